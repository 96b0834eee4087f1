// Step 36: persistent blocks. A block takes one tile of Q after the other, and begins the next one's
// products before it has stored the last one's O.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --type
// Before      step 35: a block per tile of Q. Nothing runs beside its first scores and its last store.
// Bottleneck  The ends of a block: barriers made, Q and K awaited, a first softmax and a last P V without
//             company, O stored. A block of 8 tiles of keys, 1024, spends a fifth of its time there.
// Change      One block per SM goes through the tiles of Q. Q has two stages. The next tile's first Q K^T
//             runs beside this one's last P V, and O leaves by TMA, from Q's place in shared memory.
// Prediction  The ends are 3% of a block at 8192: 660 to 700 TFLOP/s; a fifth more at 1024.
#include "common/kernel/ring.h"
#include "common/kernel/wgmma.h"

namespace {

constexpr int consumers = 2;            // warpgroups that compute, with 64 rows of Q each
constexpr int Br = consumers * 64;      // rows of Q in a tile
constexpr int Bc = 128;                 // rows of K and V in a tile
constexpr int stages = 2;               // of K and of V: one is filled while the other is read
constexpr float rescale_threshold = 8;  // P is at most 2^8 then: far from fp16's 65504
// The named barriers, one for each warpgroup; 0 is that of __syncthreads.
constexpr int first_turn = 1, first_stored = first_turn + consumers;

template <class T, int d>
struct SharedStorage {
  Ring<TmaTile<64, d, T>, stages> Q[consumers];
  Ring<TmaTile<Bc, d, T>, stages> K, V;
};

/// A tile of Q: its rows begin at `row` of a head. A head's tiles follow each other.
struct Place {
  int row, head, b;
  __device__ Place(int tile, int row_tiles, int heads)
      : row(tile % row_tiles * Br), head(tile / row_tiles % heads), b(tile / row_tiles / heads) {}
};

/// Online softmax, lazily: S becomes P, relative to m. m may stay below the maximum, by at most the
/// threshold. Else l, and O by the caller, are multiplied by alpha: returns whether.
__device__ __forceinline__ bool softmax(Accumulator<Bc> &s, float (&m)[2], float (&l)[2],
                                        float (&alpha)[2], float scale_log2) {
  float m_lane[2] = {-INFINITY, -INFINITY};  // of this lane's scores
#pragma unroll
  for (int i = 0; i < s.size; i++) m_lane[i / 2 % 2] = fmaxf(m_lane[i / 2 % 2], s(i));
  bool must_rescale = false;
  for (int r = 0; r < 2; r++) must_rescale |= m_lane[r] * scale_log2 > m[r] + rescale_threshold;
  must_rescale = __any_sync(kAllLanes, must_rescale);
  if (must_rescale) {
    for (int r = 0; r < 2; r++) {
      float m_new = m_lane[r];
      for (int mask = 1; mask < 4; mask *= 2)
        m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
      m_new = fmaxf(m[r], m_new * scale_log2);
      alpha[r] = ex2(m[r] - m_new);  // 2^-inf = 0 for the first tile
      m[r] = m_new;
      l[r] *= alpha[r];
    }
  }
#pragma unroll
  for (int i = 0; i < s.size; i++)
    l[i / 2 % 2] += s(i) = ex2(fmaf(s(i), scale_log2, -m[i / 2 % 2]));
  return must_rescale;
}

/// P, rounded: two neighbouring blocks of 8 columns are A of one product.
template <class T>
__device__ __forceinline__ void round(FragmentA (&p)[Bc / 16], Accumulator<Bc> &s) {
#pragma unroll
  for (int i = 0; i < s.size; i += 8)
    p[i / 8] = {cvt_rn_x2<T>(s(i), s(i + 1)), cvt_rn_x2<T>(s(i + 2), s(i + 3)),
                cvt_rn_x2<T>(s(i + 4), s(i + 5)), cvt_rn_x2<T>(s(i + 6), s(i + 7))};
}

template <class T, int d>
__global__ void __launch_bounds__((consumers + 1) * 128, 1)
    attention(const __grid_constant__ TensorMap map_Q, const __grid_constant__ TensorMap map_K,
              const __grid_constant__ TensorMap map_V, const __grid_constant__ TensorMap map_O,
              int heads, int tiles, int row_tiles, int key_tiles, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warpgroup = warp_index() / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (auto &Q : smem.Q) ring_init(Q, 1);
    ring_init(smem.K, consumers * 4);  // a lane of each warp that computes says that it is empty
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are there for all threads
  RingPosition<stages> q, k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == consumers * 128) {
      // In the order in which the consumers ask: each V after the next K. After the last tile, Q and K
      // are those of the last tile again: there is no other, and the products are not used.
      const auto load_q = [&](const Place &at) {
        for (int i = 0; i < consumers; i++) {
          RingPosition<stages> same = q;
          ring_load(smem.Q[i], same, map_Q, at.row + i * 64, at.head, at.b);
        }
        q.next();
      };
      Place at(blockIdx.x, row_tiles, heads);
      load_q(at);
      ring_load(smem.K, k, map_K, (key_tiles - 1) * Bc, at.head, at.b);
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int j = key_tiles - 1; j > 0; j--) {
          ring_load(smem.K, k, map_K, (j - 1) * Bc, at.head, at.b);
          ring_load(smem.V, v, map_V, j * Bc, at.head, at.b);
        }
        const Place next(min(int(tile + gridDim.x), tiles - 1), row_tiles, heads);
        load_q(next);
        ring_load(smem.K, k, map_K, (key_tiles - 1) * Bc, next.head, next.b);
        ring_load(smem.V, v, map_V, 0, at.head, at.b);
        at = next;
      }
    }
  } else {
    setmaxnreg_inc<232>();
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

    mbarrier_wait(Q.full[q.stage], q.parity);
    my_turn();
    start_qk();
    next_turn();
    wgmma_wait<0>(s);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Place at(tile, row_tiles, heads);
      float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, alpha[2];
      ring_release(smem.K, k);
      softmax(s, m, l, alpha, scale_log2);
      round<T>(p, s);

      for (int j = key_tiles - 1; j > 0; j--) {
        my_turn();
        start_qk();
        start_pv(j < key_tiles - 1);
        next_turn();
        wgmma_wait<1>(s);
        ring_release(smem.K, k);
        const bool must_rescale = softmax(s, m, l, alpha, scale_log2);
        wgmma_wait<0>(o);
        ring_release(smem.V, v);
        round<T>(p, s);
        if (must_rescale) {
#pragma unroll
          for (int i = 0; i < o.size; i++) o(i) *= alpha[i / 2 % 2];
        }
      }

      const RingPosition<stages> used = q;
      q.next();
      mbarrier_wait(Q.full[q.stage], q.parity);
      my_turn();
      start_pv(key_tiles > 1);
      start_qk();  // of the next tile
      next_turn();
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
        l[r] = 1 / l[r];
      }
      wgmma_wait<1>(o);
      ring_release(smem.V, v);

      // O lies where Q was: a warp's 16 rows, which only its own products have read.
      const int row = warp_index() % 4 * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < o.size; i += 8)
        stmatrix_x4(Q.tile[used.stage](row, i * 2 + lane / 16 * 8),
                    {cvt_rn_x2<T>(o(i) * l[0], o(i + 1) * l[0]),
                     cvt_rn_x2<T>(o(i + 2) * l[1], o(i + 3) * l[1]),
                     cvt_rn_x2<T>(o(i + 4) * l[0], o(i + 5) * l[0]),
                     cvt_rn_x2<T>(o(i + 6) * l[1], o(i + 7) * l[1])});
      fence_proxy_async();
      named_barrier_sync(first_stored + warpgroup, 128);  // all of O is there, for the copy engine
      if (threadIdx.x % 128 == 0) {
        tma_store(map_O, at.row + warpgroup * 64, at.head, at.b, Q.tile[used.stage]);
        tma_store_commit();
        tma_store_wait_read<0>();
        mbarrier_arrive(Q.empty[used.stage]);
      }
      wgmma_wait<0>(s);
    }
  }
}

template <class T, int d>
void run(const Problem &p) {
  const auto map = [&](const void *tensor, const Strides &strides, int rows, int tile_rows) {
    return tensor_map<T>(tensor, strides, p.batch, p.heads, rows, d, tile_rows);
  };
  const int row_tiles = p.seqlen_q / Br, tiles = row_tiles * p.heads * p.batch;
  constexpr int threads = (consumers + 1) * 128;
  const int blocks =
      std::min(tiles, resident_blocks<SharedStorage<T, d>>(attention<T, d>, threads));
  launch<SharedStorage<T, d>>(
      attention<T, d>, dim3(blocks), dim3(threads), map(p.Q, p.Q_strides, p.seqlen_q, 64),
      map(p.K, p.K_strides, p.seqlen_k, Bc), map(p.V, p.V_strides, p.seqlen_k, Bc),
      map(p.O, p.O_strides, p.seqlen_q, 64), p.heads, tiles, row_tiles, p.seqlen_k / Bc,
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
