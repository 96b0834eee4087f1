// SPDX-License-Identifier: MIT
// Tiles of rows of Q, and into how many splits their keys are cut, as step 27 has it, for the steps after it.
#pragma once

#include "common/kernel/kernel.h"

namespace {  // of each object of its own: the emulator and a GPU have one each

/// Returns how many tiles of `of_rows` rows of Q the whole problem has. The heads that share a head of K and V have
/// their rows in the same tiles.
inline std::int64_t row_tiles(const Problem &p, int of_rows) {
  const std::int64_t rows_of_group = std::int64_t{p.seqlen_q} * (p.heads / p.kv_heads);
  return std::int64_t{p.batch} * p.kv_heads * ((rows_of_group + of_rows - 1) / of_rows);
}

/// Returns the number of splits of each of `tiles` tiles of rows: the fewest whose waves are as full as those
/// of any number, within 5%. A wave is as many blocks as the GPU runs at once.
inline int fewest_splits(std::int64_t tiles, int wave, int most) {
  const auto filled = [=](int splits) {
    const std::int64_t blocks = tiles * splits;
    return float(blocks) / ((blocks + wave - 1) / wave * wave);
  };
  float best = 0;
  for (int splits = 1; splits <= min(most, 128); splits++) best = fmaxf(best, filled(splits));
  int fewest = 1;
  while (filled(fewest) * 1.05f < best) fewest++;
  return fewest;
}

}  // namespace
