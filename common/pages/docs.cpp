#include "common/pages/docs.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <regex>
#include <set>

namespace fs = std::filesystem;

namespace docs {
namespace {

const char kDash[] = "—";  // a result that is not there
const Strings kShape = {"batch", "heads", "seqlen", "head_dim"};

// The fp32 peak of an H200 without tensor cores, in TFLOP/s: 132 SMs x 128 lanes x 2 operations
// (a fused multiply-add) x 1.98 GHz (boost clock) = 66.9.
const double kH200Fp32Peak = 132 * 128 * 2 * 1.98e-3;
const char kFirstTensorCoreStep[] = "05";  // the steps that sort before it stay below that peak
const size_t kNumber = 2;                  // digits that a step's name begins with

// ---- tables ----

/// What a table is made of.
struct Request {
  const Csv &csv;
  const Csv *ceilings;  // of the same GPU; null if there are none
  std::string step;     // empty if the table takes none
  Filters filters;
  fs::path root, markdown_dir;
};

/// A table's lines. A heading that starts with '>' aligns its column to the right.
Strings markdown_table(Strings headings, const std::vector<Strings> &rows) {
  Strings rules;
  for (std::string &heading : headings) {
    rules.push_back(heading[0] == '>' ? "---:" : "---");
    if (heading[0] == '>') heading.erase(0, 1);
  }
  Strings lines = {"| " + join(headings, " | ") + " |", "| " + join(rules, " | ") + " |"};
  for (const Strings &row : rows) lines.push_back("| " + join(row, " | ") + " |");
  return lines;
}

std::string link(const std::string &text, const fs::path &to, const Request &request) {
  return "[" + text + "](" + to.lexically_relative(request.markdown_dir).generic_string() + ")";
}

bool is_step(const std::string &name) {
  return std::regex_search(name, std::regex("^[0-9]{2}-"));
}

/// What a chapter is about: of "# Step 02: the loop inverted", "the loop inverted".
std::string chapter_idea(const fs::path &chapter) {
  const std::string text = read_text(chapter);
  std::smatch match;
  const bool found = std::regex_search(text, match, std::regex("(^|\n)#[^\n:]*:([^\n]*)"));
  return found ? trim(match[2]) : kDash;
}

/// The rows of one name, of the largest batch that it ran with: what a table of speeds shows.
Rows largest_batch(const Request &request, const std::string &name) {
  Filters filters = request.filters;
  filters.push_back({"step", '=', name});
  Rows rows = find(request.csv, filters);
  double largest = 0;
  for (const Row *row : rows) largest = std::max(largest, number(*row, "batch"));
  std::erase_if(rows, [&](const Row *row) { return number(*row, "batch") < largest; });
  require_same(rows, {"heads"});
  return rows;
}

double tflops(const Rows &rows) {
  return rows.empty() ? 0 : median(rows, "tflops");
}

/// TFLOP/s, ms and batch: the columns that all tables of speeds have.
Strings speed_cells(const Rows &rows) {
  if (rows.empty()) return {kDash, kDash, kDash};
  return {significant(tflops(rows), 3), significant(median(rows, "median_ms"), 3),
          rows[0]->at("batch")};
}

/// The number of the step that a step builds on, as its source says; else the one before it.
std::string number_before(const fs::path &source, const Strings &names, size_t i) {
  const std::string text = fs::exists(source) ? read_text(source) : "";
  std::smatch match;
  if (std::regex_search(text, match, std::regex("(^|\n)// Before +step ([0-9]{2})")))
    return match[2];
  return i == 0 ? "" : names[i - 1].substr(0, kNumber);
}

/// How much of what it could do a step does, and what that is measured by: of plain fp32, a fused
/// multiply-add of every lane and clock; of tensor cores, mma.sync with attention's exponentials.
std::string of_ceiling(const Request &request, const std::string &name, const Rows &rows) {
  if (rows.empty()) return kDash;
  if (name < kFirstTensorCoreStep) {
    const bool h200 = rows[0]->at("device").find("H200") != std::string::npos;
    return h200 ? percent(tflops(rows) / kH200Fp32Peak) + " of fp32" : kDash;
  }
  if (!request.ceilings) return kDash;
  const std::string mma = rows[0]->at("head_dim") == "64" ? "mma-ex2-64" : "mma-ex2";
  return percent(tflops(rows) / ceiling(*request.ceilings, mma)) + " of mma";
}

/// ladder BENCH: every step, against the one it builds on, FlashAttention-2 and its ceiling.
Strings ladder(const Request &request) {
  Strings names;
  for (const auto &entry : fs::directory_iterator(request.root / "steps")) {
    const std::string name = entry.path().filename();
    if (entry.is_directory() && is_step(name)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  const double fa2 = tflops(largest_batch(request, "flash-attention-2"));
  std::map<std::string, double> speeds;  // by number
  std::vector<Strings> table;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string &name = names[i];
    const fs::path dir = request.root / "steps" / name;
    const Rows rows = largest_batch(request, name);
    const double speed = speeds[name.substr(0, kNumber)] = tflops(rows);
    Strings row = {name, kDash};
    if (fs::exists(dir / "README.md")) {
      row = {link(name, dir / "README.md", request), chapter_idea(dir / "README.md")};
    }
    for (const std::string &cell : speed_cells(rows)) row.push_back(cell);
    const std::string number = number_before(dir / "attention.cu", names, i);
    const double before = speeds[number];
    const bool skips = i > 0 && number != names[i - 1].substr(0, kNumber);
    row.push_back(speed > 0 && before > 0
                      ? times(speed / before) + (skips ? " (" + number + ")" : "")
                      : kDash);
    row.push_back(speed > 0 && fa2 > 0 ? percent(speed / fa2) : kDash);
    row.push_back(of_ceiling(request, name, rows));
    table.push_back(row);
  }
  return markdown_table({"step", "the idea", ">TFLOP/s", ">ms", ">batch", ">× the step before",
                         ">of FlashAttention-2", ">of its ceiling"},
                        table);
}

/// The speeds of some names, shown without the first `skip` characters.
Strings speeds(const Request &request, const std::string &heading, Strings names, size_t skip) {
  std::sort(names.begin(), names.end());
  std::vector<Strings> table;
  for (const std::string &name : names) {
    table.push_back({name.substr(skip)});
    for (const auto &cell : speed_cells(largest_batch(request, name))) table.back().push_back(cell);
  }
  return markdown_table({heading, ">TFLOP/s", ">ms", ">batch"}, table);
}

/// peers BENCH: every name that is no step's.
Strings peers(const Request &request) {
  Strings names;
  for (const Row *row : require(request.csv, request.filters)) {
    if (!is_step(row->at("step"))) append_new(names, row->at("step"));
  }
  return speeds(request, "peer", names, 0);
}

/// variants BENCH STEP: the names STEP:VARIANT.
Strings variants(const Request &request) {
  Strings names;
  for (const Row &row : request.csv.rows) {
    if (row.at("step").starts_with(request.step + ":")) append_new(names, row.at("step"));
  }
  if (names.empty()) throw Error("no " + request.step + ":VARIANT in " + request.csv.name + ".csv");
  return speeds(request, "variant", names, request.step.size() + 1);
}

/// How far the emulator is from ncu: "equal", or a signed percentage of ncu's count.
std::string difference(double emulator, double ncu) {
  if (emulator == ncu) return "equal";
  if (ncu == 0) return "ncu counts none";
  const double ratio = (emulator - ncu) / ncu;
  return (ratio > 0 ? "+" : "") + significant(100 * ratio, 2) + "%";
}

/// truth COUNTERS, or of one step counters COUNTERS STEP: the emulator's counts beside ncu's.
Strings truth(const Request &request) {
  Strings steps;
  for (const Row &row : request.csv.rows) append_new(steps, row.at("step"));
  std::sort(steps.begin(), steps.end());
  if (!request.step.empty()) steps = {request.step};
  std::vector<Strings> table;
  for (const std::string &step : steps) {
    Filters filters = request.filters;
    filters.insert(filters.begin(), {"step", '=', step});
    const Rows rows = require(request.csv, filters);
    require_same(rows, kShape);  // or the comparison means nothing
    Strings names;
    std::map<std::string, Rows> emulator, ncu;
    for (const Row *row : rows) {
      append_new(names, row->at("counter"));
      (row->at("source") == "ncu" ? ncu : emulator)[row->at("counter")].push_back(row);
    }
    for (const std::string &name : names) {
      const bool has_emulator = emulator.count(name), has_ncu = ncu.count(name);
      const double a = has_emulator ? counter_value(emulator[name]) : 0;
      const double b = has_ncu ? counter_value(ncu[name]) : 0;
      Strings row = {name, has_emulator ? count(a) : kDash, has_ncu ? count(b) : kDash,
                     has_emulator && has_ncu ? difference(a, b) : kDash};
      if (request.step.empty()) row.insert(row.begin(), step);
      table.push_back(row);
    }
  }
  if (!request.step.empty()) {
    return markdown_table({"counter", ">emulator", ">ncu", ">difference"}, table);
  }
  return markdown_table({"step", "counter", ">emulator", ">ncu", ">verdict"}, table);
}

using RowText = std::function<std::string(const Row &)>;

/// Counters as a table: a row for each value of the column `by`, a column for each `heading`, in
/// the order in which the file has them.
Strings pivot(const Csv &csv, const Rows &rows, const std::string &by, const RowText &label,
              const RowText &heading, std::string (*print)(double), const std::string &missing) {
  Strings headings = {by}, keys;
  std::set<std::string> used;  // headings
  std::map<std::string, Rows> rows_of_key;
  std::map<std::string, std::map<std::string, Rows>> cells;
  for (const Row *row : rows) {
    append_new(keys, row->at(by));
    rows_of_key[row->at(by)].push_back(row);
    used.insert(">" + heading(*row));
    cells[row->at(by)][">" + heading(*row)].push_back(row);
  }
  for (const Row &row : csv.rows) {
    if (used.count(">" + heading(row))) append_new(headings, ">" + heading(row));
  }
  std::vector<Strings> table;
  for (const std::string &value : keys) {
    require_same(rows_of_key[value], kShape);
    table.push_back({label(*rows_of_key[value][0])});
    for (size_t i = 1; i < headings.size(); ++i) {
      const Rows &cell = cells[value][headings[i]];
      table.back().push_back(cell.empty() ? missing : print(counter_value(cell)));
    }
  }
  return markdown_table(headings, table);
}

/// bytes COUNTERS: a row per step, a column per counter of bytes and source.
Strings bytes_table(const Request &request) {
  Rows rows = require(request.csv, request.filters);
  std::erase_if(
      rows, [](const Row *row) { return row->at("counter").find("bytes") == std::string::npos; });
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Row *a, const Row *b) { return a->at("step") < b->at("step"); });
  const auto heading = [](const Row &row) {
    return row.at("counter") + " (" + row.at("source") + ")";
  };
  return pivot(
      request.csv, rows, "step", [](const Row &row) { return row.at("step"); }, heading, bytes,
      kDash);
}

/// lines COUNTERS STEP: a row per line of the source, a column per counter, zeros left blank.
Strings lines_table(const Request &request) {
  Filters filters = {{"step", '=', request.step}, {"source", '=', "emulator"}};
  filters.insert(filters.end(), request.filters.begin(), request.filters.end());
  Rows rows = require(request.csv, filters);
  std::erase_if(
      rows, [](const Row *row) { return row->at("line") == "0" || number(*row, "value") == 0; });
  std::stable_sort(rows.begin(), rows.end(), [](const Row *a, const Row *b) {
    return number(*a, "line") < number(*b, "line");
  });
  const fs::path source = request.root / "steps" / split(request.step, ":")[0] / "attention.cu";
  const auto label = [&](const Row &row) {
    return link(row.at("line"), source.string() + "#L" + row.at("line"), request);
  };
  return pivot(
      request.csv, rows, "line", label, [](const Row &row) { return row.at("counter"); }, count,
      "");
}

struct Table {
  const char *usage;
  Strings (*make)(const Request &);
};

const Table kTables[] = {
    {"ladder BENCH", ladder},
    {"peers BENCH", peers},
    {"variants BENCH STEP", variants},
    {"counters COUNTERS STEP", truth},
    {"truth COUNTERS", truth},
    {"bytes COUNTERS", bytes_table},
    {"lines COUNTERS STEP", lines_table},
};

// ---- regions ----

/// An HTML comment: text[begin, end) is "<!-- body -->".
struct Comment {
  size_t begin, end;
  std::string body;
  std::string kind;  // "code", "table" or "value"; "" is none of ours
  bool closes;       // ends a region, else starts one
};

std::optional<Comment> next_comment(const std::string &text, size_t from) {
  const size_t begin = text.find("<!--", from);
  if (begin == text.npos) return {};
  const size_t end = std::min(text.find("-->", begin), text.size());
  Comment c = {begin, std::min(end + 3, text.size()), trim(text.substr(begin + 4, end - begin - 4)),
               "", false};
  c.closes = c.body == "/" || c.body == "/code" || c.body == "/table";
  if (c.body.starts_with("code:") || c.body == "/code") c.kind = "code";
  if (c.body.starts_with("table:") || c.body == "/table") c.kind = "table";
  if (c.body.starts_with("=") || c.body == "/") c.kind = "value";
  return c;
}

/// What is wrong with where a comment of ours stands, or "".
std::string misplaced(const Comment &c, const std::string &before, char after) {
  // After nothing but the markers of quotes and lists, Markdown takes a comment for a block.
  static const std::regex block_start(R"([ \t>]*(([-+*]|[0-9]+[.)])[ \t]+)*)");
  if (c.kind == "value" && !c.closes && std::regex_match(before, block_start)) {
    return "a value may not start a line, Markdown would end the paragraph there: " + c.body;
  }
  const bool alone = trim(before).empty() && (after == '\n' || after == '\r' || after == '\0');
  if (c.kind != "value" && !alone) return "this comment must have a line of its own: " + c.body;
  return "";
}

/// The text between the comments of a region.
std::string regenerate(const Comment &open, const std::string &indent, const fs::path &markdown_dir,
                       Results &results) {
  if (open.kind == "value") return inline_value(open.body.substr(1), results);
  const std::string arguments = trim(open.body.substr(open.kind.size() + 1));
  const Strings lines = open.kind == "code" ? code_quote(arguments, markdown_dir)
                                            : table(arguments, results, markdown_dir);
  std::string text = "\n\n";  // without a blank line Markdown takes what follows for HTML
  for (const std::string &line : lines) text += (line.empty() ? "" : indent + line) + "\n";
  return text + "\n" + indent;
}

}  // namespace

