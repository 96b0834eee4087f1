// SPDX-License-Identifier: MIT
// How a warp computes its part of an answer, and how parts merge, as step 25 has it, for the steps after it.
#pragma once

#include "common/kernel/kernel.h"
#include "common/kernel/no_maximum.h"

/// Softmax of a warp's scores: replaces S by P = 2^(S scale - m). It raises m to the maximum, and multiplies l and O by
/// what this makes of them. Not lazily as in step 14, because the loop of such a step mostly waits for memory.
template <int columns, int columns_of_o>
__device__ __forceinline__ void softmax_of_warp(FragmentC (&s)[columns],
                                                FragmentC (&o)[columns_of_o], float (&m)[2],
                                                float (&l)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float m_new = -INFINITY;
    for (FragmentC &x : s) m_new = fmaxf(m_new, fmaxf(x[2 * r], x[2 * r + 1]));
    for (int mask = 1; mask < 4; mask *= 2)
      m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
    m_new = fmaxf(m[r], m_new * scale_log2);
    const float alpha = ex2(m[r] - m_new);
    m[r] = m_new;
    l[r] *= alpha;
    for (FragmentC &x : o)
      for (int e = 2 * r; e < 2 * r + 2; e++) x[e] *= alpha;
    for (FragmentC &x : s)
      for (int e = 2 * r; e < 2 * r + 2; e++) l[r] += x[e] = ex2(fmaf(x[e], scale_log2, -m[r]));
  }
}

/// Rounds P of 16 keys: two neighbouring blocks of 8 columns become A of a product.
template <class T>
__device__ __forceinline__ FragmentA rounded(const FragmentC &left, const FragmentC &right) {
  return {cvt_rn_x2<T>(left[0], left[1]), cvt_rn_x2<T>(left[2], left[3]),
          cvt_rn_x2<T>(right[0], right[1]), cvt_rn_x2<T>(right[2], right[3])};
}

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
