// The check that every step's answer goes through, given right answers and answers that are
// wrong in the ways that kernels are.
#include "reference/verdict.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reference/inputs.h"

namespace {

using reference::Family;
using reference::Inputs;
using reference::judge;
using reference::Place;
using reference::Verdict;

constexpr int kHeads = 2, kSeqlen = 128, kHeadDim = 64, kTile = 32;
constexpr std::size_t kElements = std::size_t{kHeads} * kSeqlen * kHeadDim;

/// Inputs of a family, all their rows, and the right output in double precision.
struct Case {
  Family family;
  Inputs inputs;
  std::vector<Place> places;
  std::vector<double> exact;  // [kHeads, kSeqlen, kHeadDim]

  explicit Case(Family of) : family(of), inputs(make_inputs(of, kHeads, kSeqlen, kHeadDim, 1)) {
    for (int head = 0; head < kHeads; head++)
      for (int row = 0; row < kSeqlen; row++) places.push_back({head, row});
    for (const reference::Row &row : attention_rows(inputs, places))
      exact.insert(exact.end(), row.exact.begin(), row.exact.end());
  }

  std::string name() const { return reference::family_names()[static_cast<int>(family)]; }
  Verdict verdict(const std::vector<half> &O) const { return judge(inputs, O, places); }
};

const std::vector<Case> &cases() {
  static const std::vector<Case> all = {Case(Family::kNormal), Case(Family::kRising),
                                        Case(Family::kOneHot), Case(Family::kEnds),
                                        Case(Family::kEqualKeys)};
  return all;
}

const Case &normal() {
  return cases()[0];
}

std::vector<half> rounded(const std::vector<double> &values) {
  std::vector<half> result;
  for (const double value : values) result.push_back(double_to_half(value));
  return result;
}

std::size_t element(int head, int row, int column) {
  return (static_cast<std::size_t>(head) * kSeqlen + row) * kHeadDim + column;
}

constexpr half kNan{0x7e00}, kInfinity{0x7c00}, kMinusInfinity{0xfc00}, kPoison{0xffff};

/// What a kernel may get wrong.
struct Mistakes {
  double scale = 1 / std::sqrt(double{kHeadDim});
  int keys = kSeqlen;         // the keys after these are skipped
  bool rescale = true;        // correct l and O when a tile brings a new maximum
  int values_shifted_by = 0;  // key j gets the value of key j + this
  bool head_0_everywhere = false;
};

std::vector<double> as_doubles(const std::vector<half> &matrix) {
  std::vector<double> values;
  for (const half value : matrix) values.push_back(half_to_float(value));
  return values;
}

/// Flash attention, tile by tile, with mistakes; all else in double precision.
std::vector<half> flash_attention(const Inputs &inputs, const Mistakes &mistakes) {
  const std::vector<double> Q = as_doubles(inputs.Q), K = as_doubles(inputs.K);
  const std::vector<double> V = as_doubles(inputs.V);
  std::vector<half> O;
  for (int head = 0; head < kHeads; head++)
    for (int row = 0; row < kSeqlen; row++) {
      const int from = mistakes.head_0_everywhere ? 0 : head;
      const double *q = &Q[element(from, row, 0)];
      double m = -INFINITY, l = 0, o[kHeadDim] = {};
      for (int first = 0; first < mistakes.keys; first += kTile) {
        double s[kTile] = {};
        for (int j = 0; j < kTile; j++) {
          const double *key = &K[element(from, first + j, 0)];
          for (int k = 0; k < kHeadDim; k++) s[j] += q[k] * key[k];
          s[j] *= mistakes.scale;
        }
        const double m_new = std::max(m, *std::max_element(s, s + kTile));
        const double alpha = mistakes.rescale ? std::exp(m - m_new) : 1;
        m = m_new;
        l *= alpha;
        for (double &x : o) x *= alpha;
        for (int j = 0; j < kTile; j++) {
          const double p = std::exp(s[j] - m);
          const int of_key = (first + j + mistakes.values_shifted_by) % kSeqlen;
          const double *value = &V[element(from, of_key, 0)];
          l += p;
          for (int k = 0; k < kHeadDim; k++) o[k] += p * value[k];
        }
      }
      for (const double x : o) O.push_back(double_to_half(x / l));
    }
  return O;
}

/// Judges a wrong answer for every family: it must fail, but for the families that cannot show it.
void check_wrong(const std::function<std::vector<half>(const Case &)> &wrong_output,
                 const std::set<Family> &invisible = {}) {
  for (const Case &c : cases()) {
    CAPTURE(c.name());
    const Verdict verdict = c.verdict(wrong_output(c));
    CAPTURE(verdict.rms_error / verdict.rms_bound);
    CAPTURE(verdict.max_error / verdict.max_bound);
    CHECK(verdict.passed() == (invisible.count(c.family) > 0));
  }
}

}  // namespace

