// Is an output right? It may be twice as wrong as rounding alone would make it, and no more.
#pragma once

#include <vector>

#include "reference/attention.h"

namespace reference {

/// The comparison of an output with the reference, over all elements of the rows compared.
struct Verdict {
  double rms_error = 0, rms_bound = 0;
  double max_error = 0, max_bound = 0;
  std::size_t not_finite = 0;  // elements
  Place worst{0, 0, 0};        // the row of the largest error, or of the first not finite element
  int worst_column = 0;
  double worst_output = 0, worst_expected = 0;

  /// Never true for an output with a NaN: every comparison with NaN is false, so errors are asked
  /// to be within the bound, not whether they are beyond it.
  bool passed() const {
    return not_finite == 0 && rms_error <= rms_bound && max_error <= max_bound;
  }
};

/// Compares rows of an output, [batch, heads, seqlen_q, head_dim], with the reference.
///
/// The bound: attention in double precision but with P and O rounded to fp16 differs from exact
/// attention by some error, in RMS and at most. A kernel that keeps its operands in fp16 cannot do
/// better; one that does all else well stays close. It may differ by twice as much. (After
/// the rule of FlashAttention's own tests, tests/test_flash_attn.py, for the maximum.)
Verdict judge(const Inputs &inputs, const std::vector<std::uint16_t> &O,
              const std::vector<Place> &places);

/// All rows, where that takes about a second; else 256 rows drawn with this seed, and the first and
/// last rows of the first, second and last tiles of the first and last head of the first and last element of the batch.
std::vector<Place> places_to_check(const Shape &shape, int tile, unsigned long seed);

}  // namespace reference
