// Step 67: Overlap. Another warp adds dQ, and dV starts late: the warps that compute wait less for each other.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type
// Before      step 66: a thread that computes starts the additions to dQ. 128 threads meet before it does, and 256 wait
//             in the next tile until it has seen that the copy engine has read dQ.
// Bottleneck  Waits. A tile has 3200 clocks of products and 3813 of shared memory, and takes 4681.
// Change      A warp of the producer starts the additions, and waits until they have read dQ. The warps that compute
//             say by an mbarrier that dQ is stored, and learn by another that its place is free. dV starts when dS is
//             stored, as in step 66's variant dv-late.
// Prediction  FlashAttention's CuTe kernel has this order. Its 613 TFLOP/s on an H200 are 4210 clocks for all of a tile
//             if it runs at 1.5 GHz: 0.88 of step 66's 4782.
#include "common/kernel/backward_ends.h"
#include "common/kernel/hopper_backward.h"

namespace {

template <class T, int d>
struct SharedStorage {
  TmaTile<64, d, T> K[consumers], V[consumers];  // at the end dK and dV
  TmaTile<Br<d>, d, T> Q[stages], dO[stages];
  TmaTile<Br<d>, Bc, T> dS[2];  // one is written while the other may be read
  Tile<float, 1, Br<d> * d / consumers> dQ[consumers];
  Tile<float, 1, Br<d>> lse[stages], D[stages];
  Mbarrier KV_full, Q_full[stages], dO_full[stages], empty[stages];
  Mbarrier dQ_full[consumers], dQ_empty[consumers];
};

/// dK and dV of 128 keys, and what these keys add to dQ.
template <class T, int d>
__global__ void __launch_bounds__(threads, 1)           // blocks per SM
    gradients(const __grid_constant__ TensorMap map_Q,  // [heads, seqlen, d], all six
              const __grid_constant__ TensorMap map_dO, const __grid_constant__ TensorMap map_K,
              const __grid_constant__ TensorMap map_V, const __grid_constant__ TensorMap map_dK,
              const __grid_constant__ TensorMap map_dV, const float *lse_log2,
              const float *D,  // [heads, tiles * Br]
              float *dQ_sum,   // [heads, tiles, Br * d]: place_in_dQ
              int seqlen, int tiles, bool causal, float scale) {
  // The named barriers: of both warpgroups, and one for each; 0 is that of __syncthreads.
  constexpr int all_stored = 1, first_stored = 2;
  auto &smem = shared_storage<SharedStorage<T, d>>();
  const int warp = warp_index(), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const int head = blockIdx.y, first_key = blockIdx.x * Bc;
  const int first_tile = causal ? first_key / Br<d> : 0;
  if (threadIdx.x == 0) {
    init_copies(smem);
    for (int i = 0; i < consumers; i++) {
      mbarrier_init(smem.dQ_full[i], 4);  // the warps of a warpgroup
      mbarrier_init(smem.dQ_empty[i], 1);
    }
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised

  if (warpgroup == consumers) {
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x == consumers * 128) {
      mbarrier_arrive_expect_tx(smem.KV_full, sizeof(smem.K) + sizeof(smem.V));
      for (int i = 0; i < consumers; i++) {
        tma_load(smem.K[i], map_K, first_key + i * 64, head, 0, smem.KV_full);
        tma_load(smem.V[i], map_V, first_key + i * 64, head, 0, smem.KV_full);
      }
      const std::int64_t rows = tiles * Br<d>;
      const Matrix<const float> lse_of_head{lse_log2 + head * rows, tiles, Br<d>};
      const Matrix<const float> D_of_head{D + head * rows, tiles, Br<d>};
      for (int i = first_tile; i < tiles; i++) {
        const int stage = (i - first_tile) % stages, parity = (i - first_tile) / stages % 2;
        mbarrier_wait(smem.empty[stage], parity ^ 1);  // new stages count as empty
        load_queries(smem.Q[stage], map_Q, smem.lse[stage], lse_of_head, smem.Q_full[stage], i,
                     head);
        load_queries(smem.dO[stage], map_dO, smem.D[stage], D_of_head, smem.dO_full[stage], i,
                     head);
      }
    }
    // One thread of another warp starts the additions to dQ, and says when they have read it.
    if (threadIdx.x == consumers * 128 + 32) {
      for (int i = first_tile; i < tiles; i++) {
        for (int w = 0; w < consumers; w++) {
          mbarrier_wait(smem.dQ_full[w], (i - first_tile) % 2);
          constexpr int numbers = Br<d> * d / consumers;
          const std::int64_t part = (std::int64_t{head} * tiles + i) * consumers + w;
          bulk_red_add<numbers>(Matrix<float>{dQ_sum + part * numbers, 1, numbers}(0, 0),
                                smem.dQ[w](0, 0));
          tma_store_commit();
        }
        tma_store_wait_read<1>();  // that of the first warpgroup has been read
        mbarrier_arrive(smem.dQ_empty[0]);
        tma_store_wait_read<0>();
        mbarrier_arrive(smem.dQ_empty[1]);
      }
    }
  } else {
    setmaxnreg_inc<consumer_registers>();
    auto &K = smem.K[warpgroup], &V = smem.V[warpgroup];
    Accumulator<d> dk, dv;
    Accumulator<Br<d>> s, dp;                     // transposed: keys x queries
    Accumulator<d == 64 ? Br<d> / 2 : Br<d>> dq;  // transposed: columns x queries
    FragmentA p[Br<d> / 16], ds[Br<d> / 16];
    const bool is_first_thread = threadIdx.x % 128 == 0;
    const int own_first_key = first_key + warpgroup * 64;
    const int key = own_first_key + warp % 4 * 16 + lane / 4;  // the lane's, and 8 further on
    mbarrier_wait<false>(smem.KV_full, 0);

    for (int i = first_tile; i < tiles; i++) {
      const int stage = (i - first_tile) % stages, parity = (i - first_tile) / stages % 2;
      auto &Q = smem.Q[stage], &dO = smem.dO[stage];
      auto &dS = smem.dS[i % 2];

      // S^T = K Q^T and dP^T = V dO^T.
      mbarrier_wait<false>(smem.Q_full[stage], parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(s, k_major(K, 0, col), k_major(Q, 0, col), col > 0);
      wgmma_commit();
      mbarrier_wait<false>(smem.dO_full[stage], parity);
      wgmma_fence();
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma<T>(dp, k_major(V, 0, col), k_major(dO, 0, col), col > 0);
      wgmma_commit();

      // P^T, while dP is computed. A lane has queries `query` and `query` + 1 of each 8.
      wgmma_wait<1>(s);
      const int query = i * Br<d> + lane % 4 * 2;
      if (causal ? i * Br<d> < own_first_key + 63 : own_first_key + 64 > seqlen)
#pragma unroll
        for (int e = 0; e < s.size; e++)
          if (key + e / 2 % 2 * 8 > (causal ? query + e / 4 * 8 + e % 2 : seqlen - 1))
            s(e) = -INFINITY;
#pragma unroll
      for (int e = 0; e < s.size; e += 4) {
        const auto lse = load<2>(smem.lse[stage](0, e * 2 + lane % 4 * 2));
        for (int k = 0; k < 4; k++) s(e + k) = ex2(fmaf(s(e + k), scale * log2_e, -lse[k % 2]));
      }
      to_fragments<T>(p, s);

      wgmma_wait<0>(dp);
#pragma unroll
      for (int e = 0; e < dp.size; e += 4) {
        const auto D_of = load<2>(smem.D[stage](0, e * 2 + lane % 4 * 2));
        for (int r = 0; r < 2; r++) {
          const auto P = to_floats<T>(p[e / 8][e / 4 % 2 * 2 + r]);
          for (int k = 0; k < 2; k++) dp(e + 2 * r + k) = P[k] * (dp(e + 2 * r + k) - D_of[k]);
        }
      }
      to_fragments<T>(ds, dp);
#pragma unroll
      for (int row = 0; row < Br<d>; row += 16)
        stmatrix_x4_trans(dS(row + lane / 16 * 8 + lane % 8, warp * 16 + lane / 8 % 2 * 8),
                          ds[row / 16]);

      // dV += P^T dO, P rounded: there is no register for the other.
      wgmma_fence();
#pragma unroll
      for (int row = 0; row < Br<d>; row += 16)
        wgmma<T>(dv, p[row / 16], mn_major(dO, row, 0), i > first_tile || row > 0);
      wgmma_commit();
      fence_proxy_async();
      named_barrier_sync(all_stored, consumers * 128);  // dS is complete

      // dQ^T = K^T dS^T, for all keys, and dK += dS^T Q.
      wgmma_fence();
#pragma unroll
      for (int row = 0; row < Bc; row += 16)
        wgmma<T>(dq, mn_major(smem.K[row / 64], row % 64, d == 64 ? 0 : warpgroup * 64),
                 k_major(dS, d == 64 ? warpgroup * (Br<d> / 2) : 0, row), row > 0);
      wgmma_commit();
#pragma unroll
      for (int row = 0; row < Br<d>; row += 16)
        wgmma<T>(dk, ds[row / 16], mn_major(Q, row, 0), i > first_tile || row > 0);
      wgmma_commit();

      wgmma_wait<1>(dv, dq);
      auto &dQ = smem.dQ[warpgroup];
      mbarrier_wait<false>(smem.dQ_empty[warpgroup], (i - first_tile) % 2 ^ 1);
#pragma unroll
      for (int e = 0; e < dq.size; e += 4)
        store(dQ(0, e * 128 + threadIdx.x % 128 * 4),
              Vector<float, 4>{dq(e), dq(e + 1), dq(e + 2), dq(e + 3)});
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem.dQ_full[warpgroup]);
      wgmma_wait<0>(dk);
      if (lane == 0) mbarrier_arrive(smem.empty[stage]);
    }

    // K's and V's places become dK's and dV's.
    named_barrier_sync(all_stored, consumers * 128);  // both have read all of K
    const auto round = [&](Accumulator<d> &x, TmaTile<64, d, T> &tile, float factor) {
#pragma unroll
      for (int e = 0; e < x.size; e += 8)
        stmatrix_x4(tile(warp % 4 * 16 + lane % 16, e * 2 + lane / 16 * 8),
                    {cvt_rn_x2<T>(x(e) * factor, x(e + 1) * factor),
                     cvt_rn_x2<T>(x(e + 2) * factor, x(e + 3) * factor),
                     cvt_rn_x2<T>(x(e + 4) * factor, x(e + 5) * factor),
                     cvt_rn_x2<T>(x(e + 6) * factor, x(e + 7) * factor)});
    };
    round(dv, V, 1);
    round(dk, K, scale);
    fence_proxy_async();
    named_barrier_sync(first_stored + warpgroup, 128);  // all four warps have written both
    if (is_first_thread) {
      tma_store(map_dV, own_first_key, head, 0, V);
      tma_store(map_dK, own_first_key, head, 0, K);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
  }
}

template <class T, int d>
void run(const Problem &p) {
  const int heads = p.batch * p.heads, seqlen = p.seqlen_q, tiles = tiles_of<Br<d>>(p);
  const std::int64_t rows = std::int64_t{heads} * tiles * Br<d>;
  const auto map = [&](const void *tensor, int tile_rows) {
    return tensor_map<T>(tensor, p.Q_strides, 1, heads, seqlen, d, tile_rows);
  };
  float *const dQ_sum = static_cast<float *>(p.workspace);
  float *const lse_log2 = dQ_sum + rows * d, *const D = lse_log2 + rows;
  const float scale = 1 / sqrtf(d);
  launch<void>(begin<T, d, Br<d>>, dim3(tiles * Br<d> / 4, heads), dim3(128),
               static_cast<const T *>(p.O), static_cast<const T *>(p.dO), p.lse, lse_log2, D,
               dQ_sum, seqlen, tiles);
  launch<SharedStorage<T, d>>(gradients<T, d>, dim3((seqlen + Bc - 1) / Bc, heads), dim3(threads),
                              map(p.Q, Br<d>), map(p.dO, Br<d>), map(p.K, 64), map(p.V, 64),
                              map(p.dK, 64), map(p.dV, 64), lse_log2, D, dQ_sum, seqlen, tiles,
                              p.causal, scale);
  launch<void>(round_dQ<T, d, Br<d>, place_in_dQ<d>>, dim3((seqlen + 7) / 8, heads), dim3(d),
               dQ_sum, static_cast<T *>(p.dQ), seqlen, tiles, scale);
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes =
        [](const Problem &p) {
          const int padded =
              p.head_dim == 64 ? tiles_of<Br<64>>(p) * Br<64> : tiles_of<Br<128>>(p) * Br<128>;
          return std::size_t(p.batch) * p.heads * padded * (p.head_dim + 2) * sizeof(float);
        },
    .gradients = true,
    .same_bits = false,
});
