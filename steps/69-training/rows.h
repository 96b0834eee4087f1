// SPDX-License-Identifier: MIT
// Where a head's rows lie: each tensor has its own strides, and each number on the device is clamped.
#pragma once

#include "steps/69-training/backward.h"

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
