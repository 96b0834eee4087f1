// Step 52: scores. What a model does to a score before the softmax: soft caps, ALiBi, learned sinks.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --scale, --softcap, --alibi, --sink-logits
// Before      step 51: the softmax has the scores as the product leaves them, times a scale.
// Bottleneck  A kernel that writes S to memory for another one to change loses all that 20 steps have gained.
// Change      A function of the score, its row and its key stands between S and the softmax, inlined: which one
//             is chosen at launch. A sink is where m and l begin.
// Prediction  In clocks per element of an SM: a soft cap 1/16 for tanh and 1/128 for a product, ALiBi 2/128.
//             A tile of 128 x 128 scores, 2,048 clocks of products at head dim 128, has 1,152 and 256 clocks more
//             beside them; one of 192 x 128, 1,536 clocks at head dim 64, has 1,728 and 384. There a soft cap makes
//             3,072 clocks of MUFU, twice the products. A sink costs nothing, and without any of these nothing changes.
#include <algorithm>

#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"

namespace {

template <int d>
constexpr int warpgroups = d == 64 ? 3 : 2;  // that compute, with 64 rows of Q each
constexpr int Bc = 128;                      // rows of K and V in a tile
constexpr int q_stages = 2;                  // of Q: one is filled while the other is read
template <int d>
constexpr int stages = d == 64 ? 3 : 2;  // of K and of V: who skips a tile needs the next at once
// The last warpgroup of a block is the producer.
template <int d>
constexpr int threads = (warpgroups<d> + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
template <int d>
constexpr int consumer_registers = warpgroups<d> == 3 ? 160 : 232;
template <int d>
constexpr int producer_registers = warpgroups<d> == 3 ? 32 : 40;
constexpr float ln_2 = 0.693147181f;  // of log2: ln x is log2(x) ln_2

template <class T, int d>
struct SharedStorage {
  Ring<TmaTile<64, d, T>, q_stages> Q[warpgroups<d>];
  Ring<TmaTile<Bc, d, T>, stages<d>> K, V;
  Tile<int, 1, q_stages> tile;  // the tile that each stage of Q is of
};

/// The order in which the tiles of Q begin: the last rows of `side` heads, which share L2. They see the
/// most keys. Then come the rows before them, and so on; then the next `side` heads.
struct Order {
  int heads, row_tiles, side;  // heads: of the whole batch
  int Br, seqlen;              // Br: rows of a tile
  bool causal;
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

/// What becomes of a score before the softmax.
struct Scores {
  float scale_log2;          // what the function returns times this is a power of two
  float to_cap;              // the product q . k times this is a score in units of the soft cap
  const float *slopes;       // of ALiBi, [heads of a sequence]
  const float *sink_logits;  // [heads of a sequence]; null: no sinks
  int heads;                 // of a sequence

  __device__ float of_head(const float *values, int head) const {
    return Matrix<const float>{values, 1, heads}(0, head % heads);
  }
};

/// Draws the next tile; the first gridDim.x tiles are not drawn. The counter must hold 0, or `tiles` or
/// more. A launch draws `tiles` numbers, and leaves a 0.
__device__ __forceinline__ int draw_tile(unsigned *counter, int tiles) {
  const unsigned drawn = atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), tiles - 1);
  return gridDim.x + (drawn - 1 < unsigned(tiles - 1) ? tiles - drawn : 0);
}

template <class T, int d, bool softcap, bool alibi, bool sinks>
__global__ void __launch_bounds__(threads<d>, 1)        // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              const __grid_constant__ TensorMap map_O, Order order, unsigned *counter,
              float *lse,  // [batch * heads, seqlen]
              Scores scores) {
  constexpr int consumers = warpgroups<d>;
  static_assert(128 * (consumers * consumer_registers<d> + producer_registers<d>) <= 65536);
  // The named barriers, one for each warpgroup; 0 is that of __syncthreads.
  constexpr int first_turn = 1, first_stored = first_turn + consumers;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (auto &Q : smem.Q) ring_init(Q, 1);
    ring_init(smem.K, consumers * 4);  // the warps that compute
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised
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
    const auto start_qk = [&] {
      mbarrier_wait(smem.K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s, k_major(Q.tile[q.stage], 0, col), k_major(smem.K.tile[k.stage], 0, col),
                 col > 0);
      wgmma_commit();
    };
    const auto start_pv = [&](bool add) {
      mbarrier_wait(smem.V.full[v.stage], v.parity);
      wgmma_fence();
#pragma unroll
      for (int key = 0; key < Bc; key += 16)
        wgmma<T>(o, p[key / 16], mn_major(smem.V.tile[v.stage], key, 0), add || key > 0);
      wgmma_commit();
    };
    // Ping-pong (step 34): a warpgroup's products start when those of the one before have been started.
    const auto my_turn = [&] { named_barrier_sync(first_turn + warpgroup, 2 * 128); };
    const auto next_turn = [&] {
      named_barrier_arrive(first_turn + (warpgroup + 1) % consumers, 2 * 128);
    };
    if (warpgroup == consumers - 1) next_turn();

    // Four lanes share a row: they add their parts of l, and the first stores the row's log-sum-exp. Then l
    // becomes 1 / l.
    const auto finish_rows = [&](const Place &at, const float(&m)[2], float(&l)[2]) {
      const int row = at.row + warpgroup * 64 + warp % 4 * 16 + lane / 4;
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
        if (lane % 4 == 0 && row >= 0)
          Matrix<float>{lse, order.heads, order.seqlen}(at.head, row + r * 8) =
              (m[r] + lg2(l[r])) * ln_2;
        l[r] = 1 / l[r];
      }
    };
    // Q's place becomes O's: a warp writes 16 rows, which only its own products have read.
    const auto store_o = [&](const Place &at, const float(&l)[2], int stage) {
      const int row = warp % 4 * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < o.size; i += 8)
        stmatrix_x4(Q.tile[stage](row, i * 2 + lane / 16 * 8),
                    {cvt_rn_x2<T>(o(i) * l[0], o(i + 1) * l[0]),
                     cvt_rn_x2<T>(o(i + 2) * l[1], o(i + 3) * l[1]),
                     cvt_rn_x2<T>(o(i + 4) * l[0], o(i + 5) * l[0]),
                     cvt_rn_x2<T>(o(i + 6) * l[1], o(i + 7) * l[1])});
      fence_proxy_async();
      named_barrier_sync(first_stored + warpgroup, 128);  // all four warps have written O
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
    const auto skips = [&](const Place &at) {
      const int first_row = at.row + warpgroup * 64;
      return consumers == 3 && order.causal && first_row >= 0 &&
             first_row + 64 <= (at.key_tiles - 1) * Bc;
    };
    // A tile that is skipped is released without a wait for its copy. Its stage's previous tile has been
    // released by all warps: a warpgroup has its turn when the others have started their products of the
    // turn before, and they release a tile of K before their next turn.
    const auto start_first_qk = [&](int tile) {
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
      if (sinks && scores.sink_logits) {
        // A key of no tile: m is its logit, and l its power, 2^0, in the first of the row's four lanes.
        m[0] = m[1] = scores.of_head(scores.sink_logits, at.head) * log2_e;
        l[0] = l[1] = lane % 4 == 0;
      }
      ring_release(smem.K, k);
      const int first_row = at.row + warpgroup * 64;
      // By how much the lane's first row is larger than its first column.
      const int ahead = first_row + warp % 4 * 16 + lane / 4 - lane % 4 * 2;
      // A slope in units of what the function returns, which is multiplied by scale_log2.
      float slope = 0;
      if constexpr (alibi)
        slope = scores.of_head(scores.slopes, at.head) * log2_e / scores.scale_log2;
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
        const int row = first_row + warp % 4 * 16 + lane / 4, key = j * Bc + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < s.size; i++)
          if (key + i / 4 * 8 + i % 2 > row + i / 2 % 2 * 8) s(i) = -INFINITY;
      };
      change_scores(last);
      if (order.causal) mask_keys(last);
      softmax(s, m, l, alpha, scores.scale_log2);
      to_fragments<T>(p, s);

      for (int j = last; j > 0; j--) {
        my_turn();
        start_qk();
        start_pv(j < last);  // of the tile before
        next_turn();
        wgmma_wait<1>(s);
        ring_release(smem.K, k);
        change_scores(j - 1);
        const bool must_rescale = softmax(s, m, l, alpha, scores.scale_log2);
        wgmma_wait<0>(o);
        ring_release(smem.V, v);
        to_fragments<T>(p, s);
        if (must_rescale) rescale(o, alpha);
      }

      // With a soft cap and ALiBi nvcc had no registers to hold `at` across the loop, and spilled. The shuffle of
      // uniform() keeps it from seeing that this is the same place.
      const Place done = softcap && alibi ? Place(uniform(tile), order) : at;
      const int used = q.stage;
      q.next();
      tile = wait_for_q();
      if (tile < tiles) {
        my_turn();
        start_pv(last > 0);
        start_first_qk(tile);  // of the next tile
        next_turn();
        finish_rows(done, m, l);
        wgmma_wait<1>(o);
        ring_release(smem.V, v);
        store_o(done, l, used);
        wgmma_wait<0>(s);
      } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
        my_turn();
        start_pv(last > 0);
        next_turn();
        finish_rows(done, m, l);
        wgmma_wait<0>(o);
        store_o(done, l, used);
      }
    }
  }
}

