// SPDX-License-Identifier: MIT
// Where a head's rows lie, and their copies: each tensor has its own strides, and each number on the device is clamped.
#pragma once

#include "common/kernel/swizzle.h"
#include "steps/69-training/backward.h"

/// Starts the copies of Rows x d elements, 16 bytes per thread and iteration. Rows and columns that do not exist become
/// zeros.
template <int threads, class T, int Rows, int d>
__device__ void load_tile(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &matrix,
                          int first_row) {
  const int row = threadIdx.x / (d / 8), col = threadIdx.x % (d / 8) * 8;
  const auto part = matrix.from(first_row + row, col);
  const int rows = part.cols > 0 ? part.rows : 0;
#pragma unroll
  for (int i = 0; i < Rows; i += threads / (d / 8))
    cp_async_16_or_zeros(tile(row + i, col), part(i, 0), i < rows);
}

/// The rows of one head of a sequence: `rows` of them, from row `start` of the tensor on. All lie inside the tensor,
/// whatever the arrays on the device hold.
struct alignas(16) Rows {
  int b, head, start, rows;
};
__device__ __forceinline__ Rows queries_of(const Backward &p, int b, int head) {
  const Sequence at = sequence_of(p, b);
  return {b, head, at.q_start, at.q_count};
}
__device__ __forceinline__ Rows keys_of(const Backward &p, int b, int head) {
  const Sequence at = sequence_of(p, b);
  return {b, head, at.k_start, at.k_count};
}
template <class T, class Void>
__device__ __forceinline__ StridedMatrix<T> matrix_of(Void *tensor, const Strides &strides,
                                                      const Rows &of, int head_dim) {
  const std::int64_t first = of.b * strides.batch + of.head * strides.head + of.start * strides.row;
  return {static_cast<T *>(tensor) + first, of.rows, head_dim, strides.row};
}

/// Where a sequence's rows begin in the workspace, which has `rows` of each head. Packed sequences follow each other
/// in whole tiles: each begins at most a tile's rows further behind its place in the tensor than the one before.
template <int whole_tiles>
__device__ __forceinline__ std::int64_t first_in_workspace(const Backward &p, const Rows &of,
                                                           int rows) {
  return p.cu_seqlens_q ? (of.start + of.b * whole_tiles) / whole_tiles * whole_tiles
                        : std::int64_t{of.b} * p.heads * rows;
}

/// The rows of a head in the workspace: of all sequences if they are packed, and else of one.
template <int whole_tiles>
static inline int rows_in_workspace(const Backward &p) {
  const int rows = p.cu_seqlens_q ? p.total_q + p.batch * whole_tiles : p.seqlen_q;
  return (rows + whole_tiles - 1) / whole_tiles * whole_tiles;
}
template <int whole_tiles>
static inline std::int64_t all_rows_in_workspace(const Backward &p) {
  return std::int64_t{p.cu_seqlens_q ? 1 : p.batch} * p.heads * rows_in_workspace<whole_tiles>(p);
}
