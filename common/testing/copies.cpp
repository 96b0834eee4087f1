#include "common/testing/copies.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <fstream>
#include <mutex>
#include <stdexcept>

#include "reference/parallel.h"

namespace fs = std::filesystem;

namespace {

const std::string kFolder = "build/copies/";

/// The compiler, optimising as much as is least to wait for: a run of steps 00 to 03 takes longer
/// than their compilation, a run of the others does not.
std::string compiler(bool slow_to_run) {
  return environment("CXX", "g++") + " -std=c++20 -w -pthread " + (slow_to_run ? "-O1" : "-O0");
}

/// A folder that has kernel.h and all that it includes, precompiled: most of a step's compilation.
/// (g++ looks for NAME.gch where it looks for NAME. Another compiler passes it by.)
fs::path precompile(bool slow_to_run) {
  const fs::path folder = kFolder + (slow_to_run ? "slow-to-run" : "quick-to-run");
  const fs::path header = "common/kernel/kernel.h", to = folder / header;
  fs::create_directories(to.parent_path());
  // Of a second header that includes it, when a precompiled one can be used no more.
  std::ofstream(to) << "#include_next <" << header.string() << ">\n";
  run_command(compiler(slow_to_run) + " -I. -x c++-header " + header.string() + " -o " +
              to.string() + ".gch");
  return folder;
}

/// What every copy is linked with, as one object without debug information: half of a link's time.
std::string link_common() {
  fs::create_directories(kFolder);
  const std::string all = kFolder + "common.o";
  std::string command = environment("CXX", "g++") + " -r -nostdlib -Wl,-S -o " + all;
  const fs::path objects = environment("HOST_OBJECTS", "build/host");
  for (const char *folder : {"common/emulator", "common/program", "reference"})
    for (const auto &entry : fs::directory_iterator(objects / folder))
      if (const std::string object = entry.path();
          object.ends_with(".o") && !object.ends_with("_test.o"))
        command += " " + shell_word(object);
  if (const Finished finished = run_command(command); finished.status != 0)
    throw std::runtime_error(command + "\n" + finished.err);
  return all;
}

/// The words after "// Needs" or "// Takes" in a step's header, also on the lines that go on with it,
/// without commas; Needs has one.
std::string header_words(const std::vector<std::string> &lines, const std::string &key) {
  std::string words;
  bool within = false;
  for (const std::string &line : lines) {
    if (!line.starts_with("//")) break;
    if (!line.starts_with("//  ")) within = line.starts_with("// " + key + " ");
    if (within) words += (words.empty() ? "" : " ") + line.substr(line.find_first_not_of(' ', 9));
  }
  std::erase(words, ',');
  return words.substr(0, words.find(':'));
}

}  // namespace

Finished compile_step(const fs::path &program, const std::string &step) {
  const std::string source = program.string() + ".cu", unit = program.string() + ".cpp";
  const std::vector<std::string> lines = lines_of(read_text(source));
  std::ofstream out(unit);
  // First what is precompiled, or it is not used; what tells the copies apart comes after it.
  out << "#include \"common/kernel/kernel.h\"\n"
      << "#define STEP_NAME \"" << step << "\"\n"
      << "#define STEP_NEEDS \"" << header_words(lines, "Needs") << "\"\n"
      << "#define STEP_TAKES \"" << header_words(lines, "Takes") << "\"\n"
      << "#line 1 \"" << source << "\"\n"
      << read_text(source);
  out.close();
  static const std::string common = link_common();
  static const fs::path precompiled[] = {precompile(false), precompile(true)};
  const bool slow_to_run = step < "04";
  return run_command(compiler(slow_to_run) + " -I" + precompiled[slow_to_run].string() + " -I. " +
                     shell_word(unit) + " " + common + " -o " + shell_word(program));
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
