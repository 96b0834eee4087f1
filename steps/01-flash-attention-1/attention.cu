// Step 01: flash attention as published (Dao et al. 2022, Algorithm 1).
// SPDX-License-Identifier: MIT
// Needs       sm_75
// Before      step 00, standard attention: S and P, N x N, are written to HBM and read back.
// Bottleneck  16 bytes of HBM traffic per score, and N^2 of memory.
// Change      Work on tiles that fit on chip. For each K/V tile, visit every Q tile; keep a running
//             maximum m, sum l and output O per row, and correct them when a new tile comes in. S
//             and P never leave the chip. O, l and m do: they go to HBM and back at each visit.
// Prediction  (2 + 4 + 4) d bytes per row and K/V tile for Q, O in and O out: 10 d / Bc = 10 bytes
//             per score at head dim 128, 5 at 64. Memory falls from N^2 to N. The arithmetic is the
//             same. One block per head: fewer heads than multiprocessors leave some of them idle.
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
__global__ void __launch_bounds__(num_warps * 32)  // threads per block
    attention(const half *Q,                       // [batch * heads, seqlen, d]
              const half *K,                       // [batch * heads, seqlen, d]
              const half *V,                       // [batch * heads, seqlen, d]
              half *O,                             // [batch * heads, seqlen, d]
              float *O_sum,                        // [batch * heads, seqlen, d], O between visits
              float *l,                            // [batch * heads, seqlen]
              float *m,                            // [batch * heads, seqlen]
              int seqlen, float scale) {
  auto &smem = shared_storage<SharedStorage<d>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int64_t head_offset = std::int64_t{blockIdx.x} * seqlen * d;
  const Matrix<const half> gQ{Q + head_offset, seqlen, d}, gK{K + head_offset, seqlen, d},
      gV{V + head_offset, seqlen, d};
  const Matrix<half> gO{O + head_offset, seqlen, d};
  const Matrix<float> gO_sum{O_sum + head_offset, seqlen, d};
  const Matrix<float> gl{l + std::int64_t{blockIdx.x} * seqlen, seqlen, 1};
  const Matrix<float> gm{m + std::int64_t{blockIdx.x} * seqlen, seqlen, 1};

  // O = 0, l = 0, m = -inf (line 2). Each warp initialises the rows that it will work on.
  for (int i = 0; i < seqlen; i += Br)
    for (int r = 0; r < rows_per_warp; r++) {
      const int row = i + warp * rows_per_warp + r;
      for (int c = 0; c < d / 32; c++) gO_sum(row, lane + 32 * c) = 0.0f;
      if (lane == 0) gl(row, 0) = 0.0f;
      if (lane == 0) gm(row, 0) = -INFINITY;
    }

  for (int j = 0; j < seqlen; j += Bc) {
    __syncthreads();  // the previous K and V have been read by all warps
    for (int i = threadIdx.x; i < Bc * d; i += num_warps * 32) {
      smem.K(i / d, i % d) = gK(j + i / d, i % d);
      smem.V(i / d, i % d) = gV(j + i / d, i % d);
    }

    for (int i = 0; i < seqlen; i += Br) {
      __syncthreads();  // the previous Q has been read by all warps
      for (int e = threadIdx.x; e < Br * d; e += num_warps * 32)
        smem.Q(e / d, e % d) = gQ(i + e / d, e % d);
      __syncthreads();  // Q, K and V are there for all warps

      for (int r = 0; r < rows_per_warp; r++) {
        const int tile_row = warp * rows_per_warp + r;
        const int row = i + tile_row;

        // S = Q K^T. The lane computes the scores of keys lane, lane + 32, ... (line 9)
        float s[keys_per_lane] = {};
#pragma unroll 1  // unrolled, nvcc merges neighbouring loads: step 04 will, by hand
        for (int col = 0; col < d; col++) {
          const float q = __half2float(smem.Q(tile_row, col));
          for (int c = 0; c < keys_per_lane; c++)
            s[c] += q * __half2float(smem.K(lane + 32 * c, col));
        }

        // The tile's own maximum, exponentials and sum (line 10).
        float m_tile = -INFINITY;
        for (int c = 0; c < keys_per_lane; c++) {
          s[c] *= scale;
          m_tile = fmaxf(m_tile, s[c]);
        }
        m_tile = warp_max(m_tile);
        float l_tile = 0;
        for (int c = 0; c < keys_per_lane; c++) {
          const float p = __expf(s[c] - m_tile);
          smem.P(warp, lane + 32 * c) = p;
          l_tile += p;
        }
        l_tile = warp_sum(l_tile);
        __syncwarp();  // the row of P is there for all lanes

        // Old and new, each corrected to the maximum of both (line 11).
        const float l_old = gl(row, 0), m_old = gm(row, 0);
        const float m_new = fmaxf(m_old, m_tile);
        const float alpha = __expf(m_old - m_new), beta = __expf(m_tile - m_new);
        const float l_new = alpha * l_old + beta * l_tile;

        // P V, and O normalised anew (line 12).
        float o[d / 32] = {};
#pragma unroll 1
        for (int key = 0; key < Bc; key++) {
          const float p = smem.P(warp, key);
          for (int c = 0; c < d / 32; c++) o[c] += p * __half2float(smem.V(key, lane + 32 * c));
        }
        for (int c = 0; c < d / 32; c++) {
          const int col = lane + 32 * c;
          const float o_new = (l_old * alpha * gO_sum(row, col) + beta * o[c]) / l_new;
          if (j + Bc < seqlen)
            gO_sum(row, col) = o_new;
          else
            gO(row, col) = __float2half(o_new);
        }
        __syncwarp();  // all lanes have read l, m and P; they are overwritten now
        if (lane == 0) {
          gl(row, 0) = l_new;  // line 13
          gm(row, 0) = m_new;
        }
      }
    }
  }
}

template <int d>
void run(const Problem &p) {
  const std::int64_t rows = std::int64_t{p.batch} * p.heads * p.seqlen_q;
  float *O_sum = static_cast<float *>(p.workspace), *l = O_sum + rows * d, *m = l + rows;
  launch<SharedStorage<d>>(attention<d>, dim3(p.batch * p.heads), dim3(num_warps * 32),
                           static_cast<const half *>(p.Q), static_cast<const half *>(p.K),
                           static_cast<const half *>(p.V), static_cast<half *>(p.O), O_sum, l, m,
                           p.seqlen_q, 1 / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = Bc,
    .default_batch = 8,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          return std::size_t(p.batch) * p.heads * p.seqlen_q * (p.head_dim + 2) * sizeof(float);
        },
});
