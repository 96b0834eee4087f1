// Step 90: Around the loop. What comes before the loop and behind it takes the time of its bytes.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window-size, --scale, --type, --softcap, --alibi,
//             --sink-logits
// Before      step 81: a warp begins one query's row with 4 or 8 bytes a lane, dQ's sums are loaded by 4 bytes, and each block
//             draws a number and divides it.
// Bottleneck  Instructions and waits around the loop. At 1024 queries, causal, begin and round_dQ have 29% of the time at head
//             dim 64, and their bytes need 16%.
// Change      16 bytes a thread before the loop, and 8 behind it. Without turns the grid says which keys a block has, and no more
//             heads are side by side than give each multiprocessor two blocks, rounded up.
// Prediction  The bytes' time at 4.26 TB/s for both kernels, and step 67's loop: at 1024, causal, without turns, 0.81 of step
//             80's time at head dim 64, and 0.90 at 128.
#include <algorithm>

#include "steps/81-score-gradients/kernel.h"

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

/// dK and dV of 128 keys, and what these keys add to dQ.
template <class T, int d, bool softcap, bool alibi>
__global__ void __launch_bounds__(threads, 1)  // blocks per SM
    gradients(const __grid_constant__ SequenceMap map_Q, const __grid_constant__ SequenceMap map_dO,
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_dK,
              const __grid_constant__ SequenceMap map_dV, const Backward problem, const Sums sums,
              int group, int key_tiles, int heads_at_once, float scale_log2, float to_cap) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  // A block that waits for others needs a number that says who began before it. Else its place in the grid is enough.
  Keys own;
  if (problem.deterministic) {
    own = keys_of_block(problem, begin_block(smem, sums.counters), key_tiles, heads_at_once);
  } else {
    begin_block(smem);
    const int kv_head = blockIdx.z * gridDim.x + blockIdx.x;
    if (kv_head >= problem.batch * problem.kv_heads) return;  // of the last heads there are fewer
    own = keys_of_tile(problem, kv_head, blockIdx.y);
  }
  gradients_of_keys<T, d, softcap, alibi>(smem, own, map_Q, map_dO, map_K, map_V, map_dK, map_dV,
                                          problem, sums, group, scale_log2, to_cap);
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

template <class T, int d, bool softcap, bool alibi>
void run(const Backward &p) {
  // With a scale of 0 a masked score would be -inf * 0 = NaN.
  const float scale_log2 = softcap ? p.softcap * log2_e : std::max(p.scale * log2_e, 1e-20f);
  const float to_cap = softcap ? p.scale / p.softcap : 0;
  const Sums sums = sums_in_workspace<d>(p);
  const int longest = (p.seqlen_q + Br<d> - 1) / Br<d> * Br<d>;
  const int heads = p.batch * p.heads, kv_heads = p.batch * p.kv_heads;
  const int group = p.heads / p.kv_heads;  // heads of Q that share keys
  const int key_tiles = (p.seqlen_k + Bc - 1) / Bc;
  const auto blocks = [&](int rows) { return dim3((longest + rows - 1) / rows, heads); };
  // Side by side are as many heads as have 40 MB of Q, dO and dQ's sums, because an H200 has 50 MB of L2; without turns no more
  // than give each SM two blocks. If all blocks take equally long and none waits for another, one head at a time.
  const std::int64_t bytes = std::int64_t{group} * longest * d * 8;
  const int sms = resident_blocks<SharedStorage<T, d>>(gradients<T, d, softcap, alibi>, threads);
  const int most = p.deterministic ? kv_heads : (2 * sms + key_tiles - 1) / key_tiles;
  const bool side_by_side = p.deterministic || p.window_left >= 0 || p.window_right >= 0;
  const int heads_at_once =
      side_by_side ? std::clamp<std::int64_t>((40 << 20) / bytes, 1, std::min(most, kv_heads)) : 1;
  const dim3 grid = p.deterministic ? dim3(key_tiles * kv_heads)
                                    : dim3(heads_at_once, key_tiles,
                                           (kv_heads + heads_at_once - 1) / heads_at_once);
  launch_on<void>(p.stream, begin_rows<T, d>, blocks(rows_begun<d>), dim3(around_threads), p, sums);
  launch_on<SharedStorage<T, d>>(
      p.stream, gradients<T, d, softcap, alibi>, grid, dim3(threads),
      map_of_queries<T, d>(p, p.Q, p.Q_strides), map_of_queries<T, d>(p, p.dO, p.dO_strides),
      map_of_keys<T>(p, p.K, p.K_strides), map_of_keys<T>(p, p.V, p.V_strides),
      map_of_keys<T>(p, p.dK, p.dK_strides), map_of_keys<T>(p, p.dV, p.dV_strides), p, sums, group,
      key_tiles, heads_at_once, scale_log2, to_cap);
  launch_on<void>(p.stream, round_rows<T, d>, blocks(rows_rounded<d>), dim3(around_threads), p,
                  sums);
  add_up_sinks<Br<d>>(p, sums.lse_log2, sums.D, sums.rows);
}

template <class T, int d>
void run(const Backward &p) {
  if (p.softcap > 0)
    p.slopes ? run<T, d, true, true>(p) : run<T, d, true, false>(p);
  else
    p.slopes ? run<T, d, false, true>(p) : run<T, d, false, false>(p);
}

template <class T>
void run(const Backward &p) {
  p.head_dim <= 64 ? run<T, 64>(p) : run<T, 128>(p);
}

void backward(const Backward &call) {
  const Backward p = with_one_window(call);
  p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { backward(backward_of(p)); },
    .workspace_bytes = [](const Problem &p) { return workspace_bytes(backward_of(p)); },
    .head_dims = {64, 128, 96, 32},
    .gradients = true,
    .same_bits = false,
});
