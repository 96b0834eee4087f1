// SPDX-License-Identifier: MIT
// The check that every step's answer goes through, given right answers and answers that are
// wrong in the ways that kernels are.
#include "reference/verdict.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "reference/inputs.h"

namespace {

using reference::Elements;
using reference::Family;
using reference::Inputs;
using reference::judge;
using reference::Place;
using reference::Verdict;

constexpr int kHeads = 2, kSeqlen = 128, kHeadDim = 64, kTile = 32;
constexpr std::size_t kElements = std::size_t{kHeads} * kSeqlen * kHeadDim;

Inputs draw(Family family, Type type = Type::kFp16, std::uint64_t seed = 1) {
  return make_inputs(family,
                     {.heads = kHeads,
                      .kv_heads = kHeads,
                      .seqlen_q = kSeqlen,
                      .seqlen_k = kSeqlen,
                      .head_dim = kHeadDim},
                     type, seed);
}

/// Inputs of a family, all their rows, and the right output in double precision.
struct Case {
  Family family;
  Inputs inputs;
  std::vector<Place> places;
  std::vector<double> exact;  // [kHeads, kSeqlen, kHeadDim]

  explicit Case(Family of) : family(of), inputs(draw(of)) {
    for (int head = 0; head < kHeads; head++)
      for (int row = 0; row < kSeqlen; row++) places.push_back({0, head, row});
    for (const Place &place : places)
      for (const double x : attention_row(inputs, place).output) exact.push_back(x);
  }

  std::string name() const { return reference::family_names()[static_cast<int>(family)]; }
  Verdict verdict(const Elements &O) const { return judge(inputs, O, places); }
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

Elements rounded(const std::vector<double> &values) {
  Elements result;
  for (const double value : values) result.push_back(double_to_half(value).bits);
  return result;
}

std::size_t element(int head, int row, int column) {
  return (static_cast<std::size_t>(head) * kSeqlen + row) * kHeadDim + column;
}

constexpr std::uint16_t kNan = 0x7e00, kInfinity = 0x7c00, kMinusInfinity = 0xfc00,
                        kPoison = 0xffff;

/// What a kernel may get wrong.
struct Mistakes {
  double scale = 1 / std::sqrt(double{kHeadDim});
  int keys = kSeqlen;         // the keys after these are skipped
  bool rescale = true;        // correct l and O when a tile brings a new maximum
  int values_shifted_by = 0;  // key j gets the value of key j + this
  bool head_0_everywhere = false;
  int dropped_key = -1;
  double scale_of_P = 1;          // of P alone, not of l
  bool P_in_fp16 = false;         // a rounding, not a mistake
  double scale_when_rounded = 1;  // P times this is what is rounded
  bool O_in_fp16 = false;         // O is rounded after each key
};

double in_half(double x) {
  return half_to_float(double_to_half(x));
}

double value_of(std::uint16_t bits) {
  return half_to_float(half{bits});
}

std::vector<double> as_doubles(const Elements &matrix) {
  std::vector<double> values;
  for (const std::uint16_t bits : matrix) values.push_back(value_of(bits));
  return values;
}

/// Flash attention, tile by tile, with mistakes; all else in double precision.
Elements flash_attention(const Inputs &inputs, const Mistakes &mistakes) {
  const std::vector<double> Q = as_doubles(inputs.Q), K = as_doubles(inputs.K);
  const std::vector<double> V = as_doubles(inputs.V);
  Elements O;
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
          if (first + j == mistakes.dropped_key) continue;
          l += p;
          const double scale = mistakes.scale_when_rounded;
          const double p_used =
              mistakes.scale_of_P * (mistakes.P_in_fp16 ? in_half(p * scale) / scale : p);
          for (int k = 0; k < kHeadDim; k++) {
            o[k] += p_used * value[k];
            if (mistakes.O_in_fp16) o[k] = in_half(o[k]);
          }
        }
      }
      for (const double x : o) O.push_back(double_to_half(x / l).bits);
    }
  return O;
}

/// What a kernel in fp8 may do otherwise.
struct In8Bits {
  double scale_when_rounded = 16;   // P times this is rounded to e4m3
  double V_scale = 1, K_scale = 1;  // beside the head's own
  int swapped = 0;                  // of 16 keys' values, those of so many pairs
  bool sums_of_13_bits = true;
};
Verdict judge_in_8_bits(Family family, const In8Bits &how);

/// Judges a wrong answer for every family: it must fail, but for the families that cannot show it.
void check_wrong(const std::function<Elements(const Case &)> &wrong_output,
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
    CHECK(verdict.rms_error > 0);
    CHECK(verdict.rms_error <= verdict.rms_bound / 2);
  }
}

TEST_CASE(
    "verdict: flash attention without a mistake passes, P in double or in fp16 at any scale") {
  for (const Case &c : cases()) {
    CAPTURE(c.name());
    CHECK(c.verdict(flash_attention(c.inputs, {})).passed());
    // (The last two put each row's largest P between two numbers.)
    for (const double scale :
         {1.0, 1.0 / 3, 0.7, 1.0001, 1.3, 1.9, 101.0, 1 + 27 * 0x1p-11, 1 + 57 * 0x1p-11}) {
      CAPTURE(scale);
      // (With 101 and values of 65504 a single key's output may round to infinity.)
      if (c.family == Family::kEnds && scale != 1) continue;
      const Mistakes right{.P_in_fp16 = true, .scale_when_rounded = scale};
      const Verdict verdict = c.verdict(flash_attention(c.inputs, right));
      CAPTURE(verdict.rms_error / verdict.rms_bound);
      CAPTURE(verdict.max_error / verdict.max_bound);
      CHECK(verdict.passed());
    }
  }
}

