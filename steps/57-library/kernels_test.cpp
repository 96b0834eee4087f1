// SPDX-License-Identifier: MIT
// Which kernel a problem gets: each of Hopper's conditions once, met and missed by little. And that its answer is that of
// the other kernels.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "reference/half.h"
#include "reference/random.h"
#include "steps/57-library/testing.h"

namespace {

constexpr int kBatch = 2, kHeads = 2, kKvHeads = 2, kQueries = 40, kKeys = 100, kHeadDim = 256;
constexpr int kRows = 256;  // of a head of a tensor: enough for any problem here
constexpr std::int64_t kSize = std::int64_t{kBatch} * kHeads * kRows * kHeadDim;

/// A plain problem that Hopper's kernel takes, with room for more.
struct Example {
  std::uint16_t *Q = random(), *K = random(), *V = random(), *O = random(), *K_new = random();
  float *lse = allocate<float>(kBatch * kHeads * kRows);
  float *numbers = allocate<float>(2 * kKeys * kHeadDim);  // slopes, logits, cosines and sines
  int *arrays = allocate<int>(512);
  char *workspace = allocate<char>(1 << 22);
  attention_problem problem{};

  Example() {
    attention_problem &p = problem;
    p.struct_bytes = sizeof p;
    p.head_dim = 64;
    p.batch = kBatch, p.heads = kHeads, p.kv_heads = kKvHeads;
    p.seqlen_q = kQueries, p.seqlen_k = kKeys;
    p.Q = dense(Q, kHeads), p.O = dense(O, kHeads);
    p.K = dense(K, kKvHeads), p.V = dense(V, kKvHeads);
    std::fill_n(numbers, 2 * kKeys * kHeadDim, 0.5f);
    std::memset(workspace, 0, 1 << 22);
    p.workspace = workspace, p.workspace_bytes = 1 << 22;
  }
  Example(const Example &) = delete;
  ~Example() {
    for (void *memory : {static_cast<void *>(Q), static_cast<void *>(K), static_cast<void *>(V),
                         static_cast<void *>(O), static_cast<void *>(K_new),
                         static_cast<void *>(lse), static_cast<void *>(numbers),
                         static_cast<void *>(arrays), static_cast<void *>(workspace)})
      LIBRARY(attention_release)(memory);
  }
  static attention_tensor dense(std::uint16_t *data, int heads) {
    return {data, std::int64_t{heads} * kRows * kHeadDim, std::int64_t{kRows} * kHeadDim, kHeadDim};
  }
  static std::uint16_t *random() {
    std::uint16_t *const all = allocate<std::uint16_t>(kSize);
    static std::uint64_t state = 1;
    for (std::int64_t i = 0; i < kSize; i++)
      all[i] = float_to_element(Type::kFp16, float(next_random(state) % 2001) / 1000 - 1);
    return all;
  }
  attention_array array(int offset, const std::vector<int> &values) {
    std::copy(values.begin(), values.end(), arrays + offset);
    return {arrays + offset, nullptr};
  }
  void pages(int size) {
    attention_problem &p = problem;
    const int each = (kKeys - 1) / size + 1;
    p.page_size = size, p.pages = kBatch * each;
    p.K = {K, std::int64_t{size} * kKvHeads * kHeadDim, kHeadDim, kKvHeads * kHeadDim};
    p.V = p.K, p.V.data = V;
    std::vector<int> table(p.pages);
    for (int i = 0; i < p.pages; i++) table[i] = p.pages - 1 - i;
    p.page_table = array(64, table);
  }
  void rotate() {
    problem.rope = ATTENTION_ROPE_HALVES, problem.rope_positions = kKeys;
    problem.rope_cos = problem.rope_sin = numbers;
  }
  void pack() {
    attention_problem &p = problem;
    p.cu_seqlens_q = array(0, {0, 33, 73}), p.total_q = 73;
    p.cu_seqlens_k = array(8, {0, 100, 120}), p.total_k = 120;
  }
};

struct Case {
  std::string kernel, what;
  std::function<void(Example &, attention_problem &)> make;
  bool runs = true;  // false: there is no such memory
};
using E = Example;
using P = attention_problem;

const std::vector<Case> kCases = {
    {"hopper", "a plain problem", [](E &, P &) {}},
    {"hopper", "head dim 128", [](E &, P &p) { p.head_dim = 128; }},
    {"prompts", "head dim 32", [](E &, P &p) { p.head_dim = 32; }},
    {"hopper", "head dim 40", [](E &, P &p) { p.head_dim = 40; }},
    {"hopper", "head dim 72", [](E &, P &p) { p.head_dim = 72; }},
    {"hopper", "head dim 96, and 200 queries", [](E &, P &p) { p.head_dim = 96, p.seqlen_q = 200; }},
    {"hopper", "head dim 120", [](E &, P &p) { p.head_dim = 120; }},
    {"hopper", "head dim 160, causal, a group",
     [](E &, P &p) { p.head_dim = 160, p.kv_heads = 1, p.causal = 1; }},
    {"hopper", "head dim 256, and 200 queries",
     [](E &, P &p) { p.head_dim = 256, p.seqlen_q = 200; }},
    {"hopper", "192 columns of K and 128 of V",
     [](E &, P &p) { p.head_dim = 192, p.head_dim_v = 128; }},
    {"hopper", "136 columns of K and 104 of V",
     [](E &, P &p) { p.head_dim = 136, p.head_dim_v = 104; }},
    {"hopper", "72 columns of K and 96 of V",
     [](E &, P &p) { p.head_dim = 72, p.head_dim_v = 96; }},
    {"prompts", "192 columns of K and 96 of V",
     [](E &, P &p) { p.head_dim = 192, p.head_dim_v = 96; }},
    {"prompts", "128 columns of K and 64 of V",
     [](E &, P &p) { p.head_dim = 128, p.head_dim_v = 64; }},
    {"prompts", "64 columns of K and 256 of V",
     [](E &, P &p) { p.head_dim = 64, p.head_dim_v = 256; }},
    {"tokens", "16 queries, and 192 columns of K and 128 of V",
     [](E &, P &p) { p.seqlen_q = 16, p.head_dim = 192, p.head_dim_v = 128; }},
    {"prompts", "head dim 96 in pages",
     [](E &e, P &p) { e.pages(8), p.head_dim = 96; }},
    {"hopper", "head dim 256 and a soft cap", [](E &, P &p) { p.head_dim = 256, p.softcap = 3; }},
    {"hopper", "head dim 96 and ALiBi",
     [](E &e, P &p) { p.head_dim = 96, p.alibi_slopes = e.numbers; }},
    {"hopper", "head dim 96 and learned sinks",
     [](E &e, P &p) { p.head_dim = 96, p.sink_logits = e.numbers; }},
    {"hopper", "head dim 96, the log-sum-exp, a scale and a window to both sides",
     [](E &e, P &p) {
       p.head_dim = 96, p.lse = e.lse, p.scale = 0.5f;
       p.window = 1, p.window_left = 20, p.window_right = 5;
     }},
    {"hopper", "head dim 200, lengths, packed sequences without keys",
     [](E &e, P &p) {
       p.head_dim = 200, e.pack(), p.lengths_k = e.array(16, {70, 0});
     }},
    {"hopper", "head dim 80, left padding and a cache's sequences",
     [](E &e, P &p) {
       p.head_dim = 80, p.starts_k = e.array(0, {9, 70});
       p.cache_index = e.array(8, {1, 0}), p.caches = 2;
     }},
    {"hopper", "a rotation of 104 columns, in pages, beside 128 of V",
     [](E &e, P &p) {
       p.head_dim = 104, p.head_dim_v = 128, e.pages(7), e.rotate(), p.rope_dim = 48;
     }},
    {"hopper", "a rotation of 96 columns of packed sequences",
     [](E &e, P &p) { p.head_dim = 96, e.pack(), e.rotate(), p.causal = 1; }},
    {"hopper", "new keys of 144 columns, and 128 of V",
     [](E &e, P &p) {
       p.head_dim = 144, p.head_dim_v = 128, p.seqlen_new = 30;
       p.K_new = p.V_new = E::dense(e.K_new, kKvHeads);
     }},
    {"prompts", "mma_only", [](E &, P &p) { p.mma_only = 1; }},
    {"tokens", "16 queries", [](E &, P &p) { p.seqlen_q = 16; }},
    {"hopper", "17 queries", [](E &, P &p) { p.seqlen_q = 17; }},
    {"none", "keys that are stored",
     [](E &e, P &p) {
       p.seqlen_q = 0, p.seqlen_new = 3;
       p.K_new = p.V_new = E::dense(e.K_new, kKvHeads);
     }},
    {"hopper", "a window to both sides",
     [](E &, P &p) { p.window = 1, p.window_left = 20, p.window_right = 5; }},
    {"hopper", "a causal window", [](E &, P &p) { p.causal = p.window = 1, p.window_left = 20; }},
    {"prompts", "a window with sinks",
     [](E &, P &p) { p.window = 1, p.window_left = 20, p.sinks = 3; }},
    {"hopper", "pages of 8", [](E &e, P &) { e.pages(8); }},
    {"hopper", "pages of 24", [](E &e, P &) { e.pages(24); }},
    {"hopper", "pages of 256", [](E &e, P &) { e.pages(256); }},
    {"hopper", "a wide table",
     [](E &e, P &p) {
       e.pages(40), p.page_table_stride = 7,
                    p.page_table = e.array(64, {5, 0, 2, 9, 9, 9, 9, 1, 3, 4});
     }},
    {"prompts", "pages of 7", [](E &e, P &) { e.pages(7); }},
    {"prompts", "pages of 12", [](E &e, P &) { e.pages(12); }},
    {"prompts", "pages of 1", [](E &e, P &) { e.pages(1); }},
    {"hopper", "left padding",
     [](E &e, P &p) {
       p.starts_k = e.array(0, {9, 70});
     }},
    {"prompts", "left padding in pages",
     [](E &e, P &p) {
       e.pages(8), p.starts_k = e.array(0, {9, 70});
     }},
    {"hopper", "sequences of a cache",
     [](E &e, P &p) {
       p.cache_index = e.array(0, {1, 0}), p.caches = 2;
     }},
    {"hopper", "one sequence of a cache",
     [](E &e, P &p) {
       p.cache_index = e.array(0, {0, 0}), p.caches = 1, p.K.batch_stride = 0;
     }},
    {"hopper", "packed sequences", [](E &e, P &) { e.pack(); }},
    {"hopper", "a packed sequence without keys",
     [](E &e, P &p) {
       e.pack(), p.lengths_k = e.array(16, {70, 0});
     }},
    {"hopper", "packed queries, and lengths of the keys",
     [](E &e, P &p) {
       e.pack(), p.cu_seqlens_k = {}, p.lengths_k = e.array(16, {70, 31});
     }},
    {"hopper", "ALiBi", [](E &e, P &p) { p.alibi_slopes = e.numbers; }},
    {"prompts", "ALiBi of each sequence",
     [](E &e, P &p) { p.alibi_slopes = e.numbers, p.alibi_stride = kHeads; }},
    {"hopper", "ALiBi of one sequence",
     [](E &e, P &p) { p.batch = 1, p.alibi_slopes = e.numbers, p.alibi_stride = kHeads; }},
    {"hopper", "a soft cap, sinks and a scale",
     [](E &e, P &p) { p.softcap = 3, p.sink_logits = e.numbers, p.scale = 0.5f; }},
    {"hopper", "the log-sum-exp", [](E &e, P &p) { p.lse = e.lse; }},
    {"prompts", "the log-sum-exp of packed queries", [](E &e, P &p) { e.pack(), p.lse = e.lse; }},
    {"hopper", "a rotation", [](E &e, P &) { e.rotate(); }},
    {"hopper", "a rotation of pages of 7", [](E &e, P &) { e.pages(7), e.rotate(); }},
    {"hopper", "a rotation of packed sequences",
     [](E &e, P &p) { e.pack(), e.rotate(), p.causal = 1; }},
    {"prompts", "one row of K for all", [](E &, P &p) { p.K.row_stride = 0; }},
    {"prompts", "one head of V for all", [](E &, P &p) { p.V.head_stride = 0; }},
    {"prompts", "one sequence of K for all", [](E &, P &p) { p.K.batch_stride = 0; }},
    {"prompts", "one row of Q for all", [](E &, P &p) { p.Q.row_stride = 0; }},
    {"hopper", "one sequence, of any stride",
     [](E &, P &p) {
       p.batch = 1;
       for (attention_tensor *tensor : {&p.Q, &p.K, &p.V, &p.O}) tensor->batch_stride = 0;
     }},
    {"hopper", "one head, of any stride",
     [](E &, P &p) {
       p.heads = p.kv_heads = 1;
       for (attention_tensor *tensor : {&p.Q, &p.K, &p.V, &p.O}) tensor->head_stride = 0;
     }},
    {"hopper", "one key, of any stride",
     [](E &, P &p) { p.seqlen_k = 1, p.K.row_stride = p.V.row_stride = 0; }},
    {"hopper", "strides of 2^39 bytes", [](E &, P &p) { p.K.batch_stride = std::int64_t{1} << 38; },
     false},
    {"prompts", "strides of 2^40 bytes",
     [](E &, P &p) { p.K.batch_stride = std::int64_t{1} << 39; }, false},
    {"prompts", "more bytes than there are before the tensor",
     [](E &, P &p) { p.seqlen_k = 1000, p.V.row_stride = std::int64_t{1} << 38; }, false},
    {"prompts", "more tiles of Q than 2^30",
     [](E &, P &p) { p.batch = 1, p.heads = p.kv_heads = 65535, p.seqlen_q = 65535 * 128; }, false},
};

/// O and the log-sum-exp that a call writes.
struct Answer {
  std::vector<std::uint16_t> O;
  std::vector<float> lse;

