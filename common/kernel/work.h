// SPDX-License-Identifier: MIT
// What a block computes, and its record in shared memory. Step 45 builds it, and later steps include it.
#pragma once

#include "common/kernel/persistent.h"
#include "common/kernel/sequence_rows.h"

/// What a block computes: a tile of Q, and the tiles of keys that some of its rows see.
struct Work {
  int row = 0;           // its first, negative if there are fewer than Br
  int position = 0;      // of this row: of the last query it is that of the last key
  int from = 0, to = 0;  // tiles of keys; to: 0 if there is no work
  HeadRows q{}, k{};     // the sequence
};
constexpr int work_ints = 12;

/// Work in a row of a tile or of a matrix.
template <class View>
__device__ __forceinline__ void write_work(View &to, int at, const Work &work) {
  store(to(at, 0), Vector<int, 4>{work.row, work.position, work.from, work.to});
  store(to(at, 4), Vector<int, 4>{work.q.first, work.q.count, work.q.head, work.q.sequence});
  store(to(at, 8), Vector<int, 4>{work.k.first, work.k.count, work.k.head, work.k.sequence});
}
template <class View>
__device__ __forceinline__ Work read_work(View &from, int at) {
  const Vector<int, 4> tile = load<4>(from(at, 0)), q = load<4>(from(at, 4)),
                       k = load<4>(from(at, 8));
  return {
      tile[0], tile[1], tile[2], tile[3], {{q[0], q[1]}, q[2], q[3]}, {{k[0], k[1]}, k[2], k[3]}};
}

/// What a block has in shared memory: the rings, and the record of each stage of Q.
template <class T, int d>
struct WorkRings : Rings<T, d> {
  Tile<int, q_stages, work_ints> work;
};
