// SPDX-License-Identifier: MIT
#include "common/emulator/block.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "common/emulator/emulator.h"
#include "common/emulator/memory.h"
#include "reference/random.h"

thread_local constinit dim3 threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

namespace emulator {

thread_local constinit Block *Block::current = nullptr;

namespace {

constexpr std::uint32_t kAllLanes = 0xffffffff;
constexpr unsigned kNoThread = ~0u;
constexpr std::uint64_t kPauses = 4;  // of so many points at which a thread may be delayed, at one

std::string text(const Dim3 &d) {
  return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
}

std::string hex(std::uint32_t mask) {
  char buffer[11];
  std::snprintf(buffer, sizeof buffer, "0x%08x", mask);
  return buffer;
}

std::byte *allocate_shared(std::size_t bytes) {
  const std::size_t padded = std::max<std::size_t>(1024, (bytes + 1023) / 1024 * 1024);
  void *memory = std::aligned_alloc(1024, padded);
  if (!memory) throw std::bad_alloc();
  return static_cast<std::byte *>(memory);
}

}  // namespace

/// Those of each thread that a kernel has if one of its blocks is to fit on a multiprocessor, whose file
/// has 65536: a multiple of 8, of 255 that a thread may name.
int launch_registers(unsigned threads) {
  return std::min(248, static_cast<int>(65536 / threads / 8 * 8));
}

namespace {

std::mutex atomics;  // guards what follows, and is the atomics' order
std::map<const unsigned *, Knowledge> told_by_atomics;  // by address
std::atomic<bool> abandoned = false;

}  // namespace

void begin_atomics() {
  told_by_atomics.clear();
  abandoned = false;
}

void abandon_atomics() {
  abandoned = true;
}

Block::Block(Dim3 grid, Dim3 dim, std::size_t shared_bytes, const std::function<void()> &thread,
             const LaunchAttributes &attributes)
    : grid_(grid),
      dim_(dim),
      block_size_(dim.x * dim.y * dim.z),
      size_(block_size_ * attributes.cluster),
      entry_(thread),
      shared_bytes_(shared_bytes),
      beside_(attributes.beside),
      clocks_(size_),
      copies_(size_),
      products_(clocks_.warps()),
      requests_(clocks_.warps()),
      threads_(size_),
      warps_(clocks_.warps()) {
  for (unsigned rank = 0; rank < attributes.cluster; rank++)
    ctas_.push_back({{allocate_shared(shared_bytes), std::free},
                     SharedShadow(shared_bytes, clocks_.warps()),
                     {},
                     {},
                     {},
                     {}});
  for (unsigned i = 0; i < size_; i++) {
    threads_[i].index = {i % dim.x, i / dim.x % dim.y, i % block_size_ / dim.x / dim.y};
    threads_[i].cta = &ctas_[rank_of(i)];
  }
}

void Block::run(std::uint64_t number) {
  number_ = number;
  random_ = settings.seed * 0x2545f4914f6cdd1du + number;
  in_cluster_barrier_ = 0;
  error_.clear();
  abandoned_ = false;
  clocks_.begin_block();
  for (Cta &cta : ctas_) {
    cta.index = block_index(grid_, number++);
    std::memset(cta.shared.get(), 0xff, shared_bytes_);  // NaN as fp16 and as fp32
    cta.shadow.reset();
    cta.mbarriers.reset();
    cta.named_barriers = {};
    cta.registers.assign((block_size_ + kWarpgroup - 1) / kWarpgroup,
                         {launch_registers(block_size_), 0});
    cta.free_registers = 0;
    cta.live = block_size_;
    cta.in_block_barrier = 0;
    cta.mma = 0;
  }
  copies_.reset();
  products_.reset();
  under_way_.clear();
  drawn_ = operations_ = turns_ = 0;
  reads_.clear();
  readers_.assign(warps_.size(), 0);
  stores_.assign(size_, {});
  tma_agent_ = 0;
  waits_.clear();
  std::fill(warps_.begin(), warps_.end(), Warp{});
  ready_.clear();
  slow_ = draw(2) ? static_cast<unsigned>(draw(size_)) : kNoThread;
  live_ = size_;
  for (unsigned i = 0; i < size_; i++) {
    warps_[i / 32].lanes |= 1u << i % 32;
    warps_[i / 32].live |= 1u << i % 32;
    threads_[i].fiber.start([](void *self) { static_cast<Block *>(self)->run_thread(); }, this);
    make_ready(i);
  }

  current = this;
  blockDim = dim_;
  gridDim = grid_;
  while ((!ready_.empty() || !under_way_.empty()) && error_.empty() && !abandoned_) {
    if (ready_.empty()) {
      land(draw(under_way_.size()));
      continue;
    }
    // A thread that reads an atomic again and again always can go on: nothing lands later than this.
    constexpr std::uint64_t kPatience = 1 << 14;
    if (!under_way_.empty() && ++turns_ % kPatience == 0) {
      land(0);
      continue;
    }
    std::uint64_t drawn = draw(ready_.size() + drawn_);
    if (drawn < ready_.size() && ready_[drawn] == slow_ && ready_.size() > 1 &&
        ++passed_over_ % kPatience)
      drawn = (drawn + 1) % ready_.size();
    if (drawn >= ready_.size()) {
      land_drawn(drawn - ready_.size());
      continue;
    }
    running_ = std::exchange(ready_[drawn], ready_.back());
    ready_.pop_back();
    threadIdx = threads_[running_].index;
    cta_ = &cta_of(running_);
    blockIdx = cta_->index;
    Fiber &fiber = threads_[running_].fiber;
    fiber.resume();
    if (fiber.overflowed())
      report({Fault::kLaunch, "its stack is full: a GPU allows 512 KB of local memory per thread"});
  }
  if (error_.empty() && !abandoned_) report_stuck();
  if (error_.empty() && !abandoned_) report_bytes();
  if (error_.empty() && !abandoned_) report_late();
  if (error_.empty() && !abandoned_) report_loads();
  current = nullptr;
  if (abandoned_) throw Abandoned();
  if (!error_.empty()) throw KernelError(error_);
}

/// One of so many, from 0.
std::uint64_t Block::draw(std::uint64_t choices) {
  return (next_random(random_) >> 32) * choices >> 32;
}

/// What a thread's fiber runs.
void Block::run_thread() {
  try {
    entry_();
  } catch (const std::exception &exception) {
    report({Fault::kException, exception.what()});
  } catch (...) {
    report({Fault::kException, "an exception that is no std::exception"});
  }
  if (error_.empty() && !report_unawaited()) exit_thread();
}

// --- threads that wait for each other ------------------------------------------------------------

void Block::make_ready(unsigned thread) {
  threads_[thread].state = State::kReady;
  ready_.push_back(thread);
}

/// The running thread may be delayed here, where it could go on.
void Block::pause() {
  if (draw(kPauses)) return;
  make_ready(running_);
  Fiber::yield();
}

void Block::wait(State state, const char *what, const Where &where) {
  Thread &self = threads_[running_];
  self.state = state;
  self.waits_in = what;
  self.where = where;
}

/// The running thread is done. Those that waited for it alone need not wait any longer.
void Block::exit_thread() {
  Warp &warp = warps_[running_ / 32];
  threads_[running_].state = State::kExited;
  warp.live &= ~(1u << running_ % 32);
  live_--;
  cta_->live--;
  const unsigned warp_index = running_ / 32;
  for (unsigned lane = 0; lane < 32; lane++)
    if (warp.waiting >> lane & 1) {
      const Thread &other = threads_[warp_index * 32 + lane];
      running_ = warp_index * 32 + lane;  // the thread to name if something is wrong
      if (meet(*other.collective, warp_index, other.members)) make_ready(running_);
    }
  if (!warp.live) flush(warp_index);
  if (cta_->live && cta_->in_block_barrier == cta_->live) end_block_barrier();
  if (live_ && in_cluster_barrier_ == live_) end_cluster_barrier();
}

void Block::collective(const Collective &what, std::uint32_t members, const Where &where,
                       void *lane) {
  const unsigned warp = running_ / 32;
  Thread &self = threads_[running_];
  if (!(members >> running_ % 32 & 1))
    fail({Fault::kDivergence,
          std::string(what.name) + ": the mask does not name the lane that executes it"},
         where);
  if (what.aligned && size_ - warp * 32 < 32)
    fail({Fault::kDivergence, std::string(what.name) +
                                  ": takes all 32 lanes, and the block's last warp has " +
                                  std::to_string(size_ % 32)},
         where);
  wait(State::kInWarp, what.name, where);
  self.collective = &what;
  self.members = members;
  self.lane = lane;
  warps_[warp].waiting |= 1u << running_ % 32;
  if (!meet(what, warp, members)) return Fiber::yield();
  self.state = State::kReady;
}

/// If all lanes that the running one waits for have come to their collective, does it and lets
/// the others go on.
bool Block::meet(const Collective &what, unsigned warp_index, std::uint32_t members) {
  Warp &warp = warps_[warp_index];
  const std::uint32_t lanes = what.aligned ? members : members & warp.live;
  if (lanes & ~warp.waiting) return false;
  void *operands[32] = {};
  for (unsigned lane = 0; lane < 32; lane++)
    if (lanes >> lane & 1) {
      const Thread &thread = threads_[warp_index * 32 + lane];
      if (thread.members != members) return false;  // it meets others first
      operands[lane] = thread.lane;
    }
  check_same(what, warp_index, lanes);

  what.compute(operands);
  if (what.orders) clocks_.join_lanes(warp_index, lanes);
  if (settings.profile) {
    if (lanes == warp.lanes)  // not `live`: that others exited before is the schedule's doing
      flush(warp_index);
    else
      requests_.meet(warp_index, lanes, site_of(threads_[running_].where));
    if (what.counter != kCounters) count_each_place(warp_index, lanes, what.counter);
  }
  warp.waiting &= ~lanes;
  for (unsigned lane = 0; lane < 32; lane++)
    if (const unsigned thread = warp_index * 32 + lane; lanes >> lane & 1 && thread != running_)
      make_ready(thread);
  return true;
}

/// Fails unless these lanes wait in one instruction.
void Block::check_same(const Collective &what, unsigned warp, std::uint32_t lanes) {
  const Where &where = threads_[running_].where;
  for (unsigned lane = 0; lane < 32; lane++) {
    if (!(lanes >> lane & 1)) continue;
    const Thread &other = threads_[warp * 32 + lane];
    if ((other.waits_in == what.name || std::strcmp(other.waits_in, what.name) == 0) &&
        (!what.aligned || same_place(other.where, where)))
      continue;
    fail({Fault::kDivergence, std::string("lanes of one warp wait in different instructions: ") +
                                  what.name + " here, " + other.waits_in + " at " +
                                  describe(other.where) + " in lane " + std::to_string(lane)},
         where);
  }
}

void Block::block_barrier(const Where &where) {
  wait(State::kInBlock, "__syncthreads", where);
  if (++cta_->in_block_barrier < cta_->live) return Fiber::yield();
  end_block_barrier();
  // It goes on itself, rather than by a draw.
  ready_.erase(std::find(ready_.begin(), ready_.end(), running_));
}

/// All threads of the block that have not exited wait at the barrier: they go on.
void Block::end_block_barrier() {
  cta_->in_block_barrier = 0;
  end_barrier(State::kInBlock, rank_of(running_) * block_size_, block_size_, kBlockBarriers);
}

void Block::cluster_barrier(const Where &where) {
  wait(State::kInCluster, "cluster_sync", where);
  if (++in_cluster_barrier_ < live_) return Fiber::yield();
  end_cluster_barrier();
  ready_.erase(std::find(ready_.begin(), ready_.end(), running_));
}

void Block::end_cluster_barrier() {
  in_cluster_barrier_ = 0;
  end_barrier(State::kInCluster, 0, size_, kClusterBarriers);
}

/// Of so many threads from the first on, those in this state have met.
void Block::end_barrier(State state, unsigned first, unsigned count, Counter counter) {
  std::vector<unsigned> threads;
  for (unsigned i = first; i < first + count; i++)
    if (threads_[i].state == state) threads.push_back(i);
  clocks_.join(threads);
  if (settings.profile)
    for (unsigned warp = first / 32; warp * 32 < first + count; warp++) {
      flush(warp);
      count_each_place(warp, warps_[warp].live, counter);
    }
  for (const unsigned thread : threads) make_ready(thread);
}

void Block::count_mma(Counter counter) {
  if (counter == kMma || counter == kWgmma) cta_->mma++;
}

/// Counts an instruction that these lanes execute: once for each place of the source where they do.
void Block::count_each_place(unsigned warp, std::uint32_t lanes, Counter counter) {
  count_mma(counter);
  while (lanes) {
    const Where &where = threads_[warp * 32 + std::countr_zero(lanes)].where;
    requests_.count(site_of(where), counter, 1);
    for (unsigned lane = 0; lane < 32; lane++)
      if (lanes >> lane & 1 && same_place(threads_[warp * 32 + lane].where, where))
        lanes &= ~(1u << lane);
  }
}

/// Of a lane that waits for one that waits for others than it does: what to say; else "".
std::string Block::other_mask(unsigned thread) const {
  const Thread &self = threads_[thread];
  if (self.state != State::kInWarp) return "";
  const unsigned first = thread / 32 * 32;
  for (unsigned lane = 0; lane < 32; lane++)
    if (self.members & warps_[thread / 32].waiting & 1u << lane)
      if (const Thread &other = threads_[first + lane]; other.members != self.members)
        return "; lane " + std::to_string(thread - first) + "'s mask is " + hex(self.members) +
               ", that of lane " + std::to_string(lane) + ", which it names, " + hex(other.members);
  return "";
}

/// What a thread waits for, in words.
std::string Block::waits_for(const Thread &thread) const {
  const auto number = static_cast<unsigned>(&thread - threads_.data());
  const Cta &cta = ctas_[rank_of(number)];
  std::string text = thread.waits_in;
  if (thread.state == State::kAtMbarrier)
    text += " for parity " + std::to_string(thread.mbarrier->phase % 2) + " of " +
            thread.mbarrier->describe();
  if (thread.state == State::kAtMbarrier && thread.phase < thread.mbarrier->phase)
    text += ", whose phase " + std::to_string(thread.phase) + " ended and the next one, too";
  if (thread.state == State::kAtNamedBarrier) {
    const NamedBarrier &barrier = cta.named_barriers[thread.barrier];
    text += "(" + std::to_string(thread.barrier) + ", " + std::to_string(barrier.threads) +
            "), to which " + std::to_string(barrier.come) + " have come";
  }
  if (thread.state == State::kForRegisters) {
    const Registers &group = cta.registers[number % block_size_ / kWarpgroup];
    text += ": it needs " + std::to_string((group.wanted - group.now) * 128) +
            " registers, and the pool has " + std::to_string(cta.free_registers);
  }
  return text + in_block(cta);
}

void Block::report_stuck() {
  unsigned exited = 0;
  // The thread to name: one whose mask is not that of others, whose mbarrier's bytes are not those expected,
  // or that waits for registers is more likely the cause than who else waits.
  const Thread *first = nullptr, *likely = nullptr;
  std::string masks;
  for (const Thread &thread : threads_) {
    exited += thread.state == State::kExited;
    if (thread.state == State::kExited || !masks.empty()) continue;
    masks = other_mask(static_cast<unsigned>(&thread - threads_.data()));
    if (!first || !masks.empty()) first = &thread;
    if (!likely && (thread.state == State::kForRegisters ||
                    (thread.state == State::kAtMbarrier && thread.mbarrier->to_come == 0)))
      likely = &thread;
  }
  if (likely && masks.empty()) first = likely;
  if (!first) return;
  struct Waiting {  // threads at one place, for one thing
    const Thread *first;
    std::string what;
    unsigned threads;
  };
  std::vector<Waiting> places{{first, waits_for(*first), 0}};
  for (const Thread &thread : threads_) {
    if (thread.state == State::kExited) continue;
    const std::string what = waits_for(thread);
    const auto same = std::find_if(places.begin(), places.end(), [&](const Waiting &place) {
      return same_place(place.first->where, thread.where) && place.what == what;
    });
    if (same == places.end())
      places.push_back({&thread, what, 1});
    else
      same->threads++;
  }
  running_ = static_cast<unsigned>(first - threads_.data());
  std::string what = std::to_string(places[0].threads) + " of " + std::to_string(size_) +
                     " threads wait for ever in " + places[0].what + masks;
  if (exited) what += "; " + std::to_string(exited) + " have exited without reaching it";
  for (std::size_t i = 1; i < places.size(); i++)
    what += "; " + std::to_string(places[i].threads) + " wait in " + places[i].what + " at " +
            describe(places[i].first->where);
  report({Fault::kDeadlock, what}, describe(first->where));
}

// --- errors --------------------------------------------------------------------------------------

/// " of block (1,0,0)", or nothing where there is but one.
std::string Block::in_block(const Cta &cta) const {
  return ctas_.size() == 1 ? "" : " of block " + text(cta.index);
}

std::string name_of_thread(unsigned thread, bool of_these_blocks) {
  return Block::current->name_of(thread, of_these_blocks);
}

std::string name_of_warp(unsigned warp) {
  return Block::current->name_of_warp(warp);
}

std::string Block::name_of(unsigned thread, bool of_these_blocks) const {
  return "thread " + std::to_string(thread % block_size_) +
         (of_these_blocks ? in_block(ctas_[rank_of(thread)]) : "");
}

std::string Block::name_of_warp(unsigned warp) const {
  return "warp " + std::to_string(warp * 32 % block_size_ / 32) +
         in_block(ctas_[rank_of(warp * 32)]);
}

/// Ends the block with an error of the running thread.
void Block::report(const Error &error, const std::string &line) {
  error_ = (line.empty() ? "" : line + ": ") + tag_of(error.fault) + " block " +
           text(cta_of(running_).index) + " thread " + text(threads_[running_].index) + ": " +
           error.what;
}

void Block::fail(const Error &error, const Where &where) {
  report(error, describe(where));
  if (landing_) throw LandingFailed();
  for (;;) Fiber::yield();  // run() sees error_ and never resumes this fiber
}

void Block::fail_in_lane(unsigned lane, const Error &error, const Where &where) {
  fail_in_thread(running_ / 32 * 32 + lane, error, where);
}

void Block::fail_in_thread(unsigned thread, const Error &error, const Where &where) {
  running_ = thread;
  fail(error, where);
}

// --- memory --------------------------------------------------------------------------------------

void Block::access(const void *address, int bytes, const void *value, bool store,
                   const Where &where, const void *caller) {
  const char *operation = store ? "store" : "load";
  if (reinterpret_cast<std::uintptr_t>(address) & (bytes - 1))
    fail({Fault::kMisaligned, std::to_string(bytes) + "-byte " + operation +
                                  " at an address that is not a multiple of " +
                                  std::to_string(bytes)},
         where);
  const SiteId site = site_of(where);
  const Access access{clocks_, running_, site, store, bytes, address, value};
  const std::size_t offset = shared_offset(address);
  if (offset >= shared_bytes_) {
    access_global(access, where);
    if (settings.profile)
      requests_.add(running_, store ? Kind::kGlobalStore : Kind::kGlobalLoad, bytes,
                    reinterpret_cast<std::uintptr_t>(address), site, caller);
    return;
  }
  if (offset + bytes > shared_bytes_)
    fail({Fault::kBounds, std::string(operation) + " past the end of shared memory"}, where);
  const bool checked = settings.profile && !store &&  // else check_load has tried it
                       cta_->shadow.load_in_short(offset, bytes, running_, site, clocks_);
  if (!checked)
    if (const Error error = cta_->shadow.check(offset, access); !error.empty()) fail(error, where);
  if (settings.profile)
    requests_.add(running_, store ? Kind::kSharedStore : Kind::kSharedLoad, bytes, offset, site,
                  caller);
}

std::atomic<bool> has_waited;

void Block::wait_for_launch_before() {
  waits_.push_back({running_, clocks_.now()});
  has_waited = true;
}

/// Fails unless the running thread has waited for the launch before, or knows of a thread of its block that
/// has: what the launch before wrote is then visible. (Of another block's wait it cannot know.)
void Block::check_launch_before(const Allocation &allocation, const Access &access,
                                const char *operation, const Where &where) {
  const auto *byte = static_cast<const std::byte *>(access.memory);
  if (!beside_ || !allocation.shadow.races_with_launch_before(
                      static_cast<std::size_t>(byte - allocation.memory), access))
    return;
  if (std::none_of(waits_.begin(), waits_.end(), [&](const auto &wait) {
        return clocks_.knows(running_, wait.first, wait.second);
      }))
    fail(
        {Fault::kRace, std::string(operation) +
                           " of what the launch before may still be using: no griddepcontrol_wait"},
        where);
}

void Block::access_global(const Access &access, const Where &where) {
  thread_local Allocation *last = nullptr;
  thread_local std::uint64_t last_launch = 0;
  const auto *byte = static_cast<const std::byte *>(access.memory);
  if (last_launch != launch_number || !last || byte < last->memory ||
      byte >= last->memory + last->bytes) {
    last = find_allocation(byte);
    last_launch = launch_number;
  }
  if (!last || static_cast<std::size_t>(byte - last->memory) + access.bytes > last->bytes)
    fail({Fault::kBounds,
          std::string(access.store ? "store" : "load") + " outside of every allocation"},
         where);
  check_launch_before(*last, access, access.store ? "store" : "load", where);
  if (access.store)
    if (const Error error = copies_.check_store(byte, access.bytes); !error.empty())
      fail(error, where);
  const Error error = last->check(static_cast<std::size_t>(byte - last->memory), access);
  if (!error.empty()) fail(error, where);
}

unsigned Block::atomic(unsigned *address, const std::function<unsigned(unsigned)> &next,
                       const Where &where) {
  if (abandoned) {
    abandoned_ = true;
    for (;;) Fiber::yield();
  }
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof *address)
    fail({Fault::kMisaligned, "atomic at an address that is not a multiple of 4"}, where);
  const auto *byte = reinterpret_cast<const std::byte *>(address);
  const Allocation *allocation = find_allocation(byte);
  if (!allocation || byte + sizeof *address > allocation->memory + allocation->bytes)
    fail({Fault::kBounds, "atomic outside of every allocation"}, where);
  check_launch_before(*allocation,
                      {clocks_, running_, site_of(where), true, sizeof *address, address}, "atomic",
                      where);
  pause();
  std::this_thread::yield();  // a block that waits for another lets its host thread go on
  const std::lock_guard lock(atomics);
  clocks_.atomic(running_, told_by_atomics[address]);
  return std::exchange(*address, next(*address));
}

