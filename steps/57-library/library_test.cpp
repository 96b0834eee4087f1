// SPDX-License-Identifier: MIT
// The C interface: what it refuses, with which status and message, and that nothing is written then;
// and the client, which finds out wrong libraries.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "steps/57-library/testing.h"

namespace {

/// The same with so much behind it that what lies across its end overlaps nothing else.
template <class T>
T *allocate_apart(std::size_t size) {
  return allocate<T>(size, 65536);
}

constexpr int kBatch = 2, kHeads = 4, kKvHeads = 2, kQueries = 3, kKeys = 20, kHeadDim = 64;
constexpr int kPageSize = 8, kPages = 8, kPagesOfSequence = 3;

/// A problem with all that a problem may have, which the library takes, in memory that holds NaN.
struct Example {
  std::uint16_t *Q = allocate_apart<std::uint16_t>(kBatch * kHeads * kQueries * kHeadDim);
  std::uint16_t *O = allocate_apart<std::uint16_t>(kBatch * kHeads * kQueries * kHeadDim);
  std::uint16_t *cache =
      allocate_apart<std::uint16_t>(2 * kPages * kPageSize * kKvHeads * kHeadDim);
  std::uint16_t *added = allocate_apart<std::uint16_t>(2 * kBatch * kKvHeads * kQueries * kHeadDim);
  float *rotation = allocate_apart<float>(2 * kKeys * kHeadDim / 2);
  float *lse = allocate_apart<float>(kBatch * kHeads * kQueries);
  float *numbers = allocate_apart<float>(16);  // slopes and logits
  int *device = allocate_apart<int>(128);      // all arrays
  std::vector<int> lengths_q = {3, 1}, lengths_k = {20, 7}, cu_seqlens_q = {0, 3, 6};
  std::vector<int> cu_seqlens_k = {0, 20, 40}, page_table = {5, 0, 3, 1, -1, -1};
  std::vector<int> starts_k = {0, 4}, cache_index = {1, 0}, lengths_new = {2, 1};
  attention_problem problem{};

  Example() {
    attention_problem &p = problem;
    p.struct_bytes = sizeof p;
    p.type = ATTENTION_FP16;
    p.head_dim = kHeadDim;
    p.batch = kBatch, p.heads = kHeads, p.kv_heads = kKvHeads;
    p.seqlen_q = kQueries, p.seqlen_k = kKeys;
    p.Q = dense(Q, kHeads, kQueries);
    p.O = dense(O, kHeads, kQueries);
    p.K = dense(cache, kKvHeads, kPageSize);
    p.V = dense(cache + kPages * p.K.batch_stride, kKvHeads, kPageSize);
    p.K_new = dense(added, kKvHeads, kQueries);
    p.V_new = dense(added + kBatch * p.K_new.batch_stride, kKvHeads, kQueries);
    p.causal = p.window = 1, p.window_left = 9, p.window_right = ATTENTION_NO_LIMIT, p.sinks = 2;
    p.lse = lse, p.alibi_slopes = numbers, p.alibi_stride = kHeads, p.sink_logits = numbers + 8;
    p.softcap = 20;
    p.lengths_q = array(0, lengths_q);
    p.lengths_k = array(8, lengths_k);
    p.page_table = array(16, page_table);
    p.page_size = kPageSize, p.pages = kPages;
    p.rope = ATTENTION_ROPE_HALVES;
    p.rope_cos = rotation, p.rope_sin = rotation + kKeys * kHeadDim / 2;
    p.rope_positions = kKeys;
  }
  /// The keys are not new ones: all are rotated, into a workspace.
  void rotate_all_keys() {
    attention_problem &p = problem;
    p.K_new.data = p.V_new.data = nullptr;
    REQUIRE(LIBRARY(attention_workspace_bytes)(&p, &p.workspace_bytes) == ATTENTION_OK);
    REQUIRE(p.workspace_bytes > 0);
    p.workspace = allocate_apart<char>(p.workspace_bytes + 8);
    std::memset(p.workspace, 0, p.workspace_bytes + 8);
  }
  Example(const Example &) = delete;
  ~Example() {
    for (void *memory :
         {static_cast<void *>(Q), static_cast<void *>(O), static_cast<void *>(cache),
          static_cast<void *>(added), static_cast<void *>(rotation), static_cast<void *>(lse),
          static_cast<void *>(numbers), static_cast<void *>(device), problem.workspace})
      LIBRARY(attention_release)(memory);
  }

