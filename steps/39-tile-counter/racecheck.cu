// SPDX-License-Identifier: MIT
// What compute-sanitizer's racecheck sees of a number that passes through shared memory as step 39's tiles do,
// and of a tile that leaves it by a bulk copy as O does. `make racecheck` builds it and runs its modes.
//
// Needs       sm_90: mbarrier.try_wait, cp.async.bulk
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "common/kernel/kernel.h"
#include "common/kernel/tma.h"

namespace {

constexpr int readers = 128, numbers = 50;
const char *const modes[] = {"each-arrives",    "each-arrives-early", "one-arrives",
                             "without-barrier", "bulk-copy",          "bulk-copy-early"};
constexpr int each_arrives = 0, each_arrives_early = 1, one_arrives = 2, bulk_copy = 4;

__global__ void pass(int mode, int *sums) {
  __shared__ int number[2];
  __shared__ Mbarrier full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      mbarrier_init(full[i], 1);
      mbarrier_init(empty[i], mode < one_arrives ? readers : 1);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x == readers) {
    for (int i = 0; i < numbers; i++) {
      mbarrier_wait(empty[i % 2], i / 2 % 2 ^ 1);
      number[i % 2] = i;
      mbarrier_arrive(full[i % 2]);
    }
  } else if (threadIdx.x < readers) {
    int sum = 0;
    for (int i = 0; i < numbers; i++) {
      mbarrier_wait(full[i % 2], i / 2 % 2);
      if (mode == each_arrives_early) mbarrier_arrive(empty[i % 2]);
      sum += number[i % 2];
      if (mode == each_arrives) mbarrier_arrive(empty[i % 2]);
      if (mode == one_arrives) named_barrier_sync(1, readers);
      if (mode >= one_arrives && threadIdx.x == 0) mbarrier_arrive(empty[i % 2]);
    }
    sums[threadIdx.x] = sum;
  }
}

/// The threads write a row, which one of them copies to out[i]; then they write the next over it.
__global__ void copy(int mode, int *out) {
  __shared__ alignas(128) int row[readers];
  for (int i = 0; i < numbers; i++) {
    row[(threadIdx.x + i) % readers] = i;
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile(
          "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out + i * readers),
          "r"(ptx::shared_address(row)), "n"(sizeof row)
          : "memory");
      tma_store_commit();
      if (mode == bulk_copy) tma_store_wait_read<0>();
    }
    if (mode == bulk_copy) __syncthreads();
  }
}

}  // namespace

int main(int argc, char **argv) {
  const auto named = [&](const char *mode) { return argc == 2 && !std::strcmp(mode, argv[1]); };
  const auto mode = std::find_if(std::begin(modes), std::end(modes), named) - modes;
  if (mode == std::ssize(modes)) return 2;
  int wrong = 0;
  static int out[numbers * readers];
  int *device;
  cudaMalloc(&device, sizeof out);
  cudaMemset(device, 0, sizeof out);
  if (mode < bulk_copy)
    pass<<<1, readers + 32>>>(mode, device);
  else
    copy<<<1, readers>>>(mode, device);
  cudaMemcpy(out, device, sizeof out, cudaMemcpyDeviceToHost);
  // A reader's sum, or a number of a row.
  const int results = mode < bulk_copy ? readers : numbers * readers;
  for (int i = 0; i < results; i++)
    wrong += out[i] != (mode < bulk_copy ? numbers * (numbers - 1) / 2 : i / readers);
  std::printf("%s: %s, %d of %d wrong\n", modes[mode], cudaGetErrorString(cudaGetLastError()),
              wrong, results);
}
