// SPDX-License-Identifier: MIT
#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "reference/parallel.h"

namespace reference {
namespace {

/// The scale of the head that a row belongs to, of heads of so many rows.
double scale_of(const std::vector<float> &scales, std::size_t row, int rows) {
  return scales.empty() ? 1 : scales[row / rows];
}

/// Sets a row's scaled products from one on, of keys that lie side by side.
FOR_WIDE_VECTORS void score(Row &row, const KeyValues &head, int from, int end, double scale) {
  const auto d = static_cast<int>(row.query.size());
  const std::size_t keys = head.K_columns.size() / d;
  in_columns(
      end - from, [&](auto width, int first) __attribute__((always_inline)) {
        const double *K = &head.K_columns[row.keys[from + first] - head.first];
        double s[width] = {};
        for (const double q : row.query) {
          for (int i = 0; i < width; i++) s[i] += q * K[i];
          K += keys;
        }
        for (int i = 0; i < width; i++) row.scaled[from + first + i] = s[i] * scale;
      });
}

/// Sets a row's output from its weights.
FOR_WIDE_VECTORS void average(Row &row, const KeyValues &head) {
  const auto d = static_cast<int>(row.output.size());
  in_columns(
      d, [&](auto width, int first) __attribute__((always_inline)) {
        double sum[width] = {};
        for (std::size_t j = 0; j < row.weights.size(); j++) {
          const std::size_t key = row.keys[static_cast<int>(j)] - head.first;
          const float *v = &head.V[key * d + first];
          for (int k = 0; k < width; k++) sum[k] += row.weights[j] * v[k];
        }
        std::copy_n(sum, int{width}, &row.output[first]);
      });
}

}  // namespace

int position_of(const Shape &shape, int batch, int query) {
  return shape.length_k(batch) - shape.length_q(batch) + query;
}

Keys keys_seen(const Shape &shape, int batch, int query) {
  if (query >= shape.length_q(batch)) return {0, 0};
  const int own = position_of(shape, batch, query);
  int end = shape.causal || shape.window ? std::max(0, own + 1) : shape.length_k(batch);
  if (shape.window_right >= 0)
    end = static_cast<int>(
        std::clamp<std::int64_t>(own + std::int64_t{1} + shape.window_right, 0, end));
  if (shape.window_left >= 0) {
    const int first = std::max(0, own - shape.window_left);
    return first < end ? Keys{first, end} : Keys{0, 0};
  }
  if (!shape.window || shape.window >= end) return {0, end};
  const int first = end - shape.window;
  return {first, end, std::min(shape.sinks, first)};
}

bool sees(const Shape &shape, int batch, int query, int key) {
  const Keys keys = keys_seen(shape, batch, query);
  return (keys.first <= key && key < keys.end) || (0 <= key && key < keys.sinks);
}

double visible_pairs(const Shape &shape) {
  double pairs = 0;
  for (int batch = 0; batch < shape.batch; batch++)
    for (int query = 0; query < shape.seqlen_q; query++)
      pairs += keys_seen(shape, batch, query).count();
  return pairs * shape.heads;
}

double keys_read(const Shape &shape) {
  double read = 0;
  for (int batch = 0; batch < shape.batch; batch++) {
    int end = 0;  // of what the queries before have seen: each sees as far as the one before
    for (int query = 0; query < shape.length_q(batch); query++) {
      const Keys keys = keys_seen(shape, batch, query);
      read += std::max(0, keys.end - std::max(keys.first, end)) + std::max(0, keys.sinks - end);
      end = std::max(end, keys.end);
    }
  }
  return read;
}

Rotation rotation_of(const Shape &shape) {
  Rotation rotation;
  if (shape.rope == Rope::kNone) return rotation;
  const auto pairs = static_cast<std::size_t>(shape.turned_columns() / 2);
  rotation.cos.resize(shape.seqlen_k * pairs);
  rotation.sin.resize(shape.seqlen_k * pairs);
  parallel_for(pairs, [&](std::size_t c) {
    const double angle = std::pow(10000, -2 * static_cast<double>(c) / shape.turned_columns());
    for (int t = 0; t < shape.seqlen_k; t++) {
      rotation.cos[t * pairs + c] = static_cast<float>(std::cos(t * angle));
      rotation.sin[t * pairs + c] = static_cast<float>(std::sin(t * angle));
    }
  });
  return rotation;
}

Pair pair_of(const Shape &shape, int c) {
  return shape.rope == Rope::kHalves ? Pair{c, c + shape.turned_columns() / 2}
                                     : Pair{2 * c, 2 * c + 1};
}

void rotate(const Inputs &inputs, int position, double *row) {
  if (inputs.shape.rope == Rope::kNone) return;
  const int pairs = inputs.shape.turned_columns() / 2;
  const std::size_t first = static_cast<std::size_t>(position) * pairs;
  for (int c = 0; c < pairs; c++) {
    const double cos = inputs.rotation.cos[first + c], sin = inputs.rotation.sin[first + c];
    const Pair pair = pair_of(inputs.shape, c);
    const double x = row[pair.x], y = row[pair.y];
    row[pair.x] = x * cos - y * sin;
    row[pair.y] = x * sin + y * cos;
  }
}

bool is_rotated_here(const Shape &shape, int batch, int key) {
  return shape.rope != Rope::kNone &&
         (shape.seqlen_new == 0 || key >= shape.length_k(batch) - shape.seqlen_new);
}

std::size_t first_key(const Shape &shape, Place place) {
  const int kv_head = place.head / (shape.heads / shape.kv_heads);
  return (static_cast<std::size_t>(place.batch) * shape.kv_heads + kv_head) * shape.seqlen_k;
}

KeyValues key_values(const Inputs &inputs, Place place, int first, int end) {
  const auto d = static_cast<std::size_t>(inputs.shape.head_dim);
  const std::size_t from = (first_key(inputs.shape, place) + first) * d;
  const std::size_t n = (end - first) * d;
  const auto d_V = static_cast<std::size_t>(inputs.shape.columns_of_v());
  const std::size_t from_V = (first_key(inputs.shape, place) + first) * d_V;
  KeyValues head{first, {}, {}, {}};
  head.K.resize(n);
  head.V.resize((end - first) * d_V);
  head.K_columns.resize(n);
  const std::size_t of_head = first_key(inputs.shape, place);
  const double K_scale = scale_of(inputs.scales.K, of_head, inputs.shape.seqlen_k);
  const auto V_scale =
      static_cast<float>(scale_of(inputs.scales.V, of_head, inputs.shape.seqlen_k));
  for (std::size_t i = 0; i < n; i++)
    head.K[i] = element_to_float(inputs.type, inputs.K[from + i]) * K_scale;
  for (std::size_t i = 0; i < head.V.size(); i++)
    head.V[i] = element_to_float(inputs.type, inputs.V[from_V + i]) * V_scale;
  for (int j = first; j < end; j++)
    if (is_rotated_here(inputs.shape, place.batch, j)) rotate(inputs, j, &head.K[(j - first) * d]);
  const auto keys = static_cast<std::size_t>(end - first);
  for (std::size_t j = 0; j < keys; j++)
    for (std::size_t k = 0; k < d; k++) head.K_columns[k * keys + j] = head.K[j * d + k];
  return head;
}

Row attention_row(const Inputs &inputs, const KeyValues &head, Place place) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  const std::size_t query =
      (static_cast<std::size_t>(place.batch) * shape.heads + place.head) * shape.seqlen_q +
      place.row;
  Row row{.query = std::vector<double>(d),
          .keys = keys_seen(shape, place.batch, place.row),
          .scaled = {},
          .biases = {},
          .scores = {},
          .weights = {},
          .output = std::vector<double>(shape.columns_of_v())};
  const int n = row.keys.count();
  const bool sink = !inputs.sink_logits.empty();
  if (n == 0) {
    if (sink && place.row < shape.length_q(place.batch)) {
      row.sink_weight = 1;
      row.log_sum_exp = inputs.sink_logits[place.head];
    }
    return row;
  }
  std::vector<double> &q = row.query;
  const double Q_scale = scale_of(inputs.scales.Q, query, shape.seqlen_q);
  for (int k = 0; k < d; k++)
    q[k] = element_to_float(inputs.type, inputs.Q[query * d + k]) * Q_scale;
  rotate(inputs, position_of(shape, place.batch, place.row), q.data());

