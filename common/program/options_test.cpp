#include "common/program/options.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <string>
#include <vector>

namespace {

constexpr int kTile = 48;

const Step kStep = {
    .name = "02-loop-inverted", .tile = kTile, .default_batch = 12, .launch = nullptr};

const Step kStepWithVariants = {.name = "03-bank-conflicts",
                                .tile = kTile,
                                .default_batch = 12,
                                .launch = nullptr,
                                .variant_option = "k-layout",
                                .variants = {"row-major", "padded", "swizzled"}};

Options parse(const std::vector<std::string> &arguments, const Step &step = kStep) {
  std::vector<std::string> all = {"./step"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  std::vector<char *> argv;
  for (std::string &argument : all) argv.push_back(argument.data());
  argv.push_back(nullptr);
  return parse_options(static_cast<int>(all.size()), argv.data(), step);
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

bool contains(const std::string &text, const std::string &part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("options: without arguments nothing is set but the seed") {
  const Options options = parse({});
  CHECK(options.device == DeviceChoice::kAuto);
  CHECK(!options.batch.has_value());
  CHECK(!options.heads.has_value());
  CHECK(!options.seqlen.has_value());
  CHECK(!options.head_dim.has_value());
  CHECK(!options.iters.has_value());
  CHECK(options.inputs == reference::Family::kNormal);
  CHECK(options.variant == 0);
  CHECK(options.seed == 1);
  CHECK(!options.check_only);
  CHECK(!options.profile);
  CHECK(!options.help);
  CHECK(options.csv == "");
  CHECK(options.profile_csv == "");
  CHECK(options.trace_csv == "");
}

TEST_CASE("options: every option, in both ways of writing it") {
  const auto check = [](const std::vector<std::string> &arguments) {
    const Options options = parse(arguments, kStepWithVariants);
    CHECK(options.device == DeviceChoice::kCpu);
    CHECK(options.batch == 2);
    CHECK(options.heads == 3);
    CHECK(options.seqlen == 512);
    CHECK(options.head_dim == 128);
    CHECK(options.iters == 7);
    CHECK(options.inputs == reference::Family::kOneHot);
    CHECK(options.variant == 2);
    CHECK(options.seed == 99);
    CHECK(options.profile);
    CHECK(!options.help);
    CHECK(options.csv == "a.csv");
    CHECK(options.profile_csv == "b.csv");
    CHECK(options.trace_csv == "c.csv");
  };
  check(
      {"--device",      "cpu",        "--batch",     "2",       "--heads",   "3",        "--seqlen",
       "512",           "--head-dim", "128",         "--iters", "7",         "--inputs", "one-hot",
       "--k-layout",    "swizzled",   "--seed",      "99",      "--profile", "--csv",    "a.csv",
       "--profile-csv", "b.csv",      "--trace-csv", "c.csv"});
  check({"--trace-csv=c.csv", "--profile-csv=b.csv", "--csv=a.csv", "--profile", "--seed=99",
         "--k-layout=swizzled", "--inputs=one-hot", "--iters=7", "--head-dim=128", "--seqlen=512",
         "--heads=3", "--batch=2", "--device=cpu"});
}

TEST_CASE("options: each option alone sets one thing") {
  CHECK(parse({"--profile"}).profile);
  CHECK(!parse({"--profile"}).check_only);
  CHECK(parse({"--check-only"}).check_only);
  CHECK(!parse({"--check-only"}).profile);
  CHECK(parse({"--help"}).help);
  CHECK(parse({"-h"}).help);
  CHECK(parse({"--batch", "5"}).batch == 5);
  CHECK(!parse({"--batch", "5"}).heads.has_value());
  CHECK(parse({"--head-dim", "64"}).head_dim == 64);
  CHECK(parse({"--device", "auto"}).device == DeviceChoice::kAuto);
  CHECK(parse({"--device", "gpu"}).device == DeviceChoice::kGpu);
}

TEST_CASE("options: what counts and what does not count exclude each other") {
  for (const std::vector<std::string> &counting : {std::vector<std::string>{"--profile"},
                                                   {"--profile-csv", "a.csv"},
                                                   {"--trace-csv", "a.csv"}}) {
    std::vector<std::string> both = counting;
    both.push_back("--check-only");
    CHECK(error_of(both) ==
          counting[0] + " with --check-only: one of the two is allowed; only one counts");
  }
}

TEST_CASE("options: the last of two values counts") {
  CHECK(parse({"--seqlen", "64", "--seqlen", "128"}).seqlen == 128);
}

TEST_CASE("options: every family and every variant by its name") {
  for (std::size_t i = 0; i < reference::family_names().size(); i++)
    CHECK(parse({"--inputs", reference::family_names()[i]}).inputs ==
          static_cast<reference::Family>(i));
  for (std::size_t i = 0; i < kStepWithVariants.variants.size(); i++)
    CHECK(parse({"--k-layout", kStepWithVariants.variants[i]}, kStepWithVariants).variant ==
          static_cast<int>(i));
}

TEST_CASE("options: numbers up to the ends of their ranges") {
  CHECK(parse({"--batch", "1"}).batch == 1);
  CHECK(parse({"--batch", "2147483647"}).batch == 2147483647);
  CHECK(parse({"--iters", "1000000"}).iters == 1000000);
  CHECK(parse({"--seed", "0"}).seed == 0);
  CHECK(parse({"--seed", "18446744073709551615"}).seed == 18446744073709551615u);
}

TEST_CASE("options: a number out of range, or none, is refused with the range") {
  for (const std::string option : {"--batch", "--heads", "--seqlen"})
    for (const std::string value : {"0", "-1", "+1", " 1", "2147483648", "99999999999999999999",
                                    "x", "", "12x", "1e3", "0x10", "1.5", "1 "}) {
      CAPTURE(option);
      CHECK(error_of({option, value}) ==
            option + " " + value + ": a whole number from 1 to 2147483647 is allowed");
    }
  CHECK(error_of({"--iters", "0"}) == "--iters 0: a whole number from 1 to 1000000 is allowed");
  CHECK(error_of({"--iters", "1000001"}) ==
        "--iters 1000001: a whole number from 1 to 1000000 is allowed");
  for (const std::string value : {"-1", "18446744073709551616", "random"})
    CHECK(error_of({"--seed", value}) ==
          "--seed " + value + ": a whole number from 0 to 18446744073709551615 is allowed");
}

TEST_CASE("options: a number is read well whatever went wrong before") {
  errno = ERANGE;
  CHECK(parse({"--batch", "5"}).batch == 5);
}

TEST_CASE("options: a path that is empty, or given twice, is refused") {
  for (const std::string option : {"--csv", "--profile-csv", "--trace-csv"})
    CHECK(error_of({option, ""}) == option + " : the path of a file is allowed, not nothing");
  CHECK(error_of({"--csv", "a.csv", "--profile-csv", "a.csv"}) ==
        "--profile-csv a.csv: --csv writes to it; another file is allowed");
  CHECK(error_of({"--trace-csv", "a.csv", "--csv", "a.csv"}) ==
        "--trace-csv a.csv: --csv writes to it; another file is allowed");
  CHECK(error_of({"--trace-csv", "a.csv", "--profile-csv", "a.csv"}) ==
        "--trace-csv a.csv: --profile-csv writes to it; another file is allowed");
  CHECK(error_of({"--trace-csv", "a.csv", "--profile-csv", "b.csv", "--csv", "c.csv"}) == "");
}

TEST_CASE("options: a word that is not on the list is refused with the list") {
  for (const std::string value : {"cuda", "", "GPU", "cp"})
    CHECK(error_of({"--device", value}) == "--device " + value + ": allowed are auto, gpu, cpu");
  for (const std::string value : {"32", "96", "064", "0", "64x"})
    CHECK(error_of({"--head-dim", value}) == "--head-dim " + value + ": allowed are 64, 128");
  CHECK(error_of({"--inputs", "ones"}) ==
        "--inputs ones: allowed are normal, rising, one-hot, ends, equal-keys, huge");
  CHECK(error_of({"--k-layout", "diagonal"}, kStepWithVariants) ==
        "--k-layout diagonal: allowed are row-major, padded, swizzled");
}

TEST_CASE("options: a value that is missing") {
  for (const std::string option :
       {"--device", "--batch", "--heads", "--seqlen", "--head-dim", "--iters", "--inputs", "--csv",
        "--profile-csv", "--trace-csv", "--seed"})
    CHECK(error_of({"--check-only", option}) ==
          option + ": a value is missing; --help lists the options");
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
  // An option of another step.
  CHECK(error_of({"--k-layout", "padded"}) ==
        "--k-layout: no such option; --help lists the options");
}

TEST_CASE("options: a word after one dash is refused, all of it by name") {
  CHECK(error_of({"-frobnicate", "64"}) == "-frobnicate: no such option; --help lists the options");
  CHECK(error_of({"--check-only", "-frobnicate"}) ==
        "-frobnicate: no such option; --help lists the options");
  CHECK(error_of({"--check-only"}) == "");  // the next command line is read from its beginning
}

TEST_CASE("options: a value for an option that takes none is refused") {
  for (const std::string option : {"--profile", "--check-only", "--help"}) {
    const std::string error = error_of({option + "=3"});
    CHECK(error.starts_with(option));
    CHECK(!contains(error, "no such option"));
  }
}

TEST_CASE("options: counting on a GPU is refused, and the option is named") {
  const std::string emulator_counts =
      " with --device gpu: the emulator counts; leave --device out or say cpu, or measure with "
      "`make counters`";
  CHECK(error_of({"--device", "gpu", "--profile"}) == "--profile" + emulator_counts);
  CHECK(error_of({"--profile", "--device", "gpu"}) == "--profile" + emulator_counts);
  CHECK(error_of({"--profile-csv", "a.csv", "--device", "gpu"}) ==
        "--profile-csv" + emulator_counts);
  CHECK(error_of({"--trace-csv", "a.csv", "--device", "gpu"}) == "--trace-csv" + emulator_counts);
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

TEST_CASE("options: --help lists every option, and what is particular to the step") {
  const std::string help = help_text(kStep);
  CHECK(help.starts_with("usage: ./step-02 "));
  for (const std::string option :
       {"--device auto|gpu|cpu", "--batch N", "--heads N", "--seqlen N", "--head-dim 64|128",
        "--inputs FAMILY", "--seed N", "--iters N", "--check-only", "--profile ", "--csv FILE",
        "--profile-csv FILE", "--trace-csv FILE", "--help"}) {
    CAPTURE(option);
    CHECK(contains(help, "\n  " + option));
  }
  CHECK(contains(help, "normal|rising|one-hot|ends|equal-keys|huge"));
  CHECK(contains(help, "default 1 on the emulator, 12 on a GPU"));
  CHECK(contains(help, "a multiple of " + std::to_string(kTile) + ";"));
  CHECK(!contains(help, "k-layout"));
  const std::string with_variants = help_text(kStepWithVariants);
  CHECK(with_variants.starts_with("usage: ./step-03 "));
  CHECK(contains(with_variants, "\n  --k-layout VARIANT "));
  CHECK(contains(with_variants, "row-major|padded|swizzled"));
}
