// SPDX-License-Identifier: MIT
// What step 64 multiplies and where it adds, for the steps after it.
#pragma once

#include "common/kernel/kernel.h"
#include "common/kernel/swizzle.h"

/// Adds A B^T to C, of a warp's rows of A, from `first_row` on, and the tile B: K Q^T = S^T, or V dO^T = dP^T.
template <class T, int m_tiles, int n_tiles, int rows, int d>
__device__ __forceinline__ void multiply_rows(FragmentC (&c)[m_tiles][n_tiles],
                                              SharedTile<rows, d, T> &A,
                                              SharedTile<n_tiles * 8, d, T> &B, int first_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int col = 0; col < d; col += 16) {
    FragmentA a[m_tiles];
    for (int mt = 0; mt < m_tiles; mt++)
      a[mt] = ldmatrix_x4(A(first_row + mt * 16 + lane % 16, col + lane / 16 * 8));
    for (int row = 0; row < n_tiles * 8; row += 16) {
      const auto b = ldmatrix_x4(B(row + lane % 8 + lane / 16 * 8, col + lane / 8 % 2 * 8));
      for (int mt = 0; mt < m_tiles; mt++) {
        mma<T>(c[mt][row / 8], a[mt], {b[0], b[1]});
        mma<T>(c[mt][row / 8 + 1], a[mt], {b[2], b[3]});
      }
    }
  }
}

/// Adds A B to C, of a warp's keys and the tile B: P^T dO, or dS^T Q.
template <class T, int m_tiles, int k_tiles, int n_tiles>
__device__ __forceinline__ void add_product(FragmentC (&c)[m_tiles][n_tiles],
                                            const FragmentA (&a)[m_tiles][k_tiles],
                                            SharedTile<k_tiles * 16, n_tiles * 8, T> &B) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < k_tiles * 16; row += 16)
    for (int col = 0; col < n_tiles * 8; col += 16) {
      const auto b = ldmatrix_x4_trans(B(row + lane % 16, col + lane / 16 * 8));
      for (int mt = 0; mt < m_tiles; mt++) {
        mma<T>(c[mt][col / 8], a[mt][row / 16], {b[0], b[1]});
        mma<T>(c[mt][col / 8 + 1], a[mt][row / 16], {b[2], b[3]});
      }
    }
}

/// Returns the sums of dQ of 16 queries from a column on, in the order in which a warp has them in registers: number
/// i of all lanes is a row.
template <int d, class U>
__device__ __forceinline__ Matrix<U> sums_of(U *dQ_sum, std::int64_t first_row, int first_col = 0) {
  return {dQ_sum + first_row * d + first_col * 16, (d - first_col) / 2, 32};
}

/// Returns the sum of x over the lanes of a warp.
__device__ __forceinline__ float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}
