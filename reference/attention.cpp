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

KeyValues key_values(const Inputs &inputs, Place place, Keys keys) {
  const auto d = static_cast<std::size_t>(inputs.shape.head_dim);
  const std::size_t first = (first_key(inputs.shape, place) + keys.first) * d;
  const std::size_t n = (keys.end - keys.first) * d;
  KeyValues head{keys, std::vector<float>(n), std::vector<float>(n)};
  for (std::size_t i = 0; i < n; i++) {
    head.K[i] = element_to_float(inputs.type, inputs.K[first + i]);
    head.V[i] = element_to_float(inputs.type, inputs.V[first + i]);
  }
  return head;
}

Row attention_row(const Inputs &inputs, const KeyValues &head, Place place) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  const std::size_t query =
      (static_cast<std::size_t>(place.batch) * shape.heads + place.head) * shape.seqlen_q +
      place.row;
  std::vector<double> q(d);
  for (int k = 0; k < d; k++) q[k] = element_to_float(inputs.type, inputs.Q[query * d + k]);

  const Keys keys = keys_seen(shape, place.batch, place.row);
  Row row{keys, {}, {}, std::vector<double>(d)};
  if (keys.first == keys.end) return row;

  // Four keys at a time, since a sum alone waits for each of its additions. The last ones may be the
  // same key.
  const int n = keys.end - keys.first;
  const std::size_t first = static_cast<std::size_t>(keys.first - head.keys.first) * d;
  row.scores.resize(n);
  for (int j = 0; j < n; j += 4) {
    const float *key[4];
    for (int i = 0; i < 4; i++)
      key[i] = &head.K[first + static_cast<std::size_t>(std::min(j + i, n - 1)) * d];
    double s[4] = {};
    for (int k = 0; k < d; k++)
      for (int i = 0; i < 4; i++) s[i] += q[k] * key[i][k];
    for (int i = 0; i < 4 && j + i < n; i++)
      row.scores[j + i] = s[i] / std::sqrt(static_cast<double>(d));
  }

  // e^s overflows a double from s = 710 on (and fp32 from 89). The softmax does not change when the
  // same number is subtracted from all scores; subtracting the largest leaves all exponents <= 0.
  const double m = *std::max_element(row.scores.begin(), row.scores.end());
  double l = 0;
  for (const double s : row.scores) l += row.weights.emplace_back(std::exp(s - m));
  for (double &p : row.weights) p /= l;

  const float *v = &head.V[first];
  for (const double p : row.weights)
    for (int k = 0; k < d; k++) row.output[k] += p * *v++;
  return row;
}

}  // namespace reference
