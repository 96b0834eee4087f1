// SPDX-License-Identifier: MIT
// The GPU as a device.
#include <cuda_runtime.h>

#include <algorithm>
#include <deque>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/kernel/marks.h"
#include "common/kernel/processes.h"
#include "common/program/device.h"
#include "common/program/ladder.h"

extern "C" cudaError_t read_sm_clocks(long long *clocks, int sms,
                                      cudaStream_t stream);   // sm_clock.cu
extern "C" cudaError_t forward_pass(const Problem &problem);  // forward.cu

namespace {

void check(cudaError_t error, const char *what) {
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

__global__ void nothing() {}

constexpr long long kHoldNanoseconds = 5'000'000;

/// Keeps the GPU, or this queue of it, busy for so long.
__global__ void hold(long long nanoseconds) {
  const auto now = [] {
    long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
  };
  for (const long long begin = now(); now() - begin < nanoseconds;) {
  }
}

/// Throws DeviceError unless the GPU, the current device, runs this step, and as it was compiled.
void check_runs_step(const cudaDeviceProp &gpu) {
  const int capability = 10 * gpu.major + gpu.minor;
  const std::string why_not = why_not_on_gpu(ladder(), gpu_step.name, gpu_step.needs, capability);
  if (!why_not.empty()) throw DeviceError(why_not);
  const std::string needs = gpu_step.needs;
  const std::string arch = needs.ends_with('a') ? needs : "sm_" + std::to_string(capability);
  cudaFuncAttributes attributes;  // the flags of the compiler were those of the step's kernels
  const cudaError_t error = cudaFuncGetAttributes(&attributes, nothing);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion)
    throw DeviceError("not compiled for this GPU; build it with ARCH=" + arch +
                      ", or run it on the emulator with --device cpu");
  check(error, "cudaFuncGetAttributes");
}

/// A moment in the queue of the GPU.
class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  Event(Event &&other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event &operator=(Event &&) = delete;
  ~Event() {
    if (event_) cudaEventDestroy(event_);
  }

  void record(cudaStream_t stream = nullptr) {
    check(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  /// What is queued on the stream later waits for it.
  void hold_back(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_), "cudaStreamWaitEvent");
  }
  float milliseconds_since(const Event &earlier) const {
    return earlier.milliseconds_until(event_);
  }
  float milliseconds_until(cudaEvent_t later) const {
    float milliseconds;
    check(cudaEventElapsedTime(&milliseconds, event_, later), "cudaEventElapsedTime");
    return milliseconds;
  }

 private:
  cudaEvent_t event_;
};

/// Readings of the clocks of all SMs of the current GPU, in the queue of a stream of it.
class SmClocks {
 public:
  SmClocks(int readings, int sms, cudaStream_t stream = nullptr)
      : stream_(stream), sms_(sms), clocks_(std::size_t(readings) * sms) {
    check(cudaMalloc(&memory_, bytes()), "cudaMalloc");
    check(cudaMemset(memory_, 0, bytes()), "cudaMemset");
  }
  SmClocks(const SmClocks &) = delete;
  SmClocks &operator=(const SmClocks &) = delete;
  ~SmClocks() { cudaFree(memory_); }

