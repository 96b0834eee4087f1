// SPDX-License-Identifier: MIT
// The shared memory of a block, or of each block of a cluster.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/emulator/scheduler.h"
#include "common/emulator/shadow.h"

namespace emulator {

class SharedMemory {
 public:
  SharedMemory(const Scheduler &scheduler, std::size_t bytes, unsigned warps);

  /// Fills it with NaN, which nobody has written.
  void begin_block();

  std::size_t bytes() const { return bytes_; }

  /// Of the running thread's block, or of the one with this rank: the memory, and who touched it.
  std::byte *memory() const { return memory(scheduler_.rank()); }
  SharedShadow &shadow() { return blocks_[scheduler_.rank()].shadow; }
  std::byte *memory(unsigned rank) const { return begin_[rank]; }
  SharedShadow &shadow(unsigned rank) { return blocks_[rank].shadow; }

  /// Returns where in the shared memory of the running thread, or of a block, an address lies; at least bytes() if
  /// elsewhere.
  std::size_t offset(const void *address) const { return offset(address, scheduler_.rank()); }
  std::size_t offset(const void *address, unsigned rank) const {
    return reinterpret_cast<std::uintptr_t>(address) -
           reinterpret_cast<std::uintptr_t>(memory(rank));
  }

  /// Returns true if so many bytes from this offset on are in shared memory.
  bool has(std::size_t offset, std::size_t bytes) const {
    return offset < bytes_ && offset + bytes <= bytes_;
  }

 private:
  struct Cta {  // a block
    std::unique_ptr<std::byte[], void (*)(void *)> memory;
    SharedShadow shadow;
  };
  const Scheduler &scheduler_;
  const std::size_t bytes_;
  std::vector<Cta> blocks_;         // by rank
  std::vector<std::byte *> begin_;  // of their memory, which every load looks up
};

}  // namespace emulator
