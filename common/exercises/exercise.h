// An exercise: its text is an item of its chapter, and all else lies beside the chapter, in
// steps/NN-idea/exercises/K/:
//
//   exercise       what is run and what must hold, see below
//   start.patch    what the reader's copy of the step starts from, if not from the step itself
//   answer.patch   what makes an answer of the start; without one the step itself is the answer
//   answer.txt     the reasoning, where there is no answer.patch whose first lines could hold it
//   wrong-*.patch  answers that are wrong, or wrong-*.txt; with 'Says: ' and words that they are told
//   NAME.patch     a change of the step that a prediction is about
//
// A line of `exercise` is a statement; an indented line goes on with the one before. They are worked
// off in order, and the first that fails is what the reader is told.
//
//   run NAME PROGRAM OPTIONS   PROGRAM: work, the reader's copy; step; or NAME.patch without its end.
//                              A run of work must end well, unless 'ends' says otherwise
//   ends NAME WORD | MESSAGE   how this run of work must end instead, as a word of ending_words()
//   demand EXPR REL EXPR | MESSAGE
//                              REL: < <= = >= >. EXPR: arithmetic over numbers and [RUN: COUNT]. COUNT is a
//                              counter, 'COUNTER @ TEXT' on the lines with this text, 'worst shared load'
//                              of all lines, per request, 'line', the line that a report names, or
//                              'first line @ TEXT' or 'last line @ TEXT', where the source holds it.
//                              MESSAGE may hold {left}, {right} and {line}, the line of the last COUNT
//   hint WORD TEXT | MESSAGE   said when a run ends so and its report or the line in it holds TEXT, which
//                              may be left out
//   stage NAME                 what the reader is at from here on
//   with HEADER...             of the step's folder: every source of this exercise, the reader's and the
//                              step's, holds these headers itself, where it would include them
//
// Of numbers or words that the reader writes into a file of text:
//
//   ask NAME QUESTION
//   is EXPR                    a number; or 'ends RUN', the word for how a run ends
//   because EXPR               the same number by arithmetic, without counting
//   miss EXPR | MESSAGE        said of this number, in which [it] is the right one, or of this word
#pragma once

#include <filesystem>
#include <string>
#include <vector>

struct Statement {
  std::string key, words, message;
  int line;
};

struct Exercise {
  std::string step;         // "06-swizzle"
  int number;               // from 1, in the chapter's order
  std::string kind, title;  // "Predict", "Half a swizzle"
  std::string text;         // Markdown, in one line
  std::vector<Statement> statements;

  std::string chapter() const { return step.substr(0, step.find('-')); }
  std::string name() const { return chapter() + "-" + std::to_string(number); }
  std::filesystem::path folder() const;
  /// Whether the reader writes numbers or words, not code.
  bool asks() const;
  /// What the reader edits: "try/06/2.cu" or "try/06/1.txt".
  std::filesystem::path work() const;
  std::filesystem::path source() const;  // the step's
  /// The step's headers that the sources of this exercise hold.
  std::vector<std::filesystem::path> headers() const;
};

/// The exercises of a chapter, "06", in order; none if it has no folder of them. Throws
/// std::runtime_error, which names file and line, where one is not as above.
std::vector<Exercise> exercises_of(const std::string &chapter);

/// The chapters that have exercises.
std::vector<std::string> chapters_with_exercises();

/// Parses the text of a file `exercise`.
std::vector<Statement> parse_statements(const std::string &text, const std::string &file);

/// The step's source, which holds the exercise's headers. Throws std::runtime_error.
std::string source_of_step(const Exercise &exercise);

/// What applying a patch to the source of a step makes of it. Throws std::runtime_error.
std::string patched(const std::string &source, const std::filesystem::path &patch);

/// What the reader's file holds at the start.
std::string start_of(const Exercise &exercise);

/// The same without the task on top: what patches are applied to.
std::string source_at_start(const Exercise &exercise);