void Block::load_rows(const std::array<const void *, 32> &rows, int count, const Where &where) {
  const unsigned first_thread = running_ / 32 * 32;
  const SiteId site = site_of(where);
  Request request{
      Kind::kLdmatrix, 16, static_cast<std::uint32_t>((std::uint64_t{1} << count) - 1), {}, {}};
  for (int i = 0; i < count; i++) {
    const std::size_t offset = shared_offset(rows[i]);
    const Error error =
        !rows[i] ? Error{Fault::kBounds, "row or column out of bounds"}
        : offset >= shared_bytes_
            ? Error{Fault::kBounds, "ldmatrix of a row that is not in shared memory"}
        : offset % 16 ? Error{Fault::kMisaligned,
                              "ldmatrix of a row at an address that is not a multiple of 16"}
        : offset + 16 > shared_bytes_
            ? Error{Fault::kBounds, "ldmatrix of a row past the end of shared memory"}
            : cta_->shadow.check(offset, {clocks_, first_thread + i, site, false, 16});
    if (!error.empty()) fail_in_lane(i, error, where);
    request.address[i] = offset;
  }
  if (settings.profile) requests_.count(site, request, number_ == 0 && first_thread == 0);
}

void Block::store_rows(const std::array<const void *, 32> &rows, const Where &where) {
  const unsigned first_thread = running_ / 32 * 32;
  const SiteId site = site_of(where);
  Request request{Kind::kStmatrix, 16, kAllLanes, {}, {}};
  for (unsigned i = 0; i < 32; i++) {
    const std::size_t offset = shared_offset(rows[i]);
    const Error error =
        !rows[i] ? Error{Fault::kBounds, "row or column out of bounds"}
        : offset >= shared_bytes_
            ? Error{Fault::kBounds, "stmatrix to a row that is not in shared memory"}
        : offset % 16 ? Error{Fault::kMisaligned,
                              "stmatrix to a row at an address that is not a multiple of 16"}
        : offset + 16 > shared_bytes_
            ? Error{Fault::kBounds, "stmatrix to a row past the end of shared memory"}
            : cta_->shadow.check(offset, {clocks_, first_thread + i, site, true, 16});
    if (!error.empty()) fail_in_lane(i, error, where);
    request.address[i] = offset;
  }
  if (settings.profile) requests_.count(site, request, number_ == 0 && first_thread == 0);
}

