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
  double argument = 0;         // of the soft cap's tanh; 0: there is no soft cap
  double score = 0, bias = 0;  // capped; ALiBi's
  double lse = 0, P = 0;
  double slope = 1;   // g: the derivative of the capped score with respect to the score
  double weight = 0;  // g P
  double dP_minus_D = 0, dS = 0;
};

double lse_of(const Shape &shape, const Forward &forward, int batch, int head, int query) {
  return forward.lse[(std::size_t(batch) * shape.heads + head) * shape.seqlen_q + query];
}

Meeting meet(const Inputs &inputs, const Forward &forward, const Head &head, int query, int key) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  const std::size_t i = std::size_t(query) * d, j = std::size_t(key) * d;
  Meeting meeting{.query = query, .key = key};
  meeting.score = dot(&head.Q[i], &head.K[j], d) * shape.softmax_scale();
  if (const double cap = shape.softcap; cap > 0) {
    meeting.argument = meeting.score / cap;
    const double t = std::tanh(meeting.argument);
    meeting.score = cap * t;
    meeting.slope = 1 - t * t;
  }
  if (shape.alibi)
    meeting.bias =
        -double{inputs.slopes[head.head]} * std::abs(position_of(shape, head.batch, query) - key);
  meeting.lse = lse_of(shape, forward, head.batch, head.head, query);
  meeting.P = std::exp(meeting.score + meeting.bias - meeting.lse);
  meeting.weight = meeting.slope * meeting.P;
  meeting.dP_minus_D = dot(&head.dO[i], &head.V[j], d) - head.D[query];
  meeting.dS = meeting.weight * meeting.dP_minus_D;
  return meeting;
}

/// What fp32 and tanh.approx may make of P and of g P: the largest errors. `of_lse` is the part of the exponent's that
/// all keys of a query share.
struct WeightErrors {
  double of_lse, P, weight;
};

