// SPDX-License-Identifier: MIT
// Runs all unit tests, and ends with the line that sums them up.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "common/testing/compiler.h"
#include "common/testing/jobs.h"
#include "common/testing/process.h"
#include "reference/parallel.h"

namespace {

// The suites whose tests start programs or compilers on all cores.
const char kOnAllCores[] = "bound,edits,exercises,planted,program,steps,variants";

doctest::TestRunStats totals;

/// The seconds that all cores worked for this process and for the programs that it waited for.
double cpu_seconds() {
  double seconds = 0;
  for (const auto who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage used;
    getrusage(who, &used);
    for (const timeval &part : {used.ru_utime, used.ru_stime})
      seconds += static_cast<double>(part.tv_sec) + 1e-6 * static_cast<double>(part.tv_usec);
  }
  return seconds;
}

/// Names each test case as it begins, because some take a while; says what those cost; and counts them.
struct Progress : doctest::IReporter {
  explicit Progress(const doctest::ContextOptions &) {}

  void report_query(const doctest::QueryData &) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats &stats) override { totals = stats; }
  void test_case_start(const doctest::TestCaseData &test) override {
    begin_test(test.m_name);
    began = cpu_seconds();
    std::printf("%s\n", test.m_name);
    std::fflush(stdout);
  }
  void test_case_reenter(const doctest::TestCaseData &) override {}
  void test_case_end(const doctest::CurrentTestCaseStats &) override {
    if (const double seconds = cpu_seconds() - began; seconds > 1)
      std::printf("  %.1f s of CPU\n", seconds);
  }
  void test_case_exception(const doctest::TestCaseException &) override { print_failure(); }
  void subcase_start(const doctest::SubcaseSignature &) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData &assertion) override {
    if (assertion.m_failed) print_failure();
  }
  void log_message(const doctest::MessageData &) override {}
  void test_case_skipped(const doctest::TestCaseData &) override {}

  double began = 0;
};

REGISTER_LISTENER("progress", 1, Progress);

}  // namespace

int main(int argc, char **argv) {
  doctest::Context context(argc, argv);
  for (int i = 1; i < argc; i++)  // a test's name, with '*' for what it may hold
    if (argv[i][0] != '-') context.addFilter("test-case", argv[i]);

  // If all tests are wanted, a process beside this one runs those that use one core each. What it prints comes last.
  std::FILE *const said = argc == 1 ? std::tmpfile() : nullptr;
  int counts[2];
  pid_t beside = -1;
  if (said && pipe2(counts, O_CLOEXEC) == 0) {
    fcntl(fileno(said), F_SETFD, FD_CLOEXEC);  // no program that a test starts inherits it
    tests_seed();                              // one of both
    parallel_for(2, [](std::size_t i) { compiler_for(i ? "04" : "00"); });
    std::fflush(stdout);
    beside = fork();
    close(counts[beside == 0 ? 0 : 1]);
    context.addFilter(beside == 0 ? "test-suite-exclude" : "test-suite", kOnAllCores);
    if (beside == 0) dup2(fileno(said), STDOUT_FILENO);
  }
  int status = context.run();
  if (beside == 0) {
    std::fflush(stdout);
    _exit(write(counts[1], &totals, sizeof totals) != sizeof totals || status);
  }
  if (beside > 0) {
    doctest::TestRunStats others = {};
    if (read(counts[0], &others, sizeof others) != sizeof others)  // it crashed
      others.numTestCasesPassingFilters = others.numTestCasesFailed = 1;
    if (others.numTestCasesFailed) status = 1;
    waitpid(beside, nullptr, 0);
    std::rewind(said);
    for (int c; (c = std::fgetc(said)) != EOF;) std::putchar(c);
    totals.numTestCasesPassingFilters += others.numTestCasesPassingFilters;
    totals.numTestCasesFailed += others.numTestCasesFailed;
  }
  if (!context.shouldExit() && totals.numTestCasesPassingFilters == 0) {
    std::puts(
        "no test has this name: TESTS='*banks*' matches a part of it, and build/host/bin/tests "
        "--list-test-cases lists all");
    status = 1;
  }
  if (!context.shouldExit())  // not for --help and its like, which run no test
    std::printf("%u passed, %u failed\n",
                totals.numTestCasesPassingFilters - totals.numTestCasesFailed,
                totals.numTestCasesFailed);
  return status;
}
