// SPDX-License-Identifier: MIT
// Moments on the streams of a process's GPUs, for --streams-csv on GPUs: gpus.h marks both sides of each wait, and each
// event that is recorded.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct Marks {
  struct Mark {
    cudaStream_t stream;
    bool waited;  // what ends here is a wait
    cudaEvent_t moment;
  };
  struct Place {
    int gpu, stream;  // a GPU's streams are numbered from 0, where the launch begins and ends
  };
  bool wanted = false;
  std::map<cudaStream_t, Place> places;
  std::vector<Mark> all;

  /// Marks the end of a stream.
  void add(cudaStream_t stream, bool waited) {
    if (!wanted) return;
    const auto check = [](cudaError_t error) {
      if (error != cudaSuccess)
        throw std::runtime_error(std::string("a mark on a stream: ") + cudaGetErrorString(error));
    };
    int current;
    cudaEvent_t moment;
    check(cudaGetDevice(&current));
    check(cudaSetDevice(places.at(stream).gpu));  // whose event it is
    check(cudaEventCreate(&moment));
    check(cudaEventRecord(moment, stream));
    check(cudaSetDevice(current));
    all.push_back({stream, waited, moment});
  }
};

// What the program asks of its step.
inline Marks marks;
