// SPDX-License-Identifier: MIT
// Where the threads of a warp, a warpgroup, a block or a cluster meet: instructions that they execute together,
// and __syncthreads and its like.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/events.h"
#include "common/emulator/requests.h"
#include "common/emulator/runtime.h"
#include "common/emulator/scheduler.h"

namespace emulator {

class Meetings : public Waits {
 public:
  Meetings(Scheduler &scheduler, Clocks &clocks, Requests &requests, Events &events);

  void begin_block();

  /// See runtime.h.
  void collective(const Collective &what, std::uint32_t members, const Where &where, void *lane);
  void warpgroup_collective(const Collective &what, const Where &where, void *lane);
  void block_barrier(const Where &where);
  void cluster_barrier(const Where &where);

  /// The running thread is done. Those that waited for it alone need not wait any longer.
  void exit_thread();

  /// Returns the mma and wgmma of the block with this rank in the cluster, where a profile is wanted.
  std::uint64_t mma(unsigned rank) const { return blocks_[rank].mma; }

  std::string blame(unsigned thread) const override;

 private:
  struct Lane {  // what a thread in a collective brings
    const Collective *collective;
    std::uint32_t members;
    void *operands;
  };
  struct Warp {                      // lanes
    std::uint32_t lanes = 0;         // all that exist: the last warp may have fewer than 32
    std::uint32_t live = 0;          // those that have not exited
    std::uint32_t waiting = 0;       // those in a collective,
    std::uint32_t in_warpgroup = 0;  // in one of the warpgroup,
    std::uint32_t in_block = 0;      // and at a barrier of the block,
    std::uint32_t in_cluster = 0;    // or of the cluster
  };
  struct Cta {          // a block
    unsigned live = 0;  // threads that have not exited
    unsigned in_barrier = 0;
    std::uint64_t mma = 0;
  };

  void trace_barrier(const std::vector<unsigned> &threads);
  void trace_product(unsigned thread);
  void meet(const Collective &what, unsigned warp, std::uint32_t members);
  void check_same(const Collective &what, unsigned warp, std::uint32_t lanes);
  void end_block_barrier();
  void end_cluster_barrier();
  void end_barrier(std::uint32_t Warp::*in, unsigned first, unsigned threads, Counter counter);
  void count_mma(Counter counter);
  void count_each_place(unsigned warp, std::uint32_t lanes, Counter counter);
  std::uint32_t lane_bit() const { return 1u << scheduler_.running() % 32; }
  Warp &warp() { return warps_[scheduler_.running() / 32]; }

  Scheduler &scheduler_;
  Clocks &clocks_;
  Requests &requests_;
  Events &events_;
  std::vector<Lane> lanes_;  // by thread
  std::vector<Warp> warps_;
  std::vector<Cta> blocks_;  // by rank
  unsigned live_ = 0;        // threads that have not exited
  unsigned in_cluster_barrier_ = 0;
};

}  // namespace emulator
