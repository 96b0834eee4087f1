// SPDX-License-Identifier: MIT
// Work of a test that takes a while, on all cores; what failed, and how to run that again.
#pragma once

#include <functional>
#include <string>
#include <vector>

struct Job {
  /// What runs it again, "./step-06 --seed 3", or a name that begins with a step, "06 O not rescaled".
  std::string name;
  std::function<std::string()> work;  // returns what is wrong, or nothing
  std::string failure;
};

/// Does all jobs, says how far it is, and demands that none fails. A step stops at its first failure.
void do_all(std::vector<Job> &jobs);

/// Prints FAIL and how to run the test that runs now again, of this step; or, with a command, that. Does nothing
/// but once in a test.
void print_failure(const std::string &step = "", const std::string &command = "");

/// To be called when a test begins.
void begin_test(const std::string &name);
