// SPDX-License-Identifier: MIT
// Every exercise can be done and can be missed: what the reader begins with fails its check, the answer
// passes it, and wrong answers fail with words that name what is wrong. And what a reader sees of the
// commands, with work that does not compile, end, or do what a GPU allows.
//
// STEPS_ONLY  how the names of the steps begin whose exercises are judged: 06, or 3 for 30 to 39
#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "common/exercises/judge.h"
#include "common/pages/values.h"
#include "common/testing/copies.h"

namespace fs = std::filesystem;

namespace {

const fs::path kFolder = "build/exercises-tested";

/// An exercise's judge, and files for it to judge.
struct Trial {
  const Exercise &exercise;
  fs::path folder = kFolder / exercise.name();
  Judge judge{exercise, folder};

  /// The verdict on this text, written into a file of this name, unless it is there: a program may be
  /// made of it already.
  Verdict operator()(const std::string &name, const std::string &text) {
    fs::create_directories(folder);
    const fs::path work = folder / (name + exercise.work().extension().string());
    if (!fs::exists(work) || read_text(work) != text) std::ofstream(work) << text;
    return judge.judge(work);
  }
};

/// The answers of an exercise that are "right" or "wrong", and names for their files.
std::map<std::string, const Change *> answers_of(const Exercise &exercise,
                                                 const std::string &kind) {
  std::map<std::string, const Change *> answers;
  for (const Change &change : exercise.changes)
    if (change.keyword == kind) answers[kind + "-" + std::to_string(answers.size() + 1)] = &change;
  return answers;
}

/// Whether a demand's message names a count of the step.
bool says_what_the_step_has(const Exercise &exercise) {
  return std::any_of(
      exercise.statements.begin(), exercise.statements.end(), [](const Statement &statement) {
        return statement.key == "demand" && contains(statement.message, "the step has {right}");
      });
}

/// The options of all runs of a program, "work", "step" or another.
std::vector<std::string> runs_of(const Exercise &exercise, const std::string &program) {
  const std::string head_dim =
      describe("./step-" + exercise.chapter()).head_dims.front();  // where none is named
  std::vector<std::string> runs;
  for (const Statement &statement : exercise.statements)
    if (statement.key == "run" && words(statement.words)[1] == program)
      runs.push_back("--head-dim " + head_dim + " " + statement.words);
  return runs;
}

/// All programs that an exercise's trials may run. What a reader begins with and the answer are compiled whole, as a
/// reader compiles them; the others for their runs.
std::vector<Copy> copies_of(const Exercise &exercise) {
  std::map<std::string, std::string> sources;  // by name
  for (const Statement &statement : exercise.statements)
    if (const std::string program = words(statement.words)[statement.key == "run"];
        statement.key == "run" && program != "work")
      sources[program] = source_of(exercise, "program", program);
  if (!exercise.asks()) {
    if (says_what_the_step_has(exercise)) sources["step"] = source_of_step(exercise);
    sources["start"] = start_of(exercise);
    sources["answer"] = source_of(exercise, "answer");
    for (const std::string kind : {"right", "wrong"})
      for (const auto &[name, change] : answers_of(exercise, kind))
        sources[name] = source_of(exercise, *change);
  }
  std::vector<Copy> copies;
  for (const auto &[name, source] : sources) {
    std::vector<std::string> runs = runs_of(exercise, name), work = runs_of(exercise, "work");
    runs.insert(runs.end(), work.begin(), work.end());
    if (name == "start" || name == "answer") runs.clear();
    copies.push_back({exercise.step + ":" + name, exercise.name() + "/" + name, source, runs});
  }
  return copies;
}

/// What the reader would write if these are the answers.
std::string filled(const std::map<std::string, std::string> &answers) {
  std::string text;
  for (const auto &[name, value] : answers) text += name + " = " + value + "\n";
  return text;
}

/// What is wrong with an exercise, or nothing.
std::string complaint(const Exercise &exercise) {
  Trial trial{exercise};
  if (exercise.reasoning.empty()) return "the answer has no reasoning";
  const std::string answer = exercise.asks() ? "" : source_of(exercise, "answer");

  if (trial("start", start_of(exercise)).done) return "the start passes";
  std::map<std::string, std::string> answers;
  if (exercise.asks()) {
    answers = trial.judge.right_answers();
    if (const std::string wrong = trial.judge.wrong_arithmetic(); !wrong.empty()) return wrong;
    if (const std::size_t begin = exercise.text.find("(Words:"); begin != std::string::npos) {
      std::string offered = exercise.text.substr(begin, exercise.text.find(')', begin) - begin);
      for (const char mark : {',', '.'}) std::replace(offered.begin(), offered.end(), mark, ' ');
      const std::vector<std::string> list = words(offered);
      for (const auto &[name, word] : answers)
        if (std::isalpha(static_cast<unsigned char>(word[0])) &&
            std::find(list.begin(), list.end(), word) == list.end())
          return name + " is " + word + ", which is not among the words of the item";
    }
  }
  if (const Verdict verdict = trial("answer", exercise.asks() ? filled(answers) : answer);
      !verdict.done)
    return "the answer fails: " + verdict.said;

  if (says_what_the_step_has(exercise)) {
    const fs::path step = trial.folder / "step.cu";
    if (!fs::exists(step) || read_text(step) != source_of_step(exercise))
      std::ofstream(step) << source_of_step(exercise);
    if (const std::string stale = trial.judge.stale_bounds(step); !stale.empty()) return stale;
  }

  for (const auto &[file, right] : answers_of(exercise, "right"))
    if (const Verdict verdict = trial(file, source_of(exercise, *right)); !verdict.done)
      return right->place + ": '" + right->fields[0] + "' fails: " + verdict.said;

  const auto wrongs = answers_of(exercise, "wrong");
  if (wrongs.size() < 2) return "fewer than two wrong answers";
  for (const auto &[file, wrong] : wrongs) {
    const std::string name = wrong->place + ": '" + wrong->fields[0] + "'";
    std::map<std::string, std::string> all = answers;
    for (std::size_t i = 2; exercise.asks() && i < wrong->fields.size(); i++) {
      const std::size_t equals = wrong->fields[i].find(" = ");
      const std::string question = wrong->fields[i].substr(0, equals);
      if (!all.contains(question)) return name + ": there is no question " + question;
      all[question] = wrong->fields[i].substr(equals + 3);
    }
    const Verdict verdict =
        trial(file, exercise.asks() ? filled(all) : source_of(exercise, *wrong));
    if (verdict.done) return name + " passes";
    if (!contains(verdict.said, wrong->fields[1])) return name + " is told: " + verdict.said;
    if (std::count(verdict.said.begin(), verdict.said.end(), '\n') > 1)
      return name + " is told more than two lines: " + verdict.said;
  }
  return "";
}

/// The exercises of all chapters, or of those that STEPS_ONLY asks for.
std::vector<Exercise> all_exercises() {
  std::vector<Exercise> all;
  for (const std::string &chapter : chapters_with_exercises())
    for (const Exercise &exercise : exercises_of(chapter))
      if (exercise.step.starts_with(environment("STEPS_ONLY", ""))) all.push_back(exercise);
  return all;
}

/// A reader's repository, a folder of this name, which has only what is built with this one in common.
fs::path repository(const std::string &name) {
  const fs::path here = fs::current_path(), root = kFolder / name;
  fs::remove_all(root);
  fs::create_directories(root / "build");
  for (const char *part : {"steps", "common", "reference", "build/host", "build/exercises"})
    fs::create_symlink(here / part, root / part);
  return root;
}

/// Replaces the one `find` of a file.
void edit(const fs::path &file, const std::string &find, const std::string &replace) {
  std::string text = read_text(file);
  const std::size_t at = text.find(find);
  REQUIRE(at != std::string::npos);
  REQUIRE(text.find(find, at + 1) == std::string::npos);
  std::ofstream(file) << text.replace(at, find.size(), replace);
}

}  // namespace

