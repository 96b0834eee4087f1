// Step 87: Wide heads. The backward pass of head dims above 128: dK and dV belong to two warpgroups, dQ to a third.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window-size, --scale, --type
// Before      step 80: a warpgroup has dK and dV of 64 keys in its registers, and head dims end at 128.
// Bottleneck  At head dim 256 dK and dV of 64 keys are 256 registers of each thread, and a thread may have 255.
// Change      A block has 64 keys. One warpgroup computes S, P and dV, the second dP, dS and dK, the third dQ. P goes from the
//             first to the second, and dS from the second to the third, through shared memory.
// Prediction  A visit of 64 queries has five products of 512 clocks: 2560. Shared memory has 3716 wavefronts of 128 bytes, so
//             it is the limit, as in step 66. With step 67's loss beside that limit, 15%, a visit takes 4270 clocks.
#include <algorithm>

#include "common/kernel/softmax.h"
#include "common/kernel/visits.h"
#include "steps/57-library/hopper.h"
#include "steps/69-training/rows.h"

namespace {

constexpr int Br = 64, Bc = 64;  // queries and keys of a tile
constexpr int stages = 2;        // of Q and dO
constexpr int first = 128;       // columns of dK and dV in one product; another has the rest
constexpr int chunk = 64;        // columns of dQ that are computed and added at once
// The warpgroups: each of the first two has 128 registers of sums, the third has 32. The last one copies.
constexpr int of_V = 0, of_K = 1, producer = 3, threads = 4 * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
constexpr int wide_registers = 200, narrow_registers = 88, producer_registers = 24;
static_assert(128 * (2 * wide_registers + narrow_registers + producer_registers) <= 65536);

/// Where in a tile of dQ's sums an element is. They lie as the accumulators of its chunks do: 4 elements of each thread of
/// a warpgroup, then the next 4.
__device__ constexpr int place_in_dQ(int query, int col) {
  const int thread = query / 16 * 32 + query % 8 * 4 + col % 8 / 2;
  return col / chunk * (Br * chunk) + col % chunk / 8 * 512 + thread * 4 + query / 8 % 2 * 2 +
         col % 2;
}

/// The arrays in the workspace, which no tensor map describes: the sums of dQ, and what the kernels hand to each other.
struct Sums {
  float *lse_log2, *D;  // [heads' rows]
  float *dQ;            // [heads' rows / Br, Br * d]: place_in_dQ
  // The next block's number, and how many blocks have added to each tile: [1 + heads' rows / Br].
  unsigned *counters;
  int rows;  // of each head
};

/// Computes what the blocks of keys need of each query, and clears dQ's sums and the counters. A warp handles one row. A
/// query that does not exist, or sees no key, gets an infinite log-sum-exp, so its weights are 0.
template <class T, int d>
__global__ void __launch_bounds__(128) begin(const Backward problem, const Sums sums) {
  constexpr int each = 8;  // elements of a lane; a row of 192 has none for the last lanes
  const int lane = threadIdx.x % 32, i = blockIdx.x * 4 + threadIdx.x / 32;
  const int b = blockIdx.y / problem.heads, col = lane * each;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
    Matrix<unsigned>{sums.counters, 1, 1}(0, 0) = 0;
  const Sequence at = sequence_of(problem, b);
  const Rows queries = {b, int(blockIdx.y) % problem.heads, at.q_start, at.q_count};
  if (i >= (queries.rows + Br - 1) / Br * Br) return;
  const std::int64_t row = first_in_workspace<Br>(problem, queries, sums.rows) +
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
  for (int k = lane * 4; k < d; k += 128)
    store(Matrix<float>{sums.dQ + row * d, 1, d}(0, k), Vector<float, 4>{});
  if (lane > 0) return;
  Matrix<float>{sums.lse_log2 + row, 1, 1}(0, 0) = lse == -INFINITY ? INFINITY : lse;
  Matrix<float>{sums.D + row, 1, 1}(0, 0) = sum;
  if (i % Br == 0) Matrix<unsigned>{sums.counters + 1 + row / Br, 1, 1}(0, 0) = 0;
}

template <class T, int d>
struct SharedStorage {
  TmaTile<Bc, d, T> K, V;  // at the end dK and dV
  TmaTile<Br, d, T> Q[stages], dO[stages];
  TmaTile<Br, Bc, T> dS;
  Tile<std::uint32_t, Br / 16, 128 * 4> P;  // as the fragments of 128 threads: two numbers in each
  Tile<float, 1, Br * chunk> dQ;
  Tile<float, 1, Br> lse[stages], D[stages];
  Mbarrier KV_full, Q_full[stages], Q_empty[stages], dO_full[stages], dO_empty[stages];
  Mbarrier P_full, P_empty, dS_full, dS_empty, dQ_full, dQ_empty;
  Tile<int, 1, 4> number;  // the block's
};

/// Writes dK or dV, times a factor and rounded, to their tile.
template <class T, int d, int columns>
__device__ __forceinline__ void write_keys(TmaTile<Bc, d, T> &tile, Accumulator<columns> &x,
                                           int first_col, float factor) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
  const int col = first_col + threadIdx.x % 32 / 16 * 8;
#pragma unroll
  for (int e = 0; e < x.size; e += 8)
    stmatrix_x4(tile(row, e * 2 + col), {cvt_rn_x2<T>(x(e) * factor, x(e + 1) * factor),
                                         cvt_rn_x2<T>(x(e + 2) * factor, x(e + 3) * factor),
                                         cvt_rn_x2<T>(x(e + 4) * factor, x(e + 5) * factor),
                                         cvt_rn_x2<T>(x(e + 6) * factor, x(e + 7) * factor)});
}

