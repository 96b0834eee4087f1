// The reference against attention worked out by hand, and the families of inputs against what their
// comments say.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "reference/attention.h"
#include "reference/inputs.h"

namespace {

using reference::attention_row;
using reference::attention_rows;
using reference::Family;
using reference::Inputs;
using reference::make_inputs;
using reference::Row;

std::vector<half> halves(const std::vector<float> &values) {
  std::vector<half> result;
  for (const float value : values) result.push_back(float_to_half(value));
  return result;
}

/// One head, given row after row.
Inputs one_head(int seqlen, int head_dim, const std::vector<float> &Q, const std::vector<float> &K,
                const std::vector<float> &V) {
  return {1, seqlen, head_dim, halves(Q), halves(K), halves(V)};
}

/// Equal but for the rounding of double precision.
doctest::Approx about(double value) {
  return doctest::Approx(value).epsilon(1e-13);
}

constexpr Family kFamilies[] = {Family::kNormal, Family::kRising, Family::kOneHot, Family::kEnds,
                                Family::kEqualKeys};

/// The scores of one query, q . k_j / sqrt(d).
std::vector<double> scores(const Inputs &inputs, int head, int row) {
  const int N = inputs.seqlen, d = inputs.head_dim;
  std::vector<double> s(N);
  for (int j = 0; j < N; j++) {
    for (int k = 0; k < d; k++)
      s[j] += static_cast<double>(half_to_float(inputs.Q[(head * N + row) * d + k])) *
              half_to_float(inputs.K[(head * N + j) * d + k]);
    s[j] /= std::sqrt(d);
  }
  return s;
}

/// Mean and standard deviation of some numbers.
struct Moments {
  double mean, deviation;

  explicit Moments(const std::vector<half> &values) {
    double sum = 0, squares = 0;
    for (const half value : values) {
      const double x = half_to_float(value);
      sum += x;
      squares += x * x;
    }
    const auto n = static_cast<double>(values.size());
    mean = sum / n;
    deviation = std::sqrt(squares / n - mean * mean);
  }
};

bool same_bits(const std::vector<half> &a, const std::vector<half> &b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](half x, half y) { return x.bits == y.bits; });
}

}  // namespace

// --- attention -----------------------------------------------------------------------------------

TEST_CASE("reference: with one key the output is its value") {
  const Inputs inputs = one_head(1, 2, {3, -1}, {0.5f, 7}, {-2.5f, 40});
  const Row row = attention_row(inputs, 0, 0);
  CHECK(row.exact == std::vector<double>{-2.5, 40});
  CHECK(row.rounded == std::vector<double>{-2.5, 40});
}

TEST_CASE("reference: two equal keys give the mean of their values") {
  const Inputs inputs = one_head(2, 1, {3, -5}, {2, 2}, {10, 40});
  for (const int row : {0, 1}) {
    CHECK(attention_row(inputs, 0, row).exact[0] == 25);
    CHECK(attention_row(inputs, 0, row).rounded[0] == 25);
  }
}

TEST_CASE("reference: the score is the dot product over the root of the head dim") {
  // d = 4. Query 0: dot products 2 ln 2 apart, scores ln 2 apart: weights 2/3 and 1/3. ln 2 has to
  // be a product of fp16 numbers: 0.693359375 is the one nearest to it.
  const double ln2 = 0.693359375;
  const Inputs inputs = one_head(2, 4, {0.693359375f, 0, 0, 0, 0, 0, 0, 1},
                                 {2, 0, 0, 0, 0, 9, 9, 0}, {3, 0, 0, 1, 0, 3, 0, 1});
  const std::vector<double> out = attention_row(inputs, 0, 0).exact;
  const double p = std::exp(ln2) / (std::exp(ln2) + 1);
  CHECK(p == doctest::Approx(2.0 / 3).epsilon(1e-3));
  CHECK(out[0] == about(3 * p));
  CHECK(out[1] == about(3 * (1 - p)));
  CHECK(out[2] == 0);
  CHECK(out[3] == about(1));
  // Query 1 is at right angles to both keys.
  CHECK(attention_row(inputs, 0, 1).exact == std::vector<double>{1.5, 1.5, 0, 1});
}

TEST_CASE("reference: each head has its own queries, keys and values") {
  const Inputs inputs{
      2, 2, 1, halves({1, 1, 1, 1}), halves({0, 0, 100, 0}), halves({10, 20, 30, 40})};
  CHECK(attention_row(inputs, 0, 1).exact[0] == 15);
  CHECK(attention_row(inputs, 1, 0).exact[0] == about(30));
}

