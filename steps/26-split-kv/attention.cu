// Step 26: split KV. The keys of a sequence are shared among blocks; the last to finish adds up.
//
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --page-size, --append, --splits
// Before      step 25: a block has all keys of a sequence and a key head.
// Bottleneck  Bytes under way: of batch 1 and 8 key heads 8 SMs of 132 work.
// Change      The loop over keys is cut into splits, each a block's. A block leaves O, l and m of its
//             keys in memory and counts itself; the last of a row tile's blocks combines them.
// Prediction  The bandwidth of a full GPU for any batch: 131,072 keys of 8 heads take 112 us at 4.8
//             TB/s and 8 us to begin and to end, 4.5 TB/s. 1024 keys: 5 to 7 us, all of it latency.
#include "common/kernel/kernel.h"

namespace {

constexpr int rows = 16;  // of Q in a tile: the queries of the heads that share a key head
constexpr int keys = 16;  // of K and V in a warp's tile
constexpr int num_warps = 8, stages = 3;
constexpr int threads = num_warps * 32;
constexpr float lowest = -0x1p100f;  // less than any score; no infinity, for inf - inf is NaN

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
    Tile<float, rows, d + 8> part;  // of O; in columns d and d + 1 are m and l
  } warp[num_warps];
  SharedTile<rows, d> Q;
  Tile<bool, 1, 8> is_last;
};

/// What some of the keys give a row: l and 4 columns of O, relative to m.
struct Part {
  float m = lowest, l = 0;
  Vector<float, 4> O = {};

  __device__ void add(const Part &other) {
    const float m_new = fmaxf(m, other.m);
    const float alpha = ex2(m - m_new), beta = ex2(other.m - m_new);
    m = m_new;
    l = alpha * l + beta * other.l;
    for (int e = 0; e < 4; e++) O[e] = alpha * O[e] + beta * other.O[e];
  }
};

template <int d, class View>
__device__ Part part_at(View &parts, int row, int col) {
  const Vector<float, 2> m_and_l = load<2>(parts(row, d));
  return {m_and_l[0], m_and_l[1], load<4>(parts(row, col))};
}

/// Where a key and its value begin: pointers, as numbers that lanes can shuffle.
struct Place {
  std::int64_t K, V;
};

template <int d, class T>
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
    return reinterpret_cast<std::int64_t>(static_cast<half *>(first) + block * at.batch +
                                          head * at.head + row * at.row);
  };
  return {place(p.K, p.K_strides), place(p.V, p.V_strides)};
}

/// Where to read it: a sequence's last keys may come beside the cache.
template <int d>
__device__ Place place_to_read(const Problem &p, int batch, int head, int key, int seqlen) {
  const int i = key - (seqlen - p.seqlen_new);
  if (!p.K_new || i < 0) return place_in_cache(p, batch, head, key);
  const std::int64_t row = (std::int64_t{batch} * p.kv_heads + head) * p.seqlen_new + i;
  return {reinterpret_cast<std::int64_t>(static_cast<const half *>(p.K_new) + row * d),
          reinterpret_cast<std::int64_t>(static_cast<const half *>(p.V_new) + row * d)};
}

/// Stores the new keys and values in the cache. Nobody reads them there in this launch.
template <int d>
__device__ void append(const Problem &p, int batch, int head, int seqlen) {
  for (int i = threadIdx.x * 8; i < p.seqlen_new * d; i += threads * 8) {
    const int key = seqlen - p.seqlen_new + i / d, col = i % d;
    const Place from = place_to_read<d>(p, batch, head, key, seqlen);
    const Place to = place_in_cache(p, batch, head, key);
    store<8>(row_at<d, half>(to.K)(0, col), load<8>(row_at<d, const half>(from.K)(0, col)));
    store<8>(row_at<d, half>(to.V)(0, col), load<8>(row_at<d, const half>(from.V)(0, col)));
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
    cp_async_16_or_zeros(stage.K(row, col), row_at<d, const half>(K)(0, col), row < there);
    cp_async_16_or_zeros(stage.V(row, col), row_at<d, const half>(V)(0, col), row < there);
  }
}

