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
#pragma once

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
///   - P is rounded to the type: a = max(u P, f). It may be so before dS is computed from it, too.
///   - The exponent s - lse is rounded: s and lse are each multiplied by a rounded constant, and their
///     difference is rounded, so it is off by x = 2^-24 (2 |s| + 3 |lse|), and by fp32's part of q . k, of
///     the power and of a softmax's sum, 2^-23 (d + N / 16): P is off by x P, and by P if that is below
///     2^-118.
///   - dP = do . v is a sum of d products in fp32: E = 2^-23 (d / 16 + 2) |do| |v|.
///   - D is one, too, and all keys share its error: at most 2^-24 d sum_k |do_k o_k|.
///   - dS = P (dP - D) is rounded to the type: r = max(u |dS|, f). (Before it is divided by sqrt(d).)
///   - The sum is in fp32: 2^-23 n / 8 of each term, half of it for tensor cores, which cut off once for
///     16 terms, and half for sums that several blocks add to, in any order.
///
/// Of each term of the sum these errors have random signs, and those of the two roundings to the type are
/// spread evenly: by Hoeffding's lemma they add to c^2 as in verdict.h. What all terms of a row of dQ
/// share, the error of D and that of lse, is added to the bound in full. So is h^2 of a gradient that is
/// subnormal: such numbers have few places between two of the type's, and may be rounded alike.
Verdict judge_gradient(const Inputs &inputs, const Forward &forward, Gradient of,
                       const Elements &gradient, const std::vector<Place> &places);

/// The rows of a gradient to check, as places_to_check draws those of an output.
std::vector<Place> places_of_gradient(const Shape &shape, Gradient of, int tile,
                                      unsigned long seed);

}  // namespace reference
