// SPDX-License-Identifier: MIT
// What a debugger asks of the scheduler: who waits for whom, and where a lane has a variable.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "common/emulator/block.h"
#include "common/emulator/testing.h"
#include "common/program/text.h"

namespace {

struct Nothing {};

std::vector<std::string> seen;  // by thread 0
std::string lines;

/// Thread 0 looks at the others once all have met; the threads from 32 on wait for it.
void look() {
  volatile int variable = 100 + thread_id();
  __syncthreads();
  if (is_thread(0)) {
    const emulator::Scheduler &scheduler = emulator::Block::current->scheduler;
    const auto *address = const_cast<const int *>(&variable);
    for (const unsigned thread : {0u, 1u, 31u, 40u})
      seen.push_back(
          std::to_string(*static_cast<const int *>(scheduler.in_thread(address, thread))));
    lines = scheduler.describe_threads();
  }
  at = __LINE__, __syncthreads();
}

}  // namespace

TEST_CASE("debugger: a variable of another thread, and what each thread does") {
  const Setup setup;
  bool some_wait = false, some_can_go_on = false;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    seen.clear();
    run<Nothing>(dim3(64), look);
    CHECK(seen == std::vector<std::string>{"100", "101", "131", "140"});
    CHECK(contains(lines, "1 thread runs\n"));
    int threads = 0;
    for (const std::string &line : lines_of(lines)) threads += std::stoi(line);
    CHECK(threads == 64);
    some_wait |= contains(lines, " waits in __syncthreads at " + file_and(at));
    some_can_go_on |= contains(lines, " can go on after __syncthreads at ");
  }
  CHECK(some_wait);
  CHECK(some_can_go_on);
}
