// SPDX-License-Identifier: MIT
// How processes that share a file, and nothing else, get the same bytes: NCCL's unique id, before they can talk by NCCL.
#pragma once

#include <chrono>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

/// Gives all ranks the bytes of rank 0. Rank 0 writes them into the file, which must not exist yet, and the others wait
/// for it. The file gets its name when it is complete.
static inline void share_by_file(const std::string &path, int rank, void *bytes, std::size_t count,
                                 std::chrono::milliseconds patience = std::chrono::seconds(60)) {
  using Clock = std::chrono::steady_clock;
  const auto size = static_cast<std::streamsize>(count);
  if (rank == 0) {
    if (std::filesystem::exists(path))
      throw std::runtime_error(path +
                               ": exists already; remove it, or give all ranks another file");
    const std::string part = path + ".part";
    std::ofstream file(part, std::ios::binary);
    if (!file.write(static_cast<const char *>(bytes), size).flush())
      throw std::runtime_error(part + ": cannot be written");
    std::filesystem::rename(part, path);
    return;
  }
  for (const Clock::time_point begin = Clock::now(); !std::filesystem::exists(path);) {
    if (Clock::now() - begin > patience)
      throw std::runtime_error(path + ": rank 0 has not written NCCL's id there in " +
                               std::to_string(patience.count() / 1000) +
                               " s; start it, and give all ranks the same file");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (!std::ifstream(path, std::ios::binary).read(static_cast<char *>(bytes), size))
    throw std::runtime_error(path + ": has fewer than the " + std::to_string(count) +
                             " bytes of NCCL's id; remove it, and start all ranks again");
}
