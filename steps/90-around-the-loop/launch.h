// SPDX-License-Identifier: MIT
// What step 90 has around the loop, for step 91: the kernels before and behind it, a block's keys, and the launches.
#pragma once

#include "steps/69-training/sinks.h"
#include "steps/80-backward-for-models/block.h"

namespace {

constexpr int around_threads = 128;  // of a block of the kernels before and behind
/// Rows that a block of `begin_rows` has: a thread has 8 elements of a row, 16 bytes.
template <int d>
constexpr int rows_begun = around_threads / (d / 8);
/// Rows that a block of `round_rows` has: a thread has 8 elements of 2 rows.
template <int d>
constexpr int rows_rounded = around_threads / (d / 8) * 2;

/// Computes what the blocks of keys need of each query, and clears dQ's sums and the counters. A query that does not
/// exist, or sees no key, gets an infinite log-sum-exp, so its weights are 0.
template <class T, int d>
__global__ void __launch_bounds__(around_threads)
    begin_rows(const Backward problem, const Sums sums) {
  constexpr int in_row = d / 8;  // threads of a row
  const int first_row = blockIdx.x * rows_begun<d>, i = first_row + threadIdx.x / in_row;
  const int b = blockIdx.y / problem.heads, col = threadIdx.x % in_row * 8;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
    Matrix<unsigned>{sums.counters, 1, 1}(0, 0) = 0;
  const Sequence at = sequence_of(problem, b);
  const Rows queries = {b, int(blockIdx.y) % problem.heads, at.q_start, at.q_count};
  if (first_row >= (queries.rows + Br<d> - 1) / Br<d> * Br<d>) return;
  const std::int64_t row = first_in_workspace<Br<d>>(problem, queries, sums.rows) +
                           std::int64_t{queries.head} * sums.rows + i;
  float lse = -INFINITY, sum = 0;
  if (i < queries.rows) {
    lse = lse_at(problem, at, b, queries.head, i) * log2_e;
    if (col < problem.head_dim) {
      const auto O = matrix_of<const T>(problem.O, problem.O_strides, queries, problem.head_dim);
      const auto dO = matrix_of<const T>(problem.dO, problem.dO_strides, queries, problem.head_dim);
      const auto x = load<8>(dO(i, col)), y = load<8>(O(i, col));
      for (int k = 0; k < 8; k++) sum += to_float<T>(x[k]) * to_float<T>(y[k]);
    }
  }
  for (int mask = in_row / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
  // The threads of a row store 16 bytes side by side, twice.
  for (int k = col / 2; k < d; k += d / 2)
    store(Matrix<float>{sums.dQ + row * d, 1, d}(0, k), Vector<float, 4>{});
  if (col > 0) return;
  Matrix<float>{sums.lse_log2 + row, 1, 1}(0, 0) = lse == -INFINITY ? INFINITY : lse;
  Matrix<float>{sums.D + row, 1, 1}(0, 0) = sum;
  if (i % Br<d> == 0) Matrix<unsigned>{sums.counters + 1 + row / Br<d>, 1, 1}(0, 0) = 0;
}

/// Initialises the block, and returns its keys: by its number if it waits for others, else by its place in the grid.
template <class T, int d>
__device__ __forceinline__ Keys begin_with_keys(SharedStorage<T, d> &smem, const Backward &problem,
                                                const Sums &sums, int key_tiles,
                                                int heads_at_once) {
  if (problem.deterministic)
    return keys_of_block(problem, begin_block(smem, sums.counters), key_tiles, heads_at_once);
  begin_block(smem);
  const int kv_head = blockIdx.z * gridDim.x + blockIdx.x;
  if (kv_head >= problem.batch * problem.kv_heads) return {};  // of the last heads there are fewer
  return keys_of_tile(problem, kv_head, blockIdx.y);
}

/// Multiplies dQ's sums by the scale, rounds and stores them. A warp has 16 rows of 32 columns. A thread loads 8 bytes, a
/// column of its 2 rows; 4 times 2 threads have 64 bytes that follow each other. It stores 16 bytes of each row.
template <class T, int d>
__global__ void __launch_bounds__(around_threads)
    round_rows(const Backward problem, const Sums sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = blockIdx.x * rows_rounded<d> + warp / (d / 32) * 16 + lane / 4 * 2;
  const int col = warp % (d / 32) * 32 + lane % 4 * 8;
  const Rows queries = queries_of(problem, blockIdx.y / problem.heads, blockIdx.y % problem.heads);
  if (row >= queries.rows || col >= problem.head_dim) return;
  const std::int64_t row_0 = first_in_workspace<Br<d>>(problem, queries, sums.rows) +
                             std::int64_t{queries.head} * sums.rows;
  const std::int64_t tile = row_0 / Br<d> + row / Br<d>;
  const Matrix<const float> of_tile{sums.dQ + tile * (Br<d> * d), 1, Br<d> * d};
  Vector<T, 8> rounded[2];
  for (int e = 0; e < 8; e++) {
    const auto both = load<2>(of_tile(0, place_in_dQ<d>(row % Br<d>, col + e)));
    for (int k = 0; k < 2; k++) rounded[k][e] = from_float<T>(both[k] * problem.scale);
  }
  const auto dQ = matrix_of<T>(problem.dQ, problem.dQ_strides, queries, problem.head_dim);
  for (int k = 0; k < 2; k++)
    if (row + k < queries.rows) store<8>(dQ(row + k, col), rounded[k]);
}

/// Launches the three kernels. Step 92's blocks have their own Storage, and stay. `last` are the last arguments of `gradients`.
template <class T, int d, class Storage = SharedStorage<T, d>, class... Parameters, class... Last>
void launch_around(const Backward &p, void (*gradients)(Parameters...), Last... last) {
  const Sums sums = sums_in_workspace<d>(p);
  const int longest = (p.seqlen_q + Br<d> - 1) / Br<d> * Br<d>;
  const int heads = p.batch * p.heads, kv_heads = p.batch * p.kv_heads;
  const int group = p.heads / p.kv_heads;  // heads of Q that share keys
  const int key_tiles = (p.seqlen_k + Bc - 1) / Bc;
  const auto blocks = [&](int rows) { return dim3((longest + rows - 1) / rows, heads); };
  // Side by side are as many heads as have 40 MB of Q, dO and dQ's sums, because an H200 has 50 MB of L2; without turns no more
  // than give each SM two blocks. If all blocks take equally long and none waits for another, one head at a time.
  const std::int64_t bytes = std::int64_t{group} * longest * d * 8;
  const int sms = resident_blocks<Storage>(gradients, threads);
  const int most = p.deterministic ? kv_heads : (2 * sms + key_tiles - 1) / key_tiles;
  const bool side_by_side = p.deterministic || p.window_left >= 0 || p.window_right >= 0;
  const int heads_at_once =
      side_by_side ? std::clamp<std::int64_t>((40 << 20) / bytes, 1, std::min(most, kv_heads)) : 1;
  const dim3 grid = p.deterministic ? dim3(key_tiles * kv_heads)
                                    : dim3(heads_at_once, key_tiles,
                                           (kv_heads + heads_at_once - 1) / heads_at_once);
  launch_on<void>(p.stream, begin_rows<T, d>, blocks(rows_begun<d>), dim3(around_threads), p, sums);
  constexpr bool stay = requires(Storage smem) {
    smem.work;
  };
  launch_on<Storage>(p.stream, gradients, stay ? dim3(std::min(sms, key_tiles * kv_heads)) : grid,
                     dim3(threads), map_of_queries<T, d>(p, p.Q, p.Q_strides),
                     map_of_queries<T, d>(p, p.dO, p.dO_strides),
                     map_of_keys<T>(p, p.K, p.K_strides), map_of_keys<T>(p, p.V, p.V_strides),
                     map_of_keys<T>(p, p.dK, p.dK_strides), map_of_keys<T>(p, p.dV, p.dV_strides),
                     p, sums, group, key_tiles, heads_at_once, last...);
  launch_on<void>(p.stream, round_rows<T, d>, blocks(rows_rounded<d>), dim3(around_threads), p,
                  sums);
}

}  // namespace
