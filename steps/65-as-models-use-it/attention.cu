// Step 65: as models use it. Masks, windows, lengths, layouts and grouped heads: which queries a tile of keys visits.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window-size, --type
// Before      step 64: every query sees every key, all heads are alike, and lengths are multiples of 128.
// Bottleneck  Work: with a causal mask half of the pairs of tiles have no visible score. And K and V once per query
//             head, where a model has fewer heads of them.
// Change      A block computes which tiles of queries see any of its keys, and visits these, in each head of the
//             group. It masks the tiles that an edge crosses. What all threads know lies in shared memory.
// Prediction  At 8192 and --causal a block visits 65 pairs of tiles on average, where one of step 64 visits 128. A pair
//             takes 100 clocks more, for its plan. At head dim 128 that is 0.524 of step 64's clocks, and 0.954 of its
//             TFLOP/s. Without a mask it is 1.4% more clocks than step 64 takes.
#include <algorithm>

#include "common/kernel/tile_gradients.h"
#include "steps/65-as-models-use-it/rows.h"

using namespace mma_gradients;

namespace {

/// What the keys need of each query, and dQ's sums begin at 0. A warp takes one row. A query that does not exist, or
/// sees no key, gets an infinite log-sum-exp: its weights are 0 then.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    begin(const Problem problem, float *lse_log2, float *D,  // [batch * heads, rows]
          float *dQ_sum,  // [batch * heads, rows, d], in any order
          int rows) {
  const int row = blockIdx.x * num_warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y;
  const Rows queries = queries_of(problem, head / problem.heads, head % problem.heads);
  const auto o = matrix_of<const T, d>(problem.O, problem.O_strides, queries);
  const auto dO = matrix_of<const T, d>(problem.dO, problem.O_strides, queries);
  const Matrix<float> sums{dQ_sum + (std::int64_t{head} * rows + row) * d, 1, d};
  float sum = 0;
  for (int k = lane; k < d; k += 32) {
    if (row < queries.rows) sum += to_float<T>(dO(row, k)) * to_float<T>(o(row, k));
    sums(0, k) = 0.0f;
  }
  sum = warp_sum(sum);
  if (lane > 0) return;
  const int heads = gridDim.y;
  const Matrix<const float> lse{problem.lse, heads, problem.seqlen_q};
  const float row_lse = row < queries.rows ? lse(head, row) * log2_e : -INFINITY;
  Matrix<float>{lse_log2, heads, rows}(head, row) = row_lse == -INFINITY ? INFINITY : row_lse;
  Matrix<float>{D, heads, rows}(head, row) = sum;
}

/// What a block visits in each head: the tiles of queries from row `first_row` to row `end`. Query i sees the keys
/// `lowest` + i to `highest` + i, counted from the block's first.
struct alignas(16) Plan {
  int first_row, end, lowest, highest;
};
/// One tile of them: its head of all in the batch, its first query, and the keys `from` to `to` that this query sees.
struct alignas(16) Visit {
  int head, row, from, to;
};

template <class T, int d>
struct SharedStorage : Operands<T, d> {
  // What is the same for all threads: the loop leaves no registers for it.
  Tile<Rows, 1, 1> queries, keys;
  Tile<Plan, 1, 1> plan;
  Tile<Visit, 1, 1> visit[4];
};

