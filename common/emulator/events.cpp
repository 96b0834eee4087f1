// SPDX-License-Identifier: MIT
#include "common/emulator/events.h"

#include <algorithm>
#include <cstring>
#include <tuple>

namespace emulator {

Events::Events(const Scheduler &scheduler, const Clocks &clocks)
    : scheduler_(scheduler),
      clocks_(clocks),
      slices_(1),
      waits_since_(scheduler.size()),
      times_(scheduler.size()),
      each_(clocks.warps()) {}

void Events::add(unsigned warpgroup, const char *what, std::int64_t of, SiteId site) {
  warpgroups_.resize((clocks_.warps() * 32 + kWarpgroup - 1) / kWarpgroup);
  Warpgroup &self = warpgroups_[warpgroup];
  self.known.resize(warpgroups_.size());
  std::vector<EventRow::Other> after;
  bool known_to_others = false;  // the last event here: its time may move no more
  for (unsigned i = 0; i < warpgroups_.size(); i++) {
    if (i == warpgroup) continue;
    known_to_others |= !self.events.empty() && clocks_.knows(i * kWarpgroup, warpgroup * kWarpgroup,
                                                             self.events.back().time);
    const std::vector<Event> &events = warpgroups_[i].events;
    const std::size_t before = self.known[i];
    while (self.known[i] < events.size() &&
           clocks_.knows(warpgroup * kWarpgroup, i * kWarpgroup, events[self.known[i]].time))
      self.known[i]++;
    if (self.known[i] > before) after.push_back({i, self.known[i] - 1});
  }
  if (!self.events.empty() && after.empty() && !known_to_others) {
    Event &last = self.events.back();
    if (last.site == site && std::strcmp(last.row.what, what) == 0 && last.row.of == of) {
      last.row.times++;
      last.time = clocks_.now();
      return;
    }
  }
  self.events.push_back(
      {{0, warpgroup, self.events.size(), what, line_of(site), of, 1, std::move(after)},
       site,
       clocks_.now()});
}

void Events::add_to(Profile &profile) const {
  for (const Warpgroup &warpgroup : warpgroups_)
    for (const Event &event : warpgroup.events) {
      profile.events.push_back(event.row);
      profile.events.back().launch = profile.next_launch();
    }
  add_slices_to(profile);
}

// --- the trace -----------------------------------------------------------------------------------

SliceId Events::add_slice(unsigned thread, const char *what, SiteId site, std::size_t bytes,
                          SliceId cause) {
  const std::size_t place = places_.try_emplace({site, what}, places_.size()).first->second;
  std::vector<std::uint32_t> &times = times_[thread];
  auto &of_warp = each_[thread / 32];
  if (times.size() <= place) times.resize(place + 1);
  if (of_warp.size() <= place) of_warp.resize(place + 1);
  std::vector<SliceId> &each = of_warp[place];
  const std::uint32_t time = times[place]++;
  const std::uint64_t since = std::exchange(waits_since_[thread], 0), now = ++time_;
  if (time == each.size()) {
    const unsigned rank = scheduler_.rank_of(thread);
    each.push_back(static_cast<SliceId>(slices_.size()));
    slices_.push_back(
        {rank, (thread - rank * scheduler_.block_size()) / 32, what, site, 0, now, now, false, 0});
  }
  Slice &slice = slices_[each[time]];
  slice.bytes += bytes;
  slice.waits |= since > 0;
  if (!slice.waits) slice.begin = now;
  if (since) slice.begin = std::min(slice.begin, since);
  slice.end = now;
  if (!slice.cause && cause != each[time]) slice.cause = cause;
  return each[time];
}

SliceId Events::begin_work(unsigned rank, unsigned engine, const char *what, SiteId site,
                           std::size_t bytes, SliceId cause) {
  if (!is_traced()) return 0;
  slices_.push_back({rank, engine, what, site, bytes, ++time_, 0, false, cause});
  return static_cast<SliceId>(slices_.size() - 1);
}

/// Whether what a warp does again and again at one place, with nothing between, is one slice: loads, stores and
/// exponentials, and no waits.
bool Events::is_repeated(const Slice &slice) {
  return !slice.waits && !slice.cause && (slice.bytes || std::strcmp(slice.what, "exp2") == 0);
}

/// An engine does one thing after the other, in the order in which it is done with them.
void Events::add_slices_to(Profile &profile) const {
  std::vector<SliceId> order;
  std::vector<bool> is_cause(slices_.size());
  for (SliceId id = 1; id < slices_.size(); id++) {
    if (slices_[id].end) order.push_back(id);
    is_cause[slices_[id].cause] = true;
  }
  std::sort(order.begin(), order.end(), [&](SliceId a, SliceId b) {
    const Slice &x = slices_[a], &y = slices_[b];
    return std::tie(x.block, x.track, x.end) < std::tie(y.block, y.track, y.end);
  });
  const std::uint64_t start = profile.next_time();
  std::vector<std::ptrdiff_t> row(slices_.size(), -1);
  const Slice *before = nullptr;  // on the same track
  for (const SliceId id : order) {
    const Slice &slice = slices_[id];
    const bool same_track = before && before->block == slice.block && before->track == slice.track;
    if (same_track && slice.track < TraceSlice::kTma && before->site == slice.site &&
        before->what == slice.what && is_repeated(slice) && !is_cause[id] &&
        !is_cause[static_cast<std::size_t>(before - slices_.data())]) {
      TraceSlice &merged = profile.slices.back();
      merged.bytes += slice.bytes;
      merged.times++;
      merged.end = start + slice.end + 1;
    } else {
      const std::uint64_t free = same_track ? before->end + 1 : 0;
      row[id] = static_cast<std::ptrdiff_t>(profile.slices.size());
      profile.slices.push_back({profile.next_launch(), slice.block, slice.track, slice.what,
                                line_of(slice.site), slice.bytes, 1,
                                start + std::max(slice.begin, free), start + slice.end + 1, -1});
    }
    before = &slice;
  }
  for (const SliceId id : order)
    if (const SliceId cause = slices_[id].cause;
        row[id] >= 0 && cause && row[cause] >= 0 && slices_[cause].end < slices_[id].end)
      profile.slices[static_cast<std::size_t>(row[id])].cause = row[cause];
}

}  // namespace emulator
