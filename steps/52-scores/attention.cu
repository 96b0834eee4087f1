// Step 52: scores. What a model does to a score before the softmax: soft caps, ALiBi, learned sinks.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --seqlen-k, --kv-heads, --layout, --lengths, --window, --window-size, --garbage,
//             --scale, --softcap, --alibi, --sink-logits
// Before      step 51: the softmax has the scores as the product leaves them, times a scale.
// Bottleneck  A kernel that writes S to memory for another one to change loses all that 20 steps have gained.
// Change      A function of the score, its row and its key stands between S and the softmax, inlined: which one
//             is chosen at launch. A sink is where m and l begin.
// Prediction  In clocks per element of an SM: a soft cap 1/16 for tanh and 1/128 for a product, ALiBi 2/128.
//             A tile of 128 x 128 scores, 2,048 clocks of products at head dim 128, has 1,152 and 256 clocks more
//             beside them; one of 192 x 128, 1,536 clocks at head dim 64, has 1,728 and 384. There a soft cap makes
//             3,072 clocks of MUFU, twice the products. A sink costs nothing, and without any of these nothing changes.
#include <algorithm>

#include "common/kernel/lse.h"

namespace {

/// What becomes of a score before the softmax.
struct Scores {
  float scale_log2;          // what the function returns times this is a power of two
  float to_cap;              // the product q . k times this is a score in units of the soft cap
  const float *slopes;       // of ALiBi, [heads of a sequence]
  const float *sink_logits;  // [heads of a sequence]; null: no sinks
};

template <class T, int d, bool softcap, bool alibi, bool sinks>
__global__ void __launch_bounds__(threads<d>, 1)          // blocks per SM
    attention(const __grid_constant__ SequenceMap map_Q,  // [batch, heads, rows, d], all four
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_O, const Problem problem, const Order order,
              const Scores scores) {
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
      bool more = false;  // than one tile has begun
      for (int tile = blockIdx.x; tile < order.tiles;
           tile = draw_tile(static_cast<unsigned *>(problem.workspace), order.tiles)) {
        const Work at = work_at<Br<d>>(problem, order, tile);
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
      // Of a sequence without keys O is 0, and the log-sum-exp is that of the sink alone, if there is one. It has no
      // work, because a tile of keys must have a row.
      for (int head = blockIdx.x; head < problem.batch * problem.heads; head += gridDim.x) {
        const Rows rows(problem, head);
        if (rows.k.count > 0) continue;
        const auto O = head_of<T, d>(problem.O, problem.O_strides, rows.q.sequence, rows.q.head,
                                     rows.q.first, rows.q.count);
        for (int i = lane * 8; i < rows.q.count * d; i += 32 * 8) {
          store(O(i / d, i % d), Vector<T, 8>{});
          if (i % d == 0)
            lse(head, i / d) =
                sinks && scores.sink_logits ? of_head(scores.sink_logits, rows.q.head) : -INFINITY;
        }
      }
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
      finish_rows(m, l, stage, smem.work, problem, lse, warpgroup, warp, lane);
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
      float slope =
          0;  // of ALiBi, in units of what the function returns, which is multiplied by scale_log2
      if constexpr (alibi) slope = of_head(scores.slopes, at.q.head) * log2_e / scores.scale_log2;
      if (sinks && scores.sink_logits) {
        // A key of no tile: m is its logit, and l its power, 2^0, in the first of the row's four lanes.
        m[0] = m[1] = of_head(scores.sink_logits, at.q.head) * log2_e;
        l[0] = l[1] = lane % 4 == 0;
      }
      ring_release(K, k);
      // All 64 rows see all keys of the tiles from all_from on that come before all_to.
      const int all_to = uniform(Keys(problem, at, warpgroup * 64).end / Bc);
      const int all_from = uniform((Keys(problem, at, warpgroup * 64 + 63).first + Bc - 1) / Bc);
      // How far the lane's first row stands from its first column: in the first tile of keys.
      const int ahead = at.position + warpgroup * 64 + warp % 4 * 16 + lane / 4 - lane % 4 * 2;
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
  const Order order = order_of<Br<d>>(p, d * 2 * int(sizeof(T)));
  // With a scale of 0 a masked score would be -inf * 0 = NaN. No score shows 1e-20 of itself.
  Scores scores{std::max(log2_e * p.scale, 1e-20f), 0, p.slopes, p.sink_logits};
  if (softcap) scores.scale_log2 = log2_e * p.softcap, scores.to_cap = p.scale / p.softcap;
  const auto kernel = attention<T, d, softcap, alibi, sinks>;
  const int blocks =
      std::min(std::max(1, order.tiles), resident_blocks<WorkRings<T, d>>(kernel, threads<d>));
  launch<WorkRings<T, d>>(
      kernel, dim3(blocks), dim3(threads<d>), map_of_q<T>(p, p.Q, p.Q_strides, d),
      map_of_k<T, Bc>(p, p.K, p.K_strides, d), map_of_k<T, Bc>(p, p.V, p.V_strides, d),
      map_of_q<T>(p, p.O, p.O_strides, d), p, order, scores);
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
    .workspace_bytes = [](const Problem &) { return sizeof(unsigned); },
    .writes_lse = true,
});
