// SPDX-License-Identifier: MIT
#include "common/testing/instances.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "common/testing/process.h"

namespace {

// As a step has it, and a program that says which kernels are started and which refused.
const char kBefore[] = R"(
#include <cstdio>
#include <initializer_list>
#include <type_traits>
struct ShapeError { ShapeError(const char *) {} };
struct half {};
struct bf16 {};
struct Problem { int head_dim; };
)";
const char kStep[] = R"(
template <class T, int d, bool softcap, bool alibi, bool sinks>
void run(const Problem &) {
  std::printf(" %s%d:%d%d%d", std::is_same_v<T, half> ? "h" : "b", d, softcap, alibi, sinks);
}

template <class T, int d>
void run(const Problem &p) {
  run<T, d, false, false, false>(p), run<T, d, false, false, true>(p);
  run<T, d, false, true, true>(p), run<T, d, true, false, true>(p);
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}
)";
const char kAfter[] = R"(
template <class F> void tried(F f) { try { f(); } catch (const ShapeError &) { std::printf(" -"); } }
template <class T, int d> void all(const Problem &p) {
  tried([&] { run<T, d, false, false, false>(p); }), tried([&] { run<T, d, false, false, true>(p); });
  tried([&] { run<T, d, false, true, true>(p); }), tried([&] { run<T, d, true, false, true>(p); });
}
int main() {
  for (const int d : {64, 128}) {
    tried([&] { d == 64 ? all<half, 64>({d}) : all<half, 128>({d}); });
    tried([&] { run<bf16>({d}); });
  }
}
)";

}  // namespace

TEST_SUITE_BEGIN("instances");

TEST_CASE("a copy has the kernels of its runs, and refuses every other run") {
  const std::string folder = "build/mutants-tested";
  std::filesystem::create_directories(folder);
  const auto started = [&](const std::vector<std::string> &runs) {
    const std::string program = folder + "/instances", made = with_instances_of(runs, kStep);
    CHECK(lines_of(made).size() == lines_of(kStep).size());
    std::ofstream(program + ".cpp") << kBefore << made << kAfter;
    const Finished finished = run_command(environment("CXX", "g++") + " -w -std=c++20 " + program +
                                          ".cpp -o " + program + " && " + program);
    REQUIRE_MESSAGE(finished.status == 0, finished.err);
    return finished.out;
  };
  CHECK(started({"--head-dim 64 --seqlen 9"}) == " h64:000 - - - - - - - - -");
  CHECK(started({"--head-dim 64 --head-dim 128 --softcap 3"}) ==
        " - - - - - h128:000 h128:001 - h128:101 -");
  CHECK(started({"--head-dim 64 --alibi", "--head-dim 120 --type bf16", "--head-dim 40"}) ==
        " h64:000 h64:001 h64:011 - - - - - - b128:000 -");
}

TEST_SUITE_END();
