// Step 84: splits of a latent cache. Blocks share a sequence's keys, and a second kernel sums their parts.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --type, --page-size, --splits, --garbage,
//             --scale, --latent
// Before      step 83: a block has 64 rows of Q and all keys that they see. (Splits are those of step 55.)
// Bottleneck  One sequence has two tiles of rows, so 130 of 132 SMs have nothing to do.
// Change      Blocks share a sequence's keys. A block's part of O has almost as many bytes as two tiles of keys, so the
//             last block cannot sum many: a second kernel does, with a block for each row.
// Prediction  One sequence of 65,536 keys takes 57,000 to 60,000 clocks: 17 tiles of 2,776 to 2,940, 5,000 for a
//             block's two ends, 3,700 for the merge and 1,000 for its launch. Step 82 takes 2.8 to 3.0 million.
//             HBM would take 28,000. Sequences that fill the GPU take step 82's clocks.
#include <algorithm>
#include <numeric>

#include "common/kernel/latent_rows.h"
#include "common/kernel/ring.h"
#include "common/kernel/softmax.h"
#include "common/kernel/splits.h"

namespace {

constexpr int d = 576, dv = 512;  // columns of Q and K; those that are also V's, and O's
constexpr int consumers = 2;      // warpgroups that compute, with half of O's columns each
constexpr int rows = 64;          // of Q in a tile: the queries of the heads that share a head of K
constexpr int Bc = 64;            // rows of K in a tile
constexpr int stages = 2;         // of K: one is filled while the other is read
// The last warpgroup of a block is the producer.
constexpr int threads = (consumers + 1) * 128;
// Registers of a thread after setmaxnreg. An SM has 65,536.
constexpr int consumer_registers = 232, producer_registers = 40;
static_assert(128 * (consumers * consumer_registers + producer_registers) <= 65536);
// Named barriers; 0 is that of __syncthreads.
constexpr int q_there = 1, p_written = 2, p_read = 3, o_there = 4;
constexpr bool by_trap = false;  // a wait that lasts too long ends the kernel by a store (step 58)

template <class T>
struct SharedStorage {
  TmaTile<rows, d, T> Q;
  TmaTile<Bc, d, T> K[stages];
  RingBarriers<stages> K_barriers;
  // Thread i of one warpgroup has the rows of thread i of the other: the same fragments of P.
  Tile<std::uint32_t, Bc / 16, 128 * 4> P;
  Tile<float, 2, 128> alpha;  // of its two rows of O
};

/// A block's part of O: of each row 512 columns, then m and l. A row is a multiple of 32 bytes.
constexpr int part_row = dv + 8;
__device__ Matrix<float> part_of(const Problem &p, std::int64_t block) {
  return {static_cast<float *>(p.workspace) + block * rows * part_row, rows, part_row};
}

template <class T>
__global__ void __launch_bounds__(threads, 1)  // blocks per SM
    attention(const __grid_constant__ SequenceMap map_K, const Problem p, int box_rows, int splits,
              float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T>>();
  const auto K = ring_of(smem.K, smem.K_barriers);
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const int thread = threadIdx.x % 128;  // of the warpgroup
  // The tiles of rows of one split are neighbours: they read the same keys at the same time.
  const int tiles_of_head = gridDim.x / splits, split = blockIdx.x / tiles_of_head;
  const int kv_h = blockIdx.y, b = blockIdx.z;
  const GroupRows<rows, d> tile(p, b, kv_h, blockIdx.x % tiles_of_head * rows);
  if (tile.there <= 0) return;
  const int seqlen_k = keys_of(p, b);
  // Of the tiles of keys that any row sees, each split has as many as another, or one more.
  const int tiles = max(0, tile.keys_seen(p, tile.there - 1, seqlen_k) + Bc - 1) / Bc;
  const int begin = tiles / splits * split + min(split, tiles % splits);
  const int end = begin + tiles / splits + (split < tiles % splits);
  if (threadIdx.x == 0) {
    ring_init(smem.K_barriers, consumers * 4);  // the warps that compute
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised
  RingPosition<stages> k;

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    if (warp != consumers * 4) return;
    // Lane i copies box i of a tile, which lies in one page (step 54).
    const bool copies = lane * box_rows < Bc;
    const int to_row = copies ? lane * box_rows : 0;
    for (int j = begin; j < end; j++) {
      // A box behind the last key brings the tile's first rows again: they are masked, and finite.
      const Box box(p, b, j * Bc + (j * Bc + to_row < seqlen_k ? to_row : 0), seqlen_k);
      mbarrier_wait<by_trap>(K.empty[k.stage], k.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expect_tx(K.full[k.stage], sizeof(K.tile[0]));
      __syncwarp();  // the bytes are expected, and no lane is a phase behind
      if (copies)
        tma_load_rows(K.tile[k.stage], to_row, map_K, box.source, box.row, kv_h, box.block,
                      K.full[k.stage]);
      k.next();
    }
    return;
  }
  setmaxnreg_inc<consumer_registers>();
  load_rows(smem.Q, tile, p.Q, p.Q_strides, consumers * 128, q_there);

  Accumulator<dv / 2> o;
#pragma unroll
  for (int i = 0; i < o.size; i++) o(i) = 0;
  FragmentA weights[Bc / 16];  // P
  float m[2] = {no_maximum, no_maximum}, l[2] = {}, alpha[2];
  const auto start_pv = [&] {  // the warpgroup's columns of V are K's
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < Bc; key += 16)
      wgmma<T>(o, weights[key / 16], mn_major(K.tile[k.stage], key, warpgroup * (dv / 2)), true);
    wgmma_commit();
  };

  if (warpgroup == 0) {
    Accumulator<Bc> s;
    const auto start_qk = [&] {
      mbarrier_wait<by_trap>(K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s, k_major(smem.Q, 0, col), k_major(K.tile[k.stage], 0, col), col > 0);
      wgmma_commit();
    };
    const auto mask_keys = [&](int j) {
      if ((j + 1) * Bc <= tile.keys_seen(p, 0, seqlen_k)) return;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int seen = tile.keys_seen(p, warp * 16 + lane / 4 + r * 8, seqlen_k) - j * Bc;
#pragma unroll
        for (int i = r * 2; i < s.size; i += i % 2 ? 3 : 1)
          if (i / 4 * 8 + i % 2 >= seen - lane % 4 * 2) s(i) = -INFINITY;
      }
    };
    if (begin < end) {
      start_qk();
      wgmma_wait<0>(s);
    }
    for (int j = begin; j < end; j++) {
      mask_keys(j);
      alpha[0] = alpha[1] = 1;
      const bool must_rescale = softmax(s, m, l, alpha, scale_log2);
      to_fragments<T>(weights, s);
      // The other warpgroup has read P of the tile before.
      named_barrier_sync(p_read, consumers * 128);
#pragma unroll
      for (int i = 0; i < Bc / 16; i++) store(smem.P(i, thread * 4), weights[i]);
      for (int r = 0; r < 2; r++) smem.alpha(r, thread) = alpha[r];
      named_barrier_arrive(p_written, consumers * 128);
      if (must_rescale) rescale(o, alpha);
      start_pv();
      RingPosition<stages> read = k;
      k.next();
      if (j + 1 < end) {  // S of the next tile, while this one's P V is computed
        start_qk();
        wgmma_wait<1>(o);
        ring_release(K, read);
        wgmma_wait<0>(s);
      } else {
        wgmma_wait<0>(o);
      }
    }
    for (int r = 0; r < 2; r++) {
      for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
      alpha[r] = l[r] == 0 ? 0 : 1 / l[r];  // 0: the row sees no key
    }
    named_barrier_sync(p_read, consumers * 128);
    for (int r = 0; r < 2; r++) smem.alpha(r, thread) = alpha[r];
    named_barrier_arrive(p_written, consumers * 128);
  } else {
    named_barrier_arrive(p_read, consumers * 128);  // P's place is free
    for (int j = begin; j < end; j++) {
      named_barrier_sync(p_written, consumers * 128);
#pragma unroll
      for (int i = 0; i < Bc / 16; i++) weights[i] = load<4>(smem.P(i, thread * 4));
      for (int r = 0; r < 2; r++) alpha[r] = smem.alpha(r, thread);
      named_barrier_arrive(p_read, consumers * 128);
      if (__any_sync(kAllLanes, alpha[0] != 1 || alpha[1] != 1)) rescale(o, alpha);
      mbarrier_wait<by_trap>(K.full[k.stage], k.parity);
      start_pv();
      wgmma_wait<0>(o);
      ring_release(K, k);
    }
    named_barrier_sync(p_written, consumers * 128);
    for (int r = 0; r < 2; r++) alpha[r] = smem.alpha(r, thread);
  }

