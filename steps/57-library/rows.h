// SPDX-License-Identifier: MIT
// Where step 57 finds the rows of K and V, how it turns a row by its position, and the kernel that stores rows: new
// keys in the cache, or turned ones in the workspace.
#pragma once

#include "common/kernel/cache.h"
#include "steps/57-library/call.h"

namespace {

/// The row of `cols` elements at an address.
template <class T>
__device__ __forceinline__ Matrix<T> key_row(std::int64_t address, int cols) {
  return {reinterpret_cast<T *>(address), 1, cols};
}

/// The place of a sequence's key: in its page, if there are pages.
template <class T>
__device__ __forceinline__ KeyPlace place_of_key(const Call &p, const Sequence &at, int b, int kv_h,
                                                 int key) {
  int block = at.cache, row = at.k_start + key;
  if (p.page_table) {
    const PageTable pages(p, b);
    block = pages.page_of(row), row = row % pages.size;
  }
  const auto place = [=](const void *tensor, const Strides &strides) {
    const T *const first = static_cast<const T *>(tensor);
    return reinterpret_cast<std::int64_t>(first + block * strides.batch + kv_h * strides.head +
                                          row * strides.row);
  };
  return {place(p.K, p.K_strides), place(p.V, p.V_strides)};
}

/// Returns 8 elements of a row of Q or K, from column `col` on, turned by the row's position. Pair c is elements c
/// and c + rope_dim / 2, or 2 c and 2 c + 1, and of a row the first rope_dim elements turn.
template <class T, class Row>
__device__ __forceinline__ Vector<T, 8> load_turned(const Row &row, int col, const Call &p,
                                                    int position) {
  Vector<T, 8> x = load<8>(row(0, col));
  if (p.rope == Rope::kNone || col >= p.rope_dim) return x;
  const int pairs = p.rope_dim / 2;
  const Matrix<const float> gCos{p.rope_cos, p.rope_positions, pairs},
      gSin{p.rope_sin, p.rope_positions, pairs};
  if (p.rope == Rope::kNeighbours) {
    const auto cos = load<4>(gCos(position, col / 2)), sin = load<4>(gSin(position, col / 2));
    for (int e = 0; e < 4; e++) {
      const float left = to_float(x[2 * e]), right = to_float(x[2 * e + 1]);
      x[2 * e] = from_float<T>(left * cos[e] - right * sin[e]);
      x[2 * e + 1] = from_float<T>(left * sin[e] + right * cos[e]);
    }
    return x;
  }
  const bool is_right = col >= pairs;
  const int pair = is_right ? col - pairs : col;
  const Vector<T, 8> other = load<8>(row(0, is_right ? pair : col + pairs));
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const auto cos = load<4>(gCos(position, pair + i)), sin = load<4>(gSin(position, pair + i));
    for (int e = 0; e < 4; e++) {
      const float own = to_float(x[i + e]), partner = to_float(other[i + e]);
      x[i + e] = from_float<T>(is_right ? partner * sin[e] + own * cos[e]
                                        : own * cos[e] - partner * sin[e]);
    }
  }
  return x;
}

/// Starts the copies of a warp's tile of K and V: lane i knows the place of key i. Keys from `there` on, and
/// columns from `cols` of K, or `cols_v` of V, on, become zeros: a weight of 0 times NaN is NaN.
template <class T, int keys, int d>
__device__ __forceinline__ void load_key_tiles(SharedTile<keys, d, T> &to_K,
                                               SharedTile<keys, d, T> &to_V, const KeyPlace &place,
                                               int there, int cols, int cols_v) {
  constexpr int lanes = d / 8 & -(d / 8);  // per row, 16 bytes each: a power of 2
  const int first = threadIdx.x % 32 / lanes, col = threadIdx.x % lanes * 8;
#pragma unroll
  for (int row = first; row < keys; row += 32 / lanes) {
    const std::int64_t K = __shfl_sync(kAllLanes, place.K, row);
    const std::int64_t V = __shfl_sync(kAllLanes, place.V, row);
    for (int c = col; c < d; c += lanes * 8) {
      cp_async_16_or_zeros(to_K(row, c), key_row<const T>(K, cols)(0, c), row < there && c < cols);
      cp_async_16_or_zeros(to_V(row, c), key_row<const T>(V, cols_v)(0, c),
                           row < there && c < cols_v);
    }
  }
}

constexpr int store_threads = 128;

/// Stores the keys of `from`, turned where there is a rotation, and their values as the last rows of the sequences
/// of `to`. A thread has 8 elements of a key and of its value.
template <class T, int d>
__global__ void __launch_bounds__(store_threads) store_keys(const Call from, const Call to) {
  const int thread = blockIdx.x * store_threads + threadIdx.x, h = blockIdx.y, b = blockIdx.z;
  const int i = thread / (d / 8), col = thread % (d / 8) * 8;
  const Sequence source = sequence_of(from, b), target = sequence_of(to, b);
  const int count = min(source.k_count, target.k_count), key = target.k_count - count + i;
  if (i >= count) return;
  const KeyPlace old = place_of_key<T>(from, source, b, h, i),
                 place = place_of_key<T>(to, target, b, h, key);
  const int position = rope_position_of_key(to, target, key);
  const auto K = key_row<const T>(old.K, to.head_dim), V = key_row<const T>(old.V, to.head_dim_v);
  if (col < to.head_dim)
    store<8>(key_row<T>(place.K, to.head_dim)(0, col), load_turned<T>(K, col, to, position));
  if (from.V == to.V) return;  // they stay where they are
  if (col < to.head_dim_v) store<8>(key_row<T>(place.V, to.head_dim_v)(0, col), load<8>(V(0, col)));
}

