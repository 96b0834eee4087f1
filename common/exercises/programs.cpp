// SPDX-License-Identifier: MIT
#include "common/exercises/programs.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <stdexcept>
#include <utility>

#include "common/emulator/fault.h"
#include "common/pages/values.h"
#include "common/program/ladder.h"
#include "common/testing/compiler.h"
#include "common/testing/process.h"

namespace fs = std::filesystem;

namespace {

/// Says where a kernel crashed, or what it was still at when its time was up.
const fs::path kWatch = "build/host/common/exercises/watch.o";

/// A program may print 16 MB, in blocks of 512 bytes.
constexpr const char *kLimitOutput = "ulimit -f 32768; ";
constexpr const char *kTooMuch = "more than 16 MB are printed";

/// The first error of a compiler, at the line of the source that caused it: an error within a template
/// of common/ names that line beside it.
std::string first_error(const std::string &said, const fs::path &source) {
  std::string cause;  // the line of the source that a template is required from
  const std::string at_source = source.string() + ":";
  for (const std::string &line : lines_of(said)) {
    const bool here = line.starts_with(at_source);
    const std::string number =
        here
            ? line.substr(at_source.size(),
                          line.find_first_not_of("0123456789", at_source.size()) - at_source.size())
            : cause;
    if (here && line.find("required from") != std::string::npos) cause = number;
    const std::size_t error = line.find("error: ");
    if (error == std::string::npos) continue;
    if (number.empty()) return line;
    return at_source + number + ": " + line.substr(error + 7) + " `" +
           source_line(source, static_cast<unsigned>(std::atoi(number.c_str()))) + "`";
  }
  return trim(said.substr(0, said.find('\n')));
}

// --- how a run ends ------------------------------------------------------------------------------

/// The lines of a program's source that these addresses are in, innermost first.
std::vector<unsigned> lines_at(const Build &what, const std::string &addresses) {
  const Finished finished =
      run_command("addr2line -i -e " + shell_word(what.program) + " " + addresses);
  std::vector<unsigned> lines;
  const std::string name = what.source.filename().string() + ":";
  for (const std::string &line : lines_of(finished.out))
    if (const std::size_t at = line.rfind("/" + name);
        at != std::string::npos || line.starts_with(name))
      if (const int number = std::atoi(line.c_str() + line.rfind(':') + 1); number > 0)
        lines.push_back(static_cast<unsigned>(number));
  return lines;
}

/// What the watch says: "watch: endless 0x4012a4 0x4011b0", a line for each thread.
void explain_watch(const Build &what, const std::string &said, Outcome &outcome) {
  for (const std::string &line : lines_of(said)) {
    if (!line.starts_with("watch: ")) continue;
    const std::size_t addresses = line.find(" 0x");
    const std::string kind = line.substr(7, addresses - 7);
    const std::vector<unsigned> lines =
        lines_at(what, addresses == std::string::npos ? "" : line.substr(addresses));
    if (outcome.word.empty()) outcome.word = kind.starts_with("crash") ? "crash" : "endless";
    if (!lines.empty()) outcome.line = lines[0];
    const std::string at =
        lines.empty() ? "" : what.source.filename().string() + ":" + std::to_string(lines[0]);
    if (kind == "output")
      outcome.said = (at.empty() ? "" : at + ": ") + kTooMuch;
    else if (outcome.word == "endless")
      outcome.said = "no end after " + kind.substr(kind.find(' ') + 1) + " s" +
                     (at.empty() ? "" : "; a thread is at " + at + " still, and the others wait");
    else
      outcome.said = (at.empty() ? "the kernel" : at + ": it") + " crashes" +
                     (kind == "crash-division" ? ", dividing a whole number by 0"
                      : kind == "crash-memory" ? ", at an address that is no memory"
                                               : "");
    if (!lines.empty()) return;
  }
}

Outcome explain(const Build &what, const Finished &finished) {
  Outcome outcome;
  static const std::string emulator = "emulator: ";
  for (const std::string &line : lines_of(finished.err)) {
    if (!line.starts_with(emulator)) continue;
    outcome.said = line.substr(emulator.size());
    outcome.word = "other";
    for (const std::string &word : ending_words())
      if (outcome.said.find("[" + word + "] ") != std::string::npos) outcome.word = word;
    // "2.cu:80: [race] block (0,0,0) ..."
    const std::string name = what.source.filename().string() + ":";
    if (outcome.said.starts_with(name))
      outcome.line = static_cast<unsigned>(std::atoi(outcome.said.c_str() + name.size()));
    return outcome;
  }
  explain_watch(what, finished.err, outcome);
  if (!outcome.word.empty()) return outcome;
  if (finished.status == 126) return {"endless", kTooMuch, 0, {}};
  for (const std::string &line : lines_of(finished.out)) {
    if (line.ends_with(": passed") && outcome.word.empty()) outcome.word = "passed";
    if (line.ends_with(": WRONG") && !outcome.said.starts_with("WRONG"))
      outcome.word = "wrong", outcome.said = "WRONG";
    if (line.find("elements are not finite") != std::string::npos) outcome.word = "not-finite";
    if (line.starts_with("  ") && finished.status != 0) outcome.said += "; " + trim(line);
  }
  if (finished.status == 0 && outcome.word == "passed") return outcome;
  if (outcome.word.empty() || outcome.word == "passed") {
    outcome.word = finished.status == 2 || finished.status == 3 ? "refused" : "other";
    outcome.said = trim(finished.err.substr(0, finished.err.find('\n')));
  }
  return outcome;
}

}  // namespace

