// SPDX-License-Identifier: MIT
// Several GPUs, of one process or with a process each: CUDA's streams and events, and NCCL (NCCL User Guide, 'Using
// NCCL'). On the emulator the same names are common/emulator/devices.h's.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/kernel/kernel.h"
#include "common/kernel/processes.h"

#ifdef __CUDACC__
#include <nccl.h>

#include "common/kernel/id_file.h"
#include "common/kernel/marks.h"
#else
#include "common/emulator/devices.h"

inline void cuda_check(cudaError_t, const char *) {}
#endif

/// The GPUs that this process has: all of them, or one.
static inline std::vector<int> own_gpus(const Problem &p) {
  std::vector<int> own;
  for (int gpu = 0; gpu < p.gpus; gpu++)
    if (is_own(gpu)) own.push_back(gpu);
  return own;
}

/// Makes a GPU of this process the current one.
static inline void set_device(int gpu) {
  cuda_check(cudaSetDevice(device_of(gpu)), "cudaSetDevice");
}

/// Puts a mark at the end of a stream, for which other streams can wait.
inline void record(cudaEvent_t event, cudaStream_t on,
                   [[maybe_unused]] Where where = Where::current()) {
#ifdef __CUDACC__
  cuda_check(cudaEventRecord(event, on), "cudaEventRecord");
  marks.add(on, false);
#else
  cudaEventRecord(event, on, where);
#endif
}

/// What is queued on this stream later waits for the mark.
inline void wait(cudaStream_t on, cudaEvent_t event,
                 [[maybe_unused]] Where where = Where::current()) {
#ifdef __CUDACC__
  marks.add(on, false);
  cuda_check(cudaStreamWaitEvent(on, event, 0), "cudaStreamWaitEvent");
  marks.add(on, true);
#else
  cudaStreamWaitEvent(on, event, 0, where);
#endif
}

namespace {  // of each object of its own: the emulator and a GPU have one each

/// An event for each hop.
class HopEvents {
 public:
  void push_back(cudaEvent_t event) { events_.push_back(event); }
  cudaEvent_t operator[](int hop) const {
    if (hop < 0 || hop >= int(events_.size()))
      throw std::runtime_error("hop " + std::to_string(hop) + " has no event: hops 0 to " +
                               std::to_string(int(events_.size()) - 1) + " have");
    return events_[hop];
  }

 private:
  std::vector<cudaEvent_t> events_;
};

/// A stream of a GPU beside the one of the launch, on which K and V arrive, and moments for which streams wait.
struct Traffic {
  cudaStream_t stream = nullptr;
  cudaEvent_t begun = nullptr;  // the launch
  HopEvents arrived, computed;  // the K and V of a hop are complete, and have been read
  // (Step 74 has two hops more, in which nothing is computed: the last gradients come home.)
};

}  // namespace

/// That of each GPU of this process, by rank, with as many hops as there are GPUs. Each `number` has its own, which
/// need not carry K and V (step 76). They are made once. (static, as communicators() is: the emulator's are linked into
/// the same program, and of two inline functions of one name the linker keeps one.)
static inline const std::vector<Traffic> &traffic(const Problem &p, int number = 0) {
  static std::map<std::pair<int, int>, std::vector<Traffic>> made;
  std::vector<Traffic> &all = made[{p.gpus, number}];
  all.resize(static_cast<std::size_t>(p.gpus));
  const auto new_event = [] {
    cudaEvent_t event;
    cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  };
  for (const int gpu : own_gpus(p)) {
    Traffic &of = all[gpu];
    if (of.stream) continue;
    set_device(gpu);
    of.begun = new_event();
    cuda_check(cudaStreamCreateWithFlags(&of.stream, cudaStreamNonBlocking), "cudaStreamCreate");
#ifdef __CUDACC__
    marks.places[of.stream] = {gpu, 1 + number};
#endif
    for (int hop = 0; hop < p.gpus + 2; hop++) {
      of.arrived.push_back(new_event());
      of.computed.push_back(new_event());
    }
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

#ifdef __CUDACC__
/// The communicator of the one GPU that this process has. All ranks get the unique id that rank 0 makes.
static inline ncclComm_t communicator_of_rank(int ranks) {
  const auto &[rank, device, file] = processes;
  ncclUniqueId id;
  ncclComm_t comm;
  if (rank == 0) nccl_check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  share_by_file(file, rank, &id, sizeof id);
  set_device(rank);
  nccl_check(ncclCommInitRank(&comm, ranks, id, rank), "ncclCommInitRank");
  if (rank == 0) std::filesystem::remove(file);  // all ranks are here, so all have read it
  return comm;
}
#endif

/// The communicators of this process's GPUs, by rank. They are made once: it takes a second.
static inline const std::vector<ncclComm_t> &communicators(const Problem &p) {
  static std::map<int, std::vector<ncclComm_t>> made;
  std::vector<ncclComm_t> &all = made[p.gpus];
  if (!all.empty()) return all;
  all.resize(static_cast<std::size_t>(p.gpus));
#ifdef __CUDACC__
  if (processes.rank >= 0) {
    all[processes.rank] = communicator_of_rank(p.gpus);
    return all;
  }
#endif
  nccl_check(ncclCommInitAll(all.data(), p.gpus, nullptr), "ncclCommInitAll");
  return all;
}
