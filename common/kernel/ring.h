// SPDX-License-Identifier: MIT
// A ring of tiles between those who copy and those who compute, as step 32 builds it, for the steps after it.
#pragma once

#include "common/kernel/tma.h"

/// Tiles in shared memory. One is full when its copy has landed, and empty when all who read it have
/// said so.
template <class Tile, int Stages>
struct Ring {
  Tile tile[Stages];
  Mbarrier full[Stages], empty[Stages];
};

/// Where in a ring a thread is: at which stage, and which of the phases of its barriers comes next.
template <int Stages>
struct RingPosition {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

/// Makes a ring's barriers. So many arrivals say that a tile is empty.
template <class Tile, int Stages>
__device__ __forceinline__ void ring_init(Ring<Tile, Stages> &ring, int readers,
                                          Where where = Where::current()) {
  for (int i = 0; i < Stages; i++) {
    mbarrier_init(ring.full[i], 1, where, "full");
    mbarrier_init(ring.empty[i], readers, where, "empty");
  }
}

/// Fills the next tile, once it is empty, with the rows from `row` on. (Parity ^ 1: a new ring's tiles
/// count as empty.)
template <class Tile, int Stages>
__device__ __forceinline__ void ring_load(Ring<Tile, Stages> &ring, RingPosition<Stages> &at,
                                          const TensorMap &map, int row, int head, int batch) {
  mbarrier_wait(ring.empty[at.stage], at.parity ^ 1);
  mbarrier_arrive_expect_tx(ring.full[at.stage], sizeof(Tile));
  tma_load(ring.tile[at.stage], map, row, head, batch, ring.full[at.stage]);
  at.next();
}

/// The warp has read the tile: one of its lanes says so.
template <class Tile, int Stages>
__device__ __forceinline__ void ring_release(Ring<Tile, Stages> &ring, RingPosition<Stages> &at) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty[at.stage]);
  at.next();
}
