// SPDX-License-Identifier: MIT
// What the threads of a block ask of memory: loads and stores, those of a warp's rows, cp.async and atomics. Here
// they are bounded, checked by shadow.h and counted by requests.h.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/copies.h"
#include "common/emulator/events.h"
#include "common/emulator/requests.h"
#include "common/emulator/runtime.h"
#include "common/emulator/scheduler.h"
#include "common/emulator/shared.h"

namespace emulator {

struct Allocation;

/// A launch begins, on so many threads of the host: nothing has been told by its atomics, and nothing added by its
/// reductions.
void begin_atomics(unsigned host_threads);

/// The addresses at which the last launch made atomics, and where in the source.
const std::map<const unsigned *, SiteId> &atomics_of_launch();

/// The calling thread of the host is the one with this number, from 0. With settings.repeatable it waits for its turn.
void enter_atomics(unsigned number);

/// Here another thread of the host may go on. With settings.repeatable the seed draws which one, and the calling thread
/// waits until it is its turn again.
void next_turn();

/// The calling thread has no block any more.
void leave_atomics();

/// A block has failed: others may wait for its atomics, and must not for ever. Their next atomics end
/// them, and Block::run() throws Abandoned.
void abandon_atomics();

/// Whether a thread of the launch has waited for the launch before.
extern std::atomic<bool> has_waited;

class Accesses {
 public:
  /// `beside`: the launch may have begun before the launch before has ended.
  Accesses(Scheduler &scheduler, Clocks &clocks, SharedMemory &shared, Requests &requests,
           Events &events, bool beside);

  void begin_block(std::uint64_t number);

  /// See runtime.h. `caller` is where in the compiled code.
  void access(const void *address, int bytes, const void *value, bool store, const Where &where,
              const void *caller);
  void access_rows(bool store, const std::array<const void *, 32> &rows, int count,
                   const Where &where);
  void begin_copy(void *shared, const void *global, const Where &where, const void *caller);
  void commit_copies() { copies_.commit(scheduler_.running()); }
  void wait_for_copies(int groups, const Where &where);
  unsigned atomic(unsigned *address, const std::function<unsigned(unsigned)> &next,
                  const Where &where);
  void release(unsigned *address, unsigned x, const Where &where);
  void wait_until(unsigned *address, unsigned value, const Where &where, bool or_more);
  void reduce(float *first, std::span<const float> values, const Where &where, const void *caller);

  /// Whether a reduction comes after all others there so far: its thread knows of the last.
  bool is_last(const Access &reduction) const;

  /// Fails if the program's sums have the same bits in every run, the thread has waited for other blocks, and does not
  /// know that the last reduction there is complete.
  void check_order(const Access &reduction, const Where &where);

  /// Adds, on this thread's word: last, or at the place that the seed draws in the order of all additions there
  /// since one that came last.
  void add(float *address, float value, unsigned thread, bool last);
  void wait_for_launch_before();

  /// Checks an access to global memory that the running thread makes, or an engine on its word.
  void access_global(const Access &access, const Where &where);

  /// Reports a copy of the running thread that it has not waited for: it exits.
  void report_unawaited();

 private:
  void check_atomic(unsigned *address, const Where &where);
  void check_shared(const char *what, std::size_t offset, const Access &access, const Where &where);
  void check_launch_before(const Allocation &allocation, const Access &access,
                           const char *operation, const Where &where);

  Scheduler &scheduler_;
  Clocks &clocks_;
  SharedMemory &shared_;
  Requests &requests_;
  Events &events_;
  const bool beside_;
  Copies copies_;
  std::uint64_t block_ = 0;                       // its number
  std::vector<std::uint32_t> reductions_;         // by thread, so far
  std::vector<std::pair<unsigned, Time>> waits_;  // for the launch before: which thread, and when
  std::map<unsigned, std::uint64_t> tried_;       // by thread in wait_until: after how many changes
};

}  // namespace emulator
