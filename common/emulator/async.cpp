// SPDX-License-Identifier: MIT
// What of a block is asynchronous: operations under way, mbarriers, named barriers, warpgroups, TMA.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "common/emulator/block.h"
#include "common/emulator/memory.h"

namespace emulator {
namespace {

/// What the tx-count of an mbarrier and its count of arrivals can be (PTX ISA, 'mbarrier': 2^20 - 1).
constexpr int kMostOfMbarrier = (1 << 20) - 1;

/// A slab's row, which the copy engine copies as one.
constexpr int kRowBytes = 128;

}  // namespace

// --- asynchronous operations -------------------------------------------------------------------

Operation Block::begin_operation(unsigned queue, std::function<void()> land) {
  const bool drawn = draw(2) == 0;
  under_way_.push_back({++operations_, queue, running_, drawn, std::move(land)});
  drawn_ += drawn;
  return operations_;
}

void Block::finish(Operation operation) {
  while (error_.empty()) {
    const auto found = std::find_if(under_way_.begin(), under_way_.end(),
                                    [=](const UnderWay &one) { return one.number == operation; });
    if (found == under_way_.end()) return;
    land(static_cast<std::size_t>(found - under_way_.begin()));
  }
  for (;;) Fiber::yield();
}

/// Lands the n-th of those that are drawn among the threads.
void Block::land_drawn(std::size_t n) {
  for (std::size_t i = 0;; i++)
    if (under_way_[i].drawn && n-- == 0) return land(i);
}

/// Lands an operation, or the first of its queue.
void Block::land(std::size_t i) {
  if (const unsigned queue = under_way_[i].queue; queue != kNoQueue)
    for (i = 0; under_way_[i].queue != queue;) i++;
  const UnderWay one = std::move(under_way_[i]);
  under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(i));
  drawn_ -= one.drawn;
  const unsigned running = std::exchange(running_, one.thread);
  Cta *const cta = std::exchange(cta_, &cta_of(one.thread));
  landing_ = true;
  try {
    one.land();
  } catch (const LandingFailed &) {
    // error_ says why.
  }
  landing_ = false;
  running_ = running;
  cta_ = cta;
}

ReadNumber Block::begin_async_read(std::span<const SharedBytes> bytes, unsigned warp,
                                   const Where &where) {
  AsyncRead read{&kWgmmaEngine, {}, warp * 32, std::min(32u, size_ - warp * 32), site_of(where)};
  for (const SharedBytes &some : bytes) {
    const std::size_t offset = shared_offset(some.first);
    if (offset >= shared_bytes_ || offset + some.bytes > shared_bytes_)
      fail({Fault::kBounds, "wgmma of what is not in shared memory"}, where);
    read.pieces.push_back({offset, some.bytes});
  }
  const Error error = cta_->shadow.begin_async_read(read, clocks_);
  if (!error.empty()) {
    running_ = read.first_thread;
    fail(error, where);
  }
  reads_.emplace(++read_numbers_, std::move(read));
  return read_numbers_;
}

void Block::end_async_read(ReadNumber number) {
  const auto found = reads_.find(number);
  end_read(found->second, warps_[found->second.first_thread / 32].lanes);
  reads_.erase(found);
}

/// An engine has read, and these lanes of the warp on whose word it did know.
void Block::end_read(const AsyncRead &read, std::uint32_t lanes) {
  const unsigned warp = read.first_thread / 32;
  if (!readers_[warp]) readers_[warp] = clocks_.add_agent();
  cta_->shadow.end_async_read(read, readers_[warp], clocks_.now());
  clocks_.learn_of_agent(readers_[warp], warp, lanes);
}

// --- warpgroups ----------------------------------------------------------------------------------

