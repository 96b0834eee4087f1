// SPDX-License-Identifier: MIT
// Every step gives the right answer: shapes, inputs, orders of threads, and all that it takes.
//
// STEPS_DEVICE  cpu (default) or gpu
// STEPS_ONLY    how the names of the steps begin that are run, as 5 or 57
// STEPS_PREFIX  what each command is run under, "compute-sanitizer --tool memcheck"; fewer runs then
// TESTS_SEED    draws the shapes that nobody chose; default: another each time
#include <doctest/doctest.h>

#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "common/testing/copies.h"
#include "common/testing/problems.h"
#include "common/testing/process.h"
#include "reference/random.h"

namespace {

/// A run of a step.
struct Run {
  int seqlen, batch, heads;
  std::string head_dim, inputs;
  std::uint64_t seed;
  std::string beyond_plain = "";  // further options
};

/// What to run for each option that a step may take.
std::vector<std::string> runs_with(const std::string &option) {
  static const std::map<std::string, std::vector<std::string>> all = {
      {"--causal", {"--causal"}},
      {"--seqlen-k",
       {"--seqlen 1 --seqlen-k 64", "--seqlen 1 --seqlen-k 129", "--seqlen 63 --seqlen-k 65",
        "--seqlen 65 --seqlen-k 63", "--seqlen 129 --seqlen-k 64", "--seqlen 3 --seqlen-k 200",
        "--seqlen 200 --seqlen-k 3", "--seqlen 127 --seqlen-k 257", "--seqlen 1 --seqlen-k 900",
        "--seqlen 63 --seqlen-k 65 --causal", "--seqlen 65 --seqlen-k 63 --causal",
        "--seqlen 129 --seqlen-k 64 --causal", "--seqlen 3 --seqlen-k 200 --causal",
        "--seqlen 200 --seqlen-k 3 --causal", "--seqlen 127 --seqlen-k 257 --causal",
        "--seqlen 128 --seqlen-k 129 --causal", "--seqlen 64 --seqlen-k 126 --causal"}},
      {"--head-dim-v",
       {"--head-dim 192 --head-dim-v 128", "--head-dim 136 --head-dim-v 104 --causal --layout bnhd",
        "--head-dim 256 --head-dim-v 200 --inputs rising",
        "--head-dim 72 --head-dim-v 96 --batch 3 --lengths 5:0,1:150,150:1 --layout packed"}},
      {"--latent", {"--latent", "--heads 128 --seqlen 1", "--heads 32 --seqlen 2 --causal"}},
      {"--kv-heads",
       {"--heads 6 --kv-heads 2", "--heads 3 --kv-heads 1 --causal",
        "--heads 8 --kv-heads 1 --seqlen 1 --seqlen-k 130", "--heads 3 --kv-heads 3"}},
      {"--window",
       {"--window 1", "--window 64", "--window 100 --causal", "--window 2147483647",
        "--window 65 --seqlen 3 --seqlen-k 200", "--window 7 --seqlen 200 --seqlen-k 3",
        "--window 127 --seqlen 300", "--window 66 --seqlen 200",
        "--window 50 --seqlen 16 --seqlen-k 100"}},
      {"--sinks",
       {"--window 5 --sinks 1", "--window 70 --sinks 3 --causal", "--window 64 --sinks 65",
        "--window 1 --sinks 2147483647", "--window 20 --sinks 4 --seqlen 3 --seqlen-k 200",
        "--window 5 --sinks 63 --seqlen 200"}},
      {"--type",
       {"--type bf16", "--type bf16 --inputs rising", "--type bf16 --inputs ends",
        "--type bf16 --causal"}},
      {"--layout",
       {"--layout bnhd", "--layout interleaved --causal",
        "--layout interleaved --batch 2 --heads 6 --kv-heads 2",
        "--layout bnhd --batch 2 --heads 6 --kv-heads 2 --seqlen 65 --seqlen-k 130",
        "--layout packed --batch 4 --lengths 150,0,1,65 --causal",
        "--layout packed --batch 3 --lengths 1:130,5:5,20:0 --seqlen 20 --seqlen-k 130"}},
      {"--page-size",
       {"--page-size 16", "--page-size 24 --causal", "--page-size 256",
        "--page-size 64 --seqlen 1 --seqlen-k 130 --heads 4 --kv-heads 2",
        "--page-size 16 --seqlen 70 --seqlen-k 600",  // stages that are filled again, by many boxes
        "--page-size 16 --seqlen 1 --seqlen-k 128", "--page-size 8 --seqlen 1 --seqlen-k 120",
        "--page-size 16 --layout packed --batch 3 --lengths 1:130,5:5,20:0 --seqlen 20 "
        "--seqlen-k 130"}},
      {"--lengths",
       {"--batch 3 --lengths 1,0,150", "--batch 3 --lengths 1,0,150 --causal",
        "--batch 4 --lengths 50:0,0:60,7:133,150:149 --seqlen-k 150",
        "--batch 4 --lengths 50:0,0:60,7:133,150:149 --seqlen-k 150 --causal"}},
      {"--append",
       {"--seqlen 1 --seqlen-k 65 --append 1", "--seqlen 5 --seqlen-k 130 --append 5 --causal",
        "--seqlen 3 --seqlen-k 70 --append 70", "--batch 3 --lengths 1:1,1:64,1:65 --append 1",
        // A sequence without queries, a window that hides new keys, and rows of 128 that are gathered.
        "--batch 3 --lengths 0:60,7:133,3:40 --seqlen 7 --seqlen-k 133 --append 30 --heads 4 "
        "--kv-heads 2 --page-size 16",
        "--seqlen 3 --seqlen-k 200 --append 120 --window 5",
        "--head-dim 128 --seqlen 3 --seqlen-k 135 --append 12 --page-size 8",
        "--seqlen 1 --seqlen-k 65 --append 1 --page-size 16 --heads 4 --kv-heads 2",
        "--seqlen 2 --seqlen-k 65 --append 2 --layout bnhd --heads 4 --kv-heads 1 --causal"}},
      {"--rope",
       {"--rope halves", "--rope neighbours --causal", "--rope halves --inputs one-hot",
        "--rope neighbours --inputs equal-keys", "--rope halves --seqlen 3 --seqlen-k 130",
        "--rope neighbours --seqlen 1 --seqlen-k 65 --append 1",
        "--rope halves --batch 2 --append 5 --seqlen 5 --seqlen-k 70",
        "--rope halves --head-dim 128 --batch 3 --lengths 5:60,150:150,2:140 --heads 4 "
        "--kv-heads 2 --type bf16 --layout packed --page-size 16",
        "--rope halves --batch 3 --lengths 1,0,150 --causal"}},
      {"--rope-dim",
       {"--rope halves --rope-dim 16", "--rope neighbours --rope-dim 48 --causal",
        "--rope halves --rope-dim 32 --seqlen 3 --seqlen-k 70 --append 3",
        "--rope neighbours --rope-dim 16 --seqlen 50 --seqlen-k 90 --append 40 --page-size 8"}},
      {"--window-size",
       {"--window-size 64:0", "--window-size 0:0", "--window-size 100:30", "--window-size -1:70",
        "--window-size 130:-1 --causal", "--window-size 2147483647:2147483647",
        // One query of a tile sees a key, or all but one do, in tiles of 64, 80 and 128.
        "--window-size 1:0", "--window-size 126:-1", "--window-size 129:0 --seqlen 300",
        "--window-size 40:10 --batch 3 --heads 4 --kv-heads 2 --lengths 150:90,0:60,100:140 "
        "--seqlen-k 150",
        "--head-dim 128 --window-size 30:20 --seqlen 300",
        "--head-dim 128 --window-size 78:-1 --seqlen 200"}},
      {"--scale",
       {"--scale 0.05", "--scale 1", "--scale 0 --causal", "--scale 0.3 --inputs one-hot",
        "--scale 1000000"}},
      {"--softcap",
       {"--softcap 1", "--softcap 30 --causal", "--softcap 50 --inputs rising",
        "--softcap 0.001 --inputs ends", "--softcap 2 --scale 0 --causal", "--softcap 1000000"}},
      {"--alibi",
       {"--alibi", "--alibi --causal", "--alibi --seqlen 3 --seqlen-k 200",
        "--alibi --heads 3 --inputs equal-keys", "--alibi --scale 0",
        "--alibi --softcap 2 --type bf16"}},
      {"--sink-logits",
       {"--sink-logits", "--sink-logits --causal --heads 3", "--sink-logits --inputs rising",
        "--sink-logits --inputs ends --type bf16",
        "--sink-logits --alibi --softcap 3 --scale 0.2"}},
      {"--gpus",
       {"--gpus 1", "--gpus 3 --seqlen 200", "--gpus 4 --seqlen 130 --causal",
        "--gpus 8 --seqlen 9 --causal", "--gpus 3 --heads 4 --kv-heads 2 --batch 2 --seqlen 100",
        "--gpus 2 --seqlen 400 --type bf16",
        // A chunk is one row, and one row more than a warpgroup has.
        "--gpus 2 --seqlen 4 --causal", "--gpus 2 --seqlen 257 --causal --batch 1 --heads 1"}},
      {"--link",
       {"--link copies", "--link copies --gpus 4 --seqlen 70",
        "--link copies --gpus 3 --seqlen 150 --causal"}},
      {"--leave-sms", {"--leave-sms 3 --heads 5", "--leave-sms 64"}},
      {"--splits",
       {"--splits 1", "--splits 2", "--splits 7", "--splits auto",
        "--splits 1 --seqlen 1 --seqlen-k 900",  // warps that use each of their stages again
        "--splits 3 --seqlen 1 --seqlen-k 300 --heads 8 --kv-heads 2",
        "--splits 11 --seqlen 1 --seqlen-k 1000",  // more than the 8 parts that a merge loads at once
        "--splits 4 --batch 3 --seqlen 2 --seqlen-k 150 --lengths 1:150,2:0,0:7"}},
      {"--garbage",
       {"--garbage --batch 4 --lengths 50:0,0:60,7:133,150:149 --seqlen-k 150",
        "--garbage --layout packed --batch 2 --lengths 1:3,2:5 --seqlen 20 --seqlen-k 30",
        "--garbage --layout packed --batch 3 --lengths 1:130,5:5,20:0 --seqlen 20 --seqlen-k 130",
        "--garbage --page-size 16 --seqlen 1 --seqlen-k 150",
        "--garbage --page-size 7 --layout bnhd --batch 3 --lengths 1:130,5:5,20:0 --seqlen 20 "
        "--seqlen-k 130 --heads 6 --kv-heads 2 --causal",
        "--garbage --append 7 --page-size 16 --batch 2 --lengths 9:70,1:60 --seqlen 9 --seqlen-k "
        "70"}}};
  const auto found = all.find(option);
  return found == all.end() ? std::vector<std::string>{} : found->second;
}

/// The same for a step: where it has no bf16, of the type that it has; if not every page size will do, of the
/// smallest; and if V is a part of K, not of interleaved Q, K and V.
std::vector<std::string> runs_with(const Description &step, const std::string &option) {
  std::vector<std::string> runs = runs_with(option);
  for (std::string &run : runs) {
    if (const std::size_t at = run.find("bf16"); at != std::string::npos)
      run.replace(at, 4, step.types.back());
    const std::string odd = "--page-size 7";
    if (const std::size_t at = run.find(odd); at != std::string::npos && step.page_rows > 1)
      run.replace(at, odd.size(), "--page-size " + std::to_string(step.page_rows));
  }
  const auto has = [&](const std::string &head_dim) {
    return std::count(step.head_dims.begin(), step.head_dims.end(), head_dim) > 0;
  };
  std::erase_if(runs, [&](const std::string &run) {
    const std::vector<std::string> all = words(run);
    for (std::size_t i = 0; i + 1 < all.size(); i++)
      if (all[i].starts_with("--head-dim") && !has(all[i + 1])) return true;
    return step.takes_option("--latent") && contains(run, "interleaved");
  });
  return runs;
}

/// Whether a step takes all of the options in this text.
bool takes_all(const Description &step, const std::string &text) {
  static const std::set<std::string> plain = {"--batch", "--heads", "--seqlen", "--head-dim",
                                              "--inputs"};
  for (const std::string &word : words(text))
    if (word.starts_with("--") && !plain.contains(word) && !step.takes_option(word)) return false;
  return true;
}

/// Whether an option changes the scores alone, and no address: one sequence shows what it does, and one head unless
/// each head has a number of its own, or is rotated.
bool of_scores(const std::string &option) {
  static const std::set<std::string> all = {
      "--alibi", "--causal",  "--rope", "--rope-dim", "--scale",      "--sink-logits",
      "--sinks", "--softcap", "--type", "--window",   "--window-size"};
  return all.contains(option);
}

std::vector<Run> grid(const Description &step, bool gpu, bool prefixed) {
  const bool any_length = step.tile == 1;
  const int tile = any_length ? 65 : step.tile;  // a tile's rows, and for all that we know one more
  // From step 36 on a block takes several tiles of Q if there are more than a GPU has multiprocessors.
  const bool persistent = step.step >= "36" && step.needs == "sm_90a";
  // A tile has the rows of two blocks: on the CPU half as many tiles keep as many blocks busy.
  const bool large = !gpu && tile > 128;
  std::string taken;  // at once
  for (const std::string option : {"--type", "--causal"})
    if (takes_all(step, option)) taken += " " + runs_with(step, option).at(0);
  std::vector<Run> runs;
  if (prefixed) {
    runs = {{tile, 1, 1, step.head_dims.front(), "normal", 1},
            {2 * tile, 2, 3, step.head_dims.front(), "normal", 2},
            {3 * tile, 1, 2, step.head_dims.back(), "normal", 3}};
    if (persistent) runs.push_back({2 * tile, 5, 33, step.head_dims.front(), "normal", 4, taken});
    return runs;
  }
  for (const std::string &head_dim : step.head_dims) {
    // Of many head dims, those between the ends see less.
    const bool at_end = head_dim == step.head_dims.front() || head_dim == step.head_dims.back();
    for (const std::string &inputs : step.inputs)
      if (inputs != "huge" && at_end)  // of which below
        runs.push_back({2 * tile, 1, 1, head_dim, inputs, 1});
    for (const int tiles : {1, 3}) runs.push_back({tiles * tile, 1, 1, head_dim, "normal", 2});
    runs.push_back({tile, 2, 3, head_dim, "normal", 3});
    if (any_length && at_end)  // at the ends of what may be tiles, and beside them
      for (const int seqlen : {1, 2, 15, 16, 17, 63, 64, 127, 128, 129, 191, 193})
        runs.push_back({seqlen, 1, 1, head_dim, "normal", 2});
    // One row of a tile does not exist: what its zeros give may not be finite.
    if (any_length && at_end) runs.push_back({127, 1, 1, head_dim, "rising", 2});
    if (gpu) runs.push_back({16 * tile, 2, 3, head_dim, "normal", 4});
    if (step.takes_option("--window"))  // that ends within a tile of each head dim
      runs.push_back({300, 1, 1, head_dim, "normal", 1, "--window 200"});
    if (step.takes_option("--splits"))  // more blocks than there are multiprocessors
      runs.push_back({1, gpu ? 75 : 17, 2, head_dim, "normal", 1, "--seqlen-k 140 --splits 1"});
    for (const std::string &option : step.takes) {
      const std::vector<std::string> with = runs_with(step, option);
      CHECK_MESSAGE(!with.empty(), step.step, " takes ", option, ", which nothing here tests");
      const bool by_head = option == "--alibi" || option == "--sink-logits" || option == "--rope",
                 one_head = !gpu && any_length && of_scores(option) && !by_head;
      // On the CPU two sequences in those runs alone that show an address of the second: the first and the last, and
      // of the others those of one query, for which some steps have another kernel.
      const auto two_sequences = [&](const std::string &options) {
        return gpu || (!large && !of_scores(option) && head_dim == step.head_dims.front() &&
                       (options == with.front() || options == with.back() ||
                        contains(options, "--seqlen 1 ")));
      };
      // All of them at the first head dim, one at each of the others.
      for (const std::string &options : with)
        if (takes_all(step, options) && !(step.gradients && options == "--scale 1000000") &&
            (head_dim == step.head_dims.front() || options == with.front()))
          runs.push_back({any_length ? 150 : 3 * tile, two_sequences(options) ? 2 : 1,
                          one_head ? 1 : 2, head_dim, "normal", 1, options});
    }
  }
  // More row tiles than decode.h has counters: thousands of blocks, so only in the steps that include it.
  if (step.step.starts_with("50-") || step.step.starts_with("57-"))
    runs.push_back({1, 65, 64, step.head_dims.front(), "normal", 1, "--seqlen-k 70 --splits 2"});
  for (const std::uint64_t seed : {5, 6, 7})  // orders of threads
    runs.push_back({2 * tile, 1, 2, step.head_dims.front(), "normal", seed});
  if (step.needs != "sm_90a") return runs;
  // Hopper: rings that come round, at either stage, and landings in other orders.
  for (const std::uint64_t seed : {8, 9})
    runs.push_back({(large ? 3 : 5) * tile, 1, 1, step.head_dims.front(), "normal", seed});
  if (persistent)
    for (const std::string &head_dim : step.head_dims) {
      // Blocks with one tile or two, with one tile of keys and with three.
      if (gpu) {
        runs.push_back({tile, 3, 7, head_dim, "normal", 10});
        runs.push_back({3 * tile, 2, 3, head_dim, "rising", 11, taken});
        runs.push_back({15 * tile, 3, 11, head_dim, "normal", 12, taken});
      } else {
        runs.push_back({tile, large ? 1 : 2, 3, head_dim, "normal", 10, " --sms 4"});
        runs.push_back({3 * tile, large ? 1 : 2, 1, head_dim, "rising", 11, taken + " --sms 4"});
      }
    }
  return runs;
}

/// Shapes that nobody chose, of whole tiles; on the CPU none that takes long.
std::vector<Run> drawn(const Description &step, bool gpu, std::uint64_t &state) {
  const auto one_to = [&](std::size_t n) { return 1 + static_cast<int>(next_random(state) % n); };
  std::vector<Run> runs;
  for (int i = 0; i < 3; i++) {
    const int most_tiles = step.tile > 64 ? 3 : 5;
    int tiles, batch, heads;
    do {
      tiles = one_to(most_tiles), batch = one_to(3), heads = one_to(5);
    } while (!gpu && tiles * tiles * batch * heads > 10);
    std::string beyond;
    for (const std::string &option : step.takes)
      if (one_to(3) == 1) beyond += runs_with(step, option).at(0) + " ";
    runs.push_back({tiles * step.tile, batch, heads,
                    step.head_dims[one_to(step.head_dims.size()) - 1], "normal", next_random(state),
                    beyond});
  }
  return runs;
}

std::string options_of(const Run &run) {
  return "--batch " + std::to_string(run.batch) + " --heads " + std::to_string(run.heads) +
         " --seqlen " + std::to_string(run.seqlen) + " --head-dim " + run.head_dim + " --inputs " +
         run.inputs + " --seed " + std::to_string(run.seed) + " " + run.beyond_plain;
}

bool is_gpu() {
  const std::string device = environment("STEPS_DEVICE", "cpu");
  REQUIRE((device == "cpu" || device == "gpu"));
  return device == "gpu";
}

/// Whether the GPU that the tests were to run on is missing; says so.
bool gpu_is_missing() {
  const Finished first = run_command("./step-" + step_names().at(0).substr(0, 2) +
                                     " --device gpu --check-only --batch 1 --heads 1 --seqlen 128");
  const bool missing = contains(first.err, "no GPU");
  if (missing) std::puts("SKIP: no GPU");
  return missing;
}

/// Whether a run ended because the GPU is too old for the step or too small for the shape; says so. (Of
/// what ARCH is too old for there is a program without a part for GPUs.)
bool beyond_this_gpu(const Finished &finished) {
  const bool beyond = contains(finished.err, " GPU, and this one is sm_") ||
                      contains(finished.err, "no GPU (built for the emulator alone") ||
                      contains(finished.err, "of shared memory per block") ||
                      contains(finished.err, ": this machine has ") ||
                      contains(finished.err, "out of memory");
  if (beyond) std::printf("SKIP: %s", finished.err.c_str());
  return beyond;
}

}  // namespace

