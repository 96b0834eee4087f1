// For tests that run programs as a reader would.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

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

/// A word as the shell takes it, whatever it holds.
std::string shell_word(const std::string &word);

std::string read_text(const std::filesystem::path &file);
std::vector<std::string> lines_of(const std::string &text);

/// The folders of the steps, "02-loop-inverted", in order.
std::vector<std::string> step_names();

/// What a step's program says of itself with --describe.
struct Description {
  std::string step, needs;
  std::vector<std::string> takes;  // "--causal": options beyond the plain problem
  int tile = 0;                    // seqlen is a multiple of this
  std::vector<std::string> head_dims, types, inputs;

  bool takes_option(const std::string &option) const;
};

/// Of a program, as the shell starts it. Throws std::runtime_error if there is none.
Description describe(const std::string &command);
