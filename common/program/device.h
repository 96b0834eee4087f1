// SPDX-License-Identifier: MIT
// Where a step runs: the GPU, or the emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/kernel/step.h"

/// How long launches took.
struct Times {
  std::vector<float> ms;       // between two events
  std::vector<double> clocks;  // of an SM: elapsed, whatever the power limit does to the clock rate
};

/// What a GPU's stream does for a while, in nanoseconds since all GPUs began the launch.
struct StreamSlice {
  int gpu, stream;
  const char *what;  // "kernel", "message", "cudaStreamWaitEvent"
  std::uint64_t begin, end;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;
  virtual bool is_gpu() const = 0;
  virtual const Step &step() const = 0;

  /// Makes it so many GPUs, the first ones of this machine. Throws DeviceError if there are fewer.
  virtual void use_gpus(int count) = 0;
  /// The stream that a GPU's work begins and ends on, if there are several.
  virtual void *stream(int gpu) = 0;

  /// Bytes that can still be allocated.
  virtual std::size_t free_bytes() const = 0;
  /// Memory of one GPU; throws std::bad_alloc. Freed with the device.
  virtual void *allocate(std::size_t bytes) = 0;
  int memory_of = 0;  // of several GPUs, the one whose memory that is
  virtual void upload(void *to, const void *from, std::size_t bytes) = 0;
  virtual void download(void *to, const void *from, std::size_t bytes) = 0;

  /// Runs and waits for the end. Throws std::runtime_error if the kernel failed.
  virtual void run(const std::function<void()> &launch) = 0;
  /// Computes O and lse of a problem. Throws std::logic_error on the emulator, where the reference does it.
  virtual void forward(const Problem &problem) = 0;
  /// Times a launch `iterations` times, each as the mean of `each` launches, after `warm_up` launches
  /// that are not timed. All are queued before the first is waited for, as peers.py does.
  virtual Times time(const std::function<void()> &launch, int warm_up, int iterations,
                     int each) = 0;
  /// What the streams of several GPUs do in a launch. (The emulator's profile has that.)
  virtual std::vector<StreamSlice> trace(const std::function<void()> &) { return {}; }
};

std::unique_ptr<Device> make_cpu_device();

/// The first GPU, or null and the reason why there is none.
std::unique_ptr<Device> make_gpu_device(std::string &why_not);
