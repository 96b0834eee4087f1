#include "common/exercises/exercise.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <set>
#include <stdexcept>

#include "common/pages/values.h"
#include "common/testing/process.h"

namespace fs = std::filesystem;

namespace {

const std::set<std::string> kKeys = {"run", "ends", "demand",  "hint", "stage",
                                     "ask", "is",   "because", "miss", "with"};
const std::set<std::string> kWithMessage = {"ends", "demand", "hint", "miss"};

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
      found.back() += " " + docs::trim(line);
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
  for (const std::string &word : docs::words(text)) {
    if (line.size() + 1 + word.size() > 100) {
      all += line + "\n";
      line = before;
    }
    line += " " + word;
  }
  return all + line + "\n";
}

}  // namespace

fs::path Exercise::folder() const {
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
      for (const std::string &name : docs::words(statement.words))
        paths.push_back(fs::path("steps") / step / name);
  return paths;
}

std::vector<Statement> parse_statements(const std::string &text, const std::string &file) {
  std::vector<Statement> statements;
  int number = 0;
  for (const std::string &line : lines_of(text)) {
    number++;
    if (docs::trim(line).empty() || line[0] == '#') continue;
    if (line[0] == ' ' && !statements.empty()) {
      statements.back().words += " " + docs::trim(line);
      continue;
    }
    const std::size_t space = std::min(line.find(' '), line.size());
    statements.push_back({line.substr(0, space), docs::trim(line.substr(space)), "", number});
  }
  for (Statement &statement : statements) {
    const auto complain = [&](const std::string &what) {
      throw std::runtime_error(file + ":" + std::to_string(statement.line) + ": " + what);
    };
    if (!kKeys.contains(statement.key))
      complain("'" + statement.key + "'; allowed are " +
               docs::join({kKeys.begin(), kKeys.end()}, ", "));
    if (const std::size_t bar = statement.words.find(" | ");
        kWithMessage.contains(statement.key) && bar != std::string::npos) {
      statement.message = docs::trim(statement.words.substr(bar + 3));
      statement.words = docs::trim(statement.words.substr(0, bar));
    }
    if (kWithMessage.contains(statement.key) && statement.message.empty())
      complain("'" + statement.key + "' ends with '| MESSAGE'");
  }
  return statements;
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
      const fs::path file = exercise.folder() / "exercise";
      if (!fs::exists(file)) throw std::runtime_error(at + ": there is no " + file.string());
      exercise.statements = parse_statements(read_text(file), file);
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

std::string patched(const std::string &source, const fs::path &patch) {
  static std::atomic<int> copies = 0;
  const fs::path folder =
      "build/patched." + std::to_string(getpid()) + "." + std::to_string(copies++);
  fs::create_directories(folder);
  std::ofstream(folder / "attention.cu") << source;
  const Finished finished =
      run_command("cd " + folder.string() + " && git apply " + shell_word(fs::absolute(patch)));
  const std::string text = read_text(folder / "attention.cu");
  fs::remove_all(folder);
  if (finished.status != 0) throw std::runtime_error(patch.string() + ": " + finished.err);
  return text;
}

std::string source_at_start(const Exercise &exercise) {
  const std::string step = source_of_step(exercise);
  const fs::path start = exercise.folder() / "start.patch";
  return fs::exists(start) ? patched(step, start) : step;
}

std::string start_of(const Exercise &exercise) {
  const std::string before = exercise.asks() ? "#" : "//";
  std::string text = before + " " + exercise.name() + ", " + exercise.kind + ": " + exercise.title +
                     "\n" + wrapped(exercise.text, before) + before + " `make check-" +
                     exercise.chapter() + "` judges it, `make answer-" + exercise.name() +
                     "` has the answer.\n\n";
  if (!exercise.asks()) return text + source_at_start(exercise);
  for (const Statement &statement : exercise.statements)
    if (statement.key == "ask") {
      const std::size_t space = statement.words.find(' ');
      text += wrapped(docs::trim(statement.words.substr(space)), "#") +
              statement.words.substr(0, space) + " =\n\n";
    }
  return text;
}
