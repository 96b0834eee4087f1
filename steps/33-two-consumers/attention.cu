// Step 33: two consumers. Two warpgroups share each tile of K and V, with 64 rows of Q each.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --type
// Before      step 32: one warpgroup with 128 rows, and two blocks on an SM.
// Bottleneck  Tiles of 64 keys: a wgmma with n = 64 reads 128 bytes of shared memory per clock. That is all
//             that shared memory delivers, and copies need it, too.
// Change      Each warpgroup has half of the rows, and registers for 128 keys. One block on an SM.
// Prediction  2,540 clocks for 128 x 128 scores, where step 32 needs 2,710. Nothing covers a block's
//             ends, 3%: 600 to 640 TFLOP/s.
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"

namespace {

constexpr int consumers = 2;        // warpgroups that compute, with 64 rows of Q each
constexpr int Br = consumers * 64;  // rows of Q in a tile
constexpr int Bc = 128;             // rows of K and V in a tile
constexpr int stages = 2;           // of K and of V: one is filled while the other is read
// The last warpgroup of a block is the producer.
constexpr int threads = (consumers + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
constexpr int consumer_registers = 232, producer_registers = 40;
static_assert(128 * (consumers * consumer_registers + producer_registers) <= 65536);

template <class T, int d>
struct SharedStorage {
  TmaTile<Br, d, T> Q;
  Ring<TmaTile<Bc, d, T>, stages> K, V;
  Mbarrier Q_full;
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
__global__ void __launch_bounds__(threads, 1)           // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              T *O, int seqlen, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br, head = blockIdx.y;
  if (threadIdx.x == 0) {
    mbarrier_init(smem.Q_full, 1);
    ring_init(smem.K, consumers * 4);  // the warps that compute
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised
  RingPosition<stages> k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x == consumers * 128) {
      mbarrier_arrive_expect_tx(smem.Q_full, sizeof smem.Q);
      tma_load(smem.Q, map_Q, first_row, head, 0, smem.Q_full);
      for (int j = 0; j < seqlen; j += Bc) {
        ring_load(smem.K, k, map_K, j, head, 0);
        ring_load(smem.V, v, map_V, j, head, 0);
      }
    }
  } else {
    setmaxnreg_inc<consumer_registers>();
    // Never taken, as no problem has 0 keys. Without a way to leave the branch here, nvcc 13.0
    // compiles the rest of it for the launch's registers, and spills.
    if (seqlen == 0) return;

    const int wg_row = warpgroup * 64;
    Accumulator<Bc> s;
    Accumulator<d> o;
    FragmentA p[Bc / 16];
    float l[2] = {}, m[2] = {-INFINITY, -INFINITY}, alpha[2];

    mbarrier_wait(smem.Q_full, 0);
    for (int j = 0; j < seqlen; j += Bc) {
      // S = Q K^T. Both operands are K-major: the sum runs along their rows.
      mbarrier_wait(smem.K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s, k_major(smem.Q, wg_row, col), k_major(smem.K.tile[k.stage], 0, col), col > 0);
      wgmma_commit();
      wgmma_wait<0>(s);
      ring_release(smem.K, k);

      const bool must_rescale = softmax(s, m, l, alpha, scale_log2);
      to_fragments<T>(p, s);
      if (must_rescale && j > 0) rescale(o, alpha);

      // O += P V. V is MN-major: the sum runs down its columns.
      mbarrier_wait(smem.V.full[v.stage], v.parity);
      wgmma_fence();
#pragma unroll
      for (int key = 0; key < Bc; key += 16)
        wgmma<T>(o, p[key / 16], mn_major(smem.V.tile[v.stage], key, 0), j > 0 || key > 0);
      wgmma_commit();
      wgmma_wait<0>(o);
      ring_release(smem.V, v);
    }

    const Matrix<T> gO{O + std::int64_t{head} * seqlen * d, seqlen, d};
    store_rows(gO, first_row + warp * 16, lane, o, l);
  }
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
