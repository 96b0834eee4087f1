// SPDX-License-Identifier: MIT
// Who touched which byte: what finds races and reads of memory that nobody wrote. One rule for all
// memory: of two accesses to one place, one of them a store, the later must know of the earlier.
// What 'know' means is in clocks.h; here is what is remembered.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/fault.h"
#include "common/emulator/sites.h"

namespace emulator {

/// Accesses to global memory are tracked in units of two bytes, the smallest that a kernel here uses.
constexpr std::size_t kUnit = 2;

/// What one cp.async copies, and its alignment.
constexpr int kCopyBytes = 16;

/// One access, about to be made.
struct Access {
  const Clocks &clocks;
  unsigned thread;  // in the block
  SiteId site;
  bool store;
  int bytes;
  // A store's memory and what it writes there: several lanes of a warp may store one value to one
  // place in one line. Null: the value is not known.
  const void *memory = nullptr;
  const void *value = nullptr;
  bool reduction = false;  // a store that adds: two of them do not race with each other
};

/// What is remembered of the last store to a unit. `copy`: it was a cp.async; of global memory, a reduction.
struct Stamp {
  std::uint64_t time : kTimeBits, site : kSiteBits, thread : kActorBits, copy : 1;  // time 0: none
};

/// What is remembered of a warp's loads of a unit: those of its lanes that do not know of each
/// other's. A thread that reads stands for the reads that it knows.
struct WarpReads {
  Time time = 0;  // of the last
  SiteId site = 0;
  std::uint32_t lanes = 0;
};

class Reader;

/// What reads or writes shared memory by itself after a thread has issued it: its name, and what is missing
/// if it is still under way.
struct Engine {
  const char *name;     // "TMA load"
  const char *missing;  // "no mbarrier_wait for its phase yet"
};
extern const Engine kCopyEngine, kLoadEngine, kShortLoadEngine, kStoreEngine, kReductionEngine,
    kWgmmaEngine;

/// Bytes of shared memory, in pieces of 16.
struct Piece {
  std::size_t offset, bytes;
};

/// What an engine reads of shared memory on the word of a warp, or of one thread.
struct AsyncRead {
  const Engine *engine;
  std::vector<Piece> pieces;
  unsigned first_thread, threads;
  SiteId site;
};

/// The shared memory of a block.
class SharedShadow {
 public:
  SharedShadow(std::size_t bytes, unsigned warps);

  /// A block begins: nobody has copies under way. (The block before is past for everyone.)
  void reset();

  /// Says what is wrong if an access races with an earlier one, reads what nobody wrote, or touches
  /// what a cp.async may still be writing; else returns nothing and remembers it.
  Error check(std::size_t offset, const Access &access);

  /// The same of most loads, in short: returns false, and remembers nothing, unless the load is right and
  /// nothing but the clocks of whole warps and blocks is to be asked.
  bool load_in_short(std::size_t offset, int bytes, unsigned thread, SiteId site,
                     const Clocks &clocks);

  /// A cp.async begins: it may write at once, so says what it races with. Until it ends its bytes
  /// are nobody's to touch.
  Error begin_copy(std::size_t offset, const Access &access);

  /// Its thread has waited for it, and counts as having written the bytes now.
  void end_copy(std::size_t offset, const Access &access);

  /// The same of a TMA load. What ordinary stores wrote there must be visible to it. Once it has landed
  /// the bytes are written by an agent, of which threads learn by their waits.
  Error begin_async_write(const Piece &piece, const Access &access);
  void end_async_write(const Piece &piece, unsigned agent, const Access &access);

  /// What a TMA load has still to write here is more than its phase expected: that ended without it.
  void note_short(const Piece &piece);

  /// An engine begins to read: says what its threads do not know or it does not see of that. Until it
  /// ends the bytes are nobody's to write.
  Error begin_async_read(const AsyncRead &read, const Clocks &clocks);

  /// It has read: the bytes were read by the agent of its warp just now.
  void end_async_read(const AsyncRead &read, unsigned agent, Time now);

 private:
  struct Copy {
    SiteId site = 0;
    std::uint16_t thread = 0;
    bool tma = false, is_short = false;  // a load's; the bytes that a phase did not expect
  };
  struct Reading {
    SiteId site = 0;
    std::uint16_t thread = 0, times = 0;  // the last that began; how many are under way
    const Engine *engine = nullptr;
  };
  struct AgentReads {  // of 16 bytes, the last of a warp's agent
    Time time = 0;
    SiteId site = 0;
    unsigned agent = 0, thread = 0, threads = 0;  // whose word it was
    const Engine *engine = nullptr;
  };
  void refine(std::size_t bytes);
  std::size_t unit_of(std::size_t offset) const { return offset >> unit_bits_; }
  std::size_t chunk_of(std::size_t unit) const { return (unit << unit_bits_) / kCopyBytes; }
  Error race(const char *operation, std::size_t unit, const Access &access) const;
  Error still_written(const std::string &operation, const Copy &copy) const;
  Error still_read(const std::string &operation, std::size_t chunk) const;
  /// In a block with agents: remembers a load.
  void add_read(std::size_t unit, const Reader &reader, const Access &access);
  /// Those lanes of a warp that have read a unit and of whose reads the access does not know.
  std::uint32_t unknown_lanes(unsigned warp, std::size_t unit, const Access &access) const;
  bool ordered_after_agents(std::size_t unit, const Access &access) const;
  bool ordered_after_store(const Stamp &write, const Access &access) const;
  bool ordered_after_loads(std::size_t unit, const Access &access) const;

