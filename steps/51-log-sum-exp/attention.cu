// Step 51: log-sum-exp. Beside O, the logarithm of each row's softmax denominator; and the caller's scale.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --seqlen-k, --kv-heads, --layout, --lengths, --window, --window-size, --garbage,
//             --scale
// Before      step 46: a launch leaves O alone, and scores are multiplied by 1 / sqrt(d).
// Bottleneck  What a model needs besides: m and l are gone when the kernel ends. The backward pass would compute
//             all scores once more for them, and two results over different keys cannot be merged without.
// Change      The first of the four lanes that share a row stores (m + log2 l) ln 2. The scale is an argument.
// Prediction  4 bytes per row beside the 2 d of its O: 1.6% more bytes at head dim 128, 3.1% at 64. Per tile of Q 30
//             instructions of each warp that computes, 90 clocks of the schedulers at head dim 64, beside the next
//             tile's products: no difference that can be measured.
#include <algorithm>

#include "common/kernel/visible.h"

namespace {

constexpr float ln_2 = 0.693147181f;  // of log2: ln x is log2(x) ln_2

/// Four lanes share a row: they add their parts of l, and the first stores the row's log-sum-exp. Then l becomes 1 / l.
/// A stage's record says which rows they are. The last arguments are references as mask_tile's are.
template <class View>
__device__ __forceinline__ void finish_rows(const float (&m)[2], float (&l)[2], int stage,
                                            View &records, const Problem &problem,
                                            const Matrix<float> &lse, const int &warpgroup,
                                            const int &warp, const int &lane) {
  const Work done = read_work(records, stage);
  const int row = done.row + warpgroup * 64 + warp % 4 * 16 + lane / 4;
  for (int r = 0; r < 2; r++) {
    for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
    if (lane % 4 == 0 && row >= 0 && row + r * 8 < done.q.count)
      lse(done.q.sequence * problem.heads + done.q.head, row + r * 8) = (m[r] + lg2(l[r])) * ln_2;
    l[r] = l[r] == 0 ? 1 : 1 / l[r];  // 0: the row sees no key, and O is 0
  }
}

template <class T, int d>
__global__ void __launch_bounds__(threads<d>, 1)          // blocks per SM
    attention(const __grid_constant__ SequenceMap map_Q,  // [batch, heads, rows, d], all four
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_O, const Problem problem, const Order order,
              float scale_log2) {
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
      // Of a sequence without keys O is 0 and the log-sum-exp -inf. It has no work: a tile of keys must have a row.
      for (int head = blockIdx.x; head < problem.batch * problem.heads; head += gridDim.x) {
        const Rows rows(problem, head);
        if (rows.k.count > 0) continue;
        const auto O = head_of<T, d>(problem.O, problem.O_strides, rows.q.sequence, rows.q.head,
                                     rows.q.first, rows.q.count);
        for (int i = lane * 8; i < rows.q.count * d; i += 32 * 8) {
          store(O(i / d, i % d), Vector<T, 8>{});
          if (i % d == 0) lse(head, i / d) = -INFINITY;
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
      ring_release(K, k);
      // All 64 rows see all keys of the tiles from all_from on that come before all_to.
      const int all_to = uniform(Keys(problem, at, warpgroup * 64).end / Bc);
      const int all_from = uniform((Keys(problem, at, warpgroup * 64 + 63).first + Bc - 1) / Bc);
      const auto mask_keys = [&](int j) {  // scores of the tile j of keys
        if (j < all_to && j >= all_from) return;
        mask_tile(s, problem, smem.work, q.stage, j, all_from, all_to, warpgroup, warp, lane);
      };
      mask_keys(last);
      softmax(s, m, l, alpha, scale_log2);
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
        mask_keys(j - 1);
        const bool must_rescale = softmax(s, m, l, alpha, scale_log2);
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

template <class T, int d>
void run(const Problem &p) {
  const Order order = order_of<Br<d>>(p, d * 2 * int(sizeof(T)));
  // With a scale of 0 a masked score would be -inf * 0 = NaN. No score shows 1e-20 of itself.
  const float scale_log2 = std::max(log2_e * p.scale, 1e-20f);
  const auto kernel = attention<T, d>;
  const int blocks =
      std::min(std::max(1, order.tiles), resident_blocks<WorkRings<T, d>>(kernel, threads<d>));
  launch<WorkRings<T, d>>(
      kernel, dim3(blocks), dim3(threads<d>), map_of_q<T>(p, p.Q, p.Q_strides, d),
      map_of_k<T, Bc>(p, p.K, p.K_strides, d), map_of_k<T, Bc>(p, p.V, p.V_strides, d),
      map_of_q<T>(p, p.O, p.O_strides, d), p, order, scale_log2);
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
