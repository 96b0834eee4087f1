// Step 36: persistent blocks. A block computes one tile of Q after another, and starts the next tile's first
// product before it has stored this tile's O.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --type
// Before      step 35: a block per tile of Q. Nothing runs beside its first scores and its last store.
// Bottleneck  The ends of a block: it makes barriers, waits for Q and K, and has a first softmax and a last P V
//             with nothing beside them; then it stores O. At 1024 keys that is a sixth of a block.
// Change      One block per SM goes through the tiles of Q. Q has two stages. The next tile's first Q K^T
//             runs beside this tile's last P V, and O leaves by TMA, from Q's place in shared memory.
// Prediction  The ends are 3% of a block at 8192: 660 to 700 TFLOP/s; a fifth more at 1024.
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"

namespace {

constexpr int consumers = 2;        // warpgroups that compute, with 64 rows of Q each
constexpr int Br = consumers * 64;  // rows of Q in a tile
constexpr int Bc = 128;             // rows of K and V in a tile
constexpr int stages = 2;           // of K and of V: one is filled while the other is read
// The last warpgroup of a block is the producer.
constexpr int threads = (consumers + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
constexpr int consumer_registers = 232, producer_registers = 40;
static_assert(128 * (consumers * consumer_registers + producer_registers) <= 65536);
// The named barriers, one for each warpgroup; 0 is that of __syncthreads.
constexpr int first_turn = 1, first_stored = first_turn + consumers;

template <class T, int d>
struct SharedStorage {
  Ring<TmaTile<64, d, T>, stages> Q[consumers];
  Ring<TmaTile<Bc, d, T>, stages> K, V;
};

/// A tile of Q: its rows begin at `row` of a head of the batch. A head's tiles follow each other.
struct Place {
  int row, head;
  __device__ Place(int tile, int seqlen)
      : row(tile % (seqlen / Br) * Br), head(tile / (seqlen / Br)) {}
};

template <class T, int d>
__global__ void __launch_bounds__(threads, 1)           // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              const __grid_constant__ TensorMap map_O, int tiles, int seqlen, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (auto &Q : smem.Q) ring_init(Q, 1);
    ring_init(smem.K, consumers * 4);  // the warps that compute
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised
  RingPosition<stages> q, k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x == consumers * 128) {
      // The consumers need each V after the K behind it, which may be the next tile's.
      int head_before = 0;
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place at(tile, seqlen);
        for (int i = 0; i < consumers; i++) {
          RingPosition<stages> same = q;
          ring_load(smem.Q[i], same, map_Q, at.row + i * 64, at.head, 0);
        }
        q.next();
        ring_load(smem.K, k, map_K, 0, at.head, 0);
        if (tile != int(blockIdx.x)) ring_load(smem.V, v, map_V, seqlen - Bc, head_before, 0);
        for (int j = Bc; j < seqlen; j += Bc) {
          ring_load(smem.K, k, map_K, j, at.head, 0);
          ring_load(smem.V, v, map_V, j - Bc, at.head, 0);
        }
        head_before = at.head;
      }
      ring_load(smem.V, v, map_V, seqlen - Bc, head_before, 0);
    }
  } else {
    setmaxnreg_inc<consumer_registers>();
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
    // Ping-pong (step 34): a warpgroup's products start when the other's have been started.
    const auto my_turn = [&] { named_barrier_sync(first_turn + warpgroup, consumers * 128); };
    const auto next_turn = [&] {
      named_barrier_arrive(first_turn + (warpgroup + 1) % consumers, consumers * 128);
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

    mbarrier_wait(Q.full[q.stage], q.parity);
    my_turn();
    start_qk();
    next_turn();
    wgmma_wait<0>(s);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Place at(tile, seqlen);
      float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
      ring_release(smem.K, k);
      softmax(s, m, l, alpha, scale_log2);
      to_fragments<T>(p, s);

      for (int j = Bc; j < seqlen; j += Bc) {
        my_turn();
        start_qk();
        start_pv(j > Bc);  // of the tile before
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
      if (tile + int(gridDim.x) < tiles) {
        mbarrier_wait(Q.full[q.stage], q.parity);
        my_turn();
        start_pv(seqlen > Bc);
        start_qk();  // of the next tile
        next_turn();
        invert(l);
        wgmma_wait<1>(o);
        ring_release(smem.V, v);
        store_o(at, l, used);
        wgmma_wait<0>(s);
      } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
        my_turn();
        start_pv(seqlen > Bc);
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
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<T>(tensor, p.Q_strides, 1, p.batch * p.heads, p.seqlen_q, d, tile_rows);
  };
  const int tiles = p.seqlen_q / Br * p.heads * p.batch;
  const int blocks =
      std::min(tiles, resident_blocks<SharedStorage<T, d>>(attention<T, d>, threads));
  launch<SharedStorage<T, d>>(attention<T, d>, dim3(blocks), dim3(threads), map(p.Q, 64),
                              map(p.K, Bc), map(p.V, Bc), map(p.O, 64), tiles, p.seqlen_q,
                              log2_e / sqrtf(d));
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = Br,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
});
