// Step 68: Deterministic. The same bits in every run: dQ's additions have an order, and blocks one in which they come.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type
// Before      step 67: blocks add to a tile of dQ in the order in which they come, and each order rounds differently.
// Bottleneck  A fixed order: whoever adds waits for those before.
// Change      A number per tile of dQ says whose turn it is. The thread that adds waits for its turn, adds, waits until
//             the addition is performed, and signals. All blocks visit the queries from the last to the first, so each
//             comes to a tile just behind the block before. Blocks draw numbers, and share as many heads as L2 holds.
// Prediction  An addition follows the one before by some 2500 clocks, and a tile takes 4382. The next block of a head
//             begins 13,700 clocks after the one before, 7000 with a mask, so nobody waits but at the start: 33 blocks
//             of a head begin at once, and the last waits 80,000 clocks. At 4 x 16 heads of 8192 these are 0.6% of the
//             clocks, and 1.1% with a mask.
#include <algorithm>

#include "common/kernel/backward_ends.h"
#include "common/kernel/hopper_backward.h"

namespace {

template <class T, int d>
struct SharedStorage {
  TmaTile<64, d, T> K[consumers], V[consumers];  // at the end dK and dV
  TmaTile<Br<d>, d, T> Q[stages], dO[stages];
  TmaTile<Br<d>, Bc, T> dS[2];  // one is written while the other may be read
  Tile<float, 1, Br<d> * d / consumers> dQ[consumers];
  Tile<float, 1, Br<d>> lse[stages], D[stages];
  Mbarrier KV_full, Q_full[stages], dO_full[stages], empty[stages];
  Mbarrier dQ_full[consumers], dQ_empty[consumers];
  Tile<int, 1, 4> number;  // the block's
};

/// dK and dV of 128 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 1)  // blocks per SM
    gradients(
        const __grid_constant__ TensorMap map_Q,  // [heads, seqlen, d], all six
        const __grid_constant__ TensorMap map_dO, const __grid_constant__ TensorMap map_K,
        const __grid_constant__ TensorMap map_V, const __grid_constant__ TensorMap map_dK,
        const __grid_constant__ TensorMap map_dV, const float *lse_log2,
        const float *D,  // [heads, tiles * Br]
        float *dQ_sum,   // [heads, tiles, Br * d]: place_in_dQ
        // The next block's number, and how many blocks have added to each tile: [1 + heads * tiles].
        unsigned *counters, int heads, int heads_at_once, int seqlen, int tiles, bool causal,
        float scale) {
  // The named barriers: of both warpgroups, and one for each; 0 is that of __syncthreads.
  constexpr int all_stored = 1, first_stored = 2;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    // Blocks are numbered in the order in which they begin, so those before this one have begun.
    const unsigned left = atomic_dec(Matrix<unsigned>{counters, 1, 1}(0, 0), gridDim.x - 1);
    smem.number(0, 0) = left == 0 ? 0 : gridDim.x - left;
    init_copies(smem);
    for (int i = 0; i < consumers; i++) {
      mbarrier_init(smem.dQ_full[i], 4);  // the warps of a warpgroup
      mbarrier_init(smem.dQ_empty[i], 1);
    }
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised, and the number is there

  // The blocks of `heads_at_once` heads follow each other: the first keys of each head, then the next.
  const int number = uniform(smem.number(0, 0)), key_tiles = gridDim.x / heads;
  const int first_head = number / (heads_at_once * key_tiles) * heads_at_once;
  const int some = min(heads_at_once, heads - first_head), place = number - first_head * key_tiles;
  const int head = first_head + place % some, key_tile = place / some, first_key = key_tile * Bc;
  // From the last tile of queries to the first that sees the keys.
  const int visits = tiles - (causal ? first_key / Br<d> : 0);

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x == consumers * 128) {
      mbarrier_arrive_expect_tx(smem.KV_full, sizeof(smem.K) + sizeof(smem.V));
      for (int i = 0; i < consumers; i++) {
        tma_load(smem.K[i], map_K, first_key + i * 64, head, 0, smem.KV_full);
        tma_load(smem.V[i], map_V, first_key + i * 64, head, 0, smem.KV_full);
      }
      const std::int64_t rows = tiles * Br<d>;
      const Matrix<const float> lse_of_head{lse_log2 + head * rows, tiles, Br<d>};
      const Matrix<const float> D_of_head{D + head * rows, tiles, Br<d>};
      for (int n = 0; n < visits; n++) {
        const int i = tiles - 1 - n, stage = n % stages, parity = n / stages % 2;
        mbarrier_wait(smem.empty[stage], parity ^ 1);  // new stages count as empty
        load_queries(smem.Q[stage], map_Q, smem.lse[stage], lse_of_head, smem.Q_full[stage], i,
                     head);
        load_queries(smem.dO[stage], map_dO, smem.D[stage], D_of_head, smem.dO_full[stage], i,
                     head);
      }
    }
    // One thread of another warp adds to dQ, when the keys before these have added.
    if (threadIdx.x == consumers * 128 + 32) {
      for (int n = 0; n < visits; n++) {
        const int i = tiles - 1 - n;
        // How many blocks have added to this tile: the keys before these, if it is this block's turn.
        auto &&turn = Matrix<unsigned>{counters + 1 + std::int64_t{head} * tiles, 1, tiles}(0, i);
        wait_until(turn, key_tile);
        // The engine's additions come after this thread's load, which is the generic proxy's.
        fence_proxy_async_global();
        for (int w = 0; w < consumers; w++) {
          mbarrier_wait(smem.dQ_full[w], n % 2);
          constexpr int numbers = Br<d> * d / consumers;
          const std::int64_t part = (std::int64_t{head} * tiles + i) * consumers + w;
          bulk_red_add<numbers>(Matrix<float>{dQ_sum + part * numbers, 1, numbers}(0, 0),
                                smem.dQ[w](0, 0));
          tma_store_commit();
        }
        tma_store_wait_read<1>();  // that of the first warpgroup has been read
        mbarrier_arrive(smem.dQ_empty[0]);
        tma_store_wait_read<0>();
        mbarrier_arrive(smem.dQ_empty[1]);
        tma_store_wait<0>();  // the sums have them: to have read them is not enough
        red_release_add(turn, 1);
      }
    }
  } else {
    setmaxnreg_inc<consumer_registers>();
    auto &K = smem.K[warpgroup], &V = smem.V[warpgroup];
    Accumulator<d> dk, dv;
    Accumulator<Br<d>> s, dp;                     // transposed: keys x queries
    Accumulator<d == 64 ? Br<d> / 2 : Br<d>> dq;  // transposed: columns x queries
    FragmentA p[Br<d> / 16], ds[Br<d> / 16];
    const bool is_first_thread = threadIdx.x % 128 == 0;
    const int own_first_key = first_key + warpgroup * 64;
    const int key = own_first_key + warp % 4 * 16 + lane / 4;  // the lane's, and 8 further on
    mbarrier_wait<false>(smem.KV_full, 0);

    for (int n = 0; n < visits; n++) {
      const int i = tiles - 1 - n, stage = n % stages, parity = n / stages % 2;
      auto &Q = smem.Q[stage], &dO = smem.dO[stage];
      auto &dS = smem.dS[n % 2];

      // S^T = K Q^T and dP^T = V dO^T.
      mbarrier_wait<false>(smem.Q_full[stage], parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s, k_major(K, 0, col), k_major(Q, 0, col), col > 0);
      wgmma_commit();
      mbarrier_wait<false>(smem.dO_full[stage], parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(dp, k_major(V, 0, col), k_major(dO, 0, col), col > 0);
      wgmma_commit();

      // P^T, while dP is computed. A lane has queries `query` and `query` + 1 of each 8.
      wgmma_wait<1>(s);
      const int query = i * Br<d> + lane % 4 * 2;
      if (causal ? i * Br<d> < own_first_key + 63 : own_first_key + 64 > seqlen)
#pragma unroll
        for (int e = 0; e < s.size; e++)
          if (key + e / 2 % 2 * 8 > (causal ? query + e / 4 * 8 + e % 2 : seqlen - 1))
            s(e) = -INFINITY;
#pragma unroll
      for (int e = 0; e < s.size; e += 4) {
        const auto lse = load<2>(smem.lse[stage](0, e * 2 + lane % 4 * 2));
        for (int k = 0; k < 4; k++) s(e + k) = ex2(fmaf(s(e + k), scale * log2_e, -lse[k % 2]));
      }
      to_fragments<T>(p, s);

      wgmma_wait<0>(dp);
#pragma unroll
      for (int e = 0; e < dp.size; e += 4) {
        const auto D_of = load<2>(smem.D[stage](0, e * 2 + lane % 4 * 2));
        for (int r = 0; r < 2; r++) {
          const auto P = to_floats<T>(p[e / 8][e / 4 % 2 * 2 + r]);
          for (int k = 0; k < 2; k++) dp(e + 2 * r + k) = P[k] * (dp(e + 2 * r + k) - D_of[k]);
        }
      }
      to_fragments<T>(ds, dp);
#pragma unroll
      for (int row = 0; row < Br<d>; row += 16)
        stmatrix_x4_trans(dS(row + lane / 16 * 8 + lane % 8, warp * 16 + lane / 8 % 2 * 8),
                          ds[row / 16]);

      // dV += P^T dO, P rounded: there is no register for the other.
      wgmma_fence();
#pragma unroll
      for (int row = 0; row < Br<d>; row += 16)
        wgmma<T>(dv, p[row / 16], mn_major(dO, row, 0), n > 0 || row > 0);
      wgmma_commit();
      fence_proxy_async();
      named_barrier_sync(all_stored, consumers * 128);  // dS is complete

      // dQ^T = K^T dS^T, for all keys, and dK += dS^T Q.
      wgmma_fence();
#pragma unroll
      for (int row = 0; row < Bc; row += 16)
        wgmma<T>(dq, mn_major(smem.K[row / 64], row % 64, d == 64 ? 0 : warpgroup * 64),
                 k_major(dS, d == 64 ? warpgroup * (Br<d> / 2) : 0, row), row > 0);
      wgmma_commit();
#pragma unroll
      for (int row = 0; row < Br<d>; row += 16)
        wgmma<T>(dk, ds[row / 16], mn_major(Q, row, 0), n > 0 || row > 0);
      wgmma_commit();

      wgmma_wait<1>(dv, dq);
      auto &dQ = smem.dQ[warpgroup];
      mbarrier_wait<false>(smem.dQ_empty[warpgroup], n % 2 ^ 1);
#pragma unroll
      for (int e = 0; e < dq.size; e += 4)
        store(dQ(0, e * 128 + threadIdx.x % 128 * 4),
              Vector<float, 4>{dq(e), dq(e + 1), dq(e + 2), dq(e + 3)});
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem.dQ_full[warpgroup]);
      wgmma_wait<0>(dk);
      if (lane == 0) mbarrier_arrive(smem.empty[stage]);
    }

    // K's and V's places become dK's and dV's.
    named_barrier_sync(all_stored, consumers * 128);  // both have read all of K
    write_keys(V, dv, 1);
    write_keys(K, dk, scale);
    fence_proxy_async();
    named_barrier_sync(first_stored + warpgroup, 128);  // all four warps have written both
    if (is_first_thread) {
      tma_store(map_dV, own_first_key, head, 0, V);
      tma_store(map_dK, own_first_key, head, 0, K);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
  }
}

