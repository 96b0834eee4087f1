#include "common/program/csv.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "common/program/options.h"

CsvFile::CsvFile(std::string option, std::string path, std::string header)
    : option_(std::move(option)), path_(std::move(path)), header_(std::move(header)) {
  const std::filesystem::path file(path_);
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  const bool exists = std::filesystem::exists(file);
  const bool writable =
      exists ? std::filesystem::is_regular_file(file) && access(path_.c_str(), W_OK | R_OK) == 0
             : std::filesystem::is_directory(folder) && access(folder.c_str(), W_OK) == 0;
  if (!writable)
    throw UsageError(option_ + " " + path_ +
                     ": cannot be written; a file in a folder that exists "
                     "and can be written to is allowed");
  std::string first_line;
  if (exists) std::getline(std::ifstream(path_), first_line);
  if (exists && std::filesystem::file_size(file) > 0 && first_line != header_)
    throw UsageError(option_ + " " + path_ +
                     ": has another header; a new file or one that begins "
                     "with '" +
                     header_ + "' is allowed");
}

void CsvFile::append(const std::vector<std::string> &rows) const {
  std::error_code none;
  const auto size = std::filesystem::file_size(path_, none);
  std::string text;
  if (none || size == 0) text = header_ + "\n";
  if (std::ifstream end(path_); end.seekg(-1, std::ios::end) && end.get() != '\n')
    text = "\n";  // the last row was cut off: it must not swallow this one
  for (const std::string &row : rows) text += row + "\n";
  std::ofstream file(path_, std::ios::app);
  file << text << std::flush;
  if (file) return;
  file.close();
  std::filesystem::resize_file(path_, none ? 0 : size, none);  // all of the rows or none
  throw UsageError(option_ + " " + path_ + ": writing failed");
}
