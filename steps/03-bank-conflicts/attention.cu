// Step 03: bank conflicts. K is read down its columns; the layout decides what that costs.
//
// Needs       sm_75
// Before      step 02: 32 lanes read one column of 32 rows of K, rows 256 bytes apart.
// Bottleneck  All 32 words lie in one bank of shared memory: each load of K takes 32 wavefronts
//             where one would do.
// Change      Where K's elements lie in the tile, nothing else. --k-layout compares four layouts:
//             swizzled (kept), row-major (step 02's), padded, and transposed before the kernel.
// Prediction  A row and k step took 1 wavefront for Q and 4 x 32 for K, for 4 FMA; now 1 + 4. P V
//             takes 1 + 4 for the same 4 FMA. So (129 + 5) / (5 + 5): up to 13 times faster.
#include "common/kernel/kernel.h"

namespace {

constexpr int Br = 32;   // rows of Q in a tile
constexpr int Bc = 128;  // rows of K and V in a tile
constexpr int warps = 4;
constexpr int rows_per_warp = Br / warps;
constexpr int keys_per_lane = Bc / 32;

// Layouts of a Bc x d tile of fp16. A bank is 4 bytes wide: two elements.

/// A row takes d + 2 elements: the next row begins one bank further on.
template <int d>
struct Padded {
  static constexpr int size = Bc * (d + 2);
  __device__ static constexpr int offset(int row, int col) { return row * (d + 2) + col; }
};

/// Words of two elements, permuted within their row: word w of a row lies at w XOR row % 32. Down a
/// column, 32 rows lie in 32 banks; along a row, the same banks as before in another order.
template <int d>
struct Swizzled {
  static constexpr int size = Bc * d;
  __device__ static constexpr int offset(int row, int col) {
    return row * d + (col ^ (row % 32 * 2));
  }
};

/// Columns follow each other: down a column is along memory.
template <int d>
struct Transposed {
  static constexpr int size = Bc * d;
  __device__ static constexpr int offset(int row, int col) { return col * Bc + row; }
};

template <int d, class KLayout>
struct SharedStorage {
  Tile<half, Br, d> Q;
  Tile<half, Bc, d, KLayout> K;
  Tile<half, Bc, d> V;
  Tile<float, warps, Bc> P;  // the row of P that each warp is at
};

__device__ float warp_max(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, mask));
  return x;
}

__device__ float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

