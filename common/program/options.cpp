#include "common/program/options.h"

#include <getopt.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <vector>

namespace {

enum Key {
  kDevice = 1000,  // beyond all characters, which getopt keeps for short options
  kBatch,
  kHeads,
  kSeqlen,
  kHeadDim,
  kIters,
  kInputs,
  kVariant,
  kCheckOnly,
  kProfile,
  kProfileCsv,
  kTraceCsv,
  kCsv,
  kSeed,
  kHelp,
};

/// A whole number from `least` to `most`, or a UsageError that says so.
std::uint64_t number(const std::string &option, const char *text, std::uint64_t least,
                     std::uint64_t most) {
  errno = 0;
  char *end;
  const unsigned long long value = std::strtoull(text, &end, 10);
  const bool digits = *text >= '0' && *text <= '9';  // strtoull takes "-1" and " 1", too
  if (!digits || *end != '\0' || errno == ERANGE || value < least || value > most)
    throw UsageError(option + " " + text + ": a whole number from " + std::to_string(least) +
                     " to " + std::to_string(most) + " is allowed");
  return value;
}

/// The index of a word in a list, or a UsageError that lists them.
int choice(const std::string &option, const std::string &text,
           const std::vector<std::string> &allowed) {
  const auto found = std::find(allowed.begin(), allowed.end(), text);
  if (found != allowed.end()) return static_cast<int>(found - allowed.begin());
  std::string list;
  for (const std::string &word : allowed) list += (list.empty() ? "" : ", ") + word;
  throw UsageError(option + " " + text + ": allowed are " + list);
}

/// A file's path, or a UsageError if there is none.
std::string path(const std::string &option, const char *text) {
  if (*text == '\0') throw UsageError(option + " : the path of a file is allowed, not nothing");
  return text;
}

std::string join(const std::vector<std::string> &words) {
  std::string text;
  for (const std::string &word : words) text += (text.empty() ? "" : "|") + word;
  return text;
}

}  // namespace

