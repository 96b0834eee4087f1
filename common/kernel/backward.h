// SPDX-License-Identifier: MIT
// What steps 61 to 63 multiply, copy and begin with, for the steps after them.
#pragma once

#include "common/kernel/kernel.h"
#include "common/kernel/swizzle.h"

/// Returns the sum of x over the lanes of a warp.
__device__ __forceinline__ float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

/// Starts the copies of Rows x d elements by a block of `threads`, 16 bytes per thread and iteration.
template <int threads, class T, int Rows, int d>
__device__ __forceinline__ void load_tile(SharedTile<Rows, d, T> &tile,
                                          const Matrix<const T> &matrix, int first_row) {
  const int row = threadIdx.x / (d / 8), col = threadIdx.x % (d / 8) * 8;
#pragma unroll
  for (int i = 0; i < Rows; i += threads / (d / 8))
    cp_async_16(tile(row + i, col), matrix(first_row + row + i, col));
}

/// D = dO . o of each query, and dQ's sums begin at 0, as in step 61. A warp takes one row.
template <class T, int d, int num_warps>
__global__ void __launch_bounds__(num_warps * 32)
    begin(const T *O, const T *dO,  // [batch * heads * seqlen, d]
          float *D,                 // [batch * heads * seqlen]
          float *dQ_sum) {          // [batch * heads * seqlen, d], in any order
  const int lane = threadIdx.x % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * num_warps + threadIdx.x / 32;
  const Matrix<const T> o{O + row * d, 1, d}, dO_row{dO + row * d, 1, d};
  const Matrix<float> sums{dQ_sum + row * d, 1, d};
  float sum = 0;
  for (int k = lane; k < d; k += 32) {
    sum += to_float<T>(dO_row(0, k)) * to_float<T>(o(0, k));
    sums(0, k) = 0.0f;
  }
  sum = warp_sum(sum);
  if (lane == 0) Matrix<float>{D + row, 1, 1}(0, 0) = sum;
}

/// Adds A B^T to C, of a warp's rows of A, from `first_row` on, and the tile B: K Q^T = S^T, or V dO^T = dP^T. A warp
/// has m_tiles times mma's 16 rows of A, and each fragment of B feeds all of them. `unroll` is how many iterations nvcc
/// unrolls: more of them take more registers.
template <class T, int unroll = 0, int m_tiles, int n_tiles, int rows, int d>
__device__ __forceinline__ void multiply_rows(FragmentC (&c)[m_tiles][n_tiles],
                                              SharedTile<rows, d, T> &A,
                                              SharedTile<n_tiles * 8, d, T> &B, int first_row) {
  const int lane = threadIdx.x % 32;
  const auto multiply = [&](int col) {
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
  };
  if constexpr (unroll > 0) {
#pragma unroll(unroll)
    for (int col = 0; col < d; col += 16) multiply(col);
  } else {
#pragma unroll
    for (int col = 0; col < d; col += 16) multiply(col);
  }
}

/// Adds A B to C, of a warp's keys, which are A's rows, and the tile B: P^T dO, or dS^T Q.
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
