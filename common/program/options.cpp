// SPDX-License-Identifier: MIT
#include "common/program/options.h"

#include <getopt.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <functional>
#include <optional>

#include "common/program/shape.h"
#include "common/program/text.h"

namespace {

// The most rows of a sequence or a page: a kernel that rounds them up to its tile stays within an
// int.
constexpr int kMostRows = 1 << 30;
// The most blocks along a grid's y and z.
constexpr int kMostBlocks = 65535;

const std::vector<std::string> kTypes = {"fp16", "bf16", "fp8"};
const std::vector<std::string> kLayouts = {"bhnd",   "bnhd",    "interleaved",
                                           "packed", "bnhd-32", "bnhd-128"};
const std::vector<std::string> kDevices = {"auto", "gpu", "cpu"};
const std::vector<std::string> kLinks = {"nccl", "copies"};
// A machine's GPUs, and the multiprocessors of one that kernels may leave to NCCL.
constexpr int kMostGpus = 64, kMostLeft = 64;

/// "auto, gpu or cpu".
std::string one_of(std::vector<std::string> words) {
  const std::string last = words.back();
  words.pop_back();
  return words.empty() ? last : join(words, ", ") + " or " + last;
}

std::vector<std::string> head_dim_names(const Step &step) {
  std::vector<std::string> names;
  for (const int head_dim : step.head_dims) names.push_back(std::to_string(head_dim));
  return names;
}

/// The families of inputs that a step takes: the fp32 log-sum-exp of a backward pass cannot hold the scores of `huge`.
std::vector<std::string> families_of(const Step &step) {
  std::vector<std::string> families = reference::family_names();
  if (step.gradients) families.pop_back();
  return families;
}

/// The types that a step accepts, the first of them by default: "--type" is all but fp8, "--type
/// fp8" that alone.
std::vector<std::string> types_of(const Step &step) {
  if (takes(step.takes, "fp8")) return {"fp8"};
  if (takes(step.takes, "--type")) return {"fp16", "bf16"};
  return {"fp16"};
}

/// A number with as few digits as it takes to read it back: "0.05".
std::string shortest(float value) {
  char text[32];
  const std::to_chars_result end = std::to_chars(text, text + sizeof text, value);
  return {text, end.ptr};
}

int index_of(const std::string &word, const std::vector<std::string> &words) {
  return static_cast<int>(std::find(words.begin(), words.end(), word) - words.begin());
}

/// The index of a word in a list, or a UsageError that lists them.
int choose(const std::string &option, const std::string &text,
           const std::vector<std::string> &words, const std::string &hint = "") {
  const int index = index_of(text, words);
  if (index < static_cast<int>(words.size())) return index;
  throw UsageError(option + " " + text + ": must be " + one_of(words) + hint);
}

/// A whole number from `least` to `most`, or nothing.
std::optional<std::uint64_t> whole_number(const std::string &text, std::uint64_t least,
                                          std::uint64_t most) {
  errno = 0;
  char *end;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  const bool digits = text[0] >= '0' && text[0] <= '9';  // strtoull reads "-1" and " 1", too
  if (!digits || *end != '\0' || errno == ERANGE || value < least || value > most) return {};
  return value;
}

std::uint64_t number(const std::string &option, const std::string &text, std::uint64_t least,
                     std::uint64_t most, const std::string &or_word = "") {
  if (const auto value = whole_number(text, least, most)) return *value;
  throw UsageError(option + " " + text + ": must be " + or_word + "a whole number from " +
                   std::to_string(least) + " to " + std::to_string(most));
}

/// A number from `least` to `most`, written with digits.
float real_number(const std::string &option, const std::string &text, float least, float most) {
  char *end;
  const float value = std::strtof(text.c_str(), &end);
  const bool digits = (text[0] >= '0' && text[0] <= '9') || text[0] == '.';  // not " 1", inf, nan
  if (digits && *end == '\0' && value >= least && value <= most) return value;
  throw UsageError(option + " " + text + ": must be a number from " + shortest(least) + " to " +
                   shortest(most));
}

/// "128:0" is a window of 128 keys before a query's own and none after it; -1 is no limit.
void read_window_size(reference::Shape &shape, const std::string &option, const std::string &text) {
  const std::vector<std::string> parts = split(text, ":");
  const auto side = [&](const std::string &part) -> std::optional<int> {
    if (part == "-1") return -1;
    const auto keys = whole_number(part, 0, INT_MAX);
    return keys ? std::optional(static_cast<int>(*keys)) : std::nullopt;
  };
  const auto left = side(parts.front()), right = side(parts.back());
  if (!left || !right || parts.size() != 2)
    throw UsageError(option + " " + text +
                     ": must be LEFT:RIGHT, each -1 or a whole number from 0 to " +
                     std::to_string(INT_MAX));
  shape.window_left = *left;
  shape.window_right = *right;
}

/// "100,37:64" is 100 queries and keys of the first batch element, 37 and 64 of the second.
void read_lengths(reference::Shape &shape, const std::string &option, const std::string &text) {
  shape.lengths_q.clear(), shape.lengths_k.clear();
  for (const std::string &element : split(text, ",")) {
    const std::vector<std::string> parts = split(element, ":");
    const auto q = whole_number(parts.front(), 0, kMostRows);
    const auto k = whole_number(parts.back(), 0, kMostRows);
    if (!q || !k || parts.size() > 2)
      throw UsageError(
          option + " " + text +
          ": must be N or N:M for each batch element, with commas between, from 0 to " +
          std::to_string(kMostRows));
    shape.lengths_q.push_back(static_cast<int>(*q));
    shape.lengths_k.push_back(static_cast<int>(*k));
  }
}

/// "1:/tmp/id" is rank 1, which meets the others through this file.
void read_rank(Options &to, const std::string &option, const std::string &text) {
  const std::size_t colon = text.find(':');
  const auto rank = whole_number(text.substr(0, colon), 0, kMostGpus - 1);
  if (!rank || colon == std::string::npos || colon + 1 == text.size())
    throw UsageError(option + " " + text + ": must be R:FILE, R a whole number from 0 to " +
                     std::to_string(kMostGpus - 1));
  to.rank = static_cast<int>(*rank);
  to.id_file = text.substr(colon + 1);
}

/// An option, for the parser, for --help and for the column 'options' of the results.
struct Entry {
  std::string name;   // "seqlen"
  std::string value;  // what stands for its value in --help: "N"; "": it has none
  std::string help;   // a line, or several
  std::function<void(const std::string &option, const std::string &text)> read;
  std::function<std::string()> shown = {};  // its value, as the user would type it
  bool is_size = false;                     // a smaller one needs less memory
  bool beyond_plain = false;                // a step must accept it
  std::string plain = "";                   // the value that it has in the plain problem
  std::string goes_with = "";               // another option: a step that accepts it accepts this
};

Entry beyond(Entry entry, const std::string &plain = "") {
  entry.beyond_plain = true;
  entry.plain = plain;
  return entry;
}

/// What a step must accept; empty if every step accepts the option.
std::string needed(const Entry &entry) {
  return entry.beyond_plain ? "--" + (entry.goes_with.empty() ? entry.name : entry.goes_with) : "";
}

Entry count(const std::string &name, int &member, int most, const std::string &help) {
  return {name, "N", help, [&member, most](const std::string &option, const std::string &text) {
            member = static_cast<int>(number(option, text, 1, most));
          }};
}

Entry size(const std::string &name, int &member, int most, const std::string &help) {
  Entry entry = count(name, member, most, help);
  entry.shown = [&member] { return std::to_string(member); };
  entry.is_size = true;
  return entry;
}

Entry flag(const std::string &name, bool &member, const std::string &help) {
  return {name, "", help, [&member](const std::string &, const std::string &) { member = true; },
          [&member] { return member ? "yes" : ""; }};
}

/// One of some words, which stand for the values of an enumeration from `first` on.
template <class Enum>
Entry choice(const std::string &name, const std::vector<std::string> &words, Enum &member,
             const std::string &help, int first = 0) {
  const auto read = [&member, words, first](const std::string &option, const std::string &text) {
    member = static_cast<Enum>(first + choose(option, text, words));
  };
  const auto shown = [&member, words, first] {
    const int index = static_cast<int>(member) - first;
    return index < 0 ? "" : words[static_cast<std::size_t>(index)];
  };
  return {name, join(words, "|"), help, read, shown};
}

std::string lengths_text(const reference::Shape &shape) {
  std::string text;
  for (std::size_t b = 0; b < shape.lengths_q.size(); b++) {
    const int q = shape.lengths_q[b], k = shape.lengths_k[b];
    text += (b ? "," : "") + std::to_string(q) + (q == k ? "" : ":" + std::to_string(k));
  }
  return text;
}

/// What an option lacks that has no value.
std::string needs_value(const std::string &option, const std::string &value) {
  return option + " needs a " + (value == "FILE" ? "file name" : "value") +
         "; --help lists the options";
}

/// All options. What is read goes into `to`.
std::vector<Entry> option_table(const Step &step, const Ladder &ladder, Options &to) {
  const reference::Shape cpu = with_defaults({}, step, false).shape;
  const reference::Shape gpu = with_defaults({}, step, true).shape;
  const auto either = [](int on_cpu, int on_gpu) {
    const std::string text = std::to_string(on_cpu);
    return on_cpu == on_gpu ? text
                            : text + " on the emulator, " + std::to_string(on_gpu) + " on a GPU";
  };
  const auto defaults = [&](int on_cpu, int on_gpu) { return "default " + either(on_cpu, on_gpu); };
  const std::string multiple =
      step.tile > 1 ? "a multiple of " + std::to_string(step.tile) + "; " : "";
  const auto of_keys = [&](const std::string &option, int on_cpu, int on_gpu,
                           const std::string &otherwise) {
    return "of K and V; default: " +
           (step.decodes ? "as " + option + "; without " + option + "\n" + either(on_cpu, on_gpu)
                         : otherwise);
  };
  using Text = const std::string &;
  reference::Shape &shape = to.shape;
  const auto read_head_dim = [&shape, &step](Text option, Text text) {
    shape.head_dim = step.head_dims[choose(option, text, head_dim_names(step))];
  };
  const auto read_type = [&to, &step, &ladder](Text option, Text text) {
    choose(option, text, types_of(step), text == "fp8" ? "; " + who_takes(ladder, text) : "");
    to.type = static_cast<Type>(index_of(text, kTypes));
  };
  const auto read_splits = [&to](Text option, Text text) {
    const bool is_auto = text == "auto";
    to.splits = is_auto ? 0 : static_cast<int>(number(option, text, 1, kMostBlocks, "auto or "));
  };
  const auto read_rope_dim = [&shape](Text option, Text text) {
    const auto columns = whole_number(text, 16, 256);
    if (!columns || *columns % 16)
      throw UsageError(option + " " + text + ": must be a multiple of 16, from 16 to the head dim");
    shape.rope_dim = static_cast<int>(*columns);
  };
  const std::vector<std::string> families = families_of(step);
  Entry inputs = choice("inputs", families, to.inputs, join(families, "|"));
  inputs.value = "FAMILY";  // the words need a line
  std::vector<Entry> table = {
      choice("device", kDevices, to.device,
             "the GPU if there is one, else the emulator; or insist"),
      size("batch", shape.batch, kMostBlocks, defaults(cpu.batch, gpu.batch)),
      size("heads", shape.heads, kMostBlocks, defaults(cpu.heads, gpu.heads)),
      size("seqlen", shape.seqlen_q, kMostRows, multiple + defaults(cpu.seqlen_q, gpu.seqlen_q)),
      {"head-dim",
       join(head_dim_names(step), "|"),
       defaults(cpu.head_dim, gpu.head_dim),
       read_head_dim,
       {},
       true},
      beyond({"head-dim-v", join(head_dim_names(step), "|"), "of V and O; default: that of Q and K",
              [&shape, &step](Text option, Text text) {
                shape.head_dim_v = step.head_dims[choose(option, text, head_dim_names(step))];
              },
              [&shape] { return std::to_string(shape.latent ? 0 : shape.head_dim_v); }},
             "0"),
      beyond(flag("latent", shape.latent,
                  "V is the first columns of K, all but 64, and no tensor of its own; always\n"
                  "so in a step that accepts this")),
      beyond(flag("causal", shape.causal,
                  "a query sees the keys up to its own position; the last of both are one")),
      beyond(size("seqlen-k", shape.seqlen_k, kMostRows,
                  multiple + of_keys("--seqlen", cpu.seqlen_k, gpu.seqlen_k, "that of Q")),
             std::to_string(shape.seqlen_q)),
      beyond(size("kv-heads", shape.kv_heads, kMostBlocks,
                  "a divisor of --heads; " + of_keys("--heads", cpu.kv_heads, gpu.kv_heads, "all")),
             std::to_string(shape.heads)),
      beyond(size("window", shape.window, INT_MAX,
                  "a query sees the last N keys up to its own position"),
             "0"),
      beyond(size("sinks", shape.sinks, INT_MAX, "with --window: it sees the first N keys, too"),
             "0"),
      beyond({"window-size", "LEFT:RIGHT",
              "a query sees the keys from LEFT before its own position to RIGHT after\n"
              "it, as FlashAttention's window_size; -1: no limit",
              [&shape](Text option, Text text) { read_window_size(shape, option, text); },
              [&shape] {
                return std::to_string(shape.window_left) + ":" + std::to_string(shape.window_right);
              }},
             "-1:-1"),
      beyond(
          {"scale", "X", "of the scores; default 1 / sqrt(head dim)",
           [&shape](Text option, Text text) { shape.scale = real_number(option, text, 0, 1e6f); },
           [&shape] { return shape.scale ? shortest(*shape.scale) : ""; }}),
      beyond({"softcap", "X", "scores between -X and X: X tanh(score / X)",
              [&shape](Text option, Text text) {
                shape.softcap = real_number(option, text, 0.001f, 1e6f);
              },
              [&shape] { return shortest(shape.softcap); }},
             "0"),
      beyond(flag("alibi", shape.alibi,
                  "scores fall with the distance of query and key, at each head's slope")),
      beyond(flag("sink-logits", shape.sink_logits,
                  "each head has a sink: a logit, drawn from the seed, in the softmax's\n"
                  "denominator alone")),
      beyond({"type", join(types_of(step), "|"),
              types_of(step).front() == "fp8"
                  ? "of the elements of Q, K and V: e4m3, with a scale for each head; O is\n"
                    "bf16; default fp8"
                  : "of the elements of Q, K, V and O; default fp16",
              read_type, [&to] { return kTypes[static_cast<std::size_t>(to.type)]; }},
             "fp16"),
      beyond(choice("layout", kLayouts, to.layout,
                    "the order of batch, heads and seqlen in memory; interleaved: as bnhd,\n"
                    "with the heads of Q, K and V side by side; packed: as bnhd, the\n"
                    "sequences of --lengths without a gap between; bnhd-32, bnhd-128: as\n"
                    "bnhd, with V's rows aligned to 32 or 128 bytes, not 16; default bhnd"),
             "bhnd"),
      beyond(size("page-size", to.page_size, kMostRows,
                  "K and V in pages of N rows, in an order drawn from the seed"),
             "0"),
      beyond({"lengths", "LIST",
              "a length for each batch element: 100,37; or of its queries and of its\n"
              "keys: 1:100,1:37; default: full",
              [&shape](Text option, Text text) { read_lengths(shape, option, text); },
              [&shape] { return lengths_text(shape); }, true}),
      beyond(size("append", shape.seqlen_new, kMostRows,
                  "K and V are a cache that lacks each sequence's last N keys: they come\n"
                  "beside it, and the step stores them in it"),
             "0"),
      beyond(choice("rope", rope_names(), shape.rope,
                    "rotary embedding of Q and K; a pair is an element of each half of a\n"
                    "row, or two neighbours",
                    1)),
      beyond(
          {"rope-dim", "N", "with --rope: the first N columns turn, a multiple of 16; default: all",
           read_rope_dim, [&shape] { return std::to_string(shape.rope_dim); }, true},
          "0"),
      beyond({"splits", "N|auto", "share the keys among N blocks; default: the step decides",
              read_splits, [&to] { return std::to_string(to.splits); }, true},
             "0"),
      beyond(flag("garbage", to.garbage,
                  "first launch with lengths and pages of any numbers: nothing outside of the\n"
                  "tensors may be read or written")),
      beyond({"gpus", "N", "share the sequence among N GPUs; default 2",
              [&to](Text option, Text text) {
                to.gpus = static_cast<int>(number(option, text, 1, kMostGpus));
              },
              [&to] { return std::to_string(to.gpus); }, true},
             "0"),
      {"rank", "R:FILE",
       "this process has GPU R of --gpus alone, and each of the others has one, too;\n"
       "rank 0 creates FILE, through which they find each other",
       [&to](Text option, Text text) { read_rank(to, option, text); },
       [&to] { return to.rank < 0 ? "" : std::to_string(to.rank); }, false, true, "", "gpus"},
      beyond(choice("link", kLinks, to.link,
                    "who carries the bytes between GPUs: NCCL's kernels or the copy engines;\n"
                    "default nccl"),
             "nccl"),
      beyond({"leave-sms", "N", "multiprocessors that the kernel leaves to NCCL's; default 0",
              [&to](Text option, Text text) {
                to.leave_sms = static_cast<int>(number(option, text, 0, kMostLeft));
              },
              [&to] { return std::to_string(to.leave_sms); }},
             "0"),
      inputs,
      {"seed", "N", "draws the inputs and, on the emulator, the order of threads;\ndefault 1",
       [&to](Text option, Text text) { to.seed = number(option, text, 0, ULLONG_MAX); }},
      count("iters", to.iters, 1000000, "timed launches on a GPU; default: 3 to 20, by time"),
      flag("again", to.again,
           "time launches again for each line of standard input, their number, and\n"
           "append a row: `make variants-NN` alternates programs"),
      count("repeat", to.repeat, 1000000,
            "run N times more, on the emulator each with another order of threads, and\n"
            "compare the bits of what the runs write"),
      flag("repeatable", to.repeatable,
           "on the emulator blocks take turns that the seed draws: the same seed, the\n"
           "same run; on one core"),
      count("sms", to.sms, 1000, "multiprocessors of the GPU that is emulated; default 16"),
      flag("check-only", to.check_only, "no timing, no counting"),
      flag("profile", to.profile, "count on the emulator, line by line")};
  for (int i = 0; i < kCsvKinds; i++)
    table.push_back({kCsv[i].option, "FILE", kCsv[i].help, [&to, i](Text option, Text text) {
                       if (text.empty()) throw UsageError(needs_value(option, "FILE"));
                       to.files[i] = text;
                     }});
  table.push_back(flag("describe", to.describe,
                       "what this step needs, takes and does by default, and a problem's\n"
                       "operations, for scripts"));
  table.push_back(flag("help", to.help, "this"));
  return table;
}

std::string csv_option(int kind) {
  return std::string("--") + kCsv[kind].option;
}

/// Refuses options that exclude each other.
void check_together(const Options &options) {
  const std::string counting = counting_option(options);
  if (!counting.empty() && counting != csv_option(kStreamsCsv) &&
      options.device == DeviceChoice::kGpu)
    throw UsageError(counting + " cannot be combined with --device gpu, because " +
                     (counting == csv_option(kTrace)
                          ? "the emulator alone traces; leave --device out"
                          : "the emulator counts; leave --device out, or measure with `make "
                            "counters`"));
  if (!counting.empty() && options.check_only)
    throw UsageError(counting + " cannot be combined with --check-only, which does not count");
  if (options.shape.rope_dim && options.shape.rope == Rope::kNone)
    throw UsageError("--rope-dim " + std::to_string(options.shape.rope_dim) + " needs --rope");
  if (options.shape.sinks && !options.shape.window)
    throw UsageError("--sinks " + std::to_string(options.shape.sinks) +
                     " needs --window: without one a query sees the first keys anyway");
  const bool window_size = options.shape.window_left >= 0 || options.shape.window_right >= 0;
  if (options.shape.window && window_size)
    throw UsageError("--window " + std::to_string(options.shape.window) +
                     " cannot be combined with --window-size, which says the same: LEFT is " +
                     std::to_string(options.shape.window - 1));
  if (options.layout == Layout::kPacked && options.shape.lengths_q.empty())
    throw UsageError("--layout packed needs --lengths, which says where a sequence ends");
  if (options.rank >= 0 && options.link == Link::kCopies)
    throw UsageError(
        "--link copies cannot be combined with --rank, because a process cannot copy from the "
        "memory of another one's GPU");
  if (options.rank >= 0 && !options.files[kStreamsCsv].empty())
    throw UsageError(
        "--streams-csv cannot be combined with --rank, because no clock is common to the "
        "processes");
  using reference::Family;
  if (const Family family = options.inputs;
      options.shape.rope != Rope::kNone &&
      (family == Family::kRising || family == Family::kEnds || family == Family::kHuge))
    throw UsageError("--inputs " + reference::family_names()[static_cast<int>(family)] +
                     ": must be normal, one-hot or equal-keys with --rope: the scores of others "
                     "depend on how a kernel rounds what it rotates");
  const std::string untimed = options.check_only                     ? "--check-only"
                              : options.device == DeviceChoice::kCpu ? "--device cpu"
                                                                     : counting;
  const std::string timed = options.iters ? "--iters" : options.again ? "--again" : "";
  if (!timed.empty() && !untimed.empty())
    throw UsageError(timed + " cannot be combined with " + untimed +
                     ", because launches are timed on a GPU only");
  for (int i = 0; i < kCsvKinds; i++)
    for (int j = 0; j < i; j++)
      if (same_file(options.files[i], options.files[j]))
        throw UsageError(csv_option(i) + " " + options.files[i] + ": must be another file than " +
                         csv_option(j) + "'s");
}

}  // namespace

