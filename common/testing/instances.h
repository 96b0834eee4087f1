// SPDX-License-Identifier: MIT
// A step compiled for some runs alone: most of a copy's compilation are kernels of head dims and types that its runs
// do not name.
#pragma once

#include <string>
#include <vector>

/// Returns the source in which run<T, d>(...), which starts the kernels of a type and a head dim, refuses every problem
/// unless one of these runs names them: the options of each, --head-dim among them; of several the last counts. Any
/// other run is refused, with exit status 2, and has no answer. Lines keep their numbers.
std::string with_instances_of(const std::vector<std::string> &runs, const std::string &source);
