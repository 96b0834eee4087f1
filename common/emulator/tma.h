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

inline void tma_prefetch_map(const TensorMap &) {}

namespace emulator {

/// What the engine is asked to copy.
template <class T, int Rows, int d>
TmaTransfer transfer(TmaTile<Rows, d, T> &tile, const TensorMap &map, int row, int head,
                     int batch) {
  return {map.tensor, row, 0,        head, batch, reinterpret_cast<std::byte *>(&tile),
          Rows,       d,   sizeof(T)};
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
