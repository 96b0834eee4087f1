#include "common/testing/copies.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <fstream>
#include <mutex>

#include "reference/parallel.h"

namespace fs = std::filesystem;

namespace {

std::string compiler() {
  // Not optimised further: most of the time goes into the compiler, not into the programs.
  return environment("CXX", "g++") + " -std=c++20 -O1 -w -pthread";
}

/// A folder that has kernel.h and all that it includes, precompiled: most of a step's compilation.
/// (g++ looks for NAME.gch where it looks for NAME. Another compiler passes it by.)
fs::path precompiled() {
  static const fs::path folder = [] {
    const fs::path header = "common/kernel/kernel.h", to = "build/copies" / header;
    fs::create_directories(to.parent_path());
    run_command(compiler() + " -I. -x c++-header " + header.string() + " -o " + to.string() +
                ".gch");
    return fs::path("build/copies");
  }();
  return folder;
}

/// The words after "// Needs" or "// Takes" in a step's header, without commas; Needs has one.
std::string header_words(const std::vector<std::string> &lines, const std::string &key) {
  std::string words;
  for (const std::string &line : lines)
    if (line.starts_with("// " + key + " ")) words = line.substr(line.find_first_not_of(' ', 9));
  std::erase(words, ',');
  return words.substr(0, words.find(':'));
}

}  // namespace

Finished compile_step(const fs::path &program, const std::string &step) {
  const std::string source = program.string() + ".cu", unit = program.string() + ".cpp";
  const std::vector<std::string> lines = lines_of(read_text(source));
  std::ofstream out(unit);
  for (std::size_t i = 0; i < lines.size(); i++) {
    out << lines[i] << "\n";
    if (lines[i] != "#include \"common/kernel/kernel.h\"") continue;
    // What tells the copies apart comes after what they share.
    out << "#define STEP_NAME \"" << step << "\"\n"
        << "#define STEP_NEEDS \"" << header_words(lines, "Needs") << "\"\n"
        << "#define STEP_TAKES \"" << header_words(lines, "Takes") << "\"\n"
        << "#line " << i + 2 << " \"" << source << "\"\n";
  }
  out.close();
  std::string command = compiler() + " -I" + precompiled().string() + " -I. " + shell_word(unit);
  const fs::path objects = environment("HOST_OBJECTS", "build/host");
  for (const char *folder : {"common/emulator", "common/program", "reference"})
    for (const auto &entry : fs::directory_iterator(objects / folder))
      if (const std::string object = entry.path();
          object.ends_with(".o") && !object.ends_with("_test.o"))
        command += " " + shell_word(object);
  return run_command(command + " -o " + shell_word(program));
}

void do_all(std::vector<Job> &jobs) {
  std::size_t done = 0;
  std::mutex printing;
  parallel_for(jobs.size(), [&](std::size_t i) {
    try {
      jobs[i].failure = jobs[i].work();
    } catch (const std::exception &error) {
      jobs[i].failure = error.what();
    }
    const std::lock_guard lock(printing);
    if (++done % 20 == 0 || done == jobs.size())
      std::printf("  %zu of %zu\n", done, jobs.size()), std::fflush(stdout);
  });
  for (const Job &job : jobs) CHECK_MESSAGE(job.failure.empty(), job.name, ": ", job.failure);
}
