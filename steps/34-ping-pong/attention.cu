// Step 34: ping-pong. While one warpgroup multiplies, the other has its softmax.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --type
// Before      step 33: the warpgroups may do the same at the same time.
// Bottleneck  Chance: where both have their softmax, the tensor cores stand still; where both multiply,
//             the scheduler does.
// Change      They take turns: P V and the next Q K^T in one's, the softmax in the other's.
// Prediction  The softmax fits under the other's products, but each change of turn costs some 330
//             clocks: 2,700 for 2,540, 580 to 620 TFLOP/s, no gain.
#include "common/kernel/ring.h"
#include "common/kernel/wgmma.h"

namespace {

constexpr int consumers = 2;            // warpgroups that compute, with 64 rows of Q each
constexpr int Br = consumers * 64;      // rows of Q in a tile
constexpr int Bc = 128;                 // rows of K and V in a tile
constexpr int stages = 2;               // of K and of V: one is filled while the other is read
constexpr float rescale_threshold = 8;  // P is at most 2^8 then: far from fp16's 65504
// The named barriers, one for each warpgroup; 0 is that of __syncthreads.
constexpr int first_turn = 1;

template <class T, int d>
struct SharedStorage {
  TmaTile<Br, d, T> Q;
  Ring<TmaTile<Bc, d, T>, stages> K, V;
  Mbarrier Q_full;
};

/// Online softmax, lazily: S becomes P, relative to m. m may stay below the maximum, by at most the
/// threshold. Else l, and O by the caller, are multiplied by alpha: returns whether.
__device__ __forceinline__ bool softmax(Accumulator<Bc> &s, float (&m)[2], float (&l)[2],
                                        float (&alpha)[2], float scale_log2) {
  float m_lane[2] = {-INFINITY, -INFINITY};  // of this lane's scores
#pragma unroll
  for (int i = 0; i < s.size; i++) m_lane[i / 2 % 2] = fmaxf(m_lane[i / 2 % 2], s(i));
  bool must_rescale = false;
  for (int r = 0; r < 2; r++) must_rescale |= m_lane[r] * scale_log2 > m[r] + rescale_threshold;
  must_rescale = __any_sync(kAllLanes, must_rescale);
  if (must_rescale) {
    for (int r = 0; r < 2; r++) {
      float m_new = m_lane[r];
      for (int mask = 1; mask < 4; mask *= 2)
        m_new = fmaxf(m_new, __shfl_xor_sync(kAllLanes, m_new, mask));
      m_new = fmaxf(m[r], m_new * scale_log2);
      alpha[r] = ex2(m[r] - m_new);  // 2^-inf = 0 for the first tile
      m[r] = m_new;
      l[r] *= alpha[r];
    }
  }
#pragma unroll
  for (int i = 0; i < s.size; i++)
    l[i / 2 % 2] += s(i) = ex2(fmaf(s(i), scale_log2, -m[i / 2 % 2]));
  return must_rescale;
}

/// P, rounded: two neighbouring blocks of 8 columns are A of one product.
template <class T>
__device__ __forceinline__ void round(FragmentA (&p)[Bc / 16], Accumulator<Bc> &s) {
#pragma unroll
  for (int i = 0; i < s.size; i += 8)
    p[i / 8] = {cvt_rn_x2<T>(s(i), s(i + 1)), cvt_rn_x2<T>(s(i + 2), s(i + 3)),
                cvt_rn_x2<T>(s(i + 4), s(i + 5)), cvt_rn_x2<T>(s(i + 6), s(i + 7))};
}

template <class T, int d>
__global__ void __launch_bounds__((consumers + 1) * 128, 1)  // threads per block, blocks per SM
    attention(const __grid_constant__ TensorMap map_Q,       // [batch * heads, seqlen, d], all four
              const __grid_constant__ TensorMap map_K, const __grid_constant__ TensorMap map_V,
              T *O, int seqlen, float scale_log2) {
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * Br, head = blockIdx.y;
  if (threadIdx.x == 0) {
    mbarrier_init(smem.Q_full, 1);
    ring_init(smem.K, consumers * 4);  // a lane of each warp that computes says that it is empty
    ring_init(smem.V, consumers * 4);
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are made
  RingPosition<stages> k, v;

  if (warpgroup == consumers) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == consumers * 128) {
      mbarrier_arrive_expect_tx(smem.Q_full, sizeof smem.Q);
      tma_load(smem.Q, map_Q, first_row, head, 0, smem.Q_full);
      for (int j = 0; j < seqlen; j += Bc) {
        ring_load(smem.K, k, map_K, j, head, 0);
        ring_load(smem.V, v, map_V, j, head, 0);
      }
    }
  } else {
    setmaxnreg_inc<232>();
    // Never taken. Without a way out behind setmaxnreg, nvcc 13.0 compiles what follows for the registers
    // of the launch, and spills.
    if (seqlen == 0) return;
    const int wg_row = warpgroup * 64;
    Accumulator<Bc> s;
    Accumulator<d> o;
    FragmentA p[Bc / 16];
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, alpha[2];
    // Ping-pong: a warpgroup's products start when the other's are done.
    const auto my_turn = [&] { named_barrier_sync(first_turn + warpgroup, consumers * 128); };
    const auto next_turn = [&] {
      named_barrier_arrive(first_turn + (warpgroup + 1) % consumers, consumers * 128);
    };
    if (warpgroup == consumers - 1) next_turn();

    mbarrier_wait(smem.Q_full, 0);
    my_turn();
    for (int j = 0; j < seqlen; j += Bc) {
      mbarrier_wait(smem.K.full[k.stage], k.parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s, k_major(smem.Q, wg_row, col), k_major(smem.K.tile[k.stage], 0, col), col > 0);
      wgmma_commit();
      wgmma_wait<0>(s);
      ring_release(smem.K, k);
      next_turn();

      const bool must_rescale = softmax(s, m, l, alpha, scale_log2);
      round<T>(p, s);
      if (must_rescale && j > 0) {
#pragma unroll
        for (int i = 0; i < o.size; i++) o(i) *= alpha[i / 2 % 2];
      }

      my_turn();
      mbarrier_wait(smem.V.full[v.stage], v.parity);
      wgmma_fence();
#pragma unroll
      for (int key = 0; key < Bc; key += 16)
        wgmma<T>(o, p[key / 16], mn_major(smem.V.tile[v.stage], key, 0), j > 0 || key > 0);
      wgmma_commit();
      wgmma_wait<0>(o);
      ring_release(smem.V, v);
    }
    next_turn();

    const Matrix<T> gO{O + std::int64_t{head} * seqlen * d, seqlen, d};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
      const int row = first_row + warp * 16 + lane / 4 + 8 * r;
      for (int i = 2 * r; i < o.size; i += 4)
        store<2>(gO(row, i / 4 * 8 + lane % 4 * 2),
                 Vector<T, 2>{from_float<T>(o(i) / l[r]), from_float<T>(o(i + 1) / l[r])});
    }
  }
}

template <class T, int d>
void run(const Problem &p) {
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<T>(tensor, p.Q_strides, 1, p.batch * p.heads, p.seqlen_q, d, tile_rows);
  };
  const dim3 grid(p.seqlen_q / Br, p.batch * p.heads);
  launch<SharedStorage<T, d>>(attention<T, d>, grid, dim3((consumers + 1) * 128), map(p.Q, Br),
                              map(p.K, Bc), map(p.V, Bc), static_cast<T *>(p.O), p.seqlen_q,
                              log2_e / sqrtf(d));
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = Br,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
});
