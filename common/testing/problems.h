// SPDX-License-Identifier: MIT
// Problems that nobody chose, for tests of what takes them.
#pragma once

#include <cstdint>
#include <string>

#include "common/testing/process.h"

/// Returns the options of a problem that this program takes, with lengths and windows of up to `longest` rows. If the
/// heads of all sequences are more than `most_heads`, the rows are fewer in proportion.
std::string draw_problem(const Description &program, int longest, int most_heads,
                         std::uint64_t &state);
