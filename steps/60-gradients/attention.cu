// Step 60: gradients. The backward pass by its definition: five products, P and dS in global memory.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --type
// Before      step 00: standard attention, and S and P cross HBM; step 05: its products on tensor cores.
// Change      The chain rule, a kernel for each line (reference/gradients.h): S = Q K^T, P = softmax(S),
//             dV = P^T dO, dS = P o (dO V^T - D), dQ = dS K, dK = dS^T Q. D is the row sum of dO o O.
// Prediction  A score crosses HBM in 20 bytes: S out and in, 4 each; P out and twice in, dS out and
//             twice in, 2 each. Its five products are 10 d = 1280 operations: at 4.8 TB/s 307 TFLOP/s
//             at most, and less, because no kernel copies and multiplies at the same time.
#include "common/kernel/kernel.h"
#include "common/kernel/swizzle.h"

namespace {

constexpr int Br = 64;  // rows of Q in a tile
constexpr int Bc = 64;  // rows of K and V in a tile
constexpr int num_warps = 4;
constexpr int threads = num_warps * 32;

/// Starts the copies of Rows x Cols elements, 16 bytes per thread and iteration.
template <class T, int Rows, int Cols>
__device__ void load_tile(SharedTile<Rows, Cols, T> &tile, const Matrix<const T> &matrix,
                          int first_row, int first_col) {
  for (int i = threadIdx.x * 8; i < Rows * Cols; i += threads * 8)
    cp_async_16(tile(i / Cols, i % Cols), matrix(first_row + i / Cols, first_col + i % Cols));
}

__device__ float warp_max(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, mask));
  return x;
}

__device__ float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

template <class T, int d>
struct RowsStorage {
  SharedTile<Br, d, T> A;
  SharedTile<Bc, d, T> B;
};

/// C = A B^T of a tile of rows of each: Q K^T, or dO V^T. A warp has 16 rows of C.
template <class T, int d>
__device__ void multiply_rows(FragmentC (&c)[Bc / 8], const Matrix<const T> &A,
                              const Matrix<const T> &B, int first_row, int first_key) {
  auto &smem = shared_storage<RowsStorage<T, d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  load_tile(smem.A, A, first_row, 0);
  load_tile(smem.B, B, first_key, 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // the copies of all warps are there
#pragma unroll
  for (int col = 0; col < d; col += 16) {
    const FragmentA a = ldmatrix_x4(smem.A(warp * 16 + lane % 16, col + lane / 16 * 8));
    for (int key = 0; key < Bc; key += 16) {
      const auto b = ldmatrix_x4(smem.B(key + lane % 8 + lane / 16 * 8, col + lane / 8 % 2 * 8));
      mma<T>(c[key / 8], a, {b[0], b[1]});
      mma<T>(c[key / 8 + 1], a, {b[2], b[3]});
    }
  }
}

/// S = Q K^T / sqrt(d). A block computes a tile of S.
template <class T, int d>
__global__ void __launch_bounds__(threads) scores(const T *Q,  // [batch * heads, seqlen, d]
                                                  const T *K,  // [batch * heads, seqlen, d]
                                                  float *S,    // [batch * heads, seqlen, seqlen]
                                                  int seqlen, float scale) {
  const std::int64_t head = blockIdx.z;
  const int first_key = blockIdx.x * Bc, first_row = blockIdx.y * Br;
  const Matrix<float> gS{S + head * seqlen * seqlen, seqlen, seqlen};
  FragmentC s[Bc / 8] = {};
  multiply_rows<T, d>(s, {Q + head * seqlen * d, seqlen, d}, {K + head * seqlen * d, seqlen, d},
                      first_row, first_key);
  const int row = first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int key = first_key + threadIdx.x % 4 * 2;
  for (int i = 0; i < Bc / 8; i++)
    for (int r = 0; r < 2; r++)
      store<2>(gS(row + 8 * r, key + 8 * i),
               Vector<float, 2>{s[i][2 * r] * scale, s[i][2 * r + 1] * scale});
}

/// P = softmax(S) of a row, and D = dO . o of its query. A warp takes one row.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    softmax(const float *S,           // [batch * heads * seqlen, seqlen]
            const T *O, const T *dO,  // [batch * heads * seqlen, d]
            T *P,                     // [batch * heads * seqlen, seqlen]
            float *D,                 // [batch * heads * seqlen]
            int seqlen) {
  const int lane = threadIdx.x % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * num_warps + threadIdx.x / 32;
  const Matrix<const float> s{S + row * seqlen, 1, seqlen};
  const Matrix<const T> o{O + row * d, 1, d}, dO_row{dO + row * d, 1, d};
  const Matrix<T> p{P + row * seqlen, 1, seqlen};
  float m = -INFINITY, l = 0, sum = 0;
  for (int j = lane; j < seqlen; j += 32) m = fmaxf(m, s(0, j));
  m = warp_max(m);
  for (int j = lane; j < seqlen; j += 32) l += __expf(s(0, j) - m);
  l = warp_sum(l);
  for (int j = lane; j < seqlen; j += 32) p(0, j) = from_float<T>(__expf(s(0, j) - m) / l);

  for (int k = lane; k < d; k += 32) sum += to_float<T>(dO_row(0, k)) * to_float<T>(o(0, k));
  sum = warp_sum(sum);
  if (lane == 0) Matrix<float>{D + row, 1, 1}(0, 0) = sum;
}

