// Step 00: standard attention, three kernels: S = Q K^T, P = softmax(S), O = P V.
// SPDX-License-Identifier: MIT
// Needs       sm_75
// Before      nothing: this is the definition (reference/attention.h), tiled for a GPU.
// Change      Each kernel is one line of the formula. S is N x N and crosses HBM: written by the
//             first kernel, turned into P in place by the second, read by the third.
// Prediction  S and P cross HBM four times, 4 bytes each: 16 bytes per score, where Q, K, V and
//             O together cost 8 d / N bytes per score, 0.125 at seqlen 8192. And 4 N^2 bytes of
//             memory per head: 268 MB at 8192.
#include "common/kernel/kernel.h"

namespace {

constexpr int Br = 32;   // rows of Q in a tile
constexpr int Bc = 128;  // rows of K and V in a tile
constexpr int num_warps = 4;
constexpr int rows_per_warp = Br / num_warps;
constexpr int keys_per_lane = Bc / 32;

__device__ float warp_max(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, mask));
  return x;
}

__device__ float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

template <int d>
struct ScoresStorage {
  Tile<half, Br, d> Q;
  Tile<half, Bc, d> K;
};

/// S = Q K^T / sqrt(d). A block computes one Br x Bc tile of S.
template <int d>
__global__ void __launch_bounds__(num_warps * 32)  // threads per block
    scores(const half *Q,                          // [batch * heads, seqlen, d]
           const half *K,                          // [batch * heads, seqlen, d]
           float *S,                               // [batch * heads, seqlen, seqlen]
           int seqlen, float scale) {
  auto &smem = shared_storage<ScoresStorage<d>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_key = blockIdx.x * Bc, first_row = blockIdx.y * Br;
  const std::int64_t head_offset = std::int64_t{blockIdx.z} * seqlen * d;
  const Matrix<const half> gQ{Q + head_offset, seqlen, d}, gK{K + head_offset, seqlen, d};
  const Matrix<float> gS{S + std::int64_t{blockIdx.z} * seqlen * seqlen, seqlen, seqlen};

  for (int i = threadIdx.x; i < Br * d; i += num_warps * 32)
    smem.Q(i / d, i % d) = gQ(first_row + i / d, i % d);
  for (int i = threadIdx.x; i < Bc * d; i += num_warps * 32)
    smem.K(i / d, i % d) = gK(first_key + i / d, i % d);
  __syncthreads();  // Q and K are there for all warps

  for (int r = 0; r < rows_per_warp; r++) {
    const int row = warp * rows_per_warp + r;
    // The lane computes the scores of keys lane, lane + 32, ...
    float s[keys_per_lane] = {};
#pragma unroll 1  // unrolled, nvcc merges neighbouring loads: step 04 will, by hand
    for (int col = 0; col < d; col++) {
      const float q = __half2float(smem.Q(row, col));
      for (int c = 0; c < keys_per_lane; c++) s[c] += q * __half2float(smem.K(lane + 32 * c, col));
    }
    for (int c = 0; c < keys_per_lane; c++)
      gS(first_row + row, first_key + lane + 32 * c) = s[c] * scale;
  }
}

constexpr int softmax_num_warps = 8;

struct SoftmaxStorage {
  Tile<float, 2, softmax_num_warps> of_warp;  // each warp's maximum, then each warp's sum
};

