// SPDX-License-Identifier: MIT
// Which tiles of queries a block of keys visits, and which scores of them it hides, as step 65 has it, for the steps
// after it.
#pragma once

#include <algorithm>

#include "common/kernel/kernel.h"

/// What a block visits in each head: the tiles of queries from row `first_row` to row `end`. Query i sees the keys
/// `lowest` + i to `highest` + i, counted from the block's first.
struct alignas(16) Plan {
  int first_row, end, lowest, highest;
};
/// One tile of them: its head of all in the batch, its first query, and the keys `from` to `to` that this query sees.
struct alignas(16) Visit {
  int head, row, from, to;
};

/// Returns the plan of a block that has `keys_here` keys from `first_key` on, and how many tiles of Br queries it visits
/// in each head. `queries` and `keys` say how many rows the sequence has.
template <int Br, class Rows>
__device__ __forceinline__ auto plan_of(const Problem &problem, const Rows &queries,
                                        const Rows &keys, int first_key, int keys_here) {
  // Query i stands at key i + offset. It sees the keys from `left` before that one to `right` after it.
  const int offset = keys.rows - queries.rows, all = keys.rows + queries.rows;
  const int left = problem.window_left < 0 ? all : min(problem.window_left, all);
  const int right = problem.window_right < 0 ? all : min(problem.window_right, all);
  const int lowest = offset - left - first_key, highest = offset + right - first_key;
  // Query -highest is the first that sees the block's first key. Query keys_here - 1 - lowest is the last one that
  // sees its last key.
  const int first_query = max(0, -highest) / Br * Br;
  const int queries_end = min(queries.rows, keys_here - lowest);
  const int tiles = max(0, (queries_end - first_query + Br - 1) / Br);
  struct {
    Plan plan;
    int tiles;
  } found = {{first_query, first_query + tiles * Br, lowest, highest}, tiles};
  return found;
}

/// Makes the scores of keys that a query does not see -infinity, or `hidden`. `keys_end` keys exist from the block's first
/// on.
template <int m_tiles, int n_tiles>
__device__ __forceinline__ void hide_scores(FragmentC (&x)[m_tiles][n_tiles], int warp_key,
                                            int key_row, int query, const Visit &visit,
                                            int keys_end, float hidden = -INFINITY) {
  constexpr int Br = n_tiles * 8, keys = m_tiles * 16;
  if (warp_key + keys > keys_end || warp_key + keys - 1 > visit.to ||
      warp_key - (Br - 1) < visit.from) {
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++)
      for (int n = 0; n < Br / 8; n++)
        for (int e = 0; e < 4; e++) {
          const int key = key_row + mt * 16 + e / 2 * 8, after = key - (query + 8 * n + e % 2);
          if (key >= keys_end || after > visit.to || after < visit.from) x[mt][n][e] = hidden;
        }
  }
}

/// Returns a grid of x: the heads of K and V of a section, y: tiles of keys, z: sections. With a causal mask a section
/// is as many heads as have 32 MB of Q, dO and dQ's sums, which stay in L2 until all tiles of keys have visited them.
/// Without one all blocks take as long, and a section is one head.
template <int Bc>
static dim3 grid_of(const Problem &p, bool causal) {
  const int kv_heads = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  const std::int64_t bytes =
      std::int64_t{group} * std::max(1, p.seqlen_q) * p.head_dim * (2 + 2 + 4);
  const int most = causal ? std::clamp<std::int64_t>((32 << 20) / bytes, 1, kv_heads) : 1;
  const int sections = (kv_heads + most - 1) / most;
  return dim3((kv_heads + sections - 1) / sections, (p.seqlen_k + Bc - 1) / Bc, sections);
}