  explicit Answer(Example &example) {
    std::fill_n(example.O, kSize, std::uint16_t{0x3c00});
    std::fill_n(example.lse, kBatch * kHeads * kRows, 0.f);
    const int status = LIBRARY(attention_forward)(&example.problem);
    CHECK_MESSAGE(status == ATTENTION_OK, std::string(LIBRARY(attention_message)()));
    O.assign(example.O, example.O + kSize);
    lse.assign(example.lse, example.lse + kBatch * kHeads * kRows);
  }
  /// The largest difference.
  float from(const Answer &other) const {
    float most = 0;
    const auto compare = [&](float a, float b) {
      if (!(std::fabs(a - b) <= most)) most = std::isnan(a - b) ? INFINITY : std::fabs(a - b);
    };
    for (std::size_t i = 0; i < O.size(); i++)
      if (O[i] != other.O[i])
        compare(element_to_float(Type::kFp16, O[i]), element_to_float(Type::kFp16, other.O[i]));
    for (std::size_t i = 0; i < lse.size(); i++)
      if (lse[i] != other.lse[i]) compare(lse[i], other.lse[i]);
    return most;
  }
};

}  // namespace

TEST_SUITE_BEGIN("library");

TEST_CASE("which kernel a problem gets, and that its answer is the other kernels'") {
  std::vector<Case> cases(std::begin(kCases), std::end(kCases));
  draw(cases, 12);
  for (const Case &a_case : cases) {
    CAPTURE(a_case.what);
    Example example;
    a_case.make(example, example.problem);
    CHECK(kernel_of(example.problem) == a_case.kernel);
    if (!a_case.runs || example.problem.seqlen_q == 0) continue;
    const Answer chosen(example);
    example.problem.mma_only = 1;
    CHECK(kernel_of(example.problem) != "hopper");
    CHECK(chosen.from(Answer(example)) < 2e-3f);  // fp16's of numbers below 1
    CHECK(std::count(example.workspace, example.workspace + 4 * 4097, 0) == 4 * 4097);
  }
}