// --- right answers -------------------------------------------------------------------------------

TEST_CASE("verdict: the exact answer rounded to fp16 passes") {
  for (const Case &c : cases()) {
    CAPTURE(c.name());
    const Verdict verdict = c.verdict(rounded(c.exact));
    CHECK(verdict.passed());
    CHECK(verdict.not_finite == 0);
    // Rounding O is part of what the bound allows, rounding P the other part; the bound is twice.
    CHECK(verdict.rms_error > 0);
    CHECK(verdict.rms_error <= verdict.rms_bound / 2);
    CHECK(verdict.max_error <= verdict.max_bound / 2);
  }
}

TEST_CASE("verdict: flash attention without a mistake passes") {
  for (const Case &c : cases()) {
    CAPTURE(c.name());
    CHECK(c.verdict(flash_attention(c.inputs, {})).passed());
  }
}

TEST_CASE("verdict: the bound is twice the error of rounding P and O, in RMS and at most") {
  for (const Case &c : cases()) {
    CAPTURE(c.name());
    double squares = 0, largest = 0;
    std::vector<half> with_rounding;
    const std::vector<reference::Row> rows = attention_rows(c.inputs, c.places);
    for (std::size_t i = 0; i < rows.size(); i++)
      for (int k = 0; k < kHeadDim; k++) {
        const double error = rows[i].rounded[k] - rows[i].exact[k];
        squares += error * error;
        largest = std::max(largest, std::abs(error));
        with_rounding.push_back(double_to_half(rows[i].rounded[k]));
      }
    const Verdict verdict = c.verdict(with_rounding);
    CHECK(verdict.passed());
    CHECK(verdict.rms_bound == doctest::Approx(2 * std::sqrt(squares / kElements)));
    CHECK(verdict.max_bound == doctest::Approx(2 * largest));
    CHECK(std::isfinite(verdict.max_bound));
    CHECK(verdict.rms_error == doctest::Approx(verdict.rms_bound / 2));
    CHECK(verdict.max_error == doctest::Approx(verdict.max_bound / 2));
  }
}

TEST_CASE("verdict: the bound is small beside the answer") {
  // Otherwise anything passes. fp16 has 11 bits: an error of about 2^-12 of each number, twice.
  for (const Case &c : cases()) {
    CAPTURE(c.name());
    double squares = 0;
    for (const double x : c.exact) squares += x * x;
    CHECK(c.verdict(rounded(c.exact)).rms_bound < 0x1p-10 * std::sqrt(squares / kElements));
  }
}

// --- not finite ----------------------------------------------------------------------------------

TEST_CASE("verdict: one NaN or infinity anywhere fails, even if all else is exact") {
  const std::vector<half> right = rounded(normal().exact);
  for (const half bad : {kNan, kInfinity, kMinusInfinity, kPoison})
    for (const auto &[head, row, column] :
         {std::array{0, 0, 0}, {0, 77, 5}, {1, 0, 63}, {kHeads - 1, kSeqlen - 1, kHeadDim - 1}}) {
      CAPTURE(bad.bits);
      CAPTURE(head);
      CAPTURE(row);
      std::vector<half> O = right;
      O[element(head, row, column)] = bad;
      const Verdict verdict = normal().verdict(O);
      CHECK(!verdict.passed());
      CHECK(verdict.not_finite == 1);
      CHECK(verdict.worst.head == head);
      CHECK(verdict.worst.row == row);
      CHECK(verdict.worst_column == column);
      CHECK(!std::isfinite(verdict.worst_output));
      CHECK(verdict.worst_expected == normal().exact[element(head, row, column)]);
    }
}

TEST_CASE("verdict: elements that are not finite are counted, and the first is the worst") {
  std::vector<half> O = rounded(normal().exact);
  O[element(0, 3, 0)] = float_to_half(60000);  // wrong, but finite
  O[element(0, 5, 2)] = kInfinity;
  O[element(0, 5, 9)] = kNan;
  O[element(1, 0, 0)] = kNan;
  O[element(1, 9, 0)] = float_to_half(-60000);
  const Verdict verdict = normal().verdict(O);
  CHECK(!verdict.passed());
  CHECK(verdict.not_finite == 3);
  CHECK(verdict.worst.row == 5);
  CHECK(verdict.worst_column == 2);
}

TEST_CASE("verdict: an output that nobody wrote fails") {
  check_wrong([](const Case &) { return std::vector<half>(kElements, kPoison); });
}