/// dK and dV of 64 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 1)  // blocks per SM
    gradients(const __grid_constant__ SequenceMap map_Q, const __grid_constant__ SequenceMap map_dO,
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_dK,
              const __grid_constant__ SequenceMap map_dV, const Backward problem, const Sums sums,
              int group, int key_tiles, int heads_at_once, float scale_log2) {
  // The named barriers: of the three that compute, and one for each of two; 0 is that of __syncthreads.
  constexpr int all_multiplied = 1, first_stored = 2;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    // Blocks are numbered in the order in which they begin, so those before this one have begun.
    const unsigned left = atomic_dec(Matrix<unsigned>{sums.counters, 1, 1}(0, 0), gridDim.x - 1);
    smem.number(0, 0) = left == 0 ? 0 : gridDim.x - left;
    mbarrier_init(smem.KV_full, 1);
    for (int i = 0; i < stages; i++) {
      mbarrier_init(smem.Q_full[i], 1);
      mbarrier_init(smem.dO_full[i], 1);
      mbarrier_init(smem.Q_empty[i], 8);  // the warps of the two that multiply them
      mbarrier_init(smem.dO_empty[i], 8);
    }
    mbarrier_init(smem.P_full, 4);  // the warps of one
    mbarrier_init(smem.P_empty, 4);
    mbarrier_init(smem.dS_full, 4);
    mbarrier_init(smem.dS_empty, 4);
    mbarrier_init(smem.dQ_full, 4);
    mbarrier_init(smem.dQ_empty, 1);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised, and the number is there

  // The blocks of `heads_at_once` heads of K follow each other: the first keys of each head, then the next.
  const int number = uniform(smem.number(0, 0)), kv_heads = gridDim.x / key_tiles;
  const int first_head = number / (heads_at_once * key_tiles) * heads_at_once;
  const int some = min(heads_at_once, kv_heads - first_head);
  const int place = number - first_head * key_tiles, kv_head = first_head + place % some;
  const int key_tile = place / some, first_key = key_tile * Bc, b = kv_head / problem.kv_heads;
  const Rows keys = keys_of(problem, b, kv_head % problem.kv_heads);
  const int keys_here = min(keys.rows - first_key, Bc);
  if (keys_here <= 0) return;  // the sequence is shorter than the longest

  // A visit is of a tile of queries of one head, in the order of step 80.
  const Rows queries = queries_of(problem, b, keys.head * group);
  const auto [plan, tiles] = plan_of<Br>(problem, queries, keys, first_key, keys_here);
  const int visits = group * tiles, last_row = plan.end - Br;
  // With a window to the left blocks seldom wait, and a head after the other is faster (chapter 80).
  const bool by_head = problem.window_left >= 0;
  const auto next = [&](int &h, int &q_row) {
    if (by_head && (q_row -= Br) < plan.first_row) h++, q_row = last_row;
    if (!by_head && ++h == group) h = 0, q_row -= Br;
  };
  const SequenceRows rows_of_k = {keys.start, keys.rows};

  if (warpgroup == producer) {
    setmaxnreg_dec<producer_registers>();
    // The row of the workspace of the first head's query 0.
    const std::int64_t row_0 = first_in_workspace<Br>(problem, queries, sums.rows) +
                               std::int64_t{queries.head} * sums.rows;
    if (threadIdx.x == producer * 128) {
      const SequenceRows rows_of_q = {queries.start, queries.rows};
      mbarrier_arrive_expect_tx(smem.KV_full, sizeof smem.K + sizeof smem.V);
      tma_load(smem.K, map_K, rows_of_k, first_key, keys.head, b, smem.KV_full);
      tma_load(smem.V, map_V, rows_of_k, first_key, keys.head, b, smem.KV_full);
      for (int n = 0, h = 0, q_row = last_row; n < visits; n++, next(h, q_row)) {
        const int stage = n % stages, parity = n / stages % 2;
        const std::int64_t row = row_0 + std::int64_t{h} * sums.rows + q_row;
        const auto load = [&](auto &tile, const SequenceMap &map, auto &numbers, const float *all,
                              Mbarrier &full, Mbarrier &empty) {
          mbarrier_wait(empty, parity ^ 1);  // new stages count as empty
          mbarrier_arrive_expect_tx(full, sizeof tile + sizeof numbers);
          tma_load(tile, map, rows_of_q, q_row, queries.head + h, b, full);
          bulk_load<Br>(numbers(0, 0), Matrix<const float>{all + row, 1, Br}(0, 0), full);
        };
        load(smem.Q[stage], map_Q, smem.lse[stage], sums.lse_log2, smem.Q_full[stage],
             smem.Q_empty[stage]);
        load(smem.dO[stage], map_dO, smem.D[stage], sums.D, smem.dO_full[stage],
             smem.dO_empty[stage]);
      }
    }
    // One thread of another warp adds to dQ, when the keys before these have added.
    if (threadIdx.x == producer * 128 + 32) {
      for (int n = 0, h = 0, q_row = last_row; n < visits; n++, next(h, q_row)) {
        const std::int64_t tile = (row_0 + std::int64_t{h} * sums.rows + q_row) / Br;
        // How many blocks have added to this tile: those between the first that visits it and this one.
        auto &&turn = Matrix<unsigned>{sums.counters + 1 + tile, 1, 1}(0, 0);
        const int first_visitor = max(0, plan.lowest + first_key + q_row) / Bc;
        // A counter may skip a value if arrays that nobody checked give two sequences the same rows.
        if (problem.deterministic) wait_until_at_least(turn, key_tile - first_visitor);
        // The engine's additions come after this thread's load, which is the generic proxy's.
        fence_proxy_async_global();
        for (int c = 0; c < d / chunk; c++) {
          mbarrier_wait(smem.dQ_full, (n * (d / chunk) + c) % 2);
          constexpr int numbers = Br * chunk;
          bulk_red_add<numbers>(
              Matrix<float>{sums.dQ + (tile * (d / chunk) + c) * numbers, 1, numbers}(0, 0),
              smem.dQ(0, 0));
          tma_store_commit();
          tma_store_wait_read<0>();
          mbarrier_arrive(smem.dQ_empty);
        }
        if (problem.deterministic) {
          tma_store_wait<0>();  // the sums have them: to have read them is not enough
          red_release_add(turn, 1);
        }
      }
    }
  } else if (warpgroup == of_V) {
    setmaxnreg_inc<wide_registers>();
    Accumulator<first> dv_low;  // of columns
    Accumulator<d - first> dv_high;
    Accumulator<Br> s;  // transposed: keys x queries
    FragmentA p[Br / 16];
    const int key = warp % 4 * 16 + lane / 4;  // the lane's of the block's, and 8 further on
    const int query = lane % 4 * 2;            // of each 8, and 1 further on
#pragma unroll
    for (int e = 0; e < dv_low.size; e++) dv_low(e) = 0;  // if no query sees the keys
#pragma unroll
    for (int e = 0; e < dv_high.size; e++) dv_high(e) = 0;
    mbarrier_wait<false>(smem.KV_full, 0);

    for (int n = 0, h = 0, q_row = last_row; n < visits; n++, next(h, q_row)) {
      const int stage = n % stages, parity = n / stages % 2;
      auto &Q = smem.Q[stage], &dO = smem.dO[stage];

      // S^T = K Q^T.
      mbarrier_wait<false>(smem.Q_full[stage], parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s, k_major(smem.K, 0, col), k_major(Q, 0, col), col > 0);
      wgmma_commit();

      // P^T. The tile's first query sees the keys `from` to `to` of the block's.
      wgmma_wait<0>(s);
      const int from = plan.lowest + q_row, to = plan.highest + q_row;
      if (Bc > keys_here || Bc - 1 > to || from > -(Br - 1))
#pragma unroll
        for (int e = 0; e < s.size; e++) {
          const int after = key - query + e / 2 % 2 * 8 - e / 4 * 8 - e % 2;
          if (after > to || after < from || key + e / 2 % 2 * 8 >= keys_here) s(e) = -INFINITY;
        }
#pragma unroll
      for (int e = 0; e < s.size; e += 4) {
        const auto lse = load<2>(smem.lse[stage](0, e * 2 + lane % 4 * 2));
        for (int k = 0; k < 4; k++) s(e + k) = ex2(fmaf(s(e + k), scale_log2, -lse[k % 2]));
      }
      to_fragments<T>(p, s);
      mbarrier_wait<false>(smem.P_empty, n % 2 ^ 1);
#pragma unroll
      for (int k = 0; k < Br / 16; k++) store(smem.P(k, threadIdx.x % 128 * 4), p[k]);
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(smem.P_full);
        mbarrier_arrive(smem.Q_empty[stage]);
      }

      // dV += P^T dO.
      mbarrier_wait<false>(smem.dO_full[stage], parity);
      wgmma_fence();
#pragma unroll
      for (int row = 0; row < Br; row += 16) {
        wgmma<T>(dv_low, p[row / 16], mn_major(dO, row, 0), true);
        wgmma<T>(dv_high, p[row / 16], mn_major(dO, row, first), true);
      }
      wgmma_commit();
      wgmma_wait<0>(dv_low, dv_high);
      if (lane == 0) mbarrier_arrive(smem.dO_empty[stage]);
    }

    // V's place becomes dV's.
    named_barrier_sync(all_multiplied, 3 * 128);
    write_keys(smem.V, dv_low, 0, 1);
    write_keys(smem.V, dv_high, first, 1);
    fence_proxy_async();
    named_barrier_sync(first_stored + of_V, 128);  // all four warps have written it
    if (threadIdx.x == of_V * 128) {
      tma_store(map_dV, rows_of_k, first_key, keys.head, b, smem.V);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
  } else if (warpgroup == of_K) {
    setmaxnreg_inc<wide_registers>();
    Accumulator<first> dk_low;  // of columns
    Accumulator<d - first> dk_high;
    Accumulator<Br> dp;  // transposed: keys x queries
    FragmentA ds[Br / 16];
#pragma unroll
    for (int e = 0; e < dk_low.size; e++) dk_low(e) = 0;  // if no query sees the keys
#pragma unroll
    for (int e = 0; e < dk_high.size; e++) dk_high(e) = 0;
    mbarrier_wait<false>(smem.KV_full, 0);

    for (int n = 0; n < visits; n++) {
      const int stage = n % stages, parity = n / stages % 2;
      auto &Q = smem.Q[stage], &dO = smem.dO[stage];

      // dP^T = V dO^T.
      mbarrier_wait<false>(smem.dO_full[stage], parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(dp, k_major(smem.V, 0, col), k_major(dO, 0, col), col > 0);
      wgmma_commit();

      // dS^T, with P as it was rounded for dV.
      mbarrier_wait<false>(smem.P_full, n % 2);
      wgmma_wait<0>(dp);
#pragma unroll
      for (int e = 0; e < dp.size; e += 8) {
        const auto of_8 = load<4>(smem.P(e / 8, threadIdx.x % 128 * 4));
        for (int i = 0; i < 8; i += 4) {
          const auto D_of = load<2>(smem.D[stage](0, (e + i) * 2 + lane % 4 * 2));
          for (int r = 0; r < 4; r += 2) {
            const auto P = to_floats<T>(of_8[(i + r) / 2]);
            for (int k = 0; k < 2; k++) dp(e + i + r + k) = P[k] * (dp(e + i + r + k) - D_of[k]);
          }
        }
      }
      to_fragments<T>(ds, dp);
      mbarrier_wait<false>(smem.dS_empty, n % 2 ^ 1);
#pragma unroll
      for (int row = 0; row < Br; row += 16)
        stmatrix_x4_trans(smem.dS(row + lane / 16 * 8 + lane % 8, warp % 4 * 16 + lane / 8 % 2 * 8),
                          ds[row / 16]);
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(smem.dS_full);
        mbarrier_arrive(smem.P_empty);
        mbarrier_arrive(smem.dO_empty[stage]);
      }

      // dK += dS^T Q.
      wgmma_fence();
#pragma unroll
      for (int row = 0; row < Br; row += 16) {
        wgmma<T>(dk_low, ds[row / 16], mn_major(Q, row, 0), true);
        wgmma<T>(dk_high, ds[row / 16], mn_major(Q, row, first), true);
      }
      wgmma_commit();
      wgmma_wait<0>(dk_low, dk_high);
      if (lane == 0) mbarrier_arrive(smem.Q_empty[stage]);
    }

    // K's place becomes dK's.
    named_barrier_sync(all_multiplied, 3 * 128);
    write_keys(smem.K, dk_low, 0, problem.scale);
    write_keys(smem.K, dk_high, first, problem.scale);
    fence_proxy_async();
    named_barrier_sync(first_stored + of_K, 128);  // all four warps have written it
    if (threadIdx.x == of_K * 128) {
      tma_store(map_dK, rows_of_k, first_key, keys.head, b, smem.K);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
  } else {
    setmaxnreg_dec<narrow_registers>();
    Accumulator<chunk> dq;
    mbarrier_wait<false>(smem.KV_full, 0);
    for (int n = 0; n < visits; n++) {
      // dS as A: 16 queries for each warp, and all keys.
      FragmentA ds[Bc / 16];
      mbarrier_wait<false>(smem.dS_full, n % 2);
#pragma unroll
      for (int k = 0; k < Bc / 16; k++)
        ds[k] = ldmatrix_x4(smem.dS(warp % 4 * 16 + lane % 16, k * 16 + lane / 16 * 8));
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem.dS_empty);

        // dQ = dS K, 64 columns after 64 columns.
#pragma unroll 1
      for (int c = 0; c < d / chunk; c++) {
        wgmma_fence();
#pragma unroll
        for (int row = 0; row < Bc; row += 16)
          wgmma<T>(dq, ds[row / 16], mn_major(smem.K, row, c * chunk), row > 0);
        wgmma_commit();
        wgmma_wait<0>(dq);
        mbarrier_wait<false>(smem.dQ_empty, (n * (d / chunk) + c) % 2 ^ 1);
#pragma unroll
        for (int e = 0; e < dq.size; e += 4)
          store(smem.dQ(0, e * 128 + threadIdx.x % 128 * 4),
                Vector<float, 4>{dq(e), dq(e + 1), dq(e + 2), dq(e + 3)});
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem.dQ_full);
      }
    }
    named_barrier_sync(all_multiplied, 3 * 128);  // K has been read
  }
}

