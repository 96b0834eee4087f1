// SPDX-License-Identifier: MIT
#include "common/emulator/shadow.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <type_traits>

namespace emulator {
namespace {

Error race_message(const char *operation, const char *memory, const char *operation_before,
                   const std::string &who, SiteId site_before, const char *more = "") {
  return {Fault::kRace, std::string(operation) + " races in " + memory + " memory with the " +
                            operation_before + " at " + describe(line_of(site_before)) + " by " +
                            who + ": no barrier between them" + more};
}

std::string name_of(unsigned thread, bool of_these_blocks = true) {
  if (thread >= kFirstAgent) return "the TMA";
  return name_of_thread(thread, of_these_blocks);
}

const char *name_of(const Access &access) {
  return access.reduction ? "reduction" : access.store ? "store" : "load";
}

/// True if the lane whose store `before` was stores the same value, in the same line: of the lanes
/// of one instruction that write one place, one does (CUDA C++ Programming Guide, 'SIMT
/// Architecture'), and it does not matter which.
bool stores_the_same(const Stamp &before, const Access &access) {
  return access.store && access.value && before.site == access.site && !before.copy &&
         before.thread / 32 == access.thread / 32 &&
         std::memcmp(access.memory, access.value, access.bytes) == 0;
}

/// The loads of some warps that the access does not know of: by whom, and where. Empty if none.
struct Unknown {
  std::string who;
  SiteId site = 0;
};
template <class ReadsOfWarp, class LanesOfWarp>
Unknown unknown_loads(unsigned warps, ReadsOfWarp reads_of, LanesOfWarp unknown_lanes) {
  Unknown unknown;
  for (unsigned warp = 0; warp < warps; warp++) {
    const WarpReads *reads = reads_of(warp);
    if (!reads) continue;
    const std::uint32_t lanes = unknown_lanes(warp, *reads);
    if (!lanes) continue;
    if (unknown.site)
      unknown.who = "threads of several warps";
    else if (std::has_single_bit(lanes))
      unknown.who = name_of(warp * 32 + std::countr_zero(lanes));
    else
      unknown.who = "several threads of " + name_of_warp(warp);
    unknown.site = reads->site;
  }
  return unknown;
}

}  // namespace

/// A thread that reads.
class Reader {
 public:
  explicit Reader(const Access &access)
      : access_(access),
        now_(access.clocks.now()),
        known_(access.clocks.known_in_warp(access.thread)),
        lane_(1u << access.thread % 32) {}

  /// Returns whether other lanes' reads remain, of which the thread does not know.
  bool add_to(WarpReads &reads) const {
    std::uint32_t unknown = 0;
    if (reads.time >= known_)
      unknown =
          access_.clocks.unknown(access_.thread, access_.thread / 32, reads.lanes, reads.time);
    reads = {now_, access_.site, unknown | lane_};
    return unknown;
  }

