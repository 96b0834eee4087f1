// SPDX-License-Identifier: MIT
// Where step 50 finds the rows of K and V, how it turns a row by its position, and the kernel that
// stores rows: new keys in the cache, or rotated ones in the workspace.
#pragma once

#include "common/kernel/cache.h"

namespace {

/// The pairs among 16 elements of a row, 8 from column `col` and 8 from `col` + d / 2, whichever
/// elements are pairs: turns each by its angle at this position.
template <Rope rope, class T, int d>
__device__ void rotate_as(Vector<T, 8> &left, Vector<T, 8> &right, const Problem &p, int position,
                          int col) {
  const Matrix<const float> gCos{p.rope_cos, p.seqlen_k, d / 2},
      gSin{p.rope_sin, p.seqlen_k, d / 2};
#pragma unroll
  for (int i = 0; i < 2; i++) {  // 4 pairs each
    const int pair = rope == Rope::kHalves ? col + 4 * i : col / 2 + d / 4 * i;
    const auto cos = load<4>(gCos(position, pair)), sin = load<4>(gSin(position, pair));
    for (int e = 0; e < 4; e++) {
      Vector<T, 8> &part = i == 0 ? left : right;  // of neighbours
      T &x = rope == Rope::kHalves ? left[4 * i + e] : part[2 * e];
      T &y = rope == Rope::kHalves ? right[4 * i + e] : part[2 * e + 1];
      const float x_before = to_float(x), y_before = to_float(y);
      x = from_float<T>(x_before * cos[e] - y_before * sin[e]);
      y = from_float<T>(x_before * sin[e] + y_before * cos[e]);
    }
  }
}
template <class T, int d>
__device__ void rotate(Vector<T, 8> &left, Vector<T, 8> &right, const Problem &p, int position,
                       int col) {
  if (p.rope == Rope::kHalves)
    rotate_as<Rope::kHalves, T, d>(left, right, p, position, col);
  else
    rotate_as<Rope::kNeighbours, T, d>(left, right, p, position, col);
}

constexpr int store_threads = 128;

/// Stores the keys of `from`, rotated where there is a rotation, and their values as the last rows of
/// the sequences of `to`. A thread has 16 elements of a key.
template <class T, int d>
__global__ void __launch_bounds__(store_threads) store_keys(const Problem from, const Problem to) {
  const int thread = blockIdx.x * store_threads + threadIdx.x, h = blockIdx.y, b = blockIdx.z;
  const int i = thread / (d / 16), col = thread % (d / 16) * 8;
  const int length = of_batch(from.lengths_k, from, b, from.seqlen_k);
  const int key = of_batch(to.lengths_k, to, b, to.seqlen_k) - length + i;
  if (i >= length || key < 0) return;
  const KeyPlace old = place_of<d, T>(from, b, h, i, length),
                 place = place_of<d, T>(to, b, h, key, key + 1);
  const auto K = row_at<d, const T>(old.K), V = row_at<d, const T>(old.V);
  const auto K_to = row_at<d, T>(place.K), V_to = row_at<d, T>(place.V);
  Vector<T, 8> left = load<8>(K(0, col)), right = load<8>(K(0, col + d / 2));
  if (to.rope != Rope::kNone) rotate<T, d>(left, right, to, key, col);
  store<8>(K_to(0, col), left), store<8>(K_to(0, col + d / 2), right);
  if (from.V == to.V) return;  // they stay where they are
  store<8>(V_to(0, col), load<8>(V(0, col)));
  store<8>(V_to(0, col + d / 2), load<8>(V(0, col + d / 2)));
}

template <class T, int d>
void launch_store(const Problem &from, const Problem &to) {
  const int blocks = (std::int64_t{from.seqlen_k} * (d / 16) + store_threads - 1) / store_threads;
  launch_on<void>(to.stream, store_keys<T, d>, dim3(blocks, to.kv_heads, to.batch),
                  dim3(store_threads), from, to);
}

/// Whether the keys are rotated into the workspace first: they are not new ones of a cache.
bool rotates_all_keys(const Problem &p) {
  return p.rope != Rope::kNone && !p.K_new;
}

/// The rows of K that a copy in the workspace has.
std::int64_t rows_in_workspace(const Problem &p) {
  return p.total_k ? p.total_k : std::int64_t{p.batch} * p.seqlen_k;
}

/// Bytes of that copy; of pages V is copied, too: what is in no pages has none.
std::size_t rotated_bytes(const Problem &p) {
  if (!rotates_all_keys(p)) return 0;
  return std::size_t{2} * p.kv_heads * rows_in_workspace(p) * p.head_dim * (p.page_table ? 2 : 1);
}

/// Does what is to be done before the queries can ask: new keys go into the cache, or all keys are
/// rotated into `copy`. Returns the problem that is left.
template <class T, int d>
Problem prepare(const Problem &p, void *copy) {
  Problem left = p;
  if (p.K_new) {
    Problem from = p;
    from.K = const_cast<void *>(p.K_new), from.V = const_cast<void *>(p.V_new);
    from.K_strides = p.K_new_strides, from.V_strides = p.V_new_strides;
    from.seqlen_k = p.seqlen_new;
    from.lengths_k = p.lengths_new, from.cu_seqlens_k = p.cu_seqlens_new;
    from.page_table = nullptr;
    launch_store<T, d>(from, p);
  } else if (rotates_all_keys(p)) {
    // [kv_heads, rows of all sequences, d]
    const std::int64_t head = rows_in_workspace(p) * d;
    left.K_strides = {p.cu_seqlens_k ? 0 : std::int64_t{p.seqlen_k} * d, head, d};
    left.K = copy;
    if (p.page_table) {
      left.V_strides = left.K_strides;
      left.V = static_cast<T *>(copy) + p.kv_heads * head;
      left.page_table = nullptr;
    }
    launch_store<T, d>(p, left);
  }
  return left;
}

}  // namespace
