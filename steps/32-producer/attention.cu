// Step 32: a producer. One warpgroup only copies, and the other only computes.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Before      step 31: the same threads ask for tiles and use them, and wait for each other to do so.
// Bottleneck  The order of one thread's instructions: a copy starts when all have passed a barrier,
//             not when its place is free, and it is awaited less than a tile's time later.
// Change      A second warpgroup fills rings of two K and two V, as soon as the first has released a
//             stage: 'full' and 'empty' barriers, and none of the block. It gives its registers away.
// Prediction  407 instructions per warp and tile as before, no barrier, and copies that have a whole
//             tile's time more. But the other block already hides most waits: 1.00 to 1.05 times step
//             31, 590 to 660 TFLOP/s.
#include "common/kernel/wgmma.h"

namespace {

constexpr int Br = 128;                 // rows of Q in a tile
constexpr int Bc = 64;                  // rows of K and V in a tile
constexpr int m_tiles = Br / 64;        // in units of wgmma's 64 rows
constexpr int stages = 2;               // of K and of V: one is filled while the other is read
constexpr float rescale_threshold = 8;  // P is at most 2^8 then: far from fp16's 65504

/// A ring of tiles in shared memory. A tile is full when its copy has landed, and empty when all who
/// read it have said so.
template <class Tile>
struct Tiles {
  Tile tile[stages];
  Mbarrier full[stages], empty[stages];
};

/// Where in a ring a thread is: at which stage, and which of the phases of its barriers comes next.
struct Position {
  int stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

template <int d>
struct SharedStorage {
  TmaTile<Br, d> Q;
  Tiles<TmaTile<Bc, d>> K, V;
  Mbarrier Q_full;
};

/// Fills the next tile of a ring, once it is empty. (Parity ^ 1: a new ring's tiles count as empty.)
template <class Tile>
__device__ void load(Tiles<Tile> &to, Position &at, const TensorMap &map, int row, int head) {
  mbarrier_wait(to.empty[at.stage], at.parity ^ 1);
  mbarrier_arrive_expect_tx(to.full[at.stage], sizeof(Tile));
  tma_load(to.tile[at.stage], map, row, head, 0, to.full[at.stage]);
  at.next();
}

template <int d>
__global__ void __launch_bounds__(256, 2)           // threads per block, blocks per SM
    attention(const __grid_constant__ TensorMap Q,  // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap K, const __grid_constant__ TensorMap V, half *O,
              int seqlen, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<d>>();
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br, head = blockIdx.y;
  const Matrix<half> gO{O + std::int64_t{head} * seqlen * d, seqlen, d};

  if (threadIdx.x == 0) {
    mbarrier_init(smem.Q_full, 1);
    for (int i = 0; i < stages; i++) {
      mbarrier_init(smem.K.full[i], 1);
      mbarrier_init(smem.V.full[i], 1);
      mbarrier_init(smem.K.empty[i], 4);  // a lane of each warp that computes
      mbarrier_init(smem.V.empty[i], 4);
    }
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are made
  Position k, v;

  if (warp >= 4) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 128) {
      mbarrier_arrive_expect_tx(smem.Q_full, sizeof smem.Q);
      tma_load(smem.Q, Q, first_row, head, 0, smem.Q_full);
      for (int j = 0; j < seqlen; j += Bc) {
        load(smem.K, k, K, j, head);
        load(smem.V, v, V, j, head);
      }
    }
  } else {
    setmaxnreg_inc<232>();
    // Never taken. Without a way out behind setmaxnreg, nvcc 13.0 compiles what follows for the registers
    // of the launch, and spills.
    if (seqlen == 0) return;

    // Of each m tile a warp has 16 rows, and the lane rows lane / 4 (r = 0) and lane / 4 + 8 (r = 1)
    // of these: of element i, r is i / 2 % 2.
    Accumulator<d> o[m_tiles];
    Accumulator<Bc> s[m_tiles];
    float l[m_tiles][2] = {}, m[m_tiles][2];
    for (int mt = 0; mt < m_tiles; mt++) m[mt][0] = m[mt][1] = -INFINITY;

    mbarrier_wait(smem.Q_full, 0);
    for (int j = 0; j < seqlen; j += Bc) {
      // S = Q K^T: to be multiplied, K lies as Q does.
      mbarrier_wait(smem.K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int col = 0; col < d; col += 16)
          wgmma(s[mt], k_major(smem.Q, mt * 64, col), k_major(smem.K.tile[k.stage], 0, col),
                col > 0);
      wgmma_commit();
      wgmma_wait<0>(s[0], s[1]);
      if (lane == 0) mbarrier_arrive(smem.K.empty[k.stage]);
      k.next();

      // Online softmax, lazily: m may stay below the maximum, by at most the threshold. P and l are
      // relative to m, whatever it is, and O / l is not.
      bool must_rescale = false;
      float m_lane[m_tiles][2];  // of this lane's scores
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int r = 0; r < 2; r++) {
          m_lane[mt][r] = -INFINITY;
          for (int i = 2 * r; i < Bc / 2; i += 4)
            m_lane[mt][r] = fmaxf(m_lane[mt][r], fmaxf(s[mt](i), s[mt](i + 1)));
          must_rescale |= m_lane[mt][r] * scale_log2 > m[mt][r] + rescale_threshold;
        }
      if (__any_sync(kAllLanes, must_rescale)) {
#pragma unroll
        for (int mt = 0; mt < m_tiles; mt++)
          for (int r = 0; r < 2; r++) {
            float m_new = m_lane[mt][r];
            for (int mask = 1; mask < 4; mask *= 2)
              m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
            m_new = fmaxf(m[mt][r], m_new * scale_log2);
            const float alpha = ex2(m[mt][r] - m_new);  // 2^-inf = 0 for the first tile
            m[mt][r] = m_new;
            l[mt][r] *= alpha;
            if (j > 0)
              for (int i = 2 * r; i < d / 2; i += 4) o[mt](i) *= alpha, o[mt](i + 1) *= alpha;
          }
      }
      // Two neighbouring blocks of 8 columns of P, rounded to fp16, are A of one product.
      FragmentA p[m_tiles][Bc / 16];
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++) {
        for (int i = 0; i < Bc / 2; i++)
          l[mt][i / 2 % 2] += s[mt](i) = ex2(fmaf(s[mt](i), scale_log2, -m[mt][i / 2 % 2]));
        for (int i = 0; i < Bc / 2; i += 8)
          p[mt][i / 8] = {
              cvt_rn_f16x2(s[mt](i), s[mt](i + 1)), cvt_rn_f16x2(s[mt](i + 2), s[mt](i + 3)),
              cvt_rn_f16x2(s[mt](i + 4), s[mt](i + 5)), cvt_rn_f16x2(s[mt](i + 6), s[mt](i + 7))};
      }

