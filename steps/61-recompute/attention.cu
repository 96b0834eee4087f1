// Step 61: recompute. P and dS never leave the chip: a block computes them again from Q, K and the log-sum-exp.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --type
// Before      step 60: a kernel for each line of the chain rule; P and dS cross HBM.
// Bottleneck  HBM: 20 bytes of each score pass through it.
// Change      A block takes 64 keys and walks along the queries. P = e^(S - lse) needs no other key. dK
//             and dV stay in registers. dQ is a sum over blocks: they add to it in fp32, by reductions.
// Prediction  A score moves no byte of HBM, and 4 d / 64 = 8 bytes of reductions to L2. 64 queries and 64
//             keys are 1280 mma, 1920 clocks of an SM's tensor cores, and 3456 wavefronts of its shared
//             memory, a clock each: at 1.80 GHz 132 SMs do 360 TFLOP/s at most. Copies are waited for.
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
                          int first_row) {
  for (int i = threadIdx.x * 8; i < Rows * Cols; i += threads * 8)
    cp_async_16(tile(i / Cols, i % Cols), matrix(first_row + i / Cols, i % Cols));
}

__device__ float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

/// D = dO . o of each query, and dQ's sums begin at 0. A warp takes one row.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    begin(const T *O, const T *dO,  // [batch * heads * seqlen, d]
          float *D,                 // [batch * heads * seqlen]
          float *dQ_sum) {          // [batch * heads * seqlen, d]
  const int lane = threadIdx.x % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * num_warps + threadIdx.x / 32;
  const Matrix<const T> o{O + row * d, 1, d}, dO_row{dO + row * d, 1, d};
  const Matrix<float> sums{dQ_sum + row * d, 1, d};
  float sum = 0;
  for (int k = lane; k < d; k += 32) {
    sum += to_float<T>(dO_row(0, k)) * to_float<T>(o(0, k));
    sums(0, k) = 0.0f;
  }
  sum = warp_sum(sum);
  if (lane == 0) Matrix<float>{D + row, 1, 1}(0, 0) = sum;
}

template <class T, int d>
struct SharedStorage {
  SharedTile<Bc, d, T> K, V;
  SharedTile<Br, d, T> Q, dO;
  SharedTile<Br, Bc, T> P, dS;
};

/// A B^T of 16 rows of A and the tile B: Q K^T, or dO V^T.
template <class T, int d>
__device__ void multiply_rows(FragmentC (&c)[Bc / 8], SharedTile<Br, d, T> &A,
                              SharedTile<Bc, d, T> &B) {
  const int warp = warp_index(), lane = threadIdx.x % 32;
#pragma unroll 4  // unrolled further, it takes more registers than there are
  for (int col = 0; col < d; col += 16) {
    const FragmentA a = ldmatrix_x4(A(warp * 16 + lane % 16, col + lane / 16 * 8));
    for (int key = 0; key < Bc; key += 16) {
      const auto b = ldmatrix_x4(B(key + lane % 8 + lane / 16 * 8, col + lane / 8 % 2 * 8));
      mma<T>(c[key / 8], a, {b[0], b[1]});
      mma<T>(c[key / 8 + 1], a, {b[2], b[3]});
    }
  }
}

