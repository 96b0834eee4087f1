// SPDX-License-Identifier: MIT
#include "common/emulator/memory.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "common/emulator/devices.h"
#include "common/emulator/runtime.h"

namespace emulator {
namespace {

std::vector<std::unique_ptr<Allocation>> &allocations() {
  static std::vector<std::unique_ptr<Allocation>> list;
  return list;
}

constexpr std::size_t kAlignment = 256;  // as cudaMalloc gives it
// Between allocations, so that a small step outside of one does not land in the next.
constexpr std::size_t kGuard = 4096;

}  // namespace

Error Allocation::check(std::size_t offset, const Access &access) {
  if (!touched.load(std::memory_order_relaxed)) touched.store(true, std::memory_order_relaxed);
  if (!sectors.empty())
    std::atomic_ref(sectors[offset / 32])
        .fetch_or(static_cast<std::uint8_t>(access.store ? 2 : 1), std::memory_order_relaxed);
  return shadow.check(offset, access);
}

void Allocation::begin_launch(bool profile, bool beside) {
  if (!touched.exchange(false) && !beside && !shadow.has_before() && profile != sectors.empty())
    return;  // it is as the launch before found it
  shadow.begin_launch(beside);
  sectors.assign(profile ? (bytes + 31) / 32 : 0, 0);
}

void *allocate(std::size_t bytes) {
  if (bytes > PTRDIFF_MAX - kGuard - kAlignment) throw std::bad_alloc();
  auto allocation = std::make_unique<Allocation>();
  allocation->bytes = bytes;
  allocation->device = current_device();
  const std::size_t padded = (bytes + kGuard + kAlignment - 1) / kAlignment * kAlignment;
  allocation->memory = static_cast<std::byte *>(std::aligned_alloc(kAlignment, padded));
  if (!allocation->memory) throw std::bad_alloc();
  std::memset(allocation->memory, 0xff, bytes);  // NaN as fp16 and as fp32
  if (bytes <= Allocation::kMaxTracked) allocation->shadow.resize(bytes);
  allocations().push_back(std::move(allocation));
  return allocations().back()->memory;
}

void release(void *memory) {
  std::erase_if(allocations(), [&](const auto &allocation) {
    if (allocation->memory != memory) return false;
    std::free(allocation->memory);
    return true;
  });
}

Allocation *find_allocation(const void *address) {
  const auto *byte = static_cast<const std::byte *>(address);
  for (const auto &allocation : allocations())
    if (byte >= allocation->memory && byte < allocation->memory + allocation->bytes)
      return allocation.get();
  return nullptr;
}

void begin_launch(bool profile, bool beside) {
  for (const auto &allocation : allocations()) allocation->begin_launch(profile, beside);
}

void count_unique_bytes(std::uint64_t &read, std::uint64_t &written) {
  for (const auto &allocation : allocations()) {
    if (!allocation->touched) continue;
    for (const std::uint8_t sector : allocation->sectors) {
      read += 32 * (sector & 1u);
      written += 32 * (sector >> 1);
    }
  }
}

std::vector<Touched> touched_by_launch() {
  std::vector<Touched> all;
  for (const auto &allocation : allocations()) {
    if (!allocation->touched) continue;
    for (const bool written : {false, true}) {
      bool goes_on = false;
      allocation->shadow.each_unit([&](std::size_t offset, SiteId read, SiteId write) {
        const SiteId site = written ? write : read;
        if (site && goes_on)
          all.back().bytes += kUnit;
        else if (site)
          all.push_back({allocation.get(), offset, kUnit, written, site});
        goes_on = site;
      });
    }
  }
  return all;
}

}  // namespace emulator
