// Step 59: payloads. Persistent blocks have equal shares of all keys of all sequences.
// SPDX-License-Identifier: MIT
// Needs       sm_90: cp.async.bulk, mbarrier
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --type, --page-size, --garbage
// Before      step 55: each sequence's keys are cut into equal splits, as many for each, a block for each.
// Bottleneck  Waves that are not full, sequences of unlike lengths, and blocks that read nothing while they begin
//             and end.
// Change      All tiles of keys of all sequences and heads lie on one line. Each block computes from the lengths
//             where its share begins, walks it, and starts the next sequence's copies before it has finished this
//             one. A sequence that is cut leaves parts, which are summed in groups by the last of each group.
// Prediction  7 x 40,000 and 12 x 9,000 keys at the bandwidth of 16 x 65,536; 64 sequences of 1 to 4096 keys, which
//             step 55 ends with the longest alone, in the time of their sum.
#include "common/kernel/cache.h"
#include "common/kernel/ring.h"

namespace {

constexpr int rows = 16;  // of Q in a tile: the queries of the heads that share a head of K and V
constexpr int keys = 16, stages = 3;  // of K and V: in a warp's tile, and the tiles that it has
constexpr int num_warps = 8, threads = num_warps * 32;
constexpr int overhead = 4;             // what an item costs besides its tiles, in tiles: a guess
constexpr int fan_in = 16, levels = 3;  // parts that one block sums, and levels of such sums

/// Rows of d elements of 2 bytes, as step 55 has them.
template <int d>
struct Padded {
  static constexpr int size = keys * (d + 8);
  __device__ static constexpr int offset(int row, int col) { return row * (d + 8) + col; }
};

template <class T, int d>
struct SharedStorage {
  struct {
    union {
      struct {
        Tile<T, keys, d, Padded<d>> K, V;
      };
      Tile<float, rows, d + 8> part;  // of O; columns d and d + 1 are m and l
    } stage[stages];
    Mbarrier landed[stages];
  } warp[num_warps];
  SharedTile<rows, d, T> Q;
  Tile<bool, 1, 8> is_last;
};

/// What an array of the device holds, between 0 and most: it may hold anything.
__device__ int clamped(int x, int most) {
  return max(0, min(x, most));
}

__device__ int keys_of(const Problem &p, int b) {
  const int most = p.cu_seqlens_k ? min(p.seqlen_k, p.total_k) : p.seqlen_k;
  return clamped(of_batch(p.lengths_k, p, b, p.seqlen_k), most);
}

/// The row of K or of V that belongs to a key: in its page, if there are pages.
template <class T, int d>
__device__ Matrix<const T> cache_row(const Problem &p, bool of_V, int b, int kv_h, int key) {
  int block = b, row = key;
  if (p.cu_seqlens_k) row = clamped(key + of_batch(p.cu_seqlens_k, p, b, 0), p.total_k - 1);
  if (p.page_table) {
    const Pages pages(p);
    block = clamped(pages.page_of(b, key), p.num_pages - 1), row = key % p.page_size;
  }
  const Strides &strides = of_V ? p.V_strides : p.K_strides;
  return {head_of<const T, d>(of_V ? p.V : p.K, strides, block, kv_h, row, 1).data, 1, d};
}

/// A block's way along the line. An item is a tile of rows of a sequence and head of K and V. On the line it has
/// a place for each tile of its keys, and some for its overhead.
struct Walk {
  int payload;   // of a block: places on the line
  int b, item;   // the sequence, and the item's number in it
  int seqlen_k;  // of the sequence
  int from;  // where the item begins, in places from where the payload begins; the first may begin before it
  int count;  // tiles of the items before it that the block has

