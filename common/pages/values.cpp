#include "common/pages/values.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

namespace fs = std::filesystem;

namespace docs {
namespace {

const Strings kBenchColumns =
    words("step device batch heads seqlen head_dim causal median_ms min_ms tflops rms_error");
const Strings kCounterColumns =
    words("step source batch heads seqlen head_dim kernel line counter value");
const Strings kCeilingColumns = words("name value unit");
const Filters kBenchDefaults = {
    {"seqlen", '=', "8192"}, {"head_dim", '=', "128"}, {"causal", '=', "0"}};
const Filters kCounterDefaults = {{"kernel", '=', "total"}, {"line", '=', "0"}};

bool is_counters(const std::string &name) {
  return name.ends_with("counters");
}

/// Named values: what the GPU can do at most, or the clock and the power of a run.
bool is_ceilings(const std::string &name) {
  return name.ends_with("ceilings") || name.ends_with("power");
}

bool contains(const Strings &list, const std::string &s) {
  return std::find(list.begin(), list.end(), s) != list.end();
}

std::string decimals(double value, int digits) {
  std::array<char, 400> buffer;  // the longest double has 309 digits before the point
  std::snprintf(buffer.data(), buffer.size(), "%.*f", digits, value);
  return buffer.data();
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
  if (std::isdigit(how.back()) && how != "s0") {
    const int digits = how.back() - '0';
    if (kind == "") return decimals(value, digits);
    if (kind == "s") return significant(value, digits);
    if (kind == "%") return decimals(100 * value, digits) + "%";
  }
  throw Error("unknown format '" + how + "'; allowed: 0 1 2.. s1 s2 s3.. , % %1 x GB MB KB");
}

/// The fields of a CSV line. A field with a comma is quoted: "shared load wavefronts, ideal".
Strings csv_fields(const std::string &line) {
  Strings fields(1);
  bool quoted = false;
  for (char c : line) {
    if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

/// The different values in some columns of some rows: "batch=1 heads=16; batch=16 heads=16".
std::string different(const Rows &rows, const Strings &columns) {
  Strings seen;
  for (const Row *row : rows) {
    std::string pairs;
    for (const std::string &column : columns) pairs += " " + column + "=" + row->at(column);
    append_new(seen, pairs.substr(1));
  }
  return join(seen, "; ");
}

/// The value of a key, given without its brackets.
double key(const std::string &text, Results &results) {
  Strings list = words(text);
  if (list.size() == 2 && is_ceilings(list[0])) return ceiling(results.read(list[0]), list[1]);
  const bool counters = !list.empty() && is_counters(list[0]);
  Filters filters = take_filters(list, counters);
  if (counters ? list.size() < 4 : list.size() != 3) {
    throw Error(
        "a key is [BENCH COLUMN STEP filters], [COUNTERS SOURCE COUNTER STEP filters] or "
        "[CEILINGS NAME], not [" +
        text + "]");
  }
  const Csv &csv = results.read(list[0]);
  filters.insert(filters.begin(), {"step", '=', list.back()});
  if (counters) {
    const std::string name = join({list.begin() + 2, list.end() - 1}, " ");
    filters.insert(filters.begin() + 1, {{"source", '=', list[1]}, {"counter", '=', name}});
    return counter_value(require(csv, filters));
  }
  const Strings values(kBenchColumns.begin() + 2, kBenchColumns.end());  // not step and device
  if (!contains(values, list[1])) {
    throw Error("no value '" + list[1] + "' in " + csv.name +
                ".csv; allowed: " + join(values, " "));
  }
  const Rows rows = require(csv, filters);
  require_same(rows, {"batch", "heads"});
  return median(rows, list[1]);
}

/// Arithmetic over numbers and [keys], by recursive descent: a method per level of precedence.
class Expression {
 public:
  Expression(const std::string &text, Results &results) : text_(text), results_(results) {}

  double value() {
    const double v = sum();
    if (next() != '\0') fail("an operator");
    return v;
  }

 private:
  double sum() {
    double v = product();
    for (;;) {
      if (take('+')) {
        v += product();
      } else if (take('-')) {
        v -= product();
      } else {
        return v;
      }
    }
  }

  double product() {
    double v = atom();
    for (;;) {
      if (take('*')) {
        v *= atom();
      } else if (take('/')) {
        const double divisor = atom();
        if (divisor == 0) throw Error("division by zero in '" + text_ + "'");
        v /= divisor;
      } else {
        return v;
      }
    }
  }

  double atom() {
    if (take('-')) return -atom();
    if (take('(')) {
      const double v = sum();
      if (!take(')')) fail("')'");
      return v;
    }
    if (take('[')) {
      const size_t begin = at_, end = text_.find(']', at_);
      if (end == text_.npos) fail("']'");
      at_ = end + 1;
      return key(text_.substr(begin, end - begin), results_);
    }
    if (!std::isdigit(next())) fail("a number, a [key] or '('");
    size_t length = 0;
    const double v = std::stod(text_.substr(at_), &length);
    at_ += length;
    return v;
  }

  /// The next character that is no space; '\0' at the end.
  char next() {
    at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size());
    return text_[at_];
  }

  bool take(char c) {
    const bool found = next() == c;
    at_ += found;
    return found;
  }

  [[noreturn]] void fail(const std::string &expected) const {
    throw Error("expected " + expected + " in '" + text_ + "' before '" + text_.substr(at_) + "'");
  }

  const std::string text_;
  Results &results_;
  size_t at_ = 0;
};

}  // namespace

// ---- strings ----

std::string trim(const std::string &s) {
  const size_t first = s.find_first_not_of(" \t\r\n");
  return first == s.npos ? "" : s.substr(first, s.find_last_not_of(" \t\r\n") - first + 1);
}

Strings split(const std::string &s, const std::string &separator) {
  Strings pieces;
  size_t begin = 0;
  for (size_t at; (at = s.find(separator, begin)) != s.npos; begin = at + separator.size()) {
    pieces.push_back(s.substr(begin, at - begin));
  }
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

void append_new(Strings &list, const std::string &s) {
  if (!contains(list, s)) list.push_back(s);
}

std::string read_text(const fs::path &path) {
  std::ifstream in(path, std::ios::binary);
  if (!in || fs::is_directory(path)) throw Error("cannot read " + path.filename().string());
  return {std::istreambuf_iterator<char>(in), {}};
}

// ---- numbers, printed ----

std::string grouped(double value) {
  std::string s = decimals(std::fabs(value), 0);
  for (int i = static_cast<int>(s.size()) - 3; i > 0; i -= 3) s.insert(i, 1, ',');
  return (value < 0 ? "-" : "") + s;
}

std::string significant(double value, int digits) {
  std::array<char, 32> buffer;
  std::snprintf(buffer.data(), buffer.size(), "%.*e", digits - 1, value);
  const double rounded = std::atof(buffer.data());  // 9.999 has become 10.0
  const int exponent = rounded == 0 ? 0 : std::floor(std::log10(std::fabs(rounded)));
  if (exponent >= 3 && exponent >= digits - 1) return grouped(rounded);
  return decimals(rounded, std::max(0, digits - 1 - exponent));
}

std::string count(double value) {
  return value == std::floor(value) ? grouped(value) : significant(value, 3);
}

std::string bytes(double value) {
  return value < 1e3   ? grouped(value) + " B"
         : value < 1e6 ? format(value, "KB")
         : value < 1e9 ? format(value, "MB")
                       : format(value, "GB");
}

std::string percent(double ratio) {
  return (ratio < 0.1 ? significant(100 * ratio, 2) : decimals(100 * ratio, 0)) + "%";
}

std::string times(double ratio) {
  return decimals(ratio, ratio < 2 ? 2 : ratio < 10 ? 1 : 0) + "×";
}

// ---- results ----

Results::Results(const fs::path &dir)
    : dir_((fs::absolute(dir) / "").lexically_normal().parent_path()) {}

bool Results::has(const std::string &name) const {
  return fs::is_regular_file(dir_ / (name + ".csv"));
}

const Csv &Results::read(const std::string &name) {
  if (const auto found = read_.find(name); found != read_.end()) return found->second;
  const fs::path path = dir_ / (name + ".csv");
  if (!has(name)) {
    Strings names;
    for (const auto &entry : fs::directory_iterator(dir_)) {
      if (entry.path().extension() == ".csv") names.push_back(entry.path().stem());
    }
    std::sort(names.begin(), names.end());
    throw Error("no results '" + name + "'; there are: " + join(names, " "));
  }
  const Strings &columns = is_counters(name)   ? kCounterColumns
                           : is_ceilings(name) ? kCeilingColumns
                                               : kBenchColumns;
  const Strings lines = split(read_text(path), "\n");
  Csv csv = {name, {}};
  for (size_t i = 0; i < lines.size(); ++i) {
    const Strings fields = csv_fields(trim(lines[i]));
    if (i > 0 && fields[0].empty()) continue;
    if (i == 0 ? fields != columns : fields.size() != columns.size()) {
      throw Error(path.filename().string() + ":" + std::to_string(i + 1) +
                  ": the columns must be " + join(columns, ","));
    }
    Row row;
    for (size_t c = 0; c < columns.size(); ++c) row[columns[c]] = fields[c];
    if (i > 0) csv.rows.push_back(row);
  }
  return read_[name] = csv;
}

Filters take_filters(Strings &list, bool counters, bool by_line) {
  const Strings &columns = counters ? kCounterColumns : kBenchColumns;
  Filters filters = by_line ? Filters{} : counters ? kCounterDefaults : kBenchDefaults;
  while (!list.empty() && list.back().find_first_of("=~") != std::string::npos) {
    const size_t relation = list.back().find_first_of("=~");
    const Filter filter = {list.back().substr(0, relation), list.back()[relation],
                           list.back().substr(relation + 1)};
    if (!contains(columns, filter.column)) {
      throw Error("no column '" + filter.column + "' to filter by; allowed: " + join(columns, " "));
    }
    std::erase_if(filters, [&](const Filter &f) { return f.column == filter.column; });
    filters.push_back(filter);
    list.pop_back();
  }
  return filters;
}

Rows find(const Csv &csv, const Filters &filters) {
  Rows rows;
  for (const Row &row : csv.rows) {
    const auto matches = [&](const Filter &f) {
      const std::string &field = row.at(f.column);
      return f.relation == '=' ? field == f.text : field.find(f.text) != field.npos;
    };
    if (std::all_of(filters.begin(), filters.end(), matches)) rows.push_back(&row);
  }
  return rows;
}

Rows require(const Csv &csv, const Filters &filters) {
  for (auto end = filters.begin(); end != filters.end(); ++end) {
    if (!find(csv, {filters.begin(), end + 1}).empty()) continue;
    throw Error("no " + end->column + end->relation + end->text + " in " + csv.name +
                ".csv; there are: " + different(find(csv, {filters.begin(), end}), {end->column}));
  }
  return find(csv, filters);
}

void require_same(const Rows &rows, const Strings &columns) {
  const std::string all = different(rows, columns);
  if (all.find(';') == all.npos) return;
  throw Error("several rows of " + rows[0]->at("step") + " match, filter by one of: " + all);
}

double number(const Row &row, const std::string &column) {
  const std::string &field = row.at(column);
  char *end = nullptr;
  const double value = std::strtod(field.c_str(), &end);
  if (field.empty() || *end) throw Error("'" + field + "' in column " + column + " is no number");
  return value;
}

double median(const Rows &rows, const std::string &column) {
  std::vector<double> values;
  for (const Row *row : rows) values.push_back(number(*row, column));
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

double counter_value(const Rows &rows) {
  for (const Row *row : rows) {
    if (row->at("value") != rows[0]->at("value")) {
      require_same(rows, words("batch heads seqlen head_dim kernel line value"));
    }
  }
  return number(*rows.at(0), "value");
}

double ceiling(const Csv &csv, const std::string &name) {
  return number(*require(csv, {{"name", '=', name}}).at(0), "value");
}

std::string inline_value(const std::string &expression_and_format, Results &results) {
  // The format follows the colon after the last [key]: a variant's name has a colon too.
  const size_t bracket = expression_and_format.rfind(']');
  const size_t colon = expression_and_format.find(':', bracket == std::string::npos ? 0 : bracket);
  const std::string how = colon == std::string::npos ? "" : expression_and_format.substr(colon + 1);
  const std::string expression = trim(expression_and_format.substr(0, colon));
  return format(Expression(expression, results).value(), trim(how));
}

}  // namespace docs
