// Step 69: Training. The backward pass for whoever calls it: any strides, packed rows, and numbers nobody checked.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window-size, --scale, --type, --softcap, --alibi,
//             --sink-logits
// Before      step 65: dO and dQ lie as O does, dK as K and dV as V, in rows of 64 or 128 elements, and whoever launches
//             it must have checked each length that is on the device.
// Bottleneck  An autograd engine gives dO as it lies, and packs sequences. A length of -1 reads where nothing is.
// Change      Each tensor has its own strides. Lengths and starts are clamped before they become an address. Columns
//             behind the head dim are zeros. The workspace of packed sequences grows with their rows, not with the
//             longest sequence times their number.
// Prediction  The loop has the products of step 65, and two more loads of 8 bytes from shared memory a visit: its time
//             within 1%. At head dim 96 it has the products of 128, and 96/128 of its TFLOP/s.
#include <algorithm>

#include "common/kernel/tile_gradients.h"
#include "common/kernel/visits.h"
#include "steps/69-training/rows.h"
#include "steps/69-training/scores.h"
#include "steps/69-training/sinks.h"

using namespace mma_gradients;

namespace {

constexpr int whole_tiles = 128;  // the workspace has such a multiple of rows for a sequence
// Queries and keys of a tile. Above 128 columns a thread has registers for the sums of 16 keys, and a block has 163 KB for
// 64 keys and two stages of 32 queries.
template <int d>
constexpr int tile_queries = d <= 128 ? Br : 32;
template <int d>
constexpr int tile_keys = d <= 128 ? Bc : 64;

/// What the keys need of each query, and dQ's sums begin at 0. A warp takes one row. A query that does not exist, or
/// sees no key, gets an infinite log-sum-exp: its weights are 0 then.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    begin(const Backward problem, float *lse_log2, float *D,  // [heads' rows]
          float *dQ_sum,                                      // [heads' rows, d], in any order
          int rows) {
  const int i = blockIdx.x * num_warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int b = blockIdx.y / problem.heads, cols = problem.head_dim;
  const Sequence at = sequence_of(problem, b);
  const Rows queries = {b, int(blockIdx.y) % problem.heads, at.q_start, at.q_count};
  if (i >= (queries.rows + whole_tiles - 1) / whole_tiles * whole_tiles) return;
  const auto o = matrix_of<const T>(problem.O, problem.O_strides, queries, cols);
  const auto dO = matrix_of<const T>(problem.dO, problem.dO_strides, queries, cols);
  const std::int64_t row = first_in_workspace<whole_tiles>(problem, queries, rows) +
                           std::int64_t{queries.head} * rows + i;
  const Matrix<float> sums{dQ_sum + row * d, 1, d};
  float sum = 0;
  for (int k = lane; k < d; k += 32) {
    if (i < queries.rows && k < cols) sum += to_float<T>(dO(i, k)) * to_float<T>(o(i, k));
    sums(0, k) = 0.0f;
  }
  sum = warp_sum(sum);
  if (lane > 0) return;
  float lse = -INFINITY;
  if (i < queries.rows) lse = lse_at(problem, at, b, queries.head, i) * log2_e;
  Matrix<float>{lse_log2 + row, 1, 1}(0, 0) = lse == -INFINITY ? INFINITY : lse;
  Matrix<float>{D + row, 1, 1}(0, 0) = sum;
}

template <class T, int d>
struct SharedStorage : Operands<T, d, tile_queries<d>, tile_keys<d>> {
  // What is the same for all threads: the loop leaves no registers for it.
  Tile<Rows, 1, 1> queries, keys;
  Tile<Plan, 1, 1> plan;
  Tile<Visit, 1, 1> visit[4];
  Tile<std::int64_t, 1, 1> first_in_workspace;
};

/// dK and dV of a tile of keys, and what these keys add to dQ. `changes`: with a soft cap or ALiBi, or both.
template <class T, int d, bool changes, int Br = tile_queries<d>, int Bc = tile_keys<d>,
          int m_tiles = Bc / 64>
