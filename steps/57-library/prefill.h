// SPDX-License-Identifier: MIT
// Step 57's kernel for prompts: many queries per head. Step 50's, with windows to both sides, scores that a function
// changes before the softmax, learned sinks, any head dim up to the tile's, and the log-sum-exp.
#pragma once

#include "common/kernel/order.h"
#include "steps/57-library/scores.h"
#include "steps/57-library/tiles.h"

namespace {

constexpr float rescale_threshold = 8;  // P is at most 2^8 then: far from fp16's 65504

template <class T, int d, int Bc = tiling<d>.Bc>
struct SharedStorage {
  SharedTile<tiling<d>.Br, d, T> Q;
  SharedTile<Bc, d, T> K, V;
};

template <class T, int d, int Bc, Kind kind>
__global__ void __launch_bounds__(tiling<d>.num_warps * 32, tiling<d>.blocks_per_SM)
    prefill(const Call call, const Scores scores) {
  constexpr int Br = tiling<d>.Br;
  constexpr int m_tiles = Br / tiling<d>.num_warps / 16;  // a warp's rows, in units of mma's 16
  constexpr bool plain = kind == Kind::kPlain, all = kind == Kind::kAll;
  auto &smem = shared_storage<SharedStorage<T, d, Bc>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  // Blocks start in the order of their index, x first: the last rows, which see the most keys.
  const int head = (gridDim.z - 1 - blockIdx.z) * gridDim.x + blockIdx.x;
  const int first_row = (gridDim.y - 1 - blockIdx.y) * Br;
  const int b = head / call.heads, h = head % call.heads;
  if (b >= call.batch) return;
  const Sequence at = sequence_of(call, b);
  if (first_row >= at.q_count) return;  // the sequence is shorter than the longest
  const Sight sight = sight_of(call, at);
  const int keys_end = min(at.k_count, first_row + Br - 1 + sight.end);  // of all rows of the tile
  const int last = (keys_end + Bc - 1) / Bc * Bc - Bc;  // the last tile; negative if there is none
  // The first tile of the first row's window, and the last tile of the sinks: negative without sinks.
  const int window_first = max(0, first_row + sight.begin) / Bc * Bc;
  const int sinks_last = (min(sight.sinks, at.k_count) + Bc - 1) / Bc * Bc - Bc;
  const int kv_h = h / (call.heads / call.kv_heads);  // the group's head of K and V
  const int cols = all ? call.head_dim : d, cols_v = all ? call.head_dim_v : d;
  const auto head_rows = [&](auto *tensor, const Strides &strides, int block, int of_block,
                             int start, int rows, int columns) {
    return StridedMatrix<std::remove_pointer_t<decltype(tensor)>>{
        tensor + block * strides.batch + of_block * strides.head + start * strides.row, rows,
        columns, strides.row};
  };
  const auto gQ =
      head_rows(static_cast<const T *>(call.Q), call.Q_strides, b, h, at.q_start, at.q_count, cols);
  // In pages: the head's rows in page 0.
  const bool paged = kind == Kind::kPages || (all && call.page_table);
  const int kv_b = paged ? 0 : at.cache, k_start = paged ? 0 : at.k_start;
  const auto gK = head_rows(static_cast<const T *>(call.K), call.K_strides, kv_b, kv_h, k_start,
                            at.k_count, cols);
  const auto gV = head_rows(static_cast<const T *>(call.V), call.V_strides, kv_b, kv_h, k_start,
                            at.k_count, cols_v);

  // ldmatrix.x4 of a 16 x 16 block: lane i supplies row i % 16 of its left or its right half.
  const int warp_row = warp * m_tiles * 16, lane_row = lane % 16, lane_col = lane / 16 * 8;
  // For K, its upper or lower half, so that registers 0 and 1 are mma's B of the first 8 keys.
  const int lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8;

  // All of the warp's rows see a key before all_see, if it is a sink or from in_all_windows on.
  const int all_see = min(at.k_count, first_row + warp_row + sight.end);
  const int in_all_windows = first_row + warp_row + m_tiles * 16 - 1 + sight.begin;

  const bool turns = !plain && call.rope != Rope::kNone;
  if (!turns) load_tile<kind, true>(smem.Q, gQ, first_row);
  if (last >= 0) load_keys<kind, true>(smem.K, gK, last, call, call.K_strides, b, at.k_start);
  cp_async_commit();
  if (turns) load_turned_tile(smem.Q, gQ, call, at, first_row);  // while K is on its way
  const float slope = all ? scores.slope(call, b, h) : 0;

  // In each m tile, the lane holds rows lane / 4 (r = 0) and lane / 4 + 8 (r = 1), as mma has it.
  FragmentC o[m_tiles][d / 8] = {};
  float l[m_tiles][2] = {}, m[m_tiles][2];
  // A sink is a key of no tile: m is its logit, and l its power, 2^0, in the first of the row's four lanes.
  const bool sink = !plain && call.sink_logits;
  const float m_first =
      sink ? fmaxf(of_head(call.sink_logits, h) * log2_e, no_maximum) : no_maximum;
  for (int mt = 0; mt < m_tiles; mt++)
    for (int r = 0; r < 2; r++) {
      m[mt][r] = m_first;
      if (sink && lane % 4 == 0) l[mt][r] = 1;
    }
  constexpr bool q_stays = d == 192;  // in registers, which have room
  FragmentA q[m_tiles][q_stays ? d / 16 : 1];

  for (int j = last, next; j >= 0; j = next) {
    // From the window to the sinks.
    next = !plain && j == window_first ? min(j - Bc, sinks_last) : j - Bc;
    cp_async_wait<0>();
    __syncthreads();  // Q and K are there for all warps, and the previous V has been read by all

    // S = Q K^T. mma wants K^T column by column: that is K row by row, as it lies.
    FragmentC s[m_tiles][Bc / 8] = {};
#pragma unroll
    for (int col = 0; col < d; col += 16) {
      const int k_step = q_stays ? col / 16 : 0;
      for (int mt = 0; mt < m_tiles; mt++)
        if (!q_stays || j == last)
          q[mt][k_step] = ldmatrix_x4(smem.Q(warp_row + mt * 16 + lane_row, col + lane_col));
      for (int key = 0; key < Bc; key += 16) {
        const Vector<std::uint32_t, 4> k = ldmatrix_x4(smem.K(key + lane_key, col + lane_key_col));
        for (int mt = 0; mt < m_tiles; mt++) {
          mma<T>(s[mt][key / 8], q[mt][k_step], {k[0], k[1]});
          mma<T>(s[mt][key / 8 + 1], q[mt][k_step], {k[2], k[3]});
        }
      }
      if (col == 0) {  // the first ldmatrix are ahead: now V, on its way behind the rest of Q K^T
        // Zeros where no row is there: a weight of 0 times NaN is NaN.
        load_keys<kind, true>(smem.V, gV, j, call, call.V_strides, b, at.k_start);
        cp_async_commit();
      }
    }

    cp_async_wait<0>();
    __syncthreads();  // V is there for all warps, and K has been read by all

    // What element e of a fragment is: its row, and its key.
    const auto row_of = [&](int mt, int e) {
      return first_row + warp_row + mt * 16 + lane / 4 + e / 2 * 8;
    };
    const auto key_of = [&](int key, int e) { return j + key + lane % 4 * 2 + e % 2; };
    if constexpr (all) {
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int key = 0; key < Bc; key += 8)
          for (int e = 0; e < 4; e++) {
            const int distance = row_of(mt, e) + at.k_count - at.q_count - key_of(key, e);
            s[mt][key / 8][e] = scores.of(s[mt][key / 8][e], slope, distance);
          }
    }
    // After the scores have been changed: a soft cap would show the masked ones again.
    if (j + Bc > all_see || (!plain && j < in_all_windows && j + Bc > sight.sinks)) {
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int key = 0; key < Bc; key += 8)
          for (int e = 0; e < 4; e++) {
            const int row = row_of(mt, e), k = key_of(key, e);
            if (k >= min(at.k_count, row + sight.end) ||
                (!plain && k < row + sight.begin && k >= sight.sinks))
              s[mt][key / 8][e] = -INFINITY;
          }
    }