TEST_CASE("verdict: a row that nobody wrote fails") {
  check_wrong([](const Case &c) {
    std::vector<half> O = rounded(c.exact);
    std::fill_n(O.begin() + element(1, kSeqlen - 1, 0), kHeadDim, kPoison);
    return O;
  });
}

// --- wrong numbers -------------------------------------------------------------------------------

TEST_CASE("verdict: one element three times beyond the bound fails, by the maximum alone") {
  for (const Case &c : cases()) {
    if (c.family == Family::kOneHot) continue;  // a bound below fp16's steps: see the next test
    CAPTURE(c.name());
    std::vector<half> O = rounded(c.exact);
    const double bound = c.verdict(O).max_bound;
    // The smallest element, where fp16 is fine enough to hold an error of this size.
    const auto smallest = std::min_element(c.exact.begin(), c.exact.end(), [](double a, double b) {
      return std::abs(a) < std::abs(b);
    });
    const auto i = static_cast<std::size_t>(smallest - c.exact.begin());
    for (const int sign : {1, -1}) {
      O[i] = double_to_half(*smallest + 3 * sign * bound);
      const Verdict verdict = c.verdict(O);
      CHECK(!verdict.passed());
      CHECK(verdict.max_error == doctest::Approx(3 * bound).epsilon(0.05));
      CHECK(verdict.max_bound == bound);
      CHECK(verdict.rms_error <= verdict.rms_bound);
      CHECK(element(verdict.worst.head, verdict.worst.row, verdict.worst_column) == i);
      CHECK(verdict.worst_output == half_to_float(O[i]));
      CHECK(verdict.worst_expected == c.exact[i]);
    }
  }
}

TEST_CASE("verdict: an answer that is one value alone must be right to the last bit") {
  const Case &one_hot = cases()[2];
  for (const std::size_t i : {std::size_t{0}, kElements / 3, kElements - 1}) {
    std::vector<half> O = rounded(one_hot.exact);
    O[i].bits ^= 1;
    CHECK(!one_hot.verdict(O).passed());
  }
}

TEST_CASE("verdict: a small error everywhere fails, by the RMS alone") {
  std::vector<double> off = normal().exact;
  const Verdict right = normal().verdict(rounded(off));
  REQUIRE(1.5 * right.rms_bound < 0.7 * right.max_bound);
  for (std::size_t i = 0; i < off.size(); i++) off[i] += (i % 2 ? 1.5 : -1.5) * right.rms_bound;
  const Verdict verdict = normal().verdict(rounded(off));
  CHECK(!verdict.passed());
  CHECK(verdict.not_finite == 0);
  CHECK(verdict.max_error <= verdict.max_bound);
  CHECK(verdict.rms_error == doctest::Approx(1.5 * right.rms_bound).epsilon(0.1));
}

TEST_CASE("verdict: errors just within both bounds pass") {
  std::vector<double> off = normal().exact;
  const Verdict right = normal().verdict(rounded(off));
  for (std::size_t i = 0; i < off.size(); i++) off[i] += (i % 2 ? 0.8 : -0.8) * right.rms_bound;
  const Verdict verdict = normal().verdict(rounded(off));
  CHECK(verdict.rms_error > 0.8 * verdict.rms_bound);
  CHECK(verdict.passed());
}

TEST_CASE("verdict: only the rows asked for are compared") {
  std::vector<half> O = rounded(normal().exact);
  std::fill_n(O.begin() + element(1, 50, 0), kHeadDim, kNan);
  CHECK(judge(normal().inputs, O, {{0, 50}, {1, 49}, {1, 51}}).passed());
  CHECK(!judge(normal().inputs, O, {{0, 50}, {1, 50}, {1, 51}}).passed());
}

TEST_CASE("verdict: zeros fail") {
  check_wrong([](const Case &) { return std::vector<half>(kElements, half{0}); });
}

TEST_CASE("verdict: a tile of the output left at zero fails") {
  check_wrong([](const Case &c) {
    std::vector<half> O = rounded(c.exact);
    std::fill(O.end() - kTile * kHeadDim, O.end(), half{0});
    return O;
  });
}

// --- mistakes of kernels -------------------------------------------------------------------------

TEST_CASE("verdict: a skipped last tile of keys fails") {
  check_wrong([](const Case &c) { return flash_attention(c.inputs, {.keys = kSeqlen - kTile}); });
}

TEST_CASE("verdict: scores divided by d in place of its root fail") {
  // With equal keys all scores are equal, whatever they are divided by.
  check_wrong([](const Case &c) { return flash_attention(c.inputs, {.scale = 1.0 / kHeadDim}); },
              {Family::kEqualKeys});
}

TEST_CASE("verdict: scores that are not divided at all fail") {
  // A query that matches one key alone does so all the more.
  check_wrong([](const Case &c) { return flash_attention(c.inputs, {.scale = 1}); },
              {Family::kEqualKeys, Family::kOneHot});
}

