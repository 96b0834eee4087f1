// SPDX-License-Identifier: MIT
// Wrong kernels are found out. steps/NN-idea/bugs holds changes of the step: the check of the answer or the
// emulator must report each, and a program of the same source without one must pass the same problems.
//
//   bug NAME | REPORT | RUN...   REPORT: wrong, not-finite, or a tag of the emulator, as race; or several, of which
//                                the order of threads decides: in-use/race. RUN: options of a run that must give
//                                it, or of several. One run, or none, is made with two orders of threads
//   spare WHY | RUN              a call, or a value, that the step can do without, in a run with these options;
//                                without RUN with inputs that rise
//   layout NAME                  gives the right answer, but with bank conflicts
//
// STEPS_ONLY    how the names of the steps begin: 36, or 3 for 30 to 39
#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "common/program/ladder.h"
#include "common/testing/copies.h"

namespace {

const std::string kFolder = "build/planted/";

// From step 36 on, blocks that take four tiles of Q, two more than Q has stages; and with one tile of keys.
const char *const kPersistent = "--sms 2 --heads 4 --seqlen 256";
const char *const kPersistentShort = "--sms 2 --heads 8 --seqlen 128";

// Where some are enough: steps, and of each of these bugs and calls.
constexpr std::size_t kSomeSteps = 5, kSomeBugs = 3, kSomeCalls = 1;

/// The steps whose copies are run.
std::vector<std::string> steps() {
  std::vector<std::string> all = step_names();
  std::erase_if(all, [](const std::string &step) {
    return !step.starts_with(environment("STEPS_ONLY", ""));
  });
  draw(all, kSomeSteps);
  return all;
}

/// A step's source; with the headers of its own, and those that hold what an earlier step added, where they are
/// included.
std::string source_of(const std::string &step) {
  std::string source = read_text("steps/" + step + "/attention.cu");
  std::vector<std::string> held = {
      "#include \"steps/" + step + "/",  "#include \"common/kernel/order.h",
      "#include \"common/kernel/ring.h", "#include \"common/kernel/cache",
      "#include \"common/kernel/line.h", "#include \"common/kernel/merge",
      "#include \"common/kernel/part.h", "#include \"common/kernel/latent_rows.h"};
  // These use all of it.
  const auto of = [&](const std::string &number, const std::string &header) {
    if (step.starts_with(number)) held.push_back("#include \"common/kernel/" + header);
  };
  of("43", "persistent.h"), of("43", "draw.h"), of("44", "group_order.h"),
      of("45", "sequence_rows.h"), of("46", "work.h"), of("51", "visible.h"),
      of("54", "consumers.h"), of("56", "lse.h"), of("56", "plan.h"), of("56", "visible.h"),
      of("56", "scores.h"), of("85", "lse.h"), of("85", "plan.h"), of("85", "visible.h"),
      of("85", "scores.h"), of("63", "backward.h"), of("64", "backward.h"),
      of("65", "tile_gradients.h"), of("69", "tile_gradients.h"), of("69", "visits.h"),
      of("74", "tile_gradients.h"), of("66", "backward_ends.h"), of("67", "backward_ends.h"),
      of("67", "hopper_backward.h"), of("68", "backward_ends.h"), of("68", "hopper_backward.h"),
      of("71", "hopper_attention.h"), of("74", "mma_gradients.h"), of("74", "zigzag.h"),
      of("75", "hopper_attention.h"), of("75", "zigzag.h"), of("76", "zigzag.h"),
      of("80", "hopper_backward.h"), of("80", "visits.h"), of("81", "visits.h"),
      of("87", "visits.h"), of("87", "hopper_backward.h"), of("88", "hopper_backward.h"),
      of("86", "key_pages.h");
  if (step.starts_with("8"))
    for (const char *const header : {"69-training/rows.h", "88-strides-and-lengths/"})
      held.push_back(std::string("#include \"steps/") + header);
  if (step.starts_with("69")) held.push_back("#include \"steps/69-training/rows.h");
  if (step.starts_with("57")) held.push_back("#include \"steps/69-training/backward.h");
  if (step.starts_with("81"))
    for (const char *const header : {"69-training/sinks.h", "80-backward-for-models/"})
      held.push_back(std::string("#include \"steps/") + header);
  if (step.starts_with("87")) held.push_back("#include \"steps/80-backward-for-models/");
  if (step.starts_with("89")) held.push_back("#include \"steps/86-new-keys/kernel.h");
  if (step.starts_with("91") || step.starts_with("92"))
    held.push_back("#include \"steps/90-around-the-loop/launch.h");
  const auto next = [&] {
    std::size_t first = std::string::npos;
    for (const std::string &start : held) first = std::min(first, source.find(start));
    return first;
  };
  std::vector<std::string> included;
  for (std::size_t at; (at = next()) != std::string::npos;) {
    const std::size_t end = source.find('\n', at);
    const std::string line = source.substr(at, end - at), quoted = line.substr(line.find('"') + 1);
    std::string header;
    if (std::find(included.begin(), included.end(), line) == included.end()) {
      header = read_text(quoted.substr(0, quoted.size() - 1));
      header.replace(header.find("#pragma once"), 12, "");
      included.push_back(line);
    }
    source.replace(at, end - at, header);
  }
  return source;
}

// --- runs ----------------------------------------------------------------------------------------

struct Run {
  int tiles, seed;
  std::string options;
};

/// The runs that a bug's fields name, behind its name and report.
std::vector<Run> runs_of(const Change &bug) {
  std::vector<std::string> options(bug.fields.begin() + 2, bug.fields.end());
  if (options.empty()) options = {""};
  if (options.size() == 1) options.push_back(options[0]);  // another order of threads
  std::vector<Run> runs;
  for (const std::string &some : options)
    runs.push_back({2, static_cast<int>(runs.size()) + 1, some});
  return runs;
}

/// One head, if its options do not name more; head dim 64, if the step takes it.
std::string command(const std::string &program, const Description &step, const Run &run) {
  const bool has_64 = std::count(step.head_dims.begin(), step.head_dims.end(), "64") > 0;
  return program + " --check-only --device cpu --repeatable --batch 1 --heads 1 --head-dim " +
         (has_64 ? "64" : step.head_dims.front()) + " --seqlen " +
         std::to_string(run.tiles * step.tile) + " --seed " + std::to_string(run.seed) + " " +
         run.options;
}

std::string show(const std::string &line, const Finished &finished) {
  return "\n" + line + "\n" + finished.out + finished.err + "exit status " +
         std::to_string(finished.status) + "\n";
}

/// Whether a run ended with one of these reports: '/' stands between them.
bool reports(const Finished &finished, const std::string &report) {
  if (finished.status != 1) return false;
  for (const std::string &one : split(report, "/"))
    if (one == "wrong"        ? finished.out.find(": WRONG") != std::string::npos
        : one == "not-finite" ? finished.out.find("elements are not finite") != std::string::npos
                              : finished.err.find("[" + one + "]") != std::string::npos)
      return true;
  return false;
}

/// What is wrong with a run that must pass: nothing, or what it printed.
std::string failure_of(const std::string &line) {
  const Finished finished = run_command(line);
  return finished.status == 0 ? "" : show(line, finished);
}

// --- calls that are gone ---------------------------------------------------------------------------

/// What a step cannot do without: calls, each to be taken away alone.
const std::vector<std::string> kBarriers = {"__syncthreads()", "__syncwarp()",
                                            "cp_async_wait<0>()"};
// keep_loads_apart() is none: what it stands for is a hint to nvcc, and nothing may rely on it.
const std::vector<std::string> kHopperBarriers = {
    "__syncthreads(",       "__syncwarp(",          "mbarrier_wait(",
    "mbarrier_arrive(",     "mbarrier_fence_init(", "mbarrier_arrive_expect_tx(",
    "wgmma_fence(",         "wgmma_commit(",        "wgmma_wait<",
    "fence_proxy_async(",   "named_barrier_sync(",  "named_barrier_arrive(",
    "named_barrier_meet(",  "tma_store_commit(",    "tma_store_wait_read<",
    "ring_release(",        "cluster_sync(",        "mbarrier_arrive_at(",
    "griddepcontrol_wait(", "mbarrier_wait<"};

/// Whether a step is for Hopper alone: of Part IV, or built on it.
bool of_hopper(const std::string &step) {
  return header_of(step).needs == "sm_90a";
}

/// These calls in a source, but not their definitions; not those that it can do without.
std::vector<Replacement> calls_of(const std::string &step, const std::string &source,
                                  const std::vector<Replacement> &spare) {
  std::vector<Replacement> calls;
  for (const std::string &name : of_hopper(step) ? kHopperBarriers : kBarriers)
    for (std::size_t at = 0; (at = source.find(name, at)) != std::string::npos; at++) {
      const std::size_t end = source.find(';', at), line = source.rfind('\n', at);
      if (source.substr(line, at - line).find("//") != std::string::npos) continue;
      if (at > 0 && (std::isalnum(source[at - 1]) || source[at - 1] == '_')) continue;
      if (source.substr(at, end - at).find('{') != std::string::npos) continue;
      if (std::none_of(spare.begin(), spare.end(), [&](const Replacement &other) {
            return other.at <= at && at < other.at + other.size;
          }))
        calls.push_back({at, end - at, ""});
    }
  return calls;
}

// --- all changes of a step -------------------------------------------------------------------------

struct Planted {
  Mutants mutants;
  Description help;
  std::vector<Change> bugs;  // their numbers among the mutants are those of their places here
  std::vector<Replacement> calls;
  std::size_t first_call;  // the number of the first among the mutants
};

/// The options of all runs of a step's changes below: of a type and a head dim that none names nothing is compiled.
std::vector<std::string> runs_of(const Planted &step) {
  const std::string plain = command("", step.help, {2, 1, ""});
  std::vector<std::string> runs = {plain};
  for (const Change &change : step.bugs) {
    for (std::size_t i = change.keyword == "bug" ? 2 : 1; i < change.fields.size(); i++)
      runs.push_back(plain + change.fields[i]);
    if (change.keyword == "layout")
      for (const std::string &head_dim : step.help.head_dims)
        runs.push_back("--head-dim " + head_dim);
  }
  if (of_hopper(step.mutants.step) && step.help.takes_option("--head-dim-v"))
    runs.push_back("--head-dim 256");
  return runs;
}

/// The bugs, and what else that file holds, of all steps; of each step one program, or a few, compiled when they
/// are first asked for.
std::vector<Planted> &planted() {
  static std::vector<Planted> all = [] {
    std::vector<Planted> made;
    std::vector<Mutants> mutants;
    for (const std::string &step : steps()) {
      const std::string source = source_of(step), file = "steps/" + step + "/bugs";
      Planted of_step = {{step, step.substr(0, 2), source, {}}, {}, {}, {}, 0};
      of_step.bugs = parse_changes(read_text(file), file);
      std::vector<Replacement> spare;
      for (const Change &bug : of_step.bugs) {
        REQUIRE_MESSAGE((bug.keyword == "spare" || bug.keyword == "layout" ||
                         (bug.keyword == "bug" && bug.fields.size() >= 2)),
                        bug.place,
                        ": 'bug NAME | REPORT', 'spare WHY | RUN' or 'layout NAME' is allowed");
        const std::vector<Replacement> parts = locate(source, bug.edits);
        if (bug.keyword == "spare") spare.push_back(parts.at(0));
      }
      of_step.calls = calls_of(step, source, spare);
      draw(of_step.bugs, kSomeBugs);
      draw(of_step.calls, kSomeCalls);
      for (const Change &bug : of_step.bugs)
        of_step.mutants.changes.push_back(locate(source, bug.edits));
      of_step.first_call = of_step.bugs.size();
      for (const Replacement &call : of_step.calls) of_step.mutants.changes.push_back({call});
      of_step.help = describe("./step-" + step.substr(0, 2));
      of_step.mutants.runs = runs_of(of_step);
      mutants.push_back(of_step.mutants);
      made.push_back(of_step);
    }
    compile_mutants(kFolder, mutants);
    for (std::size_t i = 0; i < made.size(); i++) {
      made[i].mutants = mutants[i];
      CHECK_MESSAGE(mutants[i].complaint.empty(), mutants[i].complaint);
      REQUIRE(!mutants[i].unchanged.empty());
    }
    return made;
  }();
  return all;
}

/// The numbers of a step's changes with this keyword.
std::vector<std::size_t> with_keyword(const Planted &step, const std::string &keyword) {
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < step.bugs.size(); i++)
    if (step.bugs[i].keyword == keyword) numbers.push_back(i);
  return numbers;
}

}  // namespace

