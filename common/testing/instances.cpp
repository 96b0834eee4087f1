// SPDX-License-Identifier: MIT
#include "common/testing/instances.h"

#include <algorithm>

#include "common/program/text.h"

namespace {

/// What follows the last of these options in a run, or nothing.
std::string value_of(const Strings &run, const std::string &option) {
  const auto found = std::find(run.rbegin(), run.rend(), option);
  return found == run.rend() || found == run.rbegin() ? "" : found[-1];
}

/// C++ that is true of the parameters of a template for one of these runs. A kernel has as many columns as the problem
/// has, or fewer than 64 more.
std::string needed(const std::vector<std::string> &runs, const std::string &parameters) {
  Strings all;
  for (const std::string &options : runs) {
    const Strings run = words(options);
    const auto has = [&](const std::string &option) {
      return std::find(run.begin(), run.end(), option) != run.end();
    };
    const std::string head_dim = value_of(run, "--head-dim");
    std::string one = head_dim + " <= d && d < " + head_dim + " + 64";
    if (contains(parameters, "class T"))
      one += " && std::is_same_v<T, " +
             std::string(value_of(run, "--type") == "bf16" ? "bf16" : "half") + ">";
    const bool softcap = has("--softcap"), alibi = has("--alibi");
    if (contains(parameters, "bool softcap") && !softcap) one += " && !softcap";
    if (contains(parameters, "bool alibi") && !alibi) one += " && !alibi";
    if (contains(parameters, "bool changes") && !softcap && !alibi) one += " && !changes";
    if (contains(parameters, "bool sinks") && !softcap && !alibi && !has("--sink-logits"))
      one += " && !sinks";
    all.push_back("(" + one + ")");
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return join(all, " || ");
}

}  // namespace

std::string with_instances_of(const std::vector<std::string> &runs, const std::string &source) {
  std::string made = source;
  for (std::size_t at = 0; (at = made.find("\ntemplate <", at)) != std::string::npos; at++) {
    const std::size_t function = made.find('\n', at + 1) + 1, body = made.find(" {\n", function);
    const std::string parameters = made.substr(at + 1, function - at - 2),
                      signature = made.substr(function, body - function);
    if (!signature.starts_with("void run(") || !contains(parameters, "int d") ||
        contains(signature, "\n"))
      continue;
    // An overload refuses what none needs.
    const std::string those = needed(runs, parameters);
    made.insert(body, " requires(" + those + ")");
    made.insert(at + 1, parameters + " " + signature + " requires(!(" + those +
                            ")) { throw ShapeError(\"no run of this copy names this head dim and "
                            "type\"); } ");
  }
  return made;
}