  static attention_tensor dense(std::uint16_t *data, int heads, int rows) {
    return {data, std::int64_t{heads} * rows * kHeadDim, std::int64_t{rows} * kHeadDim, kHeadDim};
  }
  attention_array array(int offset, const std::vector<int> &values) {
    LIBRARY(attention_upload)(device + offset, values.data(), values.size() * sizeof(int));
    return {device + offset, values.data()};
  }
  /// Whether the cache and the output hold nothing but the NaN that they began with.
  bool untouched() const {
    for (const auto &[memory, size] :
         {std::pair{O, kBatch * kHeads * kQueries * kHeadDim},
          std::pair{cache, 2 * kPages * kPageSize * kKvHeads * kHeadDim}})
      for (int i = 0; i < size; i++)
        if (memory[i] != 0xffff) return false;
    for (int i = 0; i < kBatch * kHeads * kQueries; i++)
      if (!std::isnan(lse[i])) return false;
    return true;
  }
};

struct Mistake {
  attention_status status;
  std::string message;
  std::function<void(Example &, attention_problem &)> make;
};
using E = Example;
using P = attention_problem;

const std::vector<Mistake> kMistakes = {
    {ATTENTION_STRUCT_SIZE, "struct_bytes 8: must be " + std::to_string(sizeof(P)) + ", as this library's header has it",
     [](E &, P &p) { p.struct_bytes = 8; }},
    {ATTENTION_TYPE, "type 2: must be ATTENTION_FP16 or ATTENTION_BF16",
     [](E &, P &p) { p.type = 2; }},
    {ATTENTION_HEAD_DIM, "head_dim 68: must be a multiple of 8 from 8 to 256",
     [](E &, P &p) { p.head_dim = 68; }},
    {ATTENTION_HEAD_DIM, "head_dim_v 100: must be 0, or a multiple of 8 from 8 to 256",
     [](E &, P &p) { p.head_dim_v = 100; }},
    {ATTENTION_HEAD_DIM, "head_dim_v 264: must be 0, or a multiple of 8 from 8 to 256",
     [](E &, P &p) { p.head_dim_v = 264; }},
    {ATTENTION_HEAD_DIM, "head_dim_v -8: must be 0, or a multiple of 8 from 8 to 256",
     [](E &, P &p) { p.head_dim_v = -8; }},
    {ATTENTION_STRIDE, "O is written: its strides let two rows share elements",
     [](E &, P &p) { p.head_dim_v = 80; }},
    {ATTENTION_SIZE, "batch 0: must be 1 or more", [](E &, P &p) { p.batch = 0; }},
    {ATTENTION_SIZE, "heads -4: must be 1 or more", [](E &, P &p) { p.heads = -4; }},
    {ATTENTION_SIZE, "seqlen_q -1: must be 0 or more", [](E &, P &p) { p.seqlen_q = -1; }},
    {ATTENTION_SIZE, "seqlen_k -1: must be 0 or more", [](E &, P &p) { p.seqlen_k = -1; }},
    {ATTENTION_LENGTH, "lengths_k[0] 20: must be 0 to 0", [](E &, P &p) { p.seqlen_k = 0; }},
    {ATTENTION_SIZE, "batch 16384, heads 4: their product must be at most 65535",
     [](E &, P &p) { p.batch = 16384; }},
    {ATTENTION_SIZE, "seqlen_q 8388481: must be 8388480 or less",
     [](E &, P &p) { p.seqlen_q = 8388481; }},
    {ATTENTION_SIZE, "seqlen_k 134217729: must be 134217728 or less",
     [](E &, P &p) { p.seqlen_k = p.rope_positions = 134217729; }},
    {ATTENTION_SIZE, "seqlen_k 2147483647: must be 134217728 or less",
     [](E &, P &p) { p.seqlen_k = p.rope_positions = 2147483647; }},
    {ATTENTION_HEADS, "kv_heads 3: must be a divisor of heads 4",
     [](E &, P &p) { p.kv_heads = 3; }},
    {ATTENTION_WINDOW, "window_left -2: must be 0 or more, or ATTENTION_NO_LIMIT",
     [](E &, P &p) { p.window_left = -2; }},
    {ATTENTION_WINDOW, "window_right -2: must be 0 or more, or ATTENTION_NO_LIMIT",
     [](E &, P &p) { p.window_right = -2; }},
    {ATTENTION_WINDOW, "window_left 9: must be 0 without a window",
     [](E &, P &p) { p.window = 0; }},
    {ATTENTION_WINDOW, "sinks -1: must be 0 or more", [](E &, P &p) { p.sinks = -1; }},
    {ATTENTION_WINDOW, "sinks 2: must be 0 without a window to the left",
     [](E &, P &p) { p.window_left = ATTENTION_NO_LIMIT; }},
    {ATTENTION_SCORES, "scale -1: must be 0, or from 0 to 1e+06",
     [](E &, P &p) { p.scale = -1; }},
    {ATTENTION_SCORES, "scale nan: must be 0, or from 0 to 1e+06",
     [](E &, P &p) { p.scale = std::nanf(""); }},
    {ATTENTION_SCORES, "softcap inf: must be 0, or from 0.001 to 1e+06",
     [](E &, P &p) { p.softcap = INFINITY; }},
    {ATTENTION_SCORES, "softcap 0.0001: must be 0, or from 0.001 to 1e+06",
     [](E &, P &p) { p.softcap = 1e-4f; }},
    {ATTENTION_SCORES, "alibi_stride -1: must be 0 or more",
     [](E &, P &p) { p.alibi_stride = -1; }},
    {ATTENTION_ROPE, "rope_dim 24: must be a multiple of 16, and at most head_dim 64",
     [](E &, P &p) { p.rope_dim = 24; }},
    {ATTENTION_ROPE, "rope_dim 80: must be a multiple of 16, and at most head_dim 64",
     [](E &, P &p) { p.rope_dim = 80; }},
    {ATTENTION_ROPE, "rope_dim 0, head_dim 56: must be a multiple of 16, or rope_dim must be one",
     [](E &, P &p) { p.head_dim = 56; }},
    {ATTENTION_LENGTH, "starts_k[1] 21: must be 0 to 20",
     [](E &e, P &p) { e.starts_k[1] = 21, p.starts_k = e.array(64, e.starts_k); }},
    {ATTENTION_LENGTH, "lengths_k[1] 7: must be 0 to 6",
     [](E &e, P &p) { e.starts_k[1] = 14, p.starts_k = e.array(64, e.starts_k); }},
    {ATTENTION_LENGTH, "starts_k: must be NULL with cu_seqlens_k",
     [](E &e, P &p) {
       p.page_table = {}, p.starts_k = e.array(64, e.starts_k);
       p.cu_seqlens_k = e.array(40, e.cu_seqlens_k), p.total_k = 40;
     }},
    {ATTENTION_LENGTH, "lengths_new: must be NULL with seqlen_new 0",
     [](E &e, P &p) { p.lengths_new = e.array(72, e.lengths_new); }},
    {ATTENTION_LENGTH, "lengths_new[0] 2: must be 0 to 1",
     [](E &e, P &p) { p.lengths_new = e.array(72, e.lengths_new), p.seqlen_new = 1; }},
    {ATTENTION_SIZE, "seqlen_new -1: must be 0 or more", [](E &, P &p) { p.seqlen_new = -1; }},
    {ATTENTION_CACHE, "cache_index: must be NULL with page_table",
     [](E &e, P &p) { p.cache_index = e.array(80, e.cache_index), p.caches = 2; }},
    {ATTENTION_CACHE, "caches 0: must be 1 or more",
     [](E &e, P &p) { p.cache_index = e.array(80, e.cache_index), p.page_table = {}; }},
    {ATTENTION_CACHE, "cache_index[0] 2: must be 0 to 1",
     [](E &e, P &p) {
       e.cache_index[0] = 2, p.cache_index = e.array(80, e.cache_index), p.page_table = {};
       p.caches = 2;
     }},
    {ATTENTION_CACHE, "cache_index[1] 1: must not be that of sequence 0, because both append to it",
     [](E &e, P &p) {
       e.cache_index[1] = 1, p.cache_index = e.array(80, e.cache_index), p.page_table = {};
       p.caches = 2;
     }},
    {ATTENTION_PAGE, "page_table_stride 2: must be 3 or more",
     [](E &, P &p) { p.page_table_stride = 2; }},
    {ATTENTION_PAGE,
     "page_table[3] 3: must not be a page of sequence 0, because one of the two appends to it",
     [](E &e, P &) { e.page_table[3] = 3; }},
    {ATTENTION_PAGE,
     "page_table[3] 5: must not be a page of sequence 0, because one of the two appends to it",
     [](E &e, P &) { e.page_table[3] = 5; }},
    {ATTENTION_PAGE, "page_table[4] 8: must be 0 to 7",
     [](E &e, P &p) { e.page_table = {5, 0, 3, -1, 8}, p.page_table_stride = 4; }},
    {ATTENTION_ALIGNMENT, "lse: must be a multiple of 4 bytes",
     [](E &e, P &p) { p.lse = reinterpret_cast<float *>(reinterpret_cast<char *>(e.lse) + 2); }},
    {ATTENTION_OVERLAP, "lse is written: it overlaps Q",
     [](E &e, P &p) { p.lse = reinterpret_cast<float *>(e.Q); }},
    {ATTENTION_OVERLAP, "lse is written: it overlaps O",
     [](E &e, P &p) { p.lse = reinterpret_cast<float *>(e.O + 8); }},
    {ATTENTION_OVERLAP, "lse is written: it overlaps sink_logits",
     [](E &e, P &p) { p.sink_logits = e.lse; }},
    {ATTENTION_OVERLAP, "lse is written: it overlaps alibi_slopes",
     [](E &e, P &p) { p.alibi_slopes = e.lse - 7; }},
    {ATTENTION_ROPE, "rope 3: must be a value of enum attention_rope",
     [](E &, P &p) { p.rope = 3; }},
    {ATTENTION_ROPE, "rope_positions 19: must be seqlen_k 20 or more",
     [](E &, P &p) { p.rope_positions = 19; }},
    {ATTENTION_ROPE, "rope_positions 0: must be 1 or more",
     [](E &, P &p) { p.lengths_k = {}, p.seqlen_k = p.rope_positions = 0; }},
    {ATTENTION_ROPE,
     "lengths_q[1] 8: must be at most lengths_k[1] 7 with a rotation, because a query before the "
     "first key has no position",
     [](E &e, P &p) { p.seqlen_q = 8, p.K_new.data = p.V_new.data = nullptr, e.lengths_q[1] = 8; }},
    {ATTENTION_LENGTH, "lengths_q[0] 4: must be 0 to 3", [](E &e, P &) { e.lengths_q[0] = 4; }},
    {ATTENTION_LENGTH, "lengths_k[1] -1: must be 0 to 20",
     [](E &e, P &) { e.lengths_k[1] = -1; }},
    {ATTENTION_LENGTH, "lengths_k[0] 2: must be 3 or more, because it counts the new keys of K_new",
     [](E &e, P &) { e.lengths_k[0] = 2; }},
    {ATTENTION_LENGTH, "cu_seqlens_q[2] 7: must be 3 to 6",
     [](E &e, P &p) {
       e.cu_seqlens_q[2] = 7, p.cu_seqlens_q = e.array(32, e.cu_seqlens_q), p.total_q = 6;
     }},
    {ATTENTION_LENGTH, "cu_seqlens_q[1] -1: must be 0 to 6",
     [](E &e, P &p) {
       e.cu_seqlens_q[1] = -1, p.cu_seqlens_q = e.array(32, e.cu_seqlens_q), p.total_q = 6;
     }},
    {ATTENTION_LENGTH, "lengths_q[0] 3: must be at most the 2 rows that cu_seqlens_q has for it",
     [](E &e, P &p) {
       e.cu_seqlens_q[1] = 2, p.cu_seqlens_q = e.array(32, e.cu_seqlens_q), p.total_q = 6;
     }},
    {ATTENTION_LENGTH, "total_q -1: must be 0 or more",
     [](E &e, P &p) { p.cu_seqlens_q = e.array(32, e.cu_seqlens_q), p.total_q = -1; }},
    {ATTENTION_LENGTH, "cu_seqlens_q[1] 3: must be 0 to 0",
     [](E &e, P &p) { p.cu_seqlens_q = e.array(32, e.cu_seqlens_q); }},
    {ATTENTION_PAGE, "page_table[2] 8: must be 0 to 7", [](E &e, P &) { e.page_table[2] = 8; }},
    {ATTENTION_PAGE, "page_table[3] -1: must be 0 to 7",
     [](E &e, P &) { e.page_table[3] = -1; }},
    {ATTENTION_PAGE, "page_table[0] 8: must be 0 to 7",
     [](E &e, P &p) {
       e.page_table[0] = 8, p.page_size = 2147483647;
       p.K.data = p.V.data = e.cache;
     }},
    {ATTENTION_PAGE, "page_size 0: must be 1 or more", [](E &, P &p) { p.page_size = 0; }},
    {ATTENTION_PAGE, "pages 0: must be 1 or more", [](E &, P &p) { p.pages = 0; }},
    {ATTENTION_PAGE, "cu_seqlens_k: must be NULL with page_table",
     [](E &e, P &p) { p.cu_seqlens_k = e.array(40, e.cu_seqlens_k), p.total_k = 40; }},
    {ATTENTION_NULL_POINTER, "Q.data: it is NULL", [](E &, P &p) { p.Q.data = nullptr; }},
    {ATTENTION_NULL_POINTER, "K.data: it is NULL", [](E &, P &p) { p.K.data = nullptr; }},
    {ATTENTION_NULL_POINTER, "V.data: it is NULL", [](E &, P &p) { p.V.data = nullptr; }},
    {ATTENTION_NULL_POINTER, "O.data: it is NULL", [](E &, P &p) { p.O.data = nullptr; }},
    {ATTENTION_NULL_POINTER, "V_new.data: it is NULL", [](E &, P &p) { p.V_new.data = nullptr; }},
    {ATTENTION_NULL_POINTER, "K_new.data: it is NULL", [](E &, P &p) { p.K_new.data = nullptr; }},
    {ATTENTION_NULL_POINTER, "rope_cos: it is NULL", [](E &, P &p) { p.rope_cos = nullptr; }},
    {ATTENTION_NULL_POINTER, "rope_sin: it is NULL", [](E &, P &p) { p.rope_sin = nullptr; }},
    {ATTENTION_NULL_POINTER, "lengths_k.device: it is NULL, and lengths_k.host is not",
     [](E &, P &p) { p.lengths_k.device = nullptr; }},
    {ATTENTION_LENGTH, "cu_seqlens_q[1] 4: must be at most 3, because no sequence has more than 3 rows",
     [](E &e, P &p) {
       e.cu_seqlens_q[1] = 4, p.cu_seqlens_q = e.array(32, e.cu_seqlens_q), p.total_q = 6;
       p.lengths_q = {};
     }},
    {ATTENTION_ALIGNMENT, "Q.data: must be a multiple of 16 bytes",
     [](E &e, P &p) { p.Q.data = e.Q + 4; }},
    {ATTENTION_ALIGNMENT, "K.row_stride 68: must be a multiple of 8 elements",
     [](E &, P &p) { p.K.row_stride = 68; }},
    {ATTENTION_ALIGNMENT, "V_new.head_stride 1: must be a multiple of 8 elements",
     [](E &, P &p) { p.V_new.head_stride = 1; }},
    {ATTENTION_ALIGNMENT, "rope_cos: must be a multiple of 16 bytes",
     [](E &e, P &p) { p.rope_cos = e.rotation + 1; }},
    {ATTENTION_STRIDE, "Q.row_stride -64: must be 0 or more",
     [](E &, P &p) { p.Q.row_stride = -64; }},
    {ATTENTION_STRIDE, "O is written: its strides let two rows share elements",
     [](E &, P &p) { p.O.row_stride = 56; }},
    {ATTENTION_STRIDE, "O is written: its strides let two rows share elements",
     [](E &, P &p) { p.O.batch_stride = 0; }},
    {ATTENTION_STRIDE, "K is written: its strides let two rows share elements",
     [](E &, P &p) { p.K.head_stride = 64; }},
    {ATTENTION_OVERLAP, "O is written: it overlaps Q", [](E &e, P &p) { p.O.data = e.Q; }},
    {ATTENTION_OVERLAP, "O is written: it overlaps Q", [](E &e, P &p) { p.O.data = e.Q + 64; }},
    {ATTENTION_OVERLAP, "O is written: it overlaps K_new", [](E &e, P &p) { p.O.data = e.added; }},
    {ATTENTION_OVERLAP, "V is written: it overlaps K", [](E &e, P &p) { p.V.data = e.cache; }},
    {ATTENTION_OVERLAP, "O is written: it overlaps lengths_k",
     [](E &e, P &p) { p.lengths_k.device = reinterpret_cast<int *>(e.O); }},
    {ATTENTION_OVERLAP, "K is written: it overlaps rope_sin",
     [](E &e, P &p) { p.rope_sin = reinterpret_cast<float *>(e.cache); }},
};

// The same of a problem that needs a workspace: its keys are rotated, all.
const std::vector<Mistake> kMistakesWithWorkspace = {
    {ATTENTION_WORKSPACE, "", [](E &, P &p) { p.workspace_bytes--; }},
    {ATTENTION_NULL_POINTER, "workspace: it is NULL", [](E &, P &p) { p.workspace = nullptr; }},
    {ATTENTION_ALIGNMENT, "workspace: must be a multiple of 16 bytes",
     [](E &, P &p) { p.workspace = static_cast<char *>(p.workspace) + 8; }},
    {ATTENTION_OVERLAP, "workspace is written: it overlaps Q",
     [](E &, P &p) { p.Q.data = p.workspace; }},
    {ATTENTION_OVERLAP, "workspace is written: it overlaps K",
     [](E &, P &p) { p.K.data = static_cast<char *>(p.workspace) + p.workspace_bytes - 16; }},
    {ATTENTION_OVERLAP, "workspace is written: it overlaps V",
     [](E &, P &p) { p.V.data = p.workspace; }},
    {ATTENTION_OVERLAP, "workspace is written: it overlaps O",
     [](E &e, P &p) { p.workspace = e.O + kQueries * kHeadDim; }},
    {ATTENTION_OVERLAP, "workspace is written: it overlaps page_table",
     [](E &, P &p) { p.page_table.device = static_cast<int *>(p.workspace); }},
    {ATTENTION_OVERLAP, "workspace is written: it overlaps rope_cos",
     [](E &, P &p) { p.rope_cos = static_cast<float *>(p.workspace) + 4; }},
};

int forward(const attention_problem &problem) {
  return LIBRARY(attention_forward)(&problem);
}
std::string message() {
  return LIBRARY(attention_message)();
}

}  // namespace

