// SPDX-License-Identifier: MIT
// Which keys a row sees, and the work of a tile of Q. Step 46 builds it, and later steps include it.
#pragma once

#include "common/kernel/group_order.h"
#include "common/kernel/persistent.h"
#include "common/kernel/work.h"

/// The keys that row i of a tile of Q sees.
struct Keys {
  int first, end;
  __device__ __forceinline__ Keys(const Problem &p, const Work &work, int i) {
    const int own = work.position + i;
    first = max(0, own - p.window_left);
    end = min(work.k.count, own + 1 + p.window_right);
  }
};

/// The work of a tile of Q, the n-th from the sequence's end. The tiles end with a multiple of 64 rows, so a
/// warpgroup has rows from its first on, or none.
template <int Br, int Bc = ::Bc>
__device__ __forceinline__ Work make_work(const Problem &p, const Rows &rows, int n) {
  const int queries = rows.q.count, end = (queries + 63) / 64 * 64 - n * Br;
  Work work;
  work.row = end - Br;
  work.position = work.row + rows.k.count - queries;
  work.q = rows.q, work.k = rows.k;
  if (end <= 0 || rows.k.count == 0) return work;  // there is no such tile, or there are no keys
  // Rows that see nothing have a tile of keys, of which all is masked.
  work.to = (max(1, Keys(p, work, min(end, queries) - 1 - work.row).end) + Bc - 1) / Bc;
  work.from = min(Keys(p, work, max(0, -work.row)).first / Bc, work.to - 1);
  return work;
}

/// The work of a tile of Q, by its number in the order.
template <int Br, Given given = Given::kLengths, int Bc = ::Bc>
__device__ __forceinline__ Work work_at(const Problem &p, const Order &order, int tile) {
  const Order::Place place = order.place(p, tile);
  return make_work<Br, Bc>(p, Rows(p, place.head, given), place.n());
}

/// Waits for the tile of Q that a warpgroup computes next, and returns its record.
template <class RingOfQ, int Stages, class View>
__device__ __forceinline__ Work wait_for_work(RingOfQ &Q, const RingPosition<Stages> &q,
                                              View &records) {
  mbarrier_wait(Q.full[q.stage], q.parity);
  return read_work(records, q.stage);
}

/// Returns whether none of a warpgroup's rows sees the last tile of keys (step 42), and it skips this tile. Of two tiles of
/// keys one stays.
template <int consumers, int Bc = ::Bc>
__device__ __forceinline__ bool skips_last(const Problem &problem, const Work &work,
                                           const int &warpgroup) {
  const int end = Keys(problem, work, warpgroup * 64 + 63).end;
  return consumers == 3 && work.to - work.from > 1 && uniform(end <= (work.to - 1) * Bc);
}

/// Masks a warp's scores of the tile j of keys: those behind what its rows see, if j is all_to or more, and those before,
/// if j is less than all_from. It reads the record of this stage again, because registers are few. Its arguments are
/// references, as a lambda's captures are: by value nvcc 13.0 makes other code of the kernel.
template <int Bc, class View>
__device__ __forceinline__ void mask_tile(Accumulator<Bc> &s, const Problem &problem, View &records,
                                          const int &stage, int j, const int &all_from,
                                          const int &all_to, const int &warpgroup, const int &warp,
                                          const int &lane) {
  const Work work = read_work(records, stage);
  const int row = warpgroup * 64 + warp % 4 * 16 + lane / 4, key = j * Bc + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const Keys seen(problem, work, row + r * 8);
    if (j >= all_to)
#pragma unroll
      for (int i = r * 2; i < s.size; i += i % 2 ? 3 : 1)
        if (i / 4 * 8 + i % 2 >= seen.end - key) s(i) = -INFINITY;
    if (j < all_from)
#pragma unroll
      for (int i = r * 2; i < s.size; i += i % 2 ? 3 : 1)
        if (i / 4 * 8 + i % 2 < seen.first - key) s(i) = -INFINITY;
  }
}

/// Stores the d columns of O that a warpgroup, one of `consumers`, has written to the place of its Q, and gives the
/// place back. A tile before the first row is not stored.
template <int consumers, int d, class RingOfQ, class View>
__device__ __forceinline__ void store_tile(RingOfQ &Q, int stage, View &records,
                                           const SequenceMap &map_O, const int &warpgroup) {
  fence_proxy_async();
  named_barrier_sync(first_turn + consumers + warpgroup, 128);  // all four warps have written O
  if (threadIdx.x % 128 == 0) {
    const Work done = read_work(records, stage);
    const int row = done.row + warpgroup * 64;
    if (row >= 0) tma_store<d>(map_O, done.q, row, done.q.head, done.q.sequence, Q.tile[stage]);
    tma_store_commit();
    tma_store_wait_read<0>();
    mbarrier_arrive(Q.empty[stage]);
  }
}

/// Returns the problem with its mask as a window of two sides, whichever kind it is. No limit is 2^30 keys.
static inline Problem with_sides(Problem p) {
  if (p.window) p.window_left = p.window - 1;
  if (p.window || p.causal) p.window_right = 0;
  for (int *side : {&p.window_left, &p.window_right})
    *side = *side < 0 ? 1 << 30 : std::min(*side, 1 << 30);
  return p;
}

/// Returns whether a row of Q sees more keys than the row before, of a problem with sides.
static inline bool is_causal(const Problem &p) {
  return p.window_left >= p.seqlen_k && p.window_right < p.seqlen_k;
}

/// Returns the order of tiles of Br rows of Q. kv_row_bytes: of a row of K and of V.
template <int Br>
static inline Order order_of(const Problem &p, int kv_row_bytes) {
  return order_of<Br>(p, kv_row_bytes, is_causal(p));
}
