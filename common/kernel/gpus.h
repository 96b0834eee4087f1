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

/// Puts a mark at the end of a stream, for which other streams can wait.
inline void record(cudaEvent_t event, cudaStream_t on,
                   [[maybe_unused]] Where where = Where::current()) {
#ifdef __CUDACC__
  cuda_check(cudaEventRecord(event, on), "cudaEventRecord");
#else
  cudaEventRecord(event, on, where);
#endif
}

/// What is queued on this stream later waits for the mark.
inline void wait(cudaStream_t on, cudaEvent_t event,
                 [[maybe_unused]] Where where = Where::current()) {
#ifdef __CUDACC__
  cuda_check(cudaStreamWaitEvent(on, event, 0), "cudaStreamWaitEvent");
#else
  cudaStreamWaitEvent(on, event, 0, where);
#endif
}

namespace {  // of each object of its own: the emulator and a GPU have one each

/// A GPU's second stream, on which K and V arrive, and moments for which streams wait.
struct Traffic {
  cudaStream_t stream;
  cudaEvent_t begun;  // the launch
  std::vector<cudaEvent_t> arrived,
      computed;  // of each hop: its K and V are complete, and have been read
  // (Step 74 has two hops more, in which nothing is computed: the last gradients come home.)
};

}  // namespace

/// That of each of the first so many GPUs, with as many hops. They are made once. (static, as
/// communicators() is: the emulator's are linked into the same program, and of two inline functions
/// of one name the linker keeps one.)
static inline const std::vector<Traffic> &traffic(int gpus) {
  static std::map<int, std::vector<Traffic>> made;
  std::vector<Traffic> &all = made[gpus];
  const auto new_event = [] {
    cudaEvent_t event;
    cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  };
  for (int gpu = static_cast<int>(all.size()); gpu < gpus; gpu++) {
    cuda_check(cudaSetDevice(gpu), "cudaSetDevice");
    Traffic of{{}, new_event(), {}, {}};
    cuda_check(cudaStreamCreateWithFlags(&of.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    for (int hop = 0; hop < gpus + 2; hop++) {
      of.arrived.push_back(new_event());
      of.computed.push_back(new_event());
    }
    all.push_back(of);
  }
  return all;
}

/// Turns an error of NCCL into an exception that says what was being done.
inline void nccl_check(ncclResult_t result, const char *what) {
  if (result != ncclSuccess)
    throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(result));
}

template <class T>
constexpr ncclDataType_t nccl_type = std::is_same_v<T, float>  ? ncclFloat32
                                     : std::is_same_v<T, bf16> ? ncclBfloat16
                                                               : ncclFloat16;

/// The communicators of the first so many GPUs, by rank. They are made once: it takes a second.
static inline const std::vector<ncclComm_t> &communicators(int gpus) {
  static std::map<int, std::vector<ncclComm_t>> made;
  std::vector<ncclComm_t> &all = made[gpus];
  if (all.empty()) {
    all.resize(static_cast<std::size_t>(gpus));
    nccl_check(ncclCommInitAll(all.data(), gpus, nullptr), "ncclCommInitAll");
  }
  return all;
}
