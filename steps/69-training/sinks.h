// SPDX-License-Identifier: MIT
// The derivatives of the sinks' logits, from what the keys need of each query.
#pragma once

#include "common/kernel/backward.h"
#include "steps/69-training/rows.h"

namespace {

constexpr int sink_threads = 512;
using SinkSums = Tile<float, 1, sink_threads / 32>;

/// Minus the sum of p D over the queries of a head in all sequences, where p = e^(sink - lse) is the sink's weight. A
/// block takes a head. It adds in one order, so each run has the same bits.
template <int whole_tiles>
__global__ void __launch_bounds__(sink_threads)
    add_sinks(const Backward problem, const float *lse_log2,
              const float *D,  // [heads' rows]
              int rows) {
  auto &sums = shared_storage<SinkSums>();
  const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float logit = of_head(problem.sink_logits, head) * log2_e;
  float sum = 0;
  for (int b = 0; b < problem.batch; b++) {
    const Rows queries = queries_of(problem, b, head);
    const std::int64_t row_0 =
        first_in_workspace<whole_tiles>(problem, queries, rows) + std::int64_t{head} * rows;
    const Matrix<const float> all_lse{lse_log2 + row_0, 1, queries.rows};
    const Matrix<const float> all_D{D + row_0, 1, queries.rows};
#pragma unroll 4  // loads in flight
    for (int i = threadIdx.x; i < queries.rows; i += sink_threads)
      sum += ex2(logit - all_lse(0, i)) * all_D(0, i);
  }
  sum = warp_sum(sum);
  if (lane == 0) sums(0, warp) = sum;
  __syncthreads();  // all warps have stored their sums
  if (warp > 0) return;
  sum = warp_sum(lane < sink_threads / 32 ? float(sums(0, lane)) : 0.0f);
  if (lane == 0) Matrix<float>{problem.d_sink_logits, 1, problem.heads}(0, head) = -sum;
}

/// Launches it, if somebody wants these derivatives.
template <int whole_tiles>
void add_up_sinks(const Backward &p, const float *lse_log2, const float *D, int rows) {
  if (p.d_sink_logits)
    launch_on<SinkSums>(p.stream, add_sinks<whole_tiles>, dim3(p.heads), dim3(sink_threads), p,
                        lse_log2, D, rows);
}

}  // namespace