TEST_SUITE_BEGIN("steps");

TEST_CASE("every step is right, in every shape, on all inputs") {
  const bool gpu = is_gpu();
  if (gpu && gpu_is_missing()) return;
  const std::string prefix = environment("STEPS_PREFIX", "");
  std::uint64_t state = tests_seed();
  REQUIRE(!step_names().empty());
  const std::string only = environment("STEPS_ONLY", "");
  std::vector<Job> jobs;
  for (const std::string &name : step_names()) {
    if (!name.starts_with(only)) continue;
    const std::string program = "./step-" + name.substr(0, 2);
    const Description step = describe(program);
    std::vector<std::string> runs;
    for (const Run &run : grid(step, gpu, !prefix.empty())) runs.push_back(options_of(run));
    if (step.tile == 1)
      for (int i = 0; i < (!prefix.empty() ? 3 : step.takes_option("--gpus") ? 10 : 20); i++)
        runs.push_back(draw_problem(step, gpu ? 1000 : 200, gpu ? 36 : 4, state));
    else if (prefix.empty())
      for (const Run &run : drawn(step, gpu, state)) runs.push_back(options_of(run));
    draw(runs, 2);
    for (const std::string &options : runs) {
      const std::string line = prefix + (prefix.empty() ? "" : " ") + program + " " + options +
                               " --check-only --device " + (gpu ? "gpu" : "cpu");
      const auto work = [line, gpu]() -> std::string {
        const Finished finished = run_command(line);
        if (gpu && beyond_this_gpu(finished)) return "";
        return finished.status == 0 && contains(finished.out, ": passed\n")
                   ? ""
                   : "exit status " + std::to_string(finished.status) + "\n" + finished.out +
                         finished.err;
      };
      if (gpu)
        CHECK_MESSAGE(work() == "", line);
      else
        jobs.push_back({line, work, ""});
    }
  }
  do_all(jobs);
}

