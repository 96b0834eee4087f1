#include "common/emulator/block.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "common/emulator/emulator.h"
#include "reference/random.h"

thread_local constinit dim3 threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

namespace emulator {

thread_local Block *Block::current = nullptr;

namespace {

constexpr int kTracedRequests = 2;  // per place, enough to draw a bank map

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
      warps_(size_ / 32) {
  for (unsigned i = 0; i < size_; i++)
    threads_[i].index = {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
}

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
    // A thread of the block before may have exited with copies under way. That is no error: a wait
    // is what a thread owes to those who read the copy.
    threads_[i].copies.clear();
    threads_[i].fiber.start([](void *self) { static_cast<Block *>(self)->entry_(); }, this);
    make_ready(i);
  }

  current = this;
  blockIdx = index_;
  blockDim = dim_;
  gridDim = grid_;
  while (!ready_.empty() && error_.empty()) {
    const std::uint64_t drawn = (next_random(random_) >> 32) * ready_.size() >> 32;
    running_ = std::exchange(ready_[drawn], ready_.back());
    ready_.pop_back();
    threadIdx = threads_[running_].index;
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

void Block::collective(const char *instruction, Counter counter, const Where &where, void *lane,
                       void (*compute)(void **lanes)) {
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
  compute(lanes);
  flush(warp);
  if (settings.profile) counts_of(site_of(where))[counter]++;
  warps_[warp].waiting = 0;
  for (unsigned i = warp * 32; i < warp * 32 + 32; i++)
    if (i != running_) make_ready(i);
  threads_[running_].state = State::kReady;
}

void Block::warp_barrier(const Where &where) {
  // The last lane to come counts it; all lanes go on in the new epoch.
  collective("__syncwarp", kWarpBarriers, where, &warps_[running_ / 32].barriers,
             [](void **lanes) { ++*static_cast<std::uint64_t *>(lanes[0]); });
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
  if (settings.profile)  // as a profiler counts: one per warp
    counts_of(site_of(where))[kBlockBarriers] += warps_.size();
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
  return "block " + text(index_) + " thread " + text(threads_[running_].index);
}

void Block::fail(const std::string &what, const Where &where) {
  error_ = describe(where) + ": " + position() + ": " + what;
  for (;;) Fiber::yield();  // run() sees error_ and never resumes this fiber
}

// --- memory --------------------------------------------------------------------------------------

Position Block::here(unsigned thread) const {
  return {thread, number_, barriers_, warps_[thread / 32].barriers};
}

/// Where in shared memory an address lies; at least shared_bytes_ if elsewhere.
std::size_t Block::shared_offset(const void *address) const {
  return reinterpret_cast<std::uintptr_t>(address) -
         reinterpret_cast<std::uintptr_t>(shared_.get());
}

void Block::access(const void *address, int bytes, bool store, const Where &where) {
  const char *operation = store ? "store" : "load";
  if (reinterpret_cast<std::uintptr_t>(address) % bytes)
    fail(std::to_string(bytes) + "-byte " + operation +
             " at an address that is not a multiple of " + std::to_string(bytes),
         where);
  const SiteId site = site_of(where);
  const std::size_t offset = shared_offset(address);
  if (offset >= shared_bytes_) return access_global(address, bytes, store, site, where);
  if (offset + bytes > shared_bytes_)
    fail(std::string(operation) + " past the end of shared memory", where);
  const std::string error = shadow_.check(offset, bytes, store, site, here(running_));
  if (settings.profile) count(store ? Kind::kSharedStore : Kind::kSharedLoad, bytes, offset, site);
  if (!error.empty()) fail(error, where);
}

void Block::access_global(const void *address, int bytes, bool store, SiteId site,
                          const Where &where) {
  thread_local Allocation *last = nullptr;
  thread_local std::uint64_t last_launch = 0;
  const auto *byte = static_cast<const std::byte *>(address);
  if (last_launch != launch_number || !last || byte < last->memory ||
      byte >= last->memory + last->bytes) {
    last = find_allocation(address);
    last_launch = launch_number;
  }
  if (!last || static_cast<std::size_t>(byte - last->memory) + bytes > last->bytes)
    fail(std::string(store ? "store" : "load") + " outside of every allocation", where);
  const std::string error = last->check(static_cast<std::size_t>(byte - last->memory), bytes, store,
                                        site, here(running_));
  if (settings.profile)
    count(store ? Kind::kGlobalStore : Kind::kGlobalLoad, bytes,
          reinterpret_cast<std::uintptr_t>(address), site);
  if (!error.empty()) fail(error, where);
}

void Block::load_rows(const std::array<const void *, 32> &rows, int count, const Where &where) {
  const unsigned warp = running_ / 32;
  const SiteId site = site_of(where);
  Request request{
      Kind::kLdmatrix, 16, static_cast<std::uint32_t>((std::uint64_t{1} << count) - 1), {}};
  for (int i = 0; i < count; i++) {
    const unsigned thread = warp * 32 + i;
    const std::size_t offset = shared_offset(rows[i]);
    const std::string error =
        offset >= shared_bytes_ ? "ldmatrix of a row that is not in shared memory"
        : offset % 16           ? "ldmatrix of a row at an address that is not a multiple of 16"
        : offset + 16 > shared_bytes_ ? "ldmatrix of a row past the end of shared memory"
                                      : shadow_.check(offset, 16, false, site, here(thread));
    if (!error.empty()) {
      running_ = thread;  // the lane to name, whichever came last
      fail(error, where);
    }
    request.address[i] = offset;
  }
  if (settings.profile) count_request(warp, site, request);
}

// --- cp.async ------------------------------------------------------------------------------------

void Block::begin_copy(void *shared, const void *global, const Where &where) {
  const std::size_t offset = shared_offset(shared);
  if (offset >= shared_bytes_) fail("cp.async to what is not shared memory", where);
  if (offset % kCopyBytes) fail("cp.async to an address that is not a multiple of 16", where);
  if (offset + kCopyBytes > shared_bytes_) fail("cp.async past the end of shared memory", where);
  if (reinterpret_cast<std::uintptr_t>(global) % kCopyBytes)
    fail("cp.async from an address that is not a multiple of 16", where);
  const SiteId site = site_of(where);
  const std::string error = shadow_.begin_copy(offset, site, here(running_));
  if (settings.profile) count(Kind::kCopy, kCopyBytes, offset, site);
  if (!error.empty()) fail(error, where);
  access_global(global, kCopyBytes, false, site, where);
  Thread &self = threads_[running_];
  self.copies.push_back({offset, global, site, self.groups});
}

void Block::commit_copies() {
  threads_[running_].groups++;
}

void Block::wait_for_copies(int groups) {
  Thread &self = threads_[running_];
  const Position now = here(running_);
  auto copy = self.copies.begin();
  // A copy that is not committed has the group that comes next: no wait covers it.
  for (; copy != self.copies.end() && copy->group + groups < self.groups; ++copy) {
    std::memcpy(shared_.get() + copy->offset, copy->global, kCopyBytes);
    shadow_.end_copy(copy->offset, copy->site, now);
  }
  self.copies.erase(self.copies.begin(), copy);
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

Counts &Block::counts_of(SiteId site) {
  counts_.resize(std::max<std::size_t>(counts_.size(), site + 1));
  return counts_[site];
}

void Block::count_request(unsigned warp, SiteId site, const Request &request) {
  Counts &counts = counts_of(site);
  const auto shared = [&](Counter requests, Counter wavefronts, Counter ideal) {
    const Wavefronts cost = shared_wavefronts(request);
    counts[requests]++;
    counts[wavefronts] += cost.actual;
    counts[ideal] += cost.ideal;
    if (number_ == 0 && warp == 0) trace(site, request, cost);
  };
  switch (request.kind) {
    case Kind::kSharedLoad:
    case Kind::kLdmatrix:
      shared(kSharedLoadRequests, kSharedLoadWavefronts, kSharedLoadIdeal);
      break;
    case Kind::kSharedStore:
      shared(kSharedStoreRequests, kSharedStoreWavefronts, kSharedStoreIdeal);
      break;
    case Kind::kCopy: shared(kCopyRequests, kCopyWavefronts, kCopyIdeal); break;
    case Kind::kGlobalLoad:
      counts[kGlobalLoadRequests]++;
      counts[kGlobalLoadSectors] += global_sectors(request);
      break;
    case Kind::kGlobalStore:
      counts[kGlobalStoreRequests]++;
      counts[kGlobalStoreSectors] += global_sectors(request);
      break;
    case Kind::kExp2: counts[kExp2]++; break;
  }
}

void Block::flush(unsigned warp_index) {
  Warp &warp = warps_[warp_index];
  for (const SiteId site : warp.touched) {
    Pending &pending = warp.pending[site];
    for (const Request &request : pending.requests) count_request(warp_index, site, request);
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
      trace_rows_.push_back({line_of(site), request.kind, traced_[site], lane,
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
