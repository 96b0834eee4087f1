// Step 40: FP8. Q, K and V in e4m3, with a scale for each head; the tensor cores multiply twice as fast.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type fp8
// Before      step 39: the products of 128 x 128 scores at head dim 128 take 2048 clocks of an SM.
// Bottleneck  The tensor cores, at half of what they can do, with 16-bit operands.
// Change      wgmma of e4m3. It needs V with its keys side by side: a kernel before transposes V, and orders
//             the keys as a thread has its scores, so that P stays in registers. The scales of Q and K join
//             the scores' factor, that of V joins 1 / l. O has twice Q's bytes and gets a place of its own.
// Prediction  Products take 1024 clocks, as many as the exponentials: 1.3 to 1.5 times step 39 at 8192.
#include "common/kernel/draw.h"
#include "common/kernel/heads.h"
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"
#include "common/kernel/tile_order.h"

namespace {

using T = e4m3;
constexpr int d = 128;              // a row fills the 128 bytes of a swizzle atom
constexpr int consumers = 2;        // warpgroups that compute, with 64 rows of Q each
constexpr int Br = consumers * 64;  // rows of Q in a tile
constexpr int Bc = 128;             // rows of K and V in a tile
constexpr int stages = 4;           // of K and of V: as many bytes as two of 16-bit numbers
constexpr int before_v = 128;       // bytes of the workspace before V^T: the counter's
constexpr float rise = 4;           // P's largest is 2^4 to 2^8; e4m3 ends at 448
// The last warpgroup of a block is the producer.
constexpr int threads = (consumers + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
constexpr int consumer_registers = 232, producer_registers = 40;
static_assert(128 * (consumers * consumer_registers + producer_registers) <= 65536);

struct SharedStorage {
  Ring<TmaTile<64, d, T>, 2> Q[consumers];
  Ring<TmaTile<Bc, d, T>, stages> K;
  Ring<TmaTile<d, Bc, T>, stages> V;  // transposed
  TmaTile<64, d, bf16> O[consumers];  // twice as large as Q
  Tile<int, 1, 2> tile;               // the tile that each stage of Q is of
  Tile<float, 2, 2> scale;            // row 0: of the scores, for exponents of 2; row 1: of V
};

using Place = PlaceInOrder<Bc>;

/// Returns which of 16 keys stands at this place in V^T. A thread has the scores of keys 2t and 2t + 1,
/// and of those 8 further on; the tensor cores read them, as A of P V, as columns 4t to 4t + 3.
__device__ constexpr int key_at(int place) {
  return place / 4 * 2 + place % 4 / 2 * 8 + place % 2;
}

/// Writes V^T tile by tile: d rows of Bc keys in the order of key_at. A thread transposes 16 keys of 4
/// columns. 8 threads share a sector of 32 bytes of V, and 2 share one of V^T.
__global__ void __launch_bounds__(Bc / 16 * 32)
    transpose(const void *V, Strides strides, T *V_transposed, int heads, int seqlen) {
  const int b = blockIdx.y / heads, head = blockIdx.y % heads, thread = threadIdx.x;
  const auto v = head_of<const T, d>(V, strides, b, head, 0, seqlen);
  const int col = (thread % 8 + thread / 16 % 4 * 8) * 4;
  const int group = thread / 64 * 2 + thread / 8 % 2, key = blockIdx.x * Bc + group * 16;
  Vector<T, 16> keys[4];  // of each column
#pragma unroll
  for (int place = 0; place < 16; place++) {
    const Vector<T, 4> row = load<4>(v(key + key_at(place), col));
    for (int i = 0; i < 4; i++) keys[i][place] = row[i];
  }
  const std::int64_t first = (std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * d * Bc;
  const Matrix<T> out{V_transposed + first, d, Bc};
  for (int i = 0; i < 4; i++) store(out(col + i, group * 16), keys[i]);
}

__global__ void __launch_bounds__(threads, 1)           // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              const __grid_constant__ TensorMap map_O, HeadScales scales, Order order,
              unsigned *counter) {
  // The named barriers, one for each warpgroup; 0 is that of __syncthreads.
  constexpr int first_turn = 1, first_stored = first_turn + consumers;
  auto &smem = shared_storage<SharedStorage>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (auto &Q : smem.Q) ring_init(Q, 4);  // the warps that compute
    ring_init(smem.K, consumers * 4);
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised
  const int tiles = order.heads * order.row_tiles;
  RingPosition<2> q;
  RingPosition<stages> k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x == consumers * 128) {
      // The consumers need each V after the K behind it, which may be the next tile's.
      const auto tell = [&](int tile, int head) {  // visible when the phase of `full` ends
        for (auto &Q : smem.Q) mbarrier_wait(Q.empty[q.stage], q.parity ^ 1);
        smem.tile(0, q.stage) = tile;
        smem.scale(0, q.stage) =
            of_head(scales.Q, head) * of_head(scales.K, head) * (log2_e / sqrtf(d));
        smem.scale(1, q.stage) = of_head(scales.V, head);
      };
      int head_before = 0;
      for (int tile = blockIdx.x; tile < tiles; tile = draw_tile(counter, tiles)) {
        const Place at(tile, order);
        tell(tile, at.head);
        for (int i = 0; i < consumers; i++) {
          RingPosition<2> same = q;
          ring_load(smem.Q[i], same, map_Q, at.row + i * 64, at.head, 0);
        }
        q.next();
        ring_load(smem.K, k, map_K, (at.key_tiles - 1) * Bc, at.head, 0);
        if (tile != int(blockIdx.x)) ring_load(smem.V, v, map_V, 0, head_before, 0);
        for (int j = at.key_tiles - 1; j > 0; j--) {
          ring_load(smem.K, k, map_K, (j - 1) * Bc, at.head, 0);
          ring_load(smem.V, v, map_V, j * d, at.head, 0);
        }
        head_before = at.head;
      }
      tell(tiles, head_before);  // the end: no Q comes with it
      for (auto &Q : smem.Q) mbarrier_arrive(Q.full[q.stage]);
      ring_load(smem.V, v, map_V, 0, head_before, 0);
    }
  } else {
    setmaxnreg_inc<consumer_registers>();
    auto &Q = smem.Q[warpgroup];
    auto &O = smem.O[warpgroup];
    Accumulator<Bc> s;
    Accumulator<d> o;
    FragmentA p[Bc / 32];
    const auto start_qk = [&] {
      mbarrier_wait(smem.K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 32)
        wgmma<T>(s, k_major(Q.tile[q.stage], 0, col), k_major(smem.K.tile[k.stage], 0, col),
                 col > 0);
      wgmma_commit();
    };
    const auto start_pv = [&](bool add) {
      mbarrier_wait(smem.V.full[v.stage], v.parity);
      wgmma_fence();
#pragma unroll
      for (int key = 0; key < Bc; key += 32)
        wgmma<T>(o, p[key / 32], k_major(smem.V.tile[v.stage], 0, key), add || key > 0);
      wgmma_commit();
    };
    // Rounds P. In key_at's order of keys, a lane's pairs of 4 blocks of 8 columns are A of a product.
    const auto to_fragments = [&] {
      const auto pair = [&](int i) { return cvt_rn_e4m3x2(s(i), s(i + 1)); };
      const auto pairs = [&](int i) { return pack_here(pair(i), pair(i + 4)); };
#pragma unroll
      for (int i = 0; i < s.size; i += 16)
        p[i / 16] = {pairs(i), pairs(i + 2), pairs(i + 8), pairs(i + 10)};
    };
    // Ping-pong (step 34): a warpgroup's products start when those of the one before have been started.
    const auto my_turn = [&] { named_barrier_sync(first_turn + warpgroup, 2 * 128); };
    const auto next_turn = [&] {
      named_barrier_arrive(first_turn + (warpgroup + 1) % consumers, 2 * 128);
    };
    if (warpgroup == consumers - 1) next_turn();

    const auto invert = [](float(&l)[2], float V_scale) {  // l becomes V_scale / l
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
        l[r] = V_scale / l[r];
      }
    };
    const auto store_o = [&](const Place &at, const float(&l)[2]) {
      const int row = warp % 4 * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < o.size; i += 8)
        stmatrix_x4(O(row, i * 2 + lane / 16 * 8),
                    {cvt_rn_x2<bf16>(o(i) * l[0], o(i + 1) * l[0]),
                     cvt_rn_x2<bf16>(o(i + 2) * l[1], o(i + 3) * l[1]),
                     cvt_rn_x2<bf16>(o(i + 4) * l[0], o(i + 5) * l[0]),
                     cvt_rn_x2<bf16>(o(i + 6) * l[1], o(i + 7) * l[1])});
      fence_proxy_async();
      named_barrier_sync(first_stored + warpgroup, 128);  // all four warps have written O
      if (threadIdx.x % 128 == 0) {
        tma_store(map_O, at.row + warpgroup * 64, at.head, 0, O);
        tma_store_commit();
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
      const float scale_log2 = smem.scale(0, q.stage), V_scale = smem.scale(1, q.stage);
      float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
      ring_release(smem.K, k);
      const int first_row = at.row + warpgroup * 64;
      const auto mask_keys = [&](int j) { mask_diagonal(s, first_row, j, warp, lane); };
      if (order.causal) mask_keys(at.key_tiles - 1);
      softmax(s, m, l, alpha, scale_log2, rise);
      to_fragments();

      for (int j = at.key_tiles - 1; j > 0; j--) {
        my_turn();
        start_qk();
        start_pv(j < at.key_tiles - 1);  // of the tile before
        next_turn();
        wgmma_wait<1>(s);
        ring_release(smem.K, k);
        const bool must_rescale = softmax(s, m, l, alpha, scale_log2, rise);
        wgmma_wait<0>(o);
        ring_release(smem.V, v);
        to_fragments();
        if (must_rescale) rescale(o, alpha);
      }

      RingPosition<2> used = q;
      q.next();
      tile = wait_for_q();
      if (tile < tiles) {
        my_turn();
        ring_release(Q, used);  // behind a barrier: all lanes have read what came with it
        start_pv(at.key_tiles > 1);
        start_qk();  // of the next tile
        next_turn();
        invert(l, V_scale);
        wgmma_wait<1>(o);
        ring_release(smem.V, v);
        store_o(at, l);
        wgmma_wait<0>(s);
      } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
        my_turn();
        start_pv(at.key_tiles > 1);
        next_turn();
        invert(l, V_scale);
        wgmma_wait<0>(o);
        store_o(at, l);
      }
      if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // O may be written again
    }
  }
}

