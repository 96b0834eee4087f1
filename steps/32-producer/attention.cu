// Step 32: a producer. One warpgroup only copies, and the other only computes.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --type
// Before      step 31: the same threads request tiles and use them, and wait for each other at barriers.
// Bottleneck  One program orders everything: a copy starts when all warps have passed a barrier, not when
//             its place is free, and a warp waits for it less than a tile's time later.
// Change      A second warpgroup fills rings of two K and two V. It fills a stage when the first has
//             released it, by mbarriers 'full' and 'empty'. It gives its registers to the first.
// Prediction  407 instructions per warp and tile as before, no barrier of the block, and a tile's time
//             more for each copy. But the other block already hides most waits: 1.00 to 1.05 times step
//             31, 590 to 660 TFLOP/s.
#include "common/kernel/softmax.h"

namespace {

constexpr int consumers = 1;      // warpgroups that compute, with all rows of Q
constexpr int Br = 128;           // rows of Q in a tile
constexpr int Bc = 64;            // rows of K and V in a tile
constexpr int m_tiles = Br / 64;  // in units of wgmma's 64 rows
constexpr int stages = 2;         // of K and of V: one is filled while the other is read
// The last warpgroup of a block is the producer.
constexpr int threads = (consumers + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536 for two blocks.
constexpr int consumer_registers = 232, producer_registers = 24;
static_assert(2 * 128 * (consumers * consumer_registers + producer_registers) <= 65536);

/// A ring of tiles in shared memory, one in each stage. A stage is full when its copy is complete,
/// and empty when every reader has arrived.
template <class Tile>
struct Ring {
  Tile tile[stages];
  Mbarrier full[stages], empty[stages];
};

/// A thread's position in a ring: its next stage, and the parity that it waits for there.
struct RingPosition {
  int stage = 0, parity = 0;
  __device__ void next() {
    stage++;
    if (stage == stages) stage = 0, parity ^= 1;
  }
};

template <class T, int d>
struct SharedStorage {
  TmaTile<Br, d, T> Q;
  Ring<TmaTile<Bc, d, T>> K, V;
  Mbarrier Q_full;
};

/// Initialises a ring's barriers: a stage is empty after `readers` arrivals.
template <class Tile>
__device__ void ring_init(Ring<Tile> &ring, int readers) {
  for (int i = 0; i < stages; i++) {
    mbarrier_init(ring.full[i], 1);
    mbarrier_init(ring.empty[i], readers);
  }
}

/// Waits until the next stage is empty, and starts the copy of the rows from `row` on into it.
/// (Parity ^ 1: the stages of a new ring count as empty.)
template <class Tile>
__device__ void ring_load(Ring<Tile> &ring, RingPosition &at, const TensorMap &map, int row,
                          int head, int batch) {
  mbarrier_wait(ring.empty[at.stage], at.parity ^ 1);
  mbarrier_arrive_expect_tx(ring.full[at.stage], sizeof(Tile));
  tma_load(ring.tile[at.stage], map, row, head, batch, ring.full[at.stage]);
  at.next();
}

/// Releases the stage that this warp has read: one of its lanes arrives.
template <class Tile>
__device__ void ring_release(Ring<Tile> &ring, RingPosition &at) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty[at.stage]);
  at.next();
}

/// Stores a warp's 16 rows of O, from `row` of gO on, divided by l, the sum over a row's 4 lanes.
template <class T, int d>
__device__ __forceinline__ void store_rows(const Matrix<T> &gO, int row, int lane,
                                           Accumulator<d> &o, float (&l)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
    for (int i = 2 * r; i < o.size; i += 4)
      store<2>(gO(row + lane / 4 + 8 * r, i / 4 * 8 + lane % 4 * 2),
               Vector<T, 2>{from_float<T>(o(i) / l[r]), from_float<T>(o(i + 1) / l[r])});
  }
}

