// CSV files that are appended to: whole rows or nothing, under one header.
#pragma once

#include <string>
#include <vector>

class CsvFile {
 public:
  /// Checks that the file can be appended to, and that it is new, empty or has this header. Writes
  /// nothing. Throws UsageError.
  CsvFile(std::string option, std::string path, std::string header);

  /// Appends rows, after the header if the file is new. Throws UsageError.
  void append(const std::vector<std::string> &rows) const;

 private:
  std::string option_, path_, header_;
};
