// Step 39: tiles from a counter. A block that is free draws its next tile of Q.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type
// Before      step 38: a block knows its tiles of Q beforehand, every 132nd.
// Bottleneck  With a causal mask tiles take 1 to 64 tiles of keys at 8192: the shares are unequal, and the
//             launch ends with the largest.
// Change      A block's producer draws the next tile from a counter in global memory and tells the
//             consumers its number with the tile's Q.
// Prediction  The blocks end within 0.5% of each other: 1.13 times step 38 at 1024, 1.01 times at 8192, and
//             no change without a mask.
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"
#include "common/kernel/tile_order.h"

namespace {

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

template <class T, int d>
struct SharedStorage {
  Ring<TmaTile<64, d, T>, stages> Q[warpgroups<d>];
  Ring<TmaTile<Bc, d, T>, stages> K, V;
  Tile<int, 1, stages> tile;  // the tile that each stage of Q is of
};

using Place = PlaceInOrder<Bc>;

/// Draws the next tile; the first gridDim.x tiles are not drawn. The counter must hold 0, or `tiles` or
/// more. A launch draws `tiles` numbers, and leaves a 0.
__device__ __forceinline__ int draw_tile(unsigned *counter, int tiles) {
  const unsigned drawn = atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), tiles - 1);
  return gridDim.x + (drawn - 1 < unsigned(tiles - 1) ? tiles - drawn : 0);
}

template <class T, int d>
__global__ void __launch_bounds__(threads<d>, 1)        // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              const __grid_constant__ TensorMap map_O, Order order, unsigned *counter,
              float scale_log2) {
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
  RingPosition<stages> q, k, v;

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
          RingPosition<stages> same = q;
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

    const auto invert = [](float(&l)[2]) {  // l becomes 1 / l; four lanes share a row
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
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
      const auto mask_keys = [&](int j) { mask_diagonal(s, first_row, j, warp, lane); };
      if (order.causal) mask_keys(at.key_tiles - 1);
      softmax(s, m, l, alpha, scale_log2);
      to_fragments<T>(p, s);

      for (int j = at.key_tiles - 1; j > 0; j--) {
        my_turn();
        start_qk();
        start_pv(j < at.key_tiles - 1);  // of the tile before
        next_turn();
        wgmma_wait<1>(s);
        ring_release(smem.K, k);
        // Three warpgroups' rows are more than a tile of keys: the diagonal may cross the last two.
        if (consumers == 3 && order.causal && j * Bc > first_row) mask_keys(j - 1);
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
        start_pv(at.key_tiles > 1);
        start_qk();  // of the next tile
        next_turn();
        invert(l);
        wgmma_wait<1>(o);
        ring_release(smem.V, v);
        store_o(at, l, used);
        wgmma_wait<0>(s);
      } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
        my_turn();
        start_pv(at.key_tiles > 1);
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
  const int heads = p.batch * p.heads;
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<T>(tensor, p.Q_strides, 1, heads, p.seqlen_q, d, tile_rows);
  };
  const Order order = order_of(p, warpgroups<d> * 64, d * 2 * sizeof(T));
  const int blocks = std::min(heads * order.row_tiles,
                              resident_blocks<SharedStorage<T, d>>(attention<T, d>, threads<d>));
  launch<SharedStorage<T, d>>(attention<T, d>, dim3(blocks), dim3(threads<d>), map(p.Q, 64),
                              map(p.K, Bc), map(p.V, Bc), map(p.O, 64), order,
                              static_cast<unsigned *>(p.workspace), log2_e / sqrtf(d));
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
