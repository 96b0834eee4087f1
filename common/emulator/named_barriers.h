// SPDX-License-Identifier: MIT
// The named barriers of a block.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/events.h"
#include "common/emulator/runtime.h"
#include "common/emulator/scheduler.h"

namespace emulator {

class NamedBarriers : public Waits {
 public:
  NamedBarriers(Scheduler &scheduler, Clocks &clocks, Events &events);

  void begin_block();

  /// See runtime.h.
  void named_barrier(int id, int threads, Named kind, const Where &where);

  std::string describe_wait(unsigned thread) const override;

 private:
  struct Arrival {
    unsigned thread;
    bool sync;
    Time time;
  };
  struct NamedBarrier {
    int threads = 0;                        // that it is for, while some have come
    int come = 0;                           // and arrived
    Where where;                            // one of them
    Where waited_at;                        // the first of those that wait
    bool aligned = false;                   // and whether one of them asks that all wait there
    std::vector<unsigned> waiting;          // those that came to wait
    std::vector<Arrival> arrivals, before;  // in this phase and in the last one
    int threads_before = 0;                 // that the last one was for
    Told told;
    SliceId ended_by = 0;  // the last phase: whose arrival
  };

  Scheduler &scheduler_;
  Clocks &clocks_;
  Events &events_;
  std::vector<std::array<NamedBarrier, 16>> barriers_;  // by rank
  std::vector<int> waits_at_;                           // by thread
};

}  // namespace emulator
