// SPDX-License-Identifier: MIT
// Gradients of attention between some queries and some keys of a sequence: step 65's kernels for the steps of Part VII,
// where each GPU has a part of both. The sums stay in fp32, so that those of several launches can be added.
#pragma once

#include <algorithm>

#include "common/kernel/heads.h"
#include "common/kernel/kernel.h"
#include "common/kernel/tile_gradients.h"

namespace mma_gradients {

/// A launch: these rows of Q with these rows of K and V, [batch, rows, heads or kv_heads, d] each.
struct Piece {
  const void *Q, *K, *V, *dO;
  Strides Q_strides, K_strides;  // dO has Q's, V, dK and dV have K's
  int batch, heads, kv_heads, rows_q, rows_k;
  bool causal;  // query i sees the keys up to i
  // What `begin` gives of each row of Q, from a row on that is a multiple of 64.
  const float *lse_log2, *D;  // [batch * heads, all_rows]
  float *dQ_sum;              // [batch * heads, all_rows / 16, d / 2, 32]: the launch adds to it
  int all_rows;
  float *dK, *dV;  // [batch, rows_k, kv_heads, d]: the launch writes them
  void *stream;
};

/// Rows of Q in the arrays of `begin`: whole tiles, at either head dim.
inline int rows_in_arrays(int rows) {
  return (rows + 127) / 128 * 128;
}

/// Starts the copies of Rows x d elements, 16 bytes per thread and iteration. Rows that do not exist become zeros.
template <class T, int Rows, int d>
__device__ void load_tile(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &matrix,
                          int first_row) {
  const int row = threadIdx.x / (d / 8), col = threadIdx.x % (d / 8) * 8;
  const auto part = matrix.from(first_row + row, col);
#pragma unroll
  for (int i = 0; i < Rows; i += threads / (d / 8))
    cp_async_16_or_zeros(tile(row + i, col), part(i, 0), i < part.rows);
}

/// What the keys need of each query, and dQ's sums begin at 0. A warp takes one row. In `lse_of_late` the rows before
/// `late` have an infinite log-sum-exp, as rows that do not exist have in both: their weights are 0 then.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    begin(const void *O, const void *dO, Strides strides,  // [batch, rows, heads, d]
          const float *lse,                                // natural, [batch * heads, part_rows]
          int part_rows, int rows, int heads, int late,
          float *lse_log2,  // [batch * heads, all_rows], as the next two
          float *lse_of_late, float *D,
          float *dQ_sum,  // [batch * heads, all_rows, d], in any order
          int all_rows) {
  const int row = blockIdx.x * num_warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y, all_heads = gridDim.y;
  const auto o = head_of<const T, d>(O, strides, head / heads, head % heads, 0, rows);
  const auto do_ = head_of<const T, d>(dO, strides, head / heads, head % heads, 0, rows);
  const Matrix<float> sums{dQ_sum + (std::int64_t{head} * all_rows + row) * d, 1, d};
  float sum = 0;
  for (int k = lane; k < d; k += 32) {
    if (row < rows) sum += to_float<T>(do_(row, k)) * to_float<T>(o(row, k));
    sums(0, k) = 0.0f;
  }
  sum = warp_sum(sum);
  if (lane > 0) return;
  const Matrix<const float> of_rows{lse, all_heads, part_rows};
  const float row_lse = row < rows ? of_rows(head, row) * log2_e : INFINITY;
  Matrix<float>{lse_log2, all_heads, all_rows}(head, row) = row_lse;
  Matrix<float>{lse_of_late, all_heads, all_rows}(head, row) = row < late ? INFINITY : row_lse;
  Matrix<float>{D, all_heads, all_rows}(head, row) = sum;
}

/// One tile of queries that a block visits: its head of all in the batch, its first query, and the last of the block's
/// keys that this query sees.
struct alignas(16) Visit {
  int head, row, to, unused;
};

