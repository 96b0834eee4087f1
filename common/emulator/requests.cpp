// SPDX-License-Identifier: MIT
#include "common/emulator/requests.h"

#include <algorithm>
#include <bit>

namespace emulator {
namespace {

constexpr int kTracedRequests = 2;  // per site, enough to draw a bank map

// A place is a site and a code: kind * 5 + log2(bytes) of a request, then the counters of
// instructions, then a meeting.
constexpr std::uint32_t kWidths = 5, kCodes = 128;
constexpr std::uint32_t kFirstCounter = static_cast<std::uint32_t>(Kind::kKinds) * kWidths;
constexpr std::uint32_t kMeeting = kCodes - 1;
static_assert(kFirstCounter + kCounters <= kMeeting);

std::uint32_t lane_bit(unsigned lane) {
  return 1u << lane;
}

}  // namespace

// --- noting --------------------------------------------------------------------------------------

inline void Requests::add(unsigned thread, Place place, std::uint64_t address, const void *caller,
                          std::uint64_t source) {
  Lane &lane = warps_[thread / 32][thread % 32];
  lane.events.push_back({address, source, place,
                         static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(caller))});
  lane.path = (lane.path ^ place) * 0x9e3779b97f4a7c15u;
  lane.path ^= lane.path >> 32;
}

void Requests::add(unsigned thread, Kind kind, int bytes, std::uint64_t address, SiteId site,
                   const void *caller, std::uint64_t source) {
  const auto width = static_cast<std::uint32_t>(std::countr_zero(static_cast<unsigned>(bytes)));
  add(thread, site * kCodes + static_cast<std::uint32_t>(kind) * kWidths + width, address, caller,
      source);
}

void Requests::add(unsigned thread, Counter counter, SiteId site, const void *caller) {
  add(thread, site * kCodes + kFirstCounter + counter, 0, caller, 0);
}

void Requests::meet(unsigned warp, std::uint32_t lanes, SiteId site) {
  for (unsigned lane = 0; lane < 32; lane++)
    if (lanes & lane_bit(lane)) add(warp * 32 + lane, site * kCodes + kMeeting, 0, nullptr, 0);
}

// --- grouping ------------------------------------------------------------------------------------

void Requests::flush(unsigned warp_index) {
  Warp &warp = warps_[warp_index];
  std::uint32_t lanes = 0;
  const Lane *first = nullptr;
  bool together = true;  // all lanes that did anything came by the same places
  for (unsigned i = 0; i < 32; i++) {
    const Lane &lane = warp[i];
    if (lane.events.empty()) continue;
    lanes |= lane_bit(i);
    if (!first) first = &lane;
    together &= lane.path == first->path && lane.events.size() == first->events.size();
  }
  if (!lanes) return;
  if (together) {
    for (std::size_t n = 0; n < first->events.size(); n++)
      issue(warp_index, lanes,
            [&](unsigned lane) -> const Event & { return warp[lane].events[n]; });
  } else {
    issue_apart(warp_index);
  }
  for (Lane &lane : warp) {
    lane.events.clear();
    lane.path = 0;
  }
}

/// Counts what these lanes do at one place, as one.
template <class EventOf>
void Requests::issue(unsigned warp, std::uint32_t lanes, EventOf event_of) {
  const Event &event = event_of(std::countr_zero(lanes));
  const SiteId site = event.place / kCodes;
  const std::uint32_t code = event.place % kCodes;
  if (code == kMeeting) return;
  Request request{};
  request.active = lanes;
  bool mixed = false;
  for (unsigned lane = 0; lane < 32; lane++)
    if (lanes & lane_bit(lane)) {
      const Event &of_lane = event_of(lane);
      request.address[lane] = of_lane.address;
      request.source[lane] = of_lane.source;
      mixed |= of_lane.caller != event.caller;
    }
  if (mixed) {
    mixed_.resize(std::max<std::size_t>(mixed_.size(), site + 1));
    mixed_[site] = true;
  }
  if (code >= kFirstCounter) return count(site, static_cast<Counter>(code - kFirstCounter), 1);
  request.kind = static_cast<Kind>(code / kWidths);
  request.bytes = 1 << code % kWidths;
  count(site, request, warp);
}

Requests::Visits &Requests::visits_of(Place place) {
  if (visited_.size() <= place) visited_.resize(place + 1);
  std::uint32_t &index = visited_[place];
  if (!index) {
    visits_.emplace_back();
    index = static_cast<std::uint32_t>(visits_.size());
  }
  return visits_[index - 1];
}

