// SPDX-License-Identifier: MIT
// Rotary embedding for step 24: of rows in any memory, and of K before the attention starts.
#pragma once

#include "common/kernel/heads.h"
#include "common/kernel/kernel.h"

namespace {

/// rotate_rows of one pairing.
template <int d, bool halves, class From, class To>
__device__ void rotate_pairs(From &from, To &to, int rows, const Problem &problem,
                             int first_position) {
  const Matrix<const float> gCos{problem.rope_cos, problem.seqlen_k, d / 2};
  const Matrix<const float> gSin{problem.rope_sin, problem.seqlen_k, d / 2};
  // 8 consecutive lanes have 8 rows: in shared memory the swizzle keeps these in all banks.
  const int lane_row = threadIdx.x / 32 * 8 + threadIdx.x % 8, lane_col = threadIdx.x / 8 % 4 * 8;
  for (int row = lane_row; row < rows; row += blockDim.x / 4)
#pragma unroll
    for (int col = lane_col; col < lane_col + d / 2; col += 32) {
      // 8 elements each from col and from col + d / 2 on are 8 pairs, whichever elements are pairs.
      Vector<half, 8> x[2] = {load<8>(from(row, col)), load<8>(from(row, col + d / 2))};
      for (int n = 0; n < 2; n++) {
        const int pair = halves ? col + 4 * n : col / 2 + d / 4 * n;  // the first of 4
        const auto cos = load<4>(gCos(first_position + row, pair));
        const auto sin = load<4>(gSin(first_position + row, pair));
        for (int e = 0; e < 4; e++) {
          half &a = halves ? x[0][4 * n + e] : x[n][2 * e];
          half &b = halves ? x[1][4 * n + e] : x[n][2 * e + 1];
          const float a_before = __half2float(a), b_before = __half2float(b);
          a = __float2half(a_before * cos[e] - b_before * sin[e]);
          b = __float2half(a_before * sin[e] + b_before * cos[e]);
        }
      }
      store<8>(to(row, col), x[0]);
      store<8>(to(row, col + d / 2), x[1]);
    }
}

/// Rotates rows 0 to `rows` - 1 by the angles of their positions, pair by pair, and stores them in `to`.
/// A thread reads and writes the same elements, so `to` may be `from`.
template <int d, class From, class To>
__device__ void rotate_rows(From &from, To &to, int rows, const Problem &problem,
                            int first_position) {
  if (problem.rope == Rope::kHalves)
    rotate_pairs<d, true>(from, to, rows, problem, first_position);
  else
    rotate_pairs<d, false>(from, to, rows, problem, first_position);
}

constexpr int rotated_rows = 128;  // per block
constexpr int rotating_threads = 128;

/// Rotates K into the workspace.
template <int d>
__global__ void __launch_bounds__(rotating_threads)
    rotate_keys(const Problem problem, const Strides workspace_strides) {
  const int first_row = blockIdx.x * rotated_rows, h = blockIdx.y, b = blockIdx.z;
  const int rows = of_batch(problem.lengths_k, problem, b, problem.seqlen_k) - first_row;
  const int start = of_batch(problem.cu_seqlens_k, problem, b, 0) + first_row;
  const auto gK = head_of<const half, d>(problem.K, problem.K_strides, b, h, start, rows);
  const auto to = head_of<half, d>(problem.workspace, workspace_strides, b, h, start, rows);
  rotate_rows<d>(gK, to, min(rows, rotated_rows), problem, first_row);
}

/// Returns the bytes of K, rotated: the workspace that rotate_keys_beforehand needs.
inline std::size_t rotated_keys_bytes(const Problem &p) {
  return p.rope == Rope::kNone ? 0 : sizeof(half) * p.batch * p.kv_heads * p.seqlen_k * p.head_dim;
}

/// Launches a kernel that rotates K into the workspace, and makes the workspace the problem's K.
template <int d>
void rotate_keys_beforehand(Problem &p) {
  // [kv_heads, batch, seqlen_k, d]; of packed sequences [kv_heads, the rows of all, d].
  const std::int64_t sequence = std::int64_t{p.seqlen_k} * d;
  const Strides strides{p.cu_seqlens_k ? 0 : sequence, p.batch * sequence, d};
  const dim3 grid((p.seqlen_k + rotated_rows - 1) / rotated_rows, p.kv_heads, p.batch);
  launch<void>(rotate_keys<d>, grid, dim3(rotating_threads), p, strides);
  p.K = p.workspace, p.K_strides = strides;
}

}  // namespace
