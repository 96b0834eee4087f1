// SPDX-License-Identifier: MIT
#include "common/testing/copies.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <stdexcept>

#include "common/program/ladder.h"
#include "common/testing/compiler.h"
#include "common/testing/instances.h"

namespace fs = std::filesystem;

namespace {

/// The number of copies in a program: more take longer to compile than to start the compiler anew.
constexpr std::size_t kMostInOne = 16;

/// The number of the step that a copy is of.
std::string number_of(const Copy &copy) {
  return copy.step.substr(0, copy.step.find_first_of("-:"));
}

/// What a source includes.
std::set<std::string> includes_of(const std::string &source) {
  std::set<std::string> includes;
  for (const std::string &line : lines_of(source))
    if (line.starts_with("#include ")) includes.insert(line);
  return includes;
}

/// An explicit specialization, of a header's template: two lines, among the includes.
const std::string kSpecialization = "template <>";
bool specialises(const Copy &copy) {
  return copy.source.find("\n" + kSpecialization + "\n") != std::string::npos;
}

/// Whether two copies may share a program: if they are of one step, or are compiled alike and include the same.
/// (What another step includes might hide what is missing here, or have functions of the same names.)
bool go_together(const Copy &a, const Copy &b) {
  if (specialises(a) || specialises(b)) return false;  // for all that include the header
  return number_of(a) == number_of(b) ||
         (&compiler_for(number_of(a)) == &compiler_for(number_of(b)) &&
          includes_of(a.source) == includes_of(b.source));
}

/// One file of all copies, each in a namespace of its own: the name that the program is started by says
/// which is run.
std::string unit_of(const std::vector<Copy *> &copies, const fs::path &folder) {
  // First what is precompiled, or it is not used; what tells the copies apart comes after it.
  std::string includes =
      "#include \"common/kernel/kernel.h\"\n#include <errno.h>\n#include <string>\n";
  std::string all, choice;
  for (std::size_t i = 0; i < copies.size(); i++) {
    const Copy *copy = copies[i];
    const std::vector<std::string> lines =
        lines_of(copy->runs.empty() ? copy->source : with_instances_of(copy->runs, copy->source));
    const std::string place = "copy_" + std::to_string(i);
    all += "#undef STEP_NAME\n#undef STEP_NEEDS\n#undef STEP_TAKES\n" + macros_of(copy->step) +
           "namespace " + place + " {\n#line 1 \"" + (folder / copy->name).string() + ".cu\"\n";
    for (std::size_t k = 0; k < lines.size(); k++) {
      const bool specialised =
          lines[k] == kSpecialization || (k > 0 && lines[k - 1] == kSpecialization);
      (lines[k].starts_with("#include ") || specialised ? includes : all) += lines[k];
      includes += "\n", all += "\n";
    }
    all += "}\n";
    choice += "  if (program.ends_with(\"/" + copy->name + "\")) return " + place + "::cpu_step;\n";
  }
  return includes +
         "static const int mutant = std::getenv(\"MUTANT\") ? std::atoi(std::getenv(\"MUTANT\")) : "
         "-1;\n" +
         all +
         "extern const Step cpu_step;\nconst Step cpu_step = [] {\n"
         "  const std::string program = program_invocation_name;\n" +
         choice + "  throw program;\n}();\n";
}

/// Compiles copies into one program. If they do not compile, all have the complaint.
void compile_together(const fs::path &folder, const std::vector<Copy *> &copies,
                      const std::string &with) {
  const fs::path program = folder / copies[0]->name;
  const std::string unit = program.string() + ".together.cpp";
  std::ofstream(unit) << unit_of(copies, folder);
  const std::string step = number_of(*copies[0]);
  const Compiler &compiler = compiler_for(step);
  const Finished finished =
      run_command(compiler.command + " " + shell_word(unit) + " " + compiler.common.string() + " " +
                  with + " -o " + shell_word(program));
  for (Copy *copy : copies) {
    copy->complaint = finished.status == 0 ? "" : finished.out + finished.err;
    const fs::path link = folder / copy->name;
    if (link != program || finished.status != 0) fs::remove(link);
    if (finished.status != 0) continue;
    if (link != program) fs::create_hard_link(program, link);
    copy->command = shell_word(link);
  }
}

/// The same; those of which the compiler complains are compiled alone, and the others without them.
void compile_some(const fs::path &folder, const std::vector<Copy *> &copies,
                  const std::string &with) {
  compile_together(folder, copies, with);
  if (copies.size() == 1 || !copies[0]->command.empty()) return;
  std::vector<Copy *> others;
  const std::string complaint = copies[0]->complaint;
  for (Copy *copy : copies)
    if (complaint.find((folder / copy->name).string() + ".cu:") == std::string::npos)
      others.push_back(copy);
    else
      compile_together(folder, {copy}, with);
  if (others.size() < copies.size() && !others.empty()) return compile_some(folder, others, with);
  for (Copy *copy : others) compile_together(folder, {copy}, with);
}

}  // namespace

