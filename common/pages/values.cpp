#include "common/pages/values.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

namespace fs = std::filesystem;

namespace docs {
namespace {

// What is meant where nothing else is said: a benchmark's default shape, and counts in total.
const Row kDefaults = {{"options", ""}, {"seqlen", "8192"}, {"head_dim", "128"}, {"line", "0"}};
const Strings kShape = {"batch", "heads", "seqlen", "head_dim"};

std::string printed(const char *how, int digits, double value) {
  char buffer[400];  // the longest double has 309 digits before the point
  std::snprintf(buffer, sizeof buffer, how, digits, value);
  return buffer;
}

std::string decimals(double value, int digits) {
  return printed("%.*f", digits, value);
}

std::string grouped(double value) {
  std::string s = decimals(std::fabs(value), 0);
  for (int i = static_cast<int>(s.size()) - 3; i > 0; i -= 3) s.insert(i, 1, ',');
  return (value < 0 ? "-" : "") + s;
}

/// Prints a value as an inline value's FORMAT asks.
std::string format(double value, const std::string &how) {
  if (how.empty()) return significant(value, 3);
  if (how == ",") return grouped(value);
  if (how == "x") return times(value);
  if (how == "%") return decimals(100 * value, 0) + "%";
  if (how == "GB") return significant(value / 1e9, 3) + " GB";
  if (how == "MB") return significant(value / 1e6, 3) + " MB";
  if (how == "KB") return significant(value / 1e3, 3) + " KB";
  const std::string kind = how.substr(0, how.size() - 1);
  const int digits = how.back() - '0';
  if (std::isdigit(how.back()) && kind == "") return decimals(value, digits);
  if (std::isdigit(how.back()) && kind == "%") return decimals(100 * value, digits) + "%";
  if (std::isdigit(how.back()) && kind == "s" && digits > 0) return significant(value, digits);
  throw Error("unknown format '" + how + "'; allowed: 0 1 2.. s1 s2 s3.. , % %1 x GB MB KB");
}

/// The fields of a CSV line. A field with a comma is quoted: "shared load wavefronts, ideal".
Strings csv_fields(const std::string &line) {
  Strings fields(1);
  bool quoted = false;
  for (char c : line) {
    if (c == '"') quoted = !quoted;
    if (c == ',' && !quoted) fields.emplace_back();
    if (c != '"' && (c != ',' || quoted)) fields.back() += c;
  }
  return fields;
}

const std::string &field(const Row &row, const std::string &column) {
  if (row.count(column)) return row.at(column);
  Strings columns;
  for (const auto &[name, text] : row) columns.push_back(name);
  throw Error("no column '" + column + "'; there are: " + join(columns, " "));
}

/// Adds the column cache_TBs to a row of a BENCH.
void add_cache_speed(Row &row) {
  if (!row.count("median_ms") || !row.count("options")) return;
  const auto of = [&](const std::string &column) { return std::atof(row.at(column).c_str()); };
  const double heads = std::atof(option(row, "kv-heads", row.at("heads")).c_str());
  const double keys = std::atof(option(row, "seqlen-k", row.at("seqlen")).c_str());
  const double bytes = 2 * 2 * of("batch") * heads * keys * of("head_dim");
  if (of("median_ms") > 0) row["cache_TBs"] = printed("%.*g", 6, bytes / of("median_ms") / 1e9);
}

/// The value of a key, given without its brackets.
double key(const std::string &text, Results &results) {
  Strings list = words(text);
  const Strings filters = take_filters(list);
  const std::string kind = list.empty() ? "" : results.kind(list[0]);
  const bool counters = kind == "COUNTERS", named = kind == "NAMED";
  if (named && list.size() == 2 && filters.empty())
    return number(*results.select(list[0], {"name=" + list[1]})[0], "value");
  if (named || (counters ? list.size() < 4 : list.size() != 3))
    throw Error(
        "a key is [BENCH COLUMN STEP filters], [COUNTERS SOURCE COUNTER STEP filters] or "
        "[NAMED NAME], not [" +
        text + "]");
  Strings all = {"step=" + list.back()};
  if (counters) {
    const std::string counter = join({list.begin() + 2, list.end() - 1}, "+");
    all.insert(all.end(), {"source=" + list[1], "counter=" + counter});
  }
  all.insert(all.end(), filters.begin(), filters.end());
  const Rows found = results.select(list[0], all);
  if (counters) return counter_value(found);
  require_same(found, {"batch", "heads"});
  return median(found, list[1]);
}

/// Arithmetic over numbers and [keys], by recursive descent: a method for each precedence.
struct Expression {
  const std::string text;
  const std::function<double(const std::string &)> &value_of;  // of a key
  size_t at = 0;

