// SPDX-License-Identifier: MIT
#include "common/pages/docs.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <regex>
#include <set>

#include "common/testing/process.h"
#include "reference/parallel.h"

namespace fs = std::filesystem;

namespace docs {
namespace {

/// A value that nobody has measured: an error in prose, a dash in a table.
struct Missing : Error {
  using Error::Error;
};

using Row = std::map<std::string, std::string>;  // column -> field
using Rows = std::vector<Row>;

const char kDash[] = "—";

/// A table has a row for each row of its file that matches these filters and its own, sorted by step;
/// what gives the same line is one. A column is HEADING = CELL; > aligns it to the right, ? leaves it out
/// if all its cells are the same. In a cell $NAME is what Page::about says, {EXPR:FORMAT} a
/// value. Where one of them is missing the cell is what follows the semicolon, or a dash.
struct Table {
  std::string filters, columns;
};

const std::map<std::string, Table> kTables = {
    {"ladder", {"step~^[01][0-9]-[^:]*$", R"(
step = [$step]($chapter) | the idea = $idea | >TFLOP/s = {$speed} | >ms = {$ms} | >batch = {$most:,}
>× the step before = {$speed/[$file tflops $before $largest]:x}$note
>of FlashAttention-2 = {$speed/[$file tflops flash-attention-2 $largest]:%s}
>of its ceiling = {$speed/[$file-ceilings mma-ex2]:%s} of $mma;{$speed/[$file-ceilings fp32-peak]:%s} of fp32)"}},
    {"types", {"step~^[0-9]{2}-[^:]*$ options~^(type=bf16)?$", R"(
step = [$step]($chapter) | the idea = $idea | >fp16, TFLOP/s = {$speed} | >bf16, TFLOP/s = {$bf16}
>× FlashAttention-3 = {$bf16/$fa3:x};{$speed/$fa3:x} (fp16))"}},
    {"models", {"options~ seqlen~ head_dim~", R"(
step = [$step]($chapter) | the idea = $idea | problem = $problem | >speed = {[$1 cache_TBs $step $at seqlen=1]} TB/s;{[$1 tflops $step $at]} TFLOP/s
>× FlashAttention-2 = {[$1 median_ms flash-attention-2 $at]/[$1 median_ms $step $at]:x}
>× FlashAttention-3 = {[$1 median_ms flash-attention-3-bf16 $at]/[$1 median_ms $step $at]:x}
>× cuDNN = {[$1 median_ms cudnn $at]/[$1 median_ms $step $at]:x})"}},
    {"problems", {"step=$2", R"(
?>batch = $batch | ?>heads = $heads | ?>seqlen = $seqlen | ?>head dim = $head_dim | ?seqlen-k = $keys)"}},
    {"peers", {"step~^(?!matmul)[a-z]", R"(
peer = $step | >TFLOP/s = {$speed} | >ms = {$ms} | >batch = {$most:,})"}},
    {"variants", {"step~^[0-9]{2}-", R"(
variant = $variant | >TFLOP/s = {$speed} | >ms = {$ms} | >batch = {$most:,}
>× the step = $in_time;{$speed/[$file tflops $base $largest]:x} | ?>× the step, in clocks = $in_clocks
what it tries = $what)"}},
    {"counters", {"", R"(
counter = $counter | >emulator = {[$file emulator $counter $step $filters]:,}
>ncu = {[$file ncu $counter $step $filters]:,} | >difference = $difference)"}},
    {"truth", {"batch~ heads~ seqlen~ head_dim~ options~", ""}},
    {"truth-sentence", {"batch~ heads~ seqlen~ head_dim~ options~", ""}},
    {"costs", {"", R"(
step = [$step]($chapter) | the idea = $idea | >instructions = {[$file instructions $step head_dim=$head_dim]:,}
>registers = {[$file registers $step head_dim=$head_dim]:0} | ?>clocks, millions = {[$1 sm_clocks $step $filters]/1000000:s4}
?>least to most = {[$1 sm_clocks_least $step $filters]/1000000:s4} to {[$1 sm_clocks_most $step $filters]/1000000:s4}
?>× clocks of the step before = {[$1 sm_clocks $step $filters]/[$1 sm_clocks $before $filters]:x}
?>× its time = {[$1 median_ms $step $filters]/[$1 median_ms $before $filters]:x}
?>W = {[$1 watts $step $filters]:0})"}},
    {"sustained", {"", R"(
run = $run | >W = {[$file watts $step $here]:0} | >GHz = {[$file mhz $step $here]/1000:s4}
>GHz by nvidia-smi = {[$file smi_mhz $step $here]/1000:s4} | >TFLOP/s = {[$file tflops $step $here]}
>TFLOP/s per GHz = {[$file tflops $step $here]/[$file mhz $step $here]*1000:s4})"}}};

/// What $NAME stands for in a table where it is no column.
const Row kShort = {
    {"largest", "batch=max $filters"},
    {"speed", "[$file tflops $step $largest]"},
    {"ms", "[$file median_ms $step $largest]"},
    {"most", "[$file batch $step $largest]"},
    {"bf16", "[$file tflops $step $largest options=type=bf16]"},
    {"fa3", "[$file tflops flash-attention-3-bf16 $largest options=type=bf16]"},
    {"here", "seqlen=$seqlen head_dim=$head_dim options=$plus"},
    {"at", "batch=$batch heads=$heads seqlen=$seqlen head_dim=$head_dim options=$plus"}};

/// A text with every match of `pattern` replaced by what `make` makes of its first group.
template <class F>
std::string replaced(std::string text, const std::regex &pattern, F make) {
  std::string done;
  for (std::smatch match; std::regex_search(text, match, pattern); text = match.suffix())
    done += match.prefix().str() + make(match[1]);
  return done + text;
}

/// What the first match of `pattern` in a file captures.
std::string capture(const fs::path &file, const std::string &pattern) {
  const std::string text = read_text(file);
  std::smatch match;
  if (!std::regex_search(text, match, std::regex(pattern)))
    throw Missing("nothing in " + file.string() + " matches " + pattern);
  return join(words(match[1]), " ");
}

const std::string &field(const Row &row, const std::string &column) {
  if (row.count(column)) return row.at(column);
  Strings columns;
  for (const auto &[name, text] : row) columns.push_back(name);
  throw Missing("no column '" + column + "'; there are: " + join(columns, " "));
}

double number(const Row &row, const std::string &column) {
  const std::string &text = field(row, column);
  if (text.empty()) throw Missing("no " + column);
  static const std::regex decimal("-?[0-9.]+(e[-+]?[0-9]+)?");
  if (!std::regex_match(text, decimal)) throw Error(column + " '" + text + "' is no number");
  return std::stod(text);
}

/// The rows of CSV files. Each option that has a value is a column, too, kv-heads of kv-heads=8. Of a benchmark
/// cache_TBs is one: kv_bytes over the time, in TB/s. What stands behind the column 'line' are counters: each count is
/// a row, with the columns counter and one for each source, emulator or ncu.
Rows read_csv(const std::vector<fs::path> &paths) {
  Rows rows;
  std::map<Row, size_t> places;  // of counts
  for (const fs::path &path : paths) {
    Strings columns;
    size_t shared = std::string::npos;  // columns before the counters
    for (const std::string &line : lines_of(read_text(path))) {
      const Strings fields = csv_fields(line);
      if (columns.empty()) {
        columns = fields;
        const auto last = std::find(columns.begin(), columns.end(), "line");
        if (std::count(columns.begin(), last, "source"))
          shared = static_cast<size_t>(last - columns.begin()) + 1;
      }
      if (fields.size() != columns.size())
        throw Error(path.string() + ": '" + line + "': the columns must be " + join(columns, ","));
      if (fields == columns) continue;
      size_t c = 0;
      Row row;
      for (; c < std::min(shared, columns.size()); ++c) row[columns[c]] = fields[c];
      for (const std::string &word : words(row.count("options") ? row["options"] : ""))
        if (const Strings parts = split(word, "="); parts.size() == 2) row[parts[0]] = parts[1];
      if (row.count("kv_bytes") && !row["kv_bytes"].empty())
        row["cache_TBs"] = std::to_string(number(row, "kv_bytes") / number(row, "median_ms") / 1e9);
      if (shared == std::string::npos) {
        rows.push_back(row);
        continue;
      }
      const std::string source = row["source"];
      row.erase("source");
      for (; c < columns.size(); ++c) {
        if (fields[c].empty()) continue;
        row["counter"] = columns[c];
        const auto [place, fresh] = places.try_emplace(row, rows.size());
        if (fresh) rows.push_back(row);
        std::string &cell = rows[place->second][source];
        if (!cell.empty() && cell != fields[c])
          throw Error("two values of " + columns[c] + ": " + line);
        cell = fields[c];
      }
    }
  }
  if (rows.empty()) throw Error("no rows in " + paths.back().string());
  return rows;
}

/// Takes the filters out of `list`.
Strings take_filters(Strings &list) {
  const auto filter = [](const std::string &word) { return word.find_first_of("=~") != word.npos; };
  Strings filters = list;
  std::erase_if(list, filter);
  std::erase_if(filters, std::not_fn(filter));
  return filters;
}

/// The CSV files of all pages, as they are read.
struct Results {
  std::mutex reading = {};
  std::map<std::string, Rows> files = {};
};

/// A Markdown file, and what its regions are made from.
struct Page {
  const fs::path root, directory;  // of the repository, of the file
  Results &results;
  std::string made = "", stale = "", error = "";  // what run() asks for

  // ---- values ----

  /// The rows of a file. The emulator's counts, which are the same beside every GPU's, have a file of their own;
  /// they come first in a GPU's if it begins with a problem of theirs.
  Rows rows_of(const std::string &file) const {
    const fs::path own = root / "plots/results" / (file + ".csv"),
                   emulator = root / "plots/results/emulator-counters.csv";
    if (!fs::exists(own)) throw Missing("no rows in " + own.string());
    Rows rows = read_csv({own});
    if (!rows[0].count("counter") || own == emulator || !fs::exists(emulator)) return rows;
    const auto problem = [](const Row &row) {
      Strings fields;
      for (const char *column : {"step", "batch", "heads", "seqlen", "head_dim", "options"})
        fields.push_back(row.at(column));
      return fields;
    };
    const Rows counted = read_csv({emulator});
    const bool begins = std::any_of(counted.begin(), counted.end(), [&](const Row &row) {
      return problem(row) == problem(rows[0]);
    });
    return begins ? read_csv({emulator, own}) : rows;
  }

  /// The rows of a file that match every filter, COLUMN=TEXT or COLUMN~REGEX (a + is a space, =max the
  /// largest there is), and the defaults of the columns that no filter names.
  std::vector<const Row *> select(const std::string &file, Strings filters) {
    std::vector<const Row *> rows;
    const std::lock_guard lock(results.reading);
    Rows &all = results.files[file];
    if (all.empty()) all = rows_of(file);
    for (const Row &row : all) rows.push_back(&row);
    const Row first = *rows[0];
    Row defaults = {{"options", ""}, {"line", "0"}, {"seqlen", "8192"}, {"head_dim", "128"}};
    if (first.count("counter"))
      for (const char *column : {"batch", "heads", "seqlen", "head_dim"})
        defaults[column] = first.at(column);
    for (const std::string &f : filters) defaults.erase(f.substr(0, f.find_first_of("=~")));
    for (const auto &[column, text] : defaults)
      if (first.count(column)) filters.push_back(column + "=" + text);
    std::stable_partition(filters.begin(), filters.end(),
                          [](const std::string &f) { return !f.ends_with("=max"); });
    for (const std::string &filter : filters) {
      const size_t at = filter.find_first_of("=~");
      const std::string column = filter.substr(0, at);
      std::string text = join(split(filter.substr(at + 1), "+"), " ");
      std::set<std::string> there;
      for (const Row *row : rows) {
        there.insert(field(*row, column));
        if (text == "max" || (filter.ends_with("=max") && number(*row, column) > std::stod(text)))
          text = row->at(column);
      }
      const std::regex pattern(filter[at] == '~' ? text : "");
      std::erase_if(rows, [&](const Row *row) {
        const std::string &in = row->at(column);
        return filter[at] == '=' ? in != text : !std::regex_search(in, pattern);
      });
      if (rows.empty())
        throw Missing("no " + filter + " in " + file +
                      ".csv; there are: " + join({there.begin(), there.end()}, "; "));
    }
    return rows;
  }

  /// The value of a key, given without its brackets: a median, of the repetitions of an interleaved run.
  double value_of(const std::string &key) {
    Strings list = words(key), filters = take_filters(list);
    if (list.size() < 2)
      throw Error("a key is [FILE COLUMN STEP] or [FILE NAME], not [" + key + "]");
    const bool named = list.size() == 2;
    filters.insert(filters.begin(), (named ? "name=" : "step=") + list.back());
    if (list.size() > 3)
      filters.insert(filters.begin(), "counter=" + join({list.begin() + 2, list.end() - 1}, "+"));
    std::map<std::string, std::set<std::string>> different;
    std::vector<double> values;
    for (const Row *row : select(list[0], filters)) {
      values.push_back(number(*row, named ? "value" : list[1]));
      for (const auto &[column, text] : *row) different[column].insert(text);
    }
    for (const char *column : {"batch", "heads", "seqlen", "head_dim", "options", "counter"})
      if (const auto &texts = different[column]; texts.size() > 1)
        throw Error("several rows of " + list.back() + " match, filter by " + column + ": " +
                    join({texts.begin(), texts.end()}, "; "));
    std::sort(values.begin(), values.end());
    return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
  }

  /// The value of EXPR:FORMAT, printed.
  std::string value(const std::string &text) {
    // The format follows a colon after the last [key]: a variant's name has a colon, too.
    static const std::regex form("(.*?)(?::([^:\\]]*))?");
    std::smatch match;
    std::regex_match(text, match, form);
    const auto of_key = [&](const std::string &key) { return value_of(key); };
    return format(arithmetic(match[1], of_key), match[2].matched ? trim(match[2]) : "s3");
  }

  // ---- tables ----

  std::string step_named(const std::string &number) const {
    for (const auto &entry : fs::directory_iterator(root / "steps"))
      if (const std::string name = entry.path().filename(); name.starts_with(number + "-"))
        return name;
    throw Error("no step " + number);
  }

  /// What a step's header says: a column of build/ladder.csv.
  std::string header(const std::string &step, const std::string &column) const {
    const std::lock_guard lock(results.reading);
    Rows &headers = results.files["ladder"];
    if (headers.empty()) headers = read_csv({root / "build/ladder.csv"});
    for (const Row &row : headers)
      if (row.at("step") == step) return row.at(column);
    return "";
  }

  /// What $NAME is in a row: a column, or what follows from its columns, or is said of its step.
  std::string about(const Row &row, const std::string &name) const {
    if (row.count(name)) return row.at(name);
    if (kShort.count(name)) return filled(kShort.at(name), row);
    if (name == "plus") return join(words(row.at("options")), "+");
    if (name == "keys") return field(row, "seqlen-k");
    if (name == "run")
      return row.at("step") + (row.at("options").empty() ? "" : " " + row.at("options"));
    if (name == "base") return step_named(row.at("file").substr(row.at("file").size() - 2));
    if (name == "problem")
      return filled("batch $batch, $heads head", row) + (row.at("heads") == "1" ? "" : "s") +
             filled(", seqlen $seqlen, head dim $head_dim", row) +
             (row.at("options").empty() ? "" : ", " + row.at("options"));
    if (name == "difference") {
      const double a = number(row, "emulator"), b = number(row, "ncu");
      return a == b   ? "equal"
             : b == 0 ? "ncu counts none"
                      : (a > b ? "+" : "") + format((a - b) / b, "%s2");
    }
    const Strings parts = split(field(row, "step"), ":");  // STEP:VARIANT
    const fs::path folder = root / "steps" / parts[0];
    if (name == "variant") return parts.back();
    if (name == "chapter") return fs::relative(folder / "README.md", directory).string();
    if (name == "idea") return capture(folder / "README.md", "^#[^\n:]*:([^\n]*)");
    if (name == "mma" && header(parts[0], "why").find("mma") != std::string::npos) return name;
    if (name == "before" && !header(parts[0], name).empty())
      return step_named(header(parts[0], name));
    if (name == "note") {  // where that is not the one before
      const std::string before = about(row, "before").substr(0, 2);
      return std::stoi(before) + 1 == std::stoi(parts[0]) ? "" : " (" + before + ")";
    }
    if (name == "what" && parts.size() == 1)
      return parts[0] == about(row, "base") ? "the step" : "the step before";
    if (name == "what" && parts[1] == "control") return "the step once more: the noise";
    if (name == "what")  // the first sentence
      return capture(folder / "variants" / (parts[1] + ".patch"),
                     R"(^([^.]*(?:\.[^\s][^.]*)*\.)\s)");
    throw Missing("no $" + name);
  }

  std::string filled(const std::string &text, const Row &row) const {
    static const std::regex name("\\$(\\w+)");
    return replaced(text, name, [&](const std::string &match) { return about(row, match); });
  }

  std::string cell(const std::string &text, const Row &row) {
    static const std::regex braces("\\{(.*?)\\}");
    for (const std::string &way : split(text, ";")) {
      try {
        return replaced(filled(way, row), braces,
                        [&](const std::string &match) { return value(match); });
      } catch (const Missing &) {  // the next way
      }
    }
    return kDash;
  }

  Strings table_of(const Strings &columns, const Rows &rows) {
    Strings lines(rows.size() + 2, "|");
    for (const std::string &column : columns) {
      const size_t equals = column.find(" = ");
      const bool optional = column[0] == '?', right = column[optional] == '>';
      Strings cells;
      for (const Row &row : rows) cells.push_back(cell(column.substr(equals + 3), row));
      const bool same = Strings(cells.size(), cells[0]) == cells;
      if (optional && same) continue;
      if (same && cells[0] == kDash)
        throw Error("nothing is measured for '" + column.substr(right, equals - right) + "'");
      lines[0] += " " + column.substr(right + optional, equals - right - optional) + " |";
      lines[1] += right ? " ---: |" : " --- |";
      for (size_t i = 0; i < rows.size(); ++i) lines[i + 2] += " " + cells[i] + " |";
    }
    std::set<std::string> seen;
    std::erase_if(lines, [&](const std::string &line) { return !seen.insert(line).second; });
    return lines;
  }

  /// How many counts of the emulator equal ncu's, and which do not.
  std::string truth_sentence(const Rows &rows, const Strings &problems) const {
    std::map<std::string, std::set<std::string>> others;  // counters that are not equal: steps
    double all = 0, equal = 0;
    for (const Row &row : rows) {
      if (!row.count("emulator") || !row.count("ncu")) continue;
      const bool same = about(row, "difference") == "equal";
      all++, equal += same;
      if (!same) others[row.at("counter")].insert(row.at("step").substr(0, 2));
    }
    Strings list;
    for (const auto &[counter, steps] : others)
      list.push_back(counter + " (" + join({steps.begin(), steps.end()}, ", ") + ")");
    const size_t named = std::min<size_t>(problems.size(), 3), more = problems.size() - named;
    return count(equal) + " of " + count(all) + " counts equal ncu's, at " +
           join({problems.begin(), problems.begin() + named}, "; at ") +
           (more ? "; and at " + std::to_string(more) + " more problems." : ".") +
           (list.empty() ? "" : " The others, by step: " + join(list, "; ") + ".");
  }

  /// Of each step: how many of its counts equal ncu's, and of each counter that does not, at how many problems.
  Strings truth_table(const Rows &rows) const {
    struct Compared {
      std::set<std::string> problems;
      double all = 0, equal = 0;
      std::map<std::string, int> others;
    };
    std::map<std::string, Compared> steps;
    for (const Row &row : rows) {
      if (!row.count("emulator") || !row.count("ncu")) continue;
      Compared &step = steps[row.at("step")];
      const bool same = about(row, "difference") == "equal";
      step.problems.insert(row.at("problem"));
      step.all++, step.equal += same;
      if (!same) step.others[row.at("counter")]++;
    }
    Strings lines = {"| step | problems | counts | equal | the others, and at how many problems |",
                     "| --- | ---: | ---: | ---: | --- |"};
    for (const auto &[name, step] : steps) {
      Strings others;
      for (const auto &[counter, times] : step.others)
        others.push_back(counter + " (" + std::to_string(times) + ")");
      lines.push_back("| " + name + " | " + count(step.problems.size()) + " | " + count(step.all) +
                      " | " + count(step.equal) + " | " + join(others, "; ") + " |");
    }
    return lines;
  }

  Strings table(const std::string &arguments) {
    Strings list = words(arguments), names, columns, problems;
    Row given = {{"filters", join(take_filters(list), " ")}};
    for (size_t i = 1; i < list.size(); ++i)
      given[i == 1 ? "file" : std::to_string(i - 1)] = list[i];
    for (const auto &[name, table] : kTables) names.push_back(name);
    const std::string name = list.empty() ? "" : list[0];
    const size_t least = name == "problems" ? 4 : name == "models" || name == "costs" ? 3 : 2;
    if (!kTables.count(name) || list.size() < least || (list.size() > least && name != "problems"))
      throw Error(
          "a table is 'NAME FILE [filters]', 'models FILE FILE [filters]', 'costs FILE FILE "
          "[filters]' or "
          "'problems FILE COLUMN STEP... [filters]', NAME one of " +
          join(names, ", ") + "; not '" + arguments + "'");
    const Table &table = kTables.at(list[0]);
    Rows rows;
    Strings wanted = words(filled(table.filters + " $filters", given));
    if (name == "costs")  // the first file has the code, the second the problems
      std::erase_if(wanted, [](const std::string &filter) {
        return !filter.starts_with("step") && !filter.starts_with("head_dim");
      });
    for (const Row *found : select(list[1], wanted)) {
      rows.push_back(*found);
      rows.back().insert(given.begin(), given.end());
      std::string &step = rows.back()["step"];
      if (step.size() == 2) step = step_named(step);
    }
    const auto order = [&](const Row &row) {  // problems from small to large
      std::vector<double> sizes;
      for (const char *size : {"batch", "heads", "seqlen", "keys"})
        if (name == "problems")
          sizes.push_back(std::stod(cell(std::string("$") + size + ";0", row)));
      return std::pair(row.at("step"), sizes);
    };
    std::stable_sort(rows.begin(), rows.end(),
                     [&](const Row &a, const Row &b) { return order(a) < order(b); });
    columns = split(join(split(trim(table.columns), "\n"), " | "), " | ");
    if (list[0] == "problems")
      for (size_t i = 3; i < list.size(); ++i)
        columns.push_back(">" + list[i] + " = {[$file $1 " + list[i] + " $at]}");
    if (!list[0].starts_with("truth")) return table_of(columns, rows);

    for (Row &row : rows) {  // a section for each problem that ncu has measured, too
      row["problem"] = about(row, "problem");
      if (row.count("emulator") && row.count("ncu") &&
          std::find(problems.begin(), problems.end(), row["problem"]) == problems.end())
        problems.push_back(row["problem"]);
    }
    if (problems.empty()) throw Error("ncu has measured nothing in " + list[1]);
    if (list[0] == "truth-sentence") return {truth_sentence(rows, problems)};
    return truth_table(rows);
  }

  // ---- quotes ----

  /// Lines of a file (`code`), or of what a command prints, as a terminal shows it.
  Strings quote(bool code, const std::string &arguments) const {
    Strings parts = split(arguments + " ", " | ");  // with no LAST, the bar ends the arguments
    std::transform(parts.begin(), parts.end(), parts.begin(), trim);
    if (parts.size() > 3 || parts[0].empty() || (code && parts.size() < 2))
      throw Error("a quote is 'FILE | FIRST | LAST' or 'COMMAND | FIRST | LAST'; not '" +
                  arguments + "'");
    parts.resize(3);
    const std::string &what = parts[0], &from = parts[1], &to = parts[2];
    const Finished run = code ? Finished{0, read_text(directory / what), ""}
                              : run_command("cd " + shell_word(root) + " && exec 2>&1 && " + what);
    if (run.status > 1)  // 1: a wrong answer, as some are to show
      throw Error("'" + what + "' fails: " + trim(run.out));
    const Strings lines = code ? lines_of(run.out) : split(trim(run.out), "\n");
    if (lines.empty()) throw Error("cannot read " + what);
    Strings found;  // the lines that contain `from`
    size_t first = 0, last = from.empty() && to.empty() ? lines.size() - 1 : 0;
    for (size_t i = lines.size(); !from.empty() && i-- > 0;)
      if (lines[i].find(from) != from.npos)
        first = last = i, found.push_back(std::to_string(i + 1));
    if (!from.empty() && found.size() != 1)
      throw Error("one line of " + what + " must contain '" + from + "', not " +
                  count(found.size()) + ": " + join(found, " "));
    if (!to.empty())
      while (last < lines.size() && lines[last].find(to) == to.npos) ++last;
    const std::string a = std::to_string(first + 1), b = std::to_string(last + 1);
    if (last == lines.size())
      throw Error("no line of " + what + " from " + a + " on contains '" + to + "'");

    size_t indent = code ? std::string::npos : 0;
    for (size_t i = first; i <= last; ++i)
      indent = std::min(indent, lines[i].find_first_not_of(' '));
    Strings quoted = {code ? "```cuda" : "```text"};
    if (!code) quoted.push_back("$ " + what);
    if (!code && first > 0) quoted.push_back("...");
    for (size_t i = first; i <= last; ++i)
      quoted.push_back(lines[i].substr(std::min(indent, lines[i].size())));
    if (!code && last + 1 < lines.size()) quoted.push_back("...");
    quoted.push_back("```");
    if (code)
      quoted.push_back("<sub>[" + what + "](" + what + "#L" + a + "-L" + b + "), " +
                       (a == b ? "line " + a : "lines " + a + "–" + b) + "</sub>");
    return quoted;
  }

  // ---- regions ----

  /// A line with its values made anew.
  std::string with_values(const std::string &line) {
    static const std::regex one("<!--=(.*?)-->[^<]*<!--/-->"), half("<!--=|<!--/-->");
    // After nothing but the markers of quotes and lists, Markdown takes a comment for a block.
    static const std::regex at_start(R"([ \t>]*(([-+*]|[0-9]+[.)])[ \t]+)*<!--=.*)");
    if (std::regex_match(line, at_start))
      throw Error("a value may not start a line, Markdown would end the paragraph there: " + line);
    if (std::regex_search(replaced(line, one, [](const auto &) { return ""; }), half))
      throw Error("a value is <!--=EXPR:FORMAT-->text<!--/-->, in one line; not " + trim(line));
    return replaced(line, one, [&](const std::string &text) {
      return "<!--=" + text + "-->" + value(text) + "<!--/-->";
    });
  }

  /// Makes every region anew.
  void rewrite(const std::string &file) {
    static const std::regex opening("( *)<!-- (code|output|table): (.*) -->"),
        ours("<!-- /?(code|output|table)\\b");
    const Strings lines = lines_of(read_text(file));
    if (lines.empty()) error = "cannot read " + file + "\n";
    for (size_t i = 0; i < lines.size(); ++i) {
      const std::string at = file + ":" + std::to_string(i + 1) + ": ";
      Strings old = {lines[i]}, fresh = old;
      try {
        std::smatch match;
        if (std::regex_match(lines[i], match, opening)) {
          const std::string indent = match[1], kind = match[2], what = trim(match[3]);
          const std::string closing = indent + "<!-- /" + kind + " -->";
          do old.push_back(++i < lines.size() ? lines[i] : "<!-- /code");
          while (!std::regex_search(old.back(), ours));
          if (old.back() != closing)
            throw Error("unterminated, only " + closing + " may follow: " + trim(old[0]));
          fresh.push_back("");  // or Markdown takes what follows for HTML
          for (const std::string &line :
               kind == "table" ? table(what) : quote(kind == "code", what))
            fresh.push_back(line.empty() ? "" : indent + line);
          fresh.insert(fresh.end(), {"", closing});
        } else if (std::regex_search(lines[i], ours)) {
          throw Error("this comment ends nothing, or has no line of its own: " + trim(lines[i]));
        } else {
          fresh = {with_values(lines[i])};
        }
      } catch (const std::exception &e) {
        error = at + e.what() + "\n";
        return;
      }
      if (fresh != old) stale += at + "stale: " + trim(old[0]) + "\n";
      made += join(fresh, "\n") + "\n";
    }
  }
};

}  // namespace

int run(const Strings &files, const fs::path &root, bool check, std::ostream &output,
        std::ostream &error) {
  Results results;
  std::vector<Page> pages;
  for (const fs::path file : files)
    pages.push_back({root, fs::absolute(file).parent_path(), results});
  parallel_for(files.size(), [&](size_t i) { pages[i].rewrite(files[i]); });
  std::string stale, errors;
  for (const Page &page : pages) stale += page.stale, errors += page.error;
  for (size_t i = 0; errors.empty() && !check && i < pages.size(); ++i)
    if (!pages[i].stale.empty() && !(std::ofstream(files[i]) << pages[i].made << std::flush))
      errors = "cannot write " + files[i] + "\n";
  error << errors;
  if (check && errors.empty()) output << stale;
  return !errors.empty() ? 2 : check && !stale.empty();
}

}  // namespace docs
