// SPDX-License-Identifier: MIT
// Attention between some queries and some keys of a sequence: step 39's kernel for the steps of Part VII, where
// each GPU has a part of both. Beside step 39 it knows at which positions the two parts begin, takes any number of
// rows and grouped heads, and stores O either as T, or in fp32 with the logarithm of the row's sum. A step can also load
// and store the state of the rows by functions of its own (step 75).
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"

namespace hopper_attention {

template <int d>
constexpr int warpgroups = d == 64 ? 3 : 2;  // that compute, with 64 rows of Q each
constexpr int Bc = 128;                      // rows of K and V in a tile
constexpr int stages = 2;                    // of K and of V: one is filled while the other is read
// The last warpgroup of a block is the producer.
template <int d>
constexpr int threads = (warpgroups<d> + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
template <int d>
constexpr int consumer_registers = warpgroups<d> == 3 ? 160 : 232;
template <int d>
constexpr int producer_registers = warpgroups<d> == 3 ? 32 : 40;

/// A launch: these rows of Q with these rows of K and V, [batch, rows, heads or kv_heads, d] each.
struct Piece {
  const void *Q, *K, *V;
  Strides Q_strides, K_strides;  // V has K's, O has Q's
  int batch, heads, kv_heads, rows_q, rows_k;
  int first_q = 0, first_k = 0;  // the positions of their first rows in the sequence
  bool causal;
  void *O = nullptr;           // [batch, rows_q, heads, d] of T; or null, and then
  float *O_partial = nullptr;  // the same in fp32, and log2 of the sum of 2^score of each row:
  float *lse = nullptr;        // [batch * heads, lse_rows]
  int lse_rows = 0;
  unsigned *counter;  // holds 0, or as many as there are tiles, or more
  int leave_sms;      // multiprocessors without a block of this launch
  void *stream;
};

/// What becomes of O. Out is T; or float, for O_partial and lse; or a step's own struct of a row's state. The struct has
/// `begun`, whether there is a state to load, and `end`: the rows before it are complete and are stored as T. (The others of
/// their tile are too, until a later launch overwrites them.) Its functions load and store have a lane's two rows.
template <class T, class Out>
constexpr bool has_state = !std::is_same_v<Out, T> && !std::is_same_v<Out, float>;
template <class T, class Out>
using Target = std::conditional_t<has_state<T, Out>, Out, float *>;

template <class T, int d>
struct SharedStorage {
  Ring<TmaTile<64, d, T>, stages> Q[warpgroups<d>];
  Ring<TmaTile<Bc, d, T>, stages> K, V;
  Tile<int, 1, stages> tile;  // which one Q is of
};

/// The tiles of Q in the order in which they begin: of `side` heads, which share L2, the last rows, which
/// see the most keys, then the rows before them; then of the next heads.
struct Order {
  int all_heads, row_tiles, side;  // all_heads: of the whole batch
  int Br, rows_q, rows_k;          // Br: rows of a tile
  int query_0_sees;                // query i sees the keys before i + query_0_sees
  int heads, kv_heads;
  int lse_rows;
};
struct Place {
  int row, head, kv_head, batch, key_tiles;
  __device__ Place(int tile, const Order &order) {
    const int section = tile / (order.side * order.row_tiles) * order.side;  // its first head
    const int here = min(order.side, order.all_heads - section);
    const int in_section = tile - section * order.row_tiles;
    row = (order.row_tiles - 1 - in_section / here) * order.Br;
    const int any_head = section + in_section % here;
    head = any_head % order.heads;
    batch = any_head / order.heads;
    kv_head = head / (order.heads / order.kv_heads);
    const int last_sees = min(row + order.Br, order.rows_q) - 1 + order.query_0_sees;
    key_tiles = (min(last_sees, order.rows_k) + Bc - 1) / Bc;
  }
};

/// The next tile that no block has drawn; the first are the blocks' own. The counter holds 0, or `tiles`
/// or more. A launch draws as many numbers as there are tiles, 0 first, and leaves a 0.
__device__ __forceinline__ int draw_tile(unsigned *counter, int tiles) {
  const unsigned drawn = atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), tiles - 1);
  return gridDim.x + (drawn - 1 < unsigned(tiles - 1) ? tiles - drawn : 0);
}

