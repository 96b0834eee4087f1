// SPDX-License-Identifier: MIT
// Step 81's kernel for the library, as its chapter has it. It is compiled for sm_90a alone.
#include "common/kernel/kernel.h"

#undef EXPORT_STEP
#define EXPORT_STEP(...)  // it is no program here
#include "steps/81-score-gradients/attention.cu"

const BackwardKernels HOPPER_BACKWARD = {
    [](const Backward &p) { backward(p); },
    [](const Backward &p) { return workspace_bytes(p); },
};
