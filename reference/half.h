// SPDX-License-Identifier: MIT
// fp16, bf16 and e4m3 on the host: the element types of Q, K, V and O wherever no CUDA header is at hand
// (the reference, the program, the emulator). Round to nearest even, as the GPU does.
#pragma once

#include <bit>
#include <cstdint>

#include "reference/type.h"

/// IEEE 754 binary16: 5 bits of exponent, 10 of mantissa.
struct half {
  std::uint16_t bits;
};

/// The upper half of an fp32 number: 8 bits of exponent, 7 of mantissa.
struct bf16 {
  std::uint16_t bits;
};

/// 8 bits, "fp8": 4 of exponent, 3 of mantissa. There is no infinity, and all ones are NaN: the largest
/// is 448 (Micikevicius et al. 2022, 'FP8 Formats for Deep Learning').
struct e4m3 {
  std::uint8_t bits;
};
constexpr float kLargestE4m3 = 448;

/// The value of an fp16 number, exactly.
inline float half_to_float(half h) {
  const std::uint32_t magnitude = h.bits & 0x7fffu;
  // fp32 has 13 more mantissa bits, and an exponent bias larger by 112. The multiplication corrects
  // the bias, and normalises a subnormal on the way.
  float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  if (magnitude >= 0x7c00u) value = std::bit_cast<float>(0x7f800000u | (magnitude & 0x3ffu) << 13);
  const std::uint32_t sign = (h.bits & 0x8000u) << 16;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

/// The nearest fp16 number, ties to even; beyond 65504 + half a step, infinity.
inline half float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    result = 0x7c00u;  // at least 65520: infinity
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the result's 10 mantissa bits, rounded, at the bottom.
    result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return half{static_cast<std::uint16_t>(sign | result)};
}

/// The value of a bf16 number, exactly.
inline float bf16_to_float(bf16 b) {
  return std::bit_cast<float>(std::uint32_t{b.bits} << 16);
}

/// The nearest bf16 number, ties to even; beyond the largest + half a step, infinity.
inline bf16 float_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (value != value) return bf16{static_cast<std::uint16_t>(bits >> 16 | 0x40u)};  // stays a NaN
  // A carry out of the mantissa is right: it moves on to the next exponent, and to infinity.
  return bf16{static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

/// The value of an e4m3 number, exactly.
inline float e4m3_to_float(e4m3 e) {
  const std::uint32_t magnitude = e.bits & 0x7fu;
  // As in half_to_float: 20 more mantissa bits, a bias larger by 120.
  float value = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  if (magnitude == 0x7fu) value = std::bit_cast<float>(0x7fc00000u);
  const std::uint32_t sign = (e.bits & 0x80u) << 24;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

/// The nearest e4m3 number, ties to even; the largest for what is beyond it (PTX ISA 'cvt',
/// .satfinite).
inline e4m3 float_to_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 24 & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7f;  // NaN
  } else if (magnitude >= 0x43e00000u) {
    result = 0x7e;  // at least 448
  } else if (magnitude < 0x3c800000u) {
    // Below 2^-6: adding 2^14 leaves the result's 3 mantissa bits, rounded, at the bottom.
    result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u;
  } else {
    result = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  }
  return e4m3{static_cast<std::uint8_t>(sign | result)};
}

/// A double in fp32, made odd in its last bit when inexact: rounding that to fewer bits gives what
/// rounding the double once would, and not twice.
inline float round_to_odd(double value) {
  const float narrow = static_cast<float>(value);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(narrow);
  if (static_cast<double>(narrow) == value || value != value || (bits & 1u)) return narrow;
  const bool too_far = (narrow < 0 ? -static_cast<double>(narrow) : static_cast<double>(narrow)) >
                       (value < 0 ? -value : value);
  return std::bit_cast<float>(too_far ? bits - 1 : bits + 1);
}

/// A double rounded once to fp16.
inline half double_to_half(double value) {
  return float_to_half(round_to_odd(value));
}

/// A double rounded once to bf16.
inline bf16 double_to_bf16(double value) {
  return float_to_bf16(round_to_odd(value));
}

/// The value of an element of a type, and the element nearest to a value.
inline float element_to_float(Type type, std::uint16_t bits) {
  switch (type) {
    case Type::kFp16: return half_to_float(half{bits});
    case Type::kBf16: return bf16_to_float(bf16{bits});
    case Type::kFp8: break;
  }
  return e4m3_to_float(e4m3{static_cast<std::uint8_t>(bits)});
}
inline std::uint16_t float_to_element(Type type, float value) {
  switch (type) {
    case Type::kFp16: return float_to_half(value).bits;
    case Type::kBf16: return float_to_bf16(value).bits;
    case Type::kFp8: break;
  }
  return float_to_e4m3(value).bits;
}
