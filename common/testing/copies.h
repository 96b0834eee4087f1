// Copies of the steps, with a bug planted or a patch applied, built for the emulator and run: many
// small programs, whose common part is compiled once.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "common/testing/process.h"

/// Compiles FOLDER/NAME.cu, a step of this name, for the emulator into the program FOLDER/NAME.
/// CXX is the compiler, default g++; HOST_OBJECTS is where make puts what it is linked with, default
/// build/host.
Finished compile_step(const std::filesystem::path &program, const std::string &step);

/// Work of a test that takes a while, most often a copy to build and run.
struct Job {
  std::string name;
  std::function<std::string()> work;  // gives what was wrong, or nothing
  std::string failure;
};

/// Does all jobs, as many at a time as there are cores, demands that none fails, and says how far it
/// is.
void do_all(std::vector<Job> &jobs);