TEST_SUITE_BEGIN("planted");

TEST_CASE("every planted bug is reported, in every run, and a step without one passes them") {
  std::vector<Job> jobs;
  for (const Planted &step : planted()) {
    const std::vector<std::size_t> bugs = with_keyword(step, "bug");
    std::set<std::string> right;
    for (const int seed : {1, 2})
      right.insert(command(step.mutants.unchanged, step.help, {2, seed, ""}));
    std::set<std::string> passed;
    for (const std::size_t i : bugs) {
      // Each problem with one order of threads: the second order is the bug's matter.
      for (const Run &run : runs_of(step.bugs[i]))
        if (passed.insert(run.options).second)
          right.insert(command(step.mutants.unchanged, step.help, run));
      jobs.push_back(
          {step.mutants.name + " " + step.bugs[i].fields[0],
           [&step, i] {
             if (step.mutants.commands[i].empty()) return step.mutants.complaint;
             const std::string &report = step.bugs[i].fields[1];
             for (const Run &run : runs_of(step.bugs[i])) {
               const std::string line = command(step.mutants.commands[i], step.help, run);
               const Finished finished = run_command(line);
               if (!reports(finished, report))
                 return step.bugs[i].place + show(line, finished) + "expected '" + report + "'";
             }
             return std::string();
           },
           ""});
    }
    for (const std::string &line : right)
      jobs.push_back(
          {step.mutants.name + " without a bug", [line] { return failure_of(line); }, ""});
  }
  do_all(jobs);
}

