// SPDX-License-Identifier: MIT
#include "common/emulator/mbarriers.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace emulator {
namespace {

/// What the tx-count of an mbarrier and its count of arrivals can be (PTX ISA, 'mbarrier': 2^20 - 1).
constexpr int kMostOfMbarrier = (1 << 20) - 1;

}  // namespace

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
        ", " + std::to_string(expected) + " bytes expected, " + std::to_string(landed) + " arrived";
  return text + ")";
}

Mbarriers::Mbarriers(Scheduler &scheduler, Clocks &clocks, const SharedMemory &shared,
                     Events &events)
    : scheduler_(scheduler),
      clocks_(clocks),
      shared_(shared),
      events_(events),
      barriers_(scheduler.blocks()),
      waits_(scheduler.size()) {}

void Mbarriers::begin_block() {
  for (auto &of_block : barriers_) of_block.clear();
}

void Mbarriers::init(const void *address, int arrivals, const char *part, const Where &where) {
  const std::size_t offset = shared_.offset(address);
  if (offset >= shared_.bytes() || offset + sizeof(std::uint64_t) > shared_.bytes())
    scheduler_.fail({Fault::kBounds, "mbarrier_init: the mbarrier is not in shared memory"}, where);
  if (offset % sizeof(std::uint64_t))
    scheduler_.fail({Fault::kMisaligned, "mbarrier_init at an address that is not a multiple of 8"},
                    where);
  if (arrivals < 1 || arrivals > kMostOfMbarrier)
    scheduler_.fail(
        {Fault::kBarrier, "mbarrier_init for " + std::to_string(arrivals) + " arrivals: 1 to " +
                              std::to_string(kMostOfMbarrier) + " are allowed"},
        where);
  auto &of_block = barriers_[scheduler_.rank()];
  if (const auto before = of_block.find(offset); before != of_block.end())
    scheduler_.fail(
        {Fault::kBarrier, "mbarrier_init of " + before->second.describe() + ", which is in use"},
        where);
  BarrierState barrier{};
  barrier.offset = offset;
  barrier.part = part;
  barrier.site = site_of(where);
  for (const auto &[other_offset, other] : of_block)
    barrier.index += other.site == barrier.site && std::strcmp(other.part, part) == 0;
  barrier.thread = scheduler_.running();
  barrier.time = clocks_.now();
  barrier.count = barrier.to_come = arrivals;
  of_block.emplace(offset, barrier);
}

void Mbarriers::fence_init() {
  const Time time = clocks_.next();
  for (auto &[offset, barrier] : barriers_[scheduler_.rank()])
    if (barrier.thread == scheduler_.running()) barrier.fenced = time;
}

BarrierState &Mbarriers::usable(const char *what, unsigned rank, std::size_t offset,
                                const Where &where) {
  const auto found = barriers_[rank].find(offset);
  const bool here = rank == scheduler_.rank();
  if (found == barriers_[rank].end())
    scheduler_.fail({Fault::kUninitialised, std::string(what) + " of an mbarrier" +
                                                (here ? "" : scheduler_.in_block(rank)) +
                                                " that nobody has initialised"},
                    where);
  BarrierState &barrier = found->second;
  if (!clocks_.knows(scheduler_.running(), barrier.thread, barrier.time))
    scheduler_.fail({Fault::kRace, std::string(what) + " of an mbarrier that " +
                                       scheduler_.name_of(barrier.thread) + " initialises at " +
                                       describe(line_of(barrier.site)) + ": no " +
                                       (here ? "barrier" : "cluster_sync") + " between them"},
                    where);
  return barrier;
}

void Mbarriers::arrive(const void *address, int bytes, const Where &where) {
  BarrierState &barrier =
      usable("mbarrier_arrive", scheduler_.rank(), shared_.offset(address), where);
  if (bytes < 0 || barrier.expected + bytes > kMostOfMbarrier)
    scheduler_.fail(
        {Fault::kBarrier, "mbarrier_arrive_expect_tx of " + std::to_string(bytes) +
                              " bytes: a phase has at most " + std::to_string(kMostOfMbarrier)},
        where);
  if (barrier.to_come == 0)
    scheduler_.fail({Fault::kBarrier, "mbarrier_arrive: one arrival more than " +
                                          barrier.describe() + " has room for"},
                    where);
  const SliceId arrival = events_.note(scheduler_.running(), "mbarrier_arrive",
                                       static_cast<std::int64_t>(barrier.offset), where);
  clocks_.release(scheduler_.running(), barrier.told);
  barrier.expected += bytes;
  barrier.to_come--;
  go_on_if_ended(barrier, arrival);
  scheduler_.pause();
}

/// The arrival has the default scope, the block: to another block it tells what engines have done and the
/// thread has waited for, and of the thread's own loads and stores nothing.
void Mbarriers::arrive_at(const void *address, int rank, const Where &where) {
  constexpr const char *kName = "mbarrier_arrive_at";
  if (rank < 0 || rank >= static_cast<int>(scheduler_.blocks()))
    scheduler_.fail(
        {Fault::kBounds, std::string(kName) + ": block " + std::to_string(rank) +
                             " of a cluster that has " + std::to_string(scheduler_.blocks())},
        where);
  const auto to = static_cast<unsigned>(rank);
  if (to == scheduler_.rank()) return arrive(address, 0, where);
  BarrierState &barrier = usable(kName, to, shared_.offset(address), where);
  if (!is_fenced(barrier))
    scheduler_.fail({Fault::kFence,
                     std::string(kName) + ": other blocks may not see the mbarrier that " +
                         scheduler_.name_of(barrier.thread) + " initialises at " +
                         describe(line_of(barrier.site)) + ": no mbarrier_fence_init between them"},
                    where);
  if (barrier.to_come == 0)
    scheduler_.fail(
        {Fault::kBarrier, std::string(kName) + ": one arrival more than " + barrier.describe() +
                              scheduler_.in_block(to) + " has room for"},
        where);
  clocks_.release_agents(scheduler_.running(), barrier.told);
  note_remote(barrier, false, site_of(where));
  barrier.to_come--;
  go_on_if_ended(barrier, events_.slice(scheduler_.running(), kName, site_of(where)));
  scheduler_.pause();
}

