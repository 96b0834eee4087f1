// SPDX-License-Identifier: MIT
// In place of gpu_device.cu where there is no nvcc.
#include "common/program/device.h"

std::unique_ptr<Device> make_gpu_device(std::string &why_not) {
  why_not = "built without nvcc";
  return nullptr;
}
