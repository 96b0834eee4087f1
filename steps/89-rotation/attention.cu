// Step 89: rotation. Queries and new keys turn by their positions, in a small kernel before the attention.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --causal, --type, --seqlen-k, --kv-heads, --layout, --lengths, --page-size, --append, --rope,
//             --rope-dim, --window, --window-size, --garbage, --scale, --softcap, --alibi, --sink-logits
// Before      step 86: queries and new keys must be turned already, by the caller.
// Bottleneck  A block that turned rows between TMA and wgmma would fence them, and turn new keys for each tile of Q.
// Change      A kernel turns queries and new keys into the workspace. The attention has these copies for Q and K_new,
//             and stores turned keys in the cache. In a problem without new keys all keys are turned.
// Prediction  4096 queries and new keys on a cache of 8192, 4 x 16 heads of 128, causal: a copy of 268 MB takes 63 us,
//             and 2.4 times that, as in step 24, is 8% of step 86's 2.89 million clocks; 4.4% if 8 heads share keys.
#include <algorithm>

#include "common/kernel/new_keys.h"
#include "steps/86-new-keys/kernel.h"

namespace {

constexpr int turn_threads = 128;
/// Turns the first rope_dim columns of queries and of new keys by their positions, from `p` to `to`. Without new keys
/// all keys are new. y: heads. Odd blocks have queries. A thread has 8 columns of a row, and the 8 that turn with them.
template <class T, int d>
__global__ void __launch_bounds__(turn_threads)
    turn_rows(const Problem p, const Problem to, const Pages pages) {
  griddepcontrol_launch_dependents();  // the next kernel's prologue may run meanwhile
  const bool is_query = blockIdx.x % 2;
  const int head = blockIdx.y, b = blockIdx.z;
  const int i = blockIdx.x / 2 * turn_threads + threadIdx.x, row = i / (d / 16);
  const Rows rows(p, b * p.heads);
  const int keys = rows.k.count, first_new = p.K_new ? first_new_key(p, keys) : 0;
  if (row >= (is_query ? rows.q.count : head < p.kv_heads ? keys - first_new : 0)) return;
  const int position =
      min(row + (is_query ? max(keys - rows.q.count, 0) : first_new), p.seqlen_k - 1);
  const auto row_in = [&](const Problem &of) {
    if (is_query)
      return head_of<T, d>(const_cast<void *>(of.Q), of.Q_strides, b, head, rows.q.first + row, 1);
    if (of.K_new)
      return head_of<T, d>(const_cast<void *>(of.K_new), of.K_new_strides, b, head, row, 1);
    const int page = pages.table.data ? pages.clamped(pages.table(b, row / pages.size)) : b;
    return head_of<T, d>(of.K, of.K_strides, page, head, rows.k.first + row % pages.size, 1);
  };
  const auto from = row_in(p), target = row_in(to);
  const int pairs = p.rope_dim / 2, n = i % (d / 16) * 8;
  const bool turns = n < pairs;
  // Whichever elements are pairs, these 16 are 8 of them.
  const int col = turns ? n : 2 * n, other = turns ? n + pairs : 2 * n + 8;
  Vector<T, 8> x[2] = {load<8>(from(0, col)), load<8>(from(0, other))};
  const Matrix<const float> gCos{p.rope_cos, p.seqlen_k, pairs},
      gSin{p.rope_sin, p.seqlen_k, pairs};
  const bool halves = p.rope == Rope::kHalves;
  for (int half = 0; half < 2 && turns; half++) {
    const int pair = halves ? n + 4 * half : n / 2 + pairs / 2 * half;  // the first of 4
    const auto cos = load<4>(gCos(position, pair)), sin = load<4>(gSin(position, pair));
#pragma unroll
    for (int e = 0; e < 4; e++) {
      T &left = halves ? x[0][4 * half + e] : x[half][2 * e];
      T &right = halves ? x[1][4 * half + e] : x[half][2 * e + 1];
      const float l = to_float(left), r = to_float(right);
      left = from_float<T>(l * cos[e] - r * sin[e]);
      right = from_float<T>(l * sin[e] + r * cos[e]);
    }
  }
  store(target(0, col), x[0]);
  store(target(0, other), x[1]);
}

/// The strides of a copy in the workspace, [heads, rows of all, d]: of so many sequences or pages, or of packed rows.
Strides copy_of(const Problem &p, int blocks, int rows, int packed) {
  const std::int64_t d = p.head_dim, all = packed ? packed : std::int64_t{blocks} * rows;
  return {packed ? 0 : rows * d, all * d, d};
}
Strides copy_of_queries(const Problem &p) {
  return copy_of(p, p.batch, p.seqlen_q, p.total_q);
}
Strides copy_of_keys(const Problem &p) {
  if (p.K_new) return copy_of(p, p.batch, p.seqlen_new, 0);
  return p.page_table ? copy_of(p, p.num_pages, p.page_size, 0)
                      : copy_of(p, p.batch, p.seqlen_k, p.total_k);
}

/// Returns where the copies begin in the workspace, in bytes: behind the plan.
std::size_t copies_at(const Problem &p) {
  return (Plan::ints(p, p.head_dim == 64 ? Br<64> : Br<128>) * sizeof(int) + 127) / 128 * 128;
}
std::size_t workspace_bytes(const Problem &p) {
  const std::int64_t elements =
      copy_of_queries(p).head * p.heads + copy_of_keys(p).head * p.kv_heads;
  return copies_at(p) + (p.rope == Rope::kNone ? 0 : elements * 2);
}

/// Launches the kernel that turns rows into the workspace. Returns the problem that is left.
template <class T, int d>
Problem with_turned_rows(const Problem &p) {
  if (p.rope == Rope::kNone) return p;
  Problem left = p;
  left.Q = static_cast<char *>(p.workspace) + copies_at(p), left.Q_strides = copy_of_queries(p);
  void *const keys = static_cast<T *>(const_cast<void *>(left.Q)) + left.Q_strides.head * p.heads;
  if (p.K_new)
    left.K_new = keys, left.K_new_strides = copy_of_keys(p);
  else
    left.K = keys, left.K_strides = copy_of_keys(p);
  const std::int64_t rows = std::max(p.seqlen_q, p.K_new ? p.seqlen_new : p.seqlen_k);
  const dim3 grid((rows * (d / 16) + turn_threads - 1) / turn_threads * 2, p.heads, p.batch);
  launch_on<void>(p.stream, turn_rows<T, d>, grid, dim3(turn_threads), p, left, Pages(p, Bc));
  return left;
}

template <class T, int d, bool softcap, bool alibi, bool sinks>
void run(const Problem &given) {
  const Problem p = with_turned_rows<T, d>(given);
  const Pages pages(p, p.K_new ? 16 : Bc);  // a lane gathers a row of a box
  constexpr int kv_row_bytes = d * 2 * sizeof(T);
  const Order order = order_of<Br<d>>(p, kv_row_bytes);
  const Plan plan(p, Br<d>);
  const bool planned = plan_tiles<Br<d>>(p, plan, kv_row_bytes);
  const auto kernel = attention<T, d, softcap, alibi, sinks>;
  const int blocks =
      std::min(std::max(1, order.tiles), resident_blocks<WorkRings<T, d>>(kernel, threads<d>));
  launch_beside_on<WorkRings<T, d>>(
      p.stream, kernel, dim3(blocks), dim3(threads<d>), map_of_q<T>(p, p.Q, p.Q_strides, d),
      cache_and_new<T, d>(p, pages, p.K, p.K_strides, p.K_new, p.K_new_strides),
      cache_and_new<T, d>(p, pages, p.V, p.V_strides, p.V_new, p.V_new_strides),
      map_of_q<T>(p, p.O, p.O_strides, d), p, order, plan, pages, planned, scores_of(p));
}

template <class T, int d>
void run(const Problem &p) {
  // Where a score has a function, a sink is asked for once per tile of Q: no kernels of its own for that.
  if (p.softcap > 0)
    p.slopes ? run<T, d, true, true, true>(p) : run<T, d, true, false, true>(p);
  else if (p.slopes)
    run<T, d, false, true, true>(p);
  else
    p.sink_logits ? run<T, d, false, false, true>(p) : run<T, d, false, false, false>(p);
}

template <class T>
void run(const Problem &given) {
  const Problem p = with_sides(given);
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 16,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes = workspace_bytes,
    .page_rows = 8,
    .writes_lse = true,
});
