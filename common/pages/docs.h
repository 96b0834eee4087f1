// SPDX-License-Identifier: MIT
// Generated regions of Markdown files: quotes of code and of output, tables, and numbers in prose,
// each made anew from what it comes from, so that none can drift. main.cpp is the program, and its
// --help says how regions are written.
#pragma once

#include <filesystem>
#include <iosfwd>

#include "common/pages/values.h"
#include "common/program/text.h"

namespace docs {

/// The program for files of the repository `root`: returns its exit status. Stale regions go to
/// `output`, errors, "FILE:LINE: what is wrong and what is allowed", to `error`.
int run(const Strings &files, const std::filesystem::path &root, bool check, std::ostream &output,
        std::ostream &error);

}  // namespace docs
