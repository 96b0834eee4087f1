// SPDX-License-Identifier: MIT
// The one header that a step includes. A kernel's source is compiled by nvcc for the GPU and by
// the host's compiler for the emulator; what differs between the two is here and in view.h.
#pragma once

#include <cfloat>

#include "common/kernel/ptx.h"
#include "common/kernel/step.h"
#include "common/kernel/view.h"

constexpr unsigned kAllLanes = 0xffffffff;

/// log2(e). ex2 is the GPU's only exponential: e^x is 2^(x log2_e).
constexpr float log2_e = 1.44269504f;

#ifdef __CUDACC__

#include <cuda_fp16.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

/// Turns a CUDA error into an exception that says what was being done.
inline void cuda_check(cudaError_t error, const char *what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/// The block's shared memory, as the struct that the launch made room for.
template <class SharedStorage>
__device__ SharedStorage &shared_storage() {
  asm volatile("// shared memory: %0" ::"n"(sizeof(SharedStorage)));  // `make regs` looks for it
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  return *reinterpret_cast<SharedStorage *>(shared_memory);
}

/// The most shared memory that a block can have on this GPU: 99 KB on sm_89, 163 on sm_80, 227 on sm_90.
/// (static: the emulator's function of this name is linked into the same program.)
static inline int shared_memory_per_block() {
  int device, bytes;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  return bytes;
}

/// Lets a kernel's blocks have this much shared memory, once for each kernel and device: a launch that
/// is timed is only a launch. More than 48 KB must be requested (CUDA C++ Programming Guide, 'Shared Memory'
/// of compute capability 7).
inline void allow_shared_memory(const void *kernel, int bytes) {
  static std::map<std::pair<int, const void *>, int> allowed;
  static std::mutex mutex;  // threads of a program that calls a step as a library
  const std::lock_guard lock(mutex);
  int device;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  int &so_far = allowed[{device, kernel}];
  if (so_far >= bytes) return;
  const int available = shared_memory_per_block();
  if (bytes > available)
    // At head dim 64 every step fits the 64 KB that all GPUs since sm_75 have.
    throw ShapeError("this step and head dim take " + std::to_string((bytes + 1023) / 1024) +
                     " KB of shared memory per block, and this GPU allows " +
                     std::to_string(available / 1024) +
                     " KB; --head-dim 64 takes less, and `make regs` lists what other steps take");
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "cudaFuncSetAttribute");
  so_far = bytes;
}

/// Starts a kernel whose blocks have one SharedStorage each (void: none), and does not wait for it.
/// The kernels of one stream (null: the default) run in order.
template <class SharedStorage, class... Parameters, class... Arguments>
void launch_on(void *stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
               Arguments... arguments) {
  int bytes = 0;
  if constexpr (!std::is_void_v<SharedStorage>) bytes = sizeof(SharedStorage);
  allow_shared_memory(reinterpret_cast<const void *>(kernel), bytes);
  kernel<<<grid, block, bytes, static_cast<cudaStream_t>(stream)>>>(
      static_cast<Parameters>(arguments)...);
  cuda_check(cudaGetLastError(), "kernel launch");
}

/// How many of a kernel's blocks the GPU runs at once.
template <class SharedStorage, class Kernel>
int resident_blocks(Kernel *kernel, int threads) {
  static const int blocks = [=] {
    int device, multiprocessors, of_each;
    allow_shared_memory(reinterpret_cast<const void *>(kernel), sizeof(SharedStorage));
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    cuda_check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
               "cudaDeviceGetAttribute");
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, kernel, threads,
                                                             sizeof(SharedStorage)),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return multiprocessors * of_each;
  }();
  return blocks;
}

/// The same launch with all blocks on the GPU at once, so that they can wait for each other.
template <class SharedStorage, class... Parameters, class... Arguments>
void launch_together(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments) {
  allow_shared_memory(reinterpret_cast<const void *>(kernel), sizeof(SharedStorage));
  cudaLaunchAttribute cooperative;
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{grid, block, sizeof(SharedStorage), nullptr, &cooperative, 1};
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  if (error == cudaErrorCooperativeLaunchTooLarge)
    throw ShapeError("this step has all blocks on the GPU at once, and they are " +
                     std::to_string(grid.x * grid.y * grid.z) + "; --batch or --splits is less");
  cuda_check(error, "kernel launch");
}

/// The same launch in clusters of `blocks` blocks, neighbours in x.
template <class SharedStorage, class... Parameters, class... Arguments>
void launch_clusters(int blocks, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                     Arguments... arguments) {
  allow_shared_memory(reinterpret_cast<const void *>(kernel), sizeof(SharedStorage));
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{grid, block, sizeof(SharedStorage), nullptr, &cluster, 1};
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...),
             "kernel launch");
}