__global__ void __launch_bounds__(threads, 1)  // threads per block, blocks per SM
    gradients(const Backward problem, const float *lse_log2,
              const float *D,  // [heads' rows]
              float *dQ_sum,   // [heads' rows / 16, d / 2, 32]
              int rows, float scale_log2, float to_cap) {
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

  const auto [of_block, tiles] = plan_of<Br>(problem, queries, keys, first_key, keys_here);
  const int visits = group * tiles;
  if (threadIdx.x == 0) {
    smem.queries(0, 0) = queries;
    smem.keys(0, 0) = keys;
    smem.first_in_workspace(0, 0) = first_in_workspace<whole_tiles>(problem, queries, rows);
    smem.plan(0, 0) = of_block;
    // The one before the first, in whose place visit 3 will be.
    smem.visit[3](0, 0) = {queries.head, of_block.first_row - Br, 0, 0};
  }
  __syncthreads();  // these numbers are there for all threads

  // Visit t is of the next tile, or of the next head's first.
  const auto load_queries = [&](int stage, int t) {
    const Plan plan = smem.plan(0, 0);
    Visit visit = smem.visit[(t + 3) % 4](0, 0);
    visit.row += Br;
    if (visit.row == plan.end) visit.row = plan.first_row, visit.head++;
    Rows of = smem.queries(0, 0);
    of.head = visit.head;
    load_tile<threads>(smem.Q[stage],
                       matrix_of<const T>(problem.Q, problem.Q_strides, of, problem.head_dim),
                       visit.row);
    load_tile<threads>(smem.dO[stage],
                       matrix_of<const T>(problem.dO, problem.dO_strides, of, problem.head_dim),
                       visit.row);
    if (threadIdx.x < Br / 4) {
      const std::int64_t row =
          smem.first_in_workspace(0, 0) + std::int64_t{visit.head} * rows + visit.row;
      const int col = threadIdx.x * 4;
      const Matrix<const float> all_lse{lse_log2 + row, 1, Br}, all_D{D + row, 1, Br};
      cp_async_16(smem.lse[stage](0, col), all_lse(0, col));
      cp_async_16(smem.D[stage](0, col), all_D(0, col));
    }
    if (threadIdx.x == 0)
      smem.visit[t % 4](0, 0) = {visit.head, visit.row, plan.lowest + visit.row,
                                 plan.highest + visit.row};
  };
  load_tile<threads>(
      smem.K, matrix_of<const T>(problem.K, problem.K_strides, keys, problem.head_dim), first_key);
  load_tile<threads>(
      smem.V, matrix_of<const T>(problem.V, problem.V_strides, keys, problem.head_dim), first_key);
  if (visits > 0) load_queries(0, 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // K, V, and the first Q, dO, lse and D are there for all warps

  // Warps 0 to 3 keep dV of Bc / 4 keys each, and compute S^T and P^T. Warps 4 to 7 keep dK of the same keys,
  // and compute dP^T and dS^T. In each 16 keys and 8 queries a lane has two keys, `key_row` and 8 further,
  // and two queries, `query` and `query` + 1.
  const bool keeps_dV = warp < 4;
  const int warp_key = warp % 4 * (Bc / 4), key_row = threadIdx.x / 32 % 4 * (Bc / 4) + lane / 4;
  const int query = lane % 4 * 2;
  FragmentC sum[m_tiles][d / 8] = {};
  const auto hide = [&](auto &x, int t) {
    const Visit visit = smem.visit[t % 4](0, 0);
    const Rows of = smem.keys(0, 0);
    // With a soft cap finite, because P, which is 0, is multiplied by its square.
    const float hidden = changes && to_cap >= 0 ? -1e15f : -INFINITY;
    hide_scores(x, warp_key, key_row, query, visit, of.rows - first_key, hidden);
  };
  const auto row_of = [&](int t) {
    const Visit visit = smem.visit[t % 4](0, 0);
    return smem.first_in_workspace(0, 0) + std::int64_t{visit.head} * rows + visit.row;
  };
  if constexpr (changes) {
    const auto changes_of = [&](int t) {
      const Visit visit = smem.visit[t % 4](0, 0);
      const Rows k = smem.keys(0, 0), q = smem.queries(0, 0);
      return Changed{to_cap, slope_of(problem, k.b, visit.head) * log2_e,
                     float(first_key + key_row - (k.rows - q.rows + visit.row + query))};
    };
    add_visits<T>(sum, smem, warp, visits, scale_log2, dQ_sum, load_queries, hide, row_of,
                  changes_of);
  } else {
    add_visits<T>(sum, smem, warp, visits, scale_log2, dQ_sum, load_queries, hide, row_of);
  }

  const Rows of = smem.keys(0, 0);
  const auto out = keeps_dV ? matrix_of<T>(problem.dV, problem.dV_strides, of, problem.head_dim)
                            : matrix_of<T>(problem.dK, problem.dK_strides, of, problem.head_dim);
  const float factor = keeps_dV ? 1 : problem.scale;
#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++)
    for (int r = 0; r < 2; r++) {
      const int key = first_key + key_row + mt * 16 + 8 * r;
      if (key >= of.rows) continue;
      for (int col = 0; col < d; col += 8) {
        if (col >= out.cols) break;
        const float *const two = &sum[mt][col / 8][2 * r];
        store<2>(out(key, col + lane % 4 * 2),
                 Vector<T, 2>{from_float<T>(two[0] * factor), from_float<T>(two[1] * factor)});
      }
    }
}

/// dQ = its sums times the scale, rounded. A warp takes 16 queries.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    round_dQ(const Backward problem,
             const float *dQ_sum,  // [heads' rows / 16, d / 2, 32]
             int rows) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * num_warps + threadIdx.x / 32) * 16;
  const Rows queries = queries_of(problem, blockIdx.y / problem.heads, blockIdx.y % problem.heads);
  const auto dQ = matrix_of<T>(problem.dQ, problem.dQ_strides, queries, problem.head_dim);
  const std::int64_t row_0 =
      first_in_workspace<whole_tiles>(problem, queries, rows) + std::int64_t{queries.head} * rows;
  const auto sums = sums_of<d>(dQ_sum, row_0 + first);
  for (int i = 0; i < d / 2; i += 2) {
    const int row = first + lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2;
    if (row < queries.rows && col < dQ.cols)
      store<2>(dQ(row, col), Vector<T, 2>{from_float<T>(sums(i, lane) * problem.scale),
                                          from_float<T>(sums(i + 1, lane) * problem.scale)});
  }
}

