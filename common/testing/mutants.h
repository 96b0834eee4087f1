// SPDX-License-Identifier: MIT
// Many changes of one source, of which its program makes one, or none: which is chosen when it starts.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "common/testing/edits.h"

/// Changes of one source; each is made alone, at some places.
using Changes = std::vector<std::vector<Replacement>>;

struct Woven {
  std::string source;
  /// By change, the first and the last line of what has an `if` around it; 0 and 0 if the change is left out.
  std::vector<std::pair<std::size_t, std::size_t>> lines;
};

/// Returns the source with an `if (mutant == I)` around each statement or expression that change I is in. A change of
/// a constant, a type or a template argument cannot be made so, and is left out; so is one with leave_out[I]. Lines
/// keep their numbers. The program that includes this must have an int `mutant`; -1 changes nothing.
Woven weave(const std::string &source, const Changes &changes,
            const std::vector<bool> &leave_out = {});