  __device__ int tiles() const { return (seqlen_k + keys - 1) / keys; }
  __device__ int places() const { return max(1, tiles()); }
  __device__ bool ended(const Problem &p) const { return b == p.batch || from >= payload; }
  // The block has the item's tiles from begin() to end().
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

/// Computes where the block's payload begins. Each warp does so for itself: lane i looks at every 32nd sequence.
__device__ Walk plan(const Problem &p, int items) {
  const int lane = threadIdx.x % 32;
  const auto cost_of = [&](int b) {  // of all items of a sequence
    return b < p.batch ? (max(1, (keys_of(p, b) + keys - 1) / keys) + overhead) * items : 0;
  };
  const int alike = p.lengths_k ? 0 : cost_of(0);  // what each sequence costs, if all are full
  int total = alike * p.batch;
  if (!alike) {
    for (int b = lane; b < p.batch; b += 32) total += cost_of(b);
    for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(kAllLanes, total, mask);
  }
  const int payload = max(num_warps, (total + int(gridDim.x) - 1) / int(gridDim.x));
  int start = blockIdx.x * payload;  // on the line, and then from sequence b on
  int b = alike ? min(p.batch, start / alike) : p.batch;
  start -= b * alike;
  for (int first = 0; first < p.batch && !alike; first += 32) {
    int sum = cost_of(first + lane);  // and of those before it, from `first` on
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_sync(kAllLanes, sum, (lane - i) & 31);
      if (lane >= i) sum += other;
    }
    const int all = __shfl_sync(kAllLanes, sum, 31);
    if (start < all) {
      b = first;  // and as many sequences on as end before the payload begins
      for (int i = 16; i > 0; i /= 2)
        if (__shfl_sync(kAllLanes, sum, b - first + i - 1) <= start) b += i;
      const int before = __shfl_sync(kAllLanes, sum, (b - first + 31) & 31);
      if (b > first) start -= before;
      break;
    }
    start -= all;
  }
  Walk walk{payload, b, 0, 0, 0, 0};
  if (b == p.batch) return walk;
  walk.seqlen_k = keys_of(p, b);
  walk.item = start / (walk.places() + overhead);
  walk.from = -(start % (walk.places() + overhead));
  if (walk.begin() >= walk.places()) walk.next(p, items);  // of this item it has overhead alone
  return walk;
}

/// The rows of Q and O of an item.
template <int d>
struct Rows {
  int b, kv_h, group, first, seqlen_q, q_start, there;

  __device__ Rows(const Problem &p, const Walk &walk, int tiles_of_head)
      : b(walk.b),
        kv_h(walk.item / tiles_of_head),
        group(p.heads / p.kv_heads),
        first(walk.item % tiles_of_head * rows),
        seqlen_q(clamped(of_batch(p.lengths_q, p, b, p.seqlen_q), p.seqlen_q)),
        q_start(0) {
    if (p.cu_seqlens_q) {
      seqlen_q = min(seqlen_q, p.total_q);
      q_start = clamped(of_batch(p.cu_seqlens_q, p, b, 0), p.total_q - seqlen_q);
    }
    there = min(rows, seqlen_q * group - first);
  }
  // Row r of the group's heads is query r / group of its head r % group.
  template <class T>
  __device__ auto row(T *tensor, const Strides &strides, int row) const {
    const int head = kv_h * group + (first + row) % group;
    return head_of<T, d>(tensor, strides, b, head, q_start + (first + row) / group, 1);
  }
};

/// Counters of missing parts, and the parts: of each level, two per block. A block may have a part of an item that
/// began in another, and of one that it begins.
template <int d>
struct Workspace {
  void *memory;

