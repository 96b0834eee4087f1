// Step 02: the loop inverted. A block owns a Q tile and streams K and V past it.
// SPDX-License-Identifier: MIT
// Needs       sm_75
// Before      step 01, flash attention as published: K/V tiles outside, Q tiles inside.
// Bottleneck  O, l and m go to HBM and back for every pair of tiles: 10 d / Bc = 10 bytes per
//             score.
// Change      Swap the two loops. A row's O, l and m depend only on the same row one K/V tile
//             earlier, so they stay in registers, and O is divided by l once, at the end.
//             A block per Q tile, not per head; __launch_bounds__ keeps its registers few enough
//             for the three blocks per SM that shared memory has room for.
// Prediction  HBM traffic falls from 10 bytes per score to Q, K, V and O once: at seqlen 8192 and
//             head dim 128, from 671 MB per head to 8.4 MB. Time falls with it only if traffic is
//             what the time is spent on.
#include "common/kernel/kernel.h"

namespace {

constexpr int Br = 32;   // rows of Q in a tile
constexpr int Bc = 128;  // rows of K and V in a tile
constexpr int num_warps = 4;
constexpr int rows_per_warp = Br / num_warps;
constexpr int keys_per_lane = Bc / 32;

template <int d>
struct SharedStorage {
  Tile<half, Br, d> Q;
  Tile<half, Bc, d> K, V;
  Tile<float, num_warps, Bc> P;  // the row of P that each warp is at
};

__device__ float warp_max(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, mask));
  return x;
}

__device__ float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

template <int d>
__global__ void __launch_bounds__(num_warps * 32, 3)  // threads per block, blocks per SM
    attention(const half *Q,                          // [batch * heads, seqlen, d]
              const half *K,                          // [batch * heads, seqlen, d]
              const half *V,                          // [batch * heads, seqlen, d]
              half *O,                                // [batch * heads, seqlen, d]
              int seqlen, float scale) {
  auto &smem = shared_storage<SharedStorage<d>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br;
  const std::int64_t head_offset = std::int64_t{blockIdx.y} * seqlen * d;
  const Matrix<const half> gQ{Q + head_offset, seqlen, d}, gK{K + head_offset, seqlen, d},
      gV{V + head_offset, seqlen, d};
  const Matrix<half> gO{O + head_offset, seqlen, d};

  for (int i = threadIdx.x; i < Br * d; i += num_warps * 32)
    smem.Q(i / d, i % d) = gQ(first_row + i / d, i % d);

  // The state of this warp's rows, across the whole loop. O: lane owns columns lane + 32 c.
  float o[rows_per_warp][d / 32] = {}, l[rows_per_warp] = {}, m[rows_per_warp];
  for (int r = 0; r < rows_per_warp; r++) m[r] = -INFINITY;

  for (int j = 0; j < seqlen; j += Bc) {
    __syncthreads();  // the previous K and V have been read by all warps
    for (int i = threadIdx.x; i < Bc * d; i += num_warps * 32) {
      smem.K(i / d, i % d) = gK(j + i / d, i % d);
      smem.V(i / d, i % d) = gV(j + i / d, i % d);
    }
    __syncthreads();  // Q, K and V are there for all warps

#pragma unroll
    for (int r = 0; r < rows_per_warp; r++) {
      const int row = warp * rows_per_warp + r;

      // S = Q K^T. The lane computes the scores of keys lane, lane + 32, ...
      float s[keys_per_lane] = {};
#pragma unroll 1  // unrolled, nvcc merges neighbouring loads: step 04 will, by hand
      for (int col = 0; col < d; col++) {
        const float q = __half2float(smem.Q(row, col));
        for (int c = 0; c < keys_per_lane; c++)
          s[c] += q * __half2float(smem.K(lane + 32 * c, col));
      }

      // Online softmax: a new maximum rescales what was summed under the old one.
      float m_new = m[r];
      for (int c = 0; c < keys_per_lane; c++) {
        s[c] *= scale;
        m_new = fmaxf(m_new, s[c]);
      }
      m_new = warp_max(m_new);
      const float alpha = __expf(m[r] - m_new);  // e^-inf = 0 for the first tile
      m[r] = m_new;
      float l_tile = 0;
      for (int c = 0; c < keys_per_lane; c++) {
        const float p = __expf(s[c] - m_new);
        smem.P(warp, lane + 32 * c) = p;
        l_tile += p;
      }
      l[r] = l[r] * alpha + warp_sum(l_tile);
      __syncwarp();  // the row of P is there for all lanes

      // O = alpha O + P V
      for (int c = 0; c < d / 32; c++) o[r][c] *= alpha;
#pragma unroll 1
      for (int key = 0; key < Bc; key++) {
        const float p = smem.P(warp, key);
        for (int c = 0; c < d / 32; c++) o[r][c] += p * __half2float(smem.V(key, lane + 32 * c));
      }
      __syncwarp();  // all lanes have read P; the next row overwrites it
    }
  }

#pragma unroll
  for (int r = 0; r < rows_per_warp; r++)
    for (int c = 0; c < d / 32; c++)
      gO(first_row + warp * rows_per_warp + r, lane + 32 * c) = __float2half(o[r][c] / l[r]);
}

template <int d>
void run(const Problem &p) {
  const dim3 grid(p.seqlen_q / Br, p.batch * p.heads);
  launch<SharedStorage<d>>(attention<d>, grid, dim3(num_warps * 32), static_cast<const half *>(p.Q),
                           static_cast<const half *>(p.K), static_cast<const half *>(p.V),
                           static_cast<half *>(p.O), p.seqlen_q, 1 / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = Bc,
    .default_batch = 1,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
});