TEST_CASE(
    "each head dim of a step that is not for Hopper alone is right where a block has 99 KB of "
    "shared memory, or "
    "163") {
  if (is_gpu()) return;  // a GPU has what it has
  const std::string only = environment("STEPS_ONLY", "");
  std::vector<Job> jobs;
  for (const std::string &name : step_names()) {
    if (!name.starts_with(only)) continue;
    const std::string program = "./step-" + name.substr(0, 2);
    const Description step = describe(program);
    if (step.needs.starts_with("sm_90")) continue;  // has 227 KB
    std::vector<std::string> problems = {"--batch 1 --heads 1 --seqlen " +
                                         std::to_string(step.tile == 1 ? 130 : 2 * step.tile)};
    if (step.takes_option(
            "--page-size")) {  // of more row tiles than the emulator runs blocks, and of few
      problems.push_back("--batch 17 --heads 1 --seqlen 1 --seqlen-k 140");
      problems.push_back(
          "--batch 1 --heads 4 --kv-heads 2 --seqlen 2 --seqlen-k 300 --page-size 24");
    }
    for (const std::string &head_dim : step.head_dims)
      for (const std::string &problem : problems)
        for (const std::string kb : {"99", "163"}) {
          if (kb == "99" && (name.starts_with("64") || name.starts_with("65") ||
                             name.starts_with("69") || name.starts_with("74")))
            continue;  // have tiles for 163; 63 runs in 99
          const std::string line = "EMULATED_SHARED_KB=" + kb + " " + program +
                                   " --device cpu --check-only " + problem + " --head-dim " +
                                   head_dim;
          const auto work = [line]() -> std::string {
            const Finished finished = run_command(line);
            return finished.status == 0 ? "" : finished.out + finished.err;
          };
          jobs.push_back({line, work, ""});
        }
  }
  draw(jobs, 10);
  do_all(jobs);
}

