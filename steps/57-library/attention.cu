// Step 57: the library. One C function in front of everything, on every GPU from sm_80.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --causal, --seqlen-k, --kv-heads, --layout, --lengths, --window, --sinks, --window-size, --scale,
//             --softcap, --alibi, --sink-logits, --type, --page-size, --append, --rope, --rope-dim, --splits,
//             --garbage, --head-dim-v
// Before      step 50: three kernels for a model, whose scores are q . k / sqrt(d) and nothing else.
// Bottleneck  A caller with a soft cap, a log-sum-exp or a head dim of 72 has to go elsewhere, and one whose lengths are
//             wrong on the device reads where nothing is.
// Change      A Call is a Problem and what a model may want besides. A function stands between S and the softmax, a
//             window has two sides, a sink is where m and l begin, columns behind the head dim are zeros, and
//             every number from the device is clamped before it becomes an address. The bytes of a workspace grow
//             with each size. A prompt's kernel has four kinds, and a call gets the one that can do no more than it must.
//             On Hopper the library, not this program, launches the kernels of steps 53, 54 and 56 for prompts.
// Prediction  Prompts and new tokens that step 50 takes, too: its instructions in the loop, and some before it that
//             clamp: its time within 1%. A tile of 128 x 64 at head dim 128 is 1,536 clocks of mma and 512 of powers. If
//             nothing overlaps, ALiBi adds 64 or more, 3%, and a soft cap 576 more, 28%. 72 columns cost as much as 80.
#include "steps/57-library/hopper.h"
#include "steps/57-library/prefill.h"
#include "steps/57-library/splits.h"

namespace {

/// Whether the kernel for new tokens is the faster one. It reads K and V once for each 16 rows of a group's
/// queries, and its blocks share the keys, so they fill the GPU. The kernel for prompts reads K and V for each
/// head and each tile of its queries, in blocks that go through all keys. If its blocks do not fill a wave, as
/// many as the GPU runs at once, they take as long as a full wave. So reads are compared by waves, where the
/// cache is long beside the queries.
template <class T, int d>
bool decodes(const Call &p) {
  if (p.seqlen_q <= 16) return true;
  if (p.window_left >= 0 || p.seqlen_k / 128 < p.seqlen_q) return false;
  const int wave = max(1, resident_blocks<SharedStorage<T, d>>(
                              prefill<T, d, tiling<d>.Bc, Kind::kRows>, tiling<d>.num_warps * 32));
  const int tiles = (p.seqlen_q + tiling<d>.Br - 1) / tiling<d>.Br;
  const std::int64_t blocks = std::int64_t{p.batch} * p.heads * tiles;
  return row_tiles(p) <= (blocks + wave - 1) / wave * wave;
}

// The workspace: how many parts each row tile of decode lacks; Hopper's workspace, whose first int is its counter of
// tiles, or, from its 32nd int on, the parts; then the turned keys. The counters are always at the same places and
// nothing else is ever there, for they must be 0 when a call begins. Each leaves them so.
constexpr std::size_t hopper_at = sizeof(unsigned) * decoding::max_counters;
constexpr std::size_t counters_bytes = hopper_at + sizeof(int) * decoding::hopper_ints;

/// The bytes that Hopper's kernel or the kernel for new tokens needs behind the counters. Hopper's do not depend on
/// whether it takes the call, because a smaller call may be one that it takes.
template <class T, int d>
std::size_t working_bytes(const Call &p, const Hopper *hopper) {
  std::size_t of_hopper = 0;
  if (hopper && may_be_hoppers(p, *hopper))
    of_hopper = hopper->workspace_bytes(p) + hopper_at - counters_bytes;
  return std::max(of_hopper, parts_bytes<T, d>(p));
}

/// Which kernel the queries get, once the keys are stored.
enum class Kernel { kNone, kTokens, kHopper, kPrompts };
template <class T, int d>
Kernel kernel_of(const Call &p, const Hopper *hopper) {
  if (p.seqlen_q == 0) return Kernel::kNone;
  if (decodes<T, d>(p)) return Kernel::kTokens;
  return hopper && hopper_takes(p, *hopper) ? Kernel::kHopper : Kernel::kPrompts;
}

template <class T, int d>
void run(const Call &call, const Hopper *hopper) {
  char *const workspace = static_cast<char *>(call.workspace);
  char *const keys = workspace + counters_bytes + working_bytes<T, d>(call, hopper);
  const Call p = prepare<T, d>(call, keys);
  const Kernel kernel = kernel_of<T, d>(p, hopper);
  if (kernel == Kernel::kTokens) return launch_decode<T, d>(p);
  if (kernel == Kernel::kPrompts) return launch_prefill<T, d>(p);
  if (kernel == Kernel::kHopper) {
    const bool turns = p.rope != Rope::kNone;
    const Call left = turns ? with_turned_queries<T, d>(p, keys + turned_bytes(call)) : p;
    hopper->forward(problem_for_hopper(left, workspace + hopper_at));
  }
}

/// Calls f with the smallest of these head dims that has the call's columns of K and of V, and with its type.
template <class F, int d, int... larger>
auto with_kernel(const Call &p, F f, std::integer_sequence<int, d, larger...>) {
  if constexpr (sizeof...(larger) > 0)
    if (std::max(p.head_dim, p.head_dim_v) > d)
      return with_kernel(p, f, std::integer_sequence<int, larger...>());
  const std::integral_constant<int, d> dim;
  return p.type == Type::kBf16 ? f(bf16(), dim) : f(half(), dim);
}
constexpr std::integer_sequence<int, 32, 64, 80, 96, 128, 192, 256> head_dims;

void forward(const Call &call, const Hopper *hopper) {
  const Call p = with_one_window(call);
  with_kernel(
      p, [&](auto type, auto d) { run<decltype(type), d>(p, hopper); }, head_dims);
}
std::size_t workspace_bytes(const Call &call, const Hopper *hopper) {
  const Call p = with_one_window(call);
  const std::size_t working = with_kernel(
      p, [&](auto type, auto d) { return working_bytes<decltype(type), d>(p, hopper); }, head_dims);
  const bool turns_queries = hopper && may_be_hoppers(p, *hopper) && p.rope != Rope::kNone;
  const std::size_t bytes = working + turned_bytes(p) + (turns_queries ? turned_query_bytes(p) : 0);
  return bytes ? counters_bytes + bytes : 0;
}
const char *kernel(const Call &call, const Hopper *hopper) {
  const Call p = with_one_window(call);
  constexpr const char *names[] = {"none", "tokens", "hopper", "prompts"};
  return names[static_cast<int>(with_kernel(
      p,
      [&](auto type, auto d) {
        using T = decltype(type);
        const bool turns = turns_all_keys(p);
        return kernel_of<T, d>(turns ? with_turned_keys<T>(p, p.workspace) : p, hopper);
      },
      head_dims))];
}

}  // namespace

const Backend BACKEND = {forward, workspace_bytes, kernel, counters_bytes};

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { forward(call_of(p), nullptr); },
    .workspace_bytes = [](const Problem &p) { return workspace_bytes(call_of(p), nullptr); },
    .head_dims = {64, 32, 48, 80, 96, 128, 160, 192, 256},
    .writes_lse = true,
});
