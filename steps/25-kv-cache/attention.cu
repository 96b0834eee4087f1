// Step 25: KV cache. A few new queries against a long cache of keys: one m tile, and all bandwidth.
//
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --page-size, --append
// Before      step 23: a block is 128 queries of one head. Of one query it is 127 rows of nothing.
// Bottleneck  Memory: one query does four operations per byte of K and V, and each byte is read for
//             each head anew. No product matters, and no instruction; copies under way do.
// Change      The rows of an m tile are the queries of all heads that share the keys. Each warp
//             streams keys of its own, three stages deep, and waits for no other warp; at the end
//             they combine their parts. A page table says where a key is; new keys are stored.
// Prediction  128 KB of copies under way per SM, where 4.8 TB/s need 36 KB at a latency of 1 us. But
//             there is one block per sequence and key head: with batch 1 and 8 key heads 8 SMs of
//             132 work, 0.4 TB/s. The bandwidth grows with the batch, to 4.2 or more from 32 on.
#include "common/kernel/kernel.h"

namespace {

constexpr int rows = 16;  // of Q in a tile: the queries of the heads that share a key head
constexpr int keys = 16;  // of K and V in a warp's tile
constexpr int num_warps = 8, stages = 3;
constexpr int Bc = num_warps * keys;    // the warps take tiles in turn
constexpr float rescale_threshold = 8;  // P is at most 2^8 then: far from fp16's 65504

/// Rows of d elements, in swizzle atoms of 64 (128 bytes: each bank once). Within an atom the
/// chunks of 8 (16 bytes: 4 banks) are permuted: 8 consecutive rows keep a column in all banks.
template <int Rows, int d>
struct Swizzled {
  static constexpr int size = Rows * d;
  __device__ static constexpr int offset(int row, int col) {
    return row * d + col / 64 * 64 + (col % 64 ^ row % 8 * 8);
  }
};

template <int Rows, int d>
using SharedTile = Tile<half, Rows, d, Swizzled<Rows, d>>;

template <int d>
struct Stage {
  SharedTile<keys, d> K, V;
};

template <int d>
struct SharedStorage {
  union {
    Stage<d> stage[stages];
    Tile<float, rows, d + 8> O;  // when the warp is done with its keys
  } warp[num_warps];
  SharedTile<rows, d> Q;
  Tile<float, num_warps, rows> m, l;
};

/// Where a key and its value begin.
struct Place {
  std::int64_t K, V;  // pointers; as numbers, lanes can shuffle them
};

template <class T>
__device__ std::int64_t number(T *pointer) {
  return reinterpret_cast<std::int64_t>(pointer);
}
template <int d, class T = const half>
__device__ Matrix<T> row_at(std::int64_t place) {
  return {reinterpret_cast<T *>(place), 1, d};
}

/// Where a key of a sequence is kept: in its page, if there are pages.
__device__ Place place_in_cache(const Problem &p, int batch, int head, int key) {
  std::int64_t block = batch, row = key;
  if (p.page_table) {
    const int pages = (p.seqlen_k + p.page_size - 1) / p.page_size;
    block = Matrix<const int>{p.page_table, p.batch, pages}(batch, key / p.page_size);
    row = key % p.page_size;
  }
  if (p.cu_seqlens_k) row += Matrix<const int>{p.cu_seqlens_k, 1, p.batch + 1}(0, batch);
  const auto place = [&](void *first, const Strides &at) {
    return number(static_cast<half *>(first) + block * at.batch + head * at.head + row * at.row);
  };
  return {place(p.K, p.K_strides), place(p.V, p.V_strides)};
}

/// Where to read it: a sequence's last keys may come beside the cache.
template <int d>
__device__ Place place_to_read(const Problem &p, int batch, int head, int key, int seqlen) {
  const int i = key - (seqlen - p.seqlen_new);
  if (!p.K_new || i < 0) return place_in_cache(p, batch, head, key);
  const std::int64_t row = (std::int64_t{batch} * p.kv_heads + head) * p.seqlen_new + i;
  return {number(static_cast<const half *>(p.K_new) + row * d),
          number(static_cast<const half *>(p.V_new) + row * d)};
}

/// Stores the new keys and values in the cache. Nobody reads them there in this launch.
template <int d>
__device__ void append(const Problem &p, int batch, int head, int seqlen) {
  for (int i = threadIdx.x * 8; i < p.seqlen_new * d; i += num_warps * 32 * 8) {
    const int key = seqlen - p.seqlen_new + i / d, col = i % d;
    const Place from = place_to_read<d>(p, batch, head, key, seqlen);
    const Place to = place_in_cache(p, batch, head, key);
    store<8>(row_at<d, half>(to.K)(0, col), load<8>(row_at<d>(from.K)(0, col)));
    store<8>(row_at<d, half>(to.V)(0, col), load<8>(row_at<d>(from.V)(0, col)));
  }
}

/// Starts the copies of a warp's tile: lane i knows where key i is. Those from `there` on are not;
/// zeros arrive, for they are masked, but 0 times NaN is NaN.
template <int d>
__device__ void load_tile(Stage<d> &stage, const Place &place, int there) {
  constexpr int lanes = d / 8;  // per row, 16 bytes each
  const int first = threadIdx.x % 32 / lanes, col = threadIdx.x % lanes * 8;
#pragma unroll
  for (int row = first; row < keys; row += 32 / lanes) {
    const std::int64_t K = __shfl_sync(kAllLanes, place.K, row);
    const std::int64_t V = __shfl_sync(kAllLanes, place.V, row);
    cp_async_16_or_zeros(stage.K(row, col), row_at<d>(K)(0, col), row < there);
    cp_async_16_or_zeros(stage.V(row, col), row_at<d>(V)(0, col), row < there);
  }
}

template <int d>
__global__ void __launch_bounds__(num_warps * 32) attention(const Problem p, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int batch = blockIdx.y / p.kv_heads, kv_head = blockIdx.y % p.kv_heads;
  int seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k, first_query = 0;
  if (p.lengths_q) seqlen_q = Matrix<const int>{p.lengths_q, 1, p.batch}(0, batch);
  if (p.lengths_k) seqlen_k = Matrix<const int>{p.lengths_k, 1, p.batch}(0, batch);
  if (p.cu_seqlens_q) first_query = Matrix<const int>{p.cu_seqlens_q, 1, p.batch + 1}(0, batch);

  // Row r of the block's heads is query r / group of head r % group.
  const int group = p.heads / p.kv_heads, first_row = blockIdx.x * rows;
  const int rows_there = seqlen_q * group - first_row;  // of this tile, or more
  const auto row_of = [&](auto *tensor, const Strides &at, int row) {
    return Matrix<std::remove_pointer_t<decltype(tensor)>>{
        tensor + batch * at.batch + (kv_head * group + (first_row + row) % group) * at.head +
            (first_query + (first_row + row) / group) * at.row,
        1, d};
  };
  // How many keys it sees, the first and the last row of the tile.
  const auto keys_seen = [&](int row) {
    return p.causal ? (first_row + row) / group + 1 + seqlen_k - seqlen_q : seqlen_k;
  };
  const int seen_by_all = keys_seen(0);
  const int keys_end = rows_there > 0 ? keys_seen(rows_there < rows ? rows_there - 1 : rows - 1) : 0;

  for (int i = threadIdx.x * 8; i < rows * d; i += num_warps * 32 * 8)
    cp_async_16_or_zeros(smem.Q(i / d, i % d),
                         row_of(static_cast<const half *>(p.Q), p.Q_strides, i / d)(0, i % d),
                         i / d < rows_there);

  // The place of a key is looked up a tile before its copies begin: a page table is slow, too.
  Stage<d> *const stage = smem.warp[warp].stage;
  int next = warp * keys;  // the first key of the tile to load
  Place place{};
  const auto find_next = [&] {
    const int key = next + lane % keys;
    if (key < seqlen_k) place = place_to_read<d>(p, batch, kv_head, key, seqlen_k);
  };
  const auto load_next = [&](int to) {
    if (next < keys_end) load_tile<d>(stage[to], place, seqlen_k - next);
    cp_async_commit();
    next += Bc;
    find_next();
  };
  find_next();
  for (int i = 0; i < stages - 1; i++) load_next(i);
  if (first_row == 0) append<d>(p, batch, kv_head, seqlen_k);

  cp_async_wait<stages - 2>();
  __syncthreads();  // Q is there for all warps
  const int lane_row = lane % 16, lane_col = lane / 16 * 8;
  const int lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8;
  FragmentA q[d / 16];
#pragma unroll
  for (int col = 0; col < d; col += 16) q[col / 16] = ldmatrix_x4(smem.Q(lane_row, col + lane_col));

  FragmentC o[d / 8] = {};
  float l[2] = {}, m[2] = {-INFINITY, -INFINITY};
  for (int j = warp * keys, now = 0; j < keys_end; j += Bc) {
    cp_async_wait<stages - 2>();
    __syncwarp();  // the tile is there for all lanes, and the one before it has been read by all
    load_next(now == 0 ? stages - 1 : now - 1);

    FragmentC s[keys / 8] = {};
#pragma unroll
    for (int col = 0; col < d; col += 16)
      for (int key = 0; key < keys; key += 16) {
        const Vector<std::uint32_t, 4> k =
            ldmatrix_x4(stage[now].K(key + lane_key, col + lane_key_col));
        mma(s[key / 8], q[col / 16], {k[0], k[1]});
        mma(s[key / 8 + 1], q[col / 16], {k[2], k[3]});
      }
    if (j + keys > seen_by_all)
      for (int key = 0; key < keys; key += 8)
        for (int e = 0; e < 4; e++)
          if (j + key + lane % 4 * 2 + e % 2 >= keys_seen(lane / 4 + e / 2 * 8))
            s[key / 8][e] = -INFINITY;

    // Online softmax, lazily, as in step 14.
    bool must_rescale = false;
    float m_lane[2] = {-INFINITY, -INFINITY};
    for (int r = 0; r < 2; r++) {
      for (FragmentC &x : s) m_lane[r] = fmaxf(m_lane[r], fmaxf(x[2 * r], x[2 * r + 1]));
      must_rescale |= m_lane[r] * scale_log2 > m[r] + rescale_threshold;
    }
    if (__any_sync(kAllLanes, must_rescale))
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float m_new = m_lane[r];
        for (int mask = 1; mask < 4; mask *= 2)
          m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
        m_new = fmaxf(m[r], m_new * scale_log2);
        // While a row has seen nothing, its m is -inf, and so is m_new: not a number, times 0.
        const float alpha = m[r] == m_new ? 1 : ex2(m[r] - m_new);
        m[r] = m_new;
        l[r] *= alpha;
        for (FragmentC &x : o)
          for (int e = 2 * r; e < 2 * r + 2; e++) x[e] *= alpha;
      }
    for (int r = 0; r < 2; r++) {
      const float minus_m = m[r] == -INFINITY ? 0 : -m[r];  // 2^(-inf - 0) = 0
      for (FragmentC &x : s)
        for (int e = 2 * r; e < 2 * r + 2; e++) l[r] += x[e] = ex2(fmaf(x[e], scale_log2, minus_m));
    }

#pragma unroll
    for (int key = 0; key < keys; key += 16) {
      const FragmentC &left = s[key / 8], &right = s[key / 8 + 1];
      const FragmentA w = {cvt_rn_f16x2(left[0], left[1]), cvt_rn_f16x2(left[2], left[3]),
                           cvt_rn_f16x2(right[0], right[1]), cvt_rn_f16x2(right[2], right[3])};
      for (int col = 0; col < d; col += 16) {
        const Vector<std::uint32_t, 4> v =
            ldmatrix_x4_trans(stage[now].V(key + lane_row, col + lane_col));
        mma(o[col / 8], w, {v[0], v[1]});
        mma(o[col / 8 + 1], w, {v[2], v[3]});
      }
    }
    now = now == stages - 1 ? 0 : now + 1;
  }

