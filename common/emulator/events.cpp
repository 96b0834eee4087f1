// SPDX-License-Identifier: MIT
#include "common/emulator/events.h"

#include <algorithm>
#include <cstring>

namespace emulator {

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
}

}  // namespace emulator
