// SPDX-License-Identifier: MIT
// Clusters: blocks on neighbouring multiprocessors that reach each other's shared memory (PTX ISA, 'Cooperative
// Thread Arrays': thread block clusters).
#pragma once

#include "common/kernel/tma.h"

#ifdef __CUDACC__

/// The block's number in its cluster ('%cluster_ctarank').
__device__ __forceinline__ int cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// Waits until all threads of all blocks of the cluster are here ('barrier.cluster').
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// Arrives at the barrier that lies at this place in the shared memory of block `rank` of the cluster
/// ('mapa', 'mbarrier.arrive'). It orders what tensor cores and copy engines have done and the thread has
/// waited for, but not the thread's own loads and stores. (With .release.cluster it would order these, too,
/// and nvcc makes that a MEMBAR.ALL.GPU.)
__device__ __forceinline__ void mbarrier_arrive_at(Mbarrier &barrier, int rank) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(ptx::shared_address(&barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

/// Starts to copy a part of a tile, a box of the map, to the same place in the shared memory of each
/// block that `blocks` names, bit by bit. In each the bytes count as arrived at the barrier of that block.
/// The part begins at `part_row`, a multiple of 8, and `col`, a slab's first, of the tile; and at `row` of
/// the tensor ('cp.async.bulk.tensor', .multicast::cluster).
template <class T, int Rows, int d>
__device__ __forceinline__ void tma_load_multicast(TmaTile<Rows, d, T> &tile, int part_row, int col,
                                                   const TensorMap &map, int row, int head,
                                                   int batch, Mbarrier &landed, int blocks) {
  using Layout = Slabs<Rows, d, T>;
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(
          ptx::shared_address(&tile) + Layout::offset(part_row, col) * int(sizeof(T))),
      "l"(&map), "r"(0), "r"(row), "r"(col / Layout::width), "r"(head), "r"(batch),
      "r"(ptx::shared_address(&landed)), "h"(static_cast<unsigned short>(blocks))
      : "memory");
}

#else

#include "common/emulator/cluster.h"

#endif
