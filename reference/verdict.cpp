#include "reference/verdict.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace reference {

Verdict judge(const Inputs &inputs, const std::vector<half> &O, const std::vector<Place> &places) {
  const std::vector<Row> rows = attention_rows(inputs, places);
  const int d = inputs.head_dim;
  Verdict verdict;
  double squares = 0, squares_of_rounding = 0;
  for (std::size_t i = 0; i < places.size(); i++) {
    const std::size_t first =
        (static_cast<std::size_t>(places[i].head) * inputs.seqlen + places[i].row) * d;
    for (int k = 0; k < d; k++) {
      const double output = half_to_float(O[first + k]);
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
        verdict.worst = places[i];
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

std::vector<Place> places_to_check(const Inputs &inputs, int tile, unsigned long seed) {
  const int N = inputs.seqlen;
  const double rows = static_cast<double>(inputs.batch_heads) * N;
  std::vector<Place> places;
  if (rows * N * inputs.head_dim <= 1e8) {
    for (int head = 0; head < inputs.batch_heads; head++)
      for (int row = 0; row < N; row++) places.push_back({head, row});
    return places;
  }
  for (const int head : {0, inputs.batch_heads - 1})
    for (const int row : {0, tile - 1, tile % N, (2 * tile - 1) % N, N - tile, N - 1})
      places.push_back({head, row});
  std::mt19937_64 random(seed);
  for (int i = 0; i < 256; i++)
    places.push_back(
        {static_cast<int>(random() % inputs.batch_heads), static_cast<int>(random() % N)});
  return places;
}

}  // namespace reference