TEST_SUITE_BEGIN("library");

TEST_CASE("every mistake has its status and one line, and nothing is written") {
  for (const bool with_workspace : {false, true})
    for (const Mistake &mistake : with_workspace ? kMistakesWithWorkspace : kMistakes) {
      Example example;
      if (with_workspace) example.rotate_all_keys();
      void *const workspace = example.problem.workspace;
      mistake.make(example, example.problem);
      CAPTURE(mistake.message);
      CHECK(forward(example.problem) == mistake.status);
      if (!mistake.message.empty()) CHECK(message() == mistake.message);
      CHECK(message().find('\n') == std::string::npos);
      CHECK(example.untouched());
      example.problem.workspace = workspace;
    }
}

TEST_CASE("what differs from a mistake by little is taken") {
  Example example;
  P &p = example.problem;
  REQUIRE(forward(p) == ATTENTION_OK);
  CHECK(!example.untouched());
  SUBCASE("sequences that are not there") {
    example.lengths_q[1] = example.lengths_k[1] = 0;
  }
  SUBCASE("a table that only the device has") {
    p.page_table.host = nullptr;
  }
  SUBCASE("O between the heads of Q") {
    std::uint16_t *const both = example.cache;
    p.K_new.data = p.V_new.data = nullptr;
    p.rope = ATTENTION_ROPE_NONE;
    p.page_table = {};
    p.K = p.V = {example.added, 0, 0, 0};  // one row for all
    p.Q = {both, 2 * kQueries * kHeads * kHeadDim, 2 * kHeadDim, 2 * kHeads * kHeadDim};
    p.O = p.Q;
    p.O.data = both + kHeadDim;
  }
  CHECK_MESSAGE(forward(p) == ATTENTION_OK, message());
}

