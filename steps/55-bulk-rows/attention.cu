// Step 55: bulk rows. One instruction of one lane copies a whole row of K or V, of 256 bytes.
// SPDX-License-Identifier: MIT
// Needs       sm_90: cp.async.bulk, mbarrier
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --type, --page-size, --splits
// Before      step 27: a lane copies 16 bytes. A tile of 16 keys is 16 instructions of its warp, and each row's
//             address goes to 16 lanes by shuffles. (This step does not append keys: step 50 stores them first.)
// Bottleneck  Instructions between the bytes: 2 shuffles and an address for each 16 bytes of a lane.
// Change      Lane i copies row i of the tile, K's or V's: it knows the row's address, and no other lane needs it.
//             Rows are padded by 16 bytes in shared memory, so that ldmatrix has no bank conflicts. The copies
//             count their bytes at an mbarrier, one for each stage of each warp.
// Prediction  A tile of 8 KB is 32 copies, and no shuffle but the softmax's. At 4.8 TB/s an SM receives a row
//             each 12 clocks. HBM is the limit as before: step 27's time, and with pages step 27's without.
#include "common/kernel/cache.h"
#include "common/kernel/ring.h"
#include "common/kernel/splits.h"

namespace {

constexpr int rows = 16;  // of Q in a tile: the queries of the heads that share a head of K and V
constexpr int keys = 16, stages = 3;  // a warp's tile of K and V, and how many of them it has

/// A tile's rows of d elements of 2 bytes, each 16 bytes longer than it must be: 8 consecutive rows have a column in
/// all banks, and a row's bytes follow each other, as a bulk copy writes them.
template <int rows, int d>
struct Padded {
  static constexpr int size = rows * (d + 8);
  __device__ static constexpr int offset(int row, int col) { return row * (d + 8) + col; }
};

template <class T, int d, int num_warps>
struct SharedStorage {
  struct {
    union {
      struct {
        Tile<T, keys, d, Padded<keys, d>> K, V;
      } stage[stages];
      Tile<float, rows, d + 8> part;  // of O; columns d and d + 1 are m and l
    };
    Mbarrier landed[stages];
  } warp[num_warps];
  SharedTile<rows, d, T> Q;
  Tile<bool, 1, 8> is_last;
};

template <int d, class View>
__device__ void store_part(View &parts, int row, int col, const Part &part) {
  store<4>(parts(row, col), part.O);
  store<2>(parts(row, d), Vector<float, 2>{part.m, part.l});  // the same from all lanes of a row
}

/// The row of K or of V that belongs to a key: in its page, if there are pages.
template <class T, int d>
__device__ Matrix<const T> cache_row(const Problem &p, bool of_V, int b, int kv_h, int key) {
  int block = b, row = key + of_batch(p.cu_seqlens_k, p, b, 0);
  if (p.page_table) {
    const Pages pages(p);
    block = pages.page_of(b, key), row = key % p.page_size;
  }
  const Strides &strides = of_V ? p.V_strides : p.K_strides;
  return {head_of<const T, d>(of_V ? p.V : p.K, strides, block, kv_h, row, 1).data, 1, d};
}

template <class T, int d, int num_warps, int threads = num_warps * 32>
__global__ void __launch_bounds__(threads) attention(Problem p, int splits, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T, d, num_warps>>();
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
                         row_of(static_cast<const T *>(p.Q), p.Q_strides, i / d)(0, i % d),
                         i / d < rows_there);

