// Step 59: payloads. Persistent blocks have equal shares of all keys of all sequences.
// SPDX-License-Identifier: MIT
// Needs       sm_90: cp.async.bulk, mbarrier
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --type, --page-size, --garbage
// Before      step 55: the keys of each sequence are cut into the same number of splits, with a block for each split.
// Bottleneck  Waves that are not full, sequences of unlike lengths, and blocks that read nothing while they begin
//             and end.
// Change      All tiles of keys of all sequences and heads lie on one line. Each block computes from the lengths
//             where its share begins, walks it, and starts the next sequence's copies before it has finished this
//             one. Where blocks share a sequence, the last block of each group of 16 sums the group's parts.
// Prediction  7 x 40,000 and 12 x 9,000 keys at the bandwidth of 16 x 65,536; 64 sequences of 1 to 4096 keys, which
//             step 55 ends with the longest alone, in the time of their sum.
#include "common/kernel/cache_rows.h"
#include "common/kernel/line.h"
#include "common/kernel/merge.h"
#include "common/kernel/ring.h"
#include "common/kernel/splits.h"

namespace {

constexpr int rows = 16;  // of Q in a tile: the queries of the heads that share a head of K and V
constexpr int keys = 16, stages = 3;  // a warp's tile of K and V, and how many of them it has
constexpr int num_warps = 8, threads = num_warps * 32;
constexpr int overhead = 4;  // what an item costs besides its tiles, in tiles: a guess
constexpr int fan_in = 16;   // parts that one block sums

template <class T, int d>
struct SharedStorage {
  struct {
    union {
      struct {
        Tile<T, keys, d, Padded<keys, d>> K, V;
      };
      Tile<float, rows, d + 8> part;  // of O; columns d and d + 1 are m and l
    } stage[stages];
    Mbarrier landed[stages];
  } warp[num_warps];
  SharedTile<rows, d, T> Q;
  Tile<bool, 1, 8> is_last;
};

/// A block's way along the line. An item is a tile of rows of one sequence and one head of K and V. It has a place on
/// the line for each tile of its keys, and `overhead` places more.
struct Walk {
  int payload;   // places of the line that each block has
  int b, item;   // the sequence, and the item's number in it
  int seqlen_k;  // of the sequence
  int from;      // the item's first place, from the payload's first on; below 0 if it lies before
  int count;     // the block's tiles in the items before this one

