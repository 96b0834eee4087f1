// The order in which blocks start, as step 20 has it, for the steps after it.
#pragma once

#include <algorithm>

#include "common/kernel/kernel.h"

/// A grid of x: heads that run side by side, y: tiles of Br rows of Q, z: the next such heads. Blocks
/// start in the order of their index, x first. Where the tiles of a head differ in length, so many
/// heads run side by side as have 32 MB of K and V, which stay in L2 (an A100 has 40 MB) while all
/// tiles of Q meet them; else one.
inline dim3 grid_by_heads(const Problem &p, int Br) {
  const int heads = p.batch * p.heads;
  const std::int64_t kv_bytes =  // of a query head, which may share them
      std::max<std::int64_t>(1, std::int64_t{p.seqlen_k} * p.head_dim * 4 * p.kv_heads / p.heads);
  const int most = p.causal ? std::clamp<std::int64_t>((32 << 20) / kv_bytes, 1, heads) : 1;
  const int sections = (heads + most - 1) / most;
  return dim3((heads + sections - 1) / sections, (p.seqlen_q + Br - 1) / Br, sections);
}
