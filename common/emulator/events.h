// SPDX-License-Identifier: MIT
// What the warpgroups of block 0 do, each in its order, and what of it comes before what of the others: for
// the picture of who does what. Time it has none.
#pragma once

#include <cstdint>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/counters.h"
#include "common/emulator/runtime.h"
#include "common/emulator/scheduler.h"
#include "common/emulator/sites.h"

namespace emulator {

/// The events of a block. A warpgroup's are those of its first thread.
class Events {
 public:
  Events(const Scheduler &scheduler, const Clocks &clocks)
      : scheduler_(scheduler), clocks_(clocks) {}

  /// The block with this number begins.
  void begin_block(std::uint64_t number) { is_first_ = number == 0; }

  /// A thread does something, `of` what: see EventRow. It is noted if the thread is the first of a warpgroup of
  /// block 0, and a profile is wanted.
  void note(unsigned thread, const char *what, std::int64_t of, const Where &where) {
    if (settings.profile && is_first_ && thread < scheduler_.block_size() &&
        thread % kWarpgroup == 0)
      add(thread / kWarpgroup, what, of, site_of(where));
  }

  void add_to(Profile &profile) const;

 private:
  struct Event {
    EventRow row;
    SiteId site;
    Time time;
  };
  struct Warpgroup {
    std::vector<Event> events;
    // By warpgroup: how many events of its come before the next one here.
    std::vector<std::size_t> known;
  };
  /// What a warpgroup repeats at one place, with nothing between, without having learned more and before another
  /// warpgroup knows of it, is one event.
  void add(unsigned warpgroup, const char *what, std::int64_t of, SiteId site);

  const Scheduler &scheduler_;
  const Clocks &clocks_;
  bool is_first_ = false;  // block 0
  std::vector<Warpgroup> warpgroups_;
};

}  // namespace emulator
