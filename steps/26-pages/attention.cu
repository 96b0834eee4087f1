// Step 26: pages. The cache grows by appended keys and lies in pages, wherever there was room.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --page-size, --append
// Before      step 25: the keys of a sequence follow each other in memory.
// Bottleneck  Memory that is reserved and not used: a sequence grows by a token at a time, and a cache
//             without pages must be allocated at its longest, or moved.
// Change      A page table says where a key is: each lane looks up one key of the next tile, and lanes
//             pass the addresses on by shuffles. New keys are stored in passing.
// Prediction  The same time: a warp looks up a tile by one sector of 32 bytes, a tile ahead of its 8 KB of
//             copies (pages of 16 keys, head dim 128). That is 0.4% more bytes, and they come from L2
//             for 7 of the 8 heads of a sequence.
#include "common/kernel/heads.h"
#include "common/kernel/kernel.h"
#include "common/kernel/part.h"
#include "common/kernel/swizzle.h"

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
};

/// Where a key and its value begin: addresses as numbers, which lanes can shuffle.
struct KeyPlace {
  std::int64_t K, V;
};

/// The d elements at an address.
template <int d, class T = const half>
__device__ Matrix<T> row_at(std::int64_t address) {
  return {reinterpret_cast<T *>(address), 1, d};
}

/// The place of a sequence's key: in its page, if there are pages. From new_from on it is beside the cache.
template <int d>
__device__ KeyPlace place_of(const Problem &p, int b, int kv_h, int key, int new_from) {
  const auto place = [=](const void *tensor, const Strides &strides, int block, int row) {
    const auto head = head_of<const half, d>(tensor, strides, block, kv_h, row, 1);
    return reinterpret_cast<std::int64_t>(head.data);
  };
  if (key >= new_from) {
    const std::int64_t of_head = std::int64_t{p.seqlen_new} * d;
    const Strides dense{of_head * p.kv_heads, of_head, d};
    return {place(p.K_new, dense, b, key - new_from), place(p.V_new, dense, b, key - new_from)};
  }
  int block = b, row = key + of_batch(p.cu_seqlens_k, p, b, 0);
  if (p.page_table) {
    const int pages = (p.seqlen_k + p.page_size - 1) / p.page_size;
    block = Matrix<const int>{p.page_table, p.batch, pages}(b, key / p.page_size);
    row = key % p.page_size;
  }
  return {place(p.K, p.K_strides, block, row), place(p.V, p.V_strides, block, row)};
}

/// Stores the new keys of a sequence and their values in the cache, by all threads of a block. A
/// launch that does so reads them beside the cache.
template <int d>
__device__ void append(const Problem &p, int b, int kv_h, int seqlen_k) {
  const int new_from = seqlen_k - p.seqlen_new;
  for (int i = threadIdx.x * 8; i < p.seqlen_new * d; i += blockDim.x * 8) {
    const KeyPlace from = place_of<d>(p, b, kv_h, new_from + i / d, new_from);
    const KeyPlace to = place_of<d>(p, b, kv_h, new_from + i / d, seqlen_k);
    store<8>(row_at<d, half>(to.K)(0, i % d), load<8>(row_at<d>(from.K)(0, i % d)));
    store<8>(row_at<d, half>(to.V)(0, i % d), load<8>(row_at<d>(from.V)(0, i % d)));
  }
}

/// Starts the copies of a warp's tile of K and V: lane i knows the place of key i. Keys from `there` on become
/// zeros: they are masked, but a weight of 0 times NaN is NaN.
template <int d>
__device__ void load_keys(SharedTile<keys, d> &to_K, SharedTile<keys, d> &to_V,
                          const KeyPlace &place, int there) {
  constexpr int lanes = d / 8;  // per row
  const int first = threadIdx.x % 32 / lanes, col = threadIdx.x % lanes * 8;
#pragma unroll
  for (int i = 0; i < keys; i += 32 / lanes) {
    const std::int64_t K = __shfl_sync(kAllLanes, place.K, first + i);
    const std::int64_t V = __shfl_sync(kAllLanes, place.V, first + i);
    cp_async_16_or_zeros(to_K(first + i, col), row_at<d>(K)(0, col), first + i < there);
    cp_async_16_or_zeros(to_V(first + i, col), row_at<d>(V)(0, col), first + i < there);
  }
}

template <int d, int num_warps, int threads = num_warps * 32>
__global__ void __launch_bounds__(threads) attention(const Problem p, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<d, num_warps>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * rows, kv_h = blockIdx.y, b = blockIdx.z;
  const int seqlen_q = of_batch(p.lengths_q, p, b, p.seqlen_q);
  const int seqlen_k = of_batch(p.lengths_k, p, b, p.seqlen_k);
  const int q_start = of_batch(p.cu_seqlens_q, p, b, 0);  // if packed
  // Row r of the group's heads is query r / group of its head r % group.
  const int group = p.heads / p.kv_heads, rows_there = min(rows, seqlen_q * group - first_row);
  const auto row_of = [=]<class E>(E *tensor, const Strides &strides, int row) {
    const int head = kv_h * group + (first_row + row) % group;
    return head_of<E, d>(tensor, strides, b, head, q_start + (first_row + row) / group, 1);
  };
  const auto keys_seen = [=](int row) {  // how many keys, from key 0 on, a row of the tile sees
    return p.causal ? (first_row + row) / group + 1 + seqlen_k - seqlen_q : seqlen_k;
  };
  const int keys_end = rows_there > 0 ? keys_seen(rows_there - 1) : 0;  // no row sees further

  for (int i = threadIdx.x * 8; i < rows * d; i += threads * 8)
    cp_async_16_or_zeros(smem.Q(i / d, i % d),
                         row_of(static_cast<const half *>(p.Q), p.Q_strides, i / d)(0, i % d),
                         i / d < rows_there);

  // A key's place is looked up a tile before its copy begins, because the page table is memory, too.
  auto *const stage = smem.warp[warp].stage;
  int next = warp * keys;  // the first key of the tile to load
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
  for (int j = warp * keys, now = 0; j < keys_end; j += num_warps * keys) {
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
  for (int i = threadIdx.x * 4; i < rows_there * d; i += threads * 4) {
    Part sum;
    for (auto &of_warp : smem.warp) sum.add(part_at<d>(of_warp.part, i / d, i % d));
    Vector<half, 4> O;  // of a row that saw no key it is 0
    for (int e = 0; e < 4; e++) O[e] = __float2half(sum.l > 0 ? sum.O[e] / sum.l : 0);
    store<4>(row_of(static_cast<half *>(p.O), p.O_strides, i / d)(0, i % d), O);
  }
}

/// Launches blocks of 8 warps, or of half as many until one fits this GPU: at head dim 128, 8 warps need
/// 196 KB of shared memory, 4 need 100 and 2 need 52.
template <int d, int num_warps = 8>
void run(const Problem &p) {
  using Storage = SharedStorage<d, num_warps>;
  if constexpr (sizeof(Storage) > kSharedMemoryOfAll)
    if (!fits_a_block<Storage>()) return run<d, num_warps / 2>(p);
  const int row_tiles = (p.seqlen_q * (p.heads / p.kv_heads) + rows - 1) / rows;
  launch<Storage>(attention<d, num_warps>, dim3(row_tiles, p.kv_heads, p.batch),
                  dim3(num_warps * 32), p, log2_e / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
    .decodes = true,
});
