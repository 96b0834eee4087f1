// Step 54: pages. A tile of keys comes in boxes, each from a page of its own, and a lane copies each.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --seqlen-k, --kv-heads, --layout, --lengths, --page-size, --window, --window-size,
//             --garbage, --scale, --softcap, --alibi, --sink-logits
// Before      step 53: a tile of K or V is one box, so its rows follow each other. A cache has them in pages.
// Bottleneck  None: a cache in pages must be copied into one piece before step 53 may read it.
// Change      A box has as many rows as divide a page's and a tile's. Lane i of a warp copies box i. One warp loads K
//             and another V. Each looks up its boxes' pages a tile ahead, and divides once for each tile of Q. The
//             map of step 45 serves with pages for sequences.
// Prediction  At head dim 128 a tile of keys in pages of 16 is 32 requests to TMA, and a warp has 16 of them. At 55
//             clocks for a request and 8 for each of 70 other instructions it takes 1,440 clocks, beside the 2,316
//             of a tile in step 42: hidden, at least 0.95 of the speed without pages. Pages of 256 are 2 requests
//             of each warp, as without pages. Pages of 8 are 32 of each, 2,320 clocks: at the edge.
#include <algorithm>
#include <climits>
#include <numeric>

#include "common/kernel/consumers.h"
#include "common/kernel/plan.h"

namespace {

/// Where keys lie: row i of a sequence is row i % size of page table(sequence, i / size). Without pages a sequence
/// is one page, and its number is the sequence's.
struct Pages {
  StridedMatrix<const int>
      table;        // [batch, pages of the longest sequence]; its data are null without pages
  int size, count;  // rows of a page; pages in all
  int box_rows;     // divide a page's rows and a tile's, so that a box lies in one page
  int whole, rest;  // a tile's rows are so many pages, and a rest
  explicit Pages(const Problem &p)
      : table{p.page_table, p.batch, 0, 0},
        size(INT_MAX),
        count(p.cache_index ? p.caches : p.batch),
        box_rows(Bc),
        whole(0),
        rest(Bc) {
    if (!p.page_table) return;
    size = p.page_size, count = p.num_pages, box_rows = std::gcd(size, Bc);
    whole = Bc / size, rest = Bc % size;
    table.cols = (p.seqlen_k - 1) / size + 1;
    table.stride = p.page_table_stride ? p.page_table_stride : table.cols;
  }
};

template <class T, int d, bool softcap, bool alibi, bool sinks>
__global__ void __launch_bounds__(threads<d>, 1)          // blocks per SM
    attention(const __grid_constant__ SequenceMap map_Q,  // [batch, heads, rows, d], all four
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
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
    griddepcontrol_wait();  // the list is complete, and no launch before this one uses O
    // Lane i copies box i of a tile of keys. A lane without a box looks up the first one's page, too.
    const bool copies = lane * pages.box_rows < Bc;
    const int to_row = copies ? lane * pages.box_rows : 0;
    // Loads the tiles of K or V of a work, the last one first. One warp does so for K, and another for V.
    const auto load_tiles = [&](auto &ring, auto &at, const SequenceMap &map, const Work &work) {
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
      for (int j = work.to - 1;; j--) {
        mbarrier_wait(ring.empty[at.stage], at.parity ^ 1);
        if (lane == 0) mbarrier_arrive_expect_tx(ring.full[at.stage], sizeof(ring.tile[0]));
        __syncwarp();  // the bytes are expected, and no lane is a phase behind
        if (copies)
          tma_load_rows(ring.tile[at.stage], to_row, map, {keys.first, its_keys}, its_row,
                        keys.head, min(max(page, 0), pages.count - 1), ring.full[at.stage]);
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
        load_tiles(smem.K, k, map_K, at);
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
        __syncwarp();  // all lanes have read it before a V can be full: Q's stage is emptied after that
        load_tiles(smem.V, v, map_V, at);
      }
    } else if (warp == consumers * 4 + 2) {
      write_rows_without_keys<T, d, sinks>(problem, scores, lse, lane);
    }
  } else {
    consume<T, d, softcap, alibi, sinks>(smem, map_O, problem, scores, lse, q, k, v, warpgroup,
                                         warp, lane);
  }
}

template <class T, int d, bool softcap, bool alibi, bool sinks>
void run(const Problem &p) {
  const Pages pages(p);
  const auto map_k = [&](const void *tensor, const Strides &strides) {
    const bool packed = p.cu_seqlens_k;
    const int rows = p.page_table ? p.page_size : packed ? p.total_k : p.seqlen_k;
    return sequence_map<T>(tensor, strides, pages.count, p.kv_heads, rows, packed, d,
                           pages.box_rows);
  };
  constexpr int kv_row_bytes = d * 2 * sizeof(T);
  const Order order = order_of<Br<d>>(p, kv_row_bytes);
  const Plan plan(p, Br<d>);
  const bool planned = plan_tiles<Br<d>>(p, plan, kv_row_bytes);
  const auto kernel = attention<T, d, softcap, alibi, sinks>;
  const int blocks =
      std::min(std::max(1, order.tiles), resident_blocks<WorkRings<T, d>>(kernel, threads<d>));
  launch_beside_on<WorkRings<T, d>>(p.stream, kernel, dim3(blocks), dim3(threads<d>),
                                    map_of_q<T>(p, p.Q, p.Q_strides, d), map_k(p.K, p.K_strides),
                                    map_k(p.V, p.V_strides), map_of_q<T>(p, p.O, p.O_strides, d), p,
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
