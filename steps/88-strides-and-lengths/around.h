// SPDX-License-Identifier: MIT
// What stands around the kernels of steps 88, 80, 81 and 87: the workspace, and what comes before and after.
#pragma once

#include "common/kernel/hopper_backward.h"
#include "steps/57-library/hopper.h"
#include "steps/69-training/rows.h"

namespace {

/// The arrays in the workspace, which no tensor map describes: the sums of dQ, and what the kernels hand to each other.
struct Sums {
  float *lse_log2, *D;  // [heads' rows]
  float *dQ;            // [heads' rows / Br, Br * d]: place_in_dQ
  // The next block's number, and how many blocks have added to each tile: [1 + heads' rows / Br].
  unsigned *counters;
  int rows;  // of each head
};
template <int d>
Sums sums_in_workspace(const Backward &p) {
  const std::int64_t all_rows = all_rows_in_workspace<Br<d>>(p);
  float *const dQ = static_cast<float *>(p.workspace), *const lse_log2 = dQ + all_rows * d;
  float *const D = lse_log2 + all_rows;
  return {lse_log2, D, dQ, reinterpret_cast<unsigned *>(D + all_rows), rows_in_workspace<Br<d>>(p)};
}
template <int d>
std::size_t workspace_bytes(const Backward &p) {
  const std::int64_t rows = all_rows_in_workspace<Br<d>>(p);
  return (rows * (d + 2) + rows / Br<d> + 1) * 4;
}
inline std::size_t workspace_bytes(const Backward &p) {
  return p.head_dim <= 64    ? workspace_bytes<64>(p)
         : p.head_dim <= 128 ? workspace_bytes<128>(p)
         : p.head_dim <= 192 ? workspace_bytes<192>(p)
                             : workspace_bytes<256>(p);
}

/// Returns the map of Q or dO; and of K, V, dK or dV.
template <class T, int d>
SequenceMap map_of_queries(const Backward &p, const void *data, const Strides &strides) {
  const Mapped of = mapped_queries(p, data, strides);
  return sequence_map<T>(data, strides_for_map(p, of, p.cu_seqlens_q), of.blocks, of.heads, of.rows,
                         p.cu_seqlens_q, p.head_dim, Br<d>);
}
template <class T>
SequenceMap map_of_keys(const Backward &p, const void *data, const Strides &strides) {
  const Mapped of = mapped_keys(p, data, strides);
  return sequence_map<T>(data, strides_for_map(p, of, p.cu_seqlens_k), of.blocks, of.heads, of.rows,
                         p.cu_seqlens_k, p.head_dim, 64);
}

/// Computes what the blocks of keys need of each query, and clears dQ's sums and the counters. A warp handles one row. A
/// query that does not exist, or sees no key, gets an infinite log-sum-exp, so its weights are 0.
template <class T, int d>
__global__ void __launch_bounds__(128) begin(const Backward problem, const Sums sums) {
  constexpr int each =
      d > 128 ? 8 : d / 32;  // elements of a lane; of 192 the last 8 lanes have none
  constexpr int of_sums = each < 4 ? each : 4;  // 16 bytes
  const int lane = threadIdx.x % 32, i = blockIdx.x * 4 + threadIdx.x / 32;
  const int b = blockIdx.y / problem.heads, col = lane * each;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
    Matrix<unsigned>{sums.counters, 1, 1}(0, 0) = 0;
  const Sequence at = sequence_of(problem, b);
  const Rows queries = {b, int(blockIdx.y) % problem.heads, at.q_start, at.q_count};
  if (i >= (queries.rows + Br<d> - 1) / Br<d> * Br<d>) return;
  const std::int64_t row = first_in_workspace<Br<d>>(problem, queries, sums.rows) +
                           std::int64_t{queries.head} * sums.rows + i;
  float lse = -INFINITY, sum = 0;
  if (i < queries.rows) {
    lse = lse_at(problem, at, b, queries.head, i) * log2_e;
    if (col < problem.head_dim) {
      const auto O = matrix_of<const T>(problem.O, problem.O_strides, queries, problem.head_dim);
      const auto dO = matrix_of<const T>(problem.dO, problem.dO_strides, queries, problem.head_dim);
      const auto x = load<each>(dO(i, col)), y = load<each>(O(i, col));
      for (int k = 0; k < each; k++) sum += to_float<T>(x[k]) * to_float<T>(y[k]);
    }
  }
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
  for (int k = lane * of_sums; k < d; k += 32 * of_sums)
    store(Matrix<float>{sums.dQ + row * d, 1, d}(0, k), Vector<float, of_sums>{});
  if (lane > 0) return;
  Matrix<float>{sums.lse_log2 + row, 1, 1}(0, 0) = lse == -INFINITY ? INFINITY : lse;
  Matrix<float>{sums.D + row, 1, 1}(0, 0) = sum;
  if (i % Br<d> == 0) Matrix<unsigned>{sums.counters + 1 + row / Br<d>, 1, 1}(0, 0) = 0;
}

/// Numbers the block. Blocks are numbered in the order in which they begin, so those before this one have begun.
__device__ __forceinline__ void take_number(Tile<int, 1, 4> &number, unsigned *counters) {
  const unsigned left = atomic_dec(Matrix<unsigned>{counters, 1, 1}(0, 0), gridDim.x - 1);
  number(0, 0) = left == 0 ? 0 : gridDim.x - left;
}

/// Rows of dQ that a block of round_dQ handles. A warp has 8 rows of 32 columns, so it reads whole sectors, and writes
/// whole ones. Above head dim 128 a sector has 4 columns of a row and of the one 8 further on: 16 rows of 16 columns.
template <int d>
constexpr int rounded_rows = d > 128 ? 16 : 8;

/// Multiplies dQ's sums by the scale, rounds and stores them. A thread handles 8 elements of a row.
template <class T, int d>
__global__ void __launch_bounds__(d *rounded_rows<d> / 8)
    round_dQ(const Backward problem, const Sums sums) {
  constexpr int rows = rounded_rows<d>, in_row = 32 / rows;  // threads of a warp in a row
  const int row = blockIdx.x * rows + threadIdx.x / in_row % rows;
  const int col = threadIdx.x / 32 * (in_row * 8) + threadIdx.x % in_row * 8;
  const Rows queries = queries_of(problem, blockIdx.y / problem.heads, blockIdx.y % problem.heads);
  if (row >= queries.rows || col >= problem.head_dim) return;
  const std::int64_t row_0 = first_in_workspace<Br<d>>(problem, queries, sums.rows) +
                             std::int64_t{queries.head} * sums.rows;
  const std::int64_t tile = row_0 / Br<d> + row / Br<d>;
  const Matrix<const float> of_tile{sums.dQ + tile * (Br<d> * d), 1, Br<d> * d};
  Vector<T, 8> rounded;
  for (int e = 0; e < 8; e++)
    rounded[e] = from_float<T>(of_tile(0, place_in_dQ<d>(row % Br<d>, col + e)) * problem.scale);
  store<8>(matrix_of<T>(problem.dQ, problem.dQ_strides, queries, problem.head_dim)(row, col),
           rounded);
}

}  // namespace
