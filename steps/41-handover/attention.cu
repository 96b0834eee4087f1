// Step 41: FP8. Q, K and V in e4m3, with a scale for each head; the tensor cores multiply twice as fast.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type fp8
// Before      step 39: the products of 128 x 128 scores at head dim 128 take 2048 clocks of an SM.
// Bottleneck  The tensor cores, at half of what they can do, with 16-bit operands.
// Change      wgmma of e4m3. It wants V with its keys side by side: a kernel before transposes it, and orders
//             the keys as a thread has its scores, so that P goes on in registers. The scales of Q and K
//             join the scores' factor, that of V joins 1 / l. Three warpgroups, each doing one thing at a time.
// Prediction  Products and exponentials take 1024 clocks each: 1.3 to 1.5 times step 39 at 8192.
#include <algorithm>

#include "common/kernel/heads.h"
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"

namespace {

constexpr int consumers = 3;        // warpgroups that compute, with 64 rows of Q each
constexpr int Br = consumers * 64;  // rows of Q in a tile
constexpr int Bc = 128;             // rows of K and V in a tile
constexpr int d = 128;              // a row fills the 128 bytes of a swizzle atom
constexpr int stages = 3;           // of K and of V
constexpr int before_v = 128;       // bytes of the workspace before V^T: the counter's
constexpr float rise = 4;           // P's largest is 2^4 to 2^8; e4m3 ends at 448
// The named barriers, one for each warpgroup; 0 is that of __syncthreads.
constexpr int first_free = 1, first_stored = first_free + consumers;

struct SharedStorage {
  Ring<TmaTile<64, d, e4m3>, 2> Q[consumers];
  Ring<TmaTile<Bc, d, e4m3>, stages> K;
  Ring<TmaTile<d, Bc, e4m3>, stages> V;  // transposed
  TmaTile<64, d, bf16> O[consumers];     // twice as large as Q
  Tile<int, 1, 2> tile;                  // which one Q is of
  Tile<float, 2, 2> scale;               // of its scores, for exponents of 2; and of V
};

/// The tiles of Q in the order in which they begin: of `side` heads, which share L2, the last rows, which
/// see the most keys, then the rows before them; then of the next heads.
struct Order {
  int heads, all_heads, row_tiles, side;  // all_heads: of the whole batch
  int Br, seqlen;                         // Br: rows of a tile
  bool causal;

  __device__ int tiles() const { return all_heads * row_tiles; }
};
struct Place {
  int row, head, b, key_tiles;
  __device__ Place(int tile, const Order &order) {
    const int section = tile / (order.side * order.row_tiles) * order.side;  // its first head
    const int here = min(order.side, order.all_heads - section);
    const int in_section = tile - section * order.row_tiles;
    row = (order.row_tiles - 1 - in_section / here) * order.Br;
    head = (section + in_section % here) % order.heads;
    b = (section + in_section % here) / order.heads;
    key_tiles = ((order.causal ? min(row + order.Br, order.seqlen) : order.seqlen) + Bc - 1) / Bc;
  }
};

/// The next tile that no block has drawn; the first are the blocks' own. The counter holds 0, or `tiles`
/// or more. A launch draws as many numbers as there are tiles, 0 first, and leaves a 0.
__device__ __forceinline__ int draw_tile(unsigned *counter, int tiles) {
  const unsigned drawn = atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), tiles - 1);
  return gridDim.x + (drawn - 1 < unsigned(tiles - 1) ? tiles - drawn : 0);
}

/// Of 16 keys, the one whose values come at this place in V^T: a thread has the scores of keys 2t
/// and 2t + 1, and 8 further on, and as A of P V the tensor cores take them for columns 4t to 4t + 3.
__device__ constexpr int key_at(int place) {
  return place / 4 * 2 + place % 4 / 2 * 8 + place % 2;
}