      // O += P V. The sum goes down V's columns.
      mbarrier_wait(smem.V.full[v.stage], v.parity);
      wgmma_fence();
#pragma unroll
      for (int mt = 0; mt < m_tiles; mt++)
        for (int key = 0; key < Bc; key += 16)
          wgmma(o[mt], p[mt][key / 16], mn_major(smem.V.tile[v.stage], key, 0), j > 0 || key > 0);
      wgmma_commit();
      wgmma_wait<0>(o[0], o[1]);
      if (lane == 0) mbarrier_arrive(smem.V.empty[v.stage]);
      v.next();
    }

#pragma unroll
    for (int mt = 0; mt < m_tiles; mt++) {
      for (int r = 0; r < 2; r++) {
        for (int mask = 1; mask < 4; mask *= 2)
          l[mt][r] += __shfl_xor_sync(kAllLanes, l[mt][r], mask);
        const int row = first_row + mt * 64 + warp * 16 + lane / 4 + 8 * r;
        for (int i = 2 * r; i < d / 2; i += 4)
          store<2>(gO(row, i / 4 * 8 + lane % 4 * 2),
                   Vector<half, 2>{__float2half(o[mt](i) / l[mt][r]),
                                   __float2half(o[mt](i + 1) / l[mt][r])});
      }
    }
  }
}

template <int d>
void run(const Problem &p) {
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<half>(tensor, p.Q_strides, 1, p.batch * p.heads, p.seqlen_q, d, tile_rows);
  };
  const dim3 grid(p.seqlen_q / Br, p.batch * p.heads);
  launch<SharedStorage<d>>(attention<d>, grid, dim3(256), map(p.Q, Br), map(p.K, Bc), map(p.V, Bc),
                           static_cast<half *>(p.O), p.seqlen_q, log2_e / sqrtf(d));
}

}  // namespace

EXPORT_STEP({
    .tile = Br,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? run<64>(p) : run<128>(p); },
});
