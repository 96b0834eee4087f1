// SPDX-License-Identifier: MIT
// The steps of the book, as their headers describe them: which of them accept what another does
// not, and which run on a GPU that another does not.
#pragma once

#include <string>
#include <vector>

/// A row of build/ladder.csv: the first lines of a step's attention.cu.
struct LadderStep {
  std::string name;         // "05-tensor-cores"
  std::string needs;        // "sm_80": the oldest GPU; "sm_90a": that one alone
  std::string why = "";     // "cp.async, mma.m16n8k16": the instructions that need it
  std::string takes = "";   // "--causal --type fp8": what it accepts beyond the plain problem
  std::string before = "";  // "04": the step that it builds on
};
using Ladder = std::vector<LadderStep>;

/// All steps, in order.
const Ladder &ladder();

/// The row of a source: of a step, of "any-problem", or of a variant, "15-early-k:padded", its
/// step's.
const LadderStep &header_of(const std::string &label);

/// The lines that tell a source what it is: '#define STEP_NAME "15-early-k:padded"', what it needs
/// and what it takes.
std::string macros_of(const std::string &label);

/// Whether a list of options, "--causal --type fp8", has this one, "--causal", or this type, "fp8".
bool takes(const std::string &list, const std::string &option);

/// The end of a refusal: "steps 20 to 23 accept it", or "no step accepts it yet".
std::string who_takes(const Ladder &ladder, const std::string &option);

/// Whether code that needs "sm_80" or "sm_90a" runs on a GPU of this compute capability, 90 for
/// 9.0. An architecture with an 'a' is one chip's: it runs on no other, not even on a newer one
/// (PTX ISA, '.target').
bool runs_on(const std::string &needs, int capability);

/// Why a GPU does not run a step that needs this, in one line, or "" if it does.
std::string why_not_on_gpu(const Ladder &ladder, const std::string &step, const std::string &needs,
                           int capability);