template <class T, int d>
void run(const Problem &p) {
  const int heads = p.batch * p.heads, seqlen = p.seqlen_q, tiles = tiles_of<Br<d>>(p);
  const std::int64_t rows = std::int64_t{heads} * tiles * Br<d>;
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<T>(tensor, p.Q_strides, 1, heads, seqlen, d, tile_rows);
  };
  float *const dQ_sum = static_cast<float *>(p.workspace);
  float *const lse_log2 = dQ_sum + rows * d, *const D = lse_log2 + rows;
  auto *const counters = reinterpret_cast<unsigned *>(D + rows);
  const float scale = 1 / sqrtf(d);
  // Q and dO in 16 bits and the sums of so many heads are 40 MB at most. An H200 has 50 MB of L2.
  const std::int64_t bytes = std::int64_t{tiles} * Br<d> * d * 8;
  const int heads_at_once = std::clamp<std::int64_t>((40 << 20) / bytes, 1, heads);
  launch<void>(begin<T, d, Br<d>, unsigned>, dim3(tiles * Br<d> / 4, heads), dim3(128),
               static_cast<const T *>(p.O), static_cast<const T *>(p.dO), p.lse, lse_log2, D,
               dQ_sum, seqlen, tiles, counters);
  launch<SharedStorage<T, d>>(gradients<T, d>, dim3((seqlen + Bc - 1) / Bc * heads), dim3(threads),
                              map(p.Q, Br<d>), map(p.dO, Br<d>), map(p.K, 64), map(p.V, 64),
                              map(p.dK, 64), map(p.dV, 64), lse_log2, D, dQ_sum, counters, heads,
                              heads_at_once, seqlen, tiles, p.causal, scale);
  launch<void>(round_dQ<T, d, Br<d>, place_in_dQ<d>>, dim3((seqlen + 7) / 8, heads), dim3(d),
               dQ_sum, static_cast<T *>(p.dQ), seqlen, tiles, scale);
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          const int tiles = p.head_dim == 64 ? tiles_of<Br<64>>(p) : tiles_of<Br<128>>(p);
          const int padded = tiles * (p.head_dim == 64 ? Br<64> : Br<128>);
          return (std::size_t(p.batch) * p.heads * (padded * (p.head_dim + 2) + tiles) + 1) * 4;
        },
    .gradients = true,
});
