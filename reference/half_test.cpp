// SPDX-License-Identifier: MIT
// fp16 and e4m3 on the host, against a slow computation that shares nothing with it: ldexp builds the
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
  int wrong = 0, wrong_through_double = 0;
  for (unsigned bits = 0; bits < 0x10000; bits++) {
    const float value = half_to_float(of_bits(bits));
    const unsigned back = float_to_half(value).bits, back_double = double_to_half(value).bits;
    if ((bits & 0x7fff) > 0x7c00) {  // a NaN stays some NaN
      wrong += (back & 0x7fff) <= 0x7c00;
      wrong_through_double += (back_double & 0x7fff) <= 0x7c00;
    } else {
      wrong += back != bits;
      wrong_through_double += back_double != bits;
    }
  }
  CHECK(wrong == 0);
  CHECK(wrong_through_double == 0);
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

TEST_CASE("half: double_to_half rounds once where float_to_half of a float rounds twice") {
  // Just above the middle of 1 and its upper neighbour, by less than a float can hold.
  const double above = 1 + 0x1p-11 + 0x1p-40;
  CHECK(double_to_half(above).bits == 0x3c01);
  CHECK(double_to_half(-above).bits == 0xbc01);
  CHECK(float_to_half(static_cast<float>(above)).bits == 0x3c00);
  // Just below the middle of the next two.
  const double below = 1 + 3 * 0x1p-11 - 0x1p-40;
  CHECK(double_to_half(below).bits == 0x3c01);
  CHECK(double_to_half(-below).bits == 0xbc01);
  CHECK(float_to_half(static_cast<float>(below)).bits == 0x3c02);
}

TEST_CASE("half: double_to_half rounds to nearest, ties to even") {
  Comparison beside_the_middle, any;
  for (unsigned bits = 0; bits < 0x7bff; bits++) {
    const double middle = (slow_value(bits) + slow_value(bits + 1)) / 2;
    const double step = slow_value(bits + 1) - slow_value(bits);
    for (const double offset : {0.0, 0x1p-8, 0x1p-14, 0x1p-20, 0x1p-30, 0x1p-40})
      for (const double value : {middle + offset * step, middle - offset * step})
        for (const double with_sign : {value, -value})
          beside_the_middle.add(with_sign, double_to_half(with_sign));
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; i++) {
    const std::uint64_t bits = random();
    // Exponents from 2^-30 to 2^17: from nothing to infinity in fp16.
    const std::uint64_t exponent = 1023 - 30 + bits % 48;
    const double value = std::bit_cast<double>((bits & 0x800fffffffffffffu) | exponent << 52);
    any.add(value, double_to_half(value));
  }
  INFO("first wrong: ", beside_the_middle.first_wrong, " ", any.first_wrong);
  CHECK(beside_the_middle.wrong == 0);
  CHECK(any.wrong == 0);

  CHECK(double_to_half(1e300).bits == 0x7c00);
  CHECK(double_to_half(-1e300).bits == 0xfc00);
  CHECK(double_to_half(1e-300).bits == 0x0000);
  CHECK(double_to_half(-1e-300).bits == 0x8000);
  CHECK(double_to_half(0x1p-25).bits == 0x0000);
  CHECK(double_to_half(0x1p-25 + 0x1p-70).bits == 0x0001);
  CHECK(double_to_half(65520 - 0x1p-30).bits == 0x7bff);
  CHECK((double_to_half(std::numeric_limits<double>::quiet_NaN()).bits & 0x7fff) > 0x7c00);
}

namespace {

/// The value of an e4m3 number that is not NaN: (-1)^sign 2^(e - 7) (1 + m / 8), or with the exponent of
/// the smallest normal and no leading 1 where e is 0.
double slow_value_of_e4m3(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 3 & 15), mantissa = static_cast<int>(bits & 7);
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -value : value;
}

unsigned bits_of_e4m3(float value) {
  return float_to_e4m3(value).bits;
}

}  // namespace

TEST_CASE("e4m3: all 256 numbers have the value that their bits spell, and come back from it") {
  for (unsigned bits = 0; bits < 0x100; bits++) {
    CAPTURE(bits);
    const float value = e4m3_to_float(e4m3{static_cast<std::uint8_t>(bits)});
    if ((bits & 0x7f) == 0x7f) {
      CHECK(std::isnan(value));
    } else {
      CHECK(value == slow_value_of_e4m3(bits));
      CHECK(element_to_float(Type::kFp8, static_cast<std::uint16_t>(bits)) == value);
      CHECK(std::signbit(value) == (bits >= 0x80));
    }
    CHECK(bits_of_e4m3(value) == bits);
  }
}

TEST_CASE("e4m3: in the middle of two neighbours the even one, beside it the nearer one") {
  for (unsigned bits = 0; bits < 0x7e; bits++) {
    CAPTURE(bits);
    const auto middle =
        static_cast<float>((slow_value_of_e4m3(bits) + slow_value_of_e4m3(bits + 1)) / 2);
    CHECK(bits_of_e4m3(middle) == bits + bits % 2);
    CHECK(bits_of_e4m3(-middle) == (0x80 | (bits + bits % 2)));
    CHECK(bits_of_e4m3(std::nextafter(middle, 0.0f)) == bits);
    CHECK(bits_of_e4m3(std::nextafter(middle, kInfinity)) == bits + 1);
  }
}

TEST_CASE("e4m3: what is too large becomes the largest, what is too small zero") {
  for (const float large : {448.0f, 463.9f, 464.0f, 1e30f, kInfinity}) {
    CHECK(bits_of_e4m3(large) == 0x7e);
    CHECK(bits_of_e4m3(-large) == 0xfe);
  }
  CHECK(bits_of_e4m3(std::bit_cast<float>(0x7f800001u)) == 0x7f);
  CHECK(bits_of_e4m3(0x1p-9f) == 1);   // smallest subnormal
  CHECK(bits_of_e4m3(0x1p-10f) == 0);  // tie: to even, zero
  CHECK(bits_of_e4m3(0x1p-126f) == 0);
  CHECK(bits_of_e4m3(-0.0f) == 0x80);
}
