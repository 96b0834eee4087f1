// SPDX-License-Identifier: MIT
// Rows of a cache of K and V, as step 55 copies them, and the rows of Q that use them, for the steps after it. What
// arrays of the device hold is clamped: it may be anything, because nobody can check it before the launch.
#pragma once

#include "common/kernel/cache.h"
#include "common/kernel/tma.h"

/// Returns x, but at least 0 and at most `most`.
__device__ __forceinline__ int clamped(int x, int most) {
  return max(0, min(x, most));
}

/// Returns the number of keys of a sequence.
__device__ __forceinline__ int keys_of(const Problem &p, int b) {
  const int most = p.cu_seqlens_k ? min(p.seqlen_k, p.total_k) : p.seqlen_k;
  return clamped(of_batch(p.lengths_k, p, b, p.seqlen_k), most);
}

/// A tile's rows of d elements of 2 bytes, each 16 bytes longer than it must be: 8 consecutive rows have a column in
/// all banks, and a row's bytes follow each other, as a bulk copy writes them.
template <int rows, int d>
struct Padded {
  static constexpr int size = rows * (d + 8);
  __device__ static constexpr int offset(int row, int col) { return row * (d + 8) + col; }
};

/// Returns the row of K or of V that belongs to a key: in its page, if there are pages.
template <class T, int d>
__device__ __forceinline__ Matrix<const T> cache_row(const Problem &p, bool of_V, int b, int kv_h,
                                                     int key) {
  int block = b, row = key;
  if (p.cu_seqlens_k) row = clamped(key + of_batch(p.cu_seqlens_k, p, b, 0), p.total_k - 1);
  if (p.page_table) {
    const Pages pages(p);
    block = clamped(pages.page_of(b, key), p.num_pages - 1), row = key % p.page_size;
  }
  const Strides &strides = of_V ? p.V_strides : p.K_strides;
  return {head_of<const T, d>(of_V ? p.V : p.K, strides, block, kv_h, row, 1).data, 1, d};
}

/// Where the box of a cache lies that begins with this key of a sequence: in its page, if there are pages (step 54).
struct Box {
  SequenceRows source;
  int row, block;

  __device__ Box(const Problem &p, int b, int key, int seqlen_k)
      : source{0, seqlen_k}, row(key), block(b) {
    if (p.page_table) {
      const Pages pages(p);
      block = clamped(pages.page_of(b, key), p.num_pages - 1), row = key % pages.size;
      source.count = min(seqlen_k - key + row, pages.size);
    } else if (p.cu_seqlens_k) {
      source.first = clamped(of_batch(p.cu_seqlens_k, p, b, 0), p.total_k - seqlen_k);
    }
  }
};

/// A tile of the rows of Q and O that share a head of K and V: row r of all of them is query r / group of the
/// group's head r % group. The tile begins at row `first`, and has `there` rows.
template <int rows, int d>
struct GroupRows {
  int b, kv_h, group, first, seqlen_q, q_start, there;

  __device__ GroupRows(const Problem &p, int sequence, int kv_head, int first_row)
      : b(sequence),
        kv_h(kv_head),
        group(p.heads / p.kv_heads),
        first(first_row),
        seqlen_q(clamped(of_batch(p.lengths_q, p, b, p.seqlen_q), p.seqlen_q)),
        q_start(0) {
    if (p.cu_seqlens_q) {
      seqlen_q = min(seqlen_q, p.total_q);
      q_start = clamped(of_batch(p.cu_seqlens_q, p, b, 0), p.total_q - seqlen_q);
    }
    there = min(rows, seqlen_q * group - first);
  }
  /// Returns the tile's row in Q, or in O.
  template <class T>
  __device__ auto row(T *tensor, const Strides &strides, int row) const {
    const int head = kv_h * group + (first + row) % group;
    return head_of<T, d>(tensor, strides, b, head, q_start + (first + row) / group, 1);
  }
  /// Returns how many keys a row of the tile sees, from key 0 on.
  __device__ int keys_seen(const Problem &p, int row, int seqlen_k) const {
    return p.causal ? (first + row) / group + 1 + seqlen_k - seqlen_q : seqlen_k;
  }
};
