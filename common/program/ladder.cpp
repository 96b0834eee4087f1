// SPDX-License-Identifier: MIT
#include "common/program/ladder.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <stdexcept>

#include "common/program/text.h"

namespace {

/// Of all sources that have a header; not all are steps.
const Ladder kHeaders = {
#include "ladder.inc"  // build/ladder.csv, in braces
};

std::string number(const LadderStep &step) {
  return step.name.substr(0, step.name.find('-'));
}

/// "steps 00 to 04, 20, 21 and 30" of those that this holds for, or "" for none.
std::string numbers_where(const Ladder &ladder,
                          const std::function<bool(const LadderStep &)> &holds) {
  std::vector<std::string> ranges;
  int steps = 0;
  for (std::size_t i = 0; i < ladder.size(); i++) {
    if (!holds(ladder[i])) continue;
    const std::size_t first = i;
    while (i + 1 < ladder.size() && holds(ladder[i + 1])) i++;
    if (i == first + 1)
      ranges.push_back(number(ladder[first])), ranges.push_back(number(ladder[i]));
    else
      ranges.push_back(number(ladder[first]) + (i > first ? " to " + number(ladder[i]) : ""));
    steps += static_cast<int>(i - first + 1);
  }
  std::string text;
  for (std::size_t i = 0; i < ranges.size(); i++)
    text += (i == 0 ? "" : i + 1 < ranges.size() ? ", " : " and ") + ranges[i];
  return steps == 0 ? "" : (steps == 1 ? "step " : "steps ") + text;
}

}  // namespace

const Ladder &ladder() {
  static const Ladder steps = [] {
    Ladder of_steps = kHeaders;
    std::erase_if(of_steps, [](const LadderStep &of) { return !std::isdigit(of.name[0]); });
    return of_steps;
  }();
  return steps;
}

const LadderStep &header_of(const std::string &label) {
  const std::string name = label.substr(0, label.find(':'));
  for (const LadderStep &header : kHeaders)
    if (header.name == name) return header;
  throw std::runtime_error("no such step: " + name);
}

std::string macros_of(const std::string &label) {
  const LadderStep &header = header_of(label);
  return "#define STEP_NAME \"" + label + "\"\n#define STEP_NEEDS \"" + header.needs +
         "\"\n#define STEP_TAKES \"" + header.takes + "\"\n";
}

bool takes(const std::string &list, const std::string &option) {
  const Strings options = words(list);
  return std::find(options.begin(), options.end(), option) != options.end();
}

std::string who_takes(const Ladder &ladder, const std::string &option) {
  const std::string steps =
      numbers_where(ladder, [&](const LadderStep &step) { return takes(step.takes, option); });
  if (steps.empty()) return "no step accepts it yet";
  return steps + (steps.starts_with("steps") ? " accept it" : " accepts it");
}

bool runs_on(const std::string &needs, int capability) {
  const int least = std::stoi(needs.substr(needs.find('_') + 1));
  return needs.ends_with('a') ? capability == least : capability >= least;
}

std::string why_not_on_gpu(const Ladder &ladder, const std::string &step, const std::string &needs,
                           int capability) {
  if (runs_on(needs, capability)) return "";
  std::string why;  // a variant, "15-early-k:padded", has its step's reasons
  for (const LadderStep &other : ladder)
    if (step.substr(0, step.find(':')) == other.name && !other.why.empty())
      why = " (" + other.why + ")";
  const std::string others = numbers_where(
      ladder, [&](const LadderStep &other) { return runs_on(other.needs, capability); });
  return "step " + step.substr(0, step.find('-')) + " needs an " + needs + " GPU" + why +
         ", and this one is sm_" + std::to_string(capability) +
         (others.empty() ? "" : ", which runs " + others) +
         "; run it on the emulator with --device cpu";
}
