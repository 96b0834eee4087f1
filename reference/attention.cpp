#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace reference {

Keys keys_seen(const Shape &shape, int batch, int query) {
  const int length_q = shape.lengths_q.empty() ? shape.seqlen_q : shape.lengths_q[batch];
  const int length_k = shape.lengths_k.empty() ? shape.seqlen_k : shape.lengths_k[batch];
  if (query >= length_q) return {0, 0};
  const int own = length_k - length_q + query;  // the key at the query's own position
  const int first = shape.window ? std::max(0, own - shape.window + 1) : 0;
  const int end = shape.causal || shape.window ? own + 1 : length_k;
  return {first, std::max(first, end)};
}

bool sees(const Shape &shape, int batch, int query, int key) {
  const Keys keys = keys_seen(shape, batch, query);
  return keys.first <= key && key < keys.end;
}

double visible_pairs(const Shape &shape) {
  double pairs = 0;
  for (int batch = 0; batch < shape.batch; batch++)
    for (int query = 0; query < shape.seqlen_q; query++) {
      const Keys keys = keys_seen(shape, batch, query);
      pairs += keys.end - keys.first;
    }
  return pairs * shape.heads;
}

std::size_t first_key(const Shape &shape, Place place) {
  const int kv_head = place.head / (shape.heads / shape.kv_heads);
  return (static_cast<std::size_t>(place.batch) * shape.kv_heads + kv_head) * shape.seqlen_k;
}

Row attention_row(const Inputs &inputs, Place place) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  const std::size_t head = static_cast<std::size_t>(place.batch) * shape.heads + place.head;
  const std::uint16_t *q = &inputs.Q[(head * shape.seqlen_q + place.row) * d];
  const std::uint16_t *K = &inputs.K[first_key(shape, place) * d];
  const std::uint16_t *V = &inputs.V[first_key(shape, place) * d];
  const auto value = [&](const std::uint16_t *row, int k) {
    return static_cast<double>(element_to_float(inputs.type, row[k]));
  };

  const Keys keys = keys_seen(shape, place.batch, place.row);
  Row row{keys, {}, {}, std::vector<double>(d)};
  if (keys.first == keys.end) return row;

  for (int j = keys.first; j < keys.end; j++) {
    double s = 0;
    for (int k = 0; k < d; k++) s += value(q, k) * value(K + static_cast<std::size_t>(j) * d, k);
    row.scores.push_back(s / std::sqrt(static_cast<double>(d)));
  }

  // e^s overflows a double from s = 710 on (and fp32 from 89). The softmax does not change when the
  // same number is subtracted from all scores; subtracting the largest leaves all exponents <= 0.
  const double m = *std::max_element(row.scores.begin(), row.scores.end());
  double l = 0;
  for (const double s : row.scores) l += row.weights.emplace_back(std::exp(s - m));
  for (double &p : row.weights) p /= l;

  for (int j = keys.first; j < keys.end; j++)
    for (int k = 0; k < d; k++)
      row.output[k] += row.weights[j - keys.first] * value(V + static_cast<std::size_t>(j) * d, k);
  return row;
}

}  // namespace reference
