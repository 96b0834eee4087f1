// SPDX-License-Identifier: MIT
#include "common/program/shape.h"

#include <doctest/doctest.h>

namespace {

const Step kStep = {.name = "20-all",
                    .needs = "sm_75",
                    .takes = "",
                    .tile = 16,
                    .default_batch = 12,
                    .launch = nullptr};

/// The options of a small shape.
Options small() {
  Options options;
  options.shape.batch = 2;
  options.shape.heads = 4;
  options.shape.seqlen_q = 64;
  options.shape.head_dim = 64;
  return options;
}

/// The shape that a step is given.
reference::Shape shape_of(const Options &options, const Step &step, bool gpu) {
  const Options all = with_defaults(options, step, gpu);
  check_problem(all, step);
  return all.shape;
}

void set_lengths(Options &options, const std::vector<int> &q, const std::vector<int> &k) {
  options.shape.lengths_q = q;
  options.shape.lengths_k = k;
}

/// The message of the UsageError that these options give, or "".
std::string error_of(const Options &options) {
  try {
    shape_of(options, kStep, false);
  } catch (const UsageError &error) {
    return error.what();
  }
  return "";
}

/// The same, of small() after a change.
template <class Change>
std::string error_after(Change change) {
  Options options = small();
  change(options);
  return error_of(options);
}

}  // namespace

TEST_CASE("shape: what is not asked for is the device's default") {
  const reference::Shape cpu = shape_of({}, kStep, false), gpu = shape_of({}, kStep, true);
  CHECK(cpu.batch == 1);
  CHECK(cpu.heads == 2);
  CHECK(cpu.kv_heads == 2);
  CHECK(cpu.seqlen_q == 256);
  CHECK(cpu.seqlen_k == 256);
  CHECK(cpu.head_dim == 64);
  CHECK(gpu.batch == 12);
  CHECK(gpu.heads == 16);
  CHECK(gpu.kv_heads == 16);
  CHECK(gpu.seqlen_q == 8192);
  CHECK(gpu.seqlen_k == 8192);
  CHECK(gpu.head_dim == 128);
  CHECK(!cpu.causal);
  CHECK(cpu.window == 0);
  CHECK(cpu.lengths_q.empty());
  CHECK(cpu.lengths_k.empty());
}

TEST_CASE("shape: latent attention has one head of K, and V in all but 64 of its columns") {
  Step step = kStep;
  step.tile = 1;
  step.takes = "--latent --kv-heads";
  step.head_dims = {576};
  step.decodes = true;
  for (const bool gpu : {false, true}) {
    const Options options = with_defaults({}, step, gpu);
    CHECK(options.shape.latent);
    CHECK(options.shape.heads == 128);
    CHECK(options.shape.kv_heads == 1);
    CHECK(options.shape.head_dim == 576);
    CHECK(options.shape.columns_of_v() == 512);
    CHECK(departures(options, step).starts_with("latent "));  // which says V's columns, too
    CHECK(kv_bytes(options.shape, Type::kBf16) ==
          2.0 * 576 * options.shape.batch * options.shape.seqlen_k);
    Options interleaved = options;
    interleaved.layout = Layout::kInterleaved;
    CHECK_THROWS_WITH_AS(
        check_problem(interleaved, step),
        "--layout interleaved cannot be combined with a latent cache, where V is a part of K",
        UsageError);
  }
  Options few;
  few.shape.heads = 6;
  CHECK(with_defaults(few, step, true).shape.kv_heads == 1);
  few.shape.kv_heads = 2;
  CHECK(with_defaults(few, step, true).shape.kv_heads == 2);
  CHECK(!with_defaults({}, kStep, true).shape.latent);
}

TEST_CASE("shape: what is asked for arrives") {
  Options options = small();
  options.shape.seqlen_k = 96;
  options.shape.kv_heads = 2;
  options.shape.causal = true;
  options.shape.window = 5;
  set_lengths(options, {1, 64}, {2, 96});
  const reference::Shape shape = shape_of(options, kStep, false);
  CHECK(shape.batch == 2);
  CHECK(shape.heads == 4);
  CHECK(shape.kv_heads == 2);
  CHECK(shape.seqlen_q == 64);
  CHECK(shape.seqlen_k == 96);
  CHECK(shape.causal);
  CHECK(shape.window == 5);
  CHECK(shape.lengths_q == std::vector<int>{1, 64});
  CHECK(shape.lengths_k == std::vector<int>{2, 96});
  options.shape.batch = 0;  // as many as there are lengths
  CHECK(shape_of(options, kStep, true).batch == 2);
}

