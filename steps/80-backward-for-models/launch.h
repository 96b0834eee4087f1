// SPDX-License-Identifier: MIT
// What step 80 has, for steps 81 and 87: a block's keys, the loads of its visits, and the launches.
#pragma once

#include "common/kernel/visits.h"
#include "steps/88-strides-and-lengths/around.h"

namespace {

/// The keys of a block.
struct Keys {
  Rows rows;              // of the head and sequence
  int tile, first, here;  // the tile's number, its first key, and how many of its keys there are
};

/// Returns the keys of a tile: `most` keys, or fewer at the end of the sequence. kv_head is a head of K of all in the batch.
template <int most = Bc>
__device__ __forceinline__ Keys keys_of_tile(const Backward &problem, int kv_head, int key_tile) {
  const int first_key = key_tile * most, b = kv_head / problem.kv_heads;
  const Rows keys = keys_of(problem, b, kv_head % problem.kv_heads);
  const int keys_here = min(keys.rows - first_key, most);
  return {keys, key_tile, first_key, keys_here};
}

/// Returns the keys with this number, of all that `kv_heads` heads of the batch have.
template <int most = Bc>
__device__ __forceinline__ Keys keys_of_number(const Backward &problem, int number, int kv_heads,
                                               int key_tiles, int heads_at_once) {
  // Those of `heads_at_once` heads of K follow each other: the first keys of each head, then the next.
  const int first_head = number / (heads_at_once * key_tiles) * heads_at_once;
  const int some = min(heads_at_once, kv_heads - first_head);
  const int place = number - first_head * key_tiles, kv_head = first_head + place % some;
  const int key_tile = place / some;
  return keys_of_tile<most>(problem, kv_head, key_tile);
}

/// Returns the keys of the block with this number, of a grid with a block for each tile of keys.
template <int most = Bc>
__device__ __forceinline__ Keys keys_of_block(const Backward &problem, int number, int key_tiles,
                                              int heads_at_once) {
  return keys_of_number<most>(problem, number, gridDim.x / key_tiles, key_tiles, heads_at_once);
}

/// Loads Q and dO of so many visits, with the log-sum-exp and D of their queries. The block has made `before` visits by
/// then. One thread calls this.
template <int d, class Storage, class Next>
__device__ __forceinline__ void load_visits(Storage &smem, const SequenceMap &map_Q,
                                            const SequenceMap &map_dO, const Sums &sums,
                                            const Rows &queries, std::int64_t row_0, int visits,
                                            int last_row, const Next &next, int before = 0) {
  const int b = queries.b;
  const SequenceRows of_q = {queries.start, queries.rows};
  for (int n = before, h = 0, q_row = last_row; n < before + visits; n++, next(h, q_row)) {
    const int stage = n % stages, parity = n / stages % 2;
    const std::int64_t row = row_0 + std::int64_t{h} * sums.rows + q_row;
    mbarrier_wait(smem.empty[stage], parity ^ 1);  // new stages count as empty
    const auto load = [&](auto &tile, const SequenceMap &map, auto &numbers, const float *all,
                          Mbarrier &full) {
      mbarrier_arrive_expect_tx(full, sizeof tile + sizeof numbers);
      tma_load(tile, map, of_q, q_row, queries.head + h, b, full);
      bulk_load<Br<d>>(numbers(0, 0), Matrix<const float>{all + row, 1, Br<d>}(0, 0), full);
    };
    load(smem.Q[stage], map_Q, smem.lse[stage], sums.lse_log2, smem.Q_full[stage]);
    // Step 87 has a barrier of dO's own.
    if constexpr (requires { smem.dO_empty; }) mbarrier_wait(smem.dO_empty[stage], parity ^ 1);
    load(smem.dO[stage], map_dO, smem.D[stage], sums.D, smem.dO_full[stage]);
  }
}

/// Launches all kernels of a step. A block of `gradients` has `block_threads` threads and `block_keys` keys. `last` are the
/// kernel's last arguments.
template <class T, int d, class Storage, class... Parameters, class... Last>
void launch_gradients(const Backward &p, void (*gradients)(Parameters...), int block_threads,
                      int block_keys, Last... last) {
  const Sums sums = sums_in_workspace<d>(p);
  const int longest = (p.seqlen_q + Br<d> - 1) / Br<d> * Br<d>;
  const int heads = p.batch * p.heads, kv_heads = p.batch * p.kv_heads;
  const int group = p.heads / p.kv_heads;  // heads of Q that share keys
  const int key_tiles = (p.seqlen_k + block_keys - 1) / block_keys;
  // As many heads at once as have 40 MB of Q, dO and dQ's sums, because an H200 has 50 MB of L2. If all blocks take equally
  // long and none waits for another, one head at a time.
  const std::int64_t bytes = std::int64_t{group} * longest * d * 8;
  const bool side_by_side = p.deterministic || p.window_left >= 0 || p.window_right >= 0;
  const int heads_at_once =
      side_by_side ? std::clamp<std::int64_t>((40 << 20) / bytes, 1, kv_heads) : 1;
  launch_on<void>(p.stream, begin<T, d>, dim3(longest / 4, heads), dim3(128), p, sums);
  launch_on<Storage>(p.stream, gradients, dim3(key_tiles * kv_heads), dim3(block_threads),
                     map_of_queries<T, d>(p, p.Q, p.Q_strides),
                     map_of_queries<T, d>(p, p.dO, p.dO_strides),
                     map_of_keys<T>(p, p.K, p.K_strides), map_of_keys<T>(p, p.V, p.V_strides),
                     map_of_keys<T>(p, p.dK, p.dK_strides), map_of_keys<T>(p, p.dV, p.dV_strides),
                     p, sums, group, key_tiles, heads_at_once, last...);
  constexpr int rows = rounded_rows<d>;
  launch_on<void>(p.stream, round_dQ<T, d>, dim3(longest / rows, heads), dim3(d * rows / 8), p,
                  sums);
}

}  // namespace
