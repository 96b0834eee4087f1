// SPDX-License-Identifier: MIT
// Step 87's kernel for the library: see hopper_gradients.cu.
#include "common/kernel/kernel.h"

#undef EXPORT_STEP
#define EXPORT_STEP(...)
#include "steps/87-wide-heads/attention.cu"

void HOPPER_WIDE_BACKWARD(const Backward &p) {
  backward(p);
}
