// Step 29: in a model. All of this part behind one call.
//
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths
// Before      step 23: one problem each.
// Bottleneck  TODO
// Change      TODO
// Prediction  TODO
#include "common/kernel/kernel.h"
#include "steps/29-in-a-model/prefill.h"

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.head_dim == 64 ? prefill::run<64>(p) : prefill::run<128>(p); },
});