const std::vector<std::string> &ending_words() {
  static const std::vector<std::string> words = [] {
    std::vector<std::string> all = {"passed", "wrong", "not-finite"};
    using emulator::Fault;
    for (int fault = 0; fault <= static_cast<int>(Fault::kException); fault++) {
      const std::string tag = emulator::tag_of(static_cast<Fault>(fault));
      all.push_back(tag.substr(1, tag.size() - 2));
    }
    all.insert(all.end(), {"refused", "endless", "crash", "other"});
    return all;
  }();
  return words;
}

std::string source_line(const fs::path &source, unsigned line) {
  const std::vector<std::string> lines = lines_of(read_text(source));
  return line == 0 || line > lines.size() ? "" : trim(lines[line - 1]);
}

std::string unit_of(const Build &what) {
  // First what is precompiled, or it is not used; what tells the programs apart comes after it.
  return "#include \"common/kernel/kernel.h\"\n" +
         macros_of(what.step + ":" + what.source.stem().string()) + "#line 1 \"" +
         what.source.string() + "\"\n" + read_text(what.source);
}

std::string build(const Build &what) {
  const Compiler &compiler = compiler_for(what.step);
  const fs::path unit = what.program.string() + ".cpp";
  const std::string text = unit_of(what);
  bool stale = read_text(unit) != text || older(what.program, compiler.common) ||
               older(what.program, kWatch);
  for (const auto &entry : fs::directory_iterator(fs::path("steps") / what.step))
    stale = stale || (entry.path().extension() == ".h" && older(what.program, entry.path()));
  if (!stale) return "";
  fs::create_directories(what.program.parent_path());
  fs::remove(what.program);
  std::ofstream(unit) << text;
  const Finished finished =
      run_command(compiler.command + " " + shell_word(unit) + " " + compiler.common.string() + " " +
                  kWatch.string() + " -o " + shell_word(what.program));
  if (finished.status == 0) return "";
  fs::remove(what.program);
  return first_error(finished.err, what.source);
}

Outcome run(const Build &what, const std::string &options, bool counts, bool traced) {
  const fs::path csv = what.program.string() + ".csv", problem = what.program.string() + ".row.csv",
                 trace = what.program.string() + ".trace.csv";
  for (const fs::path &file : {csv, problem, trace}) fs::remove(file);
  const Finished finished =
      run_command(kLimitOutput + shell_word(fs::absolute(what.program)) +
                  " --device cpu --repeatable " + options + " --csv " + shell_word(problem) +
                  (counts ? " --profile-csv " + shell_word(csv) : " --check-only") +
                  (traced ? " --trace-csv " + shell_word(trace) : ""));
  Outcome outcome = explain(what, finished);
  if (const auto rows = lines_of(read_text(problem)); rows.size() == 2) {
    const Strings names = csv_fields(rows[0]), values = csv_fields(rows[1]);
    const auto value_of = [&](const std::string &name) {
      const auto at = std::find(names.begin(), names.end(), name) - names.begin();
      return std::atof(values.at(static_cast<std::size_t>(at)).c_str());
    };
    outcome.head_dim = value_of("head_dim");
    outcome.operations = value_of("operations");
    outcome.kv_bytes = value_of("kv_bytes");
    if (rows[1].find("lengths=") == std::string::npos)
      outcome.o_bytes =
          2 * value_of("batch") * value_of("heads") * value_of("seqlen") * outcome.head_dim;
  } else if (outcome.word == "passed") {  // whoever printed that
    outcome = {"other", "the program ends before it writes its result", 0, {}};
  }
  const std::string here = what.source.filename().string() + ":";
  for (const std::string &row : lines_of(read_text(csv))) {
    // step,source,batch,...,2.cu:80,"counter",value. Totals have line 0.
    const Strings fields = csv_fields(row);
    const std::string &place = fields.at(fields.size() - 3);
    const bool is_here = place.starts_with(here);
    if (is_here || place == "0")
      outcome.counts[static_cast<unsigned>(std::atoi(place.c_str() + (is_here ? here.size() : 0)))]
                    [fields.at(fields.size() - 2)] += std::atof(fields.back().c_str());
  }
  std::map<unsigned, std::map<int, int>> first_requests;  // by line, the address of each lane
  for (const std::string &row : lines_of(read_text(trace)))
    // line,op,request,lane,address,...
    if (const Strings fields = csv_fields(row); fields.at(2) == "0")
      first_requests[static_cast<unsigned>(std::atoi(fields[0].c_str()))]
                    [std::atoi(fields[3].c_str())] = std::atoi(fields[4].c_str());
  for (const auto &[line, addresses] : first_requests) {
    std::set<int> lines;
    for (const auto &[lane, address] : addresses) lines.insert(address / 128);
    outcome.counts[line][kLinesOfFirst] = static_cast<double>(lines.size());
    if (addresses.contains(0) && addresses.contains(8))
      outcome.counts[line][kBytesOfFirst] = std::abs(addresses.at(8) - addresses.at(0));
  }
  return outcome;
}
