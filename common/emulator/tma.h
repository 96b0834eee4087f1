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
  SequenceMap map{
      tensor_map<T>(data, steps, packed ? 1 : batch, heads, rows, d, tile_rows, 1).tensor, packed};
  map.tensor.clips_columns = true;
  return map;
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

/// Throws unless a part of a tile of `rows` x `d`, as large as the map's box, lies in the tile and begins where
/// the copy engine may begin: slabs are `width` columns wide.
[[gnu::noinline]] inline void check_part(const Tensor &tensor, int part_row, int col, int rows,
                                         int d, int width, Where where) {
  const auto refuse = [&](const std::string &what) {
    fail({Fault::kDescriptor, "TMA load: a part of " + std::to_string(tensor.tile_rows) +
                                  " rows and " + std::to_string(tensor.tile_d) +
                                  " columns, the map's box, at row " + std::to_string(part_row) +
                                  " and column " + std::to_string(col) + " of a tile of " +
                                  std::to_string(rows) + " x " + std::to_string(d) + what},
         where);
  };
  if (part_row < 0 || part_row + tensor.tile_rows > rows || col < 0 || col + tensor.tile_d > d)
    refuse(": it does not lie in the tile");
  if (part_row % 8 || col % width) refuse(": it begins at a multiple of 8 rows, and at a slab");
  if (tensor.tile_d > width && tensor.tile_rows != rows)
    refuse(
        ": a box of several slabs has all of the tile's rows, for it leaves no gap between them");
}

/// Throws unless a map's box of a sequence's rows is one that the engine may copy: the sequence is in the tensor,
/// and the box has a row of it (chapter 45 says what an H200 made of a box that has none).
[[gnu::noinline]] inline void check_sequence(const Tensor &tensor, const SequenceRows &rows,
                                             int row, int head, int batch, Where where) {
  const auto refuse = [&](const std::string &what) {
    fail({Fault::kBounds, "TMA: " + what}, where);
  };
  if (rows.first < 0 || rows.count < 0 || rows.count > tensor.rows - rows.first)
    refuse("a sequence of " + std::to_string(rows.count) + " rows from " +
           std::to_string(rows.first) + " on, of a tensor that has " + std::to_string(tensor.rows));
  if (head < 0 || head >= tensor.heads || batch < 0 || batch >= tensor.batch)
    refuse("head " + std::to_string(head) + " of batch element " + std::to_string(batch) +
           ", of a tensor of " + std::to_string(tensor.batch) + " x " +
           std::to_string(tensor.heads) + " heads");
  if (row >= rows.count || row + tensor.tile_rows <= 0)
    refuse("a box of " + std::to_string(tensor.tile_rows) + " rows from row " +
           std::to_string(row) + " on has no row of its sequence, which has " +
           std::to_string(rows.count));
}

/// One slab of a box of a sequence's rows, to `box_rows` rows of the tile from `to_row` on. Rows of the box that
/// are not in the sequence are not in the tensor of the copy.
template <class T, int Rows, int d>
TmaTransfer slab_transfer(TmaTile<Rows, d, T> &tile, int to_row, int box_rows, int col,
                          const SequenceMap &map, const SequenceRows &rows, int row, int head,
                          int sequence, const Where &where) {
  constexpr int slab = Slabs<Rows, d, T>::width;
  const int batch = map.packed ? 0 : sequence;
  check_sequence(map.tensor, rows, row, head, batch, where);
  Tensor tensor = map.tensor;
  tensor.data += rows.first * tensor.row_stride;
  tensor.rows = rows.count;
  std::byte *const part = reinterpret_cast<std::byte *>(&tile) + (col / slab * Rows + to_row) * 128;
  return {tensor, row, col, head, batch, part, box_rows, slab, sizeof(T)};
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
void tma_load_rows(TmaTile<Rows, d, T> &tile, int to_row, const SequenceMap &map,
                   const SequenceRows &rows, int row, int head, int sequence, Mbarrier &landed,
                   Where where = Where::current()) {
  constexpr int slab = Slabs<Rows, d, T>::width;
  const int box_rows = map.tensor.tile_rows;
  for (int col = 0; col < d; col += slab) {
    emulator::check_part(map.tensor, to_row, col, Rows, d, slab, where);
    emulator::tma_load(
        emulator::slab_transfer(tile, to_row, box_rows, col, map, rows, row, head, sequence, where),
        &landed, where);
  }
}

template <class T, int Rows, int d>
void tma_load(TmaTile<Rows, d, T> &tile, const SequenceMap &map, const SequenceRows &rows, int row,
              int head, int sequence, Mbarrier &landed, Where where = Where::current()) {
  for (int col = 0; col < d; col += Slabs<Rows, d, T>::width)
    emulator::tma_load(
        emulator::slab_transfer(tile, 0, Rows, col, map, rows, row, head, sequence, where), &landed,
        where);
}

template <int columns, class T, int Rows, int d>
void tma_store(const SequenceMap &map, const SequenceRows &rows, int row, int head, int sequence,
               TmaTile<Rows, d, T> &tile, Where where = Where::current()) {
  for (int col = 0; col < columns; col += Slabs<Rows, d, T>::width)
    emulator::tma_store(
        emulator::slab_transfer(tile, 0, Rows, col, map, rows, row, head, sequence, where), where);
}

template <class T, int Rows, int d>
void tma_store(const SequenceMap &map, const SequenceRows &rows, int row, int head, int sequence,
               TmaTile<Rows, d, T> &tile, Where where = Where::current()) {
  tma_store<d>(map, rows, row, head, sequence, tile, where);
}

template <int N>
void bulk_red_add(const Reference<float> &to, const Reference<float> &from,
                  Where where = Where::current()) {
  static_assert(N * sizeof(float) % 16 == 0, "a multiple of 16 bytes");
  emulator::bulk_red_add(to.checked(N), from.checked(N), N, where);
}

inline void tma_store_commit() {
  emulator::tma_store_commit();
}

template <int N>
void tma_store_wait_read(Where where = Where::current()) {
  static_assert(N >= 0);
  emulator::tma_store_wait_read(N, where);
}

template <int N>
void tma_store_wait(Where where = Where::current()) {
  static_assert(N >= 0);
  emulator::tma_store_wait(N, where);
}

inline void fence_proxy_async(Where where = Where::current()) {
  emulator::proxy_fence(where);
}

inline void fence_proxy_async_global(Where where = Where::current()) {
  emulator::global_proxy_fence(where);
}