TEST_CASE("reference: large scores do not overflow") {
  // d = 4: 40 * 50 / sqrt(4) = 1000, and two keys with 999 and -1000.
  const Inputs inputs = one_head(3, 4, {40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                                 {50, 0, 0, 0, 49.9375f, 0, 0, 0, -50, 0, 0, 0},
                                 {1, 0, 0, 0, 3, 0, 0, 0, 60000, 0, 0, 0});
  const Row row = attention_row(inputs, 0, 0);
  const double p = std::exp(40 * (49.9375 - 50) / 2);
  CHECK(row.exact[0] == about((1 + 3 * p) / (1 + p)));
  CHECK(std::isfinite(row.rounded[0]));
}

TEST_CASE("reference: attention with P and O rounded to fp16, by hand") {
  // Scores 0 and -1; e^-1 = 0.36787944 lies between the fp16 numbers 0.36767578 and 0.36791992.
  const Inputs inputs = one_head(2, 1, {1, 1}, {0, -1}, {-37, 100});
  const double p = std::exp(-1.0), p_rounded = 0.367919921875;
  const Row row = attention_row(inputs, 0, 0);
  CHECK(row.exact[0] == about((-37 + 100 * p) / (1 + p)));  // -0.155025...
  // The sum l stays exact. fp16 has steps of 1 / 8192 here.
  CHECK((-37 + 100 * p_rounded) / (1 + p) * 8192 == doctest::Approx(-1245.73).epsilon(1e-5));
  CHECK(row.rounded[0] == -1246.0 / 8192);
}

TEST_CASE("reference: the order of keys does not matter if their values go along") {
  const int N = 64, d = 16;
  Inputs inputs = make_inputs(Family::kNormal, 1, N, d, 3);
  const Row before = attention_row(inputs, 0, 5);
  std::vector<int> order(N);
  for (int j = 0; j < N; j++) order[j] = (j * 27 + 11) % N;
  const Inputs drawn = inputs;
  for (int j = 0; j < N; j++)
    for (int k = 0; k < d; k++) {
      inputs.K[j * d + k] = drawn.K[order[j] * d + k];
      inputs.V[j * d + k] = drawn.V[order[j] * d + k];
    }
  const Row after = attention_row(inputs, 0, 5);
  for (int k = 0; k < d; k++)
    CHECK(after.exact[k] == doctest::Approx(before.exact[k]).epsilon(1e-12));
  // And it does if they do not.
  inputs.V = drawn.V;
  CHECK(attention_row(inputs, 0, 5).exact[0] != doctest::Approx(before.exact[0]).epsilon(1e-3));
}

TEST_CASE("reference: the weights sum to 1") {
  for (const Family family : kFamilies) {
    CAPTURE(reference::family_names()[static_cast<int>(family)]);
    Inputs inputs = make_inputs(family, 2, 32, 8, 1);
    std::fill(inputs.V.begin(), inputs.V.end(), float_to_half(1));
    for (int row = 0; row < 32; row++)
      for (const double out : attention_row(inputs, 1, row).exact) CHECK(out == about(1));
  }
}

TEST_CASE("reference: many rows at once are the same rows, in the order asked for") {
  const Inputs inputs = make_inputs(Family::kNormal, 3, 40, 8, 1);
  std::vector<reference::Place> places;
  for (int i = 0; i < 100; i++) places.push_back({i * 7 % 3, i * 13 % 40});
  const std::vector<Row> rows = attention_rows(inputs, places);
  REQUIRE(rows.size() == places.size());
  for (std::size_t i = 0; i < places.size(); i++) {
    const Row row = attention_row(inputs, places[i].head, places[i].row);
    CHECK(rows[i].exact == row.exact);
    CHECK(rows[i].rounded == row.rounded);
  }
  CHECK(rows[0].exact != rows[1].exact);
  CHECK(attention_rows(inputs, {}).empty());
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
  CHECK(o / l == about(attention_row(inputs, 0, 0).exact[0]));
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
    const Inputs a = make_inputs(family, 3, 32, 16, 7), again = make_inputs(family, 3, 32, 16, 7);
    const Inputs b = make_inputs(family, 3, 32, 16, 8);
    CHECK(a.batch_heads == 3);
    CHECK(a.seqlen == 32);
    CHECK(a.head_dim == 16);
    for (auto matrix : {&Inputs::Q, &Inputs::K, &Inputs::V}) {
      CHECK((a.*matrix).size() == 3 * 32 * 16);
      CHECK(same_bits(a.*matrix, again.*matrix));
      CHECK(!same_bits(a.*matrix, b.*matrix));
    }
    CHECK(!same_bits(a.Q, a.K));
    CHECK(!same_bits(a.K, a.V));
  }
}