TEST_CASE("shape: one that the step does not take is refused, with what is allowed") {
  CHECK(error_of(small()) == "");
  CHECK(error_after([](Options &o) { o.shape.seqlen_q = 40; }) ==
        "--seqlen 40: must be a multiple of 16");
  CHECK(error_after([](Options &o) { o.shape.seqlen_k = 40; }) ==
        "--seqlen-k 40: must be a multiple of 16");
  CHECK(error_after([](Options &o) { o.page_size = 24; }) ==
        "--page-size 24: must be a multiple or a divisor of 16, the rows of this step's tile");
  for (const int page_size : {1, 8, 16, 48})
    CHECK(error_after([&](Options &o) { o.page_size = page_size; }) == "");
  Step of_8 = kStep;
  of_8.page_rows = 8;
  Options paged = small();
  paged.page_size = 4;
  CHECK_THROWS_WITH_AS(shape_of(paged, of_8, false), "--page-size 4: must be a multiple of 8",
                       UsageError);
  paged.page_size = 8;
  CHECK_NOTHROW(shape_of(paged, of_8, false));
  CHECK(error_after([](Options &o) { o.shape.kv_heads = 3; }) ==
        "--kv-heads 3: must be a divisor of --heads 4");
  CHECK(error_after([](Options &o) { o.shape.kv_heads = 8; }) ==
        "--kv-heads 8: must be a divisor of --heads 4");
  CHECK(error_after([](Options &o) { o.shape.batch = 16384; }) ==
        "--batch 16384 --heads 4: their product must be at most 65535");
  CHECK(error_after([](Options &o) { o.shape.batch = o.shape.heads = 2147483647; }) ==
        "--batch 2147483647 --heads 2147483647: their product must be at most 65535");
}

TEST_CASE("shape: what does not go together is refused") {
  CHECK(error_after([](Options &o) {
          o.layout = Layout::kInterleaved;
          o.shape.seqlen_k = 32;
        }) ==
        "--seqlen-k 32: must be --seqlen 64 with --layout interleaved, because a row has Q, K and "
        "V");
  CHECK(error_after([](Options &o) {
          o.layout = Layout::kInterleaved;
          o.page_size = 16;
        }) == "--page-size 16 cannot be combined with --layout interleaved");
  CHECK(error_after([](Options &o) {
          o.layout = Layout::kInterleaved;
          o.shape.head_dim_v = 128;
        }) ==
        "--head-dim-v 128 cannot be combined with --layout interleaved, where V's rows are as far "
        "apart as Q's");
  CHECK(error_after([](Options &o) { set_lengths(o, {1}, {1}); }) ==
        "--lengths has 1 entry: must have 2, one for each of --batch");
  CHECK(error_after([](Options &o) {
          set_lengths(o, {1, 2, 3}, {1, 2, 3});
        }) == "--lengths has 3 entries: must have 2, one for each of --batch");
  CHECK(error_after([](Options &o) {
          set_lengths(o, {1, 65}, {1, 65});
        }) == "--lengths 65: must be at most --seqlen 64");
  CHECK(error_after([](Options &o) {
          set_lengths(o, {1, 64}, {65, 64});
        }) == "--lengths 65: must be at most --seqlen 64 for keys");
  CHECK(error_after([](Options &o) {
          set_lengths(o, {1, 64}, {65, 97});
          o.shape.seqlen_k = 96;
        }) == "--lengths 97: must be at most --seqlen-k 96 for keys");
  CHECK(error_after([](Options &o) { set_lengths(o, {0, 64}, {64, 0}); }) == "");
}

