// Step 64: tiles. 128 keys for a block of eight warps: half of the warps keep dV, the other half dK.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --type
// Before      step 63: a warp keeps dV and dK of 16 keys, and a block copies, waits, and then multiplies.
// Bottleneck  Shared memory: 3332 wavefronts for 64 queries and 64 keys, beside 1920 clocks of products, because a
//             warp uses a fragment of Q or dO for 16 keys alone. And the waits for copies.
// Change      A warp has 32 keys, and keeps one sum of them: dV, or dK. The warps that keep dV compute P, and
//             give it to those that keep dK through shared memory. Both kinds add to dQ of the tile before, at
//             different times. Q and dO have two stages.
// Prediction  64 queries and 128 keys: 4356 wavefronts, 3840 clocks of products, 1024 sectors of reductions,
//             as many as half of the keys had. The phases add up to 4600 clocks; with the waits between them
//             5500, 450 TFLOP/s at 1.80 GHz.
#include "common/kernel/backward.h"
#include "common/kernel/mbarrier.h"

namespace {

/// Rows of Q in a tile: as many as registers and shared memory hold.
template <int d>
constexpr int query_rows = 8192 / d;
constexpr int Bc = 128;  // rows of K and V in a tile
constexpr int num_warps = 8;
constexpr int m_tiles = Bc / (num_warps / 2) / 16;  // a warp's keys, in units of mma's 16
constexpr int threads = num_warps * 32;

template <class T, int d>
struct SharedStorage {
  SharedTile<Bc, d, T> K, V;
  SharedTile<query_rows<d>, d, T> Q[2], dO[2];
  SharedTile<Bc, query_rows<d>, T> P_dS[2];  // P^T, then dS^T in its place: a row for each key
  Tile<float, 1, query_rows<d>> lse[2], D[2];
};

/// dK and dV of 128 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 1)                   // threads per block, blocks per SM
    gradients(const T *Q, const T *K, const T *V, const T *dO,  // [batch * heads, seqlen, d]
              const float *lse, const float *D,                 // [batch * heads, seqlen]
              float *dQ_sum,  // [batch * heads, seqlen / 16, d / 2, 32]
              T *dK, T *dV,   // [batch * heads, seqlen, d]
              int seqlen, float scale) {
  constexpr int Br = query_rows<d>;
  constexpr int part = d / 16;  // as many as registers hold
  const float scale_log2 = scale * log2_e;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int first_key = blockIdx.x * Bc;
  const std::int64_t head_rows = std::int64_t{blockIdx.y} * seqlen;
  const auto of_head = [=]<class U>(U *tensor) {
    return Matrix<U>{tensor + head_rows * d, seqlen, d};
  };
  const Matrix<const float> glse{lse + head_rows, 1, seqlen}, gD{D + head_rows, 1, seqlen};
  const auto load_queries = [&](int stage, int first_row) {
    load_tile<threads>(smem.Q[stage], of_head(Q), first_row);
    load_tile<threads>(smem.dO[stage], of_head(dO), first_row);
    if (threadIdx.x < Br / 4) {
      const int row = threadIdx.x * 4;
      cp_async_16(smem.lse[stage](0, row), glse(0, first_row + row));
      cp_async_16(smem.D[stage](0, row), gD(0, first_row + row));
    }
  };
  load_tile<threads>(smem.K, of_head(K), first_key);
  load_tile<threads>(smem.V, of_head(V), first_key);
  load_queries(0, 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // K, V, and the first Q, dO, lse and D are there for all warps

  // Warps 0 to 3 keep dV of 32 keys each, and compute S^T and P^T. Warps 4 to 7 keep dK of the same keys,
  // and compute dP^T and dS^T. In each 16 keys and 8 queries a lane has two keys, `key_row` and 8 further,
  // and two queries, `query` and `query` + 1.
  const bool keeps_dV = warp < 4;
  const int warp_key = warp % 4 * 32, key_row = threadIdx.x / 32 % 4 * 32 + lane / 4;
  const int query = lane % 4 * 2;
  FragmentC sum[m_tiles][d / 8] = {};
  // Adds dS K of a tile's queries, from `i` on: each warp has 32 of them and 32 columns.
  const auto add_to_dQ = [&](int i, auto &dS) {
    constexpr int cols = 32;
    const int warp_row = warp / (d / cols) * 32, warp_col = warp % (d / cols) * cols;
    FragmentC dq[2][cols / 8] = {};
#pragma unroll 4  // unrolled further, it takes more registers than there are
    for (int key = 0; key < Bc; key += 16) {
      FragmentA ds[2];
      for (int mt = 0; mt < 2; mt++)
        ds[mt] = ldmatrix_x4_trans(
            dS(key + lane % 8 + lane / 16 * 8, warp_row + mt * 16 + lane / 8 % 2 * 8));
      for (int n = 0; n < cols / 8; n += 2) {
        const auto k = ldmatrix_x4_trans(smem.K(key + lane % 16, warp_col + n * 8 + lane / 16 * 8));
        for (int mt = 0; mt < 2; mt++) {
          mma<T>(dq[mt][n], ds[mt], {k[0], k[1]});
          mma<T>(dq[mt][n + 1], ds[mt], {k[2], k[3]});
        }
      }
    }
#pragma unroll
    for (int mt = 0; mt < 2; mt++) {
      const Matrix<float> sums = sums_of<d>(dQ_sum, head_rows + i + warp_row + mt * 16, warp_col);
      for (int n = 0; n < cols / 8; n++)
        for (int e = 0; e < 4; e++) red_add(sums(n * 4 + e, lane), dq[mt][n][e]);
    }
  };
  for (int i = 0, stage = 0; i < seqlen; i += Br, stage ^= 1) {
    // The other stage has been read by all warps. Its copies are on their way behind the products.
    if (i + Br < seqlen) load_queries(stage ^ 1, i + Br);
    cp_async_commit();

    // dQ of the tile before is the first product of the warps that keep dK, and the last of the others.
    const auto add_tile_before = [&] {
      if (i > 0) add_to_dQ(i - Br, smem.P_dS[stage ^ 1]);
    };
    if (!keeps_dV) add_tile_before();
    FragmentC x[m_tiles][Br / 8] = {};
    FragmentA a[m_tiles][Br / 16];
    multiply_rows<T, d == 64 ? 2 : 8>(x, keeps_dV ? smem.K : smem.V,
                                      keeps_dV ? smem.Q[stage] : smem.dO[stage], warp_key);
    auto &tile = smem.P_dS[stage];
    // The compiler moves no load in front of a store that may be to the same place. So lse, and D and P^T, are
    // loaded before anything is stored, of `part` times 8 queries at once.
    if (keeps_dV) {
      // P^T = e^(S^T - lse), rounded.
#pragma unroll
      for (int first = 0; first < Br / 8; first += part) {
        Vector<float, 2> row_lse[part];
        for (int n = 0; n < part; n++)
          row_lse[n] = load<2>(smem.lse[stage](0, query + 8 * (first + n)));
        for (int n = first; n < first + part; n++)
          for (int mt = 0; mt < m_tiles; mt++)
            for (int r = 0; r < 2; r++) {
              float p[2];
              for (int e = 0; e < 2; e++)
                p[e] = ex2(fmaf(x[mt][n][2 * r + e], scale_log2, -row_lse[n - first][e] * log2_e));
              a[mt][n / 2][n % 2 * 2 + r] = cvt_rn_x2<T>(p[0], p[1]);
              store<2>(tile(key_row + mt * 16 + 8 * r, query + 8 * n),
                       unpack_x2<T>(a[mt][n / 2][n % 2 * 2 + r]));
            }
      }
      named_barrier_arrive(1 + warp % 4, 64);  // P^T of these keys is there for the other warp
    } else {
      // dS^T = P^T o (dP^T - D), rounded.
      named_barrier_sync(1 + warp % 4, 64);  // the other warp has stored P^T of these keys
#pragma unroll
      for (int first = 0; first < Br / 8; first += part) {
        for (int mt = 0; mt < m_tiles; mt++)
          for (int n = first; n < first + part; n += 2)
            a[mt][n / 2] = ldmatrix_x4(tile(warp_key + mt * 16 + lane % 16, n * 8 + lane / 16 * 8));
        Vector<float, 2> row_D[part];
        for (int n = 0; n < part; n++)
          row_D[n] = load<2>(smem.D[stage](0, query + 8 * (first + n)));
        __syncwarp();  // all lanes have P^T of these queries, and dS^T takes its place
        for (int n = first; n < first + part; n++)
          for (int mt = 0; mt < m_tiles; mt++)
            for (int r = 0; r < 2; r++) {
              const auto p = to_floats<T>(a[mt][n / 2][n % 2 * 2 + r]);
              float ds[2];
              for (int e = 0; e < 2; e++)
                ds[e] = p[e] * (x[mt][n][2 * r + e] - row_D[n - first][e]);
              a[mt][n / 2][n % 2 * 2 + r] = cvt_rn_x2<T>(ds[0], ds[1]);
              store<2>(tile(key_row + mt * 16 + 8 * r, query + 8 * n),
                       unpack_x2<T>(a[mt][n / 2][n % 2 * 2 + r]));
            }
      }
    }
    // dV += P^T dO, or dK += dS^T Q.
    add_product<T>(sum, a, keeps_dV ? smem.dO[stage] : smem.Q[stage]);
    if (keeps_dV) add_tile_before();

    cp_async_wait<0>();
    __syncthreads();  // dS of all keys is there for all warps, and the next Q, dO, lse and D
  }
  add_to_dQ(seqlen - Br, smem.P_dS[(seqlen / Br - 1) % 2]);

  const auto out = of_head(keeps_dV ? dV : dK);
  const float factor = keeps_dV ? 1 : scale;
#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++)
    for (int col = 0; col < d; col += 8)
      for (int r = 0; r < 2; r++) {
        const float *const two = &sum[mt][col / 8][2 * r];
        store<2>(out(first_key + key_row + mt * 16 + 8 * r, col + lane % 4 * 2),
                 Vector<T, 2>{from_float<T>(two[0] * factor), from_float<T>(two[1] * factor)});
      }
}

/// dQ = its sums / sqrt(d), rounded. A warp takes 16 queries.
template <class T, int d>
__global__ void __launch_bounds__(threads)
    round_dQ(const float *dQ_sum,  // [batch * heads * seqlen / 16, d / 2, 32]
             T *dQ,                // [batch * heads * seqlen, d]
             float scale) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const std::int64_t first = (std::int64_t{blockIdx.x} * num_warps + threadIdx.x / 32) * 16;
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
  launch<void>(round_dQ<T, d>, dim3(rows / 16 / num_warps), block, dQ_sum, static_cast<T *>(p.dQ),
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
