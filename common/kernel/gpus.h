// SPDX-License-Identifier: MIT
// Several GPUs in one process: CUDA's streams and events, and NCCL (NCCL User Guide, 'Using NCCL'). On the
// emulator the same names are common/emulator/devices.h's.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/kernel/kernel.h"

#ifdef __CUDACC__
#include <nccl.h>
#else
#include "common/emulator/devices.h"

inline void cuda_check(cudaError_t, const char *) {}
#endif

/// Turns an error of NCCL into an exception that says what was being done.
inline void nccl_check(ncclResult_t result, const char *what) {
  if (result != ncclSuccess)
    throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(result));
}

template <class T>
constexpr ncclDataType_t nccl_type = std::is_same_v<T, bf16> ? ncclBfloat16 : ncclFloat16;

/// The communicators of the first so many GPUs, by rank. They are made once: it takes a second.
inline const std::vector<ncclComm_t> &communicators(int gpus) {
  static std::map<int, std::vector<ncclComm_t>> made;
  std::vector<ncclComm_t> &all = made[gpus];
  if (all.empty()) {
    all.resize(static_cast<std::size_t>(gpus));
    nccl_check(ncclCommInitAll(all.data(), gpus, nullptr), "ncclCommInitAll");
  }
  return all;
}
