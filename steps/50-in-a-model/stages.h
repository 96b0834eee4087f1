// SPDX-License-Identifier: MIT
// How the tiles of step 50's decoding come into shared memory: each warp has its own.
#pragma once

#include "common/kernel/swizzle.h"
#include "steps/50-in-a-model/rows.h"

namespace {

namespace decoding {

constexpr int keys = 16;  // of K and V in a warp's tile

template <class T, int d>
struct Stage {
  SharedTile<keys, d, T> K, V;
};

/// Where a key and its value begin: pointers, as numbers that lanes can shuffle.
struct KeyPlace {
  std::int64_t K, V;
};

template <class T, int d>
__device__ Matrix<const T> row_at(std::int64_t place) {
  return {reinterpret_cast<const T *>(place), 1, d};
}

/// Starts the copies of a warp's tile: lane i knows where key i is. Those from `there` on are not;
/// zeros arrive, for they are masked, but 0 times NaN is NaN.
template <class T, int d>
__device__ void load_stage(Stage<T, d> &stage, const KeyPlace &place, int there) {
  constexpr int lanes = d / 8 & -(d / 8);  // per row, 16 bytes each
  const int first = threadIdx.x % 32 / lanes, col = threadIdx.x % lanes * 8;
#pragma unroll
  for (int row = first; row < keys; row += 32 / lanes) {
    const std::int64_t K = __shfl_sync(kAllLanes, place.K, row);
    const std::int64_t V = __shfl_sync(kAllLanes, place.V, row);
    for (int c = col; c < d; c += lanes * 8) {
      cp_async_16_or_zeros(stage.K(row, c), row_at<T, d>(K)(0, c), row < there);
      cp_async_16_or_zeros(stage.V(row, c), row_at<T, d>(V)(0, c), row < there);
    }
  }
}

}  // namespace decoding

}  // namespace
