// SPDX-License-Identifier: MIT
// What steps 31 to 42 built, for the steps from 43 on: the shape of a block and its rings, the turns of its
// warpgroups, and their products.
#pragma once

#include "common/kernel/draw.h"
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"

template <int d>
constexpr int warpgroups = d == 64 ? 3 : 2;  // that compute, with 64 rows of Q each
template <int d>
constexpr int Br = warpgroups<d> * 64;  // rows of Q in a tile
constexpr int Bc = 128;                 // rows of K and V in a tile
constexpr int q_stages = 2;             // of Q: one is filled while the other is read
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
static_assert(128 * (3 * consumer_registers<64> + producer_registers<64>) <= 65536);
static_assert(128 * (2 * consumer_registers<128> + producer_registers<128>) <= 65536);

// The named barriers, two for each warpgroup that computes; 0 is that of __syncthreads.
constexpr int first_turn = 1;
template <int d>
constexpr int first_stored = first_turn + warpgroups<d>;

/// What a block has in shared memory: the tiles of Q of each warpgroup that computes, and the tiles of K and V of all.
template <class T, int d>
struct Rings {
  Ring<TmaTile<64, d, T>, q_stages> Q[warpgroups<d>];
  Ring<TmaTile<Bc, d, T>, stages<d>> K, V;
};

/// Initialises the barriers of the rings of Q, one for each warpgroup that computes, and of those of K and V. All threads
/// of the block call this.
template <class RingOfQ, int consumers, class RingOfK>
__device__ __forceinline__ void init_rings(RingOfQ (&rings_of_Q)[consumers], RingOfK &K,
                                           RingOfK &V) {
  if (threadIdx.x == 0) {
    for (auto &Q : rings_of_Q) ring_init(Q, 1);
    ring_init(K, consumers * 4);  // the warps that compute
    ring_init(V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised
}
template <class T, int d>
__device__ __forceinline__ void init_rings(Rings<T, d> &smem) {
  init_rings(smem.Q, smem.K, smem.V);
}

/// Ping-pong (step 34): a warpgroup's products start when those of the one before have been started. Waits for that.
__device__ __forceinline__ void begin_turn(int warpgroup) {
  named_barrier_sync(first_turn + warpgroup, 2 * 128);
}
/// Lets the next of the warpgroups that compute begin its turn.
template <int consumers>
__device__ __forceinline__ void end_turn(int warpgroup) {
  named_barrier_arrive(first_turn + (warpgroup + 1) % consumers, 2 * 128);
}

/// Waits for a tile of K, and starts S = Q K^T of 64 rows and d columns.
template <class T, int d, int Bc, class RingOfQ, int QStages, class RingOfK, int Stages>
__device__ __forceinline__ void start_scores(Accumulator<Bc> &s, RingOfQ &Q,
                                             const RingPosition<QStages> &q, RingOfK &K,
                                             const RingPosition<Stages> &k) {
  mbarrier_wait(K.full[k.stage], k.parity);
  wgmma_fence();
#pragma unroll
  for (int col = 0; col < d; col += 16)
    wgmma<T>(s, k_major(Q.tile[q.stage], 0, col), k_major(K.tile[k.stage], 0, col), col > 0);
  wgmma_commit();
}

/// Waits for a tile of V, and starts O = P V of 64 rows, or O += P V.
template <class T, int d, int KeySteps, class RingOfV, int Stages>
__device__ __forceinline__ void start_output(Accumulator<d> &o, const FragmentA (&p)[KeySteps],
                                             RingOfV &V, const RingPosition<Stages> &v, bool add) {
  mbarrier_wait(V.full[v.stage], v.parity);
  wgmma_fence();
#pragma unroll
  for (int key = 0; key < KeySteps * 16; key += 16)
    wgmma<T>(o, p[key / 16], mn_major(V.tile[v.stage], key, 0), add || key > 0);
  wgmma_commit();
}

/// Writes the 16 rows of O of a warp of the block to its warpgroup's tile, each row times its factor.
template <class T, int d, class RingOfQ>
__device__ __forceinline__ void write_rows(RingOfQ &Q, int stage, Accumulator<d> &o,
                                           const float (&l)[2], int warp, int lane) {
  const int row = warp % 4 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < o.size; i += 8)
    stmatrix_x4(
        Q.tile[stage](row, i * 2 + lane / 16 * 8),
        {cvt_rn_x2<T>(o(i) * l[0], o(i + 1) * l[0]), cvt_rn_x2<T>(o(i + 2) * l[1], o(i + 3) * l[1]),
         cvt_rn_x2<T>(o(i + 4) * l[0], o(i + 5) * l[0]),
         cvt_rn_x2<T>(o(i + 6) * l[1], o(i + 7) * l[1])});
}
