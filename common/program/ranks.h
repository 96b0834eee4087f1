// SPDX-License-Identifier: MIT
// Processes that share a sequence, with a GPU each (--rank), end together if one of them fails: the others would wait for
// its messages for ever.
#pragma once

#include <functional>
#include <string>
#include <thread>

class Ranks {
 public:
  /// Watches for the failure of another rank of those that meet through this file, and calls `end` with what is to be
  /// said. `end` does not return, except in tests.
  Ranks(const std::string &id_file, std::function<void(const std::string &)> end);

  /// This rank has failed if it has not passed: the others get to know.
  ~Ranks();
  void passed() { passed_ = true; }

 private:
  const std::string failed_;  // a file that says that a rank has failed
  bool passed_ = false;
  std::jthread watch_;
};
