// Step 31: wgmma. Four warps multiply 64 rows at once, and the tensor cores read Q, K and V from shared
// memory themselves.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Before      step 30: mma.sync, whose operands go through registers.
// Bottleneck  mma.sync itself: 1.5 clocks per mma, 336 of 710 instructions to fetch and to multiply,
//             and a warp that does nothing else meanwhile.
// Change      S = Q K^T with both operands in shared memory, O += P V with P in registers. A warpgroup
//             is four warps: the block. Its two m tiles have 64 rows each.
// Prediction  A tile's products take 1024 clocks for 1536, 24 instructions for 336. Shared memory is as
//             busy as the tensor cores. Two blocks that meet at random keep both busy for three
//             quarters of the time: at 1.45 to 1.55 GHz 590 to 630 TFLOP/s, 1.5 times step 30.
#include "common/kernel/wgmma.h"

namespace {

constexpr int Br = 128;  // rows of Q in a tile
constexpr int Bc = 64;   // rows of K and V in a tile
constexpr int num_warps = 4;
constexpr int m_tiles = Br / 64;        // in units of wgmma's 64 rows
constexpr float rescale_threshold = 8;  // P is at most 2^8 then: far from fp16's 65504

template <int d>
struct SharedStorage {
  TmaTile<Br, d> Q;
  TmaTile<Bc, d> K, V;
  Mbarrier K_full, V_full;  // Q lands with the first K
};

template <int d>
__global__ void __launch_bounds__(num_warps * 32, 2)  // threads per block, blocks per SM
    attention(const __grid_constant__ TensorMap Q,    // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap K, const __grid_constant__ TensorMap V, half *O,
              int seqlen, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br, head = blockIdx.y;
  const Matrix<half> gO{O + std::int64_t{head} * seqlen * d, seqlen, d};

  if (threadIdx.x == 0) {
    mbarrier_init(smem.K_full, 1);
    mbarrier_init(smem.V_full, 1);
    mbarrier_fence_init();
    mbarrier_arrive_expect_tx(smem.K_full, sizeof smem.Q + sizeof smem.K);
    tma_load(smem.Q, Q, first_row, head, 0, smem.K_full);
    tma_load(smem.K, K, 0, head, 0, smem.K_full);
  }

  // Of each m tile a warp has 16 rows, and the lane rows lane / 4 (r = 0) and lane / 4 + 8 (r = 1)
  // of these: of element i, r is i / 2 % 2.
  Accumulator<d> o[m_tiles];
  Accumulator<Bc> s[m_tiles];
  float l[m_tiles][2] = {}, m[m_tiles][2];
  for (int mt = 0; mt < m_tiles; mt++) m[mt][0] = m[mt][1] = -INFINITY;

  for (int j = 0, parity = 0; j < seqlen; j += Bc, parity ^= 1) {
    __syncthreads();  // the barriers are made, and the previous V has been read by all
    if (threadIdx.x == 0) {
      // V is on its way behind Q K^T.
      mbarrier_arrive_expect_tx(smem.V_full, sizeof smem.V);
      tma_load(smem.V, V, j, head, 0, smem.V_full);
    }
    mbarrier_wait(smem.K_full, parity);

    // S = Q K^T: to be multiplied, K lies as Q does.
    wgmma_fence();
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++)
      for (int col = 0; col < d; col += 16)
        wgmma(s[mt], k_major(smem.Q, mt * 64, col), k_major(smem.K, 0, col), col > 0);
    wgmma_commit();
    wgmma_wait<0>(s[0], s[1]);

    __syncthreads();  // K has been read by all
    if (threadIdx.x == 0 && j + Bc < seqlen) {
      // The next K is on its way behind the softmax and P V.
      mbarrier_arrive_expect_tx(smem.K_full, sizeof smem.K);
      tma_load(smem.K, K, j + Bc, head, 0, smem.K_full);
    }

    // Online softmax, lazily: m may stay below the maximum, by at most the threshold. P and l are
    // relative to m, whatever it is, and O / l is not.
    bool must_rescale = false;
    float m_lane[m_tiles][2];  // of this lane's scores
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++)
      for (int r = 0; r < 2; r++) {
        m_lane[mt][r] = -INFINITY;
        for (int i = 2 * r; i < Bc / 2; i += 4)
          m_lane[mt][r] = fmaxf(m_lane[mt][r], fmaxf(s[mt](i), s[mt](i + 1)));
        must_rescale |= m_lane[mt][r] * scale_log2 > m[mt][r] + rescale_threshold;
      }
    if (__any_sync(kAllLanes, must_rescale)) {
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int r = 0; r < 2; r++) {
          float m_new = m_lane[mt][r];
          for (int mask = 1; mask < 4; mask *= 2)
            m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
          m_new = fmaxf(m[mt][r], m_new * scale_log2);
          const float alpha = ex2(m[mt][r] - m_new);  // 2^-inf = 0 for the first tile
          m[mt][r] = m_new;
          l[mt][r] *= alpha;
          if (j > 0)
            for (int i = 2 * r; i < d / 2; i += 4) o[mt](i) *= alpha, o[mt](i + 1) *= alpha;
        }
    }
    // Two neighbouring blocks of 8 columns of P, rounded to fp16, are A of one product.
    FragmentA p[m_tiles][Bc / 16];
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++) {
      for (int i = 0; i < Bc / 2; i++)
        l[mt][i / 2 % 2] += s[mt](i) = ex2(fmaf(s[mt](i), scale_log2, -m[mt][i / 2 % 2]));
      for (int i = 0; i < Bc / 2; i += 8)
        p[mt][i / 8] = {
            cvt_rn_f16x2(s[mt](i), s[mt](i + 1)), cvt_rn_f16x2(s[mt](i + 2), s[mt](i + 3)),
            cvt_rn_f16x2(s[mt](i + 4), s[mt](i + 5)), cvt_rn_f16x2(s[mt](i + 6), s[mt](i + 7))};
    }

    // O += P V. The sum goes down V's columns.
    mbarrier_wait(smem.V_full, parity);
    wgmma_fence();
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++)
      for (int key = 0; key < Bc; key += 16)
        wgmma(o[mt], p[mt][key / 16], mn_major(smem.V, key, 0), j > 0 || key > 0);
    wgmma_commit();
    wgmma_wait<0>(o[0], o[1]);
  }

#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++) {
    for (int r = 0; r < 2; r++) {
      for (int mask = 1; mask < 4; mask *= 2)
        l[mt][r] += __shfl_xor_sync(kAllLanes, l[mt][r], mask);
      const int row = first_row + mt * 64 + warp * 16 + lane / 4 + 8 * r;
      for (int i = 2 * r; i < d / 2; i += 4)
        store<2>(gO(row, i / 4 * 8 + lane % 4 * 2),
                 Vector<half, 2>{__float2half(o[mt](i) / l[mt][r]),
                                 __float2half(o[mt](i + 1) / l[mt][r])});
    }
  }
}

template <int d>
void run(const Problem &p) {
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<half>(tensor, p.Q_strides, 1, p.batch * p.heads, p.seqlen_q, d, tile_rows);
  };
  const dim3 grid(p.seqlen_q / Br, p.batch * p.heads);
  launch<SharedStorage<d>>(attention<d>, grid, dim3(num_warps * 32), map(p.Q, Br), map(p.K, Bc),
                           map(p.V, Bc), static_cast<half *>(p.O), p.seqlen_q, log2_e / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = Br,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
});