  if (splits > 1) {  // 16 columns as a lane has them: 2t, 2t + 1, 2t + 8, 2t + 9 for t of 0 to 3
    const auto part = part_of(p, (b * gridDim.y + kv_h) * gridDim.x + blockIdx.x);
    for (int r = 0; r < 2; r++) {
      const int row = warp % 4 * 16 + lane / 4 + r * 8;
#pragma unroll
      for (int i = r * 2; i < o.size; i += 8)
        store_global(part(row, warpgroup * (dv / 2) + i / 8 * 16 + lane % 4 * 4),
                     {o(i), o(i + 1), o(i + 4), o(i + 5)});
      if (warpgroup == 0 && lane % 4 == 0) store<2>(part(row, dv), Vector<float, 2>{m[r], l[r]});
    }
    return;
  }
  // Q's place becomes O's: the first warpgroup has computed the last S.
  write_rows(smem.Q, warpgroup * (dv / 2), o, alpha, warp, lane);
  named_barrier_sync(o_there, consumers * 128);  // all warps have written O
  const GroupRows<rows, dv> tile_of_O(p, b, kv_h, tile.first);
  for (int row = threadIdx.x / 8; row < tile.there; row += consumers * 16) {
    const auto O = tile_of_O.row(static_cast<T *>(p.O), p.O_strides, row);
    for (int col = threadIdx.x % 8 * 8; col < dv; col += 64)
      store<8>(O(0, col), load<8>(smem.Q(row, col)));
  }
}

