// SPDX-License-Identifier: MIT
// What the warpgroups that compute do, as step 52 has it. Step 54 includes it.
#pragma once

#include "common/kernel/lse.h"
#include "common/kernel/scores.h"

/// Computes the tiles of Q that the producer tells of, 64 rows of each. A warpgroup's threads call it. The arguments are
/// references as mask_tile's are.
template <class T, int d, bool softcap, bool alibi, bool sinks>
__device__ __forceinline__ void consume(WorkRings<T, d> &smem, const SequenceMap &map_O,
                                        const Problem &problem, const Scores &scores,
                                        const Matrix<float> &lse, RingPosition<q_stages> &q,
                                        RingPosition<stages<d>> &k, RingPosition<stages<d>> &v,
                                        const int &warpgroup, const int &warp, const int &lane) {
  constexpr int consumers = warpgroups<d>;
  auto &K = smem.K, &V = smem.V;
  setmaxnreg_inc<consumer_registers<d>>();
  auto &Q = smem.Q[warpgroup];
  Accumulator<Bc> s;
  Accumulator<d> o;
  FragmentA p[Bc / 16];
  const auto start_qk = [&] { start_scores<T, d>(s, Q, q, K, k); };
  const auto start_pv = [&](bool add) { start_output<T, d>(o, p, V, v, add); };
  const auto my_turn = [&] { begin_turn(warpgroup); };
  const auto next_turn = [&] { end_turn<consumers>(warpgroup); };
  if (warpgroup == consumers - 1) next_turn();

  const auto finish = [&](const float(&m)[2], float(&l)[2], int stage) {
    finish_rows(m, l, stage, smem.work, problem, lse, warpgroup, warp, lane, lse.data);
  };
  // Q's place becomes O's: a warp writes 16 rows, which only its own products have read.
  const auto store_o = [&](const float(&l)[2], int stage) {
    // Warp and lane anew: with those from above nvcc 13.0 spills in step 52.
    write_rows<T, d>(Q, stage, o, l, threadIdx.x / 32, threadIdx.x % 32);
    store_tile<consumers, d>(Q, stage, smem.work, map_O, warpgroup);
  };

  const auto wait_for_q = [&] { return wait_for_work(Q, q, smem.work); };
  const auto skips = [&](const Work &work) {
    return skips_last<consumers>(problem, work, warpgroup);
  };
  const auto start_first_qk = [&](const Work &work) {  // step 42 says why nothing waits here
    if (skips(work)) ring_release(K, k);
    start_qk();
  };
  Work at = wait_for_q();
  if (at.to == 0) return;  // there are fewer tiles than blocks
  my_turn();
  start_first_qk(at);
  next_turn();
  wgmma_wait<0>(s);
  while (at.to > 0) {
    const bool skip = skips(at);
    const int first = uniform(at.from);
    int last = uniform(at.to) - 1 - skip;
    if (skip) {
      my_turn();  // a turn without products: the others multiply the tile's V
      next_turn();
      ring_release(V, v);
    }
    float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
    float slope = 0;  // of ALiBi
    if constexpr (alibi) slope = slope_of(scores, at.q.head);
    if (sinks && scores.sink_logits) begin_with_sink(m, l, scores, at.q.head, lane);
    ring_release(K, k);
    // All 64 rows see all keys of the tiles from all_from on that come before all_to.
    const int all_to = uniform(Keys(problem, at, warpgroup * 64).end / Bc);
    const int all_from = uniform((Keys(problem, at, warpgroup * 64 + 63).first + Bc - 1) / Bc);
    const int ahead = rows_ahead(at, warpgroup, warp, lane);
    const auto change_scores = [&](int j) {  // of the tile j of keys
      const float distance = ahead - j * Bc;
#pragma unroll
      for (int i = 0; i < s.size; i++) {
        if constexpr (softcap) s(i) = tanh_approx(s(i) * scores.to_cap);
        if constexpr (alibi)
          s(i) = fmaf(-slope, fabsf(distance + (i / 2 % 2 * 8 - i / 4 * 8 - i % 2)), s(i));
      }
    };
    const auto mask_keys = [&](int j) {  // after change_scores: a soft cap would show them again
      // With a soft cap alone nvcc 13.0 had no register left for this branch, and spilled.
      if ((!softcap || alibi) && j < all_to && j >= all_from) return;
      mask_tile(s, problem, smem.work, q.stage, j, all_from, all_to, warpgroup, warp, lane);
    };
    change_scores(last);
    mask_keys(last);
    softmax(s, m, l, alpha, scores.scale_log2);
    to_fragments<T>(p, s);

    // A warpgroup without rows multiplies one tile of keys, and passes on the others as one that it skips.
    for (; last > first && at.row + warpgroup * 64 < 0; last--) {
      my_turn();
      next_turn();
      ring_release(K, k);
      ring_release(V, v);
    }
    for (int j = last; j > first; j--) {
      my_turn();
      start_qk();
      start_pv(j < last);  // of the tile before
      next_turn();
      wgmma_wait<1>(s);
      ring_release(K, k);
      change_scores(j - 1);
      mask_keys(j - 1);
      const bool must_rescale = softmax(s, m, l, alpha, scores.scale_log2);
      wgmma_wait<0>(o);
      ring_release(V, v);
      to_fragments<T>(p, s);
      if (must_rescale) rescale(o, alpha);
    }

    const int used = q.stage;
    q.next();
    at = wait_for_q();
    if (at.to > 0) {
      my_turn();
      start_pv(last > first);
      start_first_qk(at);  // of the next tile
      next_turn();
      finish(m, l, used);
      wgmma_wait<1>(o);
      ring_release(V, v);
      store_o(l, used);
      wgmma_wait<0>(s);
    } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
      my_turn();
      start_pv(last > first);
      next_turn();
      finish(m, l, used);
      wgmma_wait<0>(o);
      store_o(l, used);
    }
  }
}
