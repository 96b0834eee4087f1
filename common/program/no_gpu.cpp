// SPDX-License-Identifier: MIT
// In place of gpu_device.cu where there is no nvcc, or no NCCL for a step that needs it.
#include "common/program/device.h"

std::unique_ptr<Device> make_gpu_device(std::string &why_not) {
  const bool sends = std::string(cpu_step.takes).find("--gpus") != std::string::npos;
  why_not = sends ? "built without nvcc or NCCL" : "built without nvcc";
  return nullptr;
}
