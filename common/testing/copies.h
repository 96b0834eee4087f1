// Copies of the steps, with a bug planted or a patch applied, built for the emulator and run: many
// kernels, of which some share a program, and whose common part is compiled once.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "common/testing/process.h"

/// A step's file with a change.
struct Copy {
  std::string step;    // "02-loop-inverted", of which there may be a ':' and more
  std::string name;    // what messages cite: FOLDER/NAME.cu
  std::string source;  // the text of that file

  std::string command = "";    // starts it, where it was compiled
  std::string complaint = "";  // what the compiler said, where it was not
};

/// A step's source without the kernels that no run with these options asks for: it compiles in a fraction of
/// the time. Without options, head dim 64 in fp16 is left.
std::string only_for(const std::string &options, std::string source);

/// Compiles all copies for the emulator, by compiler.h, into programs of their names in this folder; some of one
/// step, or of steps that include the same, are one program with several names. `with` is linked with
/// them, too.
void compile_copies(const std::filesystem::path &folder, std::vector<Copy> &copies,
                    const std::string &with = "");

/// Work of a test that takes a while, most often a copy to run.
struct Job {
  std::string name;
  std::function<std::string()> work;  // gives what was wrong, or nothing
  std::string failure;
};

/// Does all jobs, as many at a time as there are cores, demands that none fails, and says how far it
/// is.
void do_all(std::vector<Job> &jobs);