TEST_SUITE_BEGIN("exercises");

TEST_CASE(
    "exercises: the start fails, the answer passes, and wrong answers are told what is wrong") {
  std::vector<Exercise> exercises = all_exercises();
  draw(exercises, 2);
  // Before the judges would, one by one. What does not compile is left for them.
  std::vector<Copy> copies;
  for (const Exercise &exercise : exercises)
    for (Copy &copy : copies_of(exercise)) copies.push_back(std::move(copy));
  compile_copies(kFolder, copies, "build/host/common/exercises/watch.o");
  for (const Copy &copy : copies) {
    const fs::path program = kFolder / copy.name;
    const std::string step = copy.step.substr(0, copy.step.find(':'));
    if (copy.command.empty()) continue;
    std::ofstream(program.string() + ".cu") << copy.source;
    std::ofstream(program.string() + ".cpp") << unit_of({program.string() + ".cu", program, step});
  }
  std::vector<Job> jobs;
  for (const Exercise &exercise : exercises)
    jobs.push_back({exercise.name(), [&exercise] { return complaint(exercise); }, ""});
  do_all(jobs);
}

TEST_CASE("exercises: every change fits its source") {
  for (const std::string &chapter : chapters_with_exercises())
    for (const Exercise &exercise : exercises_of(chapter))
      for (const Change &change : exercise.changes)
        if (!exercise.asks() || change.keyword == "program")
          CHECK_NOTHROW(source_of(exercise, change));
}

