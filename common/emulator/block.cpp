#include "common/emulator/block.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "common/emulator/emulator.h"
#include "common/random.h"

thread_local constinit dim3 threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

namespace emulator {

thread_local Block *Block::current = nullptr;

namespace {

constexpr int kTracedRequests = 2;  // per place, enough to draw a bank map

bool same_place(const Where &a, const Where &b) {
  return a.line() == b.line() && a.column() == b.column() &&
         std::strcmp(a.file_name(), b.file_name()) == 0;
}

std::string describe(const Where &where) {
  return emulator::describe(Line{where.file_name(), where.line()});
}

std::string text(const Dim3 &d) {
  return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
}

std::byte *allocate_shared(std::size_t bytes) {
  const std::size_t padded = std::max<std::size_t>(1024, (bytes + 1023) / 1024 * 1024);
  void *memory = std::aligned_alloc(1024, padded);
  if (!memory) throw std::bad_alloc();
  return static_cast<std::byte *>(memory);
}

}  // namespace

Block::Block(Dim3 grid, Dim3 dim, std::size_t shared_bytes, const std::function<void()> &thread)
    : grid_(grid),
      dim_(dim),
      size_(dim.x * dim.y * dim.z),
      entry_(thread),
      shared_bytes_(shared_bytes),
      shared_(allocate_shared(shared_bytes), std::free),
      threads_(size_),
      warps_(size_ / 32) {}

void Block::run(std::uint64_t number) {
  number_ = number;
  index_ = {static_cast<unsigned>(number % grid_.x),
            static_cast<unsigned>(number / grid_.x % grid_.y),
            static_cast<unsigned>(number / grid_.x / grid_.y)};
  random_ = settings.seed * 0x2545f4914f6cdd1du + number;
  barriers_ = 0;
  in_block_barrier_ = 0;
  error_.clear();
  std::memset(shared_.get(), 0xff, shared_bytes_);  // NaN as fp16 and as fp32
  shadow_.reset(shared_bytes_);
  for (Warp &warp : warps_) {
    warp.waiting = warp.exited = 0;
    warp.barriers = 0;
  }
  ready_.clear();
  for (unsigned i = 0; i < size_; i++) {
    threads_[i].fiber.start([](void *self) { static_cast<Block *>(self)->entry_(); }, this);
    make_ready(i);
  }

  current = this;
  blockIdx = index_;
  blockDim = dim_;
  gridDim = grid_;
  while (!ready_.empty() && error_.empty()) {
    std::swap(ready_[next_random(random_) % ready_.size()], ready_.back());
    running_ = ready_.back();
    ready_.pop_back();
    threadIdx = {running_ % dim_.x, running_ / dim_.x % dim_.y, running_ / dim_.x / dim_.y};
    if (threads_[running_].fiber.resume()) {
      threads_[running_].state = State::kExited;
      if (++warps_[running_ / 32].exited == 32) flush(running_ / 32);
    }
  }
  if (error_.empty()) report_stuck();
  current = nullptr;
  if (!error_.empty()) throw KernelError(error_);
}

// --- threads that wait for each other ------------------------------------------------------------

void Block::make_ready(unsigned thread) {
  threads_[thread].state = State::kReady;
  ready_.push_back(thread);
}

void Block::wait(State state, const char *what, const Where &where) {
  Thread &self = threads_[running_];
  self.state = state;
  self.waits_for = what;
  self.where = where;
}

void Block::collective(const char *instruction, std::optional<Counter> counter, const Where &where,
                       void *lane, void (*compute)(void **lanes)) {
  const unsigned warp = running_ / 32;
  wait(State::kInWarp, instruction, where);
  threads_[running_].lane = lane;
  if (++warps_[warp].waiting < 32) return Fiber::yield();

  void *lanes[32];
  for (unsigned i = 0; i < 32; i++) {
    const Thread &other = threads_[warp * 32 + i];
    lanes[i] = other.lane;
    if (!same_place(other.where, where))
      fail(std::string("lanes of one warp wait in different instructions: ") + instruction +
               " here, " + other.waits_for + " at " + describe(other.where) + " in lane " +
               std::to_string(i),
           where);
  }
  if (compute) compute(lanes);
  flush(warp);
  if (settings.profile && counter) {
    const SiteId site = site_of(where);
    counts_.resize(std::max<std::size_t>(counts_.size(), site + 1));
    counts_[site][*counter]++;
  }
  warps_[warp].waiting = 0;
  for (unsigned i = warp * 32; i < warp * 32 + 32; i++)
    if (i != running_) make_ready(i);
  threads_[running_].state = State::kReady;
}

void Block::warp_barrier(const Where &where) {
  // The last lane to come counts it; all lanes go on in the new epoch.
  struct Lane {
    std::uint64_t *barriers;
  } lane{&warps_[running_ / 32].barriers};
  collective("__syncwarp", kWarpBarriers, where, &lane,
             [](void **lanes) { ++*static_cast<Lane *>(lanes[0])->barriers; });
}

void Block::block_barrier(const Where &where) {
  wait(State::kInBlock, "__syncthreads", where);
  if (++in_block_barrier_ < size_) return Fiber::yield();

  for (unsigned i = 0; i < size_; i++)
    if (!same_place(threads_[i].where, where))
      fail("threads of one block wait at different barriers: here, and thread " +
               std::to_string(i) + " at " + describe(threads_[i].where),
           where);
  in_block_barrier_ = 0;
  barriers_++;
  for (unsigned warp = 0; warp < warps_.size(); warp++) flush(warp);
  if (settings.profile) {
    const SiteId site = site_of(where);
    counts_.resize(std::max<std::size_t>(counts_.size(), site + 1));
    counts_[site][kBlockBarriers] += warps_.size();  // as a profiler counts: one per warp
  }
  for (unsigned i = 0; i < size_; i++)
    if (i != running_) make_ready(i);
  threads_[running_].state = State::kReady;
}

void Block::report_stuck() {
  unsigned exited = 0;
  const Thread *first = nullptr;
  for (const Thread &thread : threads_) {
    exited += thread.state == State::kExited;
    if (thread.state != State::kExited && !first) first = &thread;
  }
  if (!first) return;
  unsigned with_first = 0;
  const Thread *other = nullptr;
  for (const Thread &thread : threads_) {
    if (thread.state == State::kExited) continue;
    if (same_place(thread.where, first->where))
      with_first++;
    else
      other = &thread;
  }
  running_ = static_cast<unsigned>(first - threads_.data());
  error_ = describe(first->where) + ": " + position() + ": " + std::to_string(with_first) + " of " +
           std::to_string(size_) + " threads wait for ever in " + first->waits_for;
  if (exited) error_ += "; " + std::to_string(exited) + " have exited without reaching it";
  if (other)
    error_ += std::string("; others wait in ") + other->waits_for + " at " + describe(other->where);
}

// --- errors --------------------------------------------------------------------------------------

std::string Block::position() const {
  const Dim3 thread{running_ % dim_.x, running_ / dim_.x % dim_.y, running_ / dim_.x / dim_.y};
  return "block " + text(index_) + " thread " + text(thread);
}

void Block::fail(const std::string &what, const Where &where) {
  error_ = describe(where) + ": " + position() + ": " + what;
  for (;;) Fiber::yield();  // run() sees error_ and never resumes this fiber
}

// --- memory --------------------------------------------------------------------------------------

void Block::access(const void *address, int bytes, bool store, const Where &where) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  const char *operation = store ? "store" : "load";
  if (value % bytes)
    fail(std::to_string(bytes) + "-byte " + operation +
             " at an address that is not a multiple of " + std::to_string(bytes),
         where);
  const SiteId site = site_of(where);
  const Position now{running_, number_, barriers_, warps_[running_ / 32].barriers};
  const std::uint64_t offset = value - reinterpret_cast<std::uintptr_t>(shared_.get());
  std::string error;
  if (offset < shared_bytes_) {
    if (offset + bytes > shared_bytes_)
      fail(std::string(operation) + " past the end of shared memory", where);
    error = shadow_.check(offset, bytes, store, site, now);
    if (settings.profile)
      count(store ? Kind::kSharedStore : Kind::kSharedLoad, bytes, offset, site);
  } else {
    thread_local Allocation *last = nullptr;
    thread_local std::uint64_t last_launch = 0;
    const auto *byte = static_cast<const std::byte *>(address);
    if (last_launch != launch_number || !last || byte < last->memory ||
        byte >= last->memory + last->bytes) {
      last = find_allocation(address);
      last_launch = launch_number;
    }
    if (!last || static_cast<std::size_t>(byte - last->memory) + bytes > last->bytes)
      fail(std::string(operation) + " outside of every allocation", where);
    error = last->check(static_cast<std::size_t>(byte - last->memory), bytes, store, site, now);
    if (settings.profile) count(store ? Kind::kGlobalStore : Kind::kGlobalLoad, bytes, value, site);
  }
  if (!error.empty()) fail(error, where);
}

