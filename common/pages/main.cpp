// build/docs: rewrites the generated regions of Markdown files; see docs.h.
#include <getopt.h>

#include <iostream>

#include "common/pages/docs.h"

namespace {

const char kUsage[] = "usage: docs [--check] [--results DIR] FILE.md...\n";

const char kHelp[] = R"(
Rewrites the generated regions of Markdown files in place, from sources, results and programs.

  --check        write nothing; print "FILE:LINE: stale: REGION" for each that would change
  --results DIR  where the CSV files are (default: plots/results)
  --help         this text

Exit status: 0 all is fresh (or was written), 1 --check found something stale, 2 an error
("FILE:LINE: what is wrong and what is allowed"; nothing was written).

Regions, all of them HTML comments:

  <!-- code: FILE | FIRST | LAST --> ... <!-- /code -->
      The source from the one line that contains FIRST through the first line at or after it that
      contains LAST; no LAST, that one line. The path is relative to the Markdown file.

  <!-- output: COMMAND | FIRST | LAST --> ... <!-- /output -->
      The same lines of what a shell command prints, run at the root of the repository; without
      FIRST and LAST, all of them.

  <!-- table: NAME ARGS... --> ... <!-- /table -->
      ladder BENCH [filters]             every step of Parts I and II, against the step before,
                                         FlashAttention-2 and, from BENCH-ceilings, its ceiling
      types BENCH [filters]              steps in fp16 and in bf16, against FlashAttention-3 in bf16
      peers BENCH [filters]              every name in the CSV that is no step
      variants BENCH [filters]           steps and their variants, named STEP:VARIANT
      models BENCH                       each step of Part III at its problem of plots/models.csv
      problems BENCH COLUMN NAMES [filters]
                                         this column of steps, variants and peers (02-x,cudnn), a row
                                         for each problem of the first of them
      counters COUNTERS STEP [filters]   each counter, emulator beside ncu
      truth COUNTERS [filters]           the same for all steps and shapes
      truth-sentence COUNTERS [filters]  and in a sentence
      ceilings NAMED                     each value, and its clock, the value of NAME-clock
      power NAMED                        each run of `make power`

  <!--=EXPR:FORMAT-->text<!--/-->
      EXPR is arithmetic (+ - * / and parentheses) over numbers and keys:
        [BENCH COLUMN STEP filters]              e.g. [h200 tflops 02-loop-inverted seqlen=1024]
        [COUNTERS SOURCE COUNTER STEP filters]   e.g. [h200-counters ncu dram bytes 02-loop-inverted]
        [NAMED NAME]                             e.g. [h200-ceilings mma-ex2], in the file's unit
      A BENCH's COLUMN may be cache_TBs, too: TB/s at which K and V are read, each once. A filter is
      COLUMN=TEXT or COLUMN~TEXT, which contains it, with a + for a space: options=causal+kv-heads=8.
      Without filters it is options= seqlen=8192 head_dim=128, and a counter's line=0.
      FORMAT: 0, 1, 2... decimals; s3 significant digits (the default); "," 1,234,567; % or %1
      a ratio as percent; x a ratio as 7.3x; GB, MB, KB bytes.
      It may stand anywhere but at the start of a line, where Markdown would end the paragraph.

Each names a CSV file, which is a BENCH, COUNTERS or NAMED values by its columns. Filters are
COLUMN=TEXT, or COLUMN~TEXT for a column that contains the text (counter~shared); a + is a space.
Those of a BENCH start from seqlen=8192 head_dim=128 options=, those of COUNTERS from line=0 and
the shape that the file has first; naming a column replaces its own filter, or all of the shape.
)";

}  // namespace

int main(int argc, char **argv) {
  const option options[] = {{"check", no_argument, nullptr, 'c'},
                            {"results", required_argument, nullptr, 'r'},
                            {"help", no_argument, nullptr, 'h'},
                            {}};
  bool check = false;
  std::string results = "plots/results";
  for (int o; (o = getopt_long(argc, argv, "h", options, nullptr)) != -1;) {
    if (o == 'c') check = true;
    if (o == 'r') results = optarg;
    if (o == 'h') return std::cout << kUsage << kHelp, 0;
    if (o == '?') return std::cerr << kUsage, 2;
  }
  if (optind == argc) return std::cerr << "docs: no FILE.md given\n" << kUsage, 2;
  return docs::run({argv + optind, argv + argc}, results, check, std::cout, std::cerr);
}