TEST_CASE("shape: a head spans fewer than 2^32 elements, which is how far kernels count") {
  const int most = (1 << 26) - 16;  // the last multiple of the tile below 2^32 / 64
  CHECK(error_after([&](Options &o) { o.shape.seqlen_q = most; }) == "");
  CHECK(error_after([&](Options &o) { o.shape.seqlen_k = most; }) == "");
  const std::string spans =
      ": must be at most 67108863, because a head must have fewer than 2^32 elements";
  CHECK(error_after([&](Options &o) { o.shape.seqlen_q = most + 16; }) ==
        "--seqlen 67108864" + spans);
  CHECK(error_after([&](Options &o) { o.shape.seqlen_k = most + 16; }) ==
        "--seqlen-k 67108864" + spans);
  CHECK(error_after([&](Options &o) { o.shape.seqlen_q = 2147483632; }) ==
        "--seqlen 2147483632" + spans);
  // A step that takes layouts has strides of 64 bits.
  Options options = small();
  options.shape.seqlen_q = 2147483632;
  Step strided = kStep;
  strided.takes = "--causal --layout";
  CHECK(shape_of(options, strided, false).seqlen_q == 2147483632);
}

TEST_CASE("shape: a step that decodes has one query per head by default, and a long cache") {
  Step decodes = kStep;
  decodes.tile = 1;
  decodes.decodes = true;
  const auto text = [&](const Options &options, bool gpu) {
    const reference::Shape s = shape_of(options, decodes, gpu);
    std::string all;
    for (const int n : {s.batch, s.heads, s.kv_heads, s.seqlen_q, s.seqlen_k})
      all += std::to_string(n) + " ";
    return all;
  };
  CHECK(text({}, false) == "1 8 2 1 256 ");
  CHECK(text({}, true) == "12 64 8 1 65536 ");
  Options options;
  options.shape.seqlen_k = 77;
  CHECK(text(options, true) == "12 64 8 1 77 ");
  options.shape.heads = 6;  // then all of K and V's, as in every step
  CHECK(text(options, true) == "12 6 6 1 77 ");
  options = {};
  options.shape.seqlen_q = 5;  // then the keys are as many, as in every step
  CHECK(text(options, true) == "12 64 8 5 5 ");
}

TEST_CASE("shape: without --seqlen the longest sequence counts") {
  Options options;
  set_lengths(options, {1, 16}, {48, 32});
  reference::Shape shape = shape_of(options, kStep, true);
  CHECK(shape.seqlen_q == 16);
  CHECK(shape.seqlen_k == 48);
  options.shape.seqlen_q = 64;
  shape = shape_of(options, kStep, true);
  CHECK(shape.seqlen_q == 64);
  CHECK(shape.seqlen_k == 64);
}

TEST_CASE("shape: keys beside a cache have their rows in it") {
  CHECK(error_after([](Options &o) { o.shape.seqlen_new = 64; }) == "");
  CHECK(error_after([](Options &o) { o.shape.seqlen_new = 65; }) ==
        "--append 65: must be at most 64, the keys of a sequence");
  CHECK(error_after([](Options &o) {
          o.shape.seqlen_new = 4;
          set_lengths(o, {1, 1}, {64, 3});
        }) == "--append 4: must be at most 3, the keys of the shortest sequence");
  CHECK(error_after([](Options &o) {
          o.shape.seqlen_new = 1;
          set_lengths(o, {0, 1}, {0, 1});
        }) == "--append 1: each sequence needs as many keys, and one of --lengths has none");
  CHECK(error_after([](Options &o) {
          o.shape.seqlen_new = 1;
          o.layout = Layout::kInterleaved;
        }) ==
        "--append 1 cannot be combined with --layout interleaved, where Q's rows are among the "
        "cache's");
  const auto packed = [](Options &o) {
    o.shape.seqlen_new = 1;
    o.layout = Layout::kPacked;
    set_lengths(o, {1, 1}, {64, 3});
  };
  CHECK(error_after(packed) ==
        "--append 1 with --layout packed needs --page-size: packed K and V have no room for more "
        "keys");
  CHECK(error_after([&](Options &o) {
          packed(o);
          o.page_size = 16;
        }) == "");
}

