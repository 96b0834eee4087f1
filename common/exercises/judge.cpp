// SPDX-License-Identifier: MIT
#include "common/exercises/judge.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>

#include "common/pages/values.h"
#include "common/testing/process.h"

namespace fs = std::filesystem;

namespace {

/// The program does not compile.
struct BuildError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string first_word(const std::string &text) {
  return text.substr(0, text.find(' '));
}
std::string after_first_word(const std::string &text) {
  return trim(text.substr(first_word(text).size()));
}

std::string replaced(std::string text, const std::string &find, const std::string &by) {
  for (std::size_t at; (at = text.find(find)) != std::string::npos;)
    text.replace(at, find.size(), by);
  return text;
}

bool holds(double left, const std::string &relation, double right) {
  if (relation == "<") return left < right;
  if (relation == "<=") return left <= right;
  if (relation == "=") return std::abs(left - right) <= 1e-9 * std::abs(right);
  if (relation == ">=") return left >= right;
  return left > right;
}

/// The value of a reader's number, 0.625, or fraction, 5/8.
std::optional<double> number_in(const std::string &written) {
  const std::size_t slash = written.find('/');
  const auto number = [](const std::string &text) -> std::optional<double> {
    char *end;
    const double value = std::strtod(text.c_str(), &end);
    if (*end != '\0' || end == text.c_str()) return {};
    return value;
  };
  const auto above = number(trim(written.substr(0, slash)));
  if (slash == std::string::npos) return above;
  const auto below = number(trim(written.substr(slash + 1)));
  if (!above || !below || *below == 0) return {};
  return *above / *below;
}

/// Whether a reader's number is this one, rounded to the digits that were written; a fraction, exactly.
/// Of a number that is not whole two digits are the fewest.
bool is_rounded(const std::string &written, double it) {
  const double value = *number_in(written);
  if (written.find('/') != std::string::npos) return std::abs(value - it) <= 1e-6 * std::abs(it);
  const std::size_t point = written.find('.');
  const double decimals =
      point == std::string::npos ? 0 : static_cast<double>(written.size() - point - 1);
  const auto digits =
      std::count_if(written.begin(), written.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (digits < 2 && it != value) return false;
  return std::abs(value - it) <= 0.5000001 * std::pow(10, -decimals);
}

/// Throws unless a run's profile may have a count of this name.
void require_counter(const std::string &counter) {
  static const std::set<std::string> names = {
#define COUNTER(id, name, ncu, listed) name,
#include "common/emulator/counters.def"
#undef COUNTER
      "shared wavefronts, ideal", "global bytes read", "global bytes written",
      "unique global bytes read", "unique global bytes written"};
  if (!names.contains(counter)) throw std::runtime_error("there is no counter '" + counter + "'");
}

std::string printed(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value == std::floor(value) ? "%.0f" : "%.4g", value);
  return text;
}

}  // namespace

Judge::Judge(Exercise exercise, fs::path folder)
    : exercise_(std::move(exercise)), folder_(std::move(folder)) {}

/// Builds a program that a run names: "work", "step", or a change of it. Throws BuildError.
const Build &Judge::built(const std::string &program) {
  if (const auto found = built_.find(program); found != built_.end()) return found->second;
  Build what{work_, folder_ / work_.stem(), exercise_.step};
  if (program != "work") {
    what.source = folder_ / (program + ".cu");
    what.program = folder_ / program;
    const std::string source = source_of(exercise_, "program", program);
    fs::create_directories(folder_);
    if (!fs::exists(what.source) || read_text(what.source) != source)
      std::ofstream(what.source) << source;
  }
  if (const std::string error = build(what); !error.empty()) throw BuildError(error);
  return built_[program] = what;
}

/// The first run of the reader's program that must end well, or null.
const Statement *Judge::first_run() const {
  for (const Statement &run : exercise_.statements) {
    const std::string name = first_word(run.words);
    const auto ends_it = [&](const Statement &other) {
      return other.key == "ends" && first_word(other.words) == name;
    };
    if (run.key == "run" && first_word(after_first_word(run.words)) == "work" &&
        std::none_of(exercise_.statements.begin(), exercise_.statements.end(), ends_it))
      return &run;
  }
  return nullptr;
}

