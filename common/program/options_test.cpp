// SPDX-License-Identifier: MIT
#include "common/program/options.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "common/program/shape.h"
#include "common/program/text.h"

namespace {

constexpr int kTile = 48;

const Step kStep = {.name = "02-loop-inverted",
                    .needs = "sm_75",
                    .takes = "",
                    .tile = kTile,
                    .default_batch = 12,
                    .launch = nullptr};

const Step kTakesAll = {.name = "23-strides",
                        .needs = "sm_80",
                        .takes =
                            "--causal --seqlen-k --kv-heads --window --type --layout "
                            "--page-size --lengths --sinks --append --rope --rope-dim --splits "
                            "--window-size --scale --softcap --alibi --sink-logits --garbage "
                            "--head-dim-v",
                        .tile = 1,
                        .default_batch = 16,
                        .launch = nullptr,
                        .head_dims = {32, 80, 256}};

const Step kFp8 = {.name = "41-handover",
                   .needs = "sm_90a",
                   .takes = "--causal --type fp8",
                   .tile = 128,
                   .default_batch = 16,
                   .launch = nullptr,
                   .head_dims = {128}};

const Step kShared = {.name = "71-ring",
                      .needs = "sm_90a",
                      .takes = "--gpus --link",
                      .tile = 1,
                      .default_batch = 1,
                      .launch = nullptr};

const Ladder kLadder = {{"02-loop-inverted", "sm_75", "", ""},
                        {"20-causal", "sm_80", "", "--causal"},
                        {"23-strides", "sm_80", "", kTakesAll.takes},
                        {"71-ring", "sm_90a", "", kShared.takes}};

Options parse(const std::vector<std::string> &arguments, const Step &step = kStep) {
  std::vector<std::string> all = {"./step"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  std::vector<char *> argv;
  for (std::string &argument : all) argv.push_back(argument.data());
  argv.push_back(nullptr);
  return parse_options(static_cast<int>(all.size()), argv.data(), step, kLadder);
}

/// The message of the UsageError that these arguments give, or "".
std::string error_of(const std::vector<std::string> &arguments, const Step &step = kStep) {
  try {
    parse(arguments, step);
  } catch (const UsageError &error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("options: without arguments nothing is set but the seed") {
  const Options options = parse({});
  CHECK(options.device == DeviceChoice::kAuto);
  const reference::Shape &shape = options.shape;
  for (const int size : {shape.batch, shape.heads, shape.kv_heads, shape.seqlen_q, shape.seqlen_k,
                         shape.head_dim, options.iters})
    CHECK(size == 0);
  CHECK(options.inputs == reference::Family::kNormal);
  CHECK(!shape.causal);
  CHECK(shape.window == 0);
  CHECK(options.type == Type::kFp16);
  CHECK(options.layout == Layout::kBhnd);
  CHECK(options.page_size == 0);
  CHECK(shape.lengths_q.empty());
  CHECK(options.seed == 1);
  CHECK(!options.check_only);
  CHECK(!options.profile);
  CHECK(!options.describe);
  CHECK(!options.help);
  for (const std::string &file : options.files) CHECK(file == "");
  CHECK(options.sizes == "");
}

TEST_CASE("options: every option, in both ways of writing it") {
  const std::vector<std::pair<std::string, std::string>> all = {
      {"--device", "cpu"},        {"--batch", "2"},         {"--heads", "3"},
      {"--seqlen", "512"},        {"--head-dim", "80"},     {"--inputs", "one-hot"},
      {"--seed", "99"},           {"--csv", "a.csv"},       {"--trace-csv", "c.csv"},
      {"--profile-csv", "b.csv"}, {"--seqlen-k", "100"},    {"--kv-heads", "1"},
      {"--window", "17"},         {"--type", "bf16"},       {"--layout", "bnhd"},
      {"--page-size", "16"},      {"--lengths", "5,6:7"},   {"--sinks", "4"},
      {"--append", "2"},          {"--rope", "halves"},     {"--rope-dim", "32"},
      {"--splits", "3"},          {"--events-csv", "d.csv"}};
  std::vector<std::string> two_words = {"--profile", "--causal", "--garbage", "--repeatable"},
                           one_word = {"--repeatable", "--causal", "--garbage", "--profile"};
  for (const auto &[option, value] : all) {
    two_words.insert(two_words.end(), {option, value});
    one_word.insert(one_word.begin(), option + "=" + value);
  }
  for (const auto &arguments : {two_words, one_word}) {
    const Options options = parse(arguments, kTakesAll);
    CHECK(options.device == DeviceChoice::kCpu);
    CHECK(options.shape.batch == 2);
    CHECK(options.shape.heads == 3);
    CHECK(options.shape.seqlen_q == 512);
    CHECK(options.shape.head_dim == 80);
    CHECK(options.inputs == reference::Family::kOneHot);
    CHECK(options.seed == 99);
    CHECK(options.repeatable);
    CHECK(options.profile);
    CHECK(!options.help);
    CHECK(options.files[kResultCsv] == "a.csv");
    CHECK(options.files[kProfileCsv] == "b.csv");
    CHECK(options.files[kTraceCsv] == "c.csv");
    CHECK(options.files[kEventsCsv] == "d.csv");
    CHECK(options.shape.causal);
    CHECK(options.shape.seqlen_k == 100);
    CHECK(options.shape.kv_heads == 1);
    CHECK(options.shape.window == 17);
    CHECK(options.type == Type::kBf16);
    CHECK(options.layout == Layout::kBnhd);
    CHECK(options.page_size == 16);
    CHECK(options.shape.sinks == 4);
    CHECK(options.shape.seqlen_new == 2);
    CHECK(options.shape.rope == Rope::kHalves);
    CHECK(options.shape.rope_dim == 32);
    CHECK(options.splits == 3);
    CHECK(options.garbage);
    CHECK(options.shape.lengths_q == std::vector<int>{5, 6});
    CHECK(options.shape.lengths_k == std::vector<int>{5, 7});
  }
}

TEST_CASE("options: what a step does not take is refused, with the steps that do") {
  const std::string not_taken = ": this step does not accept it; ";
  CHECK(error_of({"--causal"}) == "--causal" + not_taken + "steps 20 and 23 accept it");
  for (const std::string option :
       {"--seqlen-k", "--kv-heads", "--window", "--type", "--layout", "--page-size", "--lengths",
        "--sinks", "--append", "--rope", "--rope-dim", "--splits", "--window-size", "--scale",
        "--softcap"}) {
    CHECK(error_of({option, "1"}) == option + not_taken + "step 23 accepts it");
    CHECK(error_of({option + "=nonsense"}) == option + not_taken + "step 23 accepts it");
    CHECK(!contains(error_of({option, "1"}, kTakesAll), "accept"));
  }
  Step some = kStep;
  some.takes = "--window --causal";
  CHECK(parse({"--causal"}, some).shape.causal);
  CHECK(parse({"--window", "3"}, some).shape.window == 3);
  CHECK(error_of({"--type", "bf16"}, some) == "--type" + not_taken + "step 23 accepts it");
}

TEST_CASE("options: lengths, of queries and keys") {
  const auto lengths = [](const std::string &list) {
    const reference::Shape shape = parse({"--lengths", list}, kTakesAll).shape;
    std::string text;
    for (std::size_t b = 0; b < shape.lengths_q.size(); b++)
      text += std::to_string(shape.lengths_q[b]) + "/" + std::to_string(shape.lengths_k[b]) + " ";
    return text;
  };
  CHECK(lengths("7") == "7/7 ");
  CHECK(lengths("0,1073741824") == "0/0 1073741824/1073741824 ");
  CHECK(lengths("1:2,3,4:0") == "1/2 3/3 4/0 ");
  for (const std::string list : {"", ",", "1,", ",1", "1,,2", "1:", ":1", "1:2:3", "-1", "x",
                                 "1 ,2", "1;2", "1073741825", "1:2147483648", "1:,2"}) {
    CAPTURE(list);
    CHECK(
        error_of({"--lengths", list}, kTakesAll) ==
        "--lengths " + list +
            ": must be N or N:M for each batch element, with commas between, from 0 to 1073741824");
  }
}

TEST_CASE("options: windows to both sides") {
  const auto sides = [](const std::string &text) {
    const reference::Shape shape = parse({"--window-size", text}, kTakesAll).shape;
    return std::pair(shape.window_left, shape.window_right);
  };
  CHECK(sides("128:0") == std::pair(128, 0));
  CHECK(sides("-1:5") == std::pair(-1, 5));
  CHECK(sides("2147483647:-1") == std::pair(2147483647, -1));
  for (const std::string text : {"", ":", "5", "5:", ":5", "1:2:3", "-2:0", "0:-2", "x:1", "1,2",
                                 "2147483648:0", "-1 :0", "1.5:0"})
    CHECK(error_of({"--window-size", text}, kTakesAll) ==
          "--window-size " + text +
              ": must be LEFT:RIGHT, each -1 or a whole number from 0 to 2147483647");
  CHECK(error_of({"--window-size", "3:0", "--window", "4"}, kTakesAll) ==
        "--window 4 cannot be combined with --window-size, which says the same: LEFT is 3");
  CHECK(error_of({"--window-size", "-1:-1", "--window", "4"}, kTakesAll) == "");
}

TEST_CASE("options: a scale, and what becomes of scores") {
  CHECK(!parse({}, kTakesAll).shape.scale);
  for (const auto &[text, value] : {std::pair{"0.05", 0.05f},
                                    {"0", 0.0f},
                                    {"1", 1.0f},
                                    {".5", 0.5f},
                                    {"1e-3", 1e-3f},
                                    {"1000000", 1e6f}})
    CHECK(parse({"--scale", text}, kTakesAll).shape.scale == value);
  CHECK(parse({"--softcap", "30"}, kTakesAll).shape.softcap == 30);
  CHECK(parse({"--softcap", "0.001"}, kTakesAll).shape.softcap == 0.001f);
  CHECK(parse({"--alibi"}, kTakesAll).shape.alibi);
  CHECK(parse({"--sink-logits"}, kTakesAll).shape.sink_logits);
  // The maximum is taken before the scale: with a negative one it would be the minimum.
  for (const std::string text :
       {"-1", "-0", "inf", "nan", "", " 1", "1 ", "x", "1x", "0,5", "1000001", "1e39", "+1"})
    CHECK(error_of({"--scale", text}, kTakesAll) ==
          "--scale " + text + ": must be a number from 0 to 1e+06");
  for (const std::string text : {"0", "-30", "0.0009", "nan", "1e7"})
    CHECK(error_of({"--softcap", text}, kTakesAll) ==
          "--softcap " + text + ": must be a number from 0.001 to 1e+06");
}

TEST_CASE("options: splits, and that the step decides on them") {
  CHECK(parse({}, kTakesAll).splits == 0);
  CHECK(parse({"--splits", "auto"}, kTakesAll).splits == 0);
  CHECK(parse({"--splits", "1"}, kTakesAll).splits == 1);
  CHECK(parse({"--splits", "65535"}, kTakesAll).splits == 65535);
  for (const std::string value : {"0", "-1", "65536", "268435456", "2147483648", "", "Auto", "4x"})
    CHECK(error_of({"--splits", value}, kTakesAll) ==
          "--splits " + value + ": must be auto or a whole number from 1 to 65535");
}

TEST_CASE("options: columns that turn") {
  CHECK(parse({"--rope", "halves", "--rope-dim", "256"}, kTakesAll).shape.rope_dim == 256);
  for (const std::string value : {"0", "-16", "8", "24", "272", "4294967312", "", "x", "16x"})
    CHECK(error_of({"--rope", "halves", "--rope-dim", value}, kTakesAll) ==
          "--rope-dim " + value + ": must be a multiple of 16, from 16 to the head dim");
}

TEST_CASE("options: what means nothing without another is refused") {
  CHECK(error_of({"--sinks", "4"}, kTakesAll) ==
        "--sinks 4 needs --window: without one a query sees the first keys anyway");
  CHECK(error_of({"--sinks", "4", "--window", "5"}, kTakesAll) == "");
  CHECK(error_of({"--rope-dim", "16"}, kTakesAll) == "--rope-dim 16 needs --rope");
  CHECK(error_of({"--rope-dim", "16", "--rope", "halves"}, kTakesAll) == "");
  CHECK(error_of({"--layout", "packed"}, kTakesAll) ==
        "--layout packed needs --lengths, which says where a sequence ends");
  CHECK(error_of({"--layout", "packed", "--lengths", "5"}, kTakesAll) == "");
  for (const std::string &family : reference::family_names()) {
    const bool well_posed = family == "normal" || family == "one-hot" || family == "equal-keys";
    CHECK(error_of({"--inputs", family}, kTakesAll) == "");
    CHECK(error_of({"--inputs", family, "--rope", "halves"}, kTakesAll) ==
          (well_posed ? ""
                      : "--inputs " + family +
                            ": must be normal, one-hot or equal-keys with --rope: the scores of "
                            "others depend on how a kernel rounds what it rotates"));
  }
}

TEST_CASE("options: each option alone sets one thing") {
  CHECK(parse({"--profile"}).profile);
  CHECK(!parse({"--profile"}).check_only);
  CHECK(parse({"--check-only"}).check_only);
  CHECK(!parse({"--check-only"}).profile);
  CHECK(parse({"--describe"}).describe);
  CHECK(parse({"--help"}).help);
  CHECK(parse({"-h"}).help);
  CHECK(parse({"--batch", "5"}).shape.batch == 5);
  CHECK(parse({"--batch", "5"}).shape.heads == 0);
  CHECK(parse({"--head-dim", "64"}).shape.head_dim == 64);
  CHECK(parse({"--device", "auto"}).device == DeviceChoice::kAuto);
  CHECK(parse({"--device", "gpu"}).device == DeviceChoice::kGpu);
}

TEST_CASE("options: what counts and what does not count exclude each other") {
  for (const std::vector<std::string> &counting : {std::vector<std::string>{"--profile"},
                                                   {"--profile-csv", "a.csv"},
                                                   {"--trace-csv", "a.csv"},
                                                   {"--events-csv", "a.csv"}}) {
    std::vector<std::string> both = counting;
    both.push_back("--check-only");
    CHECK(error_of(both) ==
          counting[0] + " cannot be combined with --check-only, which does not count");
  }
}

TEST_CASE("options: --iters with what is not timed is refused") {
  CHECK(parse({"--iters", "7"}).iters == 7);
  CHECK(parse({"--iters=7", "--device", "gpu"}).iters == 7);
  for (const std::vector<std::string> &untimed : {std::vector<std::string>{"--device", "cpu"},
                                                  {"--check-only"},
                                                  {"--profile"},
                                                  {"--profile-csv", "a.csv"},
                                                  {"--trace-csv", "a.csv"}}) {
    std::vector<std::string> both = untimed;
    both.insert(both.end(), {"--iters", "7"});
    const std::string with = " cannot be combined with " + untimed[0] +
                             (untimed[0] == "--device" ? " cpu" : "") +
                             ", because launches are timed on a GPU only";
    CHECK(error_of(both) == "--iters" + with);
    both = untimed;
    both.push_back("--again");
    CHECK(error_of(both) == "--again" + with);
  }
}

TEST_CASE("options: the sizes that were typed are kept for messages") {
  CHECK(
      parse({"--batch", "2", "--causal", "--seqlen=48", "--splits", "3", "--seed", "4"}, kTakesAll)
          .sizes == "--batch 2 --seqlen 48 --splits 3");
}

TEST_CASE("options: the last of two values counts") {
  CHECK(parse({"--seqlen", "64", "--seqlen", "128"}).shape.seqlen_q == 128);
}

TEST_CASE("options: every word of each list, by its name") {
  for (std::size_t i = 0; i < reference::family_names().size(); i++)
    CHECK(parse({"--inputs", reference::family_names()[i]}).inputs ==
          static_cast<reference::Family>(i));
  for (const int head_dim : kTakesAll.head_dims)
    CHECK(parse({"--head-dim", std::to_string(head_dim)}, kTakesAll).shape.head_dim == head_dim);
  CHECK(parse({"--head-dim", "32"}, kTakesAll).shape.columns_of_v() == 32);
  CHECK(parse({"--head-dim-v", "80"}, kTakesAll).shape.columns_of_v() == 80);
  CHECK(parse({"--type", "fp16"}, kTakesAll).type == Type::kFp16);
  CHECK(parse({"--type", "bf16"}, kTakesAll).type == Type::kBf16);
  CHECK(parse({"--type", "fp8"}, kFp8).type == Type::kFp8);
  CHECK(parse({}, kFp8).type == Type::kFp8);
  CHECK(parse({"--layout", "bhnd"}, kTakesAll).layout == Layout::kBhnd);
  CHECK(parse({"--layout", "bnhd"}, kTakesAll).layout == Layout::kBnhd);
  CHECK(parse({"--layout", "interleaved"}, kTakesAll).layout == Layout::kInterleaved);
  CHECK(parse({"--layout", "packed", "--lengths", "1"}, kTakesAll).layout == Layout::kPacked);
  CHECK(parse({}, kTakesAll).shape.rope == Rope::kNone);
  CHECK(parse({"--rope", "halves"}, kTakesAll).shape.rope == Rope::kHalves);
  CHECK(parse({"--rope", "neighbours"}, kTakesAll).shape.rope == Rope::kNeighbours);
}

TEST_CASE("options: numbers up to the ends of their ranges") {
  CHECK(parse({"--batch", "1"}).shape.batch == 1);
  CHECK(parse({"--batch", "65535"}).shape.batch == 65535);
  CHECK(parse({"--seqlen", "1073741824"}).shape.seqlen_q == 1073741824);
  CHECK(parse({"--window", "2147483647"}, kTakesAll).shape.window == 2147483647);
  CHECK(parse({"--iters", "1000000"}).iters == 1000000);
  CHECK(parse({"--seed", "0"}).seed == 0);
  CHECK(parse({"--seed", "18446744073709551615"}).seed == 18446744073709551615u);
}

TEST_CASE("options: a number out of range, or none, is refused with the range") {
  const std::vector<std::pair<std::string, std::int64_t>> sizes = {
      {"--batch", 65535},       {"--heads", 65535},         {"--kv-heads", 65535},
      {"--seqlen", 1073741824}, {"--seqlen-k", 1073741824}, {"--page-size", 1073741824},
      {"--append", 1073741824}, {"--window", 2147483647},   {"--sinks", 2147483647}};
  for (const auto &[option, most] : sizes)
    for (const std::string &value :
         {std::to_string(most + 1), std::string("0"), std::string("-1"), std::string("+1"),
          std::string(" 1"), std::string("4294967297"), std::string("99999999999999999999"),
          std::string("x"), std::string(""), std::string("12x"), std::string("1e3"),
          std::string("0x10"), std::string("1.5"), std::string("1 ")}) {
      CAPTURE(option);
      CHECK(error_of({option, value}, kTakesAll) ==
            option + " " + value + ": must be a whole number from 1 to " + std::to_string(most));
    }
  CHECK(error_of({"--iters", "0"}) == "--iters 0: must be a whole number from 1 to 1000000");
  CHECK(error_of({"--iters", "1000001"}) ==
        "--iters 1000001: must be a whole number from 1 to 1000000");
  for (const std::string value : {"-1", "18446744073709551616", "random"})
    CHECK(error_of({"--seed", value}) ==
          "--seed " + value + ": must be a whole number from 0 to 18446744073709551615");
}

TEST_CASE("options: a number is read well whatever went wrong before") {
  errno = ERANGE;
  CHECK(parse({"--batch", "5"}).shape.batch == 5);
}

TEST_CASE("options: a path that is empty, or given twice, is refused") {
  for (const std::string option : {"--csv", "--profile-csv", "--trace-csv", "--blocks-csv",
                                   "--events-csv", "--streams-csv", "--trace"}) {
    CHECK(error_of({option, ""}) == option + " needs a file name; --help lists the options");
    CHECK(error_of({option, "--seqlen", "128"}) ==
          option + " needs a file name; --help lists the options");
  }
  CHECK(error_of({"--csv", "a.csv", "--profile-csv", "a.csv"}) ==
        "--profile-csv a.csv: must be another file than --csv's");
  CHECK(error_of({"--trace-csv", "a.csv", "--csv", "a.csv"}) ==
        "--trace-csv a.csv: must be another file than --csv's");
  CHECK(error_of({"--trace-csv", "a.csv", "--profile-csv", "a.csv"}) ==
        "--trace-csv a.csv: must be another file than --profile-csv's");
  CHECK(error_of({"--blocks-csv", "a.csv", "--csv", "a.csv"}) ==
        "--blocks-csv a.csv: must be another file than --csv's");
  CHECK(error_of({"--events-csv", "a.csv", "--csv", "a.csv"}) ==
        "--events-csv a.csv: must be another file than --csv's");
  CHECK(error_of({"--csv", "a.csv", "--profile-csv", "./a.csv"}) ==
        "--profile-csv ./a.csv: must be another file than --csv's");
  CHECK(error_of({"--trace", "a", "--csv", "a"}) == "--trace a: must be another file than --csv's");
  CHECK(error_of({"--trace-csv", "a.csv", "--profile-csv", "b.csv", "--csv", "c.csv"}) == "");
}

TEST_CASE("options: a word that is not on the list is refused with the list") {
  for (const std::string value : {"cuda", "", "GPU", "cp"})
    CHECK(error_of({"--device", value}) == "--device " + value + ": must be auto, gpu or cpu");
  for (const std::string value : {"32", "96", "064", "0", "64x"})
    CHECK(error_of({"--head-dim", value}) == "--head-dim " + value + ": must be 64 or 128");
  CHECK(error_of({"--inputs", "ones"}) ==
        "--inputs ones: must be normal, rising, one-hot, ends, equal-keys or huge");
  CHECK(error_of({"--head-dim", "64"}, kTakesAll) == "--head-dim 64: must be 32, 80 or 256");
  CHECK(error_of({"--head-dim-v", "64"}, kTakesAll) == "--head-dim-v 64: must be 32, 80 or 256");
  CHECK(error_of({"--head-dim-v", "64"}) ==
        "--head-dim-v: this step does not accept it; step 23 accepts it");
  CHECK(error_of({"--type", "fp8"}, kTakesAll) ==
        "--type fp8: must be fp16 or bf16; no step accepts it yet");
  CHECK(who_takes({{"23-strides", "sm_80", "", kTakesAll.takes},
                   {"41-handover", "sm_90a", "", kFp8.takes}},
                  "fp8") == "step 41 accepts it");
  CHECK(error_of({"--type", "fp32"}, kTakesAll) == "--type fp32: must be fp16 or bf16");
  CHECK(error_of({"--type", "fp16"}, kFp8) == "--type fp16: must be fp8");
  CHECK(error_of({"--layout", "thd"}, kTakesAll) ==
        "--layout thd: must be bhnd, bnhd, interleaved, packed, bnhd-32 or bnhd-128");
}

TEST_CASE("options: a backward pass takes no huge scores") {
  Step backward = kTakesAll;
  backward.gradients = true;
  CHECK(error_of({"--inputs", "rising"}, backward) == "");
  CHECK(error_of({"--inputs", "huge"}, backward) ==
        "--inputs huge: must be normal, rising, one-hot, ends or equal-keys");
  CHECK(error_of({"--inputs", "huge"}, kTakesAll) == "");
}

TEST_CASE("options: a value that is missing") {
  for (const std::string option :
       {"--device",     "--batch",  "--heads",     "--seqlen",      "--head-dim",
        "--iters",      "--inputs", "--csv",       "--profile-csv", "--trace-csv",
        "--blocks-csv", "--seed",   "--seqlen-k",  "--kv-heads",    "--window",
        "--type",       "--layout", "--page-size", "--lengths",     "--sinks",
        "--append",     "--rope",   "--rope-dim",  "--splits",      "--events-csv"})
    for (const std::string next : {"", "--causal"}) {
      std::vector<std::string> words = {"--check-only", option};
      if (!next.empty()) words.push_back(next);
      CHECK(error_of(words, kTakesAll) == option + " needs a " +
                                              (option.ends_with("csv") ? "file name" : "value") +
                                              "; --help lists the options");
    }
}

TEST_CASE("options: what is not an option is refused, by name") {
  CHECK(error_of({"--frobnicate"}) == "--frobnicate: no such option; --help lists the options");
  CHECK(error_of({"--seqlen", "64", "--frobnicate=3"}) ==
        "--frobnicate=3: no such option; --help lists the options");
  CHECK(error_of({"-x"}) == "-x: no such option; --help lists the options");
  CHECK(error_of({"512"}) == "512: not an option; --help lists the options");
  CHECK(error_of({"--seqlen", "64", "512", "--check-only"}) ==
        "512: not an option; --help lists the options");
  CHECK(error_of({"512", "--frobnicate"}) == "512: not an option; --help lists the options");
  CHECK(error_of({"--", "512"}) == "512: not an option; --help lists the options");
}

TEST_CASE("options: a word after one dash is refused, all of it by name") {
  CHECK(error_of({"-frobnicate", "64"}) == "-frobnicate: no such option; --help lists the options");
  CHECK(error_of({"--check-only", "-frobnicate"}) ==
        "-frobnicate: no such option; --help lists the options");
  CHECK(error_of({"--check-only"}) == "");  // the next command line is read from its beginning
}

TEST_CASE("options: a value for an option that takes none is refused") {
  for (const std::string option :
       {"--profile", "--check-only", "--causal", "--describe", "--help"}) {
    const std::string error = error_of({option + "=3"});
    CHECK(error.starts_with(option));
    CHECK(!contains(error, "no such option"));
  }
}

TEST_CASE("options: counting on a GPU is refused, and the option is named") {
  const std::string emulator_counts =
      " cannot be combined with --device gpu, because the emulator counts; leave --device out, or "
      "measure with `make counters`";
  CHECK(error_of({"--device", "gpu", "--profile"}) == "--profile" + emulator_counts);
  CHECK(error_of({"--profile", "--device", "gpu"}) == "--profile" + emulator_counts);
  CHECK(error_of({"--profile-csv", "a.csv", "--device", "gpu"}) ==
        "--profile-csv" + emulator_counts);
  CHECK(error_of({"--trace-csv", "a.csv", "--device", "gpu"}) == "--trace-csv" + emulator_counts);
  CHECK(error_of({"--blocks-csv", "a.csv", "--device", "gpu"}) == "--blocks-csv" + emulator_counts);
  CHECK(error_of({"--events-csv", "a.csv", "--device", "gpu"}) == "--events-csv" + emulator_counts);
  CHECK(error_of({"--streams-csv", "a.csv", "--device", "gpu"}) == "");  // it measures
  CHECK(error_of({"--trace", "a.json", "--device", "gpu"}) ==
        "--trace cannot be combined with --device gpu, because the emulator alone traces; leave "
        "--device out");
  CHECK(error_of({"--csv", "a.csv", "--device", "gpu"}) == "");
  CHECK(error_of({"--device", "cpu", "--profile"}) == "");
  CHECK(error_of({"--profile"}) == "");
}

TEST_CASE("options: messages are one line") {
  for (const std::vector<std::string> &arguments :
       std::vector<std::vector<std::string>>{{"--device", "x"},
                                             {"--batch", "x"},
                                             {"--inputs", "x"},
                                             {"--x"},
                                             {"x"},
                                             {"--csv"},
                                             {"--device", "gpu", "--profile"}}) {
    const std::string error = error_of(arguments);
    CHECK(error != "");
    CHECK(!contains(error, "\n"));
  }
}

TEST_CASE("options: --help lists every option that the step takes, with its defaults") {
  const std::vector<std::string> plain = {"--device auto|gpu|cpu",
                                          "--batch N",
                                          "--heads N",
                                          "--seqlen N",
                                          "--inputs FAMILY        normal|rising|one-hot|ends|"
                                          "equal-keys|huge\n",
                                          "--seed N",
                                          "--iters N",
                                          "--repeatable ",
                                          "--check-only ",
                                          "--profile ",
                                          "--csv FILE",
                                          "--profile-csv FILE",
                                          "--trace-csv FILE",
                                          "--blocks-csv FILE",
                                          "--events-csv FILE",
                                          "--streams-csv FILE",
                                          "--trace FILE",
                                          "--describe ",
                                          "--help "};
  const std::vector<std::string> beyond = {
      "--causal ",
      "--seqlen-k N",
      "--kv-heads N",
      "--window N",
      "--type fp16|bf16",
      "--layout bhnd|bnhd|interleaved|packed|bnhd-32|bnhd-128\n",
      "--page-size N",
      "--lengths LIST",
      "--sinks N",
      "--append N",
      "--rope halves|neighbours\n",
      "--rope-dim N",
      "--splits N|auto",
      "--window-size LEFT:RIGHT\n",
      "--scale X",
      "--softcap X",
      "--alibi ",
      "--sink-logits ",
      "--garbage "};
  const std::string help = help_text("./step-02", kStep), all = help_text("./step-23", kTakesAll);
  CHECK(help.starts_with("usage: ./step-02 [options]\n"));
  CHECK(all.starts_with("usage: ./step-23 [options]\n"));
  for (const std::string &option : plain) {
    CAPTURE(option);
    CHECK(contains(help, "\n  " + option));
    CHECK(contains(all, "\n  " + option));
  }
  for (const std::string &option : beyond) {
    CAPTURE(option);
    CHECK(!contains(help, option));
    CHECK(contains(all, "\n  " + option));
  }
  CHECK(contains(help, "\n  --head-dim 64|128      default 64 on the emulator, 128 on a GPU\n"));
  CHECK(contains(all, "\n  --head-dim 32|80|256   default 32 on the emulator, 256 on a GPU\n"));
  CHECK(contains(help, "\n  --batch N              default 1 on the emulator, 12 on a GPU\n"));
  CHECK(contains(help, "\n  --seqlen N             a multiple of " + std::to_string(kTile) +
                           "; default 256 on the emulator, 8192 on a GPU\n"));
  CHECK(contains(all, "\n  --seqlen N             default 256 on the emulator"));
  CHECK(contains(help, "\nExit status: 0 passed; "));
}

TEST_CASE("options: a step in fp8 takes no other type") {
  CHECK(contains(help_text("./step-41", kFp8),
                 "\n  --type fp8             of the elements of Q, K and V: e4m3,"));
  CHECK(contains(describe_text(kFp8), "\ntypes fp8\n"));
  CHECK(contains(describe_text(kFp8), "\ntakes --causal --type fp8\n"));
}

TEST_CASE("options: a step that decodes has one query per head by default, and a long cache") {
  Step decodes = kTakesAll;
  decodes.decodes = true;
  CHECK(contains(describe_text(decodes),
                 "\ngpu batch=16 heads=64 seqlen=1 head-dim=256 seqlen-k=65536 kv-heads=8\n"
                 "emulator batch=1 heads=8 seqlen=1 head-dim=32 seqlen-k=256 kv-heads=2\n"));
  const std::string help = help_text("./step-26", decodes);
  CHECK(contains(help, "\n  --seqlen N             default 1\n"));
  CHECK(contains(help,
                 "of K and V; default: as --seqlen; without --seqlen\n"
                 "                         256 on the emulator, 65536 on a GPU\n"));
  CHECK(contains(help,
                 "of K and V; default: as --heads; without --heads\n"
                 "                         2 on the emulator, 8 on a GPU\n"));
}

TEST_CASE("options: --describe says all that scripts ask for, a line for each thing") {
  CHECK(
      describe_text(kStep) ==
      "step 02-loop-inverted\n"
      "needs sm_75\n"
      "takes\n"
      "tile 48\n"
      "page-rows 1\n"
      "head-dims 64 128\n"
      "types fp16\n"
      "inputs normal rising one-hot ends equal-keys huge\n"
      "writes O\n"
      "bits same\n"
      "gpu batch=12 heads=16 seqlen=8192 head-dim=128\n"
      "emulator batch=1 heads=2 seqlen=256 head-dim=64\n"
      "csv "
      "step,device,batch,heads,seqlen,head_dim,options,operations,kv_bytes,median_ms,min_ms,"
      "sm_clocks,tflops,rms_error\n"
      "profile-csv step,source,batch,heads,seqlen,head_dim,options,line,counter,value\n"
      "trace-csv line,op,request,lane,address,bytes,bank,wavefront\n"
      "blocks-csv step,batch,heads,seqlen,head_dim,options,launch,block,x,y,z,mma\n"
      "events-csv step,batch,heads,seqlen,head_dim,options,launch,warpgroup,event,what,line,of,"
      "times,after\n"
      "streams-csv step,device,batch,heads,seqlen,head_dim,options,gpu,stream,what,line,peer,bytes,"
      "begin,end\n");
  const std::string all = describe_text(kTakesAll);
  CHECK(contains(all, "\ntakes " + std::string(kTakesAll.takes) + "\n"));
  CHECK(contains(all, "\ntypes fp16 bf16\n"));
  CHECK(contains(all, "\nhead-dims 32 80 256\n"));
}

TEST_CASE("options: --rank is one of --gpus, and names the file through which the ranks meet") {
  const Options options = parse({"--gpus", "4", "--rank", "3:/tmp/a:b"}, kShared);
  CHECK(options.rank == 3);
  CHECK(options.id_file == "/tmp/a:b");
  CHECK(departures(with_defaults(options, kShared, true), kShared) == "gpus=4 rank=3");
  CHECK(parse({}, kShared).rank == -1);
  for (const std::string value : {"1", "1:", ":file", "-1:file", "64:file", "one:file"})
    CHECK(error_of({"--rank", value}, kShared) ==
          "--rank " + value + ": must be R:FILE, R a whole number from 0 to 63");
  CHECK(error_of({"--rank", "0:file", "--link", "copies"}, kShared) ==
        "--link copies cannot be combined with --rank, because a process cannot copy from the "
        "memory of another one's GPU");
  CHECK(error_of({"--rank", "0:file", "--streams-csv", "a.csv"}, kShared) ==
        "--streams-csv cannot be combined with --rank, because no clock is common to the "
        "processes");
  CHECK(error_of({"--rank", "0:file"}) ==
        "--rank: this step does not accept it; step 71 accepts it");
  CHECK(contains(help_text("./step-71", kShared), "--rank R:FILE"));
  CHECK(!contains(help_text("./step-02", kStep), "--rank"));
}