/// V^T, tile by tile: d rows of Bc keys in the order of key_at. A thread turns 16 keys of 4 columns: of V 8
/// threads share a sector of 32 bytes, of V^T 2.
__global__ void __launch_bounds__(Bc / 16 * 32)
    transpose(const void *V, Strides strides, e4m3 *V_transposed, int heads, int seqlen) {
  griddepcontrol_launch_dependents();  // tiles of Q may load and wait meanwhile
  const int b = blockIdx.y / heads, head = blockIdx.y % heads, thread = threadIdx.x;
  const auto v = head_of<const e4m3, d>(V, strides, b, head, 0, seqlen);
  const int col = (thread % 8 + thread / 16 % 4 * 8) * 4;
  const int group = thread / 64 * 2 + thread / 8 % 2, key = blockIdx.x * Bc + group * 16;
  Vector<e4m3, 16> keys[4];  // of each column
#pragma unroll
  for (int place = 0; place < 16; place++) {
    const Vector<e4m3, 4> row = load<4>(v(key + key_at(place), col));
    for (int i = 0; i < 4; i++) keys[i][place] = row[i];
  }
  const std::int64_t first = (std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * d * Bc;
  const Matrix<e4m3> out{V_transposed + first, d, Bc};
  for (int i = 0; i < 4; i++) store(out(col + i, group * 16), keys[i]);
}

__global__ void __launch_bounds__((consumers + 1) * 128, 1)
    attention(const __grid_constant__ TensorMap map_Q, const __grid_constant__ TensorMap map_K,
              const __grid_constant__ TensorMap map_V, const __grid_constant__ TensorMap map_O,
              HeadScales scales, Order order, unsigned *counter) {
  auto &smem = shared_storage<SharedStorage>();
  const int warpgroup = warp_index() / 4;
  if (threadIdx.x == 0) {
    for (auto &Q : smem.Q)
      ring_init(Q, 4);  // a lane of each warp that computes says that it is empty
    ring_init(smem.K, consumers * 4);
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are there for all threads
  const int tiles = order.tiles();
  RingPosition<2> q;
  RingPosition<stages> k, v;
  if (warpgroup == consumers) {
    setmaxnreg_dec<32>();
    if (threadIdx.x == consumers * 128) {
      // After the last tile, Q is that of the last tile again: with it the consumers hear of the end.
      const auto load_q = [&](const Place &at, int tile) {
        for (int i = 0; i < consumers; i++) mbarrier_wait(smem.Q[i].empty[q.stage], q.parity ^ 1);
        const int head = at.b * order.heads + at.head;
        smem.tile(0, q.stage) = tile;  // told with Q
        smem.scale(0, q.stage) =
            of_head(scales.Q, head) * of_head(scales.K, head) * (log2_e / sqrtf(d));
        smem.scale(1, q.stage) = of_head(scales.V, head);
        for (int i = 0; i < consumers; i++) {
          RingPosition<2> same = q;
          ring_load(smem.Q[i], same, map_Q, at.row + i * 64, at.head, at.b);
        }
        q.next();
      };
      int tile = blockIdx.x;
      Place at(tile, order);
      load_q(at, tile);
      griddepcontrol_wait();  // V^T is there
      while (tile < tiles) {
        for (int j = at.key_tiles - 1; j >= 0; j--) {
          ring_load(smem.K, k, map_K, j * Bc, at.head, at.b);
          ring_load(smem.V, v, map_V, j * d, at.head, at.b);
        }
        tile = draw_tile(counter, tiles);
        at = Place(min(tile, tiles - 1), order);
        load_q(at, tile);
      }
    }
  } else {
    setmaxnreg_inc<160>();
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
        wgmma<e4m3>(s, k_major(Q.tile[q.stage], 0, col), k_major(smem.K.tile[k.stage], 0, col),
                    col > 0);
      wgmma_commit();
    };
    const auto start_pv = [&](bool add) {
      mbarrier_wait(smem.V.full[v.stage], v.parity);
      wgmma_fence();
#pragma unroll
      for (int key = 0; key < Bc; key += 32)
        wgmma<e4m3>(o, p[key / 32], k_major(smem.V.tile[v.stage], 0, key), add || key > 0);
      wgmma_commit();
    };
    // P, rounded. As key_at has the keys, neighbours of 4 blocks of 8 columns are A of one product.
    const auto to_fragments = [&] {
      const auto pair = [&](int i) { return cvt_rn_e4m3x2(s(i), s(i + 1)); };
      const auto pairs = [&](int i) { return pack_here(pair(i), pair(i + 4)); };
#pragma unroll
      for (int i = 0; i < s.size; i += 16)
        p[i / 16] = {pairs(i), pairs(i + 2), pairs(i + 8), pairs(i + 10)};
    };
    const auto pass = [](auto &ring, auto &position) {
      mbarrier_wait(ring.full[position.stage], position.parity);
      __syncwarp();  // all lanes have seen it full before the tile may be another
      ring_release(ring, position);
    };
    const auto wait_for_q = [&] {
      mbarrier_wait(Q.full[q.stage], q.parity);
      return uniform(smem.tile(0, q.stage));
    };
    int tile = wait_for_q();
    while (tile < tiles) {
      const Place at(tile, order);
      const float scale_log2 = smem.scale(0, q.stage), V_scale = smem.scale(1, q.stage);
      const int first_row = at.row + warpgroup * 64, row = first_row + warp_index() % 4 * 16;
      float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
      const auto mask_keys = [&](int j) {  // scores of the tile j of keys
        const int lane = threadIdx.x % 32, key = j * Bc, last = row + lane / 4 - lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < s.size; i++)
          if (key + i / 4 * 8 + i % 2 > last + i / 2 % 2 * 8) s(i) = -INFINITY;
      };
      // Of the tiles of keys those that these 64 rows see: none, and no row to store, behind the last.
      const int keys = order.causal ? first_row + 64 : order.seqlen;
      const int own_tiles = first_row < order.seqlen ? (keys + Bc - 1) / Bc : 0;
      for (int j = at.key_tiles; j > own_tiles; j--) {
        pass(smem.K, k);
        pass(smem.V, v);
      }
      for (int j = own_tiles - 1; j >= 0; j--) {
        start_qk();
        wgmma_wait<0>(s);
        ring_release(smem.K, k);
        if (order.causal && j == own_tiles - 1) mask_keys(j);
        const bool must_rescale = softmax(s, m, l, alpha, scale_log2, rise);
        to_fragments();
        if (must_rescale && j < own_tiles - 1) rescale(o, alpha);
        start_pv(j < own_tiles - 1);
        wgmma_wait<0>(o);
        ring_release(smem.V, v);
      }

      named_barrier_sync(first_free + warpgroup, 128);  // O's place is free, what came with Q read
      ring_release(Q, q);
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
        l[r] = V_scale / l[r];
      }
      const int lane = threadIdx.x % 32, O_row = warp_index() % 4 * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < o.size; i += 8)
        stmatrix_x4(O(O_row, i * 2 + lane / 16 * 8),
                    {cvt_rn_x2<bf16>(o(i) * l[0], o(i + 1) * l[0]),
                     cvt_rn_x2<bf16>(o(i + 2) * l[1], o(i + 3) * l[1]),
                     cvt_rn_x2<bf16>(o(i + 4) * l[0], o(i + 5) * l[0]),
                     cvt_rn_x2<bf16>(o(i + 6) * l[1], o(i + 7) * l[1])});
      fence_proxy_async();
      named_barrier_sync(first_stored + warpgroup, 128);  // all of O is there, for the copy engine
      if (threadIdx.x % 128 == 0) {
        if (first_row < order.seqlen) tma_store(map_O, first_row, at.head, at.b, O);
        tma_store_commit();
      }
      tile = wait_for_q();
      if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // O may be written again
    }
  }
}

