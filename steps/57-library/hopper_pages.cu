// SPDX-License-Identifier: MIT
// Step 54's kernel for the library: see hopper.cu.
#include "common/kernel/kernel.h"
#include "steps/57-library/call.h"

#undef EXPORT_STEP
#define EXPORT_STEP(...)
#include "steps/54-pages/attention.cu"

void HOPPER_PAGES(const Problem &p) {
  p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p);
}
