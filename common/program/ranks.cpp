// SPDX-License-Identifier: MIT
#include "common/program/ranks.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

Ranks::Ranks(const std::string &id_file, std::function<void(const std::string &)> end)
    : failed_(id_file + ".failed"),
      watch_([failed = failed_, end = std::move(end)](const std::stop_token &stop) {
        for (std::error_code error; !stop.stop_requested();) {
          if (std::filesystem::exists(failed, error))
            return end(failed +
                       ": another rank has failed, so this one ends; remove the file before you "
                       "start the ranks again");
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
      }) {}

Ranks::~Ranks() {
  watch_.request_stop();
  watch_.join();
  if (!passed_) std::ofstream file(failed_);
}
