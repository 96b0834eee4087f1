// SPDX-License-Identifier: MIT
// What steps 31 to 42 built, for the steps from 43 on: the shape of a block, whose tiles come from a counter, and
// the products of one of its warpgroups.
#pragma once

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

/// Returns how many tiles of Q a launch numbers: `row_tiles` for each head. draw_tile counts them in 32 bits.
inline int tiles_of_q(const Problem &p, int row_tiles) {
  const std::int64_t tiles = std::int64_t{row_tiles} * p.batch * p.heads;
  if (tiles > 1 << 30)
    throw ShapeError("this step numbers tiles of Q in 32 bits, and they may be " +
                     std::to_string(tiles) + "; fewer sequences, heads or queries");
  return tiles;
}

/// Draws the next tile; the first gridDim.x tiles are not drawn. The counter must hold 0, or `tiles` or
/// more. A launch draws `tiles` numbers, and leaves a 0.
__device__ __forceinline__ int draw_tile(unsigned *counter, int tiles) {
  const unsigned drawn = atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), tiles - 1);
  return gridDim.x + (drawn - 1 < unsigned(tiles - 1) ? tiles - drawn : 0);
}

/// Waits for a tile of K, and starts S = Q K^T of 64 rows.
template <class T, int d, int Stages>
__device__ __forceinline__ void start_scores(Accumulator<Bc> &s, const TmaTile<64, d, T> &Q,
                                             Ring<TmaTile<Bc, d, T>, Stages> &K,
                                             const RingPosition<Stages> &at) {
  mbarrier_wait(K.full[at.stage], at.parity);
  wgmma_fence();
#pragma unroll
  for (int col = 0; col < d; col += 16)
    wgmma<T>(s, k_major(Q, 0, col), k_major(K.tile[at.stage], 0, col), col > 0);
  wgmma_commit();
}

/// Waits for a tile of V, and starts O = P V of 64 rows, or O += P V.
template <class T, int d, int Stages>
__device__ __forceinline__ void start_output(Accumulator<d> &o, const FragmentA (&p)[Bc / 16],
                                             Ring<TmaTile<Bc, d, T>, Stages> &V,
                                             const RingPosition<Stages> &at, bool add) {
  mbarrier_wait(V.full[at.stage], at.parity);
  wgmma_fence();
#pragma unroll
  for (int key = 0; key < Bc; key += 16)
    wgmma<T>(o, p[key / 16], mn_major(V.tile[at.stage], key, 0), add || key > 0);
  wgmma_commit();
}

/// Writes a warp's 16 rows of O to its warpgroup's tile, each row times its factor.
template <class T, int d>
__device__ __forceinline__ void write_rows(TmaTile<64, d, T> &tile, Accumulator<d> &o,
                                           const float (&factor)[2]) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
  const int col = threadIdx.x % 32 / 16 * 8;
  const auto pair = [&](int i, int r) {
    return cvt_rn_x2<T>(o(i) * factor[r], o(i + 1) * factor[r]);
  };
#pragma unroll
  for (int i = 0; i < o.size; i += 8)
    stmatrix_x4(tile(row, i * 2 + col),
                {pair(i, 0), pair(i + 2, 1), pair(i + 4, 0), pair(i + 6, 1)});
}
