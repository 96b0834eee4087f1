#include "reference/verdict.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace reference {

Verdict judge(const Inputs &inputs, const std::vector<std::uint16_t> &O,
              const std::vector<Place> &places) {
  const std::vector<Row> rows = attention_rows(inputs, places);
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  Verdict verdict;
  double squares = 0, squares_of_rounding = 0;
  for (std::size_t i = 0; i < places.size(); i++) {
    const Place &place = places[i];
    const std::size_t head = static_cast<std::size_t>(place.batch) * shape.heads + place.head;
    const std::size_t first = (head * shape.seqlen_q + place.row) * d;
    for (int k = 0; k < d; k++) {
      const double output = element_to_float(inputs.type, O[first + k]);
      const double expected = rows[i].exact[k];
      const double error = std::abs(output - expected);
      const double rounding = std::abs(rows[i].rounded[k] - expected);
      const bool first_not_finite = !std::isfinite(output) && verdict.not_finite == 0;
      verdict.not_finite += !std::isfinite(output);
      squares += error * error;
      squares_of_rounding += rounding * rounding;
      verdict.max_bound = std::max(verdict.max_bound, 2 * rounding);
      if (first_not_finite || (verdict.not_finite == 0 && error > verdict.max_error)) {
        verdict.max_error = error;
        verdict.worst = place;
        verdict.worst_column = k;
        verdict.worst_output = output;
        verdict.worst_expected = expected;
      }
    }
  }
  const double elements = static_cast<double>(places.size()) * d;
  verdict.rms_error = std::sqrt(squares / elements);
  verdict.rms_bound = 2 * std::sqrt(squares_of_rounding / elements);
  return verdict;
}

std::vector<Place> places_to_check(const Shape &shape, int tile, unsigned long seed) {
  const int N = shape.seqlen_q;
  std::vector<Place> places;
  if (visible_pairs(shape) * shape.head_dim <= 1e8) {
    for (int batch = 0; batch < shape.batch; batch++)
      for (int head = 0; head < shape.heads; head++)
        for (int row = 0; row < N; row++) places.push_back({batch, head, row});
    return places;
  }
  const int second = std::min(tile, N - 1), last = (N - 1) / tile * tile;
  for (const int batch : {0, shape.batch - 1})
    for (const int head : {0, shape.heads - 1})
      for (const int row : {0, tile - 1, second, second + tile - 1, last, N - 1})
        places.push_back({batch, head, std::min(row, N - 1)});
  std::mt19937_64 random(seed);
  const auto below = [&](int limit) { return static_cast<int>(random() % limit); };
  for (int i = 0; i < 256; i++)
    places.push_back({below(shape.batch), below(shape.heads), below(N)});
  return places;
}

}  // namespace reference
