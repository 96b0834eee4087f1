// SPDX-License-Identifier: MIT
#include "common/program/text.h"

#include <fstream>
#include <iterator>
#include <sstream>

std::string trim(const std::string &text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  return first == text.npos ? "" : text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

Strings split(const std::string &text, const std::string &separator) {
  Strings pieces;
  std::size_t begin = 0;
  for (std::size_t at; (at = text.find(separator, begin)) != text.npos;
       begin = at + separator.size())
    pieces.push_back(text.substr(begin, at - begin));
  pieces.push_back(text.substr(begin));
  return pieces;
}

Strings words(const std::string &text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

std::string join(const Strings &pieces, const std::string &separator) {
  std::string text;
  for (std::size_t i = 0; i < pieces.size(); i++) text += (i ? separator : "") + pieces[i];
  return text;
}

bool contains(const std::string &text, const std::string &part) {
  return text.find(part) != text.npos;
}

Strings lines_of(const std::string &text) {
  Strings lines = split(text, "\n");
  if (lines.back().empty()) lines.pop_back();
  return lines;
}

Strings csv_fields(const std::string &row) {
  Strings fields(1);
  bool quoted = false;
  for (const char c : row)
    if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      fields.emplace_back();
    else
      fields.back() += c;
  return fields;
}

std::string read_text(const std::filesystem::path &file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string shell_word(const std::string &text) {
  return "'" + join(split(text, "'"), "'\\''") + "'";
}
