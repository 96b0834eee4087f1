// SPDX-License-Identifier: MIT
// Hopper's barriers: the mbarrier, which counts threads that arrive and bytes that land, and the
// numbered barriers of some of a block's warps.
#pragma once

#include "common/kernel/ptx.h"

/// An mbarrier object, in shared memory (PTX ISA, 'Parallel Synchronization and Communication
/// Instructions: mbarrier'). It goes from phase to phase: a phase ends when as many threads have arrived
/// as it was made for and all bytes that it was told to expect have landed. Who waits names the phase
/// by its parity, 0 for the first, and goes on once that phase has ended.
struct Mbarrier {
  std::uint64_t state;  // the instructions' own
};

#ifdef __CUDACC__

/// Begins the first phase of a barrier at which so many arrivals are expected per phase. One thread
/// does this; the others, and the copy engine, may use it after mbarrier_fence_init and a barrier of the
/// block ('mbarrier.init'). The emulator names the barrier by where it is made and, if it is one of a ring's,
/// by its part.
__device__ __forceinline__ void mbarrier_init(Mbarrier &barrier, int arrivals,
                                              Where = Where::current(), const char * = "") {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx::shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

/// Makes the barriers that this thread has initialised visible to the copy engine and to the blocks of
/// the cluster ('fence.mbarrier_init').
__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives. What the thread did before happens before what those do who have waited for the phase
/// ('mbarrier.arrive').
__device__ __forceinline__ void mbarrier_arrive(Mbarrier &barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ptx::shared_address(&barrier))
               : "memory");
}

/// Lets the phase expect so many bytes more, and arrives ('mbarrier.arrive.expect_tx').
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier &barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx::shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

/// Waits until the phase of this parity has ended ('mbarrier.try_wait'). A kernel that waits for what
/// never comes is ended with an error after some seconds, and the GPU does not hang.
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
    if (tries == 1 << 22) __trap();
}

/// Waits at barrier `id` (1 to 15; 0 is __syncthreads) until `threads` threads have come to it or
/// arrived: whole warps ('barrier.sync').
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives there, and does not wait ('barrier.arrive').
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Gives registers back, or asks for more and waits until they are there: each thread of the warpgroup
/// has so many from now on, a multiple of 8 from 24 to 256 ('setmaxnreg').
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
