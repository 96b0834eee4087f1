// Step 63: transposed. S and dP are computed transposed: in registers they are operands of dV and dK already.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --type
// Before      step 61: P and dS go through shared memory, because another warp multiplies them.
// Bottleneck  The reductions of dQ, nearly half of the clocks: each touches 8 sectors and fills half of each.
//             Then shared memory, with 3456 wavefronts for a pair of tiles.
// Change      A warp computes S^T and dP^T of its 16 keys. P^T and dS^T are A of dV += P^T dO and of
//             dK += dS^T Q as they lie. Only dS goes through shared memory, for dQ. The sums of dQ lie in
//             global memory in the order of the registers, so that a reduction fills its sectors.
// Prediction  3332 wavefronts, not 3456, and 1024 sectors of reductions, not 2048. If the sectors are what
//             takes 3900 of step 61's 8600 clocks, 1950 of them go: 6700 clocks, 1.3 times the speed.
#include "common/kernel/backward.h"

namespace {

constexpr int Br = 64;  // rows of Q in a tile
constexpr int Bc = 64;  // rows of K and V in a tile
constexpr int num_warps = 4;
constexpr int m_tiles = Bc / num_warps / 16;  // a warp's keys, in units of mma's 16: one
constexpr int threads = num_warps * 32;

template <class T, int d>
struct SharedStorage {
  SharedTile<Bc, d, T> K, V;
  SharedTile<Br, d, T> Q, dO;
  SharedTile<Bc, Br, T> dS;  // transposed: a row for each key
  Tile<float, 1, Br> lse, D;
};

/// A warp's 16 rows of P^T or dS^T, rounded: two neighbouring blocks of 8 queries become A of one product.
template <class T>
__device__ void to_fragments(FragmentA (&a)[Br / 16], const FragmentC (&c)[Br / 8]) {
  for (int n = 0; n < Br / 8; n++)
    for (int r = 0; r < 2; r++)
      a[n / 2][n % 2 * 2 + r] = cvt_rn_x2<T>(c[n][2 * r], c[n][2 * r + 1]);
}

/// The sums of dQ of 16 queries, in the order in which a warp has them in registers: number i of all lanes is
/// a row.
template <int d, class U>
__device__ Matrix<U> sums_of(U *dQ_sum, std::int64_t first_row) {
  return {dQ_sum + first_row * d, d / 2, 32};
}

/// dK and dV of 64 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 2)                   // threads per block, blocks per SM
    gradients(const T *Q, const T *K, const T *V, const T *dO,  // [batch * heads, seqlen, d]
              const float *lse, const float *D,                 // [batch * heads, seqlen]
              float *dQ_sum,  // [batch * heads, seqlen / 16, d / 2, 32]
              T *dK, T *dV,   // [batch * heads, seqlen, d]
              int seqlen, float scale) {
  const float scale_log2 = scale * log2_e;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int first_key = blockIdx.x * Bc;
  const std::int64_t head_rows = std::int64_t{blockIdx.y} * seqlen;
  const auto of_head = [=]<class U>(U *tensor) {
    return Matrix<U>{tensor + head_rows * d, seqlen, d};
  };
  const auto gQ = of_head(Q), gdO = of_head(dO);
  const Matrix<const float> glse{lse + head_rows, 1, seqlen}, gD{D + head_rows, 1, seqlen};
  const auto load_queries = [&](int first_row) {
    load_tile<threads>(smem.Q, gQ, first_row);
    load_tile<threads>(smem.dO, gdO, first_row);
    if (threadIdx.x < Br / 4) {
      const int row = threadIdx.x * 4;
      cp_async_16(smem.lse(0, row), glse(0, first_row + row));
      cp_async_16(smem.D(0, row), gD(0, first_row + row));
    }
  };
  load_tile<threads>(smem.K, of_head(K), first_key);
  load_tile<threads>(smem.V, of_head(V), first_key);

  FragmentC dk[m_tiles][d / 8] = {}, dv[m_tiles][d / 8] = {};
  for (int i = 0; i < seqlen; i += Br) {
    load_queries(i);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // K, V, Q, dO, lse and D are there, and the previous dS has been read by all

    // A warp has 16 keys and all 64 queries. In each 8 queries a lane has two keys, `key_row` and 8 further,
    // and two queries, `query` and `query` + 1. P^T = e^(S^T - lse), and dV += P^T dO.
    const int key_row = threadIdx.x / 32 * 16 + lane / 4, query = lane % 4 * 2;
    FragmentC p[m_tiles][Br / 8] = {};
    FragmentA a[m_tiles][Br / 16];
    multiply_rows<T, 4>(p, smem.K, smem.Q, warp_index() * 16);
    for (int n = 0; n < Br / 8; n++) {
      const auto two = load<2>(smem.lse(0, query + 8 * n));
      for (int e = 0; e < 4; e++)
        p[0][n][e] = ex2(fmaf(p[0][n][e], scale_log2, -two[e % 2] * log2_e));
    }
    to_fragments<T>(a[0], p[0]);
    add_product<T>(dv, a, smem.dO);

    // dS^T = P^T o (V dO^T - D), and dK += dS^T Q.
    FragmentC ds[m_tiles][Br / 8] = {};
    multiply_rows<T, 4>(ds, smem.V, smem.dO, warp_index() * 16);
    for (int n = 0; n < Br / 8; n++) {
      const auto two = load<2>(smem.D(0, query + 8 * n));
      for (int e = 0; e < 4; e++) ds[0][n][e] = p[0][n][e] * (ds[0][n][e] - two[e % 2]);
    }
    to_fragments<T>(a[0], ds[0]);
    for (int n = 0; n < Br / 8; n++)
      for (int r = 0; r < 2; r++)
        store<2>(smem.dS(key_row + 8 * r, query + 8 * n), unpack_x2<T>(a[0][n / 2][n % 2 * 2 + r]));
    add_product<T>(dk, a, smem.Q);
    __syncthreads();  // dS of all keys is there, and Q, dO, lse and D have been read by all

    // 16 queries, and what the block's keys add to dQ: dS K.
    for (int key = 0; key < Bc; key += 16)
      a[0][key / 16] =
          ldmatrix_x4_trans(smem.dS(key + lane % 8 + lane / 16 * 8, warp * 16 + lane / 8 % 2 * 8));
    const Matrix<float> sums = sums_of<d>(dQ_sum, head_rows + i + warp * 16);
#pragma unroll 1  // unrolled, it takes more registers than there are
    for (int col = 0; col < d; col += 16) {
      FragmentC dq[2] = {};
      for (int key = 0; key < Bc; key += 16) {
        const auto k = ldmatrix_x4_trans(smem.K(key + lane % 16, col + lane / 16 * 8));
        mma<T>(dq[0], a[0][key / 16], {k[0], k[1]});
        mma<T>(dq[1], a[0][key / 16], {k[2], k[3]});
      }
      for (int e = 0; e < 8; e++) red_add(sums(col / 2 + e, lane), dq[e / 4][e % 4]);
    }
  }

  const auto gdK = of_head(dK), gdV = of_head(dV);
  const int first = first_key + threadIdx.x / 32 * 16 + lane / 4;
  for (int col = 0; col < d; col += 8)
    for (int r = 0; r < 2; r++) {
      const float *const k = &dk[0][col / 8][2 * r], *const v = &dv[0][col / 8][2 * r];
      store<2>(gdK(first + 8 * r, col + lane % 4 * 2),
               Vector<T, 2>{from_float<T>(k[0] * scale), from_float<T>(k[1] * scale)});
      store<2>(gdV(first + 8 * r, col + lane % 4 * 2),
               Vector<T, 2>{from_float<T>(v[0]), from_float<T>(v[1])});
    }
}

/// dQ = its sums / sqrt(d), rounded. A warp takes 16 queries.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    round_dQ(const float *dQ_sum,  // [batch * heads * seqlen / 16, d / 2, 32]
             T *dQ,                // [batch * heads * seqlen, d]
             float scale) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const std::int64_t first = std::int64_t{blockIdx.x} * Br + threadIdx.x / 32 * 16;
  const auto sums = sums_of<d>(dQ_sum, first);
  const Matrix<T> rows{dQ + first * d, 16, d};
  for (int i = 0; i < d / 2; i += 2)
    store<2>(rows(row + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2),
             Vector<T, 2>{from_float<T>(sums(i, lane) * scale),
                          from_float<T>(sums(i + 1, lane) * scale)});
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
  launch<void>(begin<T, d, num_warps>, dim3(rows / num_warps), block, O, dO, D, dQ_sum);
  launch<SharedStorage<T, d>>(gradients<T, d>, dim3(p.seqlen_q / Bc, heads), block, Q, K, V, dO,
                              p.lse, D, dQ_sum, static_cast<T *>(p.dK), static_cast<T *>(p.dV),
                              p.seqlen_q, scale);
  launch<void>(round_dQ<T, d>, dim3(rows / Br), block, dQ_sum, static_cast<T *>(p.dQ), scale);
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
