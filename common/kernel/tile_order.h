// SPDX-License-Identifier: MIT
// The order in which the tiles of Q begin, as step 38 has it, for the steps after it.
#pragma once

#include <algorithm>

#include "common/kernel/kernel.h"

/// The order in which the tiles of Q begin: the last rows of `side` heads, which share L2. They see the
/// most keys. Then come the rows before them, and so on; then the next `side` heads.
struct Order {
  int heads, row_tiles, side;  // heads: of the whole batch
  int Br, seqlen;              // Br: rows of a tile
  bool causal;
};

/// A tile of Q: its first row, its head, and how many tiles of Bc keys it sees. The tiles begin with row 0.
template <int Bc>
struct PlaceInOrder {
  int row, head, key_tiles;
  __device__ PlaceInOrder(int tile, const Order &order) {
    const int section = tile / (order.side * order.row_tiles) * order.side;  // its first head
    const int here = min(order.side, order.heads - section);
    const int in_section = tile - section * order.row_tiles;
    row = (order.row_tiles - 1 - in_section / here) * order.Br;
    head = section + in_section % here;
    key_tiles = (order.causal ? min(row + order.Br + Bc - 1, order.seqlen) : order.seqlen) / Bc;
  }
};

/// Returns the order of tiles of Br rows of Q. kv_row_bytes: of a row of K and of V. With a causal mask, as many
/// heads stand side by side as have 32 MB of K and V: they stay in L2 (step 20).
static inline Order order_of(const Problem &p, int Br, int kv_row_bytes) {
  const int heads = p.batch * p.heads;
  const std::int64_t kv_bytes = std::int64_t{p.seqlen_k} * kv_row_bytes;
  Order order{heads, (p.seqlen_q + Br - 1) / Br, 1, Br, p.seqlen_k, p.causal};
  if (p.causal) order.side = std::clamp<std::int64_t>((32 << 20) / kv_bytes, 1, heads);
  return order;
}