  __device__ int tiles() const { return (seqlen_k + keys - 1) / keys; }
  __device__ int places() const { return max(1, tiles()); }
  __device__ bool ended(const Problem &p) const { return b == p.batch || from >= payload; }
  // The block has the item's tiles begin() to end() - 1.
  __device__ int begin() const { return max(0, -from); }
  __device__ int end() const { return min(tiles(), payload - from); }
  __device__ void next(const Problem &p, int items) {
    count += max(0, end() - begin());
    from += places() + overhead;
    if (++item < items) return;
    item = 0;
    if (++b < p.batch) seqlen_k = keys_of(p, b);
  }
};

/// Computes where the block's payload begins. Each warp does so for itself.
__device__ Walk plan(const Problem &p, int items) {
  const auto cost_of = [&](int b) {  // of all items of a sequence
    return b < p.batch ? (max(1, (keys_of(p, b) + keys - 1) / keys) + overhead) * items : 0;
  };
  const int alike = p.lengths_k ? 0 : cost_of(0);  // what each sequence costs, if all are full
  const int total = alike ? alike * p.batch : length_of_line(p.batch, cost_of);
  const int payload = max(num_warps, (total + int(gridDim.x) - 1) / int(gridDim.x));
  int start = blockIdx.x * payload;  // on the line, and then in sequence b
  const int b = alike ? min(p.batch, start / alike) : find_on_line(p.batch, start, cost_of);
  start -= b * alike;
  Walk walk{payload, b, 0, 0, 0, 0};
  if (b == p.batch) return walk;
  walk.seqlen_k = keys_of(p, b);
  walk.item = start / (walk.places() + overhead);
  walk.from = -(start % (walk.places() + overhead));
  if (walk.begin() >= walk.places()) walk.next(p, items);  // only overhead of this item is left
  return walk;
}

template <class T, int d>
__global__ void __launch_bounds__(threads) attention(Problem p, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int tiles_of_head = (p.seqlen_q * (p.heads / p.kv_heads) + rows - 1) / rows;
  const int items = p.kv_heads * tiles_of_head;  // of a sequence
  auto *const stage = smem.warp[warp].stage;
  auto *const landed = smem.warp[warp].landed;
  const Workspace<rows, d> workspace{p.workspace};
  if (lane == 0) {
    for (int i = 0; i < stages; i++) mbarrier_init(landed[i], 1, Where::current(), "landed");
    mbarrier_fence_init();
  }
  __syncwarp();  // the barriers are initialised
  Walk walk = plan(p, items);

  const auto tile_of = [&](const Walk &of) {
    return GroupRows<rows, d>(p, of.b, of.item / tiles_of_head, of.item % tiles_of_head * rows);
  };
  const auto load_Q = [&] {
    if (walk.ended(p)) return;
    const GroupRows<rows, d> tile = tile_of(walk);
    for (int i = threadIdx.x * 8; i < rows * d; i += threads * 8)
      cp_async_16_or_zeros(smem.Q(i / d, i % d),
                           tile.row(static_cast<const T *>(p.Q), p.Q_strides, i / d)(0, i % d),
                           i / d < tile.there);
    cp_async_commit();
  };
  load_Q();

  // The warps take the block's tiles in turn.
  const auto first_tile = [&](const Walk &of) {
    return of.begin() + ((warp - of.count) & (num_warps - 1));
  };
  Walk ahead = walk;
  int next = first_tile(ahead);  // the tile to load
  // Lane i copies row i of the tile: lanes 0 to 15 copy K's rows, lanes 16 to 31 V's. A lane looks its row up while
  // the tile before is being copied, because the page table is in global memory, too.
  Matrix<const T> source{};
  const auto find_next = [&] {
    while (!ahead.ended(p) && next >= ahead.end()) {
      ahead.next(p, items);
      next = first_tile(ahead);
    }
    // Behind the last key, the last row is copied again: a masked row must still be finite.
    if (!ahead.ended(p))
      source = cache_row<T, d>(p, lane >= keys, ahead.b, ahead.item / tiles_of_head,
                               min(next * keys + lane % keys, ahead.seqlen_k - 1));
  };
  const auto load_next = [&](int to) {
    if (ahead.ended(p)) return;
    if (lane == 0) mbarrier_arrive_expect_tx(landed[to], 2 * keys * d * sizeof(T));
    bulk_load<d>((lane < keys ? stage[to].K : stage[to].V)(lane % keys, 0), source(0, 0),
                 landed[to]);
    next += num_warps;
    find_next();
  };
  find_next();
  for (int i = 0; i < stages - 1; i++) load_next(i);

  RingPosition<stages> at;
  while (!walk.ended(p)) {
    const Walk item = walk;
    const GroupRows<rows, d> tile = tile_of(item);
    const auto keys_seen = [&](int row) { return tile.keys_seen(p, row, item.seqlen_k); };
    cp_async_wait<0>();
    __syncthreads();  // all copies of Q have arrived, and all have read the parts of the item before
    const int lane_row = lane % 16, lane_col = lane / 16 * 8;
    const int lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8;
    FragmentA q[d / 16];
#pragma unroll
    for (int col = 0; col < d; col += 16)
      q[col / 16] = ldmatrix_x4(smem.Q(lane_row, col + lane_col));

    FragmentC o[d / 8] = {};
    float l[2] = {}, m[2] = {no_maximum, no_maximum};
    for (int t = first_tile(item); t < item.end(); t += num_warps) {
      const int now = at.stage, j = t * keys;
      mbarrier_wait(landed[now], at.parity);
      __syncwarp();  // all lanes have read the tile before this one: its stage may be overwritten
      load_next(now == 0 ? stages - 1 : now - 1);
      at.next();
      FragmentC s[keys / 8] = {};
#pragma unroll
      for (int col = 0; col < d; col += 16)
        for (int key = 0; key < keys; key += 16) {
          const auto k = ldmatrix_x4(stage[now].K(key + lane_key, col + lane_key_col));
          mma<T>(s[key / 8], q[col / 16], {k[0], k[1]});
          mma<T>(s[key / 8 + 1], q[col / 16], {k[2], k[3]});
        }
      if (j + keys > keys_seen(0))
        for (int key = 0; key < keys; key += 8)
          for (int e = 0; e < 4; e++)
            if (j + key + lane % 4 * 2 + e % 2 >= keys_seen(lane / 4 + e / 2 * 8))
              s[key / 8][e] = -INFINITY;

      softmax_of_warp(s, o, m, l, scale_log2);

#pragma unroll
      for (int key = 0; key < keys; key += 16) {
        const FragmentA weights = rounded<T>(s[key / 8], s[key / 8 + 1]);
        for (int col = 0; col < d; col += 16) {
          const auto v = ldmatrix_x4_trans(stage[now].V(key + lane_row, col + lane_col));
          mma<T>(o[col / 8], weights, {v[0], v[1]});
          mma<T>(o[col / 8 + 1], weights, {v[2], v[3]});
        }
      }
    }
    __syncwarp();  // the last V has been read by all lanes; the part lies over it
    walk.next(p, items);
    // Warp w's part lies in the stage that it has read last: the warps took walk.count tiles in turn.
    const auto part_of = [&](int w) -> auto & {
      return smem.warp[w]
          .stage[((walk.count + num_warps - 1 - w) / num_warps + stages - 1) % stages]
          .part;
    };
    for (int r = 0; r < 2; r++) {
      auto &part = part_of(warp);
      const int row = lane / 4 + 8 * r;
      for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
      if (lane % 4 == 0) store<2>(part(row, d), Vector<float, 2>{m[r], l[r]});
      for (int col = 0; col < d; col += 8)
        store<2>(part(row, col + lane % 4 * 2),
                 Vector<float, 2>{o[col / 8][2 * r], o[col / 8][2 * r + 1]});
    }
    fence_proxy_async();  // the next tile's copy overwrites the part
    __syncthreads();      // all warps have stored their parts, and have read Q
    load_Q();

    // Blocks from `first` on, `parts` of them, have a part of the item each. `before` of them come before this one.
    const int before = item.from < 0 ? (item.payload - 1 - item.from) / item.payload : 0;
    const int first = blockIdx.x - before;
    const int parts = before + (item.from + item.places() - 1) / item.payload + 1;
    const auto sum_of_block = [&](int row, int col) {
      Part sum;
      for (int w = 0; w < num_warps; w++) sum.add(part_at<d>(part_of(w), row, col));
      return sum;
    };
    const auto store_O = [&](int row, int col, const Part &sum) {
      Vector<T, 4> O;  // of a row that saw no key it is 0
      for (int e = 0; e < 4; e++) O[e] = from_float<T>(sum.l > 0 ? sum.O[e] / sum.l : 0);
      store<4>(tile.row(static_cast<T *>(p.O), p.O_strides, row)(0, col), O);
    };
    merge<fan_in, threads>(workspace, smem.is_last, tile.there, first, before, parts, sum_of_block,
                           store_O);
  }
}

/// How many blocks the GPU runs at once.
template <class T, int d>
int wave() {
  return resident_blocks<SharedStorage<T, d>>(attention<T, d>, threads);
}

/// Launches as many blocks.
template <class T, int d>
void run(const Problem &p) {
  const std::int64_t line = (p.seqlen_k / keys + 1 + overhead) * row_tiles(p, rows);
  if (line > 1 << 30)
    throw ShapeError("this step counts tiles of keys in 32 bits, and they may be " +
                     std::to_string(line) + "; fewer sequences, queries or keys");
  launch<SharedStorage<T, d>>(attention<T, d>, dim3(wave<T, d>()), dim3(threads), p,
                              log2_e / sqrtf(d));
}

template <class T>
void run_dims(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch =
        [](const Problem &p) { p.type == Type::kBf16 ? run_dims<bf16>(p) : run_dims<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          return p.head_dim == 64 ? Workspace<rows, 64>::bytes(wave<half, 64>())
                                  : Workspace<rows, 128>::bytes(wave<half, 128>());
        },
    .decodes = true,
});
