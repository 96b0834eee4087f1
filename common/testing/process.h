// SPDX-License-Identifier: MIT
// For tests that run programs as a reader would.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/program/text.h"
#include "reference/random.h"

/// What a command left behind.
struct Finished {
  int status;  // its exit status; 128 + n if signal n ended it
  std::string out, err;
};

/// Runs a line of shell, without input, and waits for its end. Several threads may do so at once.
Finished run_command(const std::string &line);

/// A variable of the environment.
std::string environment(const char *name, const char *otherwise);

/// The seed of what tests draw: TESTS_SEED, or another each time. It is printed.
std::uint64_t tests_seed();

/// The seed if a test has asked for it, or nothing.
std::string seed_in_use();

/// Whether `make test` wants a draw of the many alike, not all: TESTS_SOME is set.
bool some_are_enough();

/// Keeps as many items as `most`, drawn by the seed, where some are enough.
template <class Items>
void draw(Items &items, std::size_t most) {
  if (!some_are_enough()) return;
  for (std::uint64_t state = tests_seed(); items.size() > most;)
    items.erase(items.begin() + static_cast<std::ptrdiff_t>(next_random(state) % items.size()));
}

/// The folders of the steps, "02-loop-inverted", in order.
std::vector<std::string> step_names();

/// What a step's program says of itself with --describe.
struct Description {
  std::string step, needs;
  std::vector<std::string> takes;  // "--causal": options beyond the plain problem
  int tile = 0, page_rows = 1;     // seqlen is a multiple of the one, a page's rows of the other
  std::vector<std::string> head_dims, types, inputs;
  bool writes_lse = false, gradients = false;
  bool same_bits = true;  // in every run

  bool takes_option(const std::string &option) const;
};

/// Of a program, as the shell starts it. Throws std::runtime_error if there is none.
Description describe(const std::string &command);
