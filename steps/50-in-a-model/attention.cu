// Step 50: in a model. All that steps 20 to 29 can do, behind one call that a model can make.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window, --sinks, --type, --page-size, --append, --rope, --splits
// Before      step 29: each step of this part has one idea, and of the others what its idea needs.
// Bottleneck  A model wants all of them in one call: a prompt, then tokens, in pages, rotated, in bf16.
// Change      Three kernels: prefill for prompts, decode for new tokens, and one that stores and rotates
//             new keys before them. Type, head dim, pages and, at 128, no rotation and no window are
//             template parameters, the rest is asked at run time. Step 57 puts a C interface in front.
// Prediction  Prompts: 4% more instructions per tile than step 28, and 4% more time at most; at 128,
//             plain, step 29's time; with pages a loop a quarter longer. New tokens: the time of step
//             27, and 2 us where there are keys to store.
#include "steps/50-in-a-model/decode.h"
#include "steps/50-in-a-model/prefill.h"

namespace {

/// Whether the kernel for new tokens is the faster one. It reads K and V once for each 16 rows of a group's
/// queries, and its blocks share the keys, so they fill the GPU. The kernel for prompts reads K and V for each
/// head and each tile of its queries, in blocks that go through all keys. If its blocks do not fill a wave, as
/// many as the GPU runs at once, they take as long as a full wave. So its reads are counted by full waves, if
/// the cache is at least 128 times as long as the queries.
template <class T, int d>
bool decodes(const Problem &p) {
  if (p.seqlen_q <= 16) return true;
  if (p.window || p.seqlen_k / 128 < p.seqlen_q) return false;
  const int wave = max(1, resident_blocks<SharedStorage<T, d>>(
                              prefill<T, d, tiling<d>.Bc, false, false>, tiling<d>.num_warps * 32));
  const int tiles = (p.seqlen_q + tiling<d>.Br - 1) / tiling<d>.Br;
  const std::int64_t blocks = std::int64_t{p.batch} * p.heads * tiles;
  return row_tiles(p) <= (blocks + wave - 1) / wave * wave;
}

// The workspace: how many parts each row tile of decode lacks; the parts; then the rotated keys. The
// counters are always first and nothing else is there, for they must be 0 when a call begins. Each
// leaves them so.
constexpr std::size_t counters_bytes = sizeof(unsigned) * decoding::max_counters;

template <class T, int d>
std::size_t parts_bytes(const Problem &p) {
  const int splits = decodes<T, d>(p) ? num_splits<T, d>(p) : 1;
  if (splits == 1) return 0;
  return sizeof(float) * row_tiles(p) * splits * decoding::rows * (d + 4);
}

template <class T, int d>
void run(const Problem &problem) {
  char *const workspace = static_cast<char *>(problem.workspace);
  const Problem p = prepare<T, d>(problem, workspace + counters_bytes + parts_bytes<T, d>(problem));
  if (decodes<T, d>(p))
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
  const std::size_t bytes =
      rotated_bytes(p) +
      ((p.head_dim == d ? parts(parts_bytes<bf16, d>, parts_bytes<half, d>) : 0) + ...);
  return bytes ? counters_bytes + bytes : 0;
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = launch<32, 64, 80, 96, 128, 192, 256>,
    .workspace_bytes = workspace_bytes<32, 64, 80, 96, 128, 192, 256>,
    .head_dims = {64, 32, 80, 96, 128, 192, 256},
});
