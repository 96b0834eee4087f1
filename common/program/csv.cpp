// SPDX-License-Identifier: MIT
#include "common/program/csv.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "common/program/options.h"

namespace {

namespace fs = std::filesystem;

/// Whether rows can be appended to the file, or a file of this name can be made. Asks without
/// exceptions: a loop of links or a name that is too long is a name like any other.
bool is_writable(const std::string &path) {
  std::error_code error;
  const fs::file_status file = fs::status(path, error);
  if (file.type() == fs::file_type::regular) return access(path.c_str(), W_OK | R_OK) == 0;
  if (file.type() != fs::file_type::not_found || fs::is_symlink(fs::symlink_status(path, error)))
    return false;  // no file, or a link to nothing
  const fs::path parent = fs::path(path).parent_path(), folder = parent.empty() ? "." : parent;
  return fs::is_directory(folder, error) && access(folder.c_str(), W_OK) == 0;
}

}  // namespace

CsvFile::CsvFile(std::string option, std::string path, std::string header)
    : option_(std::move(option)), path_(std::move(path)), header_(std::move(header)) {
  if (!is_writable(path_))
    throw UsageError(option_ + " " + path_ +
                     ": cannot be written; must be a file in a folder that exists and can be "
                     "written to");
  if (header_.empty()) return;
  std::string first_line;
  std::ifstream file(path_);
  if (file.peek() == std::ifstream::traits_type::eof()) return;  // new or empty
  std::getline(file, first_line);
  if (first_line != header_)
    throw UsageError(option_ + " " + path_ +
                     ": has another header; must be a new file, or one that begins with '" +
                     header_ + "'");
}

void CsvFile::append(const std::vector<std::string> &rows) const {
  if (header_.empty()) {
    std::error_code removed;
    fs::resize_file(path_, 0, removed);  // if it is there
  }
  std::error_code none;
  const auto size = fs::file_size(path_, none);
  std::string text;
  if ((none || size == 0) && !header_.empty()) text = header_ + "\n";
  if (std::ifstream end(path_); end.seekg(-1, std::ios::end) && end.get() != '\n')
    text = "\n";  // the last row was cut off: it must not swallow this one
  for (const std::string &row : rows) text += row + "\n";
  std::ofstream file(path_, std::ios::app);
  file << text << std::flush;
  if (file) return;
  file.close();
  fs::resize_file(path_, none ? 0 : size, none);  // all of the rows or none
  throw UsageError(option_ + " " + path_ + ": writing failed");
}

bool same_file(const std::string &a, const std::string &b) {
  if (a.empty() || b.empty()) return false;
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;  // hard links, too
  // Absolute first: of a path that does not exist at all, nothing is made canonical.
  const fs::path one = fs::weakly_canonical(fs::absolute(a), error);
  if (error) return a == b;
  const fs::path other = fs::weakly_canonical(fs::absolute(b), error);
  return error ? a == b : one == other;
}