TEST_CASE("threads may call at the same time, with a workspace of their own or one of a stream") {
  constexpr int kThreads = 4, kCalls = 3, kSize = kBatch * kHeads * kQueries * kHeadDim;
  std::vector<Example> examples(kThreads);
  for (Example &example : examples) {
    example.rotate_all_keys();
    for (int i = 0; i < 2 * kPages * kPageSize * kKvHeads * kHeadDim; i++)
      example.cache[i] = static_cast<std::uint16_t>(0x3000 + i * 7 % 1999);
    for (int i = 0; i < kSize; i++)
      example.Q[i] = static_cast<std::uint16_t>(0x3000 + i * 5 % 1999);
    std::fill_n(example.rotation, 2 * kKeys * kHeadDim / 2, 0.5f);
  }
  REQUIRE(forward(examples[0].problem) == ATTENTION_OK);
  const std::vector<std::uint16_t> O(examples[0].O, examples[0].O + kSize);
  CHECK(!examples[0].untouched());
  for (const bool share : {false, true}) {
    std::vector<int> wrong(kThreads);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; i++)
      threads.emplace_back([&, i] {
        P problem = examples[i].problem;
        if (share) problem.workspace = examples[0].problem.workspace;
        for (int n = 0; n < kCalls; n++) {
          void *memory = nullptr;
          wrong[i] += LIBRARY(attention_allocate)(&memory, 4096) != ATTENTION_OK;
          wrong[i] +=
              forward(problem) != ATTENTION_OK || !std::equal(O.begin(), O.end(), examples[i].O);
          wrong[i] += LIBRARY(attention_release)(memory) != ATTENTION_OK;
        }
      });
    for (std::thread &thread : threads) thread.join();
    CHECK(wrong == std::vector<int>(kThreads));
  }
}