  // Each warp has seen a part of the keys. O = sum_w 2^(m_w - m) O_w / sum_w 2^(m_w - m) l_w.
  __syncwarp();  // the last V has been read by all lanes; O lies over it
  for (int r = 0; r < 2; r++) {
    const int row = lane / 4 + 8 * r;
    for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
    if (lane % 4 == 0) {
      smem.m(warp, row) = m[r];
      smem.l(warp, row) = l[r];
    }
    for (int col = 0; col < d; col += 8)
      store<2>(smem.warp[warp].O(row, col + lane % 4 * 2),
               Vector<float, 2>{o[col / 8][2 * r], o[col / 8][2 * r + 1]});
  }
  __syncthreads();  // all parts are there
  for (int i = threadIdx.x * 4; i < rows * d; i += num_warps * 32 * 4) {
    const int row = i / d, col = i % d;
    if (row >= rows_there) break;
    float m_all = -INFINITY, l_all = 0, sum[4] = {};
    for (int w = 0; w < num_warps; w++) m_all = fmaxf(m_all, smem.m(w, row));
    for (int w = 0; w < num_warps; w++) {
      const float weight = smem.l(w, row) > 0 ? ex2(smem.m(w, row) - m_all) : 0;
      const Vector<float, 4> part = load<4>(smem.warp[w].O(row, col));
      l_all += weight * smem.l(w, row);
      for (int e = 0; e < 4; e++) sum[e] += weight * part[e];
    }
    const float scale = l_all > 0 ? 1 / l_all : 0;
    store<4>(row_of(static_cast<half *>(p.O), p.O_strides, row)(0, col),
             Vector<half, 4>{__float2half(sum[0] * scale), __float2half(sum[1] * scale),
                             __float2half(sum[2] * scale), __float2half(sum[3] * scale)});
  }
}

template <int d>
void run(const Problem &p) {
  const int row_tiles = (p.seqlen_q * (p.heads / p.kv_heads) + rows - 1) / rows;
  launch<SharedStorage<d>>(attention<d>, dim3(row_tiles, p.batch * p.kv_heads),
                           dim3(num_warps * 32), p, 1.44269504f / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
});
