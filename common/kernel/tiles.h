// The tiles of Q of a persistent kernel, and the ends of one: the order in which blocks draw them, the
// mask on the diagonal and O's way out. Step 38 has them inline and says why they are as they are. Step 39 alone
// includes them: it changes none, and would have more than the 250 lines of a step with them written out.
#pragma once

#include <algorithm>

#include "common/kernel/wgmma.h"

/// The tiles of Q, of Br rows, in the order in which they begin: of `side` heads, which share L2, the last
/// rows, which see the most keys, then the rows before them; then of the next heads.
struct Order {
  int heads, all_heads, row_tiles, side;  // all_heads: of the whole batch
  int Br, seqlen;
  bool causal;

  __device__ int tiles() const { return all_heads * row_tiles; }
};

/// Side by side where the mask makes them differ: as many heads as have 32 MB of K and V (step 20).
inline Order longest_first(const Problem &p, int Br, std::int64_t kv_bytes) {
  Order order{p.heads, p.heads * p.batch, (p.seqlen_q + Br - 1) / Br, 1, Br, p.seqlen_k, p.causal};
  if (p.causal) order.side = std::clamp<std::int64_t>((32 << 20) / kv_bytes, 1, order.all_heads);
  return order;
}

/// Where a tile is, and how many tiles of Bc keys it sees.
template <int Bc>
struct PlaceOf {
  int row, head, b, key_tiles;

  __device__ PlaceOf(int tile, const Order &order) {
    const int section = tile / (order.side * order.row_tiles) * order.side;  // its first head
    const int here = min(order.side, order.all_heads - section);
    const int in_section = tile - section * order.row_tiles;
    row = (order.row_tiles - 1 - in_section / here) * order.Br;
    head = (section + in_section % here) % order.heads;
    b = (section + in_section % here) / order.heads;
    key_tiles = ((order.causal ? min(row + order.Br, order.seqlen) : order.seqlen) + Bc - 1) / Bc;
  }
};

/// The next tile that no block has drawn; the first are the blocks' own. The counter holds 0, or `tiles`
/// or more. A launch draws as many numbers as there are tiles, 0 first, and leaves a 0.
__device__ __forceinline__ int draw_tile(unsigned *counter, int tiles) {
  const unsigned drawn = atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), tiles - 1);
  return gridDim.x + (drawn - 1 < unsigned(tiles - 1) ? tiles - drawn : 0);
}

/// Hides the scores of the keys after each row. The tile's keys begin at `key`, the warp's 16 rows at `row`.
template <int Bc>
__device__ __forceinline__ void mask_keys(Accumulator<Bc> &s, int key, int row) {
  const int lane = threadIdx.x % 32, last = row + lane / 4 - lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < s.size; i++)
    if (key + i / 4 * 8 + i % 2 > last + i / 2 % 2 * 8) s(i) = -INFINITY;
}

/// A warp's 16 rows of O, each times its factor, to a tile in shared memory.
template <class T, int d>
__device__ __forceinline__ void store_o(TmaTile<64, d, T> &O, Accumulator<d> &o,
                                        const float (&factor)[2]) {
  const int lane = threadIdx.x % 32, row = warp_index() % 4 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < o.size; i += 8)
    stmatrix_x4(O(row, i * 2 + lane / 16 * 8),
                {cvt_rn_x2<T>(o(i) * factor[0], o(i + 1) * factor[0]),
                 cvt_rn_x2<T>(o(i + 2) * factor[1], o(i + 3) * factor[1]),
                 cvt_rn_x2<T>(o(i + 4) * factor[0], o(i + 5) * factor[0]),
                 cvt_rn_x2<T>(o(i + 6) * factor[1], o(i + 7) * factor[1])});
}
