// SPDX-License-Identifier: MIT
#include "common/emulator/named_barriers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/emulator/sites.h"

namespace emulator {

NamedBarriers::NamedBarriers(Scheduler &scheduler, Clocks &clocks, Events &events)
    : scheduler_(scheduler),
      clocks_(clocks),
      events_(events),
      barriers_(scheduler.blocks()),
      waits_at_(scheduler.size()) {}

void NamedBarriers::begin_block() {
  for (auto &of_block : barriers_) of_block = {};
}

void NamedBarriers::named_barrier(int id, int threads, Named kind, const Where &where) {
  const unsigned running = scheduler_.running();
  const bool sync = kind != Named::kArrive;
  const char *const name = kind == Named::kArrive ? "named_barrier_arrive"
                           : kind == Named::kSync ? "named_barrier_sync"
                                                  : "named_barrier_meet";
  const auto fail = [&](const std::string &why) {
    scheduler_.fail({Fault::kBarrier, std::string(name) + "(" + std::to_string(id) + ", " +
                                          std::to_string(threads) + "): " + why},
                    where);
  };
  if (id < 1 || id > 15) fail("barriers 1 to 15 are allowed");
  if (threads < 32 || threads % 32 || threads > static_cast<int>(scheduler_.block_size()))
    fail("a multiple of 32 up to the block's " + std::to_string(scheduler_.block_size()) +
         " threads is allowed");
  NamedBarrier &barrier = barriers_[scheduler_.rank()][id];
  if (barrier.come && barrier.threads != threads)
    fail("the barrier is for " + std::to_string(barrier.threads) + " threads at " +
         describe(barrier.where));
  // Who does not know that the last phase has ended may arrive in it. Who waited for it knows.
  if (std::none_of(barrier.before.begin(), barrier.before.end(),
                   [&](const Arrival &one) { return one.sync && one.thread == running; }))
    for (const Arrival &one : barrier.before)
      if (!clocks_.knows(running, one.thread, one.time))
        fail("the barrier may still be in use, for " + std::to_string(barrier.threads_before) +
             " threads at " + describe(barrier.where) + ", by " + scheduler_.name_of(one.thread) +
             ": no barrier between them");
  // PTX ISA, 'barrier', .aligned: all threads execute the same instruction.
  if (sync && !barrier.waiting.empty() && (barrier.aligned || kind == Named::kSync) &&
      (barrier.waited_at.line() != where.line() ||
       std::strcmp(barrier.waited_at.file_name(), where.file_name()) != 0))
    fail("other threads wait in it at " + describe(barrier.waited_at) +
         ", and all must wait at one place; named_barrier_meet has several");
  if (sync && barrier.waiting.empty()) barrier.waited_at = where;
  barrier.aligned |= kind == Named::kSync;
  barrier.threads = threads;
  barrier.where = where;
  barrier.arrivals.push_back({running, sync, clocks_.now()});
  SliceId arrival = 0;
  if (sync)
    events_.begin_wait();
  else
    arrival = events_.note(running, name, id, where);
  clocks_.release(running, barrier.told);
  if (sync) {
    scheduler_.wait(*this, name, where);
    waits_at_[running] = id;
    barrier.waiting.push_back(running);
  }
  const bool last = ++barrier.come == threads;
  if (!last) {
    if (!sync) return scheduler_.pause();
    Fiber::yield();
    events_.note(running, name, id, where, barrier.ended_by);
    return;
  }
  for (const unsigned thread : barrier.waiting) {
    clocks_.acquire(thread, barrier.told);
    scheduler_.make_ready(thread);
  }
  if (sync) arrival = events_.note(running, name, id, where);
  NamedBarrier next;
  next.ended_by = arrival;
  next.where = where;
  next.threads_before = threads;
  next.before = std::move(barrier.arrivals);
  barrier = std::move(next);
  if (sync)
    Fiber::yield();
  else
    scheduler_.pause();
}

std::string NamedBarriers::describe_wait(unsigned thread) const {
  const int id = waits_at_[thread];
  const NamedBarrier &barrier = barriers_[scheduler_.rank_of(thread)][id];
  return "(" + std::to_string(id) + ", " + std::to_string(barrier.threads) + "), to which " +
         std::to_string(barrier.come) + " have come";
}

}  // namespace emulator
