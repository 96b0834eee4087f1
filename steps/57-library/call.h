// SPDX-License-Identifier: MIT
// What a call of the library asks for: a Problem, and what a model may want besides. And where the rows of its
// sequences lie, whatever the arrays on the device hold.
#pragma once

#include "common/kernel/heads.h"
#include "common/kernel/kernel.h"

struct Call : Problem {
  int total_new;           // rows of packed K_new and V_new
  int rope_dim;            // elements of a row that turn: the first ones, a multiple of 16
  int rope_positions;      // rows of rope_cos and rope_sin
  bool rope_one_position;  // all queries of a sequence turn as its first
  bool rope_from_new;      // the first turns as the first new key, not the last as the last key
  bool lse_packed;         // lse is [heads, total_q]
  bool deterministic;      // a backward pass has the same bits in every run
  std::int64_t
      slopes_stride;  // from ALiBi's slopes of a sequence to those of the next; 0: the same
};

/// The kernels of steps 53, 54 and 56, for Hopper alone: hopper.cu.
struct Hopper {
  bool (*has_tiles)(const Problem &);  // for the head dims
  void (*forward)(const Problem &);
  std::size_t (*workspace_bytes)(const Problem &);
};

/// What the library calls, and the program of this step. `hopper`: null where that kernel may not run.
struct Backend {
  void (*forward)(const Call &, const Hopper *hopper);  // all kernels of a call
  std::size_t (*workspace_bytes)(const Call &, const Hopper *hopper);
  const char *(*kernel)(const Call &, const Hopper *hopper);  // the name of the one for the queries
  std::size_t counters_bytes;  // at the beginning of the workspace; they are 0 between two calls
};
#ifdef __CUDACC__
#define BACKEND gpu_calls
#define HOPPER gpu_hopper
#define HOPPER_PAGES gpu_hopper_pages
#define HOPPER_DIMS gpu_hopper_dims
#else
#define BACKEND cpu_calls
#define HOPPER cpu_hopper
#define HOPPER_PAGES cpu_hopper_pages
#define HOPPER_DIMS cpu_hopper_dims
#endif
extern const Backend BACKEND;
void HOPPER_PAGES(const Problem &);
extern const Hopper HOPPER_DIMS;
extern const Hopper HOPPER [[gnu::weak]];  // a library that was not compiled for sm_90a has none

/// Whether steps 53 and 54 have tiles for the head dims.
static inline bool has_head_dims_of_53(const Problem &p) {
  return (p.head_dim == 64 || p.head_dim == 128) && p.head_dim_v == p.head_dim;
}

/// The call that a program's problem is.
static inline Call call_of(const Problem &problem) {
  Call call{};
  static_cast<Problem &>(call) = problem;
  call.page_table_stride = problem.page_table ? (problem.seqlen_k - 1) / problem.page_size + 1 : 0;
  call.caches = problem.batch;
  call.rope_dim = problem.rope_dim;
  call.rope_positions = problem.seqlen_k;
  return call;
}

/// The call with its windows, and its causal mask, as one window with two sides.
template <class SomeCall>
static inline SomeCall with_one_window(SomeCall call) {
  if (call.window) call.window_left = call.window - 1;
  if (call.window || call.causal) call.window_right = 0;
  call.causal = call.window_right >= 0;  // for the order of the blocks
  return call;
}