TEST_CASE("without keys O is 0 and the log-sum-exp that of the sink alone, by each kernel") {
  struct Empty {
    std::string kernel, what;
    int rows = kQueries;  // of each sequence
    std::function<void(Example &, attention_problem &)> make;
  };
  const Empty all[] = {
      {"prompts", "seqlen_k 0", kQueries, [](E &, P &p) { p.seqlen_k = 0, p.K = p.V = {}; }},
      {"tokens", "seqlen_k 0", 3, [](E &, P &p) { p.seqlen_k = 0, p.K = p.V = {}; }},
      {"prompts", "head dims 192 and 128", kQueries,
       [](E &, P &p) { p.seqlen_k = 0, p.K = p.V = {}, p.head_dim = 192, p.head_dim_v = 128; }},
      {"prompts", "mma_only, causal, a window, a soft cap", kQueries,
       [](E &, P &p) {
         p.seqlen_k = 0, p.K = p.V = {}, p.mma_only = p.causal = p.window = 1, p.softcap = 3;
       }},
      {"prompts", "packed, without a row", kQueries,
       [](E &e, P &p) {
         p.cu_seqlens_k = e.array(0, {0, 0, 0}), p.K = p.V = {};
       }},
      {"prompts", "packed, max_seqlen_k 0", kQueries,
       [](E &e, P &p) {
         p.cu_seqlens_k = e.array(0, {0, 0, 0}), p.seqlen_k = 0, p.K = p.V = {};
       }},
      {"tokens", "packed, and the device has other numbers", 16,
       [](E &e, P &p) {
         p.cu_seqlens_k = e.array(0, {3, -7, 1 << 30}), p.K = p.V = {};
         p.lengths_k = e.array(8, {5, 1 << 30});
       }},
      {"prompts", "pages, and the device has other numbers", kQueries,
       [](E &e, P &p) {
         e.pages(8), p.seqlen_k = 0, p.lengths_k = e.array(0, {5, 1 << 30});
       }},
      {"tokens", "pages of one row", 1,
       [](E &e, P &p) {
         e.pages(1), p.seqlen_k = 0, p.lengths_k = e.array(0, {5, 1 << 30});
       }},
      {"prompts", "sequences of a cache, and left padding", kQueries,
       [](E &e, P &p) {
         p.seqlen_k = 0, p.cache_index = e.array(0, {9, -1}), p.caches = 1;
         p.starts_k = e.array(8, {4, -4}), p.K = p.V = {};
       }},
      {"hopper", "lengths of 0", kQueries,
       [](E &e, P &p) {
         p.lengths_k = e.array(0, {0, 0});
       }},
  };
  for (const Empty &empty : all)
    for (const bool sinks : {false, true}) {
      CAPTURE(empty.what);
      Example example;
      P &p = example.problem;
      p.seqlen_q = empty.rows, p.lse = example.lse;
      if (sinks) p.sink_logits = example.numbers;  // 0.5 each
      empty.make(example, p);
      CHECK(kernel_of(p) == empty.kernel);
      const Answer answer(example);
      const int columns = p.head_dim_v ? p.head_dim_v : p.head_dim;
      const auto rows = kBatch * kHeads * empty.rows;
      CHECK(std::count(answer.O.begin(), answer.O.end(), 0) == rows * columns);
      const float expected = sinks ? 0.5f : -INFINITY;
      CHECK(std::all_of(answer.lse.begin(), answer.lse.begin() + rows,
                        [&](float x) { return x == expected || std::fabs(x - expected) < 1e-6f; }));
      CHECK(std::count(answer.lse.begin() + rows, answer.lse.end(), 0.0f) ==
            kBatch * kHeads * kRows - rows);
    }
}