void compile_copies(const fs::path &folder, std::vector<Copy> &copies, const std::string &with) {
  std::vector<std::vector<Copy *>> programs;
  for (Copy &copy : copies) {
    const fs::path file = folder / (copy.name + ".cu");
    fs::create_directories(file.parent_path());
    std::ofstream(file) << copy.source;
    const auto room = std::find_if(programs.begin(), programs.end(), [&](const auto &some) {
      return some.size() < kMostInOne && go_together(*some[0], copy);
    });
    if (room == programs.end())
      programs.push_back({&copy});
    else
      room->push_back(&copy);
  }
  // The largest first: none is left to wait for at the end.
  const auto size_of = [](const std::vector<Copy *> &some) {
    std::size_t size = 0;
    for (const Copy *copy : some) size += copy->source.size();
    return size;
  };
  std::stable_sort(programs.begin(), programs.end(),
                   [&](const auto &a, const auto &b) { return size_of(a) > size_of(b); });
  std::vector<Job> jobs;
  for (const std::vector<Copy *> &some : programs)
    jobs.push_back({number_of(*some[0]),
                    [&folder, &some, &with] {
                      compile_some(folder, some, with);
                      return "";
                    },
                    ""});
  std::printf("  compiling %zu copies into %zu programs\n", copies.size(), jobs.size());
  do_all(jobs);
}

namespace {

/// Compiles a program of the changes that one can hold; `holds` says which these are.
Copy compile_woven(const fs::path &folder, const Mutants &mutants, std::vector<bool> &holds) {
  std::vector<bool> leave_out(mutants.changes.size());
  for (bool fewer = true;;) {
    const Woven woven = weave(mutants.source, mutants.changes, leave_out);
    Copy copy = {mutants.step, mutants.name, woven.source, mutants.runs};
    compile_together(folder, {&copy}, "");
    holds.clear();
    for (const auto &[first, last] : woven.lines) holds.push_back(first > 0);
    if (!copy.command.empty() || !fewer) return copy;
    // Without those in whose lines there is an error.
    fewer = false;
    const std::string place = (folder / copy.name).string() + ".cu:";
    for (const std::string &line : lines_of(copy.complaint)) {
      if (!line.starts_with(place)) continue;
      const std::size_t at = std::strtoul(line.c_str() + place.size(), nullptr, 10);
      for (std::size_t i = 0; i < holds.size(); i++)
        if (holds[i] && woven.lines[i].first <= at && at <= woven.lines[i].second)
          leave_out[i] = fewer = true;
    }
    if (!fewer) leave_out.assign(leave_out.size(), true);
  }
}

}  // namespace

void compile_mutants(const fs::path &folder, std::vector<Mutants> &all) {
  fs::create_directories(folder);
  std::vector<std::vector<bool>> holds(all.size());
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < all.size(); i++)
    jobs.push_back({all[i].step,
                    [&, i] {
                      Mutants &mutants = all[i];
                      const Copy copy = compile_woven(folder, mutants, holds[i]);
                      mutants.unchanged = copy.command;
                      for (std::size_t k = 0; k < holds[i].size(); k++)
                        mutants.commands.push_back(
                            holds[i][k] ? "MUTANT=" + std::to_string(k) + " " + copy.command : "");
                      return copy.complaint;
                    },
                    ""});
  do_all(jobs);
  std::vector<Copy> copies;
  std::vector<std::pair<std::size_t, std::size_t>> of;  // which each is
  for (std::size_t i = 0; i < all.size(); i++)
    for (std::size_t k = 0; k < holds[i].size(); k++)
      if (!holds[i][k]) {
        copies.push_back({all[i].step, all[i].name + "-" + std::to_string(k),
                          edited(all[i].source, all[i].changes[k]), all[i].runs});
        of.push_back({i, k});
      }
  compile_copies(folder, copies);
  for (std::size_t c = 0; c < copies.size(); c++) {
    Mutants &mutants = all[of[c].first];
    mutants.commands[of[c].second] = copies[c].command;
    if (mutants.complaint.empty()) mutants.complaint = copies[c].complaint;
  }
}
