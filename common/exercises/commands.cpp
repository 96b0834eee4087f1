// SPDX-License-Identifier: MIT
#include "common/exercises/commands.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/exercises/judge.h"
#include "common/pages/values.h"
#include "common/testing/process.h"
#include "reference/parallel.h"

namespace fs = std::filesystem;

namespace {

std::vector<Exercise> of_chapter(const std::string &chapter) {
  std::vector<Exercise> exercises = exercises_of(chapter);
  if (exercises.empty())
    throw std::runtime_error("no exercises there; chapters with exercises are " +
                             join(chapters_with_exercises(), " "));
  return exercises;
}

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

fs::path folder_of(const Exercise &exercise) {
  return fs::path("build") / "try" / exercise.chapter();
}

// --- verdicts, kept until what they are of changes -----------------------------------------------

fs::path verdict_file(const Exercise &exercise) {
  return folder_of(exercise) / (std::to_string(exercise.number) + ".verdict");
}

/// Of one text of the reader's. (Not its time: a copy that is put back has an old one.)
std::string verdict_line(bool done, const std::string &work) {
  return (done ? "done " : "not yet ") + std::to_string(std::hash<std::string>()(work));
}

/// Whether the reader's file is there, and no longer as it was at the start.
bool is_begun(const Exercise &exercise) {
  return fs::exists(exercise.work()) && read_text(exercise.work()) != start_of(exercise);
}

/// The verdict of the file as it is, if there is one.
std::optional<Verdict> kept_verdict(const Exercise &exercise) {
  const fs::path file = verdict_file(exercise);
  if (!fs::exists(file) || !fs::exists(exercise.work())) return {};
  std::vector<fs::path> of = exercise.headers();
  of.insert(of.end(), {exercise.file(), exercise.source(), "build/host/bin/exercises",
                       "build/exercises/common.o"});
  for (const fs::path &path : of)
    if (!fs::exists(path) || fs::last_write_time(path) >= fs::last_write_time(file)) return {};
  const std::string text = read_text(file), work = read_text(exercise.work());
  for (const bool done : {true, false})
    if (const std::string line = verdict_line(done, work) + "\n"; text.starts_with(line))
      return Verdict{done, text.substr(line.size())};
  return {};
}

Verdict verdict_of(const Exercise &exercise) {
  if (const std::optional<Verdict> kept = kept_verdict(exercise)) return *kept;
  const std::string work = read_text(exercise.work());
  const fs::path folder = folder_of(exercise) / std::to_string(exercise.number);
  const Verdict verdict = Judge(exercise, folder).judge(exercise.work());
  if (read_text(exercise.work()) == work) {  // else it may be of either
    fs::create_directories(folder_of(exercise));
    std::ofstream(verdict_file(exercise)) << verdict_line(verdict.done, work) << "\n"
                                          << verdict.said;
  }
  return verdict;
}

// --- the commands --------------------------------------------------------------------------------

int make_copies(const std::string &chapter, std::ostream &output) {
  const std::vector<Exercise> exercises = of_chapter(chapter);
  const fs::path folder = fs::path("try") / chapter;
  const std::string again = "mv try/" + chapter + "/" + exercises[0].work().filename().string() +
                            " somewhere-else && make try-" + chapter;
  int made = 0;
  fs::create_directories(folder);
  for (const Exercise &exercise : exercises) {
    if (fs::exists(exercise.work())) continue;
    std::ofstream(exercise.work()) << start_of(exercise);
    made++;
  }
  if (!made)
    throw std::runtime_error(folder.string() +
                             " has all its files, and they are yours. To start "
                             "one afresh: " +
                             again + "; all: mv try/" + chapter + " try/" + chapter +
                             ".old && make try-" + chapter);
  for (const Exercise &exercise : exercises)
    output << padded(exercise.work().string(), 14) << padded(exercise.kind, 12) << exercise.title
           << "\n";
  output << "Edit them, in any order, then: make check-" << chapter << "\n";
  return 0;
}

/// "3 of 24", of all chapters, by the verdicts that there are.
std::string done_in_book() {
  int done = 0, all = 0;
  for (const std::string &chapter : chapters_with_exercises())
    for (const Exercise &exercise : exercises_of(chapter)) {
      all++;
      const std::optional<Verdict> verdict = kept_verdict(exercise);
      done += verdict && verdict->done;
    }
  return std::to_string(done) + " of " + std::to_string(all);
}

/// Judges a chapter and says so. Returns whether all of it is done.
bool check_once(const std::string &chapter, std::ostream &output) {
  const std::vector<Exercise> exercises = of_chapter(chapter);
  if (!fs::exists(fs::path("try") / chapter))
    throw std::runtime_error("there is no try/" + chapter + "; make try-" + chapter + " makes it");
  std::vector<std::string> lines(exercises.size());
  std::vector<char> done(exercises.size());
  parallel_for(exercises.size(), [&](std::size_t i) {
    const Exercise &exercise = exercises[i];
    const std::string indent(16, ' ');
    std::string mark = "to do", said = exercise.title + ": " + exercise.work().string();
    if (!fs::exists(exercise.work())) {
      said += " is not there; make try-" + chapter + " makes it and leaves the others alone";
    } else if (is_begun(exercise)) {
      const Verdict verdict = verdict_of(exercise);
      done[i] = verdict.done;
      mark = verdict.done ? "done" : "not yet";
      said = verdict.done ? exercise.title : join(split(verdict.said, "\n"), "\n" + indent);
    }
    lines[i] = padded(exercise.name(), 7) + padded(mark, 9) + said + "\n";
  });
  for (const std::string &line : lines) output << line;
  const auto count = std::count(done.begin(), done.end(), char{1});
  output << "chapter " << chapter << ": " << count << " of " << exercises.size()
         << " done; the book: " << done_in_book() << "\n"
         << std::flush;
  return static_cast<std::size_t>(count) == exercises.size();
}

int check(const std::string &chapter, std::ostream &output) {
  const std::vector<Exercise> exercises = of_chapter(chapter);
  // Of each file, and not its time: a copy that is put back has an old one.
  const auto texts = [&] {
    std::vector<std::string> all;
    for (const Exercise &exercise : exercises) all.push_back(read_text(exercise.work()));
    return all;
  };
  for (;;) {
    const std::vector<std::string> judged = texts();  // a save in the meantime is one, too
    if (check_once(chapter, output) || environment("WATCH", "").empty()) return 0;
    output << "waiting for a save in try/" << chapter << "; Ctrl-C ends it\n" << std::flush;
    const auto saved = [&] {
      const std::vector<std::string> now = texts();
      for (std::size_t i = 0; i < now.size(); i++)  // one that is gone may be about to be replaced
        if (!now[i].empty() && now[i] != judged[i]) return true;
      return false;
    };
    while (!saved()) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

int progress(std::ostream &output) {
  std::size_t done = 0, all = 0;
  for (const std::string &chapter : chapters_with_exercises()) {
    const std::vector<Exercise> exercises = of_chapter(chapter);
    std::string marks;
    std::size_t here = 0;
    for (const Exercise &exercise : exercises) {
      const bool begun = is_begun(exercise), is_done = begun && verdict_of(exercise).done;
      here += is_done;
      marks += "  " + std::to_string(exercise.number) +
               (is_done ? " done"
                : begun ? " begun"
                        : " -");
    }
    output << padded(exercises[0].step, 24) << here << " of " << exercises.size() << marks << "\n";
    done += here;
    all += exercises.size();
  }
  output << "the book: " << done << " of " << all << "\n";
  return 0;
}

/// How one source becomes another, as a patch shows it.
std::string difference(const std::string &from, const std::string &to, const fs::path &folder) {
  fs::create_directories(folder);
  std::ofstream(folder / "from.cu") << from;
  std::ofstream(folder / "to.cu") << to;
  return run_command("cd " + shell_word(folder) +
                     " && diff -u --label a/attention.cu --label b/attention.cu from.cu to.cu")
      .out;
}

int answer(const std::string &name, std::ostream &output) {
  const std::size_t dash = name.find('-');
  for (const Exercise &exercise : of_chapter(name.substr(0, dash))) {
    if (exercise.name() != name) continue;
    const fs::path folder = folder_of(exercise) / std::to_string(exercise.number);
    output << name << ", " << exercise.kind << ": " << exercise.title << "\n\n";
    if (exercise.asks()) {
      for (const auto &[question, right] : Judge(exercise, folder).right_answers())
        output << question << " = " << right << "\n";
      output << "\n";
    }
    output << exercise.reasoning;
    if (exercise.asks()) return 0;
    if (std::any_of(exercise.changes.begin(), exercise.changes.end(),
                    [](const Change &change) { return change.keyword == "answer"; }))
      output << "\n"
             << difference(source_of(exercise, "start"), source_of(exercise, "answer"), folder);
    else
      output << "\nThe answer is " << exercise.source().string() << " itself: diff "
             << exercise.work().string() << " " << exercise.source().string() << "\n";
    return 0;
  }
  throw std::runtime_error("chapter " + name.substr(0, dash) + " has exercises 1 to " +
                           std::to_string(of_chapter(name.substr(0, dash)).size()));
}

}  // namespace

int exercise_command(const std::string &command, std::ostream &output) {
  const std::size_t dash = command.find('-');
  const std::string what = command.substr(0, dash);
  const std::string of = dash == std::string::npos ? "" : command.substr(dash + 1);
  if (what == "try") return make_copies(of, output);
  if (what == "check") return check(of, output);
  if (what == "answer") return answer(of, output);
  if (command == "progress") return progress(output);
  throw std::runtime_error("allowed are try-NN, check-NN, answer-NN-K and progress");
}