namespace {

/// What was wrong with a step in which a call is gone, or nothing. `many`: the call is of a kernel for many
/// queries, where a step has another for few.
std::string failures_without(const Planted &step, std::size_t call, bool many) {
  const std::string &program = step.mutants.commands[step.first_call + call];
  if (program.empty()) return step.mutants.complaint;
  std::string failures;
  const bool hopper = of_hopper(step.mutants.step);
  // Several tiles; and what a step takes, it may have barriers for.
  std::string options = step.help.tile == 1 ? "--seqlen 256" : hopper ? "--seqlen 384" : "";
  if (step.help.takes_option("--rope")) options += " --rope halves";
  if (step.help.takes_option("--splits") && !many)
    options = "--seqlen 4 --seqlen-k 1500 --splits 3";
  std::vector<std::string> shapes = {options};
  // A tile that sees no key.
  if (step.help.tile == 1 && step.help.takes_option("--causal") &&
      step.help.takes_option("--seqlen-k"))
    shapes.push_back("--seqlen 200 --seqlen-k 3 --causal");
  // Warps that use each stage of theirs again, several times.
  if (step.help.tile == 1 && step.mutants.step >= "55")
    shapes.push_back("--sms 1 --seqlen 64 --seqlen-k 500");
  if (hopper && step.mutants.step >= "36")
    shapes = {"--seqlen 1024", kPersistent, kPersistentShort};
  if (hopper && step.help.takes_option("--gpus"))  // O in 16 bits and in fp32
    shapes = {"--sms 2 --seqlen 1024 --gpus 1", "--sms 2 --heads 6 --seqlen 256",
              "--sms 2 --heads 6 --seqlen 256 --gpus 1"};
  if (hopper && step.mutants.step >= "42" && step.help.takes_option("--causal"))
    shapes.push_back("--seqlen 640 --causal");        // a tile of keys that a warpgroup skips
  if (hopper && step.help.takes_option("--lengths"))  // what plans, and warpgroups without rows
    shapes.push_back("--batch 3 --heads 1 --lengths 300,150,20 --seqlen 300");
  if (hopper && step.help.takes_option("--head-dim-v"))  // where Q has one stage
    shapes.insert(shapes.begin(), "--sms 1 --heads 3 --seqlen 130 --head-dim 256");
  if (step.help.tile > 128) shapes = {kPersistent};
  const auto also = [&](const std::string &of, const std::string &shape) {
    if (step.mutants.step.starts_with(of)) shapes.insert(shapes.begin(), shape);
  };
  // Only where a lane of one warp is the slow thread: in one of many blocks.
  also("41", "--heads 4 --seqlen 640 --causal");
  also("54", "--page-size 16 --batch 16 --heads 4 --sms 64 --seqlen 1 --seqlen-k 700");
  also("86", "--append 3 --page-size 16 --seqlen 3 --seqlen-k 150");  // a box that a warp gathers
  also("83", "--batch 16 --heads 4 --kv-heads 4 --seqlen 1 --seqlen-k 192");
  also("84", "--batch 16 --heads 4 --kv-heads 4 --seqlen 1 --seqlen-k 192");
  // Tiles of keys that no query sees.
  also("92", "--sms 1 --seqlen 100 --seqlen-k 700 --window-size 20:20");
  // A merge that is not the last.
  also("71", "--gpus 3 --seqlen 100"), also("72", "--gpus 3 --seqlen 100");
  if (step.help.gradients && step.help.takes_option("--sink-logits"))  // a kernel of their own
    for (std::string &shape : shapes) shape += " --sink-logits";
  // A run in which the call is not missed costs most. So Hopper's shortest runs come first, which are added last, and
  // with the second seed the shape that reported with the first.
  if (hopper) std::reverse(shapes.begin(), shapes.end());
  for (const int seed : {1, 2}) {  // one head: a barrier is of one block
    std::string said;              // in shapes in which the call is not missed
    bool reported = false;
    for (std::size_t i = 0; i < shapes.size() && !reported; i++) {
      const std::string shape = shapes[i];
      // In Part IV O is rescaled, from whichever end the keys come: accumulators are touched between
      // products.
      const std::string line =
          command(program, step.help, {2, seed, (hopper ? "--inputs one-hot " : "") + shape});
      const Finished finished = run_command(line);
      reported = hopper ? finished.status == 1
                        : reports(finished, "race/uninitialised/in-flight/not-finite");
      if (reported) std::swap(shapes[0], shapes[i]);
      said += show(line, finished);
    }
    if (!reported) failures += said;
  }
  return failures;
}

}  // namespace