/// P and dS of a warp's 16 queries and all 64 keys, rounded, to shared memory. lse and D are those of the
/// tile's queries.
template <class T, int d>
__device__ void compute_P_and_dS(SharedStorage<T, d> &smem, const Matrix<const float> &lse,
                                 const Matrix<const float> &D, float scale_log2) {
  // The lane has rows `row` and `row` + 8, columns `key` and `key` + 1 of each 8 keys.
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, key = lane % 4 * 2;

  // P = e^(S - lse).
  FragmentC s[Bc / 8] = {};
  multiply_rows<T, d>(s, smem.Q, smem.K);
  for (int r = 0; r < 2; r++) {
    const float lse_log2 = lse(0, row + 8 * r) * log2_e;
    for (int n = 0; n < Bc / 8; n++) {
      Vector<T, 2> p;
      for (int e = 0; e < 2; e++)
        p[e] = from_float<T>(ex2(fmaf(s[n][2 * r + e], scale_log2, -lse_log2)));
      store<2>(smem.P(row + 8 * r, key + 8 * n), p);
    }
  }

  // dS = P o (dO V^T - D). The lane reads the P that it has stored: there is no register to keep it.
  FragmentC dp[Bc / 8] = {};
  multiply_rows<T, d>(dp, smem.dO, smem.V);
  for (int r = 0; r < 2; r++) {
    const float D_row = D(0, row + 8 * r);
    for (int n = 0; n < Bc / 8; n++) {
      const auto p = load<2>(smem.P(row + 8 * r, key + 8 * n));
      Vector<T, 2> ds;
      for (int e = 0; e < 2; e++)
        ds[e] = from_float<T>(to_float<T>(p[e]) * (dp[n][2 * r + e] - D_row));
      store<2>(smem.dS(row + 8 * r, key + 8 * n), ds);
    }
  }
}

/// C += A^T B of a warp's 16 columns of A: P^T dO, or dS^T Q.
template <class T, int d>
__device__ void add_transposed(FragmentC (&c)[d / 8], SharedTile<Br, Bc, T> &A,
                               SharedTile<Br, d, T> &B) {
  const int warp = warp_index(), lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < Br; row += 16) {
    const FragmentA a =
        ldmatrix_x4_trans(A(row + lane % 8 + lane / 16 * 8, warp * 16 + lane / 8 % 2 * 8));
    for (int col = 0; col < d; col += 16) {
      const auto b = ldmatrix_x4_trans(B(row + lane % 16, col + lane / 16 * 8));
      mma<T>(c[col / 8], a, {b[0], b[1]});
      mma<T>(c[col / 8 + 1], a, {b[2], b[3]});
    }
  }
}

/// dK and dV of 64 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 2)                   // threads per block, blocks per SM
    gradients(const T *Q, const T *K, const T *V, const T *dO,  // [batch * heads, seqlen, d]
              const float *lse, const float *D,                 // [batch * heads, seqlen]
              float *dQ_sum,                                    // [batch * heads, seqlen, d]
              T *dK, T *dV,                                     // [batch * heads, seqlen, d]
              int seqlen, float scale) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int first_key = blockIdx.x * Bc;
  const std::int64_t head_rows = std::int64_t{blockIdx.y} * seqlen;
  const auto of_head = [=]<class U>(U *tensor) {
    return Matrix<U>{tensor + head_rows * d, seqlen, d};
  };
  const auto gQ = of_head(Q), gdO = of_head(dO);
  const auto gdQ = of_head(dQ_sum);
  load_tile(smem.K, of_head(K), first_key);
  load_tile(smem.V, of_head(V), first_key);

  FragmentC dk[d / 8] = {}, dv[d / 8] = {};
  for (int i = 0; i < seqlen; i += Br) {
    __syncthreads();  // the previous Q, dO, P and dS have been read by all warps
    load_tile(smem.Q, gQ, i);
    load_tile(smem.dO, gdO, i);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // K, V, Q and dO are there for all warps

    compute_P_and_dS(smem, {lse + head_rows + i, 1, Br}, {D + head_rows + i, 1, Br},
                     scale * log2_e);
    __syncthreads();  // P and dS of all queries are there for all warps

    // A warp has 16 keys and all 64 queries: dV += P^T dO, dK += dS^T Q.
    add_transposed<T, d>(dv, smem.P, smem.dO);
    add_transposed<T, d>(dk, smem.dS, smem.Q);

    // The warp's 16 queries again, and what the block's keys add to dQ: dS K.
    const int row = i + threadIdx.x / 32 * 16 + lane / 4;
    FragmentA ds[Bc / 16];
    for (int key = 0; key < Bc; key += 16)
      ds[key / 16] = ldmatrix_x4(smem.dS(warp * 16 + lane % 16, key + lane / 16 * 8));
#pragma unroll 1  // unrolled, it takes more registers than there are
    for (int col = 0; col < d; col += 16) {
      FragmentC dq[2] = {};
      for (int key = 0; key < Bc; key += 16) {
        const auto k = ldmatrix_x4_trans(smem.K(key + lane % 16, col + lane / 16 * 8));
        mma<T>(dq[0], ds[key / 16], {k[0], k[1]});
        mma<T>(dq[1], ds[key / 16], {k[2], k[3]});
      }
      for (int e = 0; e < 8; e++)
        red_add(gdQ(row + e / 2 % 2 * 8, col + e / 4 * 8 + lane % 4 * 2 + e % 2), dq[e / 4][e % 4]);
    }
  }

  const auto gdK = of_head(dK), gdV = of_head(dV);
  const int first = first_key + threadIdx.x / 32 * 16 + lane / 4;
  for (int col = 0; col < d; col += 8)
    for (int r = 0; r < 2; r++) {
      const float *const k = &dk[col / 8][2 * r], *const v = &dv[col / 8][2 * r];
      store<2>(gdK(first + 8 * r, col + lane % 4 * 2),
               Vector<T, 2>{from_float<T>(k[0] * scale), from_float<T>(k[1] * scale)});
      store<2>(gdV(first + 8 * r, col + lane % 4 * 2),
               Vector<T, 2>{from_float<T>(v[0]), from_float<T>(v[1])});
    }
}

