// Step 91: The columns that exist. With head dim 96 the products have 96 columns, where tiles have 128.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window-size, --scale, --type, --softcap, --alibi,
//             --sink-logits
// Before      step 81: with head dim 96 all products have 128 columns. What comes before its loop and behind it is step 90's.
// Bottleneck  Shared memory: 3813 wavefronts for a visit, whether its columns exist or not.
// Change      S and dP add up 96 products, dK and dV have 96 columns. Tiles and dQ keep their 128.
// Prediction  3365 wavefronts and 2560 clocks of products for a visit with head dim 96: 0.88 of step 90's clocks. All else as it
//             was.
#include <algorithm>

#include "steps/90-around-the-loop/launch.h"

namespace {

/// dK and dV of 128 keys, and what these keys add to dQ. With a soft cap a score is scale_log2 tanh(q . k to_cap) in base 2.
/// A tile in shared memory has d columns. Those behind the first `columns` are 0.
template <class T, int d, int columns, bool softcap, bool alibi>
__global__ void __launch_bounds__(threads, 1)  // blocks per SM
    gradients(const __grid_constant__ SequenceMap map_Q, const __grid_constant__ SequenceMap map_dO,
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_dK,
              const __grid_constant__ SequenceMap map_dV, const Backward problem, const Sums sums,
              int group, int key_tiles, int heads_at_once, float scale_log2, float to_cap) {
  // The named barriers: of both warpgroups, and one for each; 0 is that of __syncthreads.
  constexpr int all_stored = 1, first_stored = 2;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const Keys own = begin_with_keys(smem, problem, sums, key_tiles, heads_at_once);
  const auto &[keys, key_tile, first_key, keys_here] = own;
  if (keys_here <= 0) return;  // the sequence is shorter than the longest

  const Rows queries = queries_of(problem, keys.b, keys.head * group);
  const auto [plan, tiles] = plan_of<Br<d>>(problem, queries, keys, first_key, keys_here);
  const int visits = group * tiles, last_row = plan.end - Br<d>;
  // With both functions nvcc 13.0 spills in the other order.
  const bool by_head = (softcap && alibi) || problem.window_left >= 0;
  const auto next = [&](int &h, int &q_row) {
    if (by_head && (q_row -= Br<d>) < plan.first_row) h++, q_row = last_row;
    if (!by_head && ++h == group) h = 0, q_row -= Br<d>;
  };

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    // The row of the workspace of the first head's query 0.
    const std::int64_t row_0 = first_in_workspace<Br<d>>(problem, queries, sums.rows) +
                               std::int64_t{queries.head} * sums.rows;
    if (threadIdx.x == consumers * 128)
      load_tiles(smem, map_Q, map_dO, map_K, map_V, sums, queries, own, row_0, visits, last_row,
                 next);
    if (threadIdx.x == consumers * 128 + 32)
      for (int n = 0, h = 0, q_row = last_row; n < visits; n++, next(h, q_row)) {
        const std::int64_t tile = (row_0 + std::int64_t{h} * sums.rows + q_row) / Br<d>;
        add_in_turn(smem, problem, sums, own, plan, tile, q_row, n);
      }
  } else {
    setmaxnreg_inc<consumer_registers>();
    auto &K = smem.K[warpgroup], &V = smem.V[warpgroup];
    Accumulator<columns> dk, dv;
    Accumulator<Br<d>> s, dp;                     // transposed: keys x queries
    Accumulator<d == 64 ? Br<d> / 2 : Br<d>> dq;  // transposed: columns x queries
    FragmentA p[Br<d> / 16], ds[Br<d> / 16];
    FragmentA p_slope[Br<d> / 16];  // P^T times the derivative of the capped score
    // With both functions and 128 columns nvcc 13.0 spills if dP has its registers before P is rounded.
    constexpr bool late_dP = softcap && alibi && columns == 128;
    // Of a score that is not seen. With a soft cap finite, because P, which is 0, is multiplied by its square.
    constexpr float hidden = softcap ? -1e15f : -INFINITY;
    const bool is_first_thread = threadIdx.x % 128 == 0;
    const int own_key = warpgroup * 64;                  // of the block's
    const int key = own_key + warp % 4 * 16 + lane / 4;  // the lane's, and 8 further on
    const int query = lane % 4 * 2;                      // of each 8, and 1 further on
    clear(dk), clear(dv);                                // if no query sees the keys
    mbarrier_wait<false>(smem.KV_full, 0);

    float slope = 0;  // of ALiBi, in base 2
    for (int n = 0, h = 0, q_row = last_row; n < visits; n++, next(h, q_row)) {
      if constexpr (alibi)
        if (!by_head || q_row == last_row)
          slope = slope_of(problem, keys.b, queries.head + h) * log2_e;
      const int stage = n % stages, parity = n / stages % 2;
      auto &Q = smem.Q[stage], &dO = smem.dO[stage];
      auto &dS = smem.dS[n % 2];

      // S^T = K Q^T and dP^T = V dO^T.
      mbarrier_wait<false>(smem.Q_full[stage], parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < columns; col += 16)
        wgmma<T>(s, k_major(K, 0, col), k_major(Q, 0, col), col > 0);
      wgmma_commit();
      const auto start_dP = [&] {
        mbarrier_wait<false>(smem.dO_full[stage], parity);
        wgmma_fence();
#pragma unroll
        for (int col = 0; col < columns; col += 16)
          wgmma<T>(dp, k_major(V, 0, col), k_major(dO, 0, col), col > 0);
        wgmma_commit();
      };
      if constexpr (!late_dP) start_dP();

      // P^T, while dP is computed. The tile's first query sees the keys `from` to `to` of the block's.
      wgmma_wait<late_dP ? 0 : 1>(s);
      if constexpr (softcap)
#pragma unroll
        for (int e = 0; e < s.size; e++) s(e) = tanh_approx(s(e) * to_cap);
      const int from = plan.lowest + q_row, to = plan.highest + q_row;
      if (own_key + 64 > keys_here || own_key + 63 > to || own_key < from + Br<d> - 1)
#pragma unroll
        for (int e = 0; e < s.size; e++) {
          const int after = key - query + e / 2 % 2 * 8 - e / 4 * 8 - e % 2;
          if (after > to || after < from || key + e / 2 % 2 * 8 >= keys_here) s(e) = hidden;
        }
      // How far the lane's first key is behind its first query.
      const float behind = first_key + key - (keys.rows - queries.rows + q_row + query);
#pragma unroll
      for (int e = 0; e < s.size; e += 4) {
        const auto lse = load<2>(smem.lse[stage](0, e * 2 + lane % 4 * 2));
        float w[4];
        for (int k = 0; k < 4; k++) {
          float minus_lse = -lse[k % 2];
          if constexpr (alibi)
            minus_lse = fmaf(-slope, fabsf(behind + (k / 2 * 8 - e * 2 - k % 2)), minus_lse);
          const float t = s(e + k);
          s(e + k) = ex2(fmaf(t, scale_log2, minus_lse));
          if constexpr (softcap) w[k] = fmaf(-s(e + k) * t, t, s(e + k));  // P (1 - t^2)
        }
        for (int r = 0; softcap && r < 2; r++)
          p_slope[e / 8][e / 4 % 2 * 2 + r] = cvt_rn_x2<T>(w[2 * r], w[2 * r + 1]);
      }
      to_fragments<T>(p, s);

      // dV += P^T dO, P rounded: there is no register for the other.
      const auto add_to_dV = [&] {
        wgmma_fence();
#pragma unroll
        for (int row = 0; row < Br<d>; row += 16)
          wgmma<T>(dv, p[row / 16], mn_major(dO, row, 0), true);
        wgmma_commit();
      };
      if constexpr (late_dP) start_dP();
      // With a soft cap dV's product begins here: it takes P in 16 bits, so nvcc 13.0 keeps no fp32 for later.
      if constexpr (softcap) add_to_dV();
      wgmma_wait<softcap ? 1 : 0>(dp);
#pragma unroll
      for (int e = 0; e < dp.size; e += 4) {
        const auto D_of = load<2>(smem.D[stage](0, e * 2 + lane % 4 * 2));
        for (int r = 0; r < 2; r++) {
          const auto P = to_floats<T>((softcap ? p_slope : p)[e / 8][e / 4 % 2 * 2 + r]);
          for (int k = 0; k < 2; k++) dp(e + 2 * r + k) = P[k] * (dp(e + 2 * r + k) - D_of[k]);
        }
      }
      to_fragments<T>(ds, dp);
#pragma unroll
      for (int row = 0; row < Br<d>; row += 16)
        stmatrix_x4_trans(dS(row + lane / 16 * 8 + lane % 8, warp * 16 + lane / 8 % 2 * 8),
                          ds[row / 16]);

      if constexpr (!softcap) add_to_dV();
      fence_proxy_async();
      named_barrier_sync(all_stored, consumers * 128);  // dS is complete

      // dQ^T = K^T dS^T, for all keys, and dK += dS^T Q.
      wgmma_fence();
#pragma unroll
      for (int row = 0; row < Bc; row += 16)
        wgmma<T>(dq, mn_major(smem.K[row / 64], row % 64, d == 64 ? 0 : warpgroup * 64),
                 k_major(dS, d == 64 ? warpgroup * (Br<d> / 2) : 0, row), row > 0);
      wgmma_commit();
#pragma unroll
      for (int row = 0; row < Br<d>; row += 16)
        wgmma<T>(dk, ds[row / 16], mn_major(Q, row, 0), true);
      wgmma_commit();

      wgmma_wait<1>(dv, dq);
      auto &dQ = smem.dQ[warpgroup];
      mbarrier_wait<false>(smem.dQ_empty[warpgroup], n % 2 ^ 1);
#pragma unroll
      for (int e = 0; e < dq.size; e += 4)
        store(dQ(0, e * 128 + threadIdx.x % 128 * 4),
              Vector<float, 4>{dq(e), dq(e + 1), dq(e + 2), dq(e + 3)});
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem.dQ_full[warpgroup]);
      wgmma_wait<0>(dk);
      if (lane == 0) mbarrier_arrive(smem.empty[stage]);
    }