TEST_CASE("offsets beyond 2^31 elements of Q, K, V and O, and beyond 2^32 of S") {
  if (!is_gpu() || environment("STEPS_PREFIX", "") != "")
    return;  // no other device is large enough
  if (gpu_is_missing()) return;
  for (const std::string &name : step_names()) {
    if (!name.starts_with(environment("STEPS_ONLY", ""))) continue;
    // 65,535 heads of 768 x 64 elements, half as many of 128, or 8192 of more, and of two GPUs each as many; of step
    // 00, 17 heads of 16,384 x 16,384 scores.
    const std::string rows = name.starts_with("7") ? "1536" : "768";
    const std::string program = "./step-" + name.substr(0, 2);
    const std::vector<std::string> head_dims = describe(program).head_dims;
    const auto has = [&](const std::string &head_dim) {
      return std::count(head_dims.begin(), head_dims.end(), head_dim) > 0;
    };
    const std::string shape =
        name.starts_with("00") ? "--heads 17 --seqlen 16384 --head-dim 64"
        : has("64")            ? "--heads 65535 --seqlen " + rows + " --head-dim 64"
        : has("128")           ? "--heads 32768 --seqlen " + rows + " --head-dim 128"
                     : "--heads 8192 --kv-heads 8192 --seqlen 768 --head-dim " + head_dims.front();
    const std::string line = program + " --device gpu --check-only --batch 1 " + shape;
    CAPTURE(line);
    const Finished finished = run_command(line);
    if (beyond_this_gpu(finished)) continue;
    CAPTURE(finished.out);
    CAPTURE(finished.err);
    CHECK(finished.status == 0);
  }
}

