// SPDX-License-Identifier: MIT
// What the verdicts share: a type's rounding, and how errors with random signs add up (verdict.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "reference/type.h"

namespace reference {

constexpr double kFailureOfARightKernel = 1e-6 / 3;  // F of verdict.h, for each of the bounds

/// What a type's rounding does to a number: half a unit in the last place.
struct Rounding {
  double u;  // of 1
  double f;  // of the smallest subnormal

  double half_ulp(double x) const {
    int exponent;  // |x| = 2^exponent * [0.5, 1)
    std::frexp(x, &exponent);
    return x == 0 ? f : std::max(f, std::ldexp(u, exponent - 1));
  }
};

inline Rounding rounding_of(Type type) {
  switch (type) {
    case Type::kFp16: return {0x1p-11, 0x1p-25};
    case Type::kBf16: return {0x1p-8, 0x1p-134};
    case Type::kFp8: break;
  }
  return {0x1p-4, 0x1p-10};
}

/// Which keys may be rounded alike, or are most of the sum alone.
inline std::vector<bool> keys_that_count_fully(const std::vector<double> &weights) {
  std::vector<std::pair<double, int>> order(weights.size());
  for (std::size_t i = 0; i < order.size(); i++) order[i] = {weights[i], static_cast<int>(i)};
  std::sort(order.begin(), order.end(),
            [](const auto &a, const auto &b) { return a.first < b.first; });
  std::vector<bool> fully(weights.size());
  for (std::size_t i = 0; i < order.size(); i++) {
    const auto [w, key] = order[i];
    if (w > 0.5) fully[key] = true;
    if (i > 0 && w - order[i - 1].first <= 0x1p-11 * w)
      fully[key] = fully[order[i - 1].second] = true;
  }
  return fully;
}

/// The bound of the mean square of n errors that are sums of squares, of these means, but for F.
inline double bound_of_mean_square(const std::vector<double> &means, double n) {
  const double L = std::log(1 / kFailureOfARightKernel);
  double sum = 0, sum_of_squares = 0, largest = 0;
  for (const double mean : means) {
    sum += mean;
    sum_of_squares += mean * mean;
    largest = std::max(largest, mean);
  }
  return (sum + 2 * std::sqrt(L * sum_of_squares) + 2 * L * largest) / n;
}

}  // namespace reference
