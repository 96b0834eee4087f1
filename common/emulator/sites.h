// SPDX-License-Identifier: MIT
// Places in a kernel's source, numbered, so that a place fits into two bytes.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <source_location>

#include "common/emulator/counters.h"

namespace emulator {

using SiteId = std::uint32_t;  // 0: none
constexpr int kSiteBits = 16;

/// The number of a place; the same place always has the same number. Throws std::length_error if
/// there are too many.
SiteId look_up_site(const std::source_location &where);

/// The same, remembered. A location is the address of what it says of its place: the same address, the same
/// place. (One place may have several.)
inline SiteId site_of(const std::source_location &where) {
  static_assert(sizeof where == sizeof(std::uintptr_t));
  struct Entry {
    std::uintptr_t address = 1;  // which is none
    SiteId id = 0;
  };
  constexpr int kBits = 9;
  static thread_local constinit std::array<Entry, 1 << kBits> cache;
  const auto address = std::bit_cast<std::uintptr_t>(where);
  Entry &entry = cache[address * std::uint64_t{0x9e3779b97f4a7c15} >> (64 - kBits)];
  if (entry.address != address) entry = {address, look_up_site(where)};
  return entry.id;
}

/// True if two places are the same.
inline bool same_place(const std::source_location &a, const std::source_location &b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

/// The line that a number stands for.
Line line_of(SiteId site);

/// True if the first is earlier in the text.
bool comes_before(SiteId a, SiteId b);

/// What a line of the source initialises, "smem.K" of `ring_init(smem.K, 8)`; "" if it cannot be read.
std::string initialised_at(const Line &line);

/// "attention.cu:57", as errors name a place.
std::string describe(const Line &line);
inline std::string describe(const std::source_location &where) {
  return describe(Line{where.file_name(), where.line()});
}

}  // namespace emulator