TEST_CASE("exercises: a chapter says how to begin, and every file is an item of it") {
  for (const std::string &chapter : chapters_with_exercises()) {
    const std::vector<Exercise> exercises = exercises_of(chapter);
    REQUIRE(!exercises.empty());
    CAPTURE(exercises[0].step);
    const fs::path folder = exercises[0].file().parent_path();
    const std::string text = read_text(folder.parent_path() / "README.md");
    for (const char *command : {"make try-", "make check-", "make answer-"})
      CHECK(contains(text, command + chapter));
    const auto files = std::distance(fs::directory_iterator(folder), fs::directory_iterator());
    CHECK(files == static_cast<std::ptrdiff_t>(exercises.size()));
    for (const Exercise &exercise : exercises) {
      const std::vector<std::string> kinds = {"Predict", "Find", "Break", "Extend", "Blank page"};
      CHECK(std::find(kinds.begin(), kinds.end(), exercise.kind) != kinds.end());
      for (const Statement &statement : exercise.statements) {
        const std::string word = statement.words.substr(0, statement.words.find(' '));
        CAPTURE(statement.place);
        if (statement.key == "hint")
          CHECK(std::find(ending_words().begin(), ending_words().end(), word) !=
                ending_words().end());
      }
    }
  }
}

TEST_CASE("exercises: a file is read as it says, or refused by line") {
  const auto parsed = [](const std::string &text) {
    Exercise exercise{"02-loop-inverted", 1, "Predict", "T", "", {}, {}, ""};
    parse(text, "e", exercise);
    return exercise;
  };
  const Exercise words = parsed(
      "# a comment\nask n How\n  many?\nis 2\nmiss 3 | No.\n\n> Two.\n>\n> Or not.\n\n"
      "wrong one more | No | n = 3\n");
  REQUIRE(words.statements.size() == 3);
  CHECK(words.statements[0].words == "n How many?");
  CHECK(words.statements[2].words == "3");
  CHECK(words.statements[2].message == "No.");
  CHECK(words.statements[2].place == "e:5");
  CHECK(words.reasoning == "Two.\n\nOr not.\n");
  REQUIRE(words.changes.size() == 1);
  CHECK(words.changes[0].fields == std::vector<std::string>{"one more", "No", "n = 3"});

  // A change is of the step, of the start or of the answer, as it says.
  const std::string step = "run a work\nstart\n- m[r] = m_new;\n";
  const std::string wrong = "\nwrong w | No";
  const auto made = [&](const std::string &text, const std::string &keyword) {
    return source_of(parsed(step + text), keyword);
  };
  const std::string source = read_text("steps/02-loop-inverted/attention.cu");
  const std::string begun = made("", "start");
  CHECK(source.size() > begun.size());
  CHECK(made("", "answer") == source);
  CHECK(made("answer\n- l_tile += p;\n+ l_tile\n", "answer").size() == begun.size() - 6);
  CHECK(made("answer step\n- l_tile += p;\n+ l_tile\n", "answer").size() == source.size() - 6);
  const std::string edits = "\n- l_tile += p;\n+ l_tile\n";
  CHECK(made(wrong + edits, "wrong").size() == source.size() - 6);
  CHECK(made(wrong + " | start" + edits, "wrong").size() == begun.size() - 6);

  const auto refused = [&](const std::string &text, const std::string &says) {
    CHECK_THROWS_WITH(parsed(text), doctest::Contains(says.c_str()));
  };
  refused("run a work\nwalk b\n", "e:2: 'walk'; allowed are ask");
  refused("demand 1 < 2\n", "e:1: 'demand' must end with '| MESSAGE'");
  refused("run a other\n", "e:1: 'run' must name work, step or a program");
  refused("run a work\n- b\n", "e:1: only answer, program, right, start, wrong may have edits");
  refused("  more\n", "e:1: the first line must not be indented");
  refused("answer start\n- a\n", "e:1: 'answer' or 'answer step' is allowed");
  refused("answer\nrun a work\n", "e:1: 'answer' must have edits");
  refused("start\nrun a work\n", "e:1: 'start' must have edits");
  refused("wrong w\n- a\n", "e:1: a wrong answer must have '| WORDS'");
  refused("wrong w | No | end\n- a\n", "e:1: 'end'; allowed are start and step");
  refused("ask n N?\nwrong w | No | 3\n", "e:2: '3'; allowed are QUESTION = VALUE");
}