TEST_CASE("the other functions refuse, too") {
  std::size_t bytes;
  CHECK(LIBRARY(attention_forward)(nullptr) == ATTENTION_NULL_POINTER);
  CHECK(message() == "problem: it is NULL");
  CHECK(LIBRARY(attention_workspace_bytes)(nullptr, &bytes) == ATTENTION_NULL_POINTER);
  CHECK(LIBRARY(attention_device)(nullptr, 1) == ATTENTION_NULL_POINTER);
  CHECK(LIBRARY(attention_allocate)(nullptr, 1) == ATTENTION_NULL_POINTER);
  void *memory;
  for (const std::size_t beyond : {std::size_t{1} << 60, SIZE_MAX - 5000, SIZE_MAX})
    CHECK(LIBRARY(attention_allocate)(&memory, beyond) == ATTENTION_MEMORY);
}

TEST_CASE("copies and releases of what was never allocated are refused") {
  char host[32] = "what the host has";
  char *const device = allocate<char>(32);
  const auto upload = LIBRARY(attention_upload);
  const auto download = LIBRARY(attention_download);
  const auto release = LIBRARY(attention_release);
  CHECK(upload(device, host, 32) == ATTENTION_OK);
  CHECK(download(host, device + 16, 16) == ATTENTION_OK);
  CHECK(upload(nullptr, nullptr, 0) == ATTENTION_OK);
  for (const int status : {upload(nullptr, host, 32), upload(device, nullptr, 32),
                           download(nullptr, device, 32), download(host, nullptr, 32)})
    CHECK(status == ATTENTION_NULL_POINTER);
  CHECK(message() == "device: it is NULL");
  CHECK(upload(device + 1, host, 32) == ATTENTION_FAILED);
  CHECK(message() == "device: 32 bytes from there are not within what attention_allocate returned");
  CHECK(download(host, device, 33) == ATTENTION_FAILED);
  CHECK(upload(host, device, 1) == ATTENTION_FAILED);
  CHECK(download(host, device, SIZE_MAX) == ATTENTION_FAILED);
  CHECK(release(device + 16) == ATTENTION_FAILED);
  CHECK(message() == "memory: attention_allocate did not return this pointer, or it was released");
  CHECK(release(host) == ATTENTION_FAILED);
  CHECK(release(device) == ATTENTION_OK);
  CHECK(release(device) == ATTENTION_FAILED);
  CHECK(release(nullptr) == ATTENTION_OK);
}

