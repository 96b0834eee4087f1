// SPDX-License-Identifier: MIT
// Which of the GPUs that share a sequence this process has: all of them, or one, while other processes have the others.
#pragma once

#include <string>

struct Processes {
  int rank = -1;        // the GPU that this process has; -1: it has all
  int device = 0;       // that GPU's number for CUDA
  std::string id_file;  // through which the processes find each other
};

// What --rank says, for the program and its steps.
inline Processes processes;

static inline bool is_own(int gpu) {
  return processes.rank < 0 || gpu == processes.rank;
}

/// The number of a GPU of this process for CUDA.
static inline int device_of(int gpu) {
  return processes.rank < 0 ? gpu : processes.device;
}