    // Online softmax, lazily: m may stay below the maximum, by at most the threshold. P and l are
    // relative to m, whatever it is; O / l does not depend on it.
    bool must_rescale = false;
    float m_lane[m_tiles][2];  // of this lane's scores
    for (int mt = 0; mt < m_tiles; mt++)
      for (int r = 0; r < 2; r++) {
        m_lane[mt][r] = -INFINITY;
        for (FragmentC &x : s[mt])
          m_lane[mt][r] = fmaxf(m_lane[mt][r], fmaxf(x[2 * r], x[2 * r + 1]));
        must_rescale |= m_lane[mt][r] * scores.scale_log2 > m[mt][r] + rescale_threshold;
      }
    if (next >= 0) load_keys<kind>(smem.K, gK, next, call, call.K_strides, b, at.k_start);
    cp_async_commit();  // the next K is on its way behind the exponentials and P V
    if (__any_sync(kAllLanes, must_rescale)) {
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int r = 0; r < 2; r++) {
          float m_new = m_lane[mt][r];
          for (int mask = 1; mask < 4; mask *= 2)
            m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
          m_new = fmaxf(m[mt][r], m_new * scores.scale_log2);
          const float alpha = ex2(m[mt][r] - m_new);  // 0 after no_maximum
          m[mt][r] = m_new;
          l[mt][r] *= alpha;
          for (FragmentC &x : o[mt])
            for (int e = 2 * r; e < 2 * r + 2; e++) x[e] *= alpha;
        }
    }
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++) {
      for (int r = 0; r < 2; r++)
        for (FragmentC &x : s[mt])
          for (int e = 2 * r; e < 2 * r + 2; e++)
            l[mt][r] += x[e] = ex2(fmaf(x[e], scores.scale_log2, -m[mt][r]));
    }

    // O += P V. Two neighbouring C fragments of S, rounded to T, are an A fragment of P.
