// SPDX-License-Identifier: MIT
// Hopper's barriers: the mbarrier, which counts arrivals of threads and bytes of copies, and the numbered
// barriers, for some of a block's warps.
#pragma once

#include "common/kernel/ptx.h"

/// An mbarrier object, in shared memory (PTX ISA, 'Parallel Synchronization and Communication
/// Instructions: mbarrier'). It goes through phases. A phase ends when the threads that it expects
/// and all bytes that it expects have arrived. A thread waits for a phase by its parity, 0 for the
/// first. A wait for the parity of the phase before the current one returns at once, at a new
/// barrier as well.
struct Mbarrier {
  std::uint64_t state;  // the instructions' own
};

#ifdef __CUDACC__

/// Begins the first phase of a barrier that expects `arrivals` arrivals per phase. One thread calls
/// this. The others, and the copy engine, may use the barrier after mbarrier_fence_init and a
/// barrier of the block ('mbarrier.init'). The emulator names the barrier by the line that
/// initialises it, and by its part if it belongs to a ring.
__device__ __forceinline__ void mbarrier_init(Mbarrier &barrier, int arrivals,
                                              Where = Where::current(), const char * = "") {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx::shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

/// Makes the barriers that this thread has initialised visible to the blocks of the cluster
/// ('fence.mbarrier_init'), and, by CUTLASS' practice, to the copy engine.
__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives. What this thread did before is visible to every thread that has waited for the phase
/// ('mbarrier.arrive').
__device__ __forceinline__ void mbarrier_arrive(Mbarrier &barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ptx::shared_address(&barrier))
               : "memory");
}

/// Makes the phase expect `bytes` bytes more, and arrives ('mbarrier.arrive.expect_tx').
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier &barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx::shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

/// Waits until the phase of this parity has ended ('mbarrier.try_wait'). After some seconds of
/// waiting it ends the kernel with an error, so that the GPU does not hang: by a trap, or by a store to address
/// 0. (Where a trap can be reached, ptxas 13.0 spills what exceeds the registers that the kernel was launched
/// with, in spite of setmaxnreg. Step 66 needs more.)
template <bool by_trap = true>
__device__ __forceinline__ void mbarrier_wait(Mbarrier &barrier, int parity) {
  const unsigned address = ptx::shared_address(&barrier);
  unsigned done;
  const auto try_wait = [&] {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  };
  // Each try lasts up to a time that the hardware sets.
  for (int tries = 0; try_wait(), !done; tries++)
    if (tries == 1 << 22) {
      if constexpr (by_trap)
        __trap();
      else
        asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(parity) : "memory");
    }
}

/// Arrives at barrier `id` (1 to 15; 0 is __syncthreads), and waits until `threads` threads have
/// arrived, in whole warps ('barrier.sync'). `.aligned` promises that all who wait do so by this one instruction.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The same for warps that come to the barrier by instructions of their own, each warp's threads by one.
__device__ __forceinline__ void named_barrier_meet(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives at barrier `id`, and does not wait ('barrier.arrive').
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Give registers back to the block, or wait until it has enough and take them. From then on each
/// thread of the warpgroup has `Registers`, a multiple of 8 from 24 to 256 ('setmaxnreg').
template <int Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

#else

#include "common/emulator/mbarrier.h"

#endif