template <class T, int d>
__global__ void __launch_bounds__(threads, 2)           // blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              T *O, int seqlen, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br, head = blockIdx.y;
  if (threadIdx.x == 0) {
    mbarrier_init(smem.Q_full, 1);
    ring_init(smem.K, consumers * 4);  // the warps that compute
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised
  RingPosition k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x == consumers * 128) {
      mbarrier_arrive_expect_tx(smem.Q_full, sizeof smem.Q);
      tma_load(smem.Q, map_Q, first_row, head, 0, smem.Q_full);
      for (int j = 0; j < seqlen; j += Bc) {
        ring_load(smem.K, k, map_K, j, head, 0);
        ring_load(smem.V, v, map_V, j, head, 0);
      }
    }
  } else {
    setmaxnreg_inc<consumer_registers>();
    // Never taken, as no problem has 0 keys. Without a way to leave the branch here, nvcc 13.0
    // compiles the rest of it for the launch's registers, and spills.
    if (seqlen == 0) return;

    // In each m tile a warp has 16 rows, and a lane rows lane / 4 (r = 0) and lane / 4 + 8 (r = 1).
    Accumulator<Bc> s[m_tiles];
    Accumulator<d> o[m_tiles];
    FragmentA p[m_tiles][Bc / 16];
    float l[m_tiles][2] = {}, m[m_tiles][2], alpha[2];
    for (int mt = 0; mt < m_tiles; mt++) m[mt][0] = m[mt][1] = -INFINITY;

    mbarrier_wait(smem.Q_full, 0);
    for (int j = 0; j < seqlen; j += Bc) {
      // S = Q K^T. Both operands are K-major: the sum runs along their rows.
      mbarrier_wait(smem.K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int col = 0; col < d; col += 16)
          wgmma<T>(s[mt], k_major(smem.Q, mt * 64, col), k_major(smem.K.tile[k.stage], 0, col),
                   col > 0);
      wgmma_commit();
      wgmma_wait<0>(s[0], s[1]);
      ring_release(smem.K, k);

      // Online softmax, lazily, with one vote for both m tiles.
      bool must_rescale = false;
      float m_lane[m_tiles][2];
      for (int mt = 0; mt < m_tiles; mt++) {
        lane_maxima(s[mt], m_lane[mt]);
        for (int r = 0; r < 2; r++)
          must_rescale |= m_lane[mt][r] * scale_log2 > m[mt][r] + rescale_threshold;
      }
      if (__any_sync(kAllLanes, must_rescale)) {
#pragma unroll
        for (int mt = 0; mt < m_tiles; mt++) {
          raise_maxima(m_lane[mt], m[mt], l[mt], alpha, scale_log2);
          if (j > 0) rescale(o[mt], alpha);
        }
      }
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++) {
        exponentiate(s[mt], m[mt], l[mt], scale_log2);
        to_fragments<T>(p[mt], s[mt]);
      }

      // O += P V. V is MN-major: the sum runs down its columns.
      mbarrier_wait(smem.V.full[v.stage], v.parity);
      wgmma_fence();
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int key = 0; key < Bc; key += 16)
          wgmma<T>(o[mt], p[mt][key / 16], mn_major(smem.V.tile[v.stage], key, 0),
                   j > 0 || key > 0);
      wgmma_commit();
      wgmma_wait<0>(o[0], o[1]);
      ring_release(smem.V, v);
    }

    const Matrix<T> gO{O + std::int64_t{head} * seqlen * d, seqlen, d};
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++)
      store_rows(gO, first_row + mt * 64 + warp * 16, lane, o[mt], l[mt]);
  }
}

template <class T, int d>
void run(const Problem &p) {
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<T>(tensor, p.Q_strides, 1, p.batch * p.heads, p.seqlen_q, d, tile_rows);
  };
  const dim3 grid(p.seqlen_q / Br, p.batch * p.heads);
  launch<SharedStorage<T, d>>(attention<T, d>, grid, dim3(threads), map(p.Q, Br), map(p.K, Bc),
                              map(p.V, Bc), static_cast<T *>(p.O), p.seqlen_q, log2_e / sqrtf(d));
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
