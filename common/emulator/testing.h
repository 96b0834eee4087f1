// SPDX-License-Identifier: MIT
// What the emulator's tests share: kernels written in a test, and the errors that they end with.
//
// A kernel notes the line of an instruction by `at = __LINE__` on the same line, before it. (Kernels
// stand outside of CHECK: all of a macro's arguments count as one line.)
#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <string>

#include "common/emulator/sites.h"
#include "common/kernel/kernel.h"

inline int at, also_at;  // lines that a kernel noted

/// Sets the emulator up for one test, and leaves it as it was.
struct Setup {
  const emulator::Settings before = emulator::settings;

  Setup() {
    emulator::settings = {.host_threads = 1};
    at = also_at = 0;
  }
  ~Setup() { emulator::settings = before; }
};

/// What each thread of a launch does. It may refer to what is around it in the test.
using Kernel = std::function<void()>;

/// Launches a kernel whose blocks have a Storage each; or one block of it.
template <class Storage>
void run(dim3 grid, dim3 block, const Kernel &kernel) {
  launch<Storage>(
      +[](const Kernel *body) { (*body)(); }, grid, block, &kernel);
}
template <class Storage>
void run(dim3 block, const Kernel &kernel) {
  run<Storage>(dim3(1), block, kernel);
}

/// The tag of the last error, "[race] ", which the tests of a kind's own words need not repeat.
inline std::string tag;

/// The message of the KernelError that something ends with, without its tag, or "" if it ends well.
template <class Work>
std::string error_of_work(const Work &work) {
  tag.clear();
  try {
    work();
  } catch (const emulator::KernelError &error) {
    std::string message = error.what();
    const std::size_t begin = message.find('['), end = message.find("] ") + 2;
    tag = message.substr(begin, end - begin);
    return message.erase(begin, end - begin);
  }
  return "";
}

/// The same of a launch, or of a launch of one block.
template <class Storage>
std::string error_of(dim3 grid, dim3 block, const Kernel &kernel) {
  return error_of_work([&] { run<Storage>(grid, block, kernel); });
}
template <class Storage>
std::string error_of(dim3 block, const Kernel &kernel) {
  return error_of<Storage>(dim3(1), block, kernel);
}

/// Seeds that a test tries: as many orders of threads.
constexpr int kSeeds = 20;

/// Under each of these seeds, the error of a launch of one block: the same, which it returns.
template <class Storage>
std::string error_under_all_seeds(dim3 block, const Kernel &kernel) {
  std::string first;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const std::string error = error_of<Storage>(block, kernel);
    if (seed == 1) first = error;
    CHECK(error == first);
  }
  return first;
}

/// A line of the test's file, as errors name it: "tma_test.cpp:57".
inline std::string file_and(int line, Where where = Where::current()) {
  return emulator::describe(emulator::Line{where.file_name(), static_cast<unsigned>(line)});
}

/// An error as the emulator words it, in a thread of block (0,0,0).
inline std::string error_in_thread(int line, unsigned thread, const std::string &what,
                                   Where where = Where::current()) {
  return file_and(line, where) + ": block (0,0,0) thread (" + std::to_string(thread) +
         ",0,0): " + what;
}

/// The running thread of a block in one dimension.
inline int thread_id() {
  return static_cast<int>(threadIdx.x);
}
inline int lane_id() {
  return thread_id() % 32;
}
inline bool is_thread(int x) {
  return thread_id() == x;
}

/// Reads an element and forgets it.
template <class T>
void read(const Reference<T> &element) {
  (void)static_cast<std::remove_const_t<T>>(element);
}
