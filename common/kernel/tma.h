// SPDX-License-Identifier: MIT
// The tensor memory accelerator, TMA: an engine that copies a tile between global and shared memory when
// one thread requests it, and lays it out as the tensor cores read it.
#pragma once

#include "common/kernel/kernel.h"
#include "common/kernel/mbarrier.h"

/// The layout of a tile for TMA and wgmma: the columns in slabs of 128 bytes, each slab row by row.
/// The 16-byte chunks of a row are permuted by the last 3 bits of its number: the 128-byte swizzle
/// (PTX ISA, 'Tensor swizzling modes'). It works on addresses, so tiles begin at a multiple of 1024
/// bytes.
template <int Rows, int d, class T>
struct Slabs {
  static constexpr int width = 128 / sizeof(T), chunk = 16 / sizeof(T);
  static constexpr int size = Rows * d;
  static_assert(Rows % 8 == 0 && d % width == 0, "whole atoms of 8 rows of 128 bytes");
  __device__ static constexpr int offset(int row, int col) {
    return col / width * (Rows * width) + row * width + (col % width ^ row % 8 * chunk);
  }
};

template <int Rows, int d, class T = half>
struct alignas(1024) TmaTile : Tile<T, Rows, d, Slabs<Rows, d, T>> {};

/// The rows of a sequence in a tensor, or in its batch element: `count` of them from `first` on.
struct SequenceRows {
  int first, count;
};

#ifdef __CUDACC__

#include <cuda.h>

/// Describes a tensor [batch, heads, rows, d] to the engine, and the tiles that kernels request
/// from it: `tile_rows` rows of one head. It is a kernel's parameter, `const __grid_constant__`.
struct TensorMap {
  CUtensorMap map;
};