void Block::warpgroup_collective(const Collective &what, const Where &where, void *lane) {
  const unsigned first = running_ / kWarpgroup * kWarpgroup;
  Thread &self = threads_[running_];
  if (size_ - first < kWarpgroup)
    fail({Fault::kDivergence, std::string(what.name) +
                                  ": takes a warpgroup of 128 threads, and the block's last has " +
                                  std::to_string(size_ - first)},
         where);
  wait(State::kInWarpgroup, what.name, where);
  self.collective = &what;
  self.lane = lane;
  void *operands[kWarpgroup];
  for (unsigned i = 0; i < kWarpgroup; i++) {
    const Thread &other = threads_[first + i];
    if (other.state == State::kExited)
      fail({Fault::kDivergence, std::string(what.name) +
                                    ": takes all 128 threads of the warpgroup, and " +
                                    name_of(first + i) + " has exited"},
           where);
    if (other.state != State::kInWarpgroup) return Fiber::yield();
    operands[i] = other.lane;
  }
  for (unsigned i = 0; i < kWarpgroup; i++)
    if (const Thread &other = threads_[first + i];
        other.collective != &what || !same_place(other.where, where))
      fail({Fault::kDivergence,
            std::string("warps of one warpgroup are at different instructions: ") + what.name +
                " here, " + other.waits_in + " at " + describe(other.where) + " in " +
                name_of_warp((first + i) / 32)},
           where);
  what.compute(operands);
  if (settings.profile)
    for (unsigned warp = first / 32; warp < (first + kWarpgroup) / 32; warp++) {
      flush(warp);
      if (what.counter == kCounters) continue;
      requests_.count(site_of(where), what.counter, 1);
      count_mma(what.counter);
    }
  for (unsigned thread = first; thread < first + kWarpgroup; thread++)
    if (thread != running_) make_ready(thread);
  self.state = State::kReady;
}

/// The pool has the registers that the block was launched with and that warpgroups gave back. (PTX ISA
/// 'setmaxnreg': undefined where inc asks for fewer, or dec for more.)
void Block::set_registers(int registers, bool more, const Where &where) {
  static constexpr auto change = [](void **lanes) {
    current->change_registers(*static_cast<int *>(lanes[0]));
  };
  static constexpr Collective kMore{"setmaxnreg_inc", kCounters, true, false, change},
      kLess{"setmaxnreg_dec", kCounters, true, false, change};
  const Collective &what = more ? kMore : kLess;
  const std::string name = std::string(what.name) + "<" + std::to_string(registers) + ">";
  if (registers % 8 || registers < 24 || registers > 256)
    fail({Fault::kRegisters, name + ": a multiple of 8 from 24 to 256 is allowed"}, where);
  Registers &group = registers_of(running_);
  if (more && registers < group.now) share_registers(registers);
  if (more ? registers < group.now : registers > group.now)
    fail({Fault::kRegisters,
          name + ": the threads have " + std::to_string(group.now) + " registers each"},
         where);
  int all = 0, least = 0;
  for (const Registers &of_group : cta_->registers) {
    all += of_group.now;
    least += std::min(of_group.now, 24);
  }
  all += cta_->free_registers / static_cast<int>(kWarpgroup);
  if (registers + least - 24 > all)
    fail({Fault::kRegisters, name + ": the block's warpgroups have " + std::to_string(all) +
                                 " together, and keep 24 each"},
         where);
  warpgroup_collective(what, where, &registers);
  while (group.wanted) {
    wait(State::kForRegisters, what.name, where);
    Fiber::yield();
  }
}

/// The running thread's warpgroup asks for more than it has, and for less than a block has that is alone
/// on its multiprocessor: then so many share it (the launch bounds say so to nvcc, not to the emulator)
/// that it has less.
void Block::share_registers(int wanted) {
  int blocks = 1;
  while (blocks * block_size_ <= 2048 && launch_registers(blocks * block_size_) > wanted) blocks++;
  const int each = launch_registers(blocks * block_size_);
  const int before = launch_registers(block_size_);
  if (blocks * block_size_ > 2048 || registers_of(running_).now != before) return;
  for (Registers &group : cta_->registers)
    if (group.now == before)
      group.now = each;
    else  // it gave back less
      cta_->free_registers -= (before - each) * static_cast<int>(kWarpgroup);
}

