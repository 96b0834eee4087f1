// SPDX-License-Identifier: MIT
// What steps 85 and 56 have of step 53: the loop over a block's works, and that over a work's tiles of keys. Functions of a score
// are asked for at run time.
#pragma once

#include "common/kernel/plan.h"
#include "common/kernel/scores.h"

/// Calls `load` with each work that a block draws: of the list, if there is one. One thread calls this.
template <int Br, int Bc, class Load>
static __device__ __forceinline__ void draw_works(const Problem &problem, const Order &order,
                                                  const Plan &plan, bool planned,
                                                  const Load &load) {
  const int tiles = planned ? plan.tiles(0, 0) : order.tiles;
  for (int tile = blockIdx.x; tile < tiles;
       tile = draw_tile(static_cast<unsigned *>(problem.workspace), tiles)) {
    const Work at = planned ? read_work(plan.list, tile)
                            : work_at<Br, Given::kNothing, Bc>(problem, order, tile);
    if (at.to > 0) load(at);
  }
}

/// Computes a warpgroup's O of a work but for the last product, that of the tile `from` of keys. The caller starts that one,
/// because the next work's first S may follow it. S of the last tile of keys is there. `skip`: it is that of the last but
/// one. Sets the maxima m and the sums l, and returns whether O has a product. `changes`: a function changes the scores,
/// or there are learned sinks. start_qk and start_pv start a product. The other arguments are references as mask_tile's are.
template <class T, int consumers, bool changes, int Bc, int d, class RingOfK, class RingOfV,
          int Stages, class View, class StartQK, class StartPV>
__device__ __forceinline__ bool attend(const Work &at, bool skip, Accumulator<Bc> &s,
                                       Accumulator<d> &o, FragmentA (&p)[Bc / 16], float (&m)[2],
                                       float (&l)[2], RingOfK &K, RingPosition<Stages> &k,
                                       RingOfV &V, RingPosition<Stages> &v, View &records,
                                       const int &stage, const Problem &problem,
                                       const Scores &scores, const int &warpgroup, const int &warp,
                                       const int &lane, const StartQK &start_qk,
                                       const StartPV &start_pv) {
  const auto my_turn = [&] { begin_turn(warpgroup); };
  const auto next_turn = [&] { end_turn<consumers>(warpgroup); };
  const int first = uniform(at.from);
  int last = uniform(at.to) - 1 - skip;
  if (skip) {
    my_turn();  // a turn without products: the others multiply the tile's V
    next_turn();
    ring_release(V, v);
  }
  float alpha[2];
  m[0] = m[1] = no_maximum, l[0] = l[1] = 0;
  if (changes && scores.sink_logits) begin_with_sink(m, l, scores, at.q.head, lane);
  ring_release(K, k);
  // All 64 rows see all keys of the tiles from all_from on that come before all_to.
  const int all_to = uniform(Keys(problem, at, warpgroup * 64).end / Bc);
  const int all_from = uniform((Keys(problem, at, warpgroup * 64 + 63).first + Bc - 1) / Bc);
  const float slope = changes && scores.slopes ? slope_of(scores, at.q.head) : 0;
  const int ahead = rows_ahead(at, warpgroup, warp, lane);
  const auto change_scores = [&](int j) {  // of the tile j of keys
    if (changes) cap_and_bias(s, scores, slope, ahead, j);
  };
  const auto mask_keys = [&](int j) {  // after change_scores: a soft cap would show them again
    if (j < all_to && j >= all_from) return;
    mask_tile(s, problem, records, stage, j, all_from, all_to, warpgroup, warp, lane);
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
  return last > first;
}
