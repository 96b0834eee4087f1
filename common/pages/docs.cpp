#include "common/pages/docs.h"

#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <regex>
#include <set>
#include <sstream>
#include <tuple>

namespace fs = std::filesystem;

namespace docs {
namespace {

const char kDash[] = "—";     // a result that is not there
const char kPartIV[] = "30";  // its steps' numbers begin there; they have a ladder of their own

/// What a region is made of.
struct Request {
  Results &results;
  fs::path markdown_dir;
  std::string file = {};  // of a table: its CSV, what it takes more, and its filters
  Strings more = {}, filters = {};

  fs::path steps() const { return results.root() / "steps"; }
  Rows rows(Strings first = {}) const {
    first.insert(first.end(), filters.begin(), filters.end());
    return results.select(file, first);
  }
};

/// What the first match of `pattern` in a file captures; "" without a match or a file.
std::string capture(const fs::path &file, const std::string &pattern) {
  const std::string text = fs::exists(file) ? read_text(file) : "";
  std::smatch match;
  return std::regex_search(text, match, std::regex(pattern)) ? trim(match[1]) : "";
}

// ---- tables ----

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

/// The speed of a name at the largest batch that it ran with: what a table of speeds shows.
struct Speed {
  double tflops = 0;
  Strings cells = {kDash, kDash, kDash};  // TFLOP/s, ms, batch
};

Speed speed(Rows rows, const std::string &name) {
  double largest = 0;
  std::erase_if(rows, [&](const Row *row) { return row->at("step") != name; });
  for (const Row *row : rows) largest = std::max(largest, number(*row, "batch"));
  std::erase_if(rows, [&](const Row *row) { return number(*row, "batch") < largest; });
  if (rows.empty()) return {};
  require_same(rows, {"heads"});
  const double tflops = median(rows, "tflops");
  return {tflops,
          {significant(tflops, 3), significant(median(rows, "median_ms"), 3), count(largest)}};
}

/// A speed relative to another, printed; a dash if one of them is not there.
std::string against(const Speed &s, double other, std::string (*print)(double),
                    const std::string &unit = "") {
  return s.tflops > 0 && other > 0 ? print(s.tflops / other) + unit : kDash;
}

std::set<std::string> names_of(const Rows &rows) {
  std::set<std::string> names;
  for (const Row *row : rows) names.insert(row->at("step"));
  return names;
}

bool is_step(const std::string &name) {
  return std::regex_match(name, std::regex("[0-9]{2}-[^:]*"));
}

/// The columns of a ladder that say what a step is: its name, a link if it has a chapter, and its idea.
Strings step_and_idea(const Request &r, const std::string &name) {
  const fs::path chapter = r.steps() / name / "README.md";
  if (!fs::exists(chapter)) return {name, kDash};
  return {"[" + name + "](" + chapter.lexically_relative(r.markdown_dir).generic_string() + ")",
          capture(chapter, "(?:^|\n)#[^\n:]*:([^\n]*)")};
}

/// Every step of Parts I and II (a step that takes more says so in its header), against the one
/// that it builds on, FlashAttention-2 and its ceiling: of plain fp32,
/// a fused multiply-add of every lane and clock; of tensor cores, mma.sync with attention's ex2.
Strings ladder(const Request &r) {
  const Rows rows = r.rows();
  const bool narrow = rows[0]->at("head_dim") == "64";
  std::set<std::string> names;
  for (const auto &entry : fs::directory_iterator(r.steps()))
    if (is_step(entry.path().filename())) names.insert(entry.path().filename());
  const double fa2 = speed(rows, "flash-attention-2").tflops;
  std::map<std::string, double> tflops;  // by number
  std::string last;
  std::vector<Strings> table;
  for (const std::string &name : names) {
    const fs::path source = r.steps() / name / "attention.cu";
    if (!capture(source, "(?:^|\n)// Takes +([^\n]+)").empty() || name >= kPartIV) continue;
    const std::string number = name.substr(0, 2);
    const Speed s = speed(rows, name);
    const std::string before_text = capture(source, "(?:^|\n)// Before +step ([0-9]{2})");
    const std::string before = before_text.empty() ? last : before_text;
    Strings row = step_and_idea(r, name);
    row.insert(row.end(), s.cells.begin(), s.cells.end());
    const bool tensor_cores = !capture(source, "(?:^|\n)// Needs +[^\n]*(mma)").empty();
    const double ceiling = r.results.named(
        r.file + "-ceilings", tensor_cores ? (narrow ? "mma-ex2-64" : "mma-ex2") : "fp32-peak", 0);
    row.push_back(against(s, tflops[before], times, before == last ? "" : " (" + before + ")"));
    row.push_back(against(s, fa2, percent));
    row.push_back(against(s, ceiling, percent, tensor_cores ? " of mma" : " of fp32"));
    table.push_back(row);
    tflops[last = number] = s.tflops;
  }
  return markdown_table({"step", "the idea", ">TFLOP/s", ">ms", ">batch", ">× the step before",
                         ">of FlashAttention-2", ">of its ceiling"},
                        table);
}

/// Each step of a BENCH in fp16 and in bf16, and over FlashAttention-3 in bf16: what a step has no bf16
/// for, with its fp16.
Strings types(const Request &r) {
  const Rows rows = r.rows({"options~"});
  const auto speed_in = [&](const std::string &name, const std::string &options) {
    Rows found = rows;
    std::erase_if(found, [&](const Row *row) { return row->at("options") != options; });
    return speed(found, name);
  };
  const double fa3 = speed_in("flash-attention-3-bf16", "type=bf16").tflops;
  std::vector<Strings> table;
  for (const std::string &name : names_of(rows)) {
    if (!is_step(name)) continue;
    const Speed fp16 = speed_in(name, ""), bf16 = speed_in(name, "type=bf16");
    if (!(fp16.tflops > 0 || bf16.tflops > 0)) continue;  // in fp8
    Strings row = step_and_idea(r, name);
    row.insert(row.end(), {fp16.cells[0], bf16.cells[0]});
    row.push_back(bf16.tflops > 0 ? against(bf16, fa3, times)
                                  : against(fp16, fa3, times, " (fp16)"));
    table.push_back(row);
  }
  return markdown_table(
      {"step", "the idea", ">fp16, TFLOP/s", ">bf16, TFLOP/s", ">× FlashAttention-3"}, table);
}

/// What a problem is, in words: "batch 4, 16 heads, seqlen 8192, head dim 128, causal".
std::string problem_text(const Row &row) {
  return "batch " + row.at("batch") + ", " + row.at("heads") +
         (row.at("heads") == "1" ? " head" : " heads") + ", seqlen " + row.at("seqlen") +
         ", head dim " + row.at("head_dim") +
         (row.at("options").empty() ? "" : ", " + row.at("options"));
}

/// Each step of Part III at the problem that plots/models.csv has for it, and its speed over its
/// peers'. A decoding step's speed is that of the cache's bytes.
Strings models(const Request &r) {
  std::vector<Strings> table;
  for (const Row &problem : r.results.read("../models")) {
    Strings row;
    for (const auto &entry : fs::directory_iterator(r.steps()))
      if (const std::string name = entry.path().filename();
          name.starts_with(problem.at("step") + "-"))
        row = step_and_idea(r, name);
    if (row.empty()) continue;  // no such step yet
    const bool decodes = problem.at("seqlen") == "1";
    const std::string column = decodes ? "cache_TBs" : "tflops";
    const auto of = [&](const std::string &name) {
      Rows found;
      for (const Row &measured : r.results.read(r.file)) {
        bool same = measured.at("step").starts_with(name) &&
                    measured.at("step").find(':') == std::string::npos;
        for (const auto &[key, value] : problem)
          same = same && (key == "step" || measured.at(key) == value);
        if (same) found.push_back(&measured);
      }
      return found.empty() ? 0 : median(found, column);
    };
    const double speed = of(problem.at("step") + "-");
    row.insert(row.end(),
               {problem_text(problem),
                speed > 0 ? significant(speed, 3) + (decodes ? " TB/s" : " TFLOP/s") : kDash});
    for (const std::string peer : {"flash-attention-2", "flash-attention-3", "cudnn"})
      row.push_back(speed > 0 && of(peer) > 0 ? times(speed / of(peer)) : kDash);
    table.push_back(row);
  }
  return markdown_table({"step", "the idea", "problem", ">speed", ">× FlashAttention-2",
                         ">× FlashAttention-3", ">× cuDNN"},
                        table);
}

/// One column of some steps, variants and peers, a row for each problem at which the first of them was
/// measured. What is the same in all rows is left out.
Strings problems(const Request &r) {
  const std::string &column = r.more[0];
  const Strings names = split(r.more[1], ",");
  const Rows rows = r.rows();
  Rows problems;  // one row of each
  for (const Row *row : rows)
    if (row->at("step") == names[0] &&
        std::none_of(problems.begin(), problems.end(),
                     [&](const Row *known) { return problem_text(*known) == problem_text(*row); }))
      problems.push_back(row);
  if (problems.empty())
    throw Error("no step=" + names[0] + " in " + r.file + ".csv with these filters");
  std::vector<std::string> options;
  for (const Row *row : problems)
    for (const std::string &word : words(row->at("options")))
      if (const std::string name = split(word, "=")[0];
          std::find(options.begin(), options.end(), name) == options.end())
        options.push_back(name);

  Strings headings;
  std::vector<Strings> table(problems.size());
  const auto add = [&](const std::string &heading, auto cell) {
    Strings cells;
    for (const Row *row : problems) cells.push_back(cell(*row));
    if (std::all_of(cells.begin(), cells.end(), [&](const auto &c) { return c == cells[0]; }))
      return;
    headings.push_back(heading);
    for (size_t i = 0; i < cells.size(); ++i) table[i].push_back(cells[i]);
  };
  for (const std::string key : {"batch", "heads", "seqlen", "head_dim"})
    add(">" + join(split(key, "_"), " "), [&](const Row &row) { return row.at(key); });
  for (const std::string &name : options)
    add(name, [&](const Row &row) { return option(row, name, ""); });
  for (const std::string &name : names) {
    headings.push_back(">" + name);
    for (size_t i = 0; i < problems.size(); ++i) {
      Rows found;
      for (const Row *row : rows)
        if (row->at("step") == name && problem_text(*row) == problem_text(*problems[i]))
          found.push_back(row);
      table[i].push_back(found.empty() ? kDash : significant(median(found, column), 3));
    }
  }
  return markdown_table(headings, table);
}

/// Every name that is no step's, nor a variant's.
Strings peers(const Request &r) {
  std::vector<Strings> table;
  for (const std::string &name : names_of(r.rows())) {
    if (std::regex_search(name, std::regex("^[0-9]{2}-|^matmul"))) continue;
    const Speed s = speed(r.rows(), name);
    table.push_back({name, s.cells[0], s.cells[1], s.cells[2]});
  }
  return markdown_table({"peer", ">TFLOP/s", ">ms", ">batch"}, table);
}

/// A step, the step before it, and the step's variants, STEP:NAME. What one tries is the first
/// sentence of its patch.
Strings variants(const Request &r) {
  const Rows rows = r.rows();
  const auto names = names_of(rows);
  const auto of = std::find_if(names.begin(), names.end(),
                               [](const std::string &name) { return name.find(':') != name.npos; });
  if (of == names.end()) throw Error(r.file + ".csv has no variant, STEP:NAME");
  const std::string base = split(*of, ":")[0];
  std::vector<Strings> table;
  for (const std::string &name : names) {
    const Strings parts = split(name, ":");
    if (!std::regex_search(name, std::regex("^[0-9]{2}-"))) continue;
    const Speed s = speed(rows, name), step = speed(rows, base);
    table.push_back({parts.back(), s.cells[0], s.cells[1], s.cells[2],
                     against(s, step.tflops, times),
                     parts[0] == base ? "the step" : "the step before"});
    if (parts.size() == 1) continue;
    const fs::path patch = r.steps() / parts[0] / "variants" / (parts[1] + ".patch");
    const std::string what = capture(patch, "^([^.]*(?:\\.[^\\s][^.]*)*\\.)\\s");
    table.back().back() = what.empty() ? kDash : join(words(what), " ");
  }
  return markdown_table({"variant", ">TFLOP/s", ">ms", ">batch", ">× the step", "what it tries"},
                        table);
}

/// A counter of a step at one shape, as the emulator counts it and as ncu measures it.
struct Count {
  std::string shape, step, counter;
  Rows emulator = {}, ncu = {};