/// The running thread's warpgroup has come to setmaxnreg. Whoever waits for registers gets them once
/// there are enough, the first warpgroup first.
void Block::change_registers(int registers) {
  registers_of(running_).wanted = registers;
  for (bool changed = true; std::exchange(changed, false);)
    for (unsigned i = 0; i < cta_->registers.size(); i++) {
      Registers &group = cta_->registers[i];
      const int more = (group.wanted - group.now) * static_cast<int>(kWarpgroup);
      if (!group.wanted || more > cta_->free_registers) continue;
      cta_->free_registers -= more;
      group = {group.wanted, 0};
      changed = true;
      const unsigned first = rank_of(running_) * block_size_ + i * kWarpgroup;
      for (unsigned thread = first; thread < first + kWarpgroup; thread++)
        if (threads_[thread].state == State::kForRegisters) make_ready(thread);
    }
}

// --- named barriers ------------------------------------------------------------------------------

void Block::named_barrier(int id, int threads, bool sync, const Where &where) {
  const std::string name = std::string(sync ? "named_barrier_sync(" : "named_barrier_arrive(") +
                           std::to_string(id) + ", " + std::to_string(threads) + ")";
  if (id < 1 || id > 15) fail({Fault::kBarrier, name + ": barriers 1 to 15 are allowed"}, where);
  if (threads < 32 || threads % 32 || threads > static_cast<int>(block_size_))
    fail({Fault::kBarrier, name + ": a multiple of 32 up to the block's " +
                               std::to_string(block_size_) + " threads is allowed"},
         where);
  NamedBarrier &barrier = cta_->named_barriers[id];
  if (barrier.come && barrier.threads != threads)
    fail({Fault::kBarrier, name + ": the barrier is for " + std::to_string(barrier.threads) +
                               " threads at " + describe(barrier.where)},
         where);
  // Who does not know that the last phase has ended may arrive in it. Who waited for it knows.
  if (std::none_of(barrier.before.begin(), barrier.before.end(),
                   [&](const Arrival &one) { return one.sync && one.thread == running_; }))
    for (const Arrival &one : barrier.before)
      if (!clocks_.knows(running_, one.thread, one.time))
        fail({Fault::kBarrier, name + ": the barrier may still be in use, for " +
                                   std::to_string(barrier.threads_before) + " threads at " +
                                   describe(barrier.where) + ", by " + name_of(one.thread) +
                                   ": no barrier between them"},
             where);
  barrier.threads = threads;
  barrier.where = where;
  barrier.arrivals.push_back({running_, sync, clocks_.now()});
  if (!sync) note(running_, "named_barrier_arrive", id, where);
  clocks_.release(running_, barrier.told);
  const bool last = ++barrier.come == threads;
  if (!last) {
    if (!sync) return pause();
    wait(State::kAtNamedBarrier, "named_barrier_sync", where);
    threads_[running_].barrier = id;
    barrier.waiting.push_back(running_);
    Fiber::yield();
    return note(running_, "named_barrier_sync", id, where);
  }
  for (const unsigned thread : barrier.waiting) {
    clocks_.acquire(thread, barrier.told);
    make_ready(thread);
  }
  if (sync) {
    clocks_.acquire(running_, barrier.told);
    note(running_, "named_barrier_sync", id, where);
  }
  NamedBarrier next;
  next.where = where;
  next.threads_before = threads;
  next.before = std::move(barrier.arrivals);
  barrier = std::move(next);
  pause();
}

// --- mbarriers -----------------------------------------------------------------------------------

bool BarrierState::end_phase() {
  if (to_come || expected != landed) return false;
  phase++;
  to_come = count;
  expected = landed = 0;
  told_to_waiting = told;
  return true;
}

std::string BarrierState::describe() const {
  std::string name = initialised_at(line_of(site));
  if (*part)
    name += (name.empty() ? "" : ".") + std::string(part) + "[" + std::to_string(index) + "]";
  if (!name.empty()) name = " " + name;
  std::string text = "the mbarrier" + name + " of " + emulator::describe(line_of(site)) +
                     " (at byte " + std::to_string(offset) + ", phase " + std::to_string(phase) +
                     ", " + std::to_string(to_come) + " of " + std::to_string(count) +
                     " arrivals to come";
  if (expected || landed)
    text +=
        ", " + std::to_string(expected) + " bytes expected, " + std::to_string(landed) + " landed";
  return text + ")";
}

