// SPDX-License-Identifier: MIT
// The order in which the tiles of Q begin if query heads share keys, for the steps from 44 on.
#pragma once

#include <algorithm>
#include <string>

#include "common/kernel/kernel.h"

/// The order in which the tiles of Q begin: the last rows of `side` heads of K and V, which share L2, and
/// of the query heads that they serve. They see the most keys. Then come the rows before them, and so on;
/// then the next `side` heads. Every sequence counts as the longest.
struct Order {
  int tiles, row_tiles, side;  // row_tiles: of a head

  /// Where a tile of Q stands: it is the one with this number in its section.
  struct Place {
    int head, in_section;  // head: of the whole batch
    int heads, group;      // of the section, and those of a head of K and V
    /// Returns its number among the head's tiles, from the last one on.
    __device__ int n() const { return in_section / heads; }
  };
  __device__ Place place(const Problem &p, int tile) const {
    const int group = p.heads / p.kv_heads, of_head = row_tiles * group;
    const int section = tile / (side * of_head) * side;  // its first head of K and V
    const int here = min(side, p.batch * p.kv_heads - section) * group;
    const int in_section = tile - section * of_head;
    return {section * group + in_section % here, in_section, here, group};
  }
};

/// Returns how many tiles of Q a launch numbers: `row_tiles` for each head. draw_tile counts them in 32 bits.
static inline int tiles_of_q(const Problem &p, int row_tiles) {
  const std::int64_t tiles = std::int64_t{row_tiles} * p.batch * p.heads;
  if (tiles > 1 << 30)
    throw ShapeError("this step numbers tiles of Q in 32 bits, and they may be " +
                     std::to_string(tiles) + "; fewer sequences, heads or queries");
  return tiles;
}

/// Returns the order of tiles of Br rows of Q. kv_row_bytes: of a row of K and of V. With a causal mask, as many heads
/// of K and V stand side by side as have 32 MB of them: they stay in L2 (step 20).
template <int Br>
static inline Order order_of(const Problem &p, int kv_row_bytes, bool causal) {
  const int row_tiles = (p.seqlen_q + Br - 1) / Br;
  Order order{tiles_of_q(p, row_tiles), row_tiles, 1};
  if (causal) {
    const std::int64_t kv_bytes = std::max<std::int64_t>(1, p.seqlen_k) * kv_row_bytes;
    const std::int64_t heads = std::int64_t{p.batch} * p.kv_heads;
    const std::int64_t most = std::clamp<std::int64_t>((32 << 20) / kv_bytes, 1, heads);
    const std::int64_t sections = (heads + most - 1) / most;
    order.side =
        (heads + sections - 1) / sections;  // alike: a small last section leaves blocks idle
  }
  return order;
}
