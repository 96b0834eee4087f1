// SPDX-License-Identifier: MIT
// The gradients against finite differences of the output, and their verdict: given right gradients and
// gradients that are wrong in the ways that kernels are.
#include "reference/gradients.h"

#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "reference/inputs.h"

namespace {

using namespace reference;

Inputs draw(const Shape &shape, Type type = Type::kFp16, Family family = Family::kNormal,
            std::uint64_t seed = 1) {
  Inputs inputs = make_inputs(family, shape, type, seed);
  add_dO(inputs, family, seed);
  return inputs;
}

/// The loss whose derivative with respect to O is dO: the sum of O o dO.
double loss(const Inputs &inputs) {
  const Shape &shape = inputs.shape;
  double sum = 0;
  for (int b = 0; b < shape.batch; b++)
    for (int head = 0; head < shape.heads; head++)
      for (int i = 0; i < shape.length_q(b); i++) {
        const Row row = attention_row(inputs, {b, head, i});
        const std::size_t first =
            ((std::size_t(b) * shape.heads + head) * shape.seqlen_q + i) * shape.head_dim;
        for (int k = 0; k < shape.head_dim; k++)
          sum += row.output[k] * element_to_float(inputs.type, inputs.dO[first + k]);
      }
  return sum;
}

struct Rows {
  std::vector<Place> places;
  int heads, seqlen;
};
Rows rows_of(const Shape &shape, Gradient of) {
  Rows rows{{},
            of == Gradient::kQ ? shape.heads : shape.kv_heads,
            of == Gradient::kQ ? shape.seqlen_q : shape.seqlen_k};
  for (int b = 0; b < shape.batch; b++)
    for (int head = 0; head < rows.heads; head++)
      for (int i = 0; i < rows.seqlen; i++) rows.places.push_back({b, head, i});
  return rows;
}

/// How a kernel computes a gradient: what it does to P, to dS, and to what it has in the end.
struct Kernel {
  std::function<double(double)> round_P, round_dS;
  double scale = 1;
  bool without_D = false;
  bool without_slope = false;  // of the soft cap
  double tanh_factor = 1;      // what tanh.approx makes of tanh
  int keys_left_out = 0, queries_left_out = 0;
};

double rounded(Type type, double x) {
  return element_to_float(type,
                          type == Type::kFp16 ? double_to_half(x).bits : double_to_bf16(x).bits);
}

Elements compute(const Inputs &inputs, const Forward &forward, Gradient of, const Kernel &kernel) {
  const Shape &shape = inputs.shape;
  const int N = shape.seqlen_q, M = shape.seqlen_k, d = shape.head_dim;
  const auto value = [&](const Elements &elements, std::size_t row, int k) {
    return static_cast<double>(element_to_float(inputs.type, elements[row * d + k]));
  };
  const Rows rows = rows_of(shape, of);
  std::vector<double> sums(rows.places.size() * d);
  for (std::size_t head = 0; head < std::size_t(shape.batch) * shape.heads; head++)
    for (int i = 0; i < N - kernel.queries_left_out; i++)
      for (int j = 0; j < M - kernel.keys_left_out; j++) {
        const std::size_t q = head * N + i, key = head * M + j;
        double s = 0, dP = 0, D = 0;
        for (int k = 0; k < d; k++) {
          s += value(inputs.Q, q, k) * value(inputs.K, key, k);
          dP += value(inputs.dO, q, k) * value(inputs.V, key, k);
          D += value(inputs.dO, q, k) * value(forward.O, q, k);
        }
        s /= std::sqrt(d);
        double g = 1;
        if (const double cap = shape.softcap; cap > 0) {
          const double t = std::tanh(s / cap) * kernel.tanh_factor;
          s = cap * t, g = kernel.without_slope ? 1 : 1 - t * t;
        }
        if (shape.alibi) s -= double{inputs.slopes[head % shape.heads]} * std::abs(i + M - N - j);
        const double P = std::exp(s - forward.lse[q]), w = kernel.round_P(g * P);
        const double dS = kernel.round_dS(w * (dP - (kernel.without_D ? 0 : D)));
        for (int k = 0; k < d; k++)
          if (of == Gradient::kQ)
            sums[q * d + k] += dS * value(inputs.K, key, k) / std::sqrt(d);
          else if (of == Gradient::kK)
            sums[key * d + k] += dS * value(inputs.Q, q, k) / std::sqrt(d);
          else
            sums[key * d + k] += kernel.round_P(P) * value(inputs.dO, q, k);
      }
  Elements result(sums.size());
  for (std::size_t i = 0; i < sums.size(); i++) {
    const double x = sums[i] * kernel.scale;
    result[i] = inputs.type == Type::kFp16 ? double_to_half(x).bits : double_to_bf16(x).bits;
  }
  return result;
}

const std::string kNames[] = {"dQ", "dK", "dV"};

}  // namespace

