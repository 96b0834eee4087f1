// SPDX-License-Identifier: MIT
// Which keys a row sees, and in which order the tiles of Q begin. Step 44 builds it, and later steps include it.
#pragma once

#include "common/kernel/persistent.h"
#include "common/kernel/work.h"

/// The keys that row i of a tile of Q sees.
struct Keys {
  int first, end;
  __device__ __forceinline__ Keys(const Problem &p, const Work &work, int i) {
    const int own = work.position + i;
    first = max(0, own - p.window_left);
    end = min(work.k.count, own + 1 + p.window_right);
  }
};

/// The work of a tile of Q, the n-th from the sequence's end. The tiles end with a multiple of 64 rows, so a
/// warpgroup has rows from its first on, or none.
template <int Br>
__device__ __forceinline__ Work make_work(const Problem &p, const Rows &rows, int n) {
  const int queries = rows.q.count, end = (queries + 63) / 64 * 64 - n * Br;
  Work work;
  work.row = end - Br;
  work.position = work.row + rows.k.count - queries;
  work.q = rows.q, work.k = rows.k;
  if (end <= 0 || rows.k.count == 0) return work;  // there is no such tile, or there are no keys
  // Rows that see nothing have a tile of keys, of which all is masked.
  work.to = (max(1, Keys(p, work, min(end, queries) - 1 - work.row).end) + Bc - 1) / Bc;
  work.from = min(Keys(p, work, max(0, -work.row)).first / Bc, work.to - 1);
  return work;
}

/// The order in which the tiles of Q begin: the last rows of `side` heads of K and V, which share L2, and
/// of the query heads that they serve. They see the most keys. Then come the rows before them, and so on;
/// then the next `side` heads. Every sequence counts as the longest.
struct Order {
  int tiles, row_tiles, side;  // row_tiles: of a head

  template <int Br, Given given = Given::kLengths>
  __device__ Work work(const Problem &p, int tile) const {
    const int group = p.heads / p.kv_heads, of_head = row_tiles * group;
    const int section = tile / (side * of_head) * side;  // its first head of K and V
    const int here = min(side, p.batch * p.kv_heads - section) * group;
    const int in_section = tile - section * of_head;
    return make_work<Br>(p, Rows(p, section * group + in_section % here, given), in_section / here);
  }
};