#pragma unroll
    for (int key = 0; key < Bc; key += 16) {
      FragmentA p[m_tiles];
      for (int mt = 0; mt < m_tiles; mt++) {
        const FragmentC &left = s[mt][key / 8], &right = s[mt][key / 8 + 1];
        p[mt] = {cvt_rn_x2<T>(left[0], left[1]), cvt_rn_x2<T>(left[2], left[3]),
                 cvt_rn_x2<T>(right[0], right[1]), cvt_rn_x2<T>(right[2], right[3])};
      }
      for (int col = 0; col < d; col += 16) {
        const Vector<std::uint32_t, 4> v =
            ldmatrix_x4_trans(smem.V(key + lane_row, col + lane_col));
        for (int mt = 0; mt < m_tiles; mt++) {
          mma<T>(o[mt][col / 8], p[mt], {v[0], v[1]});
          mma<T>(o[mt][col / 8 + 1], p[mt], {v[2], v[3]});
        }
      }
    }
  }

  // Not before the loop: its address would take registers there. And without a window nvcc 13.0 had none to hold `at`
  // across the loop: the shuffles in sequence_of() keep it from seeing that these are the same numbers.
  const Sequence done = plain ? sequence_of(call, b) : at;
  const auto gO =
      head_rows(static_cast<T *>(call.O), call.O_strides, b, h, done.q_start, done.q_count, cols_v);
  cp_async_wait<0>();  // a tile that sees no key has not waited for Q
#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++) {
    for (int r = 0; r < 2; r++) {
      for (int mask = 1; mask < 4; mask *= 2)
        l[mt][r] += __shfl_xor_sync(kAllLanes, l[mt][r], mask);
      const int row = first_row + (threadIdx.x / 32 * m_tiles + mt) * 16 + lane / 4 + 8 * r;
      if (row >= done.q_count) continue;
      if (call.lse && lane % 4 == 0)
        lse_at(call, done, b, h, row) = (m[mt][r] + lg2(l[mt][r])) * ln_2;
      if (l[mt][r] == 0) l[mt][r] = 1;  // the row saw no key, and O is 0
      for (int col = 0; col < d; col += 8) {
        if (all && col >= cols_v) break;
        const float *x = &o[mt][col / 8][2 * r];
        store<2>(gO(row, col + lane % 4 * 2),
                 Vector<T, 2>{from_float<T>(x[0] / l[mt][r]), from_float<T>(x[1] / l[mt][r])});
      }
    }
  }
}

/// At 256, tiles of 96 keys need 160 KB of shared memory. Tiles of 32, for a GPU that has less, need 96.
template <class T, int d, Kind kind, int Bc = tiling<d>.Bc>
void launch_prefill(const Call &p) {
  using Storage = SharedStorage<T, d, Bc>;
  if constexpr (sizeof(Storage) > kSharedMemoryOfAll)
    if (!fits_a_block<Storage>()) return launch_prefill<T, d, kind, 32>(p);
  launch_on<Storage>(p.stream, prefill<T, d, Bc, kind>, grid_by_heads(p, tiling<d>.Br),
                     dim3(tiling<d>.num_warps * 32), p, Scores(p));
}

/// Chooses the kernel that can do no more than it must: what it can do besides would take registers and time.
template <class T, int d>
void launch_prefill(const Call &p) {
  if (p.softcap > 0 || p.slopes || p.head_dim != d || p.head_dim_v != d)
    return launch_prefill<T, d, Kind::kAll>(p);
  if (p.page_table) return launch_prefill<T, d, Kind::kPages>(p);
  if constexpr (d == 128)
    if (p.rope == Rope::kNone && p.window_left < 0 && !p.sink_logits)
      return launch_prefill<T, d, Kind::kPlain>(p);
  launch_prefill<T, d, Kind::kRows>(p);
}

}  // namespace
