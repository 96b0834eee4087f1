// SPDX-License-Identifier: MIT
#include "common/emulator/accesses.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <semaphore>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "common/emulator/memory.h"
#include "common/emulator/sites.h"
#include "reference/random.h"

namespace emulator {
namespace {

std::mutex atomics;  // guards what follows, and is the atomics' order
std::map<const unsigned *, Knowledge> told_by_atomics;  // by address
std::map<const unsigned *, SiteId> sites_of_atomics;    // of the launch: the first in the source
std::atomic<bool> abandoned = false;

// Host threads that run blocks of the launch, and how many of these can go on only if another one changes a number: since
// the last change all they have tried to pass a wait_until, and nothing else is left to do in their blocks.
unsigned working = 0, standing = 0;
std::uint64_t changes = 1;  // by atomics, and by host threads that leave
constexpr std::uint64_t kHasLeft = ~std::uint64_t{0};
// Of each host thread: the number of changes when it last stood, or that it has left.
std::vector<std::uint64_t> stood_since;
thread_local unsigned host_thread = 0;  // the number of this one

void note_change() {
  changes++;
  standing = 0;
}

// With settings.repeatable host threads take turns. Who has the turn runs alone.
std::deque<std::binary_semaphore> turns;
std::uint64_t drawn_turns = 0;

/// Gives the turn to one of the host threads that can go on, drawn from the seed; returns false if there is none. The
/// caller has the turn, so no other thread changes these numbers now.
bool give_turn() {
  std::vector<unsigned> able;
  for (unsigned i = 0; i < stood_since.size(); i++)
    if (stood_since[i] != kHasLeft && stood_since[i] != changes) able.push_back(i);
  if (able.empty()) return false;
  turns[able[next_random(drawn_turns) % able.size()]].release();
  return true;
}

/// A number in global memory that reductions of this launch add to.
struct Sum {
  float before = 0, now = 0;
  // With each number's place in the order: how many came last so far, and what the seed has drawn.
  std::vector<std::tuple<unsigned, std::uint64_t, float>> added;
};
// Host threads seldom meet at one of these.
struct Sums {
  std::mutex mutex;
  std::unordered_map<float *, Sum> by_address;
};
std::array<Sums, 64> all_sums;

/// fp32 addition of a reduction: subnormal operands and results are 0 (PTX ISA 'red').
float rounded_sum(float a, float b) {
  const auto flushed = [](float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; };
  return flushed(flushed(a) + flushed(b));
}

Error misaligned(const std::string &what, int bytes) {
  return {Fault::kMisaligned,
          what + " at an address that is not a multiple of " + std::to_string(bytes)};
}

}  // namespace

void begin_atomics(unsigned host_threads) {
  working = host_threads;
  note_change();
  stood_since.assign(host_threads, 0);
  turns.clear();
  for (unsigned i = 0; i < host_threads; i++) turns.emplace_back(0);
  drawn_turns = settings.seed;
  told_by_atomics.clear();
  sites_of_atomics.clear();
  for (Sums &sums : all_sums) sums.by_address.clear();
  abandoned = false;
}

const std::map<const unsigned *, SiteId> &atomics_of_launch() {
  return sites_of_atomics;
}

void enter_atomics(unsigned number) {
  host_thread = number;
  if (settings.repeatable && number > 0) turns[number].acquire();
}

void next_turn() {
  if (!settings.repeatable) return std::this_thread::yield();
  if (give_turn()) turns[host_thread].acquire();
}

void leave_atomics() {
  {
    const std::lock_guard lock(atomics);
    working--;
    note_change();
    stood_since[host_thread] = kHasLeft;
  }
  if (settings.repeatable) give_turn();
}

void abandon_atomics() {
  abandoned = true;
}

Accesses::Accesses(Scheduler &scheduler, Clocks &clocks, SharedMemory &shared, Requests &requests,
                   Events &events, bool beside)
    : scheduler_(scheduler),
      clocks_(clocks),
      shared_(shared),
      requests_(requests),
      events_(events),
      beside_(beside),
      copies_(scheduler.size()),
      reductions_(scheduler.size()) {}

void Accesses::begin_block(std::uint64_t number) {
  block_ = number;
  std::fill(reductions_.begin(), reductions_.end(), 0);
  copies_.reset();
  waits_.clear();
  tried_.clear();
}

// --- loads and stores ----------------------------------------------------------------------------

/// Fails unless the access, which begins in shared memory, ends there and is right.
void Accesses::check_shared(const char *what, std::size_t offset, const Access &access,
                            const Where &where) {
  Error error;
  if (offset + access.bytes > shared_.bytes())
    error = {Fault::kBounds, what + std::string(" past the end of shared memory")};
  else
    error = shared_.shadow().check(offset, access);
  if (!error.empty()) scheduler_.fail_in_thread(access.thread, error, where);
}

void Accesses::access(const void *address, int bytes, const void *value, bool store,
                      const Where &where, const void *caller) {
  const char *operation = store ? "store" : "load";
  if (reinterpret_cast<std::uintptr_t>(address) & (bytes - 1))
    scheduler_.fail(misaligned(std::to_string(bytes) + "-byte " + operation, bytes), where);
  const SiteId site = site_of(where);
  const Access access{clocks_, scheduler_.running(), site, store, bytes, address, value};
  const std::size_t offset = shared_.offset(address);
  if (offset >= shared_.bytes()) {
    access_global(access, where);
    events_.slice(access.thread, store ? "global store" : "global load", site, access.bytes);
    if (settings.profile)
      requests_.add(scheduler_.running(), store ? Kind::kGlobalStore : Kind::kGlobalLoad, bytes,
                    reinterpret_cast<std::uintptr_t>(address), site, caller);
    return;
  }
  const bool checked =
      settings.profile && !store &&
      shared_.has(offset, bytes) &&  // else Block::load_in_short has tried it
      shared_.shadow().load_in_short(offset, bytes, scheduler_.running(), site, clocks_);
  if (!checked) check_shared(operation, offset, access, where);
  events_.slice(access.thread, store ? "shared store" : "shared load", site, access.bytes);
  if (settings.profile)
    requests_.add(scheduler_.running(), store ? Kind::kSharedStore : Kind::kSharedLoad, bytes,
                  offset, site, caller);
}

std::atomic<bool> has_waited;

void Accesses::wait_for_launch_before() {
  waits_.push_back({scheduler_.running(), clocks_.now()});
  has_waited = true;
}

/// Fails unless the running thread has waited for the launch before, or knows of a thread of its block that
/// has: what the launch before wrote is then visible. (Of another block's wait it cannot know.)
void Accesses::check_launch_before(const Allocation &allocation, const Access &access,
                                   const char *operation, const Where &where) {
  const auto *byte = static_cast<const std::byte *>(access.memory);
  if (!beside_ || !allocation.shadow.races_with_launch_before(
                      static_cast<std::size_t>(byte - allocation.memory), access))
    return;
  if (std::none_of(waits_.begin(), waits_.end(), [&](const auto &wait) {
        return clocks_.knows(scheduler_.running(), wait.first, wait.second);
      }))
    scheduler_.fail(
        {Fault::kRace, std::string(operation) +
                           " of what the launch before may still be using: no griddepcontrol_wait"},
        where);
}

void Accesses::access_global(const Access &access, const Where &where) {
  thread_local Allocation *last = nullptr;
  thread_local std::uint64_t last_launch = 0;
  const auto *byte = static_cast<const std::byte *>(access.memory);
  if (last_launch != launch_number || !last || byte < last->memory ||
      byte >= last->memory + last->bytes) {
    last = find_allocation(byte);
    last_launch = launch_number;
  }
  if (!last || static_cast<std::size_t>(byte - last->memory) + access.bytes > last->bytes)
    scheduler_.fail({Fault::kBounds, std::string(access.reduction ? "reduction"
                                                 : access.store   ? "store"
                                                                  : "load") +
                                         " outside of every allocation"},
                    where);
  check_launch_before(*last, access, access.store ? "store" : "load", where);
  if (access.store)
    if (const Error error = copies_.check_store(byte, access.bytes); !error.empty())
      scheduler_.fail(error, where);
  const Error error = last->check(static_cast<std::size_t>(byte - last->memory), access);
  if (!error.empty()) scheduler_.fail(error, where);
}

/// Fails unless an atomic may be made there.
void Accesses::check_atomic(unsigned *address, const Where &where) {
  if (abandoned) scheduler_.abandon();
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof *address)
    scheduler_.fail({Fault::kMisaligned, "atomic at an address that is not a multiple of 4"},
                    where);
  const auto *byte = reinterpret_cast<const std::byte *>(address);
  const Allocation *allocation = find_allocation(byte);
  if (!allocation || byte + sizeof *address > allocation->memory + allocation->bytes)
    scheduler_.fail({Fault::kBounds, "atomic outside of every allocation"}, where);
  check_launch_before(
      *allocation, {clocks_, scheduler_.running(), site_of(where), true, sizeof *address, address},
      "atomic", where);
  {
    const std::lock_guard lock(atomics);
    SiteId &site = sites_of_atomics[address];
    if (!site || comes_before(site_of(where), site)) site = site_of(where);
  }
  scheduler_.pause();
  next_turn();  // of the blocks, too, any may be next
  events_.slice(scheduler_.running(), "atomic", site_of(where), sizeof *address);
}

