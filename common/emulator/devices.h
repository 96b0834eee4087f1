// SPDX-License-Identifier: MIT
// Several GPUs in one process, as a step of Part VII sees them: devices, streams, events, copies between
// devices, and NCCL. The names are those of CUDA's runtime and of nccl.h.
//
// The host only queues. What is queued runs when the host waits, in an order drawn by --seed among
// all that may run. README.md, 'Several GPUs', says what is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/emulator/runtime.h"

namespace emulator {

struct Stream;
struct Event;
struct Communicator;

/// There are so many devices from now on, with nothing queued, and device 0 is the current one.
void begin_devices(int count);
int current_device();

/// Runs all that is queued, on all devices.
void synchronise_devices();

/// The launches that are queued and have not begun. Any thread of the host may ask.
std::uint64_t queued_launches();

/// Queues on a stream that its owner writes these bytes, and leaves them as they are: what a step's caller may do
/// before and after a launch.
void rewrite(void *stream, const void *memory, std::size_t bytes, Where where = Where::current());

/// The bytes that went from one device to another since the last call.
using LinkBytes = std::map<std::pair<int, int>, std::uint64_t>;
LinkBytes take_link_bytes();

/// What the streams have done since the last call, if settings.streams is set.
std::vector<TraceSlice> take_streams();

namespace api {

// --- CUDA's runtime --------------------------------------------------------------------------------

using cudaStream_t = Stream *;
using cudaEvent_t = Event *;

enum cudaError_t { cudaSuccess };
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;

inline const char *cudaGetErrorString(cudaError_t) {
  return "no error";
}

// What CUDA refuses throws a KernelError that names the caller's line: these functions return cudaSuccess.
cudaError_t cudaSetDevice(int device, Where where = Where::current());
cudaError_t cudaMalloc(void **memory, std::size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream, Where where = Where::current());
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0,
                                Where where = Where::current());
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags, Where where = Where::current());
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                std::size_t bytes, cudaStream_t stream,
                                Where where = Where::current());

// --- NCCL ------------------------------------------------------------------------------------------

using ncclComm_t = Communicator *;

enum ncclResult_t { ncclSuccess };
enum ncclDataType_t { ncclUint8, ncclFloat16, ncclBfloat16, ncclFloat32 };

inline const char *ncclGetErrorString(ncclResult_t) {
  return "no error";
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices,
                             Where where = Where::current());
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclGroupStart(Where where = Where::current());
ncclResult_t ncclGroupEnd(Where where = Where::current());
ncclResult_t ncclSend(const void *from, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream, Where where = Where::current());
ncclResult_t ncclRecv(void *to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream, Where where = Where::current());
ncclResult_t ncclAllGather(const void *from, void *to, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream, Where where = Where::current());

}  // namespace api
}  // namespace emulator

using namespace emulator::api;