std::size_t transposed_bytes(const Problem &p) {
  return std::size_t(p.seqlen_k) * d;
}

void run(const Problem &p) {
  const auto counter = static_cast<unsigned *>(p.workspace);
  const auto V_transposed = static_cast<e4m3 *>(p.workspace) + before_v;
  const std::int64_t v_bytes = transposed_bytes(p);
  launch<void>(transpose, dim3(p.seqlen_k / Bc, p.batch * p.heads), dim3(Bc / 16 * 32), p.V,
               p.V_strides, V_transposed, p.heads, p.seqlen_k);
  // As many heads as have 32 MB of K and V side by side: they stay in L2 (step 20).
  const std::int64_t kv_bytes = std::int64_t{p.seqlen_k} * d + v_bytes;
  Order order{p.heads, p.heads * p.batch, (p.seqlen_q + Br - 1) / Br, 1, Br, p.seqlen_k, p.causal};
  if (p.causal) order.side = std::clamp<std::int64_t>((32 << 20) / kv_bytes, 1, order.all_heads);
  constexpr int threads = (consumers + 1) * 128;
  const int blocks = std::min(order.all_heads * order.row_tiles,
                              resident_blocks<SharedStorage>(attention, threads));
  launch_beside<SharedStorage>(
      attention, dim3(blocks), dim3(threads),
      tensor_map<e4m3>(p.Q, p.Q_strides, p.batch, p.heads, p.seqlen_q, d, 64),
      tensor_map<e4m3>(p.K, p.K_strides, p.batch, p.heads, p.seqlen_k, d, Bc),
      tensor_map<e4m3>(V_transposed, {v_bytes * p.heads, v_bytes, Bc}, p.batch, p.heads,
                       p.seqlen_k / Bc * d, Bc, d),
      tensor_map<bf16>(p.O, p.O_strides, p.batch, p.heads, p.seqlen_q, d, 64), p.scales, order,
      counter);
}

}  // namespace

EXPORT_STEP({
    .tile = 128,
    .default_batch = 16,
    .launch = run,
    .workspace_bytes =
        [](const Problem &p) { return before_v + transposed_bytes(p) * p.heads * p.batch; },
    .head_dims = {d},
});