// --- cp.async ------------------------------------------------------------------------------------

void Block::begin_copy(void *shared, const void *global, const Where &where, const void *caller) {
  const std::size_t offset = shared_offset(shared);
  if (offset >= shared_bytes_)
    fail({Fault::kBounds, "cp.async to what is not shared memory"}, where);
  if (offset % kCopyBytes)
    fail({Fault::kMisaligned, "cp.async to an address that is not a multiple of 16"}, where);
  if (offset + kCopyBytes > shared_bytes_)
    fail({Fault::kBounds, "cp.async past the end of shared memory"}, where);
  if (reinterpret_cast<std::uintptr_t>(global) % kCopyBytes)
    fail({Fault::kMisaligned, "cp.async from an address that is not a multiple of 16"}, where);
  const SiteId site = site_of(where);
  const Error error = cta_->shadow.begin_copy(offset, {clocks_, running_, site, true, kCopyBytes});
  if (!error.empty()) fail(error, where);
  if (global) access_global({clocks_, running_, site, false, kCopyBytes, global}, where);
  copies_.begin(running_, offset, global, site);
  if (!settings.profile) return;
  const auto source = reinterpret_cast<std::uintptr_t>(global);
  requests_.add(running_, Kind::kCopy, kCopyBytes, offset, site, caller, source);
  if (global) requests_.add(running_, Kind::kGlobalLoad, kCopyBytes, source, site, caller);
}

void Block::wait_for_copies(int groups) {
  Copy copy;
  while (copies_.end_one(running_, groups, copy)) {
    if (copy.global)
      std::memcpy(cta_->shared.get() + copy.offset, copy.global, kCopyBytes);
    else
      std::memset(cta_->shared.get() + copy.offset, 0, kCopyBytes);
    cta_->shadow.end_copy(copy.offset, {clocks_, running_, copy.site, true, kCopyBytes});
    if (!copy.global) continue;
    // It read its source until now.
    Allocation &source = *find_allocation(copy.global);
    (void)source.shadow.check(copy.global - source.memory,
                              {clocks_, running_, copy.site, false, kCopyBytes});
  }
}

void Block::count(Counter counter, const Where &where, const void *caller) {
  requests_.add(running_, counter, site_of(where), caller);
  if (counter == kExp2) note(running_, "exp2", -1, where);
}

}  // namespace emulator
