// SPDX-License-Identifier: MIT
// What a run says: lines for a reader, rows for a file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/emulator/counters.h"
#include "common/program/csv.h"
#include "reference/gradients.h"
#include "reference/verdict.h"

/// The result of a run.
struct Result {
  std::string step, device;
  reference::Shape shape;
  std::string options;          // how the problem differs from the plain one
  double operations, kv_bytes;  // kv_bytes: of K and V, what must be read at least once
  std::optional<double> median_ms, min_ms;
  std::optional<double> sm_clocks;  // elapsed, a launch
  std::optional<double> tflops;
  double rms_error;
};

/// printf for one number.
std::string format(const char *pattern, double value);

/// The text on one line: an option's value may hold anything.
std::string one_line(const std::string &text);

/// `strays` are elements written between O's rows; `places` of the `rows` were compared.
void print_verdict(const reference::Verdict &verdict, std::size_t strays, std::size_t places,
                   std::size_t rows);

/// Of the log-sum-exp; `strays` as above.
void print_lse_verdict(const reference::Verdict &verdict, std::size_t strays);

/// Of the sinks' gradient; `strays` are elements written beside it.
void print_sink_verdict(const reference::SinkVerdict &verdict, std::size_t strays);

/// The same of a gradient, "dQ".
void print_gradient_verdict(const reference::Verdict &verdict, const std::string &name,
                            std::size_t strays, std::size_t places, std::size_t rows);

/// In how many of `runs` the bits were not those of the run before them; `same_bits`: none may be so.
void print_bits(int runs, int other_runs, bool same_bits);

/// The error against attention on the inputs before they were quantised. No bound is on it.
void print_quantisation(const reference::Verdict &verdict);

/// Of the keys or values of a cache, after the new ones were stored; `strays` as above.
void print_cache_verdict(const reference::CacheVerdict &verdict, std::size_t strays, bool keys);

/// The emulator's counts, in total and by line of the source.
void print_totals(const emulator::Profile &profile);
void print_lines(const emulator::Profile &profile);

/// The rows of a CSV file, or the lines of a trace.
std::vector<std::string> csv_rows(CsvKind kind, const Result &result,
                                  const emulator::Profile &profile);
