// SPDX-License-Identifier: MIT
// What block 0 does, and its cluster, told as it happens. Two records are made of it: what each warpgroup does in its
// order, and what of it comes before what of the others, which is the same for every order of threads; and, if it
// is asked for, a trace of every warp and engine in the order in which the emulator ran them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/counters.h"
#include "common/emulator/runtime.h"
#include "common/emulator/scheduler.h"
#include "common/emulator/sites.h"

namespace emulator {

/// A slice of the trace. 0: none.
using SliceId = std::uint32_t;

class Events {
 public:
  Events(const Scheduler &scheduler, const Clocks &clocks);

  /// The block with this number begins.
  void begin_block(std::uint64_t number) { is_first_ = number == 0; }

  /// A thread does something, `of` what: see EventRow, which the first thread of a warpgroup makes. It is in the
  /// trace, too, as slice() has it.
  SliceId note(unsigned thread, const char *what, std::int64_t of, const Where &where,
               SliceId cause = 0) {
    if (!settings.profile || !is_first_) return 0;
    if (thread < scheduler_.block_size() && thread % kWarpgroup == 0)
      add(thread / kWarpgroup, what, of, site_of(where));
    return slice(thread, what, site_of(where), 0, cause);
  }

  /// A thread does something that only the trace has. What the lanes of a warp do at one place, each for the same
  /// time, is one slice, at the moment of the last lane. `cause` is what ended a wait.
  SliceId slice(unsigned thread, const char *what, SiteId site, std::size_t bytes = 0,
                SliceId cause = 0) {
    return is_traced() ? add_slice(thread, what, site, bytes, cause) : 0;
  }

  /// The running thread waits from now on, until its next slice.
  void begin_wait() {
    if (is_traced()) waits_since_[scheduler_.running()] = ++time_;
  }

  /// An engine of a block gets work, for which `cause` asks; and has done it.
  SliceId begin_work(unsigned rank, unsigned engine, const char *what, SiteId site,
                     std::size_t bytes, SliceId cause);
  void end_work(SliceId id) {
    if (id) slices_[id].end = ++time_;
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
  struct Slice {
    unsigned block, track;
    const char *what;
    SiteId site;
    std::uint64_t bytes, begin, end;  // end 0: an engine's that is still under way
    bool waits;
    SliceId cause;
  };

  /// What a warpgroup repeats at one place, with nothing between, without having learned more and before another
  /// warpgroup knows of it, is one event.
  void add(unsigned warpgroup, const char *what, std::int64_t of, SiteId site);

  bool is_traced() const { return settings.trace && is_first_; }
  SliceId add_slice(unsigned thread, const char *what, SiteId site, std::size_t bytes,
                    SliceId cause);
  static bool is_repeated(const Slice &slice);
  void add_slices_to(Profile &profile) const;

  const Scheduler &scheduler_;
  const Clocks &clocks_;
  bool is_first_ = false;  // block 0
  std::vector<Warpgroup> warpgroups_;
  std::uint64_t time_ = 0;
  std::vector<Slice> slices_;
  std::vector<std::uint64_t> waits_since_;                         // by thread; 0: it does not wait
  std::map<std::pair<SiteId, const char *>, std::size_t> places_;  // numbers what is done where
  std::vector<std::vector<std::uint32_t>> times_;        // by thread and place: how often so far
  std::vector<std::vector<std::vector<SliceId>>> each_;  // by warp and place: each time's
};

}  // namespace emulator
