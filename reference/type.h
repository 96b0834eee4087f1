// SPDX-License-Identifier: MIT
// What a problem names and the reference knows. (A header of its own: half.h cannot be read beside
// CUDA's.)
#pragma once

/// Of the elements of Q, K, V and O. Where Q, K and V are kFp8 (e4m3), each head of them has a scale, by
/// which its elements are multiplied, and O is kBf16.
enum class Type { kFp16, kBf16, kFp8 };

constexpr Type output_type(Type type) {
  return type == Type::kFp8 ? Type::kBf16 : type;
}

/// Which elements of a row are a pair, of head_dim / 2 pairs: c and c + head_dim / 2, or 2 c and
/// 2 c + 1.
enum class Rope { kNone, kHalves, kNeighbours };
