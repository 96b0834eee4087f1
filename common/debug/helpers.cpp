// SPDX-License-Identifier: MIT
// What commands.py calls in a program that gdb has stopped in a thread of a kernel.
#include <cstdint>
#include <cstdio>

#include "common/emulator/block.h"
#include "reference/half.h"

namespace {

const emulator::Scheduler &scheduler() {
  return emulator::Block::current->scheduler;
}

}  // namespace

/// Prints who waits for what in the block, or the cluster, of the thread that is stopped.
extern "C" void debug_waits() {
  std::fputs(scheduler().describe_threads().c_str(), stdout);
  std::fflush(stdout);
}

/// Prints a variable of the kernel in each lane of the warp that is stopped: `count` floats, or, if `halves`, as many
/// registers of two fp16 numbers. Behind them, what the lane does: its variable is as of there.
extern "C" void debug_lanes(const void *variable, int count, bool halves) {
  const unsigned first = scheduler().running() / 32 * 32;
  for (unsigned lane = 0; lane < 32 && first + lane < scheduler().size(); lane++) {
    const void *values = scheduler().in_thread(variable, first + lane);
    std::printf("lane %2u ", lane);
    for (int i = 0; i < count; i++)
      if (halves) {
        const std::uint32_t pair = static_cast<const std::uint32_t *>(values)[i];
        std::printf(" %9.4g %9.4g", half_to_float(half{static_cast<std::uint16_t>(pair)}),
                    half_to_float(half{static_cast<std::uint16_t>(pair >> 16)}));
      } else {
        std::printf(" %9.4g", static_cast<const float *>(values)[i]);
      }
    std::printf("  %s\n", scheduler().describe_thread(first + lane).c_str());
  }
  std::fflush(stdout);
}
