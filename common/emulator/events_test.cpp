// SPDX-License-Identifier: MIT
// What warpgroups do in which order: the events of a profile.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "common/emulator/runtime.h"
#include "common/emulator/testing.h"
#include "common/kernel/mbarrier.h"

namespace {

struct Shared {
  Mbarrier full;
};

/// Warpgroup 0 does something and tells the others: warpgroup 1 by a named barrier, and 2 by an mbarrier.
void tell() {
  Mbarrier &full = shared_storage<Shared>().full;
  if (is_thread(0)) mbarrier_init(full, 1);
  __syncthreads();
  const int warpgroup = thread_id() / 128;
  if (warpgroup == 0) {
    at = __LINE__;
    for (int i = 0; i < 3; i++) (void)ex2(1.0f);
    named_barrier_arrive(2, 256);
    (void)ex2(1.0f);
    if (is_thread(0)) mbarrier_arrive(full);
  } else if (warpgroup == 1) {
    (void)ex2(1.0f);
    named_barrier_sync(2, 256);
    (void)ex2(1.0f);
  } else {
    mbarrier_wait(full, 0);
  }
}

/// Warpgroup 0 repeats something after the others know of it, by a barrier that is no event.
void repeat() {
  for (int i = 0; i < 2; i++) {
    if (thread_id() < 128) (void)ex2(1.0f);
    if (i == 0) __syncthreads();
  }
  if (thread_id() >= 128) (void)ex2(1.0f);
}

/// The events of one launch, a line for each: "1.2 exp2 x 1 after 0:3".
std::vector<std::string> events(dim3 grid, dim3 block = dim3(384), void (*kernel)() = tell) {
  (void)emulator::take_profile();
  run<Shared>(grid, block, kernel);
  std::vector<std::string> lines;
  for (const emulator::EventRow &row : emulator::take_profile().events) {
    lines.push_back(std::to_string(row.warpgroup) + "." + std::to_string(row.number) + " " +
                    row.what + (row.of < 0 ? "" : "(" + std::to_string(row.of) + ")") + " x " +
                    std::to_string(row.times));
    for (const emulator::EventRow::Other &other : row.after)
      lines.back() +=
          " after " + std::to_string(other.warpgroup) + "." + std::to_string(other.number);
    CHECK(row.launch == 0);
    if (kernel == tell && row.warpgroup == 0 && row.number == 0)
      CHECK(static_cast<int>(row.line.line) == at + 1);
  }
  return lines;
}

}  // namespace

TEST_CASE(
    "events: of block 0's warpgroups, and what comes before them, with any order of threads") {
  const Setup setup;
  emulator::settings.profile = true;
  const std::vector<std::string> expected = {
      "0.0 exp2 x 3", "0.1 named_barrier_arrive(2) x 1",
      "0.2 exp2 x 1", "0.3 mbarrier_arrive(0) x 1",
      "1.0 exp2 x 1", "1.1 named_barrier_sync(2) x 1 after 0.1",
      "1.2 exp2 x 1", "2.0 mbarrier_wait(0) x 1 after 0.3",
  };
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    CHECK(events(dim3(1)) == expected);
    CHECK(events(dim3(3)) == expected);
  }
}

TEST_CASE("events: what is repeated after others know of it is another event") {
  const Setup setup;
  emulator::settings.profile = true;
  const std::vector<std::string> expected = {"0.0 exp2 x 1", "0.1 exp2 x 1",
                                             "1.0 exp2 x 1 after 0.0"};
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    CHECK(events(dim3(1), dim3(256), repeat) == expected);
  }
}

TEST_CASE("events: launches of one profile are numbered") {
  const Setup setup;
  emulator::settings.profile = true;
  (void)emulator::take_profile();
  for (int launch = 0; launch < 2; launch++) run<Shared>(dim3(3), dim3(256), repeat);
  std::vector<int> launches;
  for (const emulator::EventRow &row : emulator::take_profile().events)
    launches.push_back(row.launch);
  CHECK(launches == std::vector<int>{0, 0, 0, 1, 1, 1});
}

TEST_CASE("events: none without a profile") {
  const Setup setup;
  CHECK(events(dim3(1)).empty());
}
