// SPDX-License-Identifier: MIT
// Builds and runs what a reader, or an exercise, has made of a step, on the emulator.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

/// What is built: a source, and the step that it is made of, "06-swizzle".
struct Build {
  std::filesystem::path source, program;
  std::string step;
};

/// The text that is compiled; build() keeps it beside the program, in PROGRAM.cpp.
std::string unit_of(const Build &what);

/// Compiles and links, unless the program is there and of the same text. Returns nothing, or the
/// compiler's first error: "try/06/2.cu:87: 'smen' was not declared in this scope".
std::string build(const Build &what);

/// How a run ended.
struct Outcome {
  std::string word;   // one of ending_words()
  std::string said;   // what the check or the emulator says of it, if it did not pass
  unsigned line = 0;  // of the source, that this names; 0 without
  // Counts by line of the source, 0 for the totals, and by the counter's name.
  std::map<unsigned, std::map<std::string, double>> counts;
  // With counts, columns of the results that describe the problem.
  double head_dim = 0, operations = 0, kv_bytes = 0;
  double o_bytes = 0;  // 0 where the sequences are of several lengths
};

/// What a trace tells of the first request at each place: how many lines of 128 bytes of shared memory its lanes
/// address, and how many bytes lie between lanes 0 and 8.
constexpr const char *kLinesOfFirst = "lines of the first request",
                     *kBytesOfFirst = "bytes between lanes 0 and 8 of the first request";

/// Runs a program with these options, for at most EXERCISE_SECONDS; with counts, if they are wanted, and with these.
Outcome run(const Build &what, const std::string &options, bool counts, bool traced);

/// The words for how a run ends: "passed", "wrong", "race", ...
const std::vector<std::string> &ending_words();

/// A line of a source, without its indentation.
std::string source_line(const std::filesystem::path &source, unsigned line);