TEST_CASE("every barrier and every wait is missed when it is gone, with any order of threads") {
  std::vector<Job> jobs;
  for (const Planted &step : planted()) {
    const std::string &source = step.mutants.source;
    for (std::size_t i = 0; i < step.calls.size(); i++) {
      const auto [at, size, text] = step.calls[i];
      const auto line =
          1 + std::count(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(at), '\n');
      // Step 50 has two kernels: the later one in its source has many queries.
      const bool many = at > source.find("prefill(const Problem");
      jobs.push_back(
          {step.mutants.step + ":" + std::to_string(line) + ": " + source.substr(at, size),
           [&step, i, many] { return failures_without(step, i, many); }, ""});
    }
  }
  do_all(jobs);
}

TEST_CASE("what a step can do without is there, and is not missed") {
  std::vector<Job> jobs;
  for (const Planted &step : planted())
    for (const std::size_t i : with_keyword(step, "spare"))
      jobs.push_back(
          {step.mutants.name + " without " + step.bugs[i].edits.at(0).find,
           [&step, i] {
             if (step.mutants.commands[i].empty()) return step.mutants.complaint;
             return failure_of(command(
                 step.mutants.commands[i], step.help,
                 {3, 1,
                  step.bugs[i].fields.size() > 1 ? step.bugs[i].fields[1] : "--inputs rising"}));
           },
           ""});
  do_all(jobs);
}

