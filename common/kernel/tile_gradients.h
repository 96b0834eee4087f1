// SPDX-License-Identifier: MIT
// Step 64's loop, for the steps after it: what the tiles of queries that a block visits add to dK, dV and dQ.
#pragma once

#include "common/kernel/backward.h"
#include "common/kernel/mbarrier.h"

namespace mma_gradients {

constexpr int Br = 64;   // rows of Q in a tile
constexpr int Bc = 128;  // rows of K and V in a tile
constexpr int num_warps = 8;
constexpr int m_tiles = Bc / (num_warps / 2) / 16;  // a warp's keys, in units of mma's 16
constexpr int threads = num_warps * 32;

/// What a model does to the scores of a visit: nothing. P is e^(score - lse), and dS is P times dP - D.
struct Unchanged {
  static constexpr bool any = false;
  __device__ __forceinline__ Unchanged operator()(int) const { return {}; }  // of a visit
  template <class Scores>
  __device__ __forceinline__ void cap(Scores &) const {}
  __device__ __forceinline__ float minus_lse(float lse, int, int) const { return -lse; }
  __device__ __forceinline__ float weight(float P, float) const { return P; }
};

/// The operands of a block: K and V, and two stages of the rest.
template <class T, int d, int Br = mma_gradients::Br, int Bc = mma_gradients::Bc>
struct Operands {
  SharedTile<Bc, d, T> K, V;
  SharedTile<Br, d, T> Q[2], dO[2];
  SharedTile<Bc, Br, T> P_dS[2];  // P^T, then dS^T in its place: a row for each key
  Tile<float, 1, Br> lse[2], D[2];
};

/// Visits tiles of queries with the Bc keys of a block. Warps 0 to 3 keep dV of Bc / 4 keys each in `sum`, and compute S^T
/// and P^T. Warps 4 to 7 keep dK of the same keys, and compute dP^T and dS^T. All add to dQ. `smem` has K and V and the
/// first visit's Q, dO, lse and D. Of visit t, load_queries(stage, t) starts these copies, hide(x, t) makes the scores of
/// keys that a query does not see -infinity, and row_of(t) is the first row in dQ's sums. lse is in base 2. It and D are
/// loaded for `part` times 8 queries at once, before P or dS of these is stored. changes_of(t) is what becomes of the
/// scores: cap(x) before they are hidden, minus_lse() with what is added to a score, and weight(P, score), of which dS is
/// computed: P times the derivative of what cap() does.
template <class T, int part = 1, int m_tiles, int d, int Br, int Bc, class Load, class Hide,
          class Row, class Changes = Unchanged>
__device__ __forceinline__ void add_visits(FragmentC (&sum)[m_tiles][d / 8],
                                           Operands<T, d, Br, Bc> &smem, int warp, int visits,
                                           float scale_log2, float *dQ_sum,
                                           const Load &load_queries, const Hide &hide,
                                           const Row &row_of, const Changes &changes_of = {}) {
  static_assert(Bc == num_warps / 2 * m_tiles * 16);
  const int lane = threadIdx.x % 32;
  const bool keeps_dV = warp < 4;
  // In each 16 keys and 8 queries a lane has two keys, `key_row` and 8 further, and two queries, `query` and `query` + 1.
  const int warp_key = warp % 4 * (Bc / 4), key_row = threadIdx.x / 32 % 4 * (Bc / 4) + lane / 4;
  const int query = lane % 4 * 2;
  // Adds dS K of visit t: each warp has half of its queries and a quarter of the columns.
  const auto add_to_dQ = [&](int t) {
    auto &dS = smem.P_dS[t % 2];
    constexpr int cols = d / 4, query_tiles = Br / 32;
    const int warp_row = warp / 4 * (Br / 2), warp_col = warp % 4 * cols;
    FragmentC dq[query_tiles][cols / 8] = {};
#pragma unroll 4  // unrolled further, it takes more registers than there are
    for (int key = 0; key < Bc; key += 16) {
      FragmentA ds[query_tiles];
      for (int mt = 0; mt < query_tiles; mt++)
        ds[mt] = ldmatrix_x4_trans(
            dS(key + lane % 8 + lane / 16 * 8, warp_row + mt * 16 + lane / 8 % 2 * 8));
      for (int n = 0; n < cols / 8; n += 2) {
        const auto k = ldmatrix_x4_trans(smem.K(key + lane % 16, warp_col + n * 8 + lane / 16 * 8));
        for (int mt = 0; mt < query_tiles; mt++) {
          mma<T>(dq[mt][n], ds[mt], {k[0], k[1]});
          mma<T>(dq[mt][n + 1], ds[mt], {k[2], k[3]});
        }
      }
    }
    const std::int64_t row = row_of(t) + warp_row;
#pragma unroll
    for (int mt = 0; mt < query_tiles; mt++) {
      const Matrix<float> sums = sums_of<d>(dQ_sum, row + mt * 16, warp_col);
      for (int n = 0; n < cols / 8; n++)
        for (int e = 0; e < 4; e++) red_add(sums(n * 4 + e, lane), dq[mt][n][e]);
    }
  };
  for (int t = 0; t < visits; t++) {
    const int stage = t % 2;
    // The other stage has been read by all warps. Its copies are on their way behind the products.
    if (t + 1 < visits) load_queries(stage ^ 1, t + 1);
    cp_async_commit();

    // dQ of the visit before is the first product of the warps that keep dK, and the last of the others.
    if (!keeps_dV && t > 0) add_to_dQ(t - 1);
    FragmentC x[m_tiles][Br / 8] = {};
    FragmentA a[m_tiles][Br / 16];
    multiply_rows<T>(x, keeps_dV ? smem.K : smem.V, keeps_dV ? smem.Q[stage] : smem.dO[stage],
                     warp_key);
    auto &tile = smem.P_dS[stage];
    if (keeps_dV) {
      const auto changes = changes_of(t);
      changes.cap(x);
      hide(x, t);
      // P^T = e^(S^T - lse), rounded. The other warp gets its weights.
#pragma unroll
      for (int first = 0; first < Br / 8; first += part) {
        Vector<float, 2> row_lse[part];
        for (int n = 0; n < part; n++)
          row_lse[n] = load<2>(smem.lse[stage](0, query + 8 * (first + n)));
        for (int n = first; n < first + part; n++)
          for (int mt = 0; mt < m_tiles; mt++)
            for (int r = 0; r < 2; r++) {
              float p[2], weights[2];
              for (int e = 0; e < 2; e++) {
                const float score = x[mt][n][2 * r + e];
                p[e] =
                    ex2(fmaf(score, scale_log2,
                             changes.minus_lse(row_lse[n - first][e], mt * 16 + 8 * r, 8 * n + e)));
                weights[e] = changes.weight(p[e], score);
              }
              const std::uint32_t both = a[mt][n / 2][n % 2 * 2 + r] = cvt_rn_x2<T>(p[0], p[1]);
              store<2>(tile(key_row + mt * 16 + 8 * r, query + 8 * n),
                       unpack_x2<T>(changes.any ? cvt_rn_x2<T>(weights[0], weights[1]) : both));
            }
      }
      named_barrier_arrive(1 + warp % 4, 64);  // P^T of these keys is there for the other warp
    } else {
      // dS^T = P^T o (dP^T - D), rounded.
      named_barrier_sync(1 + warp % 4, 64);  // the other warp has stored P^T of these keys
      for (int mt = 0; mt < m_tiles; mt++)
        for (int row = 0; row < Br; row += 16)
          a[mt][row / 16] = ldmatrix_x4(tile(warp_key + mt * 16 + lane % 16, row + lane / 16 * 8));
      __syncwarp();  // all lanes have P^T, and dS^T takes its place
#pragma unroll
      for (int first = 0; first < Br / 8; first += part) {
        Vector<float, 2> row_D[part];
        for (int n = 0; n < part; n++)
          row_D[n] = load<2>(smem.D[stage](0, query + 8 * (first + n)));
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
    if (keeps_dV && t > 0) add_to_dQ(t - 1);

    cp_async_wait<0>();
    __syncthreads();  // dS of all keys is there for all warps, and the next Q, dO, lse and D
  }
  if (visits > 0) add_to_dQ(visits - 1);
}

}  // namespace mma_gradients
