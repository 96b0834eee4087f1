// SPDX-License-Identifier: MIT
// What the warpgroups of block 0 do, each in its order, and what of it comes before what of the others: for
// the picture of who does what. Time it has none.
#pragma once

#include <cstdint>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/counters.h"
#include "common/emulator/sites.h"

namespace emulator {

/// The events of a block. A warpgroup's are those of its first thread.
class Events {
 public:
  /// The first thread of a warpgroup does something, `of` what: see EventRow. What it repeats at one place,
  /// with nothing between, without having learned more and before another warpgroup knows of it, is one event.
  void add(unsigned warpgroup, const char *what, std::int64_t of, SiteId site,
           const Clocks &clocks);

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
  std::vector<Warpgroup> warpgroups_;
};

}  // namespace emulator