/// dK and dV of 128 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 1)  // threads per block, blocks per SM
    gradients(const Problem problem, const float *lse_log2,
              const float *D,  // [batch * heads, rows]
              float *dQ_sum,   // [batch * heads, rows / 16, d / 2, 32]
              int rows, float scale) {
  constexpr int part = 1;  // of 8 queries. Of more nvcc spills a register at head dim 128
  const float scale_log2 = scale * log2_e;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  // Blocks start in the order of their index, x first: a section's first keys, which the most queries see.
  const int kv_head = (gridDim.z - 1 - blockIdx.z) * gridDim.x + blockIdx.x;
  const int first_key = blockIdx.y * Bc, b = kv_head / problem.kv_heads;
  if (b >= problem.batch) return;
  const Rows keys = keys_of(problem, b, kv_head % problem.kv_heads);
  const int group = problem.heads / problem.kv_heads;  // heads of Q that share these keys
  const Rows queries = queries_of(problem, b, keys.head * group);
  const int keys_here = min(keys.rows - first_key, Bc);
  if (keys_here <= 0) return;  // the sequence is shorter than the longest

  // Query i stands at key i + offset. It sees the keys from `left` before that one to `right` after it.
  const int offset = keys.rows - queries.rows, all = keys.rows + queries.rows;
  const int left = problem.window_left < 0 ? all : min(problem.window_left, all);
  const int right = problem.causal             ? 0
                    : problem.window_right < 0 ? all
                                               : min(problem.window_right, all);
  const int lowest = offset - left - first_key, highest = offset + right - first_key;
  // Query -highest is the first that sees the block's first key. Query keys_here - 1 - lowest is the last one that
  // sees its last key.
  const int first_query = max(0, -highest) / Br * Br;
  const int queries_end = min(queries.rows, keys_here - lowest);
  const int tiles = max(0, (queries_end - first_query + Br - 1) / Br), visits = group * tiles;
  if (threadIdx.x == 0) {
    smem.queries(0, 0) = queries;
    smem.keys(0, 0) = keys;
    smem.plan(0, 0) = {first_query, first_query + tiles * Br, lowest, highest};
    // The one before the first, in whose place visit 3 will be.
    smem.visit[3](0, 0) = {b * problem.heads + queries.head, first_query - Br, 0, 0};
  }
  __syncthreads();  // these numbers are there for all threads

  // Visit t is of the next tile, or of the next head's first.
  const auto load_queries = [&](int stage, int t) {
    const Plan plan = smem.plan(0, 0);
    Visit visit = smem.visit[(t + 3) % 4](0, 0);
    visit.row += Br;
    if (visit.row == plan.end) visit.row = plan.first_row, visit.head++;
    Rows of = smem.queries(0, 0);
    of.head = visit.head - of.b * problem.heads;
    load_tile<threads>(smem.Q[stage], matrix_of<const T, d>(problem.Q, problem.Q_strides, of),
                       visit.row);
    load_tile<threads>(smem.dO[stage], matrix_of<const T, d>(problem.dO, problem.O_strides, of),
                       visit.row);
    if (threadIdx.x < Br / 4) {
      const int heads = problem.batch * problem.heads, col = threadIdx.x * 4;
      const Matrix<const float> all_lse{lse_log2, heads, rows}, all_D{D, heads, rows};
      cp_async_16(smem.lse[stage](0, col), all_lse(visit.head, visit.row + col));
      cp_async_16(smem.D[stage](0, col), all_D(visit.head, visit.row + col));
    }
    if (threadIdx.x == 0)
      smem.visit[t % 4](0, 0) = {visit.head, visit.row, plan.lowest + visit.row,
                                 plan.highest + visit.row};
  };
  load_tile<threads>(smem.K, matrix_of<const T, d>(problem.K, problem.K_strides, keys), first_key);
  load_tile<threads>(smem.V, matrix_of<const T, d>(problem.V, problem.V_strides, keys), first_key);
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
    const Rows of = smem.keys(0, 0);
    const int keys_end = of.rows - first_key;
    if (warp_key + 32 > keys_end || warp_key + 31 > visit.to || warp_key - (Br - 1) < visit.from) {
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int n = 0; n < Br / 8; n++)
          for (int e = 0; e < 4; e++) {
            const int key = key_row + mt * 16 + e / 2 * 8, after = key - (query + 8 * n + e % 2);
            if (key >= keys_end || after > visit.to || after < visit.from) x[mt][n][e] = -INFINITY;
          }
    }
  };
  const auto row_of = [&](int t) {
    const Visit visit = smem.visit[t % 4](0, 0);
    return std::int64_t{visit.head} * rows + visit.row;
  };
  add_visits<T, part>(sum, smem, warp, visits, scale_log2, dQ_sum, load_queries, hide, row_of);

  const Rows of = smem.keys(0, 0);
  const auto out = keeps_dV ? matrix_of<T, d>(problem.dV, problem.V_strides, of)
                            : matrix_of<T, d>(problem.dK, problem.K_strides, of);
  const float factor = keeps_dV ? 1 : scale;