// --- counting ------------------------------------------------------------------------------------

// The n-th time that each lane comes by one place of the source, between two points where the warp
// is together, is one request of the warp.
void Block::count(Kind kind, int bytes, std::uint64_t address, SiteId site) {
  Warp &warp = warps_[running_ / 32];
  const unsigned lane = running_ % 32;
  if (warp.pending.size() <= site) warp.pending.resize(site + 1);
  Pending &pending = warp.pending[site];
  if (pending.requests.empty()) warp.touched.push_back(site);
  const std::uint32_t n = pending.next[lane]++;
  if (n >= pending.requests.size()) pending.requests.push_back(Request{kind, bytes, 0, {}});
  Request &request = pending.requests[n];
  request.active |= 1u << lane;
  request.address[lane] = address;
}

void Block::flush(unsigned warp_index) {
  Warp &warp = warps_[warp_index];
  for (const SiteId site : warp.touched) {
    Pending &pending = warp.pending[site];
    counts_.resize(std::max<std::size_t>(counts_.size(), site + 1));
    Counts &counts = counts_[site];
    for (const Request &request : pending.requests) {
      switch (request.kind) {
        case Kind::kSharedLoad:
        case Kind::kSharedStore: {
          const Wavefronts wavefronts = shared_wavefronts(request);
          const bool load = request.kind == Kind::kSharedLoad;
          counts[load ? kSharedLoadRequests : kSharedStoreRequests]++;
          counts[load ? kSharedLoadWavefronts : kSharedStoreWavefronts] += wavefronts.actual;
          counts[load ? kSharedLoadIdeal : kSharedStoreIdeal] += wavefronts.ideal;
          if (number_ == 0 && warp_index == 0) trace(site, request, wavefronts);
          break;
        }
        case Kind::kGlobalLoad:
        case Kind::kGlobalStore: {
          const bool load = request.kind == Kind::kGlobalLoad;
          counts[load ? kGlobalLoadRequests : kGlobalStoreRequests]++;
          counts[load ? kGlobalLoadSectors : kGlobalStoreSectors] += global_sectors(request);
          break;
        }
        case Kind::kExp2: counts[kExp2]++; break;
      }
    }
    pending.requests.clear();
    pending.next.fill(0);
  }
  warp.touched.clear();
}

void Block::trace(SiteId site, const Request &request, const Wavefronts &wavefronts) {
  traced_.resize(std::max<std::size_t>(traced_.size(), site + 1));
  if (traced_[site] == kTracedRequests) return;
  for (int lane = 0; lane < 32; lane++)
    if (request.active >> lane & 1)
      trace_rows_.push_back({line_of(site), request.kind == Kind::kSharedStore, traced_[site], lane,
                             request.address[lane], request.bytes, wavefronts.of_lane[lane]});
  traced_[site]++;
}

void Block::add_counts(Profile &profile) const {
  for (SiteId site = 1; site < counts_.size(); site++) {
    Counts &sum = profile.lines[line_of(site)];
    for (int i = 0; i < kCounters; i++) sum[i] += counts_[site][i];
  }
  profile.trace.insert(profile.trace.end(), trace_rows_.begin(), trace_rows_.end());
}

}  // namespace emulator