  /// Queues the next reading.
  void read() {
    check(read_sm_clocks(memory_ + next_, sms_, stream_), "reading the clocks");
    next_ += sms_;
  }
  /// Waits for the readings and returns the clocks from each to the next: the mean over the SMs that
  /// both have read. (The SMs of a GPU have several clock generators, whose rates differ a little.)
  std::vector<double> elapsed() {
    check(cudaMemcpy(clocks_.data(), memory_, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    std::vector<double> all;
    for (std::size_t i = sms_; i < clocks_.size(); i += sms_) {
      double sum = 0;
      int seen = 0;
      for (std::size_t sm = i; sm < i + sms_; sm++)
        if (clocks_[sm] && clocks_[sm - sms_]) {
          sum += static_cast<double>(clocks_[sm] - clocks_[sm - sms_]);
          seen++;
        }
      all.push_back(sum / seen);
    }
    return all;
  }

 private:
  std::size_t bytes() const { return clocks_.size() * sizeof(long long); }

  cudaStream_t stream_;
  std::size_t sms_, next_ = 0;
  std::vector<long long> clocks_;
  long long *memory_ = nullptr;
};

class Gpu : public Device {
 public:
  Gpu() {
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaGetDeviceProperties(&properties_, 0), "cudaGetDeviceProperties");
    check_runs_step(properties_);
  }
  ~Gpu() override {
    for (void *memory : allocated_) cudaFree(memory);
  }

  std::string name() const override { return properties_.name; }
  bool is_gpu() const override { return true; }
  const Step &step() const override { return gpu_step; }

  void use_gpus(int count) override {
    int there;
    check(cudaGetDeviceCount(&there), "cudaGetDeviceCount");
    if (processes.rank >= 0) {
      first_ = processes.rank;
      processes.device = processes.rank % there;  // the ranks of a machine follow each other
      devices_ = {processes.device};
      streams_.resize(1);
      check(cudaSetDevice(devices_[0]), "cudaSetDevice");
      check(cudaStreamCreateWithFlags(&streams_[0], cudaStreamNonBlocking), "cudaStreamCreate");
      return;
    }
    if (there < count)
      throw DeviceError("--gpus " + std::to_string(count) + ": this machine has " +
                        std::to_string(there) + "; run it on the emulator with --device cpu");
    streams_.resize(count);
    devices_.resize(count);
    for (int gpu = 0; gpu < count; gpu++) {
      devices_[gpu] = gpu;
      check(cudaSetDevice(gpu), "cudaSetDevice");
      check(cudaStreamCreateWithFlags(&streams_[gpu], cudaStreamNonBlocking), "cudaStreamCreate");
      marks.places[streams_[gpu]] = {gpu, 0};
      for (int peer = 0; peer < count; peer++) {  // copies go directly where they can
        int direct = 0;
        if (peer != gpu) check(cudaDeviceCanAccessPeer(&direct, gpu, peer), "the peers");
        if (direct) check(cudaDeviceEnablePeerAccess(peer, 0), "cudaDeviceEnablePeerAccess");
      }
    }
  }
  void *stream(int gpu) override { return streams_[gpu - first_]; }

  std::size_t free_bytes() const override {
    std::size_t free = 0, total;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
  }
  void *allocate(std::size_t bytes) override {
    check(cudaSetDevice(device_of(memory_of)), "cudaSetDevice");
    void *memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    allocated_.push_back(memory);
    check(cudaMemset(memory, 0xff, bytes), "cudaMemset");  // NaN as fp16 and as fp32
    // The streams of several GPUs do not wait for the default stream, on which that is.
    check(cudaDeviceSynchronize(), "cudaMemset");
    return memory;
  }
  void upload(void *to, const void *from, std::size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the GPU");
  }
  void download(void *to, const void *from, std::size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the GPU");
  }

  void run(const std::function<void()> &launch) override {
    launch();
    synchronise();
  }
  void forward(const Problem &problem) override {
    check(forward_pass(problem), "the forward pass");
    check(cudaDeviceSynchronize(), "the forward pass failed");
  }
  Times time(const std::function<void()> &launch, int warm_up, int iterations, int each) override {
    if (!streams_.empty()) return time_together(launch, warm_up, iterations, each);
    constexpr int kEmpty = 5;
    std::vector<Event> begin(iterations + kEmpty), end(iterations + kEmpty);
    SmClocks clocks(iterations + kEmpty + 1, properties_.multiProcessorCount);
    for (int i = 0; i < warm_up; i++) launch();
    // Short launches end sooner than the host queues them: they wait until all are queued.
    if (each > 1) hold<<<1, 1>>>(kHoldNanoseconds);
    clocks.read();
    for (int i = 0; i < iterations + kEmpty; i++) {
      begin[i].record();
      for (int j = 0; j < each && i < iterations; j++) launch();
      end[i].record();
      clocks.read();
    }
    check(cudaDeviceSynchronize(), "the kernel failed");
    // What two readings cost with no launch between them is subtracted. What a launch costs after
    // another, a microsecond, is a part of it, in the clocks as in the time.
    std::vector<double> elapsed = clocks.elapsed();
    std::sort(elapsed.end() - kEmpty, elapsed.end());
    const double empty = elapsed[iterations + kEmpty / 2];
    Times times;
    for (int i = 0; i < iterations; i++) {
      times.ms.push_back(end[i].milliseconds_since(begin[i]) / each);
      times.clocks.push_back((elapsed[i] - empty) / each);
    }
    return times;
  }

  std::vector<StreamSlice> trace(const std::function<void()> &launch) override {
    const std::size_t gpus = streams_.size();
    std::vector<Event> ready, begin;
    for (std::size_t gpu = 0; gpu < gpus; gpu++) {
      check(cudaSetDevice(devices_[gpu]), "cudaSetDevice");
      ready.emplace_back();
      begin.emplace_back();
    }
    for (int i = 0; i < 3; i++) launch();  // the first messages of all cost more
    synchronise();
    hold_all();
    for (std::size_t gpu = 0; gpu < gpus; gpu++) ready[gpu].record(streams_[gpu]);
    for (std::size_t gpu = 0; gpu < gpus; gpu++) {
      for (std::size_t peer = 0; peer < gpus; peer++) ready[peer].hold_back(streams_[gpu]);
      begin[gpu].record(streams_[gpu]);
    }
    marks.wanted = true;
    launch();
    for (const cudaStream_t stream : streams_) marks.add(stream, false);
    marks.wanted = false;
    synchronise();
    std::vector<StreamSlice> slices;
    std::map<cudaStream_t, std::uint64_t> reached;
    for (const Marks::Mark &mark : std::exchange(marks.all, {})) {
      const auto [gpu, stream] = marks.places.at(mark.stream);
      check(cudaSetDevice(gpu), "cudaSetDevice");
      const auto end = static_cast<std::uint64_t>(
          std::max(0.0f, begin[gpu].milliseconds_until(mark.moment)) * 1e6);
      std::uint64_t &now = reached[mark.stream];
      const char *const what = mark.waited   ? "cudaStreamWaitEvent"
                               : stream == 1 ? "message"
                                             : "kernel";
      if (end > now) slices.push_back({gpu, stream, what, now, end});
      now = std::max(now, end);
      check(cudaEventDestroy(mark.moment), "cudaEventDestroy");
    }
    return slices;
  }

 private:
  void synchronise() {
    for (const int device : devices_) {
      check(cudaSetDevice(device), "cudaSetDevice");
      check(cudaDeviceSynchronize(), "the kernel failed");
    }
  }

  /// The GPUs wait until all is queued: the host is slower than short launches.
  void hold_all() {
    for (std::size_t gpu = 0; gpu < streams_.size(); gpu++) {
      check(cudaSetDevice(devices_[gpu]), "cudaSetDevice");
      hold<<<1, 1, 0, streams_[gpu]>>>(kHoldNanoseconds);
    }
  }

  /// The time of the slowest GPU of this process, and the most clocks that one of them takes. Before each of the
  /// times they all wait for each other.
  Times time_together(const std::function<void()> &launch, int warm_up, int iterations, int each) {
    constexpr int kEmpty = 5;
    const std::size_t gpus = streams_.size();
    std::vector<Event> ready, begin, end;
    std::deque<SmClocks> clocks;  // which are not moved
    for (std::size_t gpu = 0; gpu < gpus; gpu++) {
      check(cudaSetDevice(devices_[gpu]), "cudaSetDevice");  // whose events these are
      for (std::vector<Event> *events : {&ready, &begin, &end})
        for (int i = 0; i < iterations + kEmpty; i++) events->emplace_back();
      clocks.emplace_back(2 * (iterations + kEmpty), properties_.multiProcessorCount,
                          streams_[gpu]);
    }
    const auto at = [&](std::vector<Event> &events, std::size_t gpu, int i) -> Event & {
      return events[gpu * (iterations + kEmpty) + i];
    };
    for (int i = 0; i < warm_up; i++) launch();
    synchronise();
    hold_all();
    for (int i = 0; i < iterations + kEmpty; i++) {
      for (std::size_t gpu = 0; gpu < gpus; gpu++) at(ready, gpu, i).record(streams_[gpu]);
      for (std::size_t gpu = 0; gpu < gpus; gpu++) {
        check(cudaSetDevice(devices_[gpu]), "cudaSetDevice");
        for (std::size_t peer = 0; peer < gpus; peer++) at(ready, peer, i).hold_back(streams_[gpu]);
        clocks[gpu].read();
        at(begin, gpu, i).record(streams_[gpu]);
      }
      for (int j = 0; j < each && i < iterations; j++) launch();
      for (std::size_t gpu = 0; gpu < gpus; gpu++) {
        check(cudaSetDevice(devices_[gpu]), "cudaSetDevice");
        at(end, gpu, i).record(streams_[gpu]);
        clocks[gpu].read();
      }
    }
    synchronise();
    Times times;
    times.ms.resize(iterations);
    times.clocks.resize(iterations);
    for (std::size_t gpu = 0; gpu < gpus; gpu++) {
      const std::vector<double> elapsed = clocks[gpu].elapsed();  // in a launch, then to the next
      for (int i = 0; i < iterations; i++) {
        times.ms[i] =
            std::max(times.ms[i], at(end, gpu, i).milliseconds_since(at(begin, gpu, i)) / each);
        times.clocks[i] = std::max(
            times.clocks[i], (elapsed[2 * i] - elapsed[2 * (iterations + kEmpty / 2)]) / each);
      }
    }
    return times;
  }

  cudaDeviceProp properties_;
  std::vector<int> devices_ = {0};  // of this process's GPUs, from GPU `first_` of all on
  int first_ = 0;
  std::vector<cudaStream_t> streams_;  // of several GPUs
  std::vector<void *> allocated_;
};

}  // namespace

std::unique_ptr<Device> make_gpu_device(std::string &why_not) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    why_not = "no NVIDIA driver, or one older than the CUDA toolkit";
    return nullptr;
  }
  if (error != cudaSuccess || count == 0) {
    why_not = error != cudaSuccess ? cudaGetErrorString(error) : "no CUDA device";
    return nullptr;
  }
  return std::make_unique<Gpu>();
}
