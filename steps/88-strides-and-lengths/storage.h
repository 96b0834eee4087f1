// SPDX-License-Identifier: MIT
// What the kernels of steps 88, 80 and 81 have of steps 67 and 68: shared memory, and how dQ leaves it.
#pragma once

#include "steps/88-strides-and-lengths/around.h"

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
  Tile<int, 1, 4> number;  // the block's
};

/// Initialises the barriers, and returns the block's number, if there are counters that draw it.
template <class T, int d, class... Counters>
__device__ __forceinline__ int begin_block(SharedStorage<T, d> &smem, Counters *...counters) {
  if (threadIdx.x == 0) {
    (take_number(smem.number, counters), ...);
    init_copies(smem);
    for (int i = 0; i < consumers; i++) {
      mbarrier_init(smem.dQ_full[i], 4);  // the warps of a warpgroup
      mbarrier_init(smem.dQ_empty[i], 1);
    }
    mbarrier_fence_init();
  }
  __syncthreads();  // the barriers are initialised, and the number is there
  return sizeof...(counters) ? uniform(smem.number(0, 0)) : 0;
}

/// Adds visit n's dQ to the sums of a tile: waits until each warpgroup has written its half, and says when it has been read.
template <class T, int d>
__device__ __forceinline__ void add_to_dQ(float *dQ_sum, SharedStorage<T, d> &smem,
                                          std::int64_t tile, int n) {
  // The engine's additions come after this thread's load, which is the generic proxy's.
  fence_proxy_async_global();
  for (int w = 0; w < consumers; w++) {
    mbarrier_wait(smem.dQ_full[w], n % 2);
    constexpr int numbers = Br<d> * d / consumers;
    const std::int64_t part = tile * consumers + w;
    bulk_red_add<numbers>(Matrix<float>{dQ_sum + part * numbers, 1, numbers}(0, 0),
                          smem.dQ[w](0, 0));
    tma_store_commit();
  }
  tma_store_wait_read<1>();  // that of the first warpgroup has been read
  mbarrier_arrive(smem.dQ_empty[0]);
  tma_store_wait_read<0>();
  mbarrier_arrive(smem.dQ_empty[1]);
}

}  // namespace