/// Sums the parts of a row: a block for each row, because the parts of a tile, 130 KB each, are too many for one.
template <class T>
__global__ void __launch_bounds__(dv / 4) merge_splits(const Problem p, int splits) {
  const int kv_h = blockIdx.y, b = blockIdx.z, row = blockIdx.x, col = threadIdx.x * 4;
  const GroupRows<1, dv> tile(p, b, kv_h, row);
  if (tile.there <= 0) return;
  const int tiles_of_head = (gridDim.x + rows - 1) / rows;
  const int first = (b * gridDim.y + kv_h) * tiles_of_head * splits + row / rows;
  Part sum;
  for (int split = 0; split < splits; split += 8) {
    Part parts[8];  // all are under way before the first is added
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const auto part = part_of(p, first + (split + i) * tiles_of_head);
      if (split + i < splits) parts[i] = part_at<dv>(part, row % rows, col);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum.add(parts[i]);
  }
  const auto O = tile.row(static_cast<T *>(p.O), p.O_strides, 0);
  for (int e = 0; e < 4; e += 2) {  // of a row that saw no key O is 0
    const float factor = sum.l > 0 ? 1 / sum.l : 0;
    store<2>(O(0, col / 16 * 16 + col % 16 / 2 + e * 4),
             Vector<T, 2>{from_float<T>(sum.O[e] * factor), from_float<T>(sum.O[e + 1] * factor)});
  }
}

/// As many splits as fill the GPU, each of two tiles of keys or more: a part is as many bytes as two tiles.
int num_splits(const Problem &p) {
  const int blocks = resident_blocks<SharedStorage<half>>(attention<half>, threads);
  return p.splits ? p.splits : fewest_splits(row_tiles(p, rows), blocks, p.seqlen_k / (2 * Bc));
}

template <class T>
void run(const Problem &p) {
  const int rows_of_group = p.seqlen_q * (p.heads / p.kv_heads), splits = num_splits(p);
  const int box_rows = p.page_table ? std::gcd(p.page_size, Bc) : Bc;
  const auto map_K = map_of_cache<T>(p, d, box_rows);
  // A scale of 0 would make NaN of a masked score, which is -infinity.
  launch_on<SharedStorage<T>>(
      p.stream, attention<T>, dim3((rows_of_group + rows - 1) / rows * splits, p.kv_heads, p.batch),
      dim3(threads), map_K, p, box_rows, splits, std::max(log2_e * p.scale, 1e-20f));
  if (splits > 1)
    launch_on<void>(p.stream, merge_splits<T>, dim3(rows_of_group, p.kv_heads, p.batch),
                    dim3(dv / 4), p, splits);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 64,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          const int splits = num_splits(p);
          return splits == 1 ? 0 : sizeof(float) * row_tiles(p, rows) * splits * rows * part_row;
        },
    .head_dims = {d},
    .page_rows = 8,
    .decodes = true,
});
