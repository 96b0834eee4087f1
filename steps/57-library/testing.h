// SPDX-License-Identifier: MIT
// The library as a program finds it, for its tests: by name, on the emulator.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "common/testing/process.h"
#include "reference/random.h"
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

/// Copies to the memory of the device, which may be a GPU's.
template <class T>
void to_device(T *device, const std::vector<T> &values) {
  REQUIRE(LIBRARY(attention_upload)(device, values.data(), values.size() * sizeof(T)) ==
          ATTENTION_OK);
}
template <class T>
std::vector<T> from_device(const T *device, std::size_t size) {
  std::vector<T> values(size);
  REQUIRE(LIBRARY(attention_download)(values.data(), device, size * sizeof(T)) == ATTENTION_OK);
  return values;
}

// --- calls that are drawn

namespace {

using Bits = std::uint16_t;

/// What a call is drawn from.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed) {}

  int from(int least, int most) {
    return least + static_cast<int>(next_random(state_) % (most - least + 1));
  }
  bool one_in(int n) { return from(1, n) == 1; }
  float normal() {
    const double u = (static_cast<double>(next_random(state_) >> 11) + 0.5) * 0x1p-53;
    const double angle = static_cast<double>(next_random(state_) >> 11) * 0x1p-53 * 2 * M_PI;
    return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(angle));
  }

 private:
  std::uint64_t state_;
};

/// A tensor in the memory of the device: poison but for what the test writes.
struct Tensor {
  attention_tensor view{};
  std::vector<Bits> expected;  // what all of its memory must hold after the call

  void lay(Draw &draw, int blocks, int heads, int rows, int d) {
    if (rows == 0) return;  // NULL
    const int gap = 8 * draw.from(0, 2);
    const bool heads_first = draw.one_in(2);
    view.row_stride = (heads_first ? d : heads * d) + gap;
    view.head_stride = heads_first ? rows * view.row_stride : d;
    view.batch_stride = (heads_first ? heads : 1) * rows * view.row_stride + gap;
    expected.assign(blocks * view.batch_stride, 0xffff);
    view.data = allocate<Bits>(expected.size());
  }
  std::size_t place(int block, int head, int row) const {
    return block * view.batch_stride + head * view.head_stride + row * view.row_stride;
  }
  void fill() const { to_device(static_cast<Bits *>(view.data), expected); }
  std::vector<Bits> now() const {
    return from_device(static_cast<const Bits *>(view.data), expected.size());
  }
  bool is_as_expected() const { return now() == expected; }
};

/// The sequences of Q, of K and V, or of new keys.
struct Lengths {
  std::vector<int> count, start, cu_seqlens;
  int longest, total = 0;
  bool packed = false;

  int row(int b, int i) const { return i + (packed ? cu_seqlens[b] : start[b]); }
  /// Lays the rows of the sequences one after the other; with lengths there may be room between them.
  void pack(Draw &draw, bool with_lengths) {
    packed = true;
    cu_seqlens = {0};
    for (const int n : count)
      cu_seqlens.push_back(cu_seqlens.back() + n + (with_lengths ? draw.from(0, 2) : 0));
    total = cu_seqlens.back() + draw.from(0, 2);
  }
};

}  // namespace