template <class T, int d, bool softcap, bool alibi, bool sinks>
void run(const Problem &p) {
  const int heads = p.batch * p.heads;
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<T>(tensor, p.Q_strides, 1, heads, p.seqlen_q, d, tile_rows);
  };
  constexpr int Br = warpgroups<d> * 64;
  // As many heads as have 32 MB of K and V side by side: they stay in L2 (step 20).
  const std::int64_t kv_bytes = std::int64_t{p.seqlen_k} * d * 2 * sizeof(T);
  Order order{heads, (p.seqlen_q + Br - 1) / Br, 1, Br, p.seqlen_k, p.causal};
  if (p.causal) order.side = std::clamp<std::int64_t>((32 << 20) / kv_bytes, 1, heads);
  // With a scale of 0 a masked score would be -inf * 0 = NaN. No score shows 1e-20 of itself.
  Scores scores{std::max(log2_e * p.scale, 1e-20f), 0, p.slopes, p.sink_logits, p.heads};
  if (softcap) scores.scale_log2 = log2_e * p.softcap, scores.to_cap = p.scale / p.softcap;
  const auto kernel = attention<T, d, softcap, alibi, sinks>;
  const int blocks =
      std::min(heads * order.row_tiles, resident_blocks<SharedStorage<T, d>>(kernel, threads<d>));
  launch<SharedStorage<T, d>>(kernel, dim3(blocks), dim3(threads<d>), map(p.Q, 64), map(p.K, Bc),
                              map(p.V, Bc), map(p.O, 64), order,
                              static_cast<unsigned *>(p.workspace), p.lse, scores);
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
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = Bc,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes = [](const Problem &) { return sizeof(unsigned); },
    .writes_lse = true,
});