template <class T, int d>
struct SharedStorage : Operands<T, d> {
  Tile<Visit, 1, 1> visit[4];  // the same for all threads: the loop leaves no registers for it
};

/// dK and dV of 128 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 1)  // threads per block, blocks per SM
    gradients(const Piece piece, float scale) {
  const float scale_log2 = scale * log2_e;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  // Blocks start in the order of their index, x first: a section's first keys, which the most queries see.
  const int any_head = (gridDim.z - 1 - blockIdx.z) * gridDim.x + blockIdx.x;
  const int kv_head = any_head % piece.kv_heads, b = any_head / piece.kv_heads;
  if (b >= piece.batch) return;
  const int group = piece.heads / piece.kv_heads;  // heads of Q that share these keys
  const int first_key = blockIdx.y * Bc, keys_end = piece.rows_k - first_key;

  // Query `first_key` is the first that sees the block's first key.
  const int first_query = piece.causal ? first_key / Br * Br : 0;
  const int tiles = max(0, (piece.rows_q - first_query + Br - 1) / Br), visits = group * tiles;
  // The one before the first, in whose place visit 3 will be.
  if (threadIdx.x == 0)
    smem.visit[3](0, 0) = {b * piece.heads + kv_head * group, first_query - Br, 0, 0};
  __syncthreads();  // it is there for all threads

  // Visit t is of the next tile, or of the next head's first.
  const auto load_queries = [&](int stage, int t) {
    Visit visit = smem.visit[(t + 3) % 4](0, 0);
    visit.row += Br;
    if (visit.row >= piece.rows_q) visit.row = first_query, visit.head++;
    visit.to = piece.causal ? visit.row - first_key : Bc + Br;
    const auto of = [&](const void *tensor) {
      return head_of<const T, d>(tensor, piece.Q_strides, b, visit.head - b * piece.heads, 0,
                                 piece.rows_q);
    };
    load_tile(smem.Q[stage], of(piece.Q), visit.row);
    load_tile(smem.dO[stage], of(piece.dO), visit.row);
    if (threadIdx.x < Br / 4) {
      const int heads = piece.batch * piece.heads, col = threadIdx.x * 4;
      const Matrix<const float> all_lse{piece.lse_log2, heads, piece.all_rows},
          all_D{piece.D, heads, piece.all_rows};
      cp_async_16(smem.lse[stage](0, col), all_lse(visit.head, visit.row + col));
      cp_async_16(smem.D[stage](0, col), all_D(visit.head, visit.row + col));
    }
    if (threadIdx.x == 0) smem.visit[t % 4](0, 0) = visit;
  };
  const auto of_keys = [&]<class E>(auto *tensor) {
    return head_of<E, d>(tensor, piece.K_strides, b, kv_head, 0, piece.rows_k);
  };
  load_tile(smem.K, of_keys.template operator()<const T>(piece.K), first_key);
  load_tile(smem.V, of_keys.template operator()<const T>(piece.V), first_key);
  if (visits > 0) load_queries(0, 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // K, V, and the first Q, dO, lse and D are there for all warps

  // Warps 0 to 3 keep dV of 32 keys each, and compute S^T and P^T. Warps 4 to 7 keep dK of the same keys,
  // and compute dP^T and dS^T. In each 16 keys and 8 queries a lane has two keys, `key_row` and 8 further,
  // and two queries, `query` and `query` + 1.
  const bool keeps_dV = warp < 4;
  const int warp_key = warp % 4 * 32, key_row = threadIdx.x / 32 % 4 * 32 + lane / 4;
  const int query = lane % 4 * 2;
  FragmentC sum[m_tiles][d / 8] = {};
  // The score of a query and a key that it does not see is -infinity.
  const auto hide = [&](auto &x, int t) {
    const Visit visit = smem.visit[t % 4](0, 0);
    if (warp_key + 32 > keys_end || warp_key + 31 > visit.to) {
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int n = 0; n < Br / 8; n++)
          for (int e = 0; e < 4; e++) {
            const int key = key_row + mt * 16 + e / 2 * 8;
            if (key >= keys_end || key - (query + 8 * n + e % 2) > visit.to)
              x[mt][n][e] = -INFINITY;
          }
    }
  };
  const auto row_of = [&](int t) {
    const Visit visit = smem.visit[t % 4](0, 0);
    return std::int64_t{visit.head} * piece.all_rows + visit.row;
  };
  add_visits<T>(sum, smem, warp, visits, scale_log2, piece.dQ_sum, load_queries, hide, row_of);

  const auto out = of_keys.template operator()<float>(keeps_dV ? piece.dV : piece.dK);
  const float factor = keeps_dV ? 1 : scale;
#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++)
    for (int r = 0; r < 2; r++) {
      const int key = key_row + mt * 16 + 8 * r;
      if (key >= keys_end) continue;
      for (int col = 0; col < d; col += 8) {
        const float *const two = &sum[mt][col / 8][2 * r];
        store<2>(out(first_key + key, col + lane % 4 * 2),
                 Vector<float, 2>{two[0] * factor, two[1] * factor});
      }
    }
}

