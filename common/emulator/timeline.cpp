// SPDX-License-Identifier: MIT
#include "common/emulator/timeline.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace emulator {

namespace {

// A turn is as long as an mma of a warp, 4,096 operations. These rates are those of an H200 whose tensor cores are 30
// times as slow: there a byte takes NCCL as long as 3,800 operations (chapter 71), and here as long as 128. So a hop
// of 256 tokens looks as one of 7,600 tokens there.
constexpr std::uint64_t kMmaOfWgmma = 16;    // a warp's part of 64 x 128 x 16
constexpr std::uint64_t kLinkBytes = 32;     // a turn's, in each direction
constexpr std::uint64_t kMemoryBytes = 768;  // a turn's: 24 times as many as a link's

// Each slice has a beginning and an end for arrows.
constexpr std::uint64_t kLeastTurns = 2;

std::uint64_t turns_of_bytes(std::size_t bytes) {
  return std::max<std::uint64_t>(kLeastTurns, bytes / kLinkBytes);
}

}  // namespace

Timeline::Links &Timeline::links(int device) {
  if (links_.size() <= static_cast<std::size_t>(device)) links_.resize(device + std::size_t{1});
  return links_[static_cast<std::size_t>(device)];
}

Progress Timeline::add(const Track &track, bool sends, const char *what, SiteId site, int peer,
                       std::uint64_t bytes, std::uint64_t begin, std::uint64_t end,
                       std::ptrdiff_t cause) {
  slices_.push_back({0, 0, 2 * track.stream + sends, what, line_of(site), bytes, 1, begin, end,
                     cause, track.device, peer});
  return {end, static_cast<std::ptrdiff_t>(slices_.size()) - 1};
}

void Timeline::run(Track &track, SiteId site, const Counts &counts) {
  const std::uint64_t products = counts[kMma] + kMmaOfWgmma * counts[kWgmma];
  const std::uint64_t sectors =
      counts[kGlobalLoadSectors] + counts[kGlobalStoreSectors] + counts[kReductionSectors];
  const std::uint64_t bytes = 32 * sectors + counts[kTmaLoadBytes] + counts[kTmaStoreBytes];
  const std::uint64_t turns = std::max({kLeastTurns, products, bytes / kMemoryBytes});
  track.now = add(track, false, "kernel", site, -1, bytes, track.now.time, track.now.time + turns);
}

void Timeline::wait(Track &track, SiteId site, const Progress &event, int device) {
  if (event.time <= track.now.time) return;
  add(track, false, "cudaStreamWaitEvent", site, device, 0, track.now.time, event.time,
      event.slice);
  track.now = event;
}

void Timeline::copy(Track &track, const char *what, SiteId site, int from, int to,
                    std::size_t bytes) {
  const std::uint64_t begin = std::max({track.now.time, links(from).out, links(to).in});
  const std::uint64_t end = begin + turns_of_bytes(bytes);
  links(from).out = links(to).in = end;
  track.now = add(track, false, what, site, track.device == to ? from : to, bytes, begin, end);
}

void Timeline::send(Track &from, SiteId send, Track &to, SiteId receive, std::size_t bytes) {
  const std::uint64_t begin =
      std::max({from.now.time, to.now.time, links(from.device).out, links(to.device).in});
  const std::uint64_t end = begin + turns_of_bytes(bytes);
  links(from.device).out = links(to.device).in = end;
  const Progress sent = add(from, true, "ncclSend", send, to.device, bytes, begin, end);
  const Progress received =
      add(to, false, "ncclRecv", receive, from.device, bytes, begin, end, sent.slice);
  if (from.after_group.time < end) from.after_group = sent;
  if (to.after_group.time < end) to.after_group = received;
}

void Timeline::gather(const std::vector<Track *> &tracks, const std::vector<SiteId> &sites,
                      std::size_t bytes) {
  std::uint64_t begin = 0;
  for (const Track *track : tracks)
    begin = std::max({begin, track->now.time, links(track->device).out, links(track->device).in});
  const std::uint64_t end = begin + turns_of_bytes((tracks.size() - 1) * bytes);
  for (std::size_t i = 0; i < tracks.size(); i++) {
    links(tracks[i]->device) = {end, end};
    tracks[i]->after_group = add(*tracks[i], false, "ncclAllGather", sites[i], -1,
                                 (tracks.size() - 1) * bytes, begin, end);
  }
}

void Timeline::end_group(Track &track) {
  if (track.after_group.time > track.now.time) track.now = track.after_group;
}

std::vector<TraceSlice> Timeline::take() {
  std::vector<std::size_t> order(slices_.size()), place(slices_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const TraceSlice &x = slices_[a], &y = slices_[b];
    return std::tie(x.device, x.track, x.begin) < std::tie(y.device, y.track, y.begin);
  });
  std::vector<TraceSlice> sorted;
  for (const std::size_t i : order) {
    place[i] = sorted.size();
    sorted.push_back(slices_[i]);
  }
  for (TraceSlice &slice : sorted)
    if (slice.cause >= 0)
      slice.cause = static_cast<std::ptrdiff_t>(place[static_cast<std::size_t>(slice.cause)]);
  *this = {};
  return sorted;
}

}  // namespace emulator
