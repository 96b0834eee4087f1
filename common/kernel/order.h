// The order in which blocks start, as step 20 has it, for the steps after it.
#pragma once

#include <algorithm>

#include "common/kernel/kernel.h"

/// A grid of x: heads that share the L2 cache, y: tiles of Br rows of Q, z: the next such heads.
/// Blocks start in the order of their index, x first. As many heads run at a time as have their K
/// and V in 32 MB: these stay in L2 (an A100 has 40 MB) while all tiles of Q meet them.
inline dim3 grid_by_heads(const Problem &p, int Br) {
  const int heads = p.batch * p.heads;
  const std::int64_t kv_bytes =  // of a query head, which may share them
      std::int64_t{p.seqlen_k} * 2 * p.head_dim * 2 * p.kv_heads / p.heads;
  const int grid_x = std::clamp<std::int64_t>((32 << 20) / (kv_bytes + 1), 1, heads);
  return dim3(grid_x, (p.seqlen_q + Br - 1) / Br, (heads + grid_x - 1) / grid_x);
}
