// SPDX-License-Identifier: MIT
// The softmax of a warpgroup's scores, as steps 33 to 36 have it, for the steps after them.
#pragma once

#include <cfloat>

#include "common/kernel/wgmma.h"

constexpr float rescale_threshold = 8;  // P is at most 2^8 then: far from fp16's 65504
constexpr float no_maximum = -FLT_MAX;  // of no keys: finite, for -inf - -inf is NaN

/// Online softmax, lazily: S becomes P, relative to m. m may stay below the maximum, by at most the
/// threshold. Else l, and O by the caller, are multiplied by alpha: returns whether. With `rise` m stays
/// below the maximum by that much at least, and P's largest is 2^rise or more.
template <int Bc>
__device__ __forceinline__ bool softmax(Accumulator<Bc> &s, float (&m)[2], float (&l)[2],
                                        float (&alpha)[2], float scale_log2, float rise = 0) {
  float m_lane[2] = {-INFINITY, -INFINITY};  // of this lane's scores
#pragma unroll
  for (int i = 0; i < s.size; i++) m_lane[i / 2 % 2] = fmaxf(m_lane[i / 2 % 2], s(i));
  bool must_rescale = false;
  for (int r = 0; r < 2; r++) must_rescale |= m_lane[r] * scale_log2 > m[r] + rescale_threshold;
  must_rescale = __any_sync(kAllLanes, must_rescale);
  if (must_rescale) {
    for (int r = 0; r < 2; r++) {
      float m_new = m_lane[r];
      for (int mask = 1; mask < 4; mask *= 2)
        m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
      m_new = fmaxf(m[r], m_new * scale_log2 - rise);
      alpha[r] = ex2(m[r] - m_new);  // 2^-inf = 0 for the first tile
      m[r] = m_new;
      l[r] *= alpha[r];
    }
  }
#pragma unroll
  for (int i = 0; i < s.size; i++)
    l[i / 2 % 2] += s(i) = ex2(fmaf(s(i), scale_log2, -m[i / 2 % 2]));
  return must_rescale;
}

/// O, row by row, times alpha.
template <int d>
__device__ __forceinline__ void rescale(Accumulator<d> &o, const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < o.size; i++) o(i) *= alpha[i / 2 % 2];
}

/// P, rounded: two neighbouring blocks of 8 columns are A of one product.
template <class T, int Bc>
__device__ __forceinline__ void to_fragments(FragmentA (&p)[Bc / 16], Accumulator<Bc> &s) {
#pragma unroll
  for (int i = 0; i < s.size; i += 8)
    p[i / 8] = {cvt_rn_x2<T>(s(i), s(i + 1)), cvt_rn_x2<T>(s(i + 2), s(i + 3)),
                cvt_rn_x2<T>(s(i + 4), s(i + 5)), cvt_rn_x2<T>(s(i + 6), s(i + 7))};
}
