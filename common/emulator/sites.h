// Places in a kernel's source, numbered, so that a place fits into two bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <source_location>

#include "common/emulator/counters.h"

namespace emulator {

using SiteId = std::uint32_t;  // 0: none
constexpr int kSiteBits = 16;

/// The number of a place; the same place always has the same number. Throws std::length_error if
/// there are too many.
SiteId site_of(const std::source_location &where);

/// True if two places are the same.
inline bool same_place(const std::source_location &a, const std::source_location &b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

/// The line that a number stands for.
Line line_of(SiteId site);

/// True if the first is earlier in the text.
bool comes_before(SiteId a, SiteId b);

/// "attention.cu:57", as errors name a place.
std::string describe(const Line &line);
inline std::string describe(const std::source_location &where) {
  return describe(Line{where.file_name(), where.line()});
}

}  // namespace emulator
