// SPDX-License-Identifier: MIT
#include "common/emulator/shared.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace emulator {
namespace {

std::byte *allocate_shared(std::size_t bytes) {
  const std::size_t padded = std::max<std::size_t>(1024, (bytes + 1023) / 1024 * 1024);
  void *memory = std::aligned_alloc(1024, padded);
  if (!memory) throw std::bad_alloc();
  return static_cast<std::byte *>(memory);
}

}  // namespace

SharedMemory::SharedMemory(const Scheduler &scheduler, std::size_t bytes, unsigned warps)
    : scheduler_(scheduler), bytes_(bytes) {
  for (unsigned rank = 0; rank < scheduler.blocks(); rank++)
    blocks_.push_back({{allocate_shared(bytes), std::free}, SharedShadow(bytes, warps)});
  for (const Cta &block : blocks_) begin_.push_back(block.memory.get());
}

void SharedMemory::begin_block() {
  for (Cta &block : blocks_) {
    std::memset(block.memory.get(), 0xff, bytes_);  // NaN as fp16 and as fp32
    block.shadow.reset();
  }
}

}  // namespace emulator
