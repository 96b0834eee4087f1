// SPDX-License-Identifier: MIT
// How parts of an answer merge, as step 25 has it, for the steps after it.
#pragma once

#include "common/kernel/kernel.h"
#include "common/kernel/no_maximum.h"

/// What some of the keys give a row: l and 4 columns of O, relative to m.
struct Part {
  float m = no_maximum, l = 0;
  Vector<float, 4> O = {};

  __device__ __forceinline__ void add(const Part &other) {
    const float m_new = fmaxf(m, other.m);
    const float alpha = ex2(m - m_new), beta = ex2(other.m - m_new);
    m = m_new;
    l = alpha * l + beta * other.l;
    for (int e = 0; e < 4; e++) O[e] = alpha * O[e] + beta * other.O[e];
  }
};

/// A part in a matrix: O is its columns 0 to d - 1, m and l are columns d and d + 1.
template <int d, class View>
__device__ __forceinline__ Part part_at(View &parts, int row, int col) {
  const Vector<float, 2> m_and_l = load<2>(parts(row, d));
  return {m_and_l[0], m_and_l[1], load<4>(parts(row, col))};
}

/// Returns the sum of the parts that a block's warps hold.
template <int d, class Warps>
__device__ __forceinline__ Part sum_of_warps(Warps &warps, int row, int col) {
  Part sum;
  for (auto &warp : warps) sum.add(part_at<d>(warp.part, row, col));
  return sum;
}
