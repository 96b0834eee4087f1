// SPDX-License-Identifier: MIT
// What a block of step 92 does next, and its record in shared memory.
#pragma once

#include "steps/80-backward-for-models/visit.h"
#include "steps/90-around-the-loop/launch.h"

namespace {

/// A tile of keys, and what a block visits for it.
struct Work {
  Keys keys;
  Rows queries;  // of the first head of the group
  Plan plan;
  int first_tile;  // of these queries in dQ's sums
  int visits;      // in all heads of the group
};
/// The block's work, and its next: 0 to 3 the keys' rows, 4 their tile, 5 how many they are, 6 first_tile, 7 visits, 8 to 10 the
/// queries, 12 to 15 the plan.
using Records = Tile<int, 2, 16>;
constexpr int visits_in_record = 7;  // negative: there is no more work

/// Reads a record.
__device__ __forceinline__ Keys read_keys(Records &from, int i) {
  const Vector<int, 4> rows = load<4>(from(i % 2, 0));
  const Vector<int, 2> tile = load<2>(from(i % 2, 4));
  return {{rows[0], rows[1], rows[2], rows[3]}, tile[0], tile[0] * Bc, tile[1]};
}
__device__ __forceinline__ Work read_work(Records &from, int i) {
  const Keys keys = read_keys(from, i);
  const Vector<int, 2> all = load<2>(from(i % 2, 6));
  const Vector<int, 4> queries = load<4>(from(i % 2, 8)), plan = load<4>(from(i % 2, 12));
  return {keys,
          {keys.rows.b, queries[0], queries[1], queries[2]},
          {plan[0], plan[1], plan[2], plan[3]},
          all[0],
          all[1]};
}

/// Draws the next tile of keys that has some, and writes them to a record; returns false if there is none. A warp calls this.
__device__ __forceinline__ bool draw_keys(Records &to, int i, const Backward &problem,
                                          unsigned *counter, int key_tiles, int heads_at_once) {
  const int lane = threadIdx.x % 32, kv_heads = problem.batch * problem.kv_heads;
  for (;;) {
    int number = 0;
    // atomic_dec returns 0, 2^32 - 1, 2^32 - 2, and so on: negated 0, 1, 2.
    if (lane == 0) number = -atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), ~0u);
    number = __shfl_sync(kAllLanes, number, 0);
    if (number >= kv_heads * key_tiles) return false;
    const auto [keys, tile, first, here] =
        keys_of_number(problem, number, kv_heads, key_tiles, heads_at_once);
    if (here <= 0) continue;  // the sequence is shorter than the longest
    if (lane == 0) {
      store(to(i % 2, 0), Vector<int, 4>{keys.b, keys.head, keys.start, keys.rows});
      store(to(i % 2, 4), Vector<int, 2>{tile, here});
    }
    return true;
  }
}

/// Writes what is visited for a record's keys. A warp calls this.
template <int d>
__device__ __forceinline__ void plan_visits(Records &to, int i, const Backward &problem,
                                            const Sums &sums, int group) {
  const auto [keys, tile, first, here] = read_keys(to, i);
  const Rows queries = queries_of(problem, keys.b, keys.head * group);
  // 2^31 rows of the workspace would take over 500 GB.
  const int row = first_in_workspace<Br<d>>(problem, queries, sums.rows) +
                  std::int64_t{queries.head} * sums.rows;
  const auto [plan, tiles] = plan_of<Br<d>>(problem, queries, keys, first, here);
  if (threadIdx.x % 32 > 0) return;
  store(to(i % 2, 6), Vector<int, 2>{row / Br<d>, group * tiles});
  store(to(i % 2, 8), Vector<int, 4>{queries.head, queries.start, queries.rows, 0});
  store(to(i % 2, 12), Vector<int, 4>{plan.first_row, plan.end, plan.lowest, plan.highest});
}

}  // namespace
