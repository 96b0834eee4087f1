// SPDX-License-Identifier: MIT
// CUDA as a kernel sees it, on a CPU: the names that a kernel uses and that CUDA's own headers
// declare on a GPU. One function per instruction.
#pragma once

#include <math.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "common/emulator/runtime.h"
#include "reference/half.h"

// Each call within a kernel becomes a copy of the function, as nvcc makes one: what two sides of a
// branch call is told apart (Profile::mixed).
// Not of what is [[gnu::noinline]]: where lanes meet, what converts a number and what reports an error,
// none of which is told apart by its place in the compiled code. Inlined, they were most of a kernel.
#define __global__ __attribute__((flatten))
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

using dim3 = emulator::Dim3;

// Set by the engine each time it lets a thread go on.
extern thread_local constinit dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
/// The running thread's lane in its warp.
inline unsigned lane_number() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}
}  // namespace emulator

// CUDA has them for integers without a namespace.
using std::max;
using std::min;

[[gnu::noinline]] inline float __half2float(half h) {
  return half_to_float(h);
}
[[gnu::noinline]] inline half __float2half(float f) {
  return float_to_half(f);
}
inline float __bfloat162float(bf16 b) {
  return bf16_to_float(b);
}
inline bf16 __float2bfloat16(float f) {
  return float_to_bf16(f);
}

[[gnu::noinline]] inline void __syncthreads(emulator::Where where = emulator::Where::current()) {
  emulator::block_barrier(where);
}

[[gnu::noinline]] inline void __syncwarp(std::uint32_t members = 0xffffffff,
                                         emulator::Where where = emulator::Where::current()) {
  static constexpr emulator::Collective kSyncwarp{"__syncwarp", emulator::kWarpBarriers, false,
                                                  true, [](void **) {}};
  emulator::collective(kSyncwarp, members, where, nullptr);
}

/// Orders what the thread did before it and after it, with atomics, for other blocks (PTX ISA 'membar').
inline void __threadfence() {
  emulator::fence();
}

namespace emulator {

/// e^x as the GPU's fast path does it: one multiplication by log2(e) and one ex2.approx (CUDA C++
/// Programming Guide, 'Intrinsic Functions'; PTX ISA 'ex2'). ex2.approx is off by up to 2 ulp; this
/// is not.
inline float fast_exp(float x, Where where = Where::current()) {
  count(kExp2, where);
  return std::exp2(x * 1.44269504f);
}

}  // namespace emulator

#define __expf emulator::fast_exp  // a macro, because glibc has a function of this name

namespace emulator {

/// A lane's part in a vote: its predicate, then what the lanes that vote agree on.
struct Vote {
  int predicate;
  bool any = false, all = true;
};

inline void count_votes(void **lanes) {
  Vote sum{0};
  for (int i = 0; i < 32; i++)
    if (const auto *vote = static_cast<Vote *>(lanes[i])) {
      sum.any |= vote->predicate != 0;
      sum.all &= vote->predicate != 0;
    }
  for (int i = 0; i < 32; i++)
    if (auto *vote = static_cast<Vote *>(lanes[i])) *vote = sum;
}

}  // namespace emulator

/// Whether any lane's predicate holds, and whether all do (PTX ISA 'vote.sync').
[[gnu::noinline]] inline int __any_sync(std::uint32_t members, int predicate,
                                        emulator::Where where = emulator::Where::current()) {
  static constexpr emulator::Collective kAny{"__any_sync", emulator::kVotes, false, false,
                                             emulator::count_votes};
  emulator::Vote vote{predicate};
  emulator::collective(kAny, members, where, &vote);
  return vote.any;
}
[[gnu::noinline]] inline int __all_sync(std::uint32_t members, int predicate,
                                        emulator::Where where = emulator::Where::current()) {
  static constexpr emulator::Collective kAll{"__all_sync", emulator::kVotes, false, false,
                                             emulator::count_votes};
  emulator::Vote vote{predicate};
  emulator::collective(kAll, members, where, &vote);
  return vote.all;
}

namespace emulator {

/// A lane's part in a shuffle: what it gives, and what it receives from another.
template <class T>
struct Shuffle {
  T value;
  unsigned source;  // the lane
  const char *name;
  Where where;
  T result{};

  static void compute(void **lanes) {
    for (unsigned i = 0; i < 32; i++) {
      auto *self = static_cast<Shuffle *>(lanes[i]);
      if (!self) continue;
      const auto *other = static_cast<Shuffle *>(lanes[self->source]);
      if (!other)
        fail_in_lane(
            i,
            {Fault::kDivergence, std::string(self->name) + " from lane " +
                                     std::to_string(self->source) + ", which takes no part"},
            self->where);
      self->result = other->value;
    }
  }
};

/// The first lane of this lane's segment of `width` lanes.
inline unsigned segment_of(unsigned lane, int width, const char *name, Where where) {
  if (width < 1 || width > 32 || width & (width - 1))
    fail({Fault::kBounds, std::string(name) + ": a width of " + std::to_string(width) +
                              ", which is no power of two up to 32"},
         where);
  return lane & ~(static_cast<unsigned>(width) - 1);
}

}  // namespace emulator

/// The value that another lane of the warp gives, of the lane's own segment of `width` lanes: the
/// one with this number in it (PTX ISA 'shfl.sync.idx').
template <class T>
[[gnu::noinline]] T __shfl_sync(std::uint32_t members, T value, int lane, int width = 32,
                                emulator::Where where = emulator::Where::current()) {
  static constexpr emulator::Collective kShuffle{"__shfl_sync", emulator::kShuffles, false, false,
                                                 emulator::Shuffle<T>::compute};
  const unsigned segment =
      emulator::segment_of(emulator::lane_number(), width, kShuffle.name, where);
  const unsigned source =
      segment | (static_cast<unsigned>(lane) & (static_cast<unsigned>(width) - 1));
  emulator::Shuffle<T> self{value, source, kShuffle.name, where};
  emulator::collective(kShuffle, members, where, &self);
  return self.result;
}

/// The same of lane ^ mask; of a later segment, the lane's own value ('shfl.sync.bfly').
template <class T>
[[gnu::noinline]] T __shfl_xor_sync(std::uint32_t members, T value, int mask, int width = 32,
                                    emulator::Where where = emulator::Where::current()) {
  static constexpr emulator::Collective kShuffle{"__shfl_xor_sync", emulator::kShuffles, false,
                                                 false, emulator::Shuffle<T>::compute};
  const unsigned lane = emulator::lane_number();
  const unsigned segment = emulator::segment_of(lane, width, kShuffle.name, where);
  unsigned source = (lane ^ static_cast<unsigned>(mask)) % 32;
  if (source >= segment + static_cast<unsigned>(width)) source = lane;
  emulator::Shuffle<T> self{value, source, kShuffle.name, where};
  emulator::collective(kShuffle, members, where, &self);
  return self.result;
}
