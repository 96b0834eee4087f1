// SPDX-License-Identifier: MIT
// The maximum of no scores, for what computes a softmax tile by tile, and for what merges parts of one.
#pragma once

#include <cfloat>

constexpr float no_maximum = -FLT_MAX;  // of no keys: finite, because -inf - -inf is NaN