const std::vector<std::string> &rope_names() {
  static const std::vector<std::string> names = {"halves", "neighbours"};
  return names;
}

std::string counting_option(const Options &options) {
  if (options.profile) return "--profile";
  for (int i = 0; i < kCsvKinds; i++)
    if (i != kResultCsv && !options.files[i].empty()) return csv_option(i);
  return "";
}

Options parse_options(int argc, char **argv, const Step &step, const Ladder &ladder) {
  Options options;
  options.type = static_cast<Type>(index_of(types_of(step).front(), kTypes));
  const std::vector<Entry> entries = option_table(step, ladder, options);
  constexpr int kFirst = 1000;  // beyond all characters, which getopt keeps for short options
  std::vector<option> table;
  for (const Entry &entry : entries)
    table.push_back({entry.name.c_str(), entry.value.empty() ? no_argument : required_argument,
                     nullptr, kFirst + static_cast<int>(table.size())});
  table.push_back({});

  opterr = 0;
  optind = 0;  // glibc begins anew, also in the middle of a word
  for (;;) {
    const std::string word = argv[std::min(std::max(optind, 1), argc - 1)];  // what is read next
    // '+' stops at the first word that is no option; ':' tells a missing value from a wrong option.
    const int key = getopt_long(argc, argv, "+:h", table.data(), nullptr);
    if (key == -1) break;
    if (key == 'h') {
      options.help = true;
    } else if (key == ':') {
      throw UsageError(needs_value(word, entries[optopt - kFirst].value));
    } else if (key < kFirst) {
      throw UsageError(word +
                       (optopt >= kFirst ? ": this option has no value" : ": no such option") +
                       "; --help lists the options");
    } else {
      const Entry &entry = entries[key - kFirst];
      const std::string name = "--" + entry.name;
      if (const std::string option = needed(entry); !option.empty() && !takes(step.takes, option))
        throw UsageError(name + ": this step does not accept it; " + who_takes(ladder, option));
      if (optarg && std::string(optarg).starts_with("--"))  // the next option
        throw UsageError(needs_value(name, entry.value));
      entry.read(name, optarg ? optarg : "");
      if (entry.is_size) options.sizes += (options.sizes.empty() ? "" : " ") + name + " " + optarg;
    }
  }
  if (optind < argc)
    throw UsageError(std::string(argv[optind]) + ": not an option; --help lists the options");
  check_together(options);
  return options;
}

