// SPDX-License-Identifier: MIT
#include "reference/inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <numeric>

#include "reference/parallel.h"
#include "reference/random.h"

namespace reference {
namespace {

/// Normal numbers by Box and Muller: the standard's distributions differ between libraries.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() { return next_random(state_); }
  int below(int limit) { return static_cast<int>(bits() % static_cast<std::uint64_t>(limit)); }
  float sign() { return bits() & 1 ? 1.0f : -1.0f; }

  float normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    // Of 64 random bits, 32 for the radius and 32 for the angle. In single precision, a third of the
    // time: the longest normal number is then 6.7, one of 10^11.
    const std::uint64_t drawn = bits();
    const float u = (static_cast<float>(drawn >> 32) + 0.5f) * 0x1p-32f;
    const float angle =
        2 * std::numbers::pi_v<float> * 0x1p-32f * static_cast<float>(drawn & 0xffffffff);
    const float radius = std::sqrt(-2 * std::log(std::min(u, 1.0f)));
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }

 private:
  std::uint64_t state_;
  float spare_ = 0;
  bool has_spare_ = false;
};

/// Rows of one of Q, K and V.
struct Matrix {
  std::uint16_t *data;
  int rows, d;
  Type type;

  /// Sets a row to what `value` returns for each column.
  template <class F>
  void fill(int row, F value) const {
    for (int k = 0; k < d; k++)
      data[static_cast<std::size_t>(row) * d + k] = float_to_element(type, value(k));
  }
  float operator()(int row, int k) const {
    return element_to_float(type, data[static_cast<std::size_t>(row) * d + k]);
  }
};

/// Draws the keys and values of one head, and the queries of all heads that share them.
void make_group(Family family, const Matrix &Q, const Matrix &K, const Matrix &V, bool to_quantise,
                Random &random) {
  const auto normal = [&](int) { return random.normal(); };
  for (int i = 0; i < std::max(Q.rows, K.rows); i++)
    for (const Matrix &matrix : {Q, K, V})
      if (i < matrix.rows) matrix.fill(i, normal);
  switch (family) {
    case Family::kNormal: break;
    case Family::kRising: {
      // q . k_j / sqrt(d) climbs from -10240 by 60: column 0 brings the depth, column 1 the climb,
      // the others a little noise. All are multiples of 1 / 16 and the sum stays below 2^18, so that
      // fp32 adds them exactly, in any order. What fp8's tensor cores keep of a sum, 13 bits, would not
      // tell scores apart at such a depth: there it is 80.
      const float root = std::sqrt(static_cast<float>(K.d));
      for (int i = 0; i < Q.rows; i++)
        Q.fill(i, [&](int k) { return k == 0 ? 256 : k == 1 ? 8 : random.sign(); });
      for (int j = 0; j < K.rows; j++) {
        const float climb = 60 * static_cast<float>(j) / static_cast<float>(K.rows);
        K.fill(j, [&](int k) {
          return k == 0   ? (to_quantise ? std::round(-1.25f * root) / 4 : std::round(-40 * root))
                 : k == 1 ? std::round(climb * root / 8 * 4) / 4
                          : std::round(4 * random.normal()) / 16;
        });
      }
      break;
    }
    case Family::kOneHot: {
      // Keys are random signs; query i is 8 times key permuted[i]. Its score is 8 sqrt(d), those of
      // the others have standard deviation 8.
      std::vector<int> permuted(K.rows);
      std::iota(permuted.begin(), permuted.end(), 0);
      for (int j = K.rows - 1; j > 0; j--) std::swap(permuted[j], permuted[random.below(j + 1)]);
      for (int j = 0; j < K.rows; j++) K.fill(j, [&](int) { return random.sign(); });
      for (int i = 0; i < Q.rows; i++)
        Q.fill(i, [&](int k) { return 8 * K(permuted[i % K.rows], k); });
      break;
    }
    case Family::kEnds:
    case Family::kHuge: {
      // A row holds one of four magnitudes. K's largest is a power of two: then products add up
      // exactly in fp32, and keys whose scores are equal stay equal. In kEnds it keeps scores below
      // 2^12; in kHuge they reach 2^35, where one unit in the last place is hundreds.
      using Magnitudes = std::array<float, 4>;
      const bool fp8_ends = to_quantise && family == Family::kEnds;
      const Magnitudes of_Q = fp8_ends ? Magnitudes{kLargestE4m3, 1, 0x1p-6f, 0x1p-9f}
                                       : Magnitudes{65504, 1, 0x1p-14f, 0x1p-24f};
      const Magnitudes of_K = fp8_ends ? Magnitudes{0.5f, 0x1p-3f, 0x1p-9f, 0x1p-10f / kLargestE4m3}
                              : family == Family::kEnds
                                  ? Magnitudes{0x1p-10f, 0x1p-12f, 0x1p-14f, 0x1p-24f}
                                  : Magnitudes{0x1p15f, 1, 0x1p-14f, 0x1p-24f};
      // bf16 reaches as far as fp32, in which values are summed: there must be room for the sum.
      const Magnitudes of_V = to_quantise || V.type == Type::kFp16
                                  ? of_Q
                                  : Magnitudes{0x1p100f, 1, 0x1p-126f, 0x1p-133f};
      for (const auto &[matrix, ends] : {std::pair{Q, of_Q}, {K, of_K}, {V, of_V}})
        for (int i = 0; i < matrix.rows; i++) {
          const float end = ends[random.below(4)];
          matrix.fill(i, [&](int) { return end * random.sign(); });
        }
      break;
    }
    case Family::kEqualKeys:
      for (int j = 1; j < K.rows; j++) K.fill(j, [&](int k) { return K(0, k); });
      break;
  }
}

}  // namespace

