// SPDX-License-Identifier: MIT
// The clusters of common/kernel/cluster.h, which includes this, on the emulator.
#pragma once

#include "common/emulator/tma.h"

inline int cluster_rank() {
  return static_cast<int>(emulator::cluster_rank());
}

[[gnu::noinline]] inline void cluster_sync(Where where = Where::current()) {
  emulator::cluster_barrier(where);
}

inline void mbarrier_arrive_at(Mbarrier &barrier, int rank, Where where = Where::current()) {
  emulator::mbarrier_arrive_at(&barrier, rank, where);
}

namespace emulator {

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

}  // namespace emulator

/// The part of a tile is as large as the map's box.
template <class T, int Rows, int d>
void tma_load_multicast(TmaTile<Rows, d, T> &tile, int part_row, int col, const TensorMap &map,
                        int row, int head, int batch, Mbarrier &landed, int blocks,
                        Where where = Where::current()) {
  using Layout = Slabs<Rows, d, T>;
  const emulator::Tensor &tensor = map.tensor;
  emulator::check_part(tensor, part_row, col, Rows, d, Layout::width, where);
  emulator::TmaTransfer part = emulator::transfer(tile, map, row, head, batch);
  part.col = col;
  part.tile += Layout::offset(part_row, col) * static_cast<int>(sizeof(T));
  part.tile_rows = tensor.tile_rows;
  part.d = tensor.tile_d;
  emulator::tma_load_multicast(part, &landed, static_cast<unsigned>(blocks), where);
}