  double sum() {
    double v = product();
    while (next() == '+' || next() == '-') {
      const int sign = text[at++] == '+' ? 1 : -1;
      v += sign * product();
    }
    return v;
  }

  double product() {
    double v = atom();
    for (;;) {
      if (take('*'))
        v *= atom();
      else if (take('/'))
        v /= atom();
      else
        return v;
    }
  }

  double atom() {
    if (take('-')) return -atom();
    if (take('(')) {
      const double v = sum();
      expect(take(')'), "')'");
      return v;
    }
    if (take('[')) {
      const size_t begin = at, end = text.find(']', at);
      expect(end != text.npos, "']'");
      at = end + 1;
      return value_of(text.substr(begin, end - begin));
    }
    expect(std::isdigit(next()), "a number, a [key] or '('");
    size_t length = 0;
    const double v = std::stod(text.substr(at), &length);
    at += length;
    return v;
  }

  /// The next character that is no space; '\0' at the end.
  char next() {
    at = std::min(text.find_first_not_of(" \t\r\n", at), text.size());
    return text[at];
  }

  bool take(char c) {
    const bool found = next() == c;
    at += found;
    return found;
  }

  void expect(bool found, const std::string &what) const {
    if (!found)
      throw Error("expected " + what + " in '" + text + "' before '" + text.substr(at) + "'");
  }
};

}  // namespace

std::string trim(const std::string &s) {
  const size_t first = s.find_first_not_of(" \t\r\n");
  return first == s.npos ? "" : s.substr(first, s.find_last_not_of(" \t\r\n") - first + 1);
}

Strings split(const std::string &s, const std::string &separator) {
  Strings pieces;
  size_t begin = 0;
  for (size_t at; (at = s.find(separator, begin)) != s.npos; begin = at + separator.size())
    pieces.push_back(s.substr(begin, at - begin));
  pieces.push_back(s.substr(begin));
  return pieces;
}

Strings words(const std::string &s) {
  std::istringstream in(s);
  return {std::istream_iterator<std::string>(in), {}};
}

std::string join(const Strings &pieces, const std::string &separator) {
  std::string s;
  for (size_t i = 0; i < pieces.size(); ++i) s += (i ? separator : "") + pieces[i];
  return s;
}

std::string read_text(const fs::path &path) {
  std::ifstream in(path, std::ios::binary);
  if (!in || fs::is_directory(path)) throw Error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string significant(double value, int digits) {
  const double rounded = std::atof(printed("%.*e", digits - 1, value).c_str());  // 9.999: 10.0
  const int exponent = rounded == 0 ? 0 : std::floor(std::log10(std::fabs(rounded)));
  if (exponent >= 3 && exponent >= digits - 1) return grouped(rounded);
  return decimals(rounded, std::max(0, digits - 1 - exponent));
}

std::string count(double value) {
  return value == std::floor(value) ? grouped(value) : significant(value, 3);
}

std::string percent(double ratio) {
  return (ratio < 0.1 ? significant(100 * ratio, 2) : decimals(100 * ratio, 0)) + "%";
}

std::string times(double ratio) {
  return decimals(ratio, ratio < 2 ? 2 : ratio < 10 ? 1 : 0) + "×";
}

const std::vector<Row> &Results::read(const std::string &name) {
  if (const auto found = read_.find(name); found != read_.end()) return found->second;
  const fs::path path = dir_ / (name + ".csv");
  if (!fs::is_regular_file(path)) {
    std::set<std::string> names;
    for (const auto &entry : fs::directory_iterator(dir_))
      if (entry.path().extension() == ".csv") names.insert(entry.path().stem());
    throw Error("no results '" + name + "'; there are: " + join({names.begin(), names.end()}, " "));
  }
  const Strings lines = split(trim(read_text(path)), "\n"), columns = csv_fields(trim(lines[0]));
  std::vector<Row> rows;
  for (size_t i = 1; i < lines.size(); ++i) {
    const Strings fields = csv_fields(trim(lines[i]));
    if (fields.size() != columns.size())
      throw Error(name + ".csv:" + std::to_string(i + 1) + ": the columns must be " +
                  join(columns, ","));
    Row row;
    for (size_t c = 0; c < columns.size(); ++c) row[columns[c]] = fields[c];
    add_cache_speed(row);
    rows.push_back(row);
  }
  if (rows.empty()) throw Error(name + ".csv has no rows");
  return read_[name] = rows;
}

Rows Results::select(const std::string &name, Strings filters) {
  Rows rows;
  for (const Row &row : read(name)) rows.push_back(&row);
  const Row &first = *rows[0];
  const auto is_free = [&](const std::string &column) {  // there, and not filtered by
    return first.count(column) && std::none_of(filters.begin(), filters.end(), [&](const auto &f) {
             return f.substr(0, f.find_first_of("=~")) == column;
           });
  };
  Strings defaults;
  const bool bench = kind(name) == "BENCH";
  for (const std::string &column : words(bench ? "options seqlen head_dim" : "options line"))
    if (is_free(column)) defaults.push_back(column + "=" + kDefaults.at(column));
  if (!bench && std::all_of(kShape.begin(), kShape.end(), is_free))
    for (const std::string &column : kShape) defaults.push_back(column + "=" + first.at(column));
  filters.insert(filters.end(), defaults.begin(), defaults.end());

  for (const std::string &filter : filters) {
    const size_t at = filter.find_first_of("=~");
    const std::string column = filter.substr(0, at);
    std::string text = filter.substr(at + 1);
    std::replace(text.begin(), text.end(), '+', ' ');
    Rows found;
    for (const Row *row : rows) {
      const std::string &in = field(*row, column);
      if (filter[at] == '=' ? in == text : in.find(text) != in.npos) found.push_back(row);
    }
    if (found.empty()) {
      throw Error("no " + column + filter[at] + text + " in " + name +
                  ".csv; there are: " + different(rows, {column}));
    }
    rows = found;
  }
  return rows;
}

double Results::named(const std::string &file, const std::string &name, double missing) {
  if (!fs::is_regular_file(dir_ / (file + ".csv"))) return missing;
  for (const Row &row : read(file))
    if (row.at("name") == name) return number(row, "value");
  return missing;
}

std::string option(const Row &row, const std::string &name, const std::string &missing) {
  for (const std::string &word : words(row.at("options"))) {
    if (word == name) return "yes";
    if (word.starts_with(name + "=")) return word.substr(name.size() + 1);
  }
  return missing;
}

Strings take_filters(Strings &list) {
  Strings filters;
  for (; !list.empty() && list.back().find_first_of("=~") != std::string::npos; list.pop_back())
    filters.insert(filters.begin(), list.back());
  return filters;
}

std::string different(const Rows &rows, const Strings &columns) {
  Strings seen;
  for (const Row *row : rows) {
    Strings pairs;
    for (const std::string &column : columns) pairs.push_back(column + "=" + field(*row, column));
    const std::string values = join(pairs, " ");
    if (std::find(seen.begin(), seen.end(), values) == seen.end()) seen.push_back(values);
  }
  return join(seen, "; ");
}

void require_same(const Rows &rows, const Strings &columns) {
  const std::string all = different(rows, columns);
  if (all.find(';') == all.npos) return;
  throw Error("several rows of " + rows[0]->at("step") + " match, filter by one of: " + all);
}

double number(const Row &row, const std::string &column) {
  const std::string &text = field(row, column);
  char *end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end) throw Error("'" + text + "' in column " + column + " is no number");
  return value;
}

double median(const Rows &rows, const std::string &column) {
  std::vector<double> values;
  for (const Row *row : rows) values.push_back(number(*row, column));
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

double counter_value(const Rows &rows) {
  if (different(rows, {"value"}).find(';') != std::string::npos)
    require_same(rows, words("batch heads seqlen head_dim options line value"));
  return number(*rows.at(0), "value");
}

double arithmetic(const std::string &text,
                  const std::function<double(const std::string &)> &value_of) {
  Expression expression = {text, value_of};
  const double value = expression.sum();
  expression.expect(expression.next() == '\0', "an operator");
  if (!std::isfinite(value)) throw Error("division by zero in '" + text + "'");
  return value;
}

std::string inline_value(const std::string &expression_and_format, Results &results) {
  // The format follows the colon after the last [key]: a variant's name has a colon too.
  const size_t bracket = expression_and_format.rfind(']');
  const size_t colon = expression_and_format.find(':', bracket == std::string::npos ? 0 : bracket);
  const std::string how = colon == std::string::npos ? "" : expression_and_format.substr(colon + 1);
  const double value = arithmetic(trim(expression_and_format.substr(0, colon)),
                                  [&](const std::string &text) { return key(text, results); });
  return format(value, trim(how));
}

}  // namespace docs
