// SPDX-License-Identifier: MIT
// Step 92's kernels for the library, as its chapter has it, and step 87's above head dim 128. They are compiled for sm_90a
// alone, so each is an object of its own.
#include "common/kernel/kernel.h"

#undef EXPORT_STEP
#define EXPORT_STEP(...)  // it is no program here
#include "steps/92-next-keys/attention.cu"

const BackwardKernels HOPPER_BACKWARD = {
    [](const Backward &p) { p.head_dim > 128 ? HOPPER_WIDE_BACKWARD(p) : backward(p); },
    [](const Backward &p) { return workspace_bytes(p); },  // of both
};
