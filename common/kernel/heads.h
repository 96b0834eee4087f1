// SPDX-License-Identifier: MIT
// Where a head's rows lie in the tensors of a Problem, as step 22 has it, for the steps after it.
#pragma once

#include "common/kernel/kernel.h"

/// The rows of head h of batch element b, from `start` on.
template <class T, int d, class Void>
__device__ __forceinline__ StridedMatrix<T> head_of(Void *tensor, const Strides &strides, int b,
                                                    int h, int start, int rows) {
  const std::int64_t offset = b * strides.batch + h * strides.head + start * strides.row;
  return {static_cast<T *>(tensor) + offset, rows, d, strides.row};
}

/// The number that an array of all heads, [batch, heads], holds for one of them.
__device__ __forceinline__ float of_head(const float *array, int head) {
  return Matrix<const float>{array, 1, head + 1}(0, head);
}

/// The number that an array of the batch holds for element b, if there is such an array.
__device__ __forceinline__ int of_batch(const int *array, const Problem &problem, int b,
                                        int otherwise) {
  return array ? Matrix<const int>{array, 1, problem.batch}(0, b) : otherwise;
}
