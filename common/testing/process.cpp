// SPDX-License-Identifier: MIT
#include "common/testing/process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>

namespace {

/// Appends what a command used to the file that TESTS_COSTS names: seconds of CPU, a tab, the command.
void record_cost(const std::string &line, const rusage &used) {
  const std::string file = environment("TESTS_COSTS", "");
  if (file.empty()) return;
  double seconds = 0;
  for (const timeval &part : {used.ru_utime, used.ru_stime})
    seconds += static_cast<double>(part.tv_sec) + 1e-6 * static_cast<double>(part.tv_usec);
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::ofstream(file, std::ios::app) << seconds << '\t' << line << '\n';
}

/// A file without a name. No other command inherits it: a make that is started under a make takes the descriptors 3
/// and 4 for its jobserver, and would read a byte of what another command printed.
class TemporaryFile {
 public:
  TemporaryFile() {
    std::string name = "/tmp/output-XXXXXX";
    descriptor = mkostemp(name.data(), O_CLOEXEC);
    if (descriptor < 0) throw std::runtime_error("no temporary file");
    unlink(name.c_str());
  }
  TemporaryFile(const TemporaryFile &) = delete;
  ~TemporaryFile() { close(descriptor); }

  /// All that was written to it.
  std::string text() const {
    std::string all;
    char some[1 << 16];
    for (ssize_t n; (n = pread(descriptor, some, sizeof some, static_cast<off_t>(all.size()))) > 0;)
      all.append(some, static_cast<std::size_t>(n));
    return all;
  }

  int descriptor;
};

}  // namespace

Finished run_command(const std::string &line) {
  const TemporaryFile out, err;
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, out.descriptor, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, err.descriptor, STDERR_FILENO);
  std::string shell = "sh", option = "-c", command = line;
  char *arguments[] = {shell.data(), option.data(), command.data(), nullptr};
  pid_t child;
  const int error = posix_spawn(&child, "/bin/sh", &files, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&files);
  int status = 0;
  rusage used = {};
  if (error || wait4(child, &status, 0, &used) != child)
    throw std::runtime_error("cannot run " + line);
  record_cost(line, used);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), out.text(), err.text()};
}

std::string environment(const char *name, const char *otherwise) {
  const char *value = std::getenv(name);
  return value ? value : otherwise;
}

namespace {
std::string used_seed;
}

std::uint64_t tests_seed() {
  if (used_seed.empty()) {
    used_seed = environment("TESTS_SEED", std::to_string(std::random_device()()).c_str());
    std::printf("TESTS_SEED=%s draws the same again\n", used_seed.c_str());
  }
  return std::stoull(used_seed);
}

std::string seed_in_use() {
  return used_seed;
}

bool some_are_enough() {
  return environment("TESTS_SOME", "") != "";
}

std::vector<std::string> step_names() {
  std::vector<std::string> names;
  for (const auto &entry : std::filesystem::directory_iterator("steps")) {
    const std::string name = entry.path().filename();
    if (entry.is_directory() && std::isdigit(static_cast<unsigned char>(name[0])))
      names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool Description::takes_option(const std::string &option) const {
  return std::find(takes.begin(), takes.end(), option) != takes.end();
}

Description describe(const std::string &command) {
  const Finished finished = run_command(command + " --describe");
  if (finished.status != 0)
    throw std::runtime_error(command + " --describe: " + finished.err + "; is it built?");
  std::map<std::string, Strings> values;
  for (const std::string &line : lines_of(finished.out))
    if (const Strings all = words(line); !all.empty())
      values[all[0]] = {all.begin() + 1, all.end()};
  std::erase_if(values["takes"], [](const std::string &word) { return !word.starts_with("--"); });
  const Strings &writes = values["writes"];
  return {values["step"].at(0),
          values["needs"].at(0),
          values["takes"],
          std::stoi(values["tile"].at(0)),
          std::stoi(values["page-rows"].at(0)),
          values["head-dims"],
          values["types"],
          values["inputs"],
          writes.back() == "lse",
          writes.front() == "dQ",
          values["bits"] == Strings{"same"}};
}
