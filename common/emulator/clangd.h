// SPDX-License-Identifier: MIT
// For clangd alone, which includes this before each file: before version 16 it has no std::source_location.
#pragma once

#if !__has_builtin(__builtin_source_location)
namespace std {

struct source_location {
  static constexpr source_location current(const char *file = __builtin_FILE(),
                                           const char *function = __builtin_FUNCTION(),
                                           unsigned line = __builtin_LINE(),
                                           unsigned column = __builtin_COLUMN()) {
    return {file, function, line, column};
  }
  constexpr const char *file_name() const { return file_; }
  constexpr const char *function_name() const { return function_; }
  constexpr unsigned line() const { return line_; }
  constexpr unsigned column() const { return column_; }

  const char *file_ = "", *function_ = "";
  unsigned line_ = 0, column_ = 0;
};

}  // namespace std
#endif
