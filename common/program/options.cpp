#include "common/program/options.h"

#include <getopt.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <functional>
#include <sstream>

#include "common/program/csv.h"

namespace {

std::string join(const std::vector<std::string> &words, const std::string &between) {
  std::string text;
  for (const std::string &word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::vector<std::string> split(const std::string &text, char between) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, between);) parts.push_back(part);
  if (text.empty() || text.back() == between) parts.push_back("");
  return parts;
}

std::vector<std::string> head_dim_names(const Step &step) {
  std::vector<std::string> names;
  for (const int head_dim : step.head_dims) names.push_back(std::to_string(head_dim));
  return names;
}

/// The types that a step takes, the first of them by default: "--type" is all but fp8, "--type fp8" that
/// alone.
std::vector<std::string> types_of(const Step &step) {
  if (takes(step.takes, "fp8")) return {"fp8"};
  if (takes(step.takes, "--type")) return {"fp16", "bf16"};
  return {"fp16"};
}

Type type_named(const std::string &name) {
  const auto &names = type_names();
  return static_cast<Type>(std::find(names.begin(), names.end(), name) - names.begin());
}

/// A type that the step takes, or a UsageError that names those, and who takes fp8.
Type type_of(const Step &step, const Ladder &ladder, const std::string &option,
             const std::string &text) {
  const std::vector<std::string> types = types_of(step);
  if (std::find(types.begin(), types.end(), text) != types.end()) return type_named(text);
  throw UsageError(option + " " + text + ": allowed are " + join(types, ", ") +
                   (text == "fp8" ? "; " + who_takes(ladder, text) : ""));
}

/// A whole number from `least` to `most`, or nothing.
std::optional<std::uint64_t> whole_number(const std::string &text, std::uint64_t least,
                                          std::uint64_t most) {
  errno = 0;
  char *end;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  const bool digits = text[0] >= '0' && text[0] <= '9';  // strtoull takes "-1" and " 1", too
  if (!digits || *end != '\0' || errno == ERANGE || value < least || value > most) return {};
  return value;
}

std::uint64_t number(const std::string &option, const std::string &text, std::uint64_t least,
                     std::uint64_t most) {
  const std::optional<std::uint64_t> value = whole_number(text, least, most);
  if (!value)
    throw UsageError(option + " " + text + ": a whole number from " + std::to_string(least) +
                     " to " + std::to_string(most) + " is allowed");
  return *value;
}

int positive(const std::string &option, const std::string &text) {
  return static_cast<int>(number(option, text, 1, INT_MAX));
}

/// The index of a word in a list, or a UsageError that lists them.
int choice(const std::string &option, const std::string &text,
           const std::vector<std::string> &allowed) {
  const auto found = std::find(allowed.begin(), allowed.end(), text);
  if (found != allowed.end()) return static_cast<int>(found - allowed.begin());
  throw UsageError(option + " " + text + ": allowed are " + join(allowed, ", "));
}

/// "100,37:64" is 100 queries and keys of the first batch element, 37 and 64 of the second.
std::vector<Lengths> lengths(const std::string &option, const std::string &text) {
  std::vector<Lengths> list;
  for (const std::string &element : split(text, ',')) {
    const std::vector<std::string> parts = split(element, ':');
    const auto q = whole_number(parts.front(), 0, INT_MAX);
    const auto k = whole_number(parts.back(), 0, INT_MAX);
    if (!q || !k || parts.size() > 2)
      throw UsageError(
          option + " " + text +
          ": a length N or N:M for each batch element is allowed, with commas between");
    list.push_back({static_cast<int>(*q), static_cast<int>(*k)});
  }
  return list;
}

/// A number, or 0 for "auto".
int splits(const std::string &option, const std::string &text) {
  if (text == "auto") return 0;
  const auto value = whole_number(text, 1, INT_MAX);
  if (!value)
    throw UsageError(option + " " + text + ": auto or a whole number from 1 to " +
                     std::to_string(INT_MAX) + " is allowed");
  return static_cast<int>(*value);
}

/// A file's path, or a UsageError if there is none.
std::string path(const std::string &option, const std::string &text) {
  if (text.empty()) throw UsageError(option + " : the path of a file is allowed, not nothing");
  return text;
}

/// An option, for the parser and for --help.
struct Entry {
  std::string name;   // "seqlen"
  std::string value;  // what stands for its value in --help: "N"; "": it has none
  std::string help;   // a line, or several
  std::function<void(const std::string &option, const std::string &text)> read;
  bool beyond_plain = false;  // a step must take it
};

