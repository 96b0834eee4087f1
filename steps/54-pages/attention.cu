// Step 54: pages. A tile of keys comes in boxes, each from a page of its own, and a lane copies each.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --scale, --seqlen-k, --kv-heads, --layout, --lengths, --page-size, --window,
//             --window-size, --garbage
// Before      step 53: a tile of K or V is one box, so its rows follow each other. A cache has them in pages.
// Bottleneck  None: a cache in pages must be copied into one piece before step 53 may read it.
// Change      A box has as many rows as divide a page's and a tile's. Lane i of a warp that produces copies box i.
//             It looked up the box's page a tile before. The map of step 53 serves with pages for sequences.
// Prediction  At head dim 128 a tile of keys in pages of 16 is 32 requests to TMA, each 11 instructions of one
//             warp. At 4 clocks each that is 1,408 clocks, beside the 2,316 of a tile in step 42: hidden, at
//             least 0.95 of the speed without pages. Pages of 256 are 4 requests, as without pages. Pages of 8 are
//             64 requests, 2,816 clocks: 1.2 times the time.
#include <algorithm>
#include <climits>
#include <numeric>

#include "common/kernel/heads.h"
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"

namespace {

template <int d>
constexpr int warpgroups = d == 64 ? 3 : 2;  // that compute, with 64 rows of Q each
constexpr int Bc = 128;                      // rows of K and V in a tile
constexpr int q_stages = 2;                  // of Q: one is filled while the other is read
template <int d>
constexpr int stages = d == 64 ? 3 : 2;  // of K and of V: who skips a tile needs the next at once
// The last warpgroup of a block has the producer, its first warp.
template <int d>
constexpr int threads = (warpgroups<d> + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
template <int d>
constexpr int consumer_registers = warpgroups<d> == 3 ? 160 : 232;
template <int d>
constexpr int producer_registers = warpgroups<d> == 3 ? 32 : 40;
constexpr float ln_2 = 0.693147181f;  // of log2: ln x is log2(x) ln_2
constexpr int plan_threads = 1024;

/// What a block computes: a tile of Q, and the tiles of keys that some of its rows see.
struct Work {
  int head = -1, row = 0;  // of the whole batch, -1 if there is no more work; in its sequence
  int from = 0, to = 1;    // tiles of keys: at least one
  SequenceRows q{}, k{};   // the sequence
};
constexpr int work_ints = 8;
static_assert(sizeof(Work) == work_ints * sizeof(int));

/// Work in a row of a matrix or of a tile.
template <class View>
__device__ __forceinline__ void write_work(View &to, int row, const Work &work) {
  store(to(row, 0), Vector<int, 4>{work.head, work.row, work.from, work.to});
  store(to(row, 4), Vector<int, 4>{work.q.first, work.q.count, work.k.first, work.k.count});
}
template <class View>
__device__ __forceinline__ Work read_work(View &from, int row) {
  const Vector<int, 4> tile = load<4>(from(row, 0)), rows = load<4>(from(row, 4));
  return {tile[0], tile[1], tile[2], tile[3], {rows[0], rows[1]}, {rows[2], rows[3]}};
}

template <class T, int d>
struct SharedStorage {
  Ring<TmaTile<64, d, T>, q_stages> Q[warpgroups<d>];
  Ring<TmaTile<Bc, d, T>, stages<d>> K, V;
  Tile<int, q_stages, work_ints> work;  // what Q is of
  Tile<int, q_stages, 2> place;         // its sequence, and its head of K and V
};

/// The keys that a row sees. The last query stands at the last key.
struct Keys {
  int first, end;
  __device__ __forceinline__ Keys(const Problem &p, const Work &work, int row) {
    const int all = work.k.count, own = row + all - work.q.count;  // its position
    first = p.window_left < 0 ? 0 : max(0, own - min(p.window_left, all));
    end = p.window_right < 0 ? all : min(all, own + 1 + min(p.window_right, all + work.q.count));
  }
};

/// The work of a tile of Q: rows that see nothing have a tile of keys to mask.
__device__ __forceinline__ Work make_work(const Problem &p, int head, int row, int Br,
                                          const SequenceRows &q, const SequenceRows &k) {
  Work work{head, row, 0, 1, q, k};
  work.to = (max(1, Keys(p, work, min(row + Br, q.count) - 1).end) + Bc - 1) / Bc;
  work.from = min(Keys(p, work, row).first / Bc, work.to - 1);
  return work;
}

/// The order of the tiles of Q where all sequences are alike: of `side` heads of K and V, which share L2, the
/// last rows, which see the most keys, then the rows before them; then of the next heads.
struct Order {
  int Br, row_tiles, side;
  __device__ __forceinline__ Work work(const Problem &p, int tile) const {
    const int group = p.heads / p.kv_heads, of_head = row_tiles * group;
    const int section = tile / (side * of_head) * side;  // its first head of K and V
    const int here = min(side, p.batch * p.kv_heads - section) * group;
    const int in_section = tile - section * of_head;
    const int row = (row_tiles - 1 - in_section / here) * Br;
    return make_work(p, section * group + in_section % here, row, Br, {0, p.seqlen_q},
                     {0, p.seqlen_k});
  }
};

/// Where keys lie: row i of a sequence is row i % size of page table(sequence, i / size). Without pages a sequence
/// is one page, and its number is the sequence's.
struct Pages {
  Matrix<const int>
      table;        // [batch, pages of the longest sequence]; its data are null without pages
  int size, count;  // rows of a page; pages in all
  int box_rows;     // divide a page's rows and a tile's, so that a box lies in one page
  explicit Pages(const Problem &p)
      : table{p.page_table, 0, 0}, size(INT_MAX), count(p.batch), box_rows(Bc) {
    if (!p.page_table) return;
    size = p.page_size, count = p.num_pages, box_rows = std::gcd(size, Bc);
    table.rows = p.batch, table.cols = (p.seqlen_k - 1) / size + 1;
  }
};

/// The plan, in the workspace: a list of tiles of Q, and what it is made from.
struct Plan {
  unsigned *counter;     // from which the blocks draw
  Matrix<int> tiles;     // how many tiles of Q
  Matrix<int> list;      // [tiles, work_ints]
  Matrix<int> rows;      // [batch, 4]: the sequences' rows, clamped
  Matrix<int> sequence;  // [batch, 6]: longest first: section, row tiles before and its own, the
      // tile of keys, in units of Br, at which its rows begin, number, heads side by side
  static std::int64_t ints(const Problem &p, int Br) {
    return 32 + work_ints * most_tiles(p, Br) + 12 * std::int64_t{p.batch};
  }
  static std::int64_t most_tiles(const Problem &p, int Br) {
    return std::int64_t{p.batch} * p.heads * ((p.seqlen_q + Br - 1) / Br);
  }
  Plan(const Problem &p, int Br) {
    const int most = most_tiles(p, Br);
    int *const first = static_cast<int *>(p.workspace);
    counter = reinterpret_cast<unsigned *>(first);
    tiles = {first + 1, 1, 1};
    list = {first + 32, most, work_ints};
    rows = {list.data + std::int64_t{most} * work_ints, p.batch, 4};
    sequence = {rows.data + std::int64_t{p.batch} * 4, p.batch, 8};
  }
};

/// The rows of a sequence, whatever the arrays hold: inside the tensor, and no more than the longest.
__device__ __forceinline__ SequenceRows rows_of(const Problem &p, const int *cu_seqlens,
                                                const int *lengths, int seqlen, int total, int b) {
  const int first = cu_seqlens ? min(max(of_batch(cu_seqlens, p, b, 0), 0), total) : 0;
  const int most = cu_seqlens ? min(seqlen, total - first) : seqlen;
  return {first, min(max(of_batch(lengths, p, b, seqlen), 0), most)};
}

/// Plans the list, in one block. l2_tiles: tiles of K and V that L2 holds; 0 if a row of Q sees no more keys than
/// the row before. The list has sections, one after the other: some sequences, or some heads of one, as
/// many as L2 holds. In a section the tiles of Q that stand at the last keys come first. A place in the list is
/// the number of the tiles that come before it, so that no thread waits for another's.
template <class T, int d>
__global__ void __launch_bounds__(plan_threads)
    make_plan(const Problem p, const Plan plan, int Br, int l2_tiles) {
  griddepcontrol_launch_dependents();  // the blocks' prologues may run meanwhile
  const auto key_tiles = [&](int b) { return max(1, (plan.rows(b, 3) + Bc - 1) / Bc); };
  const auto row_tiles = [&](int b) {  // of a sequence without keys none
    return plan.rows(b, 3) > 0 ? (plan.rows(b, 1) + Br - 1) / Br : 0;
  };
  for (int b = threadIdx.x; b < p.batch; b += plan_threads) {
    const auto q = rows_of(p, p.cu_seqlens_q, p.lengths_q, p.seqlen_q, p.total_q, b);
    const auto k = rows_of(p, p.cu_seqlens_k, p.lengths_k, p.seqlen_k, p.total_k, b);
    store(plan.rows(b, 0), Vector<int, 4>{q.first, q.count, k.first, k.count});
  }
  __syncthreads();  // all sequences' rows are there
  for (int b = threadIdx.x; b < p.batch; b += plan_threads) {
    const int keys = key_tiles(b);
    int before = 0, rows_before = 0, keys_before = 0, all = 0;
    for (int other = 0; other < p.batch; other++) {
      const int n = key_tiles(other);
      all += n * p.kv_heads;
      if (n < keys || (n == keys && other >= b)) continue;
      before++;
      rows_before += row_tiles(other);
      keys_before += n * p.kv_heads;
    }
    // Sections of the same size, of which none is larger than L2: a small last one would leave blocks idle.
    const int sections = l2_tiles ? (all + l2_tiles - 1) / l2_tiles : all;
    const int in_section = (all + sections - 1) / sections;
    const int parts = (keys * p.kv_heads + in_section - 1) / in_section;  // of this sequence
    const int shift = l2_tiles ? (plan.rows(b, 3) - plan.rows(b, 1)) / Br : 0;
    store(plan.sequence(before, 0),
          Vector<int, 4>{keys_before / in_section, rows_before, row_tiles(b), shift});
    store(plan.sequence(before, 4),
          Vector<int, 4>{b, (p.kv_heads + parts - 1) / parts, rows_before + row_tiles(b), 0});
    if (before == p.batch - 1) plan.tiles(0, 0) = (rows_before + row_tiles(b)) * p.heads;
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
    const Vector<int, 4> rows = load<4>(plan.rows(b, 0));
    for (int head = lane; head < p.heads; head += 32) {
      const int first = head / group / side * side;  // of the heads of K and V in the section
      const int here = min(side, p.kv_heads - first) * group;
      const int place =
          earlier * p.heads + first * group * own[2] + longer * here + head - first * group;
      write_work(
          plan.list, place,
          make_work(p, b * p.heads + head, tile * Br, Br, {rows[0], rows[1]}, {rows[2], rows[3]}));
    }
  }
  // A sequence without keys has no tile: its O is 0, and no sum has a logarithm.
  for (int b = 0; b < p.batch; b++) {
    const Vector<int, 4> rows = load<4>(plan.rows(b, 0));
    if (rows[3] > 0) continue;
    for (int head = 0; head < p.heads; head++) {
      const int element = p.cu_seqlens_q ? 0 : b;
      const auto O = head_of<T, d>(p.O, p.O_strides, element, head, rows[0], rows[1]);
      const Matrix<float> lse{p.lse, p.batch * p.heads, p.seqlen_q};
      for (int at = threadIdx.x * 8; at < rows[1] * d; at += plan_threads * 8) {
        store(O(at / d, at % d), Vector<T, 8>{});
        if (at % d == 0) lse(b * p.heads + head, at / d) = -INFINITY;
      }
    }
  }
}
/// The next tile that no block has drawn; the first are the blocks' own. The counter holds 0, or `tiles`
/// or more. A launch draws as many numbers as there are tiles, 0 first, and leaves a 0.
__device__ __forceinline__ int draw_tile(unsigned *counter, int tiles) {
  const unsigned drawn = atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), tiles - 1);
  return gridDim.x + (drawn - 1 < unsigned(tiles - 1) ? tiles - drawn : 0);
}