namespace ptx {

/// The one function behind tensor maps (CUDA driver API, 'cuTensorMapEncodeTiled'): 5 dimensions, their
/// distances in bytes but for the first, and the box that a copy takes. Throws ShapeError if the data or a
/// distance is not a multiple of 16 bytes.
template <class T>
TensorMap encode(std::uintptr_t data, const cuuint64_t (&sizes)[5], const cuuint64_t (&steps)[4],
                 const cuuint32_t (&box)[5]) {
  static const auto encode_tiled = [] {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const cuuint32_t every[] = {1, 1, 1, 1, 1};
  TensorMap result;
  const CUresult error =
      encode_tiled(&result.map,
                   std::is_same_v<T, half>   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                   : std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                             : CU_TENSOR_MAP_DATA_TYPE_UINT8,  // e4m3
                   5, reinterpret_cast<void *>(data), sizes, steps, box, every,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS)
    throw ShapeError(
        "TMA cannot read this tensor: data and strides must be multiples of 16 "
        "bytes, tiles at most 256 rows (cuTensorMapEncodeTiled: error " +
        std::to_string(error) + ")");
  return result;
}

}  // namespace ptx

/// Makes a tensor map of 5 dimensions. The first is the columns of a slab, the third is the slabs. A tile has
/// all slabs, or `tile_slabs` of them.
template <class T>
TensorMap tensor_map(const void *data, const Strides &strides, int batch, int heads, int rows,
                     int d, int tile_rows, int tile_slabs = 0) {
  const auto u64 = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
  const auto u32 = [](int n) { return static_cast<cuuint32_t>(n); };
  const int slab = 128 / sizeof(T);
  return ptx::encode<T>(reinterpret_cast<std::uintptr_t>(data),
                        {u64(slab), u64(rows), u64(d / slab), u64(heads), u64(batch)},
                        {u64(strides.row * sizeof(T)), 128, u64(strides.head * sizeof(T)),
                         u64(strides.batch * sizeof(T))},
                        {u32(slab), u32(tile_rows), u32(tile_slabs ? tile_slabs : d / slab), 1, 1});
}

/// Describes a tensor whose tiles end where a sequence ends (step 45). `rows`: those of the tensor, of one
/// batch element or, if the sequences are packed, of all.
struct SequenceMap {
  TensorMap map;
  int rows;
  bool packed;
};

/// Makes the map. Its second dimension is the rows, and its third, as far apart, moves a tile along the rows:
/// row r of a sequence that ends before row `end` of the tensor is (rows - its rows + r, end). So the second
/// dimension ends where the sequence does, and the engine clips a tile there. The two numbers count `rows`
/// rows too many: the data begins so many earlier for the engine. A tile is loaded slab by slab.
template <class T>
SequenceMap sequence_map(const void *data, const Strides &strides, int batch, int heads, int rows,
                         bool packed, int d, int tile_rows) {
  const auto u64 = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
  rows = rows > 0 ? rows : 1;  // a dimension of none is refused
  const std::int64_t row = strides.row * sizeof(T);
  const std::int64_t element = packed ? row : strides.batch * sizeof(T);
  return {ptx::encode<T>(reinterpret_cast<std::uintptr_t>(data) - u64(rows * row),
                         {u64(d), u64(rows), u64(rows) + 1, u64(heads), u64(packed ? 1 : batch)},
                         {u64(row), u64(row), u64(strides.head * sizeof(T)), u64(element)},
                         {128 / sizeof(T), static_cast<cuuint32_t>(tile_rows), 1, 1, 1}),
          rows, packed};
}

/// Loads a map into the cache from which the engine reads it ('prefetch.tensormap').
__device__ __forceinline__ void tma_prefetch_map(const TensorMap &map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Starts the copy of the tile that begins at `row` of a head to shared memory. All its Rows * d
/// elements count as arrived at the barrier; rows beyond the tensor's last are zeros. One thread
/// calls this (PTX ISA 'cp.async.bulk.tensor').
template <class T, int Rows, int d>
__device__ __forceinline__ void tma_load(TmaTile<Rows, d, T> &tile, const TensorMap &map, int row,
                                         int head, int batch, Mbarrier &landed) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(ptx::shared_address(&tile)),
      "l"(&map), "r"(0), "r"(row), "r"(0), "r"(head), "r"(batch), "r"(ptx::shared_address(&landed))
      : "memory");
}

/// Starts the copy of N elements that follow each other, in a multiple of 16 bytes, to shared memory. Both begin
/// at a multiple of 16 bytes. They count as arrived at the barrier. Each thread that calls this copies its own
/// (PTX ISA 'cp.async.bulk', sm_90).
template <int N, class T>
__device__ __forceinline__ void bulk_load(T &to, const T &from, Mbarrier &landed) {
  static_assert(N * sizeof(T) % 16 == 0, "a multiple of 16 bytes");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(ptx::shared_address(&to)),
      "l"(&from), "n"(N * sizeof(T)), "r"(ptx::shared_address(&landed))
      : "memory");
}

/// Starts the copy of a tile from shared memory to the rows of a head from `row` on. It writes no
/// rows beyond the tensor's last. No coordinate may be negative: an H200 ends such a store with an
/// illegal instruction, where a load gives zeros. The engine sees what ordinary stores wrote to the
/// tile if fence_proxy_async came between (PTX ISA 'cp.async.bulk.tensor').
template <class T, int Rows, int d>
__device__ __forceinline__ void tma_store(const TensorMap &map, int row, int head, int batch,
                                          TmaTile<Rows, d, T> &tile) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(0), "r"(row), "r"(0), "r"(head), "r"(batch), "r"(ptx::shared_address(&tile))
      : "memory");
}

