// SPDX-License-Identifier: MIT
// The mbarriers of a block, by their place in shared memory: who has arrived, which bytes have landed,
// and what the threads and the copies told that did. Who waits for them is the scheduler's (block.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/sites.h"

namespace emulator {

/// An arrival by a thread of another block of the cluster, or a copy of its that has landed.
struct RemoteUse {
  bool copy;
  SiteId site;
  unsigned thread;
  Time time;
};

/// One mbarrier, from its initialisation to the block's end.
struct BarrierState {
  std::size_t offset;  // in shared memory
  const char
      *part;    // of what is named where it is made: "full", or "" if that is the barrier itself
  int index;    // among those made there as this part
  SiteId site;  // of its initialisation,
  unsigned thread;  // who did it,
  Time time;        // when,
  Time fenced = 0;  // and when the same thread made it visible to the copy engine; 0: it has not
  int count;        // arrivals per phase
  int to_come;      // of this phase
  std::int64_t expected = 0, landed = 0;  // bytes of this phase
  std::uint64_t phase = 0;                // those that have ended
  unsigned agent = 0;                     // of the copies that land here; 0: none so far
  Told told;                              // by all who have arrived and landed,
  Told told_to_waiting;                   // and by those until the last phase ended
  std::vector<unsigned> waiting;          // threads
  std::uint64_t waited_for = 0;           // phases whose end a thread knows of
  struct {
    std::uint64_t phase;
    SiteId site;  // 0: there was none
    unsigned thread;
  } load{};                        // the last that has landed here
  std::uint64_t remote_phase = 0;  // the last one with arrivals and copies of other blocks,
  std::vector<RemoteUse> remote;   // and these

  /// "the mbarrier smem.K.full[1] of attention.cu:57 (at byte 8192, phase 3, 1 of 8 arrivals to come, 16384 bytes expected, ...)"
  std::string describe() const;

  /// Ends the phase if all have arrived and landed; true if so.
  bool end_phase();
};

class Mbarriers {
 public:
  /// A block begins.
  void reset() { barriers_.clear(); }

  BarrierState *find(std::size_t offset) {
    const auto found = barriers_.find(offset);
    return found == barriers_.end() ? nullptr : &found->second;
  }
  void add(std::size_t offset, const BarrierState &barrier) { barriers_.emplace(offset, barrier); }

  std::map<std::size_t, BarrierState> &all() { return barriers_; }

 private:
  std::map<std::size_t, BarrierState> barriers_;  // by their offset in shared memory
};

}  // namespace emulator