template <class T, int d>
__global__ void __launch_bounds__(threads<d>, 1)          // blocks per SM
    attention(const __grid_constant__ SequenceMap map_Q,  // [batch, heads, rows, d], all four
              const __grid_constant__ SequenceMap map_K, const __grid_constant__ SequenceMap map_V,
              const __grid_constant__ SequenceMap map_O, const Problem problem, const Order order,
              const Plan plan, const Pages pages, bool planned, float scale_log2) {
  constexpr int consumers = warpgroups<d>;
  static_assert(128 * (consumers * consumer_registers<d> + producer_registers<d>) <= 65536);
  // The named barriers, one for each warpgroup; 0 is that of __syncthreads.
  constexpr int first_turn = 1, first_stored = first_turn + consumers;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (auto &Q : smem.Q) ring_init(Q, 1);
    ring_init(smem.K, consumers * 4);  // the warps that compute
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised
  RingPosition<q_stages> q;
  RingPosition<stages<d>> k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers<d>>();
    if (warp == consumers * 4) {
      // The consumers need each V after the K behind it, which may be the next tile's.
      const auto tell = [&](const Work &work) {  // it becomes visible when the phase of `full` ends
        __syncwarp();                            // all lanes have read what the stage told before
        if (lane == 0) {
          for (auto &Q : smem.Q) mbarrier_wait(Q.empty[q.stage], q.parity ^ 1);
          write_work(smem.work, q.stage, work);
          smem.place(q.stage, 0) = work.head / problem.heads;
          smem.place(q.stage, 1) = work.head % problem.heads / (problem.heads / problem.kv_heads);
        }
        __syncwarp();  // all lanes may read it
      };
      // Lane i copies box i of a tile of keys, if there is one. A box must have a key of the sequence. One that
      // would have none brings the tile's first rows again: they are masked, and finite if they were.
      const int to_row = lane * pages.box_rows;
      const auto first_key = [&](int stage, int j) {
        const int key = j * Bc + to_row;
        return to_row < Bc && key < smem.work(stage, 7) ? key : j * Bc;
      };
      const auto look_up = [&](int stage, int j) {  // the box's page; any number if it is a table's
        const int sequence = smem.place(stage, 0);
        return pages.table.data ? pages.table(sequence, first_key(stage, j) / pages.size)
                                : sequence;
      };
      const auto load = [&](auto &ring, auto &at, const SequenceMap &map, int stage, int j,
                            int page) {
        const int key = first_key(stage, j), row = key % pages.size;
        const int left = smem.work(stage, 7) - (key - row);  // of the sequence, from the page on
        const SequenceRows rows{smem.work(stage, 6), min(left, pages.size)};
        if (lane == 0) {
          mbarrier_wait(ring.empty[at.stage], at.parity ^ 1);
          mbarrier_arrive_expect_tx(ring.full[at.stage], sizeof(ring.tile[0]));
        }
        __syncwarp();  // the stage is empty, and no lane is a phase behind
        if (to_row < Bc)
          tma_load_rows(ring.tile[at.stage], to_row, map, rows, row, smem.place(stage, 1),
                        min(max(page, 0), pages.count - 1), ring.full[at.stage]);
        at.next();
      };
      // The page table is memory, too: K's page is looked up a tile ahead. V's was K's, a tile before.
      int ahead = 0, page_k = 0, page_v = 0;
      const auto load_k = [&](int stage, int j) {
        page_k = ahead;
        if (j > smem.work(stage, 2)) ahead = look_up(stage, j - 1);
        load(smem.K, k, map_K, stage, j, page_k);
      };
      const auto load_v = [&](int stage, int j) {
        load(smem.V, v, map_V, stage, j, page_v);
        page_v = page_k;
      };
      griddepcontrol_wait();  // the list is complete
      const int tiles =
          planned ? plan.tiles(0, 0) : problem.batch * problem.heads * order.row_tiles;
      const auto draw = [&] {
        return __shfl_sync(kAllLanes, lane == 0 ? draw_tile(plan.counter, tiles) : 0, 0);
      };
      for (int tile = blockIdx.x; tile < tiles; tile = draw()) {
        const Work at = planned ? read_work(plan.list, tile) : order.work(problem, tile);
        tell(at);
        const int sequence = smem.place(q.stage, 0), head = at.head - sequence * problem.heads;
        for (int i = 0; i < consumers && lane == 0; i++) {
          RingPosition<q_stages> same = q;
          // Rows behind the sequence's last are never stored: any will do, but a box must have a row of the
          // sequence.
          const int row = at.row + (at.row + i * 64 < at.q.count ? i * 64 : 0);
          ring_load(smem.Q[i], same, map_Q, at.q, row, head, sequence);
        }
        const int stage = q.stage, before = stage ^ 1;  // where the tile before is, for a while
        q.next();
        ahead = look_up(stage, at.to - 1);
        load_k(stage, at.to - 1);
        if (tile == int(blockIdx.x))
          page_v = page_k;
        else
          load_v(before, smem.work(before, 2));
        for (int j = at.to - 1; j > smem.work(stage, 2); j--) {
          load_k(stage, j - 1);
          load_v(stage, j);
        }
      }
      tell({});  // the end: no Q comes with it
      if (lane == 0)
        for (auto &Q : smem.Q) mbarrier_arrive(Q.full[q.stage]);
      if (int(blockIdx.x) < tiles) load_v(q.stage ^ 1, smem.work(q.stage ^ 1, 2));
    }
  } else {
    setmaxnreg_inc<consumer_registers<d>>();
    auto &Q = smem.Q[warpgroup];
    Accumulator<Bc> s;
    Accumulator<d> o;
    FragmentA p[Bc / 16];
    const auto start_qk = [&] {
      mbarrier_wait(smem.K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s, k_major(Q.tile[q.stage], 0, col), k_major(smem.K.tile[k.stage], 0, col),
                 col > 0);
      wgmma_commit();
    };
    const auto start_pv = [&](bool add) {
      mbarrier_wait(smem.V.full[v.stage], v.parity);
      wgmma_fence();
#pragma unroll
      for (int key = 0; key < Bc; key += 16)
        wgmma<T>(o, p[key / 16], mn_major(smem.V.tile[v.stage], key, 0), add || key > 0);
      wgmma_commit();
    };
    // Ping-pong (step 34): a warpgroup's products start when those of the one before have been started.
    const auto my_turn = [&] { named_barrier_sync(first_turn + warpgroup, 2 * 128); };
    const auto next_turn = [&] {
      named_barrier_arrive(first_turn + (warpgroup + 1) % consumers, 2 * 128);
    };
    if (warpgroup == consumers - 1) next_turn();

    // Four lanes share a row: they add their parts of l, and the first stores the row's log-sum-exp. Then l
    // becomes 1 / l.
    const auto finish_rows = [&](const float(&m)[2], float(&l)[2], int stage) {
      const Work work = read_work(smem.work, stage);
      const int row = work.row + warpgroup * 64 + warp % 4 * 16 + lane / 4;
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
        if (lane % 4 == 0 && row + r * 8 < work.q.count)
          Matrix<float>{problem.lse, problem.batch * problem.heads, problem.seqlen_q}(
              work.head, row + r * 8) = (m[r] + lg2(l[r])) * ln_2;
        l[r] = l[r] == 0 ? 1 : 1 / l[r];  // 0: the row sees no key, and O is 0
      }
    };
    // Q's place becomes O's: a warp writes 16 rows, which only its own products have read.
    const auto store_o = [&](const float(&l)[2], int stage) {
      const int row = warp % 4 * 16 + lane % 16;
      const auto pair = [&](int i, int r) { return cvt_rn_x2<T>(o(i) * l[r], o(i + 1) * l[r]); };
#pragma unroll
      for (int i = 0; i < o.size; i += 8)
        stmatrix_x4(Q.tile[stage](row, i * 2 + lane / 16 * 8),
                    {pair(i, 0), pair(i + 2, 1), pair(i + 4, 0), pair(i + 6, 1)});
      fence_proxy_async();
      named_barrier_sync(first_stored + warpgroup, 128);  // all four warps have written O
      if (threadIdx.x % 128 == 0) {
        const Work work = read_work(smem.work, stage);
        if (work.row + warpgroup * 64 < work.q.count)
          tma_store(map_O, work.q, work.row + warpgroup * 64, work.head % problem.heads,
                    work.head / problem.heads, Q.tile[stage]);
        tma_store_commit();
        tma_store_wait_read<0>();
        mbarrier_arrive(Q.empty[stage]);
      }
    };

    const auto wait_for_q = [&] {
      mbarrier_wait(Q.full[q.stage], q.parity);
      return read_work(smem.work, q.stage);
    };
    // Of three warpgroups the first one or two may see no key of the tile's last keys (step 42).
    const auto skips = [&](const Work &work) {
      const int end = Keys(problem, work, work.row + warpgroup * 64 + 63).end;
      return consumers == 3 && work.to - work.from > 1 && end <= (work.to - 1) * Bc;
    };
    const auto start_first_qk = [&](const Work &work) {
      if (skips(work)) ring_release(smem.K, k);
      start_qk();
    };
    Work at = wait_for_q();
    if (at.head < 0) return;  // there are fewer tiles than blocks
    my_turn();
    start_first_qk(at);
    next_turn();
    wgmma_wait<0>(s);
    while (at.head >= 0) {
      const bool skip = skips(at);
      const int first = uniform(at.from), last = uniform(at.to) - 1 - skip;
      const int first_row = at.row + warpgroup * 64;
      if (skip) {
        my_turn();  // a turn without products: the others multiply the tile's V
        next_turn();
        ring_release(smem.V, v);
      }
      float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
      ring_release(smem.K, k);
      // All rows of the warpgroup see all keys of the tiles from all_from to before all_to.
      const int all_to = uniform(Keys(problem, at, first_row).end / Bc);
      const int all_from = uniform((Keys(problem, at, first_row + 63).first + Bc - 1) / Bc);
      const auto mask_keys = [&](int j) {  // scores of the tile j of keys
        if (j < all_to && j >= all_from) return;
        const Work work = read_work(smem.work, q.stage);  // read again: registers are few
        const int row = work.row + warpgroup * 64 + warp % 4 * 16 + lane / 4;
        const int key = j * Bc + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const Keys seen(problem, work, row + r * 8);
          const unsigned count = max(0, seen.end - seen.first);
#pragma unroll
          for (int i = r * 2; i < s.size; i += i % 2 ? 3 : 1)
            if (unsigned(key + i / 4 * 8 + i % 2 - seen.first) >= count) s(i) = -INFINITY;
        }
      };
      mask_keys(last);
      softmax(s, m, l, alpha, scale_log2);
      to_fragments<T>(p, s);

      // The rows of a warpgroup may all be behind the sequence's last. It multiplies its first tile of keys, and
      // then hands on the others as it hands on one that it skips.
      int j = last;
      for (; j > first && first_row >= at.q.count; j--) {
        my_turn();
        next_turn();
        ring_release(smem.K, k);
        ring_release(smem.V, v);
      }
      bool add = false;  // to O: not the first tile of V
      for (; j > first; j--) {
        my_turn();
        start_qk();
        start_pv(add);  // of the tile before
        add = true;
        next_turn();
        wgmma_wait<1>(s);
        ring_release(smem.K, k);
        mask_keys(j - 1);
        const bool must_rescale = softmax(s, m, l, alpha, scale_log2);
        wgmma_wait<0>(o);
        ring_release(smem.V, v);
        to_fragments<T>(p, s);
        if (must_rescale) rescale(o, alpha);
      }

      const int used = q.stage;
      q.next();
      at = wait_for_q();
      if (at.head >= 0) {
        my_turn();
        start_pv(add);
        start_first_qk(at);  // of the next tile
        next_turn();
        finish_rows(m, l, used);
        wgmma_wait<1>(o);
        ring_release(smem.V, v);
        store_o(l, used);
        wgmma_wait<0>(s);
      } else {  // a branch of its own: with `if` around start_qk alone, nvcc 13.0 serialises all wgmma
        my_turn();
        start_pv(add);
        next_turn();
        finish_rows(m, l, used);
        wgmma_wait<0>(o);
        store_o(l, used);
      }
    }
  }
}

