// SPDX-License-Identifier: MIT
// Step 53's kernel for the library, as its chapter has it; step 54's where there are pages, and step 56's for other head
// dims. They are compiled for sm_90a alone, so each is an object of its own.
#include "common/kernel/kernel.h"
#include "steps/57-library/call.h"

#undef EXPORT_STEP
#define EXPORT_STEP(...)  // it is no program here
#include "steps/53-work-list/attention.cu"

const Hopper HOPPER = {
    [](const Problem &p) { return has_head_dims_of_53(p) || HOPPER_DIMS.has_tiles(p); },
    [](const Problem &p) {
      if (!has_head_dims_of_53(p)) return HOPPER_DIMS.forward(p);
      if (p.page_table) return HOPPER_PAGES(p);
      p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p);
    },
    [](const Problem &p) {  // step 54 has the same plan
      if (!has_head_dims_of_53(p)) return HOPPER_DIMS.workspace_bytes(p);
      return sizeof(int) * std::size_t(Plan::ints(p, p.head_dim == 64 ? Br<64> : Br<128>));
    },
};
