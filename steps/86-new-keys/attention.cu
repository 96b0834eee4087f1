// Step 86: new keys. A launch attends to keys that the cache lacks, and stores them in it.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --seqlen-k, --kv-heads, --layout, --lengths, --page-size, --append, --window,
//             --window-size, --garbage, --scale, --softcap, --alibi, --sink-logits
// Before      step 54: the cache must have all keys. A model's new ones come beside it, and a kernel stores them first.
// Bottleneck  That kernel reads and writes each new key, and no product runs meanwhile.
// Change      No block waits for a new key in the cache. Boxes of new keys come from where the caller has them, by maps
//             of their own, and two idle warps of each block store them in the cache meanwhile. Where the cache ends
//             inside a box, a warp gathers this box by cp.async from both. Boxes have 16 rows at most then.
// Prediction  4096 queries and new keys on a cache of 8192, 4 x 16 heads of 128, causal, pages of 16. A kernel before
//             moves 268 MB in 63 us, 3.3% of the clocks. Here the bytes move beside products. On a cache of 8188 a
//             box is gathered for each tile of Q: a look-up, 16 copies and a wait, 1,500 clocks. That is 0.8% of its
//             80.5 tiles of keys at 2,316, if the ring hides nothing of it. Else the clocks are step 54's.
#include <algorithm>

#include "common/kernel/consumers.h"
#include "common/kernel/key_pages.h"
#include "common/kernel/plan.h"

namespace {

/// K or V: the cache, the new rows that it lacks, and a map of each.
template <class T, int d>
struct CacheAndNew {
  SequenceMap map, map_new;
  T *cache;
  const T *fresh;  // null if the cache has all
  Strides strides, strides_new;

  /// Returns the row of the cache that is a key's.
  __device__ __forceinline__ auto cached(const Pages &pages, int b, int head, int key) const {
    const int page = pages.table.data ? pages.clamped(pages.table(b, key / pages.size)) : b;
    return head_of<T, d>(cache, strides, page, head, key % pages.size, 1);
  }
  __device__ __forceinline__ auto new_row(int b, int head, int row) const {
    return head_of<const T, d>(fresh, strides_new, b, head, row, 1);
  }
};

/// Returns the first key that the cache lacks, of a sequence with `keys` keys.
__device__ __forceinline__ int first_new_key(const Problem &p, int keys) {
  return p.seqlen_new ? max(keys - p.seqlen_new, 0) : 1 << 30;
}

/// Copies the box in which the cache ends, by a warp: lane i row i, an old one or a new one. A box of a map would begin
/// at a multiple of 8 rows of the tile, and the new ones need not.
template <class T, int d>
__device__ __forceinline__ void gather(TmaTile<Bc, d, T> &tile, const CacheAndNew<T, d> &of,
                                       const Problem &p, const Pages &pages, const HeadRows &keys,
                                       int first_new) {
  const int lane = threadIdx.x % 32, old = first_new % pages.box_rows, row = lane - old;
  if (lane < pages.box_rows) {
    const T *const from =
        row < 0 ? of.cached(pages, keys.sequence, keys.head, first_new + row).data
                // Behind the last new row comes this one again: it is masked.
                : of.new_row(keys.sequence, keys.head, min(row, p.seqlen_new - 1)).data;
#pragma unroll
    for (int col = 0; col < d; col += 8)
      cp_async_16(tile(first_new % Bc + row, col), Matrix<const T>{from, 1, d}(0, col));
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();  // wgmma reads what ordinary copies wrote
}

/// Stores the new rows in the cache, by `warps` warps. A lane has 16 bytes of a key and of its value. No block waits
/// for this: each has the new rows from where they are.
template <class T, int d>
__device__ __forceinline__ void store_new_rows(const Problem &p, const Pages &pages,
                                               const CacheAndNew<T, d> &K,
                                               const CacheAndNew<T, d> &V, int warp, int warps) {
  constexpr int lanes = d / 8;  // per row
  const int all = p.batch * p.kv_heads * p.seqlen_new, col = threadIdx.x % lanes * 8;
  for (int i = (warp * 32 + int(threadIdx.x) % 32) / lanes; i < all; i += warps * 32 / lanes) {
    const int row = i % p.seqlen_new, any_head = i / p.seqlen_new;
    const int b = any_head / p.kv_heads, head = any_head % p.kv_heads;
    const int keys = Rows(p, b * p.heads).k.count, key = first_new_key(p, keys) + row;
    const auto to_K = K.cached(pages, b, head, key), to_V = V.cached(pages, b, head, key);
    const auto new_K = load<8>(K.new_row(b, head, row)(0, col));
    const auto new_V = load<8>(V.new_row(b, head, row)(0, col));
    store(to_K(0, col), new_K);
    store(to_V(0, col), new_V);
  }
}

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

template <class T, int d, bool softcap, bool alibi, bool sinks>
void run(const Problem &p) {
  const Pages pages(p, p.K_new ? 16 : Bc);  // a lane gathers a row of a box
  const auto keys_of = [&](void *cache, const Strides &strides, const void *fresh,
                           const Strides &strides_new) {
    const SequenceMap map = map_of_pages<T>(p, pages, cache, strides, d);
    return CacheAndNew<T, d>{map,
                             fresh ? sequence_map<T>(fresh, strides_new, p.batch, p.kv_heads,
                                                     p.seqlen_new, false, d, pages.box_rows)
                                   : map,
                             static_cast<T *>(cache),
                             static_cast<const T *>(fresh),
                             strides,
                             strides_new};
  };
  constexpr int kv_row_bytes = d * 2 * sizeof(T);
  const Order order = order_of<Br<d>>(p, kv_row_bytes);
  const Plan plan(p, Br<d>);
  const bool planned = plan_tiles<Br<d>>(p, plan, kv_row_bytes);
  const auto kernel = attention<T, d, softcap, alibi, sinks>;
  const int blocks =
      std::min(std::max(1, order.tiles), resident_blocks<WorkRings<T, d>>(kernel, threads<d>));
  launch_beside_on<WorkRings<T, d>>(
      p.stream, kernel, dim3(blocks), dim3(threads<d>), map_of_q<T>(p, p.Q, p.Q_strides, d),
      keys_of(p.K, p.K_strides, p.K_new, p.K_new_strides),
      keys_of(p.V, p.V_strides, p.V_new, p.V_new_strides), map_of_q<T>(p, p.O, p.O_strides, d), p,
      order, plan, pages, planned, scores_of(p));
}

template <class T, int d>
void run(const Problem &p) {
  // Where a score has a function, a sink is asked for once per tile of Q: no kernels of its own for that.
  if (p.softcap > 0)
    p.slopes ? run<T, d, true, true, true>(p) : run<T, d, true, false, true>(p);
  else if (p.slopes)
    run<T, d, false, true, true>(p);
  else
    p.sink_logits ? run<T, d, false, false, true>(p) : run<T, d, false, false, false>(p);
}

template <class T>
void run(const Problem &given) {
  const Problem p = with_sides(given);
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          return std::size_t(Plan::ints(p, p.head_dim == 64 ? Br<64> : Br<128>)) * sizeof(int);
        },
    .page_rows = 8,
    .writes_lse = true,
});