  bool both() const { return !emulator.empty() && !ncu.empty(); }
  bool equal() const { return counter_value(emulator) == counter_value(ncu); }
};

/// The counters of some rows, sorted by step; else in the order of the file.
std::vector<Count> counts_of(const Rows &rows) {
  std::vector<Count> counts;
  std::map<std::string, size_t> places;
  for (const Row *row : rows) {
    const Count fresh = {problem_text(*row), row->at("step"), row->at("counter")};
    const auto [place, is_new] =
        places.try_emplace(fresh.shape + fresh.step + fresh.counter, counts.size());
    if (is_new) counts.push_back(fresh);
    Count &c = counts[place->second];
    (row->at("source") == "ncu" ? c.ncu : c.emulator).push_back(row);
  }
  std::stable_sort(counts.begin(), counts.end(),
                   [](const Count &a, const Count &b) { return a.step < b.step; });
  return counts;
}

/// The counts as rows of a table, each after its step and name.
std::vector<Strings> count_rows(const std::vector<Count> &counts) {
  std::vector<Strings> rows;
  for (const Count &c : counts) {
    const double a = c.emulator.empty() ? 0 : counter_value(c.emulator);
    const double b = c.ncu.empty() ? 0 : counter_value(c.ncu);
    rows.push_back({c.step, c.counter, c.emulator.empty() ? kDash : count(a),
                    c.ncu.empty() ? kDash : count(b),
                    !c.both() ? kDash
                    : a == b  ? "equal"
                    : b == 0  ? "ncu counts none"
                              : (a > b ? "+" : "") + significant(100 * (a - b) / b, 2) + "%"});
  }
  return rows;
}

/// One step's counters, emulator beside ncu.
Strings counters(const Request &r) {
  const Rows rows = r.rows({"step=" + r.more[0]});
  require_same(rows,
               {"batch", "heads", "seqlen", "head_dim", "options"});  // or it compares nothing
  std::vector<Strings> table = count_rows(counts_of(rows));
  for (Strings &row : table) row.erase(row.begin());
  return markdown_table({"counter", ">emulator", ">ncu", ">difference"}, table);
}

/// The same of all steps, a table for each problem that ncu has measured.
Strings truth(const Request &r) {
  Strings shapes, lines;
  std::map<std::string, std::vector<Count>> counts;
  for (const Count &c : counts_of(r.rows({"seqlen~", "options~"}))) {  // of every problem
    if (!counts.count(c.shape)) shapes.push_back(c.shape);
    counts[c.shape].push_back(c);
  }
  std::erase_if(shapes, [&](const std::string &shape) {
    return std::none_of(counts[shape].begin(), counts[shape].end(), std::mem_fn(&Count::both));
  });
  for (const std::string &shape : shapes) {
    lines.insert(lines.end(), {"## B" + shape.substr(1), ""});
    for (const std::string &line : markdown_table(
             {"step", "counter", ">emulator", ">ncu", ">verdict"}, count_rows(counts[shape])))
      lines.push_back(line);
    lines.push_back("");
  }
  lines.pop_back();
  return lines;
}

/// What comes out of that, in a sentence.
Strings truth_sentence(const Request &r) {
  int all = 0, equal = 0;
  Strings shapes, others;
  std::map<std::string, Strings> steps;  // of a counter that is not equal
  for (const Count &c : counts_of(r.rows({"seqlen~", "options~"}))) {
    if (!c.both()) continue;
    if (std::find(shapes.begin(), shapes.end(), c.shape) == shapes.end()) shapes.push_back(c.shape);
    all++;
    equal += c.equal();
    if (!c.equal()) steps[c.counter].push_back(c.step.substr(0, 2));
  }
  constexpr size_t kNamed = 3;  // Part III has problems of its own for each step
  const size_t more = shapes.size() - std::min(shapes.size(), kNamed);
  shapes.resize(shapes.size() - more);
  for (auto &[counter, of] : steps) {
    of.erase(std::unique(of.begin(), of.end()), of.end());
    others.push_back(counter + " (" + join(of, ", ") + ")");
  }
  return {count(equal) + " of " + count(all) + " counts equal ncu's, at " + join(shapes, "; at ") +
          (more ? "; and at " + count(static_cast<double>(more)) + " more problems." : ".") +
          (others.empty() ? "" : " The others, by step: " + join(others, "; ") + ".")};
}

/// What the GPU can do at most: each named value, and the clock that it was measured at.
Strings ceilings(const Request &r) {
  std::vector<Strings> table;
  for (const Row &row : r.results.read(r.file)) {
    const std::string &name = row.at("name");
    if (name.ends_with("-clock")) continue;
    const double ghz = r.results.named(r.file, name + "-clock", 0);
    table.push_back({name, significant(number(row, "value"), 3) + " " + row.at("unit"),
                     ghz > 0 ? significant(ghz, 3) : kDash});
  }
  return markdown_table({"ceiling", ">measured", ">GHz"}, table);
}

/// Of a file of `make power` a row for each run, the NAME of power-NAME.
Strings power(const Request &r) {
  std::vector<Strings> table;
  for (const Row &row : r.results.read(r.file)) {
    if (!row.at("name").starts_with("power-")) continue;
    const std::string run = row.at("name").substr(std::string("power-").size());
    const auto cell = [&](const std::string &what, double unit, int digits) {
      const double value = r.results.named(r.file, what + "-" + run, 0) / unit;
      return value > 0 ? significant(value, digits) : kDash;
    };
    table.push_back({run, cell("power", 1, 3), cell("clock", 1e3, 4),
                     cell("clock-in-kernel", 1e3, 4), cell("speed", 1, 3),
                     cell("speed-per-clock", 1, 4)});
  }
  return markdown_table({"run", ">W", ">GHz", ">GHz in the kernel", ">TFLOP/s", ">TFLOP/s per GHz"},
                        table);
}

const std::map<std::string, Strings (*)(const Request &)> kTables = {
    {"ladder BENCH", ladder},
    {"peers BENCH", peers},
    {"variants BENCH", variants},
    {"types BENCH", types},
    {"models BENCH", models},
    {"problems BENCH COLUMN NAMES", problems},
    {"counters COUNTERS STEP", counters},
    {"truth COUNTERS", truth},
    {"truth-sentence COUNTERS", truth_sentence},
    {"ceilings NAMED", ceilings},
    {"power NAMED", power}};

Strings table(Request r, const std::string &arguments) {
  Strings list = words(arguments), usages;
  r.filters = take_filters(list);
  for (const auto &[usage, make] : kTables) {
    usages.push_back(usage);
    const Strings wanted = words(usage);
    if (list.empty() || wanted[0] != list[0]) continue;
    const std::string kind = list.size() < 2 ? "" : r.results.kind(list[1]);
    if (list.size() != wanted.size() || kind != wanted[1])
      throw Error("the table is '" + usage + " [filters]', not '" + arguments + "'" +
                  (kind.empty() ? "" : "; " + list[1] + ".csv is a " + kind));
    r.file = list[1];
    r.more.assign(list.begin() + 2, list.end());
    return make(r);
  }
  throw Error("no table '" + arguments + "'; allowed: " + join(usages, ", "));
}

// ---- quotes ----

/// The lines of a text from the one that contains `first` to the first from there on that contains
/// `last`; without `last`, the one line. Both are numbered from 0.
std::pair<size_t, size_t> excerpt(const Strings &lines, const std::string &what,
                                  const std::string &first, const std::string &last) {
  const auto find = [&](size_t from, const std::string &text) {
    while (from < lines.size() && lines[from].find(text) == text.npos) ++from;
    return from;
  };
  const size_t a = find(0, first), again = find(a + 1, first), b = last.empty() ? a : find(a, last);
  const std::string line = std::to_string(a + 1);
  if (a == lines.size()) throw Error("no line of " + what + " contains '" + first + "'");
  if (again < lines.size())
    throw Error("'" + first + "' is in lines " + line + " and " + std::to_string(again + 1) +
                " of " + what + ": take more of the line");
  if (b == lines.size())
    throw Error("no line of " + what + " from " + line + " on contains '" + last + "'");
  return {a, b};
}

Strings code(const Request &r, const std::string &arguments) {
  const Strings parts = split(arguments + " ", " | ");  // with no LAST, the bar ends the arguments
  if (parts.size() != 3 || trim(parts[0]).empty() || trim(parts[1]).empty())
    throw Error("a quote is 'FILE | FIRST | LAST', LAST may be empty; not '" + arguments + "'");
  const std::string file = trim(parts[0]);
  const Strings source = split(read_text(r.markdown_dir / file), "\n");
  const auto [first, last] = excerpt(source, file, trim(parts[1]), trim(parts[2]));
  size_t indent = std::string::npos;
  for (size_t i = first; i <= last; ++i)
    indent = std::min(indent, source[i].find_first_not_of(' '));
  Strings lines = {"```cuda"};
  for (size_t i = first; i <= last; ++i)
    lines.push_back(source[i].substr(std::min(indent, source[i].size())));
  const std::string a = std::to_string(first + 1), b = std::to_string(last + 1);
  lines.insert(lines.end(),
               {"```", "<sub>[" + file + "](" + file + "#L" + a + "-L" + b + "), " +
                           (a == b ? "line " + a : "lines " + a + "–" + b) + "</sub>"});
  return lines;
}

/// What a command prints, as a terminal shows it.
Strings output(const Request &r, const std::string &arguments) {
  const Strings parts = split(arguments + " ", " | ");
  if (parts.size() > 3 || trim(parts[0]).empty())
    throw Error("an output is 'COMMAND' or 'COMMAND | FIRST | LAST'; not '" + arguments + "'");
  const std::string command = trim(parts[0]);
  std::string text;
  FILE *pipe =
      popen(("cd '" + r.results.root().string() + "' && exec 2>&1 && " + command).c_str(), "r");
  if (!pipe) throw Error("cannot run '" + command + "'");
  for (int c; (c = std::fgetc(pipe)) != EOF;) text += static_cast<char>(c);
  const int status = pclose(pipe);
  if (!WIFEXITED(status) || WEXITSTATUS(status) > 1)  // 1: a wrong answer, as some are to show
    throw Error("'" + command + "' fails: " + trim(text));
  const Strings all = split(trim(text), "\n");
  auto [first, last] = std::pair{size_t{0}, all.size() - 1};
  if (parts.size() > 1)
    std::tie(first, last) = excerpt(all, "the output of '" + command + "'", trim(parts[1]),
                                    parts.size() > 2 ? trim(parts[2]) : "");
  Strings lines = {"```text", "$ " + command};
  if (first > 0) lines.push_back("...");
  lines.insert(lines.end(), all.begin() + first, all.begin() + last + 1);
  if (last + 1 < all.size()) lines.push_back("...");
  lines.push_back("```");
  return lines;
}

// ---- regions ----

/// The lines of a region.
Strings regenerate(const Request &r, const std::string &kind, const std::string &arguments) {
  return kind == "code"    ? code(r, arguments)
         : kind == "table" ? table(r, arguments)
                           : output(r, arguments);
}

/// A line with its values regenerated.
std::string regenerate_values(const std::string &line, Results &results) {
  static const std::regex value("<!--=(.*?)-->.*?<!--/-->"), half("<!--=|<!--/-->");
  // After nothing but the markers of quotes and lists, Markdown takes a comment for a block.
  static const std::regex block_start(R"([ \t>]*(([-+*]|[0-9]+[.)])[ \t]+)*)");
  std::string done, rest = line;
  for (std::smatch match; std::regex_search(rest, match, value); rest = match.suffix()) {
    const std::string expression = match[1], before = match.prefix();
    if (done.empty() && std::regex_match(before, block_start))
      throw Error("a value may not start a line, Markdown would end the paragraph there: =" +
                  expression);
    if (std::regex_search(before, half)) break;
    done += before + "<!--=" + expression + "-->" + inline_value(expression, results) + "<!--/-->";
  }
  if (std::regex_search(rest, half))
    throw Error("a value is <!--=EXPR:FORMAT-->text<!--/-->, in one line; not " + trim(rest));
  return done + rest;
}

}  // namespace

std::string rewrite(const fs::path &file, Results &results, std::ostream &stale) {
  static const std::regex opening("( *)<!-- (code|output|table): (.*) -->"),
      ours("<!-- /?(code|output|table)\\b");
  const Strings lines = split(read_text(file), "\n");
  const Request request = {results, fs::absolute(file).lexically_normal().parent_path()};
  Strings done;
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string at = file.string() + ":" + std::to_string(i + 1) + ": ";
    try {
      std::smatch match;
      if (!std::regex_match(lines[i], match, opening)) {
        if (std::regex_search(lines[i], ours))
          throw Error("this comment ends nothing, or has no line of its own: " + trim(lines[i]));
        done.push_back(regenerate_values(lines[i], results));
        if (done.back() != lines[i]) stale << at << "stale: " << trim(lines[i]) << "\n";
        continue;
      }
      const std::string indent = match[1], closing = indent + "<!-- /" + match[2].str() + " -->";
      size_t end = i + 1;
      while (end < lines.size() && !std::regex_search(lines[end], ours)) ++end;
      if (end == lines.size() || lines[end] != closing)
        throw Error("unterminated, only " + closing + " may follow: " + trim(lines[i]));
      Strings fresh = {lines[i], ""};  // or Markdown takes what follows for HTML
      for (const std::string &line : regenerate(request, match[2], trim(match[3])))
        fresh.push_back(line.empty() ? "" : indent + line);
      fresh.insert(fresh.end(), {"", closing});
      if (fresh != Strings(lines.begin() + i, lines.begin() + end + 1))
        stale << at << "stale: " << trim(lines[i]) << "\n";
      done.insert(done.end(), fresh.begin(), fresh.end());
      i = end;
    } catch (const std::exception &e) {
      throw Error(at + e.what());
    }
  }
  return join(done, "\n");
}

int run(const Strings &files, const fs::path &results_dir, bool check, std::ostream &output,
        std::ostream &error) {
  Results results(results_dir);
  std::map<std::string, std::string> rewritten;
  std::ostringstream stale;
  bool failed = false;
  for (const std::string &file : files) {
    try {
      rewritten[file] = rewrite(file, results, stale);
    } catch (const std::exception &e) {
      error << e.what() << "\n";
      failed = true;
    }
  }
  if (failed) return 2;
  if (check) {
    output << stale.str();
    return !stale.str().empty();
  }
  for (const auto &[file, text] : rewritten) {
    if (text == read_text(file)) continue;
    if (!(std::ofstream(file, std::ios::binary) << text << std::flush)) {
      error << "cannot write " << file << "\n";
      return 2;
    }
  }
  return 0;
}

}  // namespace docs
