// The layout of a tile of fp16 or bf16 in shared memory, as step 06 builds it, for the steps of Part
// III.
#pragma once

#include "common/kernel/view.h"

/// Rows of d elements of 2 bytes, in swizzle atoms of 64 (128 bytes: each bank once). Within an atom
/// the chunks of 8 (16 bytes: 4 banks) are permuted: 8 consecutive rows keep a column in all banks.
template <int Rows, int d>
struct Swizzled {
  static constexpr int size = Rows * d;
  __device__ static constexpr int offset(int row, int col) {
    return row * d + col / 64 * 64 + (col % 64 ^ row % 8 * 8);
  }
};

template <int Rows, int d>
using SharedTile = Tile<half, Rows, d, Swizzled<Rows, d>>;
