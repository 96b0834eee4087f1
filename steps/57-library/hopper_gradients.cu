// SPDX-License-Identifier: MIT
// Step 80's kernel for the library, as its chapter has it. It is compiled for sm_90a alone.
#include "common/kernel/kernel.h"

#undef EXPORT_STEP
#define EXPORT_STEP(...)  // it is no program here
#include "steps/80-backward-for-models/attention.cu"