Options parse_options(int argc, char **argv, const Step &step) {
  std::vector<option> table = {
      {"device", required_argument, nullptr, kDevice},
      {"batch", required_argument, nullptr, kBatch},
      {"heads", required_argument, nullptr, kHeads},
      {"seqlen", required_argument, nullptr, kSeqlen},
      {"head-dim", required_argument, nullptr, kHeadDim},
      {"iters", required_argument, nullptr, kIters},
      {"inputs", required_argument, nullptr, kInputs},
      {"check-only", no_argument, nullptr, kCheckOnly},
      {"profile", no_argument, nullptr, kProfile},
      {"profile-csv", required_argument, nullptr, kProfileCsv},
      {"trace-csv", required_argument, nullptr, kTraceCsv},
      {"csv", required_argument, nullptr, kCsv},
      {"seed", required_argument, nullptr, kSeed},
      {"help", no_argument, nullptr, kHelp},
  };
  if (step.variant_option)
    table.push_back({step.variant_option, required_argument, nullptr, kVariant});
  table.push_back({});

  Options options;
  const auto positive = [](const std::string &name) {
    return static_cast<int>(number(name, optarg, 1, INT_MAX));
  };
  opterr = 0;
  optind = 0;  // glibc begins anew, also in the middle of a word
  for (;;) {
    const std::string word = argv[std::min(std::max(optind, 1), argc - 1)];  // what is read next
    // '+' stops at the first word that is no option; ':' tells a missing value from a wrong option.
    const int key = getopt_long(argc, argv, "+:h", table.data(), nullptr);
    if (key == -1) break;
    switch (key) {
      case kDevice:
        options.device =
            static_cast<DeviceChoice>(choice("--device", optarg, {"auto", "gpu", "cpu"}));
        break;
      case kBatch: options.batch = positive("--batch"); break;
      case kHeads: options.heads = positive("--heads"); break;
      case kSeqlen: options.seqlen = positive("--seqlen"); break;
      case kHeadDim:
        choice("--head-dim", optarg, {"64", "128"});
        options.head_dim = positive("--head-dim");
        break;
      case kIters: options.iters = static_cast<int>(number("--iters", optarg, 1, 1000000)); break;
      case kInputs:
        options.inputs =
            static_cast<reference::Family>(choice("--inputs", optarg, reference::family_names()));
        break;
      case kVariant:
        options.variant = choice(std::string("--") + step.variant_option, optarg,
                                 {step.variants.begin(), step.variants.end()});
        break;
      case kCheckOnly: options.check_only = true; break;
      case kProfile: options.profile = true; break;
      case kProfileCsv: options.profile_csv = path("--profile-csv", optarg); break;
      case kTraceCsv: options.trace_csv = path("--trace-csv", optarg); break;
      case kCsv: options.csv = path("--csv", optarg); break;
      case kSeed: options.seed = number("--seed", optarg, 0, ULLONG_MAX); break;
      case 'h':
      case kHelp: options.help = true; break;
      case ':': throw UsageError(word + ": a value is missing; --help lists the options");
      default:
        throw UsageError(word +
                         (optopt >= kDevice ? ": this option takes no value" : ": no such option") +
                         "; --help lists the options");
    }
  }
  if (optind < argc)
    throw UsageError(std::string(argv[optind]) + ": not an option; --help lists the options");
  const std::string counting = options.profile                ? "--profile"
                               : !options.profile_csv.empty() ? "--profile-csv"
                               : !options.trace_csv.empty()   ? "--trace-csv"
                                                              : "";
  if (!counting.empty() && options.device == DeviceChoice::kGpu)
    throw UsageError(counting +
                     " with --device gpu: the emulator counts; leave --device out or say cpu, or "
                     "measure with `make counters`");
  if (!counting.empty() && options.check_only)
    throw UsageError(counting + " with --check-only: one of the two is allowed; only one counts");
  const std::vector<std::pair<std::string, std::string>> files = {
      {"--csv", options.csv},
      {"--profile-csv", options.profile_csv},
      {"--trace-csv", options.trace_csv}};
  for (std::size_t i = 0; i < files.size(); i++)
    for (std::size_t j = 0; j < i; j++)
      if (!files[i].second.empty() && files[i].second == files[j].second)
        throw UsageError(files[i].first + " " + files[i].second + ": " + files[j].first +
                         " writes to it; another file is allowed");
  return options;
}

std::string help_text(const Step &step) {
  std::string text =
      "usage: ./step-" + std::string(step.name, 2) +
      " [options]\n"
      "\n"
      "Computes attention, checks the answer, and says how long it took (on a GPU)\n"
      "or what it cost (on the emulator).\n"
      "\n"
      "  --device auto|gpu|cpu  the GPU if there is one, else the emulator; or insist\n"
      "  --batch N              default 1 on the emulator, " +
      std::to_string(step.default_batch) +
      " on a GPU\n"
      "  --heads N              default 2 on the emulator, 16 on a GPU\n"
      "  --seqlen N             a multiple of " +
      std::to_string(step.tile) +
      "; default 256 on the emulator, 8192 on a GPU\n"
      "  --head-dim 64|128      default 64 on the emulator, 128 on a GPU\n"
      "  --inputs FAMILY        " +
      join(reference::family_names()) + "\n";
  if (step.variant_option) {
    std::string option = "  --" + std::string(step.variant_option) + " VARIANT";
    option.resize(25, ' ');
    text += option + join({step.variants.begin(), step.variants.end()}) + "\n";
  }
  text +=
      "  --seed N               draws the inputs and, on the emulator, the order of threads;\n"
      "                         default 1\n"
      "  --iters N              timed launches on a GPU; default: 3 to 20, by time\n"
      "  --check-only           no timing, no counting\n"
      "  --profile              count on the emulator, line by line\n"
      "  --csv FILE             append the result as a row\n"
      "  --profile-csv FILE     append the emulator's counts\n"
      "  --trace-csv FILE       append which bank each lane asks for, for the bank maps\n"
      "  --help                 this\n"
      "\n"
      "Exit status: 0 passed; 1 wrong answer, or the kernel failed; 2 bad arguments, or a shape\n"
      "this step does not take; 3 no such device, or out of memory.\n";
  return text;
}
