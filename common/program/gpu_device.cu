// The GPU as a device.
#include <cuda_runtime.h>

#include <new>
#include <stdexcept>
#include <string>

#include "common/program/device.h"

namespace {

void check(cudaError_t error, const char *what) {
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

constexpr const char *kFirstTensorCoreStep = "05";  // the steps that sort before it run anywhere

__global__ void nothing() {}

/// Throws DeviceError unless the GPU, the current device, runs this step, and as it was compiled.
void check_runs_step(const cudaDeviceProp &gpu) {
  const int capability = 10 * gpu.major + gpu.minor;
  const std::string arch = "sm_" + std::to_string(capability);
  if (gpu_step.name >= std::string(kFirstTensorCoreStep) && capability < 80)
    throw DeviceError("this step needs sm_80 or later (cp.async, mma.m16n8k16), and this GPU is " +
                      arch + "; steps 00 to 04 run on it, and --device cpu runs the emulator");
  cudaFuncAttributes attributes;  // the flags of the compiler were those of the step's kernels
  const cudaError_t error = cudaFuncGetAttributes(&attributes, nothing);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion)
    throw DeviceError("not compiled for this GPU: make it with ARCH=" + arch +
                      "; --device cpu runs the emulator");
  check(error, "cudaFuncGetAttributes");
}

class Gpu : public Device {
 public:
  Gpu() {
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaGetDeviceProperties(&properties_, 0), "cudaGetDeviceProperties");
    check_runs_step(properties_);
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Gpu() override {
    for (void *memory : allocated_) cudaFree(memory);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  std::string name() const override { return properties_.name; }
  bool is_gpu() const override { return true; }
  const Step &step() const override { return gpu_step; }

  std::size_t free_bytes() const override {
    std::size_t free = 0, total;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
  }
  void *allocate(std::size_t bytes) override {
    void *memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    allocated_.push_back(memory);
    check(cudaMemset(memory, 0xff, bytes), "cudaMemset");  // NaN as fp16 and as fp32
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
    check(cudaDeviceSynchronize(), "the kernel failed");
  }
  std::vector<float> time(const std::function<void()> &launch, int iterations) override {
    std::vector<float> milliseconds(iterations);
    for (float &elapsed : milliseconds) {
      check(cudaEventRecord(begin_), "cudaEventRecord");
      launch();
      check(cudaEventRecord(end_), "cudaEventRecord");
      check(cudaEventSynchronize(end_), "the kernel failed");
      check(cudaEventElapsedTime(&elapsed, begin_, end_), "cudaEventElapsedTime");
    }
    return milliseconds;
  }

 private:
  cudaDeviceProp properties_;
  cudaEvent_t begin_, end_;
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
