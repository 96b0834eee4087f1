// SPDX-License-Identifier: MIT
// Keys in pages for TMA, as step 54 has them, for the steps after it.
#pragma once

#include <climits>
#include <numeric>

#include "common/kernel/persistent.h"
#include "common/kernel/sequence_rows.h"

namespace {  // a step without TMA has pages of its own (cache.h)

/// Where keys lie: row i of a sequence is row i % size of page table(sequence, i / size). Without pages a sequence
/// is one page, and its number is the sequence's.
struct Pages {
  StridedMatrix<const int>
      table;        // [batch, pages of the longest sequence]; its data are null without pages
  int size, count;  // rows of a page; pages in all
  int box_rows;     // divide a page's rows and a tile's, so that a box lies in one page
  int whole, rest;  // a tile's rows are so many pages, and a rest
  /// `most_rows`: of a box, a divisor of Bc.
  Pages(const Problem &p, int most_rows)
      : table{p.page_table, p.batch, 0, 0},
        size(INT_MAX),
        count(p.cache_index ? p.caches : p.batch),
        box_rows(most_rows),
        whole(0),
        rest(Bc) {
    if (!p.page_table) return;
    size = p.page_size, count = p.num_pages, box_rows = std::gcd(size, most_rows);
    whole = Bc / size, rest = Bc % size;
    table.cols = (p.seqlen_k - 1) / size + 1;
    table.stride = p.page_table_stride ? p.page_table_stride : table.cols;
  }
  /// Returns the number of a page, whatever the table holds.
  __device__ __forceinline__ int clamped(int page) const { return min(max(page, 0), count - 1); }
};

}  // namespace

/// Returns the map of K or V, with d columns.
template <class T>
static inline SequenceMap map_of_pages(const Problem &p, const Pages &pages, const void *tensor,
                                       const Strides &strides, int d) {
  const bool packed = p.cu_seqlens_k;
  const int rows = p.page_table ? p.page_size : packed ? p.total_k : p.seqlen_k;
  return sequence_map<T>(tensor, strides, pages.count, p.kv_heads, rows, packed, d, pages.box_rows);
}