TEST_CASE("inputs: heads differ from each other, and do not depend on how many there are") {
  for (const Family family : kFamilies) {
    CAPTURE(reference::family_names()[static_cast<int>(family)]);
    const Inputs three = make_inputs(family, 3, 32, 16, 7), two = make_inputs(family, 2, 32, 16, 7);
    const auto head = [](const std::vector<half> &matrix, int h) {
      return std::vector<half>(matrix.begin() + h * 512, matrix.begin() + (h + 1) * 512);
    };
    for (auto matrix : {&Inputs::Q, &Inputs::K, &Inputs::V}) {
      CHECK(same_bits(head(three.*matrix, 0), head(two.*matrix, 0)));
      CHECK(same_bits(head(three.*matrix, 1), head(two.*matrix, 1)));
      CHECK(!same_bits(head(three.*matrix, 0), head(three.*matrix, 1)));
      CHECK(!same_bits(head(three.*matrix, 1), head(three.*matrix, 2)));
    }
  }
}

TEST_CASE("inputs: normal: mean 0, standard deviation 1, scores of standard deviation 1") {
  const Inputs inputs = make_inputs(Family::kNormal, 4, 256, 64, 1);
  for (auto matrix : {&Inputs::Q, &Inputs::K, &Inputs::V}) {
    const Moments moments(inputs.*matrix);  // of 65536 numbers: good to 1 / 256
    CHECK(std::abs(moments.mean) < 4.0 / 256);
    CHECK(std::abs(moments.deviation - 1) < 4.0 / 256);
    // One in 44 of normal numbers is beyond 2 on each side, and none of these is far out.
    const auto beyond = [&](double limit) {
      return std::count_if((inputs.*matrix).begin(), (inputs.*matrix).end(),
                           [&](half x) { return half_to_float(x) > limit; });
    };
    CHECK(beyond(2) == doctest::Approx(65536 * 0.02275).epsilon(0.1));
    CHECK(beyond(-1) == doctest::Approx(65536 * 0.84134).epsilon(0.01));
    CHECK(beyond(6) == 0);
  }
  double squares = 0;
  for (const double s : scores(inputs, 2, 17)) squares += s * s;
  CHECK(std::sqrt(squares / 256) == doctest::Approx(1).epsilon(0.2));
}

TEST_CASE("inputs: rising: scores climb from -200 to -140, every tile has a new maximum") {
  for (const int d : {64, 128}) {
    const int N = 512;
    const Inputs inputs = make_inputs(Family::kRising, 2, N, d, 1);
    for (const int row : {0, 100, N - 1}) {
      const std::vector<double> s = scores(inputs, 1, row);
      CHECK(s.front() == doctest::Approx(-200).epsilon(0.02));
      CHECK(s.back() == doctest::Approx(-140).epsilon(0.02));
      double before = -INFINITY;
      for (int tile = 0; tile < N; tile += 32) {
        const double maximum = *std::max_element(s.begin() + tile, s.begin() + tile + 32);
        CHECK(maximum > before + 2);  // 60 / 16 a tile, less the noise
        before = maximum;
      }
    }
  }
}

TEST_CASE("inputs: one-hot: each query matches one key, each key one query") {
  const int N = 256;
  for (const int d : {64, 128}) {
    const Inputs inputs = make_inputs(Family::kOneHot, 2, N, d, 1);
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
    const Inputs inputs = make_inputs(family, 1, N, d, 1);
    for (auto matrix : {&Inputs::Q, &Inputs::K, &Inputs::V}) {
      std::set<unsigned> all;
      int negative = 0;
      for (int row = 0; row < N; row++) {
        std::set<unsigned> of_row;
        for (int k = 0; k < d; k++) {
          const unsigned bits = (inputs.*matrix)[row * d + k].bits;
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
  const Inputs inputs = make_inputs(Family::kEqualKeys, 2, N, d, 1);
  for (int head = 0; head < 2; head++) {
    const half *key = &inputs.K[head * N * d];
    int different = 0;
    for (int i = 0; i < N * d; i++) different += key[i].bits != key[i % d].bits;
    CHECK(different == 0);
    for (const int row : {0, 31, N - 1}) {
      const std::vector<double> out = attention_row(inputs, head, row).exact;
      for (int k = 0; k < d; k++) {
        double mean = 0;
        for (int j = 0; j < N; j++) mean += half_to_float(inputs.V[(head * N + j) * d + k]);
        CHECK(out[k] == doctest::Approx(mean / N).epsilon(1e-12));
      }
    }
  }
}