/// Counts what the lanes of a warp did that did not all do the same.
void Requests::issue_apart(unsigned warp_index) {
  const Warp &warp = warps_[warp_index];
  std::size_t events = 0;
  for (unsigned lane = 0; lane < 32; lane++)
    for (const Event &event : warp[lane].events) {
      Visits &visits = visits_of(event.place);
      visits.all[lane]++;
      visits.left[lane]++;
      visits.total++;
      events++;
    }
  std::array<std::size_t, 32> next{};  // by lane: the event that comes next
  while (events > 0) {
    const Group group = next_group(warp, next);
    issue(warp_index, group.lanes,
          [&](unsigned lane) -> const Event & { return warp[lane].events[next[lane]]; });
    Visits &visits = visits_of(group.place);
    for (unsigned lane = 0; lane < 32; lane++)
      if (group.lanes & lane_bit(lane)) {
        visits.left[lane]--;
        next[lane]++;
        events--;
      }
  }
  for (const Lane &lane : warp)
    for (const Event &event : lane.events) visited_[event.place] = 0;
  visits_.clear();
}

/// Lanes that are at one place, when no other lane is on its way there. If there are none, those
/// that go first all the same.
Requests::Group Requests::next_group(const Warp &warp, const std::array<std::size_t, 32> &next) {
  Group best{0, 0};
  std::uint32_t seen = 0;
  for (unsigned first = 0; first < 32; first++) {
    if (seen & lane_bit(first) || next[first] == warp[first].events.size()) continue;
    Group group{warp[first].events[next[first]].place, 0};
    const Visits &visits = visits_of(group.place);
    bool all_here = true;
    for (unsigned lane = 0; lane < 32; lane++) {
      if (visits.left[lane] == 0) continue;
      if (warp[lane].events[next[lane]].place == group.place)
        group.lanes |= lane_bit(lane);
      else
        all_here = false;
    }
    if (all_here) return group;
    seen |= group.lanes;
    if (!best.lanes || goes_first(group, best)) best = group;
  }
  return best;
}

/// True if every lane that comes by at all comes by equally often.
bool Requests::is_even(const Visits &visits) {
  std::uint32_t times = 0;
  for (const std::uint32_t all : visits.all) {
    if (all && times && all != times) return false;
    times = std::max(times, all);
  }
  return true;
}

bool Requests::goes_first(const Group &a, const Group &b) {
  const Visits of_a = visits_of(a.place), of_b = visits_of(b.place);
  if (is_even(of_a) != is_even(of_b)) return is_even(of_b);
  if (of_a.total != of_b.total) return of_a.total < of_b.total;
  return comes_before(a.place / kCodes, b.place / kCodes);
}

// --- counting ------------------------------------------------------------------------------------

Counts &Requests::counts_of(SiteId site) {
  if (counts_.size() <= site) counts_.resize(site + 1);
  return counts_[site];
}

void Requests::count(SiteId site, Counter counter, std::uint64_t instructions) {
  counts_of(site)[counter] += instructions;
}

void Requests::count(SiteId site, const Request &request, unsigned warp) {
  const KindInfo &kind = info(request.kind);
  Counts &counts = counts_of(site);
  counts[kind.requests]++;
  if (kind.shared) {
    const Wavefronts wavefronts = shared_wavefronts(request);
    counts[kind.cost] += wavefronts.actual;
    counts[kind.ideal] += wavefronts.ideal;
    if (is_traced_ && warp == 0) trace(site, request, wavefronts);
  } else {
    counts[kind.cost] += global_sectors(request);
  }
}

void Requests::trace(SiteId site, const Request &request, const Wavefronts &wavefronts) {
  traced_.resize(std::max<std::size_t>(traced_.size(), site + 1));
  if (traced_[site] == kTracedRequests) return;
  for (unsigned lane = 0; lane < 32; lane++)
    if (request.active & lane_bit(lane))
      trace_rows_.push_back({line_of(site), request.kind, traced_[site], static_cast<int>(lane),
                             request.address[lane], request.bytes, wavefronts.of_lane[lane]});
  traced_[site]++;
}

void Requests::add_to(Profile &profile) const {
  for (SiteId site = 1; site < counts_.size(); site++) {
    Counts &sum = profile.lines[line_of(site)];
    for (int i = 0; i < kCounters; i++) sum[i] += counts_[site][i];
  }
  for (SiteId site = 1; site < mixed_.size(); site++)
    if (mixed_[site]) profile.mixed.insert(line_of(site));
  profile.trace.insert(profile.trace.end(), trace_rows_.begin(), trace_rows_.end());
}

}  // namespace emulator
