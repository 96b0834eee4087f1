// SPDX-License-Identifier: MIT
// The emulator as a device.
#include "common/program/device.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/emulator/runtime.h"

namespace {

class Emulator : public Device {
 public:
  ~Emulator() override {
    for (void *memory : allocated_) emulator::release(memory);
  }

  std::string name() const override { return "emulator"; }
  bool is_gpu() const override { return false; }
  const Step &step() const override { return cpu_step; }

  std::size_t free_bytes() const override {
    // Half of the host's memory, and a ninth of that: beside each two bytes of a tensor the
    // emulator keeps 16 on who touched them.
    const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
    return pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) / 2 / 9;
  }
  void *allocate(std::size_t bytes) override {
    allocated_.push_back(emulator::allocate(bytes));
    return allocated_.back();
  }
  void upload(void *to, const void *from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void download(void *to, const void *from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }

  void run(const std::function<void()> &launch) override { launch(); }
  void forward(const Problem &) override {
    throw std::logic_error("the reference computes the forward pass of what the emulator runs");
  }
  Times time(const std::function<void()> &, int, int, int) override {
    throw std::logic_error("the emulator's time says nothing about a GPU's");
  }

 private:
  std::vector<void *> allocated_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() {
  return std::make_unique<Emulator>();
}
