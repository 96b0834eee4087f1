// What parts of the keys give a row, and how they add up: steps 25, 26 and 29 share it.
#pragma once

#include "common/kernel/ptx.h"
#include "common/kernel/view.h"

constexpr float no_maximum = -1e30f;  // of no keys: finite, for -inf - -inf is NaN

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

template <int d, class View>
__device__ __forceinline__ void store_part(View &parts, int row, int col, const Part &part) {
  store<4>(parts(row, col), part.O);
  store<2>(parts(row, d), Vector<float, 2>{part.m, part.l});  // the same from all lanes of a row
}