 private:
  const Access &access_;
  const Time now_, known_;
  const std::uint32_t lane_;
};

namespace {

constexpr const char *kOtherBlock =
    " (the other is of another block; no fences and atomics order the two)";

Stamp stamp(const Access &access, bool copy = false) {
  return {access.clocks.now(), access.site, access.thread, copy};
}

}  // namespace

const Engine kCopyEngine{"cp.async", "no cp_async_wait for its group yet"},
    kLoadEngine{"TMA load", "no mbarrier_wait for its phase yet"},
    kShortLoadEngine{"TMA load",
                     "the mbarrier expected fewer bytes than its loads copy, and its phase ended "
                     "before these arrived"},
    kStoreEngine{"TMA store", "no tma_store_wait_read for its group yet"},
    kReductionEngine{"bulk reduction", "no tma_store_wait_read for its group yet"},
    kWgmmaEngine{"wgmma", "no wgmma_wait for its group yet"};

Error under_way(const std::string &operation, Fault fault, const Engine &engine, unsigned thread,
                SiteId site) {
  return {fault, operation + " memory that a " + engine.name + " at " + describe(line_of(site)) +
                     " by " + name_of(thread) + " may still be " +
                     (fault == Fault::kInUse ? "reading" : "writing") + ": " + engine.missing};
}

// --- shared memory -----------------------------------------------------------------------------

SharedShadow::SharedShadow(std::size_t bytes, unsigned warps)
    : writes_((bytes + kCopyBytes - 1) / kCopyBytes),
      reads_(warps),
      read_at_(writes_.size()),
      copies_(writes_.size()),
      agents_reads_(warps) {}

void SharedShadow::reset() {
  if (copying_) std::fill(copies_.begin(), copies_.end(), Copy{});
  if (reading_) std::fill(being_read_.begin(), being_read_.end(), Reading{});
  copying_ = reading_ = 0;
  lanes_reads_.clear();
}

/// From now on units are of so many bytes, fewer than before: what is remembered of one holds for each of
/// its parts.
void SharedShadow::refine(std::size_t bytes) {
  const std::size_t parts = (std::size_t{1} << unit_bits_) / bytes;
  const auto refined = [parts](const auto &units) {
    std::remove_cvref_t<decltype(units)> all;
    all.reserve(units.size() * parts);
    for (const auto &unit : units) all.insert(all.end(), parts, unit);
    return all;
  };
  writes_ = refined(writes_);
  for (std::vector<WarpReads> &reads : reads_) reads = refined(reads);
  std::unordered_map<std::size_t, std::array<Time, 32>> lanes_reads;
  for (const auto &[unit_and_warp, times] : lanes_reads_)
    for (std::size_t part = 0; part < parts; part++)
      lanes_reads[(unit_and_warp / 32 * parts + part) * 32 + unit_and_warp % 32] = times;
  lanes_reads_ = std::move(lanes_reads);
  unit_bits_ = std::countr_zero(bytes);
}

inline bool SharedShadow::ordered_after_store(const Stamp &write, const Access &access) const {
  return access.clocks.knows(access.thread, write.thread, write.time) ||
         stores_the_same(write, access);
}

// Apart from what nearly every access asks for, to keep that short.
[[gnu::noinline]] std::uint32_t SharedShadow::unknown_lanes(unsigned warp, std::size_t unit,
                                                            const Access &access) const {
  const WarpReads &reads = reads_[warp][unit];
  std::uint32_t lanes = access.clocks.unknown(access.thread, warp, reads.lanes, reads.time);
  if (!lanes || lanes_reads_.empty() || std::has_single_bit(reads.lanes)) return lanes;
  const auto times = lanes_reads_.find(unit * 32 + warp);
  if (times == lanes_reads_.end()) return lanes;
  for (unsigned lane = 0; lane < 32; lane++)
    if (lanes >> lane & 1 &&
        access.clocks.knows(access.thread, warp * 32 + lane, times->second[lane]))
      lanes &= ~(1u << lane);
  return lanes;
}

[[gnu::noinline]] bool SharedShadow::ordered_after_agents(std::size_t unit,
                                                          const Access &access) const {
  return std::all_of(agents_reads_.begin(), agents_reads_.end(), [&](const auto &of_warp) {
    if (of_warp.empty()) return true;
    const AgentReads &reads = of_warp[chunk_of(unit)];
    return reads.time < access.clocks.begin() ||
           access.clocks.knows(access.thread, reads.agent, reads.time);
  });
}

[[gnu::noinline]] void SharedShadow::add_read(std::size_t unit, const Reader &reader,
                                              const Access &access) {
  WarpReads &reads = reads_[access.thread / 32][unit];
  const WarpReads before = reads;
  if (!reader.add_to(reads)) return;
  const auto [entry, is_new] = lanes_reads_.try_emplace(unit * 32 + access.thread / 32);
  if (is_new || std::has_single_bit(before.lanes)) entry->second.fill(before.time);
  entry->second[access.thread % 32] = access.clocks.now();
}

inline bool SharedShadow::ordered_after_loads(std::size_t unit, const Access &access) const {
  const Time known = access.clocks.known_by_all();
  const bool recent = read_at_[chunk_of(unit)] >= known;  // else everybody knows of all loads
  for (unsigned warp = 0; recent && warp < reads_.size(); warp++) {
    if (reads_[warp].empty()) continue;
    const WarpReads &reads = reads_[warp][unit];
    if (reads.time >= known &&
        access.clocks.unknown(access.thread, warp, reads.lanes, reads.time) &&
        unknown_lanes(warp, unit, access))
      return false;
  }
  return being_read_.empty() || ordered_after_agents(unit, access);
}

/// Says with what an access races that is not ordered after all before it.
Error SharedShadow::race(const char *operation, std::size_t unit, const Access &access) const {
  const Stamp &write = writes_[unit];
  if (!ordered_after_store(write, access)) {
    if (write.thread >= kFirstAgent)
      return still_written(std::string(operation) + (access.store ? " to shared" : " of shared"),
                           loads_[chunk_of(unit)]);
    return race_message(operation, "shared", write.copy ? "cp.async" : "store",
                        name_of(write.thread), write.site);
  }
  const Unknown loads = unknown_loads(
      static_cast<unsigned>(reads_.size()),
      [&](unsigned warp) { return reads_[warp].empty() ? nullptr : &reads_[warp][unit]; },
      [&](unsigned warp, const WarpReads &) { return unknown_lanes(warp, unit, access); });
  if (loads.site) return race_message(operation, "shared", "load", loads.who, loads.site);
  for (unsigned warp = 0; warp < agents_reads_.size(); warp++) {
    if (agents_reads_[warp].empty()) continue;
    const AgentReads &reads = agents_reads_[warp][chunk_of(unit)];
    if (reads.time >= access.clocks.begin() &&
        !access.clocks.knows(access.thread, reads.agent, reads.time))
      return race_message(operation, "shared", reads.engine->name,
                          reads.threads == 1 ? name_of(reads.thread) : name_of_warp(warp),
                          reads.site);
  }
  return {};
}

Error SharedShadow::still_written(const std::string &operation, const Copy &copy) const {
  const Engine &engine = !copy.tma ? kCopyEngine : copy.is_short ? kShortLoadEngine : kLoadEngine;
  return under_way(operation, Fault::kInFlight, engine, copy.thread, copy.site);
}

Error SharedShadow::still_read(const std::string &operation, std::size_t chunk) const {
  const Reading &reading = being_read_[chunk];
  return under_way(operation, Fault::kInUse, *reading.engine, reading.thread, reading.site);
}

Error SharedShadow::check(std::size_t offset, const Access &access) {
  if (access.bytes >> unit_bits_ == 0) refine(static_cast<std::size_t>(access.bytes));
  if (copying_) {
    const std::size_t chunk = offset / kCopyBytes;  // an aligned access touches no second one
    if (copies_[chunk].site)
      return still_written(access.store ? "store to shared" : "load of shared", copies_[chunk]);
  }
  if (reading_ && access.store && being_read_[offset / kCopyBytes].times)
    return still_read("store to shared", offset / kCopyBytes);
  std::vector<WarpReads> &reads = reads_[access.thread / 32];
  const std::size_t first = unit_of(offset), end = unit_of(offset + access.bytes);
  if (access.store) {
    for (std::size_t unit = first; unit < end; unit++) {
      if (!ordered_after_store(writes_[unit], access) || !ordered_after_loads(unit, access))
        return race("store", unit, access);
      writes_[unit] = stamp(access);
    }
    return {};
  }
  if (reads.empty()) reads.resize(writes_.size());
  read_at_[offset / kCopyBytes] = access.clocks.now();
  // What the clocks say, once for all units.
  const Time begin = access.clocks.begin(), known = access.clocks.known_by_all();
  const Reader reader(access);
  const auto load = [&](auto add_read_of) {
    for (std::size_t unit = first; unit < end; unit++) {
      const Stamp write = writes_[unit];
      if (write.time >= known && !ordered_after_store(write, access))
        return race("load", unit, access);
      if (write.time < begin)
        return Error{Fault::kUninitialised, "load of shared memory that nobody wrote"};
      add_read_of(unit);
    }
    return Error();
  };
  if (access.clocks.has_agents())
    return load([&](std::size_t unit) { add_read(unit, reader, access); });
  return load([&](std::size_t unit) { reader.add_to(reads[unit]); });
}

Error SharedShadow::begin_copy(std::size_t offset, const Access &access) {
  Copy &copy = copies_[offset / kCopyBytes];
  if (copy.site) return still_written("cp.async to shared", copies_[offset / kCopyBytes]);
  if (reading_ && being_read_[offset / kCopyBytes].times)
    return still_read("cp.async to shared", offset / kCopyBytes);
  const std::size_t first = unit_of(offset), units = unit_of(kCopyBytes);
  // Mostly everybody knows of everything before: then nothing needs a closer look.
  const Time known = access.clocks.known_by_all();
  Time latest = read_at_[offset / kCopyBytes];
  for (std::size_t i = 0; i < units; i++) latest = std::max<Time>(latest, writes_[first + i].time);
  for (std::size_t i = 0; i < units && latest >= known; i++)
    if (!ordered_after_store(writes_[first + i], access) || !ordered_after_loads(first + i, access))
      return race("cp.async", first + i, access);
  copy = {access.site, static_cast<std::uint16_t>(access.thread)};
  copying_++;
  return {};
}

void SharedShadow::end_copy(std::size_t offset, const Access &access) {
  copies_[offset / kCopyBytes] = {};
  copying_--;
  std::fill_n(writes_.begin() + unit_of(offset), unit_of(kCopyBytes), stamp(access, true));
}

// --- engines -------------------------------------------------------------------------------------

namespace {

Error invisible(const Engine &engine, const Stamp &write) {
  return {Fault::kFence, std::string(engine.name) + " may not see the " +
                             (write.copy ? "cp.async" : "store") + " to shared memory at " +
                             describe(line_of(write.site)) + " by " + name_of(write.thread) +
                             ": no fence_proxy_async between them"};
}

/// True if what an ordinary store wrote is visible to what agents do on the access's thread's word.
bool is_visible(const Stamp &write, const Access &access) {
  return write.thread >= kFirstAgent ||
         access.clocks.visible(access.thread, write.thread, write.time);
}

}  // namespace

Error SharedShadow::begin_async_write(const Piece &piece, const Access &access) {
  const std::size_t first = piece.offset / kCopyBytes, end = first + piece.bytes / kCopyBytes;
  const std::size_t units = unit_of(kCopyBytes);
  for (std::size_t chunk = first; chunk < end; chunk++) {
    if (copies_[chunk].site) return still_written("TMA load to shared", copies_[chunk]);
    if (reading_ && being_read_[chunk].times) return still_read("TMA load to shared", chunk);
    for (std::size_t unit = chunk * units; unit < (chunk + 1) * units; unit++) {
      const Stamp &write = writes_[unit];
      if (!ordered_after_store(write, access) || !ordered_after_loads(unit, access))
        return race(kLoadEngine.name, unit, access);
      if (!is_visible(write, access)) return invisible(kLoadEngine, write);
    }
  }
  std::fill(copies_.begin() + first, copies_.begin() + end,
            Copy{access.site, static_cast<std::uint16_t>(access.thread), true});
  copying_ += end - first;
  return {};
}

void SharedShadow::end_async_write(const Piece &piece, unsigned agent, const Access &access) {
  const std::size_t first = piece.offset / kCopyBytes, end = first + piece.bytes / kCopyBytes;
  if (loads_.empty()) loads_.resize(copies_.size());
  for (std::size_t chunk = first; chunk < end; chunk++) {
    loads_[chunk] = copies_[chunk];
    copies_[chunk] = {};
  }
  copying_ -= end - first;
  const std::size_t first_unit = unit_of(piece.offset), units = unit_of(piece.bytes);
  std::fill_n(writes_.begin() + first_unit, units,
              Stamp{access.clocks.now(), access.site, agent, false});
  // Who knows of the write knows of what was read before.
  for (std::vector<WarpReads> &reads : reads_)
    if (!reads.empty()) std::fill_n(reads.begin() + first_unit, units, WarpReads{});
  for (std::vector<AgentReads> &reads : agents_reads_)
    if (!reads.empty()) std::fill(reads.begin() + first, reads.begin() + end, AgentReads{});
}

void SharedShadow::note_short(const Piece &piece) {
  for (std::size_t chunk = piece.offset / kCopyBytes;
       chunk < (piece.offset + piece.bytes) / kCopyBytes; chunk++)
    copies_[chunk].is_short = true;
}

Error SharedShadow::begin_async_read(const AsyncRead &read, const Clocks &clocks) {
  const Engine &engine = *read.engine;
  if (being_read_.empty()) being_read_.resize(copies_.size());
  Stamp checked{};  // mostly one store, or one load of the TMA, wrote a good part of the bytes
  for (const Piece &piece : read.pieces) {
    for (std::size_t unit = unit_of(piece.offset); unit < unit_of(piece.offset + piece.bytes);
         unit++) {
      if (copying_ && copies_[chunk_of(unit)].site)
        return still_written(std::string(engine.name) + " of shared", copies_[chunk_of(unit)]);
      const Stamp &write = writes_[unit];
      if (write.time < clocks.begin())
        return {Fault::kUninitialised,
                std::string(engine.name) + " of shared memory that nobody wrote"};
      if (std::bit_cast<std::uint64_t>(write) == std::bit_cast<std::uint64_t>(checked)) continue;
      for (unsigned i = 0; i < read.threads; i++) {
        const Access access{clocks, read.first_thread + i, read.site, false, kCopyBytes};
        if (!ordered_after_store(write, access)) return race(engine.name, unit, access);
        if (!is_visible(write, access)) return invisible(engine, write);
      }
      checked = write;
    }
  }
  for (const Piece &piece : read.pieces)
    for (std::size_t chunk = piece.offset / kCopyBytes;
         chunk < (piece.offset + piece.bytes) / kCopyBytes; chunk++) {
      Reading &reading = being_read_[chunk];
      reading_ += reading.times == 0;
      reading = {read.site, static_cast<std::uint16_t>(read.first_thread),
                 static_cast<std::uint16_t>(reading.times + 1), &engine};
    }
  return {};
}

void SharedShadow::end_async_read(const AsyncRead &read, unsigned agent, Time now) {
  std::vector<AgentReads> &reads = agents_reads_[read.first_thread / 32];
  if (reads.empty()) reads.resize(copies_.size());
  for (const Piece &piece : read.pieces)
    for (std::size_t chunk = piece.offset / kCopyBytes;
         chunk < (piece.offset + piece.bytes) / kCopyBytes; chunk++) {
      reading_ -= --being_read_[chunk].times == 0;
      reads[chunk] = {now, read.site, agent, read.first_thread, read.threads, read.engine};
    }
}

// --- global memory -----------------------------------------------------------------------------

void GlobalShadow::begin_launch(bool beside) {
  before_.resize(beside ? units_.size() : 0);
  for (std::size_t unit = 0; unit < before_.size(); unit++)
    before_[unit] |=
        static_cast<std::uint8_t>((units_[unit].read != 0) | (units_[unit].write != 0) << 1);
  std::fill(units_.begin(), units_.end(), Unit{});
  sets_.clear();
}

bool GlobalShadow::races_with_launch_before(std::size_t offset, const Access &access) const {
  if (before_.empty()) return false;
  const auto unit = before_.begin() + static_cast<std::ptrdiff_t>(offset / kUnit);
  return std::any_of(unit, unit + access.bytes / kUnit, [&](std::uint8_t touched) {
    return touched & 2 || (touched && access.store);
  });
}

Error GlobalShadow::check(std::size_t offset, const Access &access) {
  const Clocks &clocks = access.clocks;
  if (units_.empty()) return {};
  Unit *unit = &units_[offset / kUnit];
  for (Unit *end = unit + access.bytes / kUnit; unit < end; unit++) {
    std::atomic_ref write_word(unit->write), read_word(unit->read);
    const auto write = std::bit_cast<Stamp>(write_word.load(std::memory_order_relaxed));
    const auto read = std::bit_cast<Read>(read_word.load(std::memory_order_relaxed));
    if (write.time && !(access.reduction && write.copy)) {
      const bool same_block = clocks.is_of_block(write.time);
      if (same_block ? !clocks.knows(access.thread, write.thread, write.time) &&
                           !stores_the_same(write, access)
                     : !clocks.knows_of_block(access.thread, write.thread, write.time))
        return race_message(name_of(access), "global", write.copy ? "reduction" : "store",
                            name_of(write.thread, same_block), write.site,
                            same_block ? "" : kOtherBlock);
    }
    if (access.store) {
      if (read.site)
        if (Error error = race_with_loads(read, access); !error.empty()) return error;
      write_word.store(std::bit_cast<std::uint64_t>(stamp(access, access.reduction)),
                       std::memory_order_relaxed);
    } else if (!read.several || read.time) {  // loads of several blocks remain that
      read_word.store(std::bit_cast<std::uint64_t>(merge(read, access)), std::memory_order_relaxed);
    }
  }
  return {};
}

bool GlobalShadow::knows_last_store(std::size_t offset, const Access &access) const {
  if (units_.empty()) return false;
  // (Atomic, and so not const.)
  auto &word = const_cast<std::uint64_t &>(units_[offset / kUnit].write);
  const auto write = std::bit_cast<Stamp>(std::atomic_ref(word).load(std::memory_order_relaxed));
  if (!write.time) return true;
  return access.clocks.is_of_block(write.time)
             ? access.clocks.knows(access.thread, write.thread, write.time)
             : access.clocks.knows_of_block(access.thread, write.thread, write.time);
}

Error GlobalShadow::check_order(std::size_t offset, const Access &access) const {
  if (units_.empty() || knows_last_store(offset, access)) return {};
  auto &word = const_cast<std::uint64_t &>(units_[offset / kUnit].write);
  const auto write = std::bit_cast<Stamp>(std::atomic_ref(word).load(std::memory_order_relaxed));
  if (!write.copy) return {};  // a store, with which it races
  const bool same_block = access.clocks.is_of_block(write.time);
  return {Fault::kRace, "reduction in no order with the reduction at " +
                            describe(line_of(write.site)) + " by " +
                            name_of(write.thread, same_block) +
                            ": no tma_store_wait and signal between them, and this step says that "
                            "its bits are the same in every run"};
}

void GlobalShadow::mark_stored(std::size_t offset, std::size_t bytes, const Stamp &stamp) {
  if (units_.empty()) return;
  for (std::size_t unit = offset / kUnit; unit < (offset + bytes) / kUnit; unit++)
    std::atomic_ref(units_[unit].write)
        .store(std::bit_cast<std::uint64_t>(stamp), std::memory_order_relaxed);
}

void GlobalShadow::mark_again(std::size_t offset, std::size_t bytes, const Stamp &marked,
                              const Stamp &now) {
  if (units_.empty()) return;
  for (std::size_t unit = offset / kUnit; unit < (offset + bytes) / kUnit; unit++) {
    auto expected = std::bit_cast<std::uint64_t>(marked);
    std::atomic_ref(units_[unit].write)
        .compare_exchange_strong(expected, std::bit_cast<std::uint64_t>(now));
  }
}

/// True if the access knows of all these loads, which another block made.
bool GlobalShadow::knows_all(const ReadSet &set, const Access &access) {
  for (unsigned warp = 0; warp < set.of_warp.size(); warp++)
    for (unsigned lane = 0; lane < 32; lane++)
      if (set.of_warp[warp].lanes >> lane & 1 &&
          !access.clocks.knows_of_block(access.thread, warp * 32 + lane, set.of_warp[warp].time))
        return false;
  return true;
}

/// What to remember of the loads so far and this one.
GlobalShadow::Read GlobalShadow::merge(Read before, const Access &access) {
  const Clocks &clocks = access.clocks;
  const unsigned thread = access.thread;
  const Read alone{clocks.now(), access.site, thread, 0};
  const Read several_blocks{0, access.site, thread, 1};
  if (!before.site) return alone;
  if (!before.several) {
    const bool same_block = clocks.is_of_block(before.time);
    if (same_block ? clocks.knows(thread, before.thread, before.time)
                   : clocks.knows_of_block(thread, before.thread, before.time))
      return alone;
    if (!same_block) return several_blocks;
    const std::lock_guard lock(mutex_);
    ReadSet &set = sets_.emplace_back(clocks.begin(), std::vector<WarpReads>(clocks.warps()));
    set.of_warp[before.thread / 32] = {before.time, static_cast<SiteId>(before.site),
                                       1u << before.thread % 32};
    Reader(access).add_to(set.of_warp[thread / 32]);
    return {sets_.size(), access.site, thread, 1};
  }
  const std::lock_guard lock(mutex_);
  ReadSet &set = sets_[before.time - 1];
  if (set.block != clocks.begin()) return knows_all(set, access) ? alone : several_blocks;
  Reader(access).add_to(set.of_warp[thread / 32]);
  return before;
}

Error GlobalShadow::race_with_loads(Read before, const Access &access) {
  const Clocks &clocks = access.clocks;
  const char *other = "";
  std::string who = name_of(before.thread);
  SiteId site = before.site;
  if (!before.several) {
    const bool same_block = clocks.is_of_block(before.time);
    if (same_block ? clocks.knows(access.thread, before.thread, before.time)
                   : clocks.knows_of_block(access.thread, before.thread, before.time))
      return {};
    if (!same_block) {
      other = kOtherBlock;
      who = name_of(before.thread, false);
    }
  } else if (before.time == 0) {
    other = " (the other is of several other blocks; no fences and atomics order them)";
  } else {
    const std::lock_guard lock(mutex_);
    const ReadSet &set = sets_[before.time - 1];
    if (set.block != clocks.begin()) {
      if (knows_all(set, access)) return {};
      other = kOtherBlock;
    } else {
      const Unknown loads = unknown_loads(
          clocks.warps(), [&](unsigned warp) { return &set.of_warp[warp]; },
          [&](unsigned warp, const WarpReads &reads) {
            return clocks.unknown(access.thread, warp, reads.lanes, reads.time);
          });
      if (!loads.site) return {};
      who = loads.who;
      site = loads.site;
    }
  }
  return race_message(name_of(access), "global", "load", who, site, other);
}

}  // namespace emulator
