// SPDX-License-Identifier: MIT
// wgmma, Hopper's matrix product: the four warps of a warpgroup multiply 64 rows at once, with operands
// that the tensor cores read from shared memory themselves. The warps continue meanwhile.
#pragma once

#include "common/kernel/tma.h"

#ifdef __CUDACC__

/// A warpgroup's 64 x N accumulators: element i of a lane is at row (warp % 4) * 16 + lane / 4 + 8
/// (i / 2 % 2), column i / 4 * 8 + lane % 4 * 2 + i % 2 (PTX ISA, 'Register Fragments for
/// wgmma.m64nNk16'). No thread may touch them between a wgmma and the wait for its group.
template <int N>
class Accumulator {
 public:
  static constexpr int size = N / 2;  // of a thread
  __device__ __forceinline__ float &operator()(int i, Where = Where::current()) { return x_[i]; }

 private:
  float x_[size];
};

struct KMajor {
  std::uint64_t descriptor;
};
struct MNMajor {
  std::uint64_t descriptor;
};

namespace ptx {
/// The emulator's operands know their tile, too.
template <class Operand, class Tile>
__device__ __forceinline__ Operand operand(std::uint64_t descriptor, const Tile &, int, int) {
  return {descriptor};
}
}  // namespace ptx

#else

#include "common/emulator/wgmma.h"

#endif

// A descriptor tells the tensor cores where an operand in shared memory begins, how far apart its
// swizzle atoms (8 rows of 128 bytes) are, and how they are swizzled (PTX ISA, 'Matrix
// descriptor'). In a K-major operand the sum runs along the tile's rows, as in Q and K. In an
// MN-major operand, as V, it runs down the columns; only types of 16 bits can be MN-major. Both A and B
// may be either.

namespace ptx {
/// Returns the descriptor of the operand that begins `offset` bytes into the tile. Its fields count
/// units of 16 bytes; mode 1 is the 128-byte swizzle.
__device__ __forceinline__ std::uint64_t descriptor(const void *tile, int offset, int leading,
                                                    int stride) {
  return (std::uint64_t{1} << 62 | std::uint64_t(stride / 16) << 32 |
          std::uint64_t(leading / 16) << 16 | (shared_address(tile) & 0x3ffff) / 16) +
         offset / 16;
}
}  // namespace ptx

/// Describes the part of a tile that begins at this row, a multiple of 8, and column, a multiple of
/// 32 bytes.
template <class T, int Rows, int d>
__device__ __forceinline__ KMajor k_major(const TmaTile<Rows, d, T> &tile, int row, int col) {
  using Layout = Slabs<Rows, d, T>;
  const int offset =
      col / Layout::width * (Rows * 128) + row * 128 + col % Layout::width * sizeof(T);
  return ptx::operand<KMajor>(ptx::descriptor(&tile, offset, 16, 8 * 128), tile, row, col);
}

/// Describes an MN-major part: the sum runs over the rows. The row is a multiple of 8, the column
/// of a slab's 64.
template <class T, int Rows, int d>
__device__ __forceinline__ MNMajor mn_major(const TmaTile<Rows, d, T> &tile, int row, int col) {
  const int offset = col / Slabs<Rows, d, T>::width * (Rows * 128) + row * 128;
  return ptx::operand<MNMajor>(ptx::descriptor(&tile, offset, Rows * 128, 8 * 128), tile, row, col);
}

#ifdef __CUDACC__

/// Must come before a warpgroup's first wgmma, and again if its registers (accumulators or A) were
/// read or written since the last one ('wgmma.fence').
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// Makes a group of the products that the warpgroup has started since its last group
/// ('wgmma.commit_group').
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most the N youngest groups are incomplete ('wgmma.wait_group'). The accumulators
/// that are named may be touched after it.
template <int N, class... Accumulators>
__device__ __forceinline__ void wgmma_wait(Accumulators &...done) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  // nvcc does not know of the wait. This asm pretends to write the accumulators here.
  const auto written_here = [](auto &accumulator) {
#pragma unroll
    for (int i = 0; i < accumulator.size; i++) asm volatile("" : "+f"(accumulator(i))::"memory");
  };
  (written_here(done), ...);
}

