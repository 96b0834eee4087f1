// SPDX-License-Identifier: MIT
// What a reader types: make try-06, make check-06, make answer-06-2, make progress.
//
// WATCH  if it is not empty, check-NN checks again at each save, until all is done
#pragma once

#include <ostream>
#include <string>

/// Does the command and returns the exit status: 0, also where exercises are not done. Throws
/// std::runtime_error of one line where there is nothing to be done, as what lacks which command makes.
int exercise_command(const std::string &command, std::ostream &output);
