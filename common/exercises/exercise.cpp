// SPDX-License-Identifier: MIT
#include "common/exercises/exercise.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

#include "common/pages/values.h"
#include "common/testing/process.h"

namespace fs = std::filesystem;

namespace {

const std::set<std::string> kStatements = {"run", "ends", "demand",  "hint", "stage",
                                           "ask", "is",   "because", "miss", "with"};
const std::set<std::string> kWithMessage = {"ends", "demand", "hint", "miss"};
const std::set<std::string> kChanges = {"start", "answer", "right", "program", "wrong"};

/// The items of the chapter's list of exercises, each in one line.
std::vector<std::string> items(const std::string &step) {
  std::vector<std::string> found;
  bool within = false;
  for (const std::string &line : lines_of(read_text(fs::path("steps") / step / "README.md"))) {
    if (line.starts_with("## ")) within = line == "## Exercises";
    if (!within) continue;
    const std::size_t digits = line.find_first_not_of("0123456789");
    if (digits > 0 && digits < line.size() && line.substr(digits, 2) == ". ")
      found.push_back(line.substr(digits + 2));
    else if (!found.empty() && line.starts_with("   "))
      found.back() += " " + trim(line);
    else if (!found.empty() && !line.empty())
      break;
  }
  return found;
}

/// A source with the text of these headers, where it or one of them includes them for the first time.
/// Those that it holds are added to `held`.
std::string with_headers(const std::string &source, const std::vector<fs::path> &headers,
                         std::set<fs::path> &held) {
  std::string text;
  for (const std::string &line : lines_of(source)) {
    const auto header = std::find_if(headers.begin(), headers.end(), [&](const fs::path &path) {
      return line == "#include \"" + path.string() + "\"";
    });
    if (header == headers.end())
      text += line == "#pragma once" ? "" : line + "\n";
    else if (held.insert(*header).second)
      text += "// --- " + header->string() + "\n" + with_headers(read_text(*header), headers, held);
  }
  return text;
}

/// Lines of at most 100 characters, each after `before`.
std::string wrapped(const std::string &text, const std::string &before) {
  std::string all, line = before;
  for (const std::string &word : words(text)) {
    if (line.size() + 1 + word.size() > 100) {
      all += line + "\n";
      line = before;
    }
    line += " " + word;
  }
  return all + line + "\n";
}

}  // namespace

fs::path Exercise::file() const {
  return fs::path("steps") / step / "exercises" / std::to_string(number);
}

bool Exercise::asks() const {
  return std::any_of(statements.begin(), statements.end(),
                     [](const Statement &statement) { return statement.key == "ask"; });
}

fs::path Exercise::work() const {
  return fs::path("try") / chapter() / (std::to_string(number) + (asks() ? ".txt" : ".cu"));
}

fs::path Exercise::source() const {
  return fs::path("steps") / step / "attention.cu";
}

std::vector<fs::path> Exercise::headers() const {
  std::vector<fs::path> paths;
  for (const Statement &statement : statements)
    if (statement.key == "with")
      for (const std::string &name : words(statement.words))
        paths.push_back((fs::path("steps") / step / name).lexically_normal());
  return paths;
}

void parse(const std::string &text, const std::string &file, Exercise &exercise) {
  const std::string changes = join({kChanges.begin(), kChanges.end()}, ", ");
  const auto require = [](bool holds, const std::string &place, const std::string &what) {
    if (!holds) throw std::runtime_error(place + ": " + what);
  };
  for (Change &change : parse_changes(text, file)) {
    const std::string key = change.keyword, words = join(change.fields, " | ");
    if (kChanges.contains(key)) {
      exercise.changes.push_back(std::move(change));
      continue;
    }
    require(change.edits.empty(), change.place, "only " + changes + " may have edits");
    if (key == ">") {
      exercise.reasoning += words + "\n";
    } else if (key.empty()) {  // an indented line
      require(!exercise.statements.empty(), change.place, "the first line must not be indented");
      exercise.statements.back().words += " " + trim(words);
    } else {
      require(kStatements.contains(key), change.place,
              "'" + key + "'; allowed are " + join({kStatements.begin(), kStatements.end()}, ", ") +
                  ", " + changes);
      exercise.statements.push_back({key, trim(words), "", change.place});
    }
  }
  for (Statement &statement : exercise.statements) {
    if (!kWithMessage.contains(statement.key)) continue;
    const std::size_t bar = statement.words.find(" | ");
    require(bar != std::string::npos, statement.place,
            "'" + statement.key + "' must end with '| MESSAGE'");
    statement.message = trim(statement.words.substr(bar + 3));
    statement.words = trim(statement.words.substr(0, bar));
  }
  for (const Statement &statement : exercise.statements) {
    if (statement.key != "run") continue;
    const std::vector<std::string> words = ::words(statement.words);
    const auto is_named = [&](const Change &change) {
      return change.keyword == "program" && change.fields[0] == words[1];
    };
    require(words.size() > 1 &&
                (words[1] == "work" || words[1] == "step" ||
                 std::any_of(exercise.changes.begin(), exercise.changes.end(), is_named)),
            statement.place, "'run' must name work, step or a program");
  }
  for (const Change &change : exercise.changes) {
    const std::vector<std::string> &fields = change.fields;
    const bool asks = exercise.asks();
    require(!change.edits.empty() || fields.back() == "step" || (asks && change.keyword == "wrong"),
            change.place, "'" + change.keyword + "' must have edits");
    if (change.keyword == "answer")
      require(fields == Strings{""} || fields == Strings{"step"}, change.place,
              "'answer' or 'answer step' is allowed");
    if (change.keyword != "wrong") continue;
    require(fields.size() >= 2, change.place, "a wrong answer must have '| WORDS' to be told");
    for (std::size_t i = 2; i < fields.size(); i++)
      require(asks ? fields[i].find(" = ") != std::string::npos
                   : fields[i] == "start" || fields[i] == "step",
              change.place,
              "'" + fields[i] + "'; allowed are " + (asks ? "QUESTION = VALUE" : "start and step"));
  }
}