TEST_CASE("one FMA cannot bring scores of 10^10 under their maximum; a subtraction can") {
  // From step 10 on a power is 2^(s scale - m) with m rounded: beyond 2^24 the two differ by more
  // than the score's own last place. Chapter 10 says so; a step that learns it moves this border.
  std::vector<std::string> steps = step_names();
  std::erase_if(steps, [](const std::string &step) {  // a backward pass refuses them
    return describe("./step-" + step.substr(0, 2)).inputs.back() != "huge";
  });
  draw(steps, 8);
  for (const std::string &step : steps) {
    const std::string line =
        "./step-" + step.substr(0, 2) +
        " --device cpu --check-only --batch 1 --heads 1 --seqlen 256 --inputs huge";
    CAPTURE(line);
    const Finished finished = run_command(line);
    CHECK(finished.status == (step < "10" ? 0 : 1));
    CHECK(contains(finished.out, step < "10" ? ": passed\n" : ": WRONG\n"));
    CHECK(finished.err == "");
  }
}

TEST_CASE("a backward pass has the same bits in every order of threads, or says that it has not") {
  if (is_gpu()) return;
  std::vector<Job> jobs;
  for (const std::string &name : step_names()) {
    if (!name.starts_with(environment("STEPS_ONLY", ""))) continue;
    const std::string program = "./step-" + name.substr(0, 2);
    const Description step = describe(program);
    if (!step.gradients) continue;
    // Three tiles of keys: two terms have one sum in either order. Where turns are counted, five: a turn that comes one
    // early is seldom taken by the third.
    const std::string line = program + " --device cpu --check-only --batch 1 --heads 1 --seqlen " +
                             std::to_string(step.tile == 1 ? 600 : 3 * step.tile) + " --repeat 6";
    const std::string report = step.same_bits ? "bits     the same in all 6 runs after the first\n"
                                              : " of 6 runs: this step adds in any order\n";
    jobs.push_back({line,
                    [line, report]() -> std::string {
                      const Finished finished = run_command(line);
                      const bool right = finished.status == 0 && contains(finished.out, report);
                      return right ? "" : finished.out + finished.err;
                    },
                    ""});
  }
  draw(jobs, 3);
  do_all(jobs);
}

