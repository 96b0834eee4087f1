// SPDX-License-Identifier: MIT
// build/docs: rewrites the generated regions of Markdown files; see docs.h.
#include <getopt.h>

#include <iostream>

#include "common/pages/docs.h"

namespace {

const char kHelp[] = R"(usage: docs [--check] FILE.md...
Makes the generated regions of Markdown files anew, from sources, plots/results and programs. Run it at
the root of the repository. With --check it writes nothing, and prints "FILE:LINE: stale: REGION".
Exit status: 0 all is fresh (or was written), 1 --check found something stale, 2 an error.

  <!-- code: FILE | FIRST | LAST --> ... <!-- /code -->
      The source from the one line that contains FIRST through the first line from there on that
      contains LAST; no LAST, that one line. The path is relative to the Markdown file.
  <!-- output: COMMAND | FIRST | LAST --> ... <!-- /output -->
      The same lines of what a shell command prints; without FIRST and LAST, all of them. A bar between
      spaces ends the COMMAND: its pipes are written without, as in 2>&1|grep.
  <!-- table: NAME FILE ARGUMENTS... filters... --> ... <!-- /table -->
      A table of docs.cpp (kTables) of the rows of plots/results/FILE.csv that match the filters.
      models has a second file to take its speeds from; problems a column and names of steps, variants
      or peers: its rows are the problems of the first.
  <!--=EXPR:FORMAT-->text<!--/-->
      EXPR is arithmetic (+ - * / and parentheses) over numbers and keys, of three kinds of files:
        [h200 tflops 02-loop-inverted seqlen=1024]          a column of a benchmark (or cache_TBs, TB/s
                                                            at which K and V are read, each once)
        [h200-counters ncu dram bytes 02-loop-inverted]     a counter of the emulator or of ncu
        [h200-ceilings mma-ex2]                             a value that has a name
      FORMAT: 0 to 9 decimals; s1 to s9 significant digits (s3 if there is no FORMAT); "," 1,234,567;
      % a ratio as percent, %1 or %s2 the same with the digits of 1 or s2; %s with two below ten; x a
      ratio as 7.3x. It may stand anywhere but at the start of a line, where Markdown would end the
      paragraph.

A filter is COLUMN=TEXT, or COLUMN~REGEX for a column that matches; a + is a space, =max the largest.
Those of a benchmark start from options= seqlen=8192 head_dim=128, those of counters from options=
line=0 and the shape that the file has first; naming a column replaces its own filter.
)";

}  // namespace

int main(int argc, char **argv) {
  const option options[] = {
      {"check", no_argument, nullptr, 'c'}, {"help", no_argument, nullptr, 'h'}, {}};
  bool check = false;
  for (int o; (o = getopt_long(argc, argv, "h", options, nullptr)) != -1;) {
    if (o == 'c') check = true;
    if (o == 'h') return std::cout << kHelp, 0;
    if (o == '?') return 2;
  }
  if (optind == argc) return std::cerr << "docs: no FILE.md given; see --help\n", 2;
  return docs::run({argv + optind, argv + argc}, ".", check, std::cout, std::cerr);
}