    // K's and V's places become dK's and dV's.
    named_barrier_sync(all_stored, consumers * 128);  // both have read all of K
    write_keys(V, dv, 1);
    write_keys(K, dk, problem.scale);
    fence_proxy_async();
    named_barrier_sync(first_stored + warpgroup, 128);  // all four warps have written both
    if (is_first_thread && own_key < keys_here)
      store_keys(map_dK, map_dV, K, V, keys, first_key, own_key);
  }
}

template <class T, int d, int columns, bool softcap, bool alibi>
void run(const Backward &p) {
  // With a scale of 0 a masked score would be -inf * 0 = NaN.
  const float scale_log2 = softcap ? p.softcap * log2_e : std::max(p.scale * log2_e, 1e-20f);
  const float to_cap = softcap ? p.scale / p.softcap : 0;
  launch_around<T, d>(p, gradients<T, d, columns, softcap, alibi>, scale_log2, to_cap);
  const Sums sums = sums_in_workspace<d>(p);
  add_up_sinks<Br<d>>(p, sums.lse_log2, sums.D, sums.rows);
}

template <class T, int d, int columns>
void run(const Backward &p) {
  if (p.softcap > 0)
    p.slopes ? run<T, d, columns, true, true>(p) : run<T, d, columns, true, false>(p);
  else
    p.slopes ? run<T, d, columns, false, true>(p) : run<T, d, columns, false, false>(p);
}

template <class T>
void run(const Backward &p) {
  p.head_dim <= 64   ? run<T, 64, 64>(p)
  : p.head_dim <= 96 ? run<T, 128, 96>(p)
                     : run<T, 128, 128>(p);
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
    .head_dims = {64, 128, 96, 32, 80, 104},
    .gradients = true,
    .same_bits = false,
});
