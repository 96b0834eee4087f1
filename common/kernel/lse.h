// SPDX-License-Identifier: MIT
// The end of a row's softmax: its log-sum-exp. Step 51 builds it, and later steps include it.
#pragma once

#include "common/kernel/visible.h"

constexpr float ln_2 = 0.693147181f;  // of log2: ln x is log2(x) ln_2

/// Four lanes share a row: they add their parts of l, and the first stores the row's log-sum-exp, if it is wanted. Then l becomes 1 / l.
/// A stage's record says which rows they are. The last arguments are references as mask_tile's are.
template <class View>
__device__ __forceinline__ void finish_rows(const float (&m)[2], float (&l)[2], int stage,
                                            View &records, const Problem &problem,
                                            const Matrix<float> &lse, const int &warpgroup,
                                            const int &warp, const int &lane, bool wanted = true) {
  const Work done = read_work(records, stage);
  const int row = done.row + warpgroup * 64 + warp % 4 * 16 + lane / 4;
  for (int r = 0; r < 2; r++) {
    for (int mask = 1; mask < 4; mask *= 2) l[r] += __shfl_xor_sync(kAllLanes, l[r], mask);
    if (wanted && lane % 4 == 0 && row >= 0 && row + r * 8 < done.q.count)
      lse(done.q.sequence * problem.heads + done.q.head, row + r * 8) = (m[r] + lg2(l[r])) * ln_2;
    l[r] = l[r] == 0 ? 1 : 1 / l[r];  // 0: the row sees no key, and O is 0
  }
}
