// SPDX-License-Identifier: MIT
// What a hardware profiler counts, per source line: requests of a warp to shared and global memory,
// the wavefronts and sectors they cost, tensor-core, special-function and warp-level instructions,
// barriers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace emulator {

/// Numbers the rows of counters.def.
enum Counter {
#define COUNTER(id, name, ncu, listed) id,
#include "common/emulator/counters.def"
#undef COUNTER
  kCounters
};

/// Whether tables list a counter that is zero.
enum class Listed { kAlways, kWhereAny };

struct CounterInfo {
  const char *name;  // in tables and CSV files
  const char *ncu;   // the metrics whose sum measures it on a GPU, "" if there are none
  Listed listed;
};
const CounterInfo &info(Counter counter);

/// True for the counters that tables leave out where a program has none of them.
inline bool is_optional(Counter counter) {
  return info(counter).listed == Listed::kWhereAny;
}

/// The counter's name in tables and CSV files.
inline const char *name(Counter counter) {
  return info(counter).name;
}

using Counts = std::array<std::uint64_t, kCounters>;

/// A place in a kernel's source.
struct Line {
  std::string file;
  unsigned line;
  auto operator<=>(const Line &) const = default;
};

/// What a request asks of which memory.
enum class Kind : std::uint8_t {
  kSharedLoad,
  kLdmatrix,  // a load of shared memory by rows
  kSharedStore,
  kStmatrix,  // no shared store by ncu's counters, either
  kCopy,      // a cp.async's store to shared memory
  kGlobalLoad,
  kGlobalStore,
  kGlobalReduction,  // an atomic that returns nothing
  kKinds,
};

/// The counters that a kind of request adds to, and its names in the tables of a profile. Of shared
/// memory the cost is wavefronts, of global memory sectors.
struct KindInfo {
  const char *in_totals, *in_lines;
  bool shared;
  Counter requests, cost;
  Counter ideal;  // of shared memory
};
const KindInfo &info(Kind kind);

/// One lane's part in one request to shared memory, kept for the bank maps.
struct TraceRow {
  Line line;
  Kind kind;
  int request;  // the first requests of block 0, warp 0 at this place, numbered
  int lane;
  std::uint64_t address;  // bytes from the start of shared memory
  int bytes;
  int wavefront;  // which of the request's wavefronts serves this lane
};

/// What one block did, of a launch numbered from 0: its place in the order in which blocks start, and its
/// mma or wgmma.
struct BlockRow {
  int launch;
  std::uint64_t number;
  unsigned x, y, z;
  std::uint64_t mma;
};

/// What the first thread of a warpgroup of block 0 did at once so many times, and what comes before it by the
/// rules of README.md, 'What happens before what'.
struct EventRow {
  // The last event of another warpgroup that comes before this one and not before an earlier one of this
  // warpgroup.
  struct Other {
    unsigned warpgroup;
    std::size_t number;
  };
  int launch;
  unsigned warpgroup;
  std::size_t number;  // of the warpgroup's, from 0
  const char *what;    // "wgmma_wait"
  Line line;
  // A named barrier's number, an mbarrier's place in shared memory, the groups that a wgmma_wait leaves
  // under way; -1: nothing.
  std::int64_t of;
  int times;
  std::vector<Other>
      after;  // what it newly learned; a warpgroup of which it learned nothing is left out
};

/// A slice of a trace: what a warp or an engine of block 0, or of its cluster, does for a while. Times have no unit:
/// each thing that a thread or an engine does is one later than what was done before. Or, of several devices, what a
/// stream does (timeline.h).
struct TraceSlice {
  // Tracks of a block: its warps by their numbers, and then its engines.
  static constexpr unsigned kTma = 32, kTensorCores = 33;
  // Of a device: two for each of its streams, because it may send and receive at once.
  int launch;
  unsigned block;  // its rank in the cluster
  unsigned track;
  const char *what;  // "mbarrier_wait"
  Line line;
  std::uint64_t bytes, times;  // of all lanes; how often it was done, with nothing between
  std::uint64_t begin, end;    // slices of one track do not overlap
  std::ptrdiff_t cause;        // the slice before which it could not end, or begin; -1: none
  int device = -1, peer = -1;  // of several devices; the other one
};

/// All counts of the launches since the profile began.
struct Profile {
  std::map<Line, Counts> lines;
  std::uint64_t unique_read_bytes = 0;     // each 32-byte sector of global memory counted once per
  std::uint64_t unique_written_bytes = 0;  // launch: what a cache without limits would leave
  std::vector<TraceRow> trace;
  std::vector<BlockRow> blocks;
  std::vector<EventRow> events;
  std::vector<TraceSlice> slices;
  std::map<std::pair<int, int>, std::uint64_t> link_bytes;  // from one device to another
  std::set<Line> mixed;  // see Requests: where lanes counted together may have come apart

  Counts total() const;

  /// The time from which on a trace's slices may begin: after all that are here.
  std::uint64_t next_time() const;

  /// The number of the launch after those whose blocks are here.
  int next_launch() const { return blocks.empty() ? 0 : blocks.back().launch + 1; }
};

/// What the lanes of a warp ask for at once: one instruction's accesses.
struct Request {
  Kind kind;
  int bytes;                              // per lane: 2, 4, 8 or 16
  std::uint32_t active;                   // bit i: lane i takes part
  std::array<std::uint64_t, 32> address;  // shared memory: from its start; global: as it is
  std::array<std::uint64_t, 32> source;   // of a copy, in global memory; 0: it writes zeros
};

/// The wavefronts that a shared-memory request costs, and the fewest it could. Lanes are served in
/// groups that fit 128 bytes: the whole warp for 1 to 4 bytes a lane, half-warps for 8,
/// quarter-warps for 16; of ldmatrix, the 8 lanes that name the rows of one matrix. A load's
/// neighbouring groups merge into one when nowhere in the warp lanes i and i^1 ask for two addresses, or
/// nowhere lanes i and i^2. Within a group a wavefront serves one 4-byte word of each of the 32
/// banks.
/// The data of a cp.async goes sector by sector, 32 bytes each. A wavefront has sectors of one
/// 128-byte line of global memory and puts each in a place of its own in one 128-byte row of shared
/// memory. All of them are whole, or first halves, or second halves; all have their halves swapped,
/// or none; and all keep the last bit of their number in the line, or none does. A lane goes into
/// the first wavefront that has room for it by these rules.
/// Zeros are written as a store writes; where some lanes write zeros and others data, the zeros go
/// to all lanes, and the data follows.
/// (Loads and stores are as measured: wavefronts_h200.csv holds 260 patterns with what ncu counted
/// for each on an H200, and the tests compare them all. Of cp.async this is what ncu's metric of
/// the SASS says, 155 patterns of it; the hardware's own counter,
/// l1tex__data_pipe_lsu_wavefronts_mem_shared, counted nothing for data, and for zeros one for each
/// quarter-warp that has any. No pattern tells whether halves go with whole sectors, or what zeros
/// cost in another order than one after the other. ldmatrix is as ncu counts it in the steps:
/// plots/results/h200-counters.csv.)
struct Wavefronts {
  int actual;
  int ideal;
  std::array<int, 32> of_lane;  // the wavefront that completes each active lane
};
Wavefronts shared_wavefronts(const Request &request);

/// The 32-byte sectors of global memory that a request touches.
int global_sectors(const Request &request);

}  // namespace emulator
