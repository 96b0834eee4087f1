// Step 46: a window. A row sees keys from its own position's left to its right, and no more tiles are loaded.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --seqlen-k, --kv-heads, --layout, --lengths, --window, --window-size, --garbage
// Before      step 45: a row sees all keys, or all up to its own position.
// Bottleneck  Of 16,384 keys, a tile of Q has 64.5 tiles up to the diagonal; a window of 1,024 keys needs 9 or 10.
// Change      A tile of Q has a first tile of keys, too. Which keys a row sees is a number on each side. Tiles at
//             either side are masked, those between are not.
// Prediction  A tile of Q's time is that of its tiles of keys: 192 rows and a window of 1,024 meet 10 or 11 of 128
//             keys, 128 rows 9 or 10. Without a window step 45's clocks: one comparison per tile of keys more.
#include "common/kernel/group_order.h"
#include "common/kernel/work.h"

namespace {

/// The keys that row i of a tile of Q sees.
struct Keys {
  int first, end;
  __device__ __forceinline__ Keys(const Problem &p, const Work &work, int i) {
    const int own = work.position + i;
    first = max(0, own - p.window_left);
    end = min(work.k.count, own + 1 + p.window_right);
  }
};

/// The work of a tile of Q, the n-th from the sequence's end. The tiles end with a multiple of 64 rows, so a
/// warpgroup has rows from its first on, or none.
template <int Br>
__device__ __forceinline__ Work make_work(const Problem &p, const Rows &rows, int n) {
  const int queries = rows.q.count, end = (queries + 63) / 64 * 64 - n * Br;
  Work work = {end - Br, end - Br + rows.k.count - queries, 0, 0, rows.q, rows.k};
  if (end <= 0 || rows.k.count == 0) return work;  // there is no such tile, or there are no keys
  // Rows that see nothing have a tile of keys, of which all is masked.
  work.to = (max(1, Keys(p, work, min(end, queries) - 1 - work.row).end) + Bc - 1) / Bc;
  work.from = min(Keys(p, work, max(0, -work.row)).first / Bc, work.to - 1);
  return work;
}

template <class T, int d>
__global__ void __launch_bounds__(threads<d>, 1)          // blocks per SM
    attention(const __grid_constant__ SequenceMap map_Q,  // [batch, heads, rows, d], all four
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_O, const Problem problem, const Order order,
              float scale_log2) {
  constexpr int consumers = warpgroups<d>;
  auto &smem = shared_storage<WorkRings<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  init_rings<T, d>(smem);
  RingPosition<q_stages> q;
  RingPosition<stages<d>> k, v;

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
        ring_load(smem.K, k, map_K, read_work(smem.work, stage).k, j * Bc);
      };
      const auto load_v = [&](int stage, int j) {
        ring_load(smem.V, v, map_V, read_work(smem.work, stage).k, j * Bc);
      };
      bool more = false;  // than one tile has begun
      for (int tile = blockIdx.x; tile < order.tiles;
           tile = draw_tile(static_cast<unsigned *>(problem.workspace), order.tiles)) {
        const Order::Place place = order.place(problem, tile);
        const Work at = make_work<Br<d>>(problem, Rows(problem, place.head), place.n());
        if (at.to == 0) continue;
        tell(at);
        for (int i = 0; i < consumers; i++) {
          RingPosition<q_stages> same = q;
          // A warpgroup without rows gets the first ones. They are not stored.
          ring_load(smem.Q[i], same, map_Q, at.q, max(0, at.row + i * 64));
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
      write_zeros_without_keys<T, d>(problem, lane);
    }
  } else {
    setmaxnreg_inc<consumer_registers<d>>();
    auto &Q = smem.Q[warpgroup];
    Accumulator<Bc> s;
    Accumulator<d> o;
    FragmentA p[Bc / 16];
    const auto start_qk = [&] { start_scores<T, d>(s, Q, q, smem.K, k); };
    const auto start_pv = [&](bool add) { start_output<T, d>(o, p, smem.V, v, add); };
    const auto my_turn = [&] { begin_turn(warpgroup); };
    const auto next_turn = [&] { end_turn<consumers>(warpgroup); };
    if (warpgroup == consumers - 1) next_turn();

    const auto invert = [](float(&l)[2]) {  // l becomes 1 / l; four lanes share a row
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
        l[r] = l[r] == 0 ? 1 : 1 / l[r];  // 0: the row sees no key, and O is 0
      }
    };
    // Q's place becomes O's: a warp writes 16 rows, which only its own products have read.
    const auto store_o = [&](const float(&l)[2], int stage) {
      // Warp and lane anew: with those from above nvcc 13.0 spills in step 52.
      write_rows<T, d>(Q, stage, o, l, threadIdx.x / 32, threadIdx.x % 32);
      fence_proxy_async();
      named_barrier_sync(first_stored<d> + warpgroup, 128);  // all four warps have written O
      if (threadIdx.x % 128 == 0) {
        const Work done = read_work(smem.work, stage);
        const int row = done.row + warpgroup * 64;
        if (row >= 0) tma_store(map_O, done.q, row, Q.tile[stage]);
        tma_store_commit();
        tma_store_wait_read<0>();
        mbarrier_arrive(Q.empty[stage]);
      }
    };

