// SPDX-License-Identifier: MIT
// Step 53's kernel for the library, as its chapter has it, and step 54's where there are pages. They are compiled for
// sm_90a alone, so each is an object of its own.
#include "common/kernel/kernel.h"
#include "steps/57-library/call.h"

#undef EXPORT_STEP
#define EXPORT_STEP(...)  // it is no program here
#include "steps/53-work-list/attention.cu"

const Hopper HOPPER = {
    [](const Problem &p) {
      if (p.page_table) return HOPPER_PAGES(p);
      p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p);
    },
    [](const Problem &p) {  // step 54 has the same plan
      return sizeof(int) * std::size_t(Plan::ints(p, p.head_dim == 64 ? Br<64> : Br<128>));
    },
};
