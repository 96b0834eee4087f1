// Step 27: split KV. Several blocks share the keys of a sequence; the last to finish merges their parts.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --page-size, --append, --splits
// Before      step 26: a block has all keys of a sequence and a head of K and V.
// Bottleneck  Bytes in flight: at batch 1 and 8 key heads 8 SMs of 132 work.
// Change      The loop over keys is cut into splits, a block for each. A block leaves its part in
//             memory and counts itself. The last block of a tile merges the parts.
// Prediction  The bandwidth of a full GPU at any batch: 131,072 keys of 8 heads are 112 us at 4.8
//             TB/s, and 8 us to begin and to end: 4.5 TB/s. 1024 keys: 5 to 7 us of latency.
#include "common/kernel/cache.h"

namespace {

constexpr int rows = 16;  // of Q in a tile: the queries of the heads that share a head of K and V
constexpr int keys = 16, stages = 3;  // a warp's tile of K and V, and how many of them it has

template <int d, int num_warps>
struct SharedStorage {
  union {
    struct {
      SharedTile<keys, d> K, V;
    } stage[stages];
    Tile<float, rows, d + 8> part;  // of O; columns d and d + 1 are m and l
  } warp[num_warps];
  SharedTile<rows, d> Q;
  Tile<bool, 1, 8> is_last;
};

template <int d, class View>
__device__ void store_part(View &parts, int row, int col, const Part &part) {
  store<4>(parts(row, col), part.O);
  store<2>(parts(row, d), Vector<float, 2>{part.m, part.l});  // the same from all lanes of a row
}

template <int d, int num_warps, int threads = num_warps * 32>
__global__ void __launch_bounds__(threads) attention(Problem p, int splits, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<d, num_warps>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int split = blockIdx.x % splits, kv_h = blockIdx.y, b = blockIdx.z;
  const int first_row = blockIdx.x / splits * rows;
  const int seqlen_q = of_batch(p.lengths_q, p, b, p.seqlen_q);
  const int seqlen_k = of_batch(p.lengths_k, p, b, p.seqlen_k);
  const int q_start = of_batch(p.cu_seqlens_q, p, b, 0);
  // Row r of the group's heads is query r / group of its head r % group.
  const int group = p.heads / p.kv_heads, rows_there = min(rows, seqlen_q * group - first_row);
  const auto row_of = [=]<class E>(E *tensor, const Strides &strides, int row) {
    const int head = kv_h * group + (first_row + row) % group;
    return head_of<E, d>(tensor, strides, b, head, q_start + (first_row + row) / group, 1);
  };
  const auto keys_seen = [=](int row) {  // how many keys, from key 0 on, a row of the tile sees
    return p.causal ? (first_row + row) / group + 1 + seqlen_k - seqlen_q : seqlen_k;
  };
  // The tiles of keys that any row sees are divided evenly: splits differ by at most one tile.
  const int tiles = rows_there > 0 ? max(0, keys_seen(rows_there - 1) + keys - 1) / keys : 0;
  const int keys_begin = (tiles / splits * split + min(split, tiles % splits)) * keys;
  const int keys_end = keys_begin + (tiles / splits + (split < tiles % splits)) * keys;

  for (int i = threadIdx.x * 8; i < rows * d; i += threads * 8)
    cp_async_16_or_zeros(smem.Q(i / d, i % d),
                         row_of(static_cast<const half *>(p.Q), p.Q_strides, i / d)(0, i % d),
                         i / d < rows_there);

  // A key's place is looked up a tile before its copy begins, because the page table is memory, too.
  auto *const stage = smem.warp[warp].stage;
  int next = keys_begin + warp * keys;  // the first key of the tile to load
  const auto find_next = [&] {
    const int key = next + lane % keys;
    return key < seqlen_k ? place_of<d>(p, b, kv_h, key, seqlen_k - p.seqlen_new) : KeyPlace{};
  };
  KeyPlace place = find_next();
  const auto load_next = [&](int to) {
    if (next < keys_end) load_keys(stage[to].K, stage[to].V, place, seqlen_k - next);
    cp_async_commit();
    next += num_warps * keys;
    place = find_next();
  };
  for (int i = 0; i < stages - 1; i++) load_next(i);
  if (blockIdx.x == 0) append<d>(p, b, kv_h, seqlen_k);

  cp_async_wait<stages - 2>();
  __syncthreads();  // Q is there for all warps
  const int lane_row = lane % 16, lane_col = lane / 16 * 8;
  const int lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8;
  FragmentA q[d / 16];
#pragma unroll
  for (int col = 0; col < d; col += 16) q[col / 16] = ldmatrix_x4(smem.Q(lane_row, col + lane_col));

  FragmentC o[d / 8] = {};
  float l[2] = {}, m[2] = {no_maximum, no_maximum};
  for (int j = keys_begin + warp * keys, now = 0; j < keys_end; j += num_warps * keys) {
    cp_async_wait<stages - 2>();
    __syncwarp();  // the tile is there for all lanes, and the one before it has been read by all
    load_next(now == 0 ? stages - 1 : now - 1);
    FragmentC s[keys / 8] = {};
#pragma unroll
    for (int col = 0; col < d; col += 16)
      for (int key = 0; key < keys; key += 16) {
        const auto k = ldmatrix_x4(stage[now].K(key + lane_key, col + lane_key_col));
        mma(s[key / 8], q[col / 16], {k[0], k[1]});
        mma(s[key / 8 + 1], q[col / 16], {k[2], k[3]});
      }
    if (j + keys > keys_seen(0))
      for (int key = 0; key < keys; key += 8)
        for (int e = 0; e < 4; e++)
          if (j + key + lane % 4 * 2 + e % 2 >= keys_seen(lane / 4 + e / 2 * 8))
            s[key / 8][e] = -INFINITY;

    softmax_of_warp(s, o, m, l, scale_log2);

#pragma unroll
    for (int key = 0; key < keys; key += 16) {
      const FragmentC &left = s[key / 8], &right = s[key / 8 + 1];
      const FragmentA weights = {cvt_rn_f16x2(left[0], left[1]), cvt_rn_f16x2(left[2], left[3]),
                                 cvt_rn_f16x2(right[0], right[1]),
                                 cvt_rn_f16x2(right[2], right[3])};
      for (int col = 0; col < d; col += 16) {
        const auto v = ldmatrix_x4_trans(stage[now].V(key + lane_row, col + lane_col));
        mma(o[col / 8], weights, {v[0], v[1]});
        mma(o[col / 8 + 1], weights, {v[2], v[3]});
      }
    }
    now = now == stages - 1 ? 0 : now + 1;
  }
  __syncwarp();  // the last V has been read by all lanes; the part lies over it
  for (int r = 0; r < 2; r++) {
    auto &part = smem.warp[warp].part;
    const int row = lane / 4 + 8 * r;
    for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
    if (lane % 4 == 0) store<2>(part(row, d), Vector<float, 2>{m[r], l[r]});
    for (int col = 0; col < d; col += 8)
      store<2>(part(row, col + lane % 4 * 2),
               Vector<float, 2>{o[col / 8][2 * r], o[col / 8][2 * r + 1]});
  }
  __syncthreads();  // the parts of all warps are there
  // The workspace of the tile: a part for each split, and the number of those that are missing.
  const std::int64_t tile = (b * p.kv_heads + kv_h) * (gridDim.x / splits) + blockIdx.x / splits;
  float *const workspace = static_cast<float *>(p.workspace) + tile * (splits * rows + 1) * (d + 4);
  const Matrix<float> parts{workspace, splits * rows, d + 4};
  const Matrix<unsigned> missing{reinterpret_cast<unsigned *>(workspace + splits * rows * (d + 4)),
                                 1, 1};
  if (splits > 1) {
    for (int i = threadIdx.x * 4; i < rows_there * d; i += threads * 4)
      store_part<d>(parts, split * rows + i / d, i % d, sum_of_warps<d>(smem.warp, i / d, i % d));
    __syncthreads();  // all threads of the block have stored its part
    if (threadIdx.x == 0) {
      __threadfence();  // every block that sees the count must see the part
      smem.is_last(0, 0) = atomic_dec(missing(0, 0), splits - 1) == 1;
      __threadfence();  // the last block must see the parts of all others
    }
    __syncthreads();
    if (!smem.is_last(0, 0)) return;
  }
  for (int i = threadIdx.x * 4; i < rows_there * d; i += threads * 4) {
    Part sum = splits == 1 ? sum_of_warps<d>(smem.warp, i / d, i % d) : Part{};
#pragma unroll 8
    for (int j = 0; j < splits && splits > 1; j++)
      sum.add(part_at<d>(parts, j * rows + i / d, i % d));
    Vector<half, 4> O;  // of a row that saw no key it is 0
    for (int e = 0; e < 4; e++) O[e] = __float2half(sum.l > 0 ? sum.O[e] / sum.l : 0);
    store<4>(row_of(static_cast<half *>(p.O), p.O_strides, i / d)(0, i % d), O);
  }
}

/// Returns how many tiles of `of_rows` rows of Q the whole problem has. The heads that share a head of K and V have
/// their rows in the same tiles.
inline std::int64_t row_tiles(const Problem &p, int of_rows) {
  const std::int64_t rows_of_group = std::int64_t{p.seqlen_q} * (p.heads / p.kv_heads);
  return std::int64_t{p.batch} * p.kv_heads * ((rows_of_group + of_rows - 1) / of_rows);
}

/// How many blocks the GPU runs at once: of 8 warps, or of half as many until one fits it.
template <int d, int num_warps = 8>
int wave() {
  using Storage = SharedStorage<d, num_warps>;
  if constexpr (sizeof(Storage) > kSharedMemoryOfAll)
    if (!fits_a_block<Storage>()) return wave<d, num_warps / 2>();
  return resident_blocks<Storage>(attention<d, num_warps>, num_warps * 32);
}

/// Returns the number of splits of each of `tiles` tiles of rows: the fewest whose waves are as full as those
/// of any number, within 5%. A wave is as many blocks as the GPU runs at once.
inline int fewest_splits(std::int64_t tiles, int wave, int most) {
  const auto filled = [=](int splits) {
    const std::int64_t blocks = tiles * splits;
    return float(blocks) / ((blocks + wave - 1) / wave * wave);
  };
  float best = 0;
  for (int splits = 1; splits <= min(most, 128); splits++) best = fmaxf(best, filled(splits));
  int fewest = 1;
  while (filled(fewest) * 1.05f < best) fewest++;
  return fewest;
}

int num_splits(const Problem &p) {
  const int blocks = p.head_dim == 64 ? wave<64>() : wave<128>();
  return p.splits ? p.splits : fewest_splits(row_tiles(p, rows), blocks, p.seqlen_k / (8 * keys));
}

/// Launches blocks of 8 warps, or of half as many where two share an SM and until one fits this GPU: at head
/// dim 128, 8 warps need 196 KB of shared memory, 4 need 100 and 2 need 52.
template <int d, int num_warps = 8>
void run(const Problem &p, bool share_SMs) {
  using Storage = SharedStorage<d, num_warps>;
  if constexpr (sizeof(Storage) > kSharedMemoryOfAll)
    if (share_SMs || !fits_a_block<Storage>()) return run<d, num_warps / 2>(p, false);
  const int splits = num_splits(p), of_head = row_tiles(p, rows) / (p.kv_heads * p.batch);
  launch<Storage>(attention<d, num_warps>, dim3(of_head * splits, p.kv_heads, p.batch),
                  dim3(num_warps * 32), p, splits, log2_e / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch =
        [](const Problem &p) {
          // At head dim 128 a block of 8 warps has an SM for itself. If not all run at once, two of
          // 4 warps share it: one reads while the other begins or ends.
          const bool share_SMs = row_tiles(p, rows) * num_splits(p) > wave<128>();
          p.head_dim == 64 ? run<64>(p, false) : run<128>(p, share_SMs);
        },
    .workspace_bytes =
        [](const Problem &p) {
          return sizeof(float) * row_tiles(p, rows) * (num_splits(p) * rows + 1) * (p.head_dim + 4);
        },
    .decodes = true,
});
