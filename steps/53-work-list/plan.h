// SPDX-License-Identifier: MIT
// Step 53's first kernel: the list of the tiles of Q that exist, in the order in which blocks draw them.
#pragma once

#include "common/kernel/visible.h"

namespace {

constexpr int plan_threads = 1024;

/// The plan, in the workspace behind the counter: a list of tiles of Q, and what it is made from.
struct Plan {
  Matrix<int> tiles;  // how many tiles of Q
  Matrix<int> list;   // [tiles, work_ints]
  Matrix<int>
      lengths;  // [batch, 4]: tiles of Q and of keys; in units of Br, by how much the keys are more
  Matrix<int>
      sequence;  // [batch, 8]: longest first: section, row tiles before and its own, the same
                 // difference, number, heads side by side, row tiles up to here
  static std::int64_t most_tiles(const Problem &p, int Br) {
    std::int64_t of_head = std::int64_t{p.batch} * ((p.seqlen_q + Br - 1) / Br);
    if (p.cu_seqlens_q) of_head = std::min(of_head, p.total_q / Br + std::int64_t{p.batch});
    return of_head * p.heads;
  }
  static std::int64_t ints(const Problem &p, int Br) {
    return 32 + work_ints * most_tiles(p, Br) + 12 * std::int64_t{p.batch};
  }
  Plan(const Problem &p, int Br) {
    const int most = most_tiles(p, Br);
    int *const first = static_cast<int *>(p.workspace);
    tiles = {first + 1, 1, 1};
    list = {first + 32, most, work_ints};
    lengths = {list.data + std::int64_t{most} * work_ints, p.batch, 4};
    sequence = {lengths.data + std::int64_t{p.batch} * 4, p.batch, 8};
  }
};

/// Plans the list, in one block. l2_tiles: tiles of K and V that L2 holds; 0 if a row of Q sees no more keys than
/// the row before. The list has sections, one after the other: some sequences, or some heads of one, as
/// many as L2 holds. In a section the tiles of Q that stand at the last keys come first. A place in the list is
/// the number of the tiles that come before it, so that no thread waits for another's.
template <int Br>
__global__ void __launch_bounds__(plan_threads)
    make_plan(const Problem p, const Plan plan, int l2_tiles) {
  griddepcontrol_launch_dependents();  // the blocks' prologues may run meanwhile
  for (int b = threadIdx.x; b < p.batch; b += plan_threads) {
    const Rows rows(p, b * p.heads, Given::kAll);
    const int queries = rows.q.count, keys = rows.k.count;
    const int row_tiles = keys > 0 ? (queries + Br - 1) / Br : 0;
    const int ahead = l2_tiles ? (keys + Br - 1) / Br - row_tiles : 0;
    store(plan.lengths(b, 0), Vector<int, 4>{row_tiles, (keys + Bc - 1) / Bc, ahead, 0});
  }
  __syncthreads();  // all sequences' lengths are there
  for (int b = threadIdx.x; b < p.batch; b += plan_threads) {
    const Vector<int, 4> own = load<4>(plan.lengths(b, 0));
    const int keys = max(1, own[1]);
    int before = 0, rows_before = 0, keys_before = 0, all = 0;
    for (int other = 0; other < p.batch; other++) {
      const Vector<int, 4> its = load<4>(plan.lengths(other, 0));
      const int n = max(1, its[1]);
      all += n * p.kv_heads;
      if (n < keys || (n == keys && other >= b)) continue;
      before++;
      rows_before += its[0];
      keys_before += n * p.kv_heads;
    }
    // Sections of the same size, of which none is larger than L2: a small last one would leave blocks idle.
    const int sections = l2_tiles ? (all + l2_tiles - 1) / l2_tiles : all;
    const int in_section = (all + sections - 1) / sections;
    const int parts = (keys * p.kv_heads + in_section - 1) / in_section;  // of this sequence
    store(plan.sequence(before, 0),
          Vector<int, 4>{keys_before / in_section, rows_before, own[0], own[2]});
    store(plan.sequence(before, 4),
          Vector<int, 4>{b, (p.kv_heads + parts - 1) / parts, rows_before + own[0], 0});
    if (before == p.batch - 1)
      plan.tiles(0, 0) = min((rows_before + own[0]) * p.heads, plan.list.rows);
  }
  __syncthreads();  // the sequences are sorted

  const int lane = threadIdx.x % 32, group = p.heads / p.kv_heads;
  const int all_rows = plan.sequence(p.batch - 1, 6);
  int i = 0;  // the sequence, in their order
  for (int row_tile = threadIdx.x / 32; row_tile < all_rows; row_tile += plan_threads / 32) {
    while (plan.sequence(i, 6) <= row_tile) i++;
    const Vector<int, 4> own = load<4>(plan.sequence(i, 0));
    const int tile = row_tile - own[1], stands_at = tile + own[3];
    // Per head: the tiles of the sections before, and of this section those that stand behind this tile or beside
    // it, in a sequence before.
    int earlier = 0, longer = 0;
    for (int other = lane; other < p.batch; other += 32) {
      const Vector<int, 4> its = load<4>(plan.sequence(other, 0));
      const int behind = its[2] + its[3] - 1 - stands_at;
      if (its[0] < own[0]) earlier += its[2];
      if (its[0] != own[0]) continue;
      longer += min(max(behind, 0), its[2]);
      if (other < i && behind >= 0 && stands_at >= its[3]) longer++;
    }
    for (int mask = 1; mask < 32; mask *= 2) {
      earlier += __shfl_xor_sync(kAllLanes, earlier, mask);
      longer += __shfl_xor_sync(kAllLanes, longer, mask);
    }
    const int b = plan.sequence(i, 4), side = plan.sequence(i, 5);
    for (int head = lane; head < p.heads; head += 32) {
      const int first = head / group / side * side;  // of the heads of K and V in the section
      const int here = min(side, p.kv_heads - first) * group;
      const int place =
          earlier * p.heads + first * group * own[2] + longer * here + head - first * group;
      if (place < plan.list.rows)  // more are there only if packed sequences overlap
        write_work(
            plan.list, place,
            make_work<Br, Bc>(p, Rows(p, b * p.heads + head, Given::kAll), own[2] - 1 - tile));
    }
  }
}

}  // namespace
