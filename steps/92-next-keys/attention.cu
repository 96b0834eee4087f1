// Step 92: The next keys. A block stays on its SM, and loads its next keys while it stores the gradients of the last.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window-size, --scale, --type, --softcap, --alibi,
//             --sink-logits
// Before      step 91: a block for each tile of keys. It begins when another has ended, and then loads its keys.
// Bottleneck  Between its last visit and the first of the next block an SM multiplies nothing: we guess 8500 clocks.
// Change      As many blocks as fit on the GPU. A block draws its next keys when it loads its last tile of queries; V and K are
//             loaded as soon as nobody reads the last ones. dV and dK leave through the places of dS and dQ.
// Prediction  2000 of these clocks stay: to write dV and dK, while K arrives. At 1024 with a mask that is 0.85 of the clocks of the
//             loop at head dim 128, at 4096 0.95.
#include <algorithm>

#include "steps/92-next-keys/work.h"

namespace {

template <class T, int d>
struct BlockStorage : SharedStorage<T, d> {
  Records work;
  Mbarrier work_full, work_taken;
  Mbarrier V_full, K_empty, V_empty;  // KV_full counts K alone
};

/// Returns the place of a tile of dS, or of a warpgroup's dQ, as that of 64 rows of dV or dK.
template <class T, int d, class Place>
__device__ __forceinline__ TmaTile<64, d, T> &as_keys(Place &place) {
  static_assert(sizeof(TmaTile<64, d, T>) <= sizeof place);
  return reinterpret_cast<TmaTile<64, d, T> &>(place);
}

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
  auto &smem = shared_storage<BlockStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(smem.work_full, 1);
    mbarrier_init(smem.work_taken, consumers * 4 + 3);  // the warps that compute, three roles
    mbarrier_init(smem.V_full, 1);
    mbarrier_init(smem.K_empty, consumers * 4);
    mbarrier_init(smem.V_empty, consumers * 4);
  }
  begin_block(smem);
  // With a soft cap and ALiBi always by head, because nvcc 13.0 spills in the other order.
  const bool by_head = (softcap && alibi) || problem.window_left >= 0;
  const auto order = [&](const Plan &plan) {
    return NextVisit<Br<d>>{by_head, group, plan.first_row, plan.end - Br<d>};
  };

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    // The first warp plans. Each of the others has a role, which one of its threads plays. It reads its work again for each
    // visit, because it has 24 registers.
    const auto each_work = [&](const auto &role) {
      for (int i = 0;; i++) {
        mbarrier_wait(smem.work_full, i % 2);
        if (smem.work(i % 2, visits_in_record) < 0) break;
        role(i);
      }
    };
    int n = 0;
    if (warp == consumers * 4) {
      for (int i = 0;; i ^= 1) {
        mbarrier_wait(smem.work_taken, i ^ 1);
        const bool more = draw_keys(smem.work, i, problem, sums.counters, key_tiles, heads_at_once);
        __syncwarp();  // the keys are written
        if (more) plan_visits<d>(smem.work, i, problem, sums, group);
        if (lane == 0) {
          if (!more) smem.work(i, visits_in_record) = -1;
          mbarrier_arrive(smem.work_full);
        }
        if (!more) break;
      }
    } else if (threadIdx.x == consumers * 128 + 32) {
      each_work([&](int i) {
        mbarrier_arrive(smem.work_taken);
        const auto [keys, key_tile, first_key, keys_here] = read_keys(smem.work, i);
        const auto load = [&](auto &tiles, const SequenceMap &map, Mbarrier &full,
                              Mbarrier &empty) {
          mbarrier_wait(empty, i % 2 ^ 1);
          mbarrier_arrive_expect_tx(full, sizeof tiles);
          for (int w = 0; w < consumers; w++) {
            // TMA wants a row of the sequence. A warpgroup without one gets the other's keys, and hides them.
            const int row = first_key + (w * 64 < keys_here ? w * 64 : 0);
            tma_load(tiles[w], map, {keys.start, keys.rows}, row, keys.head, keys.b, full);
          }
        };
        load(smem.V, map_V, smem.V_full, smem.V_empty);
        load(smem.K, map_K, smem.KV_full, smem.K_empty);
      });
    } else if (threadIdx.x == consumers * 128 + 64) {
      each_work([&](int i) {
        const int end = n + smem.work(i % 2, visits_in_record);
        for (int h = 0, q_row = order(read_work(smem.work, i).plan).last_row; n < end; n++) {
          const Work work = read_work(smem.work, i);
          const auto [b, head, start, rows] = work.queries;
          const int row_0 = work.first_tile * Br<d> + h * sums.rows;  // of the head's query 0
          load_visits<d>(
              smem, map_Q, map_dO, sums, {b, head + h, start, rows}, row_0, 1, q_row,
              [](int &, int &) {}, n);
          order(work.plan)(h, q_row);
        }
        mbarrier_arrive(smem.work_taken);  // not before, so that the next work is drawn late
      });
    } else if (threadIdx.x == consumers * 128 + 96) {
      each_work([&](int i) {
        mbarrier_arrive(smem.work_taken);
        const int end = n + smem.work(i % 2, visits_in_record);
        for (int h = 0, q_row = order(read_work(smem.work, i).plan).last_row; n < end; n++) {
          const Work work = read_work(smem.work, i);
          const int tile = work.first_tile + (h * sums.rows + q_row) / Br<d>;
          add_in_turn(smem, problem, sums, work.keys, work.plan, tile, q_row, n);
          order(work.plan)(h, q_row);
        }
      });
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
    float slope = 0;                                     // of ALiBi, in base 2
    int n = 0;                                           // visits before this one
    for (int i = 0;; i++) {
      mbarrier_wait<false>(smem.work_full, i % 2);
      if (smem.work(i % 2, visits_in_record) < 0) break;
      const auto [own, queries, plan, first_tile, visits] = read_work(smem.work, i);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem.work_taken);
      const auto &[keys, key_tile, first_key, keys_here] = own;
      const auto next = order(plan);
      const int last_row = next.last_row;
      mbarrier_wait<false>(smem.V_full, i % 2);  // V comes first
      mbarrier_wait<false>(smem.KV_full, i % 2);
      named_barrier_sync(all_stored, consumers * 128);  // TMA has read the last dV and dK
      clear(dk), clear(dv);                             // if no query sees the keys

      const int end = n + visits;
      for (int h = 0, q_row = last_row; n < end; n++, next(h, q_row)) {
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
        if (n == end - 1 && lane == 0) mbarrier_arrive(smem.V_empty);
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
        if (n == end - 1 && lane == 0) mbarrier_arrive(smem.K_empty);
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

      if (visits == 0 && lane == 0) {
        mbarrier_arrive(smem.V_empty);
        mbarrier_arrive(smem.K_empty);
      }
      // The places of dS become dV's, those of dQ dK's.
      auto &dV = as_keys<T, d>(smem.dS[warpgroup]), &dK = as_keys<T, d>(smem.dQ[warpgroup]);
      named_barrier_sync(all_stored, consumers * 128);  // both warpgroups have read all of dS
      write_keys(dV, dv, 1);
      mbarrier_wait<false>(smem.dQ_empty[warpgroup], n % 2 ^ 1);  // the last dQ has been read
      write_keys(dK, dk, problem.scale);
      fence_proxy_async();
      named_barrier_sync(first_stored + warpgroup, 128);  // all four warps have written both
      if (is_first_thread && own_key < keys_here) {
        const Keys to = read_keys(smem.work, i);  // again, before this warp takes the next
        store_keys(map_dK, map_dV, dK, dV, to.rows, to.first, own_key);
      }
    }
  }
}

template <class T, int d, int columns, bool softcap, bool alibi>
void run(const Backward &p) {
  // With a scale of 0 a masked score would be -inf * 0 = NaN.
  const float scale_log2 = softcap ? p.softcap * log2_e : std::max(p.scale * log2_e, 1e-20f);
  const float to_cap = softcap ? p.scale / p.softcap : 0;
  launch_around<T, d, BlockStorage<T, d>>(p, gradients<T, d, columns, softcap, alibi>, scale_log2,
                                          to_cap);
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
