// build/docs: rewrites the generated regions of Markdown files; see docs.h.
#include <getopt.h>

#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "common/pages/docs.h"

namespace {

const char kUsage[] = "usage: docs [--check] [--results DIR] FILE.md...\n";

const char kHelp[] = R"(
Rewrites the generated regions of Markdown files in place, from sources and results.

  --check        write nothing; print "FILE: stale: REGION" for each region that would change
  --results DIR  where the CSV files are (default: plots/results)
  --help         this text

Exit status: 0 all is fresh (or was written), 1 --check found something stale, 2 an error
("FILE:LINE: what is wrong and what is allowed"; nothing was written).

Regions, all of them HTML comments:

  <!-- code: attention.cu | FIRST | LAST --> ... <!-- /code -->
      The source from the one line that contains FIRST through the first line at or after it that
      contains LAST; no LAST, that one line. The path is relative to the Markdown file.

  <!-- table: NAME ARGS... --> ... <!-- /table -->
      ladder BENCH [filters]             every step: TFLOP/s, ms, against the step before, against
                                         FlashAttention-2 and, from BENCH-ceilings, its ceiling
      peers BENCH [filters]              every name in the CSV that is no step
      variants BENCH STEP [filters]      the rows named STEP:VARIANT
      counters COUNTERS STEP [filters]   each counter, emulator beside ncu
      truth COUNTERS [filters]           the same for all steps
      bytes COUNTERS [filters]           a row per step, a column per counter named "bytes"
      lines COUNTERS STEP [filters]      the emulator's counters by source line

  <!--=EXPR:FORMAT-->text<!--/-->
      EXPR is arithmetic (+ - * / and parentheses) over numbers and keys:
        [BENCH COLUMN STEP filters]              e.g. [h200 tflops 02-loop-inverted seqlen=1024]
        [COUNTERS SOURCE COUNTER STEP filters]   e.g. [h200-counters ncu dram bytes 02-loop-inverted]
        [CEILINGS NAME]                          e.g. [h200-ceilings mma-ex2], in the file's unit
      These begin with the name of a CSV file: COUNTERS ends in "counters", CEILINGS in "ceilings" or "power".
      FORMAT: 0, 1, 2... decimals; s3 significant digits (the default); "," 1,234,567; % or %1
      a ratio as percent; x a ratio as 7.3x; GB, MB, KB bytes.
      It may stand anywhere but at the start of a line, where Markdown would end the paragraph.

Filters are COLUMN=TEXT, or COLUMN~TEXT for a column that contains the text (counter~shared).
Those of a benchmark start from seqlen=8192 head_dim=128 causal=0, those of counters from
kernel=total line=0; naming a column replaces its own filter only.
)";

}  // namespace

int main(int argc, char **argv) {
  const option options[] = {{"check", no_argument, nullptr, 'c'},
                            {"results", required_argument, nullptr, 'r'},
                            {"help", no_argument, nullptr, 'h'},
                            {nullptr, 0, nullptr, 0}};
  bool check = false;
  std::string results = "plots/results";
  for (int o; (o = getopt_long(argc, argv, "h", options, nullptr)) != -1;) {
    if (o == 'c') {
      check = true;
    } else if (o == 'r') {
      results = optarg;
    } else if (o == 'h') {
      std::printf("%s%s", kUsage, kHelp);
      return 0;
    } else {
      std::fputs(kUsage, stderr);
      return 2;
    }
  }
  if (optind == argc) {
    std::fprintf(stderr, "docs: no FILE.md given\n%s", kUsage);
    return 2;
  }
  return docs::run({argv + optind, argv + argc}, results, check, std::cout, std::cerr);
}
