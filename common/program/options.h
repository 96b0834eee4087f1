// The command line of a step's program.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/kernel/step.h"
#include "common/program/ladder.h"
#include "reference/inputs.h"

enum class DeviceChoice { kAuto, kGpu, kCpu };

/// How the rows of Q, K, V and O follow each other in memory.
enum class Layout {
  kBhnd,         // [batch, heads, seqlen, head_dim], the plain one
  kBnhd,         // [batch, seqlen, heads, head_dim], as a projection writes it
  kInterleaved,  // [batch, seqlen, heads + 2 kv_heads, head_dim]: Q, K and V by one projection
  kPacked,       // [rows of all sequences, heads, head_dim]: as kBnhd, without the rows not there
};

/// How much of a batch element is there.
struct Lengths {
  int q, k;
};

/// What the user asked for; what is not set depends on the device.
struct Options {
  DeviceChoice device = DeviceChoice::kAuto;
  std::optional<int> batch, heads, seqlen, head_dim, iters, sms;
  reference::Family inputs = reference::Family::kNormal;
  std::uint64_t seed = 1;
  bool check_only = false;
  bool profile = false;
  bool describe = false;
  bool help = false;
  std::string csv, profile_csv, trace_csv, blocks_csv, events_csv;  // paths, empty if not asked for
  // Beyond the plain problem:
  bool causal = false;
  std::optional<int> seqlen_k, kv_heads;
  int window = 0;  // 0: none
  int sinks = 0;
  Type type = Type::kFp16;
  Layout layout = Layout::kBhnd;
  int page_size = 0;             // 0: not paged
  std::vector<Lengths> lengths;  // of each batch element; empty: full
  int append = 0;                // of each sequence's keys, those that are beside the cache
  Rope rope = Rope::kNone;
  int splits = 0;  // 0: the step decides
};

const std::vector<std::string> &type_names();
const std::vector<std::string> &layout_names();
/// Those of --rope; Rope::kNone has none.
const std::vector<std::string> &rope_names();

/// Bad arguments: one line that names the option, the value and what is allowed.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Reads the command line. Throws UsageError; for an option that the step does not take, one that
/// names the steps of the ladder that do.
Options parse_options(int argc, char **argv, const Step &step, const Ladder &ladder);

/// The shape of a run that asks for none.
struct DefaultShape {
  int batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim;
};
DefaultShape default_shape(const Step &step, bool gpu);

/// What --help prints. `program` is the command: "./step-05".
std::string help_text(const std::string &program, const Step &step);

/// What --describe prints: what a script, a test or a figure has to know of a step, a line for each
/// thing, its name first.
std::string describe_text(const Step &step);
