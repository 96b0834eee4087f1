// Step 39: FP8. Q, K and V in e4m3, with a scale for each head; the tensor cores multiply twice as fast.
//
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type fp8
// Before      step 38: the products of a tile, 128 x 128 at head dim 128, take 2048 clocks of an SM.
// Bottleneck  The tensor cores, of which 16-bit operands are half of what they can do.
// Change      wgmma of e4m3. It wants V with its keys side by side: a kernel before transposes it, and puts
//             the keys in the order in which a thread has its scores, so that P goes on in registers.
//             The scales of Q and K join the scores' factor, that of V joins 1 / l.
// Prediction  Products and exponentials take 1024 clocks each: 1.3 to 1.5 times step 38 at 8192.
#include <cfloat>

#include "common/kernel/heads.h"
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"
#include "common/kernel/tiles.h"

namespace {

constexpr int consumers = 3;                // warpgroups that compute, with 64 rows of Q each
constexpr int Br = consumers * 64;          // rows of Q in a tile
constexpr int Bc = 96;                      // rows of K and V in a tile
constexpr int Vc = (Bc + 127) / 128 * 128;  // columns of a tile of V^T: whole swizzle atoms
constexpr int d = 128;                      // a row fills the 128 bytes of a swizzle atom
constexpr int stages = 4;                   // of K and of V: as many bytes as two in fp16
constexpr int before_v = 128;               // bytes of the workspace before V^T: the counter's
constexpr float rise = 4;                   // P's largest is 2^4 to 2^8; e4m3 ends at 448

struct SharedStorage {
  Ring<TmaTile<64, d, e4m3>, 2> Q[consumers];
  Ring<TmaTile<Bc, d, e4m3>, stages> K;
  Ring<TmaTile<d, Vc, e4m3>, stages> V;  // transposed
  TmaTile<64, d, bf16> O[consumers];     // twice as large as Q
  Tile<int, 1, 2> tile;                  // which one Q is of
  Tile<float, 2, 2> scale;               // of its scores, for exponents of 2; and of V
};

/// Of 16 keys, the one whose values come at this place in V^T: of its scores a thread has those of keys 2t
/// and 2t + 1, and 8 further on, and as A of P V the tensor cores take them for columns 4t to 4t + 3.
__device__ constexpr int key_at(int place) {
  return place / 4 * 2 + place % 4 / 2 * 8 + place % 2;
}

/// V^T, tile by tile: d rows of Bc keys in the order of key_at, zeros from seqlen on. A thread turns 16 keys
/// of 4 columns; 8 threads share a sector of 32 bytes of V, as many a sector of V^T.
__global__ void __launch_bounds__(Bc / 16 * 32)
    transpose(const void *V, Strides strides, e4m3 *V_transposed, int heads, int seqlen) {
  const int b = blockIdx.y / heads, head = blockIdx.y % heads, thread = threadIdx.x;
  const auto v = head_of<const e4m3, d>(V, strides, b, head, 0, seqlen);
  const int col = (thread % 8 + thread / 16 % 4 * 8) * 4;
  const int group = thread / 64 * 2 + thread / 8 % 2, key = blockIdx.x * Bc + group * 16;
  Vector<e4m3, 16> keys[4] = {};  // of each column
  if (key < seqlen) {
#pragma unroll
    for (int place = 0; place < 16; place++) {
      const Vector<e4m3, 4> row = load<4>(v(key + key_at(place), col));
      for (int i = 0; i < 4; i++) keys[i][place] = row[i];
    }
  }
  const std::int64_t first = (std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * d * Vc;
  const Matrix<e4m3> out{V_transposed + first, d, Vc};
  for (int i = 0; i < 4; i++) store(out(col + i, group * 16), keys[i]);
}

using Place = PlaceOf<Bc>;

__global__ void __launch_bounds__((consumers + 1) * 128, 1)
    attention(const __grid_constant__ TensorMap map_Q, const __grid_constant__ TensorMap map_K,
              const __grid_constant__ TensorMap map_V, const __grid_constant__ TensorMap map_O,
              HeadScales scales, Order order, unsigned *counter) {
  auto &smem = shared_storage<SharedStorage>();
  const int warpgroup = warp_index() / 4;
  if (threadIdx.x == 0) {
    for (auto &Q : smem.Q) ring_init(Q, 4);  // a lane of each warp that computes: it is empty
    ring_init(smem.K, consumers * 4);
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are there for all threads
  const int tiles = order.tiles();
  RingPosition<2> q;
  RingPosition<stages> k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<consumers == 2 ? 40 : 32>();
    if (threadIdx.x == consumers * 128) {
      // In the order in which the consumers ask: each V after the next K. After the last tile, Q and K
      // are those of the last tile again: there is no other, and the products are not used.
      const auto load_q = [&](const Place &at, int tile) {
        for (int i = 0; i < consumers; i++) mbarrier_wait(smem.Q[i].empty[q.stage], q.parity ^ 1);
        const int head = at.b * order.heads + at.head;
        smem.tile(0, q.stage) = tile;  // told with Q
        smem.scale(0, q.stage) =
            of_head(scales.Q, head) * of_head(scales.K, head) * (1.44269504f / sqrtf(d));
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
      ring_load(smem.K, k, map_K, (at.key_tiles - 1) * Bc, at.head, at.b);
      while (tile < tiles) {
        for (int j = at.key_tiles - 1; j > 0; j--) {
          ring_load(smem.K, k, map_K, (j - 1) * Bc, at.head, at.b);
          ring_load(smem.V, v, map_V, j * d, at.head, at.b);
        }
        tile = draw_tile(counter, tiles);
        const Place next(min(tile, tiles - 1), order);
        load_q(next, tile);
        ring_load(smem.K, k, map_K, (next.key_tiles - 1) * Bc, next.head, next.b);
        ring_load(smem.V, v, map_V, 0, at.head, at.b);
        at = next;
      }
    }
  } else {
    setmaxnreg_inc<consumers == 2 ? 232 : 160>();
    auto &Q = smem.Q[warpgroup];
    auto &O = smem.O[warpgroup];
    Accumulator<Bc> s;
    Accumulator<d> o;
    std::uint16_t pairs[Bc / 4];  // of P
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
    // As key_at has them, pairs of 4 blocks of 8 columns are A of one product.
    const auto to_fragments = [&] {
#pragma unroll
      for (int i = 0; i < Bc / 4; i += 8)
        p[i / 8] = {pack_here(pairs[i], pairs[i + 2]), pack_here(pairs[i + 1], pairs[i + 3]),
                    pack_here(pairs[i + 4], pairs[i + 6]), pack_here(pairs[i + 5], pairs[i + 7])};
    };
    // Ping-pong (step 34): a warpgroup's products start when those of the one before have been started.
    const auto my_turn = [&] { named_barrier_sync(1 + warpgroup, 2 * 128); };
    const auto next_turn = [&] { named_barrier_arrive(1 + (warpgroup + 1) % consumers, 2 * 128); };
    if (warpgroup == consumers - 1) next_turn();
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
      const int first_row = at.row + warpgroup * 64, row = first_row + warp_index() % 4 * 16;
      float m[2] = {-FLT_MAX, -FLT_MAX}, l[2] = {}, alpha[2];
      ring_release(smem.K, k);
      if (order.causal || order.seqlen % Bc) mask_keys(s, (at.key_tiles - 1) * Bc, row, order);
      softmax(s, m, l, alpha, scale_log2, rise);
      to_pairs(pairs, s);
      to_fragments();

      for (int j = at.key_tiles - 1; j > 0; j--) {
        my_turn();
        start_qk();
        start_pv(j < at.key_tiles - 1);
        next_turn();
        wgmma_wait<1>(s);
        ring_release(smem.K, k);
        // A tile of Q has more rows than a tile of keys: the diagonal may cross two of these.
        if (order.causal && j * Bc > first_row) mask_keys(s, (j - 1) * Bc, row, order);
        const bool must_rescale = softmax(s, m, l, alpha, scale_log2, rise);
        to_pairs(pairs, s);
        wgmma_wait<0>(o);
        ring_release(smem.V, v);
        to_fragments();
        if (must_rescale) rescale(o, alpha);
      }

      RingPosition<2> used_q = q;
      q.next();
      tile = wait_for_q();
      my_turn();
      ring_release(Q, used_q);  // after a barrier: all lanes have read what came with it
      start_pv(at.key_tiles > 1);
      start_qk();  // of the next tile
      next_turn();
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
        l[r] = V_scale / l[r];
      }
      wgmma_wait<1>(o);
      ring_release(smem.V, v);

      store_o(O, o, l);
      fence_proxy_async();
      named_barrier_sync(1 + consumers + warpgroup, 128);  // all of O is there, for the copy engine
      if (threadIdx.x % 128 == 0) {
        if (first_row < order.seqlen)  // the last tile may have fewer rows
          tma_store(map_O, first_row, at.head, at.b, O);
        tma_store_commit();
      }
      wgmma_wait<0>(s);
      if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // O may be written again
    }
  }
}

/// Tiles of a head's keys, and bytes of its V^T.
int key_tiles(const Problem &p) {
  return (p.seqlen_k + Bc - 1) / Bc;
}
std::size_t transposed_bytes(const Problem &p) {
  return std::size_t(key_tiles(p)) * d * Vc;
}

void run(const Problem &p) {
  const auto counter = static_cast<unsigned *>(p.workspace);
  const auto V_transposed = static_cast<e4m3 *>(p.workspace) + before_v;
  launch<void>(transpose, dim3(key_tiles(p), p.batch * p.heads), dim3(Bc / 16 * 32), p.V,
               p.V_strides, V_transposed, p.heads, p.seqlen_k);
  const auto map = [&](const void *tensor, const Strides &strides, int rows, int tile_rows) {
    return tensor_map<e4m3>(tensor, strides, p.batch, p.heads, rows, d, tile_rows);
  };
  const std::int64_t of_head = transposed_bytes(p);
  const Order order = longest_first(p, Br, std::int64_t{p.seqlen_k} * d + of_head);
  constexpr int threads = (consumers + 1) * 128;
  const int blocks = std::min(order.all_heads * order.row_tiles,
                              resident_blocks<SharedStorage>(attention, threads));
  launch<SharedStorage>(attention, dim3(blocks), dim3(threads),
                        map(p.Q, p.Q_strides, p.seqlen_q, 64),
                        map(p.K, p.K_strides, p.seqlen_k, Bc),
                        tensor_map<e4m3>(V_transposed, Strides{of_head * p.heads, of_head, Vc},
                                         p.batch, p.heads, key_tiles(p) * d, Vc, d),
                        tensor_map<bf16>(p.O, p.O_strides, p.batch, p.heads, p.seqlen_q, d, 64),
                        p.scales, order, counter);
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
