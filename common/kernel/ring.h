// SPDX-License-Identifier: MIT
// A ring of tiles between a producer, which copies them, and consumers, which read them. Step 32
// builds it, and later steps include it.
#pragma once

#include "common/kernel/tma.h"

/// Tiles in shared memory, one in each stage. A stage is full when its copy is complete, and empty
/// when every reader has arrived.
template <class Tile, int Stages>
struct Ring {
  Tile tile[Stages];
  Mbarrier full[Stages], empty[Stages];
};

/// The barriers of a ring whose tiles lie elsewhere. Behind tiles of 1024 bytes' alignment they would take as much.
template <int Stages>
struct RingBarriers {
  Mbarrier full[Stages], empty[Stages];
};
/// Such a ring, of both.
template <class Tile, int Stages>
struct SplitRing {
  Tile (&tile)[Stages];
  Mbarrier (&full)[Stages], (&empty)[Stages];
};
template <class Tile, int Stages>
__device__ __forceinline__ SplitRing<Tile, Stages> ring_of(Tile (&tiles)[Stages],
                                                           RingBarriers<Stages> &barriers) {
  return {tiles, barriers.full, barriers.empty};
}

/// A thread's position in a ring: its next stage, and the parity that it waits for there.
template <int Stages>
struct RingPosition {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    stage++;
    if (stage == Stages) stage = 0, parity ^= 1;
  }
};

/// Initialises the barriers of a ring, or of RingBarriers: a stage is empty after `readers` arrivals.
template <class AnyRing>
__device__ __forceinline__ void ring_init(AnyRing &ring, int readers,
                                          Where where = Where::current()) {
  for (int i = 0; i < int(sizeof(ring.full) / sizeof(Mbarrier)); i++) {
    mbarrier_init(ring.full[i], 1, where, "full");
    mbarrier_init(ring.empty[i], readers, where, "empty");
  }
}

/// Waits until the next stage is empty, and starts the copy of a tile into it: `place` is the tile's in the
/// tensor, as tma_load takes it. (Parity ^ 1: the stages of a new ring count as empty.)
template <bool by_trap = true, class AnyRing, int Stages, class Map, class... Place>
__device__ __forceinline__ void ring_load(AnyRing &&ring, RingPosition<Stages> &at, const Map &map,
                                          const Place &...place) {
  mbarrier_wait<by_trap>(ring.empty[at.stage], at.parity ^ 1);
  mbarrier_arrive_expect_tx(ring.full[at.stage], sizeof(ring.tile[0]));
  tma_load(ring.tile[at.stage], map, place..., ring.full[at.stage]);
  at.next();
}

/// Releases the stage that this warp has read: one of its lanes arrives.
template <class AnyRing, int Stages>
__device__ __forceinline__ void ring_release(AnyRing &ring, RingPosition<Stages> &at) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty[at.stage]);
  at.next();
}