const std::vector<std::string> &family_names() {
  static const std::vector<std::string> names = {"normal", "rising",     "one-hot",
                                                 "ends",   "equal-keys", "huge"};
  return names;
}

namespace {

Inputs draw(Family family, const Shape &shape, Type type, bool to_quantise, std::uint64_t seed) {
  const int d = shape.head_dim, groups = shape.batch * shape.kv_heads;
  const int queries = shape.heads / shape.kv_heads * shape.seqlen_q;  // that share a key
  const std::size_t of_Q = static_cast<std::size_t>(queries) * d;
  const int d_V = shape.columns_of_v();
  const std::size_t of_K = static_cast<std::size_t>(shape.seqlen_k) * d;
  const std::size_t of_V = static_cast<std::size_t>(shape.seqlen_k) * d_V;
  Inputs inputs{shape, type, {}, {}, {}, rotation_of(shape)};
  // The slopes that the paper has where the heads are a power of two: a geometric sequence down to 2^-8.
  for (int h = 0; shape.alibi && h < shape.heads; h++)
    inputs.slopes.push_back(static_cast<float>(std::exp2(-8.0 * (h + 1) / shape.heads)));
  Random of_sinks(seed * 1000003 - 1);  // from far below a row's scores to far above
  for (int h = 0; shape.sink_logits && h < shape.heads; h++)
    inputs.sink_logits.push_back(4 * of_sinks.normal());
  inputs.Q.resize(groups * of_Q);
  inputs.K.resize(groups * of_K);
  inputs.V.resize(groups * of_V);
  parallel_for(groups, [&](std::size_t group) {
    Random random(seed * 1000003 + group);
    make_group(family, {&inputs.Q[group * of_Q], queries, d, type},
               {&inputs.K[group * of_K], shape.seqlen_k, d, type},
               {&inputs.V[group * of_V], shape.seqlen_k, d_V, type}, to_quantise, random);
    for (int key = 0; shape.latent && key < shape.seqlen_k; key++)
      std::copy_n(&inputs.K[group * of_K + key * std::size_t(d)], d_V,
                  &inputs.V[group * of_V + key * std::size_t(d_V)]);
  });
  return inputs;
}

/// From bf16 to fp8, in place, heads of so many elements. Returns each head's scale, by which its
/// elements are divided: its largest element is 448 then.
std::vector<float> quantise(Elements &elements, std::size_t of_head) {
  std::vector<float> scales(elements.size() / of_head);
  parallel_for(scales.size(), [&](std::size_t head) {
    std::uint16_t *const first = &elements[head * of_head];
    float largest = 0;
    for (std::size_t i = 0; i < of_head; i++)
      largest = std::max(largest, std::abs(element_to_float(Type::kBf16, first[i])));
    scales[head] = largest == 0 ? 1 : largest / kLargestE4m3;
    for (std::size_t i = 0; i < of_head; i++)
      first[i] =
          float_to_element(Type::kFp8, element_to_float(Type::kBf16, first[i]) / scales[head]);
  });
  return scales;
}

}  // namespace

Inputs make_inputs_to_quantise(Family family, const Shape &shape, std::uint64_t seed) {
  return draw(family, shape, Type::kBf16, true, seed);
}

void add_dO(Inputs &inputs, Family family, std::uint64_t seed) {
  const Shape &shape = inputs.shape;
  const std::size_t of_head = static_cast<std::size_t>(shape.seqlen_q) * shape.head_dim;
  inputs.dO.resize(inputs.Q.size());
  const bool ends = family == Family::kEnds || family == Family::kHuge;
  parallel_for(inputs.dO.size() / of_head, [&](std::size_t head) {
    Random random(~seed * 1000003 + head);
    const Matrix dO{&inputs.dO[head * of_head], shape.seqlen_q, shape.head_dim, inputs.type};
    for (int i = 0; i < dO.rows; i++) {
      const float end = std::ldexp(0x1p-24f, 2 * random.below(4));
      dO.fill(i, [&](int) { return ends ? end * random.sign() : random.normal(); });
    }
  });
}

Inputs make_inputs(Family family, const Shape &shape, Type type, std::uint64_t seed) {
  if (type != Type::kFp8) return draw(family, shape, type, false, seed);
  Inputs inputs = make_inputs_to_quantise(family, shape, seed);
  const auto d = static_cast<std::size_t>(shape.head_dim);
  inputs.type = type;
  inputs.scales.Q = quantise(inputs.Q, shape.seqlen_q * d);
  inputs.scales.K = quantise(inputs.K, shape.seqlen_k * d);
  inputs.scales.V =
      quantise(inputs.V, static_cast<std::size_t>(shape.seqlen_k) * shape.columns_of_v());
  return inputs;
}

}  // namespace reference