unsigned Accesses::atomic(unsigned *address, const std::function<unsigned(unsigned)> &next,
                          const Where &where) {
  check_atomic(address, where);
  const std::lock_guard lock(atomics);
  clocks_.atomic(scheduler_.running(), told_by_atomics[address]);
  const unsigned before = std::exchange(*address, next(*address));
  if (*address != before) note_change();
  return before;
}

void Accesses::release(unsigned *address, unsigned x, const Where &where) {
  check_atomic(address, where);
  const std::lock_guard lock(atomics);
  clocks_.atomic_release(scheduler_.running(), told_by_atomics[address]);
  *address += x;
  note_change();
}

void Accesses::wait_until(unsigned *address, unsigned value, const Where &where, bool or_more) {
  check_atomic(address, where);
  const unsigned thread = scheduler_.running();
  for (;;) {
    bool ended = abandoned, is_last = false;
    unsigned now = 0;
    {
      const std::lock_guard lock(atomics);
      now = *address;
      if (now == value || (or_more && now > value)) {
        clocks_.atomic_acquire(thread, told_by_atomics[address]);
        tried_.erase(thread);
        return;
      }
      tried_[thread] = changes;
      is_last = scheduler_.is_last_to_try();
      if (is_last && stood_since[host_thread] != changes &&
          std::all_of(tried_.begin(), tried_.end(),
                      [](const auto &one) { return one.second == changes; })) {
        stood_since[host_thread] = changes;
        standing++;
      }
      if (standing == working && !ended) {
        ended = true;
        note_change();  // the others need not report it
      }
    }
    if (abandoned) scheduler_.abandon();
    if (ended)
      scheduler_.fail(
          {Fault::kDeadlock, "waits for ever until the number is " + std::to_string(value) +
                                 (or_more ? " or more" : "") + ": it is " + std::to_string(now) +
                                 ", and all blocks that have begun have ended or wait, too"},
          where);
    if (is_last) next_turn();
    scheduler_.try_later();
  }
}

