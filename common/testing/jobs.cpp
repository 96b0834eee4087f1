// SPDX-License-Identifier: MIT
#include "common/testing/jobs.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <exception>
#include <mutex>
#include <set>

#include "common/testing/process.h"
#include "reference/parallel.h"

namespace {

std::string test_name;
bool printed;

bool is_command(const std::string &name) {
  return name.find("./step-") != std::string::npos;
}

/// The number of the step that a job is of, "06", or nothing.
std::string step_of(const std::string &name) {
  const std::string start = is_command(name) ? name.substr(name.find("./step-") + 7) : name;
  const auto digit = [&](std::size_t i) {
    return start.size() > i && std::isdigit(static_cast<unsigned char>(start[i]));
  };
  return digit(0) && digit(1) ? start.substr(0, 2) : "";
}

}  // namespace

void begin_test(const std::string &name) {
  test_name = name;
  printed = false;
}

void print_failure(const std::string &step, const std::string &command) {
  if (printed) return;
  printed = true;
  std::string pattern = test_name, variables;
  std::replace_if(
      pattern.begin(), pattern.end(), [](char c) { return c == ',' || c == '\''; }, '?');
  for (const char *name : {"STEPS_DEVICE", "STEPS_PREFIX", "TESTS_SOME"})
    if (const std::string value = environment(name, ""); !value.empty())
      variables += std::string(name) + "=" + shell_word(value) + " ";
  if (const std::string only = step.empty() ? environment("STEPS_ONLY", "") : step; !only.empty())
    variables += "STEPS_ONLY=" + only + " ";
  if (const std::string seed = seed_in_use(); !seed.empty())
    variables += "TESTS_SEED=" + seed + " ";
  std::printf("FAIL %s\n", command.empty()
                               ? (variables + "build/host/bin/tests -tc='" + pattern + "'").c_str()
                               : command.c_str());
  std::fflush(stdout);
}

void do_all(std::vector<Job> &jobs) {
  std::size_t done = 0, failures = 0;
  std::set<std::string> failed;  // steps
  std::mutex mutex;
  parallel_for(jobs.size(), [&](std::size_t i) {
    Job &job = jobs[i];
    const std::string step = step_of(job.name);
    {
      const std::lock_guard lock(mutex);
      if (failed.contains(step)) return;
    }
    try {
      job.failure = job.work();
    } catch (const std::exception &error) {
      job.failure = error.what();
    }
    const std::lock_guard lock(mutex);
    if (++done % 100 == 0) std::printf("  %zu of %zu\n", done, jobs.size()), std::fflush(stdout);
    if (job.failure.empty() || (!step.empty() && !failed.insert(step).second)) return;
    failures++;
    print_failure(step, is_command(job.name) ? job.name : "");
    std::printf("%s: %s\n", job.name.c_str(), job.failure.c_str());
  });
  CHECK_MESSAGE(failures == 0, "the rest of a step's work is left out after its first failure");
}
