// SPDX-License-Identifier: MIT
// An exercise: its text is an item of its chapter, and all else stands in a file beside the chapter,
// steps/NN-idea/exercises/K: statements, and then changes of the step, as edits.h has them.
//
//   start          makes what the reader's copy begins with of the step; without it that is the step
//   answer         makes the answer of the start, 'answer step' of the step; without it that is the step.
//                  Lines that begin with '> ' are its reasoning, and stand before it
//   right NAME     makes another answer of the answer, or with '| start' or '| step' of these
//   program NAME   makes of the step what a run may name
//   wrong NAME | WORDS
//                  makes a wrong answer of the answer, or with '| start' or '| step' behind it of these.
//                  The reader must be told the words. Where the reader writes numbers or words, it is
//                  '| QUESTION = VALUE'
//
// A statement is a line; an indented line goes on with the one before. They are worked off in order, and
// the first that fails is what the reader is told.
//
//   run NAME PROGRAM OPTIONS   PROGRAM: work, the reader's copy; step; or a program's name.
//                              A run of work must end well, unless 'ends' says otherwise
//   ends NAME WORD | MESSAGE   how this run of work must end instead, as a word of ending_words()
//   demand EXPR REL EXPR | MESSAGE
//                              REL: < <= = >= >. EXPR: arithmetic over numbers and [RUN: COUNT]. COUNT is a
//                              counter, 'COUNTER @ TEXT' on the lines with this text, 'worst shared load'
//                              of all lines, per request, 'lines of the first request @ TEXT' or 'bytes between
//                              lanes 0 and 8 of the first request @ TEXT', of shared memory, 'line', the line that a report names, or
//                              'first line @ TEXT' or 'last line @ TEXT', where the source's code holds it,
//                              or 0; with ' before TEXT' only above the first line that holds that.
//                              MESSAGE may hold {left}, {right} and {line}, the line of the last COUNT
//   hint WORD TEXT | MESSAGE   said when a run ends so and its report or the line in it holds TEXT, which
//                              may be left out
//   stage NAME                 what the reader is at from here on
//   with HEADER...             from the step's folder on: every source of this exercise, the reader's and the
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

#include "common/testing/edits.h"

struct Statement {
  std::string key, words, message;
  std::string place;  // "FILE:LINE"
};

struct Exercise {
  std::string step;         // "06-swizzle"
  int number;               // from 1, in the chapter's order
  std::string kind, title;  // "Predict", "Half a swizzle"
  std::string text;         // Markdown, in one line
  std::vector<Statement> statements;
  std::vector<Change> changes;  // 'start', 'answer', 'right', 'program' and 'wrong'
  std::string reasoning;        // the answer's, in lines

  std::string chapter() const { return step.substr(0, step.find('-')); }
  std::string name() const { return chapter() + "-" + std::to_string(number); }
  std::filesystem::path file() const;
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

/// Parses the text of an exercise's file into its statements, changes and reasoning.
void parse(const std::string &text, const std::string &file, Exercise &exercise);

/// The step's source, which holds the exercise's headers. Throws std::runtime_error.
std::string source_of_step(const Exercise &exercise);

/// What an exercise's change makes. Throws std::runtime_error.
std::string source_of(const Exercise &exercise, const Change &change);

/// The same of the change with this keyword, and this name if it is a program; the step if there is none.
std::string source_of(const Exercise &exercise, const std::string &keyword,
                      const std::string &name = "");

/// What the reader's file holds at the start.
std::string start_of(const Exercise &exercise);