TEST_SUITE_BEGIN("reference");

TEST_CASE("gradients: they are the finite differences of the loss") {
  const std::vector<Shape> shapes = {
      {.seqlen_q = 7, .seqlen_k = 7, .head_dim = 16},
      {.batch = 2, .heads = 2, .kv_heads = 1, .seqlen_q = 5, .seqlen_k = 9, .head_dim = 8},
      {.seqlen_q = 6, .seqlen_k = 4, .head_dim = 8, .causal = true},  // queries that see nothing
      {.seqlen_q = 1, .seqlen_k = 1, .head_dim = 8},
      {.batch = 2,
       .seqlen_q = 6,
       .seqlen_k = 6,
       .head_dim = 8,
       .lengths_q = {6, 2},
       .lengths_k = {3, 6}},
      {.heads = 4, .kv_heads = 2, .seqlen_q = 5, .seqlen_k = 5, .head_dim = 8, .causal = true},
      {.seqlen_q = 7, .seqlen_k = 9, .head_dim = 8, .window_left = 2, .window_right = 1},
      {.seqlen_q = 9, .seqlen_k = 5, .head_dim = 8, .window_left = 0, .window_right = -1},
      {.batch = 3,
       .heads = 2,
       .kv_heads = 1,
       .seqlen_q = 6,
       .seqlen_k = 6,
       .head_dim = 8,
       .window_left = 1,
       .window_right = 0,
       .lengths_q = {6, 0, 1},
       .lengths_k = {4, 6, 1}},
      {.seqlen_q = 5, .seqlen_k = 7, .head_dim = 8, .softcap = 0.7f},
      {.heads = 3, .kv_heads = 3, .seqlen_q = 4, .seqlen_k = 6, .head_dim = 8, .alibi = true},
      {.batch = 2,
       .heads = 4,
       .kv_heads = 2,
       .seqlen_q = 6,
       .seqlen_k = 4,
       .head_dim = 8,
       .causal = true,  // queries that see the sink alone
       .scale = 0.3f,
       .softcap = 1.5f,
       .alibi = true,
       .sink_logits = true,
       .lengths_q = {6, 2},
       .lengths_k = {4, 3}}};
  for (const Shape &shape : shapes) {
    Inputs inputs = draw(shape);
    const Forward forward = forward_pass(inputs);
    for (const Gradient of : kGradients) {
      Elements &elements = of == Gradient::kQ ? inputs.Q : of == Gradient::kK ? inputs.K : inputs.V;
      const Rows rows = rows_of(shape, of);
      for (std::size_t r = 0; r < rows.places.size(); r++) {
        const std::vector<double> gradient = gradient_row(inputs, forward, of, rows.places[r]);
        for (int k = 0; k < shape.head_dim; k++) {
          // One unit in the last place to each side: of the element there is nothing between.
          std::uint16_t &bits = elements[r * shape.head_dim + k];
          const std::uint16_t right = bits;
          bits = right + 1;
          const double above = loss(inputs), x = element_to_float(inputs.type, bits);
          bits = right - 1;
          const double below = loss(inputs), y = element_to_float(inputs.type, bits);
          bits = right;
          CAPTURE(kNames[static_cast<int>(of)]);
          CAPTURE(r);
          // What O is rounded by is in D: 2^-11 of each of its terms. V's gradient has no D.
          const double off = of == Gradient::kV ? 2e-6 : 4e-3;
          CHECK(std::abs((above - below) / (x - y) - gradient[k]) <= off);
        }
      }
    }
    if (!shape.sink_logits) continue;
    const std::vector<double> gradient = sink_gradients(inputs, forward);
    for (std::size_t head = 0; head < gradient.size(); head++) {
      float &logit = inputs.sink_logits[head];
      const float right = logit;
      logit = right + 0x1p-9f;
      const double above = loss(inputs), x = logit;
      logit = right - 0x1p-9f;
      const double below = loss(inputs), y = logit;
      logit = right;
      CAPTURE(head);
      CHECK(std::abs((above - below) / (x - y) - gradient[head]) <= 4e-3);
      CHECK(std::abs(gradient[head]) > 4e-2);
    }
  }
}