  // Lane i copies row i of the tile: lanes 0 to 15 copy K's rows, lanes 16 to 31 V's. A lane looks its row up while
  // the tile before is being copied, because the page table is in global memory, too.
  auto *const stage = smem.warp[warp].stage;
  auto *const landed = smem.warp[warp].landed;
  if (lane == 0) {
    for (int i = 0; i < stages; i++) mbarrier_init(landed[i], 1, Where::current(), "landed");
    mbarrier_fence_init();
  }
  __syncwarp();                         // the barriers are initialised
  int next = keys_begin + warp * keys;  // the first key of the tile to load
  const auto find_next = [&] {
    // Behind the last key, the last row is copied again: a masked row must still be finite.
    const int key = min(next + lane % keys, seqlen_k - 1);
    return next < keys_end ? cache_row<T, d>(p, lane >= keys, b, kv_h, key) : Matrix<const T>{};
  };
  Matrix<const T> source = find_next();
  const auto load_next = [&](int to) {
    if (next >= keys_end) return;
    if (lane == 0) mbarrier_arrive_expect_tx(landed[to], 2 * keys * d * sizeof(T));
    bulk_load<d>((lane < keys ? stage[to].K : stage[to].V)(lane % keys, 0), source(0, 0),
                 landed[to]);
    next += num_warps * keys;
    source = find_next();
  };
  for (int i = 0; i < stages - 1; i++) load_next(i);

  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // Q is there for all warps
  const int lane_row = lane % 16, lane_col = lane / 16 * 8;
  const int lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8;
  FragmentA q[d / 16];
#pragma unroll
  for (int col = 0; col < d; col += 16) q[col / 16] = ldmatrix_x4(smem.Q(lane_row, col + lane_col));

  FragmentC o[d / 8] = {};
  float l[2] = {}, m[2] = {no_maximum, no_maximum};
  RingPosition<stages> at;
  for (int j = keys_begin + warp * keys; j < keys_end; j += num_warps * keys) {
    const int now = at.stage;
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
    Vector<T, 4> O;  // of a row that saw no key it is 0
    for (int e = 0; e < 4; e++) O[e] = from_float<T>(sum.l > 0 ? sum.O[e] / sum.l : 0);
    store<4>(row_of(static_cast<T *>(p.O), p.O_strides, i / d)(0, i % d), O);
  }
}

/// How many blocks the GPU runs at once: of 8 warps, or of half as many until one fits it.
template <class T, int d, int num_warps = 8>
int wave() {
  using Storage = SharedStorage<T, d, num_warps>;
  if constexpr (sizeof(Storage) > kSharedMemoryOfAll)
    if (!fits_a_block<Storage>()) return wave<T, d, num_warps / 2>();
  return resident_blocks<Storage>(attention<T, d, num_warps>, num_warps * 32);
}

int num_splits(const Problem &p) {
  const int blocks = p.head_dim == 64 ? wave<half, 64>() : wave<half, 128>();
  return p.splits ? p.splits : fewest_splits(row_tiles(p, rows), blocks, p.seqlen_k / (8 * keys));
}

/// Launches blocks of 8 warps, or of half as many where two share an SM and until one fits this GPU: at head
/// dim 128, 8 warps need 209 KB of shared memory, 4 need 107 and 2 need 56.
template <class T, int d, int num_warps = 8>
void run(const Problem &p, bool share_SMs) {
  using Storage = SharedStorage<T, d, num_warps>;
  if constexpr (sizeof(Storage) > kSharedMemoryOfAll)
    if (share_SMs || !fits_a_block<Storage>()) return run<T, d, num_warps / 2>(p, false);
  const int splits = num_splits(p), of_head = row_tiles(p, rows) / (p.kv_heads * p.batch);
  launch<Storage>(attention<T, d, num_warps>, dim3(of_head * splits, p.kv_heads, p.batch),
                  dim3(num_warps * 32), p, splits, log2_e / sqrtf(d));
}

template <class T>
void run_dims(const Problem &p, bool share_SMs) {
  p.head_dim == 64 ? run<T, 64>(p, false) : run<T, 128>(p, share_SMs);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch =
        [](const Problem &p) {
          // At head dim 128 a block of 8 warps has an SM for itself. If not all run at once, two of
          // 4 warps share it: one reads while the other begins or ends.
          const bool share_SMs = row_tiles(p, rows) * num_splits(p) > wave<half, 128>();
          p.type == Type::kBf16 ? run_dims<bf16>(p, share_SMs) : run_dims<half>(p, share_SMs);
        },
    .workspace_bytes =
        [](const Problem &p) {
          return sizeof(float) * row_tiles(p, rows) * (num_splits(p) * rows + 1) * (p.head_dim + 4);
        },
    .decodes = true,
});
