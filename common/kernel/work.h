// SPDX-License-Identifier: MIT
// What a block computes, and where the rows of its sequence are. Step 45 builds it, and later steps include it.
#pragma once

#include "common/kernel/heads.h"
#include "common/kernel/tma.h"

/// The rows of a head of a sequence, and which head this is.
struct HeadRows : SequenceRows {
  int head, sequence;
};

/// What a block computes: a tile of Q, and the tiles of keys that some of its rows see.
struct Work {
  int row = 0;           // its first, negative if there are fewer than Br
  int position = 0;      // of this row: of the last query it is that of the last key
  int from = 0, to = 0;  // tiles of keys; to: 0 if there is no work
  HeadRows q{}, k{};     // the sequence
};
constexpr int work_ints = 12;

/// Work in a row of a tile or of a matrix.
template <class View>
__device__ __forceinline__ void write_work(View &to, int at, const Work &work) {
  store(to(at, 0), Vector<int, 4>{work.row, work.position, work.from, work.to});
  store(to(at, 4), Vector<int, 4>{work.q.first, work.q.count, work.q.head, work.q.sequence});
  store(to(at, 8), Vector<int, 4>{work.k.first, work.k.count, work.k.head, work.k.sequence});
}
template <class View>
__device__ __forceinline__ Work read_work(View &from, int at) {
  const Vector<int, 4> tile = load<4>(from(at, 0)), q = load<4>(from(at, 4)),
                       k = load<4>(from(at, 8));
  return {
      tile[0], tile[1], tile[2], tile[3], {{q[0], q[1]}, q[2], q[3]}, {{k[0], k[1]}, k[2], k[3]}};
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

/// Returns the map of Q or O, which has so many columns, for tiles of 64 rows.
template <class T>
static inline SequenceMap map_of_q(const Problem &p, const void *tensor, const Strides &strides,
                                   int columns) {
  const bool packed = p.cu_seqlens_q;
  return sequence_map<T>(tensor, strides, p.batch, p.heads, packed ? p.total_q : p.seqlen_q, packed,
                         columns, 64);
}

/// Returns the map of K or V, which has so many columns, for tiles of Bc rows. A caller of the library may have more elements of a cache than the
/// batch has.
template <class T, int Bc>
static inline SequenceMap map_of_k(const Problem &p, const void *tensor, const Strides &strides,
                                   int columns) {
  const bool packed = p.cu_seqlens_k;
  return sequence_map<T>(tensor, strides, p.cache_index ? p.caches : p.batch, p.kv_heads,
                         packed ? p.total_k : p.seqlen_k, packed, columns, Bc);
}
