// SPDX-License-Identifier: MIT
// In place of gpu_device.cu in a program for the emulator alone.
#include "common/program/device.h"

std::unique_ptr<Device> make_gpu_device(std::string &why_not) {
  const bool sends = std::string(cpu_step.takes).find("--gpus") != std::string::npos;
  why_not =
      sends ? "built for the emulator alone, without nvcc or NCCL" : "built for the emulator alone";
  return nullptr;
}