  static std::size_t bytes(int blocks) {
    return sizeof(float) * levels * blocks * (1 + 2 * rows * (d + 4));
  }
  __device__ Reference<unsigned> missing(int level, int block,
                                         Where where = Where::current()) const {
    return Matrix<unsigned>{static_cast<unsigned *>(memory), levels, int(gridDim.x)}(level, block,
                                                                                     where);
  }
  __device__ Matrix<float> part(int level, int block, bool begins) const {
    const std::int64_t number = (std::int64_t{level} * gridDim.x + block) * 2 + begins;
    return {static_cast<float *>(memory) + levels * gridDim.x + number * rows * (d + 4), rows,
            d + 4};
  }
};

template <class T, int d>
__global__ void __launch_bounds__(threads) attention(Problem p, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int tiles_of_head = (p.seqlen_q * (p.heads / p.kv_heads) + rows - 1) / rows;
  const int items = p.kv_heads * tiles_of_head;  // of a sequence
  auto *const stage = smem.warp[warp].stage;
  auto *const landed = smem.warp[warp].landed;
  const Workspace<d> workspace{p.workspace};
  if (lane == 0) {
    for (int i = 0; i < stages; i++) mbarrier_init(landed[i], 1, Where::current(), "landed");
    mbarrier_fence_init();
  }
  __syncwarp();  // the barriers are initialised
  Walk now = plan(p, items);

  const auto load_Q = [&] {
    if (now.ended(p)) return;
    const Rows<d> tile(p, now, tiles_of_head);
    for (int i = threadIdx.x * 8; i < rows * d; i += threads * 8)
      cp_async_16_or_zeros(smem.Q(i / d, i % d),
                           tile.row(static_cast<const T *>(p.Q), p.Q_strides, i / d)(0, i % d),
                           i / d < tile.there);
    cp_async_commit();
  };
  load_Q();

  // Tile i of those that the block has is warp i % num_warps'. Lane i copies row i of it: K's, and from lane 16 on
  // V's. Where it lies is looked up a tile before its copy begins, because the page table is memory, too.
  const auto first_tile = [&](const Walk &walk) {
    return walk.begin() + ((warp - walk.count) & (num_warps - 1));
  };
  Walk ahead = now;
  int next = first_tile(ahead);  // the tile to load
  Matrix<const T> source{};
  const auto find_next = [&] {
    while (!ahead.ended(p) && next >= ahead.end()) {
      ahead.next(p, items);
      next = first_tile(ahead);
    }
    // After the last key it is copied again: it is masked, and finite if it was.
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
  while (!now.ended(p)) {
    const Walk item = now;
    const Rows<d> tile(p, item, tiles_of_head);
    const auto keys_seen = [&](int row) {  // by a row of the tile: key 0 and so many in all
      return p.causal ? (tile.first + row) / tile.group + 1 + item.seqlen_k - tile.seqlen_q
                      : item.seqlen_k;
    };
    cp_async_wait<0>();
    __syncthreads();  // Q is there for all warps, and the parts of the item before have been read
    const int lane_row = lane % 16, lane_col = lane / 16 * 8;
    const int lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8;
    FragmentA q[d / 16];
#pragma unroll
    for (int col = 0; col < d; col += 16)
      q[col / 16] = ldmatrix_x4(smem.Q(lane_row, col + lane_col));

    FragmentC o[d / 8] = {};
    float l[2] = {}, m[2] = {no_maximum, no_maximum};
    for (int t = first_tile(item); t < item.end(); t += num_warps) {
      const int current = at.stage, j = t * keys;
      mbarrier_wait(landed[current], at.parity);
      __syncwarp();  // all lanes have read the tile before this one: its stage may be overwritten
      load_next(current == 0 ? stages - 1 : current - 1);
      at.next();
      FragmentC s[keys / 8] = {};
#pragma unroll
      for (int col = 0; col < d; col += 16) {
        const auto k = ldmatrix_x4(stage[current].K(lane_key, col + lane_key_col));
        mma<T>(s[0], q[col / 16], {k[0], k[1]});
        mma<T>(s[1], q[col / 16], {k[2], k[3]});
      }
      if (j + keys > keys_seen(0))
        for (int key = 0; key < keys; key += 8)
          for (int e = 0; e < 4; e++)
            if (j + key + lane % 4 * 2 + e % 2 >= keys_seen(lane / 4 + e / 2 * 8))
              s[key / 8][e] = -INFINITY;

#pragma unroll
      for (int r = 0; r < 2; r++) {  // not lazily as in step 14: the loop mostly waits for memory
        float m_new = -INFINITY;
        for (FragmentC &x : s) m_new = fmaxf(m_new, fmaxf(x[2 * r], x[2 * r + 1]));
        for (int mask = 1; mask < 4; mask *= 2)
          m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
        m_new = fmaxf(m[r], m_new * scale_log2);
        const float alpha = ex2(m[r] - m_new);
        m[r] = m_new;
        l[r] *= alpha;
        for (FragmentC &x : o)
          for (int e = 2 * r; e < 2 * r + 2; e++) x[e] *= alpha;
        for (FragmentC &x : s)
          for (int e = 2 * r; e < 2 * r + 2; e++) l[r] += x[e] = ex2(fmaf(x[e], scale_log2, -m[r]));
      }

      const FragmentA weights = {cvt_rn_x2<T>(s[0][0], s[0][1]), cvt_rn_x2<T>(s[0][2], s[0][3]),
                                 cvt_rn_x2<T>(s[1][0], s[1][1]), cvt_rn_x2<T>(s[1][2], s[1][3])};
#pragma unroll
      for (int col = 0; col < d; col += 16) {
        const auto v = ldmatrix_x4_trans(stage[current].V(lane_row, col + lane_col));
        mma<T>(o[col / 8], weights, {v[0], v[1]});
        mma<T>(o[col / 8 + 1], weights, {v[2], v[3]});
      }
    }
    __syncwarp();  // the last V has been read by all lanes; the part lies over it
    now.next(p, items);
    // The stage that a warp has read last, of now.count tiles of the block.
    const auto part_of = [&](int w) -> auto & {
      return smem.warp[w]
          .stage[((now.count + num_warps - 1 - w) / num_warps + stages - 1) % stages]
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
    __syncthreads();      // the parts of all warps are there, and all have read Q
    load_Q();

    // The item's parts are those of `parts` blocks from `first` on. A group of fan_in of them counts its parts, and its
    // last block sums them. Its sum is a part of the next level, until there is one: the item's.
    const int before = item.from < 0 ? (item.payload - 1 - item.from) / item.payload : 0;
    const int first = blockIdx.x - before;
    int parts = before + (item.from + item.places() - 1) / item.payload + 1;
    int number = before,
        stride = 1;  // this block's among the parts; and from one to the next, in blocks
    int group = 0, members = 0;  // of the level below: its first block, and its parts
    for (int level = 0;; level++) {
      const int below = stride / fan_in;
      for (int i = threadIdx.x * 4; i < tile.there * d; i += threads * 4) {
        Part sum;
        if (level == 0)
          for (int w = 0; w < num_warps; w++) sum.add(part_at<d>(part_of(w), i / d, i % d));
#pragma unroll 8
        for (int k = 0; k < members; k++) {
          const int block = group + k * below;
          const auto part = workspace.part(level - 1, block, block == first);
          sum.add(part_at<d>(part, i / d, i % d));
        }
        if (parts == 1) {
          Vector<T, 4> O;  // of a row that saw no key it is 0
          for (int e = 0; e < 4; e++) O[e] = from_float<T>(sum.l > 0 ? sum.O[e] / sum.l : 0);
          store<4>(tile.row(static_cast<T *>(p.O), p.O_strides, i / d)(0, i % d), O);
        } else {
          const auto part = workspace.part(level, first + number * stride, number == 0);
          store<4>(part(i / d, i % d), sum.O);
          if (i % d == 0) store<2>(part(i / d, d), Vector<float, 2>{sum.m, sum.l});
        }
      }
      if (parts == 1) break;
      number /= fan_in;
      members = min(fan_in, parts - number * fan_in);
      group = first + number * fan_in * stride;
      __syncthreads();  // the part is there, for this block
      if (threadIdx.x == 0) {
        __threadfence();  // and for every block that finds it counted
        smem.is_last(0, 0) =
            members == 1 || atomic_dec(workspace.missing(level, group), members - 1) == 1;
        __threadfence();  // and if it is the last, the parts of all others are there for it
      }
      __syncthreads();
      if (!smem.is_last(0, 0)) break;
      parts = (parts + fan_in - 1) / fan_in;
      stride *= fan_in;
    }
  }
}

/// The blocks that the GPU runs at once.
template <class T, int d>
int num_blocks() {
  return resident_blocks<SharedStorage<T, d>>(attention<T, d>, threads);
}

template <class T, int d>
void run(const Problem &p) {
  const std::int64_t row_tiles =
      (std::int64_t{p.seqlen_q} * (p.heads / p.kv_heads) + rows - 1) / rows;
  const std::int64_t line = (p.seqlen_k / keys + 1 + overhead) * row_tiles * p.kv_heads * p.batch;
  if (line > 1 << 30)
    throw ShapeError("this step counts tiles of keys in 32 bits, and they may be " +
                     std::to_string(line) + "; fewer sequences, queries or keys");
  launch<SharedStorage<T, d>>(attention<T, d>, dim3(num_blocks<T, d>()), dim3(threads), p,
                              log2_e / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch =
        [](const Problem &p) {
          if (p.type == Type::kBf16)
            p.head_dim == 64 ? run<bf16, 64>(p) : run<bf16, 128>(p);
          else
            p.head_dim == 64 ? run<half, 64>(p) : run<half, 128>(p);
        },
    .workspace_bytes =
        [](const Problem &p) {
          return p.head_dim == 64 ? Workspace<64>::bytes(num_blocks<half, 64>())
                                  : Workspace<128>::bytes(num_blocks<half, 128>());
        },
    .decodes = true,
});