void Block::mbarrier_init(const void *address, int arrivals, const char *part, const Where &where) {
  const std::size_t offset = shared_offset(address);
  if (offset >= shared_bytes_ || offset + sizeof(std::uint64_t) > shared_bytes_)
    fail({Fault::kBounds, "mbarrier_init of what is not in shared memory"}, where);
  if (offset % sizeof(std::uint64_t))
    fail({Fault::kMisaligned, "mbarrier_init at an address that is not a multiple of 8"}, where);
  if (arrivals < 1 || arrivals > kMostOfMbarrier)
    fail({Fault::kBarrier, "mbarrier_init for " + std::to_string(arrivals) + " arrivals: 1 to " +
                               std::to_string(kMostOfMbarrier) + " are allowed"},
         where);
  if (const BarrierState *before = cta_->mbarriers.find(offset))
    fail({Fault::kBarrier, "mbarrier_init of " + before->describe() + ", which is in use"}, where);
  BarrierState barrier{};
  barrier.offset = offset;
  barrier.part = part;
  barrier.site = site_of(where);
  for (const auto &[other_offset, other] : cta_->mbarriers.all())
    barrier.index += other.site == barrier.site && std::strcmp(other.part, part) == 0;
  barrier.thread = running_;
  barrier.time = clocks_.now();
  barrier.count = barrier.to_come = arrivals;
  cta_->mbarriers.add(offset, barrier);
}

void Block::mbarrier_fence_init() {
  const Time time = clocks_.next();
  for (auto &[offset, barrier] : cta_->mbarriers.all())
    if (barrier.thread == running_) barrier.fenced = time;
}

/// The mbarrier at this place of a block's shared memory, if the running thread may use it.
BarrierState &Block::usable_mbarrier(const char *what, Cta &cta, std::size_t offset,
                                     const Where &where) {
  BarrierState *barrier = cta.mbarriers.find(offset);
  if (!barrier)
    fail({Fault::kUninitialised, std::string(what) + " of an mbarrier" +
                                     (&cta == cta_ ? "" : in_block(cta)) +
                                     " that nobody has initialised"},
         where);
  if (!clocks_.knows(running_, barrier->thread, barrier->time))
    fail({Fault::kRace, std::string(what) + " of an mbarrier that " + name_of(barrier->thread) +
                            " initialises at " + describe(line_of(barrier->site)) + ": no " +
                            (&cta == cta_ ? "barrier" : "cluster_sync") + " between them"},
         where);
  return *barrier;
}

void Block::mbarrier_arrive(const void *address, int bytes, const Where &where) {
  BarrierState &barrier = usable_mbarrier("mbarrier_arrive", *cta_, shared_offset(address), where);
  if (bytes < 0 || barrier.expected + bytes > kMostOfMbarrier)
    fail({Fault::kBarrier, "mbarrier_arrive_expect_tx of " + std::to_string(bytes) +
                               " bytes: a phase has at most " + std::to_string(kMostOfMbarrier)},
         where);
  if (barrier.to_come == 0)
    fail({Fault::kBarrier,
          "mbarrier_arrive: one arrival more than " + barrier.describe() + " has room for"},
         where);
  note(running_, "mbarrier_arrive", static_cast<std::int64_t>(barrier.offset), where);
  clocks_.release(running_, barrier.told);
  barrier.expected += bytes;
  barrier.to_come--;
  go_on_if_ended(barrier);
  pause();
}

/// The arrival has the default scope, the block: to another block it tells what engines have done and the
/// thread has waited for, and of the thread's own loads and stores nothing.
void Block::mbarrier_arrive_at(const void *address, int rank, const Where &where) {
  constexpr const char *kName = "mbarrier_arrive_at";
  if (rank < 0 || rank >= static_cast<int>(ctas_.size()))
    fail({Fault::kBounds, std::string(kName) + ": block " + std::to_string(rank) +
                              " of a cluster that has " + std::to_string(ctas_.size())},
         where);
  Cta &to = ctas_[static_cast<unsigned>(rank)];
  if (&to == cta_) return mbarrier_arrive(address, 0, where);
  BarrierState &barrier = usable_mbarrier(kName, to, shared_offset(address), where);
  if (!is_fenced(barrier))
    fail({Fault::kFence, std::string(kName) + ": other blocks may not see the mbarrier that " +
                             name_of(barrier.thread) + " initialises at " +
                             describe(line_of(barrier.site)) +
                             ": no mbarrier_fence_init between them"},
         where);
  if (barrier.to_come == 0)
    fail({Fault::kBarrier, std::string(kName) + ": one arrival more than " + barrier.describe() +
                               in_block(to) + " has room for"},
         where);
  clocks_.release_agents(running_, barrier.told);
  note_remote(barrier, false, site_of(where));
  barrier.to_come--;
  go_on_if_ended(barrier);
  pause();
}

