// SPDX-License-Identifier: MIT
#include "common/kernel/order.h"

#include <doctest/doctest.h>

TEST_CASE(
    "order: a section is as many heads as fit 32 MB, sections are as few as that allows, and no "
    "head is left out") {
  Problem p = {};
  p.head_dim = 128;
  p.seqlen_q = 300;
  for (const bool causal : {false, true})
    for (const int keys : {1, 1000, 8192, 8320, 200000})
      for (const int batch : {1, 3, 9})
        for (const int kv_heads : {1, 7, 16})
          for (const int group : {1, 8}) {
            CAPTURE(keys);
            CAPTURE(batch);
            CAPTURE(kv_heads);
            p.causal = causal, p.batch = batch, p.seqlen_k = keys;
            p.kv_heads = kv_heads, p.heads = kv_heads * group;
            const dim3 grid = grid_by_heads(p, 128);
            const std::int64_t bytes = std::int64_t{keys} * 128 * 2 * 2, fit = (32 << 20) / bytes;
            const int heads = batch * p.heads, side = static_cast<int>(grid.x);
            const int sections = static_cast<int>(grid.z);
            CHECK(grid.y == 3);
            CHECK(side * sections >= heads);
            CHECK(side * (sections - 1) < heads);
            if (!causal) {
              CHECK(side == 1);
            } else {
              CHECK(side % group == 0);
              CHECK((side == group || side / group <= fit));
              if (sections > 1)
                CHECK(heads > (sections - 1) * std::max<std::int64_t>(fit, 1) * group);
            }
          }
}