/// Multiplies dQ's sums by the scale, rounds and stores them. A thread handles 8 elements of a row, a block 16 rows.
template <class T, int d>
__global__ void __launch_bounds__(2 * d) round_dQ(const Backward problem, const Sums sums) {
  // A warp has 16 rows of 16 columns: it reads whole sectors, and writes whole ones.
  const int row = blockIdx.x * 16 + threadIdx.x / 2 % 16;
  const int col = threadIdx.x / 32 * 16 + threadIdx.x % 2 * 8;
  const Rows queries = queries_of(problem, blockIdx.y / problem.heads, blockIdx.y % problem.heads);
  if (row >= queries.rows || col >= problem.head_dim) return;
  const std::int64_t row_0 =
      first_in_workspace<Br>(problem, queries, sums.rows) + std::int64_t{queries.head} * sums.rows;
  const std::int64_t tile = row_0 / Br + row / Br;
  const Matrix<const float> of_tile{sums.dQ + tile * (Br * d), 1, Br * d};
  Vector<T, 8> rounded;
  for (int e = 0; e < 8; e++)
    rounded[e] = from_float<T>(of_tile(0, place_in_dQ(row % Br, col + e)) * problem.scale);
  store<8>(matrix_of<T>(problem.dQ, problem.dQ_strides, queries, problem.head_dim)(row, col),
           rounded);
}