/// Whether a demand names a count of a run.
bool Judge::has_counts() const {
  return std::any_of(exercise_.statements.begin(), exercise_.statements.end(),
                     [](const Statement &statement) {
                       return statement.key == "demand" && contains(statement.words, "[");
                     });
}

/// How a run of this name ends, counted if the exercise counts anything in it.
const Outcome &Judge::outcome(const std::string &name) {
  if (const auto found = outcomes_.find(name); found != outcomes_.end()) return found->second;
  bool counts = false, traced = false;
  const Statement *run_statement = nullptr;
  for (const Statement &statement : exercise_.statements) {
    if (statement.key == "run" && first_word(statement.words) == name) run_statement = &statement;
    if (statement.key == "ask" || !contains(statement.words, "[" + name + ":")) continue;
    counts = true;
    traced = traced || contains(statement.words, "of the first request");
  }
  if (!run_statement) throw std::runtime_error(exercise_.name() + ": there is no run " + name);
  // Where no demand counts anything, the first run shows whether a kernel computes the answer.
  counts = counts || (run_statement == first_run() && !has_counts());
  const std::string rest = after_first_word(run_statement->words);
  return outcomes_[name] = run(built(first_word(rest)), after_first_word(rest), counts, traced);
}

/// The value of a key: "it", "RUN: COUNTER", "RUN: COUNTER @ TEXT", "RUN: worst KIND", "RUN: line".
double Judge::count(const std::string &key) {
  if (key == "it") return it_;
  const std::size_t colon = key.find(": ");
  if (colon == std::string::npos)
    throw std::runtime_error(exercise_.name() + ": [" + key + "]: [RUN: COUNT] is allowed");
  const std::string name = key.substr(0, colon), what = trim(key.substr(colon + 2));
  const Outcome &of = outcome(name);
  if (what == "line") return of.line;
  const Statement &run_of = *std::find_if(
      exercise_.statements.begin(), exercise_.statements.end(), [&](const Statement &statement) {
        return statement.key == "run" && first_word(statement.words) == name;
      });
  const fs::path source = built(first_word(after_first_word(run_of.words))).source;
  const auto set_place = [&](unsigned line) {
    place_ = source.filename().string() + ":" + std::to_string(line) + " `" +
             source_line(source, line) + "`";
  };
  const auto value = [](const std::map<std::string, double> &counts, const std::string &counter) {
    const auto found = counts.find(counter);
    return found == counts.end() ? 0 : found->second;
  };
  place_.clear();
  for (const bool first : {true, false})
    if (const std::string order = first ? "first line @ " : "last line @ ";
        what.starts_with(order)) {
      const std::vector<std::string> lines = lines_of(read_text(source));
      const Strings texts = split(what.substr(order.size()), " before ");
      unsigned found = 0;
      for (std::size_t i = 0; i < lines.size() && !(first && found); i++) {
        const std::string code = lines[i].substr(0, lines[i].find("//"));
        if (texts.size() > 1 && code.find(texts[1]) != std::string::npos) break;
        if (code.find(texts[0]) != std::string::npos) found = static_cast<unsigned>(i + 1);
      }
      if (found) set_place(found);
      return found;
    }
  if (what.starts_with("worst ")) {
    const std::string kind = what.substr(6);
    const std::string cost = kind.starts_with("global") ? " sectors" : " wavefronts";
    require_counter(kind + cost);
    double worst = 0;
    for (const auto &[line, counts] : of.counts)
      if (const double requests = value(counts, kind + " requests"); line && requests)
        if (const double each = value(counts, kind + cost) / requests; each > worst)
          worst = each, set_place(line);
    return worst;
  }
  const std::size_t at = what.find(" @ ");
  if (at == std::string::npos) return of.counts.contains(0) ? value(of.counts.at(0), what) : 0;
  const std::string counter = what.substr(0, at), text = what.substr(at + 3);
  double sum = 0;
  for (const auto &[line, counts] : of.counts)
    if (line && source_line(source, line).find(text) != std::string::npos) {
      // What a request has is no sum: the largest of several lines.
      const double here = value(counts, counter);
      sum = contains(counter, "of the first request") ? std::max(sum, here) : sum + here;
      if (value(counts, counter)) set_place(line);
    }
  if (place_.empty())
    absent_ = source.filename().string() + ": no line that names `" + text + "` has " + counter +
              ", which the judge counts there: keep the name that the step has";
  return sum;
}