namespace {

/// The rows of a sequence: of Q and O, of K and V, and of K_new and V_new. The last new_count keys are new.
struct Sequence {
  int q_start, q_count, k_start, k_count, new_start, new_count;
  int cache;  // of K and V
};

__device__ __forceinline__ int clamp(int x, int least, int most) {
  return max(least, min(x, most));
}

/// Where the rows of a sequence begin, and how many there are: inside the tensor, and no more than `longest`.
struct SomeRows {
  int start, count;
};
__device__ __forceinline__ SomeRows some_rows(const int *cu_seqlens, const int *starts,
                                              const int *lengths, int batch, int b, int longest,
                                              int total) {
  const auto at = [&](const int *array, int i, int most) {
    return clamp(Matrix<const int>{array, 1, batch + 1}(0, i), 0, most);
  };
  const int begin = cu_seqlens ? at(cu_seqlens, b, total) : starts ? at(starts, b, longest) : 0;
  int count = min(longest, (cu_seqlens ? total : longest) - begin);
  if (lengths)
    count = at(lengths, b, count);
  else if (cu_seqlens)
    count = clamp(at(cu_seqlens, b + 1, total) - begin, 0, count);
  return {begin, count};
}

/// All threads of a warp call this.
__device__ __forceinline__ Sequence sequence_of(const Call &p, int b) {
  const SomeRows q =
      some_rows(p.cu_seqlens_q, nullptr, p.lengths_q, p.batch, b, p.seqlen_q, p.total_q);
  const SomeRows k =
      some_rows(p.cu_seqlens_k, p.starts_k, p.lengths_k, p.batch, b, p.seqlen_k, p.total_k);
  SomeRows added{};
  if (p.K_new)
    added =
        some_rows(p.cu_seqlens_new, nullptr, p.lengths_new, p.batch, b, p.seqlen_new, p.total_new);
  const int cache = p.cache_index ? clamp(of_batch(p.cache_index, p, b, b), 0, p.caches - 1) : b;
  return {uniform(q.start), uniform(q.count), uniform(k.start),
          uniform(k.count), added.start,      uniform(min(added.count, k.count)),
          uniform(cache)};
}

/// By which position a key turns: by its row in the tensor, where it begins at a row of its own.
__device__ __forceinline__ int rope_position_of_key(const Call &p, const Sequence &at, int key) {
  return clamp(key + (p.starts_k ? at.k_start : 0), 0, p.rope_positions - 1);
}

/// And a query: the last as the last key, or the first as the first new key.
__device__ __forceinline__ int rope_position(const Call &p, const Sequence &at, int query) {
  const int first = at.k_count - (p.rope_from_new ? at.new_count : at.q_count);
  return rope_position_of_key(p, at, first + (p.rope_one_position ? 0 : query));
}

/// Which keys the queries of a sequence see. The last query stands at the last key. Query i sees the keys from
/// i + begin to before i + end, and of those before i + end the first `sinks`.
struct Sight {
  int begin, end, sinks;
};
__device__ __forceinline__ Sight sight_of(const Call &p, const Sequence &at) {
  const int query_0 = at.k_count - at.q_count;  // its position
  return {p.window_left < 0 ? -at.q_count : query_0 - min(p.window_left, at.k_count),
          p.window_right < 0 ? at.k_count : query_0 + 1 + min(p.window_right, at.q_count), p.sinks};
}

/// The log-sum-exp of a query.
__device__ __forceinline__ Reference<float> lse_at(const Call &p, const Sequence &at, int b, int h,
                                                   int query) {
  const int rows = p.lse_packed ? p.total_q : p.seqlen_q;
  const std::int64_t head = (p.lse_packed ? 0 : std::int64_t{b} * p.heads) + h;
  return Matrix<float>{p.lse + head * rows, 1, rows}(0, query + (p.lse_packed ? at.q_start : 0));
}

/// The slope of ALiBi of a head.
__device__ __forceinline__ float slope_of(const Call &p, int b, int h) {
  return p.slopes ? of_head(p.slopes + b * p.slopes_stride, h) : 0;
}

/// The pages that hold the keys of a sequence. A page that K and V do not have is their last.
struct PageTable {
  Matrix<const int> table;
  int size, count;  // keys per page, pages

  __device__ __forceinline__ PageTable(const Call &p, int b)
      : table{p.page_table + b * p.page_table_stride, 1, (p.seqlen_k - 1) / p.page_size + 1},
        size(p.page_size),
        count(p.num_pages) {}
  __device__ __forceinline__ int page_of(int row) const {
    return min(unsigned(table(0, row / size)), unsigned(count - 1));
  }
};

}  // namespace