TEST_CASE("after a call that failed in a split the workspace is as it must be for the next") {
  // One sequence of many keys: decode splits them, and the parts are counted in the workspace.
  constexpr int keys = 4000;
  Example example;
  P &p = example.problem;
  std::vector<std::uint16_t> ones(keys * kHeadDim, 0x3c00);
  std::uint16_t *const all = allocate<std::uint16_t>(ones.size());
  LIBRARY(attention_upload)(all, ones.data(), ones.size() * 2);
  LIBRARY(attention_upload)(example.Q, ones.data(), kHeadDim * 2);
  p.K_new.data = p.V_new.data = nullptr;
  p.lengths_q = p.lengths_k = p.page_table = {};
  p.rope = ATTENTION_ROPE_NONE, p.window = p.window_left = p.window_right = p.sinks = 0;
  p.lse = nullptr, p.alibi_slopes = p.sink_logits = nullptr, p.softcap = 0;
  p.batch = p.heads = p.kv_heads = p.seqlen_q = 1, p.seqlen_k = keys;
  p.K = p.V = {all, 0, 0, kHeadDim};
  REQUIRE(LIBRARY(attention_workspace_bytes)(&p, &p.workspace_bytes) == ATTENTION_OK);
  REQUIRE(p.workspace_bytes > 0);
  p.workspace = allocate<char>(p.workspace_bytes);
  std::memset(p.workspace, 0, p.workspace_bytes);
  REQUIRE(forward(p) == ATTENTION_OK);
  p.seqlen_k++;  // beyond the tensor: the last split fails, the others have been counted
  CHECK(forward(p) == ATTENTION_FAILED);
  p.seqlen_k--;
  example.O[0] = 0;
  CHECK_MESSAGE(forward(p) == ATTENTION_OK, message());
  CHECK(example.O[0] == 0x3c00);
  LIBRARY(attention_release)(all);
}

