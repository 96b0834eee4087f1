// Step 05: tensor cores. A warp multiplies 16 x 16 by 16 x 8 in one instruction.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Before      step 04: 128 FMA of a thread for each 12 loads; 59% of what the fp32 units can do.
// Bottleneck  The fp32 units: 66.9 TFLOP/s. Tensor cores do many times as much with fp16 operands.
// Change      Q K^T and P V by mma.m16n8k16, whose operands ldmatrix brings from shared memory. Q,
//             K and V stay fp16, and cp.async copies them without registers. The scores' registers
//             become P's registers: P never leaves them.
// Prediction  Rows lie 256 bytes apart, in the same banks: ldmatrix.x4 takes 32 wavefronts, not 4.
//             16 rows and 32 keys take 8 for Q, 16 for K and 32 half ones for V: 1280 wavefronts
//             for 64 mma of 4096 operations. At 20 per mma, one per clock, 132 SMs do 53 TFLOP/s
//             at most.
#include "common/kernel/kernel.h"

namespace {

constexpr int Br = 64;  // rows of Q in a tile
constexpr int Bc = 32;  // rows of K and V in a tile
constexpr int num_warps = 2;
constexpr int m_tiles = Br / num_warps / 16;  // a warp's rows, in units of mma's 16

template <int Rows, int d>
using SharedTile = Tile<half, Rows, d>;

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
      if (mt + 1 < m_tiles) keep_loads_apart();  // K again for the other m tile, until step 11
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
      if (mt + 1 < m_tiles) keep_loads_apart();  // and V
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
    .tile = Br,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
});
