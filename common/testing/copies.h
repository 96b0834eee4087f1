// SPDX-License-Identifier: MIT
// Copies of the steps, with a bug planted or a patch applied, built for the emulator and run: many
// kernels, of which some share a program, and whose common part is compiled once.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "common/testing/jobs.h"
#include "common/testing/mutants.h"
#include "common/testing/process.h"

/// A step's file with a change.
struct Copy {
  std::string step;    // "02-loop-inverted", of which there may be a ':' and more
  std::string name;    // what messages cite: FOLDER/NAME.cu
  std::string source;  // the text of that file
  std::vector<std::string> runs =
      {};  // as of with_instances_of(); none: it may be run with any options

  std::string command = "";    // starts it, where it was compiled
  std::string complaint = "";  // what the compiler said, where it was not
};

/// Compiles all copies for the emulator, by compiler.h, into programs of their names in this folder; some of one
/// step, or of steps that include the same, are one program with several names. `with` is linked with
/// them, too.
void compile_copies(const std::filesystem::path &folder, std::vector<Copy> &copies,
                    const std::string &with = "");

/// A step's source and many changes of it, each to be run alone.
struct Mutants {
  std::string step, name, source;  // as of a Copy
  Changes changes;
  std::vector<std::string> runs = {};  // as of a Copy

  std::string unchanged = "";  // starts the source as it is
  std::vector<std::string> commands =
      {};                      // by change, starts the source with it; empty: no compiler took it
  std::string complaint = "";  // what the compiler said of the first that it did not take
};

/// Compiles each for the emulator into one program, which makes the change with the number MUTANT. A change that
/// no `if` can make, of a constant for instance, gets a copy of its own.
void compile_mutants(const std::filesystem::path &folder, std::vector<Mutants> &all);