TEST_CASE("without queries nothing is written but new keys") {
  const std::vector<std::function<void(Example &, attention_problem &)>> all = {
      [](E &, P &p) { p.seqlen_q = 0, p.Q = p.O = {}; },
      [](E &, P &p) { p.seqlen_q = p.seqlen_k = 0, p.Q = p.O = p.K = p.V = {}; },
      [](E &e, P &p) {
        p.cu_seqlens_q = e.array(0, {0, 0, 0}), p.Q = p.O = {};
      },
      [](E &e, P &p) {
        p.cu_seqlens_q = e.array(0, {-3, 7, 1 << 30}), p.Q = p.O = {};
      },
      [](E &e, P &p) { p.seqlen_q = 0, p.Q = p.O = {}, e.rotate(); },
      [](E &e, P &p) { p.seqlen_q = 0, p.Q = p.O = {}, p.K_new = E::dense(e.K_new, kKvHeads); },
  };
  for (const int mma_only : {0, 1})
    for (const auto &make : all) {
      Example example;
      P &p = example.problem;
      p.mma_only = mma_only, p.lse = example.lse;
      make(example, p);
      const std::vector<std::uint16_t> K(example.K, example.K + kSize);
      const Answer answer(example);
      CHECK(std::count(answer.O.begin(), answer.O.end(), 0x3c00) == kSize);
      CHECK(std::count(answer.lse.begin(), answer.lse.end(), 0.0f) == kBatch * kHeads * kRows);
      CHECK(std::equal(K.begin(), K.end(), example.K));
    }
}