template <class T, int d>
void launch_store(const Call &from, const Call &to) {
  const int blocks = (std::int64_t{from.seqlen_k} * (d / 8) + store_threads - 1) / store_threads;
  if (blocks == 0) return;
  launch_on<void>(to.stream, store_keys<T, d>, dim3(blocks, to.kv_heads, to.batch),
                  dim3(store_threads), from, to);
}

/// Whether the keys are turned into the workspace first: they are not new ones of a cache.
bool turns_all_keys(const Call &p) {
  return p.rope != Rope::kNone && !p.K_new;
}

/// Whether the rows of V are not those of the copy of K: then V is copied, too.
bool copies_values(const Call &p) {
  return p.page_table || p.cache_index;
}

/// The rows of K that a copy in the workspace has.
std::int64_t rows_in_workspace(const Call &p) {
  return p.cu_seqlens_k ? p.total_k : std::int64_t{p.batch} * p.seqlen_k;
}

/// The bytes of that copy.
std::size_t turned_bytes(const Call &p) {
  if (!turns_all_keys(p)) return 0;
  return std::size_t{2} * p.kv_heads * rows_in_workspace(p) *
         (p.head_dim + (copies_values(p) ? p.head_dim_v : 0));
}

/// The call that is left when all keys have been turned into `copy`: [kv_heads, rows of all sequences, head_dim], and
/// where values are copied the same of head_dim_v.
template <class T>
Call with_turned_keys(const Call &p, void *copy) {
  Call left = p;
  const auto strides_of = [&](int columns) {
    return Strides{p.cu_seqlens_k ? 0 : std::int64_t{p.seqlen_k} * columns,
                   rows_in_workspace(p) * columns, columns};
  };
  left.K_strides = strides_of(p.head_dim);
  left.K = copy;
  if (copies_values(p)) {
    left.V_strides = strides_of(p.head_dim_v);
    left.V = static_cast<T *>(copy) + p.kv_heads * left.K_strides.head;
    left.page_table = left.cache_index = nullptr, left.caches = p.batch;
  }
  return left;
}

/// Does what must be done before the queries begin: stores new keys in the cache, or turns all keys into `copy`.
/// Returns the call that is left.
template <class T, int d>
Call prepare(const Call &p, void *copy) {
  if (turns_all_keys(p)) {
    const Call left = with_turned_keys<T>(p, copy);
    launch_store<T, d>(p, left);
    return left;
  }
  if (p.K_new) {
    Call from = p;
    from.K = const_cast<void *>(p.K_new), from.V = const_cast<void *>(p.V_new);
    from.K_strides = p.K_new_strides, from.V_strides = p.V_new_strides;
    from.seqlen_k = p.seqlen_new, from.total_k = p.total_new;
    from.lengths_k = p.lengths_new, from.cu_seqlens_k = p.cu_seqlens_new;
    from.page_table = from.starts_k = from.cache_index = nullptr;
    from.K_new = nullptr, from.caches = p.batch;
    launch_store<T, d>(from, p);
  }
  return p;
}

/// Turns the queries of `from` into those of `to`, for a kernel that does not. A thread has 8 elements of a query.
template <class T, int d>
__global__ void __launch_bounds__(store_threads) turn_queries(const Call from, const Call to) {
  const int thread = blockIdx.x * store_threads + threadIdx.x, h = blockIdx.y, b = blockIdx.z;
  const int i = thread / (d / 8), col = thread % (d / 8) * 8;
  const Sequence at = sequence_of(from, b);
  if (i >= at.q_count || col >= from.head_dim) return;
  const auto place = [&](const Call &p) {
    return static_cast<const T *>(p.Q) + b * p.Q_strides.batch + h * p.Q_strides.head +
           (at.q_start + i) * p.Q_strides.row;
  };
  const Matrix<const T> Q{place(from), 1, from.head_dim};
  const Matrix<T> to_Q{const_cast<T *>(place(to)), 1, from.head_dim};
  store<8>(to_Q(0, col), load_turned<T>(Q, col, from, rope_position(from, at, i)));
}

/// The rows of Q that a copy in the workspace has, for each head, and the bytes of all.
std::int64_t query_rows(const Call &p) {
  return p.cu_seqlens_q ? p.total_q : std::int64_t{p.batch} * p.seqlen_q;
}
std::size_t turned_query_bytes(const Call &p) {
  return std::size_t{2} * p.heads * query_rows(p) * p.head_dim;
}

/// Turns all queries into `copy`, [heads, rows of all sequences, head_dim]. Returns the call that is left.
template <class T, int d>
Call with_turned_queries(const Call &p, void *copy) {
  Call left = p;
  left.Q = copy;
  left.Q_strides = {p.cu_seqlens_q ? 0 : std::int64_t{p.seqlen_q} * p.head_dim,
                    query_rows(p) * p.head_dim, p.head_dim};
  const int blocks = (std::int64_t{p.seqlen_q} * (d / 8) + store_threads - 1) / store_threads;
  launch_on<void>(p.stream, turn_queries<T, d>, dim3(blocks, p.heads, p.batch), dim3(store_threads),
                  p, left);
  return left;
}

}  // namespace