TEST_CASE("exercises: a source holds the headers that an exercise names, each once") {
  Exercise exercise{"50-in-a-model", 1, "Find", "T", "", {}, {}, ""};
  const auto source = [&](const std::string &headers) {
    exercise.statements = {{"with", headers, "", ""}};
    return source_of_step(exercise);
  };
  const auto times = [](const std::string &text, const std::string &part) {
    int found = 0;
    for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at++) found++;
    return found;
  };
  const std::string all = source("rows.h tiles.h prefill.h decode.h");
  CHECK(times(all, "#include \"steps/") == 0);
  CHECK(times(all, "#pragma once") == 0);
  CHECK(times(all, "void rotate_as(") == 1);  // of rows.h, which two others include
  const std::string some = source("prefill.h");
  CHECK(times(some, "#include \"steps/") == 2);
  CHECK(times(some, "#include \"steps/50-in-a-model/tiles.h\"") == 1);
  CHECK_THROWS_WITH(source("tiles.h"), doctest::Contains("with tiles.h: "));
}

TEST_CASE("exercises: numbers are judged to the digits that were written") {
  Exercise exercise{"02-loop-inverted", 1, "Predict", "T", "", {}, {}, ""};
  const auto verdict = [&](const std::string &it, const std::string &written) {
    exercise.statements = {
        {"ask", "n N?", "", ""}, {"is", it, "", ""}, {"miss", "[it] * 2", "Twice.", ""}};
    Trial trial{exercise, kFolder / "numbers"};
    return trial("n", "n = " + written + "\n");
  };
  CHECK(verdict("2.228224", "2.228").done);
  CHECK(verdict("2.228224", "2.2").done);
  CHECK_FALSE(verdict("2.228224", "2").done);  // one digit is no prediction
  CHECK_FALSE(verdict("2.228224", "2.229").done);
  CHECK(verdict("86016", "86,016").done);
  CHECK_FALSE(verdict("86016", "86000").done);
  CHECK(verdict("4", "4").done);
  CHECK(verdict("0.625", "5/8").done);
  CHECK(verdict("4", "8 / 2").done);
  CHECK_FALSE(verdict("0.625", "2/3").done);
  CHECK(verdict("0.625", "3/8").said == "n = 3/8: the emulator counts more");
  CHECK(verdict("0.625", "5/4").said == "n = 5/4: the emulator counts less\nTwice.");
  for (const char *none : {"5/", "/8", "5/0", "5/8/1"})
    CHECK(contains(verdict("0.625", none).said, ": must be a number"));
  CHECK(verdict("2.228224", "4.456").said == "n = 4.456: the emulator counts less\nTwice.");
  CHECK(verdict("4", "3").said == "n = 3: the emulator counts more");
  CHECK(verdict("4", "many").said == "n = many: must be a number, as 4, 0.25 or 1/4");
  CHECK(contains(verdict("4", "").said, "nothing is written yet"));
}