std::string departures(const Options &options, const Step &step) {
  Options copy = options;
  std::vector<std::string> all;
  for (const Entry &entry : option_table(step, ladder(), copy))
    if (const std::string shown = entry.beyond_plain ? entry.shown() : ""; shown != entry.plain)
      all.push_back(entry.name + (entry.value.empty() ? "" : "=" + shown));
  return join(all, " ");
}

std::string help_text(const std::string &program, const Step &step) {
  std::string text = "usage: " + program +
                     " [options]\n"
                     "\n"
                     "Computes " +
                     (step.gradients ? "the gradients of attention, checks them"
                                     : "attention, checks the answer") +
                     ", and says how long it took (on a GPU)\n"
                     "or what it cost (on the emulator).\n"
                     "\n";
  constexpr std::size_t kColumn = 25;
  Options unread;
  for (const Entry &entry : option_table(step, ladder(), unread)) {
    if (const std::string option = needed(entry); !option.empty() && !takes(step.takes, option))
      continue;
    std::string left = "  --" + entry.name + (entry.value.empty() ? "" : " " + entry.value);
    if (left.size() >= kColumn) left += "\n" + std::string(kColumn, ' ');
    if (left.size() < kColumn) left.resize(kColumn, ' ');
    const std::vector<std::string> lines = split(entry.help, "\n");
    text += left + join(lines, "\n" + std::string(kColumn, ' ')) + "\n";
  }
  return text +
         "\n"
         "Exit status: 0 passed; 1 wrong answer, or the kernel failed; 2 bad arguments, a problem\n"
         "that this step does not accept, or output that cannot be written; 3 no such device, or\n"
         "out of memory.\n";
}

