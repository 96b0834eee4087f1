// SPDX-License-Identifier: MIT
// The order in which blocks start, as step 20 has it, for the steps after it.
#pragma once

#include <algorithm>

#include "common/kernel/kernel.h"

/// Returns a grid of x: the heads of a section, y: tiles of Br rows of Q, z: sections. Blocks start in
/// the order of their index, x first. Without a mask all tiles take as long, and a section is one head.
/// With one, it is as many heads as have 32 MB of K and V, which stay in L2 (an A100 has 40 MB) until
/// all tiles of Q have read them.
static inline dim3 grid_by_heads(const Problem &p, int Br) {
  const int kv_heads = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  const std::int64_t kv_bytes =
      std::max<std::int64_t>(1, p.seqlen_k) * p.head_dim * 2 * 2;  // of one of them
  const int most = std::clamp<std::int64_t>((32 << 20) / kv_bytes, 1, kv_heads);
  const int sections = p.causal ? (kv_heads + most - 1) / most : kv_heads * group;
  const int grid_x = p.causal ? (kv_heads + sections - 1) / sections * group : 1;
  return dim3(grid_x, (p.seqlen_q + Br - 1) / Br, sections);
}
