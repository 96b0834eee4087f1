// SPDX-License-Identifier: MIT
// The reference against attention worked out by hand, and the families of inputs against what their
// comments say.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "reference/attention.h"
#include "reference/inputs.h"
#include "reference/parallel.h"

namespace {

using reference::attention_row;
using reference::Elements;
using reference::Family;
using reference::Inputs;
using reference::make_inputs;
using reference::Row;
using reference::Shape;

Elements halves(const std::vector<float> &values) {
  Elements result;
  for (const float value : values) result.push_back(float_to_half(value).bits);
  return result;
}

float value_of(std::uint16_t bits) {
  return half_to_float(half{bits});
}

/// As many heads of K and V as of Q, as many keys as queries, and no mask.
Shape plain(int heads, int seqlen, int head_dim) {
  return {.heads = heads,
          .kv_heads = heads,
          .seqlen_q = seqlen,
          .seqlen_k = seqlen,
          .head_dim = head_dim};
}

std::vector<double> output(const Inputs &inputs, int head, int row) {
  return attention_row(inputs, {0, head, row}).output;
}

Inputs draw(Family family, int heads, int seqlen, int head_dim, std::uint64_t seed) {
  return make_inputs(family, plain(heads, seqlen, head_dim), Type::kFp16, seed);
}

/// One head, given row after row.
Inputs one_head(int seqlen, int head_dim, const std::vector<float> &Q, const std::vector<float> &K,
                const std::vector<float> &V) {
  return {plain(1, seqlen, head_dim), Type::kFp16, halves(Q), halves(K), halves(V)};
}

/// Equal but for the rounding of double precision.
doctest::Approx about(double value) {
  return doctest::Approx(value).epsilon(1e-13);
}

constexpr Family kFamilies[] = {Family::kNormal, Family::kRising, Family::kOneHot, Family::kEnds,
                                Family::kEqualKeys};

/// The scores of one query, q . k_j / sqrt(d).
std::vector<double> scores(const Inputs &inputs, int head, int row) {
  const int N = inputs.shape.seqlen_k, d = inputs.shape.head_dim;
  std::vector<double> s(N);
  for (int j = 0; j < N; j++) {
    for (int k = 0; k < d; k++)
      s[j] += static_cast<double>(value_of(inputs.Q[(head * N + row) * d + k])) *
              value_of(inputs.K[(head * N + j) * d + k]);
    s[j] /= std::sqrt(d);
  }
  return s;
}

/// Mean and standard deviation of some numbers.
struct Moments {
  double mean, deviation;

  explicit Moments(const Elements &values) {
    double sum = 0, squares = 0;
    for (const std::uint16_t value : values) {
      const double x = value_of(value);
      sum += x;
      squares += x * x;
    }
    const auto n = static_cast<double>(values.size());
    mean = sum / n;
    deviation = std::sqrt(squares / n - mean * mean);
  }
};

}  // namespace

// --- attention -----------------------------------------------------------------------------------

TEST_CASE("reference: with one key the output is its value") {
  const Inputs inputs = one_head(1, 2, {3, -1}, {0.5f, 7}, {-2.5f, 40});
  CHECK(output(inputs, 0, 0) == std::vector<double>{-2.5, 40});
}

TEST_CASE("reference: two equal keys give the mean of their values") {
  const Inputs inputs = one_head(2, 1, {3, -5}, {2, 2}, {10, 40});
  for (const int row : {0, 1}) CHECK(output(inputs, 0, row)[0] == 25);
}

TEST_CASE("reference: the score is the dot product over the root of the head dim") {
  // d = 4. Query 0: dot products 2 ln 2 apart, scores ln 2 apart: weights 2/3 and 1/3. ln 2 has to
  // be a product of fp16 numbers: 0.693359375 is the one nearest to it.
  const double ln2 = 0.693359375;
  const Inputs inputs = one_head(2, 4, {0.693359375f, 0, 0, 0, 0, 0, 0, 1},
                                 {2, 0, 0, 0, 0, 9, 9, 0}, {3, 0, 0, 1, 0, 3, 0, 1});
  const std::vector<double> out = output(inputs, 0, 0);
  const double p = std::exp(ln2) / (std::exp(ln2) + 1);
  CHECK(p == doctest::Approx(2.0 / 3).epsilon(1e-3));
  CHECK(out[0] == about(3 * p));
  CHECK(out[1] == about(3 * (1 - p)));
  CHECK(out[2] == 0);
  CHECK(out[3] == about(1));
  // Query 1 is at right angles to both keys.
  CHECK(output(inputs, 0, 1) == std::vector<double>{1.5, 1.5, 0, 1});
}

TEST_CASE("reference: each head has its own queries, keys and values") {
  const Inputs inputs{plain(2, 2, 1), Type::kFp16, halves({1, 1, 1, 1}), halves({0, 0, 100, 0}),
                      halves({10, 20, 30, 40})};
  CHECK(output(inputs, 0, 1)[0] == 15);
  CHECK(output(inputs, 1, 0)[0] == about(30));
}