void run(const Problem &p) {
  const int heads = p.batch * p.heads;
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<T>(tensor, p.Q_strides, 1, heads, p.seqlen_q, d, tile_rows);
  };
  const auto V_transposed = static_cast<T *>(p.workspace) + before_v;  // in rows of Bc = d, as K
  launch<void>(transpose, dim3(p.seqlen_k / Bc, heads), dim3(Bc / 16 * 32), p.V, p.V_strides,
               V_transposed, p.heads, p.seqlen_k);
  const Order order = order_of(p, Br, d * 2 * sizeof(T));
  const int blocks =
      std::min(heads * order.row_tiles, resident_blocks<SharedStorage>(attention, threads));
  launch<SharedStorage>(attention, dim3(blocks), dim3(threads), map(p.Q, 64), map(p.K, Bc),
                        map(V_transposed, Bc),
                        tensor_map<bf16>(p.O, p.O_strides, 1, heads, p.seqlen_q, d, 64), p.scales,
                        order, static_cast<unsigned *>(p.workspace));
}

}  // namespace

EXPORT_STEP({
    .tile = 128,
    .default_batch = 16,
    .launch = run,
    .workspace_bytes =
        [](const Problem &p) { return before_v + std::size_t(p.batch) * p.heads * p.seqlen_k * d; },
    .head_dims = {d},
});
