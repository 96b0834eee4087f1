// Step 88: Strides and lengths. Step 68's kernel where a model's tensors lie, and TMA that ends where a sequence ends.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --seqlen-k, --layout, --lengths, --scale, --type
// Before      step 68: all tensors are dense, with as many keys as queries. Step 69 takes what models have, by mma.sync.
// Bottleneck  Step 69's mma.sync: it reads each operand by ldmatrix, where wgmma reads shared memory itself.
// Change      Each of six tensors has its own strides, and a map that ends where a sequence ends (step 45). In the workspace
//             each sequence has whole tiles (step 69). The keys' end and the diagonal are those of the sequence.
// Prediction  A visit has the same products and bytes, beside 4382 clocks: step 68's clocks within 1%. At head dim 128 a tile of
//             K, V, Q or dO takes two copies, each of 64 columns.
#include <algorithm>

#include "steps/88-strides-and-lengths/storage.h"

namespace {

/// dK and dV of 128 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 1)  // blocks per SM
    gradients(const __grid_constant__ SequenceMap map_Q, const __grid_constant__ SequenceMap map_dO,
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_dK,
              const __grid_constant__ SequenceMap map_dV, const Backward problem, const Sums sums,
              int key_tiles, int heads_at_once, float scale_log2) {
  // The named barriers: of both warpgroups, and one for each; 0 is that of __syncthreads.
  constexpr int all_stored = 1, first_stored = 2;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const int number = begin_block(smem, sums.counters);

  // The blocks of `heads_at_once` heads follow each other: the first keys of each head, then the next.
  const int heads = gridDim.x / key_tiles;
  const int first_head = number / (heads_at_once * key_tiles) * heads_at_once;
  const int some = min(heads_at_once, heads - first_head), place = number - first_head * key_tiles;
  const int head = first_head + place % some, key_tile = place / some, first_key = key_tile * Bc;
  const int b = head / problem.heads;
  const Rows keys = keys_of(problem, b, head % problem.heads);
  const Rows queries = queries_of(problem, b, keys.head);
  const int keys_here = min(keys.rows - first_key, Bc);
  if (keys_here <= 0) return;  // the sequence is shorter than the longest

  // With a causal mask query i sees the keys up to `highest` + i, counted from the block's first. The block visits the
  // tiles from the last one of queries to the first that sees its keys.
  const int highest = problem.causal ? keys.rows - queries.rows - first_key : keys.rows;
  const int tiles = (queries.rows + Br<d> - 1) / Br<d>, last_row = (tiles - 1) * Br<d>;
  const int visits = max(0, tiles - max(0, -highest) / Br<d>);

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    // The row of the workspace of the head's query 0.
    const std::int64_t row_0 = first_in_workspace<Br<d>>(problem, queries, sums.rows) +
                               std::int64_t{queries.head} * sums.rows;
    if (threadIdx.x == consumers * 128) {
      const SequenceRows of_q = {queries.start, queries.rows}, of_k = {keys.start, keys.rows};
      mbarrier_arrive_expect_tx(smem.KV_full, sizeof(smem.K) + sizeof(smem.V));
      for (int i = 0; i < consumers; i++) {
        // TMA wants a row of the sequence. A warpgroup without one gets the other's keys, and hides them.
        const int row = first_key + (i * 64 < keys_here ? i * 64 : 0);
        tma_load(smem.K[i], map_K, of_k, row, keys.head, b, smem.KV_full);
        tma_load(smem.V[i], map_V, of_k, row, keys.head, b, smem.KV_full);
      }
      for (int n = 0, q_row = last_row; n < visits; n++, q_row -= Br<d>) {
        const int stage = n % stages, parity = n / stages % 2;
        const std::int64_t row = row_0 + q_row;
        mbarrier_wait(smem.empty[stage], parity ^ 1);  // new stages count as empty
        const auto load = [&](auto &tile, const SequenceMap &map, auto &numbers, const float *all,
                              Mbarrier &full) {
          mbarrier_arrive_expect_tx(full, sizeof tile + sizeof numbers);
          tma_load(tile, map, of_q, q_row, queries.head, b, full);
          bulk_load<Br<d>>(numbers(0, 0), Matrix<const float>{all + row, 1, Br<d>}(0, 0), full);
        };
        load(smem.Q[stage], map_Q, smem.lse[stage], sums.lse_log2, smem.Q_full[stage]);
        load(smem.dO[stage], map_dO, smem.D[stage], sums.D, smem.dO_full[stage]);
      }
    }
    // One thread of another warp adds to dQ, when the keys before these have added.
    if (threadIdx.x == consumers * 128 + 32) {
      for (int n = 0, q_row = last_row; n < visits; n++, q_row -= Br<d>) {
        const std::int64_t tile = (row_0 + q_row) / Br<d>;
        // How many blocks have added to this tile: the keys before these, if it is this block's turn.
        auto &&turn = Matrix<unsigned>{sums.counters + 1 + tile, 1, 1}(0, 0);
        // A counter may skip a value if arrays that nobody checked give two sequences the same rows.
        wait_until_at_least(turn, key_tile);
        add_to_dQ(sums.dQ, smem, tile, n);
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
    const int own_key = warpgroup * 64;                  // of the block's
    const int key = own_key + warp % 4 * 16 + lane / 4;  // the lane's, and 8 further on
    const int query = lane % 4 * 2;                      // of each 8, and 1 further on
    clear(dk), clear(dv);                                // if no query sees the keys
    mbarrier_wait<false>(smem.KV_full, 0);

    for (int n = 0, q_row = last_row; n < visits; n++, q_row -= Br<d>) {
      const int stage = n % stages, parity = n / stages % 2;
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

      // P^T, while dP is computed. The tile's first query sees the keys up to `to`.
      wgmma_wait<1>(s);
      const int to = highest + q_row;
      if (own_key + 64 > keys_here || own_key + 63 > to)
#pragma unroll
        for (int e = 0; e < s.size; e++) {
          const int after = key - query + e / 2 % 2 * 8 - e / 4 * 8 - e % 2;
          if (after > to || key + e / 2 % 2 * 8 >= keys_here) s(e) = -INFINITY;
        }
#pragma unroll
      for (int e = 0; e < s.size; e += 4) {
        const auto lse = load<2>(smem.lse[stage](0, e * 2 + lane % 4 * 2));
        for (int k = 0; k < 4; k++) s(e + k) = ex2(fmaf(s(e + k), scale_log2, -lse[k % 2]));
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
        wgmma<T>(dv, p[row / 16], mn_major(dO, row, 0), true);
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
        wgmma<T>(dk, ds[row / 16], mn_major(Q, row, 0), true);
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
    write_keys(K, dk, problem.scale);
    fence_proxy_async();
    named_barrier_sync(first_stored + warpgroup, 128);  // all four warps have written both
    if (is_first_thread && own_key < keys_here) {
      const SequenceRows of_k = {keys.start, keys.rows};
      tma_store(map_dV, of_k, first_key + own_key, keys.head, b, V);
      tma_store(map_dK, of_k, first_key + own_key, keys.head, b, K);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
  }
}

template <class T, int d>
void run(const Backward &p) {
  const Sums sums = sums_in_workspace<d>(p);
  const int longest = (p.seqlen_q + Br<d> - 1) / Br<d> * Br<d>;
  const int heads = p.batch * p.heads, key_tiles = (p.seqlen_k + Bc - 1) / Bc;
  // Q and dO in 16 bits and the sums of so many heads are 40 MB at most. An H200 has 50 MB of L2.
  const std::int64_t bytes = std::int64_t{longest} * d * 8;
  const int heads_at_once = std::clamp<std::int64_t>((40 << 20) / bytes, 1, heads);
  // With a scale of 0 a masked score would be -inf * 0 = NaN.
  const float scale_log2 = std::max(p.scale * log2_e, 1e-20f);
  launch_on<void>(p.stream, begin<T, d>, dim3(longest / 4, heads), dim3(128), p, sums);
  launch_on<SharedStorage<T, d>>(
      p.stream, gradients<T, d>, dim3(key_tiles * heads), dim3(threads),
      map_of_queries<T, d>(p, p.Q, p.Q_strides), map_of_queries<T, d>(p, p.dO, p.dO_strides),
      map_of_keys<T>(p, p.K, p.K_strides), map_of_keys<T>(p, p.V, p.V_strides),
      map_of_keys<T>(p, p.dK, p.dK_strides), map_of_keys<T>(p, p.dV, p.dV_strides), p, sums,
      key_tiles, heads_at_once, scale_log2);
  launch_on<void>(p.stream, round_dQ<T, d>, dim3(longest / 8, heads), dim3(d), p, sums);
}

template <class T>
void run(const Backward &p) {
  p.head_dim <= 64 ? run<T, 64>(p) : run<T, 128>(p);
}

void backward(const Backward &call) {
  const Backward p = with_one_window(call);
  p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { backward(backward_of(p)); },
    .workspace_bytes = [](const Problem &p) { return workspace_bytes(backward_of(p)); },
    .head_dims = {64, 128, 96, 32},
    .gradients = true,
});
