// Step 11: batched. A fragment of K or V is loaded once and multiplied with two m tiles.
//
// Needs       sm_80: cp.async, mma.m16n8k16
// Before      step 10: 2.1 wavefronts of ldmatrix a mma.
// Bottleneck  Shared memory again. Tensor cores could do a mma every 1.5 clocks of an SM, shared
//             memory serves one every 2.1: at most 70% of the ceiling.
// Change      128 x 64: a warp has two m tiles, which share each fragment. --m-tiles one-by-one is
//             the control: the new tile, the old loop.
// Prediction  1.25 wavefronts a mma: out of the way. What it costs is registers: O 128, S 64,
//             fragments 24 of 255. 5 to 10% faster; the control no faster than step 10.
#include "common/kernel/kernel.h"

namespace {

constexpr int Br = 128;  // rows of Q in a tile
constexpr int Bc = 64;   // rows of K and V in a tile
constexpr int warps = 4;
constexpr int m_tiles = Br / warps / 16;  // a warp's rows, in units of mma's 16

/// Rows of d elements, in spaces of 64 (128 bytes: each bank once). Within a space the chunks of 8
/// (16 bytes: 4 banks) are permuted: 8 rows that follow each other keep a column in all 32 banks.
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

/// Starts the copies of Rows x d elements, 16 bytes a thread and turn.
template <int Rows, int d>
__device__ void load_tile(SharedTile<Rows, d> &tile, const Matrix<const half> &matrix,
                          int first_row) {
  const int row = threadIdx.x / (d / 8), col = threadIdx.x % (d / 8) * 8;
  // From the thread's first element on: each turn is then a constant further. (In 32 bits: a head
  // has fewer than 2^32 elements.)
  const int first = first_row + row;
  const Matrix<const half> part{matrix.data + (unsigned(first) * d + col), matrix.rows - first, d};
#pragma unroll
  for (int i = 0; i < Rows; i += warps * 32 / (d / 8)) cp_async_16(tile(row + i, col), part(i, 0));
}

template <int d, int group>                       // m tiles that share a fragment of K or V
__global__ void __launch_bounds__(warps * 32, 2)  // threads a block, blocks an SM
    attention(const half *Q,                      // [batch * heads, seqlen, d]
              const half *K,                      // [batch * heads, seqlen, d]
              const half *V,                      // [batch * heads, seqlen, d]
              half *O,                            // [batch * heads, seqlen, d]
              int seqlen, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<d>>();
  // Shuffled, so that nvcc knows that the warp is one number for all lanes.
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br;
  const std::int64_t head = std::int64_t{blockIdx.y} * seqlen * d;
  const Matrix<const half> gQ{Q + head, seqlen, d}, gK{K + head, seqlen, d},
      gV{V + head, seqlen, d};
  const Matrix<half> gO{O + head, seqlen, d};

  // ldmatrix.x4 of a 16 x 16 block: lane i names row i % 16 of its left or its right half.
  const int warp_row = warp * m_tiles * 16, row = lane % 16, col = lane / 16 * 8;

  load_tile<Br, d>(smem.Q, gQ, first_row);
  load_tile<Bc, d>(smem.K, gK, 0);
  cp_async_commit();

  // Of each m tile, the lane holds rows lane / 4 (h = 0) and lane / 4 + 8 (h = 1), as mma has it.
  FragmentC o[m_tiles][d / 8] = {};
  float l[m_tiles][2] = {}, m[m_tiles][2];
  for (int mt = 0; mt < m_tiles; mt++) m[mt][0] = m[mt][1] = -INFINITY;

  for (int j = 0; j < seqlen; j += Bc) {
    cp_async_wait<0>();
    __syncthreads();  // Q and K are there for all warps, and the previous V has been read by all
    load_tile<Bc, d>(smem.V, gV, j);
    cp_async_commit();  // V is on its way behind Q K^T

    // S = Q K^T. mma wants K^T column by column: that is K row by row, as it lies.
    FragmentC s[m_tiles][Bc / 8] = {};
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt += group) {
#pragma unroll 4
      for (int k = 0; k < d; k += 16) {
        FragmentA q[group];
        for (int g = 0; g < group; g++)
          q[g] = ldmatrix_x4(smem.Q(warp_row + (mt + g) * 16 + row, k + col));
        for (int n = 0; n < Bc; n += 16) {
          const Vector<std::uint32_t, 4> kk = ldmatrix_x4(smem.K(n + row, k + col));
          for (int g = 0; g < group; g++) {
            mma(s[mt + g][n / 8], q[g], {kk[0], kk[2]});
            mma(s[mt + g][n / 8 + 1], q[g], {kk[1], kk[3]});
          }
        }
      }
      // One by one: or nvcc loads a fragment of K once for both m tiles.
      if (mt + group < m_tiles) __syncwarp(kAllLanes);
    }

    // Online softmax. The 4 lanes of equal lane / 4 share a row; l is a sum per lane until the end.
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++) {
      for (int h = 0; h < 2; h++) {
        float m_new = -INFINITY;
        for (FragmentC &x : s[mt])
          for (int e = 2 * h; e < 2 * h + 2; e++) m_new = fmaxf(m_new, x[e]);
        for (int mask = 1; mask < 4; mask *= 2)
          m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
        m_new = fmaxf(m[mt][h], m_new * scale_log2);
        const float alpha = ex2(m[mt][h] - m_new);  // 2^-inf = 0 for the first tile
        m[mt][h] = m_new;
        l[mt][h] *= alpha;
        for (FragmentC &x : s[mt])
          for (int e = 2 * h; e < 2 * h + 2; e++)
            l[mt][h] += x[e] = ex2(fmaf(x[e], scale_log2, -m_new));
        for (FragmentC &x : o[mt])
          for (int e = 2 * h; e < 2 * h + 2; e++) x[e] *= alpha;
      }
    }

