// SPDX-License-Identifier: MIT
// Where the rows of a head of a sequence are, whatever the lengths, for the steps from 45 on.
#pragma once

#include "common/kernel/heads.h"
#include "common/kernel/tma.h"

/// The rows of a head of a sequence, and which head this is.
struct HeadRows : SequenceRows {
  int head, sequence;
};

/// The copies of a tile, to and from such rows.
template <class T, int Rows, int d>
__device__ __forceinline__ void tma_load(TmaTile<Rows, d, T> &tile, const SequenceMap &map,
                                         const HeadRows &rows, int row, Mbarrier &landed) {
  tma_load(tile, map, rows, row, rows.head, rows.sequence, landed);
}
template <class T, int Rows, int d>
__device__ __forceinline__ void tma_store(const SequenceMap &map, const HeadRows &rows, int row,
                                          TmaTile<Rows, d, T> &tile) {
  tma_store(map, rows, row, rows.head, rows.sequence, tile);
}

/// What a kernel asks for to find a sequence's rows: nothing, because all are full; lengths, as a program has them, with
/// packed rows or without; or all that a library's caller may give besides. Registers of a producer are few.
enum class Given { kNothing, kLengths, kAll };

/// The rows of a head, whatever the arrays hold: inside the tensor, and no more than the longest. `any_head` is its
/// number in the whole batch.
struct Rows {
  HeadRows q, k;
  __device__ Rows(const Problem &p, int any_head, Given given = Given::kLengths) {
    const int b = any_head / p.heads, head = any_head - b * p.heads;
    const bool all = given == Given::kAll;
    const auto rows = [&](const int *cu_seqlens, const int *starts, const int *lengths, int longest,
                          int total) {
      if (given == Given::kNothing) return HeadRows{{0, longest}, head, b};
      int first = cu_seqlens ? min(max(of_batch(cu_seqlens, p, b, 0), 0), total) : 0;
      if (all && starts) first = min(max(of_batch(starts, p, b, 0), 0), longest);
      int most = cu_seqlens ? min(longest, total - first) : longest;
      if (all && starts) most = longest - first;
      if (all && cu_seqlens && !lengths) {
        const int next = Matrix<const int>{cu_seqlens, 1, p.batch + 1}(0, b + 1);
        most = min(max(min(next, total) - first, 0), most);
        return HeadRows{{first, most}, head, b};
      }
      return HeadRows{{first, min(max(of_batch(lengths, p, b, longest), 0), most)}, head, b};
    };
    q = rows(p.cu_seqlens_q, nullptr, p.lengths_q, p.seqlen_q, p.total_q);
    k = rows(p.cu_seqlens_k, p.starts_k, p.lengths_k, p.seqlen_k, p.total_k);
    k.head = head / (p.heads / p.kv_heads);
    if (all && p.cache_index)
      k.sequence = min(max(of_batch(p.cache_index, p, b, b), 0), p.caches - 1);
  }
};

/// Of a sequence without keys O is 0. It has no work, because a tile of keys must have a row. A warp of each block
/// writes the zeros.
template <class T, int d>
__device__ __forceinline__ void write_zeros_without_keys(const Problem &problem, const int &lane) {
  for (int head = blockIdx.x; head < problem.batch * problem.heads; head += gridDim.x) {
    const Rows rows(problem, head);
    if (rows.k.count > 0) continue;
    const auto O = head_of<T, d>(problem.O, problem.O_strides, rows.q.sequence, rows.q.head,
                                 rows.q.first, rows.q.count);
    for (int i = lane * 8; i < rows.q.count * d; i += 32 * 8)
      store(O(i / d, i % d), Vector<T, 8>{});
  }
}

/// Returns the map of Q or O with this number of columns, for tiles of 64 rows.
template <class T>
static inline SequenceMap map_of_q(const Problem &p, const void *tensor, const Strides &strides,
                                   int columns) {
  const bool packed = p.cu_seqlens_q;
  return sequence_map<T>(tensor, strides, p.batch, p.heads, packed ? p.total_q : p.seqlen_q, packed,
                         columns, 64);
}

/// Returns the map of K or V with this number of columns, for tiles of Bc rows. A cache of the library's caller may have
/// more sequences than the batch.
template <class T, int Bc>
static inline SequenceMap map_of_k(const Problem &p, const void *tensor, const Strides &strides,
                                   int columns) {
  const bool packed = p.cu_seqlens_k;
  return sequence_map<T>(tensor, strides, p.cache_index ? p.caches : p.batch, p.kv_heads,
                         packed ? p.total_k : p.seqlen_k, packed, columns, Bc);
}
