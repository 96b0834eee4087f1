// Every step gives the right answer: shapes, inputs, orders of threads.
//
// STEPS_DEVICE  cpu (default) or gpu
// STEPS_PREFIX  what each command is run under, "compute-sanitizer --tool memcheck"; fewer runs
// then
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/testing/process.h"

namespace {

std::string environment(const char *name, const char *otherwise) {
  const char *value = std::getenv(name);
  return value ? value : otherwise;
}

/// A run of a step; seqlen is so many of its tiles.
struct Run {
  int tiles, batch, heads, head_dim;
  const char *inputs;
  int seed;
};

std::vector<Run> grid(bool gpu, bool prefixed) {
  if (prefixed)
    return {{1, 1, 1, 64, "normal", 1}, {2, 2, 3, 64, "normal", 2}, {3, 1, 2, 128, "normal", 3}};
  std::vector<Run> runs;
  for (const int head_dim : {64, 128}) {
    for (const char *inputs : {"normal", "rising", "one-hot", "ends", "equal-keys"})
      runs.push_back({2, 1, 1, head_dim, inputs, 1});
    for (const int tiles : {1, 3}) runs.push_back({tiles, 1, 1, head_dim, "normal", 2});
    runs.push_back({1, 2, 3, head_dim, "normal", 3});
    if (gpu) runs.push_back({16, 2, 3, head_dim, "normal", 4});
  }
  for (const int seed : {5, 6, 7}) runs.push_back({2, 1, 2, 64, "normal", seed});  // schedules
  return runs;
}

bool contains(const std::string &text, const std::string &part) {
  return text.find(part) != std::string::npos;
}

std::string command(const std::string &program, const Run &run, int tile) {
  return program + " --batch " + std::to_string(run.batch) + " --heads " +
         std::to_string(run.heads) + " --seqlen " + std::to_string(run.tiles * tile) +
         " --head-dim " + std::to_string(run.head_dim) + " --inputs " + run.inputs + " --seed " +
         std::to_string(run.seed);
}

}  // namespace

TEST_SUITE_BEGIN("steps");

TEST_CASE("every step is right, in every shape, on all inputs") {
  const std::string device = environment("STEPS_DEVICE", "cpu");
  const std::string prefix = environment("STEPS_PREFIX", "");
  REQUIRE((device == "cpu" || device == "gpu"));
  const std::vector<std::string> steps = step_names();
  REQUIRE(!steps.empty());
  for (const std::string &step : steps) {
    const std::string program = "./step-" + step.substr(0, 2);
    const StepHelp help = read_help(program);
    REQUIRE_MESSAGE(help.tile > 0, program, " --help names no tile; is it built?");
    if (device == "gpu" && step == steps[0]) {
      const Finished first =
          run_command(program + " --device gpu --check-only --batch 1 --heads 1 --seqlen " +
                      std::to_string(help.tile));
      if (contains(first.err, "no GPU")) return void(std::puts("SKIP: no GPU"));
    }
    for (const std::string &variant : help.variants)
      for (const Run &run : grid(device == "gpu", !prefix.empty())) {
        const std::string line = prefix + (prefix.empty() ? "" : " ") +
                                 command(program, run, help.tile) + " " + variant +
                                 " --check-only --device " + device;
        CAPTURE(line);
        const Finished finished = run_command(line);
        // A GPU that is too old for the step, or has too little shared memory, says so.
        if (device == "gpu" && (contains(finished.err, "this step needs sm_") ||
                                contains(finished.err, "of shared memory a block"))) {
          std::printf("SKIP: %s", finished.err.c_str());
          continue;
        }
        CAPTURE(finished.out);
        CAPTURE(finished.err);
        CHECK(finished.status == 0);
        CHECK(finished.out.find(": passed\n") != std::string::npos);
      }
  }
}

TEST_CASE("one FMA cannot bring scores of 10^10 under their maximum; a subtraction can") {
  // From step 10 on a power is 2^(s scale - m) with m rounded: beyond 2^24 the two differ by more
  // than the score's own last place. Chapter 10 says so; a step that learns it moves this border.
  for (const std::string &step : step_names()) {
    const std::string line =
        "./step-" + step.substr(0, 2) + " --device cpu --check-only --inputs huge";
    CAPTURE(line);
    CHECK(run_command(line).status == (step < "10" ? 0 : 1));
  }
}

TEST_CASE("every step reads from top to bottom: its length, and the form of its header") {
  for (const std::string &step : step_names()) {
    CAPTURE(step);
    const std::vector<std::string> lines = lines_of(read_text("steps/" + step + "/attention.cu"));
    REQUIRE(!lines.empty());
    CHECK(lines.size() <= 220);
    CHECK(lines[0].starts_with("// Step " + step.substr(0, 2) + ": "));
    // The header's words, in this order, before the first line of code.
    std::vector<std::string> words = {"// Before      ", "// Change      ", "// Prediction  "};
    for (const std::string &line : lines) {
      if (!line.starts_with("//")) break;
      if (!words.empty() && line.starts_with(words[0])) words.erase(words.begin());
    }
    CHECK_MESSAGE(words.empty(), "the header lacks ", words.empty() ? "" : words[0]);
  }
}

TEST_SUITE_END();
