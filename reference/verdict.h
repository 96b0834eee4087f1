// SPDX-License-Identifier: MIT
// Is an output right? It may differ from the reference by what rounding explains, and no more.
//
// The idea is that of FlashAttention's own tests (tests/test_flash_attn.py): rounding P and O to the
// element type costs an error that no kernel can avoid. There, attention is computed once with these
// two roundings, and a kernel may be twice as wrong as that. But the largest of some thousand errors
// is a matter of luck, and a right kernel rounds other numbers: it may hold P relative to a maximum
// that lags behind. So here the bound of each element is derived from the roundings.
//
// An element is o = sum_j w_j v_j: weights w_j > 0, which come from Q and K alone, and values v_j.
// Let u be half a unit in the last place of 1 (fp16: 2^-11, bf16: 2^-8) and f half of the smallest
// subnormal (fp16: 2^-25, bf16: 2^-134). A kernel's weights differ from w_j
//
//   - by the rounding of P: at most a_j = max(u w_j, f max_i w_i). We do not know the scale at which
//     a kernel rounds P, only that its largest P is at least 1 there;
//   - by the rounding of the scaled score to fp32: at most b_j = 2^-24 |s_j| w_j. (Of |s_j| up to
//     2^14 counts: the scores of `huge` are larger, but such that fp32 holds them exactly);
//   - by the rest of fp32's roundings: e_j = 2^-23 (d + N / 16) w_j, with N keys. Of it, d is for
//     q . k, the power (two units in the last place) and l; N / 16 is for P V, where a tensor core
//     cuts off its sum once for every 16 keys. (A model, not the worst case: rounded sums of n terms
//     err by sqrt(n) units rather than by n; Higham and Mary 2019.) And
//     min(w_j, 2^-118 max_i w_i): a power below fp32's smallest normal number, 2^-126, is 0 (PTX ISA,
//     ex2.approx.ftz), and so is a factor below it by which a P of up to 2^8 is rescaled.
//
// In fp8 P is e4m3 (u = 2^-4, f = 2^-10) and O bf16. An element of Q, K or V is its code times its head's
// scale. And the tensor cores add less exactly: one wgmma aligns its 32 products and the sum so far to
// the largest of these 33 exponents, cuts each off 13 bits below that, and the new sum off to 13 bits of
// mantissa, all toward zero (MMA-Sim, Xie et al. 2025, arXiv 2511.10909, bit by bit as an H100 does; the
// "14 bits" of DeepSeek-V3's report, section 3.3.2, and the FP22 of SageAttention2, section 3.2). So e_j
// has two terms more, by the same model of rounded sums:
//
//   - P V: 2^-13 N / 32 w_j, once for every 32 keys. (The sum so far is cut off toward zero each time,
//     so these errors add up. Those of the 32 products have the signs of V, and do not.)
//   - Q K^T: a score is off by 2^-13 sqrt(33 d / 32) g_j / sqrt(d), with g_j the largest of its products
//     and of its sums of the first 32, 64 ... of them: d / 32 times 33 terms are cut off.
//
// A kernel whose P stays in fp32 errs less. The error of o before its own rounding is x = sum_j x_j
// with |x_j| <= (a_j + b_j + e_j) |v_j|, and mostly far less than the sum of these:
//
//   - All inputs give each v_j a random sign, of which the weights and their errors know nothing. So
//     x is a sum of bounded terms with random signs: by Hoeffding's lemma the mean of e^(t x) is at
//     most e^(t^2 c^2 / 2), with c^2 the sum of the squared bounds.
//   - Errors of rounding are spread evenly between their bounds, for which the same holds with a
//     third of the square. That is not so where many keys are rounded alike or one is most of the
//     sum: then all of the error may be at its bound. So a key counts fully if another one has its
//     weight, but for one part in 2^11, or if it has more than half of all weight.
//
//         c^2 = sum_j v_j^2 (r_j (a_j^2 + b_j^2) + e_j^2),   r_j = 1 or 1/3
//
// Then |x| > t has a probability of at most 2 e^(-t^2 / (2 c^2)), and that one of n elements is
// beyond its t, of at most F if t = c sqrt(2 ln(2 n / F)). O is rounded once, by at most h, half a
// unit in the last place of |o| + t:
//
//         |error| <= min(t, sum_j (a_j + b_j + e_j) |v_j|) + h
//
// The mean square of all errors has less luck in it. An error is bounded as x is, with c^2 + h^2 / 3.
// The columns of V are independent of each other; the outputs that share one are not. Let B be the
// sum of c^2 + h^2 / 3 over the outputs that share a column, and L = ln(1 / F):
//
//         sum of squared errors <= sum B + 2 sqrt(L sum B^2) + 2 L max B
//
// but for a probability of F (Laurent and Massart 2000, lemma 1; Hsu, Kakade and Zhang 2012 for
// errors that are only bounded so; within a column by the convexity of e^x).
//
// The slope, sum(error o) / sum(o o), says by which factor all of the output is too large: much less than the
// errors, which cancel in it. What right kernels may have:
//
//   - P's rounding is a function of P and of the scale at which it is rounded. For 16 scales from 1 to 2 we
//     compute what it adds to the sum of error o in each row: sum_j (round(P_j) - P_j) v_j . o. If the scale
//     differs from row to row, as where the maximum lags, the rows are independent, and their mean squares
//     add up to a part of c^2. If all rows have the same, each row's largest P, which is 1, is rounded alike:
//     then the sum over all rows is at most 2.5 times its root mean square over the scales. (Of one number
//     between two it is sqrt(3) times; each tile that raises the maximum has another.)
//   - The rounding of O adds h^2 o^2 / 3 to c^2. But outputs that lie at the same place between two numbers of
//     the type, to 1 part in 1024, may be rounded alike, as those of equal keys: their h |o| are added first.
//   - The rotation adds at most R sum_k o_k^2 of the row.
//   - What tensor cores cut off toward zero makes all sums smaller. So e_j but for its last part counts in
//     full: 2^-23 (d + N / 16), and in fp8 2^-13 N / 32, of the row's sum(o o); and the errors of the scores
//     sum_j (b_j + ...) |v_j . o|.
//
//         |slope| sum(o o) <= 2.5 rms + systematic + c sqrt(2 ln(2 / F))
//
// At 256 rows of 128 keys this is 0.02% for fp16, 0.16% for bf16 and 2.5% for fp8, whose P has 4 bits; a
// smaller factor cannot be told from P rounded at an unlucky scale.
//
// F is a third of 1e-6 for each of the three: a right kernel fails in less than one run of a million.
// (`make check-bound` tries it: 500 runs of each of the steps 00 to 09 and 2,000 of each from 10 to 15
// came to 0.76 of an element's bound at worst, in steps 05 and 06, and 14 and 15 to 0.63.)
//
// With rotary embedding a kernel rounds what it has rotated, too: the elements of q and of the keys
// that it rotates itself (those of a cache come as they are). An element x' of a pair (x', y') is
// off by at most
//
//     h(x') = max(u |x'|, f) + 2^-23 (|x'| + |y'|)
//
// where the second term is fp32's part: two products, a sum, each rounded. To first order the
// output moves by these errors times its derivatives,
//
//     do/dq_c = 1/sqrt(d) sum_j w_j (v_j - o) k_jc        do/dk_jc = 1/sqrt(d) w_j (v_j - o) q_c
//
// The errors are spread evenly and independent of each other (every pair turns by another angle), so
// they add a third of their squared bounds to c^2, and all of them to the sum of absolute values:
//
//     r^2 = 1/3 (sum_c (h(q_c) do/dq_c)^2 + sum_jc (h(k_jc) do/dk_jc)^2)
//
// All columns of a row share these errors, so r^2 is no part of B. Let R be the sum of r^2 over a
// row. The root of the mean square of what they add is bounded like that of B, with R in its place
// and once more F (now less than two runs of a million); the two roots add up.
//
// Where a model changes the scores, their errors change:
//
//   - With a scale of the caller's, the error of q . k grows with it: e_j has d max(1, scale sqrt(d)) in place
//     of d. And the scores are the caller's: b_j counts |s_j| beyond 2^14, too.
//   - A soft cap is off by what tanh.approx.f32 is, at most 2^-11 of its value (PTX ISA 'tanh'): the score by
//     2^-11 |cap tanh(s / cap)|, which is added to e_j as the errors of fp8's scores are. What s is off by
//     grows no larger, because tanh is nowhere steeper than 1.
//   - ALiBi's bias is a product of a rounded slope, and is added to the score: b_j has |s_j| + 3 |bias_j|.
//   - A sink is a key whose value is 0. Its weight counts among the w_i of which the largest is meant.
//
// The log-sum-exp, ln(sum_j e^(s_j)), is compared where the step stores it, row by row. A kernel has it from
// l, the sum of powers of two that are relative to m, as (m + log2 l) ln 2. In units of 2^-24 it is off by at
// most the sum of
//
//   - sum_j w_j (d + 4) A_j, from the scores: A_j is the largest of the products that q . k_j adds up, and of
//     its sums of the first 32, 64 ... of them, times the scale. d roundings of the sum, and 4 of the scale
//     and of its product with the score. (A tensor core rounds toward zero, and errs less: 10.5 of these units
//     for each 16 products, by MMA-Sim's account of an H100.) To it come the errors of the soft cap and of the
//     bias above, 4 |bias_j| in place of 3;
//   - 16 + n + t sqrt(N), from l: a sum of N powers. The powers are off by two units in the last place, 4 of
//     ours, and so are the factors by which l is rescaled. A sum of N terms is off by one half of its last
//     place N times at most. These roundings are independent but where powers are equal: n is the number of
//     keys that share their power with another key, but for one part in 2^20, and t the number of standard
//     deviations for F, as above;
//   - 2^24 times the weight of all keys whose weight is less than 2^-22: l may lose these altogether;
//   - 4 max(1, |log2 l|), from lg2.approx: 2^-22 of the result or, between 1/2 and 2, of 1 (PTX ISA 'lg2').
//     logf is better. l is at most 2^8 times as large as relative to the row's maximum, so |log2 l| is at most
//     L = 8 + log2(N + 1);
//   - 3 (|log-sum-exp| + L), from the last product and sum.
//
// With rotary embedding each score is off by scale (sum_c h(q_c) |k_jc| + h(k_jc) |q_c|), too.
// A right row passes for certain but for the sum's t: all rows do but for a run in three million.
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "reference/attention.h"