template <class T, int d, class Out>
__global__ void __launch_bounds__(threads<d>, 1)        // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch, heads, rows_q, d]
              const __grid_constant__ TensorMap map_K,  // [batch, kv_heads, rows_k, d], as V
              const __grid_constant__ TensorMap map_V,
              const __grid_constant__ TensorMap map_O,  // as Q, where Out is not float
              Target<T, Out> out, float *lse, Strides O_strides, Order order, unsigned *counter,
              float scale_log2) {
  constexpr int consumers = warpgroups<d>;
  constexpr bool partial = std::is_same_v<Out, float>, stateful = has_state<T, Out>;
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
  const int tiles = order.all_heads * order.row_tiles;
  RingPosition<stages> q, k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers<d>>();
    if (threadIdx.x == consumers * 128) {
      // The consumers need each V after the K behind it, which may be the next tile's.
      const auto tell = [&](int tile) {  // it becomes visible when the phase of `full` ends
        for (auto &Q : smem.Q) mbarrier_wait(Q.empty[q.stage], q.parity ^ 1);
        smem.tile(0, q.stage) = tile;
      };
      int head_before = 0, batch_before = 0;
      for (int tile = blockIdx.x; tile < tiles; tile = draw_tile(counter, tiles)) {
        tell(tile);
        const Place at(tile, order);
        for (int i = 0; i < consumers; i++) {
          RingPosition<stages> same = q;
          ring_load(smem.Q[i], same, map_Q, at.row + i * 64, at.head, at.batch);
        }
        q.next();
        ring_load(smem.K, k, map_K, (at.key_tiles - 1) * Bc, at.kv_head, at.batch);
        if (tile != int(blockIdx.x)) ring_load(smem.V, v, map_V, 0, head_before, batch_before);
        for (int j = at.key_tiles - 1; j > 0; j--) {
          ring_load(smem.K, k, map_K, (j - 1) * Bc, at.kv_head, at.batch);
          ring_load(smem.V, v, map_V, j * Bc, at.kv_head, at.batch);
        }
        head_before = at.kv_head, batch_before = at.batch;
      }
      tell(tiles);  // the end: no Q comes with it
      for (auto &Q : smem.Q) mbarrier_arrive(Q.full[q.stage]);
      ring_load(smem.V, v, map_V, 0, head_before, batch_before);
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

    const int row_in_group =
        warp % 4 * 16 + lane / 4;  // of the lane's two rows the first; of o, too
    // l becomes 1 / l; four lanes share a row. Of a partial result m becomes the logarithm of the row's sum.
    const auto invert = [](float(&l)[2], float(&m)[2]) {
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
        if (partial) m[r] += log2f(l[r]);
        if (!stateful) l[r] = 1 / l[r];
      }
    };
    const auto store_o = [&](const Place &at, float(&l)[2], const float(&m)[2], int stage) {
      const int first_row = at.row + warpgroup * 64;
      if constexpr (partial) {
        const StridedMatrix<float> gO{out + (at.batch * O_strides.batch + at.head * O_strides.head),
                                      order.rows_q, d, O_strides.row};
        const std::int64_t any_head = at.batch * order.heads + at.head;
        const Matrix<float> gLse{lse + any_head * order.lse_rows, order.rows_q, 1};
        for (int r = 0; r < 2; r++) {
          const int row = first_row + row_in_group + 8 * r;
          if (row >= order.rows_q) continue;
          if (lane % 4 == 0) gLse(row, 0) = m[r];
#pragma unroll
          for (int i = 0; i < o.size; i += 4)
            store<2>(gO(row, i * 2 + lane % 4 * 2),
                     Vector<float, 2>{o(i + 2 * r) * l[r], o(i + 2 * r + 1) * l[r]});
        }
      }
      bool as_T = !partial;  // whether this warpgroup has a row that is stored as T
      if constexpr (stateful) {
        out.store(at, first_row + row_in_group, o, m, l);
        as_T = first_row < out.end;
        for (float &sum : l) sum = 1 / sum;
      }
      if (!as_T) {
        // All four warps waited for their last product with Q before this warpgroup's last turn, a barrier.
        if (threadIdx.x % 128 == 0) mbarrier_arrive(Q.empty[stage]);
        return;
      }
      if constexpr (!partial) {
        // Q's place becomes O's: a warp writes 16 rows, which only its own products have read.
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
          tma_store(map_O, first_row, at.head, at.batch, Q.tile[stage]);
          tma_store_commit();
          tma_store_wait_read<0>();
          mbarrier_arrive(Q.empty[stage]);
        }
      }
    };

    const auto wait_for_q = [&] {
      mbarrier_wait(Q.full[q.stage], q.parity);
      return uniform(smem.tile(0, q.stage));
    };
    int tile = wait_for_q();
    my_turn();
    start_qk();
    next_turn();
    wgmma_wait<0>(s);
    while (tile < tiles) {
      const Place at(tile, order);
      float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
      ring_release(smem.K, k);
      const int first_row = at.row + warpgroup * 64;
      const int all_see = min(order.rows_k, first_row + order.query_0_sees);  // of the 64 rows
      bool begun = false;  // o has something already
      if constexpr (stateful) {
        begun = out.begun;
        if (begun) out.load(at, first_row + row_in_group, o, m, l);
      }
      const auto mask_keys = [&](int j) {  // scores of the tile j of keys
        if ((j + 1) * Bc <= all_see) return;
        const int row_sees = first_row + row_in_group + order.query_0_sees;
        const int key = j * Bc + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < s.size; i++)
          if (key + i / 4 * 8 + i % 2 >= min(order.rows_k, row_sees + i / 2 % 2 * 8))
            s(i) = -INFINITY;
      };
      mask_keys(at.key_tiles - 1);
      if (softmax(s, m, l, alpha, scale_log2) && begun) rescale(o, alpha);
      to_fragments<T>(p, s);

      for (int j = at.key_tiles - 1; j > 0; j--) {
        my_turn();
        start_qk();
        start_pv(begun || j < at.key_tiles - 1);  // of the tile before
        next_turn();
        wgmma_wait<1>(s);
        ring_release(smem.K, k);
        mask_keys(j - 1);  // the diagonal may cross two tiles, or three
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
        start_pv(begun || at.key_tiles > 1);
        start_qk();  // of the next tile
        next_turn();
        invert(l, m);
        wgmma_wait<1>(o);
        ring_release(smem.V, v);
        store_o(at, l, m, used);
        wgmma_wait<0>(s);
      } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
        my_turn();
        start_pv(begun || at.key_tiles > 1);
        next_turn();
        invert(l, m);
        wgmma_wait<0>(o);
        store_o(at, l, m, used);
      }
    }
  }
}

