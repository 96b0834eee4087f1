// SPDX-License-Identifier: MIT
// Problems that nobody chose, for tests of what takes them.
#pragma once

#include <cstdint>
#include <string>

#include "common/testing/process.h"

/// The options of a problem of what this program takes, lengths and windows of up to `longest` rows
/// among them. Of options that it does not take there are none.
std::string draw_problem(const Description &program, int longest, std::uint64_t &state);