Strings table(const std::string &name_and_arguments, Results &results,
              const fs::path &markdown_dir) {
  Strings list = words(name_and_arguments), usages;
  for (const Table &t : kTables) {
    const Strings usage = words(t.usage);
    usages.push_back(t.usage);
    if (list.empty() || usage[0] != list[0]) continue;
    const bool counters = usage[1] == "COUNTERS";
    const Filters filters = take_filters(list, counters, usage[0] == "lines");
    if (list.size() != usage.size() || list[1].ends_with("counters") != counters) {
      throw Error("the table is '" + usages.back() + " [filters]', not '" + name_and_arguments +
                  "'; the name of COUNTERS ends in 'counters'");
    }
    const std::string ceilings = list[1] + "-ceilings";
    return t.make({results.read(list[1]), results.has(ceilings) ? &results.read(ceilings) : nullptr,
                   list.size() > 2 ? list[2] : "", filters, results.root(), markdown_dir});
  }
  throw Error("no table '" + name_and_arguments + "'; allowed: " + join(usages, ", "));
}

Strings code_quote(const std::string &arguments, const fs::path &markdown_dir) {
  Strings parts = split(arguments + " ", " | ");  // with no LAST, the bar ends the arguments
  for (std::string &part : parts) part = trim(part);
  if (parts.size() != 3 || parts[0].empty() || parts[1].empty()) {
    throw Error("a quote is 'FILE | FIRST | LAST', LAST may be empty; not '" + arguments + "'");
  }
  const std::string &file = parts[0], &first_text = parts[1], &last_text = parts[2];
  const Strings source = split(read_text(markdown_dir / file), "\n");
  const auto find_line = [&](size_t from, const std::string &anchor) {
    while (from < source.size() && source[from].find(anchor) == std::string::npos) ++from;
    return from;
  };
  const size_t first = find_line(0, first_text), again = find_line(first + 1, first_text);
  if (first == source.size()) throw Error("no line of " + file + " contains '" + first_text + "'");
  const std::string a = std::to_string(first + 1);
  if (again < source.size()) {
    throw Error("'" + first_text + "' is in lines " + a + " and " + std::to_string(again + 1) +
                " of " + file + ": take more of the line");
  }
  const size_t last = last_text.empty() ? first : find_line(first, last_text);
  if (last == source.size()) {
    throw Error("no line of " + file + " from " + a + " on contains '" + last_text + "'");
  }
  const std::string b = std::to_string(last + 1);
  size_t indent = std::string::npos;
  for (size_t i = first; i <= last; ++i) {
    indent = std::min(indent, source[i].find_first_not_of(' '));
  }
  Strings lines = {"```cuda"};
  for (size_t i = first; i <= last; ++i) {
    lines.push_back(source[i].substr(std::min(indent, source[i].size())));
  }
  lines.push_back("```");
  lines.push_back("<sub>[" + file + "](" + file + "#L" + a + "-L" + b + "), " +
                  (a == b ? "line " + a : "lines " + a + "–" + b) + "</sub>");
  return lines;
}

