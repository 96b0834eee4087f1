// Step 87: Wide heads. The backward pass of head dims above 128: dK and dV belong to two warpgroups, dQ to a third.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window-size, --scale, --type
// Before      step 80: a warpgroup has dK and dV of 64 keys in its registers, and head dims end at 128.
// Bottleneck  At head dim 256 dK and dV of 64 keys are 256 registers of each thread, and a thread may have 255.
// Change      A block has 64 keys. One warpgroup computes S, P and dV, the second dP, dS and dK, the third dQ. P goes from the
//             first to the second, and dS from the second to the third, through shared memory. The third adds dQ to L2 from
//             its registers.
// Prediction  A visit of 64 queries has five products of 512 clocks: 2560. Shared memory has 2692 wavefronts of 128 bytes, so
//             it is the limit, as in step 66. With step 67's loss beside that limit, 15%, a visit takes 3100 clocks.
#include <algorithm>

#include "steps/80-backward-for-models/launch.h"
#include "steps/80-backward-for-models/visit.h"

namespace {

constexpr int block_keys = 64;
constexpr int first = 128;  // columns of dK and dV in one product; another has the rest
constexpr int chunk = 64;   // columns of dQ that are computed and added at once
// The warpgroups: each of the first two has 128 registers of sums, the third has 32. The last one copies.
constexpr int of_V = 0, of_K = 1, producer = 3, block_threads = 4 * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
constexpr int wide_registers = 200, narrow_registers = 88;
static_assert(128 * (2 * wide_registers + narrow_registers + producer_registers) <= 65536);

template <class T, int d>
struct WideStorage {
  TmaTile<block_keys, d, T> K, V;  // at the end dK and dV
  TmaTile<Br<d>, d, T> Q[stages], dO[stages];
  TmaTile<Br<d>, block_keys, T> dS;
  Tile<std::uint32_t, Br<d> / 16, 128 * 4> P;  // the fragments of 128 threads: two numbers in each
  Tile<float, 1, Br<d>> lse[stages], D[stages];
  Mbarrier KV_full, Q_full[stages], empty[stages], dO_full[stages], dO_empty[stages];
  Mbarrier P_full, P_empty, dS_full, dS_empty;
  Tile<int, 1, 4> number;  // the block's
};

/// dK and dV of 64 keys, and what these keys add to dQ.
template <class T, int d, bool in_turns>
__global__ void __launch_bounds__(block_threads, 1)  // blocks per SM
    gradients(const __grid_constant__ SequenceMap map_Q, const __grid_constant__ SequenceMap map_dO,
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_dK,
              const __grid_constant__ SequenceMap map_dV, const Backward problem, const Sums sums,
              int group, int key_tiles, int heads_at_once, float scale_log2) {
  // The named barriers: of the three that compute, and one for each of two; 0 is that of __syncthreads.
  constexpr int all_multiplied = 1, first_stored = 2;
  auto &smem = shared_storage<WideStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    take_number(smem.number, sums.counters);
    init_copies(smem);
    for (auto &empty : smem.dO_empty) mbarrier_init(empty, 8);  // as Q's: the warps of two
    mbarrier_init(smem.P_full, 4);                              // the warps of one
    mbarrier_init(smem.P_empty, 4);
    mbarrier_init(smem.dS_full, 4);
    mbarrier_init(smem.dS_empty, 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised, and the number is there
  const Keys of_block =
      keys_of_block<block_keys>(problem, uniform(smem.number(0, 0)), key_tiles, heads_at_once);
  const auto &[keys, key_tile, first_key, keys_here] = of_block;
  if (keys_here <= 0) return;  // the sequence is shorter than the longest

  // A visit is of a tile of queries of one head, in the order of step 80.
  const Rows queries = queries_of(problem, keys.b, keys.head * group);
  const auto [plan, tiles] = plan_of<Br<d>>(problem, queries, keys, first_key, keys_here);
  const int visits = group * tiles, last_row = plan.end - Br<d>;
  // With a window to the left blocks seldom wait, and a head after the other is faster (chapter 80).
  const NextVisit<Br<d>> next = {problem.window_left >= 0, group, plan.first_row, last_row};
  // The row of the workspace of the first head's query 0.
  const std::int64_t row_0 = first_in_workspace<Br<d>>(problem, queries, sums.rows) +
                             std::int64_t{queries.head} * sums.rows;
  const SequenceRows of_k = {keys.start, keys.rows};
  // When all have multiplied, dV or dK takes the place of V or K, and leaves it.
  const auto store_sums = [&](int who, auto &tile, auto &low, auto &high, float factor,
                              const SequenceMap &map) {
    named_barrier_meet(all_multiplied, 3 * 128);
    write_keys(tile, low, factor);
    write_keys(tile, high, factor, first);
    fence_proxy_async();
    named_barrier_sync(first_stored + who, 128);  // all four warps have written it
    if (int(threadIdx.x) == who * 128) {
      tma_store(map, of_k, first_key, keys.head, keys.b, tile);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
  };

  if (warpgroup == producer) {
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x == producer * 128) {
      mbarrier_arrive_expect_tx(smem.KV_full, sizeof smem.K + sizeof smem.V);
      tma_load(smem.K, map_K, of_k, first_key, keys.head, keys.b, smem.KV_full);
      tma_load(smem.V, map_V, of_k, first_key, keys.head, keys.b, smem.KV_full);
      load_visits<d>(smem, map_Q, map_dO, sums, queries, row_0, visits, last_row, next);
    }
  } else if (warpgroup == of_V) {
    setmaxnreg_inc<wide_registers>();
    Accumulator<first> dv_low;  // of columns
    Accumulator<d - first> dv_high;
    Accumulator<Br<d>> s;  // transposed: keys x queries
    FragmentA p[Br<d> / 16];
    clear(dv_low), clear(dv_high);  // if no query sees the keys
    mbarrier_wait<false>(smem.KV_full, 0);

    for (int n = 0, h = 0, q_row = last_row; n < visits; n++, next(h, q_row)) {
      const int stage = n % stages, parity = n / stages % 2;
      auto &Q = smem.Q[stage], &dO = smem.dO[stage];

      // S^T = K Q^T.
      start_product(s, smem.K, Q, smem.Q_full[stage], parity);
      wgmma_wait<0>(s);

      // P^T.
      hide_scores(s, plan.lowest + q_row, plan.highest + q_row, keys_here);
      exponentiate(s, smem.lse[stage], scale_log2);
      to_fragments<T>(p, s);
      mbarrier_wait<false>(smem.P_empty, n % 2 ^ 1);
#pragma unroll
      for (int k = 0; k < Br<d> / 16; k++) store(smem.P(k, threadIdx.x % 128 * 4), p[k]);
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(smem.P_full);
        mbarrier_arrive(smem.empty[stage]);
      }

      // dV += P^T dO.
      mbarrier_wait<false>(smem.dO_full[stage], parity);
      wgmma_fence();
#pragma unroll
      for (int row = 0; row < Br<d>; row += 16) {
        wgmma<T>(dv_low, p[row / 16], mn_major(dO, row, 0), true);
        wgmma<T>(dv_high, p[row / 16], mn_major(dO, row, first), true);
      }
      wgmma_commit();
      wgmma_wait<0>(dv_low, dv_high);
      if (lane == 0) mbarrier_arrive(smem.dO_empty[stage]);
    }
    store_sums(of_V, smem.V, dv_low, dv_high, 1, map_dV);
  } else if (warpgroup == of_K) {
    setmaxnreg_inc<wide_registers>();
    Accumulator<first> dk_low;  // of columns
    Accumulator<d - first> dk_high;
    Accumulator<Br<d>> dp;  // transposed: keys x queries
    FragmentA ds[Br<d> / 16];
    clear(dk_low), clear(dk_high);  // if no query sees the keys
    mbarrier_wait<false>(smem.KV_full, 0);

    for (int n = 0, h = 0, q_row = last_row; n < visits; n++, next(h, q_row)) {
      const int stage = n % stages, parity = n / stages % 2;
      auto &Q = smem.Q[stage], &dO = smem.dO[stage];

      // dP^T = V dO^T.
      start_product(dp, smem.V, dO, smem.dO_full[stage], parity);

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
      for (int row = 0; row < Br<d>; row += 16)
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
      for (int row = 0; row < Br<d>; row += 16) {
        wgmma<T>(dk_low, ds[row / 16], mn_major(Q, row, 0), true);
        wgmma<T>(dk_high, ds[row / 16], mn_major(Q, row, first), true);
      }
      wgmma_commit();
      wgmma_wait<0>(dk_low, dk_high);
      if (lane == 0) mbarrier_arrive(smem.empty[stage]);
    }
    store_sums(of_K, smem.K, dk_low, dk_high, problem.scale, map_dK);
  } else {
    setmaxnreg_dec<narrow_registers>();
    Accumulator<chunk> dq;
    mbarrier_wait<false>(smem.KV_full, 0);
    for (int n = 0, h = 0, q_row = last_row; n < visits; n++, next(h, q_row)) {
      const std::int64_t tile = (row_0 + std::int64_t{h} * sums.rows + q_row) / Br<d>;

      // dS as A: 16 queries for each warp, and all keys.
      FragmentA ds[block_keys / 16];
      mbarrier_wait<false>(smem.dS_full, n % 2);
#pragma unroll
      for (int k = 0; k < block_keys / 16; k++)
        ds[k] = ldmatrix_x4(smem.dS(warp % 4 * 16 + lane % 16, k * 16 + lane / 16 * 8));
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem.dS_empty);

      // In turns: how many warps have added to this tile, of the blocks between the first that visits it and this one.
      auto &&turn = Matrix<unsigned>{sums.counters + 1 + tile, 1, 1}(0, 0);
      const int first_visitor = max(0, plan.lowest + first_key + q_row) / block_keys;
      // A counter may skip a value if arrays that nobody checked give two sequences the same rows.
      if constexpr (in_turns) {
        if (lane == 0) wait_until_at_least(turn, (key_tile - first_visitor) * 4);
        __syncwarp();
      }

      // dQ = dS K, 64 columns after 64 columns.
#pragma unroll 1
      for (int c = 0; c < d / chunk; c++) {
        wgmma_fence();
#pragma unroll
        for (int row = 0; row < block_keys; row += 16)
          wgmma<T>(dq, ds[row / 16], mn_major(smem.K, row, c * chunk), row > 0);
        wgmma_commit();
        wgmma_wait<0>(dq);
        const Matrix<float> sums_of_dQ{sums.dQ + (tile * (d / chunk) + c) * (Br<d> * chunk), 1,
                                       Br<d> * chunk};
#pragma unroll
        for (int e = 0; e < dq.size; e += 4)
          red_add(sums_of_dQ(0, e * 128 + threadIdx.x % 128 * 4),
                  Vector<float, 4>{dq(e), dq(e + 1), dq(e + 2), dq(e + 3)});
      }
      if constexpr (in_turns) {
        __syncwarp();  // all lanes have added
        if (lane == 0) red_release_add(turn, 1);
      }
    }
    named_barrier_meet(all_multiplied, 3 * 128);  // K has been read
  }
}

template <class T, int d>
void run(const Backward &p) {
  const auto kernel = p.deterministic ? gradients<T, d, true> : gradients<T, d, false>;
  // With a scale of 0 a masked score would be -inf * 0 = NaN.
  const float scale_log2 = std::max(p.scale * log2_e, 1e-20f);
  launch_gradients<T, d, WideStorage<T, d>>(p, kernel, block_threads, block_keys, scale_log2);
}

template <class T>
void run(const Backward &p) {
  p.head_dim <= 192 ? run<T, 192>(p) : run<T, 256>(p);
}

void backward(const Backward &call) {
  const Backward p = with_one_window(call);
  p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 8,
    .launch = [](const Problem &p) { backward(backward_of(p)); },
    .workspace_bytes = [](const Problem &p) { return workspace_bytes(backward_of(p)); },
    .head_dims = {192, 136, 160, 200, 256},
    .gradients = true,
    .same_bits = false,
});
