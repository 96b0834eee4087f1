// Generated regions of Markdown files: quotes of code and of output, tables, and numbers in prose,
// each made anew from what it comes from, so that none can drift. main.cpp is the program, and its
// --help says how regions are written.
#pragma once

#include <filesystem>
#include <iosfwd>
#include <string>

#include "common/pages/values.h"

namespace docs {

/// The text of a Markdown file with every region regenerated; a line to `stale` for each that has
/// changed. Throws "FILE:LINE: what is wrong and what is allowed".
std::string rewrite(const std::filesystem::path &file, Results &results, std::ostream &stale);

/// The program: returns its exit status. Stale regions go to `output`, errors to `error`.
int run(const Strings &files, const std::filesystem::path &results_dir, bool check,
        std::ostream &output, std::ostream &error);

}  // namespace docs
