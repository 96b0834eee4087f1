// SPDX-License-Identifier: MIT
// Where a cache's keys lie and how a warp loads them, as step 26 has it, for the steps after it.
#pragma once

#include "common/kernel/heads.h"
#include "common/kernel/kernel.h"
#include "common/kernel/part.h"
#include "common/kernel/swizzle.h"

/// Where a key and its value begin: addresses as numbers, which lanes can shuffle.
struct KeyPlace {
  std::int64_t K, V;
};

/// The d elements at an address.
template <int d, class T = const half>
__device__ __forceinline__ Matrix<T> row_at(std::int64_t address) {
  return {reinterpret_cast<T *>(address), 1, d};
}

/// The pages that hold the keys of all sequences.
struct Pages {
  Matrix<const int> table;
  int size;  // keys per page

  __device__ __forceinline__ explicit Pages(const Problem &p)
      : table{p.page_table, p.batch, (p.seqlen_k - 1) / p.page_size + 1}, size(p.page_size) {}
  __device__ __forceinline__ int page_of(int b, int key) const { return table(b, key / size); }
};

/// The place of a sequence's key: in its page, if there are pages. From new_from on it is beside the cache.
template <int d, class T = half>
__device__ __forceinline__ KeyPlace place_of(const Problem &p, int b, int kv_h, int key,
                                             int new_from) {
  const auto place = [=](const void *tensor, const Strides &strides, int block, int row) {
    const auto head = head_of<const T, d>(tensor, strides, block, kv_h, row, 1);
    return reinterpret_cast<std::int64_t>(head.data);
  };
  if (key >= new_from) {
    const std::int64_t of_head = std::int64_t{p.seqlen_new} * d;
    const Strides dense{of_head * p.kv_heads, of_head, d};
    return {place(p.K_new, dense, b, key - new_from), place(p.V_new, dense, b, key - new_from)};
  }
  int block = b, row = key + of_batch(p.cu_seqlens_k, p, b, 0);
  if (p.page_table) {
    const Pages pages(p);
    block = pages.page_of(b, key), row = key % pages.size;
  }
  return {place(p.K, p.K_strides, block, row), place(p.V, p.V_strides, block, row)};
}

/// Stores the new keys of a sequence and their values in the cache, by all threads of a block. A
/// launch that does so reads them beside the cache.
template <int d>
__device__ __forceinline__ void append(const Problem &p, int b, int kv_h, int seqlen_k) {
  const int new_from = seqlen_k - p.seqlen_new;
  for (int i = threadIdx.x * 8; i < p.seqlen_new * d; i += blockDim.x * 8) {
    const KeyPlace from = place_of<d>(p, b, kv_h, new_from + i / d, new_from);
    const KeyPlace to = place_of<d>(p, b, kv_h, new_from + i / d, seqlen_k);
    store<8>(row_at<d, half>(to.K)(0, i % d), load<8>(row_at<d>(from.K)(0, i % d)));
    store<8>(row_at<d, half>(to.V)(0, i % d), load<8>(row_at<d>(from.V)(0, i % d)));
  }
}

/// Starts the copies of a warp's tile of K and V: lane i knows the place of key i. Keys from `there` on become
/// zeros: they are masked, but a weight of 0 times NaN is NaN.
template <class T, int keys, int d>
__device__ __forceinline__ void load_keys(SharedTile<keys, d, T> &to_K,
                                          SharedTile<keys, d, T> &to_V, const KeyPlace &place,
                                          int there) {
  constexpr int lanes = d / 8 & -(d / 8);  // per row, 16 bytes each: a power of 2
  const int first = threadIdx.x % 32 / lanes, col = threadIdx.x % lanes * 8;
#pragma unroll
  for (int row = first; row < keys; row += 32 / lanes) {
    const std::int64_t K = __shfl_sync(kAllLanes, place.K, row);
    const std::int64_t V = __shfl_sync(kAllLanes, place.V, row);
    for (int c = col; c < d; c += lanes * 8) {
      cp_async_16_or_zeros(to_K(row, c), row_at<d, const T>(K)(0, c), row < there);
      cp_async_16_or_zeros(to_V(row, c), row_at<d, const T>(V)(0, c), row < there);
    }
  }
}
