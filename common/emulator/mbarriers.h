// SPDX-License-Identifier: MIT
// The mbarriers of a block, by their place in shared memory: who has arrived, which bytes have landed,
// what the threads and the copies told that did, and who waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/events.h"
#include "common/emulator/runtime.h"
#include "common/emulator/scheduler.h"
#include "common/emulator/shared.h"
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
  SliceId ended_by = 0;            // the last phase: whose arrival, or which copy

  /// "the mbarrier smem.K.full[1] of attention.cu:57 (at byte 8192, phase 3, 1 of 8 arrivals to come, 16384 bytes expected, ...)"
  std::string describe() const;

  /// Ends the phase if all have arrived and landed; true if so.
  bool end_phase();
};

class Mbarriers : public Waits {
 public:
  Mbarriers(Scheduler &scheduler, Clocks &clocks, const SharedMemory &shared, Events &events);

  void begin_block();

  /// See runtime.h.
  void init(const void *address, int arrivals, const char *part, const Where &where);
  void fence_init();
  void arrive(const void *address, int bytes, const Where &where);
  void arrive_at(const void *address, int rank, const Where &where);
  void wait(const void *address, int parity, const Where &where);

  /// Returns the mbarrier at this place of a block's shared memory; fails if the running thread may not use it in
  /// the instruction that `what` names.
  BarrierState &usable(const char *what, unsigned rank, std::size_t offset, const Where &where);

  /// Returns true if the running thread knows that the mbarrier is visible to the copy engine.
  bool is_fenced(const BarrierState &barrier) const {
    return barrier.fenced && clocks_.knows(scheduler_.running(), barrier.thread, barrier.fenced);
  }

  /// So many bytes of a load of the running thread have landed at a barrier of the block with this rank.
  void land(BarrierState &barrier, unsigned rank, std::size_t bytes, SiteId site, SliceId copy);

  /// All threads have exited: reports an mbarrier that is not as it must be then.
  void report_at_end();

  bool is_for_copies(unsigned thread) const override { return !waits_[thread].barrier->to_come; }
  std::string describe_wait(unsigned thread) const override;
  bool is_suspect(unsigned thread) const override { return is_for_copies(thread); }

 private:
  struct Waiting {
    const BarrierState *barrier;
    std::uint64_t phase;  // for whose end it waits
  };

  void note_remote(BarrierState &barrier, bool copy, SiteId site);
  void go_on_if_ended(BarrierState &barrier, SliceId arrival);
  void report_bytes();
  void report_late();
  void report_loads();

  Scheduler &scheduler_;
  Clocks &clocks_;
  const SharedMemory &shared_;
  Events &events_;
  std::vector<std::map<std::size_t, BarrierState>> barriers_;  // by rank, then by offset
  std::vector<Waiting> waits_;                                 // by thread
};

}  // namespace emulator
