// SPDX-License-Identifier: MIT
// Sequences on a line, one behind the other, each of as many places as its work costs: how a warp finds where on it
// a block's share begins. For step 59 and the steps after it.
#pragma once

#include "common/kernel/kernel.h"

/// Returns the length of the line: the sum of cost(b) of all sequences. All lanes of the warp call it.
template <class Cost>
__device__ __forceinline__ int length_of_line(int batch, const Cost &cost) {
  int total = 0;
  for (int b = threadIdx.x % 32; b < batch; b += 32) total += cost(b);
  for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(kAllLanes, total, mask);
  return total;
}

/// Returns the sequence in which place `start` of the line lies, or `batch` if the line ends before it; and makes
/// `start` the place's number in this sequence. All lanes of the warp call it. cost(b) is 0 from `batch` on.
template <class Cost>
__device__ __forceinline__ int find_on_line(int batch, int &start, const Cost &cost) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < batch; first += 32) {
    int sum = cost(first + lane);  // becomes the sum of this cost and those of the lanes before
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_sync(kAllLanes, sum, (lane - i) & 31);
      if (lane >= i) sum += other;
    }
    const int all = __shfl_sync(kAllLanes, sum, 31);
    if (start < all) {
      int b = first;  // pass as many sequences as end at `start` or before it
      for (int i = 16; i > 0; i /= 2)
        if (__shfl_sync(kAllLanes, sum, b - first + i - 1) <= start) b += i;
      const int before = __shfl_sync(kAllLanes, sum, (b - first + 31) & 31);
      if (b > first) start -= before;
      return b;
    }
    start -= all;
  }
  return batch;
}