std::string describe_text(const Step &step) {
  const auto problem = [&](bool gpu) {
    const Options options = with_defaults({}, step, gpu);
    const reference::Shape &shape = options.shape;
    const std::string beyond = departures(options, step);
    return "batch=" + std::to_string(shape.batch) + " heads=" + std::to_string(shape.heads) +
           " seqlen=" + std::to_string(shape.seqlen_q) +
           " head-dim=" + std::to_string(shape.head_dim) + (beyond.empty() ? "" : " ") + beyond;
  };
  std::vector<std::pair<std::string, std::string>> lines = {
      {"step", step.name},
      {"needs", step.needs},
      {"takes", step.takes},
      {"tile", std::to_string(step.tile)},
      {"page-rows", std::to_string(step.page_rows)},
      {"head-dims", join(head_dim_names(step), " ")},
      {"types", join(types_of(step), " ")},
      {"inputs", join(families_of(step), " ")},
      {"writes", step.gradients    ? "dQ dK dV"
                 : step.writes_lse ? "O lse"
                                   : "O"},
      {"bits", step.same_bits ? "same" : "any"},
      {"gpu", problem(true)},
      {"emulator", problem(false)}};
  for (const auto &csv : kCsv)
    if (*csv.header) lines.emplace_back(csv.option, csv.header);
  std::string text;
  for (const auto &[name, value] : lines) text += name + (value.empty() ? "" : " ") + value + "\n";
  return text;
}
