// SPDX-License-Identifier: MIT
// Judges what a reader has made of an exercise.
#pragma once

#include <map>
#include <string>

#include "common/exercises/exercise.h"
#include "common/exercises/programs.h"

struct Verdict {
  bool done;
  std::string said;  // what is missing, in one or two lines
};

/// The programs of one exercise and their runs, each built and run once.
class Judge {
 public:
  /// Puts what it builds into this folder.
  Judge(Exercise exercise, std::filesystem::path folder);

  /// Of the file that the reader has edited.
  Verdict judge(const std::filesystem::path &work);

  /// What is right, for each `ask`, as the reader would write it.
  std::map<std::string, std::string> right_answers();

  /// The statements 'because' that do not give the number that was counted: what the tests look at.
  std::string wrong_arithmetic();

  /// The demands whose message says what the step has, where the step has something else: what the tests look at.
  /// `step` is a file with the step's source.
  std::string stale_bounds(const std::filesystem::path &step);

 private:
  const Outcome &outcome(const std::string &run);
  const Build &built(const std::string &program);
  double count(const std::string &key);
  double evaluate(const std::string &expression);
  const Statement *first_run() const;
  bool has_counts() const;
  std::string uncounted(const Outcome &outcome) const;
  std::string failure(const Statement &run, const Outcome &outcome) const;
  std::string right(const Statement &is);
  Verdict judge_code();
  Verdict judge_words();

  Exercise exercise_;
  std::filesystem::path folder_, work_;
  std::map<std::string, Build> built_;
  std::map<std::string, Outcome> outcomes_;
  std::string place_;   // the line of the source that the last count was of
  std::string absent_;  // what the last demand counts on lines that the source does not have
  double it_ = 0;       // what [it] is
};