/// dS = P o (dP - D), with dP = dO V^T. A block computes a tile of dS.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    score_gradients(const T *dO,     // [batch * heads, seqlen, d]
                    const T *V,      // [batch * heads, seqlen, d]
                    const T *P,      // [batch * heads, seqlen, seqlen]
                    const float *D,  // [batch * heads, seqlen]
                    T *dS,           // [batch * heads, seqlen, seqlen]
                    int seqlen) {
  const std::int64_t head = blockIdx.z;
  const int first_key = blockIdx.x * Bc, first_row = blockIdx.y * Br;
  const Matrix<const T> gP{P + head * seqlen * seqlen, seqlen, seqlen};
  const Matrix<T> gdS{dS + head * seqlen * seqlen, seqlen, seqlen};
  const Matrix<const float> gD{D + head * seqlen, 1, seqlen};
  FragmentC dp[Bc / 8] = {};
  multiply_rows<T, d>(dp, {dO + head * seqlen * d, seqlen, d}, {V + head * seqlen * d, seqlen, d},
                      first_row, first_key);
  const int key = first_key + threadIdx.x % 4 * 2;
  for (int r = 0; r < 2; r++) {
    const int row = first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
    const float D_row = gD(0, row);
    for (int i = 0; i < Bc / 8; i++) {
      const auto p = load<2>(gP(row, key + 8 * i));
      Vector<T, 2> ds;
      for (int e = 0; e < 2; e++)
        ds[e] = from_float<T>(to_float<T>(p[e]) * (dp[i][2 * r + e] - D_row));
      store<2>(gdS(row, key + 8 * i), ds);
    }
  }
}

template <class T, int d>
struct GradientStorage {
  SharedTile<Br, Bc, T> A;
  SharedTile<Bc, d, T> B;
};