/// The running thread has arrived, or its copy has landed, at a barrier of another block in this phase.
void Block::note_remote(BarrierState &barrier, bool copy, SiteId site) {
  if (barrier.remote_phase != barrier.phase) barrier.remote.clear();
  barrier.remote_phase = barrier.phase;
  barrier.remote.push_back({copy, site, running_, clocks_.now()});
}

/// If the phase has ended, lets those go on that wait for it.
void Block::go_on_if_ended(BarrierState &barrier) {
  if (!barrier.end_phase()) return;
  for (const unsigned thread : std::exchange(barrier.waiting, {})) make_ready(thread);
}

void Block::mbarrier_wait(const void *address, int parity, const Where &where) {
  BarrierState &barrier = usable_mbarrier("mbarrier_wait", *cta_, shared_offset(address), where);
  if (parity != 0 && parity != 1)
    fail({Fault::kBarrier,
          "mbarrier_wait for parity " + std::to_string(parity) + ": 0 and 1 are allowed"},
         where);
  threads_[running_].mbarrier = &barrier;
  threads_[running_].phase = barrier.phase;
  // Who goes on late may find the next phase ended, too, and waits again, as on a GPU.
  while (static_cast<int>(barrier.phase % 2) == parity) {
    wait(State::kAtMbarrier, "mbarrier_wait", where);
    barrier.waiting.push_back(running_);
    Fiber::yield();
  }
  barrier.waited_for = std::max(barrier.waited_for, barrier.phase);
  clocks_.acquire(running_, barrier.told_to_waiting);
  note(running_, "mbarrier_wait", static_cast<std::int64_t>(barrier.offset), where);
  pause();
}

// --- TMA -----------------------------------------------------------------------------------------

/// Fails unless the copy engine takes this; returns where the tile is in shared memory.
std::size_t Block::check_transfer(bool store, const TmaTransfer &transfer, const Where &where) {
  const std::string name = store ? kStoreEngine.name : kLoadEngine.name;
  const Tensor &tensor = transfer.tensor;
  const auto shape = [](int rows, int d, int bytes) {
    return std::to_string(rows) + " x " + std::to_string(d) + " of " + std::to_string(bytes) +
           " bytes";
  };
  const std::size_t offset = shared_offset(transfer.tile);
  const auto bytes =
      static_cast<std::size_t>(transfer.tile_rows) * transfer.d * transfer.element_bytes;
  if (offset >= shared_bytes_ || offset + bytes > shared_bytes_)
    fail({Fault::kBounds, name + ": the tile is not in shared memory"}, where);
  if (offset % 1024)
    fail({Fault::kMisaligned, name + ": the tile begins at byte " + std::to_string(offset) +
                                  " of shared memory, which is not a multiple of 1024"},
         where);
  if (transfer.tile_rows != tensor.tile_rows || transfer.d != tensor.tile_d ||
      transfer.element_bytes != tensor.element_bytes)
    fail({Fault::kDescriptor,
          name + ": the tile is " + shape(transfer.tile_rows, transfer.d, transfer.element_bytes) +
              ", the map's box " + shape(tensor.tile_rows, tensor.tile_d, tensor.element_bytes)},
         where);
  if (transfer.col + transfer.d > tensor.d)
    fail({Fault::kBounds, name + ": columns to " + std::to_string(transfer.col + transfer.d) +
                              " of a tensor that has " + std::to_string(tensor.d)},
         where);
  return offset;
}

