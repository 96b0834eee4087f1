// SPDX-License-Identifier: MIT
// The kernel that transposes V in fp8. Step 40 builds it, and step 41 includes it.
#pragma once

#include "common/kernel/heads.h"

/// Returns which of 16 keys stands at this place in V^T. A thread has the scores of keys 2t and 2t + 1,
/// and of those 8 further on; the tensor cores read them, as A of P V, as columns 4t to 4t + 3.
__device__ constexpr int key_at(int place) {
  return place / 4 * 2 + place % 4 / 2 * 8 + place % 2;
}

/// Writes V^T tile by tile: d rows of Bc keys in the order of key_at. A thread transposes 16 keys of 4
/// columns. 8 threads share a sector of 32 bytes of V, and 2 share one of V^T.
template <int d, int Bc>
static __global__ void __launch_bounds__(Bc / 16 * 32)
    transpose(const void *V, Strides strides, e4m3 *V_transposed, int heads, int seqlen) {
  griddepcontrol_launch_dependents();  // tiles of Q may load and wait meanwhile
  const int b = blockIdx.y / heads, head = blockIdx.y % heads, thread = threadIdx.x;
  const auto v = head_of<const e4m3, d>(V, strides, b, head, 0, seqlen);
  const int col = (thread % 8 + thread / 16 % 4 * 8) * 4;
  const int group = thread / 64 * 2 + thread / 8 % 2, key = blockIdx.x * Bc + group * 16;
  Vector<e4m3, 16> keys[4];  // of each column
#pragma unroll
  for (int place = 0; place < 16; place++) {
    const Vector<e4m3, 4> row = load<4>(v(key + key_at(place), col));
    for (int i = 0; i < 4; i++) keys[i][place] = row[i];
  }
  const std::int64_t first = (std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * d * Bc;
  const Matrix<e4m3> out{V_transposed + first, d, Bc};
  for (int i = 0; i < 4; i++) store(out(col + i, group * 16), keys[i]);
}