template <class T, int d>
void run(const Problem &p) {
  const Pages pages(p);
  const auto map_q = [&](const void *tensor, const Strides &strides) {
    const bool packed = p.cu_seqlens_q;
    return sequence_map<T>(tensor, strides, p.batch, p.heads, packed ? p.total_q : p.seqlen_q,
                           packed, d, 64);
  };
  const auto map_k = [&](const void *tensor, const Strides &strides) {
    const bool packed = p.cu_seqlens_k;
    const int rows = p.page_table ? p.page_size : packed ? p.total_k : p.seqlen_k;
    return sequence_map<T>(tensor, strides, pages.count, p.kv_heads, rows, packed, d,
                           pages.box_rows);
  };
  constexpr int Br = warpgroups<d> * 64;
  // As many heads as have 32 MB of K and V side by side: they stay in L2 (step 20).
  const bool causal = p.window_left < 0 && p.window_right >= 0;
  const int l2_tiles = causal ? (32 << 20) / (Bc * d * 2 * int(sizeof(T))) : 0;
  const int kv_heads = p.batch * p.kv_heads;
  Order order{Br, (p.seqlen_q + Br - 1) / Br, 1};
  if (l2_tiles) {
    const std::int64_t key_tiles = std::int64_t{(p.seqlen_k + Bc - 1) / Bc} * kv_heads;
    const std::int64_t sections =
        std::min<std::int64_t>((key_tiles + l2_tiles - 1) / l2_tiles, kv_heads);
    order.side = (kv_heads + sections - 1) / sections;
  }
  const Plan plan(p, Br);
  const bool planned = p.lengths_q || p.lengths_k;
  if (planned) launch<void>(make_plan<T, d>, dim3(1), dim3(plan_threads), p, plan, Br, l2_tiles);
  // With a scale of 0 a masked score would be -inf * 0 = NaN. No score shows 1e-20 of itself.
  const float scale_log2 = std::max(log2_e * p.scale, 1e-20f);
  const auto kernel = attention<T, d>;
  const int blocks = std::min<std::int64_t>(
      Plan::most_tiles(p, Br), resident_blocks<SharedStorage<T, d>>(kernel, threads<d>));
  launch_beside<SharedStorage<T, d>>(
      kernel, dim3(blocks), dim3(threads<d>), map_q(p.Q, p.Q_strides), map_k(p.K, p.K_strides),
      map_k(p.V, p.V_strides), map_q(p.O, p.O_strides), p, order, plan, pages, planned, scale_log2);
}

template <class T>
void run(Problem p) {
  // Both kinds of windows, and a causal mask, are a window with two sides.
  if (p.window) p.window_left = p.window - 1;
  if (p.window || p.causal) p.window_right = 0;
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          return std::size_t(Plan::ints(p, p.head_dim == 64 ? 192 : 128)) * sizeof(int);
        },
    .page_rows = 8,
    .writes_lse = true,
});