    cp_async_wait<0>();
    __syncthreads();  // V is there for all warps, and K has been read by all
    if (j + Bc < seqlen) load_tile<Bc, d>(smem.K, gK, j + Bc);
    cp_async_commit();  // the next K is on its way behind P V

    // O += P V. Two neighbouring C fragments of S, rounded to fp16, are an A fragment of P.
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt += group) {
#pragma unroll
      for (int k = 0; k < Bc; k += 16) {
        FragmentA p[group];
        for (int g = 0; g < group; g++) {
          const FragmentC &left = s[mt + g][k / 8], &right = s[mt + g][k / 8 + 1];
          p[g] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]),
                  pack(right[2], right[3])};
        }
        for (int n = 0; n < d; n += 16) {
          const Vector<std::uint32_t, 4> v = ldmatrix_x4_trans(smem.V(k + row, n + col));
          for (int g = 0; g < group; g++) {
            mma(o[mt + g][n / 8], p[g], {v[0], v[1]});
            mma(o[mt + g][n / 8 + 1], p[g], {v[2], v[3]});
          }
        }
      }
      if (mt + group < m_tiles) __syncwarp(kAllLanes);  // as above, for V
    }
  }

#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++) {
    for (int h = 0; h < 2; h++) {
      for (int mask = 1; mask < 4; mask *= 2)
        l[mt][h] += __shfl_xor_sync(kAllLanes, l[mt][h], mask);
      const int out = first_row + (threadIdx.x / 32 * m_tiles + mt) * 16 + lane / 4 + 8 * h;
      for (int n = 0; n < d; n += 8) {
        const float *x = &o[mt][n / 8][2 * h];
        store<2>(gO(out, n + lane % 4 * 2),
                 Vector<half, 2>{__float2half(x[0] / l[mt][h]), __float2half(x[1] / l[mt][h])});
      }
    }
  }
}

template <int d, int group>
void run(const Problem &p) {
  const dim3 grid(p.seqlen_q / Br, p.batch * p.heads);
  launch<SharedStorage<d>>(attention<d, group>, grid, dim3(warps * 32),
                           static_cast<const half *>(p.Q), static_cast<const half *>(p.K),
                           static_cast<const half *>(p.V), static_cast<half *>(p.O), p.seqlen_q,
                           1.44269504f / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = Br,
    .default_batch = 16,
    .launch =
        [](const Problem &p) { p.head_dim == 64 ? run<64, m_tiles>(p) : run<128, m_tiles>(p); },
});
