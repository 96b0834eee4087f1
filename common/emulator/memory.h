// SPDX-License-Identifier: MIT
// Global memory: the allocations, who touched them, and which of their sectors were touched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/emulator/shadow.h"

namespace emulator {

struct Allocation {
  std::byte *memory = nullptr;
  std::size_t bytes = 0;
  int device = 0;                     // of several, whose memory it is
  GlobalShadow shadow;                // empty above kMaxTracked
  std::vector<std::uint8_t> sectors;  // bit 0: read, bit 1: written, while a profile is taken
  std::atomic<bool> touched = false;  // by the last launch: of several GPUs each has its own memory

  static constexpr std::size_t kMaxTracked = std::size_t{1} << 28;

  void begin_launch(bool profile, bool beside);

  /// Says with what an access of this allocation races, or returns nothing and remembers it.
  Error check(std::size_t offset, const Access &access);
};

/// The allocation that holds an address, or null.
Allocation *find_allocation(const void *address);

/// Calls begin_launch on all, and adds up their sectors after a launch.
void begin_launch(bool profile, bool beside);
void count_unique_bytes(std::uint64_t &read, std::uint64_t &written);

/// Bytes that the last launch read or wrote. What lies side by side is one. Atomics are not among them.
struct Touched {
  const Allocation *allocation;
  std::size_t offset, bytes;
  bool written;
  SiteId site;  // of the first
};
std::vector<Touched> touched_by_launch();

}  // namespace emulator
