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
        "--seqlen 40: a multiple of 16 is allowed, the rows of this step's tile");
  CHECK(error_after([](Options &o) { o.seqlen_k = 40; }) ==
        "--seqlen-k 40: a multiple of 16 is allowed, the rows of this step's tile");
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
        "--page-size 16: with --layout bhnd or bnhd only; of interleaved K and V there are no "
        "pages");
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
      ": at most 67108863 is allowed: a head's rows, 64 elements apart, must span fewer than 2^32 "
      "elements";
  CHECK(error_after([&](Options &o) { o.seqlen = most + 16; }) == "--seqlen 67108864" + spans);
  CHECK(error_after([&](Options &o) { o.seqlen_k = most + 16; }) == "--seqlen-k 67108864" + spans);
  CHECK(error_after([&](Options &o) { o.seqlen = 2147483632; }) == "--seqlen 2147483632" + spans);
  // Where the heads of a row lie side by side, a head's rows are further apart.
  CHECK(error_after([&](Options &o) {
          o.seqlen = 1 << 24;
          o.layout = Layout::kBnhd;
        }) ==
        "--seqlen 16777216: at most 16777215 is allowed: a head's rows, 256 elements apart, must "
        "span fewer than 2^32 elements");
  CHECK(error_after([&](Options &o) {
          o.seqlen = 1 << 23;
          o.layout = Layout::kInterleaved;
        }) ==
        "--seqlen 8388608: at most 5592405 is allowed: a head's rows, 768 elements apart, must "
        "span fewer than 2^32 elements");
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
}
