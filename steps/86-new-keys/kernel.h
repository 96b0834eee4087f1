// SPDX-License-Identifier: MIT
// Step 86's kernel, for step 89: attention to a cache and to the new keys that it lacks.
#pragma once

#include "common/kernel/consumers.h"
#include "common/kernel/new_keys.h"
#include "common/kernel/plan.h"

namespace {

template <class T, int d, bool softcap, bool alibi, bool sinks>
__global__ void __launch_bounds__(threads<d>, 1)          // blocks per SM
    attention(const __grid_constant__ SequenceMap map_Q,  // [batch, heads, rows, d], all four
              const __grid_constant__ CacheAndNew<T, d> K,
              const __grid_constant__ CacheAndNew<T, d> V,
              const __grid_constant__ SequenceMap map_O, const Problem problem, const Order order,
              const Plan plan, const Pages pages, bool planned, const Scores scores) {
  constexpr int consumers = warpgroups<d>;
  auto &smem = shared_storage<WorkRings<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  init_rings<T, d>(smem);
  RingPosition<q_stages> q;
  RingPosition<stages<d>> k, v;
  const Matrix<float> lse{problem.lse, problem.batch * problem.heads, problem.seqlen_q};

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers<d>>();
    griddepcontrol_wait();       // the list is complete, and no launch before this one uses O
    fence_proxy_async_global();  // TMA reads rows that ordinary stores of these launches wrote
    // Lane i copies box i of a tile of keys. A lane without a box looks up the first one's page, too.
    const bool copies = lane * pages.box_rows < Bc;
    const int to_row = copies ? lane * pages.box_rows : 0;
    // Loads the tiles of K or V of a work, the last one first. One warp does so for K, and another for V.
    const auto load_tiles = [&](auto &ring, auto &at, const CacheAndNew<T, d> &of,
                                const Work &work) {
      const HeadRows &keys = work.k;
      const auto look_up = [&](int place) {  // any number if it is a table's
        return pages.table.data ? pages.table(keys.sequence, place) : keys.sequence;
      };
      const auto keys_in = [&](int place) {
        return min(keys.count - place * pages.size, pages.size);
      };
      // Which page of the sequence the box is in, and its first row there. The only division is here.
      const int key = (work.to - 1) * Bc + to_row;
      int place = key / pages.size, row = key % pages.size;
      // A box must have a key of the sequence. One that would have none brings the tile's first rows again: they
      // are masked, and finite if they were.
      const int source = key < keys.count ? lane : 0;
      const int first_place = __shfl_sync(kAllLanes, place, source);
      int its_row = __shfl_sync(kAllLanes, row, source), page = look_up(first_place);
      int its_keys = keys_in(first_place);
      const int first_new = first_new_key(problem, keys.count);
      for (int j = work.to - 1;; j--) {
        mbarrier_wait(ring.empty[at.stage], at.parity ^ 1);
        const int old = first_new - j * Bc;  // rows of the tile that the cache has
        // A box behind the last key brings the first new ones, which are masked and finite.
        if (copies && to_row >= old)
          tma_load_rows(ring.tile[at.stage], to_row, of.map_new, {0, problem.seqlen_new},
                        to_row - old < problem.seqlen_new ? to_row - old : 0, keys.head,
                        keys.sequence, ring.full[at.stage]);
        else if (copies && to_row + pages.box_rows <= old)
          tma_load_rows(ring.tile[at.stage], to_row, of.map, {keys.first, its_keys}, its_row,
                        keys.head, pages.clamped(page), ring.full[at.stage]);
        const bool gathers = old < Bc && old % pages.box_rows > 0;  // the cache ends inside a box
        if (gathers) gather(ring.tile[at.stage], of, problem, pages, keys, first_new);
        // All lanes' copies are complete or on their way, no lane is a phase behind, and all have read their work:
        // Q's stage, where it is, is emptied after a V is full.
        __syncwarp();
        if (lane == 0)
          mbarrier_arrive_expect_tx(ring.full[at.stage],
                                    (Bc - (gathers ? pages.box_rows : 0)) * d * sizeof(T));
        at.next();
        if (j == work.from) break;
        place -= pages.whole, row -= pages.rest;  // a tile back
        if (row < 0) row += pages.size, place--;
        its_row = row, its_keys = keys_in(place);  // here, so that no stage waits for them
        // The page table is memory, too. This can complete during the next wait.
        page = look_up(place);
      }
    };
    if (warp == consumers * 4) {
      const auto tell = [&](const Work &work) {  // it becomes visible when the phase of `full` ends
        if (lane == 0) {
          for (auto &Q : smem.Q) mbarrier_wait(Q.empty[q.stage], q.parity ^ 1);
          write_work(smem.work, q.stage, work);
        }
      };
      const int tiles = planned ? plan.tiles(0, 0) : order.tiles;
      const auto draw = [&] {
        unsigned *const counter = static_cast<unsigned *>(problem.workspace);
        return __shfl_sync(kAllLanes, lane == 0 ? draw_tile(counter, tiles) : 0, 0);
      };
      for (int tile = blockIdx.x; tile < tiles; tile = draw()) {
        const Work at = planned ? read_work(plan.list, tile)
                                : work_at<Br<d>, Given::kNothing>(problem, order, tile);
        if (at.to == 0) continue;
        tell(at);
        for (int i = 0; i < consumers && lane == 0; i++) {
          RingPosition<q_stages> same = q;
          // A warpgroup without rows gets the first ones. They are not stored.
          ring_load(smem.Q[i], same, map_Q, at.q, max(0, at.row + i * 64), at.q.head,
                    at.q.sequence);
        }
        q.next();
        load_tiles(smem.K, k, K, at);
      }
      tell({});  // the end: no Q comes with it
      if (lane == 0)
        for (auto &Q : smem.Q) mbarrier_arrive(Q.full[q.stage]);
    } else if (warp == consumers * 4 + 1) {
      while (true) {
        mbarrier_wait(smem.Q[0].full[q.stage], q.parity);
        const Work at = read_work(smem.work, q.stage);
        if (at.to == 0) break;
        q.next();
        load_tiles(smem.V, v, V, at);
      }
    } else {
      if (warp == consumers * 4 + 2)
        write_rows_without_keys<T, d, sinks>(problem, scores, lse, lane);
      store_new_rows(problem, pages, K, V, blockIdx.x * 2 + warp % 2, gridDim.x * 2);
    }
  } else {
    consume<T, d, softcap, alibi, sinks>(smem, map_O, problem, scores, lse, q, k, v, warpgroup,
                                         warp, lane);
  }
}

}  // namespace
