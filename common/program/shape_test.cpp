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
  options.batch = 2;
  options.heads = 4;
  options.seqlen = 64;
  options.head_dim = 64;
  return options;
}

/// The message of the UsageError that these options give, or "".
std::string error_of(const Options &options) {
  try {
    choose_shape(options, kStep, false);
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
  const reference::Shape cpu = choose_shape({}, kStep, false), gpu = choose_shape({}, kStep, true);
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

TEST_CASE("shape: what is asked for arrives") {
  Options options = small();
  options.seqlen_k = 96;
  options.kv_heads = 2;
  options.causal = true;
  options.window = 5;
  options.lengths = {{1, 2}, {64, 96}};
  const reference::Shape shape = choose_shape(options, kStep, false);
  CHECK(shape.batch == 2);
  CHECK(shape.heads == 4);
  CHECK(shape.kv_heads == 2);
  CHECK(shape.seqlen_q == 64);
  CHECK(shape.seqlen_k == 96);
  CHECK(shape.causal);
  CHECK(shape.window == 5);
  CHECK(shape.lengths_q == std::vector<int>{1, 64});
  CHECK(shape.lengths_k == std::vector<int>{2, 96});
  options.batch.reset();  // as many as there are lengths
  CHECK(choose_shape(options, kStep, true).batch == 2);
}

TEST_CASE("shape: one that the step does not take is refused, with what is allowed") {
  CHECK(error_of(small()) == "");
  CHECK(error_after([](Options &o) { o.seqlen = 40; }) ==
        "--seqlen 40: a multiple of 16 is allowed");
  CHECK(error_after([](Options &o) { o.seqlen_k = 40; }) ==
        "--seqlen-k 40: a multiple of 16 is allowed");
  CHECK(error_after([](Options &o) { o.page_size = 24; }) ==
        "--page-size 24: a multiple or a divisor of 16 is allowed, the rows of this step's tile");
  for (const int page_size : {1, 8, 16, 48})
    CHECK(error_after([&](Options &o) { o.page_size = page_size; }) == "");
  CHECK(error_after([](Options &o) { o.kv_heads = 3; }) ==
        "--kv-heads 3: a divisor of --heads 4 is allowed");
  CHECK(error_after([](Options &o) { o.kv_heads = 8; }) ==
        "--kv-heads 8: a divisor of --heads 4 is allowed");
  CHECK(error_after([](Options &o) { o.batch = 16384; }) ==
        "--batch 16384 --heads 4: a product of at most 65535 is allowed");
  CHECK(error_after([](Options &o) { o.batch = o.heads = 2147483647; }) ==
        "--batch 2147483647 --heads 2147483647: a product of at most 65535 is allowed");
}

TEST_CASE("shape: what does not go together is refused") {
  CHECK(error_after([](Options &o) {
          o.layout = Layout::kInterleaved;
          o.seqlen_k = 32;
        }) ==
        "--seqlen-k 32: with --layout interleaved only --seqlen 64 is allowed: a row has Q, K and "
        "V");
  CHECK(error_after([](Options &o) {
          o.layout = Layout::kInterleaved;
          o.page_size = 16;
        }) ==
        "--page-size 16: with --layout interleaved not; of interleaved K and V there are no pages");
  CHECK(error_after([](Options &o) {
          o.lengths = {{1, 1}};
        }) == "--lengths: 1 of them; 2 are allowed, one for each of --batch");
  CHECK(error_after([](Options &o) {
          o.lengths = {{1, 1}, {2, 2}, {3, 3}};
        }) == "--lengths: 3 of them; 2 are allowed, one for each of --batch");
  CHECK(error_after([](Options &o) {
          o.lengths = {{1, 1}, {65, 65}};
        }) == "--lengths 1,65: at most --seqlen 64 is allowed");
  CHECK(error_after([](Options &o) {
          o.lengths = {{1, 65}, {64, 64}};
        }) == "--lengths 1:65,64: for keys at most --seqlen 64 is allowed");
  CHECK(error_after([](Options &o) {
          o.lengths = {{1, 65}, {64, 97}};
          o.seqlen_k = 96;
        }) == "--lengths 1:65,64:97: for keys at most --seqlen-k 96 is allowed");
  CHECK(error_after([](Options &o) { o.lengths = {{0, 64}, {64, 0}}; }) == "");
}

TEST_CASE("shape: a head spans fewer than 2^32 elements, which is how far kernels count") {
  const int most = (1 << 26) - 16;  // the last multiple of the tile below 2^32 / 64
  CHECK(error_after([&](Options &o) { o.seqlen = most; }) == "");
  CHECK(error_after([&](Options &o) { o.seqlen_k = most; }) == "");
  const std::string spans =
      ": at most 67108863 is allowed: a head must have fewer than 2^32 elements";
  CHECK(error_after([&](Options &o) { o.seqlen = most + 16; }) == "--seqlen 67108864" + spans);
  CHECK(error_after([&](Options &o) { o.seqlen_k = most + 16; }) == "--seqlen-k 67108864" + spans);
  CHECK(error_after([&](Options &o) { o.seqlen = 2147483632; }) == "--seqlen 2147483632" + spans);
  // A step that takes layouts has strides of 64 bits.
  Options options = small();
  options.seqlen = 2147483632;
  Step strided = kStep;
  strided.takes = "--causal --layout";
  CHECK(choose_shape(options, strided, false).seqlen_q == 2147483632);
}

TEST_CASE("shape: a step that decodes has one query per head by default, and a long cache") {
  Step decodes = kStep;
  decodes.tile = 1;
  decodes.decodes = true;
  const auto text = [&](const Options &options, bool gpu) {
    const reference::Shape s = choose_shape(options, decodes, gpu);
    std::string all;
    for (const int n : {s.batch, s.heads, s.kv_heads, s.seqlen_q, s.seqlen_k})
      all += std::to_string(n) + " ";
    return all;
  };
  CHECK(text({}, false) == "1 8 2 1 256 ");
  CHECK(text({}, true) == "12 64 8 1 65536 ");
  Options options;
  options.seqlen_k = 77;
  CHECK(text(options, true) == "12 64 8 1 77 ");
  options.heads = 6;  // then all of K and V's, as in every step
  CHECK(text(options, true) == "12 6 6 1 77 ");
  options = {};
  options.seqlen = 5;  // then the keys are as many, as in every step
  CHECK(text(options, true) == "12 64 8 5 5 ");
}

TEST_CASE("shape: without --seqlen the longest sequence counts") {
  Options options;
  options.lengths = {{1, 48}, {16, 32}};
  reference::Shape shape = choose_shape(options, kStep, true);
  CHECK(shape.seqlen_q == 16);
  CHECK(shape.seqlen_k == 48);
  options.seqlen = 64;
  shape = choose_shape(options, kStep, true);
  CHECK(shape.seqlen_q == 64);
  CHECK(shape.seqlen_k == 64);
}

TEST_CASE("shape: keys beside a cache have their rows in it") {
  CHECK(error_after([](Options &o) { o.append = 64; }) == "");
  CHECK(error_after([](Options &o) { o.append = 65; }) ==
        "--append 65: at most 64 is allowed, the keys of a sequence");
  CHECK(error_after([](Options &o) {
          o.append = 4;
          o.lengths = {{1, 64}, {1, 3}};
        }) == "--append 4: at most 3 is allowed, the keys of the shortest sequence");
  CHECK(error_after([](Options &o) {
          o.append = 1;
          o.layout = Layout::kInterleaved;
        }) == "--append 1: with --layout interleaved not; Q's rows are no cache of K and V");
  const auto packed = [](Options &o) {
    o.append = 1;
    o.layout = Layout::kPacked;
    o.lengths = {{1, 64}, {1, 3}};
  };
  CHECK(error_after(packed) ==
        "--append 1: with --layout packed only beside --page-size; packed K and V leave no room "
        "for more");
  CHECK(error_after([&](Options &o) {
          packed(o);
          o.page_size = 16;
        }) == "");
}

TEST_CASE("shape: a query that is rotated has a position") {
  CHECK(error_after([](Options &o) { o.rope = Rope::kHalves; }) == "");
  const std::string allowed =
      " keys; as many queries as keys are allowed, or fewer: one before the first key has no "
      "position";
  CHECK(error_after([](Options &o) {
          o.rope = Rope::kHalves;
          o.seqlen_k = 48;
        }) == "--rope halves: 64 queries and 48" + allowed);
  CHECK(error_after([](Options &o) {
          o.rope = Rope::kNeighbours;
          o.lengths = {{5, 5}, {3, 2}};
        }) == "--rope neighbours: 3 queries and 2" + allowed);
}

TEST_CASE("shape: what sets a problem apart from the plain one") {
  const auto departures_of = [](const Options &options) {
    return departures(choose_shape(options, kStep, false), options);
  };
  Options options = small();
  CHECK(departures_of(options) == "");
  options.kv_heads = 4;  // as plain as without
  options.seqlen_k = 64;
  CHECK(departures_of(options) == "");
  options.causal = true;
  CHECK(departures_of(options) == "causal");
  options.kv_heads = 2;
  options.type = Type::kBf16;
  CHECK(departures_of(options) == "causal kv-heads=2 type=bf16");
  options.seqlen_k = 32;
  options.window = 7;
  options.layout = Layout::kBnhd;
  options.page_size = 16;
  options.lengths = {{1, 1}, {64, 0}};
  CHECK(departures_of(options) ==
        "causal seqlen-k=32 kv-heads=2 window=7 type=bf16 layout=bnhd page-size=16 "
        "lengths=1,64:0");
  options = small();
  options.window = 7;
  options.sinks = 2;
  options.append = 3;
  options.rope = Rope::kNeighbours;
  options.splits = 5;
  CHECK(departures_of(options) == "window=7 sinks=2 append=3 rope=neighbours splits=5");
}
