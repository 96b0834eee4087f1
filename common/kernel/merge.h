// SPDX-License-Identifier: MIT
// How blocks that share an item sum their parts of its answer, in groups, for step 59 and the steps after it.
#pragma once

#include "common/kernel/cache.h"

namespace {  // of each object of its own: the emulator and a GPU have one each

/// Counters of missing parts, and the parts: of each level of sums, two per block. A block may have a part of an item
/// that began in another block, and one of an item that it begins. The counters must be 0 before the launch, and
/// are 0 again after it.
template <int rows, int d>
struct Workspace {
  static constexpr int levels = 3;  // the item's blocks may be fan_in^levels
  void *memory;

  static std::size_t bytes(int blocks) {
    return sizeof(float) * levels * blocks * (1 + 2 * rows * (d + 4));
  }
  __device__ Reference<unsigned> missing(int level, int block,
                                         Where where = Where::current()) const {
    return Matrix<unsigned>{static_cast<unsigned *>(memory), levels, int(gridDim.x)}(level, block,
                                                                                     where);
  }
  __device__ Matrix<float> part(int level, int block, bool begins) const {
    const std::int64_t number = (std::int64_t{level} * gridDim.x + block) * 2 + begins;
    return {static_cast<float *>(memory) + levels * gridDim.x + number * rows * (d + 4), rows,
            d + 4};
  }
};

}  // namespace

/// Sums the parts that `parts` blocks, from block `first` on, have of one item. This block's is number `number` of
/// them, and own(row, col) returns it. A group of fan_in blocks counts its parts, and the last block to count
/// sums them. Its sum is a part of the next level. The block that has the sum of all calls finish(row, col, sum).
template <int fan_in, int threads, int rows, int d, class Own, class Finish>
__device__ __forceinline__ void merge(const Workspace<rows, d> &workspace,
                                      Tile<bool, 1, 8> &is_last, int rows_there, int first,
                                      int number, int parts, const Own &own, const Finish &finish) {
  int stride = 1;              // from one part of this level to the next, in blocks
  int group = 0, members = 0;  // of the level below: its first block, and its parts
  for (int level = 0;; level++) {
    const int below = stride / fan_in;
    for (int i = threadIdx.x * 4; i < rows_there * d; i += threads * 4) {
      Part sum = level == 0 ? own(i / d, i % d) : Part{};
#pragma unroll 8
      for (int k = 0; k < members; k++) {
        const int block = group + k * below;
        const auto part = workspace.part(level - 1, block, block == first);
        sum.add(part_at<d>(part, i / d, i % d));
      }
      if (parts == 1) {
        finish(i / d, i % d, sum);
      } else {
        const auto part = workspace.part(level, first + number * stride, number == 0);
        store<4>(part(i / d, i % d), sum.O);
        if (i % d == 0) store<2>(part(i / d, d), Vector<float, 2>{sum.m, sum.l});
      }
    }
    if (parts == 1) return;
    number /= fan_in;
    members = min(fan_in, parts - number * fan_in);
    group = first + number * fan_in * stride;
    __syncthreads();  // all threads of the block have stored its part
    if (threadIdx.x == 0) {
      __threadfence();  // every block that sees the count must see the part
      is_last(0, 0) = members == 1 || atomic_dec(workspace.missing(level, group), members - 1) == 1;
      __threadfence();  // the last block must see the parts of all others
    }
    __syncthreads();
    if (!is_last(0, 0)) return;
    parts = (parts + fan_in - 1) / fan_in;
    stride *= fan_in;
  }
}
