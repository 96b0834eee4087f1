// SPDX-License-Identifier: MIT
#include "reference/gradients.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "reference/bounds.h"
#include "reference/parallel.h"

namespace reference {
namespace {

using Numbers = std::vector<double, Unset<double>>;

/// Some rows of a tensor as numbers.
Numbers numbers(Type type, const Elements &elements, std::size_t first, std::size_t count) {
  Numbers values(count);
  for (std::size_t i = 0; i < count; i++) values[i] = element_to_float(type, elements[first + i]);
  return values;
}

FOR_WIDE_VECTORS double dot(const double *a, const double *b, int d) {
  double sums[8] = {}, sum = 0;
  int k = 0;
  for (; k + 8 <= d; k += 8)
    for (int i = 0; i < 8; i++) sums[i] += a[k + i] * b[k + i];
  for (; k < d; k++) sum += a[k] * b[k];
  for (const double part : sums) sum += part;
  return sum;
}

FOR_WIDE_VECTORS void add(double *to, double factor, const double *row, int d) {
  for (int k = 0; k < d; k++) to[k] += factor * row[k];
}

FOR_WIDE_VECTORS void add_squares(double *to, double factor, const double *row, int d) {
  for (int k = 0; k < d; k++) to[k] += factor * row[k] * row[k];
}

FOR_WIDE_VECTORS void add_magnitudes(double *to, double factor, const double *row, int d) {
  for (int k = 0; k < d; k++) to[k] += factor * std::abs(row[k]);
}

/// The queries of a head, and the keys that it sees.
struct Head {
  int batch, head;
  Numbers Q, dO, O;                // [seqlen_q, head_dim]
  Numbers K, V;                    // [seqlen_k, head_dim]
  std::vector<double> D, D_error;  // by query: D, and what fp32 may add to it
};

Head head_of(const Inputs &inputs, const Forward &forward, int batch, int head) {
  const Shape &shape = inputs.shape;
  const auto d = static_cast<std::size_t>(shape.head_dim);
  const std::size_t of_Q = shape.seqlen_q * d, of_K = shape.seqlen_k * d;
  const std::size_t Q = (std::size_t(batch) * shape.heads + head) * of_Q;
  const std::size_t K = first_key(shape, {batch, head, 0}) * d;
  Head all{batch,
           head,
           numbers(inputs.type, inputs.Q, Q, of_Q),
           numbers(inputs.type, inputs.dO, Q, of_Q),
           numbers(inputs.type, forward.O, Q, of_Q),
           numbers(inputs.type, inputs.K, K, of_K),
           numbers(inputs.type, inputs.V, K, of_K),
           {},
           {}};
  for (int i = 0; i < shape.seqlen_q; i++) {
    const double *const dO = &all.dO[i * d], *const O = &all.O[i * d];
    double magnitudes = 0;
    for (std::size_t k = 0; k < d; k++) magnitudes += std::abs(dO[k] * O[k]);
    all.D.push_back(dot(dO, O, shape.head_dim));
    all.D_error.push_back(0x1p-24 * static_cast<double>(d) * magnitudes);
  }
  return all;
}

/// A query and a key that it sees.
struct Meeting {
  int query, key;
  double score, lse, P, dP_minus_D, dS;
};

Meeting meet(const Inputs &inputs, const Forward &forward, const Head &head, int query, int key) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  const std::size_t i = std::size_t(query) * d, j = std::size_t(key) * d;
  const double score = dot(&head.Q[i], &head.K[j], d) * shape.softmax_scale();
  const double lse =
      forward.lse[(std::size_t(head.batch) * shape.heads + head.head) * shape.seqlen_q + query];
  const double P = std::exp(score - lse);
  const double dP_minus_D = dot(&head.dO[i], &head.V[j], d) - head.D[query];
  return {query, key, score, lse, P, dP_minus_D, P * dP_minus_D};
}

/// A row of a gradient: what is right, and the bounds of its errors before its rounding.
struct GradientRow {
  std::vector<double> expected, c_squared, at_most;
  std::vector<double> common;  // of errors that all terms share
};

/// Adds what one head's queries and keys give the row.
void add_head(const Inputs &inputs, const Forward &forward, const Head &head, Gradient of,
              int number, GradientRow &row) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  std::vector<Meeting> meetings;
  if (of == Gradient::kQ) {
    const Keys keys = keys_seen(shape, head.batch, number);
    for (int i = 0; i < keys.count(); i++)
      meetings.push_back(meet(inputs, forward, head, number, keys[i]));
  } else {
    for (int i = 0; i < shape.length_q(head.batch); i++)
      if (sees(shape, head.batch, i, number))
        meetings.push_back(meet(inputs, forward, head, i, number));
  }
  if (meetings.empty()) return;

