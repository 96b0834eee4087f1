// SPDX-License-Identifier: MIT
// What comes before and after the kernel of the gradients on Hopper: D and the log-sum-exp of each query, and the
// rounding of dQ. Br are the queries of a tile.
#pragma once

#include "common/kernel/softmax.h"

/// What the keys need of each query, and dQ's sums begin at 0. A warp takes one row. P of a query that does not
/// exist is 0, because its log-sum-exp is infinite. `Counters` are none, or step 68's, which begin at 0.
template <class T, int d, int Br, class... Counters>
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
  const std::int64_t row = head * (tiles * Br) + i;
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
  if (i % Br == 0) ((Matrix<Counters>{counters + 1 + row / Br, 1, 1}(0, 0) = 0), ...);
}

/// dQ = its sums / sqrt(d), rounded. place_in_dQ(query, column) says where in a tile of sums an element is. A thread
/// takes 8 elements of a row, a block 8 rows.
template <class T, int d, int Br, int (*place_in_dQ)(int, int)>
static __global__ void __launch_bounds__(d) round_dQ(const float *dQ_sum,  // as in `gradients`
                                                     T *dQ,                // [heads, seqlen, d]
                                                     int seqlen, int tiles, float scale) {
  // A warp has 8 rows of 32 columns: it reads whole sectors, and writes whole ones.
  const int row = blockIdx.x * 8 + threadIdx.x / 4 % 8;
  const int col = threadIdx.x / 32 * 32 + threadIdx.x % 4 * 8;
  const std::int64_t head = blockIdx.y;
  if (row >= seqlen) return;
  const Matrix<const float> sums{dQ_sum + head * tiles * (Br * d), tiles, Br * d};
  Vector<T, 8> rounded;
  for (int e = 0; e < 8; e++)
    rounded[e] = from_float<T>(sums(row / Br, place_in_dQ(row % Br, col + e)) * scale);
  store<8>(Matrix<T>{dQ + head * seqlen * d, seqlen, d}(row, col), rounded);
}

/// Returns how many tiles of Br queries a head has.
template <int Br>
static int tiles_of(const Problem &p) {
  return (p.seqlen_q + Br - 1) / Br;
}
