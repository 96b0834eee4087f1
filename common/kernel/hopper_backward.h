// SPDX-License-Identifier: MIT
// What step 66 built, for the steps after it: the shape of a block, what comes before the kernel of the gradients,
// and where dQ's sums lie until they are rounded.
#pragma once

#include "common/kernel/softmax.h"

constexpr int consumers = 2;  // warpgroups that compute, with 64 keys each
constexpr int Bc = consumers * 64;
constexpr int stages = 2;  // of Q and dO
template <int d>
constexpr int Br =
    d == 64 ? 128 : 80;  // rows of Q in a tile: what registers and shared memory allow
// The last warpgroup of a block is the producer.
constexpr int threads = (consumers + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
constexpr int consumer_registers = 240, producer_registers = 24;
static_assert(128 * (consumers * consumer_registers + producer_registers) <= 65536);

/// Where in a tile of dQ's sums an element is. They lie as the accumulators of dQ^T do: 4 elements of each
/// thread of a warpgroup, then the next 4. A warpgroup has 64 columns of dQ and all queries of the tile; at
/// head dim 64 it has all columns of half of them.
template <int d>
__device__ constexpr int place_in_dQ(int query, int col) {
  const int warpgroup = d == 64 ? query / (Br<d> / 2) : col / 64;
  const int row = col % 64, column = d == 64 ? query % (Br<d> / 2) : query;  // of the accumulators
  const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  return warpgroup * (Br<d> * d / 2) + column / 8 * 512 + thread * 4 + row / 8 % 2 * 2 + column % 2;
}

/// What the keys need of each query, and dQ's sums begin at 0. A warp takes one row. P of a query that does not
/// exist is 0, because its log-sum-exp is infinite. `Counters` are none, or step 68's, which begin at 0.
template <class T, int d, class... Counters>
static __global__ void __launch_bounds__(128)
    begin(const T *O, const T *dO,    // [heads, seqlen, d]
          const float *lse,           // [heads, seqlen]
          float *lse_log2, float *D,  // [heads, tiles * Br]
          float *dQ_sum,              // [heads, tiles * Br, d]
          int seqlen, int tiles,
          Counters *...counters) {  // one, and one of each tile: [1 + heads * tiles]

  constexpr int each = d / 32;  // elements of a lane
  const int lane = threadIdx.x % 32, i = blockIdx.x * 4 + threadIdx.x / 32;
  const std::int64_t head = blockIdx.y;
  const Matrix<const T> o{O + head * seqlen * d, seqlen, d},
      dO_rows{dO + head * seqlen * d, seqlen, d};
  const std::int64_t row = head * (tiles * Br<d>)+i;
  float l = INFINITY, sum = 0;
  if (i < seqlen) {
    l = Matrix<const float>{lse + head * seqlen, 1, seqlen}(0, i) * log2_e;
    const auto a = load<each>(dO_rows(i, lane * each)), b = load<each>(o(i, lane * each));
    for (int k = 0; k < each; k++) sum += to_float<T>(a[k]) * to_float<T>(b[k]);
  }
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
  store(Matrix<float>{dQ_sum + row * d, 1, d}(0, lane * each), Vector<float, each>{});
  if (lane > 0) return;
  Matrix<float>{lse_log2 + row, 1, 1}(0, 0) = l;
  Matrix<float>{D + row, 1, 1}(0, 0) = sum;
  if (row == 0) ((Matrix<Counters>{counters, 1, 1}(0, 0) = 0), ...);
  if (i % Br<d> == 0) ((Matrix<Counters>{counters + 1 + row / Br<d>, 1, 1}(0, 0) = 0), ...);
}

/// Writes dK or dV of a warpgroup's 64 keys, times a factor and rounded, to their tile.
template <class T, int d>
__device__ __forceinline__ void write_keys(TmaTile<64, d, T> &tile, Accumulator<d> &x,
                                           float factor) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, col = threadIdx.x % 32 / 16 * 8;
#pragma unroll
  for (int e = 0; e < x.size; e += 8)
    stmatrix_x4(tile(row, e * 2 + col), {cvt_rn_x2<T>(x(e) * factor, x(e + 1) * factor),
                                         cvt_rn_x2<T>(x(e + 2) * factor, x(e + 3) * factor),
                                         cvt_rn_x2<T>(x(e + 4) * factor, x(e + 5) * factor),
                                         cvt_rn_x2<T>(x(e + 6) * factor, x(e + 7) * factor)});
}

/// dQ = its sums / sqrt(d), rounded. A thread takes 8 elements of a row, a block 8 rows.
template <class T, int d>
static __global__ void __launch_bounds__(d) round_dQ(const float *dQ_sum,  // as in `gradients`
                                                     T *dQ,                // [heads, seqlen, d]
                                                     int seqlen, int tiles, float scale) {
  // A warp has 8 rows of 32 columns: it reads whole sectors, and writes whole ones.
  const int row = blockIdx.x * 8 + threadIdx.x / 4 % 8;
  const int col = threadIdx.x / 32 * 32 + threadIdx.x % 4 * 8;
  const std::int64_t head = blockIdx.y;
  if (row >= seqlen) return;
  const Matrix<const float> sums{dQ_sum + head * tiles * (Br<d> * d), tiles, Br<d> * d};
  Vector<T, 8> rounded;
  for (int e = 0; e < 8; e++)
    rounded[e] = from_float<T>(sums(row / Br<d>, place_in_dQ<d>(row % Br<d>, col + e)) * scale);
  store<8>(Matrix<T>{dQ + head * seqlen * d, seqlen, d}(row, col), rounded);
}

/// The tiles of queries of a head.
template <int d>
static int tiles_of(const Problem &p) {
  return (p.seqlen_q + Br<d> - 1) / Br<d>;
}