std::vector<std::string> chapters_with_exercises() {
  std::vector<std::string> chapters;
  for (const std::string &step : step_names())
    if (fs::exists(fs::path("steps") / step / "exercises"))
      chapters.push_back(step.substr(0, step.find('-')));
  return chapters;
}

std::vector<Exercise> exercises_of(const std::string &chapter) {
  std::vector<Exercise> exercises;
  for (const std::string &step : step_names()) {
    if (!step.starts_with(chapter + "-") || !fs::exists(fs::path("steps") / step / "exercises"))
      continue;
    for (const std::string &item : items(step)) {
      Exercise exercise;
      exercise.step = step;
      exercise.number = static_cast<int>(exercises.size()) + 1;
      const std::string at = "steps/" + step + "/README.md, exercise " + exercise.name();
      const std::size_t kind_ends = item.find(".* **"), title = kind_ends + 5;
      const std::size_t title_ends = item.find("** ", title);
      if (item[0] != '*' || kind_ends == std::string::npos || title_ends == std::string::npos)
        throw std::runtime_error(at + ": an item begins with *Kind.* **Title.** and goes on");
      exercise.kind = item.substr(1, kind_ends - 1);
      exercise.title = item.substr(title, title_ends - title - (item[title_ends - 1] == '.'));
      exercise.text = item.substr(title_ends + 3);
      const fs::path file = exercise.file();
      if (!fs::exists(file)) throw std::runtime_error(at + ": there is no " + file.string());
      parse(read_text(file), file, exercise);
      exercises.push_back(exercise);
    }
  }
  return exercises;
}

std::string source_of_step(const Exercise &exercise) {
  const std::vector<fs::path> headers = exercise.headers();
  std::set<fs::path> held;
  const std::string text = with_headers(read_text(exercise.source()), headers, held);
  for (const fs::path &header : headers)
    if (!held.contains(header))
      throw std::runtime_error(exercise.name() + ": with " + header.filename().string() + ": " +
                               exercise.source().string() + " does not include it");
  return text;
}

std::string source_of(const Exercise &exercise, const Change &change) {
  std::string of = "step";
  if (change.keyword == "answer" && change.fields[0].empty()) of = "start";
  const std::size_t named =
      change.keyword == "wrong" ? 2 : 1;  // the field that names what it is of
  if (named == 2 || change.keyword == "right")
    of = change.fields.size() > named ? change.fields[named] : "answer";
  return edited(source_of(exercise, of), change.edits);
}

std::string source_of(const Exercise &exercise, const std::string &keyword,
                      const std::string &name) {
  for (const Change &change : exercise.changes)
    if (change.keyword == keyword && (name.empty() || change.fields[0] == name))
      return source_of(exercise, change);
  return source_of_step(exercise);
}

std::string start_of(const Exercise &exercise) {
  const std::string before = exercise.asks() ? "#" : "//";
  std::string text = before + " " + exercise.name() + ", " + exercise.kind + ": " + exercise.title +
                     "\n" + wrapped(exercise.text, before) + before + " `make check-" +
                     exercise.chapter() + "` judges it, `make answer-" + exercise.name() +
                     "` has the answer.\n\n";
  if (!exercise.asks()) return text + source_of(exercise, "start");
  for (const Statement &statement : exercise.statements)
    if (statement.key == "ask") {
      const std::size_t space = statement.words.find(' ');
      text += wrapped(trim(statement.words.substr(space)), "#") + statement.words.substr(0, space) +
              " =\n\n";
    }
  return text;
}
