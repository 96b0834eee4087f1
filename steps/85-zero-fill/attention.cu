// Step 85: zero fill. Any head dim up to 128 that is a multiple of 8, in tiles of 64, 96 or 128 columns.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --seqlen-k, --kv-heads, --layout, --lengths, --window, --window-size, --garbage,
//             --scale, --softcap, --alibi, --sink-logits
// Before      step 53: head dims 64 and 128.
// Bottleneck  Other head dims: 72 or 80 in vision, 96 in Phi-3. A caller would copy Q, K and V into rows of 128 columns,
//             and pay for all of them.
// Change      A kernel for 96 columns with tiles of its own. A head dim between uses the next kernel: TMA fills the
//             columns that the tensor does not have with zeros, and does not store them. One kernel for all functions
//             of a score, which it asks for at run time.
// Prediction  A tile of 96 columns needs 6 clocks of the tensor cores for a key, per warpgroup, where 128 columns need 8: 0.75
//             of head dim 128's clocks at 96. 72, 80 and 88 take the clocks of 96, because a zero is multiplied like
//             any other number.
#include <algorithm>

#include "common/kernel/lse.h"
#include "common/kernel/plan.h"
#include "common/kernel/scores.h"

namespace {

/// The tiles for up to d columns.
template <int d>
struct Tiles {
  static constexpr int warpgroups = d <= 96 ? 3 : 2;  // that compute, with 64 rows of Q each
  static constexpr int Br = warpgroups * 64;
  static constexpr int Bc = d == 96 ? 96 : 128;
  static constexpr int stages = d == 64 ? 3 : 2;  // of K and of V
  static constexpr int threads = (warpgroups + 1) * 128;
  // Registers of a thread after setmaxnreg: together what the launch gives, 128 of 512 threads or 168 of 384.
  static constexpr int consumer_registers = warpgroups == 3 ? 160 : 232;
  static constexpr int producer_registers = warpgroups == 3 ? 32 : 40;
};

/// Columns that a tile has for d of a tensor: whole slabs of 128 bytes. The engine fills the rest with zeros.
constexpr int padded(int d) {
  return (d + 63) / 64 * 64;
}

/// Returns the smallest d of a kernel that has room for these columns.
constexpr int instance(int columns) {
  return columns <= 64 ? 64 : columns <= 96 ? 96 : (columns + 63) / 64 * 64;
}

template <class T, int d>
struct SharedStorage {
  using Sizes = Tiles<d>;
  Ring<TmaTile<64, padded(d), T>, q_stages> Q[Sizes::warpgroups];
  Ring<TmaTile<Sizes::Bc, padded(d), T>, Sizes::stages> K, V;
  Tile<int, q_stages, work_ints> work;  // the record of the tile in each stage of Q
};

/// changes: a function changes the scores, or there are learned sinks.
template <class T, int d, bool changes>
__global__ void __launch_bounds__(Tiles<d>::threads, 1)   // blocks per SM
    attention(const __grid_constant__ SequenceMap map_Q,  // [batch, heads, rows, d], all four
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_O, const Problem problem, const Order order,
              const Plan plan, bool planned, const Scores scores) {
  using Sizes = Tiles<d>;
  constexpr int consumers = Sizes::warpgroups, Bc = Sizes::Bc;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  auto &K = smem.K, &V = smem.V;
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  init_rings(smem.Q, smem.K, smem.V);
  RingPosition<q_stages> q;
  RingPosition<Sizes::stages> k, v;
  const Matrix<float> lse{problem.lse, problem.batch * problem.heads, problem.seqlen_q};

  if (warpgroup == consumers) {
    setmaxnreg_dec<Sizes::producer_registers>();
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
                                : work_at<Sizes::Br, Given::kNothing, Bc>(problem, order, tile);
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
      write_columns_without_keys<T, d>(problem, changes ? scores.sink_logits : nullptr, lse, lane);
    }
  } else {
    setmaxnreg_inc<Sizes::consumer_registers>();
    auto &Q = smem.Q[warpgroup];
    Accumulator<Bc> s;
    Accumulator<d> o;
    FragmentA p[Bc / 16];
    const auto start_qk = [&] {
      mbarrier_wait(K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)  // not over all that the tile has
        wgmma<T>(s, k_major(Q.tile[q.stage], 0, col), k_major(K.tile[k.stage], 0, col), col > 0);
      wgmma_commit();
    };
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
      return skips_last<consumers, Bc>(problem, work, warpgroup);
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

template <class T, int d, bool changes>
void run(const Problem &p) {
  using Sizes = Tiles<d>;
  constexpr int kv_row_bytes = d * 2 * sizeof(T);
  const Order order = order_of<Sizes::Br>(p, kv_row_bytes);
  const Plan plan(p, Sizes::Br);
  const bool planned = plan_tiles<Sizes::Br, Sizes::Bc>(p, plan, kv_row_bytes);
  const auto kernel = attention<T, d, changes>;
  using Storage = SharedStorage<T, d>;
  const int blocks =
      std::min(std::max(1, order.tiles), resident_blocks<Storage>(kernel, Sizes::threads));
  launch_beside_on<Storage>(p.stream, kernel, dim3(blocks), dim3(Sizes::threads),
                            map_of_q<T>(p, p.Q, p.Q_strides, p.head_dim),
                            map_of_k<T, Sizes::Bc>(p, p.K, p.K_strides, p.head_dim),
                            map_of_k<T, Sizes::Bc>(p, p.V, p.V_strides, p.head_dim),
                            map_of_q<T>(p, p.O, p.O_strides, p.head_dim), p, order, plan, planned,
                            scores_of(p));
}

template <class T, int d>
void run(const Problem &p) {
  p.softcap > 0 || p.slopes || p.sink_logits ? run<T, d, true>(p) : run<T, d, false>(p);
}

template <class T>
void run(const Problem &given) {
  const Problem p = with_sides(given);
  const int d = instance(p.head_dim);
  d == 64 ? run<T, 64>(p) : d == 96 ? run<T, 96>(p) : run<T, 128>(p);
}

std::size_t workspace_bytes(const Problem &p) {
  return std::size_t(Plan::ints(p, p.head_dim <= 96 ? Tiles<96>::Br : Tiles<128>::Br)) *
         sizeof(int);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes = workspace_bytes,
    .head_dims = {64, 72, 80, 96, 104, 128},
    .writes_lse = true,
});
