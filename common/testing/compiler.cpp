// SPDX-License-Identifier: MIT
#include "common/testing/compiler.h"

#include <fstream>
#include <map>
#include <mutex>
#include <stdexcept>

#include "common/testing/process.h"

namespace fs = std::filesystem;

namespace {

const fs::path kFolder = "build/exercises";

/// The compiler, optimising as much as is least to wait for: a run of steps 00 to 03 takes longer
/// than their compilation, a run of the others does not. (At fixed addresses, which the watch of an
/// exercise names. The precompiled header is of use only to a compiler with the same options.)
std::string optimising(bool slow_to_run) {
  return environment("CXX", "g++") +
         " -std=c++20 -w -g1 -fno-pie -fstack-clash-protection -pthread " +
         (slow_to_run ? "-O1" : "-O0");
}

/// A folder that has kernel.h and all that it includes, precompiled: most of a step's compilation.
/// (g++ looks for NAME.gch where it looks for NAME. Another compiler passes it by.)
fs::path precompile(bool slow_to_run) {
  const fs::path folder = kFolder / (slow_to_run ? "slow-to-run" : "quick-to-run");
  const fs::path header = "common/kernel/kernel.h", to = folder / header;
  const fs::path made = to.string() + ".gch";
  bool stale = !fs::exists(made);
  for (const char *common : {"common", "reference"})
    for (const auto &entry : fs::recursive_directory_iterator(common))
      if (const std::string extension = entry.path().extension();
          extension == ".h" || extension == ".def")
        stale = stale || older(made, entry.path());
  if (!stale) return folder;
  fs::create_directories(to.parent_path());
  // Of a second header that includes it, when a precompiled one can be used no more.
  std::ofstream(to) << "#include_next <" << header.string() << ">\n";
  run_command(optimising(slow_to_run) + " -I. -x c++-header " + header.string() + " -o " +
              made.string());
  return folder;
}

/// What every program is linked with, as one object without debug information: half of a link's time.
fs::path link_common() {
  const fs::path all = kFolder / "common.o";
  fs::create_directories(kFolder);
  bool stale = !fs::exists(all);
  const fs::path built = environment("HOST_OBJECTS", "build/host");
  std::string objects;
  for (const char *name : {"common/emulator/all", "common/program/all", "common/program/cpu_device",
                           "common/program/program", "common/program/no_gpu", "reference/all"}) {
    const fs::path object = built / (name + std::string(".o"));
    objects += " " + shell_word(object);
    stale = stale || older(all, object);
  }
  if (!stale) return all;
  const std::string line =
      environment("CXX", "g++") + " -r -nostdlib -Wl,-S -o " + all.string() + objects;
  if (const Finished finished = run_command(line); finished.status != 0)
    throw std::runtime_error(line + "\n" + finished.err);
  return all;
}

}  // namespace

bool older(const fs::path &file, const fs::path &than) {
  return !fs::exists(file) || fs::last_write_time(file) < fs::last_write_time(than);
}

const Compiler &compiler_for(const std::string &step) {
  static std::mutex mutex;
  static std::map<bool, Compiler> made;
  const bool slow_to_run = step < "04";
  const std::lock_guard lock(mutex);
  if (!made.contains(slow_to_run))
    made[slow_to_run] = {optimising(slow_to_run) + " -no-pie -fdiagnostics-color=never -I" +
                             precompile(slow_to_run).string() + " -I.",
                         link_common()};
  return made[slow_to_run];
}
