// SPDX-License-Identifier: MIT
// The copies of common/kernel/tma.h, which includes this, on the emulator.
#pragma once

#include "common/emulator/runtime.h"

#define __grid_constant__

struct TensorMap {
  emulator::Tensor tensor;
};

/// Takes what cuTensorMapEncodeTiled takes.
template <class T>
TensorMap tensor_map(const void *data, const Strides &strides, int batch, int heads, int rows,
                     int d, int tile_rows, int tile_slabs = 0) {
  const int size = sizeof(T);
  const bool aligned = reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
                       (strides.row | strides.head | strides.batch) * size % 16 == 0;
  if (!aligned || tile_rows > 256)
    throw ShapeError(
        "TMA cannot read this tensor: data and strides must be multiples of 16 bytes, tiles "
        "at most 256 rows");
  return {{const_cast<std::byte *>(static_cast<const std::byte *>(data)), strides.row * size,
           strides.head * size, strides.batch * size, batch, heads, rows, d, tile_rows,
           tile_slabs ? tile_slabs * 128 / size : d, size}};
}

struct SequenceMap {
  emulator::Tensor tensor;  // of which a copy takes a slab
  bool packed;
};

template <class T>
SequenceMap sequence_map(const void *data, const Strides &strides, int batch, int heads, int rows,
                         bool packed, int d, int tile_rows) {
  const Strides steps{packed ? strides.row : strides.batch, strides.head, strides.row};
  return {tensor_map<T>(data, steps, packed ? 1 : batch, heads, rows, d, tile_rows, 1).tensor,
          packed};
}

inline void tma_prefetch_map(const TensorMap &) {}

namespace emulator {

/// What the engine is asked to copy.
template <class T, int Rows, int d>
TmaTransfer transfer(TmaTile<Rows, d, T> &tile, const TensorMap &map, int row, int head,
                     int batch) {
  return {map.tensor, row, 0,        head, batch, reinterpret_cast<std::byte *>(&tile),
          Rows,       d,   sizeof(T)};
}

/// One slab of a sequence's tile, at this column. A sequence that is not in the tensor is an error; rows of the
/// tile that are not in the sequence are not in the tensor of the copy.
template <class T, int Rows, int d>
TmaTransfer slab_transfer(TmaTile<Rows, d, T> &tile, int col, const SequenceMap &map,
                          const SequenceRows &rows, int row, int head, int sequence,
                          const Where &where) {
  if (rows.first < 0 || rows.count < 0 || rows.count > map.tensor.rows - rows.first)
    fail({Fault::kBounds, "TMA: a sequence of " + std::to_string(rows.count) + " rows from " +
                              std::to_string(rows.first) + " on, of a tensor that has " +
                              std::to_string(map.tensor.rows)},
         where);
  constexpr int slab = Slabs<Rows, d, T>::width;
  Tensor tensor = map.tensor;
  tensor.data += rows.first * tensor.row_stride;
  tensor.rows = rows.count;
  std::byte *const part = reinterpret_cast<std::byte *>(&tile) + col / slab * Rows * 128;
  return {tensor, row, col, head, map.packed ? 0 : sequence, part, Rows, slab, sizeof(T)};
}

}  // namespace emulator

template <class T, int Rows, int d>
void tma_load(TmaTile<Rows, d, T> &tile, const TensorMap &map, int row, int head, int batch,
              Mbarrier &landed, Where where = Where::current()) {
  emulator::tma_load(emulator::transfer(tile, map, row, head, batch), &landed, where);
}

template <int N, class T>
void bulk_load(const Reference<T> &to, const Reference<const T> &from, Mbarrier &landed,
               Where where = Where::current()) {
  static_assert(N * sizeof(T) % 16 == 0, "a multiple of 16 bytes");
  emulator::bulk_load(to.checked(N), from.checked(N), N * sizeof(T), &landed, where);
}

template <class T, int Rows, int d>
void tma_store(const TensorMap &map, int row, int head, int batch, TmaTile<Rows, d, T> &tile,
               Where where = Where::current()) {
  emulator::tma_store(emulator::transfer(tile, map, row, head, batch), where);
}

template <class T, int Rows, int d>
void tma_load(TmaTile<Rows, d, T> &tile, const SequenceMap &map, const SequenceRows &rows, int row,
              int head, int sequence, Mbarrier &landed, Where where = Where::current()) {
  for (int col = 0; col < d; col += Slabs<Rows, d, T>::width)
    emulator::tma_load(emulator::slab_transfer(tile, col, map, rows, row, head, sequence, where),
                       &landed, where);
}

template <class T, int Rows, int d>
void tma_store(const SequenceMap &map, const SequenceRows &rows, int row, int head, int sequence,
               TmaTile<Rows, d, T> &tile, Where where = Where::current()) {
  for (int col = 0; col < d; col += Slabs<Rows, d, T>::width)
    emulator::tma_store(emulator::slab_transfer(tile, col, map, rows, row, head, sequence, where),
                        where);
}

inline void tma_store_commit() {
  emulator::tma_store_commit();
}

template <int N>
void tma_store_wait_read(Where where = Where::current()) {
  static_assert(N >= 0);
  emulator::tma_store_wait_read(N, where);
}

inline void fence_proxy_async(Where where = Where::current()) {
  emulator::proxy_fence(where);
}
