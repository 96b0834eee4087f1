// Generated regions of Markdown files: quotes of code and of output, tables, and numbers in prose,
// each made anew from what it comes from, so that none can drift. main.cpp is the program, and its
// --help says how regions are written.
#pragma once

#include <filesystem>
#include <iosfwd>
#include <string>

#include "common/pages/values.h"

namespace docs {

/// What rewrite() made of one Markdown file.
struct Rewritten {
  std::string text;
  Strings stale;   // a line for each region that changed
  Strings errors;  // "FILE:LINE: what is wrong"; if there are any, `text` is of no use
};

/// Regenerates every region of `text`, the content of the Markdown file `file`.
Rewritten rewrite(const std::filesystem::path &file, const std::string &text, Results &results);

/// The program: returns its exit status. Stale regions go to `output`, errors to `error`.
int run(const Strings &files, const std::filesystem::path &results_dir, bool check,
        std::ostream &output, std::ostream &error);

}  // namespace docs
