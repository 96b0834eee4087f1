// SPDX-License-Identifier: MIT
#include "common/testing/mutants.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "common/testing/process.h"

namespace {

// One statement a line, and what kinds of places changes may have.
const std::string kSource = R"(
constexpr int four = 4;
template <int d>
int sum(int n) {
  // The loop.
  int total = 0, product{n * d};
  for (int i = 0; i < n; i++) {
    if (i % 2 == 0 && n > 0) total += i;
    else total -= 1;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) total += product;
  note("a; b", __LINE__);
  const int twice = std::max<int>(total, 1) * 2, more = four;
  return twice + more;
}
)";

const char *const kChanges = R"(
bug a condition
- i % 2 == 0
+ i % 2 == 1
bug a statement
- total -= 1
+ total -= 2
bug the end of a loop
- i < n;
+ i < n - 1;
bug the end of a loop and what it steps by
- i < n; i++
+ i < n; i += 2
bug an initial value
- total = 0
+ total = 5
bug a value in braces
- n * d}
+ n}
bug a type
- max<int>
+ max<long>
bug code before a comment
- // The loop.
+ n++;  //
bug the rest in a comment
- note(
+ // note(
bug a loop that is gone
- for (int i = 0; i < 2; i++) total += product;
+
bug what is returned
- twice + more;
+ twice - more;
bug two places
- total += i;
+ total += 2 * i;
- 1) * 2
+ 1) * 3
bug a constant
- four = 4
+ four = 5
)";

}  // namespace

TEST_SUITE_BEGIN("edits");

TEST_CASE(
    "one program makes each change as a copy of its own does, and its lines keep their numbers") {
  const std::vector<Change> bugs = parse_changes(kChanges, "changes");
  Changes changes;
  for (const Change &bug : bugs) changes.push_back(locate(kSource, bug.edits));
  const Woven woven = weave(kSource, changes);
  std::string
      all =
          "#include <algorithm>\n#include <cstdio>\nint mutant, line;\n"
          "void note(const char *, int at) { line = at; }\n"
          "void print(int sum) { std::printf(\"%d %d,\", sum, line), line = 0; }\n#line 1\n" +
          woven.source,
      main = "int main() {\n";
  for (std::size_t i = 0; i < bugs.size(); i++) {
    const std::string copy = "copy_" + std::to_string(i);
    all += "namespace " + copy + " {\n#line 1\n" + edited(kSource, bugs[i].edits) + "}\n";
    if (woven.lines[i].first)
      main += "mutant = -1; print(sum<3>(4)); mutant = " + std::to_string(i) +
              "; print(sum<3>(4)); print(" + copy + "::sum<3>(4)); std::puts(\"\");\n";
  }
  const std::string folder = "build/mutants-tested", program = folder + "/program";
  std::filesystem::create_directories(folder);
  std::ofstream(program + ".cpp") << all << main << "}\n";
  const Finished finished = run_command(environment("CXX", "g++") + " -w -std=c++20 " + program +
                                        ".cpp -o " + program + " && " + program);
  REQUIRE_MESSAGE(finished.status == 0, finished.err);
  const std::vector<std::string> lines = lines_of(finished.out);
  REQUIRE(lines.size() == bugs.size() - 1);  // but for the constant
  CHECK(woven.lines.back() == std::pair<std::size_t, std::size_t>{0, 0});
  for (std::size_t i = 0; i < lines.size(); i++) {
    CAPTURE(bugs[i].fields[0]);
    const std::size_t first = lines[i].find(','), second = lines[i].find(',', first + 1);
    const std::string as_it_is = lines[i].substr(0, first),
                      changed = lines[i].substr(first + 1, second - first - 1);
    CHECK(as_it_is == "52 13");
    CHECK(changed + "," == lines[i].substr(second + 1));
    if (bugs[i].fields[0] != "a type") CHECK(changed != as_it_is);
  }
}

TEST_SUITE_END();
