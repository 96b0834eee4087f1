// SPDX-License-Identifier: MIT
#include "common/testing/edits.h"

#include <doctest/doctest.h>

#include <stdexcept>

namespace {

/// What a call throws, or nothing.
template <class Call>
std::string thrown(Call call) {
  try {
    call();
  } catch (const std::runtime_error &error) {
    return error.what();
  }
  return "";
}

std::string result_of(const std::string &source, const std::string &text) {
  return edited(source, parse_changes("bug b\n" + text, "bugs").at(0).edits);
}

}  // namespace

TEST_SUITE_BEGIN("edits");

TEST_CASE("a change is a keyword, fields and edits") {
  const auto changes = parse_changes(
      "# Of step 01.\n\nbug O not rescaled | wrong | --inputs rising\n- alpha *\n+ 1 *\n\nbug "
      "two\n- a\n- "
      " b\n+ c\n- d\n",
      "bugs");
  REQUIRE(changes.size() == 2);
  CHECK(changes[0].keyword == "bug");
  CHECK(changes[0].fields ==
        std::vector<std::string>{"O not rescaled", "wrong", "--inputs rising"});
  CHECK(changes[0].place == "bugs:3");
  CHECK(changes[1].fields == std::vector<std::string>{"two"});
  REQUIRE(changes[1].edits.size() == 2);
  CHECK(changes[1].edits[0].find == "a\n b");
  CHECK(changes[1].edits[0].replace == "c");
  CHECK(changes[1].edits[1].place == "bugs:11");
}

TEST_CASE("edits replace parts of lines, lines, or delete them") {
  const std::string source = "a = b + c;\n  wait();\n  go();\n\nend\n";
  CHECK(result_of(source, "- b + c\n+ c") == "a = c;\n  wait();\n  go();\n\nend\n");
  CHECK(result_of(source, "- wait();\n") == "a = b + c;\n  go();\n\nend\n");
  CHECK(result_of(source, "- wait();\n+\n") == "a = b + c;\n  \n  go();\n\nend\n");
  CHECK(result_of(source, "- wait();\n-   go();\n+ go();\n+   wait();\n") ==
        "a = b + c;\n  go();\n  wait();\n\nend\n");
  CHECK(result_of(source, "- go();\n-\n- end") == "a = b + c;\n  wait();\n");
  CHECK(result_of(source, "-  + c\n") == "a = b;\n  wait();\n  go();\n\nend\n");
  // In any order, each found in the source as it was.
  CHECK(result_of(source, "- end\n+ a\n- a = b\n+ go = b") ==
        "go = b + c;\n  wait();\n  go();\n\na\n");
  CHECK(result_of(source, "- wait();\n\n- go();\n") == "a = b + c;\n\nend\n");
}

TEST_CASE("what cannot be done is told with its file and line") {
  CHECK(thrown([] { result_of("a a", "- a\n+ b"); }) ==
        "bugs:2: the source holds more than one 'a'");
  CHECK(thrown([] { result_of("a", "\n- b\n+ a"); }) == "bugs:3: the source holds no 'b'");
  CHECK(thrown([] { result_of("abc", "- ab\n+ a\n- bc\n+ c"); }) ==
        "bugs:2: two edits overlap at 'bc'");
  CHECK(thrown([] { result_of("a", "+ b\n"); }) == "bugs:2: '+' must follow '-' or '+'");
  CHECK(thrown([] { result_of("a", "-\n+ b\n"); }) == "bugs:2: the text to find is empty");
  CHECK(thrown([] { parse_changes("\n- a\n", "bugs"); }) == "bugs:2: an edit must follow a header");
  CHECK(thrown([] { parse_edits({"a"}, "start", 7); }) ==
        "start:7: a line of an edit must begin with '- ' or '+ '");
}

TEST_SUITE_END();