template <class T, int d, bool changes>
void run(const Backward &p) {
  const std::int64_t all_rows = all_rows_in_workspace<whole_tiles>(p);
  const int heads = p.batch * p.heads, rows = rows_in_workspace<whole_tiles>(p);
  const int longest = (p.seqlen_q + whole_tiles - 1) / whole_tiles * whole_tiles;
  const dim3 block(threads);
  // With a scale of 0 a masked score would be -inf * 0 = NaN.
  const float scale_log2 = p.softcap > 0 ? p.softcap * log2_e : std::max(p.scale * log2_e, 1e-20f);
  const float to_cap = p.softcap > 0 ? p.scale / p.softcap : -1;
  float *const dQ_sum = static_cast<float *>(p.workspace);
  float *const lse_log2 = dQ_sum + all_rows * d, *const D = lse_log2 + all_rows;
  if (longest > 0)  // without queries dK and dV are 0, and without keys dQ is
    launch_on<void>(p.stream, begin<T, d>, dim3(longest / num_warps, heads), block, p, lse_log2, D,
                    dQ_sum, rows);
  if (p.seqlen_k > 0)
    launch_on<SharedStorage<T, d>>(p.stream, gradients<T, d, changes>,
                                   grid_of<tile_keys<d>>(p, p.window_right == 0), block, p,
                                   lse_log2, D, dQ_sum, rows, scale_log2, to_cap);
  if (longest > 0)
    launch_on<void>(p.stream, round_dQ<T, d>, dim3(longest / 16 / num_warps, heads), block, p,
                    dQ_sum, rows);
  add_up_sinks<whole_tiles>(p, lse_log2, D, rows);
}

template <class T, int d>
void run(const Backward &p) {
  p.softcap > 0 || p.slopes ? run<T, d, true>(p) : run<T, d, false>(p);
}

template <class T>
void run(const Backward &p) {
  p.head_dim <= 64 ? run<T, 64>(p) : p.head_dim <= 128 ? run<T, 128>(p) : run<T, 256>(p);
}

void backward(const Backward &call) {
  const Backward p = with_one_window(call);
  p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p);
}
std::size_t workspace_bytes(const Backward &p) {
  const int columns = p.head_dim <= 64 ? 64 : p.head_dim <= 128 ? 128 : 256;
  return all_rows_in_workspace<whole_tiles>(p) * (columns + 2) * sizeof(float);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { backward(backward_of(p)); },
    .workspace_bytes = [](const Problem &p) { return workspace_bytes(backward_of(p)); },
    .head_dims = {64, 128, 96, 32, 256, 160},
    .gradients = true,
    .same_bits = false,
});
