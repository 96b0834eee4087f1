#include "reference/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <thread>

namespace reference {

Row attention_row(const Inputs &inputs, int head, int row) {
  const int N = inputs.seqlen, d = inputs.head_dim;
  const std::size_t first = static_cast<std::size_t>(head) * N * d;
  const half *q = &inputs.Q[first + static_cast<std::size_t>(row) * d];
  const half *K = &inputs.K[first], *V = &inputs.V[first];

  // Scores.
  std::vector<double> s(N), query(d);
  for (int k = 0; k < d; k++) query[k] = half_to_float(q[k]) / std::sqrt(static_cast<double>(d));
  for (int j = 0; j < N; j++)
    for (int k = 0; k < d; k++)
      s[j] += query[k] * half_to_float(K[static_cast<std::size_t>(j) * d + k]);

  // e^s overflows a double from s = 710 on (and fp32 from 89). The softmax does not change when the
  // same number is subtracted from all scores; subtracting the largest leaves all exponents <= 0.
  const double m = *std::max_element(s.begin(), s.end());
  double l = 0;
  for (double &score : s) l += score = std::exp(score - m);

  // The weighted average, divided by the sum of the weights only at the end.
  Row out{std::vector<double>(d), std::vector<double>(d)};
  for (int j = 0; j < N; j++) {
    const double p = s[j], p_rounded = half_to_float(double_to_half(p));
    for (int k = 0; k < d; k++) {
      const double v = half_to_float(V[static_cast<std::size_t>(j) * d + k]);
      out.exact[k] += p * v;
      out.rounded[k] += p_rounded * v;
    }
  }
  for (int k = 0; k < d; k++) {
    out.exact[k] /= l;
    out.rounded[k] = half_to_float(double_to_half(out.rounded[k] / l));
  }
  return out;
}

std::vector<Row> attention_rows(const Inputs &inputs, const std::vector<Place> &places) {
  std::vector<Row> rows(places.size());
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i; (i = next++) < places.size();)
      rows[i] = attention_row(inputs, places[i].head, places[i].row);
  };
  std::vector<std::thread> pool;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); i++) pool.emplace_back(work);
  work();
  for (std::thread &worker : pool) worker.join();
  return rows;
}

}  // namespace reference