TEST_CASE("gradients: the forward pass leaves O and the log-sum-exp") {
  const Inputs inputs =
      draw({.seqlen_q = 3, .seqlen_k = 2, .head_dim = 8, .causal = true}, Type::kBf16);
  const Forward forward = forward_pass(inputs);
  CHECK(forward.lse[0] == -INFINITY);  // sees no key
  const Row row = attention_row(inputs, {0, 0, 2});
  CHECK(forward.lse[2] ==
        doctest::Approx(std::log(std::exp(row.scores[0]) + std::exp(row.scores[1]))));
  CHECK(element_to_float(Type::kBf16, forward.O[2 * 8 + 3]) ==
        doctest::Approx(row.output[3]).epsilon(0x1p-8));
}

TEST_CASE("gradients: the verdict passes what rounds, and nothing that is wrong") {
  const Shape shape{.heads = 1, .seqlen_q = 96, .seqlen_k = 64, .head_dim = 32};
  for (const Type type : {Type::kFp16, Type::kBf16})
    for (const Family family :
         {Family::kNormal, Family::kOneHot, Family::kEqualKeys, Family::kEnds}) {
      const Inputs inputs = draw(shape, type, family);
      const Forward forward = forward_pass(inputs);
      const auto round = [type](double x) { return rounded(type, x); };
      const auto exact = [](double x) { return x; };
      const Kernel right{round, round};
      for (const Gradient of : kGradients) {
        CAPTURE(kNames[static_cast<int>(of)]);
        CAPTURE(family_names()[static_cast<int>(family)]);
        const auto passed = [&](const Kernel &kernel) {
          return judge_gradient(inputs, forward, of, compute(inputs, forward, of, kernel),
                                rows_of(shape, of).places)
              .passed();
        };
        CHECK(passed(right));
        CHECK(passed({exact, exact}));
        if (family != Family::kNormal) continue;
        Kernel wrong = right;
        wrong.scale = 1 + (type == Type::kFp16 ? 0x1p-9 : 0x1p-6);
        CHECK(!passed(wrong));
        wrong = right;
        wrong.without_D = true;
        CHECK(passed(wrong) == (of == Gradient::kV));
        wrong = right;
        wrong.keys_left_out = 1;
        CHECK(!passed(wrong));
        wrong = right;
        wrong.queries_left_out = 1;
        CHECK(!passed(wrong));
        wrong = right;  // P has 5 bits
        wrong.round_P = [](double x) {
          int exponent;
          const double fraction = std::frexp(x, &exponent);
          return std::ldexp(std::round(fraction * 32) / 32, exponent);
        };
        CHECK(!passed(wrong));
      }
    }
}

TEST_CASE("gradients: the verdict knows soft caps and ALiBi, and what tanh.approx costs") {
  struct Case {
    float cap;
    bool alibi;
    Type type;
  };
  for (const auto &[cap, alibi, type] : {Case{0, true, Type::kFp16},
                                         {0.5f, false, Type::kBf16},
                                         {3, true, Type::kBf16},
                                         {3, false, Type::kFp16},
                                         {50, false, Type::kFp16}}) {
    const Shape shape{.heads = 2,
                      .kv_heads = 2,
                      .seqlen_q = 48,
                      .seqlen_k = 32,
                      .head_dim = 16,
                      .softcap = cap,
                      .alibi = alibi};
    const Inputs inputs = draw(shape, type);
    const Forward forward = forward_pass(inputs);
    const auto round = [type = type](double x) { return rounded(type, x); };
    const auto exact = [](double x) { return x; };
    for (const Gradient of : kGradients) {
      CAPTURE(kNames[static_cast<int>(of)]);
      CAPTURE(shape.softcap);
      CAPTURE(shape.alibi);
      const auto passed = [&](const Kernel &kernel, const Inputs &of_kernel) {
        return judge_gradient(inputs, forward, of, compute(of_kernel, forward, of, kernel),
                              rows_of(shape, of).places)
            .passed();
      };
      Kernel kernel{round, round};
      CHECK(passed(kernel, inputs));
      CHECK(passed({exact, exact}, inputs));
      Inputs other = inputs;
      if (alibi) {
        std::swap(other.slopes[0], other.slopes[1]);
        CHECK(!passed(kernel, other));
      }
      if (cap == 0) continue;
      for (const double factor : {1 - 0x1p-11, 1 + 0x1p-11}) {
        kernel.tanh_factor = factor;
        CHECK(passed(kernel, inputs));
      }
      if (cap == 50) continue;  // there the slope is 1, but for a few thousandths
      kernel = {round, round};
      other = inputs;
      other.shape.softcap *= 1.04f;
      CHECK(!passed(kernel, other));
      kernel.without_slope = true;
      CHECK(passed(kernel, inputs) == (of == Gradient::kV));
    }
  }
}