  // Accesses are tracked in units as large as the smallest access so far: 2^unit_bits_ bytes, 16 to 2.
  int unit_bits_ = std::countr_zero(unsigned{kCopyBytes});
  std::vector<Stamp> writes_;  // by unit
  std::vector<std::vector<WarpReads>>
      reads_;                        // by warp, then by unit; empty for a warp without any
  std::vector<Time> read_at_;        // by 16 bytes, the last of these of any warp
  std::vector<Copy> copies_;         // under way, by 16 bytes; site 0: none
  std::size_t copying_ = 0;          // how many
  std::vector<Reading> being_read_;  // by 16 bytes; empty if nothing ever was
  std::size_t reading_ = 0;          // how many of them are being read
  std::vector<Copy> loads_;          // by 16 bytes, the last TMA load; empty if none ever was
  std::vector<std::vector<AgentReads>> agents_reads_;  // by warp, then by 16 bytes; as reads_
  // In a block with agents, whose lanes synchronise one by one: when each lane of a warp read a unit that
  // several read who do not know of each other. By unit * 32 + warp.
  std::unordered_map<std::size_t, std::array<Time, 32>> lanes_reads_;
};

[[gnu::always_inline]] inline bool SharedShadow::load_in_short(std::size_t offset, int bytes,
                                                               unsigned thread, SiteId site,
                                                               const Clocks &clocks) {
  WarpReads *const reads = reads_[thread / 32].data();
  if (bytes >> unit_bits_ == 0 || !reads || !clocks.are_of_warps()) return false;
  const std::size_t chunk = offset / kCopyBytes;  // an aligned access touches no second one
  if (copying_ && copies_[chunk].site) return false;
  const std::size_t first = unit_of(offset), end = unit_of(offset + bytes);
  for (std::size_t unit = first; unit < end; unit++) {
    const Stamp write = writes_[unit];
    if (write.time < clocks.begin() || !clocks.knows(thread, write.thread, write.time))
      return false;
  }
  const Time now = clocks.now(), known = clocks.known_in_warp(thread);
  const std::uint32_t lane = 1u << thread % 32;
  for (std::size_t unit = first; unit < end; unit++)
    reads[unit] = {now, site, (reads[unit].time < known ? 0 : reads[unit].lanes) | lane};
  read_at_[chunk] = now;
  return true;
}

/// One allocation of global memory, which the blocks of a launch touch from several host threads.
/// Blocks know of each other what fences and atomics tell.
class GlobalShadow {
 public:
  void resize(std::size_t bytes) { units_.resize((bytes + kUnit - 1) / kUnit); }

  /// A launch that may begin `beside` the launch before must wait for what that has touched, and, if
  /// that began beside another, for what the other has.
  void begin_launch(bool beside);

  /// Whether it knows what launches before have touched.
  bool has_before() const { return !before_.empty(); }

  /// Whether an access would race with a launch before, if nobody waited for that.
  bool races_with_launch_before(std::size_t offset, const Access &access) const;

  Error check(std::size_t offset, const Access &access);

  /// Whether the access knows of the last store to its first bytes, or there was none in this launch.
  bool knows_last_store(std::size_t offset, const Access &access) const;

  /// An error if the last store there is a reduction, and this one does not know that it is complete.
  Error check_order(std::size_t offset, const Access &access) const;

  /// Calls it with each unit's offset and the sites of its last load and of its last store, 0 for none.
  template <class Work>
  void each_unit(const Work &work) const {
    for (std::size_t i = 0; i < units_.size(); i++)
      work(i * kUnit, static_cast<SiteId>(std::bit_cast<Read>(units_[i].read).site),
           static_cast<SiteId>(std::bit_cast<Stamp>(units_[i].write).site));
  }

  /// These bytes were stored as the stamp says, by an agent.
  void mark_stored(std::size_t offset, std::size_t bytes, const Stamp &stamp);

  /// Where the last store to these bytes is the one that was marked so, it now counts as one of `now`.
  void mark_again(std::size_t offset, std::size_t bytes, const Stamp &marked, const Stamp &now);

 private:
  struct Read {
    // One thread's load. Or `several`: of several blocks (time 0), else sets_[time - 1].
    std::uint64_t time : kTimeBits, site : kSiteBits, thread : kActorBits, several : 1;
  };
  struct Unit {
    std::uint64_t write = 0, read = 0;  // a Stamp and a Read
  };
  struct ReadSet {  // loads by several threads of one block
    Time block;     // when it began
    std::vector<WarpReads> of_warp;
  };
  static bool knows_all(const ReadSet &set, const Access &access);
  Read merge(Read before, const Access &access);
  Error race_with_loads(Read before, const Access &access);

  std::vector<Unit> units_;
  std::vector<std::uint8_t> before_;  // by unit, of launches before: bit 0 read, bit 1 written
  std::mutex mutex_;                  // guards sets_
  std::deque<ReadSet> sets_;
};

/// "thread 3" and "warp 3"; of a cluster the block, too, if it is the cluster that is running.
std::string name_of_thread(unsigned thread, bool of_these_blocks);
std::string name_of_warp(unsigned warp);

/// "store to shared memory that a cp.async at attention.cu:57 by thread 3 may still be writing ...":
/// kInFlight, or kInUse if it is reading.
Error under_way(const std::string &operation, Fault fault, const Engine &engine, unsigned thread,
                SiteId site);

}  // namespace emulator