  const Rounding rounding = rounding_of(inputs.type);
  // The heads of a group add to the same row of dK and dV, as many terms each.
  const int heads = of == Gradient::kQ ? 1 : shape.heads / shape.kv_heads;
  const auto n = static_cast<double>(meetings.size()) * heads;
  const auto fully = [&](auto value) {
    std::vector<double> weights;
    double sum = 0;
    for (const Meeting &meeting : meetings) sum += weights.emplace_back(std::abs(value(meeting)));
    for (double &weight : weights) weight /= sum > 0 ? sum : 1;
    return keys_that_count_fully(weights);
  };
  const std::vector<bool> P_fully = fully([](const Meeting &meeting) { return meeting.P; });
  const std::vector<bool> dS_fully = fully([](const Meeting &meeting) { return meeting.dS; });
  double common = 0;
  std::vector<double> PK(d);
  for (std::size_t i = 0; i < meetings.size(); i++) {
    const Meeting &meeting = meetings[i];
    const double *const factor = of == Gradient::kQ   ? &head.K[std::size_t(meeting.key) * d]
                                 : of == Gradient::kK ? &head.Q[std::size_t(meeting.query) * d]
                                                      : &head.dO[std::size_t(meeting.query) * d];
    const double scale = of == Gradient::kV ? 1 : shape.softmax_scale();
    const double term = of == Gradient::kV ? meeting.P : meeting.dS;
    const double a = std::max(rounding.u * meeting.P, rounding.f);
    const double of_lse = 0x1p-24 * 3 * std::abs(meeting.lse) +
                          0x1p-23 * (d + static_cast<double>(shape.length_k(head.batch)) / 16);
    const double b = (0x1p-23 * std::min(std::abs(meeting.score), 0x1p14) + of_lse) * meeting.P +
                     std::min(meeting.P, 0x1p-118);
    const double sum = 0x1p-23 * n / 8 * std::abs(term);
    double squares, magnitude;
    if (of == Gradient::kV) {
      squares = a * a * (P_fully[i] ? 1 : 1 / 3.0) + b * b + sum * sum;
      magnitude = a + b + sum;
    } else {
      const double g = std::abs(meeting.dP_minus_D),
                   r = std::max(rounding.u * std::abs(term), rounding.f);
      const double *const v = &head.V[std::size_t(meeting.key) * d];
      const double *const dO = &head.dO[std::size_t(meeting.query) * d];
      const double norms = std::sqrt(dot(dO, dO, d) * dot(v, v, d));  // |do| |v|
      const double E = 0x1p-23 * (d / 16.0 + 2) * norms * meeting.P;
      const double of_D = head.D_error[meeting.query] * meeting.P;
      squares = a * g * a * g * (P_fully[i] ? 1 : 1 / 3.0) + r * r * (dS_fully[i] ? 1 : 1 / 3.0) +
                b * g * b * g + E * E + sum * sum;
      magnitude = (a + b) * g + r + E + sum + of_D;
      if (of == Gradient::kK) {
        squares += of_D * of_D;
      } else {
        add(PK.data(), meeting.P, factor, d);
        common = of_lse;
      }
    }
    add(row.expected.data(), term * scale, factor, d);
    add_squares(row.c_squared.data(), squares * scale * scale, factor, d);
    add_magnitudes(row.at_most.data(), magnitude * scale, factor, d);
  }
  if (of == Gradient::kQ)
    for (int k = 0; k < d; k++)
      row.common[k] = head.D_error[number] * std::abs(PK[k]) * shape.softmax_scale() +
                      common * std::abs(row.expected[k]);
}

/// The rows of the places, which are those of one head, or of one head of K and V.
std::vector<GradientRow> rows_of(const Inputs &inputs, const Forward &forward, Gradient of,
                                 const Place *first, std::size_t count) {
  const Shape &shape = inputs.shape;
  const auto d = static_cast<std::size_t>(shape.head_dim);
  const std::vector<double> zeros(d);
  std::vector<GradientRow> rows(count, {zeros, zeros, zeros, zeros});
  const int group = of == Gradient::kQ ? 1 : shape.heads / shape.kv_heads;
  for (int i = 0; i < group; i++) {
    const Head head = head_of(inputs, forward, first->batch, first->head * group + i);
    for (std::size_t row = 0; row < count; row++)
      add_head(inputs, forward, head, of, first[row].row, rows[row]);
  }
  return rows;
}

}  // namespace

