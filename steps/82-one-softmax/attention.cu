// Step 82: one softmax. A warpgroup computes S and P, and hands P over to the other.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --seqlen-k, --kv-heads, --type, --scale, --latent
// Before      step 58: both warpgroups compute all of S, and its softmax.
// Bottleneck  The tensor cores: for 1,152 of a tile's 3,328 clocks they compute S a second time.
// Change      The first warpgroup alone computes S and P. It hands P over: 8 KB of shared memory for each tile. It
//             starts the next S behind its half of P V.
// Prediction  In clocks, for 64 rows and 64 keys: 1,152 for S, 1,024 for P V, and 600 for the softmax, which nothing
//             overlaps: 2,776, 78% of the tensor cores' rate. A tile's copy takes 3,100, which must fit in the 2,776
//             from the end of P V to the S after the next: if it does not, 2,940 clocks, 74%. 64 sequences
//             of 4096 keys take 183,000 to 193,000 clocks. HBM would take 110,000.
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
constexpr int q_there = 1, p_written = 2, p_read = 3, o_there = 4;
constexpr bool by_trap = false;  // a wait that lasts too long ends the kernel by a store (step 58)

template <class T>
struct SharedStorage {
  TmaTile<rows, d, T> Q;
  TmaTile<Bc, d, T> K[stages];
  RingBarriers<stages> K_barriers;
  // Thread i of one warpgroup has the rows of thread i of the other: the same fragments of P.
  Tile<std::uint32_t, Bc / 16, 128 * 4> P;
  Tile<float, 2, 128> alpha;  // of its two rows of O
};

template <class T>
__global__ void __launch_bounds__(threads, 1)           // blocks per SM
    attention(const __grid_constant__ TensorMap map_K,  // [batch, kv_heads, seqlen_k, d]
              const Problem p, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T>>();
  const auto K = ring_of(smem.K, smem.K_barriers);
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const int thread = threadIdx.x % 128;  // of the warpgroup
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
    if (threadIdx.x == consumers * 128)
      for (int j = 0; j < p.seqlen_k; j += Bc) ring_load<by_trap>(K, k, map_K, j, kv_h, b);
    return;
  }
  setmaxnreg_inc<consumer_registers>();
  load_rows(smem.Q, tile, p.Q, p.Q_strides, consumers * 128, q_there);

  Accumulator<dv / 2> o;
#pragma unroll
  for (int i = 0; i < o.size; i++) o(i) = 0;
  FragmentA weights[Bc / 16];  // P
  float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
  const auto start_pv = [&] {  // the warpgroup's columns of V are K's
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < Bc; key += 16)
      wgmma<T>(o, weights[key / 16], mn_major(K.tile[k.stage], key, warpgroup * (dv / 2)), true);
    wgmma_commit();
  };

  if (warpgroup == 0) {
    Accumulator<Bc> s;
    const auto start_qk = [&] {
      mbarrier_wait<by_trap>(K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s, k_major(smem.Q, 0, col), k_major(K.tile[k.stage], 0, col), col > 0);
      wgmma_commit();
    };
    if (p.seqlen_k > 0) {  // always; but without the branch nvcc 13.0 spills
      start_qk();
      wgmma_wait<0>(s);
    }
    for (int j = 0; j < p.seqlen_k; j += Bc) {
      if (j + Bc > p.seqlen_k)  // the last tile may have rows behind the last key
#pragma unroll
        for (int i = 0; i < s.size; i++)
          if (j + i / 4 * 8 + i % 2 + lane % 4 * 2 >= p.seqlen_k) s(i) = -INFINITY;
      alpha[0] = alpha[1] = 1;
      const bool must_rescale = softmax(s, m, l, alpha, scale_log2);
      to_fragments<T>(weights, s);
      // The other warpgroup has read P of the tile before.
      named_barrier_sync(p_read, consumers * 128);
#pragma unroll
      for (int i = 0; i < Bc / 16; i++) store(smem.P(i, thread * 4), weights[i]);
      for (int r = 0; r < 2; r++) smem.alpha(r, thread) = alpha[r];
      named_barrier_arrive(p_written, consumers * 128);
      if (must_rescale) rescale(o, alpha);
      start_pv();
      RingPosition<stages> read = k;
      k.next();
      if (j + Bc < p.seqlen_k) {  // S of the next tile, while this one's P V is computed
        start_qk();
        wgmma_wait<1>(o);
        ring_release(K, read);
        wgmma_wait<0>(s);
      } else {
        wgmma_wait<0>(o);
      }
    }
    for (int r = 0; r < 2; r++) {
      for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
      alpha[r] = 1 / l[r];
    }
    named_barrier_sync(p_read, consumers * 128);
    for (int r = 0; r < 2; r++) smem.alpha(r, thread) = alpha[r];
    named_barrier_arrive(p_written, consumers * 128);
  } else {
    named_barrier_arrive(p_read, consumers * 128);  // P's place is free
    for (int j = 0; j < p.seqlen_k; j += Bc) {
      named_barrier_sync(p_written, consumers * 128);
#pragma unroll
      for (int i = 0; i < Bc / 16; i++) weights[i] = load<4>(smem.P(i, thread * 4));
      for (int r = 0; r < 2; r++) alpha[r] = smem.alpha(r, thread);
      named_barrier_arrive(p_read, consumers * 128);
      if (__any_sync(kAllLanes, alpha[0] != 1 || alpha[1] != 1)) rescale(o, alpha);
      mbarrier_wait<by_trap>(K.full[k.stage], k.parity);
      start_pv();
      wgmma_wait<0>(o);
      ring_release(K, k);
    }
    named_barrier_sync(p_written, consumers * 128);
    for (int r = 0; r < 2; r++) alpha[r] = smem.alpha(r, thread);
  }

  // Q's place becomes O's: the first warpgroup has computed the last S.
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