#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++)
    for (int r = 0; r < 2; r++) {
      const int key = first_key + key_row + mt * 16 + 8 * r;
      if (key >= of.rows) continue;
      for (int col = 0; col < d; col += 8) {
        const float *const two = &sum[mt][col / 8][2 * r];
        store<2>(out(key, col + lane % 4 * 2),
                 Vector<T, 2>{from_float<T>(two[0] * factor), from_float<T>(two[1] * factor)});
      }
    }
}

/// dQ = its sums / sqrt(d), rounded. A warp takes 16 queries.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    round_dQ(const Problem problem,
             const float *dQ_sum,  // [batch * heads, rows / 16, d / 2, 32]
             int rows, float scale) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * num_warps + threadIdx.x / 32) * 16;
  const int head = blockIdx.y;
  const Rows queries = queries_of(problem, head / problem.heads, head % problem.heads);
  const auto dQ = matrix_of<T, d>(problem.dQ, problem.O_strides, queries);
  const auto sums = sums_of<d>(dQ_sum, std::int64_t{head} * rows + first);
  for (int i = 0; i < d / 2; i += 2) {
    const int row = first + lane / 4 + i / 2 % 2 * 8;
    if (row < queries.rows)
      store<2>(dQ(row, i / 4 * 8 + lane % 4 * 2),
               Vector<T, 2>{from_float<T>(sums(i, lane) * scale),
                            from_float<T>(sums(i + 1, lane) * scale)});
  }
}

/// The rows of a head in the workspace: whole tiles, at either head dim.
int rows_in_workspace(const Problem &p) {
  return (p.seqlen_q + 127) / 128 * 128;
}

/// Returns a grid of x: the heads of K and V of a section, y: tiles of keys, z: sections. With a causal mask a section
/// is as many heads as have 32 MB of Q, dO and dQ's sums, which stay in L2 until all tiles of keys have visited them.
/// Without one all blocks take as long, and a section is one head.
template <int Bc>
dim3 grid_of(const Problem &p, bool causal) {
  const int kv_heads = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  const std::int64_t bytes =
      std::int64_t{group} * std::max(1, p.seqlen_q) * p.head_dim * (2 + 2 + 4);
  const int most = causal ? std::clamp<std::int64_t>((32 << 20) / bytes, 1, kv_heads) : 1;
  const int sections = (kv_heads + most - 1) / most;
  return dim3((kv_heads + sections - 1) / sections, (p.seqlen_k + Bc - 1) / Bc, sections);
}

template <class T, int d>
void run(const Problem &p) {
  const int heads = p.batch * p.heads, rows = rows_in_workspace(p);
  const dim3 block(threads);
  float *const dQ_sum = static_cast<float *>(p.workspace);
  float *const lse_log2 = dQ_sum + std::int64_t{heads} * rows * d;
  float *const D = lse_log2 + std::int64_t{heads} * rows;
  const float scale = 1 / sqrtf(d);
  launch<void>(begin<T, d>, dim3(rows / num_warps, heads), block, p, lse_log2, D, dQ_sum, rows);
  launch<SharedStorage<T, d>>(gradients<T, d>, grid_of<Bc>(p, p.causal), block, p, lse_log2, D,
                              dQ_sum, rows, scale);
  launch<void>(round_dQ<T, d>, dim3(rows / 16 / num_warps, heads), block, p, dQ_sum, rows, scale);
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          const std::size_t rows = std::size_t(p.batch) * p.heads * rows_in_workspace(p);
          return rows * (p.head_dim + 2) * sizeof(float);
        },
    .gradients = true,
    .same_bits = false,
});
