// Step 69: Training. The backward pass for whoever calls it: any strides, packed rows, and numbers nobody checked.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window-size, --scale, --type
// Before      step 65: dO and dQ lie as O does, dK as K and dV as V, in rows of 64 or 128 elements, and whoever launches
//             it must have checked each length that is on the device.
// Bottleneck  An autograd engine gives dO as it lies, and packs sequences. A length of -1 reads where nothing is.
// Change      Each tensor has its own strides. Lengths and starts are clamped before they become an address. Columns
//             behind the head dim are zeros. The workspace of packed sequences grows with their rows, not with the
//             longest sequence times their number.
// Prediction  The loop has the products of step 65, and two more loads of 8 bytes from shared memory a visit: its time
//             within 1%. At head dim 96 it has the products of 128, and 96/128 of its TFLOP/s.
#include <algorithm>

#include "common/kernel/backward.h"
#include "common/kernel/mbarrier.h"
#include "common/kernel/swizzle.h"
#include "steps/69-training/backward.h"

namespace {

constexpr int Br = 64;            // rows of Q in a tile
constexpr int whole_tiles = 128;  // the workspace has such a multiple of rows for a sequence
constexpr int Bc = 128;           // rows of K and V in a tile
constexpr int num_warps = 8;
constexpr int m_tiles = Bc / (num_warps / 2) / 16;  // a warp's keys, in units of mma's 16
constexpr int threads = num_warps * 32;

/// Starts the copies of Rows x d elements, 16 bytes per thread and iteration. Rows and columns that do not exist become
/// zeros.
template <class T, int Rows, int d>
__device__ void load_tile(SharedTile<Rows, d, T> &tile, const StridedMatrix<const T> &matrix,
                          int first_row) {
  const int row = threadIdx.x / (d / 8), col = threadIdx.x % (d / 8) * 8;
  const auto part = matrix.from(first_row + row, col);
  const int rows = part.cols > 0 ? part.rows : 0;
#pragma unroll
  for (int i = 0; i < Rows; i += threads / (d / 8))
    cp_async_16_or_zeros(tile(row + i, col), part(i, 0), i < rows);
}

/// The rows of one head of a sequence: `rows` of them, from row `start` of the tensor on. All lie inside the tensor,
/// whatever the arrays on the device hold.
struct alignas(16) Rows {
  int b, head, start, rows;
};
__device__ Rows queries_of(const Backward &p, int b, int head) {
  const Sequence at = sequence_of(p, b);
  return {b, head, at.q_start, at.q_count};
}
__device__ Rows keys_of(const Backward &p, int b, int head) {
  const Sequence at = sequence_of(p, b);
  return {b, head, at.k_start, at.k_count};
}
template <class T, class Void>
__device__ StridedMatrix<T> matrix_of(Void *tensor, const Strides &strides, const Rows &of,
                                      int head_dim) {
  const std::int64_t first = of.b * strides.batch + of.head * strides.head + of.start * strides.row;
  return {static_cast<T *>(tensor) + first, of.rows, head_dim, strides.row};
}

/// Where a sequence's rows begin in the workspace, which has `rows` of each head. Packed sequences follow each other
/// in whole tiles: each begins at most 128 rows further behind its place in the tensor than the one before.
__device__ std::int64_t first_in_workspace(const Backward &p, const Rows &of, int rows) {
  return p.cu_seqlens_q ? (of.start + of.b * whole_tiles) / whole_tiles * whole_tiles
                        : std::int64_t{of.b} * p.heads * rows;
}

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
  const std::int64_t row =
      first_in_workspace(problem, queries, rows) + std::int64_t{queries.head} * rows + i;
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

/// What a block visits in each head: the tiles of queries from row `first_row` to row `end`. Query i sees the keys
/// `lowest` + i to `highest` + i, counted from the block's first.
struct alignas(16) Plan {
  int first_row, end, lowest, highest;
};
/// One tile of them: its head, its first query, and the keys `from` to `to` that this query sees.
struct alignas(16) Visit {
  int head, row, from, to;
};

template <class T, int d>
struct SharedStorage {
  SharedTile<Bc, d, T> K, V;
  SharedTile<Br, d, T> Q[2], dO[2];
  SharedTile<Bc, Br, T> P_dS[2];  // P^T, then dS^T in its place: a row for each key
  Tile<float, 1, Br> lse[2], D[2];
  // What is the same for all threads: the loop leaves no registers for it.
  Tile<Rows, 1, 1> queries, keys;
  Tile<Plan, 1, 1> plan;
  Tile<Visit, 1, 1> visit[4];
  Tile<std::int64_t, 1, 1> first_in_workspace;
};

/// dK and dV of 128 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 1)  // threads per block, blocks per SM
    gradients(const Backward problem, const float *lse_log2,
              const float *D,  // [heads' rows]
              float *dQ_sum,   // [heads' rows / 16, d / 2, 32]
              int rows, float scale_log2) {
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
  const int right = problem.window_right < 0 ? all : min(problem.window_right, all);
  const int lowest = offset - left - first_key, highest = offset + right - first_key;
  // Query -highest is the first that sees the block's first key. Query keys_here - 1 - lowest is the last one that
  // sees its last key.
  const int first_query = max(0, -highest) / Br * Br;
  const int queries_end = min(queries.rows, keys_here - lowest);
  const int tiles = max(0, (queries_end - first_query + Br - 1) / Br), visits = group * tiles;
  if (threadIdx.x == 0) {
    smem.queries(0, 0) = queries;
    smem.keys(0, 0) = keys;
    smem.first_in_workspace(0, 0) = first_in_workspace(problem, queries, rows);
    smem.plan(0, 0) = {first_query, first_query + tiles * Br, lowest, highest};
    // The one before the first, in whose place visit 3 will be.
    smem.visit[3](0, 0) = {queries.head, first_query - Br, 0, 0};
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
    load_tile(smem.Q[stage], matrix_of<const T>(problem.Q, problem.Q_strides, of, problem.head_dim),
              visit.row);
    load_tile(smem.dO[stage],
              matrix_of<const T>(problem.dO, problem.dO_strides, of, problem.head_dim), visit.row);
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
  load_tile(smem.K, matrix_of<const T>(problem.K, problem.K_strides, keys, problem.head_dim),
            first_key);
  load_tile(smem.V, matrix_of<const T>(problem.V, problem.V_strides, keys, problem.head_dim),
            first_key);
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
  // Adds dS K of visit t: each warp has 32 of its 64 queries and a quarter of the columns.
  const auto add_to_dQ = [&](int t) {
    auto &dS = smem.P_dS[t % 2];
    constexpr int cols = d / 4;
    const int warp_row = warp / 4 * 32, warp_col = warp % 4 * cols;
    FragmentC dq[2][cols / 8] = {};
#pragma unroll 4  // unrolled further, it takes more registers than there are
    for (int key = 0; key < Bc; key += 16) {
      FragmentA ds[2];
      for (int mt = 0; mt < 2; mt++)
        ds[mt] = ldmatrix_x4_trans(
            dS(key + lane % 8 + lane / 16 * 8, warp_row + mt * 16 + lane / 8 % 2 * 8));
      for (int n = 0; n < cols / 8; n += 2) {
        const auto k = ldmatrix_x4_trans(smem.K(key + lane % 16, warp_col + n * 8 + lane / 16 * 8));
        for (int mt = 0; mt < 2; mt++) {
          mma<T>(dq[mt][n], ds[mt], {k[0], k[1]});
          mma<T>(dq[mt][n + 1], ds[mt], {k[2], k[3]});
        }
      }
    }
    const Visit visit = smem.visit[t % 4](0, 0);
    const std::int64_t row =
        smem.first_in_workspace(0, 0) + std::int64_t{visit.head} * rows + visit.row + warp_row;
#pragma unroll
    for (int mt = 0; mt < 2; mt++) {
      const Matrix<float> sums = sums_of<d>(dQ_sum, row + mt * 16, warp_col);
      for (int n = 0; n < cols / 8; n++)
        for (int e = 0; e < 4; e++) red_add(sums(n * 4 + e, lane), dq[mt][n][e]);
    }
  };
  for (int t = 0; t < visits; t++) {
    const int stage = t % 2;
    // The other stage has been read by all warps. Its copies are on their way behind the products.
    if (t + 1 < visits) load_queries(stage ^ 1, t + 1);
    cp_async_commit();

    // dQ of the visit before is the first product of the warps that keep dK, and the last of the others.
    if (!keeps_dV && t > 0) add_to_dQ(t - 1);
    FragmentC x[m_tiles][Br / 8] = {};
    FragmentA a[m_tiles][Br / 16];
    multiply_rows<T>(x, keeps_dV ? smem.K : smem.V, keeps_dV ? smem.Q[stage] : smem.dO[stage],
                     warp_key);
    auto &tile = smem.P_dS[stage];
    if (keeps_dV) {
      // The score of a query and a key that it does not see is -infinity.
      const Visit visit = smem.visit[t % 4](0, 0);
      const Rows of = smem.keys(0, 0);
      const int keys_end = of.rows - first_key;
      if (warp_key + 32 > keys_end || warp_key + 31 > visit.to ||
          warp_key - (Br - 1) < visit.from) {
#pragma unroll
        for (int mt = 0; mt < m_tiles; mt++)
          for (int n = 0; n < Br / 8; n++)
            for (int e = 0; e < 4; e++) {
              const int key = key_row + mt * 16 + e / 2 * 8, after = key - (query + 8 * n + e % 2);
              if (key >= keys_end || after > visit.to || after < visit.from)
                x[mt][n][e] = -INFINITY;
            }
      }
      // P^T = e^(S^T - lse), rounded.
#pragma unroll
      for (int n = 0; n < Br / 8; n++) {
        const auto row_lse = load<2>(smem.lse[stage](0, query + 8 * n));
        for (int mt = 0; mt < m_tiles; mt++)
          for (int r = 0; r < 2; r++) {
            float p[2];
            for (int e = 0; e < 2; e++)
              p[e] = ex2(fmaf(x[mt][n][2 * r + e], scale_log2, -row_lse[e]));
            a[mt][n / 2][n % 2 * 2 + r] = cvt_rn_x2<T>(p[0], p[1]);
            store<2>(tile(key_row + mt * 16 + 8 * r, query + 8 * n),
                     unpack_x2<T>(a[mt][n / 2][n % 2 * 2 + r]));
          }
      }
      named_barrier_arrive(1 + warp % 4, 64);  // P^T of these keys is there for the other warp
    } else {
      // dS^T = P^T o (dP^T - D), rounded.
      named_barrier_sync(1 + warp % 4, 64);  // the other warp has stored P^T of these keys
      for (int mt = 0; mt < m_tiles; mt++)
        for (int row = 0; row < Br; row += 16)
          a[mt][row / 16] = ldmatrix_x4(tile(warp_key + mt * 16 + lane % 16, row + lane / 16 * 8));
      __syncwarp();  // all lanes have P^T, and dS^T takes its place
#pragma unroll
      for (int n = 0; n < Br / 8; n++) {
        const auto row_D = load<2>(smem.D[stage](0, query + 8 * n));
        for (int mt = 0; mt < m_tiles; mt++)
          for (int r = 0; r < 2; r++) {
            const auto p = to_floats<T>(a[mt][n / 2][n % 2 * 2 + r]);
            float ds[2];
            for (int e = 0; e < 2; e++) ds[e] = p[e] * (x[mt][n][2 * r + e] - row_D[e]);
            a[mt][n / 2][n % 2 * 2 + r] = cvt_rn_x2<T>(ds[0], ds[1]);
            store<2>(tile(key_row + mt * 16 + 8 * r, query + 8 * n),
                     unpack_x2<T>(a[mt][n / 2][n % 2 * 2 + r]));
          }
      }
    }
    // dV += P^T dO, or dK += dS^T Q.
    add_product<T>(sum, a, keeps_dV ? smem.dO[stage] : smem.Q[stage]);
    if (keeps_dV && t > 0) add_to_dQ(t - 1);

    cp_async_wait<0>();
    __syncthreads();  // dS of all keys is there for all warps, and the next Q, dO, lse and D
  }
  if (visits > 0) add_to_dQ(visits - 1);

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
      first_in_workspace(problem, queries, rows) + std::int64_t{queries.head} * rows;
  const auto sums = sums_of<d>(dQ_sum, row_0 + first);
  for (int i = 0; i < d / 2; i += 2) {
    const int row = first + lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2;
    if (row < queries.rows && col < dQ.cols)
      store<2>(dQ(row, col), Vector<T, 2>{from_float<T>(sums(i, lane) * problem.scale),
                                          from_float<T>(sums(i + 1, lane) * problem.scale)});
  }
}

/// The rows of a head in the workspace: of all sequences if they are packed, and else of one.
int rows_in_workspace(const Backward &p) {
  const int rows = p.cu_seqlens_q ? p.total_q + p.batch * whole_tiles : p.seqlen_q;
  return (rows + whole_tiles - 1) / whole_tiles * whole_tiles;
}
std::int64_t all_rows_in_workspace(const Backward &p) {
  return std::int64_t{p.cu_seqlens_q ? 1 : p.batch} * p.heads * rows_in_workspace(p);
}

/// Returns a grid of x: the heads of K and V of a section, y: tiles of keys, z: sections. With a causal mask a section
/// is as many heads as have 32 MB of Q, dO and dQ's sums, which stay in L2 until all tiles of keys have visited them.
/// Without one all blocks take as long, and a section is one head.
dim3 grid_of(const Backward &p) {
  const int kv_heads = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  const std::int64_t bytes = std::int64_t{group} * p.seqlen_q * p.head_dim * (2 + 2 + 4);
  const int most =
      p.window_right == 0 ? std::clamp<std::int64_t>((32 << 20) / bytes, 1, kv_heads) : 1;
  const int sections = (kv_heads + most - 1) / most;
  return dim3((kv_heads + sections - 1) / sections, (p.seqlen_k + Bc - 1) / Bc, sections);
}

template <class T, int d>
void run(const Backward &p) {
  const std::int64_t all_rows = all_rows_in_workspace(p);
  const int heads = p.batch * p.heads, rows = rows_in_workspace(p);
  const int longest = (p.seqlen_q + whole_tiles - 1) / whole_tiles * whole_tiles;
  const dim3 block(threads);
  // With a scale of 0 a masked score would be -inf * 0 = NaN.
  const float scale_log2 = std::max(p.scale * log2_e, 1e-20f);
  float *const dQ_sum = static_cast<float *>(p.workspace);
  float *const lse_log2 = dQ_sum + all_rows * d, *const D = lse_log2 + all_rows;
  launch_on<void>(p.stream, begin<T, d>, dim3(longest / num_warps, heads), block, p, lse_log2, D,
                  dQ_sum, rows);
  launch_on<SharedStorage<T, d>>(p.stream, gradients<T, d>, grid_of(p), block, p, lse_log2, D,
                                 dQ_sum, rows, scale_log2);
  launch_on<void>(p.stream, round_dQ<T, d>, dim3(longest / 16 / num_warps, heads), block, p, dQ_sum,
                  rows);
}

template <class T>
void run(const Backward &p) {
  p.head_dim <= 64 ? run<T, 64>(p) : run<T, 128>(p);
}

void backward(const Backward &call) {
  const Backward p = with_one_window(call);
  p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p);
}
std::size_t workspace_bytes(const Backward &p) {
  const int columns = p.head_dim <= 64 ? 64 : 128;
  return all_rows_in_workspace(p) * (columns + 2) * sizeof(float);
}

}  // namespace

const BackwardKernels BACKWARD = {backward, workspace_bytes};

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { backward(backward_of(p)); },
    .workspace_bytes = [](const Problem &p) { return workspace_bytes(backward_of(p)); },
    .head_dims = {64, 128, 96, 32},
    .gradients = true,
    .same_bits = false,
});