double Judge::evaluate(const std::string &expression) {
  return docs::arithmetic(expression, [&](const std::string &key) { return count(key); });
}

/// What the reader is told of a run that did not end well.
std::string Judge::failure(const Statement &run, const Outcome &of) const {
  const std::string line = source_line(work_, of.line);
  std::string said = of.said;
  if (of.word == "wrong" || of.word == "not-finite") {
    const std::string options = after_first_word(after_first_word(run.words));
    said += options.empty() ? "" : " (" + options + ")";
  } else if (!line.empty()) {
    said += " `" + line + "`";
  }
  for (const Statement &hint : exercise_.statements) {
    if (hint.key != "hint" || first_word(hint.words) != of.word) continue;
    const std::string text = after_first_word(hint.words);
    if (said.find(text) != std::string::npos) return said + "\n" + hint.message;
  }
  return said;
}

/// What the kernel cannot have done through views and functions of common/kernel, because it counts less of it
/// than any right kernel must: plain pointers and arithmetic of its own make a count meaningless.
std::string Judge::uncounted(const Outcome &of) const {
  if (!of.counts.contains(0)) return "";
  const auto count = [&](const char *name) {
    const auto found = of.counts.at(0).find(name);
    return found == of.counts.at(0).end() ? 0 : found->second;
  };
  // Of each score two products of d terms, and in a backward pass five.
  const std::string source = read_text("steps/" + exercise_.step + "/attention.cu");
  const double products = source.find(".gradients = true") != source.npos ? 5 : 2;
  const double scores = of.operations / (2 * products * of.head_dim);
  const double exp2 = count("exp2 instructions");
  std::vector<std::tuple<std::string, double, double>> least = {
      {"different bytes of global memory are read", count("unique global bytes read"), of.kv_bytes},
      {"different bytes of global memory are written", count("unique global bytes written"),
       of.o_bytes},
      {"exponentials are computed", exp2, scores / 32}};
  if (source_of_step(exercise_).find(" mma(") != std::string::npos) {
    const double mma = of.operations / (16 * 8 * 16 * 2);
    least.push_back({"mma are issued", count("mma"), mma});
    least.push_back({"ldmatrix are issued", count("ldmatrix"), mma / 8});  // 4 m tiles, x4
  } else if (exercise_.chapter() < "05") {
    least.push_back({"requests load from memory",
                     count("shared load requests") + count("global load requests"), exp2});
  }
  for (const auto &[what, there, needed] : least)
    if (there < needed)
      return docs::count(there) + " " + what +
             " as the emulator counts, where a right kernel needs at least " +
             docs::count(std::ceil(needed)) +
             ": use views and the functions of common/kernel, not plain pointers.";
  return "";
}

Verdict Judge::judge_code() {
  std::string stage;
  const auto no = [&](const std::string &said) {
    return Verdict{false, (stage.empty() ? "" : stage + ": ") + said};
  };
  try {
    const std::vector<Statement> &statements = exercise_.statements;
    for (const Statement &statement : statements) {
      if (statement.key == "stage") stage = statement.words;
      if (statement.key == "run") {
        const std::string name = first_word(statement.words);
        const bool ends = std::any_of(statements.begin(), statements.end(), [&](const auto &other) {
          return other.key == "ends" && first_word(other.words) == name;
        });
        const bool of_work = first_word(after_first_word(statement.words)) == "work";
        const Outcome &of = outcome(name);
        if (of_work && !ends && of.word != "passed") return no(failure(statement, of));
        if (of_work && of.word == "passed")
          if (const std::string said = uncounted(of); !said.empty()) return no(said);
      } else if (statement.key == "ends") {
        const Outcome &of = outcome(first_word(statement.words));
        if (of.word != after_first_word(statement.words))
          return no((of.word == "passed" ? "the run passed" : of.said) + "\n" + statement.message);
      } else if (statement.key == "demand") {
        for (const std::string relation : {" <= ", " >= ", " < ", " > ", " = "}) {
          const std::size_t at = statement.words.find(relation);
          if (at == std::string::npos) continue;
          absent_.clear();
          double left = 0, right = 0;
          try {
            right = evaluate(statement.words.substr(at + relation.size()));
            left = evaluate(statement.words.substr(0, at));
          } catch (const docs::Error &) {  // a division by a count of 0
            if (absent_.empty()) return no("a count is 0 in " + statement.words);
          }
          if (!absent_.empty()) return no(absent_);
          if (!holds(left, trim(relation), right))
            return no(replaced(replaced(replaced(statement.message, "{left}", docs::count(left)),
                                        "{right}", docs::count(right)),
                               "{line}", place_));
          break;
        }
      }
    }
  } catch (const BuildError &error) {
    return {false, "does not compile: " + std::string(error.what())};
  }
  return {true, ""};
}

