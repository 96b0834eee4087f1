// CUDA as a kernel sees it, on a CPU: the names that a kernel uses and that CUDA's own headers
// declare on a GPU. One function per instruction.
#pragma once

#include <math.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "common/emulator/runtime.h"
#include "reference/half.h"

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

inline void __syncwarp(std::uint32_t members = 0xffffffff,
                       emulator::Where where = emulator::Where::current()) {
  if (members != 0xffffffff) emulator::fail("__syncwarp: not all 32 lanes take part", where);
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

namespace emulator {

/// How many lanes of the warp have a predicate that is not zero.
inline int count_votes(const char *instruction, std::uint32_t members, int predicate, Where where) {
  struct Lane {
    int predicate, votes;
  } lane{predicate, 0};
  if (members != 0xffffffffu)
    fail(std::string(instruction) + ": not all 32 lanes take part", where);
  collective(instruction, kVotes, where, &lane, [](void **lanes) {
    int votes = 0;
    for (int i = 0; i < 32; i++) votes += static_cast<Lane *>(lanes[i])->predicate != 0;
    for (int i = 0; i < 32; i++) static_cast<Lane *>(lanes[i])->votes = votes;
  });
  return lane.votes;
}

}  // namespace emulator

/// Whether any lane's predicate holds, and whether all do (PTX ISA 'vote.sync').
inline int __any_sync(std::uint32_t members, int predicate,
                      emulator::Where where = emulator::Where::current()) {
  return emulator::count_votes("__any_sync", members, predicate, where) > 0;
}
inline int __all_sync(std::uint32_t members, int predicate,
                      emulator::Where where = emulator::Where::current()) {
  return emulator::count_votes("__all_sync", members, predicate, where) == 32;
}

namespace emulator {

/// Lane i's value of lane (i & keep) ^ operand (PTX ISA 'shfl.sync').
template <class T>
T shuffle(const char *instruction, std::uint32_t members, T value, unsigned keep, unsigned operand,
          Where where) {
  struct Lane {
    T value, result;
    unsigned keep, operand;
  } lane{value, {}, keep, operand};
  if (members != 0xffffffffu)
    fail(std::string(instruction) + ": not all 32 lanes take part", where);
  collective(instruction, kShuffles, where, &lane, [](void **lanes) {
    for (unsigned i = 0; i < 32; i++) {
      auto *self = static_cast<Lane *>(lanes[i]);
      self->result = static_cast<Lane *>(lanes[((i & self->keep) ^ self->operand) % 32])->value;
    }
  });
  return lane.result;
}

}  // namespace emulator

template <class T>
T __shfl_sync(std::uint32_t members, T value, int lane,
              emulator::Where where = emulator::Where::current()) {
  return emulator::shuffle("__shfl_sync", members, value, 0, lane, where);
}

template <class T>
T __shfl_xor_sync(std::uint32_t members, T value, int mask,
                  emulator::Where where = emulator::Where::current()) {
  return emulator::shuffle("__shfl_xor_sync", members, value, 31, mask, where);
}
