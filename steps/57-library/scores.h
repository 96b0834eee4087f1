// SPDX-License-Identifier: MIT
// What becomes of a score before the softmax, as step 52 has it: a soft cap, then ALiBi.
#pragma once

#include <algorithm>

#include "steps/57-library/call.h"

namespace {

constexpr float ln_2 = 0.693147181f;  // of log2: ln x is log2(x) ln_2

/// The function between S and the softmax. What it returns times scale_log2 is the exponent of a power of two.
struct Scores {
  float scale_log2;
  // The product q . k times this is a score in units of the soft cap. Negative: there is none, because a scale may be 0.
  float to_cap;

  explicit Scores(const Call &p)
      : scale_log2(log2_e * (p.softcap > 0 ? p.softcap : p.scale)),
        to_cap(p.softcap > 0 ? p.scale / p.softcap : -1) {
    // With a scale of 0 a masked score would be -inf * 0 = NaN. No score shows 1e-20 of itself.
    scale_log2 = std::max(scale_log2, 1e-20f);
  }
  /// The slope of ALiBi in units of what of() returns.
  __device__ __forceinline__ float slope(const Call &p, int b, int h) const {
    return slope_of(p, b, h) * log2_e / scale_log2;
  }
  __device__ __forceinline__ float of(float product, float slope, int distance) const {
    const float capped = to_cap >= 0 ? tanh_approx(product * to_cap) : product;
    return fmaf(-slope, fabsf(float(distance)), capped);
  }
};

}  // namespace
