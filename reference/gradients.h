// SPDX-License-Identifier: MIT
// The gradients of attention, by their definition.
//
// Training asks how a number, the loss, changes when an element of Q, K or V changes a little. The
// layers after attention have answered the same for its output: dO, the derivative of the loss with
// respect to each element of O. The chain rule leads from dO back through each line of attention.h:
//
//     o = sum_j p_j v_j           dv_j = sum over the queries of p_j do
//                                 dp_j = do . v_j
//     p = softmax(s)              ds_j = p_j (dp_j - sum_i p_i dp_i)
//     s_j = (q . k_j) / sqrt(d)   dq   = sum over the keys of ds_j k_j / sqrt(d)
//                                 dk_j = sum over the queries of ds_j q / sqrt(d)
//
// dv_j means: the derivative of the loss with respect to v_j. The third line on the right is the
// softmax's: p_j grows with s_j by p_j (1 - p_j), and falls with every other s_i by p_j p_i. Its sum is
// one number for each query, D, and the output has it already:
//
//     D = sum_i p_i dp_i = sum_i p_i (do . v_i) = do . o
//
// The forward pass leaves O, and for each query the log-sum-exp, lse = ln sum_i e^(s_i). With it p_j is
// e^(s_j - lse), which needs no other key. The gradients here are those of the O and the lse that are
// given, rounded as they are: a kernel gets no others.
//
// What a model does to a score has a derivative, too. A soft cap, c tanh(s / c), has the slope g = 1 - tanh^2(s / c):
//
//     ds_j = g_j p_j (dp_j - D)
//
// ALiBi adds a number to the score, which changes p_j alone. (Its slopes are not learned.) A sink is a key whose value is
// 0, so its dp is 0. The logit is of a head, and all queries of all sequences add to its derivative:
//
//     p = e^(sink - lse)          dsink = - sum over the queries of p D
#pragma once

#include <span>
#include <vector>

#include "reference/attention.h"
#include "reference/verdict.h"

namespace reference {

/// What a forward pass leaves for the backward pass.
struct Forward {
  Elements O;              // [batch, heads, seqlen_q, head_dim]
  std::vector<float> lse;  // [batch, heads, seqlen_q]
};

/// By the definition, rounded to the type and to fp32.
Forward forward_pass(const Inputs &inputs);

enum class Gradient { kQ, kK, kV };
constexpr Gradient kGradients[] = {Gradient::kQ, Gradient::kK, Gradient::kV};

/// One row of a gradient. Of dK and dV `place.head` is a head of K and V, and `place.row` a key.
std::vector<double> gradient_row(const Inputs &inputs, const Forward &forward, Gradient of,
                                 Place place);

/// Compares rows of a gradient with the reference. The bound of an element is derived as verdict.h does it,
/// from these roundings (u, f and fp32's 2^-24 as there, n terms in the sum, of all heads of a group, N keys):
///
///   - P is rounded to the type: a = max(u P, f). It may be so before dS is computed from it, too. With a soft cap,
///     what is rounded before dS is w = g P: a = max(u w, f).
///   - The exponent s - lse is rounded: s and lse are each multiplied by a rounded constant, and their
///     difference is rounded, so it is off by x = 2^-24 (2 |s| + 3 |lse|), and by fp32's part of q . k, of
///     the power and of a softmax's sum, 2^-23 (d + N / 16): P is off by (e^x - 1) P, and by P if that is below
///     2^-118. (Of |s| at most 2^14 counts, so the bound is stricter for larger scores.) With ALiBi lse is first added to the bias, a distance times a slope that is rounded twice, and the
///     score then: x has 2^-24 (4 |bias| + |lse|) more. Here s is without the bias.
///   - With a soft cap s is capped. It is off by what tanh.approx.f32 is, 2^-11 |s| (PTX ISA, 'tanh'), and by the
///     roundings of tanh's argument y, two of |y|: 2^-23 |s|, because y / cosh^2 y is no more than tanh y. Both are
///     added to x.
///   - g = 1 - t^2 is off by 2^-10 t^2 for tanh's 2^-11, squared 2^-22 more; by what the argument is off by, z =
///     2^-23 (|y| + d / c) for its roundings and those of q . k: 1 / cosh^2 changes by at most e^(2 z) - 1 times
///     itself; and by two roundings, 2^-23. The error of P and that of g come from one tanh, so they are added
///     before they are squared: w is off by what P is times g, and by G (P and its error) for g's G.
///   - dP = do . v is a sum of d products in fp32: E = 2^-23 (d / 16 + 2) |do| |v|.
///   - D is one, too, and all keys share its error: at most 2^-24 d sum_k |do_k o_k|.
///   - dS = w (dP - D) is rounded to the type: r = max(u |dS|, f). (Before it is divided by sqrt(d).)
///   - The sum is in fp32: 2^-23 n / 8 of each term, half of it for tensor cores, which cut off once for
///     16 terms, and half for sums that several blocks add to, in any order.
///
/// Of each term of the sum these errors have random signs, and those of the two roundings to the type are
/// spread evenly: by Hoeffding's lemma they add to c^2 as in verdict.h. What all terms of a row of dQ
/// share, the error of D and that of lse, is added to the bound in full. So is h^2 of a gradient that is
/// subnormal: such numbers have few places between two of the type's, and may be rounded alike.
Verdict judge_gradient(const Inputs &inputs, const Forward &forward, Gradient of,
                       const Elements &gradient, const std::vector<Place> &places);

/// The derivatives of the loss with respect to the sinks' logits, [heads].
std::vector<double> sink_gradients(const Inputs &inputs, const Forward &forward);

/// The head whose derivative has the largest error for its bound.
struct SinkVerdict {
  int head = 0;
  double value = 0, expected = 0, error = 0, bound = 0;

  /// As in Verdict: NaN never passes.
  bool passed() const { return error <= bound; }
};

/// Compares the sinks' gradient, [heads], with the reference. Of each query's term p D:
///
///   - D is off by 2^-24 d sum_k |do_k o_k|, as above;
///   - the exponent is off by x = 2^-24 (3 |sink| + 3 |lse|): each is multiplied by a rounded constant, and their
///     difference is rounded; the power by two units in its last place, 2^-22; and the product by 2^-24. A p below
///     2^-126 is 0.
///
/// D has a random sign, because dO has. So these errors add up as in Verdict: their squares are summed to c^2. The n terms
/// are added in fp32, in any order. Each addition is rounded by at most 2^-24 of the sum S of all |p D|, and has a
/// random sign, too: n (2^-24 S)^2. The bound is c sqrt(2 ln(2 heads / F)), and at most the sum of all errors.
SinkVerdict judge_sink_gradients(const Inputs &inputs, const Forward &forward,
                                 std::span<const float> gradient);

/// The rows of a gradient to check, as places_to_check draws those of an output.
std::vector<Place> places_of_gradient(const Shape &shape, Gradient of, int tile,
                                      unsigned long seed);

}  // namespace reference
