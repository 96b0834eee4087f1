// Step 12: double-buffered. Each fragment is loaded while the one before it is multiplied.
//
// Needs       sm_80: cp.async, mma.m16n8k16
// Before      step 11: every ldmatrix stands right before the mma that want its result.
// Bottleneck  The latency of ldmatrix, some 30 clocks, if nothing else were there to do.
// Change      Two sets of fragments: ldmatrix fills one, mma reads the other.
// Prediction  None. A fragment feeds 4 mma, 24 clocks, and another warp has mma to issue meanwhile;
//             nvcc moves loads ahead by itself. The second set takes 16 registers, and there are
//             none.
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

template <int d>
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
    FragmentA q[2][m_tiles];
    Vector<std::uint32_t, 4> kk[2];
    for (int mt = 0; mt < m_tiles; mt++)
      q[0][mt] = ldmatrix_x4(smem.Q(warp_row + mt * 16 + row, col));
    kk[0] = ldmatrix_x4(smem.K(row, col));
#pragma unroll 16
    for (int i = 0; i < d / 16 * (Bc / 16); i++) {
      const int k = i / (Bc / 16), n = i % (Bc / 16), next = i + 1;
      if (n == 0 && k + 1 < d / 16)
        for (int mt = 0; mt < m_tiles; mt++)
          q[(k + 1) % 2][mt] = ldmatrix_x4(smem.Q(warp_row + mt * 16 + row, (k + 1) * 16 + col));
      if (next < d / 16 * (Bc / 16))
        kk[next % 2] =
            ldmatrix_x4(smem.K(next % (Bc / 16) * 16 + row, next / (Bc / 16) * 16 + col));
      for (int mt = 0; mt < m_tiles; mt++) {
        mma(s[mt][2 * n], q[k % 2][mt], {kk[i % 2][0], kk[i % 2][2]});
        mma(s[mt][2 * n + 1], q[k % 2][mt], {kk[i % 2][1], kk[i % 2][3]});
      }
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
    FragmentA p[m_tiles];
    Vector<std::uint32_t, 4> v[2];
    v[0] = ldmatrix_x4_trans(smem.V(row, col));
#pragma unroll
    for (int i = 0; i < Bc / 16 * (d / 16); i++) {
      const int k = i / (d / 16), n = i % (d / 16), next = i + 1;
      if (n == 0)
        for (int mt = 0; mt < m_tiles; mt++) {
          const FragmentC &left = s[mt][2 * k], &right = s[mt][2 * k + 1];
          p[mt] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]),
                   pack(right[2], right[3])};
        }
      if (next < Bc / 16 * (d / 16))
        v[next % 2] =
            ldmatrix_x4_trans(smem.V(next / (d / 16) * 16 + row, next % (d / 16) * 16 + col));
      for (int mt = 0; mt < m_tiles; mt++) {
        mma(o[mt][2 * n], p[mt], {v[i % 2][0], v[i % 2][1]});
        mma(o[mt][2 * n + 1], p[mt], {v[i % 2][2], v[i % 2][3]});
      }
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

template <int d>
void run(const Problem &p) {
  const dim3 grid(p.seqlen_q / Br, p.batch * p.heads);
  launch<SharedStorage<d>>(attention<d>, grid, dim3(warps * 32), static_cast<const half *>(p.Q),
                           static_cast<const half *>(p.K), static_cast<const half *>(p.V),
                           static_cast<half *>(p.O), p.seqlen_q, 1.44269504f / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = Br,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
});
