// SPDX-License-Identifier: MIT
// The PTX instructions of the tensor-core steps, one function each, and the registers they work on.
// On a GPU each is one instruction of inline assembly; on the emulator, common/emulator/ptx.h spells out
// what it does.
#pragma once

#include "common/kernel/view.h"

// What a lane holds of the operands of mma.m16n8k16. With g = lane / 4 and t = lane % 4 (PTX ISA,
// 'Matrix Fragments for mma.m16n8k16 with floating point type'):
//   A, 16 x 16: rows g, g + 8, g, g + 8; columns 2t and 2t + 1, the last two registers 8 further on
//   B, 16 x 8:  rows 2t and 2t + 1, the second register 8 further down; column g
//   C, 16 x 8:  rows g, g, g + 8, g + 8; columns 2t, 2t + 1, 2t, 2t + 1
using FragmentA = Vector<std::uint32_t, 4>;  // 2 elements each, the lower column in the lower half
using FragmentB = Vector<std::uint32_t, 2>;  // 2 elements each, the lower row in the lower half
using FragmentC = Vector<float, 4>;

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

using bf16 = __nv_bfloat16;  // as the emulator calls them
using e4m3 = __nv_fp8_e4m3;

namespace ptx {
__device__ __forceinline__ unsigned shared_address(const void *pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
}  // namespace ptx

/// C += A B, for a warp: 16 x 8 += (16 x 16) (16 x 8), operands of type T, fp16 or bf16, fp32 sums
/// (PTX ISA 'mma').
template <class T = half>
__device__ __forceinline__ void mma(FragmentC &c, const FragmentA &a, const FragmentB &b) {
  if constexpr (std::is_same_v<T, bf16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Loads four 8 x 8 matrices of fp16 or bf16 from shared memory. Lanes 8 i to 8 i + 7 supply the rows of
/// matrix i, 16 bytes each, aligned. Lane 4 g + t receives row g, columns 2t and 2t + 1 of each matrix
/// (PTX ISA 'ldmatrix').
template <class T>
__device__ __forceinline__ Vector<std::uint32_t, 4> ldmatrix_x4(const T &row) {
  Vector<std::uint32_t, 4> r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(ptx::shared_address(&row)));
  return r;
}

/// The same, each matrix transposed: lane 4 g + t receives rows 2t and 2t + 1 of column g.
template <class T>
__device__ __forceinline__ Vector<std::uint32_t, 4> ldmatrix_x4_trans(const T &row) {
  Vector<std::uint32_t, 4> r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(ptx::shared_address(&row)));
  return r;
}

/// Two matrices, transposed. Lanes 0 to 15 supply the rows; the addresses of lanes 16 to 31 are not used.
template <class T>
__device__ __forceinline__ Vector<std::uint32_t, 2> ldmatrix_x2_trans(const T &row) {
  Vector<std::uint32_t, 2> r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(ptx::shared_address(&row)));
  return r;
}

/// Four 8 x 8 matrices of fp16 or bf16 to shared memory: ldmatrix_x4 the other way round. Lanes 8 i to
/// 8 i + 7 supply the rows of matrix i, 16 bytes each, aligned. Lane 4 g + t gives row g, columns 2t and
/// 2t + 1 of each matrix (PTX ISA 'stmatrix', sm_90 or later).
template <class T>
__device__ __forceinline__ void stmatrix_x4(T &row, const Vector<std::uint32_t, 4> &r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   ptx::shared_address(&row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

/// The same, each matrix transposed: lane 4 g + t gives rows 2t and 2t + 1 of column g.
template <class T>
__device__ __forceinline__ void stmatrix_x4_trans(T &row, const Vector<std::uint32_t, 4> &r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   ptx::shared_address(&row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

/// Stores 4 numbers that follow each other in global memory as one access; the first is aligned to 16 bytes
/// (PTX ISA 'st'). nvcc 13.0 makes four stores of store<4> if the numbers come from an accumulator.
__device__ __forceinline__ void store_global(float &first, const Vector<float, 4> &x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(&first)),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

/// Starts a copy of 16 bytes from global to shared memory, past the registers and the L1 cache. It
/// may arrive at any time until the thread has waited for its group (PTX ISA 'cp.async').
template <class T>
__device__ __forceinline__ void cp_async_16(T &shared, const T &global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ptx::shared_address(&shared)),
               "l"(&global)
               : "memory");
}

/// The same where `there`. Elsewhere 16 bytes of zeros arrive and `global` is not read: the
/// instruction's operand src-size says how many of the bytes come from it.
template <class T>
__device__ __forceinline__ void cp_async_16_or_zeros(T &shared, const T &global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx::shared_address(&shared)),
               "l"(&global), "r"(there ? 16 : 0)
               : "memory");
}