/// All options. What is read goes into `to`.
std::vector<Entry> option_table(const Step &step, const Ladder &ladder, Options &to) {
  const DefaultShape cpu = default_shape(step, false), gpu = default_shape(step, true);
  const auto defaults = [](int on_cpu, int on_gpu) {
    return "default " + std::to_string(on_cpu) + " on the emulator, " + std::to_string(on_gpu) +
           " on a GPU";
  };
  const std::string multiple =
      step.tile > 1 ? "a multiple of " + std::to_string(step.tile) + "; " : "";
  const std::string of_keys = "of K and V; default: ";
  const std::vector<std::string> devices = {"auto", "gpu", "cpu"};
  using Text = const std::string &;
  return {
      {"device", join(devices, "|"), "the GPU if there is one, else the emulator; or insist",
       [&to, devices](Text option, Text text) {
         to.device = static_cast<DeviceChoice>(choice(option, text, devices));
       }},
      {"batch", "N", defaults(cpu.batch, gpu.batch),
       [&to](Text option, Text text) { to.batch = positive(option, text); }},
      {"heads", "N", defaults(cpu.heads, gpu.heads),
       [&to](Text option, Text text) { to.heads = positive(option, text); }},
      {"seqlen", "N", multiple + defaults(cpu.seqlen_q, gpu.seqlen_q),
       [&to](Text option, Text text) { to.seqlen = positive(option, text); }},
      {"head-dim", join(head_dim_names(step), "|"), defaults(cpu.head_dim, gpu.head_dim),
       [&to, &step](Text option, Text text) {
         to.head_dim = step.head_dims[choice(option, text, head_dim_names(step))];
       }},
      {"causal", "", "a query sees the keys up to its own position; the last of both are one",
       [&to](Text, Text) { to.causal = true; }, true},
      {"seqlen-k", "N",
       multiple + of_keys +
           (step.decodes ? "--seqlen; without it " + std::to_string(cpu.seqlen_k) + " and " +
                               std::to_string(gpu.seqlen_k)
                         : "that of Q"),
       [&to](Text option, Text text) { to.seqlen_k = positive(option, text); }, true},
      {"kv-heads", "N",
       "a divisor of --heads; " + of_keys +
           (step.decodes ? "--heads; without it " + std::to_string(cpu.kv_heads) + " and " +
                               std::to_string(gpu.kv_heads)
                         : "all"),
       [&to](Text option, Text text) { to.kv_heads = positive(option, text); }, true},
      {"window", "N", "a query sees the last N keys up to its own position",
       [&to](Text option, Text text) { to.window = positive(option, text); }, true},
      {"sinks", "N", "with --window: it sees the first N keys, too",
       [&to](Text option, Text text) { to.sinks = positive(option, text); }, true},
      {"type", join(types_of(step), "|"),
       types_of(step).front() == "fp8"
           ? "of the elements of Q, K and V: e4m3, with a scale for each head; O is\nbf16; default "
             "fp8"
           : "of the elements of Q, K, V and O; default fp16",
       [&to, &step, &ladder](Text option, Text text) {
         to.type = type_of(step, ladder, option, text);
       },
       true},
      {"layout", join(layout_names(), "|"),
       "the order of batch, heads and seqlen in memory; interleaved: as bnhd,\n"
       "with the heads of Q, K and V side by side; packed: as bnhd, the\n"
       "sequences of --lengths without a gap between; default bhnd",
       [&to](Text option, Text text) {
         to.layout = static_cast<Layout>(choice(option, text, layout_names()));
       },
       true},
      {"page-size", "N", "K and V in pages of N rows, in an order drawn from the seed",
       [&to](Text option, Text text) { to.page_size = positive(option, text); }, true},
      {"lengths", "LIST",
       "a length for each batch element: 100,37; or of its queries and of its\n"
       "keys: 1:100,1:37; default: full",
       [&to](Text option, Text text) { to.lengths = lengths(option, text); }, true},
      {"append", "N",
       "K and V are a cache that lacks each sequence's last N keys: they come\n"
       "beside it, and the step stores them in it",
       [&to](Text option, Text text) { to.append = positive(option, text); }, true},
      {"rope", join(rope_names(), "|"),
       "rotary embedding of Q and K; what is a pair: an element of each half of\n"
       "a row, or two neighbours",
       [&to](Text option, Text text) {
         to.rope = static_cast<Rope>(1 + choice(option, text, rope_names()));
       },
       true},
      {"splits", "N|auto", "share the keys among N blocks; default: the step decides",
       [&to](Text option, Text text) { to.splits = splits(option, text); }, true},
      {"inputs", "FAMILY", join(reference::family_names(), "|"),
       [&to](Text option, Text text) {
         to.inputs =
             static_cast<reference::Family>(choice(option, text, reference::family_names()));
       }},
      {"seed", "N", "draws the inputs and, on the emulator, the order of threads;\ndefault 1",
       [&to](Text option, Text text) { to.seed = number(option, text, 0, ULLONG_MAX); }},
      {"iters", "N", "timed launches on a GPU; default: 3 to 20, by time",
       [&to](Text option, Text text) {
         to.iters = static_cast<int>(number(option, text, 1, 1000000));
       }},
      {"sms", "N", "multiprocessors of the GPU that is emulated; default 16",
       [&to](Text option, Text text) { to.sms = static_cast<int>(number(option, text, 1, 1000)); }},
      {"check-only", "", "no timing, no counting", [&to](Text, Text) { to.check_only = true; }},
      {"profile", "", "count on the emulator, line by line",
       [&to](Text, Text) { to.profile = true; }},
      {"csv", "FILE", "append the result as a row",
       [&to](Text option, Text text) { to.csv = path(option, text); }},
      {"profile-csv", "FILE", "append the emulator's counts",
       [&to](Text option, Text text) { to.profile_csv = path(option, text); }},
      {"trace-csv", "FILE", "append which bank each lane asks for, for the bank maps",
       [&to](Text option, Text text) { to.trace_csv = path(option, text); }},
      {"blocks-csv", "FILE", "append how many mma each block did, in the order of their start",
       [&to](Text option, Text text) { to.blocks_csv = path(option, text); }},
      {"events-csv", "FILE", "append what block 0's warpgroups did, and what had to come before it",
       [&to](Text option, Text text) { to.events_csv = path(option, text); }},
      {"describe", "", "what this step needs, takes and does by default, for scripts",
       [&to](Text, Text) { to.describe = true; }},
      {"help", "", "this", [&to](Text, Text) { to.help = true; }},
  };
}

