// Step 25: KV cache. A few new queries against a long cache of keys: one m tile, and all bandwidth.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths
// Before      step 23: a block is 128 queries of one head, and one query leaves 127 rows empty. (Step
//             24's rotation is left out: a cache holds keys that were rotated when they were stored.)
// Bottleneck  Memory: 8 query heads that share keys do 8 operations per byte of K and V, and an H200
//             can do 206. Products do not limit the kernel; bytes in flight do.
// Change      The rows of an m tile are the queries of all heads that share the keys. Each warp
//             streams keys of its own through three stages and waits for no other warp. At the end
//             the block merges the warps' parts in shared memory.
// Prediction  128 KB of copies in flight per SM, where 4.8 TB/s at a latency of 1 us require 36 KB.
//             But a sequence and key head have one block: at batch 1 and 8 key heads 8 SMs of 132
//             work and read 0.5 TB/s. At batch 16 it is 3.9 to 4.4 TB/s.
#include "common/kernel/heads.h"
#include "common/kernel/kernel.h"
#include "common/kernel/swizzle.h"

namespace {

constexpr int rows = 16;  // of Q in a tile: the queries of the heads that share a head of K and V
constexpr int keys = 16, stages = 3;    // a warp's tile of K and V, and how many of them it has
constexpr float no_maximum = -FLT_MAX;  // of no keys: finite, for -inf - -inf is NaN

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

/// Starts a warp's copies of a tile of keys x d elements, 16 bytes per lane and iteration. Rows after the
/// matrix' last become zeros: they are masked, but a weight of 0 times NaN is NaN.
template <int d>
__device__ void load_tile(SharedTile<keys, d> &tile, const StridedMatrix<const half> &matrix,
                          int first_row) {
  constexpr int lanes = d / 8;  // per row
  const int row = threadIdx.x % 32 / lanes, col = threadIdx.x % lanes * 8;
  const auto part = matrix.from(first_row + row, col);
#pragma unroll
  for (int i = 0; i < keys; i += 32 / lanes)
    cp_async_16_or_zeros(tile(row + i, col), part(i, 0), i < part.rows);
}

/// What some of the keys give a row: l and 4 columns of O, relative to m.
struct Part {
  float m = no_maximum, l = 0;
  Vector<float, 4> O = {};

  __device__ void add(const Part &other) {
    const float m_new = fmaxf(m, other.m);
    const float alpha = ex2(m - m_new), beta = ex2(other.m - m_new);
    m = m_new;
    l = alpha * l + beta * other.l;
    for (int e = 0; e < 4; e++) O[e] = alpha * O[e] + beta * other.O[e];
  }
};

/// A part in a matrix: O is its columns 0 to d - 1, m and l are columns d and d + 1.
template <int d, class View>
__device__ Part part_at(View &parts, int row, int col) {
  const Vector<float, 2> m_and_l = load<2>(parts(row, d));
  return {m_and_l[0], m_and_l[1], load<4>(parts(row, col))};
}

template <int d, int num_warps, int threads = num_warps * 32>
__global__ void __launch_bounds__(threads) attention(const Problem p, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<d, num_warps>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * rows, kv_h = blockIdx.y, b = blockIdx.z;
  const int seqlen_q = of_batch(p.lengths_q, p, b, p.seqlen_q);
  const int seqlen_k = of_batch(p.lengths_k, p, b, p.seqlen_k);
  const int q_start = of_batch(p.cu_seqlens_q, p, b, 0);  // if packed
  const int k_start = of_batch(p.cu_seqlens_k, p, b, 0);
  const auto gK = head_of<const half, d>(p.K, p.K_strides, b, kv_h, k_start, seqlen_k);
  const auto gV = head_of<const half, d>(p.V, p.V_strides, b, kv_h, k_start, seqlen_k);
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

  auto *const stage = smem.warp[warp].stage;
  int next = warp * keys;  // the first key of the tile to load
  const auto load_next = [&](int to) {
    if (next < keys_end) {
      load_tile(stage[to].K, gK, next);
      load_tile(stage[to].V, gV, next);
    }
    cp_async_commit();
    next += num_warps * keys;
  };
  for (int i = 0; i < stages - 1; i++) load_next(i);

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
