// SPDX-License-Identifier: MIT
// The softmax of a warpgroup's scores: the registers of an Accumulator, from step 31 on. Steps 31 and 32 call
// its parts, because they vote once for two tiles of 64 rows.
#pragma once

#include "common/kernel/no_maximum.h"
#include "common/kernel/wgmma.h"

constexpr float rescale_threshold = 8;  // P is at most 2^8 then: far from fp16's 65504

// A lane has scores of two rows; element i is of row r = i / 2 % 2. Four lanes share a row, and
// each of them has the row's m and alpha, but only its own part of the sum l.

/// Masks the scores of the tile j of keys that lie behind the diagonal (step 38). s has those of 64 rows, from
/// first_row on.
template <int Bc>
__device__ __forceinline__ void mask_diagonal(Accumulator<Bc> &s, int first_row, int j, int warp,
                                              int lane) {
  const int row = first_row + warp % 4 * 16 + lane / 4, key = j * Bc + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < s.size; i++)
    if (key + i / 4 * 8 + i % 2 > row + i / 2 % 2 * 8) s(i) = -INFINITY;
}

/// Computes m_lane, the maxima of this lane's scores.
template <int Bc>
__device__ __forceinline__ void lane_maxima(Accumulator<Bc> &s, float (&m_lane)[2]) {
  m_lane[0] = m_lane[1] = -INFINITY;
#pragma unroll
  for (int i = 0; i < s.size; i++) m_lane[i / 2 % 2] = fmaxf(m_lane[i / 2 % 2], s(i));
}

/// Raises m to the maximum of the whole row, less `rise`, and multiplies l by alpha, which O must
/// be multiplied by, too.
__device__ __forceinline__ void raise_maxima(const float (&m_lane)[2], float (&m)[2], float (&l)[2],
                                             float (&alpha)[2], float scale_log2, float rise = 0) {
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

/// Replaces S by P = 2^(S scale - m), and adds P to l.
template <int Bc>
__device__ __forceinline__ void exponentiate(Accumulator<Bc> &s, const float (&m)[2], float (&l)[2],
                                             float scale_log2) {
#pragma unroll
  for (int i = 0; i < s.size; i++) {
    s(i) = ex2(fmaf(s(i), scale_log2, -m[i / 2 % 2]));
    l[i / 2 % 2] += s(i);
  }
}

/// Online softmax, lazily: replaces S by P, relative to m. m may stay below the maximum by the
/// threshold at most. Otherwise the function raises m, multiplies l by alpha, and returns true: the
/// caller multiplies O by alpha. With `rise`, m stays below the maximum by at least that much, so
/// P's largest is 2^rise or more.
template <int Bc>
__device__ __forceinline__ bool softmax(Accumulator<Bc> &s, float (&m)[2], float (&l)[2],
                                        float (&alpha)[2], float scale_log2, float rise = 0) {
  float m_lane[2];
  lane_maxima(s, m_lane);
  bool must_rescale = false;
  for (int r = 0; r < 2; r++) must_rescale |= m_lane[r] * scale_log2 > m[r] + rescale_threshold;
  must_rescale = __any_sync(kAllLanes, must_rescale);
  if (must_rescale) raise_maxima(m_lane, m, l, alpha, scale_log2, rise);
  exponentiate(s, m, l, scale_log2);
  return must_rescale;
}

/// Multiplies O, row by row, by alpha.
template <int d>
__device__ __forceinline__ void rescale(Accumulator<d> &o, const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < o.size; i++) o(i) *= alpha[i / 2 % 2];
}

/// Rounds P: two neighbouring blocks of 8 columns become A of one product.
template <class T, int Bc>
__device__ __forceinline__ void to_fragments(FragmentA (&p)[Bc / 16], Accumulator<Bc> &s) {
#pragma unroll
  for (int i = 0; i < s.size; i += 8)
    p[i / 8] = {cvt_rn_x2<T>(s(i), s(i + 1)), cvt_rn_x2<T>(s(i + 2), s(i + 3)),
                cvt_rn_x2<T>(s(i + 4), s(i + 5)), cvt_rn_x2<T>(s(i + 6), s(i + 7))};
}
