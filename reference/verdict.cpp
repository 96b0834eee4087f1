#include "reference/verdict.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <random>
#include <span>

#include "reference/parallel.h"

namespace reference {
namespace {

constexpr double kFailureOfARightKernel = 5e-7;  // F of verdict.h, for each of the two bounds

/// What a type's rounding does to a number: half a unit in the last place.
struct Rounding {
  double u;  // of 1
  double f;  // of the smallest subnormal

  double half_ulp(double x) const {
    int exponent;  // |x| = 2^exponent * [0.5, 1)
    std::frexp(x, &exponent);
    return x == 0 ? f : std::max(f, std::ldexp(u, exponent - 1));
  }
};

Rounding rounding_of(Type type) {
  return type == Type::kFp16 ? Rounding{0x1p-11, 0x1p-25} : Rounding{0x1p-8, 0x1p-134};
}

/// Which keys may be rounded alike, or are most of the sum alone.
std::vector<bool> keys_that_count_fully(const std::vector<double> &weights) {
  std::vector<int> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return weights[a] < weights[b]; });
  std::vector<bool> fully(weights.size());
  for (std::size_t i = 0; i < order.size(); i++) {
    const double w = weights[order[i]];
    if (w > 0.5) fully[order[i]] = true;
    if (i > 0 && w - weights[order[i - 1]] <= 0x1p-11 * w)
      fully[order[i]] = fully[order[i - 1]] = true;
  }
  return fully;
}

/// One element of the output: what is right, and the two bounds of its error before its rounding.
struct Element {
  double expected = 0;
  double c_squared = 0;
  double at_most = 0;
};

std::vector<Element> elements_of(const Inputs &inputs, const KeyValues &head, Place place) {
  const Row row = attention_row(inputs, head, place);
  const int d = inputs.shape.head_dim;
  std::vector<Element> elements(d);
  for (int k = 0; k < d; k++) elements[k].expected = row.output[k];
  if (row.weights.empty()) return elements;

  const Rounding rounding = rounding_of(inputs.type);
  const std::vector<bool> fully = keys_that_count_fully(row.weights);
  const double largest = *std::max_element(row.weights.begin(), row.weights.end());
  const double fp32 = 0x1p-23 * (d + static_cast<double>(row.weights.size()) / 16);
  const float *v = &head.V[static_cast<std::size_t>(row.keys.first - head.keys.first) * d];
  for (std::size_t j = 0; j < row.weights.size(); j++) {
    const double w = row.weights[j];
    const double a = std::max(rounding.u * w, rounding.f * largest);
    const double b = 0x1p-24 * std::min(std::abs(row.scores[j]), 0x1p14) * w;
    const double e = fp32 * w;
    const double squares = (a * a + b * b) * (fully[j] ? 1 : 1 / 3.0) + e * e;
    for (int k = 0; k < d; k++) {
      const double value = *v++;
      elements[k].c_squared += squares * value * value;
      elements[k].at_most += (a + b + e) * std::abs(value);
    }
  }
  return elements;
}

/// Where to cut the places such that those from one cut to the next, at most 32, share a head's keys.
std::vector<std::size_t> cuts_by_head(const Shape &shape, const std::vector<Place> &places) {
  std::vector<std::size_t> cuts;
  for (std::size_t i = 0; i < places.size(); i++)
    if (i == 0 || i - cuts.back() == 32 ||
        first_key(shape, places[i]) != first_key(shape, places[i - 1]))
      cuts.push_back(i);
  cuts.push_back(places.size());
  return cuts;
}

/// The keys that any of these places sees, and those between them.
Keys keys_of_all(const Shape &shape, std::span<const Place> places) {
  Keys all{shape.seqlen_k, 0};
  for (const Place &place : places) {
    const Keys keys = keys_seen(shape, place.batch, place.row);
    if (keys.first == keys.end) continue;
    all = {std::min(all.first, keys.first), std::max(all.end, keys.end)};
  }
  return all.first < all.end ? all : Keys{0, 0};
}

}  // namespace

Verdict judge(const Inputs &inputs, const Elements &O, const std::vector<Place> &places) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  const Rounding rounding = rounding_of(inputs.type);
  std::vector<std::vector<Element>> rows(places.size());
  const std::vector<std::size_t> cuts = cuts_by_head(shape, places);
  parallel_for(cuts.size() - 1, [&](std::size_t run) {
    const std::span some = std::span(places).subspan(cuts[run], cuts[run + 1] - cuts[run]);
    const KeyValues head = key_values(inputs, some[0], keys_of_all(shape, some));
    for (std::size_t i = 0; i < some.size(); i++)
      rows[cuts[run] + i] = elements_of(inputs, head, some[i]);
  });

  const double n = static_cast<double>(places.size()) * d;
  const double deviations = std::sqrt(2 * std::log(2 * n / kFailureOfARightKernel));
  Verdict verdict;
  double squares = 0, worst_ratio = 0;
  // Of c^2 + h^2 / 3, for each column of V of each of its heads.
  std::vector<double> column_sums(static_cast<std::size_t>(shape.batch) * shape.kv_heads * d);
  for (std::size_t i = 0; i < places.size(); i++) {
    const Place &place = places[i];
    const std::size_t head = static_cast<std::size_t>(place.batch) * shape.heads + place.head;
    const std::size_t first = (head * shape.seqlen_q + place.row) * d;
    double *const columns = &column_sums[first_key(shape, place) / shape.seqlen_k * d];
    for (int k = 0; k < d; k++) {
      const Element &element = rows[i][k];
      const double output = element_to_float(inputs.type, O[first + k]);
      const double error = std::abs(output - element.expected);
      const double before_rounding =
          std::min(deviations * std::sqrt(element.c_squared), element.at_most);
      // The output of a row that sees nothing is 0, and nothing is rounded.
      const double h = before_rounding == 0
                           ? 0
                           : rounding.half_ulp(std::abs(element.expected) + before_rounding);
      const double bound = before_rounding + h;
      squares += error * error;
      columns[k] += element.c_squared + h * h / 3;
      const double ratio = error == 0 ? 0 : error / bound;
      const bool first_not_finite = !std::isfinite(output) && verdict.not_finite == 0;
      verdict.not_finite += !std::isfinite(output);
      if (first_not_finite || (verdict.not_finite == 0 && ratio > worst_ratio)) {
        worst_ratio = ratio;
        verdict.worst = place;
        verdict.worst_column = k;
        verdict.worst_output = output;
        verdict.worst_expected = element.expected;
        verdict.max_error = error;
        verdict.max_bound = bound;
      }
    }
  }
  const double L = std::log(1 / kFailureOfARightKernel);
  double sum = 0, sum_of_squares = 0, largest = 0;
  for (const double B : column_sums) {
    sum += B;
    sum_of_squares += B * B;
    largest = std::max(largest, B);
  }
  verdict.rms_error = std::sqrt(squares / n);
  verdict.rms_bound = std::sqrt((sum + 2 * std::sqrt(L * sum_of_squares) + 2 * L * largest) / n);
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
