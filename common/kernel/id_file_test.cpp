// SPDX-License-Identifier: MIT
#include "common/kernel/id_file.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <thread>
#include <vector>

namespace {

using Bytes = std::array<char, 128>;

/// A path at which there is no file, and none remains.
struct NewPath {
  std::string path = std::filesystem::temp_directory_path() /
                     ("id_file_test-" + std::to_string(getpid()) + "-" + std::to_string(next++));
  ~NewPath() { std::filesystem::remove(path); }
  static inline int next = 0;
};

std::string error_of(const std::string &path, int rank) {
  Bytes bytes{};
  try {
    share_by_file(path, rank, bytes.data(), bytes.size(), std::chrono::milliseconds(50));
  } catch (const std::runtime_error &error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("all ranks get the bytes of rank 0, whoever comes first") {
  for (const bool rank_0_is_late : {true, false}) {
    const NewPath at;
    std::vector<Bytes> bytes(4);
    bytes[0].fill('i');
    const auto share = [&](int rank) {
      share_by_file(at.path, rank, bytes[rank].data(), bytes[rank].size());
    };
    if (!rank_0_is_late) share(0);
    std::vector<std::thread> others;
    for (int rank = 1; rank < 4; rank++) others.emplace_back(share, rank);
    if (rank_0_is_late) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      share(0);
    }
    for (std::thread &other : others) other.join();
    for (const Bytes &each : bytes) CHECK(each == bytes[0]);
    CHECK_FALSE(std::filesystem::exists(at.path + ".part"));
  }
}

TEST_CASE("a rank waits for rank 0, but not for ever, and names the file") {
  const NewPath at;
  CHECK(error_of(at.path, 1) == at.path +
                                    ": rank 0 has not written NCCL's id there in 0 s; start it, "
                                    "and give all ranks the same file");
}

TEST_CASE("the file of another run is not used") {
  const NewPath at;
  CHECK(error_of(at.path, 0) == "");
  CHECK(error_of(at.path, 0) ==
        at.path + ": exists already; remove it, or give all ranks another file");
}

TEST_CASE("what is no id is refused, as is a folder that is not there") {
  const NewPath at;
  std::ofstream(at.path) << "short";
  CHECK(error_of(at.path, 1) ==
        at.path +
            ": has fewer than the 128 bytes of NCCL's id; remove it, and start all ranks again");
  CHECK(error_of("/no such folder/id", 0) == "/no such folder/id.part: cannot be written");
}
