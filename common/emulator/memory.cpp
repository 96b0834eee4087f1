#include "common/emulator/memory.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <new>

#include "common/emulator/runtime.h"

namespace emulator {
namespace {

// What a stamp's thread says beyond a thread's own number (a block has at most 1024 threads).
constexpr unsigned kSeveralOfWarp = 1024;  // + the warp: several of its lanes
constexpr unsigned kSeveralWarps = 2047;

unsigned warp_of(unsigned thread) {
  return thread < kSeveralOfWarp ? thread / 32 : thread - kSeveralOfWarp;
}

std::string who(unsigned thread) {
  if (thread == kSeveralWarps) return "threads of several warps";
  if (thread >= kSeveralOfWarp) return "several threads of warp " + std::to_string(warp_of(thread));
  return "thread " + std::to_string(thread);
}

std::string race(const char *operation, const char *memory, const char *operation_before,
                 unsigned thread_before, SiteId site_before) {
  return std::string(operation) + " races in " + memory + " memory with the " + operation_before +
         " at " + describe(line_of(site_before)) + " by " + who(thread_before) +
         ": no barrier between them";
}

std::string under_way(const char *operation, unsigned thread, SiteId site) {
  return std::string(operation) + " shared memory that a cp.async at " + describe(line_of(site)) +
         " by " + who(thread) + " may still be writing: no cp_async_wait for its group yet";
}

}  // namespace

// --- shared memory -----------------------------------------------------------------------------

void SharedShadow::reset(std::size_t bytes) {
  units_.assign((bytes + kUnit - 1) / kUnit, Unit{});
  copies_.assign((bytes + kCopyBytes - 1) / kCopyBytes, Copy{});
  copying_ = 0;
}

inline SharedShadow::Stamp SharedShadow::stamp(SiteId site, const Position &now, bool copy) {
  return {site, copy, now.thread, now.barriers & 0xfffff, now.warp_barriers & 0x1fffff};
}

inline bool SharedShadow::ordered(const Stamp &before, const Stamp &now) {
  if (before.barriers != now.barriers || before.thread == now.thread || before.site == 0)
    return true;
  if (before.thread == kSeveralWarps || warp_of(before.thread) != warp_of(now.thread)) return false;
  return before.warp_barriers != now.warp_barriers;
}

inline SharedShadow::Stamp SharedShadow::merge_reads(const Stamp &before, const Stamp &now) {
  Stamp merged = now;
  if (before.barriers != now.barriers || before.thread == now.thread || before.site == 0)
    return merged;
  if (before.thread == kSeveralWarps || warp_of(before.thread) != warp_of(now.thread))
    merged.thread = kSeveralWarps;
  else if (before.warp_barriers == now.warp_barriers)
    merged.thread = kSeveralOfWarp + warp_of(now.thread);
  return merged;
}

std::string SharedShadow::check(std::size_t offset, int bytes, bool store, SiteId site,
                                const Position &now) {
  if (copying_) {
    const Copy &copy = copies_[offset / kCopyBytes];  // an aligned access touches no second one
    if (copy.site) return under_way(store ? "store to" : "load of", copy.thread, copy.site);
  }
  const Stamp now_stamp = stamp(site, now);
  Unit *unit = &units_[offset / kUnit];
  for (Unit *end = unit + bytes / kUnit; unit < end; unit++) {
    if (!ordered(unit->write, now_stamp))
      return race(store ? "store" : "load", "shared", unit->write.copy ? "cp.async" : "store",
                  unit->write.thread, unit->write.site);
    if (store) {
      if (!ordered(unit->read, now_stamp))
        return race("store", "shared", "load", unit->read.thread, unit->read.site);
      unit->write = now_stamp;
    } else {
      if (unit->write.site == 0) return "load of shared memory that nobody wrote";
      unit->read = merge_reads(unit->read, now_stamp);
    }
  }
  return {};
}

std::string SharedShadow::begin_copy(std::size_t offset, SiteId site, const Position &now) {
  Copy &copy = copies_[offset / kCopyBytes];
  if (copy.site) return under_way("cp.async to", copy.thread, copy.site);
  const Stamp now_stamp = stamp(site, now);
  const Unit *unit = &units_[offset / kUnit];
  for (const Unit *end = unit + kCopyBytes / kUnit; unit < end; unit++) {
    if (!ordered(unit->write, now_stamp))
      return race("cp.async", "shared", unit->write.copy ? "cp.async" : "store", unit->write.thread,
                  unit->write.site);
    if (!ordered(unit->read, now_stamp))
      return race("cp.async", "shared", "load", unit->read.thread, unit->read.site);
  }
  copy = {site, now.thread};
  copying_++;
  return {};
}

void SharedShadow::end_copy(std::size_t offset, SiteId site, const Position &now) {
  copies_[offset / kCopyBytes] = {};
  copying_--;
  const Stamp now_stamp = stamp(site, now, true);
  for (std::size_t i = 0; i < kCopyBytes / kUnit; i++) units_[offset / kUnit + i].write = now_stamp;
}

// --- global memory -----------------------------------------------------------------------------

namespace {

struct GlobalStamp {
  std::uint64_t site : 10, thread : 11, block : 15, barriers : 14, warp_barriers : 14;
};
constexpr std::uint64_t kSeveralBlocks = (1u << 15) - 1;

GlobalStamp unpack(std::uint64_t packed) {
  return std::bit_cast<GlobalStamp>(packed);
}

bool ordered(const GlobalStamp &before, const GlobalStamp &now) {
  if (before.site == 0) return true;
  if (before.block != now.block) return false;
  if (before.barriers != now.barriers || before.thread == now.thread) return true;
  if (before.thread == kSeveralWarps || warp_of(before.thread) != warp_of(now.thread)) return false;
  return before.warp_barriers != now.warp_barriers;
}

GlobalStamp merge_reads(const GlobalStamp &before, const GlobalStamp &now) {
  GlobalStamp merged = now;
  if (before.site == 0) return merged;
  if (before.block != now.block)
    merged.block = kSeveralBlocks;
  else if (before.barriers == now.barriers && before.thread != now.thread) {
    if (before.thread == kSeveralWarps || warp_of(before.thread) != warp_of(now.thread))
      merged.thread = kSeveralWarps;
    else if (before.warp_barriers == now.warp_barriers)
      merged.thread = kSeveralOfWarp + warp_of(now.thread);
  }
  return merged;
}

std::string global_race(bool store, bool stored_before, const GlobalStamp &before,
                        const GlobalStamp &now) {
  std::string message =
      race(store ? "store" : "load", "global", stored_before ? "store" : "load",
           static_cast<unsigned>(before.thread), static_cast<SiteId>(before.site));
  if (before.block == now.block) return message;
  return message + " (the other is of " +
         (before.block == kSeveralBlocks ? "several other blocks" : std::string("another block")) +
         "; nothing orders two blocks)";
}

std::vector<std::unique_ptr<Allocation>> &allocations() {
  static std::vector<std::unique_ptr<Allocation>> list;
  return list;
}

constexpr std::size_t kAlignment = 256;  // as cudaMalloc gives it
// Between allocations, so that a small step outside of one does not land in the next.
constexpr std::size_t kGuard = 4096;

}  // namespace

std::string Allocation::check(std::size_t offset, int access_bytes, bool store, SiteId site,
                              const Position &now) {
  if (!sectors.empty())
    std::atomic_ref(sectors[offset / 32])
        .fetch_or(static_cast<std::uint8_t>(store ? 2 : 1), std::memory_order_relaxed);
  if (units.empty()) return {};
  const GlobalStamp stamp{site, now.thread, now.block % kSeveralBlocks, now.barriers & 0x3fff,
                          now.warp_barriers & 0x3fff};
  Unit *unit = &units[offset / kUnit];
  for (Unit *end = unit + access_bytes / kUnit; unit < end; unit++) {
    std::atomic_ref write(unit->write), read(unit->read);
    const GlobalStamp last_write = unpack(write.load(std::memory_order_relaxed));
    const GlobalStamp last_read = unpack(read.load(std::memory_order_relaxed));
    if (!ordered(last_write, stamp)) return global_race(store, true, last_write, stamp);
    if (store) {
      if (!ordered(last_read, stamp)) return global_race(store, false, last_read, stamp);
      write.store(std::bit_cast<std::uint64_t>(stamp), std::memory_order_relaxed);
    } else {
      read.store(std::bit_cast<std::uint64_t>(merge_reads(last_read, stamp)),
                 std::memory_order_relaxed);
    }
  }
  return {};
}

void Allocation::begin_launch(bool profile) {
  std::fill(units.begin(), units.end(), Unit{});
  sectors.assign(profile ? (bytes + 31) / 32 : 0, 0);
}

void *allocate(std::size_t bytes) {
  auto allocation = std::make_unique<Allocation>();
  allocation->bytes = bytes;
  const std::size_t padded = (bytes + kGuard + kAlignment - 1) / kAlignment * kAlignment;
  allocation->memory = static_cast<std::byte *>(std::aligned_alloc(kAlignment, padded));
  if (!allocation->memory) throw std::bad_alloc();
  std::memset(allocation->memory, 0xff, bytes);  // NaN as fp16 and as fp32
  if (bytes <= Allocation::kMaxTracked) allocation->units.resize((bytes + kUnit - 1) / kUnit);
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

void begin_launch(bool profile) {
  for (const auto &allocation : allocations()) allocation->begin_launch(profile);
}

void count_unique_bytes(std::uint64_t &read, std::uint64_t &written) {
  for (const auto &allocation : allocations())
    for (const std::uint8_t sector : allocation->sectors) {
      read += 32 * (sector & 1u);
      written += 32 * (sector >> 1);
    }
}

}  // namespace emulator
