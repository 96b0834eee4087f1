// SPDX-License-Identifier: MIT
// How the tiles of step 57's prefill come into shared memory.
#pragma once

#include "common/kernel/swizzle.h"
#include "steps/57-library/rows.h"

namespace {

struct Tiling {
  int Br, Bc;  // rows of Q, and of K and V, in a tile
  int num_warps, blocks_per_SM;
};
// At 32 three blocks fit an SM if the launch bounds ask for them (step 50).
template <int d>
constexpr Tiling tiling = d == 32    ? Tiling{128, 64, 4, 3}
                          : d <= 128 ? Tiling{128, 64, 4, 2}
                                     : Tiling{128, d == 192 ? 64 : 96, 8, 1};

/// What a kernel for prompts can do. Each kind can do what those before it can.
enum class Kind {
  kPlain,  // neither a rotation nor a window to the left
  kRows,
  kPages,  // K and V in pages
  kAll,    // soft caps and ALiBi, and a head dim that is not the kernel's; with pages or without
};

/// The number of threads that copy neighbouring parts of a row, 128 bytes or less, and then the next.
template <int d>
constexpr int threads_per_row = d % 64 == 0   ? 8
                                : d % 32 == 0 ? 4
                                              : 2;

/// Starts the copies of Rows x d elements, 16 bytes per thread and iteration. Of a ragged tile, which may go on
/// after the matrix' last row, the rows that are not there become zeros; of kAll, the columns that are not there.
template <Kind kind, bool ragged, class T, int Rows, int d>
__device__ void load_tile(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &matrix,
                          int first_row) {
  constexpr int threads = threads_per_row<d>;
  const int row = threadIdx.x / threads, col = threadIdx.x % threads * 8;
  const auto part = matrix.from(first_row + row, col);
#pragma unroll
  for (int i = 0; i < Rows; i += tiling<d>.num_warps * 32 / threads)
    for (int c = 0; c < d; c += threads * 8)
      cp_async_16_or_zeros(tile(row + i, col + c), part(i, c),
                           (!ragged || i < part.rows) && (kind != Kind::kAll || c < part.cols));
}

/// The same of rows in pages: lane i of each warp looks up where rows i, i + 32 and so on begin.
template <Kind kind, class T, int Rows, int d>
__device__ void load_pages(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &head,
                           int first_row, const Call &p, const Strides &strides, int b,
                           int k_start) {
  constexpr int threads = threads_per_row<d>;
  const PageTable pages(p, b);
  std::int64_t offset_of[Rows / 32] = {};
  for (int i = 0; i < Rows / 32; i++)
    if (const int key = first_row + i * 32 + threadIdx.x % 32; key < head.rows)
      offset_of[i] =
          pages.page_of(k_start + key) * strides.batch + (k_start + key) % pages.size * strides.row;
  const int first = threadIdx.x / threads, col = threadIdx.x % threads * 8;
#pragma unroll
  for (int i = 0; i < Rows; i += tiling<d>.num_warps * 32 / threads) {
    const int row = first + i;
    std::int64_t offset = __shfl_sync(kAllLanes, offset_of[0], row % 32);
    for (int k = 1; k < Rows / 32; k++) {
      const std::int64_t further = __shfl_sync(kAllLanes, offset_of[k], row % 32);
      if (row >= k * 32) offset = further;
    }
    const Matrix<const T> from{head.data + offset, 1, head.cols};
    for (int c = 0; c < d; c += threads * 8)
      cp_async_16_or_zeros(
          tile(row, col + c), from(0, col + c),
          first_row + row < head.rows && (kind != Kind::kAll || col + c < head.cols));
  }
}

/// Starts the copies of a tile of K or V, in pages or not.
template <Kind kind, bool ragged = false, class T, int Rows, int d>
__device__ void load_keys(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &head,
                          int first_row, const Call &p, const Strides &strides, int b,
                          int k_start) {
  if (kind >= Kind::kPages && p.page_table)
    load_pages<kind>(tile, head, first_row, p, strides, b, k_start);
  else if (kind != Kind::kPages)
    load_tile<kind, ragged>(tile, head, first_row);
}

/// Loads a tile of Q, turned. Rows and columns that are not there become zeros.
template <class T, int Rows, int d>
__device__ void load_turned_tile(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &gQ,
                                 const Call &p, const Sequence &at, int first_row) {
  // 8 consecutive lanes store to 8 rows: with the swizzle each bank once.
  for (int i = threadIdx.x / 32 * 8 + threadIdx.x % 8; i < Rows; i += tiling<d>.num_warps * 8)
    for (int col = threadIdx.x / 8 % 4 * 8; col < d; col += 32) {
      const int query = first_row + i;
      Vector<T, 8> x = {};
      if (query < gQ.rows && col < gQ.cols)
        x = load_turned<T>(gQ.from(query, 0), col, p, rope_position(p, at, query));
      store<8>(tile(i, col), x);
    }
}

}  // namespace
