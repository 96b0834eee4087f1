// Who touched which byte: what finds races and reads of memory that nobody wrote. One rule for all
// memory: of two accesses to one place, one of them a store, the later must know of the earlier.
// What 'know' means is in clocks.h; here is what is remembered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/sites.h"

namespace emulator {

/// Accesses are tracked in units of two bytes, the smallest that a kernel here uses.
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
};

/// What is remembered of the last store to a unit.
struct Stamp {
  std::uint64_t time : kTimeBits, site : kSiteBits, thread : 10, copy : 1;  // time 0: none
};

/// What is remembered of a warp's loads of a unit: those of its lanes that do not know of each
/// other's. A thread that reads stands for the reads that it knows.
struct WarpReads {
  Time time = 0;  // of the last
  SiteId site = 0;
  std::uint32_t lanes = 0;
};

/// The shared memory of a block.
class SharedShadow {
 public:
  SharedShadow(std::size_t bytes, unsigned warps);

  /// A block begins: nobody has copies under way. (The block before is past for everyone.)
  void reset();

  /// Says what is wrong if an access races with an earlier one, reads what nobody wrote, or touches
  /// what a cp.async may still be writing; else returns nothing and remembers it.
  std::string check(std::size_t offset, const Access &access);

  /// A cp.async begins: it may write at once, so says what it races with. Until it ends its bytes
  /// are nobody's to touch.
  std::string begin_copy(std::size_t offset, const Access &access);

  /// Its thread has waited for it, and counts as having written the bytes now.
  void end_copy(std::size_t offset, const Access &access);

 private:
  struct Copy {
    SiteId site = 0;
    unsigned thread = 0;
  };
  std::string race(const char *operation, std::size_t unit, const Access &access) const;
  bool ordered_after_store(const Stamp &write, const Access &access) const;
  bool ordered_after_loads(std::size_t unit, const Access &access) const;

  std::vector<Stamp> writes_;
  std::vector<std::vector<WarpReads>>
      reads_;                 // by warp, then by unit; empty for a warp without any
  std::vector<Copy> copies_;  // under way, by 16 bytes; site 0: none
  std::size_t copying_ = 0;   // how many
};

/// One allocation of global memory, which the blocks of a launch touch from several host threads.
/// Blocks know of each other what fences and atomics tell.
class GlobalShadow {
 public:
  void resize(std::size_t bytes) { units_.resize((bytes + kUnit - 1) / kUnit); }
  void begin_launch();
  std::string check(std::size_t offset, const Access &access);

 private:
  struct Read {
    // One thread's load. Or `several`: of several blocks (time 0), else sets_[time - 1].
    std::uint64_t time : kTimeBits, site : kSiteBits, thread : 10, several : 1;
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
  std::string race_with_loads(Read before, const Access &access);

  std::vector<Unit> units_;
  std::mutex mutex_;  // guards sets_
  std::deque<ReadSet> sets_;
};

/// "store to shared memory that a cp.async at attention.cu:57 by thread 3 may still be writing ..."
std::string under_way(const char *operation, const char *doing, unsigned thread, SiteId site);

}  // namespace emulator