TEST_CASE("a kernel that fails on the emulator is a status and a message") {
  Example example;
  std::vector<std::uint16_t> of_the_host(kBatch * kHeads * kQueries * kHeadDim + 8);
  auto *const aligned = reinterpret_cast<std::uint16_t *>(
      (reinterpret_cast<std::uintptr_t>(of_the_host.data()) + 15) / 16 * 16);
  example.problem.Q.data = aligned;
  CHECK(forward(example.problem) == ATTENTION_FAILED);
  CHECK(message().find("outside of every allocation") != std::string::npos);
}

TEST_CASE("the header is C, and says what the library exports") {
  std::filesystem::create_directories("build/library");
  std::ofstream("build/library/client.c") << R"(#include "steps/57-library/attention.h"
int main(void) {
  struct attention_problem problem = {0};
  problem.struct_bytes = sizeof problem;
  return attention_forward(&problem) == ATTENTION_HEAD_DIM ? 0 : 1;
}
)";
  const Finished compiled = run_command(
      "gcc -std=c99 -pedantic-errors -Wall -Wextra -Werror -I. build/library/client.c "
      "build/host/bin/libattention.so -Wl,-rpath,build/host/bin -o build/library/client");
  CHECK_MESSAGE(compiled.status == 0, compiled.err);
  CHECK(run_command("build/library/client").status == 0);
}