TEST_CASE("verdict: the exact answer rounded to bf16 passes") {
  for (const Family family : {Family::kNormal, Family::kRising, Family::kOneHot, Family::kEnds}) {
    const Inputs inputs = draw(family, Type::kBf16);
    Elements O;
    for (const Place &place : normal().places)
      for (const double x : attention_row(inputs, place).output)
        O.push_back(double_to_bf16(x).bits);
    CHECK(judge(inputs, O, normal().places).passed());
  }
}

TEST_CASE("verdict: the bound of an element, by hand") {
  // Two keys with weights 2/3 and 1/3 (but for 2^-11), values 3 and -1.
  const Inputs inputs{{.seqlen_q = 1, .seqlen_k = 2, .head_dim = 1},
                      Type::kFp16,
                      {double_to_half(1).bits},
                      {double_to_half(0.693359375).bits, 0},
                      {double_to_half(3).bits, double_to_half(-1).bits}};
  const double w = 1 / (1 + std::exp(-0.693359375)), s = 0.693359375;
  const double o = 3 * w - (1 - w);
  const double e = 0x1p-23 * (1 + 2 / 16.0);  // of fp32: d = 1, N = 2
  // Only a few keys: not the tail of their sum, but all errors at their bounds.
  const double at_most = 3 * w * (0x1p-11 + 0x1p-24 * s + e) + (1 - w) * (0x1p-11 + e);
  const double half_ulp = 0x1p-11;  // o is 1.667
  const Verdict verdict = judge(inputs, {double_to_half(o + 0x1p-10).bits}, {{0, 0, 0}});
  CHECK(verdict.max_bound == doctest::Approx(at_most + half_ulp));
  // The first key has more than half of the weight and counts fully, the other for a third.
  const double c_squared =
      9 * w * w * (0x1p-22 + 0x1p-48 * s * s + e * e) + (1 - w) * (1 - w) * (0x1p-22 / 3 + e * e);
  const double B = c_squared + half_ulp * half_ulp / 3, L = std::log(1 / (1e-6 / 3));
  CHECK(verdict.rms_bound == doctest::Approx(std::sqrt(B * (1 + 2 * std::sqrt(L) + 2 * L))));
  CHECK(verdict.worst_expected == doctest::Approx(o));
}

TEST_CASE("verdict: many keys: the bound is the tail of the sum of their errors, by hand") {
  // 256 equal keys with values of +-1: each error of P may be at its bound in all of them.
  const int N = 256;
  Inputs inputs{{.seqlen_q = 1, .seqlen_k = N, .head_dim = 1}, Type::kBf16, {0}, {}, {}};
  for (int j = 0; j < N; j++) {
    inputs.K.push_back(0);
    inputs.V.push_back(double_to_bf16(j % 4 ? 1 : -1).bits);  // o = 0.5
  }
  const double e = 0x1p-23 * (1 + N / 16.0);
  const double c = std::sqrt((0x1p-16 + e * e) / N);
  const double t = c * std::sqrt(2 * std::log(2 * 1 / (1e-6 / 3)));
  const Verdict verdict = judge(inputs, {double_to_bf16(0.49).bits}, {{0, 0, 0}});
  CHECK(verdict.max_bound == doctest::Approx(t + 0x1p-9));  // half a unit in the last place of 0.5
}

TEST_CASE("verdict: the bound is small beside the answer") {
  // Otherwise anything passes. fp16 has 11 bits: an error of about 2^-12 of each number; where one
  // key has all weight, up to 2^-11 of P and of O, times what few columns cost.
  for (const Case &c : cases()) {
    CAPTURE(c.name());
    double squares = 0;
    for (const double x : c.exact) squares += x * x;
    CHECK(c.verdict(rounded(c.exact)).rms_bound < 0x1p-10 * std::sqrt(squares / kElements));
  }
}

TEST_CASE("verdict: an output of zeros is right where nothing is seen, and only there") {
  Inputs inputs = normal().inputs;
  inputs.shape.lengths_k = {0};
  CHECK(judge(inputs, Elements(kElements, 0), normal().places).passed());
  Elements O(kElements, 0);
  O[element(1, 7, 3)] = 1;  // 2^-24
  const Verdict verdict = judge(inputs, O, normal().places);
  CHECK(!verdict.passed());
  CHECK(verdict.worst.row == 7);
  inputs.shape.lengths_k = {1};
  CHECK(!judge(inputs, Elements(kElements, 0), normal().places).passed());
}

// --- not finite ----------------------------------------------------------------------------------

