// SPDX-License-Identifier: MIT
#include "common/testing/process.h"

#include <doctest/doctest.h>

#include "reference/parallel.h"

TEST_SUITE_BEGIN("process");

TEST_CASE("a command has its own files, and none of those of the commands beside it") {
  const std::string held = "sleep 0.2; ls -l /proc/self/fd | grep -c deleted >&2";
  parallel_for(2, [&](std::size_t) {
    const Finished finished = run_command("printf 67-overlap; " + held);
    CHECK(finished.out == "67-overlap");
    CHECK(finished.err == "1\n");  // stderr, for stdout is a pipe
  });
}

TEST_SUITE_END();
