// SPDX-License-Identifier: MIT
#include "common/program/ladder.h"

#include <doctest/doctest.h>

#include "common/testing/process.h"

namespace {

const Ladder kLadder = {
    {"00-first", "sm_75", "", ""},
    {"01-second", "sm_75", "", ""},
    {"05-tensor-cores", "sm_80", "cp.async, mma.m16n8k16", ""},
    {"20-causal", "sm_80", "cp.async", "--causal"},
    {"21-ragged", "sm_80", "cp.async", "--causal --lengths"},
    {"22-dead-end", "sm_80", "cp.async", ""},
    {"23-strides", "sm_80", "cp.async", "--causal --kv-heads"},
    {"30-tma", "sm_90a", "TMA, mbarrier", "--seqlen-k"},
};

}  // namespace

TEST_CASE("ladder: it names every folder of steps/, as its header describes it") {
  std::vector<std::string> names;
  for (const LadderStep &step : ladder()) {
    CAPTURE(step.name);
    names.push_back(step.name);
    CHECK(&header_of(step.name + ":variant") == &header_of(step.name));
    std::string needs = "// Needs       " + step.needs;
    if (!step.why.empty()) needs += ": " + step.why;
    bool found = false;
    for (const std::string &line : lines_of(read_text("steps/" + step.name + "/attention.cu")))
      found = found || line == needs;
    CHECK_MESSAGE(found, "its header should have the line '", needs, "'");
  }
  CHECK(names == step_names());
}

TEST_CASE("ladder: a list of options is compared word by word") {
  CHECK(takes("--causal --kv-heads", "--causal"));
  CHECK(takes("--causal --kv-heads", "--kv-heads"));
  CHECK(!takes("--causal --kv-heads", "--kv"));
  CHECK(!takes("--seqlen-k", "--seqlen"));
  CHECK(!takes("", "--causal"));
}

TEST_CASE("ladder: the steps that take an option") {
  CHECK(who_takes(kLadder, "--causal") == "steps 20, 21 and 23 accept it");
  CHECK(who_takes(kLadder, "--lengths") == "step 21 accepts it");
  CHECK(who_takes(kLadder, "--page-size") == "no step accepts it yet");
  CHECK(who_takes({}, "--causal") == "no step accepts it yet");
}

TEST_CASE("ladder: code runs on its GPU and on newer ones, an 'a' on that one alone") {
  for (const int capability : {75, 80, 86, 89, 90, 100, 120}) {
    CAPTURE(capability);
    CHECK(runs_on("sm_75", capability));
    CHECK(runs_on("sm_80", capability) == (capability >= 80));
    CHECK(runs_on("sm_90", capability) == (capability >= 90));
    CHECK(runs_on("sm_90a", capability) == (capability == 90));
    CHECK(runs_on("sm_100a", capability) == (capability == 100));
  }
}

TEST_CASE("ladder: a GPU that does not run a step is told what it is and what it does run") {
  CHECK(why_not_on_gpu(kLadder, "05-tensor-cores", "sm_80", 75) ==
        "step 05 needs an sm_80 GPU (cp.async, mma.m16n8k16), and this one is sm_75, which runs "
        "steps 00 and 01; run it on the emulator with --device cpu");
  CHECK(why_not_on_gpu(kLadder, "05-tensor-cores:padded", "sm_80", 75) ==
        why_not_on_gpu(kLadder, "05-tensor-cores", "sm_80", 75));
  CHECK(why_not_on_gpu(kLadder, "30-tma", "sm_90a", 100) ==
        "step 30 needs an sm_90a GPU (TMA, mbarrier), and this one is sm_100, which runs steps 00 "
        "to 23; run it on the emulator with --device cpu");
  CHECK(why_not_on_gpu(kLadder, "00-first", "sm_75", 70) ==
        "step 00 needs an sm_75 GPU, and this one is sm_70; run it on the emulator with --device "
        "cpu");
  CHECK(why_not_on_gpu(kLadder, "05-tensor-cores", "sm_80", 80) == "");
  CHECK(why_not_on_gpu(kLadder, "30-tma", "sm_90a", 90) == "");
}

TEST_CASE("ladder: what a GPU that is not Hopper's is told of Part IV") {
  // Which steps of the later parts it runs changes with every step that is added.
  const std::string end = "; run it on the emulator with --device cpu";
  const std::string of_30 = why_not_on_gpu(ladder(), "30-tma", "sm_90", 80);
  CHECK(
      of_30.starts_with("step 30 needs an sm_90 GPU (TMA), and this one is sm_80, which runs steps "
                        "00 to 29"));
  CHECK(of_30.ends_with(end));
  for (const LadderStep &step : ladder()) {
    if (step.name < "31" || step.name > "50") continue;
    CAPTURE(step.name);
    CHECK(step.needs == "sm_90a");
    const std::string needs = "step " + step.name.substr(0, 2) + " needs an sm_90a GPU (" +
                              step.why + "), and this one is ";
    for (const std::string gpu : {"75", "89", "100", "120"}) {
      const std::string told = why_not_on_gpu(ladder(), step.name, step.needs, std::stoi(gpu));
      const std::string most = gpu == "75" ? "04" + end : gpu == "89" ? "29" : "30";
      CHECK(told.starts_with(needs + "sm_" + gpu + ", which runs steps 00 to " + most));
      CHECK(told.ends_with(end));
    }
    CHECK(why_not_on_gpu(ladder(), step.name, step.needs, 90) == "");
  }
}
