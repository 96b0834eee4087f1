// SPDX-License-Identifier: MIT
// When the streams of several devices do what, if each thing begins as soon as all that must come before it has ended:
// for --trace and --streams-csv. README.md, 'Several GPUs as a picture', says how long things last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/emulator/counters.h"
#include "common/emulator/sites.h"

namespace emulator {

/// How far a stream has come: the time, and the slice that ended then (-1: none).
struct Progress {
  std::uint64_t time = 0;
  std::ptrdiff_t slice = -1;
};

/// A stream of a device, by its number among the device's streams.
struct Track {
  int device;
  unsigned stream;
  Progress now = {};
  Progress after_group =
      {};  // how far it is after the messages of its group that have arrived so far
};

class Timeline {
 public:
  /// A kernel that counted this much runs on a stream.
  void run(Track &track, SiteId site, const Counts &counts);

  /// What comes next on a stream waits for an event of another device or stream, which was reached then.
  void wait(Track &track, SiteId site, const Progress &event, int device);

  /// A copy engine carries bytes from a device to that of the stream, or from that of the stream.
  void copy(Track &track, const char *what, SiteId site, int from, int to, std::size_t bytes);

  /// A message goes from one stream to another. Those of a group may go side by side, but for those of one
  /// device in one direction.
  void send(Track &from, SiteId send, Track &to, SiteId receive, std::size_t bytes);

  /// All devices gather parts of so many bytes, along a ring.
  void gather(const std::vector<Track *> &tracks, const std::vector<SiteId> &sites,
              std::size_t bytes);

  /// All messages of the stream's group have arrived.
  void end_group(Track &track);

  /// The slices so far, by device and track, and none from now on.
  std::vector<TraceSlice> take();

 private:
  struct Links {  // of a device: when its link is free again, in each direction
    std::uint64_t out = 0, in = 0;
  };
  Links &links(int device);
  Progress add(const Track &track, bool sends, const char *what, SiteId site, int peer,
               std::uint64_t bytes, std::uint64_t begin, std::uint64_t end,
               std::ptrdiff_t cause = -1);

  std::vector<Links> links_;
  std::vector<TraceSlice> slices_;
};

}  // namespace emulator
