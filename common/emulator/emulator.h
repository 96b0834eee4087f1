// CUDA as a kernel sees it, on a CPU: the names that a kernel uses and that CUDA's own headers
// declare on a GPU. One function per instruction.
#pragma once

#include <math.h>

#include <cmath>
#include <cstdint>

#include "common/emulator/runtime.h"
#include "common/half.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

using dim3 = emulator::Dim3;

// Set by the engine each time it lets a thread go on.
extern thread_local constinit dim3 threadIdx, blockIdx, blockDim, gridDim;

inline float __half2float(half h) {
  return half_to_float(h);
}
inline half __float2half(float f) {
  return float_to_half(f);
}

inline void __syncthreads(emulator::Where where = emulator::Where::current()) {
  emulator::block_barrier(where);
}

inline void __syncwarp(emulator::Where where = emulator::Where::current()) {
  emulator::warp_barrier(where);
}

namespace emulator {

/// e^x as the GPU's fast path does it: one multiplication by log2(e) and one ex2.approx (CUDA C++
/// Programming Guide, 'Intrinsic Functions'; PTX ISA 'ex2'). ex2.approx is off by up to 2 ulp; this
/// is not.
inline float fast_exp(float x, Where where = Where::current()) {
  count_exp2(where);
  return std::exp2(x * 1.44269504f);
}

}  // namespace emulator

#define __expf emulator::fast_exp  // a macro, because glibc has a function of this name

/// The value of lane `lane ^ mask` (PTX ISA 'shfl.sync.bfly').
template <class T>
T __shfl_xor_sync(std::uint32_t members, T value, int mask,
                  emulator::Where where = emulator::Where::current()) {
  struct Lane {
    T value, result;
    int mask;
  } lane{value, {}, mask};
  if (members != 0xffffffffu) emulator::fail("__shfl_xor_sync: not all 32 lanes take part", where);
  emulator::collective("__shfl_xor_sync", emulator::kShuffles, where, &lane, [](void **lanes) {
    for (int i = 0; i < 32; i++) {
      auto *self = static_cast<Lane *>(lanes[i]);
      self->result = static_cast<Lane *>(lanes[(i ^ self->mask) & 31])->value;
    }
  });
  return lane.result;
}
