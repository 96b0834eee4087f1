// SPDX-License-Identifier: MIT
// Runs all unit tests, and ends with the line that sums them up.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <string>

#include "common/testing/jobs.h"

namespace {

doctest::TestRunStats totals;

/// Names each test case as it begins, because some take a while, and counts them.
struct Progress : doctest::IReporter {
  explicit Progress(const doctest::ContextOptions &) {}

  void report_query(const doctest::QueryData &) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats &stats) override { totals = stats; }
  void test_case_start(const doctest::TestCaseData &test) override {
    begin_test(test.m_name);
    std::printf("%s\n", test.m_name);
    std::fflush(stdout);
  }
  void test_case_reenter(const doctest::TestCaseData &) override {}
  void test_case_end(const doctest::CurrentTestCaseStats &) override {}
  void test_case_exception(const doctest::TestCaseException &) override { print_failure(); }
  void subcase_start(const doctest::SubcaseSignature &) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData &assertion) override {
    if (assertion.m_failed) print_failure();
  }
  void log_message(const doctest::MessageData &) override {}
  void test_case_skipped(const doctest::TestCaseData &) override {}
};

REGISTER_LISTENER("progress", 1, Progress);

}  // namespace

int main(int argc, char **argv) {
  doctest::Context context(argc, argv);
  for (int i = 1; i < argc; i++)  // a test's name, with '*' for what it may hold
    if (argv[i][0] != '-') context.addFilter("test-case", argv[i]);
  int status = context.run();
  if (!context.shouldExit() && totals.numTestCasesPassingFilters == 0) {
    std::puts("no test has this name");
    status = 1;
  }
  if (!context.shouldExit())  // not for --help and its like, which run no test
    std::printf("%u passed, %u failed\n",
                totals.numTestCasesPassingFilters - totals.numTestCasesFailed,
                totals.numTestCasesFailed);
  return status;
}
