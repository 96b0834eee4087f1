// SPDX-License-Identifier: MIT
// Step 50's kernel for new tokens: few queries per head, and a long cache of keys. Step 27's, for the
// types and head dims of step 29, with the windows of step 28 and the queries of step 24.
#pragma once

#include "common/kernel/cache.h"
#include "common/kernel/splits.h"
#include "steps/50-in-a-model/rows.h"

namespace {

namespace decoding {

constexpr int keys = 16;  // of K and V in a warp's tile
constexpr int rows = 16;  // of Q in a tile: the queries of the heads that share a key head
template <int d>
constexpr int most_warps = d <= 128 ? 8 : 4;
template <int d>
constexpr int stages = d == 256 ? 2 : 3;  // so that sm_80, with 163 KB per block, has room for it
constexpr int max_counters = 4096;        // more row tiles than fill any GPU: their keys stay whole

template <class T, int d, int num_warps>
struct SharedStorage {
  union {
    struct {
      SharedTile<keys, d, T> K, V;
    } stage[stages<d>];
    Tile<float, rows, d + 8> part;  // of O; in columns d and d + 1 are m and l
  } warp[num_warps];
  SharedTile<rows, d, T> Q;
  Tile<bool, 1, 8> is_last;
};

/// One block per split of the keys (blockIdx.y), tile of rows (x), and head of K and V of a sequence (z).
/// The last block of a tile to finish adds up the parts that the others have left in the workspace.
template <class T, int d, int num_warps>
__global__ void __launch_bounds__(num_warps * 32) decode(const Problem p, float scale_log2) {
  constexpr int threads = num_warps * 32, stages = decoding::stages<d>;
  auto &smem = shared_storage<SharedStorage<T, d, num_warps>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int b = blockIdx.z / p.kv_heads, kv_head = blockIdx.z % p.kv_heads;
  const int split = blockIdx.y, splits = gridDim.y;
  const int seqlen_q = uniform(of_batch(p.lengths_q, p, b, p.seqlen_q));
  const int seqlen_k = uniform(of_batch(p.lengths_k, p, b, p.seqlen_k));
  const int first_query = uniform(of_batch(p.cu_seqlens_q, p, b, 0));

  // Row r of the block's heads is query r / group of head r % group.
  const int group = p.heads / p.kv_heads, first_row = blockIdx.x * rows;
  const int rows_there = min(seqlen_q * group - first_row, rows);  // of this tile
  const auto row_of = [&](auto *tensor, const Strides &at, int row) {
    return Matrix<std::remove_pointer_t<decltype(tensor)>>{
        tensor + b * at.batch + (kv_head * group + (first_row + row) % group) * at.head +
            (first_query + (first_row + row) / group) * at.row,
        1, d};
  };
  const auto position_of = [&](int row) { return (first_row + row) / group + seqlen_k - seqlen_q; };
  // A row of this tile sees the keys from window_begin to seen, and the sinks.
  const auto seen = [&](int row) { return p.causal || p.window ? position_of(row) + 1 : seqlen_k; };
  const auto window_begin = [&](int row) { return p.window ? max(0, seen(row) - p.window) : 0; };
  // This block's share of the tiles that any of its rows sees: first those of the sinks.
  const int end = rows_there > 0 ? (max(0, seen(rows_there - 1)) + keys - 1) / keys : 0;
  const int window_tile = min(end, window_begin(0) / keys);
  const int sink_tiles = min(window_tile, (min(p.sinks, seqlen_k) + keys - 1) / keys);
  const int tiles = sink_tiles + end - window_tile;
  const int last = std::int64_t{tiles} * (split + 1) / splits;
  int t = std::int64_t{tiles} * split / splits + warp;  // the tile that the warp computes with
  const auto key_of = [&](int tile) {
    return (tile < sink_tiles ? tile : tile - sink_tiles + window_tile) * keys;
  };

  for (int i = threadIdx.x; i < rows * d / 16; i += threads) {
    const int row = i % rows,
              col = i / rows * 8;  // 8 lanes, 8 rows: with the swizzle each bank once
    Vector<T, 8> left = {}, right = {};
    if (row < rows_there) {
      const auto gQ = row_of(static_cast<const T *>(p.Q), p.Q_strides, row);
      left = load<8>(gQ(0, col)), right = load<8>(gQ(0, col + d / 2));
      if (p.rope != Rope::kNone && position_of(row) >= 0)
        rotate<T, d>(left, right, p, position_of(row), col);
    }
    store<8>(smem.Q(row, col), left), store<8>(smem.Q(row, col + d / 2), right);
  }

  // The place of a key is looked up a tile before its copies begin: a page table is slow, too.
  auto *const stage = smem.warp[warp].stage;
  int next = t;  // the tile to load
  KeyPlace place{};
  const auto find_next = [&] {
    const int key = key_of(next) + lane % keys;
    if (next >= last || key >= seqlen_k) return;
    place = place_of<d, T>(p, b, kv_head, key, seqlen_k);
  };
  const auto load_next = [&](int to) {
    if (next < last) load_keys(stage[to].K, stage[to].V, place, seqlen_k - key_of(next));
    cp_async_commit();
    next += num_warps;
    find_next();
  };
  find_next();
  for (int i = 0; i < stages - 1; i++) load_next(i);

  __syncthreads();  // Q is there for all warps
  const int lane_row = lane % 16, lane_col = lane / 16 * 8;
  const int lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8;
  FragmentA q[d / 16];
#pragma unroll
  for (int col = 0; col < d; col += 16) q[col / 16] = ldmatrix_x4(smem.Q(lane_row, col + lane_col));

  FragmentC o[d / 8] = {};
  float l[2] = {}, m[2] = {no_maximum, no_maximum};
  for (int now = 0; t < last; t += num_warps) {
    cp_async_wait<stages - 2>();
    __syncwarp();  // the tile is there for all lanes, and the one before it has been read by all
    load_next(now == 0 ? stages - 1 : now - 1);

    FragmentC s[keys / 8] = {};
#pragma unroll
    for (int col = 0; col < d; col += 16) {
      const auto k = ldmatrix_x4(stage[now].K(lane_key, col + lane_key_col));
      mma<T>(s[0], q[col / 16], {k[0], k[1]});
      mma<T>(s[1], q[col / 16], {k[2], k[3]});
    }
    const int j = key_of(t);
    if (j + keys > seen(0) || (j < window_begin(rows - 1) && j + keys > p.sinks))
      for (int key = 0; key < keys; key += 8)
        for (int e = 0; e < 4; e++) {
          const int row = lane / 4 + e / 2 * 8, k = j + key + lane % 4 * 2 + e % 2;
          if (k >= min(seqlen_k, seen(row)) || (k < window_begin(row) && k >= p.sinks))
            s[key / 8][e] = -INFINITY;
        }

#pragma unroll
    for (int r = 0; r < 2; r++) {
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

    const FragmentA w = {cvt_rn_x2<T>(s[0][0], s[0][1]), cvt_rn_x2<T>(s[0][2], s[0][3]),
                         cvt_rn_x2<T>(s[1][0], s[1][1]), cvt_rn_x2<T>(s[1][2], s[1][3])};
#pragma unroll
    for (int col = 0; col < d; col += 16) {
      const auto v = ldmatrix_x4_trans(stage[now].V(lane_row, col + lane_col));
      mma<T>(o[col / 8], w, {v[0], v[1]});
      mma<T>(o[col / 8 + 1], w, {v[2], v[3]});
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
  __syncthreads();  // all warps' parts are there

  const int tile = blockIdx.z * gridDim.x + blockIdx.x, all_tiles = gridDim.z * gridDim.x;
  const Matrix<unsigned> missing{static_cast<unsigned *>(p.workspace), 1, max_counters};
  const Matrix<float> parts{static_cast<float *>(p.workspace) + max_counters,
                            all_tiles * splits * rows, d + 4};
  if (splits > 1) {
    for (int i = threadIdx.x * 4; i < rows_there * d; i += threads * 4) {
      const Part sum = sum_of_warps<d>(smem.warp, i / d, i % d);
      const int row = (tile * splits + split) * rows + i / d;
      store<4>(parts(row, i % d), sum.O);
      if (i % d == 0) store<2>(parts(row, d), Vector<float, 2>{sum.m, sum.l});
    }
    __syncthreads();  // all threads of the block have stored its part
    if (threadIdx.x == 0) {
      __threadfence();  // every block that sees the count must see the part
      smem.is_last(0, 0) = atomic_dec(missing(0, tile), splits - 1) == 1;
      __threadfence();  // the last block must see the parts of all others
    }
    __syncthreads();
    if (!smem.is_last(0, 0)) return;
  }
  for (int i = threadIdx.x * 4; i < rows_there * d; i += threads * 4) {
    Part sum;
    if (splits == 1)
      sum = sum_of_warps<d>(smem.warp, i / d, i % d);
    else
#pragma unroll 8
      for (int j = 0; j < splits; j++)
        sum.add(part_at<d>(parts, (tile * splits + j) * rows + i / d, i % d));
    Vector<T, 4> O;  // of a row that saw no key it is 0
    for (int e = 0; e < 4; e++) O[e] = from_float<T>(sum.l > 0 ? sum.O[e] / sum.l : 0);
    store<4>(row_of(static_cast<T *>(p.O), p.O_strides, i / d)(0, i % d), O);
  }
}

/// Returns f of the number of a block's warps, given as a type: the largest number, or half of it where two
/// blocks share an SM (at head dim 128), halved until a block fits this GPU.
template <class T, int d, int num_warps = most_warps<d>, class F>
auto with_warps(bool share_SMs, F f) {
  using Storage = SharedStorage<T, d, num_warps>;
  if constexpr (sizeof(Storage) > kSharedMemoryOfAll)
    if ((share_SMs && d == 128) || !fits_a_block<Storage>())
      return with_warps<T, d, num_warps / 2>(false, f);
  return f(std::integral_constant<int, num_warps>());
}

}  // namespace decoding

/// Tiles of 16 rows of Q, of the heads that share a head of K and V, in the whole problem.
std::int64_t row_tiles(const Problem &p) {
  return ::row_tiles(p, decoding::rows);
}

/// How many blocks of as many warps as fit the GPU runs at once.
template <class T, int d>
int wave() {
  return decoding::with_warps<T, d>(false, [](auto num_warps) {
    return resident_blocks<decoding::SharedStorage<T, d, num_warps>>(
        decoding::decode<T, d, num_warps>, num_warps * 32);
  });
}

template <class T, int d>
int num_splits(const Problem &p) {
  if (row_tiles(p) > decoding::max_counters) return 1;
  if (p.splits) return p.splits;
  const std::int64_t seen =
      p.window ? min(std::int64_t{p.window} + p.sinks, std::int64_t{p.seqlen_k}) : p.seqlen_k;
  return fewest_splits(row_tiles(p), wave<T, d>(),
                       seen / (decoding::most_warps<d> * decoding::keys));
}

template <class T, int d>
void launch_decode(const Problem &p) {
  const int splits = num_splits<T, d>(p);
  // Of blocks that follow each other on an SM one reads while the other begins or ends.
  const bool share_SMs = row_tiles(p) * splits > wave<T, d>();
  decoding::with_warps<T, d>(share_SMs, [&](auto num_warps) {
    launch_on<decoding::SharedStorage<T, d, num_warps>>(
        p.stream, decoding::decode<T, d, num_warps>,
        dim3(row_tiles(p) / (p.batch * p.kv_heads), splits, p.batch * p.kv_heads),
        dim3(num_warps * 32), p, log2_e / sqrtf(d));
  });
}

}  // namespace