/// dQ = its sums / sqrt(d), rounded. A thread takes 8 elements.
template <class T>
__global__ void __launch_bounds__(threads)
    round_dQ(const float *dQ_sum,  // [batch * heads * seqlen, d]
             T *dQ,                // [batch * heads * seqlen, d]
             float scale) {
  const std::int64_t first = (std::int64_t{blockIdx.x} * threads + threadIdx.x) * 8;
  const Matrix<const float> sums{dQ_sum + first, 1, 8};
  Vector<T, 8> rounded;
  for (int half_of = 0; half_of < 8; half_of += 4) {
    const auto four = load<4>(sums(0, half_of));
    for (int e = 0; e < 4; e++) rounded[half_of + e] = from_float<T>(four[e] * scale);
  }
  store<8>(Matrix<T>{dQ + first, 1, 8}(0, 0), rounded);
}

template <class T, int d>
void run(const Problem &p) {
  const unsigned heads = p.batch * p.heads;
  const std::int64_t rows = std::int64_t{heads} * p.seqlen_q;
  const dim3 block(threads);
  const T *const Q = static_cast<const T *>(p.Q), *const K = static_cast<const T *>(p.K);
  const T *const V = static_cast<const T *>(p.V), *const O = static_cast<const T *>(p.O);
  const T *const dO = static_cast<const T *>(p.dO);
  float *const dQ_sum = static_cast<float *>(p.workspace);
  float *const D = dQ_sum + rows * d;
  const float scale = 1 / sqrtf(d);
  launch<void>(begin<T, d>, dim3(rows / num_warps), block, O, dO, D, dQ_sum);
  launch<SharedStorage<T, d>>(gradients<T, d>, dim3(p.seqlen_q / Bc, heads), block, Q, K, V, dO,
                              p.lse, D, dQ_sum, static_cast<T *>(p.dK), static_cast<T *>(p.dV),
                              p.seqlen_q, scale);
  launch<void>(round_dQ<T>, dim3(rows * (d / 8) / threads), block, dQ_sum, static_cast<T *>(p.dQ),
               scale);
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = Bc,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          const std::size_t rows = std::size_t(p.batch) * p.heads * p.seqlen_q;
          return rows * (p.head_dim + 1) * sizeof(float);
        },
    .gradients = true,
    .same_bits = false,
});