TEST_CASE("shape: a backward pass takes scales up to 1") {
  Step backward = kStep;
  backward.gradients = true;
  Options options = small();
  options.shape.scale = 1;
  check_problem(with_defaults(options, backward, false), backward);
  options.shape.scale = 1.5F;
  CHECK_THROWS_WITH_AS(check_problem(with_defaults(options, backward, false), backward),
                       "--scale 1.5: must be at most 1 with a backward pass, because the fp32 "
                       "log-sum-exp cannot hold larger scores",
                       UsageError);
}

TEST_CASE("shape: a query that is rotated has a position") {
  CHECK(error_after([](Options &o) { o.shape.rope = Rope::kHalves; }) == "");
  const std::string allowed =
      " keys; a sequence must have at least as many keys as queries, because a query before the "
      "first key has no position";
  CHECK(error_after([](Options &o) {
          o.shape.rope = Rope::kHalves;
          o.shape.seqlen_k = 48;
        }) == "--rope halves: 64 queries and 48" + allowed);
  CHECK(error_after([](Options &o) {
          o.shape.rope = Rope::kNeighbours;
          set_lengths(o, {5, 3}, {5, 2});
        }) == "--rope neighbours: 3 queries and 2" + allowed);
}

TEST_CASE("shape: how a problem differs from the plain one") {
  const auto departures_of = [](const Options &options) {
    return departures(with_defaults(options, kStep, false), kStep);
  };
  Options options = small();
  CHECK(departures_of(options) == "");
  options.shape.kv_heads = 4;  // as plain as without
  options.shape.seqlen_k = 64;
  CHECK(departures_of(options) == "");
  options.shape.causal = true;
  CHECK(departures_of(options) == "causal");
  options.shape.kv_heads = 2;
  options.type = Type::kBf16;
  CHECK(departures_of(options) == "causal kv-heads=2 type=bf16");
  options.shape.seqlen_k = 32;
  options.shape.window = 7;
  options.layout = Layout::kBnhd;
  options.page_size = 16;
  set_lengths(options, {1, 64}, {1, 0});
  CHECK(departures_of(options) ==
        "causal seqlen-k=32 kv-heads=2 window=7 type=bf16 layout=bnhd page-size=16 "
        "lengths=1,64:0");
  options = small();
  options.shape.window = 7;
  options.shape.sinks = 2;
  options.shape.seqlen_new = 3;
  options.shape.rope = Rope::kNeighbours;
  options.shape.rope_dim = 16;
  options.splits = 5;
  CHECK(departures_of(options) == "window=7 sinks=2 append=3 rope=neighbours rope-dim=16 splits=5");
  options = small();
  options.shape.window_left = 7;
  options.shape.scale = 0.05f;
  options.shape.softcap = 30;
  options.shape.alibi = options.shape.sink_logits = true;
  CHECK(departures_of(options) == "window-size=7:-1 scale=0.05 softcap=30 alibi sink-logits");
  options = small();
  options.shape.scale = 0.0f;
  CHECK(departures_of(options) == "scale=0");
}

TEST_CASE("shape: operations, and the bytes of K and V that must be read") {
  reference::Shape shape{
      .batch = 2, .heads = 6, .kv_heads = 3, .seqlen_q = 5, .seqlen_k = 7, .head_dim = 64};
  CHECK(operations(shape) == 4.0 * 64 * 2 * 6 * 5 * 7);
  CHECK(kv_bytes(shape, Type::kBf16) == 2.0 * 2 * 64 * 2 * 3 * 7);
  CHECK(kv_bytes(shape, Type::kFp8) == 2.0 * 64 * 2 * 3 * 7);
  shape.window = 2;  // the last 2 of the first query's 3 keys, and 4 more
  CHECK(operations(shape) == 4.0 * 64 * 2 * 6 * 5 * 2);
  CHECK(kv_bytes(shape, Type::kFp16) == 2.0 * 2 * 64 * 2 * 3 * 6);
  shape.head_dim_v = 32;
  CHECK(operations(shape) == 2.0 * (64 + 32) * 2 * 6 * 5 * 2);
  CHECK(kv_bytes(shape, Type::kFp16) == 2.0 * (64 + 32) * 2 * 3 * 6);
}