/// Refuses options that exclude each other.
void check_together(const Options &options) {
  const std::string counting = options.profile                ? "--profile"
                               : !options.profile_csv.empty() ? "--profile-csv"
                               : !options.trace_csv.empty()   ? "--trace-csv"
                               : !options.blocks_csv.empty()  ? "--blocks-csv"
                               : !options.events_csv.empty()  ? "--events-csv"
                                                              : "";
  if (!counting.empty() && options.device == DeviceChoice::kGpu)
    throw UsageError(counting +
                     " with --device gpu: the emulator counts; leave --device out or say cpu, or "
                     "measure with `make counters`");
  if (!counting.empty() && options.check_only)
    throw UsageError(counting + " with --check-only: one of the two is allowed; only one counts");
  if (options.sinks && !options.window)
    throw UsageError("--sinks " + std::to_string(options.sinks) +
                     ": with --window only; without one a query sees the first keys anyway");
  if (options.layout == Layout::kPacked && options.lengths.empty())
    throw UsageError("--layout packed: with --lengths only, which says where a sequence ends");
  using reference::Family;
  if (const Family family = options.inputs;
      options.rope != Rope::kNone &&
      (family == Family::kRising || family == Family::kEnds || family == Family::kHuge))
    throw UsageError("--inputs " + reference::family_names()[static_cast<int>(family)] +
                     ": with --rope normal, one-hot and equal-keys are allowed: these scores hang "
                     "on how a kernel rounds what it rotates");
  const std::string untimed = options.check_only                     ? "--check-only"
                              : options.device == DeviceChoice::kCpu ? "--device cpu"
                                                                     : counting;
  if (options.iters && !untimed.empty())
    throw UsageError("--iters with " + untimed +
                     ": launches are timed on a GPU only; one of the two is allowed");
  const std::vector<std::pair<std::string, std::string>> files = {
      {"--csv", options.csv},
      {"--profile-csv", options.profile_csv},
      {"--trace-csv", options.trace_csv},
      {"--blocks-csv", options.blocks_csv},
      {"--events-csv", options.events_csv}};
  for (std::size_t i = 0; i < files.size(); i++)
    for (std::size_t j = 0; j < i; j++)
      if (same_file(files[i].second, files[j].second))
        throw UsageError(files[i].first + " " + files[i].second + ": " + files[j].first +
                         " writes to it; another file is allowed");
}

}  // namespace