namespace reference {

/// The comparison of an output with the reference, over all elements of the rows compared.
struct Verdict {
  double rms_error = 0, rms_bound = 0;
  double rms_expected = 0;  // of the reference itself
  double slope = 0, slope_bound = 0;
  std::size_t not_finite = 0;  // elements
  // The element with the largest error for its bound, or the first that is not finite.
  Place worst{0, 0, 0};
  int worst_column = 0;
  double worst_output = 0, worst_expected = 0;
  double max_error = 0, max_bound = 0;
  // Of the log-sum-exp, where it was compared: the row with the largest error for its bound.
  Place lse_worst{0, 0, 0};
  double lse = 0, lse_expected = 0, lse_error = 0, lse_bound = 0;

  /// Never true for an output with a NaN: every comparison with NaN is false, so errors are asked
  /// to be within the bound, not whether they are beyond it.
  bool o_passed() const {
    return not_finite == 0 && rms_error <= rms_bound && max_error <= max_bound &&
           std::abs(slope) <= slope_bound;
  }
  bool lse_passed() const { return lse_error <= lse_bound; }
  bool passed() const { return o_passed() && lse_passed(); }
};

/// Compares rows of an output, [batch, heads, seqlen_q, head_dim], with the reference; and their log-sum-exp,
/// [batch, heads, seqlen_q], if there is one.
Verdict judge(const Inputs &inputs, const Elements &O, const std::vector<Place> &places,
              std::span<const float> lse = {});

/// What is wrong with a cache of keys or of values after the kernel stored the new ones in it.
struct CacheVerdict {
  std::size_t wrong = 0;  // elements
  // The first of them.
  Place place{0, 0, 0};
  int column = 0;
  double is = 0, should_be = 0;
};

/// Compares the rows of a cache, [batch, kv_heads, seqlen_k, head_dim], with those of inputs.K or of
/// inputs.V, bit by bit. A key that the kernel has rotated must be what some number is rounded to that
/// fp32's part of h, above, allows.
CacheVerdict judge_cache(const Inputs &inputs, const Elements &cache, bool keys);

/// All rows, where that takes about a second; else 256 rows drawn with this seed, and the first and
/// last rows of the first, second and last tiles of the first and last head of the first and last
/// element of the batch.
std::vector<Place> places_to_check(const Shape &shape, int tile, unsigned long seed);

}  // namespace reference