/// The running thread has arrived, or its copy has landed, at a barrier of another block in this phase.
void Mbarriers::note_remote(BarrierState &barrier, bool copy, SiteId site) {
  if (barrier.remote_phase != barrier.phase) barrier.remote.clear();
  barrier.remote_phase = barrier.phase;
  barrier.remote.push_back({copy, site, scheduler_.running(), clocks_.now()});
}

void Mbarriers::land(BarrierState &barrier, unsigned rank, std::size_t bytes, SiteId site,
                     SliceId copy) {
  clocks_.release_agent(barrier.agent, barrier.told);
  if (rank != scheduler_.rank()) note_remote(barrier, true, site);
  barrier.load = {barrier.phase, site, scheduler_.running()};
  barrier.landed += static_cast<std::int64_t>(bytes);
  go_on_if_ended(barrier, copy);
}

/// If the phase has ended, lets those go on that wait for it.
void Mbarriers::go_on_if_ended(BarrierState &barrier, SliceId arrival) {
  if (!barrier.end_phase()) return;
  barrier.ended_by = arrival;
  for (const unsigned thread : std::exchange(barrier.waiting, {})) scheduler_.make_ready(thread);
}

void Mbarriers::wait(const void *address, int parity, const Where &where) {
  BarrierState &barrier =
      usable("mbarrier_wait", scheduler_.rank(), shared_.offset(address), where);
  if (parity != 0 && parity != 1)
    scheduler_.fail({Fault::kBarrier, "mbarrier_wait for parity " + std::to_string(parity) +
                                          ": 0 and 1 are allowed"},
                    where);
  waits_[scheduler_.running()] = {&barrier, barrier.phase};
  if (static_cast<int>(barrier.phase % 2) == parity) events_.begin_wait();
  // Who goes on late may find the next phase ended, too, and waits again, as on a GPU.
  while (static_cast<int>(barrier.phase % 2) == parity) {
    scheduler_.wait(*this, "mbarrier_wait", where);
    barrier.waiting.push_back(scheduler_.running());
    Fiber::yield();
  }
  barrier.waited_for = std::max(barrier.waited_for, barrier.phase);
  clocks_.acquire(scheduler_.running(), barrier.told_to_waiting);
  events_.note(scheduler_.running(), "mbarrier_wait", static_cast<std::int64_t>(barrier.offset),
               where, barrier.ended_by);
  scheduler_.pause();
}

std::string Mbarriers::describe_wait(unsigned thread) const {
  const auto &[barrier, phase] = waits_[thread];
  std::string text =
      " for parity " + std::to_string(barrier->phase % 2) + " of " + barrier->describe();
  if (phase < barrier->phase)
    text += ", whose phase " + std::to_string(phase) + " ended and the next one, too";
  return text;
}

// --- errors at the end ---------------------------------------------------------------------------

void Mbarriers::report_at_end() {
  report_bytes();
  if (scheduler_.is_well()) report_late();
  if (scheduler_.is_well()) report_loads();
}

/// All threads have exited: every byte that was to land has.
void Mbarriers::report_bytes() {
  for (const auto &of_block : barriers_)
    for (const auto &[offset, barrier] : of_block)
      if (barrier.expected != barrier.landed)
        return scheduler_.report(barrier.thread,
                                 {Fault::kBarrier, "the block ends, and " + barrier.describe() +
                                                       " has not what it expects"},
                                 describe(line_of(barrier.site)));
}

/// All threads have exited: of the block's loads somebody must have waited for the last at each barrier.
void Mbarriers::report_loads() {
  for (const auto &of_block : barriers_)
    for (const auto &[offset, barrier] : of_block)
      if (barrier.load.site && barrier.waited_for <= barrier.load.phase)
        return scheduler_.report(
            barrier.load.thread,
            {Fault::kInFlight, std::string("the block ends, and this ") + kLoadEngine.name +
                                   " may still be writing shared memory: nobody waits at " +
                                   barrier.describe() + " for its phase"},
            describe(line_of(barrier.load.site)));
}

/// All threads have exited: what other blocks of the cluster did to a block's shared memory must have come
/// before the exit of one of its threads.
void Mbarriers::report_late() {
  const unsigned threads = scheduler_.block_size();
  for (unsigned rank = 0; rank < scheduler_.blocks() && scheduler_.blocks() > 1; rank++)
    for (const auto &[offset, barrier] : barriers_[rank]) {
      if (barrier.waited_for > barrier.remote_phase) continue;
      for (const RemoteUse &use : barrier.remote) {
        const auto knows = [&](unsigned thread) {
          return !use.copy && clocks_.knows(thread, use.thread, use.time);
        };
        bool known = false;
        for (unsigned i = 0; i < threads && !known; i++) known = knows(rank * threads + i);
        if (known) continue;
        return scheduler_.report(
            use.thread,
            {Fault::kInFlight,
             std::string(use.copy ? "a TMA load completes" : "an arrival") + " at " +
                 barrier.describe() + scheduler_.in_block(rank) + ", which may have exited: no " +
                 (use.copy ? "wait there for it" : "cluster_sync and no wait for it") +
                 " comes before"},
            describe(line_of(use.site)));
      }
    }
}

}  // namespace emulator