TEST_CASE("exercises: what a reader sees") {
  const fs::path root = repository("reader");
  const auto make = [&](const std::string &command, const std::string &seconds = "20") {
    return run_command("cd " + shell_word(root) + " && EXERCISE_SECONDS=" + seconds +
                       " build/host/bin/exercises " + command);
  };
  const auto line_of = [&](const char *file, const std::string &text) {
    const std::vector<std::string> lines = lines_of(read_text(root / file));
    const auto line = std::find_if(lines.begin(), lines.end(),
                                   [&](const std::string &of) { return contains(of, text); });
    return std::to_string(line - lines.begin() + 1);
  };

  // What is missing says which command makes it.
  CHECK(make("check-02").status == 2);
  CHECK(contains(make("check-02").err, "there is no try/02; make try-02 makes it"));
  CHECK(contains(make("check-99").err, "chapters with exercises are "));
  CHECK(contains(make("answer-02-9").err, "chapter 02 has exercises 1 to 4"));
  CHECK(make("try-02").status == 0);

  // Without an attempt there is nothing to be judged.
  const Finished untouched = make("check-02");
  CHECK(untouched.status == 0);
  CHECK(contains(untouched.out, "02-2   to do    A maximum forgotten too early: try/02/2.cu\n"));
  CHECK(lines_of(untouched.out).size() == 5);
  CHECK(contains(make("progress").out, "0 of 4  1 -  2 -  3 -  4 -"));

  // Nothing of the reader's is overwritten.
  const std::string barrier = "    __syncthreads();  // Q, K and V are there for all warps\n";
  edit(root / "try/02/2.cu", barrier, barrier + "    smen.K(0, 0);\n");
  const std::string mine = read_text(root / "try/02/2.cu");
  fs::remove(root / "try/02/1.txt");
  fs::remove(root / "try/02/4.cu");
  const Finished some = make("check-02");
  CHECK(some.status == 0);
  CHECK(contains(some.out, "try/02/4.cu is not there; make try-02 makes it"));
  CHECK(contains(some.out, "2.cu:" + line_of("try/02/2.cu", "smen") + ": "));
  CHECK(contains(some.out, "does not compile: "));
  CHECK(contains(some.out, "`smen.K(0, 0);`"));
  CHECK(make("try-02").status == 0);
  CHECK(read_text(root / "try/02/2.cu") == mine);
  const Finished again = make("try-02");
  CHECK(again.status == 2);
  CHECK(contains(again.err, "To start one afresh: mv try/02/1.txt "));

  // What does not end, what crashes, and who waits for whom.
  const std::string scores = "      float s[keys_per_lane] = {};\n";
  edit(root / "try/02/2.cu", "    smen.K(0, 0);\n", "");
  edit(root / "try/02/2.cu", barrier, "    for (volatile int i = 0; i < 1; i = 0) {}\n" + barrier);
  edit(root / "try/02/3.cu", scores, scores + "      s[0] = Br / (seqlen % Bc);\n");
  edit(root / "try/02/4.cu", "  // Write: the state",
       "  if (lane == 0) __syncwarp(1); else __syncthreads();\n  //");
  const Finished faults = make("check-02", "0.5");
  CAPTURE(faults.out);
  CHECK(contains(faults.out, " s; a thread is at 2.cu:" + line_of("try/02/2.cu", "volatile int")));
  CHECK(contains(faults.out, "3.cu:" + line_of("try/02/3.cu", "seqlen % Bc") +
                                 ": it crashes, dividing a whole number by 0"));
  CHECK(contains(faults.out, "chapter 02: 0 of 4 done; the book: 0 of "));

  // What sleeps for ever, and what prints for ever.
  edit(root / "try/02/2.cu", "for (volatile int i = 0; i < 1; i = 0) {}", "for (;;) usleep(1000);");
  edit(root / "try/02/3.cu", "s[0] = Br / (seqlen % Bc);", "for (;;) printf(\"%4096d\", 0);");
  for (const char *file : {"try/02/2.cu", "try/02/3.cu"}) {
    const std::string text = read_text(root / file);
    std::ofstream(root / file) << "#include <stdio.h>\n#include <unistd.h>\n" << text;
  }
  fs::remove(root / "try/02/4.cu");
  const Finished endless = make("check-02", "0.5");
  CHECK(contains(endless.out,
                 "no end after 3 s; a thread is at 2.cu:" + line_of("try/02/2.cu", "usleep(")));
  CAPTURE(endless.out);
  CHECK(contains(endless.out, "more than 16 MB are printed"));
  CHECK(contains(endless.out, "3.cu:" + line_of("try/02/3.cu", "%4096d")));

  // What prints that it passed, what computes on the host, and what loads from a tile of another name.
  const auto begin_with = [&](const char *file, const std::string &text) {
    const std::string source = read_text(root / file);
    std::ofstream(root / file) << text << source;
  };
  CHECK(make("try-60").status == 0);
  CHECK(make("try-06").status == 0);
  begin_with("try/60/2.cu",
             "#include <cstdio>\n#include <unistd.h>\n"
             "static int done = (puts(\"check: passed\"), fflush(stdout), _exit(0), 0);\n");
  const std::string printed = make("check-60").out;
  CAPTURE(printed);
  CHECK(contains(printed, "60-2   not yet  the program ends before it writes its result\n"));
  begin_with("try/06/5.cu", "#define smem_V smem.V\n");
  edit(root / "try/06/5.cu", "ldmatrix_x2_trans(smem.V(", "ldmatrix_x2_trans(smem_V(");
  edit(root / "try/06/5.cu", "return row * d + col;",
       "return row * d + col / 64 * 64 + (col % 64 ^ row % 8 * 8);");
  const std::string renamed = make("check-06").out;
  CAPTURE(renamed);
  CHECK(contains(renamed, "5.cu: no line that names `smem.V` has shared load requests"));

  // What is there can be built as a program.
  fs::create_symlink(fs::current_path() / "Makefile", root / "Makefile");
  const fs::path copy = root / "build/variants/02-loop-inverted/try-2/attention.cu";
  fs::create_directories(copy.parent_path());
  std::ofstream(copy) << start_of(exercises_of("02")[1]);  // --dry-run reads its header
  fs::last_write_time(copy, fs::last_write_time(root / "try/02/2.cu") - std::chrono::hours(1));
  const Finished program =
      run_command("cd " + shell_word(root) +
                  " && env -u MAKEFLAGS -u MAKELEVEL make --dry-run NVCC= step-02-try-2");
  CHECK(contains(program.out, "cp try/02/2.cu build/variants/02-loop-inverted/try-2/attention.cu"));
  CHECK(contains(program.out, "./step-02-try-2 for the emulator"));

  // The answer is done, and counted.
  CHECK(make("answer-02-2").status == 0);
  CHECK(contains(make("answer-02-2").out, "+      m[r] = m_new;"));
  CHECK(contains(make("answer-02-1").out, "read32 = 1.114"));
  const Exercise exercise = exercises_of("02")[1];
  std::ofstream(root / "try/02/2.cu") << source_of(exercise, "answer");
  CHECK(contains(make("check-02").out, "chapter 02: 1 of 4 done; the book: 1 of "));
  CHECK(contains(make("progress").out, "1 of 4  1 -  2 done  3 begun  4 -"));
}