/// Launches `gradients`, with step 65's grid. x: the heads of K and V of a section, y: tiles of keys, z: sections. With a
/// causal mask a section is as many heads as have 32 MB of Q, dO and dQ's sums, which stay in L2. Without one it is one.
template <class T, int d>
void launch(const Piece &piece) {
  const int kv_heads = piece.batch * piece.kv_heads, group = piece.heads / piece.kv_heads;
  const std::int64_t bytes = std::int64_t{group} * piece.rows_q * d * (2 + 2 + 4);
  const int most = piece.causal ? std::clamp<std::int64_t>((32 << 20) / bytes, 1, kv_heads) : 1;
  const int sections = (kv_heads + most - 1) / most;
  const dim3 grid((kv_heads + sections - 1) / sections, (piece.rows_k + Bc - 1) / Bc, sections);
  launch_on<SharedStorage<T, d>>(piece.stream, gradients<T, d>, grid, dim3(threads), piece,
                                 1 / sqrtf(d));
}

/// dQ = its sums / sqrt(d), rounded. A warp takes 16 queries.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    round_dQ(const float *dQ_sum,  // [batch * heads, all_rows / 16, d / 2, 32]
             void *dQ, Strides strides, int rows, int heads, int all_rows, float scale) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * num_warps + threadIdx.x / 32) * 16;
  const int head = blockIdx.y;
  const auto out = head_of<T, d>(dQ, strides, head / heads, head % heads, 0, rows);
  const auto sums = sums_of<d>(dQ_sum, std::int64_t{head} * all_rows + first);
  for (int i = 0; i < d / 2; i += 2) {
    const int row = first + lane / 4 + i / 2 % 2 * 8;
    if (row < rows)
      store<2>(out(row, i / 4 * 8 + lane % 4 * 2),
               Vector<T, 2>{from_float<T>(sums(i, lane) * scale),
                            from_float<T>(sums(i + 1, lane) * scale)});
  }
}

/// dK (z = 0) and dV (z = 1) are their sums, rounded: the first `count` elements of each batch element. A thread has 4.
template <class T>
__global__ void __launch_bounds__(threads)
    round_sums(const float *dK_sum, const float *dV_sum, T *dK, T *dV, int count,
               std::int64_t batch_stride) {
  const int i = (blockIdx.x * threads + threadIdx.x) * 4;
  if (i >= count) return;
  const std::int64_t b = blockIdx.y * batch_stride;
  const auto x = load<4>(Matrix<const float>{(blockIdx.z ? dV_sum : dK_sum) + b, 1, count}(0, i));
  Vector<T, 4> rounded;
  for (int e = 0; e < 4; e++) rounded[e] = from_float<T>(x[e]);
  store<4>(Matrix<T>{(blockIdx.z ? dV : dK) + b, 1, count}(0, i), rounded);
}

}  // namespace mma_gradients
