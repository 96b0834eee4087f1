#include "common/testing/copies.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <fstream>
#include <mutex>
#include <span>
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

/// The number of copies in a program: more take longer to compile than to start the compiler anew.
constexpr std::size_t kMostInOne = 16;

/// The number of the step that a copy is of.
std::string number_of(const Copy &copy) {
  return copy.step.substr(0, copy.step.find_first_of("-:"));
}

/// One file of all copies, each in a namespace of its own; the environment's COPY names the one that is
/// run.
std::string unit_of(std::span<const Copy> copies, const fs::path &folder) {
  // First what is precompiled, or it is not used; what tells the copies apart comes after it.
  std::string includes =
      "#include \"common/kernel/kernel.h\"\n#include <cstdlib>\n#include <map>\n";
  std::string all, steps;
  for (const Copy &copy : copies) {
    const std::vector<std::string> lines = lines_of(copy.source);
    const std::string place = "copy_" + std::to_string(&copy - copies.data());
    all +=
        "#undef STEP_NAME\n#undef STEP_NEEDS\n#undef STEP_TAKES\n"
        "#define STEP_NAME \"" +
        copy.step + "\"\n#define STEP_NEEDS \"" + header_words(lines, "Needs") +
        "\"\n#define STEP_TAKES \"" + header_words(lines, "Takes") + "\"\nnamespace " + place +
        " {\n#line 1 \"" + (folder / copy.name).string() + ".cu\"\n";
    for (const std::string &line : lines)
      if (line.starts_with("#include "))
        includes += line + "\n", all += "\n";
      else
        all += line + "\n";
    all += "}\n";
    steps += "{\"" + copy.name + "\", " + place + "::cpu_step}, ";
  }
  return includes + all +
         "extern const Step cpu_step;\nconst Step cpu_step = " + "std::map<std::string, Step>{" +
         steps + "}.at(std::getenv(\"COPY\"));\n";
}

/// Compiles copies of one step into one program. If they do not compile, all have the complaint.
void compile_together(const fs::path &folder, std::span<Copy> copies) {
  const std::string program = folder / copies[0].name, unit = program + ".cpp";
  for (const Copy &copy : copies) std::ofstream(folder / (copy.name + ".cu")) << copy.source;
  std::ofstream(unit) << unit_of(copies, folder);
  static const std::string common = link_common();
  static const fs::path precompiled[] = {precompile(false), precompile(true)};
  const bool slow_to_run = copies[0].step < "04";
  const Finished finished =
      run_command(compiler(slow_to_run) + " -I" + precompiled[slow_to_run].string() + " -I. " +
                  shell_word(unit) + " " + common + " -o " + shell_word(program));
  for (Copy &copy : copies) {
    copy.complaint = finished.status == 0 ? "" : finished.out + finished.err;
    if (finished.status == 0)
      copy.command = "COPY=" + shell_word(copy.name) + " " + shell_word(program);
  }
}

}  // namespace

void compile_copies(const fs::path &folder, std::vector<Copy> &copies) {
  fs::create_directories(folder);
  std::vector<Job> jobs;
  for (std::size_t first = 0, last; first < copies.size(); first = last) {
    for (last = first + 1; last < copies.size() && last - first < kMostInOne; last++)
      if (number_of(copies[last]) != number_of(copies[first])) break;
    const std::span together = std::span(copies).subspan(first, last - first);
    jobs.push_back({number_of(copies[first]),
                    [&folder, together] {
                      compile_together(folder, together);
                      if (together.size() > 1 && together[0].command.empty())
                        for (Copy &copy : together) compile_together(folder, {&copy, 1});
                      return "";
                    },
                    ""});
  }
  std::printf("  compiling %zu copies into %zu programs\n", copies.size(), jobs.size());
  do_all(jobs);
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