void Accesses::reduce(float *first, std::span<const float> values, const Where &where,
                      const void *caller) {
  const int bytes = static_cast<int>(values.size_bytes());
  if (reinterpret_cast<std::uintptr_t>(first) % bytes)
    scheduler_.fail(misaligned(bytes == 4 ? "4-byte reduction" : "16-byte reduction", bytes),
                    where);
  const unsigned thread = scheduler_.running();
  const SiteId site = site_of(where);
  events_.slice(thread, "global reduction", site, bytes);
  if (settings.profile)
    requests_.add(thread, Kind::kGlobalReduction, bytes, reinterpret_cast<std::uintptr_t>(first),
                  site, caller);
  for (std::size_t i = 0; i < values.size(); i++) {
    Access access{clocks_, thread, site, true, sizeof *first, first + i};
    access.reduction = true;
    const bool last = is_last(access);
    check_order(access, where);
    access_global(access, where);
    add(first + i, values[i], thread, last);
  }
}

void Accesses::check_order(const Access &reduction, const Where &where) {
  if (!settings.same_bits || !clocks_.knows_of_blocks(reduction.thread)) return;
  const auto *byte = static_cast<const std::byte *>(reduction.memory);
  const Allocation *const allocation = find_allocation(byte);
  if (!allocation) return;  // access_global says so
  const Error error = allocation->shadow.check_order(
      static_cast<std::size_t>(byte - allocation->memory), reduction);
  if (!error.empty()) scheduler_.fail(error, where);
}

bool Accesses::is_last(const Access &reduction) const {
  const auto *byte = static_cast<const std::byte *>(reduction.memory);
  const Allocation *const allocation = find_allocation(byte);
  return allocation && allocation->shadow.knows_last_store(
                           static_cast<std::size_t>(byte - allocation->memory), reduction);
}

void Accesses::add(float *address, float value, unsigned thread, bool last) {
  // Rounded sums depend on their order. It is drawn from the seed: each reduction has a place in it, by who
  // makes it, whenever its host thread comes here. The number in memory is the sum of those so far.
  std::uint64_t state = settings.seed;
  for (const std::uint64_t part :
       {block_, std::uint64_t{thread}, std::uint64_t{reductions_[thread]++}})
    state = next_random(state) ^ part;
  Sums &sums = all_sums[reinterpret_cast<std::uintptr_t>(address) / 128 % all_sums.size()];
  const std::lock_guard lock(sums.mutex);
  Sum &sum = sums.by_address[address];
  if (sum.added.empty() || std::memcmp(&sum.now, address, sizeof sum.now) != 0) {
    sum.before = *address;  // or a store came between
    sum.added.clear();
  }
  const unsigned before = sum.added.empty() ? 0 : std::get<0>(sum.added.back());
  sum.added.emplace_back(before + last, next_random(state), value);
  std::sort(sum.added.begin(), sum.added.end());
  sum.now = sum.before;
  for (const auto &[times, place, number] : sum.added) sum.now = rounded_sum(sum.now, number);
  *address = sum.now;
}