TEST_CASE(
    "gradients: the verdict of the sinks passes fp32's roundings, and nothing that is wrong") {
  const Shape shape{.batch = 2,
                    .heads = 3,
                    .kv_heads = 1,
                    .seqlen_q = 70,
                    .seqlen_k = 40,
                    .head_dim = 32,
                    .causal = true,
                    .sink_logits = true,
                    .lengths_q = {70, 33},
                    .lengths_k = {40, 0}};
  for (const Family family : {Family::kNormal, Family::kOneHot, Family::kEnds}) {
    const Inputs inputs = draw(shape, Type::kBf16, family);
    const Forward forward = forward_pass(inputs);
    /// As a kernel has it, in fp32, from the last query to the first.
    const auto compute = [&](int queries_left_out, float power_factor) {
      std::vector<float> gradient(shape.heads);
      for (int h = 0; h < shape.heads; h++)
        for (int b = 0; b < shape.batch; b++)
          for (int i = shape.lengths_q[b] - 1; i >= queries_left_out; i--) {
            const std::size_t query = (std::size_t(b) * shape.heads + h) * shape.seqlen_q + i;
            float D = 0;
            for (std::size_t k = query * 32; k < query * 32 + 32; k++)
              D += element_to_float(inputs.type, inputs.dO[k]) *
                   element_to_float(inputs.type, forward.O[k]);
            gradient[h] -= std::exp2((inputs.sink_logits[h] - forward.lse[query]) * 1.44269504f) *
                           power_factor * D;
          }
      return gradient;
    };
    CAPTURE(family_names()[static_cast<int>(family)]);
    const std::vector<float> right = compute(0, 1);
    CHECK(judge_sink_gradients(inputs, forward, right).passed());
    CHECK(judge_sink_gradients(inputs, forward, compute(0, 1 + 0x1p-22f)).passed());
    if (family != Family::kNormal) continue;
    CHECK(!judge_sink_gradients(inputs, forward, compute(0, 1 + 0x1p-12f)).passed());
    CHECK(!judge_sink_gradients(inputs, forward, compute(69, 1)).passed());
    for (std::size_t h = 0; h < 3; h++) {
      std::vector<float> wrong = right;
      wrong[h] = -wrong[h];
      const SinkVerdict verdict = judge_sink_gradients(inputs, forward, wrong);
      CHECK(!verdict.passed());
      CHECK(verdict.head == int(h));
      wrong[h] = NAN;
      CHECK(!judge_sink_gradients(inputs, forward, wrong).passed());
    }
  }
}

TEST_CASE("gradients: NaN never passes, and a row that nothing adds to must be 0") {
  const Shape shape{.seqlen_q = 4,
                    .seqlen_k = 6,
                    .head_dim = 8,
                    .causal = true,
                    .lengths_q = {2},
                    .lengths_k = {6}};
  const Inputs inputs = draw(shape);
  const Forward forward = forward_pass(inputs);
  Elements dQ(4 * 8);
  const std::vector<Place> row = {{0, 0, 3}};
  CHECK(judge_gradient(inputs, forward, Gradient::kQ, dQ, row).passed());
  dQ[3 * 8 + 1] = 1;  // the smallest number
  CHECK(!judge_gradient(inputs, forward, Gradient::kQ, dQ, row).passed());
  dQ[3 * 8 + 1] = 0xffff;
  const Verdict verdict = judge_gradient(inputs, forward, Gradient::kQ, dQ, row);
  CHECK(!verdict.passed());
  CHECK(verdict.not_finite == 1);
}

TEST_CASE("gradients: the rows of dK and dV that are checked are keys of the heads of K and V") {
  const Shape shape{
      .batch = 3, .heads = 8, .kv_heads = 2, .seqlen_q = 64, .seqlen_k = 100000, .head_dim = 128};
  int last = 0;
  for (const Place &place : places_of_gradient(shape, Gradient::kK, 64, 1)) {
    CHECK(place.head < 2);
    CHECK(place.row < 100000);
    last = std::max(last, place.row);
  }
  CHECK(last == 99999);
}

TEST_SUITE_END();