namespace {

/// The counts of a whole run, from what --profile-csv wrote.
std::map<std::string, std::uint64_t> totals(const std::string &file) {
  std::map<std::string, std::uint64_t> values;
  for (const std::string &row : lines_of(read_text(file)))
    if (const std::size_t name = row.find(",0,\""); name != std::string::npos) {
      const std::size_t end = row.rfind("\",");
      values[row.substr(name + 4, end - name - 4)] = std::stoull(row.substr(end + 2));
    }
  return values;
}

/// Runs one tile of each head dim, and compares its wavefronts with what its bytes need. `excess`: so many more,
/// or kSome.
constexpr int kSome = -1;
std::string conflicts(const std::string &program, const std::string &name, const Description &help,
                      int excess) {
  const std::string csv = kFolder + name + ".csv";
  for (const std::string &head_dim : help.head_dims) {
    std::filesystem::remove(csv);
    const std::string line = program + " --device cpu --batch 1 --heads 1 --head-dim " + head_dim +
                             " --seqlen " + std::to_string(help.tile) + " --profile-csv " + csv;
    const Finished finished = run_command(line);
    std::map<std::string, std::uint64_t> counts = totals(csv);
    std::uint64_t wavefronts = 0;
    for (const char *kind : {"shared load", "shared store", "stmatrix", "cp.async", "wgmma"})
      wavefronts += counts[kind + std::string(" wavefronts")];
    const std::uint64_t ideal = counts["shared wavefronts, ideal"];
    // From head dim 192 on steps 50 and 57 decode with 4 warps, not 8.
    const int more =
        (name == "50" || name == "57") && std::stoi(head_dim) > 128 ? excess / 2 : excess;
    if (finished.status != 0 || ideal == 0 ||
        (more == kSome ? wavefronts <= ideal : wavefronts != ideal + more))
      return show(line, finished) + std::to_string(wavefronts) + " wavefronts, ideal " +
             std::to_string(ideal) + ": expected " +
             (more == kSome ? "more" : std::to_string(more) + " more");
  }
  return "";
}

}  // namespace