namespace {

/// Whether the tensor has this row of a tile, and where.
bool is_there(const TmaTransfer &transfer, int row) {
  const Tensor &tensor = transfer.tensor;
  return transfer.head >= 0 && transfer.head < tensor.heads && transfer.batch >= 0 &&
         transfer.batch < tensor.batch && transfer.row + row >= 0 &&
         transfer.row + row < tensor.rows;
}
std::byte *row_of(const TmaTransfer &transfer, int row) {
  const Tensor &tensor = transfer.tensor;
  return tensor.data + transfer.batch * tensor.batch_stride + transfer.head * tensor.head_stride +
         (transfer.row + row) * tensor.row_stride + transfer.col * tensor.element_bytes;
}

/// Where in the tile's memory the 16 bytes with this number of a row lie: in a slab of 8, permuted by
/// the row (PTX ISA, 'Tensor swizzling modes').
std::byte *chunk_of(const TmaTransfer &transfer, int row, int chunk) {
  return transfer.tile + chunk / 8 * (transfer.tile_rows * 128) + row * 128 +
         (chunk % 8 ^ row % 8) * 16;
}

int chunks_of_row(const TmaTransfer &transfer) {
  return transfer.d * transfer.element_bytes / kCopyBytes;
}

std::size_t bytes_of(const TmaTransfer &transfer) {
  return static_cast<std::size_t>(transfer.tile_rows) * transfer.d * transfer.element_bytes;
}

}  // namespace

/// Checks the accesses to global memory, as the running thread's.
void Block::access_tensor(const TmaTransfer &transfer, bool store, SiteId site,
                          const Where &where) {
  for (int row = 0; row < transfer.tile_rows; row++)
    for (int chunk = 0; is_there(transfer, row) && chunk < chunks_of_row(transfer); chunk++)
      access_global(
          {clocks_, running_, site, store, kCopyBytes, row_of(transfer, row) + chunk * kCopyBytes},
          where);
}

/// A load counts once, its bytes in each block where they land, as ncu counts them.
void Block::count_load(const TmaTransfer &transfer, const Where &where, int blocks) {
  if (!settings.profile) return;
  requests_.count(site_of(where), kTmaLoads, 1);
  requests_.count(site_of(where), kTmaLoadBytes, blocks * bytes_of(transfer));
}

void Block::tma_load(const TmaTransfer &transfer, const void *barrier, const Where &where) {
  check_transfer(false, transfer, where);
  count_load(transfer, where);
  begin_load(*cta_, transfer, shared_offset(barrier), where);
}

void Block::tma_load_multicast(const TmaTransfer &transfer, const void *barrier, unsigned blocks,
                               const Where &where) {
  check_transfer(false, transfer, where);
  if (!blocks || blocks >> ctas_.size())
    fail({Fault::kBounds, "TMA load to the blocks " + std::to_string(blocks) +
                              ", as bits, of a cluster that has " + std::to_string(ctas_.size())},
         where);
  count_load(transfer, where, std::popcount(blocks));
  if (settings.profile) {
    requests_.count(site_of(where), kMulticasts, 1);
    requests_.count(site_of(where), kMulticastBytes, bytes_of(transfer));
  }
  for (unsigned rank = 0; rank < ctas_.size(); rank++)
    if (blocks >> rank & 1) begin_load(ctas_[rank], transfer, shared_offset(barrier), where);
}

/// Begins the load's part that lands in this block, at the barrier with this place there.
void Block::begin_load(Cta &to, const TmaTransfer &transfer, std::size_t barrier_offset,
                       const Where &where) {
  BarrierState &barrier = usable_mbarrier("TMA load", to, barrier_offset, where);
  if (!is_fenced(barrier) && !clocks_.visible(running_, barrier.thread, barrier.time))
    fail({Fault::kFence, "TMA load: the copy engine may not see the mbarrier that " +
                             name_of(barrier.thread) + " initialises at " +
                             describe(line_of(barrier.site)) +
                             ": no mbarrier_fence_init between them"},
         where);
  note(running_, "tma_load", static_cast<std::int64_t>(barrier_offset), where);
  if (!barrier.agent) barrier.agent = clocks_.add_agent();
  const SiteId site = site_of(where);
  const Piece piece{shared_offset(transfer.tile), bytes_of(transfer)};
  const Error error = to.shadow.begin_async_write(
      piece, {clocks_, running_, site, true, static_cast<int>(piece.bytes)});
  if (!error.empty())
    fail({error.fault, error.what + (&to == cta_ ? "" : "; the memory is that" + in_block(to))},
         where);
  access_tensor(transfer, false, site, where);
  TmaTransfer there = transfer;
  there.tile = to.shared.get() + piece.offset;
  begin_operation(kNoQueue, [=, this, &barrier, &to] { land_load(to, there, 0, barrier, where); });
  pause();
}

