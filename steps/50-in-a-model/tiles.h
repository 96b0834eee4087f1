// SPDX-License-Identifier: MIT
// How the tiles of step 50's prefill come into shared memory.
#pragma once

#include "common/kernel/swizzle.h"
#include "steps/50-in-a-model/rows.h"

namespace {

struct Tiling {
  int Br, Bc;  // rows of Q, and of K and V, in a tile
  int num_warps, blocks_per_SM;
};
// At 32 three blocks fit an SM if the launch bounds ask for them: 168 registers, where nvcc would take 176.
template <int d>
constexpr Tiling tiling = d == 32    ? Tiling{128, 64, 4, 3}
                          : d <= 128 ? Tiling{128, 64, 4, 2}
                                     : Tiling{128, d == 192 ? 64 : 96, 8, 1};

/// The number of threads that copy neighbouring parts of a row, 128 bytes or less, and then the next.
template <int d>
constexpr int threads_per_row = d % 64 == 0   ? 8
                                : d % 32 == 0 ? 4
                                              : 2;

/// Starts the copies of Rows x d elements, 16 bytes per thread and iteration. Of a ragged tile, which
/// may go on after the matrix' last row, the rows that are not there become zeros.
template <bool ragged, class T, int Rows, int d>
__device__ void load_tile(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &matrix,
                          int first_row) {
  constexpr int threads = threads_per_row<d>;
  const int row = threadIdx.x / threads, col = threadIdx.x % threads * 8;
  const auto part = matrix.from(first_row + row, col);
#pragma unroll
  for (int i = 0; i < Rows; i += tiling<d>.num_warps * 32 / threads)
    for (int c = 0; c < d; c += threads * 8)
      cp_async_16_or_zeros(tile(row + i, col + c), part(i, c), !ragged || i < part.rows);
}

/// The same of rows in pages: lane i of each warp looks up where rows i, i + 32 and so on begin.
template <class T, int Rows, int d>
__device__ void load_pages(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &head,
                           int first_row, const Problem &problem, const Strides &strides, int b) {
  constexpr int threads = threads_per_row<d>;
  const Pages pages(problem);
  std::int64_t offset_of[Rows / 32] = {};
  for (int i = 0; i < Rows / 32; i++)
    if (const int key = first_row + i * 32 + threadIdx.x % 32; key < head.rows)
      offset_of[i] = pages.page_of(b, key) * strides.batch + key % pages.size * strides.row;
  const int first = threadIdx.x / threads, col = threadIdx.x % threads * 8;
#pragma unroll
  for (int i = 0; i < Rows; i += tiling<d>.num_warps * 32 / threads) {
    const int row = first + i;
    std::int64_t offset = __shfl_sync(kAllLanes, offset_of[0], row % 32);
    for (int k = 1; k < Rows / 32; k++) {
      const std::int64_t further = __shfl_sync(kAllLanes, offset_of[k], row % 32);
      if (row >= k * 32) offset = further;
    }
    const Matrix<const T> from{head.data + offset, 1, d};
    for (int c = 0; c < d; c += threads * 8)
      cp_async_16_or_zeros(tile(row, col + c), from(0, col + c), first_row + row < head.rows);
  }
}

/// Starts the copies of a tile of K or V, in pages or not.
template <bool paged, bool ragged = false, class T, int Rows, int d>
__device__ void load_keys(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &head,
                          int first_row, const Problem &problem, const Strides &strides, int b) {
  if constexpr (paged)
    load_pages(tile, head, first_row, problem, strides, b);
  else
    load_tile<ragged>(tile, head, first_row);
}

/// Loads a tile of Q, rotated. Rows that are not there, or are before the first key and see none,
/// become zeros.
template <class T, int Rows, int d>
__device__ void load_rotated(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &gQ,
                             const Problem &problem, int first_row, int position_of_0) {
  // 8 consecutive lanes store to 8 rows: with the swizzle each bank once.
  for (int i = threadIdx.x / 32 * 8 + threadIdx.x % 8; i < Rows; i += tiling<d>.num_warps * 8)
    for (int col = threadIdx.x / 8 % 4 * 8; col < d / 2; col += 32) {
      const int query = first_row + i, position = query + position_of_0;
      Vector<T, 8> left = {}, right = {};
      if (query < gQ.rows && position >= 0) {
        left = load<8>(gQ(query, col)), right = load<8>(gQ(query, col + d / 2));
        rotate<T, d>(left, right, problem, position, col);
      }
      store<8>(tile(i, col), left), store<8>(tile(i, col + d / 2), right);
    }
}

}  // namespace
