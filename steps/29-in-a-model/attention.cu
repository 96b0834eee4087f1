// Step 29: in a model. All that steps 20 to 28 can do, behind one call that a model can make.
//
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window, --sinks, --type, --page-size, --append, --rope, --splits
// Before      step 28: each step of this part has one idea, and the others only where it needs them.
// Bottleneck  Nobody can call it: a model's attention is a prompt, then tokens, with everything at once.
// Change      Three kernels: one stores and rotates new keys, one is for prompts, one for new tokens.
//             What costs nothing outside the loop is asked at run time; type, head dim and pages are
//             template parameters. A C interface (attention.h, library.cu) calls this file's launch.
// Prediction  TODO
#include "steps/29-in-a-model/decode.h"
#include "steps/29-in-a-model/prefill.h"

namespace {

/// Whether the kernel for new tokens reads K and V less often: once for each 16 rows of a group's
/// queries. The one for prompts reads them for each head of the group and each 128 of its queries.
bool decodes(const Problem &p) {
  return p.seqlen_q <= 16;
}

/// The workspace: what decode needs, with the counters first, then the rotated keys.
template <class T, int d>
std::size_t parts_bytes(const Problem &p) {
  return decodes(p) ? decoding::workspace_bytes<T, d>(p) : 0;
}

template <class T, int d>
void run(const Problem &problem) {
  const std::size_t parts = parts_bytes<T, d>(problem);
  const Problem p = prepare<T, d>(problem, static_cast<char *>(problem.workspace) + parts);
  if (decodes(p))
    launch_decode<T, d>(p);
  else if (p.page_table)
    launch_prefill<T, d, true>(p);
  else
    launch_prefill<T, d, false>(p);
}

/// Runs the kernels of the problem's type and head dim; or asks for their workspace.
template <int... d>
void launch(const Problem &p) {
  ((p.head_dim != d ? void() : p.type == Type::kBf16 ? run<bf16, d>(p) : run<half, d>(p)), ...);
}
template <int... d>
std::size_t workspace_bytes(const Problem &p) {
  const auto parts = [&](auto of_bf16, auto of_fp16) {
    return p.type == Type::kBf16 ? of_bf16(p) : of_fp16(p);
  };
  return rotated_bytes(p) +
         ((p.head_dim == d ? parts(parts_bytes<bf16, d>, parts_bytes<half, d>) : 0) + ...);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = launch<32, 64, 80, 96, 128, 192, 256>,
    .workspace_bytes = workspace_bytes<32, 64, 80, 96, 128, 192, 256>,
    .head_dims = {64, 32, 80, 96, 128, 192, 256},
});
