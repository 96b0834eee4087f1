// SPDX-License-Identifier: MIT
// The emulator as a device.
#include "common/program/device.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/emulator/devices.h"

namespace {

class Emulator : public Device {
 public:
  ~Emulator() override {
    for (void *memory : allocated_) emulator::release(memory);
  }

  std::string name() const override { return "emulator"; }
  bool is_gpu() const override { return false; }
  const Step &step() const override { return cpu_step; }

  void use_gpus(int count) override {
    emulator::begin_devices(count);
    for (int gpu = 0; gpu < count; gpu++) {
      cudaSetDevice(gpu);
      cudaStreamCreateWithFlags(&streams_.emplace_back(), cudaStreamNonBlocking);
    }
  }
  void *stream(int gpu) override { return streams_[static_cast<std::size_t>(gpu)]; }

  std::size_t free_bytes() const override {
    // Half of the host's memory, and a ninth of that: beside each two bytes of a tensor the
    // emulator keeps 16 on who touched them.
    const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
    return pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) / 2 / 9;
  }
  void *allocate(std::size_t bytes) override {
    if (!streams_.empty()) cudaSetDevice(memory_of);
    allocated_.push_back(emulator::allocate(bytes));
    return allocated_.back();
  }
  void upload(void *to, const void *from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void download(void *to, const void *from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }

  void run(const std::function<void()> &launch) override {
    launch();
    emulator::synchronise_devices();
  }
  void forward(const Problem &) override {
    throw std::logic_error("the reference computes the forward pass of what the emulator runs");
  }
  Times time(const std::function<void()> &, int, int, int) override {
    throw std::logic_error("the emulator's time says nothing about a GPU's");
  }

 private:
  std::vector<void *> allocated_;
  std::vector<cudaStream_t> streams_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() {
  return std::make_unique<Emulator>();
}