/// Copies a load's bytes from this one on. If its barrier's phase ends with fewer, because it expects fewer,
/// the rest lands at another moment, as on a GPU.
void Block::land_load(Cta &to, const TmaTransfer &transfer, std::size_t from, BarrierState &barrier,
                      const Where &where) {
  const SiteId site = site_of(where);
  const std::size_t offset = static_cast<std::size_t>(transfer.tile - to.shared.get());
  std::size_t bytes = bytes_of(transfer) - from;
  if (const std::int64_t missing = barrier.expected - barrier.landed;
      !barrier.to_come && missing > 0 && missing < static_cast<std::int64_t>(bytes) &&
      missing % kRowBytes == 0) {
    bytes = static_cast<std::size_t>(missing);
    const std::size_t next = from + bytes;
    to.shadow.note_short({offset + next, bytes_of(transfer) - next});
    begin_operation(kNoQueue,
                    [=, this, &to, &barrier] { land_load(to, transfer, next, barrier, where); });
  }
  access_tensor(transfer, false, site, where);  // it read until now
  const auto rows = static_cast<std::size_t>(transfer.tile_rows);
  for (std::size_t line = from / kRowBytes; line < (from + bytes) / kRowBytes; line++) {
    const int row = static_cast<int>(line % rows), first = static_cast<int>(line / rows) * 8;
    for (int chunk = first; chunk < first + 8; chunk++)
      if (std::byte *place = chunk_of(transfer, row, chunk); is_there(transfer, row))
        std::memcpy(place, row_of(transfer, row) + chunk * kCopyBytes, kCopyBytes);
      else
        std::memset(place, 0, kCopyBytes);
  }
  to.shadow.end_async_write({offset + from, bytes}, barrier.agent,
                            {clocks_, running_, site, true, 0});
  clocks_.release_agent(barrier.agent, barrier.told);
  if (&to != cta_) note_remote(barrier, true, site);
  barrier.load = {barrier.phase, site, running_};
  barrier.landed += static_cast<std::int64_t>(bytes);
  go_on_if_ended(barrier);
}

void Block::tma_store(const TmaTransfer &transfer, const Where &where) {
  const std::size_t offset = check_transfer(true, transfer, where);
  const SiteId site = site_of(where);
  // What lies outside of the tensor is not stored, and not read.
  int first = 0, rows = 0;
  for (int row = transfer.tile_rows - 1; row >= 0; row--)
    if (is_there(transfer, row)) first = row, rows++;
  AsyncRead read{&kStoreEngine, {}, running_, 1, site};
  for (int slab = 0; slab < chunks_of_row(transfer) / 8; slab++)
    read.pieces.push_back(
        {offset + static_cast<std::size_t>(slab * transfer.tile_rows + first) * kRowBytes,
         static_cast<std::size_t>(rows) * kRowBytes});
  const Error error = cta_->shadow.begin_async_read(read, clocks_);
  if (!error.empty()) fail(error, where);
  access_tensor(transfer, true, site, where);
  if (!tma_agent_) tma_agent_ = clocks_.add_agent();
  const Stamp by_agent{clocks_.now(), site, tma_agent_, false};
  for (int row = first; row < first + rows; row++) {
    std::byte *const to = row_of(transfer, row);
    Allocation &allocation = *find_allocation(to);
    allocation.shadow.mark_stored(static_cast<std::size_t>(to - allocation.memory),
                                  chunks_of_row(transfer) * kCopyBytes, by_agent);
  }
  if (settings.profile) {
    requests_.count(site, kTmaStores, 1);
    requests_.count(site, kTmaStoreBytes, read.pieces[0].bytes * read.pieces.size());
  }
  const Operation operation = begin_operation(kNoQueue, [=] {
    for (int row = first; row < first + rows; row++)
      for (int chunk = 0; chunk < chunks_of_row(transfer); chunk++)
        std::memcpy(row_of(transfer, row) + chunk * kCopyBytes, chunk_of(transfer, row, chunk),
                    kCopyBytes);
  });
  Stores &self = stores_[running_];
  self.under_way.push_back({operation, std::move(read), self.groups});
  pause();
}

