// SPDX-License-Identifier: MIT
#include "reference/verdict.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <random>
#include <span>
#include <tuple>
#include <utility>

#include "reference/bounds.h"
#include "reference/parallel.h"

namespace reference {
namespace {

/// The value of the type's element, fp16 or bf16, that is nearest to a value.
double nearest(Type type, double value) {
  return element_to_float(
      type, type == Type::kFp16 ? double_to_half(value).bits : double_to_bf16(value).bits);
}

/// By how much each element of a row that is rotated in fp32 may be off.
std::vector<double> fp32_errors(const Shape &shape, const double *row) {
  std::vector<double> errors(shape.head_dim);
  for (int c = 0; c < shape.turned_columns() / 2; c++) {
    const Pair pair = pair_of(shape, c);
    errors[pair.x] = errors[pair.y] = 0x1p-23 * (std::abs(row[pair.x]) + std::abs(row[pair.y]));
  }
  return errors;
}

/// One element of the output: what is right, and the two bounds of its error before its rounding.
struct Element {
  double expected = 0;
  double c_squared = 0, r_squared = 0;  // r: of the rotation
  double at_most = 0;
};

constexpr int kScales = 16;  // at which P may be rounded, from 1 to 2

/// A row of the output, and what its errors may add to the sum of errors times outputs.
struct RowOfElements {
  std::vector<Element> elements;
  double rounded_P[kScales] = {};  // of P, rounded at this scale: what they do add
  double systematic = 0;           // of all that may be cut off toward zero
  double lse = -INFINITY, lse_bound = 0;
};

/// By how much each element of a row, rotated and rounded, may be off: h of verdict.h.
std::vector<double> rotation_errors(const Inputs &inputs, const double *row) {
  const Rounding rounding = rounding_of(inputs.type);
  std::vector<double> h = fp32_errors(inputs.shape, row);
  for (int c = 0; c < inputs.shape.turned_columns(); c++)
    h[c] += std::max(rounding.u * std::abs(row[c]), rounding.f);
  return h;
}

/// Adds what the roundings of the rotated query and of the rotated keys do to the output.
FOR_WIDE_VECTORS void add_rotation(const Inputs &inputs, const KeyValues &head, Place place,
                                   const Row &row, std::vector<Element> &elements) {
  const int d = inputs.shape.head_dim;
  const double scale = inputs.shape.softmax_scale();
  const std::size_t keys = row.weights.size();
  const int d_V = inputs.shape.columns_of_v();
  const int padded = (d + 7) / 8 * 8, padded_V = (d_V + 7) / 8 * 8;
  // Of each key w_j (v_j - o), and k_j.
  std::vector<float> factors(keys * padded_V), K(keys * padded);
  for (std::size_t j = 0; j < keys; j++) {
    const int number = row.keys[static_cast<int>(j)];
    const std::size_t at = static_cast<std::size_t>(number - head.first) * d;
    for (int c = 0; c < d; c++) K[j * padded + c] = static_cast<float>(head.K[at + c]);
    double squares = 0, sum = 0;
    if (is_rotated_here(inputs.shape, place.batch, number)) {
      const std::vector<double> h = rotation_errors(inputs, &head.K[at]);
      for (int c = 0; c < d; c++) {
        const double error = h[c] * std::abs(row.query[c]) * scale;
        squares += error * error;
        sum += error;
      }
    }
    const std::size_t value = static_cast<std::size_t>(number - head.first) * d_V;
    for (int k = 0; k < d_V; k++) {
      const double factor = row.weights[j] * (head.V[value + k] - row.output[k]);
      elements[k].r_squared += factor * factor * squares / 3;
      elements[k].at_most += std::abs(factor) * sum;
      factors[j * padded_V + k] = static_cast<float>(factor);
    }
  }
  // The sums over j of a factor and k_jc: most of the time goes by here, so in fp32, four factors and eight
  // columns at a time.
  using Eight = float __attribute__((vector_size(32)));
  const std::vector<double> h = rotation_errors(inputs, row.query.data());
  for (int k = 0; k < d_V; k += 4)
    for (int c = 0; c < d; c += 8) {
      Eight a{}, b{}, e{}, f{};
      for (std::size_t j = 0; j < keys; j++) {
        const float *factor = &factors[j * padded_V + k];
        Eight key;
        std::memcpy(&key, &K[j * padded + c], sizeof key);
        a += factor[0] * key, b += factor[1] * key, e += factor[2] * key, f += factor[3] * key;
      }
      const Eight sums[4] = {a, b, e, f};
      for (int r = 0; r < 4 && k + r < d_V; r++)
        for (int i = 0; i < 8 && c + i < d; i++) {
          const double error = h[c + i] * std::abs(sums[r][i]) * scale;
          elements[k + r].r_squared += error * error / 3;
          elements[k + r].at_most += error;
        }
    }
}

/// Of each key from one on, which lie side by side, the largest product of q . k, or sum of products up to a
/// multiple of 32 of them: what the tensor cores cut off is small beside this.
FOR_WIDE_VECTORS void largest_terms(const Row &row, const KeyValues &head, int from, int end,
                                    std::vector<double> &terms) {
  const auto d = static_cast<int>(row.query.size());
  const std::size_t keys = head.K_columns.size() / d;
  in_columns(
      end - from, [&](auto width, int first) __attribute__((always_inline)) {
        const double *K = &head.K_columns[row.keys[from + first] - head.first];
        double sum[width] = {}, largest[width] = {};
        for (int c = 0; c < d; c++) {
          for (int i = 0; i < width; i++) {
            const double product = row.query[c] * K[i];
            sum[i] += product;
            largest[i] = std::max(largest[i], std::abs(product));
          }
          if (c % 32 == 31)
            for (int i = 0; i < width; i++) largest[i] = std::max(largest[i], std::abs(sum[i]));
          K += keys;
        }
        std::copy_n(largest, int{width}, &terms[from + first]);
      });
}

/// Of a key: where its value is, its part of c^2 for a value of 1, and of the sum of bounds; its weight; and
/// the bound of its score's errors.
struct Part {
  const float *v;
  double squares, sum, weight, score;
};

/// Sets what all keys do to the bounds of a row.
FOR_WIDE_VECTORS void add_parts(const std::vector<Part> &parts, std::vector<Element> &elements) {
  const auto d = static_cast<int>(elements.size());
  in_columns(
      d, [&](auto width, int first) __attribute__((always_inline)) {
        double c_squared[width] = {}, at_most[width] = {};
        for (const Part &part : parts)
          for (int k = 0; k < width; k++) {
            const double value = part.v[first + k];
            c_squared[k] += part.squares * value * value;
            at_most[k] += part.sum * std::abs(value);
          }
        for (int k = 0; k < width; k++) {
          elements[first + k].c_squared = c_squared[k];
          elements[first + k].at_most = at_most[k];
        }
      });
}

/// Sets what the keys' errors may add to the sum of errors times outputs.
FOR_WIDE_VECTORS void add_to_slope(const std::vector<Part> &parts, const Rounding &rounding,
                                   double largest, RowOfElements &row) {
  const auto d = static_cast<int>(row.elements.size());
  // Adding and subtracting these rounds to the type's bits (Veltkamp), and to multiples of its smallest number.
  const double split = 0x1p53 * rounding.u + 1, offset = 0x1.8p53 * rounding.f;
  double scales[kScales], errors[kScales] = {};
  // Spread over 1 to 2; and of the places between two numbers of the type, where the largest P lies, over all.
  for (int i = 0; i < kScales; i++)
    scales[i] =
        1 + 2 * rounding.u *
                (std::floor(std::fmod(i * 0.6180339887, 1) / 2 / rounding.u) + (i + 0.5) / kScales);
  std::vector<double> output(d);
  for (int k = 0; k < d; k++) output[k] = row.elements[k].expected;
  for (const Part &part : parts) {
    double sums[8] = {};
    int k = 0;
    for (; k + 8 <= d; k += 8)
      for (int i = 0; i < 8; i++) sums[i] += part.v[k + i] * output[k + i];
    for (; k < d; k++) sums[0] += part.v[k] * output[k];
    double product = 0;
    for (const double sum : sums) product += sum;
    const double P = part.weight / largest;
    for (int i = 0; i < kScales; i++) {
      const double x = P * scales[i], high = x * split;
      errors[i] += (((high - (high - x)) + offset) - offset - x) * product;
    }
    row.systematic += part.score * std::abs(product);
  }
  for (int i = 0; i < kScales; i++) row.rounded_P[i] = errors[i] / scales[i] * largest;
}

/// The largest terms of q . k of each key, as above, in the order of the row's keys.
std::vector<double> all_largest_terms(const Row &row, const KeyValues &head) {
  std::vector<double> terms(row.weights.size());
  if (row.keys.sinks) largest_terms(row, head, 0, row.keys.sinks, terms);
  largest_terms(row, head, row.keys.sinks, row.keys.count(), terms);
  return terms;
}

/// By how much ALiBi's bias of a key is off, in units of so many roundings.
double error_of_bias(const Row &row, std::size_t j, double roundings) {
  return row.biases.empty() ? 0 : roundings * 0x1p-24 * std::abs(row.biases[j]);
}

/// By how much tanh.approx makes a key's score wrong.
double error_of_cap(const Shape &shape, const Row &row, std::size_t j) {
  const double bias = row.biases.empty() ? 0 : row.biases[j];
  return shape.softcap > 0 ? 0x1p-11 * std::abs(row.scores[j] - bias) : 0;
}

/// By how much the log-sum-exp of a row may be off. `deviations` is t of verdict.h.
double bound_of_lse(const Inputs &inputs, const KeyValues &head, Place place, const Row &row,
                    double deviations) {
  const Shape &shape = inputs.shape;
  const int d = shape.head_dim;
  const std::size_t N = row.weights.size();
  const double scale = shape.softmax_scale();
  const std::vector<double> terms = all_largest_terms(row, head);
  std::vector<double> of_query;
  if (shape.rope != Rope::kNone) of_query = rotation_errors(inputs, row.query.data());
  double of_scores = 0, lost = 0;
  for (std::size_t j = 0; j < N; j++) {
    double error = 0x1p-24 * (d + 4) * scale * terms[j] + error_of_bias(row, j, 4) +
                   error_of_cap(shape, row, j);
    if (!of_query.empty()) {
      const int number = row.keys[static_cast<int>(j)];
      const double *key = &head.K[static_cast<std::size_t>(number - head.first) * d];
      const bool here = is_rotated_here(shape, place.batch, number);
      const std::vector<double> of_key =
          here ? rotation_errors(inputs, key) : std::vector<double>(d);
      for (int c = 0; c < d; c++)
        error += scale * (of_query[c] * std::abs(key[c]) + of_key[c] * std::abs(row.query[c]));
    }
    of_scores += row.weights[j] * error;
    if (row.weights[j] < 0x1p-22) lost += row.weights[j];
  }
  std::vector<double> sorted = row.weights;
  std::sort(sorted.begin(), sorted.end());
  double alike = 0;
  const auto same = [&](std::size_t i) {  // as the one before it
    return 0 < i && i < N && sorted[i] - sorted[i - 1] <= 0x1p-20 * sorted[i];
  };
  for (std::size_t i = 0; i < N; i++) alike += same(i) || same(i + 1);
  const double n = static_cast<double>(N), L = 8 + std::log2(n + 1);
  const double of_sum = 16 + alike + deviations * std::sqrt(n);
  return of_scores + lost + 0x1p-24 * (of_sum + 4 * L + 3 * (std::abs(row.log_sum_exp) + L));
}

/// `deviations`: of the log-sum-exp's bound; 0: it is not compared.
RowOfElements elements_of(const Inputs &inputs, const KeyValues &head, Place place,
                          double deviations) {
  const Row row = attention_row(inputs, head, place);
  const int d = inputs.shape.head_dim, d_V = inputs.shape.columns_of_v();
  RowOfElements result{std::vector<Element>(d_V)};
  result.lse = row.log_sum_exp;
  // The logit of a sink alone is rounded three times: times log2(e), times ln(2), and in between.
  if (std::isfinite(row.log_sum_exp)) result.lse_bound = 3 * 0x1p-24 * std::abs(row.log_sum_exp);
  if (deviations > 0 && !row.weights.empty())
    result.lse_bound = bound_of_lse(inputs, head, place, row, deviations);
  std::vector<Element> &elements = result.elements;
  for (int k = 0; k < d_V; k++) elements[k].expected = row.output[k];
  if (row.weights.empty()) return result;

  const Rounding rounding = rounding_of(inputs.type);
  const std::vector<bool> fully = keys_that_count_fully(row.weights);
  const double largest =
      std::max(row.sink_weight, *std::max_element(row.weights.begin(), row.weights.end()));
  const double n = static_cast<double>(row.weights.size());
  const Shape &shape = inputs.shape;
  const double scale = shape.softmax_scale();
  const double counted = shape.scale ? INFINITY : 0x1p14;  // of |s_j|
  const bool fp8 = inputs.type == Type::kFp8;
  const double sums =
      0x1p-23 * (d * std::max(1.0, scale * std::sqrt(d)) + n / 16) + (fp8 ? 0x1p-13 * n / 32 : 0);
  std::vector<double> terms(row.weights.size());  // 0 where nothing is cut off
  if (fp8) terms = all_largest_terms(row, head);
  std::vector<Part> parts(row.weights.size());
  for (std::size_t j = 0; j < row.weights.size(); j++) {
    const double w = row.weights[j];
    const double a = std::max(rounding.u * w, rounding.f * largest);
    const double b =
        (0x1p-24 * std::min(std::abs(row.scaled[j]), counted) + error_of_bias(row, j, 3)) * w;
    const std::size_t key =
        static_cast<std::size_t>(row.keys[static_cast<int>(j)] - head.first) * d_V;
    const double score =
        0x1p-13 * std::sqrt(33 * d / 32.0) * scale * terms[j] + error_of_cap(shape, row, j);
    const double e = (sums + score) * w + std::min(w, 0x1p-118 * largest);
    parts[j] = {&head.V[key], (a * a + b * b) * (fully[j] ? 1 : 1 / 3.0) + e * e, a + b + e, w,
                b + score * w};
  }
  add_parts(parts, elements);
  add_to_slope(parts, rounding, largest, result);
  for (const Element &element : elements)
    result.systematic += sums * element.expected * element.expected;
  if (inputs.shape.rope != Rope::kNone) add_rotation(inputs, head, place, row, elements);
  return result;
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

/// The keys and values that any of these places sees, and those between them.
KeyValues key_values_common(const Inputs &inputs, std::span<const Place> places) {
  int first = inputs.shape.seqlen_k, end = 0;
  for (const Place &place : places) {
    const Keys keys = keys_seen(inputs.shape, place.batch, place.row);
    if (keys.count() == 0) continue;
    first = std::min(first, keys[0]);
    end = std::max(end, keys.end);
  }
  return key_values(inputs, places[0], std::min(first, end), end);
}

/// Where a value lies between its neighbours that the type has, in 1024 parts.
int place_between_neighbours(const Rounding &rounding, double value) {
  const double units = std::abs(value) / (2 * rounding.half_ulp(value));
  return static_cast<int>((units - std::floor(units)) * 1024 + 0.5) % 1024;
}

}  // namespace

Verdict judge(const Inputs &inputs, const Elements &O, const std::vector<Place> &places,
              std::span<const float> lse) {
  const Shape &shape = inputs.shape;
  const int d = shape.columns_of_v();
  const Type type = output_type(inputs.type);
  const Rounding rounding = rounding_of(type);
  std::vector<RowOfElements> rows(places.size());
  const double n = static_cast<double>(places.size()) * d;
  const double deviations = std::sqrt(2 * std::log(2 * n / kFailureOfARightKernel));
  const std::vector<std::size_t> cuts = cuts_by_head(shape, places);
  parallel_for(cuts.size() - 1, [&](std::size_t run) {
    const std::span some = std::span(places).subspan(cuts[run], cuts[run + 1] - cuts[run]);
    const KeyValues head = key_values_common(inputs, some);
    for (std::size_t i = 0; i < some.size(); i++)
      rows[cuts[run] + i] = elements_of(inputs, head, some[i], lse.empty() ? 0 : deviations);
  });

  Verdict verdict;
  double squares = 0, squares_expected = 0, products = 0, worst_ratio = 0, worst_lse = -1;
  // Of c^2 + h^2 / 3, for each column of V of each of its heads.
  std::vector<double> column_sums(static_cast<std::size_t>(shape.batch) * shape.kv_heads * d);
  std::vector<double> row_sums(places.size());  // of r^2
  // Of what adds to the sum of errors times outputs: P at each scale, what differs from row to row, and the rest.
  double rounded_P[kScales] = {}, independent = 0, systematic = 0;
  // The outputs that lie at the same place between their neighbours may be rounded alike.
  double rounded_O[1024] = {};
  for (std::size_t i = 0; i < places.size(); i++) {
    const Place &place = places[i];
    const std::size_t head = static_cast<std::size_t>(place.batch) * shape.heads + place.head;
    const std::size_t first = (head * shape.seqlen_q + place.row) * d;
    if (!lse.empty()) {
      const double is = lse[head * shape.seqlen_q + place.row], should_be = rows[i].lse;
      const bool same = is == should_be;  // -infinity, too
      const double error = same                            ? 0
                           : std::isfinite(is - should_be) ? std::abs(is - should_be)
                                                           : INFINITY;
      const double ratio = same ? 0 : error / rows[i].lse_bound;
      if (ratio > worst_lse) {
        worst_lse = ratio;
        verdict.lse_worst = place;
        verdict.lse = is;
        verdict.lse_expected = should_be;
        verdict.lse_error = error;
        verdict.lse_bound = rows[i].lse_bound;
      }
    }
    double row_squares = 0;
    double *const columns = &column_sums[first_key(shape, place) / shape.seqlen_k * d];
    for (int k = 0; k < d; k++) {
      const Element &element = rows[i].elements[k];
      const double output = element_to_float(type, O[first + k]);
      const double error = std::abs(output - element.expected);
      const double before_rounding =
          std::min(deviations * std::sqrt(element.c_squared + element.r_squared), element.at_most);
      // The output of a row that sees nothing is 0, and nothing is rounded.
      const double h = before_rounding == 0
                           ? 0
                           : rounding.half_ulp(std::abs(element.expected) + before_rounding);
      const double bound = before_rounding + h;
      squares += error * error;
      row_squares += element.expected * element.expected;
      products += (output - element.expected) * element.expected;
      rounded_O[place_between_neighbours(rounding, element.expected)] +=
          h * std::abs(element.expected);
      columns[k] += element.c_squared + h * h / 3;
      row_sums[i] += element.r_squared;
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
    squares_expected += row_squares;
    systematic += rows[i].systematic;
    independent += row_sums[i] * row_squares;
    for (int scale = 0; scale < kScales; scale++) {
      rounded_P[scale] += rows[i].rounded_P[scale];
      independent += rows[i].rounded_P[scale] * rows[i].rounded_P[scale] / kScales;
    }
  }
  for (const double sum : rounded_O) independent += sum * sum / 3;
  double common = 0;
  for (const double errors : rounded_P) common += errors * errors / kScales;
  if (squares_expected > 0) {
    const double tail = std::sqrt(2 * std::log(2 / kFailureOfARightKernel));
    verdict.slope = products / squares_expected;
    verdict.slope_bound =
        (2.5 * std::sqrt(common) + systematic + tail * std::sqrt(independent)) / squares_expected;
  }
  verdict.rms_error = std::sqrt(squares / n);
  verdict.rms_expected = std::sqrt(squares_expected / n);
  verdict.rms_bound = std::sqrt(bound_of_mean_square(column_sums, n)) +
                      std::sqrt(bound_of_mean_square(row_sums, n));
  return verdict;
}

CacheVerdict judge_cache(const Inputs &inputs, const Elements &cache, bool keys) {
  const Shape &shape = inputs.shape;
  const int d = keys ? shape.head_dim : shape.columns_of_v();
  const Elements &given = keys ? inputs.K : inputs.V;
  std::vector<CacheVerdict> of_heads(static_cast<std::size_t>(shape.batch) * shape.kv_heads);
  parallel_for(of_heads.size(), [&](std::size_t i) {
    CacheVerdict &verdict = of_heads[i];
    const Place head{static_cast<int>(i) / shape.kv_heads, static_cast<int>(i) % shape.kv_heads, 0};
    std::vector<double> row(d);
    for (int j = 0; j < shape.length_k(head.batch); j++) {
      const std::size_t first = (i * shape.seqlen_k + j) * d;
      const bool rotated = keys && is_rotated_here(shape, head.batch, j);
      for (int k = 0; k < d; k++) row[k] = element_to_float(inputs.type, given[first + k]);
      if (rotated) rotate(inputs, j, row.data());
      std::vector<double> off(d);
      if (rotated) off = fp32_errors(shape, row.data());
      for (int k = 0; k < d; k++) {
        const double is = element_to_float(inputs.type, cache[first + k]);
        bool right = cache[first + k] == given[first + k];
        if (rotated)
          right = nearest(inputs.type, row[k] - off[k]) <= is &&
                  is <= nearest(inputs.type, row[k] + off[k]);
        if (right) continue;
        verdict.wrong++;
        if (verdict.wrong == 1) {
          verdict.place = {head.batch, head.head, j};
          verdict.column = k;
          verdict.is = is;
          verdict.should_be = row[k];
        }
      }
    }
  });
  CacheVerdict all;
  for (const CacheVerdict &verdict : of_heads) {
    const std::size_t wrong = all.wrong + verdict.wrong;
    if (all.wrong == 0) all = verdict;
    all.wrong = wrong;
  }
  return all;
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
  // Those of one head side by side: its keys are then converted once.
  std::sort(places.begin(), places.end(), [](const Place &a, const Place &b) {
    return std::tie(a.batch, a.head, a.row) < std::tie(b.batch, b.head, b.row);
  });
  return places;
}

}  // namespace reference
