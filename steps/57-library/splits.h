// SPDX-License-Identifier: MIT
// Into how many splits the library cuts a row's keys, and the launch of its kernel for new tokens. Step 50's, with a bound
// on the workspace.
#pragma once

#include "steps/57-library/decode.h"

namespace {

/// Tiles of 16 rows of Q, of the heads that share a head of K and V, in the whole problem.
std::int64_t row_tiles(const Call &p) {
  return (std::int64_t{p.seqlen_q} * (p.heads / p.kv_heads) + decoding::rows - 1) / decoding::rows *
         p.batch * p.kv_heads;
}

/// How many blocks of as many warps as fit the GPU runs at once.
template <class T, int d>
int wave() {
  return decoding::with_warps<T, d>(false, [](auto num_warps) {
    return resident_blocks<decoding::SharedStorage<T, d, num_warps>>(
        decoding::decode<T, d, num_warps>, num_warps * 32);
  });
}

/// The most splits of a row's keys: each warp of a block has at least a tile of keys.
template <int d>
int most_splits(const Call &p) {
  const std::int64_t seen = p.window_left < 0 || p.window_right < 0
                                ? p.seqlen_k
                                : min(std::int64_t{p.window_left} + 1 + p.window_right + p.sinks,
                                      std::int64_t{p.seqlen_k});
  return std::clamp<std::int64_t>(seen / (decoding::most_warps<d> * decoding::keys), 1, 128);
}

/// Split tiles have at most so many waves of blocks, which bounds the parts in the workspace.
constexpr int kMostWaves = 8;

/// Returns the number of splits of each tile of rows: the fewest whose waves are as full as those of any number,
/// within 5%. A wave is as many blocks as the GPU runs at once.
template <class T, int d>
int num_splits(const Call &p) {
  const std::int64_t tiles = row_tiles(p);
  if (tiles > decoding::max_counters) return 1;
  if (p.splits) return p.splits;
  const int of_wave = wave<T, d>();
  const auto filled = [&](int splits) {
    const std::int64_t blocks = tiles * splits;
    return float(blocks) / ((blocks + of_wave - 1) / of_wave * of_wave);
  };
  const int most = std::min<std::int64_t>(most_splits<d>(p), kMostWaves * of_wave / tiles);
  float best = 0;
  for (int splits = 1; splits <= most; splits++) best = fmaxf(best, filled(splits));
  int fewest = 1;
  while (filled(fewest) * 1.05f < best) fewest++;
  return fewest;
}

/// The bytes of the parts. They grow with the batch, the queries and the keys, whatever the kernels choose.
template <class T, int d>
std::size_t parts_bytes(const Call &p) {
  const std::int64_t tiles = row_tiles(p);
  const int most = p.splits ? p.splits : most_splits<d>(p);
  if (most == 1) return 0;
  const std::int64_t parts =
      p.splits ? tiles * most : std::min<std::int64_t>(tiles * most, kMostWaves * wave<T, d>());
  return sizeof(float) * parts * decoding::rows * (d + 4);
}

template <class T, int d>
void launch_decode(const Call &p) {
  const int splits = num_splits<T, d>(p);
  // Of blocks that follow each other on an SM one reads while the other begins or ends.
  const bool share_SMs = row_tiles(p) * splits > wave<T, d>();
  decoding::with_warps<T, d>(share_SMs, [&](auto num_warps) {
    launch_on<decoding::SharedStorage<T, d, num_warps>>(
        p.stream, decoding::decode<T, d, num_warps>,
        dim3(row_tiles(p) / (p.batch * p.kv_heads), splits, p.batch * p.kv_heads),
        dim3(num_warps * 32), p, Scores(p));
  });
}

}  // namespace
