// Is an output right? It may differ from the reference by what rounding explains, and no more.
//
// The idea is that of FlashAttention's own tests (tests/test_flash_attn.py): what a kernel may get
// wrong is what rounding P and O to the element type must get wrong. There, attention is computed
// once with these roundings, and twice its largest error is allowed. But the largest of some
// thousand errors is a matter of luck, and a right kernel rounds otherwise: it holds P relative to a
// maximum that lags behind. So here the bound of each element is derived from the roundings.
//
// An element is o = sum_j w_j v_j: weights w_j > 0, which come from Q and K alone, and values v_j.
// Let u be half a unit in the last place of 1 (fp16: 2^-11, bf16: 2^-9). A kernel's weights differ
// from w_j
//
//   - by the rounding of P, at a scale that we do not know: at most a_j = u w_j. Below the smallest
//     normal number it is half of the smallest subnormal, f (fp16: 2^-25), at a scale at which the
//     largest P is at least 1: a_j = max(u w_j, f max_i w_i);
//   - by the rounding of the scaled score to fp32: at most b_j = 2^-24 |s_j| w_j. (|s_j| counts up
//     to 2^14. Products beyond that add up exactly in all inputs, and a kernel must keep them so.)
//   - by the rest of fp32's roundings: e_j = 2^-23 (d + N / 16) w_j for N keys. Of it, d is for
//     q . k, the power (two units) and the sum of P; N / 16 for P V, whose sum a tensor core cuts
//     off once for every 16 keys.
//
// The error of o before its own rounding is then x = sum_j x_j, |x_j| <= (a_j + b_j + e_j) |v_j|.
// That sum is the most that it can be. Most often it is far less:
//
//   - v_j has a random sign, in all inputs, which w_j and its error know nothing of. So x is a sum of
//     bounded terms with random signs, and by Hoeffding's lemma E e^(t x) <= e^(t^2 c^2 / 2) with
//     c^2 = sum_j (the bound of x_j)^2.
//   - The errors a_j and b_j are spread evenly between their bounds; for such, Hoeffding's lemma
//     holds with a third of the square. Not so where keys are rounded alike, all with an error at the
//     bound: so keys count fully that have another key's weight, but for one part in 2^11, or
//     more than half of all weight.
//
//         c^2 = sum_j v_j^2 ((a_j^2 + b_j^2) r_j + e_j^2),   r_j = 1 or 1/3
//
// Of each element: P(|x| > t) <= 2 e^(-t^2 / (2 c^2)). Of n elements none is beyond its t with a
// probability of at least 1 - F if t = c sqrt(2 ln(2 n / F)). O is rounded once, by h at most (half a
// unit in the last place of the largest number that o can become):
//
//         |error| <= min(t, sum_j (a_j + b_j + e_j) |v_j|) + h
//
// For the mean square of all errors: an element's error is e^(...) bounded as above by c^2 + h^2 / 3.
// Columns of V are independent, rows that share a column of V are not. With B the sums of c^2 + h^2 / 3
// over the rows of one column, L = ln(1 / F) (Laurent and Massart 2000, lemma 1; for sums such as ours
// Hsu, Kakade and Zhang 2012; rows that depend on each other: by the convexity of e^x):
//
//         sum of squares <= sum B + 2 sqrt(L sum B^2) + 2 L max B
//
// F is 5e-7 for each of the two: a right kernel fails in less than one run of a million.
#pragma once

#include <vector>

#include "reference/attention.h"

namespace reference {

/// The comparison of an output with the reference, over all elements of the rows compared.
struct Verdict {
  double rms_error = 0, rms_bound = 0;
  std::size_t not_finite = 0;  // elements
  // The element with the largest error for its bound, or the first that is not finite.
  Place worst{0, 0, 0};
  int worst_column = 0;
  double worst_output = 0, worst_expected = 0;
  double max_error = 0, max_bound = 0;

  /// Never true for an output with a NaN: every comparison with NaN is false, so errors are asked
  /// to be within the bound, not whether they are beyond it.
  bool passed() const {
    return not_finite == 0 && rms_error <= rms_bound && max_error <= max_bound;
  }
};

/// Compares rows of an output, [batch, heads, seqlen_q, head_dim], with the reference.
Verdict judge(const Inputs &inputs, const std::vector<std::uint16_t> &O,
              const std::vector<Place> &places);

/// All rows, where that takes about a second; else 256 rows drawn with this seed, and the first and
/// last rows of the first, second and last tiles of the first and last head of the first and last
/// element of the batch.
std::vector<Place> places_to_check(const Shape &shape, int tile, unsigned long seed);

}  // namespace reference