TEST_CASE("the client passes, and says what it does not take") {
  const std::string client = "build/host/bin/client --library build/host/bin/libattention.so ";
  const Finished passed = run_command(client + "--prompts 20,1,3 --tokens 3");
  CHECK_MESSAGE(passed.status == 0, passed.out, passed.err);
  CHECK(passed.out.find("decode   9 tokens of 3 sequences") != std::string::npos);
  CHECK(run_command(client + "--prompts 40 --tokens 20 --type bf16 --window 9").status == 0);
  for (const auto &[options, status, complaint] :
       {std::tuple{"--tokens -1", 2, "client: --tokens -1: a whole number from 0 to 1000000"},
        std::tuple{"--prompts 3,,4", 2, "client: --prompts : a whole number"},
        std::tuple{"--type fp8", 2, "client: --type fp8: allowed are fp16, bf16"},
        std::tuple{"--library none.so", 2, "client: --library none.so: "},
        std::tuple{"--nothing", 2, "client: --nothing: no such option"},
        std::tuple{"nothing", 2, "client: nothing: not an option"},
        std::tuple{"--heads 5", 1,
                   "client: attention_workspace_bytes: kv_heads 2: must be a divisor"}}) {
    CAPTURE(options);
    const Finished refused = run_command(client + options);
    CHECK(refused.status == status);
    CHECK_MESSAGE(refused.err.starts_with(complaint), refused.err);
    CHECK(lines_of(refused.err).size() == 1);
  }
}

TEST_SUITE_END();
