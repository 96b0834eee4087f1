// Step 04: register tiling. Each thread computes a patch of S and of O, not one element at a time.
// SPDX-License-Identifier: MIT
// Needs       sm_75
// Before      step 03: no bank conflicts left, but 5 loads from shared memory feed 4 FMA.
// Bottleneck  Shared memory serves one request per clock and multiprocessor; the FMA pipes take 4.
// Change      A thread computes 8 x 4 scores at once from 8 vectors of Q and 4 of K, and 8 x 8
//             elements of O from P and V: every value it loads is used 4 or 8 times. Values move 16
//             bytes at a time. K, V and Q become fp32 when they enter shared memory, once, and not
//             at each use; to make room, K and V take turns in one buffer.
// Prediction  Scores: 12 loads, 2 wavefronts each, for 128 FMA. Output: 16 loads for 256 FMA. With
//             softmax, loads and addresses about 9500 instructions per tile and thread, 8192 of
//             them FMA: at most 86% of the peak, 58 TFLOP/s. Shared memory is busy 61% of that
//             time.
#include "common/kernel/kernel.h"

namespace {

constexpr int Br = 64;  // rows of Q in a tile
constexpr int Bc = 64;  // rows of K and V in a tile
constexpr int num_warps = 4;
constexpr int rows_per_thread = 8;  // a warp's 16 rows, two lanes deep
constexpr int keys_per_thread = 4;  // a tile's 64 keys, 16 lanes wide

// Rows are padded, not swizzled: every address is then a register plus a constant. A pad of 4
// floats moves each row 4 banks on: rows that lanes load together begin in different banks. P's pad
// is 16: 8 lanes store 16 floats in each of two rows, which then fill all 32 banks.
template <int d>
struct SharedStorage {
  Tile<float, Br, d + 4> Q;
  Tile<float, Bc, d + 4> KV;  // K, then V, then the next K
  Tile<float, Br, Bc + 16> P;
};

/// Copies Rows x d elements: per thread and iteration 8 bytes of fp16, which become 16 of fp32.
template <int Rows, int d>
__device__ void load_tile(Tile<float, Rows, d + 4> &tile, const Matrix<const half> &matrix,
                          int first_row) {
  const int row = threadIdx.x / (d / 4), col = threadIdx.x % (d / 4) * 4;
#pragma unroll
  for (int i = 0; i < Rows; i += num_warps * 32 / (d / 4)) {
    const Vector<half, 4> x = load<4>(matrix(first_row + row + i, col));
    Vector<float, 4> y;
    for (int e = 0; e < 4; e++) y[e] = __half2float(x[e]);
    store<4>(tile(row + i, col), y);
  }
}

template <int d>
__global__ void __launch_bounds__(num_warps * 32)  // threads per block
    attention(const half *Q,                       // [batch * heads, seqlen, d]
              const half *K,                       // [batch * heads, seqlen, d]
              const half *V,                       // [batch * heads, seqlen, d]
              half *O,                             // [batch * heads, seqlen, d]
              int seqlen, float scale) {
  auto &smem = shared_storage<SharedStorage<d>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br;
  const std::int64_t head_offset = std::int64_t{blockIdx.y} * seqlen * d;
  const Matrix<const half> gQ{Q + head_offset, seqlen, d}, gK{K + head_offset, seqlen, d},
      gV{V + head_offset, seqlen, d};
  const Matrix<half> gO{O + head_offset, seqlen, d};

  // The thread's patch begins here: rows 2 r, keys 16 c and columns 64 n + e further on. Lanes one
  // apart share their keys, lanes two apart their rows: both kinds of load merge into 2 wavefronts.
  const int patch_row = warp * 16 + lane % 2, patch_key = lane / 2, patch_col = lane / 2 * 4;

  load_tile<Br, d>(smem.Q, gQ, first_row);

  float o[rows_per_thread][d / 16] = {}, l[rows_per_thread] = {}, m[rows_per_thread];
  for (int r = 0; r < rows_per_thread; r++) m[r] = -INFINITY;

  for (int j = 0; j < seqlen; j += Bc) {
    __syncthreads();  // the previous V has been read by all warps
    load_tile<Bc, d>(smem.KV, gK, j);
    __syncthreads();  // Q and K are there for all warps

    // S = Q K^T
    float s[rows_per_thread][keys_per_thread] = {};
#pragma unroll 2
    for (int col = 0; col < d; col += 4) {
      Vector<float, 4> q[rows_per_thread], k[keys_per_thread];
      for (int r = 0; r < rows_per_thread; r++) q[r] = load<4>(smem.Q(patch_row + 2 * r, col));
      for (int c = 0; c < keys_per_thread; c++) k[c] = load<4>(smem.KV(patch_key + 16 * c, col));
      for (int e = 0; e < 4; e++)
        for (int r = 0; r < rows_per_thread; r++)
          for (int c = 0; c < keys_per_thread; c++) s[r][c] += q[r][e] * k[c][e];
    }

    // Online softmax. The 16 lanes of equal parity share a row; l is a sum per lane until the end.
#pragma unroll
    for (int r = 0; r < rows_per_thread; r++) {
      float m_new = m[r];
      for (int c = 0; c < keys_per_thread; c++) {
        s[r][c] *= scale;
        m_new = fmaxf(m_new, s[r][c]);
      }
      for (int mask = 16; mask > 1; mask /= 2)
        m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
      const float alpha = __expf(m[r] - m_new);  // e^-inf = 0 for the first tile
      m[r] = m_new;
      l[r] *= alpha;
      Vector<float, 4> p;
      for (int c = 0; c < keys_per_thread; c++) l[r] += p[c] = __expf(s[r][c] - m_new);
      store<4>(smem.P(patch_row + 2 * r, 4 * patch_key), p);  // key k + 16 c is in column 4 k + c
      for (int c = 0; c < d / 16; c++) o[r][c] *= alpha;
    }

    __syncthreads();  // K has been read by all warps; P is there for all lanes
    load_tile<Bc, d>(smem.KV, gV, j);
    __syncthreads();  // V is there for all warps

    // O += P V
#pragma unroll 1
    for (int key = 0; key < Bc / 4; key++) {
      Vector<float, 4> p[rows_per_thread];  // of keys key, key + 16, key + 32, key + 48
      for (int r = 0; r < rows_per_thread; r++) p[r] = load<4>(smem.P(patch_row + 2 * r, 4 * key));
      for (int e = 0; e < 4; e++)
        for (int n = 0; n < d / 64; n++) {
          const Vector<float, 4> v = load<4>(smem.KV(key + 16 * e, patch_col + 64 * n));
          for (int r = 0; r < rows_per_thread; r++)
            for (int c = 0; c < 4; c++) o[r][4 * n + c] += p[r][e] * v[c];
        }
    }
  }

#pragma unroll
  for (int r = 0; r < rows_per_thread; r++) {
    for (int mask = 16; mask > 1; mask /= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
    for (int n = 0; n < d / 64; n++) {
      Vector<half, 4> x;
      for (int c = 0; c < 4; c++) x[c] = __float2half(o[r][4 * n + c] / l[r]);
      store<4>(gO(first_row + patch_row + 2 * r, patch_col + 64 * n), x);
    }
  }
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
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
});
