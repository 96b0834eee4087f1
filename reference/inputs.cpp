#include "reference/inputs.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <numeric>
#include <thread>

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
    const double u = (static_cast<double>(bits() >> 11) + 0.5) * 0x1p-53;
    const double angle = 2 * std::numbers::pi * static_cast<double>(bits() >> 11) * 0x1p-53;
    const double radius = std::sqrt(-2 * std::log(u));
    spare_ = static_cast<float>(radius * std::sin(angle));
    has_spare_ = true;
    return static_cast<float>(radius * std::cos(angle));
  }

 private:
  std::uint64_t state_;
  float spare_ = 0;
  bool has_spare_ = false;
};

struct Head {
  half *Q, *K, *V;
  int N, d;

  /// Sets row i of one of the three to what `value` returns for each column.
  template <class F>
  void fill(half *matrix, int i, F value) const {
    for (int k = 0; k < d; k++)
      matrix[static_cast<std::size_t>(i) * d + k] = float_to_half(value(k));
  }
};

void make_head(Family family, const Head &head, Random &random) {
  const auto normal = [&](int) { return random.normal(); };
  for (int i = 0; i < head.N; i++) {
    head.fill(head.Q, i, normal);
    head.fill(head.K, i, normal);
    head.fill(head.V, i, normal);
  }
  switch (family) {
    case Family::kNormal: break;
    case Family::kRising:
      // All queries alike in sign: q . k_j / sqrt(d) climbs from -200 to -140, with a little noise.
      // All are so low that a maximum which begins at 0, not at -infinity, leaves nothing.
      for (int i = 0; i < head.N; i++) {
        const float slope = (60 * static_cast<float>(i) / static_cast<float>(head.N) - 200) /
                            std::sqrt(static_cast<float>(head.d));
        head.fill(head.Q, i, [&](int) { return 1 + 0.01f * random.normal(); });
        head.fill(head.K, i, [&](int) { return slope + 0.1f * random.normal(); });
      }
      break;
    case Family::kOneHot: {
      // Keys are random signs; query i is 8 times key permuted[i]. Its score is 8 sqrt(d), those of
      // the others have standard deviation 8.
      std::vector<int> permuted(head.N);
      std::iota(permuted.begin(), permuted.end(), 0);
      for (int i = head.N - 1; i > 0; i--) std::swap(permuted[i], permuted[random.below(i + 1)]);
      for (int i = 0; i < head.N; i++) head.fill(head.K, i, [&](int) { return random.sign(); });
      for (int i = 0; i < head.N; i++) {
        const half *key = head.K + static_cast<std::size_t>(permuted[i]) * head.d;
        head.fill(head.Q, i, [&](int k) { return 8 * half_to_float(key[k]); });
      }
      break;
    }
    case Family::kEnds:
    case Family::kHuge: {
      // A row holds one of four magnitudes. K's largest is a power of two: then products add up
      // exactly in fp32, and keys whose scores are equal stay equal. In kEnds it keeps scores below
      // 2^12; in kHuge they reach 2^35, where one unit in the last place is hundreds.
      using Magnitudes = std::array<float, 4>;
      const Magnitudes of_K = family == Family::kEnds
                                  ? Magnitudes{0x1p-10f, 0x1p-12f, 0x1p-14f, 0x1p-24f}
                                  : Magnitudes{0x1p15f, 1, 0x1p-14f, 0x1p-24f};
      for (half *matrix : {head.Q, head.K, head.V})
        for (int i = 0; i < head.N; i++) {
          const Magnitudes ends =
              matrix == head.K ? of_K : Magnitudes{65504, 1, 0x1p-14f, 0x1p-24f};
          const float end = ends[random.below(4)];
          head.fill(matrix, i, [&](int) { return end * random.sign(); });
        }
      break;
    }
    case Family::kEqualKeys:
      for (int i = 1; i < head.N; i++)
        head.fill(head.K, i, [&](int k) { return half_to_float(head.K[k]); });
      break;
  }
}

}  // namespace

const std::vector<std::string> &family_names() {
  static const std::vector<std::string> names = {"normal", "rising",     "one-hot",
                                                 "ends",   "equal-keys", "huge"};
  return names;
}

Inputs make_inputs(Family family, int batch_heads, int seqlen, int head_dim, std::uint64_t seed) {
  const std::size_t per_head = static_cast<std::size_t>(seqlen) * head_dim;
  Inputs inputs{batch_heads, seqlen, head_dim, {}, {}, {}};
  for (auto *matrix : {&inputs.Q, &inputs.K, &inputs.V}) matrix->resize(batch_heads * per_head);
  std::atomic<int> next = 0;
  const auto work = [&] {
    for (int head; (head = next++) < batch_heads;) {
      Random random(seed * 1000003 + static_cast<std::uint64_t>(head));
      make_head(family,
                {&inputs.Q[head * per_head], &inputs.K[head * per_head], &inputs.V[head * per_head],
                 seqlen, head_dim},
                random);
    }
  };
  std::vector<std::thread> pool;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); i++) pool.emplace_back(work);
  work();
  for (std::thread &worker : pool) worker.join();
  return inputs;
}

}  // namespace reference
