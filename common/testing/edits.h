// SPDX-License-Identifier: MIT
// A step, changed by a few edits: the format of planted bugs and of exercises' answers.
//
//   bug O not rescaled | wrong | --inputs rising
//   - l_old * alpha * gO_sum(row, col)
//   + l_old * gO_sum(row, col)
//
// A change is a header (a keyword, then fields separated by ' | '), and edits. The lines that begin with '- '
// are the text to find: it occurs exactly once in the source, and its first and last line may be parts of lines.
// The lines with '+ ' after it replace it. Without them it is deleted, and so are the lines that held nothing
// else. A '-' after a '+', or after an empty line, begins the next edit. Lines with '#' are comments.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

struct Edit {
  std::string find, replace;
  bool deletes;       // no '+' line
  std::string place;  // "FILE:LINE" of the first '-'
};

struct Change {
  std::string keyword;
  std::vector<std::string> fields;  // the first is most often a name
  std::vector<Edit> edits;
  std::string place;  // "FILE:LINE" of the header
};

/// Parses all changes of a file; `file` is its name in messages. Throws std::runtime_error with file and line.
std::vector<Change> parse_changes(const std::string &text, const std::string &file);

/// Parses edits without a header, from lines of which the first is line `first` of the file.
std::vector<Edit> parse_edits(const std::vector<std::string> &lines, const std::string &file,
                              std::size_t first = 1);

/// A part of a source, and what replaces it.
struct Replacement {
  std::size_t at, size;
  std::string text;
};

/// Finds the edits in a source; returns them in the order of the source. Throws std::runtime_error with the edit's
/// place if its text is not in the source, or more than once, or if two edits overlap.
std::vector<Replacement> locate(const std::string &source, const std::vector<Edit> &edits);

/// Returns the source with all edits, or all replacements, made.
std::string edited(std::string source, const std::vector<Edit> &edits);
std::string edited(std::string source, const std::vector<Replacement> &parts);
