// Step 31: wgmma. Four warps multiply 64 rows at once, and the tensor cores read Q, K and V from shared
// memory themselves.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --type
// Before      step 30: mma.sync, which reads its operands from registers.
// Bottleneck  mma.sync itself: 1.5 clocks per mma, 336 of 710 instructions to fetch and to multiply,
//             and a warp can do nothing else meanwhile.
// Change      S = Q K^T with both operands in shared memory, O += P V with P in registers. A warpgroup
//             is four warps: the block. Its two m tiles have 64 rows each.
// Prediction  A tile's products take 1024 clocks for 1536, 24 instructions for 336. Shared memory is as
//             busy as the tensor cores. Two blocks that meet at random keep both busy for three
//             quarters of the time: at 1.45 to 1.55 GHz 590 to 630 TFLOP/s, 1.5 times step 30.
#include "common/kernel/softmax.h"

namespace {

constexpr int Br = 128;           // rows of Q in a tile
constexpr int Bc = 64;            // rows of K and V in a tile
constexpr int m_tiles = Br / 64;  // in units of wgmma's 64 rows
constexpr int threads = 128;      // of a block: a warpgroup

template <class T, int d>
struct SharedStorage {
  TmaTile<Br, d, T> Q;
  TmaTile<Bc, d, T> K, V;
  Mbarrier K_full, V_full;  // Q arrives with the first K
};

/// Stores a warp's 16 rows of O, from `row` of gO on, divided by l, the sum over a row's 4 lanes.
template <class T, int d>
__device__ __forceinline__ void store_rows(const Matrix<T> &gO, int row, int lane,
                                           Accumulator<d> &o, float (&l)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
    for (int i = 2 * r; i < o.size; i += 4)
      store<2>(gO(row + lane / 4 + 8 * r, i / 4 * 8 + lane % 4 * 2),
               Vector<T, 2>{from_float<T>(o(i) / l[r]), from_float<T>(o(i + 1) / l[r])});
  }
}

template <class T, int d>
__global__ void __launch_bounds__(threads, 2)           // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              T *O, int seqlen, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br, head = blockIdx.y;
  if (threadIdx.x == 0) {
    mbarrier_init(smem.K_full, 1);
    mbarrier_init(smem.V_full, 1);
    mbarrier_fence_init();
    mbarrier_arrive_expect_tx(smem.K_full, sizeof smem.Q + sizeof smem.K);
    tma_load(smem.Q, map_Q, first_row, head, 0, smem.K_full);
    tma_load(smem.K, map_K, 0, head, 0, smem.K_full);
  }

  // In each m tile a warp has 16 rows, and a lane rows lane / 4 (r = 0) and lane / 4 + 8 (r = 1).
  Accumulator<Bc> s[m_tiles];
  Accumulator<d> o[m_tiles];
  FragmentA p[m_tiles][Bc / 16];
  float l[m_tiles][2] = {}, m[m_tiles][2], alpha[2];
  for (int mt = 0; mt < m_tiles; mt++) m[mt][0] = m[mt][1] = -INFINITY;

  for (int j = 0, parity = 0; j < seqlen; j += Bc, parity ^= 1) {
    __syncthreads();  // the mbarriers are initialised, and all have read the previous V
    if (threadIdx.x == 0) {
      // V is copied while Q K^T is computed.
      mbarrier_arrive_expect_tx(smem.V_full, sizeof smem.V);
      tma_load(smem.V, map_V, j, head, 0, smem.V_full);
    }
    mbarrier_wait(smem.K_full, parity);

    // S = Q K^T. Both operands are K-major: the sum runs along their rows.
    wgmma_fence();
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++)
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s[mt], k_major(smem.Q, mt * 64, col), k_major(smem.K, 0, col), col > 0);
    wgmma_commit();
    wgmma_wait<0>(s[0], s[1]);

    __syncthreads();  // all have read K
    if (threadIdx.x == 0 && j + Bc < seqlen) {
      // The next K is copied during the softmax and P V.
      mbarrier_arrive_expect_tx(smem.K_full, sizeof smem.K);
      tma_load(smem.K, map_K, j + Bc, head, 0, smem.K_full);
    }

    // Online softmax, lazily, with one vote for both m tiles.
    bool must_rescale = false;
    float m_lane[m_tiles][2];
    for (int mt = 0; mt < m_tiles; mt++) {
      lane_maxima(s[mt], m_lane[mt]);
      for (int r = 0; r < 2; r++)
        must_rescale |= m_lane[mt][r] * scale_log2 > m[mt][r] + rescale_threshold;
    }
    if (__any_sync(kAllLanes, must_rescale)) {
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++) {
        raise_maxima(m_lane[mt], m[mt], l[mt], alpha, scale_log2);
        if (j > 0) rescale(o[mt], alpha);
      }
    }
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++) {
      exponentiate(s[mt], m[mt], l[mt], scale_log2);
      to_fragments<T>(p[mt], s[mt]);
    }

    // O += P V. V is MN-major: the sum runs down its columns.
    mbarrier_wait(smem.V_full, parity);
    wgmma_fence();
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++)
      for (int key = 0; key < Bc; key += 16)
        wgmma<T>(o[mt], p[mt][key / 16], mn_major(smem.V, key, 0), j > 0 || key > 0);
    wgmma_commit();
    wgmma_wait<0>(o[0], o[1]);
  }

  const Matrix<T> gO{O + std::int64_t{head} * seqlen * d, seqlen, d};
#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++)
    store_rows(gO, first_row + mt * 64 + warp * 16, lane, o[mt], l[mt]);
}

template <class T, int d>
void run(const Problem &p) {
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<T>(tensor, p.Q_strides, 1, p.batch * p.heads, p.seqlen_q, d, tile_rows);
  };
  const dim3 grid(p.seqlen_q / Br, p.batch * p.heads);
  launch<SharedStorage<T, d>>(attention<T, d>, grid, dim3(threads), map(p.Q, Br), map(p.K, Bc),
                              map(p.V, Bc), static_cast<T *>(p.O), p.seqlen_q, log2_e / sqrtf(d));
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = Br,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
});
