// SPDX-License-Identifier: MIT
// The command line of a step's program.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/kernel/step.h"
#include "common/program/csv.h"
#include "common/program/ladder.h"
#include "reference/inputs.h"

enum class DeviceChoice { kAuto, kGpu, kCpu };

/// How the rows of Q, K, V and O follow each other in memory.
enum class Layout {
  kBhnd,         // [batch, heads, seqlen, head_dim], the plain one
  kBnhd,         // [batch, seqlen, heads, head_dim], as a projection writes it
  kInterleaved,  // [batch, seqlen, heads + 2 kv_heads, head_dim]: Q, K and V by one projection
  kPacked,       // [rows of all sequences, heads, head_dim]: as kBnhd, without the rows not there
  kBnhd32,       // as kBnhd, with V's rows wider than K's by 32 bytes, not 16: in whole sectors
  kBnhd128,      // by 128 bytes: in whole lines
};

/// The problem, and what to do with it.
struct Options {
  // The sizes that the user does not give are 0 until with_defaults() chooses them.
  reference::Shape shape{
      .batch = 0, .heads = 0, .kv_heads = 0, .seqlen_q = 0, .seqlen_k = 0, .head_dim = 0};
  Type type = Type::kFp16;
  Layout layout = Layout::kBhnd;
  int page_size = 0;  // 0: not paged
  int splits = 0;     // 0: the step decides
  bool garbage = false;
  int gpus = 0;         // 0: the step's default
  int rank = -1;        // of the one GPU that this process has; -1: it has all
  std::string id_file;  // through which the ranks meet
  Link link = Link::kNccl;
  int leave_sms = 0;

  DeviceChoice device = DeviceChoice::kAuto;
  reference::Family inputs = reference::Family::kNormal;
  std::uint64_t seed = 1;
  int iters = 0;  // 0: by time
  bool again = false;
  int repeat = 0;  // runs whose bits are compared
  bool repeatable = false;
  int sms = 0;  // of the GPU that is emulated; 0: the emulator's default
  bool check_only = false, profile = false, describe = false, help = false;
  std::array<std::string, kCsvKinds> files;  // paths, empty if not asked for
  std::string sizes;  // "--batch 2 --seqlen 512": the sizes as they were typed, for messages
};

/// The words of --rope; Rope::kNone has none.
const std::vector<std::string> &rope_names();

/// Bad arguments: one line that names the option and its value, and says what it must be.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Reads the command line. Throws UsageError; for an option that the step does not accept, one that
/// names the steps of the ladder that do.
Options parse_options(int argc, char **argv, const Step &step, const Ladder &ladder);

/// The option that asks for counts, "--profile" or a CSV file of them; empty if none does.
std::string counting_option(const Options &options);

/// How the problem differs from the plain one: "causal kv-heads=2 type=bf16"; empty for the plain
/// one.
std::string departures(const Options &options, const Step &step);

/// What --help prints. `program` is the command: "./step-05".
std::string help_text(const std::string &program, const Step &step);

/// What --describe prints: what a script, a test or a figure has to know of a step, a line for each
/// thing, its name first.
std::string describe_text(const Step &step);