TEST_CASE("verdict: one NaN or infinity anywhere fails, even if all else is exact") {
  const Elements right = rounded(normal().exact);
  for (const std::uint16_t bad : {kNan, kInfinity, kMinusInfinity, kPoison})
    for (const auto &[head, row, column] :
         {std::array{0, 0, 0}, {0, 77, 5}, {1, 0, 63}, {kHeads - 1, kSeqlen - 1, kHeadDim - 1}}) {
      CAPTURE(bad);
      CAPTURE(head);
      CAPTURE(row);
      Elements O = right;
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
  Elements O = rounded(normal().exact);
  O[element(0, 3, 0)] = float_to_half(60000).bits;  // wrong, but finite
  O[element(0, 5, 2)] = kInfinity;
  O[element(0, 5, 9)] = kNan;
  O[element(1, 0, 0)] = kNan;
  O[element(1, 9, 0)] = float_to_half(-60000).bits;
  const Verdict verdict = normal().verdict(O);
  CHECK(!verdict.passed());
  CHECK(verdict.not_finite == 3);
  CHECK(verdict.worst.row == 5);
  CHECK(verdict.worst_column == 2);
}

TEST_CASE("verdict: an output that nobody wrote fails") {
  check_wrong([](const Case &) { return Elements(kElements, kPoison); });
}

TEST_CASE("verdict: a row that nobody wrote fails") {
  check_wrong([](const Case &c) {
    Elements O = rounded(c.exact);
    std::fill_n(O.begin() + element(1, kSeqlen - 1, 0), kHeadDim, kPoison);
    return O;
  });
}

// --- wrong numbers -------------------------------------------------------------------------------

TEST_CASE("verdict: one element beyond its bound fails, by the maximum alone") {
  for (const Case &c : cases()) {
    CAPTURE(c.name());
    const Elements right = rounded(c.exact);
    int lonely = 0;
    for (std::size_t i = 0; i < kElements; i += 1811) {
      // Its own bound: that of the worst element if it is wrong alone.
      Elements O = right;
      O[i] = double_to_half(c.exact[i] + 0.1 + std::abs(c.exact[i])).bits;
      const Verdict far = c.verdict(O);
      REQUIRE(element(far.worst.head, far.worst.row, far.worst_column) == i);
      for (const int sign : {1, -1}) {
        const double error = 2 * sign * far.max_bound;
        O[i] = double_to_half(c.exact[i] + error).bits;
        const Verdict verdict = c.verdict(O);
        CHECK(!verdict.passed());
        CHECK(verdict.max_error > verdict.max_bound);
        CHECK(verdict.max_bound == far.max_bound);
        CHECK(verdict.worst_output == value_of(O[i]));
        CHECK(verdict.worst_expected == c.exact[i]);
        lonely += verdict.rms_error <= verdict.rms_bound;
      }
    }
    CHECK(lonely > 13);  // of 20
  }
}

TEST_CASE("verdict: an answer that is one value alone must be right to the last two bits") {
  // P of the one key may be rounded, and then O: an error of one unit in the last place each.
  const Case &one_hot = cases()[2];
  for (const std::size_t i : {std::size_t{0}, kElements / 3, kElements - 1}) {
    Elements O = rounded(one_hot.exact);
    O[i] += 2;
    CHECK(!one_hot.verdict(O).passed());
  }
}

TEST_CASE("verdict: a small error everywhere fails, by the RMS alone") {
  std::vector<double> off = normal().exact;
  const Verdict right = normal().verdict(rounded(off));
  for (std::size_t i = 0; i < off.size(); i++) off[i] += (i % 2 ? 1.2 : -1.2) * right.rms_bound;
  const Verdict verdict = normal().verdict(rounded(off));
  CHECK(!verdict.passed());
  CHECK(verdict.not_finite == 0);
  CHECK(verdict.max_error <= verdict.max_bound);
  CHECK(verdict.rms_error == doctest::Approx(1.2 * right.rms_bound).epsilon(0.1));
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
  Elements O = rounded(normal().exact);
  std::fill_n(O.begin() + element(1, 50, 0), kHeadDim, kNan);
  CHECK(judge(normal().inputs, O, {{0, 0, 50}, {0, 1, 49}, {0, 1, 51}}).passed());
  CHECK(!judge(normal().inputs, O, {{0, 0, 50}, {0, 1, 50}, {0, 1, 51}}).passed());
}

TEST_CASE("verdict: zeros fail") {
  check_wrong([](const Case &) { return Elements(kElements, std::uint16_t{0}); });
}

TEST_CASE("verdict: a tile of the output left at zero fails") {
  check_wrong([](const Case &c) {
    Elements O = rounded(c.exact);
    std::fill(O.end() - kTile * kHeadDim, O.end(), std::uint16_t{0});
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
      Elements O(kElements, 0);
      for (int head = 0; head < kHeads; head++)
        for (int row = 0; row < kSeqlen; row++)
          for (int k = 0; k < kHeadDim; k++)
            O[element(head, row, k)] =
                double_to_half(c.exact[element(head, (row + distance) % kSeqlen, k)]).bits;
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

TEST_CASE("verdict: one row that is off by 1% fails") {
  check_wrong([](const Case &c) {
    std::vector<double> off = c.exact;
    // A row that holds a large number: in the family of the ends some answers are subnormal.
    const auto largest = std::max_element(off.begin(), off.end());
    const auto row = static_cast<std::size_t>(largest - off.begin()) / kHeadDim;
    for (int k = 0; k < kHeadDim; k++) off[row * kHeadDim + k] *= 1.01;
    return rounded(off);
  });
}

TEST_CASE("verdict: one key dropped fails") {
  check_wrong([](const Case &c) {
    return flash_attention(c.inputs, {.dropped_key = kSeqlen - 1, .P_in_fp16 = true});
  });
}

TEST_CASE("verdict: P too large by one part in 512, and l not, fails") {
  check_wrong([](const Case &c) {
    return flash_attention(c.inputs, {.scale_of_P = 1 + 0x1p-9, .P_in_fp16 = true});
  });
}

TEST_CASE("verdict: all of the output too large by little fails, by the slope alone") {
  // The first two of each are what the other bounds let pass.
  const auto by_slope_alone = [](const Verdict &verdict, double factor) {
    CAPTURE(factor);
    CHECK(verdict.rms_error <= verdict.rms_bound);
    CHECK(verdict.max_error <= verdict.max_bound);
    CHECK(!verdict.passed());
    CHECK(verdict.slope == doctest::Approx(factor - 1).epsilon(0.3));
  };
  for (const double factor : {1.0004, 0.9996, 1.0003}) {
    const Mistakes mistakes{.scale_of_P = factor, .P_in_fp16 = true};
    by_slope_alone(normal().verdict(flash_attention(normal().inputs, mistakes)), factor);
  }
  const Inputs in_bf16 = draw(Family::kNormal, Type::kBf16);
  for (const double factor : {1.002, 0.998, 1.0018}) {
    Elements O;
    for (const Place &place : normal().places)
      for (const double x : attention_row(in_bf16, place).output)
        O.push_back(double_to_bf16(factor * x).bits);
    by_slope_alone(judge(in_bf16, O, normal().places), factor);
  }
  for (const double factor : {1.04, 0.96, 1.03})
    by_slope_alone(judge_in_8_bits(Family::kNormal, {.V_scale = factor}), factor);
}

TEST_CASE("verdict: O summed in fp16 fails") {
  // Where one key or a few have all weight there is little to sum.
  check_wrong(
      [](const Case &c) {
        return flash_attention(c.inputs, {.P_in_fp16 = true, .O_in_fp16 = true});
      },
      {Family::kOneHot, Family::kRising});
}

TEST_CASE("verdict: columns in another order fail") {
  check_wrong([](const Case &c) {
    Elements O = rounded(c.exact);
    for (std::size_t i = 0; i < O.size(); i += 2) std::swap(O[i], O[i + 1]);
    return O;
  });
}

// --- rotation ------------------------------------------------------------------------------------

namespace {

/// What a kernel may do with a problem that has a rotation.
struct Rotated {
  bool rounds = true;    // what it has rotated; no mistake
  int position_off = 0;  // of the keys
  bool in_bf16 = false;  // rounds fp16 to as few bits
  int pairs_off = 0;     // it takes the angle of another pair
};

/// Attention of keys and queries that are rotated and rounded to the type; all else in double.
Elements rotated_attention(const Inputs &inputs, const Rotated &how) {
  Inputs turned = inputs;  // nothing left to rotate
  turned.shape.rope = Rope::kNone;
  Inputs angles = inputs;
  if (how.pairs_off)
    for (auto *table : {&angles.rotation.cos, &angles.rotation.sin})
      std::rotate(table->begin(), table->begin() + how.pairs_off, table->end());
  const auto round = [&](double x) {
    const Type type = how.in_bf16 ? Type::kBf16 : inputs.type;
    const double nearest =
        type == Type::kFp16 ? value_of(double_to_half(x).bits) : bf16_to_float(double_to_bf16(x));
    return float_to_element(inputs.type, static_cast<float>(nearest));
  };
  const int d = inputs.shape.head_dim;
  for (Elements *matrix : {&turned.Q, &turned.K})
    for (int head = 0; head < kHeads; head++)
      for (int i = 0; i < kSeqlen; i++) {
        std::uint16_t *elements = &(*matrix)[element(head, i, 0)];
        std::vector<double> row(d);
        for (int k = 0; k < d; k++) row[k] = element_to_float(inputs.type, elements[k]);
        const bool key = matrix == &turned.K;
        rotate(angles, key ? (i + how.position_off) % kSeqlen : i, row.data());
        for (int k = 0; k < d; k++) elements[k] = round(row[k]);
      }
  Elements O;
  for (int head = 0; head < kHeads; head++) {
    const reference::KeyValues keys = key_values(turned, {0, head, 0}, 0, kSeqlen);
    for (int i = 0; i < kSeqlen; i++)
      for (const double x : attention_row(turned, keys, {0, head, i}).output)
        O.push_back(inputs.type == Type::kFp16 ? double_to_half(x).bits : double_to_bf16(x).bits);
  }
  return O;
}

Inputs draw_rotated(Family family, Type type, Rope rope, std::uint64_t seed) {
  Inputs inputs = draw(family, type, seed);
  inputs.shape.rope = rope;
  inputs.rotation = rotation_of(inputs.shape);
  return inputs;
}

}  // namespace

TEST_CASE("verdict: a kernel that rounds what it rotates passes, whatever the seed") {
  double worst_rms = 0, worst_max = 0;
  for (const Family family : {Family::kNormal, Family::kOneHot, Family::kEqualKeys})
    for (const Type type : {Type::kFp16, Type::kBf16})
      for (std::uint64_t seed = 1; seed <= 10; seed++) {
        const Rope rope = seed % 2 ? Rope::kHalves : Rope::kNeighbours;
        const Inputs inputs = draw_rotated(family, type, rope, seed);
        const Verdict verdict = judge(inputs, rotated_attention(inputs, {}), normal().places);
        CHECK(verdict.passed());
        worst_rms = std::max(worst_rms, verdict.rms_error / verdict.rms_bound);
        worst_max = std::max(worst_max, verdict.max_error / verdict.max_bound);
      }
  // The rounding of what is rotated is much of what the bounds allow.
  CHECK(worst_rms > 0.25);
  CHECK(worst_max > 0.33);
}

TEST_CASE("verdict: a rotation by another angle fails, and one that is rounded to bf16 in fp16") {
  for (const Family family : {Family::kNormal, Family::kOneHot})
    for (const Rope rope : {Rope::kHalves, Rope::kNeighbours}) {
      const Inputs inputs = draw_rotated(family, Type::kFp16, rope, 1);
      const auto passes = [&](const Rotated &how) {
        return judge(inputs, rotated_attention(inputs, how), normal().places).passed();
      };
      CHECK(passes({}));
      CHECK(!passes({.position_off = 1}));
      CHECK(!passes({.in_bf16 = true}));
      CHECK(!passes({.pairs_off = 1}));
      Inputs other = inputs;
      other.shape.rope = rope == Rope::kHalves ? Rope::kNeighbours : Rope::kHalves;
      CHECK(!judge(inputs, rotated_attention(other, {}), normal().places).passed());
    }
}

TEST_CASE("verdict: the bound of an element with a rotation, by hand") {
  // Two keys and one query, at position 1, d = 2: all turn by that angle or by none.
  Inputs inputs{{.seqlen_q = 1, .seqlen_k = 2, .head_dim = 2, .rope = Rope::kHalves},
                Type::kFp16,
                {double_to_half(1).bits, 0},
                {double_to_half(1).bits, 0, 0, double_to_half(1).bits},
                {double_to_half(3).bits, 0, double_to_half(-1).bits, 0}};
  inputs.rotation = rotation_of(inputs.shape);
  const double c = static_cast<float>(std::cos(1.0)), s = static_cast<float>(std::sin(1.0));
  const double q[] = {c, s}, k[2][2] = {{1, 0}, {-s, c}}, v[] = {3, -1}, root = std::sqrt(2.0);
  const double s0 = c / root, s1 = (c * -s + s * c) / root;
  const double w0 = 1 / (1 + std::exp(s1 - s0)), w[] = {w0, 1 - w0};
  const double o = w[0] * v[0] + w[1] * v[1];
  const auto h = [](double x, double y) {
    return std::max(0x1p-11 * std::abs(x), 0x1p-25) + 0x1p-23 * (std::abs(x) + std::abs(y));
  };
  double at_most = 0;
  for (int i = 0; i < 2; i++) {
    double sum = 0;
    for (int j = 0; j < 2; j++) {
      sum += w[j] * (v[j] - o) * k[j][i];
      at_most += h(k[j][i], k[j][1 - i]) * w[j] * std::abs(v[j] - o) * q[i] / root;
    }
    at_most += h(q[i], q[1 - i]) * std::abs(sum) / root;
  }
  const double e = 0x1p-23 * (2 + 2 / 16.0), scores[] = {s0, s1};
  for (int j = 0; j < 2; j++)
    at_most += w[j] * std::abs(v[j]) * (0x1p-11 + 0x1p-24 * std::abs(scores[j]) + e);
  const Verdict verdict = judge(inputs, {double_to_half(o + 0.01).bits, 0}, {{0, 0, 0}});
  CHECK(verdict.worst_expected == doctest::Approx(o));
  CHECK(verdict.max_bound == doctest::Approx(at_most + 0x1p-11).epsilon(1e-6));  // o: 1 to 2
}

// --- a cache -------------------------------------------------------------------------------------

TEST_CASE(
    "verdict: a cache holds its keys bit by bit, new ones as rotation and rounding leave them") {
  Inputs inputs = draw_rotated(Family::kNormal, Type::kFp16, Rope::kHalves, 1);
  inputs.shape.seqlen_new = 2;
  inputs.shape.lengths_k = {100};
  const auto verdict = [&](const Elements &cache, bool keys) {
    return judge_cache(inputs, cache, keys);
  };
  Elements K = inputs.K;
  for (int head = 0; head < kHeads; head++)
    for (int row = 98; row < 100; row++) {
      std::vector<double> turned(kHeadDim);
      for (int k = 0; k < kHeadDim; k++) turned[k] = value_of(K[element(head, row, k)]);
      rotate(inputs, row, turned.data());
      for (int k = 0; k < kHeadDim; k++) K[element(head, row, k)] = double_to_half(turned[k]).bits;
    }
  CHECK(verdict(K, true).wrong == 0);
  CHECK(verdict(inputs.V, false).wrong == 0);
  CHECK(verdict(inputs.K, true).wrong > 2 * 2 * kHeadDim - 10);  // not rotated
  for (const auto &[row, wrong] : {std::pair{0, 1}, {97, 1}, {98, 1}, {99, 1}, {100, 0}}) {
    for (const bool keys : {true, false}) {
      Elements cache = keys ? K : inputs.V;
      cache[element(1, row, 5)] += 2;  // of its last bit
      const reference::CacheVerdict found = verdict(cache, keys);
      CHECK(found.wrong == wrong);
      if (!wrong) continue;
      CHECK(found.place.head == 1);
      CHECK(found.place.row == row);
      CHECK(found.column == 5);
      CHECK(found.is == value_of(cache[element(1, row, 5)]));
      cache[element(1, row, 5)] = kPoison;
      CHECK(verdict(cache, keys).wrong == 1);
    }
  }
}

// --- which rows ----------------------------------------------------------------------------------

namespace {

/// A shape with as many queries as keys and as many heads of both.
reference::Shape shape(int batch, int heads, int seqlen, int head_dim) {
  return {.batch = batch,
          .heads = heads,
          .kv_heads = heads,
          .seqlen_q = seqlen,
          .seqlen_k = seqlen,
          .head_dim = head_dim};
}

using Where = std::array<int, 3>;  // batch, head, row

std::vector<Where> places(const reference::Shape &of, int tile, unsigned long seed = 1) {
  std::vector<Where> result;
  for (const Place &place : reference::places_to_check(of, tile, seed))
    result.push_back({place.batch, place.head, place.row});
  return result;
}

}  // namespace

// --- the log-sum-exp -----------------------------------------------------------------------------

namespace {

/// The log-sum-exp of all rows, as a kernel has it that does everything in fp32: of keys in tiles, whose maximum
/// may lag.
std::vector<float> in_fp32(const Case &of, float lag) {
  std::vector<float> lse;
  const float scale_log2 = 1.44269504f / std::sqrt(float{kHeadDim});
  for (const Place &place : of.places) {
    float m = -1e30f, l = 0;
    for (int j = 0; j < kSeqlen; j++) {
      float s = 0;
      for (int k = 0; k < kHeadDim; k++)
        s += half_to_float(half{of.inputs.Q[element(place.head, place.row, k)]}) *
             half_to_float(half{of.inputs.K[element(place.head, j, k)]});
      if (s * scale_log2 > m + lag) {
        const float m_new = s * scale_log2;
        l *= std::exp2(m - m_new);
        m = m_new;
      }
      l += std::exp2(std::fma(s, scale_log2, -m));
    }
    lse.push_back((m + std::log2(l)) * 0.693147181f);
  }
  return lse;
}

Verdict of_lse(const Case &of, const std::vector<float> &lse) {
  return judge(of.inputs, rounded(of.exact), of.places, lse);
}

}  // namespace

TEST_CASE("verdict: a log-sum-exp in fp32 passes, whether its maximum lags or not") {
  for (const Case &of : cases())
    for (const float lag : {0.0f, 8.0f}) {
      CAPTURE(of.name());
      const Verdict verdict = of_lse(of, in_fp32(of, lag));
      CHECK(verdict.passed());
      CHECK(verdict.lse_bound > 0);
    }
}

TEST_CASE("verdict: the bound of the log-sum-exp of normal inputs is small, by hand") {
  // A row whose query is 0: all scores are 0, all powers 1, and the log-sum-exp is ln(128).
  Inputs inputs = draw(Family::kNormal);
  for (int k = 0; k < kHeadDim; k++) inputs.Q[element(0, 0, k)] = 0;
  const double exact = std::log(double{kSeqlen}), L = 8 + std::log2(kSeqlen + 1.0);
  const double t = std::sqrt(2 * std::log(2.0 * kHeadDim / (1e-6 / 3)));
  const double bound = 0x1p-24 * (16 + kSeqlen + t * std::sqrt(kSeqlen) + 4 * L + 3 * (exact + L));
  const std::vector<Place> row = {{0, 0, 0}};
  const auto verdict = [&](double lse) {
    return judge(inputs, Elements(kElements, 0), row,
                 std::vector<float>(kHeads * kSeqlen, static_cast<float>(lse)));
  };
  CHECK(verdict(exact).lse_bound == doctest::Approx(bound));
  CHECK(verdict(exact + 0.95 * bound).lse_passed());
  CHECK(!verdict(exact + 1.05 * bound).lse_passed());
  CHECK(!verdict(exact - 1.05 * bound).lse_passed());
  CHECK(bound < 3e-5);
}

TEST_CASE("verdict: a log-sum-exp that is wrong anywhere fails, and the row is named") {
  const std::vector<float> right = in_fp32(normal(), 8);
  const auto fails = [&](const std::function<float(std::size_t)> &value) {
    std::vector<float> lse;
    for (std::size_t i = 0; i < right.size(); i++) lse.push_back(value(i));
    return !of_lse(normal(), lse).passed();
  };
  CHECK(!fails([&](std::size_t i) { return right[i]; }));
  CHECK(fails([&](std::size_t i) { return right[i] * 1.442695f; }));
  CHECK(fails([&](std::size_t i) { return right[i] + std::log(0.25f); }));
  CHECK(fails([&](std::size_t i) { return right[i] + std::log1p(-1.0f / kSeqlen / 10); }));
  CHECK(fails([&](std::size_t i) { return half_to_float(float_to_half(right[i])); }));
  CHECK(fails([&](std::size_t i) { return right[(i + 1) % right.size()]; }));
  CHECK(fails([&](std::size_t i) { return right[(i + kSeqlen) % right.size()]; }));
  for (const float wrong : {0.0f, INFINITY, -INFINITY, std::nanf("")}) {
    std::vector<float> one = right;
    one[kSeqlen + 17] = wrong;
    const Verdict verdict = of_lse(normal(), one);
    CHECK(!verdict.passed());
    CHECK(verdict.o_passed());
    CHECK(verdict.lse_worst.head == 1);
    CHECK(verdict.lse_worst.row == 17);
  }
}

TEST_CASE("verdict: the log-sum-exp of an empty row is -infinity, and nothing else") {
  Inputs inputs = draw(Family::kNormal);
  inputs.shape.lengths_k = {0};
  const std::vector<Place> row = {{0, 0, 0}};
  const auto passes = [&](float lse) {
    return judge(inputs, Elements(kElements, 0), row, std::vector<float>(kHeads * kSeqlen, lse))
        .passed();
  };
  CHECK(passes(-INFINITY));
  for (const float wrong : {0.0f, -3e38f, INFINITY, std::nanf("")}) CHECK(!passes(wrong));
}

TEST_CASE(
    "verdict: a larger scale, a soft cap and a bias make the bounds larger, by their errors") {
  Inputs inputs = draw(Family::kNormal);
  const std::vector<Place> row = {{0, 0, 5}};
  const auto bounds = [&] {
    const reference::Row of = attention_row(inputs, row[0]);
    Elements O(kElements, 0);
    for (int k = 0; k < kHeadDim; k++) O[element(0, 5, k)] = double_to_half(of.output[k]).bits;
    std::vector<float> lse(kHeads * kSeqlen, static_cast<float>(of.log_sum_exp));
    const Verdict verdict = judge(inputs, O, row, lse);
    CHECK(verdict.passed());
    return std::pair(verdict.max_bound, verdict.lse_bound);
  };
  const auto plain = bounds();
  inputs.shape.scale = 1.0f;
  const auto scaled = bounds();
  CHECK(scaled.second > 2 * plain.second);
  inputs.shape.scale.reset();
  inputs.shape.softcap = 30;
  const auto capped = bounds();
  CHECK(capped.first > plain.first);
  CHECK(capped.second > 5 * plain.second);
  CHECK(capped.second < 0x1p-11 * 4);  // of scores below 4
  inputs.shape.softcap = 0;
  inputs.shape.alibi = true;
  inputs.slopes = {0.25f, 0.125f};
  CHECK(bounds().second < 2 * plain.second);
  inputs.shape.alibi = false;
  // A sink that takes all of the weight: P is rounded beside its power.
  inputs.shape.sink_logits = true;
  inputs.sink_logits = {12, 0};
  const reference::Row of = attention_row(inputs, row[0]);
  CHECK(of.sink_weight > 0.99);
  bounds();
}

TEST_CASE("verdict: at a small shape all rows are checked, once each") {
  for (const auto &[batch, heads, seqlen] : {std::array{1, 1, 1}, {2, 3, 128}, {1, 4, 512}}) {
    std::vector<Where> all;
    for (int b = 0; b < batch; b++)
      for (int head = 0; head < heads; head++)
        for (int row = 0; row < seqlen; row++) all.push_back({b, head, row});
    std::vector<Where> checked = places(shape(batch, heads, seqlen, 64), 64);
    std::sort(checked.begin(), checked.end());
    CHECK(checked == all);
  }
}

TEST_CASE("verdict: at a large shape the ends of tiles are checked, and 256 rows drawn at random") {
  for (const auto &[batch, heads, seqlen, tile] : {std::array{16, 16, 8192, 64},
                                                   {16, 16, 8192, 128},
                                                   {1, 1, 16384, 128},
                                                   {2, 1, 16384, 128},
                                                   {8, 8, 256, 128},
                                                   {8, 8, 256, 256},
                                                   {1000, 1, 128, 128},
                                                   {16, 16, 1000, 128}}) {
    CAPTURE(batch);
    CAPTURE(seqlen);
    CAPTURE(tile);
    const std::vector<Where> checked = places(shape(batch, heads, seqlen, 128), tile);
    const std::set<Where> set(checked.begin(), checked.end());
    CHECK(checked.size() < 310);
    std::set<int> of_heads, of_rows;
    for (const auto &[b, head, row] : checked) {
      CHECK((b >= 0 && b < batch));
      CHECK((head >= 0 && head < heads));
      CHECK((row >= 0 && row < seqlen));
      of_heads.insert(b * heads + head);
      of_rows.insert(row);
    }
    const int last = (seqlen - 1) / tile * tile, second = std::min(tile, last);
    for (const int b : {0, batch - 1})
      for (const int head : {0, heads - 1})
        for (const int first_row : {0, second, last}) {
          CHECK(set.count({b, head, first_row}) == 1);
          CHECK(set.count({b, head, std::min(first_row + tile, seqlen) - 1}) == 1);
        }
    CHECK(set.size() > 230);
    CHECK(static_cast<int>(of_heads.size()) > std::min(batch * heads / 2, 150));
    CHECK(static_cast<int>(of_rows.size()) > std::min(seqlen / 2, 100));
  }
}

TEST_CASE("verdict: the rows drawn depend on the seed alone") {
  const reference::Shape large = shape(16, 16, 8192, 128);
  CHECK(places(large, 64, 5) == places(large, 64, 5));
  CHECK(places(large, 64, 5) != places(large, 64, 6));
}

// --- fp8 -------------------------------------------------------------------------------------------

namespace {

/// Cut off to 13 bits of mantissa.
double cut_off(double x) {
  int exponent;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::trunc(std::ldexp(mantissa, 14)), exponent - 14);
}

Elements attention_in_8_bits(const Inputs &inputs, const In8Bits &how) {
  Elements O;
  for (int head = 0; head < kHeads; head++) {
    const reference::KeyValues values = key_values(inputs, {0, head, 0}, 0, kSeqlen);
    for (int row = 0; row < kSeqlen; row++) {
      const reference::Row right = attention_row(inputs, values, {0, head, row});
      const double m = *std::max_element(right.scores.begin(), right.scores.end());
      double l = 0, o[kHeadDim] = {};
      for (int j = 0; j < kSeqlen; j++) {
        const double p = std::exp((right.scores[j] - m) * how.K_scale) * how.scale_when_rounded;
        const double rounded = e4m3_to_float(float_to_e4m3(static_cast<float>(p)));
        l += p;
        const int of = j % 16 < 2 * how.swapped ? j ^ 1 : j;
        for (int k = 0; k < kHeadDim; k++) o[k] += rounded * values.V[of * kHeadDim + k];
        if (how.sums_of_13_bits && j % 32 == 31)
          for (double &x : o) x = cut_off(x);
      }
      for (const double x : o) O.push_back(double_to_bf16(how.V_scale * x / l).bits);
    }
  }
  return O;
}

Verdict judge_in_8_bits(Family family, const In8Bits &how) {
  const Inputs inputs = draw(family, Type::kFp8);
  return judge(inputs, attention_in_8_bits(inputs, how), normal().places);
}

}  // namespace

TEST_CASE("verdict: fp8: P rounded at any scale from 1 on and sums of 13 bits pass") {
  for (const Family family :
       {Family::kNormal, Family::kRising, Family::kOneHot, Family::kEnds, Family::kEqualKeys})
    for (const double scale : {1.0, 1.3, 16.0, 100.0, 256.0, 448.0})
      for (const bool sums_of_13_bits : {false, true}) {
        CAPTURE(reference::family_names()[static_cast<int>(family)]);
        CAPTURE(scale);
        const Verdict verdict = judge_in_8_bits(
            family, {.scale_when_rounded = scale, .sums_of_13_bits = sums_of_13_bits});
        CAPTURE(verdict.rms_error / verdict.rms_bound);
        CAPTURE(verdict.max_error / verdict.max_bound);
        CHECK(verdict.passed());
      }
}

TEST_CASE("verdict: fp8: P below e4m3's range, beyond it, a scale or a key's place wrong: fails") {
  CHECK(judge_in_8_bits(Family::kNormal, {}).passed());
  for (const In8Bits &wrong :
       {In8Bits{.scale_when_rounded = 0x1p-6}, In8Bits{.scale_when_rounded = 4096},
        In8Bits{.V_scale = 1.1}, In8Bits{.V_scale = 0.9}, In8Bits{.K_scale = 1.15},
        In8Bits{.K_scale = 0.87}, In8Bits{.swapped = 1}, In8Bits{.swapped = 8}}) {
    CAPTURE(wrong.scale_when_rounded);
    CAPTURE(wrong.V_scale);
    CAPTURE(wrong.K_scale);
    CAPTURE(wrong.swapped);
    const Verdict verdict = judge_in_8_bits(Family::kNormal, wrong);
    CAPTURE(verdict.rms_error / verdict.rms_bound);
    CAPTURE(verdict.max_error / verdict.max_bound);
    CHECK(!verdict.passed());
  }
}

TEST_CASE("verdict: fp8: the bound of an element, by hand") {
  // Two keys with scores ln 2 and 0 (nearly), values 3 and -1, of codes and scales.
  const auto code = [](float x) { return std::uint16_t{float_to_e4m3(x).bits}; };
  Inputs inputs{{.seqlen_q = 1, .seqlen_k = 2, .head_dim = 1},
                Type::kFp8,
                {code(2)},
                {code(1.375f), 0},
                {code(1.5f), code(-0.5f)}};
  inputs.scales = {{0.5f}, {0.5f}, {2}};
  const double s = 0.6875, w = 1 / (1 + std::exp(-s)), o = 3 * w - (1 - w);
  const double sums = 0x1p-23 * (1 + 2 / 16.0) + 0x1p-13 * 2 / 32;
  const double score = 0x1p-13 * std::sqrt(33 / 32.0) * s;  // of the first key; the other's is 0
  const double at_most = 3 * w * (0x1p-4 + 0x1p-24 * s + sums + score) + (1 - w) * (0x1p-4 + sums);
  const Verdict verdict = judge(inputs, {double_to_bf16(o + 0.1).bits}, {{0, 0, 0}});
  CHECK(verdict.max_bound == doctest::Approx(at_most + 0x1p-8));
  CHECK(verdict.worst_expected == doctest::Approx(o));
}
