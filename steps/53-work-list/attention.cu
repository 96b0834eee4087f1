// Step 53: a work list. A kernel plans which tiles of Q there are, and which comes first.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --seqlen-k, --kv-heads, --layout, --lengths, --window, --window-size, --garbage,
//             --scale, --softcap, --alibi, --sink-logits
// Before      step 52: every sequence counts as the longest. Blocks draw tiles that do not exist, and a short
//             sequence's tiles may come before a long one's.
// Bottleneck  If one sequence of 16 has 8192 rows and comes last, and the others have 512, one block of 132 ends
//             with a tile of 64 tiles of keys when the others have nothing left: 150,000 clocks at head dim 128.
// Change      One block plans a list of the tiles that exist: the sequence with the most keys first, and in what L2
//             holds the tiles that stand at the last keys first. The blocks draw from the list.
// Prediction  Sequences of one length need no list: step 52's clocks. The list takes 3 us, and 0.4 us more for each
//             1,000 tiles of Q. A tile that does not exist took a block 1,500 clocks, and takes none.
#include <algorithm>

#include "common/kernel/lse.h"
#include "common/kernel/scores.h"
#include "steps/53-work-list/plan.h"

namespace {

template <class T, int d, bool softcap, bool alibi, bool sinks>
__global__ void __launch_bounds__(threads<d>, 1)          // blocks per SM
    attention(const __grid_constant__ SequenceMap map_Q,  // [batch, heads, rows, d], all four
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_O, const Problem problem, const Order order,
              const Plan plan, bool planned, const Scores scores) {
  constexpr int consumers = warpgroups<d>;
  auto &smem = shared_storage<WorkRings<T, d>>();
  auto &K = smem.K, &V = smem.V;
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  init_rings<T, d>(smem);
  RingPosition<q_stages> q;
  RingPosition<stages<d>> k, v;
  const Matrix<float> lse{problem.lse, problem.batch * problem.heads, problem.seqlen_q};

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers<d>>();
    if (threadIdx.x == consumers * 128) {
      // The consumers need each V after the K behind it, which may be the next tile's.
      const auto tell = [&](const Work &work) {  // it becomes visible when the phase of `full` ends
        for (auto &Q : smem.Q) mbarrier_wait(Q.empty[q.stage], q.parity ^ 1);
        write_work(smem.work, q.stage, work);
      };
      // A tile of keys of the work that a stage tells of, read again: registers are few.
      const auto load_k = [&](int stage, int j) {
        const HeadRows keys = read_work(smem.work, stage).k;
        ring_load(K, k, map_K, keys, j * Bc, keys.head, keys.sequence);
      };
      const auto load_v = [&](int stage, int j) {
        const HeadRows keys = read_work(smem.work, stage).k;
        ring_load(V, v, map_V, keys, j * Bc, keys.head, keys.sequence);
      };
      griddepcontrol_wait();  // the list is complete
      const int tiles = planned ? plan.tiles(0, 0) : order.tiles;
      bool more = false;  // than one tile has begun
      for (int tile = blockIdx.x; tile < tiles;
           tile = draw_tile(static_cast<unsigned *>(problem.workspace), tiles)) {
        const Work at = planned ? read_work(plan.list, tile)
                                : work_at<Br<d>, Given::kNothing>(problem, order, tile);
        if (at.to == 0) continue;
        tell(at);
        for (int i = 0; i < consumers; i++) {
          RingPosition<q_stages> same = q;
          // A warpgroup without rows gets the first ones. They are not stored.
          ring_load(smem.Q[i], same, map_Q, at.q, max(0, at.row + i * 64), at.q.head,
                    at.q.sequence);
        }
        const int stage = q.stage, before = stage ^ 1;  // where the tile before is, for a while
        q.next();
        load_k(stage, at.to - 1);
        if (more) load_v(before, read_work(smem.work, before).from);
        for (int j = at.to - 1; j > read_work(smem.work, stage).from; j--) {
          load_k(stage, j - 1);
          load_v(stage, j);
        }
        more = true;
      }
      tell({});  // the end: no Q comes with it
      for (auto &Q : smem.Q) mbarrier_arrive(Q.full[q.stage]);
      if (more) load_v(q.stage ^ 1, read_work(smem.work, q.stage ^ 1).from);
    } else if (warp == consumers * 4 + 1) {
      griddepcontrol_wait();  // what came before this launch may still use O
      write_rows_without_keys<T, d, sinks>(problem, scores, lse, lane);
    }
  } else {
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
}

template <class T, int d, bool softcap, bool alibi, bool sinks>
void run(const Problem &p) {
  constexpr int kv_row_bytes = d * 2 * sizeof(T);
  const Order order = order_of<Br<d>>(p, kv_row_bytes);
  const Plan plan(p, Br<d>);
  const int l2_tiles = is_causal(p) ? (32 << 20) / (Bc * kv_row_bytes) : 0;
  const bool planned =
      p.lengths_q || p.lengths_k || p.cu_seqlens_q || p.cu_seqlens_k || p.starts_k || p.cache_index;
  if (planned)
    launch_on<void>(p.stream, make_plan<Br<d>>, dim3(1), dim3(plan_threads), p, plan, l2_tiles);
  const auto kernel = attention<T, d, softcap, alibi, sinks>;
  const int blocks =
      std::min(std::max(1, order.tiles), resident_blocks<WorkRings<T, d>>(kernel, threads<d>));
  launch_beside_on<WorkRings<T, d>>(
      p.stream, kernel, dim3(blocks), dim3(threads<d>), map_of_q<T>(p, p.Q, p.Q_strides, d),
      map_of_k<T, Bc>(p, p.K, p.K_strides, d), map_of_k<T, Bc>(p, p.V, p.V_strides, d),
      map_of_q<T>(p, p.O, p.O_strides, d), p, order, plan, planned, scores_of(p));
}

template <class T, int d>
void run(const Problem &p) {
  // Where a score has a function, a sink is asked for once per tile of Q: no kernels of its own for that.
  if (p.softcap > 0)
    p.slopes ? run<T, d, true, true, true>(p) : run<T, d, true, false, true>(p);
  else if (p.slopes)
    run<T, d, false, true, true>(p);
  else
    p.sink_logits ? run<T, d, false, false, true>(p) : run<T, d, false, false, false>(p);
}

template <class T>
void run(const Problem &given) {
  const Problem p = with_sides(given);
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          return std::size_t(Plan::ints(p, p.head_dim == 64 ? Br<64> : Br<128>)) * sizeof(int);
        },
    .writes_lse = true,
});
