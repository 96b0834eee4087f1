// SPDX-License-Identifier: MIT
// For the steps with a latent cache, 58 and 82 to 84: what steps 36, 54 and 55 have, for rows of other tensors and for
// other places in shared memory.
#pragma once

#include "common/kernel/cache_rows.h"
#include "common/kernel/wgmma.h"

/// Returns the map of a cache of d columns, in pages, packed or as a tensor, whose boxes have so many rows (step 54).
template <class T>
static SequenceMap map_of_cache(const Problem &p, int d, int box_rows) {
  const int keys_of_block = p.page_table ? p.page_size : p.cu_seqlens_k ? p.total_k : p.seqlen_k;
  return sequence_map<T>(p.K, p.K_strides, p.page_table ? p.num_pages : p.batch, p.kv_heads,
                         keys_of_block, p.cu_seqlens_k, d, box_rows);
}

/// Copies a tile's rows of Q as step 55 does, 16 bytes at a time. Rows behind the last become zeros. `threads` threads
/// call this and meet at a named barrier. After that wgmma may read the tile.
template <class T, int rows, int d>
__device__ __forceinline__ void load_rows(TmaTile<rows, d, T> &to, const GroupRows<rows, d> &tile,
                                          const void *tensor, const Strides &strides, int threads,
                                          int barrier) {
  const int first_col = threadIdx.x % 8 * 8;  // 8 threads copy 128 bytes of a row at a time
  for (int row = threadIdx.x / 8; row < rows; row += threads / 8) {
    const auto Q = tile.row(static_cast<const T *>(tensor), strides, row);
    for (int col = first_col; col < d; col += 64)
      cp_async_16_or_zeros(to(row, col), Q(0, col), row < tile.there);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();                   // wgmma reads Q
  named_barrier_sync(barrier, threads);  // all threads' copies have arrived
}

/// Writes the 16 rows of O of a warp, each row times its factor, as write_rows of step 36 does: to a tile, from a
/// column on. (warp and lane are references: with their values nvcc 13.0 writes other code.)
template <class T, int rows, int d, int columns>
__device__ __forceinline__ void write_rows(TmaTile<rows, d, T> &to, int first_col,
                                           Accumulator<columns> &o, const float (&factor)[2],
                                           const int &warp, const int &lane) {
#pragma unroll
  for (int i = 0; i < o.size; i += 8)
    stmatrix_x4(to(warp % 4 * 16 + lane % 16, first_col + i * 2 + lane / 16 * 8),
                {cvt_rn_x2<T>(o(i) * factor[0], o(i + 1) * factor[0]),
                 cvt_rn_x2<T>(o(i + 2) * factor[1], o(i + 3) * factor[1]),
                 cvt_rn_x2<T>(o(i + 4) * factor[0], o(i + 5) * factor[0]),
                 cvt_rn_x2<T>(o(i + 6) * factor[1], o(i + 7) * factor[1])});
}