void Block::tma_store_commit() {
  stores_[running_].groups++;
  pause();
}

void Block::tma_store_wait_read(int groups) {
  Stores &self = stores_[running_];
  auto store = self.under_way.begin();
  // One that is not committed has the group that comes next: no wait covers it.
  for (; store != self.under_way.end() && store->group + groups < self.groups; ++store) {
    finish(store->operation);
    end_read(store->read, 1u << running_ % 32);
  }
  self.under_way.erase(self.under_way.begin(), store);
}

// --- errors at the end ---------------------------------------------------------------------------

/// All threads have exited: every byte that was to land has.
void Block::report_bytes() {
  for (Cta &cta : ctas_)
    for (auto &[offset, barrier] : cta.mbarriers.all())
      if (barrier.expected != barrier.landed) {
        running_ = barrier.thread;
        return report({Fault::kBarrier,
                       "the block ends, and " + barrier.describe() + " has not what it expects"},
                      describe(line_of(barrier.site)));
      }
}

/// The running thread is about to exit: nobody else can wait for its copies and stores.
bool Block::report_unawaited() {
  const std::string exits = "the thread exits, and this ";
  if (const Copy *copy = copies_.first_under_way(running_))
    report({Fault::kInFlight, exits + kCopyEngine.name +
                                  " may still be writing shared memory: " + kCopyEngine.missing},
           describe(line_of(copy->site)));
  else if (const Stores &stores = stores_[running_]; !stores.under_way.empty())
    report({Fault::kInUse, exits + kStoreEngine.name +
                               " may still be reading shared memory: " + kStoreEngine.missing},
           describe(line_of(stores.under_way[0].read.site)));
  return !error_.empty();
}

/// All threads have exited: of the block's loads somebody must have waited for the last at each barrier.
void Block::report_loads() {
  for (Cta &cta : ctas_)
    for (auto &[offset, barrier] : cta.mbarriers.all())
      if (barrier.load.site && barrier.waited_for <= barrier.load.phase) {
        running_ = barrier.load.thread;
        return report(
            {Fault::kInFlight, std::string("the block ends, and this ") + kLoadEngine.name +
                                   " may still be writing shared memory: nobody waits "
                                   "at " +
                                   barrier.describe() + " for its phase"},
            describe(line_of(barrier.load.site)));
      }
}

/// All threads have exited: what other blocks of the cluster did to a block's shared memory must have come
/// before the exit of one of its threads.
void Block::report_late() {
  for (unsigned rank = 0; rank < ctas_.size() && ctas_.size() > 1; rank++)
    for (auto &[offset, barrier] : ctas_[rank].mbarriers.all()) {
      if (barrier.waited_for > barrier.remote_phase) continue;
      for (const RemoteUse &use : barrier.remote) {
        const auto knows = [&](unsigned thread) {
          return !use.copy && clocks_.knows(thread, use.thread, use.time);
        };
        bool known = false;
        for (unsigned i = 0; i < block_size_ && !known; i++) known = knows(rank * block_size_ + i);
        if (known) continue;
        running_ = use.thread;
        return report(
            {Fault::kInFlight,
             std::string(use.copy ? "a TMA load lands" : "an arrival") + " at " +
                 barrier.describe() + in_block(ctas_[rank]) + ", which may have exited: no " +
                 (use.copy ? "wait there for it" : "cluster_sync and no wait for it") +
                 " comes before"},
            describe(line_of(use.site)));
      }
    }
}

}  // namespace emulator