WeightErrors weight_errors(const Shape &shape, const Meeting &meeting, int keys) {
  const int d = shape.head_dim;
  const double score = std::abs(meeting.score), lse = std::abs(meeting.lse);
  const double of_lse =
      0x1p-24 * (shape.alibi ? 4 : 3) * lse + 0x1p-23 * (d + static_cast<double>(keys) / 16);
  double x = 0x1p-23 * std::min(score, 0x1p14) + 0x1p-22 * std::abs(meeting.bias) + of_lse;
  if (shape.softcap > 0) x += (0x1p-11 + 0x1p-23) * score;
  const double of_P = std::expm1(x) * meeting.P + std::min(meeting.P, 0x1p-118);
  if (shape.softcap == 0) return {of_lse, of_P, of_P};
  const double z = 0x1p-23 * (std::abs(meeting.argument) + d / double{shape.softcap});
  const double G =
      (0x1p-10 + 0x1p-22) * (1 - meeting.slope) + meeting.slope * std::expm1(2 * z) + 0x1p-23;
  return {of_lse, of_P, of_P * meeting.slope + G * (meeting.P + of_P)};
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
  const auto weight_of = [of](const Meeting &meeting) {  // what is rounded to the type
    return of == Gradient::kV ? meeting.P : meeting.weight;
  };
  const std::vector<bool> weight_fully = fully(weight_of);
  const std::vector<bool> dS_fully = fully([](const Meeting &meeting) { return meeting.dS; });
  double common = 0;
  std::vector<double> wK(d);
  for (std::size_t i = 0; i < meetings.size(); i++) {
    const Meeting &meeting = meetings[i];
    const double *const factor = of == Gradient::kQ   ? &head.K[std::size_t(meeting.key) * d]
                                 : of == Gradient::kK ? &head.Q[std::size_t(meeting.query) * d]
                                                      : &head.dO[std::size_t(meeting.query) * d];
    const double scale = of == Gradient::kV ? 1 : shape.softmax_scale();
    const double term = of == Gradient::kV ? meeting.P : meeting.dS;
    const double a = std::max(rounding.u * weight_of(meeting), rounding.f);
    const WeightErrors errors = weight_errors(shape, meeting, shape.length_k(head.batch));
    const double sum = 0x1p-23 * n / 8 * std::abs(term);
    double squares, magnitude;
    if (of == Gradient::kV) {
      const double b = errors.P;
      squares = a * a * (weight_fully[i] ? 1 : 1 / 3.0) + b * b + sum * sum;
      magnitude = a + b + sum;
    } else {
      const double b = errors.weight, by = std::abs(meeting.dP_minus_D),
                   r = std::max(rounding.u * std::abs(term), rounding.f);
      const double *const v = &head.V[std::size_t(meeting.key) * d];
      const double *const dO = &head.dO[std::size_t(meeting.query) * d];
      const double norms = std::sqrt(dot(dO, dO, d) * dot(v, v, d));  // |do| |v|
      const double E = 0x1p-23 * (d / 16.0 + 2) * norms * meeting.weight;
      const double of_D = head.D_error[meeting.query] * meeting.weight;
      squares = a * by * a * by * (weight_fully[i] ? 1 : 1 / 3.0) +
                r * r * (dS_fully[i] ? 1 : 1 / 3.0) + b * by * b * by + E * E + sum * sum;
      magnitude = (a + b) * by + r + E + sum + of_D;
      if (of == Gradient::kK) {
        squares += of_D * of_D;
      } else {
        add(wK.data(), meeting.weight, factor, d);
        common = errors.of_lse;
      }
    }
    add(row.expected.data(), term * scale, factor, d);
    add_squares(row.c_squared.data(), squares * scale * scale, factor, d);
    add_magnitudes(row.at_most.data(), magnitude * scale, factor, d);
  }
  if (of == Gradient::kQ)
    for (int k = 0; k < d; k++)
      row.common[k] = head.D_error[number] * std::abs(wK[k]) * shape.softmax_scale() +
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

namespace {

/// D of a query, and by how much fp32 may be off.
struct OfQuery {
  double D, error;
};
OfQuery D_of(const Inputs &inputs, const Forward &forward, std::size_t query) {
  const auto d = static_cast<std::size_t>(inputs.shape.head_dim);
  double sum = 0, magnitudes = 0;
  for (std::size_t k = query * d; k < query * d + d; k++) {
    const double term = double{element_to_float(inputs.type, inputs.dO[k])} *
                        element_to_float(inputs.type, forward.O[k]);
    sum += term, magnitudes += std::abs(term);
  }
  return {sum, 0x1p-24 * static_cast<double>(d) * magnitudes};
}

}  // namespace

SinkVerdict judge_sink_gradients(const Inputs &inputs, const Forward &forward,
                                 std::span<const float> gradient) {
  const Shape &shape = inputs.shape;
  const double deviations = std::sqrt(2 * std::log(2 * shape.heads / kFailureOfARightKernel));
  std::vector<SinkVerdict> heads(shape.heads);
  parallel_for(heads.size(), [&](std::size_t h) {
    SinkVerdict &verdict = heads[h];
    verdict.head = static_cast<int>(h);
    const double sink = inputs.sink_logits[h];
    double n = 0, sum = 0, squares = 0, at_most = 0;
    for (int b = 0; b < shape.batch; b++)
      for (int i = 0; i < shape.length_q(b); i++, n++) {
        const double lse = lse_of(shape, forward, b, verdict.head, i);
        const double p = std::exp(sink - lse);
        const auto [D, D_error] =
            D_of(inputs, forward, (std::size_t(b) * shape.heads + h) * shape.seqlen_q + i);
        const double x = 0x1p-24 * 3 * (std::abs(sink) + std::abs(lse)) + 0x1p-22 + 0x1p-24;
        const double error =
            p * D_error + (std::expm1(x) * p + std::min(p, 0x1p-126)) * (std::abs(D) + D_error);
        verdict.expected -= p * D;
        sum += std::abs(p * D);
        squares += error * error;
        at_most += error;
      }
    const double of_sum = 0x1p-24 * sum;
    verdict.bound =
        std::min(deviations * std::sqrt(squares + n * of_sum * of_sum), at_most + n * of_sum);
    verdict.value = gradient[h];
    verdict.error = std::abs(verdict.value - verdict.expected);
  });
  const auto worse = [](const SinkVerdict &a, const SinkVerdict &b) {
    if (!a.passed() || !b.passed()) return a.passed() && !b.passed();
    return a.error * b.bound < b.error * a.bound;
  };
  return *std::max_element(heads.begin(), heads.end(), worse);
}

std::vector<double> sink_gradients(const Inputs &inputs, const Forward &forward) {
  const Shape &shape = inputs.shape;
  std::vector<double> gradient(shape.heads);
  for (int b = 0; b < shape.batch; b++)
    for (int h = 0; h < shape.heads; h++)
      for (int i = 0; i < shape.length_q(b); i++)
        gradient[h] -=
            std::exp(inputs.sink_logits[h] - lse_of(shape, forward, b, h, i)) *
            D_of(inputs, forward, (std::size_t(b) * shape.heads + h) * shape.seqlen_q + i).D;
  return gradient;
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
