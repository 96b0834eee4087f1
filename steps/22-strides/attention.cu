// Step 22: strides. Q, K, V and O lie as the caller has them, in any order of batch, heads and rows.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --layout, --lengths
// Before      step 21: tensors are dense, [batch, heads, seqlen, d].
// Bottleneck  Copies made beforehand: a model has its tensors in other orders, interleaved or packed.
// Change      A row's address is the caller's stride times its number. Lengths and first rows are read
//             for each batch element; a block with no rows ends at once.
// Prediction  8 addresses for 16 copies, each a 64-bit addition: 16 to 20 instructions of 720, 2 to 3%.
#include "common/kernel/kernel.h"
#include "common/kernel/order.h"
#include "common/kernel/swizzle.h"

namespace {

constexpr int Br = 128;  // rows of Q in a tile
constexpr int Bc = 64;   // rows of K and V in a tile
constexpr int num_warps = 4;
constexpr int m_tiles = Br / num_warps / 16;  // a warp's rows, in units of mma's 16
constexpr float rescale_threshold = 8;        // P is at most 2^8 then: far from fp16's 65504
constexpr float no_maximum = -FLT_MAX;        // of no keys: finite, for -inf - -inf is NaN

template <int d>
struct SharedStorage {
  SharedTile<Br, d> Q;
  SharedTile<Bc, d> K, V;
};

/// Starts the copies of Rows x d elements, 16 bytes per thread and iteration. A ragged tile may end after
/// the matrix: its missing rows become zeros.
template <int Rows, int d, bool ragged = false>
__device__ void load_tile(SharedTile<Rows, d> &tile, const StridedMatrix<const half> &matrix,
                          int first_row) {
  // Eight threads copy 128 bytes of a row, then the next 128, at the same address plus a constant.
  const int row = threadIdx.x / 8, col = threadIdx.x % 8 * 8;
  const auto part = matrix.from(first_row + row, col);
#pragma unroll
  for (int i = 0; i < Rows; i += num_warps * 32 / 8)
    for (int c = 0; c < d; c += 64)
      cp_async_16_or_zeros(tile(row + i, col + c), part(i, c), !ragged || i < part.rows);
}

/// The rows of head h of batch element b, from `start` on.
template <class T, int d, class Void>
__device__ StridedMatrix<T> head_of(Void *tensor, const Strides &strides, int b, int h, int start,
                                    int rows) {
  const std::int64_t offset = b * strides.batch + h * strides.head + start * strides.row;
  return {static_cast<T *>(tensor) + offset, rows, d, strides.row};
}

/// The number that an array of the batch holds for element b, if there is such an array.
__device__ int of_batch(const int *array, const Problem &problem, int b, int otherwise) {
  return array ? Matrix<const int>{array, 1, problem.batch}(0, b) : otherwise;
}

template <int d>
__global__ void __launch_bounds__(num_warps * 32, 2)  // threads per block, blocks per SM
    attention(const Problem problem, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  // Blocks start in the order of their index, x first: the last rows, which see the most keys.
  const int head = (gridDim.z - 1 - blockIdx.z) * gridDim.x + blockIdx.x;
  const int first_row = (gridDim.y - 1 - blockIdx.y) * Br;
  const int b = head / problem.heads, h = head % problem.heads;
  if (b >= problem.batch) return;
  const int seqlen_q = uniform(of_batch(problem.lengths_q, problem, b, problem.seqlen_q));
  const int seqlen_k = uniform(of_batch(problem.lengths_k, problem, b, problem.seqlen_k));
  if (first_row >= seqlen_q) return;  // the sequence is shorter than the longest
  // Query i sees the keys before i + query_0_sees: the last query stands at the last key.
  const int query_0_sees = problem.causal ? seqlen_k - seqlen_q + 1 : seqlen_k;
  const int keys_end = min(seqlen_k, first_row + Br - 1 + query_0_sees);  // of all rows of the tile
  const int last = (keys_end + Bc - 1) / Bc * Bc - Bc;  // the last tile; negative if there is none
  const int q_start = uniform(of_batch(problem.cu_seqlens_q, problem, b, 0));  // if packed
  const int k_start = uniform(of_batch(problem.cu_seqlens_k, problem, b, 0));
  const auto gQ = head_of<const half, d>(problem.Q, problem.Q_strides, b, h, q_start, seqlen_q);
  const auto gK = head_of<const half, d>(problem.K, problem.K_strides, b, h, k_start, seqlen_k);
  const auto gV = head_of<const half, d>(problem.V, problem.V_strides, b, h, k_start, seqlen_k);

  // ldmatrix.x4 of a 16 x 16 block: lane i supplies row i % 16 of its left or its right half.
  const int warp_row = warp * m_tiles * 16, lane_row = lane % 16, lane_col = lane / 16 * 8;
  // For K, its upper or lower half, so that registers 0 and 1 are mma's B of the first 8 keys.
  const int lane_key = lane % 8 + lane / 16 * 8, lane_key_col = lane / 8 % 2 * 8;
  const int all_see = min(seqlen_k, first_row + warp_row + query_0_sees);  // of the warp's rows

  load_tile<Br, d, true>(smem.Q, gQ, first_row);
  if (last >= 0) load_tile<Bc, d, true>(smem.K, gK, last);
  cp_async_commit();

  // In each m tile, the lane holds rows lane / 4 (r = 0) and lane / 4 + 8 (r = 1), as mma has it.
  FragmentC o[m_tiles][d / 8] = {};
  float l[m_tiles][2] = {}, m[m_tiles][2];
  for (int mt = 0; mt < m_tiles; mt++) m[mt][0] = m[mt][1] = no_maximum;

  for (int j = last; j >= 0; j -= Bc) {
    cp_async_wait<0>();
    __syncthreads();  // Q and K are there for all warps, and the previous V has been read by all

    // S = Q K^T. mma wants K^T column by column: that is K row by row, as it lies.
    FragmentC s[m_tiles][Bc / 8] = {};
#pragma unroll
    for (int col = 0; col < d; col += 16) {
      FragmentA q[m_tiles];
      for (int mt = 0; mt < m_tiles; mt++)
        q[mt] = ldmatrix_x4(smem.Q(warp_row + mt * 16 + lane_row, col + lane_col));
      for (int key = 0; key < Bc; key += 16) {
        const Vector<std::uint32_t, 4> k = ldmatrix_x4(smem.K(key + lane_key, col + lane_key_col));
        for (int mt = 0; mt < m_tiles; mt++) {
          mma(s[mt][key / 8], q[mt], {k[0], k[1]});
          mma(s[mt][key / 8 + 1], q[mt], {k[2], k[3]});
        }
      }
      if (col == 0) {  // the first ldmatrix are ahead: now V, on its way behind the rest of Q K^T
        load_tile<Bc, d, true>(smem.V, gV, j);  // missing rows are 0: 0 times NaN is NaN
        cp_async_commit();
      }
    }

    cp_async_wait<0>();
    __syncthreads();  // V is there for all warps, and K has been read by all

    if (j + Bc > all_see) {
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int key = 0; key < Bc; key += 8)
          for (int e = 0; e < 4; e++) {
            const int row = first_row + warp_row + mt * 16 + lane / 4 + e / 2 * 8;
            if (j + key + lane % 4 * 2 + e % 2 >= min(seqlen_k, row + query_0_sees))
              s[mt][key / 8][e] = -INFINITY;
          }
    }

    // Online softmax, lazily: m may stay below the maximum, by at most the threshold. P and l are
    // relative to m, whatever it is; O / l does not depend on it.
    bool must_rescale = false;
    float m_lane[m_tiles][2];  // of this lane's scores
    for (int mt = 0; mt < m_tiles; mt++)
      for (int r = 0; r < 2; r++) {
        m_lane[mt][r] = -INFINITY;
        for (FragmentC &x : s[mt])
          m_lane[mt][r] = fmaxf(m_lane[mt][r], fmaxf(x[2 * r], x[2 * r + 1]));
        must_rescale |= m_lane[mt][r] * scale_log2 > m[mt][r] + rescale_threshold;
      }
    if (j > 0) load_tile<Bc, d>(smem.K, gK, j - Bc);
    cp_async_commit();  // the next K is on its way behind the exponentials and P V
    if (__any_sync(kAllLanes, must_rescale)) {
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int r = 0; r < 2; r++) {
          float m_new = m_lane[mt][r];
          for (int mask = 1; mask < 4; mask *= 2)
            m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
          m_new = fmaxf(m[mt][r], m_new * scale_log2);
          const float alpha = ex2(m[mt][r] - m_new);  // 0 after no_maximum
          m[mt][r] = m_new;
          l[mt][r] *= alpha;
          for (FragmentC &x : o[mt])
            for (int e = 2 * r; e < 2 * r + 2; e++) x[e] *= alpha;
        }
    }
#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++) {
      for (int r = 0; r < 2; r++)
        for (FragmentC &x : s[mt])
          for (int e = 2 * r; e < 2 * r + 2; e++)
            l[mt][r] += x[e] = ex2(fmaf(x[e], scale_log2, -m[mt][r]));
    }

    // O += P V. Two neighbouring C fragments of S, rounded to fp16, are an A fragment of P.
