// Where the keys and values of a cache lie: in pages, packed, beside it. Steps 25 and 26 share it.
#pragma once

#include "common/kernel/heads.h"
#include "common/kernel/kernel.h"

/// Where a key and its value begin: pointers, as numbers, which lanes can shuffle.
struct Place {
  std::int64_t K, V;
};

/// The d elements at a place.
template <int d, class T = const half>
__device__ __forceinline__ Matrix<T> row_at(std::int64_t place) {
  return {reinterpret_cast<T *>(place), 1, d};
}

/// The place of a sequence's key: in its page, if there are pages. From new_from on beside the cache.
template <int d>
__device__ __forceinline__ Place place_of(const Problem &p, int b, int kv_h, int key,
                                          int new_from) {
  const auto place = [=](auto *tensor, const Strides &strides, int block, int row) {
    const auto head = head_of<const half, d>(tensor, strides, block, kv_h, row, 1);
    return reinterpret_cast<std::int64_t>(head.data);
  };
  if (key >= new_from) {
    const std::int64_t of_head = std::int64_t{p.seqlen_new} * d;
    const Strides dense{of_head * p.kv_heads, of_head, d};
    return {place(p.K_new, dense, b, key - new_from), place(p.V_new, dense, b, key - new_from)};
  }
  int block = b, row = key + of_batch(p.cu_seqlens_k, p, b, 0);
  if (p.page_table) {
    const int pages = (p.seqlen_k + p.page_size - 1) / p.page_size;
    block = Matrix<const int>{p.page_table, p.batch, pages}(b, key / p.page_size);
    row = key % p.page_size;
  }
  return {place(p.K, p.K_strides, block, row), place(p.V, p.V_strides, block, row)};
}

/// Stores the new keys of a sequence and their values in the cache, by all threads of a block. A
/// launch that does so reads them beside the cache.
template <int d>
__device__ __forceinline__ void append(const Problem &p, int b, int kv_h, int seqlen_k) {
  const int new_from = seqlen_k - p.seqlen_new;
  for (int i = threadIdx.x * 8; i < p.seqlen_new * d; i += blockDim.x * 8) {
    const Place from = place_of<d>(p, b, kv_h, new_from + i / d, new_from);
    const Place to = place_of<d>(p, b, kv_h, new_from + i / d, seqlen_k);
    store<8>(row_at<d, half>(to.K)(0, i % d), load<8>(row_at<d>(from.K)(0, i % d)));
    store<8>(row_at<d, half>(to.V)(0, i % d), load<8>(row_at<d>(from.V)(0, i % d)));
  }
}

/// Starts the copies of a warp's tile of K and V: lane i knows the place of key i. Only the first
/// `there` are there. Zeros arrive for the others: they are masked, but a weight of 0 times NaN is NaN.
template <int keys, int d, class KV>
__device__ __forceinline__ void load_keys(KV &tile, const Place &place, int there) {
  constexpr int lanes = d / 8;  // per row, 16 bytes each
  const int first = threadIdx.x % 32 / lanes, col = threadIdx.x % lanes * 8;
#pragma unroll
  for (int i = 0; i < keys; i += 32 / lanes) {
    const std::int64_t K = __shfl_sync(kAllLanes, place.K, first + i);
    const std::int64_t V = __shfl_sync(kAllLanes, place.V, first + i);
    cp_async_16_or_zeros(tile.K(first + i, col), row_at<d>(K)(0, col), first + i < there);
    cp_async_16_or_zeros(tile.V(first + i, col), row_at<d>(V)(0, col), first + i < there);
  }
}
