// SPDX-License-Identifier: MIT
// One block of threads, or the blocks of a cluster, at work on one thread of the host: its parts, which the
// functions of runtime.h call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "common/emulator/accesses.h"
#include "common/emulator/async.h"
#include "common/emulator/clocks.h"
#include "common/emulator/events.h"
#include "common/emulator/fiber.h"
#include "common/emulator/mbarriers.h"
#include "common/emulator/meetings.h"
#include "common/emulator/named_barriers.h"
#include "common/emulator/products.h"
#include "common/emulator/registers.h"
#include "common/emulator/requests.h"
#include "common/emulator/runtime.h"
#include "common/emulator/scheduler.h"
#include "common/emulator/shared.h"

namespace emulator {

/// Runs the blocks of a launch one after the other, and those of a cluster together: their threads are
/// numbered one block after the other. No part knows the block; each is given those that it uses.
class Block {
 public:
  Block(Dim3 grid, Dim3 dim, std::size_t shared_bytes, const std::function<void()> &thread,
        const LaunchAttributes &attributes);

  /// Runs the block with this number to its end, or the cluster that begins with it. Throws KernelError.
  void run(std::uint64_t number);

  /// Checks a load as Accesses::access does, if it is one of those that SharedShadow::load_in_short takes: else
  /// false. Most of a kernel's time is spent here, and the parts are at hand here without a pointer to each.
  [[gnu::always_inline]] bool load_in_short(const void *address, int bytes, const Where &where) {
    const unsigned rank = scheduler.rank();
    const std::size_t offset = shared.offset(address, rank);
    return shared.has(offset, bytes) && (offset & (bytes - 1)) == 0 &&
           shared.shadow(rank).load_in_short(offset, bytes, scheduler.running(), site_of(where),
                                             clocks);
  }

  /// Adds what was counted to a profile.
  void add_counts(Profile &profile) const {
    requests.add_to(profile);
    events.add_to(profile);
  }

  /// The block that this host thread is running.
  static thread_local constinit Block *current;

 private:
  const SignalStack signal_stack_;

 public:
  Scheduler scheduler;
  Clocks clocks;
  Requests requests;
  Events events;
  SharedMemory shared;
  Meetings meetings;
  Accesses accesses;
  NamedBarriers named_barriers;
  Mbarriers mbarriers;
  RegisterFile registers;
  AsyncEngine async;
  Products products;

 private:
  void exit_thread();
};

}  // namespace emulator
