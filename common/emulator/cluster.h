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