TEST_CASE("a layout with bank conflicts gives the right answer, and the counts tell") {
  // From step 03 on no access to shared memory takes more wavefronts than its bytes need, except in step 05,
  // where ldmatrix takes 8 for 1; and where new tokens are decoded, m and l of 8 rows lie in 4 banks: 8 warps
  // store them twice.
  const std::map<std::string, int> excess = {{"05", kSome}, {"25", 16}, {"26", 16},
                                             {"27", 16},    {"50", 16}, {"55", 16},
                                             {"57", 16},    {"59", 16}, {"73", 32}};
  std::vector<Job> jobs;
  for (const Planted &step : planted()) {
    const std::string &name = step.mutants.name;
    if (name < "03") continue;
    jobs.push_back({name + " as it is",
                    [&step, name, more = excess.contains(name) ? excess.at(name) : 0] {
                      return conflicts("./step-" + name, name, step.help, more);
                    },
                    ""});
    for (const std::size_t i : with_keyword(step, "layout"))
      jobs.push_back({name + " " + step.bugs[i].fields[0],
                      [&step, name, i] {
                        if (step.mutants.commands[i].empty()) return step.mutants.complaint;
                        return conflicts(step.mutants.commands[i], name + "-" + std::to_string(i),
                                         step.help, kSome);
                      },
                      ""});
  }
  do_all(jobs);
}

TEST_SUITE_END();