    const auto wait_for_q = [&] {
      mbarrier_wait(Q.full[q.stage], q.parity);
      return read_work(smem.work, q.stage);
    };
    // Whether none of the warpgroup's rows sees the last tile of keys (step 42). Of two tiles of keys one stays.
    const auto skips = [&](const Work &work) {
      const int end = Keys(problem, work, warpgroup * 64 + 63).end;
      return consumers == 3 && work.to - work.from > 1 && uniform(end <= (work.to - 1) * Bc);
    };
    const auto start_first_qk = [&](const Work &work) {  // step 42 says why nothing waits here
      if (skips(work)) ring_release(smem.K, k);
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
        ring_release(smem.V, v);
      }
      float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
      ring_release(smem.K, k);
      // All 64 rows see all keys of the tiles from all_from on that come before all_to.
      const int all_to = uniform(Keys(problem, at, warpgroup * 64).end / Bc);
      const int all_from = uniform((Keys(problem, at, warpgroup * 64 + 63).first + Bc - 1) / Bc);
      const auto mask_keys = [&](int j) {  // scores of the tile j of keys
        if (j < all_to && j >= all_from) return;
        const Work work = read_work(smem.work, q.stage);  // read again: registers are few
        const int row = warpgroup * 64 + warp % 4 * 16 + lane / 4, key = j * Bc + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const Keys seen(problem, work, row + r * 8);
          if (j >= all_to)
#pragma unroll
            for (int i = r * 2; i < s.size; i += i % 2 ? 3 : 1)
              if (i / 4 * 8 + i % 2 >= seen.end - key) s(i) = -INFINITY;
          if (j < all_from)
#pragma unroll
            for (int i = r * 2; i < s.size; i += i % 2 ? 3 : 1)
              if (i / 4 * 8 + i % 2 < seen.first - key) s(i) = -INFINITY;
        }
      };
      mask_keys(last);
      softmax(s, m, l, alpha, scale_log2);
      to_fragments<T>(p, s);

      // A warpgroup without rows multiplies one tile of keys, and passes on the others as one that it skips.
      for (; last > first && at.row + warpgroup * 64 < 0; last--) {
        my_turn();
        next_turn();
        ring_release(smem.K, k);
        ring_release(smem.V, v);
      }
      for (int j = last; j > first; j--) {
        my_turn();
        start_qk();
        start_pv(j < last);  // of the tile before
        next_turn();
        wgmma_wait<1>(s);
        ring_release(smem.K, k);
        mask_keys(j - 1);
        const bool must_rescale = softmax(s, m, l, alpha, scale_log2);
        wgmma_wait<0>(o);
        ring_release(smem.V, v);
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
        invert(l);
        wgmma_wait<1>(o);
        ring_release(smem.V, v);
        store_o(l, used);
        wgmma_wait<0>(s);
      } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
        my_turn();
        start_pv(last > first);
        next_turn();
        invert(l);
        wgmma_wait<0>(o);
        store_o(l, used);
      }
    }
  }
}

template <class T, int d>
void run(const Problem &p) {
  const bool causal = p.window_left >= p.seqlen_k && p.window_right < p.seqlen_k;
  const Order order = order_of<Br<d>>(p, d * 2 * sizeof(T), causal);
  const auto kernel = attention<T, d>;
  const int blocks =
      std::min(std::max(1, order.tiles), resident_blocks<WorkRings<T, d>>(kernel, threads<d>));
  launch<WorkRings<T, d>>(
      kernel, dim3(blocks), dim3(threads<d>), map_of_q<T>(p, p.Q, p.Q_strides, d),
      map_of_k<T, Bc>(p, p.K, p.K_strides, d), map_of_k<T, Bc>(p, p.V, p.V_strides, d),
      map_of_q<T>(p, p.O, p.O_strides, d), p, order, log2_e / sqrtf(d));
}

template <class T>
void run(Problem p) {
  // Both kinds of windows, and a causal mask, are a window with two sides. No limit is 2^30 keys.
  if (p.window) p.window_left = p.window - 1;
  if (p.window || p.causal) p.window_right = 0;
  for (int *side : {&p.window_left, &p.window_right})
    *side = *side < 0 ? 1 << 30 : std::min(*side, 1 << 30);
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes = [](const Problem &) { return sizeof(unsigned); },
});
