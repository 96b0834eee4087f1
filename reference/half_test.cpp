// fp16 and bf16 on the host, against a slow computation that shares nothing with it: ldexp builds the
// values, nearbyint does the rounding.
#include "reference/half.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

half of_bits(unsigned bits) {
  return half{static_cast<std::uint16_t>(bits)};
}

unsigned bits_of(float value) {
  return float_to_half(value).bits;
}

/// The value of an fp16 number that is not infinite or NaN: (-1)^sign 2^(e - 15) (1 + m / 1024), or
/// with the exponent of the smallest normal and no leading 1 where e is 0.
double slow_value(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31), mantissa = static_cast<int>(bits & 1023);
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -value : value;
}

/// The nearest number that fp16 can hold, ties to even, or infinity.
double slow_round(double value) {
  if (value == 0 || std::isinf(value)) return value;
  const int exponent = std::max(std::ilogb(value), -14);
  const double step = std::ldexp(1.0, exponent - 10);  // between neighbours in fp16
  const double rounded = std::nearbyint(value / step) * step;
  return std::abs(rounded) > 65504 ? std::copysign(kInfinity, value) : rounded;
}

/// Counts how often `convert` differs from slow_round, the sign of zero included.
struct Comparison {
  int wrong = 0;
  double first_wrong = 0;

  void add(double value, half converted) {
    const double expected = slow_round(value), got = half_to_float(converted);
    if (got == expected && std::signbit(got) == std::signbit(expected)) return;
    if (wrong++ == 0) first_wrong = value;
  }
};

}  // namespace

TEST_CASE("half: every number has the value that its bits spell") {
  int wrong = 0;
  for (unsigned bits = 0; bits < 0x10000; bits++) {
    if ((bits & 0x7c00) == 0x7c00) continue;  // infinite or NaN
    const double value = half_to_float(of_bits(bits));
    wrong += value != slow_value(bits) || std::signbit(value) != (bits >= 0x8000);
  }
  CHECK(wrong == 0);
  CHECK(half_to_float(of_bits(0x7c00)) == kInfinity);
  CHECK(half_to_float(of_bits(0xfc00)) == -kInfinity);
  for (const unsigned bits : {0x7c01u, 0x7e00u, 0x7fffu, 0xfc01u, 0xffffu}) {
    CAPTURE(bits);
    CHECK(std::isnan(half_to_float(of_bits(bits))));
  }
}