TEST_CASE("verdict: a sum that is not rescaled for a new maximum fails") {
  check_wrong([](const Case &c) { return flash_attention(c.inputs, {.rescale = false}); },
              {Family::kEqualKeys});
}

TEST_CASE("verdict: rows of the output in another order fail") {
  // With equal keys all queries have one answer.
  const auto permuted = [](int distance) {
    return [=](const Case &c) {
      std::vector<half> O(kElements);
      for (int head = 0; head < kHeads; head++)
        for (int row = 0; row < kSeqlen; row++)
          for (int k = 0; k < kHeadDim; k++)
            O[element(head, row, k)] =
                double_to_half(c.exact[element(head, (row + distance) % kSeqlen, k)]);
      return O;
    };
  };
  check_wrong(permuted(1), {Family::kEqualKeys});
  check_wrong(permuted(kTile), {Family::kEqualKeys});
}

TEST_CASE("verdict: values that go with other keys fail") {
  // Equal keys have equal weights, whichever value they go with.
  for (const int distance : {1, kTile})
    check_wrong(
        [=](const Case &c) { return flash_attention(c.inputs, {.values_shifted_by = distance}); },
        {Family::kEqualKeys});
}

TEST_CASE("verdict: a wrong head's offset fails") {
  check_wrong([](const Case &c) { return flash_attention(c.inputs, {.head_0_everywhere = true}); });
}

TEST_CASE("verdict: columns in another order fail") {
  check_wrong([](const Case &c) {
    std::vector<half> O = rounded(c.exact);
    for (std::size_t i = 0; i < O.size(); i += 2) std::swap(O[i], O[i + 1]);
    return O;
  });
}

// --- which rows ----------------------------------------------------------------------------------

namespace {

/// Inputs of a shape, without the numbers.
Inputs shape(int batch_heads, int seqlen, int head_dim) {
  return {batch_heads, seqlen, head_dim, {}, {}, {}};
}

using HeadRow = std::pair<int, int>;

std::vector<HeadRow> places(const Inputs &inputs, int tile, unsigned long seed = 1) {
  std::vector<HeadRow> result;
  for (const Place &place : reference::places_to_check(inputs, tile, seed))
    result.push_back({place.head, place.row});
  return result;
}

}  // namespace

TEST_CASE("verdict: at a small shape all rows are checked, once each") {
  for (const auto &[heads, seqlen] : {std::array{1, 1}, {3, 128}, {4, 512}}) {
    std::vector<HeadRow> all;
    for (int head = 0; head < heads; head++)
      for (int row = 0; row < seqlen; row++) all.push_back({head, row});
    std::vector<HeadRow> checked = places(shape(heads, seqlen, 64), 64);
    std::sort(checked.begin(), checked.end());
    CHECK(checked == all);
  }
}

TEST_CASE("verdict: at a large shape the ends of tiles are checked, and 256 rows drawn at random") {
  for (const auto &[heads, seqlen, tile] : {std::array{256, 8192, 64},
                                            {256, 8192, 128},
                                            {1, 16384, 128},
                                            {64, 256, 128},
                                            {64, 256, 256},
                                            {1000, 128, 128}}) {
    CAPTURE(heads);
    CAPTURE(seqlen);
    CAPTURE(tile);
    const std::vector<HeadRow> checked = places(shape(heads, seqlen, 128), tile);
    const std::set<HeadRow> set(checked.begin(), checked.end());
    CHECK(checked.size() < 300);
    for (const auto &[head, row] : checked) {
      CHECK(head >= 0);
      CHECK(head < heads);
      CHECK(row >= 0);
      CHECK(row < seqlen);
    }
    const int last = seqlen - tile, second = std::min(tile, last);
    for (const int head : {0, heads - 1})
      for (const int first_row : {0, second, last}) {
        CHECK(set.count({head, first_row}) == 1);
        CHECK(set.count({head, first_row + tile - 1}) == 1);
      }
    std::set<int> of_heads, of_rows;
    for (const auto &[head, row] : checked) {
      of_heads.insert(head);
      of_rows.insert(row);
    }
    CHECK(set.size() > 230);
    CHECK(static_cast<int>(of_heads.size()) > std::min(heads / 2, 150));
    CHECK(static_cast<int>(of_rows.size()) > std::min(seqlen / 2, 200));
  }
}

TEST_CASE("verdict: the rows drawn depend on the seed alone") {
  const Inputs large = shape(256, 8192, 128);
  CHECK(places(large, 64, 5) == places(large, 64, 5));
  CHECK(places(large, 64, 5) != places(large, 64, 6));
}