/// P = softmax(S), in place. A block takes one row: three passes over it.
__global__ void __launch_bounds__(softmax_num_warps * 32)  // threads per block
    softmax(float *S,  // [batch * heads * seqlen, seqlen], S on the way in, P on the way out
            int seqlen) {
  auto &smem = shared_storage<SoftmaxStorage>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Matrix<float> row{S + std::int64_t{blockIdx.x} * seqlen, 1, seqlen};

  float m = -INFINITY;
  for (int i = threadIdx.x; i < seqlen; i += softmax_num_warps * 32) m = fmaxf(m, row(0, i));
  m = warp_max(m);
  if (lane == 0) smem.of_warp(0, warp) = m;
  __syncthreads();  // every warp's maximum is there
  m = warp_max(lane < softmax_num_warps ? float(smem.of_warp(0, lane)) : -INFINITY);

  float l = 0;
  for (int i = threadIdx.x; i < seqlen; i += softmax_num_warps * 32) l += __expf(row(0, i) - m);
  l = warp_sum(l);
  if (lane == 0) smem.of_warp(1, warp) = l;
  __syncthreads();  // every warp's sum is there
  l = warp_sum(lane < softmax_num_warps ? float(smem.of_warp(1, lane)) : 0.0f);

  for (int i = threadIdx.x; i < seqlen; i += softmax_num_warps * 32)
    row(0, i) = __expf(row(0, i) - m) / l;
}

template <int d>
struct OutputStorage {
  Tile<float, Br, Bc> P;
  Tile<half, Bc, d> V;
};

/// O = P V. A block computes Br rows of O.
template <int d>
__global__ void __launch_bounds__(num_warps * 32)  // threads per block
    output(const float *P,                         // [batch * heads, seqlen, seqlen]
           const half *V,                          // [batch * heads, seqlen, d]
           half *O,                                // [batch * heads, seqlen, d]
           int seqlen) {
  auto &smem = shared_storage<OutputStorage<d>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br;
  const std::int64_t head_offset = std::int64_t{blockIdx.y} * seqlen * d;
  const Matrix<const float> gP{P + std::int64_t{blockIdx.y} * seqlen * seqlen, seqlen, seqlen};
  const Matrix<const half> gV{V + head_offset, seqlen, d};
  const Matrix<half> gO{O + head_offset, seqlen, d};

  float o[rows_per_warp][d / 32] = {};  // the lane owns columns lane + 32 c
  for (int j = 0; j < seqlen; j += Bc) {
    __syncthreads();  // the previous P and V have been read by all warps
    for (int i = threadIdx.x; i < Br * Bc; i += num_warps * 32)
      smem.P(i / Bc, i % Bc) = gP(first_row + i / Bc, j + i % Bc);
    for (int i = threadIdx.x; i < Bc * d; i += num_warps * 32)
      smem.V(i / d, i % d) = gV(j + i / d, i % d);
    __syncthreads();  // P and V are there for all warps
#pragma unroll
    for (int r = 0; r < rows_per_warp; r++)
#pragma unroll 1
      for (int key = 0; key < Bc; key++) {
        const float p = smem.P(warp * rows_per_warp + r, key);
        for (int c = 0; c < d / 32; c++) o[r][c] += p * __half2float(smem.V(key, lane + 32 * c));
      }
  }
#pragma unroll
  for (int r = 0; r < rows_per_warp; r++)
    for (int c = 0; c < d / 32; c++)
      gO(first_row + warp * rows_per_warp + r, lane + 32 * c) = __float2half(o[r][c]);
}

template <int d>
void run(const Problem &p) {
  const unsigned heads = p.batch * p.heads, rows = p.seqlen_q / Br, keys = p.seqlen_q / Bc;
  const half *Q = static_cast<const half *>(p.Q), *K = static_cast<const half *>(p.K);
  const half *V = static_cast<const half *>(p.V);
  float *S = static_cast<float *>(p.workspace);
  launch<ScoresStorage<d>>(scores<d>, dim3(keys, rows, heads), dim3(num_warps * 32), Q, K, S,
                           p.seqlen_q, 1 / sqrtf(d));
  launch<SoftmaxStorage>(softmax, dim3(heads * p.seqlen_q), dim3(softmax_num_warps * 32), S,
                         p.seqlen_q);
  launch<OutputStorage<d>>(output<d>, dim3(rows, heads), dim3(num_warps * 32), S, V,
                           static_cast<half *>(p.O), p.seqlen_q);
}

}  // namespace

EXPORT_STEP({
    .tile = Bc,
    .default_batch = 1,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          return std::size_t(p.batch) * p.heads * p.seqlen_q * p.seqlen_q * sizeof(float);
        },
});
