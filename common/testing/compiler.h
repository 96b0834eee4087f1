// SPDX-License-Identifier: MIT
// Compiles kernels for the emulator, with little to wait for: kernel.h is precompiled, and what all
// programs are linked with is one object.
#pragma once

#include <filesystem>
#include <string>

struct Compiler {
  std::string command;           // compiles and links the files named after it
  std::filesystem::path common;  // one of them
};

/// For this step, "06-swizzle". What it needs is made first, unless it is newer than what it is made of.
/// CXX is the compiler, default g++; HOST_OBJECTS is where make puts what programs are linked with,
/// default build/host.
const Compiler &compiler_for(const std::string &step);

/// Whether a file is missing, or older than another.
bool older(const std::filesystem::path &file, const std::filesystem::path &than);