Rewritten rewrite(const fs::path &file, const std::string &text, Results &results) {
  Rewritten done;
  const fs::path dir = fs::absolute(file).lexically_normal().parent_path();
  const auto line_of = [&](const Comment &c) {
    return std::to_string(1 + std::count(text.begin(), text.begin() + c.begin, '\n'));
  };
  const auto error = [&](const Comment &c, const std::string &what) {
    done.errors.push_back(file.string() + ":" + line_of(c) + ": " + what);
  };
  size_t copied = 0;  // of text
  std::optional<Comment> open;
  for (auto c = next_comment(text, 0); c; c = next_comment(text, c->end)) {
    if (c->kind.empty() && !open) continue;
    const size_t line_begin = text.rfind('\n', c->begin) + 1;  // on the first line, npos + 1 = 0
    const std::string before = text.substr(line_begin, c->begin - line_begin);
    const std::string wrong = misplaced(*c, before, text[c->end]);
    if (!c->kind.empty() && !wrong.empty()) error(*c, wrong);
    if (open && c->closes && c->kind == open->kind) {
      try {
        const std::string old = text.substr(open->end, c->begin - open->end);
        const std::string fresh = regenerate(*open, before, dir, results);
        done.text += text.substr(copied, open->end - copied) + fresh;
        copied = c->begin;
        if (fresh != old) {
          done.stale.push_back("line " + line_of(*open) + ": " + open->body +
                               (c->kind == "value" ? " is " + fresh + ", was " + old : ""));
        }
      } catch (const std::exception &e) {
        error(*open, e.what());
      }
      open.reset();
      continue;
    }
    const std::string closing = !open || open->kind == "value" ? "/" : "/" + open->kind;
    if (open) error(*open, "unterminated, only <!--" + closing + "--> may follow: " + open->body);
    if (!open && c->closes) error(*c, "this comment ends nothing: " + c->body);
    open = c->closes || c->kind.empty() ? std::nullopt : c;
  }
  if (open) error(*open, "unterminated: " + open->body);
  done.text += text.substr(copied);
  return done;
}

int run(const std::vector<fs::path> &files, const fs::path &results_dir, bool check,
        std::ostream &output, std::ostream &error) {
  Results results(results_dir);
  std::vector<Rewritten> rewritten;
  Strings stale, errors;
  for (const fs::path &file : files) {
    try {
      rewritten.push_back(rewrite(file, read_text(file), results));
    } catch (const std::exception &e) {
      errors.push_back(file.string() + ": " + e.what());
      continue;
    }
    for (const auto &s : rewritten.back().stale) stale.push_back(file.string() + ": stale: " + s);
    for (const std::string &e : rewritten.back().errors) errors.push_back(e);
  }
  for (const std::string &e : errors) error << e << "\n";
  if (!errors.empty()) return 2;
  if (check) {
    for (const std::string &s : stale) output << s << "\n";
    return stale.empty() ? 0 : 1;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    if (rewritten[i].stale.empty()) continue;
    std::ofstream out(files[i], std::ios::binary);
    if (!(out << rewritten[i].text << std::flush)) {
      error << "cannot write " << files[i].string() << "\n";
      return 2;
    }
  }
  return 0;
}

}  // namespace docs
