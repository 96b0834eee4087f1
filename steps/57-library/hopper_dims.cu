// SPDX-License-Identifier: MIT
// Step 56's kernels for the library: see hopper.cu.
#include "common/kernel/kernel.h"
#include "steps/57-library/call.h"

#undef EXPORT_STEP
#define EXPORT_STEP(...)
#include "steps/56-head-dims/attention.cu"

const Hopper HOPPER_DIMS = {
    [](const Problem &p) { return has_kernel(instance(p.head_dim), instance(p.head_dim_v)); },
    [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    [](const Problem &p) { return workspace_bytes(p); },
};
