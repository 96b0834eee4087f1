// SPDX-License-Identifier: MIT
// The layout of a tile of fp16 or bf16 in shared memory, as step 06 builds it, for the steps of Part
// III.
#pragma once

#include <numeric>

#include "common/kernel/ptx.h"

/// Rows of d elements of 2 bytes, in chunks of 8 (16 bytes: 4 of the 32 banks), permuted so that 8
/// consecutive rows have a column in all banks. With 8 chunks, or 16, or 24, the same chunk of all rows
/// would lie in the same banks; with 12 (d = 96) it does in every second row, with 10 in every fourth.
/// The permutation separates these rows, within swizzle atoms of 64 elements, 128 bytes: each bank once.
template <int Rows, int d>
struct Swizzled {
  static constexpr int size = Rows * d;
  static constexpr int permutations = std::gcd(d / 8, 8);
  static constexpr int period = 8 / permutations;  // the rows after which the banks repeat
  __device__ static constexpr int offset(int row, int col) {
    return row * d + col / 64 * 64 + (col % 64 ^ row / period % permutations * 8);
  }
};

template <int Rows, int d, class T = half>
using SharedTile = Tile<T, Rows, d, Swizzled<Rows, d>>;
