// Who touched which byte last: what finds races and reads of memory that nobody wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/emulator/sites.h"

namespace emulator {

/// Accesses are tracked in units of two bytes, the smallest that a kernel here uses.
constexpr std::size_t kUnit = 2;

/// What one cp.async copies, and its alignment.
constexpr std::size_t kCopyBytes = 16;

/// Where a thread stands when it touches memory.
struct Position {
  unsigned thread;              // in the block
  std::uint64_t block;          // in the grid
  std::uint64_t barriers;       // __syncthreads passed by the block
  std::uint64_t warp_barriers;  // __syncwarp passed by the warp
};

/// Says what is wrong if an access to shared memory at `offset` races with an earlier one, reads
/// what nobody wrote, or touches what a cp.async may still be writing; else returns nothing and
/// remembers it. Two threads are ordered by a __syncthreads between them, or, within a warp, by a
/// __syncwarp. A shuffle orders nothing (CUDA C++ Programming Guide, 'Warp Shuffle Functions').
class SharedShadow {
 public:
  void reset(std::size_t bytes);
  std::string check(std::size_t offset, int bytes, bool store, SiteId site, const Position &now);

  /// A cp.async of 16 bytes begins: it may write at once, so says what it races with. Until it ends
  /// its bytes are nobody's to touch.
  std::string begin_copy(std::size_t offset, SiteId site, const Position &now);

  /// Its thread has waited for it, and counts as having written the bytes now.
  void end_copy(std::size_t offset, SiteId site, const Position &now);

 private:
  struct Stamp {
    std::uint64_t site : 11, copy : 1, thread : 11, barriers : 20, warp_barriers : 21;
  };
  struct Unit {
    Stamp write, read;
  };
  struct Copy {
    SiteId site = 0;
    unsigned thread = 0;
  };
  static Stamp stamp(SiteId site, const Position &now, bool copy = false);
  static bool ordered(const Stamp &before, const Stamp &now);
  static Stamp merge_reads(const Stamp &before, const Stamp &now);

  std::vector<Unit> units_;
  std::vector<Copy> copies_;  // under way, by 16 bytes; site 0: none
  std::size_t copying_ = 0;   // how many
};

/// One allocation of global memory. Threads of different blocks are never ordered within a launch;
/// those of one block as in shared memory.
struct Allocation {
  std::byte *memory = nullptr;
  std::size_t bytes = 0;
  struct Unit {
    std::uint64_t write = 0, read = 0;  // packed stamps, touched from several host threads
  };
  std::vector<Unit> units;            // empty above kMaxTracked
  std::vector<std::uint8_t> sectors;  // bit 0: read, bit 1: written, while a profile is taken

  static constexpr std::size_t kMaxTracked = std::size_t{1} << 28;

  void begin_launch(bool profile);
  std::string check(std::size_t offset, int access_bytes, bool store, SiteId site,
                    const Position &now);
};

/// The allocation that holds an address, or null.
Allocation *find_allocation(const void *address);

/// Calls begin_launch on all, and adds up their sectors after a launch.
void begin_launch(bool profile);
void count_unique_bytes(std::uint64_t &read, std::uint64_t &written);

}  // namespace emulator
