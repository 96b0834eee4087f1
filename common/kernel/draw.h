// SPDX-License-Identifier: MIT
// The counter that gives a block its next tile. Step 39 builds it, and later steps include it.
#pragma once

#include "common/kernel/kernel.h"

/// Draws the next tile; the first gridDim.x tiles are not drawn. The counter must hold 0, or `tiles` or
/// more. A launch draws `tiles` numbers, and leaves a 0.
__device__ __forceinline__ int draw_tile(unsigned *counter, int tiles) {
  const unsigned drawn = atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), tiles - 1);
  return gridDim.x + (drawn - 1 < unsigned(tiles - 1) ? tiles - drawn : 0);
}