namespace ptx {

// The accumulators' names in the text of the instruction, and the operands that they stand for: N /
// 2 of each, by tens and by eights.
#define TEN(t)                                                                                     \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t \
  "9"
#define UP_TO_32 TEN() ", " TEN(1) ", " TEN(2) ", %30, %31"
#define UP_TO_40 TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3)
#define UP_TO_48 \
  TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", %40, %41, %42, %43, %44, %45, %46, %47"
#define UP_TO_64 \
  TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", " TEN(5) ", %60, %61, %62, %63"
#define UP_TO_80 \
  TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", " TEN(5) ", " TEN(6) ", " TEN(7)
#define UP_TO_56 \
  TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", %50, %51, %52, %53, %54, %55"
#define UP_TO_88 UP_TO_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define UP_TO_96 UP_TO_80 ", " TEN(8) ", %90, %91, %92, %93, %94, %95"
#define UP_TO_112 UP_TO_80 ", " TEN(8) ", " TEN(9) ", " TEN(10) ", %110, %111"
#define UP_TO_128                                         \
  UP_TO_80 ", " TEN(8) ", " TEN(9) ", " TEN(10) ", " TEN( \
      11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT(i)                                                                              \
  "+f"(d(i)), "+f"(d(i + 1)), "+f"(d(i + 2)), "+f"(d(i + 3)), "+f"(d(i + 4)), "+f"(d(i + 5)), \
      "+f"(d(i + 6)), "+f"(d(i + 7))
#define FIRST_32 EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
#define FIRST_40 FIRST_32, EIGHT(32)
#define FIRST_48 FIRST_40, EIGHT(40)
#define FIRST_64 FIRST_48, EIGHT(48), EIGHT(56)
#define FIRST_56 FIRST_48, EIGHT(48)
#define FIRST_80 FIRST_64, EIGHT(64), EIGHT(72)
#define FIRST_88 FIRST_80, EIGHT(80)
#define FIRST_96 FIRST_88, EIGHT(88)
#define FIRST_112 FIRST_88, EIGHT(88), EIGHT(96), EIGHT(104)
#define FIRST_128 FIRST_112, EIGHT(112), EIGHT(120)

// p: whether to add to what the accumulators hold. The two ones: A and B are not negated.
#define WGMMA(shape, names, accumulate, operands, ...)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate                             \
               ", 0;\nwgmma.mma_async.sync.aligned." shape " {" names "}, " operands ";\n}" \
               : __VA_ARGS__)

// With A in shared memory, then in registers. n: N; r: N / 2; then the numbers from r on. transpose_A and _B:
// 1 for an MN-major operand, else 0.
#define WGMMA_OF(n, r, r1, r2, r3, r4, r5)                                                        \
  template <class T, int transpose_A, int transpose_B>                                            \
  __device__ __forceinline__ void wgmma(Accumulator<n> &d, std::uint64_t a, std::uint64_t b,      \
                                        int add) {                                                \
    if constexpr (std::is_same_v<T, bf16>)                                                        \
      WGMMA("m64n" #n "k16.f32.bf16.bf16", UP_TO_##r, r2,                                         \
            "%" #r ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4, FIRST_##r                              \
            : "l"(a), "l"(b), "r"(add), "n"(transpose_A), "n"(transpose_B));                      \
    else if constexpr (std::is_same_v<T, e4m3>)                                                   \
      WGMMA("m64n" #n "k32.f32.e4m3.e4m3", UP_TO_##r, r2, "%" #r ", %" #r1 ", p, 1, 1", FIRST_##r \
            : "l"(a), "l"(b), "r"(add));                                                          \
    else                                                                                          \
      WGMMA("m64n" #n "k16.f32.f16.f16", UP_TO_##r, r2,                                           \
            "%" #r ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4, FIRST_##r                              \
            : "l"(a), "l"(b), "r"(add), "n"(transpose_A), "n"(transpose_B));                      \
  }                                                                                               \
  template <class T>                                                                              \
  __device__ __forceinline__ void wgmma(Accumulator<n> &d, const FragmentA &a, std::uint64_t b,   \
                                        int add) {                                                \
    if constexpr (std::is_same_v<T, bf16>)                                                        \
      WGMMA("m64n" #n "k16.f32.bf16.bf16", UP_TO_##r, r5,                                         \
            "{%" #r ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", p, 1, 1, 1", FIRST_##r            \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                      \
    else if constexpr (std::is_same_v<T, e4m3>)                                                   \
      WGMMA("m64n" #n "k32.f32.e4m3.e4m3", UP_TO_##r, r5,                                         \
            "{%" #r ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", p, 1, 1", FIRST_##r               \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                      \
    else                                                                                          \
      WGMMA("m64n" #n "k16.f32.f16.f16", UP_TO_##r, r5,                                           \
            "{%" #r ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", p, 1, 1, 1", FIRST_##r            \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                      \
  }

// Head dims and tiles of 64 and 128, step 66's tile of 80, step 56's of 80 to 256, and the tiles of variants of
// steps 33 and 41.
WGMMA_OF(64, 32, 33, 34, 35, 36, 37)
WGMMA_OF(80, 40, 41, 42, 43, 44, 45)
WGMMA_OF(96, 48, 49, 50, 51, 52, 53)
WGMMA_OF(112, 56, 57, 58, 59, 60, 61)
WGMMA_OF(128, 64, 65, 66, 67, 68, 69)
WGMMA_OF(160, 80, 81, 82, 83, 84, 85)
WGMMA_OF(176, 88, 89, 90, 91, 92, 93)
WGMMA_OF(192, 96, 97, 98, 99, 100, 101)
WGMMA_OF(224, 112, 113, 114, 115, 116, 117)
WGMMA_OF(256, 128, 129, 130, 131, 132, 133)

#undef TEN
#undef UP_TO_32
#undef UP_TO_40
#undef UP_TO_48
#undef UP_TO_56
#undef UP_TO_64
#undef UP_TO_80
#undef UP_TO_88
#undef UP_TO_96
#undef UP_TO_112
#undef UP_TO_128
#undef EIGHT
#undef FIRST_32
#undef FIRST_40
#undef FIRST_48
#undef FIRST_56
#undef FIRST_64
#undef FIRST_80
#undef FIRST_88
#undef FIRST_96
#undef FIRST_112
#undef FIRST_128
#undef WGMMA
#undef WGMMA_OF

}  // namespace ptx

/// Starts D = A B^T (+ D), for a warpgroup: 64 x N of fp32, A 64 rows and B N rows of 32 bytes: 16
/// elements of fp16 or bf16, or 32 of e4m3, both in shared memory (PTX ISA 'wgmma.mma_async',
/// m64nNk16 and m64nNk32).
template <class T = half, int N>
__device__ __forceinline__ void wgmma(Accumulator<N> &D, KMajor A, KMajor B, bool add) {
  ptx::wgmma<T, 0, 0>(D, A.descriptor, B.descriptor, add);
}

/// Starts D = A^T B^T (+ D): A 16 rows of 64 elements, B N rows of 16, both in shared memory ('wgmma.mma_async',
/// imm-trans-a).
template <class T = half, int N>
__device__ __forceinline__ void wgmma(Accumulator<N> &D, MNMajor A, KMajor B, bool add) {
  static_assert(!std::is_same_v<T, e4m3>,
                "8-bit operands are K-major: the sum runs along their rows");
  ptx::wgmma<T, 1, 0>(D, A.descriptor, B.descriptor, add);
}

/// Starts D = A B (+ D): A, 64 x 16, in registers, each warp's 16 rows as mma has them; B 16 rows
/// of N elements in shared memory. A stays as it is until the wait.
template <class T = half, int N>
__device__ __forceinline__ void wgmma(Accumulator<N> &D, const FragmentA &A, MNMajor B, bool add) {
  static_assert(!std::is_same_v<T, e4m3>,
                "8-bit operands are K-major: the sum runs along their rows");
  ptx::wgmma<T>(D, A, B.descriptor, add);
}

/// Starts D = A B^T (+ D) for e4m3: A, 64 x 32, in registers, B N rows of 32 elements in shared
/// memory. With g = lane / 4 and t = lane % 4 the registers hold, of a warp's 16 rows, rows g, g +
/// 8, g, g + 8; columns 4t to 4t + 3, the last two 16 further on ('Register Fragments for
/// wgmma.m64nNk32').
template <class T, int N>
__device__ __forceinline__ void wgmma(Accumulator<N> &D, const FragmentA &A, KMajor B, bool add) {
  static_assert(std::is_same_v<T, e4m3>);
  ptx::wgmma<T>(D, A, B.descriptor, add);
}

#endif
