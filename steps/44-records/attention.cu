// Step 44: records. The producer alone finds out what a tile of Q is, and writes it to shared memory for the consumers.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --kv-heads
// Before      step 43: the producer tells the consumers a tile's number, and each of their threads divides twice to find
//             out its row, its head and its tiles of keys.
// Bottleneck  None yet. But what a tile is will follow from arrays of lengths in memory: all threads would read them.
// Change      One thread computes it and writes a record beside Q. All others read that. A record has a head of Q and
//             one of K and V, so several query heads may share keys.
// Prediction  Per tile of Q a load of 16 bytes in place of two divisions, beside another warpgroup's products: no
//             difference that can be measured.
#include "common/kernel/group_order.h"
#include "common/kernel/persistent.h"

namespace {

/// What a block computes: a tile of Q with its tiles of keys.
struct Work {
  int row = 0;                // its first, negative if there are fewer than Br
  int to = 0;                 // tiles of keys; 0: no work
  int head = 0, kv_head = 0;  // of the whole batch
};

/// A stage's record in shared memory.
template <class View>
__device__ __forceinline__ void write_work(View &to, int stage, const Work &work) {
  store(to(stage, 0), Vector<int, 4>{work.row, work.to, work.head, work.kv_head});
}
template <class View>
__device__ __forceinline__ Work read_work(View &from, int stage) {
  const Vector<int, 4> record = load<4>(from(stage, 0));
  return {record[0], record[1], record[2], record[3]};
}

template <class T, int d>
struct SharedStorage : Rings<T, d> {
  Tile<int, q_stages, 4> work;  // the record of each stage of Q
};

/// The work of a tile of Q.
template <int Br>
__device__ Work make_work(const Problem &p, const Order::Place &place) {
  const int row = p.seqlen_q - (place.n() + 1) * Br;
  const int to = (p.causal ? min(row + Br + Bc - 1, p.seqlen_k) : p.seqlen_k) / Bc;
  return {row, to, place.head, place.head / place.group};
}

template <class T, int d>
__global__ void __launch_bounds__(threads<d>, 1)        // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              const __grid_constant__ TensorMap map_O, const Problem problem, const Order order,
              float scale_log2) {
  constexpr int consumers = warpgroups<d>;
  auto &smem = shared_storage<SharedStorage<T, d>>();
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
        ring_load(smem.K, k, map_K, j * Bc, read_work(smem.work, stage).kv_head, 0);
      };
      const auto load_v = [&](int stage, int j) {
        ring_load(smem.V, v, map_V, j * Bc, read_work(smem.work, stage).kv_head, 0);
      };
      bool more = false;  // than one tile has begun
      for (int tile = blockIdx.x; tile < order.tiles;
           tile = draw_tile(static_cast<unsigned *>(problem.workspace), order.tiles)) {
        const Work at = make_work<Br<d>>(problem, order.place(problem, tile));
        tell(at);
        for (int i = 0; i < consumers; i++) {
          RingPosition<q_stages> same = q;
          ring_load(smem.Q[i], same, map_Q, at.row + i * 64, at.head, 0);
        }
        const int stage = q.stage, before = stage ^ 1;  // where the tile before is, for a while
        q.next();
        load_k(stage, at.to - 1);
        if (more) load_v(before, 0);
        for (int j = at.to - 1; j > 0; j--) {
          load_k(stage, j - 1);
          load_v(stage, j);
        }
        more = true;
      }
      tell({});  // the end: no Q comes with it
      for (auto &Q : smem.Q) mbarrier_arrive(Q.full[q.stage]);
      load_v(q.stage ^ 1, 0);
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
        l[r] = 1 / l[r];
      }
    };
    // Q's place becomes O's: a warp writes 16 rows, which only its own products have read.
    const auto store_o = [&](const float(&l)[2], int stage) {
      write_rows<T, d>(Q, stage, o, l, warp, lane);
      fence_proxy_async();
      named_barrier_sync(first_stored<d> + warpgroup, 128);  // all four warps have written O
      if (threadIdx.x % 128 == 0) {
        const Work done = read_work(smem.work, stage);
        const int row = done.row + warpgroup * 64;
        if (row >= 0) tma_store(map_O, row, done.head, 0, Q.tile[stage]);  // not before the first
        tma_store_commit();
        tma_store_wait_read<0>();
        mbarrier_arrive(Q.empty[stage]);
      }
    };

    const auto wait_for_q = [&] {
      mbarrier_wait(Q.full[q.stage], q.parity);
      return read_work(smem.work, q.stage);
    };
    // Whether none of the warpgroup's rows sees the last tile of keys. (Rows before the first see no
    // key at all, and their tile of Q has one tile of keys.)
    const auto skips = [&](const Work &work) {
      const int first_row = work.row + warpgroup * 64;
      return consumers == 3 && problem.causal && first_row >= 0 &&
             uniform(first_row + 64 <= (work.to - 1) * Bc);
    };
    const auto start_first_qk = [&](const Work &work) {  // step 42 says why nothing waits here
      if (skips(work)) ring_release(smem.K, k);
      start_qk();
    };
    Work at = wait_for_q();
    my_turn();
    start_first_qk(at);
    next_turn();
    wgmma_wait<0>(s);
    while (at.to > 0) {
      const bool skip = skips(at);
      const int last = uniform(at.to) - 1 - skip;  // the last tile of keys that these 64 rows see
      if (skip) {
        my_turn();  // a turn without products: the others multiply the tile's V
        next_turn();
        ring_release(smem.V, v);
      }
      float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
      ring_release(smem.K, k);
      const int first_row = at.row + warpgroup * 64;
      const auto mask_keys = [&](int j) { mask_diagonal(s, first_row, j, warp, lane); };
      if (problem.causal) mask_keys(last);
      softmax(s, m, l, alpha, scale_log2);
      to_fragments<T>(p, s);

      for (int j = last; j > 0; j--) {
        my_turn();
        start_qk();
        start_pv(j < last);  // of the tile before
        next_turn();
        wgmma_wait<1>(s);
        ring_release(smem.K, k);
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
        start_pv(last > 0);
        start_first_qk(at);  // of the next tile
        next_turn();
        invert(l);
        wgmma_wait<1>(o);
        ring_release(smem.V, v);
        store_o(l, used);
        wgmma_wait<0>(s);
      } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
        my_turn();
        start_pv(last > 0);
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
  const auto map = [&](const void *tensor, const Strides &strides, int heads, int tile_rows) {
    return tensor_map<T>(tensor, strides, 1, p.batch * heads, p.seqlen_q, d, tile_rows);
  };
  const Order order = order_of<Br<d>>(p, d * 2 * sizeof(T), p.causal);
  const auto kernel = attention<T, d>;
  const int blocks =
      std::min(order.tiles, resident_blocks<SharedStorage<T, d>>(kernel, threads<d>));
  launch<SharedStorage<T, d>>(
      kernel, dim3(blocks), dim3(threads<d>), map(p.Q, p.Q_strides, p.heads, 64),
      map(p.K, p.K_strides, p.kv_heads, Bc), map(p.V, p.V_strides, p.kv_heads, Bc),
      map(p.O, p.O_strides, p.heads, 64), p, order, log2_e / sqrtf(d));
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = Bc,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes = [](const Problem &) { return sizeof(unsigned); },
});
