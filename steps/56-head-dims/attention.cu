// Step 56: head dims. Up to 256, and V's own: tiles and registers as a budget.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --seqlen-k, --kv-heads, --layout, --lengths, --window, --window-size, --garbage,
//             --scale, --head-dim-v, --softcap, --alibi, --sink-logits
// Before      step 85: head dims up to 128, and V has Q's.
// Bottleneck  The larger head dims. With tiles of 128 rows head dim 256 would need 384 KB of shared memory, and 224
//             registers for S, P and O alone.
// Change      Kernels for 192 and 256 columns, with smaller tiles, and one for 192 with 128 of V. Where shared memory has room
//             for one stage of Q alone, the next Q waits until O is stored. Step 52's functions, and step 53's list.
// Prediction  A tile of keys needs the tensor cores for 64 Bc (d + dv) / 2048 clocks per warpgroup, and shared memory for
//             62 to 70% of that. One stage of Q adds 4,000 clocks to a tile of Q: at head dim 256 and 8192 keys 1.5%.
#include <algorithm>

#include "common/kernel/lse.h"
#include "common/kernel/plan.h"
#include "common/kernel/scores.h"

namespace {

/// The tiles for Q and K of up to d columns and V and O of up to dv. The chapter has the budget.
template <int d, int dv>
struct Tiles {
  static constexpr int warpgroups = d <= 96 ? 3 : 2;  // that compute, with 64 rows of Q each
  static constexpr int Br = warpgroups * 64;
  static constexpr int Bc = d == 96 ? 96 : dv == 192 ? 112 : d == 256 ? 80 : 128;
  static constexpr int q_stages = d <= 128 ? 2 : 1;
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

/// Returns whether there is a kernel with these columns of K and of V.
constexpr bool has_kernel(int d, int dv) {
  return d == dv || (d == 192 && dv == 128);
}

template <class T, int d, int dv>
struct SharedStorage {
  using Sizes = Tiles<d, dv>;
  TmaTile<64, padded(d), T> Q[Sizes::warpgroups][Sizes::q_stages];
  TmaTile<Sizes::Bc, padded(d), T> K[Sizes::stages];
  TmaTile<Sizes::Bc, padded(dv), T> V[Sizes::stages];
  // All barriers follow all tiles: behind each ring of its own they would take 1,024 bytes, a tile's alignment.
  RingBarriers<Sizes::q_stages> Q_barriers[Sizes::warpgroups];
  RingBarriers<Sizes::stages> K_barriers, V_barriers;
  Tile<int, Sizes::q_stages, work_ints> work;  // the record of the tile in each stage of Q
};

/// changes: a function changes the scores, or there are learned sinks.
template <class T, int d, int dv, bool changes>
__global__ void __launch_bounds__(Tiles<d, dv>::threads, 1)  // blocks per SM
    attention(const __grid_constant__ SequenceMap map_Q,     // [batch, heads, rows, d], as K
              const __grid_constant__ SequenceMap map_K,
              const __grid_constant__ SequenceMap map_V,  // [batch, heads, rows, dv], as O
              const __grid_constant__ SequenceMap map_O, const Problem problem, const Order order,
              const Plan plan, bool planned, const Scores scores) {
  using Sizes = Tiles<d, dv>;
  constexpr int consumers = Sizes::warpgroups, Bc = Sizes::Bc, q_stages = Sizes::q_stages;
  auto &smem = shared_storage<SharedStorage<T, d, dv>>();
  const auto Q_of = [&](int i) { return ring_of(smem.Q[i], smem.Q_barriers[i]); };
  const auto K = ring_of(smem.K, smem.K_barriers);
  const auto V = ring_of(smem.V, smem.V_barriers);
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  init_rings(smem.Q_barriers, smem.K_barriers, smem.V_barriers);
  RingPosition<q_stages> q;
  RingPosition<Sizes::stages> k, v;
  const Matrix<float> lse{problem.lse, problem.batch * problem.heads, problem.seqlen_q};

  if (warpgroup == consumers) {
    setmaxnreg_dec<Sizes::producer_registers>();
    if (threadIdx.x == consumers * 128) {
      const auto tell = [&](const Work &work) {  // it becomes visible when the phase of `full` ends
        for (auto &Q : smem.Q_barriers) mbarrier_wait(Q.empty[q.stage], q.parity ^ 1);
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
      for (int tile = blockIdx.x; tile < tiles;
           tile = draw_tile(static_cast<unsigned *>(problem.workspace), tiles)) {
        const Work at = planned ? read_work(plan.list, tile)
                                : work_at<Sizes::Br, Given::kNothing, Bc>(problem, order, tile);
        if (at.to == 0) continue;
        tell(at);
        for (int i = 0; i < consumers; i++) {
          RingPosition<q_stages> same = q;
          // A warpgroup without rows gets the first ones. They are not stored.
          ring_load(Q_of(i), same, map_Q, at.q, max(0, at.row + i * 64), at.q.head, at.q.sequence);
        }
        const int stage = q.stage;
        q.next();
        load_k(stage, at.to - 1);
        for (int j = at.to - 1; j > read_work(smem.work, stage).from; j--) {
          load_k(stage, j - 1);
          load_v(stage, j);
        }
        // Before the next Q: where Q has one stage, the consumers release it when this V is multiplied.
        load_v(stage, read_work(smem.work, stage).from);
      }
      tell({});  // the end: no Q comes with it
      for (auto &Q : smem.Q_barriers) mbarrier_arrive(Q.full[q.stage]);
    } else if (warp == consumers * 4 + 1) {
      griddepcontrol_wait();  // what came before this launch may still use O
      write_columns_without_keys<T, dv>(problem, changes ? scores.sink_logits : nullptr, lse, lane);
    }
  } else {
    setmaxnreg_inc<Sizes::consumer_registers>();
    const auto Q = Q_of(warpgroup);
    Accumulator<Bc> s;
    Accumulator<dv> o;
    FragmentA p[Bc / 16];
    const auto start_qk = [&] {
      mbarrier_wait(K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)  // not over all that the tile has
        wgmma<T>(s, k_major(Q.tile[q.stage], 0, col), k_major(K.tile[k.stage], 0, col), col > 0);
      wgmma_commit();
    };
    const auto start_pv = [&](bool add) { start_output<T, dv>(o, p, V, v, add); };
    const auto my_turn = [&] { begin_turn(warpgroup); };
    const auto next_turn = [&] { end_turn<consumers>(warpgroup); };
    if (warpgroup == consumers - 1) next_turn();

    const auto finish = [&](const float(&m)[2], float(&l)[2], int stage) {
      finish_rows(m, l, stage, smem.work, problem, lse, warpgroup, warp, lane, lse.data);
    };
    // Q's place becomes O's: a warp writes 16 rows, which only its own products have read.
    const auto store_o = [&](const float(&l)[2], int stage) {
      // As write_rows does. A call of it, with warp and lane by value, makes nvcc 13.0 write other code.
      const int to = warp % 4 * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < o.size; i += 8)
        stmatrix_x4(Q.tile[stage](to, i * 2 + lane / 16 * 8),
                    {cvt_rn_x2<T>(o(i) * l[0], o(i + 1) * l[0]),
                     cvt_rn_x2<T>(o(i + 2) * l[1], o(i + 3) * l[1]),
                     cvt_rn_x2<T>(o(i + 4) * l[0], o(i + 5) * l[0]),
                     cvt_rn_x2<T>(o(i + 6) * l[1], o(i + 7) * l[1])});
      store_tile<consumers, dv>(Q, stage, smem.work, map_O, warpgroup);
    };

    const auto wait_for_q = [&] { return wait_for_work(Q, q, smem.work); };
    const auto skips = [&](const Work &work) {
      return skips_last<consumers, Bc>(problem, work, warpgroup);
    };
    const auto start_first_qk = [&](const Work &work) {  // step 42 says why nothing waits here
      if (skips(work)) ring_release(K, k);
      start_qk();
    };
    const auto start_tile = [&](const Work &work) {
      my_turn();
      start_first_qk(work);
      next_turn();
      wgmma_wait<0>(s);
    };
    Work at = wait_for_q();
    if (at.to == 0) return;  // there are fewer tiles than blocks
    if constexpr (q_stages == 2) start_tile(at);
    while (at.to > 0) {
      if constexpr (q_stages == 1) start_tile(at);
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
      if constexpr (q_stages == 2) at = wait_for_q();
      if (q_stages == 2 && at.to > 0) {
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
        ring_release(V, v);
        store_o(l, used);
        if constexpr (q_stages == 1) at = wait_for_q();  // O is stored, and Q's place is free
      }
    }
  }
}

template <class T, int d, int dv, bool changes>
void run(const Problem &p) {
  using Sizes = Tiles<d, dv>;
  constexpr int kv_row_bytes = (d + dv) * sizeof(T);
  const Order order = order_of<Sizes::Br>(p, kv_row_bytes);
  const Plan plan(p, Sizes::Br);
  const bool planned = plan_tiles<Sizes::Br, Sizes::Bc>(p, plan, kv_row_bytes);
  const auto kernel = attention<T, d, dv, changes>;
  using Storage = SharedStorage<T, d, dv>;
  const int blocks =
      std::min(std::max(1, order.tiles), resident_blocks<Storage>(kernel, Sizes::threads));
  launch_beside_on<Storage>(p.stream, kernel, dim3(blocks), dim3(Sizes::threads),
                            map_of_q<T>(p, p.Q, p.Q_strides, p.head_dim),
                            map_of_k<T, Sizes::Bc>(p, p.K, p.K_strides, p.head_dim),
                            map_of_k<T, Sizes::Bc>(p, p.V, p.V_strides, p.head_dim_v),
                            map_of_q<T>(p, p.O, p.O_strides, p.head_dim_v), p, order, plan, planned,
                            scores_of(p));
}

template <class T, int d, int dv>
void run(const Problem &p) {
  p.softcap > 0 || p.slopes || p.sink_logits ? run<T, d, dv, true>(p) : run<T, d, dv, false>(p);
}

template <class T>
void run(const Problem &given) {
  const Problem p = with_sides(given);
  const int d = instance(p.head_dim), dv = instance(p.head_dim_v);
  if (!has_kernel(d, dv))
    throw ShapeError("--head-dim-v " + std::to_string(p.head_dim_v) +
                     ": must fit the tile of --head-dim " + std::to_string(p.head_dim) +
                     ", which has " + std::to_string(d) +
                     " columns for V, too; beside 192 there are also 128");
  d != dv    ? run<T, 192, 128>(p)
  : d == 64  ? run<T, 64, 64>(p)
  : d == 96  ? run<T, 96, 96>(p)
  : d == 128 ? run<T, 128, 128>(p)
  : d == 192 ? run<T, 192, 192>(p)
             : run<T, 256, 256>(p);
}

std::size_t workspace_bytes(const Problem &p) {
  return std::size_t(Plan::ints(p, p.head_dim <= 96 ? Tiles<96, 96>::Br : Tiles<128, 128>::Br)) *
         sizeof(int);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 8,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes = workspace_bytes,
    .head_dims = {64, 72, 80, 96, 104, 128, 136, 160, 192, 200, 256},
    .writes_lse = true,
});