  row.scaled.resize(n);
  const int sinks = row.keys.sinks;
  if (sinks) score(row, head, 0, sinks, shape.softmax_scale());
  score(row, head, sinks, n, shape.softmax_scale());

  row.scores = row.scaled;
  const double cap = shape.softcap;
  if (cap > 0)
    for (double &s : row.scores) s = cap * std::tanh(s / cap);
  if (shape.alibi) {
    const int own = position_of(shape, place.batch, place.row);
    for (int j = 0; j < n; j++)
      row.scores[j] +=
          row.biases.emplace_back(-double{inputs.slopes[place.head]} * std::abs(own - row.keys[j]));
  }

  // e^s overflows a double from s = 710 on (and fp32 from 89). The softmax does not change when the
  // same number is subtracted from all scores; subtracting the largest leaves all exponents <= 0.
  double m = *std::max_element(row.scores.begin(), row.scores.end());
  if (sink) m = std::max(m, double{inputs.sink_logits[place.head]});
  row.sink_weight = sink ? std::exp(inputs.sink_logits[place.head] - m) : 0;
  double l = row.sink_weight;
  for (const double s : row.scores) {
    row.weights.push_back(std::exp(s - m));
    l += row.weights.back();
  }
  for (double &p : row.weights) p /= l;
  row.sink_weight /= l;
  row.log_sum_exp = m + std::log(l);

  average(row, head);
  return row;
}

}  // namespace reference
