#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "reference/parallel.h"

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

Row attention_row(const Inputs &inputs, Place place) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  const std::size_t head = std::size_t(place.batch) * shape.heads + place.head;
  const std::size_t kv_head =
      std::size_t(place.batch) * shape.kv_heads + place.head / (shape.heads / shape.kv_heads);
  const auto value = [&](const std::vector<std::uint16_t> &matrix, std::size_t row, int k) {
    return element_to_float(inputs.type, matrix[row * d + k]);
  };
  const auto Q = [&](int k) { return value(inputs.Q, head * shape.seqlen_q + place.row, k); };
  const auto K = [&](int j, int k) { return value(inputs.K, kv_head * shape.seqlen_k + j, k); };
  const auto V = [&](int j, int k) { return value(inputs.V, kv_head * shape.seqlen_k + j, k); };

  Row out{std::vector<double>(d), std::vector<double>(d)};
  const Keys keys = keys_seen(shape, place.batch, place.row);
  if (keys.first == keys.end) return out;

  // Scores.
  std::vector<double> s(keys.end), query(d);
  for (int k = 0; k < d; k++) query[k] = Q(k) / std::sqrt(static_cast<double>(d));
  for (int j = keys.first; j < keys.end; j++)
    for (int k = 0; k < d; k++) s[j] += query[k] * K(j, k);

  // e^s overflows a double from s = 710 on (and fp32 from 89). The softmax does not change when the
  // same number is subtracted from all scores; subtracting the largest leaves all exponents <= 0.
  const double m = *std::max_element(s.begin() + keys.first, s.end());
  double l = 0;
  for (int j = keys.first; j < keys.end; j++) l += s[j] = std::exp(s[j] - m);

  // The weighted average, divided by the sum of the weights only at the end.
  const auto rounded = [&](double x) {
    return element_to_float(inputs.type, double_to_element(inputs.type, x));
  };
  for (int j = keys.first; j < keys.end; j++) {
    const double p = s[j], p_rounded = rounded(p);
    for (int k = 0; k < d; k++) {
      out.exact[k] += p * V(j, k);
      out.rounded[k] += p_rounded * V(j, k);
    }
  }
  for (int k = 0; k < d; k++) {
    out.exact[k] /= l;
    out.rounded[k] = rounded(out.rounded[k] / l);
  }
  return out;
}

std::vector<Row> attention_rows(const Inputs &inputs, const std::vector<Place> &places) {
  std::vector<Row> rows(places.size());
  parallel_for(places.size(), [&](std::size_t i) { rows[i] = attention_row(inputs, places[i]); });
  return rows;
}

}  // namespace reference
