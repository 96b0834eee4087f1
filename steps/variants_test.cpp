// SPDX-License-Identifier: MIT
// Every variant of a step applies to it, compiles for the emulator and gives the right answer: a
// patch cannot rot.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/testing/copies.h"

namespace {

const std::filesystem::path kFolder = "build/variants-tested";

/// steps/NN-idea/variants/NAME.patch of all steps.
std::vector<std::filesystem::path> patches() {
  std::vector<std::filesystem::path> found;
  for (const std::string &step : step_names())
    if (const auto folder = std::filesystem::path("steps") / step / "variants";
        std::filesystem::exists(folder))
      for (const auto &entry : std::filesystem::directory_iterator(folder))
        found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

/// The folder of the step that a patch is of.
std::filesystem::path step_of(const std::filesystem::path &patch) {
  return patch.parent_path().parent_path();
}

struct Run {
  int tiles, head_dim, heads, seed;
  const char *inputs;
};
const Run kRuns[] = {{2, 64, 1, 1, "normal"}, {3, 64, 1, 2, "rising"}, {1, 128, 2, 3, "normal"}};

std::string said(const std::string &line, const Finished &finished) {
  return line + "\n" + finished.out + finished.err + "exit status " +
         std::to_string(finished.status);
}

/// A copy of the step with the patch applied; if it does not apply, with nothing but that complaint.
Copy patched(const std::filesystem::path &patch) {
  const std::string step = step_of(patch).filename(), name = patch.stem();
  const std::filesystem::path folder = kFolder / step / name;
  std::filesystem::create_directories(folder);
  const std::string script = std::filesystem::absolute("common/kernel/variant.sh");
  const std::string apply = "cd " + shell_word(folder) + " && " + shell_word(script) + " " +
                            shell_word(std::filesystem::absolute(step_of(patch))) + " " +
                            shell_word(name);
  Copy copy{step + ":" + name, step + "/" + name + "/attention", ""};
  if (const Finished finished = run_command(apply); finished.status != 0)
    copy.complaint = said(apply, finished);
  else
    copy.source = read_text(folder / "attention.cu");
  return copy;
}

/// What is wrong with a copy: nothing, or what the compiler or the first wrong run said.
std::string complaint(const Copy &copy) {
  if (copy.command.empty()) return copy.name + ".cu:\n" + copy.complaint;
  const Description help = describe(copy.command);
  const int tile = help.tile;
  // Few queries and many keys, where a step shares them among blocks.
  const std::string beyond =
      help.takes_option("--splits")
          ? " --heads 4 --kv-heads 1 --seqlen 2 --seqlen-k 700 --splits 4 --causal"
          : "";
  std::vector<Run> runs(std::begin(kRuns), std::end(kRuns));
  if (tile == 1)  // more rows than a tile of the kernel has
    for (const std::string &head_dim : help.head_dims)
      runs.push_back({200, std::stoi(head_dim), 1, 4, "normal"});
  for (const Run &run : runs) {
    const bool has =
        std::count(help.head_dims.begin(), help.head_dims.end(), std::to_string(run.head_dim)) > 0;
    const std::string line =
        copy.command + " --device cpu --check-only --batch 1 --heads " + std::to_string(run.heads) +
        " --seqlen " + std::to_string(run.tiles * tile) + " --head-dim " +
        (has ? std::to_string(run.head_dim) : help.head_dims.front()) + " --seed " +
        std::to_string(run.seed) + " --inputs " + run.inputs + beyond;
    const Finished finished = run_command(line);
    if (finished.status == 3 &&
        finished.err.find("the emulator reads no other block's shared memory") != std::string::npos)
      return "";
    if (finished.status != 0 || finished.out.find(": passed\n") == std::string::npos)
      return said(line, finished);
  }
  return "";
}

}  // namespace

TEST_SUITE_BEGIN("variants");

TEST_CASE("every variant applies to its step and is right") {
  std::vector<Copy> copies;
  std::vector<std::filesystem::path> chosen = patches();
  draw(chosen, 4);
  for (const std::filesystem::path &patch : chosen) {
    const Copy copy = patched(patch);
    CHECK_MESSAGE(copy.complaint.empty(), copy.complaint);
    if (copy.complaint.empty()) copies.push_back(copy);
  }
  REQUIRE(!copies.empty());
  compile_copies(kFolder, copies);
  std::vector<Job> jobs;
  for (const Copy &copy : copies)
    jobs.push_back({copy.step, [&copy] { return complaint(copy); }, ""});
  do_all(jobs);
}

TEST_CASE("each variant, and each file of their results, is cited") {
  namespace fs = std::filesystem;
  std::string pages = read_text("README.md") + read_text("plots/README.md");
  for (const std::string &step : step_names()) pages += read_text("steps/" + step + "/README.md");
  // A page that has the table of a file cites the variants in it.
  for (const auto &entry : fs::directory_iterator("plots/results"))
    if (const std::string name = entry.path().stem(); contains(name, "-variants-")) {
      CHECK_MESSAGE(contains(pages, name), entry.path().string());
      if (contains(pages, "table: variants " + name + " ")) pages += read_text(entry.path());
    }
  for (const fs::path &patch : patches()) {
    const std::string name = patch.stem(), step = step_of(patch).filename();
    CHECK_MESSAGE((contains(pages, step + ":" + name) || contains(pages, "`" + name + "`") ||
                   contains(pages, "variants/" + name + ".patch") ||
                   contains(pages, "step-" + step.substr(0, 2) + "-" + name)),
                  patch.string());
  }
}

TEST_CASE("a variant is a few lines of prose, then one change to attention.cu") {
  for (const std::filesystem::path &patch : patches()) {
    CAPTURE(patch);
    CHECK(patch.extension() == ".patch");
    const std::vector<std::string> lines = lines_of(read_text(patch));
    const auto change = std::find(lines.begin(), lines.end(), "--- a/attention.cu");
    CHECK(change - lines.begin() >= 2);   // prose and an empty line
    CHECK(change - lines.begin() <= 11);  // ten lines of prose at most
    REQUIRE(lines.end() - change >= 2);
    CHECK(change[1] == "+++ b/attention.cu");
    CHECK(std::count_if(lines.begin(), lines.end(),
                        [](const std::string &line) { return line.starts_with("+++ "); }) == 1);
  }
}

TEST_CASE("a patch that no longer applies, or answers wrongly, is reported") {
  const std::filesystem::path step = kFolder / "planted/02-loop-inverted";
  std::filesystem::create_directories(step / "variants");
  std::filesystem::copy_file("steps/02-loop-inverted/attention.cu", step / "attention.cu",
                             std::filesystem::copy_options::overwrite_existing);
  const std::vector<std::string> source = lines_of(read_text(step / "attention.cu"));
  // A patch of the line that holds `find`; it says that the line was `was`, if that is not empty.
  const auto planted = [&](const std::string &name, const std::string &find, const std::string &was,
                           const std::string &is) {
    const auto line = std::find_if(source.begin(), source.end(), [&](const std::string &text) {
      return text.find(find) != std::string::npos;
    });
    REQUIRE(line + 1 < source.end());
    const std::string at = std::to_string(line - source.begin() + 1) + ",2";
    const std::filesystem::path patch = step / "variants" / (name + ".patch");
    std::ofstream(patch) << "A bug.\n\n--- a/attention.cu\n+++ b/attention.cu\n@@ -" << at << " +"
                         << at << " @@\n-" << (was.empty() ? *line : was) << "\n+" << is << "\n "
                         << line[1] << "\n";
    std::vector<Copy> copy = {patched(patch)};
    if (!copy[0].complaint.empty()) return copy[0].complaint;
    compile_copies(kFolder, copy);
    return complaint(copy[0]);
  };
  const std::string last = "static_cast<half *>(p.O), p.seqlen_q, ";
  CHECK(planted("right", last, "", last + "1 / sqrtf(d));") == "");
  CHECK(planted("stale", last, "not in the step", last).find("patch does not apply") !=
        std::string::npos);
  CHECK(planted("no-code", last, "", last + "sqrtf);").find("error") != std::string::npos);
  CHECK(planted("wrong", last, "", last + "1);").find(": WRONG") != std::string::npos);
}

TEST_SUITE_END();