void Accesses::access_rows(bool store, const std::array<const void *, 32> &rows, int count,
                           const Where &where) {
  const char *const what = store ? "stmatrix to a row" : "ldmatrix of a row";
  const unsigned warp = scheduler_.running() / 32;
  const SiteId site = site_of(where);
  Request request{store ? Kind::kStmatrix : Kind::kLdmatrix,
                  16,
                  static_cast<std::uint32_t>((std::uint64_t{1} << count) - 1),
                  {},
                  {}};
  for (unsigned i = 0; i < static_cast<unsigned>(count); i++) {
    const unsigned thread = warp * 32 + i;  // the lane that names the row
    const std::size_t offset = shared_.offset(rows[i]);
    Error error;
    if (!rows[i])
      error = {Fault::kBounds, "row or column out of bounds"};
    else if (offset >= shared_.bytes())
      error = {Fault::kBounds, what + std::string(" that is not in shared memory")};
    else if (offset % 16)
      error = misaligned(what, 16);
    if (!error.empty()) scheduler_.fail_in_thread(thread, error, where);
    check_shared(what, offset, {clocks_, thread, site, store, 16}, where);
    request.address[i] = offset;
  }
  events_.slice(warp * 32, store ? "stmatrix" : "ldmatrix", site,
                16 * static_cast<std::size_t>(count));
  if (settings.profile) requests_.count(site, request, warp);
}

// --- cp.async ------------------------------------------------------------------------------------

void Accesses::begin_copy(void *shared, const void *global, const Where &where,
                          const void *caller) {
  const std::size_t offset = shared_.offset(shared);
  if (offset >= shared_.bytes())
    scheduler_.fail({Fault::kBounds, "cp.async: the destination is not in shared memory"}, where);
  if (offset % kCopyBytes)
    scheduler_.fail({Fault::kMisaligned, "cp.async to an address that is not a multiple of 16"},
                    where);
  if (offset + kCopyBytes > shared_.bytes())
    scheduler_.fail({Fault::kBounds, "cp.async past the end of shared memory"}, where);
  if (reinterpret_cast<std::uintptr_t>(global) % kCopyBytes)
    scheduler_.fail({Fault::kMisaligned, "cp.async from an address that is not a multiple of 16"},
                    where);
  const SiteId site = site_of(where);
  const Error error =
      shared_.shadow().begin_copy(offset, {clocks_, scheduler_.running(), site, true, kCopyBytes});
  if (!error.empty()) scheduler_.fail(error, where);
  if (global)
    access_global({clocks_, scheduler_.running(), site, false, kCopyBytes, global}, where);
  copies_.begin(scheduler_.running(), offset, global, site);
  events_.slice(scheduler_.running(), "cp.async", site, kCopyBytes);
  if (!settings.profile) return;
  const auto source = reinterpret_cast<std::uintptr_t>(global);
  requests_.add(scheduler_.running(), Kind::kCopy, kCopyBytes, offset, site, caller, source);
  if (global)
    requests_.add(scheduler_.running(), Kind::kGlobalLoad, kCopyBytes, source, site, caller);
}

void Accesses::wait_for_copies(int groups, const Where &where) {
  events_.slice(scheduler_.running(), "cp.async wait", site_of(where));
  Copy copy;
  while (copies_.end_one(scheduler_.running(), groups, copy)) {
    if (copy.global)
      std::memcpy(shared_.memory() + copy.offset, copy.global, kCopyBytes);
    else
      std::memset(shared_.memory() + copy.offset, 0, kCopyBytes);
    shared_.shadow().end_copy(copy.offset,
                              {clocks_, scheduler_.running(), copy.site, true, kCopyBytes});
    if (!copy.global) continue;
    // It read its source until now.
    Allocation &source = *find_allocation(copy.global);
    (void)source.shadow.check(copy.global - source.memory,
                              {clocks_, scheduler_.running(), copy.site, false, kCopyBytes});
  }
}

void Accesses::report_unawaited() {
  if (const Copy *copy = copies_.first_under_way(scheduler_.running()))
    scheduler_.report(
        scheduler_.running(),
        {Fault::kInFlight, std::string("the thread exits, and this ") + kCopyEngine.name +
                               " may still be writing shared memory: " + kCopyEngine.missing},
        describe(line_of(copy->site)));
}

}  // namespace emulator
