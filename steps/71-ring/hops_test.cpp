// SPDX-License-Identifier: MIT
// What computes and what travels at the same time, as the emulator's trace of several GPUs has it. plots/gpu_hops.py
// draws these traces.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/testing/copies.h"

namespace {

const std::string kFolder = "build/hops/";

struct Slice {
  std::uint64_t begin, end;
  int peer;
  std::string line;
};
using Hops = std::map<std::pair<int, std::string>, std::vector<Slice>>;  // by GPU, and what it is

/// Runs a step as `make counters` does; the text of the file that it appends to.
std::string traced(const std::string &program, const std::string &file,
                   const std::string &options = "") {
  const Finished finished = run_command(
      program + " --device cpu --gpus 4 --heads 1 --head-dim 128 --streams-csv " + file + options);
  CHECK_MESSAGE(finished.status == 0, finished.err);
  return read_text(file);
}

Hops parse(const std::string &csv) {
  Hops hops;
  for (const std::string &line : lines_of(csv)) {
    const Strings fields = csv_fields(line);
    REQUIRE(fields.size() == 15);
    if (fields[0] == "step") continue;
    hops[{std::stoi(fields[7]), fields[9]}].push_back({std::stoull(fields[13]),
                                                       std::stoull(fields[14]),
                                                       std::stoi("0" + fields[11]), fields[10]});
  }
  return hops;
}

/// The kernels of a GPU that compute, and do not merge.
std::vector<Slice> attention_of(const Hops &hops, int gpu) {
  std::vector<Slice> kernels = hops.at({gpu, "kernel"});
  std::erase_if(kernels, [](const Slice &slice) { return slice.line.starts_with("merge"); });
  return kernels;
}

/// How many messages travel while their receiver computes.
int overlapping(const Hops &hops) {
  int count = 0;
  for (int gpu = 0; gpu < 4; gpu++)
    for (const Slice &message : hops.at({gpu, "ncclRecv"}))
      for (const Slice &kernel : attention_of(hops, gpu))
        count += message.begin < kernel.end && kernel.begin < message.end;
  return count;
}

}  // namespace

TEST_SUITE_BEGIN("planted");

TEST_CASE("the traces that chapters 71 and 72 draw are those of the steps, with any seed") {
  std::filesystem::create_directories(kFolder);
  for (const std::string step : {"71-ring", "72-zigzag"}) {
    const std::string file = kFolder + step + ".csv";
    std::filesystem::remove(file);
    std::string csv;
    for (const std::string options : {" --seqlen 2048", " --seqlen 2048 --causal"})
      csv = traced("./step-" + step.substr(0, 2), file, options + " --seed 2");
    CHECK_MESSAGE(csv == read_text("plots/results/trace-" + step + ".csv"),
                  "plots/results/trace-" << step << ".csv is stale: make counters writes it");
  }
}

TEST_CASE("a hop computes with what has arrived, while K and V of the next hop travel") {
  std::filesystem::create_directories(kFolder);
  const std::string file = kFolder + "hops.csv";
  std::filesystem::remove(file);
  const Hops hops = parse(traced("./step-71", file, " --seqlen 1024"));
  for (int gpu = 0; gpu < 4; gpu++) {
    const std::vector<Slice> kernels = attention_of(hops, gpu);
    const std::vector<Slice> &received = hops.at({gpu, "ncclRecv"}),
                             &sent = hops.at({gpu, "ncclSend"});
    REQUIRE(kernels.size() == 4);
    REQUIRE(received.size() == 6);  // K and V for each hop but the first
    for (std::size_t hop = 1; hop < 4; hop++)
      for (const std::size_t message : {2 * hop - 2, 2 * hop - 1}) {
        CHECK(received[message].end <= kernels[hop].begin);
        CHECK(received[message].begin < kernels[hop - 1].end);
        CHECK(received[message].peer == (gpu + 3) % 4);
        CHECK(sent[message].peer == (gpu + 1) % 4);
        // Its buffer is that of the hop before the last.
        if (hop > 2) CHECK(received[message].begin >= kernels[hop - 2].end);
      }
  }
  CHECK(overlapping(hops) > 0);
}

TEST_CASE(
    "if messages are on the stream of the kernels, none travels while its receiver computes") {
  std::filesystem::create_directories(kFolder);
  std::string source = read_text("steps/71-ring/attention.cu");
  for (const std::string gpu : {"from", "to"}) {
    const std::string own_stream = "comms[" + gpu + "], traffics[" + gpu + "].stream";
    const std::size_t at = source.find(own_stream);
    REQUIRE(at != std::string::npos);
    source.replace(at, own_stream.size(),
                   "comms[" + gpu + "], static_cast<cudaStream_t>(p.parts[" + gpu + "].stream)");
  }
  std::vector<Copy> copies = {{"71-ring", "one-stream", source}};
  compile_copies(kFolder, copies);
  REQUIRE_MESSAGE(!copies[0].command.empty(), copies[0].complaint);
  const std::string file = kFolder + "one-stream.csv";
  std::filesystem::remove(file);
  CHECK(overlapping(parse(traced(copies[0].command, file, " --seqlen 1024"))) == 0);
}