/// Starts the copies of a box of the map, slab by slab: to the rows of the tile from `to_row` on, a multiple of 8,
/// from the rows of a sequence from `row` on. At least one of these is the sequence's; those beyond its last are
/// zeros.
template <class T, int Rows, int d>
__device__ __forceinline__ void tma_load_rows(TmaTile<Rows, d, T> &tile, int to_row,
                                              const SequenceMap &map, const SequenceRows &rows,
                                              int row, int head, int sequence, Mbarrier &landed) {
  constexpr int slab = Slabs<Rows, d, T>::width;
#pragma unroll
  for (int col = 0; col < d; col += slab)
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(ptx::shared_address(&tile) +
                                                        (col / slab * Rows + to_row) * 128),
        "l"(&map.map), "r"(col), "r"(map.rows - rows.count + row), "r"(rows.first + rows.count),
        "r"(head), "r"(map.packed ? 0 : sequence), "r"(ptx::shared_address(&landed))
        : "memory");
}

/// The same for a whole tile, which is a box of the map.
template <class T, int Rows, int d>
__device__ __forceinline__ void tma_load(TmaTile<Rows, d, T> &tile, const SequenceMap &map,
                                         const SequenceRows &rows, int row, int head, int sequence,
                                         Mbarrier &landed) {
  tma_load_rows(tile, 0, map, rows, row, head, sequence, landed);
}

/// Starts the copies of a tile's first columns to the rows of a sequence from `row` on, slab by slab. They write
/// neither rows beyond the sequence's last nor columns beyond the tensor's.
template <int columns, class T, int Rows, int d>
__device__ __forceinline__ void tma_store(const SequenceMap &map, const SequenceRows &rows, int row,
                                          int head, int sequence, TmaTile<Rows, d, T> &tile) {
  constexpr int slab = Slabs<Rows, d, T>::width;
#pragma unroll
  for (int col = 0; col < columns; col += slab)
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
        "[%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map.map),
        "r"(col), "r"(map.rows - rows.count + row), "r"(rows.first + rows.count), "r"(head),
        "r"(map.packed ? 0 : sequence), "r"(ptx::shared_address(&tile) + col / slab * Rows * 128)
        : "memory");
}

/// The same for a whole tile.
template <class T, int Rows, int d>
__device__ __forceinline__ void tma_store(const SequenceMap &map, const SequenceRows &rows, int row,
                                          int head, int sequence, TmaTile<Rows, d, T> &tile) {
  tma_store<d>(map, rows, row, head, sequence, tile);
}

/// Starts to add N numbers that follow each other in shared memory to N numbers in global memory, atomically
/// for all blocks: red_add of each, by the copy engine, which reads shared memory as a store does. Both begin
/// at a multiple of 16 bytes (PTX ISA 'cp.reduce.async.bulk', sm_90).
template <int N>
__device__ __forceinline__ void bulk_red_add(float &to, const float &from) {
  static_assert(N * sizeof(float) % 16 == 0, "a multiple of 16 bytes");
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(&to),
      "r"(ptx::shared_address(&from)), "n"(N * sizeof(float))
      : "memory");
}

/// Makes a group of the stores and reductions that the thread has started since its last group
/// ('cp.async.bulk.commit_group').
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until all but the thread's N youngest groups have read their tiles, which may then be
/// written again ('cp.async.bulk.wait_group.read'). The kernel's end waits for the writes to global
/// memory.
template <int N>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/// Waits until all but the thread's N youngest groups are complete: global memory has what they store or add,
/// and this thread sees it. Others of the launch do after a fence and an atomic ('cp.async.bulk.wait_group').
template <int N>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

/// Orders this thread's ordinary loads and stores of shared memory before later accesses by TMA and
/// wgmma, which use another path, the asynchronous proxy. If another thread requests those
/// accesses, a barrier between the two comes after the fence (PTX ISA, 'Async proxy';
/// 'fence.proxy.async').
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Orders this thread's ordinary accesses to global memory, and what they have acquired, before later accesses by TMA
/// ('fence.proxy.async', .global). None is needed the other way round: a thread that has waited for a copy's completion
/// sees it ('Async proxy').
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

#else

#include "common/emulator/tma.h"

#endif