TEST_CASE("reference: large scores do not overflow") {
  // d = 4: 40 * 50 / sqrt(4) = 1000, and two keys with 999 and -1000.
  const Inputs inputs = one_head(3, 4, {40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                                 {50, 0, 0, 0, 49.9375f, 0, 0, 0, -50, 0, 0, 0},
                                 {1, 0, 0, 0, 3, 0, 0, 0, 60000, 0, 0, 0});
  const double p = std::exp(40 * (49.9375 - 50) / 2);
  CHECK(output(inputs, 0, 0)[0] == about((1 + 3 * p) / (1 + p)));
}

TEST_CASE("reference: the order of keys does not matter if their values go along") {
  const int N = 64, d = 16;
  Inputs inputs = draw(Family::kNormal, 1, N, d, 3);
  const std::vector<double> before = output(inputs, 0, 5);
  std::vector<int> order(N);
  for (int j = 0; j < N; j++) order[j] = (j * 27 + 11) % N;
  const Inputs drawn = inputs;
  for (int j = 0; j < N; j++)
    for (int k = 0; k < d; k++) {
      inputs.K[j * d + k] = drawn.K[order[j] * d + k];
      inputs.V[j * d + k] = drawn.V[order[j] * d + k];
    }
  const std::vector<double> after = output(inputs, 0, 5);
  for (int k = 0; k < d; k++) CHECK(after[k] == doctest::Approx(before[k]).epsilon(1e-12));
  // And it does if they do not.
  inputs.V = drawn.V;
  CHECK(output(inputs, 0, 5)[0] != doctest::Approx(before[0]).epsilon(1e-3));
}

TEST_CASE("reference: the weights sum to 1") {
  for (const Family family : kFamilies) {
    CAPTURE(reference::family_names()[static_cast<int>(family)]);
    Inputs inputs = draw(family, 2, 32, 8, 1);
    std::fill(inputs.V.begin(), inputs.V.end(), float_to_half(1).bits);
    for (int row = 0; row < 32; row++)
      for (const double out : output(inputs, 1, row)) CHECK(out == about(1));
  }
}

TEST_CASE("reference: a row tells its scores and weights, of the keys that it sees") {
  Inputs inputs = draw(Family::kNormal, 2, 32, 8, 1);
  inputs.shape.causal = true;
  const Row row = attention_row(inputs, {0, 1, 11});
  CHECK(row.keys.first == 0);
  CHECK(row.keys.end == 12);
  REQUIRE(row.scores.size() == 12);
  const std::vector<double> all = scores(inputs, 1, 11);
  for (int j = 0; j < 12; j++) {
    CHECK(row.scores[j] == about(all[j]));
    CHECK(row.weights[j] / row.weights[0] == about(std::exp(all[j] - all[0])));
  }
  CHECK(std::accumulate(row.weights.begin(), row.weights.end(), 0.0) == about(1));
}

// --- what becomes of a score ---------------------------------------------------------------------

TEST_CASE(
    "reference: a scale, a soft cap, a bias by distance, a sink, and the log-sum-exp, by hand") {
  // Two heads, two queries of 2 and 4 and three keys of 1, 2 and -1, with values 1, 2 and 3: the second query
  // stands at the third key, the first at the second.
  Inputs inputs{{.heads = 2, .kv_heads = 2, .seqlen_q = 2, .seqlen_k = 3, .head_dim = 1},
                Type::kFp16,
                halves({2, 4, 2, 4}),
                halves({1, 2, -1, 1, 2, -1}),
                halves({1, 2, 3, 1, 2, 3})};
  const auto row = [&](int head, int query) { return attention_row(inputs, {0, head, query}); };
  const auto softmax = [](double a, double b, double c, double sink) {
    const double l = std::exp(a) + std::exp(b) + std::exp(c) + sink;
    return std::pair((std::exp(a) + 2 * std::exp(b) + 3 * std::exp(c)) / l, std::log(l));
  };
  const auto check = [&](int head, int query, double a, double b, double c, double sink = 0) {
    const auto [o, lse] = softmax(a, b, c, sink);
    CHECK(row(head, query).output[0] == about(o));
    CHECK(row(head, query).log_sum_exp == about(lse));
  };
  check(0, 0, 2, 4, -2);
  inputs.shape.scale = 0.5f;
  check(0, 1, 2, 4, -2);
  inputs.shape.softcap = 3;
  check(0, 1, 3 * std::tanh(2 / 3.0), 3 * std::tanh(4 / 3.0), 3 * std::tanh(-2 / 3.0));
  inputs.shape.alibi = true;
  inputs.slopes = {0.5f, 2};
  check(0, 1, 3 * std::tanh(2 / 3.0) - 1, 3 * std::tanh(4 / 3.0) - 0.5, 3 * std::tanh(-2 / 3.0));
  inputs.shape.softcap = 0;
  check(1, 0, 1 - 2, 2, -1 - 2);
  inputs.shape.alibi = false;
  inputs.shape.sink_logits = true;
  inputs.sink_logits = {-1, 3};
  check(0, 0, 1, 2, -1, std::exp(-1.0));
  check(1, 0, 1, 2, -1, std::exp(3.0));
  const Row with_sink = row(1, 0);
  CHECK(with_sink.weights[0] + with_sink.weights[1] + with_sink.weights[2] +
            with_sink.sink_weight ==
        about(1));
}

TEST_CASE("reference: V with fewer or more columns than K gives those columns of the output") {
  for (const int columns : {8, 24}) {
    const Shape shape{.batch = 2,
                      .heads = 4,
                      .kv_heads = 2,
                      .seqlen_q = 5,
                      .seqlen_k = 9,
                      .head_dim = 16,
                      .head_dim_v = columns};
    const Inputs inputs = make_inputs(Family::kNormal, shape, Type::kFp16, 3);
    CHECK(inputs.V.size() == std::size_t(2 * 2 * 9 * columns));
    // The same problem with V in the first columns of K's width, or one half of V after the other.
    Inputs same = inputs;
    same.shape.head_dim_v = 0;
    for (int first = 0; first < columns; first += 8) {
      same.V.assign(inputs.K.size(), 0);
      for (int row = 0; row < 2 * 2 * 9; row++)
        std::copy_n(&inputs.V[row * columns + first], 8, &same.V[row * 16]);
      for (const reference::Place place : {reference::Place{0, 0, 0}, reference::Place{1, 3, 4}}) {
        const Row wide = attention_row(inputs, place), narrow = attention_row(same, place);
        REQUIRE(wide.output.size() == std::size_t(columns));
        CHECK(wide.log_sum_exp == narrow.log_sum_exp);
        for (int k = 0; k < 8; k++) CHECK(wide.output[first + k] == narrow.output[k]);
      }
    }
  }
}

TEST_CASE("reference: a row that sees nothing has the log-sum-exp of its sink, or -infinity") {
  Inputs inputs = draw(Family::kNormal, 2, 4, 8, 1);
  inputs.shape.seqlen_k = 2;
  inputs.shape.causal = true;
  CHECK(attention_row(inputs, {0, 1, 0}).log_sum_exp == -INFINITY);
  inputs.sink_logits = {1, -7};
  CHECK(attention_row(inputs, {0, 1, 0}).log_sum_exp == -7);
  CHECK(attention_row(inputs, {0, 1, 0}).output == std::vector<double>(8));
}

TEST_CASE("inputs: ALiBi's slopes fall to 2^-8, and sinks differ from head to head") {
  Shape shape = plain(8, 4, 8);
  shape.alibi = shape.sink_logits = true;
  const Inputs inputs = make_inputs(Family::kNormal, shape, Type::kFp16, 1);
  REQUIRE(inputs.slopes.size() == 8);
  for (int h = 0; h < 8; h++) CHECK(inputs.slopes[h] == std::exp2(-1.0f * (h + 1)));
  REQUIRE(inputs.sink_logits.size() == 8);
  CHECK(std::set<float>(inputs.sink_logits.begin(), inputs.sink_logits.end()).size() == 8);
}

// --- who sees whom -------------------------------------------------------------------------------

TEST_CASE("reference: who sees whom: no mask, causal, a window, lengths, drawn") {
  const auto picture = [](const Shape &shape, int batch) {
    std::vector<std::string> rows(shape.seqlen_q);
    for (int i = 0; i < shape.seqlen_q; i++)
      for (int j = 0; j < shape.seqlen_k; j++) rows[i] += sees(shape, batch, i, j) ? '#' : '.';
    return rows;
  };
  using Picture = std::vector<std::string>;
  CHECK(picture({.seqlen_q = 2, .seqlen_k = 3}, 0) == Picture{"###", "###"});
  CHECK(picture({.seqlen_q = 3, .seqlen_k = 3, .causal = true}, 0) == Picture{"#..", "##.", "###"});
  // The last query stands where the last key stands.
  CHECK(picture({.seqlen_q = 2, .seqlen_k = 5, .causal = true}, 0) == Picture{"####.", "#####"});
  CHECK(picture({.seqlen_q = 5, .seqlen_k = 2, .causal = true}, 0) ==
        Picture{"..", "..", "..", "#.", "##"});
  CHECK(picture({.seqlen_q = 4, .seqlen_k = 4, .causal = true, .window = 2}, 0) ==
        Picture{"#...", "##..", ".##.", "..##"});
  CHECK(picture({.seqlen_q = 4, .seqlen_k = 4, .window = 1}, 0) ==
        Picture{"#...", ".#..", "..#.", "...#"});
  CHECK(picture({.seqlen_q = 4, .seqlen_k = 2, .window = 1}, 0) == Picture{"..", "..", "#.", ".#"});
  CHECK(picture({.seqlen_q = 6, .seqlen_k = 6, .window = 2, .sinks = 2}, 0) ==
        Picture{"#.....", "##....", "###...", "####..", "##.##.", "##..##"});
  CHECK(picture({.seqlen_q = 3, .seqlen_k = 2, .window = 1, .sinks = 9}, 0) ==
        Picture{"..", "#.", "##"});
  const Shape ragged{.batch = 2,
                     .seqlen_q = 3,
                     .seqlen_k = 4,
                     .causal = true,
                     .lengths_q = {3, 2},
                     .lengths_k = {2, 4}};
  CHECK(picture(ragged, 0) == Picture{"....", "#...", "##.."});
  CHECK(picture(ragged, 1) == Picture{"###.", "####", "...."});
  CHECK(picture({.seqlen_q = 2, .seqlen_k = 2, .lengths_k = {0}}, 0) == Picture{"..", ".."});
  // Windows to both sides.
  const auto sides = [&](Shape shape, int left, int right) {
    shape.window_left = left, shape.window_right = right;
    return picture(shape, 0);
  };
  const Shape square{.seqlen_q = 4, .seqlen_k = 4};
  CHECK(sides(square, 0, 0) == Picture{"#...", ".#..", "..#.", "...#"});
  CHECK(sides(square, 1, 1) == Picture{"##..", "###.", ".###", "..##"});
  CHECK(sides(square, 2, 0) == Picture{"#...", "##..", "###.", ".###"});
  CHECK(sides(square, -1, 1) == Picture{"##..", "###.", "####", "####"});
  CHECK(sides(square, 1, -1) == Picture{"####", "####", ".###", "..##"});
  CHECK(sides(square, 2147483647, 2147483647) == Picture{"####", "####", "####", "####"});
  CHECK(sides({.seqlen_q = 4, .seqlen_k = 4, .causal = true}, 1, 2) ==
        Picture{"#...", "##..", ".##.", "..##"});
  CHECK(sides({.seqlen_q = 2, .seqlen_k = 5}, 1, 0) == Picture{"..##.", "...##"});
  CHECK(sides({.seqlen_q = 5, .seqlen_k = 2}, 0, 1) == Picture{"..", "..", "#.", "##", ".#"});
}

TEST_CASE("reference: the pairs counted are the pairs that see each other") {
  for (const bool causal : {false, true})
    for (const auto &[window, sinks] :
         {std::pair{0, 0}, {1, 0}, {3, 0}, {3, 2}, {1, 100}, {2147483647, 0}})
      for (const auto &[seqlen_q, seqlen_k] : {std::pair{7, 7}, {3, 9}, {9, 3}}) {
        const Shape shape{.batch = 2,
                          .heads = 6,
                          .kv_heads = 2,
                          .seqlen_q = seqlen_q,
                          .seqlen_k = seqlen_k,
                          .causal = causal,
                          .window = window,
                          .sinks = sinks,
                          .lengths_q = {seqlen_q, seqlen_q - 1},
                          .lengths_k = {seqlen_k, 2}};
        int pairs = 0, read = 0;
        for (int batch = 0; batch < 2; batch++)
          for (int j = 0; j < seqlen_k; j++) {
            bool seen = false;
            for (int i = 0; i < seqlen_q; i++) {
              pairs += sees(shape, batch, i, j);
              seen = seen || sees(shape, batch, i, j);
            }
            read += seen;
          }
        CHECK(visible_pairs(shape) == 6 * pairs);
        CHECK(keys_read(shape) == read);
      }
  CHECK(visible_pairs(plain(16, 8192, 128)) == 16.0 * 8192 * 8192);
}

TEST_CASE(
    "reference: a query that sees nothing has the output 0, others an average of what they see") {
  Shape shape = plain(1, 4, 1);
  shape.causal = true;
  shape.lengths_q = {3};
  shape.lengths_k = {2};
  const Inputs inputs{shape, Type::kFp16, halves({0, 0, 0, 0}), halves({1, 2, 3, 4}),
                      halves({10, 20, 30, 40})};
  CHECK(output(inputs, 0, 0)[0] == 0);
  CHECK(output(inputs, 0, 1)[0] == 10);
  CHECK(output(inputs, 0, 2)[0] == 15);
  CHECK(output(inputs, 0, 3)[0] == 0);
}

TEST_CASE(
    "reference: query heads share keys and values in groups, within an element of the batch") {
  const Shape shape{
      .batch = 2, .heads = 4, .kv_heads = 2, .seqlen_q = 1, .seqlen_k = 1, .head_dim = 1};
  const Inputs inputs{shape, Type::kFp16, halves({1, 1, 1, 1, 1, 1, 1, 1}), halves({0, 0, 0, 0}),
                      halves({10, 20, 30, 40})};
  for (int batch = 0; batch < 2; batch++)
    for (int head = 0; head < 4; head++)
      CHECK(attention_row(inputs, {batch, head, 0}).output[0] == 10 + 20 * batch + head / 2 * 10);
}

TEST_CASE("reference: the keys of a row with sinks are the sinks, then the window") {
  Inputs inputs = draw(Family::kNormal, 1, 8, 2, 1);
  inputs.shape.window = 2;
  inputs.shape.sinks = 1;
  const Row row = attention_row(inputs, {0, 0, 6});
  REQUIRE(row.keys.count() == 3);
  const std::vector<double> all = scores(inputs, 0, 6);
  for (const auto &[i, key] : {std::pair{0, 0}, {1, 5}, {2, 6}}) {
    CHECK(row.keys[i] == key);
    CHECK(row.scores[i] == about(all[key]));
  }
}

TEST_CASE("reference: rotation turns each pair by its own angle, of cosines and sines in fp32") {
  Shape shape = plain(1, 4, 4);
  for (const Rope rope : {Rope::kHalves, Rope::kNeighbours}) {
    shape.rope = rope;
    Inputs inputs{shape, Type::kFp16, {}, {}, {}, reference::rotation_of(shape)};
    std::vector<double> row = {1, 0, 0, 3};
    rotate(inputs, 3, row.data());
    // Angles 3 and 3 / 100.
    const double c0 = static_cast<float>(std::cos(3.0)), s0 = static_cast<float>(std::sin(3.0));
    const double c1 = static_cast<float>(std::cos(0.03)), s1 = static_cast<float>(std::sin(0.03));
    CHECK(row == (rope == Rope::kHalves ? std::vector<double>{c0, -3 * s1, s0, 3 * c1}
                                        : std::vector<double>{c0, s0, -3 * s1, 3 * c1}));
  }
}

TEST_CASE("reference: of a row whose first columns turn, the others stay as they are") {
  Shape shape = plain(1, 4, 6);
  shape.rope_dim = 4;
  for (const Rope rope : {Rope::kHalves, Rope::kNeighbours}) {
    shape.rope = rope;
    Inputs inputs{shape, Type::kFp16, {}, {}, {}, reference::rotation_of(shape)};
    std::vector<double> row = {1, 0, 0, 3, 5, 7}, first = {1, 0, 0, 3};
    rotate(inputs, 3, row.data());
    inputs.shape.head_dim = 4, inputs.shape.rope_dim = 0;
    rotate(inputs, 3, first.data());
    first.insert(first.end(), {5, 7});
    CHECK(row == first);
  }
}

TEST_CASE("reference: rotated scores depend on the distance of query and key alone") {
  // As many sequences as there are keys before the query, all with the same query and key.
  Shape shape = plain(1, 64, 8);
  shape.rope = Rope::kHalves;
  Inputs inputs = make_inputs(Family::kEqualKeys, shape, Type::kFp16, 1);
  for (int i = 1; i < 64; i++) std::copy_n(inputs.Q.begin(), 8, inputs.Q.begin() + i * 8);
  const std::vector<double> first = attention_row(inputs, {0, 0, 20}).scores;
  const std::vector<double> second = attention_row(inputs, {0, 0, 33}).scores;
  for (int j = 0; j < 51; j++) CHECK(first[j] == doctest::Approx(second[j + 13]).epsilon(1e-6));
  CHECK(first[20] != doctest::Approx(first[21]).epsilon(1e-3));
}

TEST_CASE("reference: the keys of a cache are rotated already, those beside it are not") {
  Shape shape = plain(1, 8, 4);
  shape.seqlen_q = 1;
  shape.rope = Rope::kHalves;
  Inputs fresh = make_inputs(Family::kNormal, shape, Type::kFp16, 1), cached = fresh;
  cached.shape.seqlen_new = 3;
  const std::vector<double> turned = attention_row(fresh, {0, 0, 0}).scores;
  const std::vector<double> as_they_are = attention_row(cached, {0, 0, 0}).scores;
  for (int j = 0; j < 8; j++) CHECK((turned[j] == as_they_are[j]) == (j == 0 || j >= 5));
}

TEST_CASE("reference: bf16 elements are read as bf16") {
  const auto bits = [](float value) { return float_to_bf16(value).bits; };
  const Inputs inputs{plain(1, 2, 1),
                      Type::kBf16,
                      {bits(1), bits(1)},
                      {bits(0), bits(0)},
                      {bits(0x1p90f), bits(0x1p91f)}};
  CHECK(output(inputs, 0, 0)[0] == 1.5 * 0x1p90);
}

TEST_CASE("reference: parallel_for calls once for each number, and passes an exception on") {
  std::vector<std::atomic<int>> calls(1000);
  parallel_for(calls.size(), [&](std::size_t i) { calls[i]++; });
  CHECK(std::all_of(calls.begin(), calls.end(), [](int n) { return n == 1; }));
  parallel_for(0, [](std::size_t) { FAIL("called"); });
  std::atomic<int> before = 0;
  CHECK_THROWS_WITH(parallel_for(100000,
                                 [&](std::size_t i) {
                                   if (i == 10) throw std::runtime_error("ten");
                                   before++;  // slowly: the other threads must hear of it in time
                                   std::this_thread::sleep_for(std::chrono::microseconds(10));
                                 }),
                    "ten");
  CHECK(before < 99999);
}

// --- numbers that the book prints ----------------------------------------------------------------

TEST_CASE("reference: the online softmax of two tiles, as the book works it out") {
  // Scores in two tiles of two, and a value for each.
  const double s[2][2] = {{1, 3}, {2, 5}}, v[2][2] = {{10, 20}, {30, 40}};
  const auto four_decimals = [](double value) { return std::round(value * 1e4) / 1e4; };

  double m = -INFINITY, l = 0, o = 0, alpha = 0, p[2] = {};
  const auto add_tile = [&](int tile) {
    const double m_old = m;
    m = std::max({m, s[tile][0], s[tile][1]});
    alpha = std::exp(m_old - m);  // corrects what was summed under the old maximum
    for (const int j : {0, 1}) p[j] = std::exp(s[tile][j] - m);
    l = alpha * l + p[0] + p[1];
    o = alpha * o + p[0] * v[tile][0] + p[1] * v[tile][1];
  };
  add_tile(0);
  CHECK(m == 3);
  CHECK(alpha == 0);
  CHECK(four_decimals(p[0]) == 0.1353);
  CHECK(p[1] == 1);
  CHECK(four_decimals(l) == 1.1353);
  CHECK(four_decimals(o) == 21.3534);

  add_tile(1);
  CHECK(m == 5);
  CHECK(four_decimals(alpha) == 0.1353);
  CHECK(four_decimals(p[0]) == 0.0498);
  CHECK(p[1] == 1);
  CHECK(four_decimals(l) == 1.2034);
  CHECK(four_decimals(o) == 44.3835);
  CHECK(four_decimals(o / l) == 36.8806);

  // The definition, all four keys at once: with d = 1 and q = 1 the scores are the keys.
  const Inputs inputs = one_head(4, 1, {1, 1, 1, 1}, {1, 3, 2, 5}, {10, 20, 30, 40});
  CHECK(o / l == about(output(inputs, 0, 0)[0]));
}

TEST_CASE("reference: where e^s overflows: fp32 from 89 on, double from 710 on") {
  volatile float fits = 88, too_large = 89;
  CHECK(std::isfinite(std::exp(float{fits})));
  CHECK(std::isinf(std::exp(float{too_large})));
  volatile double fits_double = 709, too_large_double = 710;
  CHECK(std::isfinite(std::exp(double{fits_double})));
  CHECK(std::isinf(std::exp(double{too_large_double})));
}

// --- inputs --------------------------------------------------------------------------------------

TEST_CASE("inputs: each family has a name") {
  const std::vector<std::string> names = {"normal", "rising",     "one-hot",
                                          "ends",   "equal-keys", "huge"};
  CHECK(reference::family_names() == names);
}

TEST_CASE("inputs: the same seed gives the same numbers, another seed others") {
  for (const Family family : kFamilies) {
    CAPTURE(reference::family_names()[static_cast<int>(family)]);
    const Inputs a = draw(family, 3, 32, 16, 7), again = draw(family, 3, 32, 16, 7);
    const Inputs b = draw(family, 3, 32, 16, 8);
    CHECK(a.shape.heads == 3);
    CHECK(a.shape.seqlen_k == 32);
    CHECK(a.shape.head_dim == 16);
    for (auto matrix : {&Inputs::Q, &Inputs::K, &Inputs::V}) {
      CHECK((a.*matrix).size() == 3 * 32 * 16);
      CHECK(a.*matrix == again.*matrix);
      CHECK(a.*matrix != b.*matrix);
    }
    CHECK(a.Q != a.K);
    CHECK(a.K != a.V);
  }
}

TEST_CASE("inputs: where V is a part of K, it has the first columns of each key") {
  const Shape shape{.batch = 2,
                    .heads = 4,
                    .kv_heads = 2,
                    .seqlen_q = 1,
                    .seqlen_k = 9,
                    .head_dim = 24,
                    .head_dim_v = 16,
                    .latent = true};
  for (const Family family : kFamilies) {
    const Inputs inputs = make_inputs(family, shape, Type::kFp16, 3);
    REQUIRE(inputs.V.size() == 2 * 2 * 9 * 16);
    for (int row = 0; row < 2 * 2 * 9; row++)
      CHECK(std::equal(&inputs.V[row * 16], &inputs.V[row * 16] + 16, &inputs.K[row * 24]));
  }
}

TEST_CASE("inputs: heads differ from each other, and do not depend on how many there are") {
  for (const Family family : kFamilies) {
    CAPTURE(reference::family_names()[static_cast<int>(family)]);
    const Inputs three = draw(family, 3, 32, 16, 7), two = draw(family, 2, 32, 16, 7);
    const auto head = [](const Elements &matrix, int h) {
      return Elements(matrix.begin() + h * 512, matrix.begin() + (h + 1) * 512);
    };
    for (auto matrix : {&Inputs::Q, &Inputs::K, &Inputs::V}) {
      CHECK(head(three.*matrix, 0) == head(two.*matrix, 0));
      CHECK(head(three.*matrix, 1) == head(two.*matrix, 1));
      CHECK(head(three.*matrix, 0) != head(three.*matrix, 1));
      CHECK(head(three.*matrix, 1) != head(three.*matrix, 2));
    }
  }
}

TEST_CASE("inputs: normal: mean 0, standard deviation 1, scores of standard deviation 1") {
  const Inputs inputs = draw(Family::kNormal, 4, 256, 64, 1);
  for (auto matrix : {&Inputs::Q, &Inputs::K, &Inputs::V}) {
    const Moments moments(inputs.*matrix);  // of 65536 numbers: good to 1 / 256
    CHECK(std::abs(moments.mean) < 4.0 / 256);
    CHECK(std::abs(moments.deviation - 1) < 4.0 / 256);
    // One in 44 of normal numbers is beyond 2 on each side, and none of these is far out.
    const auto beyond = [&](double limit) {
      return std::count_if((inputs.*matrix).begin(), (inputs.*matrix).end(),
                           [&](std::uint16_t x) { return value_of(x) > limit; });
    };
    CHECK(beyond(2) == doctest::Approx(65536 * 0.02275).epsilon(0.1));
    CHECK(beyond(-1) == doctest::Approx(65536 * 0.84134).epsilon(0.01));
    CHECK(beyond(6) == 0);
  }
  double squares = 0;
  for (const double s : scores(inputs, 2, 17)) squares += s * s;
  CHECK(std::sqrt(squares / 256) == doctest::Approx(1).epsilon(0.2));
}

TEST_CASE("inputs: rising: scores climb by 60 from -10240, every tile has a new maximum") {
  for (const Type type : {Type::kFp16, Type::kBf16})
    for (const int d : {64, 128}) {
      CAPTURE(d);
      const int N = 512;
      const Inputs inputs = make_inputs(Family::kRising, plain(2, N, d), type, 1);
      for (const int row : {0, 100, N - 1}) {
        const std::vector<double> s = attention_row(inputs, {0, 1, row}).scores;
        CHECK(s.front() == doctest::Approx(-10240).epsilon(0.005));
        CHECK(s.back() - s.front() == doctest::Approx(60).epsilon(0.05));
        double before = -INFINITY;
        for (int tile = 0; tile < N; tile += 32) {
          const double maximum = *std::max_element(s.begin() + tile, s.begin() + tile + 32);
          CHECK(maximum > before + 1.5);  // 60 / 16 a tile, less the noise
          before = maximum;
        }
      }
    }
}

TEST_CASE("inputs: rising: fp32 adds its products exactly, in any order") {
  for (const int d : {64, 128}) {
    const Inputs inputs = draw(Family::kRising, 1, 128, d, 1);
    for (const int row : {0, 127})
      for (int j = 0; j < 128; j++) {
        float forward = 0, backward = 0;
        for (int k = 0; k < d; k++) {
          forward += value_of(inputs.Q[row * d + k]) * value_of(inputs.K[j * d + k]);
          const int last = d - 1 - k;
          backward += value_of(inputs.Q[row * d + last]) * value_of(inputs.K[j * d + last]);
        }
        CHECK(forward == backward);
        CHECK(forward / std::sqrt(d) == about(scores(inputs, 0, row)[j]));
      }
  }
}

TEST_CASE("inputs: drawn for any shape: grouped heads, other lengths, bf16") {
  const Shape shape{
      .batch = 2, .heads = 6, .kv_heads = 2, .seqlen_q = 5, .seqlen_k = 9, .head_dim = 8};
  for (const Type type : {Type::kFp16, Type::kBf16})
    for (std::size_t i = 0; i < reference::family_names().size(); i++) {
      CAPTURE(reference::family_names()[i]);
      const Inputs inputs = make_inputs(static_cast<Family>(i), shape, type, 3);
      CHECK(inputs.type == type);
      CHECK(inputs.Q.size() == 2 * 6 * 5 * 8);
      CHECK(inputs.K.size() == 2 * 2 * 9 * 8);
      CHECK(inputs.V.size() == 2 * 2 * 9 * 8);
      for (auto matrix : {&Inputs::Q, &Inputs::K, &Inputs::V})
        for (const std::uint16_t bits : inputs.*matrix)
          CHECK(std::isfinite(element_to_float(type, bits)));
      for (int head = 0; head < 6; head++)
        for (const double x : attention_row(inputs, {1, head, 4}).output) CHECK(std::isfinite(x));
    }
  // A query of any head of a group matches one of its group's keys.
  const Inputs one_hot = make_inputs(Family::kOneHot, shape, Type::kBf16, 3);
  for (int head = 0; head < 6; head++) {
    const std::vector<double> s = attention_row(one_hot, {1, head, 0}).scores;
    CHECK(*std::max_element(s.begin(), s.end()) == about(8 * std::sqrt(8)));
  }
}

TEST_CASE("inputs: one-hot: each query matches one key, each key one query") {
  const int N = 256;
  for (const int d : {64, 128}) {
    const Inputs inputs = draw(Family::kOneHot, 2, N, d, 1);
    std::set<int> matched;
    int in_place = 0;
    for (int row = 0; row < N; row++) {
      const std::vector<double> s = scores(inputs, 1, row);
      const auto best = std::max_element(s.begin(), s.end());
      const int key = static_cast<int>(best - s.begin());
      matched.insert(key);
      in_place += key == row;
      CHECK(*best == about(8 * std::sqrt(d)));
      double rest = 0;
      for (int j = 0; j < N; j++)
        if (j != key) rest += std::exp(s[j] - *best);
      CHECK(rest < 1e-3);
    }
    CHECK(static_cast<int>(matched.size()) == N);
    CHECK(in_place < 8);  // a permutation that moves: on average one stays
  }
}

TEST_CASE("inputs: ends and huge: fp16's largest, 1, smallest normal and subnormal, nothing else") {
  const int N = 128, d = 16;
  for (const Family family : {Family::kEnds, Family::kHuge}) {
    const Inputs inputs = draw(family, 1, N, d, 1);
    for (auto matrix : {&Inputs::Q, &Inputs::K, &Inputs::V}) {
      std::set<unsigned> all;
      int negative = 0;
      for (int row = 0; row < N; row++) {
        std::set<unsigned> of_row;
        for (int k = 0; k < d; k++) {
          const unsigned bits = (inputs.*matrix)[row * d + k];
          of_row.insert(bits & 0x7fff);
          negative += bits >= 0x8000;
        }
        CHECK(of_row.size() == 1);
        all.insert(of_row.begin(), of_row.end());
      }
      using Bits = std::set<unsigned>;
      const Bits expected = matrix != &Inputs::K ? Bits{0x7bff, 0x3c00, 0x0400, 0x0001}  // 65504, 1
                            : family == Family::kEnds
                                ? Bits{0x1400, 0x0c00, 0x0400, 0x0001}   // 2^-10, 2^-12
                                : Bits{0x7800, 0x3c00, 0x0400, 0x0001};  // 2^15, 1
      CHECK(all == expected);
      CHECK(negative == doctest::Approx(N * d / 2).epsilon(0.2));
    }
  }
}

TEST_CASE("inputs: equal-keys: the output is the mean of V") {
  const int N = 64, d = 16;
  const Inputs inputs = draw(Family::kEqualKeys, 2, N, d, 1);
  for (int head = 0; head < 2; head++) {
    const std::uint16_t *key = &inputs.K[head * N * d];
    int different = 0;
    for (int i = 0; i < N * d; i++) different += key[i] != key[i % d];
    CHECK(different == 0);
    for (const int row : {0, 31, N - 1}) {
      const std::vector<double> out = output(inputs, head, row);
      for (int k = 0; k < d; k++) {
        double mean = 0;
        for (int j = 0; j < N; j++) mean += value_of(inputs.V[(head * N + j) * d + k]);
        CHECK(out[k] == doctest::Approx(mean / N).epsilon(1e-12));
      }
    }
  }
}

// --- fp8 -------------------------------------------------------------------------------------------

TEST_CASE("fp8: a head's largest element is 448, and each is the nearest to what was drawn") {
  const Shape shape{
      .batch = 2, .heads = 6, .kv_heads = 2, .seqlen_q = 5, .seqlen_k = 9, .head_dim = 8};
  for (std::size_t family = 0; family < reference::family_names().size(); family++) {
    CAPTURE(reference::family_names()[family]);
    const Inputs drawn = make_inputs_to_quantise(static_cast<Family>(family), shape, 3);
    const Inputs inputs = make_inputs(static_cast<Family>(family), shape, Type::kFp8, 3);
    CHECK(drawn.type == Type::kBf16);
    CHECK(inputs.type == Type::kFp8);
    const auto check = [&](const reference::Elements &codes, const reference::Elements &from,
                           const std::vector<float> &scales, std::size_t heads, std::size_t rows) {
      REQUIRE(scales.size() == heads);
      REQUIRE(codes.size() == heads * rows * 8);
      for (std::size_t head = 0; head < heads; head++) {
        float largest = 0;
        for (std::size_t i = head * rows * 8; i < (head + 1) * rows * 8; i++) {
          const float value = element_to_float(Type::kFp8, codes[i]);
          const float exact = element_to_float(Type::kBf16, from[i]) / scales[head];
          largest = std::max(largest, std::abs(value));
          CHECK(codes[i] < 0x100);
          CHECK(std::abs(value - exact) <= std::max(0x1p-4f * std::abs(exact), 0x1p-10f));
        }
        CHECK(largest == 448);
      }
    };
    check(inputs.Q, drawn.Q, inputs.scales.Q, 12, 5);
    check(inputs.K, drawn.K, inputs.scales.K, 4, 9);
    check(inputs.V, drawn.V, inputs.scales.V, 4, 9);
    for (int head = 0; head < 6; head++)
      for (const double x : attention_row(inputs, {1, head, 4}).output) CHECK(std::isfinite(x));
  }
}

TEST_CASE("fp8: scores and outputs are of the elements times their head's scales") {
  const Shape shape{
      .batch = 2, .heads = 4, .kv_heads = 2, .seqlen_q = 3, .seqlen_k = 5, .head_dim = 8};
  const Inputs inputs = make_inputs(Family::kNormal, shape, Type::kFp8, 1);
  const reference::Place place{1, 2, 1};  // query head 6 of all, key head 3
  const reference::Row row = attention_row(inputs, place);
  double sum = 0;
  for (int k = 0; k < 8; k++)
    sum += static_cast<double>(element_to_float(Type::kFp8, inputs.Q[(6 * 3 + 1) * 8 + k])) *
           element_to_float(Type::kFp8, inputs.K[(3 * 5 + 4) * 8 + k]);
  CHECK(row.scores[4] == about(sum * inputs.scales.Q[6] * inputs.scales.K[3] / std::sqrt(8.0)));
  Inputs other = inputs;
  other.scales.V[3] *= 2;
  for (int k = 0; k < 8; k++)
    CHECK(attention_row(other, place).output[k] == about(2 * row.output[k]));
  other = inputs;
  other.scales.Q[5] = other.scales.K[2] = other.scales.V[2] = 7;  // of others
  CHECK(attention_row(other, place).output == row.output);
}

TEST_CASE("fp8: rising scores climb by 60 from -80, where 13 bits tell them apart") {
  const Inputs inputs = make_inputs(Family::kRising, plain(1, 512, 128), Type::kFp8, 1);
  for (const int row : {0, 511}) {
    const std::vector<double> s = attention_row(inputs, {0, 0, row}).scores;
    CHECK(s.front() == doctest::Approx(-80).epsilon(0.05));
    CHECK(s.back() - s.front() == doctest::Approx(60).epsilon(0.1));
  }
}