/// Queues the launch. Every row must see a key.
template <class T, int d, class Out>
void launch(const Piece &p, const Target<T, Out> &out) {
  const auto map = [&](const void *tensor, const Strides &strides, int heads, int rows,
                       int tile_rows) {
    return tensor_map<T>(tensor, strides, p.batch, heads, rows, d, tile_rows);
  };
  const auto kernel = attention<T, d, Out>;
  constexpr int Br = warpgroups<d> * 64;
  Order order{p.batch * p.heads,
              (p.rows_q + Br - 1) / Br,
              1,
              Br,
              p.rows_q,
              p.rows_k,
              p.causal ? p.first_q - p.first_k + 1 : p.rows_k,
              p.heads,
              p.kv_heads,
              p.lse_rows};
  // As many heads as have 32 MB of K and V side by side: they stay in L2 (step 20).
  const std::int64_t kv_bytes = std::int64_t{p.rows_k} * d * 2 * sizeof(T);
  if (p.causal) order.side = std::clamp<std::int64_t>((32 << 20) / kv_bytes, 1, order.all_heads);
  const int sms = resident_blocks<SharedStorage<T, d>>(kernel, threads<d>) - p.leave_sms;
  const int blocks = std::min(order.all_heads * order.row_tiles, std::max(1, sms));
  launch_on<SharedStorage<T, d>>(p.stream, kernel, dim3(blocks), dim3(threads<d>),
                                 map(p.Q, p.Q_strides, p.heads, p.rows_q, 64),
                                 map(p.K, p.K_strides, p.kv_heads, p.rows_k, Bc),
                                 map(p.V, p.K_strides, p.kv_heads, p.rows_k, Bc),
                                 map(p.O ? p.O : p.Q, p.Q_strides, p.heads, p.rows_q, 64), out,
                                 p.lse, p.Q_strides, order, p.counter, log2_e / sqrtf(d));
}

/// The same for any type and head dim, where O is T or float. (A template, so that only a step that calls it compiles
/// these kernels.)
template <class = void>
static void launch(Type type, int d, const Piece &p) {
  const auto of_type = [&]<class T>(T) {
    if (p.O)
      d == 64 ? launch<T, 64, T>(p, nullptr) : launch<T, 128, T>(p, nullptr);
    else
      d == 64 ? launch<T, 64, float>(p, p.O_partial) : launch<T, 128, float>(p, p.O_partial);
  };
  type == Type::kBf16 ? of_type(bf16{}) : of_type(half{});
}

}  // namespace hopper_attention
