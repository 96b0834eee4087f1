// SPDX-License-Identifier: MIT
// The turns of step 34 cost time and change no result: what they forbid, the emulator's trace tells. It is
// the one that plots/ping_pong.py draws.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "common/testing/copies.h"

namespace {

const std::string kFolder = "build/turns/";

struct Event {
  struct Other {
    std::size_t warpgroup, number;
  };
  std::string what;
  std::vector<Other> after;
};
using Trace = std::vector<std::vector<Event>>;  // by warpgroup

/// Runs a step with the shape that `make counters` traces; the text of the file that it appends to.
std::string traced(const std::string &program, const std::string &file, int seed = 1) {
  const Finished finished =
      run_command(program + " --device cpu --heads 1 --seqlen 768 --head-dim 128 --seed " +
                  std::to_string(seed) + " --events-csv " + file);
  CHECK_MESSAGE(finished.status == 0, finished.err);
  return read_text(file);
}

Trace parse(const std::string &csv) {
  Trace trace;
  for (const std::string &line : lines_of(csv)) {
    const Strings fields = csv_fields(line);
    REQUIRE(fields.size() == 14);
    if (fields[0] == "step") continue;
    const std::size_t warpgroup = std::stoul(fields[7]);
    trace.resize(std::max(trace.size(), warpgroup + 1));
    Event event{fields[9], {}};
    for (const std::string &other : words(fields[13]))
      event.after.push_back({std::stoul(other), std::stoul(other.substr(other.find(':') + 1))});
    trace[warpgroup].push_back(event);
  }
  return trace;
}

/// A product of a warpgroup: its first wgmma, and the wait for it, SIZE_MAX if there is none. (Here a wait
/// is for all.)
struct Product {
  std::size_t warpgroup, start, wait;
};

std::vector<Product> products(const Trace &trace, std::size_t warpgroup) {
  std::vector<Product> found;
  bool under_way = false;
  for (std::size_t i = 0; i < trace[warpgroup].size(); i++) {
    const std::string &what = trace[warpgroup][i].what;
    if (what.starts_with("wgmma with") && !under_way) found.push_back({warpgroup, i, SIZE_MAX});
    if (what == "wgmma_wait") {
      REQUIRE(!found.empty());
      found.back().wait = i;
    }
    under_way = what == "wgmma_wait" ? false : under_way || what.starts_with("wgmma with");
  }
  return found;
}

/// Follows an event back: `reached` counts, by warpgroup, the events that are it or come before it.
void reach(const Trace &trace, Event::Other event, std::vector<std::size_t> &reached) {
  while (reached[event.warpgroup] <= event.number)
    for (const Event::Other &other : trace[event.warpgroup][reached[event.warpgroup]++].after)
      reach(trace, other, reached);
}

bool before(const Trace &trace, const Product &a, const Product &b) {
  std::vector<std::size_t> reached(trace.size());
  reach(trace, {b.warpgroup, b.start}, reached);
  return reached[a.warpgroup] > a.wait;
}

/// The pairs of a product of each warpgroup that nothing keeps apart.
int side_by_side(const Trace &trace) {
  int pairs = 0;
  for (const Product &a : products(trace, 0))
    for (const Product &b : products(trace, 1))
      pairs += !before(trace, a, b) && !before(trace, b, a);
  return pairs;
}

}  // namespace

TEST_SUITE_BEGIN("planted");

TEST_CASE("the trace that chapter 34 draws is that of the steps, with any order of threads") {
  std::filesystem::create_directories(kFolder);
  for (const int seed : {1, 2}) {
    const std::string file = kFolder + "events-" + std::to_string(seed) + ".csv";
    std::filesystem::remove(file);
    std::string csv;
    for (const char *program : {"./step-33", "./step-34", "./step-35"})
      csv = traced(program, file, seed);
    CHECK_MESSAGE(csv == read_text("plots/results/events-34.csv"),
                  "plots/results/events-34.csv is stale: make counters writes it");
  }
}

TEST_CASE("a product that nobody waits for has not ended before another") {
  const Event product = {"wgmma with A in registers", {}}, wait = {"wgmma_wait", {}};
  CHECK(side_by_side({{product, wait}, {{product.what, {{0, 1}}}, wait}}) == 0);
  CHECK(side_by_side({{product}, {{product.what, {{0, 0}}}, wait}}) == 1);
}

TEST_CASE("turns keep the products of two warpgroups apart, and without them nothing does") {
  std::filesystem::create_directories(kFolder);
  std::string source = read_text("steps/34-ping-pong/attention.cu");
  for (const std::string call :
       {"named_barrier_sync(first_turn + warpgroup, consumers * 128);",
        "named_barrier_arrive(first_turn + (warpgroup + 1) % consumers, consumers * 128);"}) {
    const std::size_t at = source.find(call);
    REQUIRE(at != std::string::npos);
    source.erase(at, call.size());
  }
  std::vector<Copy> copies = {{"34-ping-pong", "without-turns", source}};
  compile_copies(kFolder, copies);
  REQUIRE_MESSAGE(!copies[0].command.empty(), copies[0].complaint);
  const auto pairs = [](const std::string &program, const std::string &name) {
    const std::string file = kFolder + name + ".csv";
    std::filesystem::remove(file);
    return side_by_side(parse(traced(program, file)));
  };
  CHECK(pairs("./step-34", "34") == 0);
  const int of_33 = pairs("./step-33", "33");
  CHECK(of_33 > 0);
  CHECK(pairs(copies[0].command, "34-without-turns") == of_33);
}

TEST_SUITE_END();
