// SPDX-License-Identifier: MIT
// What becomes of a score before the softmax. Step 52 builds it, and later steps include it.
#pragma once

#include <algorithm>

#include "common/kernel/softmax.h"
#include "common/kernel/work.h"

/// What becomes of a score before the softmax.
struct Scores {
  float scale_log2;  // what the function returns times this is a power of two
  // The product q . k times this is a score in units of the soft cap. Negative: there is none, because a scale may be 0.
  float to_cap;
  const float *slopes;       // of ALiBi, [heads of a sequence]
  const float *sink_logits;  // [heads of a sequence]; null: no sinks
};

/// Returns a problem's functions of scores.
static inline Scores scores_of(const Problem &p) {
  // With a scale of 0 a masked score would be -inf * 0 = NaN. No score shows 1e-20 of itself.
  Scores scores{std::max(log2_e * p.scale, 1e-20f), -1, p.slopes, p.sink_logits};
  if (p.softcap > 0) scores.scale_log2 = log2_e * p.softcap, scores.to_cap = p.scale / p.softcap;
  return scores;
}

/// Begins the maximum m and the sum l of a lane's two rows of a head. A sink is a key of no tile: m is its logit, and l
/// its power, 2^0, in the first of the row's four lanes.
__device__ __forceinline__ void begin_with_sink(float (&m)[2], float (&l)[2], const Scores &scores,
                                                const int &head, const int &lane) {
  m[0] = m[1] = of_head(scores.sink_logits, head) * log2_e;
  l[0] = l[1] = lane % 4 == 0;
}

/// Returns ALiBi's slope of a head, in units of what the function returns, which is multiplied by scale_log2.
__device__ __forceinline__ float slope_of(const Scores &scores, const int &head) {
  return of_head(scores.slopes, head) * log2_e / scores.scale_log2;
}

/// Returns how far the lane's first row of a tile of Q stands from its first column, in the first tile of keys.
__device__ __forceinline__ int rows_ahead(const Work &at, const int &warpgroup, const int &warp,
                                          const int &lane) {
  return at.position + warpgroup * 64 + warp % 4 * 16 + lane / 4 - lane % 4 * 2;
}

/// Changes the scores of the tile j of keys as step 52 does, but asks at run time for a cap and for a bias. `slope`
/// is ALiBi's, in units of what the function returns. `ahead` is how far the lane's first row stands from its first
/// column, in the first tile of keys. The arguments are references as mask_tile's are.
template <int Bc>
__device__ __forceinline__ void cap_and_bias(Accumulator<Bc> &s, const Scores &scores,
                                             const float &slope, const int &ahead, const int &j) {
  if (scores.to_cap >= 0)
#pragma unroll
    for (int i = 0; i < s.size; i++) s(i) = tanh_approx(s(i) * scores.to_cap);
  if (scores.slopes) {
    const float distance = ahead - j * Bc;
#pragma unroll
    for (int i = 0; i < s.size; i++)
      s(i) = fmaf(-slope, fabsf(distance + (i / 2 % 2 * 8 - i / 4 * 8 - i % 2)), s(i));
  }
}

/// Of a sequence without keys O is 0, and the log-sum-exp is that of the sink alone, if there is one. It has no work,
/// because a tile of keys must have a row. A warp of each block writes them.
template <class T, int d, bool sinks>
__device__ __forceinline__ void write_rows_without_keys(const Problem &problem,
                                                        const Scores &scores,
                                                        const Matrix<float> &lse, const int &lane) {
  for (int head = blockIdx.x; head < problem.batch * problem.heads; head += gridDim.x) {
    const Rows rows(problem, head, Given::kAll);
    if (rows.k.count > 0) continue;
    const auto O = head_of<T, d>(problem.O, problem.O_strides, rows.q.sequence, rows.q.head,
                                 rows.q.first, rows.q.count);
    for (int i = lane * 8; i < rows.q.count * d; i += 32 * 8) {
      store(O(i / d, i % d), Vector<T, 8>{});
      if (lse.data && i % d == 0)
        lse(head, i / d) =
            sinks && scores.sink_logits ? of_head(scores.sink_logits, rows.q.head) : -INFINITY;
    }
  }
}

/// The same for V's own number of columns, head_dim_v: lane i writes row i. sink_logits: null if there are no sinks.
template <class T, int d>
__device__ __forceinline__ void write_columns_without_keys(const Problem &problem,
                                                           const float *sink_logits,
                                                           const Matrix<float> &lse,
                                                           const int &lane) {
  for (int head = blockIdx.x; head < problem.batch * problem.heads; head += gridDim.x) {
    const Rows rows(problem, head, Given::kAll);
    if (rows.k.count > 0) continue;
    const auto O = head_of<T, d>(problem.O, problem.O_strides, rows.q.sequence, rows.q.head,
                                 rows.q.first, rows.q.count);
    for (int row = lane; row < rows.q.count; row += 32) {
      for (int col = 0; col < problem.head_dim_v; col += 8) store(O(row, col), Vector<T, 8>{});
      if (lse.data) lse(head, row) = sink_logits ? of_head(sink_logits, rows.q.head) : -INFINITY;
    }
  }
}