/// Makes one group of the copies that the thread has started since its last commit.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most the N youngest of the thread's groups are in flight. The thread's other copies have
/// arrived then, for this thread alone: other threads need a barrier after it.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/// Two floats, rounded to fp16, in one register: `low` in its lower half (PTX ISA 'cvt').
__device__ __forceinline__ std::uint32_t cvt_rn_f16x2(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

/// The same, rounded to bf16.
__device__ __forceinline__ std::uint32_t cvt_rn_bf16x2(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

/// The values of the two fp16 or bf16 numbers in a register, the lower one first: what cvt_rn_x2 put there.
template <class T>
__device__ __forceinline__ Vector<float, 2> to_floats(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, bf16>)  // the upper half of an fp32 number
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
  else
    return {__half2float(__ushort_as_half(static_cast<unsigned short>(pair))),
            __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)))};
}

/// Two floats, rounded to e4m3, `low` in the lower byte; 448 for what is larger ('.satfinite'). Volatile:
/// it does not sink behind the wait that pack_here stands behind.
__device__ __forceinline__ std::uint16_t cvt_rn_e4m3x2(float low, float high) {
  std::uint16_t r;
  asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

/// Two halves of a register, put together here and not before: the product before may read the register.
__device__ __forceinline__ std::uint32_t pack_here(std::uint16_t low, std::uint16_t high) {
  std::uint32_t r;
  asm volatile("mov.b32 %0, {%1, %2};" : "=r"(r) : "h"(low), "h"(high) : "memory");
  return r;
}

/// 2^x in one instruction, off by up to 2 ulp; denormals are zero (PTX ISA 'ex2').
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x) in one instruction: off by 2^-22 at most for x between 1/2 and 2, else by 2^-22 of the result;
/// -infinity for 0 (PTX ISA 'lg2').
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The hyperbolic tangent in one instruction, off by 2^-11 of the result at most (PTX ISA 'tanh', sm_75 or
/// later).
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Subtracts one, atomically for all blocks; 0, and what is more than `limit`, becomes `limit`. Returns
/// the old value (CUDA C++ Programming Guide, 'atomicDec()').
__device__ __forceinline__ unsigned atomic_dec(unsigned &counter, unsigned limit) {
  return atomicDec(&counter, limit);
}

/// Reads memory at each call, never an older copy in a register (PTX ISA 'ld', .relaxed).
__device__ __forceinline__ unsigned atomic_read(unsigned &counter) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(&counter) : "memory");
  return value;
}

/// Waits until a number in global memory has a value, which another block gives it. What the thread does next comes
/// after all that the thread had done, or knew of, that gave it by red_release_add (PTX ISA 'ld', .acquire.gpu; 'Memory
/// Consistency Model', 'Release and Acquire Patterns').
__device__ __forceinline__ void wait_until(unsigned &number, unsigned value) {
  unsigned now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&number) : "memory");
  while (now != value);
}

/// Waits until a number in global memory has at least a value, and is else the same.
__device__ __forceinline__ void wait_until_at_least(unsigned &number, unsigned value) {
  unsigned now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&number) : "memory");
  while (now < value);
}

/// Adds to a number in global memory, atomically for all blocks, after all that the thread has done, or knows of
/// (PTX ISA 'red', .release.gpu.global.add.u32).
__device__ __forceinline__ void red_release_add(unsigned &number, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(&number), "r"(x) : "memory");
}

/// Adds to a number in global memory, atomically for all blocks, and returns nothing: the thread does not wait.
/// Blocks add in the order in which they come, so the rounding of the sum differs from run to run. Subnormal
/// numbers are 0 (PTX ISA 'red', .relaxed.gpu.global.add.f32).
__device__ __forceinline__ void red_add(float &sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(&sum), "f"(x) : "memory");
}

/// The same for 4 numbers that follow each other, from a multiple of 16 bytes on (.v4.f32, sm_90).
__device__ __forceinline__ void red_add(float &first, const Vector<float, 4> &x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(&first), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

/// Lets a kernel that is launched beside this one begin, once all blocks have said so or ended (PTX ISA
/// 'griddepcontrol', .launch_dependents).
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Waits until the kernel beside which this one was launched has ended, and sees what it wrote (.wait).
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

#else

#include "common/emulator/ptx.h"

#endif

// The type's own conversion, where the type is a template's parameter.

/// Two floats, rounded to T, in one register: `low` in its lower half.
template <class T>
__device__ __forceinline__ std::uint32_t cvt_rn_x2(float low, float high) {
  if constexpr (std::is_same_v<T, bf16>)
    return cvt_rn_bf16x2(low, high);
  else
    return cvt_rn_f16x2(low, high);
}

/// A float, rounded to T.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, bf16>)
    return __float2bfloat16(x);
  else
    return __float2half(x);
}

/// The value of an element, exactly.
template <class T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (std::is_same_v<T, bf16>)
    return __bfloat162float(x);
  else
    return __half2float(x);
}

/// The two elements of a register, the lower half first.
template <class T>
__device__ __forceinline__ Vector<T, 2> unpack_x2(std::uint32_t pair) {
  return __builtin_bit_cast(Vector<T, 2>, pair);
}
