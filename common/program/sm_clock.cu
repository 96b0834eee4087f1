// SPDX-License-Identifier: MIT
// The clock of each SM, read between launches: by the program (gpu_device.cu) and, from a shared library, by
// common/measure/peers.py.
//
// A profiler's elapsed cycles need its privileges and replay the kernel, and nvidia-smi samples a rate that is up to
// 15% above the SM's own. %clock64 is the SM's own counter and needs no privileges, but each SM has another, so
// that the two readings of a difference must come from one SM. A kernel cannot choose its SM. Therefore the reading
// runs on all of them and files what it reads under %smid.
#include <cuda_runtime.h>

namespace {

__global__ void read_clocks(long long *clocks, unsigned sms) {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (sm < sms) clocks[sm] = clock64();
}

}  // namespace

/// Queues, on this stream, a kernel that writes the clock of SM i to clocks[i], for i below `sms`. An SM that runs no
/// block of it keeps its old value. Returns the error of the launch.
extern "C" cudaError_t read_sm_clocks(long long *clocks, int sms, cudaStream_t stream) {
  // Twice as many blocks as SMs: blocks go to the SM that has fewest, so every SM runs one.
  read_clocks<<<2 * sms, 1, 0, stream>>>(clocks, static_cast<unsigned>(sms));
  return cudaGetLastError();
}
