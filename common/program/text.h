// SPDX-License-Identifier: MIT
// Texts, as the programs, the pages, the exercises and the tests take them apart.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

using Strings = std::vector<std::string>;

/// Returns a text without the white space at its ends.
std::string trim(const std::string &text);

/// Returns the pieces between the separators: one more than there are separators.
Strings split(const std::string &text, const std::string &separator);

/// Returns the pieces between white space.
Strings words(const std::string &text);

std::string join(const Strings &pieces, const std::string &separator);
bool contains(const std::string &text, const std::string &part);

/// Returns the lines of a text. The last may lack its newline.
Strings lines_of(const std::string &text);

/// Returns the fields of a CSV file's row, without the quotes around those that hold commas.
Strings csv_fields(const std::string &row);

/// Returns what a file holds; nothing if it cannot be read.
std::string read_text(const std::filesystem::path &file);

/// Returns a word of the shell that stands for this text, whatever it holds.
std::string shell_word(const std::string &text);
