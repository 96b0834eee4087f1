// SPDX-License-Identifier: MIT
#include "common/emulator/sites.h"

#include <cstdint>
#include <fstream>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <vector>

namespace emulator {
namespace {

struct Sites {
  std::mutex mutex;
  std::map<std::tuple<std::string, unsigned, unsigned>, SiteId> ids;  // file, line, column
  std::vector<Line> lines{Line{}};                                    // by number
  std::vector<unsigned> columns{0};
};

Sites &sites() {
  static Sites instance;
  return instance;
}

}  // namespace

SiteId look_up_site(const std::source_location &where) {
  Sites &table = sites();
  const std::lock_guard lock(table.mutex);
  const std::tuple<std::string, unsigned, unsigned> key{where.file_name(), where.line(),
                                                        where.column()};
  if (const auto found = table.ids.find(key); found != table.ids.end()) return found->second;
  if (table.lines.size() >> kSiteBits)
    throw std::length_error("more than 65535 places in the source touch memory");
  table.lines.push_back(Line{where.file_name(), where.line()});
  table.columns.push_back(where.column());
  return table.ids[key] = static_cast<SiteId>(table.lines.size() - 1);
}

Line line_of(SiteId site) {
  Sites &table = sites();
  const std::lock_guard lock(table.mutex);
  return table.lines.at(site);
}

bool comes_before(SiteId a, SiteId b) {
  Sites &table = sites();
  const std::lock_guard lock(table.mutex);
  return std::tie(table.lines.at(a), table.columns.at(a)) <
         std::tie(table.lines.at(b), table.columns.at(b));
}

std::string initialised_at(const Line &line) {
  std::ifstream file(line.file);
  std::string text;
  for (unsigned i = 0; i < line.line; i++)
    if (!std::getline(file, text)) return "";
  std::size_t begin = text.find("_init(");
  if (begin == std::string::npos) return "";
  begin += 6;
  int depth = 0;
  for (std::size_t end = begin; end < text.size(); end++) {
    depth += text[end] == '(';
    if (depth == 0 && (text[end] == ',' || text[end] == ')'))
      return text.substr(begin, end - begin);
    depth -= text[end] == ')';
  }
  return "";
}

std::string describe(const Line &line) {
  return line.file.substr(line.file.find_last_of('/') + 1) + ":" + std::to_string(line.line);
}

}  // namespace emulator
