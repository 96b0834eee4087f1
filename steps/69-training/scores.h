// SPDX-License-Identifier: MIT
// What a model does to the scores of a visit, as mma_gradients::add_visits calls it.
#pragma once

#include "common/kernel/softmax.h"

namespace {

/// What a soft cap and ALiBi do to the scores of a visit. Step 81 says why its weights are rounded, and not the factor.
struct Changed {
  static constexpr bool any = true;
  // The product q . k times this is a score in units of the soft cap. Negative: there is none, because a scale may be 0.
  float to_cap;
  float slope;   // of ALiBi, in base 2
  float behind;  // how far the lane's first key is behind its first query

  template <class Scores>
  __device__ __forceinline__ void cap(Scores &x) const {
    if (to_cap < 0) return;
#pragma unroll
    for (auto &keys : x)
      for (auto &some : keys)
        for (int e = 0; e < 4; e++) some[e] = tanh_approx(some[e] * to_cap);
  }
  __device__ __forceinline__ float minus_lse(float lse, int key, int query) const {
    return fmaf(-slope, fabsf(behind + (key - query)), -lse);
  }
  /// The derivative of the tanh is 1 - tanh^2.
  __device__ __forceinline__ float weight(float P, float score) const {
    return to_cap < 0 ? P : fmaf(-P * score, score, P);
  }
};

}  // namespace
