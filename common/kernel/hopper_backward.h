// SPDX-License-Identifier: MIT
// What step 66 built, for the steps after it: the shape of a block, and where dQ's sums lie until they are rounded.
#pragma once

#include "common/kernel/softmax.h"

constexpr int consumers = 2;  // warpgroups that compute, with 64 keys each
constexpr int Bc = consumers * 64;
constexpr int stages = 2;  // of Q and dO
// Rows of Q in a tile: what registers and shared memory allow. Step 87 has the head dims above 128.
template <int d>
constexpr int Br = d == 64    ? 128
                   : d <= 128 ? 80
                              : 64;
// The last warpgroup of a block is the producer.
constexpr int threads = (consumers + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
constexpr int consumer_registers = 240, producer_registers = 24;
static_assert(128 * (consumers * consumer_registers + producer_registers) <= 65536);

/// Where in a tile of dQ's sums an element is. They lie as the accumulators do: 4 elements of each thread of a
/// warpgroup, then the next 4. Accumulators of dQ^T are 64 columns of dQ and all queries of the tile; at head dim 64
/// all columns of half of them. Above 128 columns they are of dQ: all queries, and 64 columns after 64.
template <int d>
__device__ constexpr int place_in_dQ(int query, int col) {
  const int part = d == 64 ? query / (Br<d> / 2) : col / 64;
  const int of_query = d == 64 ? query % (Br<d> / 2) : query, of_col = col % 64;
  const int row = d > 128 ? of_query : of_col, column = d > 128 ? of_col : of_query;
  const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  return part * (Br<d> * (d == 64 ? 32 : 64)) + column / 8 * 512 + thread * 4 + row / 8 % 2 * 2 +
         column % 2;
}

/// Sets sums to 0: products are added to them, and there may be none.
template <int columns>
__device__ __forceinline__ void clear(Accumulator<columns> &x) {
#pragma unroll
  for (int e = 0; e < x.size; e++) x(e) = 0;
}

/// Writes dK or dV of a warpgroup's 64 keys, times a factor and rounded, to their tile, from a column on.
template <class T, int d, int columns>
__device__ __forceinline__ void write_keys(TmaTile<64, d, T> &tile, Accumulator<columns> &x,
                                           float factor, int first_col = 0) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
  const int col = first_col + threadIdx.x % 32 / 16 * 8;
#pragma unroll
  for (int e = 0; e < x.size; e += 8)
    stmatrix_x4(tile(row, e * 2 + col), {cvt_rn_x2<T>(x(e) * factor, x(e + 1) * factor),
                                         cvt_rn_x2<T>(x(e + 2) * factor, x(e + 3) * factor),
                                         cvt_rn_x2<T>(x(e + 4) * factor, x(e + 5) * factor),
                                         cvt_rn_x2<T>(x(e + 6) * factor, x(e + 7) * factor)});
}

/// Initialises the barriers of the copies of K, V, Q and dO.
template <class Storage>
__device__ __forceinline__ void init_copies(Storage &smem) {
  mbarrier_init(smem.KV_full, 1);
  for (int i = 0; i < stages; i++) {
    mbarrier_init(smem.Q_full[i], 1);
    mbarrier_init(smem.dO_full[i], 1);
    mbarrier_init(smem.empty[i], consumers * 4);  // the warps that compute
  }
}

/// Starts the copies of the tile i of a head's queries, or of its dO, and of a number of each of them.
template <int rows, int d, class T, class Numbers>
__device__ __forceinline__ void load_queries(TmaTile<rows, d, T> &tile, const TensorMap &map,
                                             Numbers &numbers,
                                             const Matrix<const float> &numbers_of_head,
                                             Mbarrier &full, int i, int head) {
  mbarrier_arrive_expect_tx(full, sizeof tile + sizeof numbers);
  tma_load(tile, map, i * rows, head, 0, full);
  bulk_load<rows>(numbers(0, 0), numbers_of_head(i, 0), full);
}