Forward forward_pass(const Inputs &inputs) {
  const Shape &shape = inputs.shape;
  const auto d = static_cast<std::size_t>(shape.head_dim);
  const Type type = output_type(inputs.type);
  Forward forward;
  forward.lse.resize(std::size_t(shape.batch) * shape.heads * shape.seqlen_q);
  forward.O.resize(forward.lse.size() * d);
  parallel_for(std::size_t(shape.batch) * shape.heads, [&](std::size_t i) {
    const int batch = static_cast<int>(i) / shape.heads, head = static_cast<int>(i) % shape.heads;
    const KeyValues all = key_values(inputs, {batch, head, 0}, 0, shape.seqlen_k);
    for (int query = 0; query < shape.seqlen_q; query++) {
      const std::size_t at = i * shape.seqlen_q + query;
      const Row row = attention_row(inputs, all, {batch, head, query});
      forward.lse[at] = static_cast<float>(row.log_sum_exp);
      for (std::size_t k = 0; k < d; k++)
        forward.O[at * d + k] = type == Type::kFp16 ? double_to_half(row.output[k]).bits
                                                    : double_to_bf16(row.output[k]).bits;
    }
  });
  return forward;
}

std::vector<double> gradient_row(const Inputs &inputs, const Forward &forward, Gradient of,
                                 Place place) {
  return rows_of(inputs, forward, of, &place, 1)[0].expected;
}

Verdict judge_gradient(const Inputs &inputs, const Forward &forward, Gradient of,
                       const Elements &gradient, const std::vector<Place> &places) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  const int heads = of == Gradient::kQ ? shape.heads : shape.kv_heads;
  const int rows_of_head = of == Gradient::kQ ? shape.seqlen_q : shape.seqlen_k;
  std::vector<std::size_t> cuts;  // places of one head, at most 32
  for (std::size_t i = 0; i < places.size(); i++)
    if (i == 0 || i - cuts.back() == 32 || places[i].batch != places[i - 1].batch ||
        places[i].head != places[i - 1].head)
      cuts.push_back(i);
  cuts.push_back(places.size());
  std::vector<GradientRow> rows(places.size());
  parallel_for(cuts.size() - 1, [&](std::size_t cut) {
    const std::size_t first = cuts[cut];
    std::vector<GradientRow> some =
        rows_of(inputs, forward, of, &places[first], cuts[cut + 1] - first);
    std::move(some.begin(), some.end(), rows.begin() + static_cast<std::ptrdiff_t>(first));
  });

  const Rounding rounding = rounding_of(inputs.type);
  const double n = static_cast<double>(places.size()) * d;
  const double deviations = std::sqrt(2 * std::log(2 * n / kFailureOfARightKernel));
  Verdict verdict;
  double squares = 0, squares_expected = 0, squares_common = 0, worst_ratio = 0;
  std::vector<double> column_sums(static_cast<std::size_t>(shape.batch) * heads * d);
  for (std::size_t i = 0; i < places.size(); i++) {
    const Place &place = places[i];
    const std::size_t head = static_cast<std::size_t>(place.batch) * heads + place.head;
    for (int k = 0; k < d; k++) {
      const double expected = rows[i].expected[k], common = rows[i].common[k];
      const double value =
          element_to_float(inputs.type, gradient[(head * rows_of_head + place.row) * d + k]);
      const double error = std::abs(value - expected);
      const double before_rounding = std::min(deviations * std::sqrt(rows[i].c_squared[k]) + common,
                                              rows[i].at_most[k] + common);
      // What nothing adds to is 0.
      const double h =
          before_rounding == 0 ? 0 : rounding.half_ulp(std::abs(expected) + before_rounding);
      const double bound = before_rounding + h;
      squares += error * error;
      squares_expected += expected * expected;
      squares_common += common * common;
      column_sums[head * d + k] += rows[i].c_squared[k] + h * h / (h > rounding.f ? 3 : 1);
      const double ratio = error == 0 ? 0 : error / bound;
      const bool first_not_finite = !std::isfinite(value) && verdict.not_finite == 0;
      verdict.not_finite += !std::isfinite(value);
      if (first_not_finite || (verdict.not_finite == 0 && ratio > worst_ratio)) {
        worst_ratio = ratio;
        verdict.worst = place;
        verdict.worst_column = k;
        verdict.worst_output = value;
        verdict.worst_expected = expected;
        verdict.max_error = error;
        verdict.max_bound = bound;
      }
    }
  }
  verdict.rms_error = std::sqrt(squares / n);
  verdict.rms_expected = std::sqrt(squares_expected / n);
  verdict.rms_bound =
      std::sqrt(bound_of_mean_square(column_sums, n)) + std::sqrt(squares_common / n);
  return verdict;
}

std::vector<Place> places_of_gradient(const Shape &shape, Gradient of, int tile,
                                      unsigned long seed) {
  Shape rows = shape;
  if (of != Gradient::kQ) {
    rows.seqlen_q = shape.seqlen_k;
    rows.lengths_q = shape.lengths_k;
    rows.heads = shape.kv_heads;
  }
  return places_to_check(rows, tile, seed);
}

}  // namespace reference
