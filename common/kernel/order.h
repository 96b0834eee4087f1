// SPDX-License-Identifier: MIT
// The order in which blocks start, as step 20 has it, for the steps after it.
#pragma once

#include <algorithm>

#include "common/kernel/kernel.h"

/// A grid of x: heads that run side by side, y: tiles of Br rows of Q, z: the next such heads. Blocks
/// start in the order of their index, x first. One head at a time where all of its tiles are as long;
/// else those of so many heads of K and V, 32 MB, that these stay in L2 (an A100 has 40 MB) while
/// all tiles of Q meet them.
inline dim3 grid_by_heads(const Problem &p, int Br) {
  const int kv_heads = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  const std::int64_t kv_bytes = std::int64_t{p.seqlen_k} * p.head_dim * 2 * 2;  // of one of them
  const int most = std::clamp<std::int64_t>((32 << 20) / kv_bytes, 1, kv_heads);
  const int sections = p.causal ? (kv_heads + most - 1) / most : kv_heads * group;
  const int grid_x = p.causal ? (kv_heads + sections - 1) / sections * group : 1;
  return dim3(grid_x, (p.seqlen_q + Br - 1) / Br, sections);
}