#pragma unroll
    for (int key = 0; key < Bc; key += 16) {
      FragmentA p[m_tiles];
      for (int mt = 0; mt < m_tiles; mt++) {
        const FragmentC &left = s[mt][key / 8], &right = s[mt][key / 8 + 1];
        p[mt] = {cvt_rn_f16x2(left[0], left[1]), cvt_rn_f16x2(left[2], left[3]),
                 cvt_rn_f16x2(right[0], right[1]), cvt_rn_f16x2(right[2], right[3])};
      }
      for (int col = 0; col < d; col += 16) {
        const Vector<std::uint32_t, 4> v =
            ldmatrix_x4_trans(smem.V(key + lane_row, col + lane_col));
        for (int mt = 0; mt < m_tiles; mt++) {
          mma(o[mt][col / 8], p[mt], {v[0], v[1]});
          mma(o[mt][col / 8 + 1], p[mt], {v[2], v[3]});
        }
      }
    }
  }

  const auto gO = head_of<half, d>(problem.O, problem.O_strides, b, h, q_start, seqlen_q);
  cp_async_wait<0>();  // a block that sees no key has not waited for Q
#pragma unroll
  for (int mt = 0; mt < m_tiles; mt++) {
    for (int r = 0; r < 2; r++) {
      for (int mask = 1; mask < 4; mask *= 2)
        l[mt][r] += __shfl_xor_sync(kAllLanes, l[mt][r], mask);
      if (l[mt][r] == 0) l[mt][r] = 1;  // the row saw no key, and O is 0
      const int row = first_row + (threadIdx.x / 32 * m_tiles + mt) * 16 + lane / 4 + 8 * r;
      if (row >= seqlen_q) continue;
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
  launch<SharedStorage<d>>(attention<d>, grid_by_heads(p, Br), dim3(num_warps * 32), p,
                           log2_e / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
});
