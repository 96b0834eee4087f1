// SPDX-License-Identifier: MIT
// Inputs, of families that each catch some kind of mistake.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/attention.h"

namespace reference {

enum class Family {
  kNormal,     // standard normal: what a network sees, more or less
  kRising,     // scores rise along the sequence, from far below: every tile has a new maximum
  kOneHot,     // each query matches one key: a permuted or skipped tile shows at once
  kEnds,       // values at the ends of fp16's range: largest, smallest normal, smallest subnormal
  kEqualKeys,  // all scores equal: the output is the mean of V
  kHuge,       // as kEnds, with scores of up to 10^10: one unit in their last place is hundreds
};

/// The families' names, in the order of the enumeration, as --inputs takes them.
const std::vector<std::string> &family_names();

/// Draws inputs. The same seed gives the same numbers, but for the last bit of the math library. Those
/// in fp8 are drawn in bf16 and then quantised: a head's scale makes its largest element 448.
Inputs make_inputs(Family family, const Shape &shape, Type type, std::uint64_t seed);

/// Draws what a backward pass gets besides: inputs.dO, of normal numbers. Of `ends` and `huge` they are
/// the smallest that fp16 has, because the other inputs are the largest: the gradients must be finite.
void add_dO(Inputs &inputs, Family family, std::uint64_t seed);

/// What the inputs in fp8 are before they are quantised, in bf16.
Inputs make_inputs_to_quantise(Family family, const Shape &shape, std::uint64_t seed);

}  // namespace reference