template <int d>
__global__ void __launch_bounds__(threads) attention(const Problem p, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int batch = blockIdx.z / p.kv_heads, kv_head = blockIdx.z % p.kv_heads;
  const int split = blockIdx.y, splits = gridDim.y;
  int seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k, first_query = 0;
  if (p.lengths_q) seqlen_q = Matrix<const int>{p.lengths_q, 1, p.batch}(0, batch);
  if (p.lengths_k) seqlen_k = Matrix<const int>{p.lengths_k, 1, p.batch}(0, batch);
  if (p.cu_seqlens_q) first_query = Matrix<const int>{p.cu_seqlens_q, 1, p.batch + 1}(0, batch);

  // Row r of the block's heads is query r / group of head r % group.
  const int group = p.heads / p.kv_heads, first_row = blockIdx.x * rows;
  const int rows_there =
      seqlen_q * group - first_row < rows ? seqlen_q * group - first_row : rows;  // of this tile
  const auto row_of = [&](auto *tensor, const Strides &at, int row) {
    return Matrix<std::remove_pointer_t<decltype(tensor)>>{
        tensor + batch * at.batch + (kv_head * group + (first_row + row) % group) * at.head +
            (first_query + (first_row + row) / group) * at.row,
        1, d};
  };
  const auto keys_seen = [&](int row) {  // by a row of this tile: so many, from key 0 on
    return p.causal ? (first_row + row) / group + 1 + seqlen_k - seqlen_q : seqlen_k;
  };
  // This block's keys: as many of the tiles that any of its rows sees as each other split's.
  const int seen = rows_there > 0 ? keys_seen(rows_there - 1) : 0;
  const int tiles = seen > 0 ? (seen + keys - 1) / keys : 0;
  const int keys_begin = std::int64_t{tiles} * split / splits * keys;
  const int keys_end = std::int64_t{tiles} * (split + 1) / splits * keys;

  for (int i = threadIdx.x * 8; i < rows * d; i += threads * 8)
    cp_async_16_or_zeros(smem.Q(i / d, i % d),
                         row_of(static_cast<const half *>(p.Q), p.Q_strides, i / d)(0, i % d),
                         i / d < rows_there);

  // The place of a key is looked up a tile before its copies begin: a page table is slow, too.
  Stage<d> *const stage = smem.warp[warp].stage;
  int next = keys_begin + warp * keys;  // the first key of the warp's tile to load
  Place place{};
  const auto find_next = [&] {
    const int key = next + lane % keys;
    if (key < seqlen_k) place = place_to_read<d>(p, batch, kv_head, key, seqlen_k);
  };
  const auto load_next = [&](int to) {
    if (next < keys_end) load_tile<d>(stage[to], place, seqlen_k - next);
    cp_async_commit();
    next += num_warps * keys;
    find_next();
  };
  find_next();
  for (int i = 0; i < stages - 1; i++) load_next(i);
  if (first_row == 0 && split == 0) append<d>(p, batch, kv_head, seqlen_k);

  cp_async_wait<stages - 2>();
  __syncthreads();  // Q is there for all warps
  const int lane_row = lane % 16, lane_col = lane / 16 * 8;
  const int lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8;
  FragmentA q[d / 16];
#pragma unroll
  for (int col = 0; col < d; col += 16) q[col / 16] = ldmatrix_x4(smem.Q(lane_row, col + lane_col));

  FragmentC o[d / 8] = {};
  float l[2] = {}, m[2] = {lowest, lowest};
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

#pragma unroll
    for (int key = 0; key < keys; key += 16) {
      const FragmentC &left = s[key / 8], &right = s[key / 8 + 1];
      const FragmentA w = {cvt_rn_f16x2(left[0], left[1]), cvt_rn_f16x2(left[2], left[3]),
                           cvt_rn_f16x2(right[0], right[1]), cvt_rn_f16x2(right[2], right[3])};
      for (int col = 0; col < d; col += 16) {
        const auto v = ldmatrix_x4_trans(stage[now].V(key + lane_row, col + lane_col));
        mma(o[col / 8], w, {v[0], v[1]});
        mma(o[col / 8 + 1], w, {v[2], v[3]});
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
  __syncthreads();  // all warps' parts are there

  const auto finish = [&](const Part &sum, int row, int col) {
    const float scale = sum.l > 0 ? 1 / sum.l : 0;  // a row that sees nothing is 0
    Vector<half, 4> O;
    for (int e = 0; e < 4; e++) O[e] = __float2half(sum.O[e] * scale);
    store<4>(row_of(static_cast<half *>(p.O), p.O_strides, row)(0, col), O);
  };
  const int row_tile = blockIdx.z * gridDim.x + blockIdx.x, row_tiles = gridDim.z * gridDim.x;
  const Matrix<unsigned> left{static_cast<unsigned *>(p.workspace), 1, row_tiles};
  const Matrix<float> parts{static_cast<float *>(p.workspace) + (row_tiles + 3) / 4 * 4,
                            row_tiles * splits * rows, d + 4};
  for (int i = threadIdx.x * 4; i < rows_there * d; i += threads * 4) {
    const int row = i / d, col = i % d;
    Part sum;
    for (auto &of_warp : smem.warp) sum.add(part_at<d>(of_warp.part, row, col));
    if (splits == 1) {
      finish(sum, row, col);
      continue;
    }
    const int to = (row_tile * splits + split) * rows + row;
    store<4>(parts(to, col), sum.O);
    if (col == 0) store<2>(parts(to, d), Vector<float, 2>{sum.m, sum.l});
  }
  if (splits == 1) return;

  __syncthreads();  // the block's part is there, for this block
  if (threadIdx.x == 0) {
    __threadfence();  // and for all
    smem.is_last(0, 0) = atomic_dec(left(0, row_tile), splits - 1) == 1;
    __threadfence();
  }
  __syncthreads();
  if (!smem.is_last(0, 0)) return;
  for (int i = threadIdx.x * 4; i < rows_there * d; i += threads * 4) {
    Part sum;
#pragma unroll 8
    for (int s = 0; s < splits; s++)
      sum.add(part_at<d>(parts, (row_tile * splits + s) * rows + i / d, i % d));
    finish(sum, i / d, i % d);
  }
}

int row_tiles(const Problem &p) {
  return (p.seqlen_q * (p.heads / p.kv_heads) + rows - 1) / rows;
}

/// The fewest splits that leave hardly an SM idle, none with less than a tile for each warp.
template <int d>
int num_splits(const Problem &p) {
  if (p.splits) return p.splits;
  const int slots = resident_blocks<SharedStorage<d>>(attention<d>, threads);
  const int blocks = row_tiles(p) * p.batch * p.kv_heads;
  const int most = p.seqlen_k / (num_warps * keys) + 1;
  int best = 1;
  float best_efficiency = 0;
  for (int splits = 1; splits <= most && splits <= 128; splits++) {
    const int waves = (blocks * splits + slots - 1) / slots;
    const float efficiency = float(blocks) * splits / (waves * slots);
    if (efficiency > 1.05f * best_efficiency) best = splits, best_efficiency = efficiency;
  }
  return best;
}

/// The workspace: for each row tile how many of its splits are left, and each split's part.
template <int d>
std::size_t workspace(const Problem &p) {
  const std::size_t tiles = row_tiles(p) * p.batch * p.kv_heads;
  return sizeof(float) * ((tiles + 3) / 4 * 4 + tiles * num_splits<d>(p) * rows * (d + 4));
}

template <int d>
void run(const Problem &p) {
  launch<SharedStorage<d>>(attention<d>, dim3(row_tiles(p), num_splits<d>(p), p.batch * p.kv_heads),
                           dim3(threads), p, 1.44269504f / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
    .workspace_bytes =
        [](const Problem &p) { return p.head_dim == 64 ? workspace<64>(p) : workspace<128>(p); },
});
