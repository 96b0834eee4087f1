// Step 43: in parts. What steps 31 to 42 settled moves to a header, and the kernel keeps what will change.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type
// Before      step 42: most of its lines have been the same since step 31. Four ideas still come, and each would
//             repeat them.
// Bottleneck  Whoever reads the next step's diff: what changes in it stands among what does not.
// Change      The shape of a block, its rings and their barriers, the counter, the turns, the two products and how a warp
//             writes its rows of O are functions of persistent.h. They are inlined.
// Prediction  The same machine code, instruction for instruction.
#include "common/kernel/persistent.h"
#include "common/kernel/tile_order.h"

namespace {

template <class T, int d>
struct SharedStorage : Rings<T, d> {
  Tile<int, 1, q_stages> tile;  // the tile that each stage of Q is of
};

struct Place {
  int row, head, key_tiles;
  __device__ Place(int tile, const Order &order) {
    const int section = tile / (order.side * order.row_tiles) * order.side;  // its first head
    const int here = min(order.side, order.heads - section);
    const int in_section = tile - section * order.row_tiles;
    row = order.seqlen - (in_section / here + 1) * order.Br;  // may be negative
    head = section + in_section % here;
    key_tiles = (order.causal ? min(row + order.Br + Bc - 1, order.seqlen) : order.seqlen) / Bc;
  }
};

template <class T, int d>
__global__ void __launch_bounds__(threads<d>, 1)        // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              const __grid_constant__ TensorMap map_O, Order order, unsigned *counter,
              float scale_log2) {
  constexpr int consumers = warpgroups<d>;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  init_rings<T, d>(smem);
  const int tiles = order.heads * order.row_tiles;
  RingPosition<q_stages> q;
  RingPosition<stages<d>> k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers<d>>();
    if (threadIdx.x == consumers * 128) {
      // The consumers need each V after the K behind it, which may be the next tile's.
      const auto tell = [&](int tile) {  // it becomes visible when the phase of `full` ends
        for (auto &Q : smem.Q) mbarrier_wait(Q.empty[q.stage], q.parity ^ 1);
        smem.tile(0, q.stage) = tile;
      };
      int head_before = 0;
      for (int tile = blockIdx.x; tile < tiles; tile = draw_tile(counter, tiles)) {
        tell(tile);
        const Place at(tile, order);
        for (int i = 0; i < consumers; i++) {
          RingPosition<q_stages> same = q;
          ring_load(smem.Q[i], same, map_Q, at.row + i * 64, at.head, 0);
        }
        q.next();
        ring_load(smem.K, k, map_K, (at.key_tiles - 1) * Bc, at.head, 0);
        if (tile != int(blockIdx.x)) ring_load(smem.V, v, map_V, 0, head_before, 0);
        for (int j = at.key_tiles - 1; j > 0; j--) {
          ring_load(smem.K, k, map_K, (j - 1) * Bc, at.head, 0);
          ring_load(smem.V, v, map_V, j * Bc, at.head, 0);
        }
        head_before = at.head;
      }
      tell(tiles);  // the end: no Q comes with it
      for (auto &Q : smem.Q) mbarrier_arrive(Q.full[q.stage]);
      ring_load(smem.V, v, map_V, 0, head_before, 0);
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
    const auto store_o = [&](const Place &at, const float(&l)[2], int stage) {
      write_rows<T, d>(Q, stage, o, l, warp, lane);
      fence_proxy_async();
      named_barrier_sync(first_stored<d> + warpgroup, 128);  // all four warps have written O
      if (threadIdx.x % 128 == 0) {
        if (at.row + warpgroup * 64 >= 0)  // not before the first row
          tma_store(map_O, at.row + warpgroup * 64, at.head, 0, Q.tile[stage]);
        tma_store_commit();
        tma_store_wait_read<0>();
        mbarrier_arrive(Q.empty[stage]);
      }
    };

    const auto wait_for_q = [&] {
      mbarrier_wait(Q.full[q.stage], q.parity);
      return uniform(smem.tile(0, q.stage));
    };
    // Whether none of the warpgroup's rows sees the last tile of keys. (Rows before the first see no
    // key at all, and their tile of Q has one tile of keys.)
    const auto skips = [&](const Place &work) {
      const int first_row = work.row + warpgroup * 64;
      return consumers == 3 && order.causal && first_row >= 0 &&
             first_row + 64 <= (work.key_tiles - 1) * Bc;
    };
    const auto start_first_qk = [&](int tile) {  // step 42 says why nothing waits here
      if (skips(Place(tile, order))) ring_release(smem.K, k);
      start_qk();
    };
    int tile = wait_for_q();
    my_turn();
    start_first_qk(tile);
    next_turn();
    wgmma_wait<0>(s);
    while (tile < tiles) {
      const Place at(tile, order);
      const bool skip = skips(at);
      const int last = at.key_tiles - 1 - skip;  // the last tile of keys that these 64 rows see
      if (skip) {
        my_turn();  // a turn without products: the others multiply the tile's V
        next_turn();
        ring_release(smem.V, v);
      }
      float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
      ring_release(smem.K, k);
      const int first_row = at.row + warpgroup * 64;
      const auto mask_keys = [&](int j) { mask_diagonal(s, first_row, j, warp, lane); };
      if (order.causal) mask_keys(last);
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
      tile = wait_for_q();
      if (tile < tiles) {
        my_turn();
        start_pv(last > 0);
        start_first_qk(tile);  // of the next tile
        next_turn();
        invert(l);
        wgmma_wait<1>(o);
        ring_release(smem.V, v);
        store_o(at, l, used);
        wgmma_wait<0>(s);
      } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
        my_turn();
        start_pv(last > 0);
        next_turn();
        invert(l);
        wgmma_wait<0>(o);
        store_o(at, l, used);
      }
    }
  }
}

template <class T, int d>
void run(const Problem &p) {
  const auto map = [&](const void *tensor, const Strides &strides, int heads, int tile_rows) {
    return tensor_map<T>(tensor, strides, 1, p.batch * heads, p.seqlen_q, d, tile_rows);
  };
  const Order order = order_of(p, Br<d>, d * 2 * sizeof(T));
  const auto kernel = attention<T, d>;
  const int blocks = std::min(order.heads * order.row_tiles,
                              resident_blocks<SharedStorage<T, d>>(kernel, threads<d>));
  launch<SharedStorage<T, d>>(
      kernel, dim3(blocks), dim3(threads<d>), map(p.Q, p.Q_strides, p.heads, 64),
      map(p.K, p.K_strides, p.heads, Bc), map(p.V, p.V_strides, p.heads, Bc),
      map(p.O, p.O_strides, p.heads, 64), order, static_cast<unsigned *>(p.workspace),
      log2_e / sqrtf(d));
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
