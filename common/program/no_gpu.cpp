// SPDX-License-Identifier: MIT
// In place of gpu_device.cu in a program for the emulator alone.
#include "common/program/device.h"

std::unique_ptr<Device> make_gpu_device(std::string &why_not) {
  why_not = "built for the emulator alone";
  return nullptr;
}