template <class T, int d>
void run(const Backward &p) {
  const std::int64_t all_rows = all_rows_in_workspace<Br>(p);
  const int rows = rows_in_workspace<Br>(p), longest = (p.seqlen_q + Br - 1) / Br * Br;
  const int heads = p.batch * p.heads, kv_heads = p.batch * p.kv_heads;
  const int group = p.heads / p.kv_heads;  // heads of Q that share keys
  const int key_tiles = (p.seqlen_k + Bc - 1) / Bc;
  float *const dQ = static_cast<float *>(p.workspace), *const lse_log2 = dQ + all_rows * d;
  float *const D = lse_log2 + all_rows;
  const Sums sums = {lse_log2, D, dQ, reinterpret_cast<unsigned *>(D + all_rows), rows};
  // As many heads at once as have 40 MB of Q, dO and dQ's sums, because an H200 has 50 MB of L2. If all blocks take equally
  // long and none waits for another, one head at a time.
  const std::int64_t bytes = std::int64_t{group} * longest * d * 8;
  const bool side_by_side = p.deterministic || p.window_left >= 0 || p.window_right >= 0;
  const int heads_at_once =
      side_by_side ? std::clamp<std::int64_t>((40 << 20) / bytes, 1, kv_heads) : 1;
  // With a scale of 0 a masked score would be -inf * 0 = NaN.
  const float scale_log2 = std::max(p.scale * log2_e, 1e-20f);
  const auto map_q = [&](const void *data, const Strides &strides) {
    const Mapped of = mapped_queries(p, data, strides);
    return sequence_map<T>(data, strides_for_map(p, of, p.cu_seqlens_q), of.blocks, of.heads,
                           of.rows, p.cu_seqlens_q, p.head_dim, Br);
  };
  const auto map_k = [&](const void *data, const Strides &strides) {
    const Mapped of = mapped_keys(p, data, strides);
    return sequence_map<T>(data, strides_for_map(p, of, p.cu_seqlens_k), of.blocks, of.heads,
                           of.rows, p.cu_seqlens_k, p.head_dim, Bc);
  };
  launch_on<void>(p.stream, begin<T, d>, dim3(longest / 4, heads), dim3(128), p, sums);
  launch_on<SharedStorage<T, d>>(p.stream, gradients<T, d>, dim3(key_tiles * kv_heads),
                                 dim3(threads), map_q(p.Q, p.Q_strides), map_q(p.dO, p.dO_strides),
                                 map_k(p.K, p.K_strides), map_k(p.V, p.V_strides),
                                 map_k(p.dK, p.dK_strides), map_k(p.dV, p.dV_strides), p, sums,
                                 group, key_tiles, heads_at_once, scale_log2);
  launch_on<void>(p.stream, round_dQ<T, d>, dim3(longest / 16, heads), dim3(2 * d), p, sums);
}

template <class T>
void run(const Backward &p) {
  p.head_dim <= 192 ? run<T, 192>(p) : run<T, 256>(p);
}

void backward(const Backward &call) {
  const Backward p = with_one_window(call);
  p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p);
}

std::size_t workspace_bytes(const Backward &p) {
  const std::int64_t rows = all_rows_in_workspace<Br>(p);
  return (rows * ((p.head_dim <= 192 ? 192 : 256) + 2) + rows / Br + 1) * 4;
}

/// Returns a program's problem as a call of the library that asks for the same bits in every run.
inline Backward call_for(const Problem &problem) {
  Backward call = backward_of(problem);
  call.deterministic = true;
  return call;
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 8,
    .launch = [](const Problem &p) { backward(call_for(p)); },
    .workspace_bytes = [](const Problem &p) { return workspace_bytes(call_for(p)); },
    .head_dims = {192, 136, 160, 200, 256},
    .gradients = true,
});