const std::vector<std::string> &type_names() {
  static const std::vector<std::string> names = {"fp16", "bf16", "fp8"};
  return names;
}

const std::vector<std::string> &layout_names() {
  static const std::vector<std::string> names = {"bhnd", "bnhd", "interleaved", "packed"};
  return names;
}

const std::vector<std::string> &rope_names() {
  static const std::vector<std::string> names = {"halves", "neighbours"};
  return names;
}

DefaultShape default_shape(const Step &step, bool gpu) {
  const auto &dims = step.head_dims;
  const bool has_128 = std::find(dims.begin(), dims.end(), 128) != dims.end();
  const int head_dim = !gpu ? dims.front() : has_128 ? 128 : dims.back();
  if (step.decodes)
    return gpu ? DefaultShape{step.default_batch, 64, 8, 1, 65536, head_dim}
               : DefaultShape{1, 8, 2, 1, 256, head_dim};
  return gpu ? DefaultShape{step.default_batch, 16, 16, 8192, 8192, head_dim}
             : DefaultShape{1, 2, 2, 256, 256, head_dim};
}

Options parse_options(int argc, char **argv, const Step &step, const Ladder &ladder) {
  Options options;
  options.type = type_named(types_of(step).front());
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
      throw UsageError(word + ": a value is missing; --help lists the options");
    } else if (key < kFirst) {
      throw UsageError(word +
                       (optopt >= kFirst ? ": this option takes no value" : ": no such option") +
                       "; --help lists the options");
    } else {
      const Entry &entry = entries[key - kFirst];
      const std::string name = "--" + entry.name;
      if (entry.beyond_plain && !takes(step.takes, name))
        throw UsageError(name + ": this step does not take it; " + who_takes(ladder, name));
      entry.read(name, optarg ? optarg : "");
    }
  }
  if (optind < argc)
    throw UsageError(std::string(argv[optind]) + ": not an option; --help lists the options");
  check_together(options);
  return options;
}

std::string help_text(const std::string &program, const Step &step) {
  std::string text = "usage: " + program +
                     " [options]\n"
                     "\n"
                     "Computes attention, checks the answer, and says how long it took (on a GPU)\n"
                     "or what it cost (on the emulator).\n"
                     "\n";
  constexpr std::size_t kColumn = 25;
  Options unread;
  for (const Entry &entry : option_table(step, ladder(), unread)) {
    if (entry.beyond_plain && !takes(step.takes, "--" + entry.name)) continue;
    std::string left = "  --" + entry.name + (entry.value.empty() ? "" : " " + entry.value);
    if (left.size() >= kColumn) left += "\n" + std::string(kColumn, ' ');
    if (left.size() < kColumn) left.resize(kColumn, ' ');
    const std::vector<std::string> lines = split(entry.help, '\n');
    text += left + join(lines, "\n" + std::string(kColumn, ' ')) + "\n";
  }
  return text +
         "\n"
         "Exit status: 0 passed; 1 wrong answer, or the kernel failed; 2 bad arguments, a shape\n"
         "this step does not take, or output that cannot be written; 3 no such device, or out of\n"
         "memory.\n";
}

std::string describe_text(const Step &step) {
  const auto shape = [&](bool gpu) {
    const DefaultShape by_default = default_shape(step, gpu);
    return "batch=" + std::to_string(by_default.batch) +
           " heads=" + std::to_string(by_default.heads) +
           " seqlen=" + std::to_string(by_default.seqlen_q) +
           " head-dim=" + std::to_string(by_default.head_dim) +
           (step.decodes ? " kv-heads=" + std::to_string(by_default.kv_heads) +
                               " seqlen-k=" + std::to_string(by_default.seqlen_k)
                         : "");
  };
  const std::vector<std::pair<std::string, std::string>> lines = {
      {"step", step.name},
      {"needs", step.needs},
      {"takes", step.takes},
      {"tile", std::to_string(step.tile)},
      {"head-dims", join(head_dim_names(step), " ")},
      {"types", join(types_of(step), " ")},
      {"inputs", join(reference::family_names(), " ")},
      {"gpu", shape(true)},
      {"emulator", shape(false)},
      {"csv", kCsvHeader},
      {"profile-csv", kProfileCsvHeader},
      {"trace-csv", kTraceCsvHeader},
      {"blocks-csv", kBlocksCsvHeader},
      {"events-csv", kEventsCsvHeader}};
  std::string text;
  for (const auto &[name, value] : lines) text += name + (value.empty() ? "" : " ") + value + "\n";
  return text;
}
