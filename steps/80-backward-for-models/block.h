// SPDX-License-Identifier: MIT
// What step 80 has in its kernel, for step 81: the producer, and the stores of dK and dV.
#pragma once

#include "steps/80-backward-for-models/launch.h"
#include "steps/88-strides-and-lengths/storage.h"

namespace {

/// Loads the block's K and V, then what the visits need. One thread calls this.
template <class T, int d, class Next>
__device__ __forceinline__ void load_tiles(SharedStorage<T, d> &smem, const SequenceMap &map_Q,
                                           const SequenceMap &map_dO, const SequenceMap &map_K,
                                           const SequenceMap &map_V, const Sums &sums,
                                           const Rows &queries, const Keys &own, std::int64_t row_0,
                                           int visits, int last_row, const Next &next) {
  const auto &[keys, key_tile, first_key, keys_here] = own;
  const int b = keys.b;
  const SequenceRows of_k = {keys.start, keys.rows};
  mbarrier_arrive_expect_tx(smem.KV_full, sizeof(smem.K) + sizeof(smem.V));
  for (int i = 0; i < consumers; i++) {
    // TMA wants a row of the sequence. A warpgroup without one gets the other's keys, and hides them.
    const int row = first_key + (i * 64 < keys_here ? i * 64 : 0);
    tma_load(smem.K[i], map_K, of_k, row, keys.head, b, smem.KV_full);
    tma_load(smem.V[i], map_V, of_k, row, keys.head, b, smem.KV_full);
  }
  load_visits<d>(smem, map_Q, map_dO, sums, queries, row_0, visits, last_row, next);
}

/// Adds visit n's dQ to a tile, when the keys before these have added. One thread of another warp calls this.
template <class T, int d>
__device__ __forceinline__ void add_in_turn(SharedStorage<T, d> &smem, const Backward &problem,
                                            const Sums &sums, const Keys &own, const Plan &plan,
                                            std::int64_t tile, int q_row, int n) {
  const auto &[keys, key_tile, first_key, keys_here] = own;
  // How many blocks have added to this tile: those between the first that visits it and this one.
  auto &&turn = Matrix<unsigned>{sums.counters + 1 + tile, 1, 1}(0, 0);
  const int first_visitor = max(0, plan.lowest + first_key + q_row) / Bc;
  // A counter may skip a value if arrays that nobody checked give two sequences the same rows.
  if (problem.deterministic) wait_until_at_least(turn, key_tile - first_visitor);
  add_to_dQ(sums.dQ, smem, tile, n);
  if (problem.deterministic) {
    tma_store_wait<0>();  // the sums have them: to have read them is not enough
    red_release_add(turn, 1);
  }
}

/// Stores a warpgroup's dK and dV, and waits until they have been read. One thread calls this.
template <class T, int d>
__device__ __forceinline__ void store_keys(const SequenceMap &map_dK, const SequenceMap &map_dV,
                                           TmaTile<64, d, T> &K, TmaTile<64, d, T> &V,
                                           const Rows &keys, int first_key, int own_key) {
  const int b = keys.b;
  const SequenceRows of_k = {keys.start, keys.rows};
  tma_store(map_dV, of_k, first_key + own_key, keys.head, b, V);
  tma_store(map_dK, of_k, first_key + own_key, keys.head, b, K);
  tma_store_commit();
  tma_store_wait_read<0>();
}

}  // namespace
