// SPDX-License-Identifier: MIT
// A right kernel always passes: every step over many seeds and shapes. The bound of
// reference/verdict.h is derived so that less than one run of a million fails; here is how near to
// it the steps come.
//
// BOUND_RUNS  runs of each step from 10 on, whose P is rounded at the most scales; the others get a
//             quarter of them. Default 8, or 1 where some are enough; `make check-bound` makes it 2000
// STEPS_ONLY  how the names of the steps begin that are run: 39, or 3 for steps 30 to 39
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "common/testing/process.h"
#include "reference/parallel.h"
#include "reference/random.h"

namespace {

/// A run with a shape and inputs drawn from its number: mostly one tile and one head, which are
/// quick. (Not `huge`: its scores are beyond what one FMA can do, steps_test.cpp says which fail.)
std::string drawn_command(const std::string &program, const Description &step,
                          std::uint64_t number) {
  std::uint64_t state = number;
  const auto one_of = [&](const std::vector<std::string> &words) {
    return words[next_random(state) % words.size()];
  };
  std::vector<std::string> head_dims = {"64", "64", "128"};
  if (std::count(step.head_dims.begin(), step.head_dims.end(), "64") == 0)
    head_dims = step.head_dims;
  std::string beyond;  // what becomes of the scores
  for (const std::string option :
       {"--scale 0.4", "--scale 0.01", "--softcap 2", "--softcap 40", "--alibi", "--sink-logits"})
    if (step.takes_option(words(option)[0]) && one_of({"", "", "yes"}) == "yes")
      beyond += " " + option;
  const int tiles = std::stoi(one_of({"1", "1", "1", "1", "1", "1", "2", "2", "3"}));
  return program + " --device cpu --check-only --batch " + one_of({"1", "1", "1", "2"}) +
         " --heads " + one_of({"1", "1", "2", "3"}) + " --head-dim " + one_of(head_dims) +
         " --seqlen " + std::to_string(tiles * step.tile) + " --inputs " +
         one_of({"normal", "normal", "normal", "rising", "one-hot", "ends", "equal-keys"}) +
         " --seed " + std::to_string(number) + beyond;
}

/// "... error 1.2e-05 rms (at most 4e-05), ...": the error over its bound, the largest of several (dQ, dK and
/// dV). Negative: not found.
double ratio(const std::string &output, const std::string &kind) {
  const std::string middle = " " + kind + " (at most ";
  double largest = -1;
  for (std::size_t at = 0; (at = output.find(middle, at)) != std::string::npos; at++) {
    const double error = std::abs(std::atof(output.c_str() + output.rfind(' ', at - 1)));
    const double bound = std::atof(output.c_str() + at + middle.size());
    largest = std::max(largest, bound > 0 ? error / bound : error > 0 ? 1e300 : 0);
  }
  return largest;
}

struct Worst {
  double ratio = 0;
  std::string command;

  void add(double next, const std::string &of) {
    if (next > ratio) *this = {next, of};
  }
};

}  // namespace

TEST_SUITE_BEGIN("bound");

TEST_CASE("every step passes, whatever the seed and the shape") {
  const char *const runs_wanted = std::getenv("BOUND_RUNS");
  const int most = runs_wanted ? std::atoi(runs_wanted) : some_are_enough() ? 1 : 8;
  const char *const only = std::getenv("STEPS_ONLY");
  std::vector<std::string> steps = step_names();
  draw(steps, 20);
  for (const std::string &step : steps) {
    if (only && !step.starts_with(only)) continue;
    const std::string program = "./step-" + step.substr(0, 2);
    const Description described = describe(program);
    const int runs = step < "10" ? std::max(most / 4, 1) : most;
    Worst rms, element, slope, lse;
    std::string failures;
    std::mutex adding;
    parallel_for(runs, [&](std::size_t i) {
      const std::string command = drawn_command(program, described, i + 1);
      const Finished finished = run_command(command);
      const double of_rms = ratio(finished.out, "rms"), of_element = ratio(finished.out, "max"),
                   of_slope = described.gradients ? 0 : ratio(finished.out, "slope"),
                   of_lse = described.writes_lse ? ratio(finished.out, "worst") : 0;
      const std::lock_guard lock(adding);
      rms.add(of_rms, command);
      element.add(of_element, command);
      slope.add(of_slope, command);
      lse.add(of_lse, command);
      if (finished.status != 0 || of_rms < 0 || of_element < 0 || of_slope < 0 || of_lse < 0)
        failures += command + "\n" + finished.out + finished.err;
    });
    CHECK_MESSAGE(failures.empty(), failures);
    if (!runs_wanted) continue;
    std::printf(
        "%s  %4d runs: at worst %.2f of the bound for an element (%s), %.2f in RMS (%s), %.2f for "
        "the slope (%s)",
        step.c_str(), runs, element.ratio, element.command.c_str(), rms.ratio, rms.command.c_str(),
        slope.ratio, slope.command.c_str());
    if (described.writes_lse)
      std::printf(", %.2f for the log-sum-exp (%s)", lse.ratio, lse.command.c_str());
    std::printf("\n");
    std::fflush(stdout);
  }
}

TEST_SUITE_END();
