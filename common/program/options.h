// The command line of a step's program.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "common/kernel/step.h"
#include "reference/inputs.h"

enum class DeviceChoice { kAuto, kGpu, kCpu };

/// What the user asked for; what is not set depends on the device.
struct Options {
  DeviceChoice device = DeviceChoice::kAuto;
  std::optional<int> batch, heads, seqlen, head_dim, iters;
  reference::Family inputs = reference::Family::kNormal;
  int variant = 0;
  std::uint64_t seed = 1;
  bool check_only = false;
  bool profile = false;
  bool help = false;
  std::string csv, profile_csv, trace_csv;  // paths, empty if not asked for
};

/// Bad arguments: one line that names the option, the value and what is allowed.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Reads the command line. Throws UsageError.
Options parse_options(int argc, char **argv, const Step &step);

/// What --help prints.
std::string help_text(const Step &step);
