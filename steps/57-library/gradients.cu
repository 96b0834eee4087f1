// SPDX-License-Identifier: MIT
// Step 69's kernels for the library, as its chapter has them.
#include "common/kernel/kernel.h"

#undef EXPORT_STEP
#define EXPORT_STEP(...)  // it is no program here
#include "steps/69-training/attention.cu"

const BackwardKernels BACKWARD = {backward, workspace_bytes};
