// SPDX-License-Identifier: MIT
#include "common/testing/edits.h"

#include <algorithm>
#include <stdexcept>

#include "common/testing/process.h"

namespace {

std::string place_of(const std::string &file, std::size_t line) {
  return file + ":" + std::to_string(line);
}

/// Whether a line is '-' or '+', alone or before a space.
bool is_edit(const std::string &line, char sign) {
  return line == std::string(1, sign) || line.starts_with(std::string(1, sign) + " ");
}

bool is_comment(const std::string &line) {
  return line.starts_with("#");
}

/// The parts of a text between ' | '.
std::vector<std::string> fields_of(const std::string &text) {
  static const std::string between = " | ";
  std::vector<std::string> fields;
  std::size_t from = 0;
  for (std::size_t at; (at = text.find(between, from)) != std::string::npos;
       from = at + between.size())
    fields.push_back(text.substr(from, at - from));
  fields.push_back(text.substr(from));
  return fields;
}

/// `part`, and its lines' indentation and last newline if its lines hold nothing else.
Replacement whole_lines(const std::string &source, Replacement part) {
  std::size_t begin = part.at, end = source.find_first_not_of(' ', part.at + part.size);
  while (begin > 0 && source[begin - 1] == ' ') begin--;
  if ((begin > 0 && source[begin - 1] != '\n') || end == std::string::npos || source[end] != '\n')
    return part;
  return {begin, end + 1 - begin, part.text};
}

}  // namespace

std::vector<Edit> parse_edits(const std::vector<std::string> &lines, const std::string &file,
                              std::size_t first) {
  std::vector<Edit> edits;
  char before = ' ';  // the sign of the line before
  for (std::size_t i = 0; i < lines.size(); i++) {
    const std::string &line = lines[i], place = place_of(file, first + i);
    if (is_comment(line)) continue;
    const std::string text = line.size() > 2 ? line.substr(2) : "";
    if (is_edit(line, '-')) {
      if (before == '-')
        edits.back().find += "\n" + text;
      else
        edits.push_back({text, "", true, place});
    } else if (is_edit(line, '+')) {
      if (before == ' ') throw std::runtime_error(place + ": '+' must follow '-' or '+'");
      edits.back().replace += (before == '+' ? "\n" : "") + text;
      edits.back().deletes = false;
    } else if (!line.empty()) {
      throw std::runtime_error(place + ": a line of an edit must begin with '- ' or '+ '");
    }
    before = line.empty() ? ' ' : line[0];
  }
  for (const Edit &edit : edits)
    if (edit.find.find_first_not_of(" \n") == std::string::npos)
      throw std::runtime_error(edit.place + ": the text to find is empty");
  return edits;
}

std::vector<Change> parse_changes(const std::string &text, const std::string &file) {
  const std::vector<std::string> lines = lines_of(text);
  const auto is_header = [&](std::size_t i) {
    const std::string &line = lines[i];
    return !line.empty() && !is_comment(line) && !is_edit(line, '-') && !is_edit(line, '+');
  };
  std::vector<Change> changes;
  for (std::size_t i = 0, next; i < lines.size(); i = next) {
    next = i + 1;
    if (is_comment(lines[i]) || lines[i].empty()) continue;
    const std::string place = place_of(file, i + 1);
    if (!is_header(i)) throw std::runtime_error(place + ": an edit must follow a header");
    while (next < lines.size() && !is_header(next)) next++;
    const std::size_t space = std::min(lines[i].find(' '), lines[i].size());
    Change change = {lines[i].substr(0, space),
                     fields_of(lines[i].substr(std::min(space + 1, lines[i].size()))),
                     parse_edits({lines.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                                  lines.begin() + static_cast<std::ptrdiff_t>(next)},
                                 file, i + 2),
                     place};
    changes.push_back(std::move(change));
  }
  return changes;
}

std::vector<Replacement> locate(const std::string &source, const std::vector<Edit> &edits) {
  std::vector<Replacement> parts;
  for (const Edit &edit : edits) {
    const std::size_t at = source.find(edit.find);
    const bool found = at != std::string::npos;
    if (!found || source.find(edit.find, at + 1) != std::string::npos)
      throw std::runtime_error(edit.place + ": the source holds " +
                               (found ? "more than one" : "no") + " '" + edit.find + "'");
    const Replacement part = {at, edit.find.size(), edit.replace};
    parts.push_back(edit.deletes ? whole_lines(source, part) : part);
  }
  std::sort(parts.begin(), parts.end(), [](const auto &a, const auto &b) { return a.at < b.at; });
  for (std::size_t i = 1; i < parts.size(); i++)
    if (parts[i].at < parts[i - 1].at + parts[i - 1].size)
      throw std::runtime_error(edits[0].place + ": two edits overlap at '" +
                               source.substr(parts[i].at, parts[i].size) + "'");
  return parts;
}

std::string edited(std::string source, const std::vector<Edit> &edits) {
  return edited(source, locate(source, edits));
}

std::string edited(std::string source, const std::vector<Replacement> &parts) {
  for (auto part = parts.rbegin(); part != parts.rend(); ++part)
    source.replace(part->at, part->size, part->text);
  return source;
}
