// Step 58: latent attention. The values are the first columns of the keys, so one tile is both.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --seqlen-k, --kv-heads, --type, --scale, --latent
// Before      step 33: K and V are two tensors, a block copies both, and two warpgroups have 64 rows of Q each. (The
//             rows of Q that share a head of K are those of step 55.)
// Bottleneck  A latent cache has 576 columns, and the values are the first 512 of them. As two tensors they would be
//             1,088 columns to copy and to hold: 344 KB of shared memory, and a block has 227.
// Change      A tile of K is copied once, and its first 512 columns are V. O of 64 rows has 512 columns, too many for
//             the registers of a warpgroup. So two warpgroups have the same 64 rows of Q, and half of O's columns each.
//             Both compute all of S.
// Prediction  In clocks, for 64 rows and 64 keys: the tensor cores need 1,152 for S, twice, and 1,024 for P V. Shared
//             memory needs 3,392 for all. That is a tile's time if one softmax runs beside the other's products. If
//             both run at the same time, it is 3,928. 64 sequences of 4096 keys take 222,000 to 256,000 clocks. HBM
//             would take 110,000.
#include <algorithm>

#include "common/kernel/latent_rows.h"
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"

namespace {

constexpr int d = 576, dv = 512;  // columns of Q and K; those that are also V's, and O's
constexpr int consumers = 2;      // warpgroups that compute, with half of O's columns each
constexpr int rows = 64;          // of Q in a tile: the queries of the heads that share a head of K
constexpr int Bc = 64;            // rows of K in a tile
constexpr int stages = 2;         // of K: one is filled while the other is read
// The last warpgroup of a block is the producer.
constexpr int threads = (consumers + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
constexpr int consumer_registers = 232, producer_registers = 40;
static_assert(128 * (consumers * consumer_registers + producer_registers) <= 65536);
// Named barriers; 0 is that of __syncthreads.
constexpr int q_there = 1, s_done = 2, o_there = 3;
// A wait ends a kernel that waits forever by a store, not by a trap, with which ptxas 13.0 spills (mbarrier.h).
constexpr bool by_trap = false;

template <class T>
struct SharedStorage {
  TmaTile<rows, d, T> Q;
  TmaTile<Bc, d, T> K[stages];
  RingBarriers<stages> K_barriers;
};

template <class T>
__global__ void __launch_bounds__(threads, 1)           // blocks per SM
    attention(const __grid_constant__ TensorMap map_K,  // [batch, kv_heads, seqlen_k, d]
              const Problem p, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T>>();
  const auto K = ring_of(smem.K, smem.K_barriers);
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const int kv_h = blockIdx.y, b = blockIdx.z;
  const GroupRows<rows, d> tile(p, b, kv_h, blockIdx.x * rows);
  if (threadIdx.x == 0) {
    ring_init(smem.K_barriers, consumers * 4);  // the warps that compute
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised
  RingPosition<stages> k;

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x == consumers * 128) {
      for (int j = 0; j < p.seqlen_k; j += Bc) ring_load<by_trap>(K, k, map_K, j, kv_h, b);
    }
    return;
  }
  setmaxnreg_inc<consumer_registers>();
  load_rows(smem.Q, tile, p.Q, p.Q_strides, consumers * 128, q_there);

  Accumulator<Bc> s;
  Accumulator<dv / 2> o;
  FragmentA weights[Bc / 16];  // P
  float l[2] = {}, m[2] = {-INFINITY, -INFINITY}, alpha[2];
  for (int j = 0; j < p.seqlen_k; j += Bc) {
    // S = Q K^T. Both operands are K-major: the sum runs along their rows.
    mbarrier_wait<by_trap>(K.full[k.stage], k.parity);
    wgmma_fence();
#pragma unroll
    for (int col = 0; col < d; col += 16)
      wgmma<T>(s, k_major(smem.Q, 0, col), k_major(K.tile[k.stage], 0, col), col > 0);
    wgmma_commit();
    wgmma_wait<0>(s);

    if (j + Bc > p.seqlen_k)  // the last tile may have rows behind the last key
#pragma unroll
      for (int i = 0; i < s.size; i++)
        if (j + i / 4 * 8 + i % 2 + lane % 4 * 2 >= p.seqlen_k) s(i) = -INFINITY;
    const bool must_rescale = softmax(s, m, l, alpha, scale_log2);
    to_fragments<T>(weights, s);
    if (must_rescale && j > 0) rescale(o, alpha);

    // O += P V. The warpgroup's columns of V are K's. They are MN-major: the sum runs down the columns.
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < Bc; key += 16)
      wgmma<T>(o, weights[key / 16], mn_major(K.tile[k.stage], key, warpgroup * (dv / 2)),
               j > 0 || key > 0);
    wgmma_commit();
    wgmma_wait<0>(o);
    ring_release(K, k);
  }

  for (int r = 0; r < 2; r++) {
    for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
    alpha[r] = 1 / l[r];
  }
  // Q's place becomes O's: both warpgroups have computed the last S.
  named_barrier_sync(s_done, consumers * 128);
  write_rows(smem.Q, warpgroup * (dv / 2), o, alpha, warp, lane);
  named_barrier_sync(o_there, consumers * 128);  // all warps have written O
  const GroupRows<rows, dv> tile_of_O(p, b, kv_h, tile.first);
  for (int row = threadIdx.x / 8; row < tile.there; row += consumers * 16) {
    const auto O = tile_of_O.row(static_cast<T *>(p.O), p.O_strides, row);
    for (int col = threadIdx.x % 8 * 8; col < dv; col += 64)
      store<8>(O(0, col), load<8>(smem.Q(row, col)));
  }
}

template <class T>
void run(const Problem &p) {
  const int rows_of_group = p.seqlen_q * (p.heads / p.kv_heads);
  const auto map_K = tensor_map<T>(p.K, p.K_strides, p.batch, p.kv_heads, p.seqlen_k, d, Bc);
  // A scale of 0 would make NaN of a masked score, which is -infinity.
  launch<SharedStorage<T>>(attention<T>,
                           dim3((rows_of_group + rows - 1) / rows, p.kv_heads, p.batch),
                           dim3(threads), map_K, p, std::max(log2_e * p.scale, 1e-20f));
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 64,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .head_dims = {d},
    .decodes = true,
});
