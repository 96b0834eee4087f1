// SPDX-License-Identifier: MIT
// Where a head's rows lie, as steps 21 to 23 have it, and their copies.
#pragma once

#include "common/kernel/heads.h"
#include "common/kernel/swizzle.h"

/// Starts the copies of Rows x d elements, 16 bytes per thread and iteration. Rows that do not exist become zeros.
template <int threads, class T, int Rows, int d>
__device__ __forceinline__ void load_tile(SharedTile<Rows, d, T> &tile,
                                          const StridedMatrix<const T> &matrix, int first_row) {
  const int row = threadIdx.x / (d / 8), col = threadIdx.x % (d / 8) * 8;
  const auto part = matrix.from(first_row + row, col);
#pragma unroll
  for (int i = 0; i < Rows; i += threads / (d / 8))
    cp_async_16_or_zeros(tile(row + i, col), part(i, 0), i < part.rows);
}

/// The rows of one head of a sequence: `rows` of them, from row `start` of the tensor on.
struct alignas(16) Rows {
  int b, head, start, rows;
};
__device__ __forceinline__ Rows queries_of(const Problem &p, int b, int head) {
  return {b, head, uniform(of_batch(p.cu_seqlens_q, p, b, 0)),
          uniform(of_batch(p.lengths_q, p, b, p.seqlen_q))};
}
__device__ __forceinline__ Rows keys_of(const Problem &p, int b, int head) {
  return {b, head, uniform(of_batch(p.cu_seqlens_k, p, b, 0)),
          uniform(of_batch(p.lengths_k, p, b, p.seqlen_k))};
}
template <class T, int d, class Void>
__device__ __forceinline__ StridedMatrix<T> matrix_of(Void *tensor, const Strides &strides,
                                                      const Rows &of) {
  return head_of<T, d>(tensor, strides, of.b, of.head, of.start, of.rows);
}