/// A launch as `launch_on` makes it, but the kernel may begin while the one before it in the stream still runs:
/// when all of that one's blocks have said griddepcontrol_launch_dependents or ended. What it writes is visible
/// after griddepcontrol_wait, and not before (CUDA C++ Programming Guide, 'Programmatic Dependent Launch').
template <class SharedStorage, class... Parameters, class... Arguments>
void launch_beside_on(void *stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                      Arguments... arguments) {
  allow_shared_memory(reinterpret_cast<const void *>(kernel), sizeof(SharedStorage));
  cudaLaunchAttribute beside;
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{
      grid, block, sizeof(SharedStorage), static_cast<cudaStream_t>(stream), &beside, 1};
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...),
             "kernel launch");
}

/// The thread's warp within its block. Shuffled, so that nvcc knows that it is one number for all
/// lanes and computes what follows from it once per warp, in uniform registers.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
}

/// Tells nvcc, in the same way, that a number is the same for all lanes. All lanes must execute it: the
/// emulator reports a lane that does not, or that has another number.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(kAllLanes, x, 0);
}

/// A workaround for nvcc: loads before it and after it stay two loads. Without it nvcc merges two
/// loops that read the same shared memory, and does by itself what a later step does by hand
/// (measured: step 05 runs at 76 TFLOP/s then, not at 47). It is no barrier that a kernel needs.
__device__ __forceinline__ void keep_loads_apart() {
  __syncwarp(kAllLanes);
}

#define BACKEND_STEP gpu_step

#else

inline int warp_index() {
  return threadIdx.x / 32;
}
[[gnu::noinline]] inline int uniform(int x, Where where = Where::current()) {
  const int first = __shfl_sync(kAllLanes, x, 0, 32, where);
  if (x != first)
    emulator::fail({emulator::Fault::kDivergence, "uniform: a lane's number is not that of lane 0"},
                   where);
  return x;
}
inline void keep_loads_apart() {}

static inline int shared_memory_per_block() {
  return emulator::shared_memory_per_block();
}

template <class SharedStorage, class Kernel>
int resident_blocks(Kernel *, int threads) {
  return emulator::resident_blocks(threads, sizeof(SharedStorage));
}

template <class SharedStorage>
SharedStorage &shared_storage() {
  return *static_cast<SharedStorage *>(emulator::shared_memory());
}

/// A stream, and the line that launches on it.
struct LaunchStream {
  void *stream;
  Where where;
  LaunchStream(void *on, Where line = Where::current()) : stream(on), where(line) {}
};

template <class SharedStorage, class... Parameters, class... Arguments>
void launch_on(LaunchStream on, void (*kernel)(Parameters...), dim3 grid, dim3 block,
               Arguments... arguments) {
  std::size_t bytes = 0;
  if constexpr (!std::is_void_v<SharedStorage>) bytes = sizeof(SharedStorage);
  emulator::launch_on(
      on.stream, grid, block, bytes, [=] { kernel(static_cast<Parameters>(arguments)...); }, {},
      on.where);
}

template <class SharedStorage, class... Parameters, class... Arguments>
void launch_together(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments) {
  emulator::run(grid, block, sizeof(SharedStorage),
                [=] { kernel(static_cast<Parameters>(arguments)...); }, {.together = true});
}

template <class SharedStorage, class... Parameters, class... Arguments>
void launch_clusters(int blocks, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                     Arguments... arguments) {
  emulator::run(grid, block, sizeof(SharedStorage),
                [=] { kernel(static_cast<Parameters>(arguments)...); },
                {.cluster = static_cast<unsigned>(blocks)});
}

template <class SharedStorage, class... Parameters, class... Arguments>
void launch_beside_on(void *stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                      Arguments... arguments) {
  emulator::launch_on(stream, grid, block, sizeof(SharedStorage),
                      [=] { kernel(static_cast<Parameters>(arguments)...); }, {.beside = true});
}

#define BACKEND_STEP cpu_step

#endif

/// Shared memory that every GPU since sm_80 lets a block have, in bytes: sm_86, sm_89 and sm_120 have no more
/// (CUDA C++ Programming Guide, 'Technical Specifications per Compute Capability').
constexpr int kSharedMemoryOfAll = 99 * 1024;

/// Whether this GPU lets a block have a SharedStorage.
template <class SharedStorage>
bool fits_a_block() {
  static const bool fits = shared_memory_per_block() >= int(sizeof(SharedStorage));
  return fits;
}

template <class SharedStorage, class Kernel, class... Arguments>
void launch(Kernel kernel, dim3 grid, dim3 block, Arguments... arguments) {
  launch_on<SharedStorage>(nullptr, kernel, grid, block, arguments...);
}

template <class SharedStorage, class Kernel, class... Arguments>
void launch_beside(Kernel kernel, dim3 grid, dim3 block, Arguments... arguments) {
  launch_beside_on<SharedStorage>(nullptr, kernel, grid, block, arguments...);
}

/// Ends a step's file: gives the program its Step. The Makefile passes the name of the folder as
/// STEP_NAME, and what the file's header says after 'Needs' and 'Takes'.
#define EXPORT_STEP(...)          \
  extern const Step BACKEND_STEP; \
  const Step BACKEND_STEP = [] {  \
    Step step __VA_ARGS__;        \
    step.name = STEP_NAME;        \
    step.needs = STEP_NEEDS;      \
    step.takes = STEP_TAKES;      \
    return step;                  \
  }()
