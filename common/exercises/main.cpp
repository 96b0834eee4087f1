// SPDX-License-Identifier: MIT
// build/host/bin/exercises try-06 | check-06 | answer-06-2 | progress: what `make` of the same name
// runs. commands.h has them.
#include <exception>
#include <iostream>

#include "common/exercises/commands.h"

int main(int argc, char **argv) {
  if (argc != 2) {
    std::cerr << "usage: exercises try-NN | check-NN | answer-NN-K | progress\n";
    return 2;
  }
  try {
    return exercise_command(argv[1], std::cout);
  } catch (const std::exception &error) {
    std::cerr << argv[1] << ": " << error.what() << "\n";
    return 2;
  }
}