/// The right answer to the question before an `is`, as the reader would write it.
std::string Judge::right(const Statement &is) {
  if (first_word(is.words) == "ends") return outcome(after_first_word(is.words)).word;
  it_ = evaluate(is.words);
  return printed(it_);
}

Verdict Judge::judge_words() {
  std::map<std::string, std::string> written;
  for (const std::string &line : lines_of(read_text(work_)))
    if (const std::size_t equals = line.find('='); line[0] != '#' && equals != std::string::npos) {
      std::string value = trim(line.substr(equals + 1));
      std::erase(value, ',');
      written[trim(line.substr(0, equals))] = value;
    }
  std::string name, question;
  for (std::size_t i = 0; i < exercise_.statements.size(); i++) {
    const Statement &statement = exercise_.statements[i];
    if (statement.key == "ask")
      name = first_word(statement.words), question = after_first_word(statement.words);
    if (statement.key != "is") continue;
    const bool wants_word = first_word(statement.words) == "ends";
    const std::string value = written[name];
    if (value.empty()) return {false, name + ": nothing is written yet. " + question};
    const std::optional<double> number = number_in(value);
    if (wants_word &&
        std::find(ending_words().begin(), ending_words().end(), value) == ending_words().end())
      return {false,
              name + " = " + value + ": must be one of the words " + join(ending_words(), ", ")};
    if (!wants_word && !number)
      return {false, name + " = " + value + ": must be a number, as 4, 0.25 or 1/4"};
    const std::string answer = right(statement);
    if (wants_word ? value == answer : is_rounded(value, it_)) continue;
    std::string said =
        name + " = " + value + ": " +
        (wants_word ? "no, it ends otherwise"
                    : "the emulator counts " + std::string(*number < it_ ? "more" : "less"));
    for (std::size_t j = i + 1; j < exercise_.statements.size(); j++) {
      const Statement &miss = exercise_.statements[j];
      if (miss.key == "ask") break;
      if (miss.key == "miss" &&
          (wants_word ? miss.words == value : is_rounded(value, evaluate(miss.words))))
        return {false, said + "\n" + miss.message};
    }
    return {false, said};
  }
  return {true, ""};
}

Verdict Judge::judge(const fs::path &work) {
  work_ = work;
  if (exercise_.asks()) return judge_words();
  built_.erase("work");
  outcomes_.clear();
  return judge_code();
}

std::string Judge::stale_bounds(const fs::path &step) {
  work_ = step;
  built_.erase("work");
  outcomes_.clear();
  std::string stale;
  for (const Statement &statement : exercise_.statements) {
    const std::size_t at = statement.words.find(" <= ");
    if (statement.key != "demand" || at == std::string::npos ||
        statement.message.find("the step has {right}") == std::string::npos)
      continue;
    const double said = evaluate(statement.words.substr(at + 4));
    const double counted = evaluate(statement.words.substr(0, at));
    if (counted != said)
      stale += statement.place + ": says that the step has " + docs::count(said) + ", and it has " +
               docs::count(counted) + "\n";
  }
  return stale;
}

std::map<std::string, std::string> Judge::right_answers() {
  std::map<std::string, std::string> answers;
  std::string name;
  for (const Statement &statement : exercise_.statements) {
    if (statement.key == "ask") name = first_word(statement.words);
    if (statement.key == "is") answers[name] = right(statement);
  }
  return answers;
}

std::string Judge::wrong_arithmetic() {
  std::string wrong;
  for (const Statement &statement : exercise_.statements) {
    if (statement.key == "is") right(statement);
    if (statement.key != "because") continue;
    const double value = evaluate(statement.words);
    if (std::abs(value - it_) > 1e-6 * std::abs(it_))
      wrong += statement.words + " is " + printed(value) + ", counted: " + printed(it_) + "\n";
  }
  return wrong;
}
