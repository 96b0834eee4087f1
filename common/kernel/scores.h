// SPDX-License-Identifier: MIT
// What becomes of a score before the softmax. Step 52 builds it, and later steps include it.
#pragma once

#include <algorithm>

#include "common/kernel/softmax.h"

constexpr float ln_2 = 0.693147181f;  // of log2: ln x is log2(x) ln_2

/// What becomes of a score before the softmax.
struct Scores {
  float scale_log2;          // what the function returns times this is a power of two
  float to_cap;              // the product q . k times this is a score in units of the soft cap
  const float *slopes;       // of ALiBi, [heads of a sequence]
  const float *sink_logits;  // [heads of a sequence]; null: no sinks
};

/// Returns a problem's functions of scores.
static inline Scores scores_of(const Problem &p) {
  // With a scale of 0 a masked score would be -inf * 0 = NaN. No score shows 1e-20 of itself.
  Scores scores{std::max(log2_e * p.scale, 1e-20f), 0, p.slopes, p.sink_logits};
  if (p.softcap > 0) scores.scale_log2 = log2_e * p.softcap, scores.to_cap = p.scale / p.softcap;
  return scores;
}
