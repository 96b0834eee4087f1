// Step 07: a larger tile. 64 x 128 and 4 warps instead of 64 x 32 and 2.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Before      step 06: no bank conflicts.
// Bottleneck  What is done once per tile: two barriers, a wait for copies, the maximum's shuffles,
//             and a multiplication of all of O by alpha. A tile has 32 keys, 64 mma of a warp's 16
//             rows.
// Change      Bc = 128, and 4 warps: a warp has one m tile, not two.
// Prediction  All of this every 128 keys. Instructions per mma fall from 7.0 to 5.7, barriers
//             to a fourth: 10 to 20% faster. Warps per SM stay 8, the bytes from L2 the same.
#include "common/kernel/kernel.h"

namespace {

constexpr int Br = 64;   // rows of Q in a tile
constexpr int Bc = 128;  // rows of K and V in a tile
constexpr int num_warps = 4;
constexpr int m_tiles = Br / num_warps / 16;  // a warp's rows, in units of mma's 16

/// Rows of d elements, in swizzle atoms of 64 (128 bytes: each bank once). Within an atom the
/// chunks of 8 (16 bytes: 4 banks) are permuted: 8 consecutive rows keep a column in all banks.
template <int Rows, int d>
struct Swizzled {
  static constexpr int size = Rows * d;
  __device__ static constexpr int offset(int row, int col) {
    return row * d + col / 64 * 64 + (col % 64 ^ row % 8 * 8);
  }
};

template <int Rows, int d>
using SharedTile = Tile<half, Rows, d, Swizzled<Rows, d>>;

template <int d>
struct SharedStorage {
  SharedTile<Br, d> Q;
  SharedTile<Bc, d> K, V;
};

/// Starts the copies of Rows x d elements, 16 bytes per thread and iteration.
template <int Rows, int d>
__device__ void load_tile(SharedTile<Rows, d> &tile, const Matrix<const half> &matrix,
                          int first_row) {
  const int row = threadIdx.x / (d / 8), col = threadIdx.x % (d / 8) * 8;
  // From the thread's first element on: each iteration is then a constant further. (In 32 bits: a
  // head has fewer than 2^32 elements, or the program refuses it.)
  const int first = first_row + row;
  const Matrix<const half> part{matrix.data + (unsigned(first) * d + col), matrix.rows - first, d};
#pragma unroll
  for (int i = 0; i < Rows; i += num_warps * 32 / (d / 8))
    cp_async_16(tile(row + i, col), part(i, 0));
}

template <int d>
__global__ void __launch_bounds__(num_warps * 32, 2)  // threads per block, blocks per SM
    attention(const half *Q,                          // [batch * heads, seqlen, d]
              const half *K,                          // [batch * heads, seqlen, d]
              const half *V,                          // [batch * heads, seqlen, d]
              half *O,                                // [batch * heads, seqlen, d]
              int seqlen, float scale) {
  auto &smem = shared_storage<SharedStorage<d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br;
  const std::int64_t head_offset = std::int64_t{blockIdx.y} * seqlen * d;
  const Matrix<const half> gQ{Q + head_offset, seqlen, d}, gK{K + head_offset, seqlen, d},
      gV{V + head_offset, seqlen, d};
  const Matrix<half> gO{O + head_offset, seqlen, d};

  // ldmatrix.x4 of a 16 x 16 block: lane i supplies row i % 16 of its left or its right half.
  const int warp_row = warp * m_tiles * 16, lane_row = lane % 16, lane_col = lane / 16 * 8;

  load_tile<Br, d>(smem.Q, gQ, first_row);

  // In each m tile, the lane holds rows lane / 4 (r = 0) and lane / 4 + 8 (r = 1), as mma has it.
  FragmentC o[m_tiles][d / 8] = {};
  float l[m_tiles][2] = {}, m[m_tiles][2];
  for (int mt = 0; mt < m_tiles; mt++) m[mt][0] = m[mt][1] = -INFINITY;

  for (int j = 0; j < seqlen; j += Bc) {
    __syncthreads();  // the previous K and V have been read by all warps
    load_tile<Bc, d>(smem.K, gK, j);
    load_tile<Bc, d>(smem.V, gV, j);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // Q, K and V are there for all warps

    // S = Q K^T. mma wants K^T column by column: that is K row by row, as it lies.
    FragmentC s[m_tiles][Bc / 8] = {};
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++) {
#pragma unroll
      for (int col = 0; col < d; col += 16) {
        const FragmentA q = ldmatrix_x4(smem.Q(warp_row + mt * 16 + lane_row, col + lane_col));
        for (int key = 0; key < Bc; key += 16) {
          const Vector<std::uint32_t, 4> k = ldmatrix_x4(smem.K(key + lane_row, col + lane_col));
          mma(s[mt][key / 8], q, {k[0], k[2]});
          mma(s[mt][key / 8 + 1], q, {k[1], k[3]});
        }
      }
    }

    // Online softmax. The 4 lanes of equal lane / 4 share a row; l is a sum per lane until the end.
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++) {
      for (int r = 0; r < 2; r++) {
        float m_new = m[mt][r];
        for (FragmentC &x : s[mt])
          for (int e = 2 * r; e < 2 * r + 2; e++) {
            x[e] *= scale;
            m_new = fmaxf(m_new, x[e]);
          }
        for (int mask = 1; mask < 4; mask *= 2)
          m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
        const float alpha = __expf(m[mt][r] - m_new);  // e^-inf = 0 for the first tile
        m[mt][r] = m_new;
        l[mt][r] *= alpha;
        for (FragmentC &x : s[mt])
          for (int e = 2 * r; e < 2 * r + 2; e++) l[mt][r] += x[e] = __expf(x[e] - m_new);
        for (FragmentC &x : o[mt])
          for (int e = 2 * r; e < 2 * r + 2; e++) x[e] *= alpha;
      }
    }

    // O += P V. Two neighbouring C fragments of S, rounded to fp16, are an A fragment of P.
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++) {
#pragma unroll
      for (int key = 0; key < Bc; key += 16) {
        const FragmentC &left = s[mt][key / 8], &right = s[mt][key / 8 + 1];
        const FragmentA p = {cvt_rn_f16x2(left[0], left[1]), cvt_rn_f16x2(left[2], left[3]),
                             cvt_rn_f16x2(right[0], right[1]), cvt_rn_f16x2(right[2], right[3])};
        for (int col = 0; col < d; col += 8)
          mma(o[mt][col / 8], p, ldmatrix_x2_trans(smem.V(key + lane_row, col)));
      }
    }
  }

#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++) {
    for (int r = 0; r < 2; r++) {
      for (int mask = 1; mask < 4; mask *= 2)
        l[mt][r] += __shfl_xor_sync(kAllLanes, l[mt][r], mask);
      const int row = first_row + (threadIdx.x / 32 * m_tiles + mt) * 16 + lane / 4 + 8 * r;
      for (int col = 0; col < d; col += 8) {
        const float *x = &o[mt][col / 8][2 * r];
        store<2>(gO(row, col + lane % 4 * 2),
                 Vector<half, 2>{__float2half(x[0] / l[mt][r]), __float2half(x[1] / l[mt][r])});
      }
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