TEST_CASE("packed sequences that overlap have more tiles than the plan has room for") {
  Example example;
  P &p = example.problem;
  p.head_dim = 128, p.batch = 8, p.heads = p.kv_heads = 1, p.seqlen_q = 200;
  SUBCASE("head dim 128") {}
  SUBCASE("head dim 96") {
    p.head_dim = 96;
  }
  SUBCASE("head dim 256") {
    p.head_dim = 256;
  }
  SUBCASE("192 columns of K and 128 of V") {
    p.head_dim = 192, p.head_dim_v = 128;
  }
  p.cu_seqlens_q = example.array(0, std::vector<int>(9)), p.total_q = 200;
  p.lengths_q = example.array(16, std::vector<int>(8, 200));  // all of them have all rows
  for (attention_tensor *tensor : {&p.K, &p.V}) tensor->batch_stride = kRows * kHeadDim / 4;
  p.seqlen_k = 40;
  SUBCASE("without pages") {}
  SUBCASE("with pages") {
    p.head_dim = 128, p.head_dim_v = 0;
    p.page_size = 40, p.pages = 8;
    p.page_table = example.array(32, {0, 1, 2, 3, 4, 5, 6, 7});
  }
  CHECK(kernel_of(p) == "hopper");
  REQUIRE(LIBRARY(attention_workspace_bytes)(&p, &p.workspace_bytes) == ATTENTION_OK);
  char *const workspace = allocate<char>(p.workspace_bytes);  // and not a byte more
  std::memset(workspace, 0, p.workspace_bytes);
  p.workspace = workspace;
  const int status = LIBRARY(attention_forward)(&p);
  const std::string message = LIBRARY(attention_message)();
  CHECK_MESSAGE((status == ATTENTION_OK || message.find("[race]") != std::string::npos), message);
  LIBRARY(attention_release)(workspace);
}

TEST_CASE("attention_kernel refuses, too") {
  char name[32];
  CHECK(LIBRARY(attention_kernel)(nullptr, name, sizeof name) == ATTENTION_NULL_POINTER);
  Example example;
  CHECK(LIBRARY(attention_kernel)(&example.problem, nullptr, 1) == ATTENTION_NULL_POINTER);
  example.problem.head_dim = 68;
  CHECK(LIBRARY(attention_kernel)(&example.problem, name, sizeof name) == ATTENTION_HEAD_DIM);
}

TEST_SUITE_END();