/// C = scale A B, or scale A^T B: dQ = dS K / sqrt(d), dV = P^T dO, dK = dS^T Q / sqrt(d). A block computes
/// 64 rows of C, a warp 16 of them.
template <class T, int d, bool transposed>
__global__ void __launch_bounds__(threads) gradient(const T *A,  // [batch * heads, seqlen, seqlen]
                                                    const T *B,  // [batch * heads, seqlen, d]
                                                    T *C,        // [batch * heads, seqlen, d]
                                                    int seqlen, float scale) {
  auto &smem = shared_storage<GradientStorage<T, d>>();
  const int lane = threadIdx.x % 32, m = warp_index() * 16;  // the warp's first row of the tile
  const std::int64_t head = blockIdx.y;
  const int first_row = blockIdx.x * Br;
  const Matrix<const T> gA{A + head * seqlen * seqlen, seqlen, seqlen};
  const Matrix<const T> gB{B + head * seqlen * d, seqlen, d};
  const Matrix<T> gC{C + head * seqlen * d, seqlen, d};

  FragmentC c[d / 8] = {};
  for (int j = 0; j < seqlen; j += Bc) {
    __syncthreads();  // the previous tiles have been read by all warps
    load_tile(smem.A, gA, transposed ? j : first_row, transposed ? first_row : j);
    load_tile(smem.B, gB, j, 0);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // A and B are there for all warps
#pragma unroll
    for (int k = 0; k < Bc; k += 16) {
      // A^T lies in memory column by column: ldmatrix.trans swaps rows and columns of each 8 x 8
      // matrix, and the lanes name the matrices so that A's order comes out.
      FragmentA a;
      if constexpr (transposed)
        a = ldmatrix_x4_trans(smem.A(k + lane % 8 + lane / 16 * 8, m + lane / 8 % 2 * 8));
      else
        a = ldmatrix_x4(smem.A(m + lane % 16, k + lane / 16 * 8));
      for (int col = 0; col < d; col += 16) {
        const auto b = ldmatrix_x4_trans(smem.B(k + lane % 16, col + lane / 16 * 8));
        mma<T>(c[col / 8], a, {b[0], b[1]});
        mma<T>(c[col / 8 + 1], a, {b[2], b[3]});
      }
    }
  }
  const int row = first_row + threadIdx.x / 32 * 16 + lane / 4;
  for (int col = 0; col < d; col += 8)
    for (int r = 0; r < 2; r++)
      store<2>(gC(row + 8 * r, col + lane % 4 * 2),
               Vector<T, 2>{from_float<T>(c[col / 8][2 * r] * scale),
                            from_float<T>(c[col / 8][2 * r + 1] * scale)});
}

template <class T, int d>
void run(const Problem &p) {
  const unsigned heads = p.batch * p.heads, tiles = p.seqlen_q / Br;
  const std::int64_t rows = std::int64_t{heads} * p.seqlen_q, all_scores = rows * p.seqlen_q;
  const dim3 score_tiles(tiles, tiles, heads), row_tiles(tiles, heads), block(threads);
  const T *const Q = static_cast<const T *>(p.Q), *const K = static_cast<const T *>(p.K);
  const T *const V = static_cast<const T *>(p.V), *const O = static_cast<const T *>(p.O);
  const T *const dO = static_cast<const T *>(p.dO);
  T *const dQ = static_cast<T *>(p.dQ), *const dK = static_cast<T *>(p.dK);
  T *const dV = static_cast<T *>(p.dV);
  float *const S = static_cast<float *>(p.workspace), *const D = S + all_scores;
  T *const P = reinterpret_cast<T *>(D + rows), *const dS = P + all_scores;
  const float scale = 1 / sqrtf(d);
  launch<RowsStorage<T, d>>(scores<T, d>, score_tiles, block, Q, K, S, p.seqlen_q, scale);
  launch<void>(softmax<T, d>, dim3(rows / num_warps), block, S, O, dO, P, D, p.seqlen_q);
  launch<GradientStorage<T, d>>(gradient<T, d, true>, row_tiles, block, P, dO, dV, p.seqlen_q,
                                1.0f);
  launch<RowsStorage<T, d>>(score_gradients<T, d>, score_tiles, block, dO, V, P, D, dS, p.seqlen_q);
  launch<GradientStorage<T, d>>(gradient<T, d, false>, row_tiles, block, dS, K, dQ, p.seqlen_q,
                                scale);
  launch<GradientStorage<T, d>>(gradient<T, d, true>, row_tiles, block, dS, Q, dK, p.seqlen_q,
                                scale);
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = Bc,
    .default_batch = 1,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          const std::size_t rows = std::size_t(p.batch) * p.heads * p.seqlen_q;
          return rows * (p.seqlen_q * (sizeof(float) + 2 * sizeof(half)) + sizeof(float));
        },
    .gradients = true,
});
