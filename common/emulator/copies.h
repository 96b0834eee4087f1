// SPDX-License-Identifier: MIT
// The cp.async that the threads of a block have under way, in groups.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/emulator/shadow.h"
#include "common/emulator/sites.h"

namespace emulator {

struct Copy {
  std::size_t offset;       // in shared memory
  const std::byte *global;  // null: zeros
  SiteId site;
  std::uint64_t group;  // of its thread's
};

class Copies {
 public:
  explicit Copies(unsigned threads) : threads_(threads) {}

  /// A block begins.
  void reset();

  void begin(unsigned thread, std::size_t offset, const void *global, SiteId site);
  void commit(unsigned thread) { threads_[thread].groups++; }

  /// The thread's oldest copy, if it is not of its youngest `groups` groups; takes it from those
  /// under way.
  bool end_one(unsigned thread, int groups, Copy &copy);

  /// The oldest that the thread has not waited for, or null.
  const Copy *first_under_way(unsigned thread) const {
    const Thread &self = threads_[thread];
    return self.first < self.copies.size() ? &self.copies[self.first] : nullptr;
  }

  /// Says so if a store to global memory changes what a copy of this block is still reading.
  Error check_store(const void *global, int bytes) const;

 private:
  struct Thread {
    std::vector<Copy> copies;  // the oldest first, from
    std::size_t first = 0;     // this one on
    std::uint64_t groups = 0;  // committed so far
  };
  std::vector<Thread> threads_;

  // How many copies under way read a piece of global memory, or another with the same place here: where none does, a
  // store needs no closer look. (A copy lies in one piece.)
  static constexpr int kPieceBytes = 4096;
  std::array<std::uint32_t, 1024> reading_ = {};
  static std::size_t piece_of(const std::byte *global) {
    return reinterpret_cast<std::uintptr_t>(global) / kPieceBytes % 1024;
  }
};

}  // namespace emulator