TEST_CASE("exercises: with WATCH=1 a save is judged, however it comes") {
  const fs::path root = repository("watch"), work = root / "try/02/1.txt", said = root / "said";
  const std::string in_root = "cd " + shell_word(root) + " && ";
  REQUIRE(run_command(in_root + "build/host/bin/exercises try-02").status == 0);
  for (const char *other : {"2.cu", "3.cu", "4.cu"}) fs::remove(work.parent_path() / other);

  // It would wait for ever: ended below, or by itself.
  std::future<Finished> watch = std::async(
      std::launch::async, run_command,
      in_root +
          "echo $$ >pid && exec env WATCH=1 timeout 60 build/host/bin/exercises check-02 >said");
  const auto says = [&](const std::string &text) {
    for (int i = 0; i < 500 && !contains(read_text(said), text); i++)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return contains(read_text(said), text);
  };
  CHECK(says("waiting for a save in try/02"));
  std::ofstream(work) << "read32 = many\n";
  CHECK(says("read32 = many: must be a number"));
  // As editors do, and then a copy of an hour ago that is put back.
  for (const char *value : {"some", "few"}) {
    const fs::path beside = work.parent_path() / ".1.txt.new";
    std::ofstream(beside) << "read32 = " << value << "\n";
    if (value == std::string("few"))
      fs::last_write_time(beside, fs::last_write_time(beside) - std::chrono::hours(1));
    fs::rename(beside, work);
    CHECK(says("read32 = " + std::string(value) + ": must be a number"));
  }
  CHECK(kill(std::stoi(read_text(root / "pid")), SIGTERM) == 0);
  CHECK(watch.get().status == 128 + SIGTERM);
  fs::remove_all(root);
}

TEST_SUITE_END();