TEST_CASE("half: every number survives the way to float and back") {
  int wrong = 0;
  for (unsigned bits = 0; bits < 0x10000; bits++) {
    const float value = half_to_float(of_bits(bits));
    const unsigned back = float_to_half(value).bits;
    if ((bits & 0x7fff) > 0x7c00) {  // a NaN stays some NaN
      wrong += (back & 0x7fff) <= 0x7c00;
    } else {
      wrong += back != bits;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("half: float_to_half rounds random floats to nearest, ties to even") {
  std::mt19937 random(1);
  Comparison any, near, subnormal;
  for (int i = 0; i < 500000; i++) {
    const auto bits = static_cast<std::uint32_t>(random());
    const float value = std::bit_cast<float>(bits);
    if (!std::isnan(value)) any.add(value, float_to_half(value));
    // The same with an exponent that fp16 has, and with one where fp16 is subnormal or zero.
    const std::uint32_t in_range = (bits & 0x807fffffu) | (112 + bits % 32) << 23;
    near.add(std::bit_cast<float>(in_range), float_to_half(std::bit_cast<float>(in_range)));
    const std::uint32_t below = (bits & 0x807fffffu) | (100 + bits % 13) << 23;
    subnormal.add(std::bit_cast<float>(below), float_to_half(std::bit_cast<float>(below)));
  }
  INFO("first wrong: ", any.first_wrong, " ", near.first_wrong, " ", subnormal.first_wrong);
  CHECK(any.wrong == 0);
  CHECK(near.wrong == 0);
  CHECK(subnormal.wrong == 0);
}

TEST_CASE("half: float_to_half decides right in the middle of two neighbours and beside it") {
  Comparison comparison;
  for (unsigned bits = 0; bits < 0x7bff; bits++) {
    const auto middle = static_cast<float>((slow_value(bits) + slow_value(bits + 1)) / 2);
    for (const float value :
         {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInfinity)})
      for (const float with_sign : {value, -value})
        comparison.add(with_sign, float_to_half(with_sign));
  }
  INFO("first wrong: ", comparison.first_wrong);
  CHECK(comparison.wrong == 0);
}

TEST_CASE("half: values at the ends of the range") {
  CHECK(bits_of(0.0f) == 0x0000);
  CHECK(bits_of(-0.0f) == 0x8000);
  CHECK(bits_of(1.0f) == 0x3c00);
  CHECK(bits_of(-2.0f) == 0xc000);
  CHECK(bits_of(65504.0f) == 0x7bff);
  CHECK(bits_of(65519.99f) == 0x7bff);  // nearer to 65504 than to 65536, which fp16 has not
  CHECK(bits_of(65520.0f) == 0x7c00);   // the tie goes to infinity
  CHECK(bits_of(-65520.0f) == 0xfc00);
  CHECK(bits_of(1e30f) == 0x7c00);
  CHECK(bits_of(kInfinity) == 0x7c00);
  CHECK(bits_of(-kInfinity) == 0xfc00);
  CHECK((bits_of(std::numeric_limits<float>::quiet_NaN()) & 0x7fff) > 0x7c00);
  CHECK((bits_of(std::bit_cast<float>(0x7f800001u)) & 0x7fff) > 0x7c00);  // only a low bit says NaN
  CHECK(bits_of(0x1p-14f) == 0x0400);                                     // smallest normal
  CHECK(bits_of(0x1p-24f) == 0x0001);                                     // smallest subnormal
  CHECK(bits_of(0x1p-25f) == 0x0000);                                     // tie: to even, zero
  CHECK(bits_of(std::nextafter(0x1p-25f, 1.0f)) == 0x0001);
  CHECK(bits_of(0x1.ff8p-15f) == 0x03ff);  // largest subnormal, 1023 * 2^-24
  CHECK(bits_of(0x1.ffcp-15f) == 0x0400);  // tie between it and the smallest normal
}

// --- bf16 ----------------------------------------------------------------------------------------

namespace {

/// The nearest number that bf16 can hold, ties to even, or infinity.
double slow_round_bf16(double value) {
  if (value == 0 || std::isinf(value)) return value;
  const int exponent = std::max(std::ilogb(value), -126);
  const double step = std::ldexp(1.0, exponent - 7);  // between neighbours in bf16
  const double rounded = std::nearbyint(value / step) * step;
  return std::abs(rounded) > 0x1.fep127 ? std::copysign(kInfinity, value) : rounded;
}

}  // namespace

TEST_CASE("bf16: every number has the value that its bits spell, and comes back") {
  int wrong = 0;
  for (unsigned bits = 0; bits < 0x10000; bits++) {
    const int exponent = static_cast<int>(bits >> 7 & 255), mantissa = static_cast<int>(bits & 127);
    const float value = bf16_to_float(bf16{static_cast<std::uint16_t>(bits)});
    if (exponent == 255) {
      wrong += mantissa ? !std::isnan(value) : !std::isinf(value);
    } else {
      const double expected =
          exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
      wrong += value != (bits & 0x8000 ? -expected : expected);
    }
    if (!std::isnan(value)) wrong += float_to_bf16(value).bits != bits;
  }
  CHECK(wrong == 0);
  CHECK(std::isnan(bf16_to_float(float_to_bf16(std::numeric_limits<float>::quiet_NaN()))));
  CHECK(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0x7f800001u)))));
}

TEST_CASE("bf16: floats are rounded once, to the nearest, ties to even") {
  std::mt19937 random(1);
  int wrong = 0;
  const auto compare = [&](double value, bf16 converted) {
    const double expected = slow_round_bf16(value), got = bf16_to_float(converted);
    wrong += got != expected || std::signbit(got) != std::signbit(expected);
  };
  for (int i = 0; i < 1000000; i++) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isnan(value)) compare(value, float_to_bf16(value));
  }
  // At ties between neighbours, which a float holds exactly, and just beside them.
  for (unsigned bits = 0; bits < 0x7f80; bits++) {
    const double low = bf16_to_float(bf16{static_cast<std::uint16_t>(bits)});
    const double high =
        bits + 1 == 0x7f80 ? 0x1p128 : bf16_to_float(bf16{static_cast<std::uint16_t>(bits + 1)});
    const auto tie = static_cast<float>((low + high) / 2);
    compare(tie, float_to_bf16(static_cast<float>(tie)));
    for (const float sign : {1.0f, -1.0f})
      for (const float value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, kInfinity)})
        compare(sign * value, float_to_bf16(sign * value));
  }
  CHECK(wrong == 0);
}

TEST_CASE("elements: a type's own conversions") {
  for (const float value : {1.0f, -0.3f, 65504.0f, 1e-7f, 3e38f}) {
    CHECK(float_to_element(Type::kFp16, value) == float_to_half(value).bits);
    CHECK(float_to_element(Type::kBf16, value) == float_to_bf16(value).bits);
  }
  CHECK(element_to_float(Type::kFp16, 0x3c00) == 1);
  CHECK(element_to_float(Type::kBf16, 0x3f80) == 1);
}
