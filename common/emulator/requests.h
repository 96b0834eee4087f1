// SPDX-License-Identifier: MIT
// What lanes ask for one by one, put together into the requests of their warp, and counted.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/emulator/counters.h"
#include "common/emulator/sites.h"

namespace emulator {

/// Counts what the warps of one block do.
///
/// The emulator runs lanes one after the other and sees what they ask for, not how they branch. From
/// one point where the warp is together to the next it notes what each lane asks for, and then
/// groups it as a GPU would issue it: lanes wait at a place for those that are still to come there.
/// Where they would wait in a circle (even lanes come by A and then B, odd lanes by B and then A),
/// they have come apart, and one place goes first with the lanes that are there: the one that some
/// lanes come by more often than others (an inner loop that some have left), else the one that the
/// warp comes by less often (a branch in a loop), else the one earlier in the text. Lanes between
/// whose branches nothing else happens look as if they were together; if their way there differs in
/// the compiled code, the line is mixed.
/// README.md, 'What is counted', says what this finds and what it assumes.
class Requests {
 public:
  explicit Requests(unsigned warps) : warps_(warps) {}

  /// The block with this number begins. Of block 0 the first warp's requests are traced.
  void begin_block(std::uint64_t number) { is_traced_ = number == 0; }

  /// One lane asks for memory. `caller` tells copies of one place in the compiled code apart; `source` is
  /// a copy's, as Request has it.
  void add(unsigned thread, Kind kind, int bytes, std::uint64_t address, SiteId site,
           const void *caller, std::uint64_t source = 0);

  /// One lane executes an instruction that its warp executes as one.
  void add(unsigned thread, Counter counter, SiteId site, const void *caller);

  /// Some lanes are together here: what they did before comes before what they do after.
  void meet(unsigned warp, std::uint32_t lanes, SiteId site);

  /// The whole warp is together: counts what its lanes asked for.
  void flush(unsigned warp);

  /// Counts one request of a warp, or so many instructions.
  void count(SiteId site, const Request &request, unsigned warp);
  void count(SiteId site, Counter counter, std::uint64_t instructions);

  void add_to(Profile &profile) const;

 private:
  // What happens at a site, in one number: a request of some kind and width, an instruction, or a
  // meeting of some lanes.
  using Place = std::uint32_t;
  struct Event {
    std::uint64_t address;
    std::uint64_t source;  // of a copy
    Place place;
    std::uint32_t caller;  // the lower half of a code address
  };
  struct Lane {
    std::vector<Event> events;
    std::uint64_t path = 0;  // a hash of the places in `events`
  };
  using Warp = std::array<Lane, 32>;
  struct Visits {                                 // of one place
    std::array<std::uint32_t, 32> all{}, left{};  // by lane
    std::uint64_t total = 0;
  };
  struct Group {  // lanes that are at one place
    Place place;
    std::uint32_t lanes;
  };

  void add(unsigned thread, Place place, std::uint64_t address, const void *caller,
           std::uint64_t source);
  template <class EventOf>
  void issue(unsigned warp, std::uint32_t lanes, EventOf event_of);
  void issue_apart(unsigned warp_index);
  Group next_group(const Warp &warp, const std::array<std::size_t, 32> &next);
  static bool is_even(const Visits &visits);
  bool goes_first(const Group &a, const Group &b);
  Visits &visits_of(Place place);
  Counts &counts_of(SiteId site);
  void trace(SiteId site, const Request &request, const Wavefronts &wavefronts);

  bool is_traced_ = false;
  std::vector<Warp> warps_;
  std::vector<Visits> visits_;          // while the lanes of a warp come apart, by
  std::vector<std::uint32_t> visited_;  // place: the index into visits_ and 1, or 0
  std::vector<Counts> counts_;          // by site
  std::vector<bool> mixed_;             // by site
  std::vector<int> traced_;             // by site: requests of block 0, warp 0 traced so far
  std::vector<TraceRow> trace_rows_;
};

}  // namespace emulator
