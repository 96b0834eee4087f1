// SPDX-License-Identifier: MIT
// The library as a program finds it, for its tests: by name, on the emulator.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <string>

#include "common/testing/process.h"
#include "steps/57-library/attention.h"

const char *const kLibrary = "build/host/bin/libattention.so";

template <class Function>
Function *function_of_library(const char *name) {
  static void *const library =
      dlopen(environment("ATTENTION_LIBRARY", kLibrary).c_str(), RTLD_NOW | RTLD_LOCAL);
  REQUIRE_MESSAGE(library, dlerror());
  return reinterpret_cast<Function *>(dlsym(library, name));
}
#define LIBRARY(name) function_of_library<decltype(name)>(#name)

/// Which kernel a problem gets.
inline std::string kernel_of(const attention_problem &problem) {
  char name[32];
  REQUIRE_MESSAGE(LIBRARY(attention_kernel)(&problem, name, sizeof name) == ATTENTION_OK,
                  LIBRARY(attention_message)());
  return name;
}

template <class T>
T *allocate(std::size_t size, std::size_t bytes_behind = 0) {
  void *memory = nullptr;
  REQUIRE(LIBRARY(attention_allocate)(&memory, size * sizeof(T) + bytes_behind) == ATTENTION_OK);
  return static_cast<T *>(memory);
}
