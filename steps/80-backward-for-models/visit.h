// SPDX-License-Identifier: MIT
// What step 80 has in its kernel, for step 87: which visit is next, and a visit's S and P.
#pragma once

#include "common/kernel/hopper_backward.h"

namespace {

/// The order of a block's visits: all heads of the group at the last tile that sees the keys, then at the tile before it;
/// or, by head, a head after the other.
template <int Br>
struct NextVisit {
  bool by_head;
  int group, first_row, last_row;
  __device__ __forceinline__ void operator()(int &h, int &q_row) const {
    if (by_head && (q_row -= Br) < first_row) h++, q_row = last_row;
    if (!by_head && ++h == group) h = 0, q_row -= Br;
  }
};

/// Waits for a tile of queries, and starts its product with 64 keys: S^T = K Q^T, or dP^T = V dO^T.
template <class T, int d, int queries>
__device__ __forceinline__ void start_product(Accumulator<queries> &x, TmaTile<64, d, T> &keys,
                                              TmaTile<queries, d, T> &tile, Mbarrier &full,
                                              int parity) {
  mbarrier_wait<false>(full, parity);
  wgmma_fence();
#pragma unroll
  for (int col = 0; col < d; col += 16)
    wgmma<T>(x, k_major(keys, 0, col), k_major(tile, 0, col), col > 0);
  wgmma_commit();
}

/// Makes the scores of 64 keys, of which there are `keys_here`, -infinity where a query does not see a key. The tile's first
/// query sees the keys `from` to `to`.
template <int queries>
__device__ __forceinline__ void hide_scores(Accumulator<queries> &s, int from, int to,
                                            int keys_here) {
  const int key = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;  // the lane's, and 8 further on
  const int query = threadIdx.x % 4 * 2;                             // of each 8, and 1 further on
  if (64 > keys_here || 63 > to || from > -(queries - 1))
#pragma unroll
    for (int e = 0; e < s.size; e++) {
      const int after = key - query + e / 2 % 2 * 8 - e / 4 * 8 - e % 2;
      if (after > to || after < from || key + e / 2 % 2 * 8 >= keys_here) s(e) = -INFINITY;
    }
}

/// Replaces S^T by P^T. The log-sum-exp is that of each query.
template <int queries>
__device__ __forceinline__ void exponentiate(Accumulator<queries> &s,
                                             Tile<float, 1, queries> &log_sums, float scale_log2) {
#pragma unroll
  for (int e = 0; e < s.size; e += 4) {
    const auto lse = load<2>(log_sums(0, e * 2 + threadIdx.x % 4 * 2));
    for (int k = 0; k < 4; k++) s(e + k) = ex2(fmaf(s(e + k), scale_log2, -lse[k % 2]));
  }
}

}  // namespace
