// SPDX-License-Identifier: MIT
#include "common/program/ranks.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <future>

namespace {

using namespace std::chrono_literals;

/// A file that does not exist, and which no test leaves there.
struct IdFile {
  const std::string path =
      std::filesystem::temp_directory_path() / ("ranks-" + std::to_string(getpid()));
  const std::string failed = path + ".failed";
  IdFile() { std::filesystem::remove(failed); }
  ~IdFile() { std::filesystem::remove(failed); }
};

/// A rank, and what it is to say when it ends.
struct Rank {
  std::promise<std::string> said;
  std::future<std::string> end = said.get_future();
  Ranks ranks;
  explicit Rank(const IdFile &file)
      : ranks(file.path, [this](const std::string &text) { said.set_value(text); }) {}
};

}  // namespace

TEST_CASE("ranks: if one fails, the others end and say why, also one that begins later") {
  const IdFile file;
  Rank waits(file);
  {
    Rank fails(file);
    CHECK(waits.end.wait_for(200ms) == std::future_status::timeout);
  }
  const std::string why = file.failed +
                          ": another rank has failed, so this one ends; remove the file before you "
                          "start the ranks again";
  REQUIRE(waits.end.wait_for(10s) == std::future_status::ready);
  CHECK(waits.end.get() == why);
  Rank late(file);
  REQUIRE(late.end.wait_for(10s) == std::future_status::ready);
  CHECK(late.end.get() == why);
}

TEST_CASE("ranks: if all pass, none ends before its time, and no file is left") {
  const IdFile file;
  Rank waits(file);
  Rank(file).ranks.passed();
  CHECK(waits.end.wait_for(200ms) == std::future_status::timeout);
  waits.ranks.passed();
  CHECK(!std::filesystem::exists(file.failed));
}
