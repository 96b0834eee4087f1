// SPDX-License-Identifier: MIT
// A cache of K and V, and the new rows that it lacks. Step 86 builds it, and later steps include it.
#pragma once

#include "common/kernel/key_pages.h"

/// K or V: the cache, the new rows that it lacks, and a map of each.
template <class T, int d>
struct CacheAndNew {
  SequenceMap map, map_new;
  T *cache;
  const T *fresh;  // null if the cache has all
  Strides strides, strides_new;

  /// Returns the row of the cache that is a key's.
  __device__ __forceinline__ auto cached(const Pages &pages, int b, int head, int key) const {
    const int page = pages.table.data ? pages.clamped(pages.table(b, key / pages.size)) : b;
    return head_of<T, d>(cache, strides, page, head, key % pages.size, 1);
  }
  __device__ __forceinline__ auto new_row(int b, int head, int row) const {
    return head_of<const T, d>(fresh, strides_new, b, head, row, 1);
  }
};

/// Returns the first key that the cache lacks, of a sequence with `keys` keys.
__device__ __forceinline__ int first_new_key(const Problem &p, int keys) {
  return p.seqlen_new ? max(keys - p.seqlen_new, 0) : 1 << 30;
}

/// Copies the box in which the cache ends, by a warp: lane i row i, an old one or a new one. A box of a map would begin
/// at a multiple of 8 rows of the tile, and the new ones need not.
template <class T, int d>
__device__ __forceinline__ void gather(TmaTile<Bc, d, T> &tile, const CacheAndNew<T, d> &of,
                                       const Problem &p, const Pages &pages, const HeadRows &keys,
                                       int first_new) {
  const int lane = threadIdx.x % 32, old = first_new % pages.box_rows, row = lane - old;
  if (lane < pages.box_rows) {
    const T *const from =
        row < 0 ? of.cached(pages, keys.sequence, keys.head, first_new + row).data
                // Behind the last new row comes this one again: it is masked.
                : of.new_row(keys.sequence, keys.head, min(row, p.seqlen_new - 1)).data;
#pragma unroll
    for (int col = 0; col < d; col += 8)
      cp_async_16(tile(first_new % Bc + row, col), Matrix<const T>{from, 1, d}(0, col));
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();  // wgmma reads what ordinary copies wrote
}

/// Stores the new rows in the cache, by `warps` warps. A lane has 16 bytes of a key and of its value. No block waits
/// for this: each has the new rows from where they are.
template <class T, int d>
__device__ __forceinline__ void store_new_rows(const Problem &p, const Pages &pages,
                                               const CacheAndNew<T, d> &K,
                                               const CacheAndNew<T, d> &V, int warp, int warps) {
  constexpr int lanes = d / 8;  // per row
  const int all = p.batch * p.kv_heads * p.seqlen_new, col = threadIdx.x % lanes * 8;
  for (int i = (warp * 32 + int(threadIdx.x) % 32) / lanes; i < all; i += warps * 32 / lanes) {
    const int row = i % p.seqlen_new, any_head = i / p.seqlen_new;
    const int b = any_head / p.kv_heads, head = any_head % p.kv_heads;
    const int keys = Rows(p, b * p.heads).k.count, key = first_new_key(p, keys) + row;
    const auto to_K = K.cached(pages, b, head, key), to_V = V.cached(pages, b, head, key);
    const auto new_K = load<8>(K.new_row(b, head, row)(0, col));
    const auto new_V = load<8>(V.new_row(b, head, row)(0, col));
    store(to_K(0, col), new_K);
    store(to_V(0, col), new_V);
  }
}

/// Returns K or V of a problem, with its maps.
template <class T, int d>
static inline CacheAndNew<T, d> cache_and_new(const Problem &p, const Pages &pages, void *cache,
                                              const Strides &strides, const void *fresh,
                                              const Strides &strides_new) {
  const SequenceMap map = map_of_pages<T>(p, pages, cache, strides, d);
  return {map,
          fresh ? sequence_map<T>(fresh, strides_new, p.batch, p.kv_heads, p.seqlen_new, false, d,
                                  pages.box_rows)
                : map,
          static_cast<T *>(cache),
          static_cast<const T *>(fresh),
          strides,
          strides_new};
}