TEST_CASE("a step's kernel in a header is the one in its step") {
  struct Copied {
    std::string step, file, begin, end;  // the first and the last words that both have
  };
  const std::vector<Copied> headers = {
      {"81-score-gradients", "steps/81-score-gradients/kernel.h", "const auto &[keys,",
       "store_keys(map_dK"},
      {"86-new-keys", "common/kernel/new_keys.h", "/// K or V: the cache,",
       "store(to_V(0, col), new_V); } }"},
      {"86-new-keys", "steps/86-new-keys/kernel.h", "__global__ void",
       "warpgroup, warp, lane); } }"},
      {"90-around-the-loop", "steps/90-around-the-loop/launch.h", "constexpr int around_threads",
       "row / Br<d>, 1, 1}(0, 0) = 0; }"},
      {"90-around-the-loop", "steps/90-around-the-loop/launch.h", "/// Multiplies dQ's sums",
       "rounded[k]); }"},
      {"90-around-the-loop", "steps/90-around-the-loop/launch.h",
       "const int most =", "- 1) / heads_at_once);"},
  };
  for (const Copied &header : headers) {
    CAPTURE(header.file);
    const auto part_of = [&](const std::string &file) {
      const std::string text = join(words(read_text(file)), " ");  // whatever the lines' ends are
      const std::size_t begin = text.find(header.begin), end = text.find(header.end, begin);
      REQUIRE(begin != text.npos);
      REQUIRE(end != text.npos);
      return text.substr(begin, end + header.end.size() - begin);
    };
    CHECK(part_of(header.file) == part_of("steps/" + header.step + "/attention.cu"));
  }
}

TEST_CASE("the header of every step has its form") {
  for (const std::string &step : step_names()) {
    CAPTURE(step);
    const std::vector<std::string> lines = lines_of(read_text("steps/" + step + "/attention.cu"));
    REQUIRE(!lines.empty());
    CHECK(lines[0].starts_with("// Step " + step.substr(0, 2) + ": "));
    // The header's words, in this order, before the first line of code.
    std::vector<std::string> words = {"// Needs       ", "// Before      ", "// Change      ",
                                      "// Prediction  "};
    for (const std::string &line : lines) {
      if (!line.starts_with("//")) break;
      if (!words.empty() && line.starts_with(words[0])) words.erase(words.begin());
    }
    CHECK_MESSAGE(words.empty(), "the header lacks ", words.empty() ? "" : words[0]);
  }
}

TEST_SUITE_END();