template <int d, class KLayout>
__global__ void __launch_bounds__(warps * 32, 3)  // threads a block; 3 fit an H200's SM
    attention(const half *Q,                      // [batch * heads, seqlen, d]
              const half *K,  // [batch * heads, seqlen, d]; Transposed: [batch * heads, d, seqlen]
              const half *V,  // [batch * heads, seqlen, d]
              half *O,        // [batch * heads, seqlen, d]
              int seqlen, float scale) {
  auto &smem = shared_storage<SharedStorage<d, KLayout>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br;
  const std::int64_t head = std::int64_t{blockIdx.y} * seqlen * d;
  const Matrix<const half> gQ{Q + head, seqlen, d}, gV{V + head, seqlen, d};
  constexpr bool transposed = std::is_same_v<KLayout, Transposed<d>>;
  const Matrix<const half> gK{K + head, transposed ? d : seqlen, transposed ? seqlen : d};
  const Matrix<half> gO{O + head, seqlen, d};

  for (int i = threadIdx.x; i < Br * d; i += warps * 32)
    smem.Q(i / d, i % d) = gQ(first_row + i / d, i % d);

  // The state of this warp's rows, across the whole loop. O: lane owns columns lane + 32 c.
  float o[rows_per_warp][d / 32] = {}, l[rows_per_warp] = {}, m[rows_per_warp];
  for (int r = 0; r < rows_per_warp; r++) m[r] = -INFINITY;

  for (int j = 0; j < seqlen; j += Bc) {
    __syncthreads();  // the previous K and V have been read by all warps
    for (int i = threadIdx.x; i < Bc * d; i += warps * 32) {
      if constexpr (transposed)
        smem.K(i % Bc, i / Bc) = gK(i / Bc, j + i % Bc);
      else
        smem.K(i / d, i % d) = gK(j + i / d, i % d);
      smem.V(i / d, i % d) = gV(j + i / d, i % d);
    }
    __syncthreads();  // Q, K and V are there for all warps

#pragma unroll
    for (int r = 0; r < rows_per_warp; r++) {
      const int row = warp * rows_per_warp + r;

      // S = Q K^T. The lane computes the scores of keys lane, lane + 32, ...
      float s[keys_per_lane] = {};
#pragma unroll 1  // unrolled, nvcc merges neighbouring loads: step 04 will, by hand
      for (int k = 0; k < d; k++) {
        const float q = __half2float(smem.Q(row, k));
        for (int c = 0; c < keys_per_lane; c++) s[c] += q * __half2float(smem.K(lane + 32 * c, k));
      }

      // Online softmax: a new maximum rescales what was summed under the old one.
      float m_new = m[r];
      for (int c = 0; c < keys_per_lane; c++) m_new = fmaxf(m_new, s[c] *= scale);
      m_new = warp_max(m_new);
      const float alpha = __expf(m[r] - m_new);  // e^-inf = 0 for the first tile
      m[r] = m_new;
      float l_tile = 0;
      for (int c = 0; c < keys_per_lane; c++) {
        const float p = __expf(s[c] - m_new);
        smem.P(warp, lane + 32 * c) = p;
        l_tile += p;
      }
      l[r] = l[r] * alpha + warp_sum(l_tile);
      __syncwarp();  // the row of P is there for all lanes

      // O = alpha O + P V
      for (int c = 0; c < d / 32; c++) o[r][c] *= alpha;
#pragma unroll 1
      for (int key = 0; key < Bc; key++) {
        const float p = smem.P(warp, key);
        for (int c = 0; c < d / 32; c++) o[r][c] += p * __half2float(smem.V(key, lane + 32 * c));
      }
      __syncwarp();  // all lanes have read P; the next row overwrites it
    }
  }

#pragma unroll
  for (int r = 0; r < rows_per_warp; r++)
    for (int c = 0; c < d / 32; c++)
      gO(first_row + warp * rows_per_warp + r, lane + 32 * c) = __float2half(o[r][c] / l[r]);
}

/// K^T of each head, for the Transposed layout. A block turns a 32 x 32 tile.
__global__ void __launch_bounds__(warps * 32)  // threads a block
    transpose(const half *K,                   // [batch * heads, seqlen, d]
              half *K_T,                       // [batch * heads, d, seqlen]
              int seqlen, int d) {
  auto &tile = shared_storage<Tile<half, 32, 34>>();  // 34: a column lies in 32 banks
  const std::int64_t head = std::int64_t{blockIdx.z} * seqlen * d;
  const Matrix<const half> gK{K + head, seqlen, d};
  const Matrix<half> gK_T{K_T + head, d, seqlen};
  const int row = blockIdx.x * 32, col = blockIdx.y * 32, warp = threadIdx.x / 32,
            lane = threadIdx.x % 32;
  for (int i = warp; i < 32; i += warps) tile(i, lane) = gK(row + i, col + lane);
  __syncthreads();  // the tile is there for all warps
  for (int i = warp; i < 32; i += warps) gK_T(col + i, row + lane) = tile(lane, i);
}

template <int d, class KLayout>
void run(const Problem &p) {
  const half *K = static_cast<const half *>(p.K);
  if (std::is_same_v<KLayout, Transposed<d>>) {
    half *K_T = static_cast<half *>(p.workspace);
    launch<Tile<half, 32, 34>>(transpose, dim3(p.seqlen_q / 32, d / 32, p.batch * p.heads),
                               dim3(warps * 32), K, K_T, p.seqlen_q, d);
    K = K_T;
  }
  const dim3 grid(p.seqlen_q / Br, p.batch * p.heads);
  launch<SharedStorage<d, KLayout>>(
      attention<d, KLayout>, grid, dim3(warps * 32), static_cast<const half *>(p.Q), K,
      static_cast<const half *>(p.V), static_cast<half *>(p.O), p.seqlen_q, 1 / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = Bc,
    .default_batch = 16,
    .launch =
        [](const Problem &p) {
          p.head_dim == 64 ? run<64, Swizzled<64>>(p) : run<128, Swizzled<128>>(p);
        },
});
