// SPDX-License-Identifier: MIT
#include "common/program/report.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "common/emulator/sites.h"

std::string format(const char *pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

namespace {

/// What the requests of a kind cost, in total.
void print_total(const emulator::KindInfo &kind, const emulator::Counts &total) {
  const std::uint64_t requests = total[kind.requests], cost = total[kind.cost];
  if (requests == 0) return;
  std::printf("  %-14s %12llu requests %13llu %s, %.2f per request", kind.in_totals,
              static_cast<unsigned long long>(requests), static_cast<unsigned long long>(cost),
              kind.shared ? "wavefronts" : "sectors   ",
              static_cast<double>(cost) / static_cast<double>(requests));
  if (kind.shared)
    std::printf(" (%.1fx the ideal)",
                static_cast<double>(cost) / static_cast<double>(total[kind.ideal]));
  std::printf("\n");
}

/// A line of source, without its indentation, if the file can be read from here.
std::string source_text(const emulator::Line &line) {
  std::ifstream file(line.file);
  std::string text;
  for (unsigned i = 0; i < line.line; i++)
    if (!std::getline(file, text)) return "";
  text.erase(0, text.find_first_not_of(' '));
  return text.substr(0, 90);
}

/// "batch,heads,seqlen,head_dim,options".
std::string problem_fields(const Result &result) {
  const reference::Shape &shape = result.shape;
  const bool list = result.options.find(',') != std::string::npos;
  return std::to_string(shape.batch) + "," + std::to_string(shape.heads) + "," +
         std::to_string(shape.seqlen_q) + "," + std::to_string(shape.head_dim) + "," +
         (list ? "\"" + result.options + "\"" : result.options);
}

std::vector<std::string> profile_rows(const Result &result, const emulator::Profile &profile) {
  using namespace emulator;
  const std::string prefix = result.step + ",emulator," + problem_fields(result) + ",";
  std::vector<std::string> rows;
  const auto add = [&](const std::string &line, const std::string &counter, std::uint64_t value) {
    rows.push_back(prefix + line + ",\"" + counter + "\"," + std::to_string(value));
  };
  const Counts total = profile.total();
  for (int i = 0; i < kCounters; i++)
    if (const auto counter = static_cast<Counter>(i); total[i] || !is_optional(counter))
      add("0", name(counter), total[i]);
  add("0", "shared wavefronts, ideal",
      total[kSharedLoadIdeal] + total[kSharedStoreIdeal] + total[kStmatrixIdeal] +
          total[kCopyIdeal] + total[kWgmmaWavefronts]);
  add("0", "global bytes read", 32 * total[kGlobalLoadSectors]);
  add("0", "global bytes written", 32 * total[kGlobalStoreSectors]);
  add("0", "unique global bytes read", profile.unique_read_bytes);
  add("0", "unique global bytes written", profile.unique_written_bytes);
  std::uint64_t most = 0, all = 0;
  for (const auto &[link, bytes] : profile.link_bytes) most = std::max(most, bytes), all += bytes;
  if (all) add("0", "bytes of the busiest link", most), add("0", "bytes of all links", all);
  for (const auto &[line, counts] : profile.lines)
    for (int i = 0; i < kCounters; i++)
      if (counts[i]) add(describe(line), name(static_cast<Counter>(i)), counts[i]);
  return rows;
}

std::vector<std::string> trace_rows(const emulator::Profile &profile) {
  std::vector<std::string> rows;
  const auto operation = [](emulator::Kind kind) {
    switch (kind) {
      case emulator::Kind::kSharedStore:
      case emulator::Kind::kStmatrix: return ",store,";
      case emulator::Kind::kLdmatrix: return ",ldmatrix,";
      case emulator::Kind::kCopy: return ",cp.async,";
      default: return ",load,";
    }
  };
  for (const emulator::TraceRow &row : profile.trace)
    rows.push_back(std::to_string(row.line.line) + operation(row.kind) +
                   std::to_string(row.request) + "," + std::to_string(row.lane) + "," +
                   std::to_string(row.address) + "," + std::to_string(row.bytes) + "," +
                   std::to_string(row.address / 4 % 32) + "," + std::to_string(row.wavefront));
  return rows;
}

std::vector<std::string> block_rows(const Result &result, const emulator::Profile &profile) {
  std::vector<std::string> rows;
  for (const emulator::BlockRow &row : profile.blocks) {
    rows.push_back(result.step + "," + problem_fields(result));
    for (const std::uint64_t value : {std::uint64_t(row.launch), row.number, std::uint64_t{row.x},
                                      std::uint64_t{row.y}, std::uint64_t{row.z}, row.mma})
      rows.back() += "," + std::to_string(value);
  }
  return rows;
}

std::vector<std::string> event_rows(const Result &result, const emulator::Profile &profile) {
  std::vector<std::string> rows;
  for (const emulator::EventRow &row : profile.events) {
    std::string after;
    for (const emulator::EventRow::Other &other : row.after)
      after += (after.empty() ? "" : " ") + std::to_string(other.warpgroup) + ":" +
               std::to_string(other.number);
    rows.push_back(result.step + "," + problem_fields(result) + "," + std::to_string(row.launch) +
                   "," + std::to_string(row.warpgroup) + "," + std::to_string(row.number) + "," +
                   row.what + "," + std::to_string(row.line.line) + "," +
                   (row.of < 0 ? "" : std::to_string(row.of)) + "," + std::to_string(row.times) +
                   "," + after);
  }
  return rows;
}

std::vector<std::string> stream_rows(const Result &result, const emulator::Profile &profile) {
  std::vector<std::string> rows;
  for (const emulator::TraceSlice &slice : profile.slices)
    if (slice.device >= 0)
      rows.push_back(result.step + ",\"" + result.device + "\"," + problem_fields(result) + "," +
                     std::to_string(slice.device) + "," + std::to_string(slice.track / 2) + "," +
                     slice.what + "," + (slice.line.line ? emulator::describe(slice.line) : "") +
                     "," + (slice.peer < 0 ? "" : std::to_string(slice.peer)) + "," +
                     std::to_string(slice.bytes) + "," + std::to_string(slice.begin) + "," +
                     std::to_string(slice.end));
  return rows;
}

std::string result_row(const Result &result) {
  const auto number = [](const std::optional<double> &value) {
    return value ? format("%.6g", *value) : std::string();
  };
  return result.step + ",\"" + result.device + "\"," + problem_fields(result) + "," +
         format("%.0f", result.operations) + "," + format("%.0f", result.kv_bytes) + "," +
         number(result.median_ms) + "," + number(result.min_ms) + "," + number(result.sm_clocks) +
         "," + number(result.tflops) + "," + format("%.4g", result.rms_error);
}

}  // namespace

std::string one_line(const std::string &text) {
  std::string line;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\x%02x", code);
    line += c == '\n' ? "\\n" : code < 0x20 || code == 0x7f ? escaped : std::string(1, c);
  }
  return line;
}

namespace {

/// What is wrong with an output.
void print_wrong(const reference::Verdict &verdict, const std::string &name, std::size_t strays) {
  if (verdict.not_finite) std::printf("         %zu elements are not finite\n", verdict.not_finite);
  if (strays)
    std::printf("         %zu elements were written that are not of %s's rows\n", strays,
                name.c_str());
  if (!verdict.o_passed())
    std::printf("         worst: batch %d, head %d, row %d, column %d is %g, should be %g\n",
                verdict.worst.batch, verdict.worst.head, verdict.worst.row, verdict.worst_column,
                verdict.worst_output, verdict.worst_expected);
}

}  // namespace

void print_verdict(const reference::Verdict &verdict, std::size_t strays, std::size_t places,
                   std::size_t rows) {
  std::printf(
      "check    %zu of %zu rows: error %.2e rms (at most %.2e), %.2e max (at most %.2e), "
      "%.1e slope (at most %.1e): %s\n",
      places, rows, verdict.rms_error, verdict.rms_bound, verdict.max_error, verdict.max_bound,
      verdict.slope, verdict.slope_bound, verdict.o_passed() && strays == 0 ? "passed" : "WRONG");
  print_wrong(verdict, "O", strays);
}

void print_gradient_verdict(const reference::Verdict &verdict, const std::string &name,
                            std::size_t strays, std::size_t places, std::size_t rows) {
  std::printf(
      "check    %s, %zu of %zu rows: error %.2e rms (at most %.2e), %.2e max (at most %.2e): %s\n",
      name.c_str(), places, rows, verdict.rms_error, verdict.rms_bound, verdict.max_error,
      verdict.max_bound, verdict.passed() && strays == 0 ? "passed" : "WRONG");
  print_wrong(verdict, name, strays);
}

void print_bits(int runs, int other_runs, bool same_bits) {
  if (other_runs == 0)
    std::printf("bits     the same in all %d runs after the first\n", runs);
  else
    std::printf("bits     other than the first run's in %d of %d runs: %s\n", other_runs, runs,
                same_bits ? "WRONG, this step's must be the same in every run"
                          : "this step adds in any order");
}

void print_sink_verdict(const reference::SinkVerdict &verdict, std::size_t strays) {
  std::printf("check    d sinks: error %.2e worst (at most %.2e): %s\n", verdict.error,
              verdict.bound, verdict.passed() && strays == 0 ? "passed" : "WRONG");
  if (strays) std::printf("         %zu elements were written that are of no head\n", strays);
  if (!verdict.passed())
    std::printf("         worst: head %d is %g, should be %g\n", verdict.head, verdict.value,
                verdict.expected);
}

void print_lse_verdict(const reference::Verdict &verdict, std::size_t strays) {
  const bool passed = verdict.lse_passed() && strays == 0;
  std::printf("lse      log-sum-exp of the same rows: error %.2e worst (at most %.2e): %s\n",
              verdict.lse_error, verdict.lse_bound, passed ? "passed" : "WRONG");
  if (strays) std::printf("         %zu elements were written that are of no row\n", strays);
  if (!verdict.lse_passed())
    std::printf("         worst: batch %d, head %d, row %d is %g, should be %g\n",
                verdict.lse_worst.batch, verdict.lse_worst.head, verdict.lse_worst.row, verdict.lse,
                verdict.lse_expected);
}

void print_quantisation(const reference::Verdict &verdict) {
  std::printf(
      "fp8      against attention on the inputs before they were quantised: error %.2e rms, %.1f%% "
      "of the output's\n",
      verdict.rms_error, 100 * verdict.rms_error / verdict.rms_expected);
}

void print_cache_verdict(const reference::CacheVerdict &verdict, std::size_t strays, bool keys) {
  std::printf("cache    the new rows of %s are there, the others as they were: %s\n",
              keys ? "K" : "V", verdict.wrong == 0 && strays == 0 ? "passed" : "WRONG");
  if (verdict.wrong)
    std::printf(
        "         %zu elements are not; first: batch %d, head %d, row %d, column %d is %g, "
        "should be %g\n",
        verdict.wrong, verdict.place.batch, verdict.place.head, verdict.place.row, verdict.column,
        verdict.is, verdict.should_be);
  if (strays) std::printf("         %zu elements were written that are of no row\n", strays);
}

void print_totals(const emulator::Profile &profile) {
  using namespace emulator;
  const Counts total = profile.total();
  std::printf("counts\n");
  for (int i = 0; i < static_cast<int>(Kind::kKinds); i++)
    if (const auto kind = static_cast<Kind>(i); kind != Kind::kLdmatrix)  // among the shared loads
      print_total(info(kind), total);
  std::printf(
      "  global memory: %.3f MB read, %.3f MB written; each sector once: %.3f and %.3f MB\n",
      32e-6 * static_cast<double>(total[kGlobalLoadSectors]),
      32e-6 * static_cast<double>(total[kGlobalStoreSectors]),
      1e-6 * static_cast<double>(profile.unique_read_bytes),
      1e-6 * static_cast<double>(profile.unique_written_bytes));
  const auto count = [&](Counter counter) {
    return static_cast<unsigned long long>(total[counter]);
  };
  std::printf("  %llu exp2, %llu shuffles, ", count(kExp2), count(kShuffles));
  if (total[kVotes]) std::printf("%llu votes, ", count(kVotes));
  if (total[kAtomics]) std::printf("%llu atomics, ", count(kAtomics));
  std::printf("%llu warp barriers, %llu block barriers (warp-wide)\n", count(kWarpBarriers),
              count(kBlockBarriers));
  if (total[kMma] || total[kLdmatrix] || total[kCopyRequests])
    std::printf("  %llu mma, %llu ldmatrix, %llu cp.async (warp-wide)\n", count(kMma),
                count(kLdmatrix), count(kCopyRequests));
  if (total[kWgmma]) std::printf("  %llu wgmma (warp-wide)\n", count(kWgmma));
  if (total[kTmaLoads] || total[kTmaStores])
    std::printf("  TMA: %llu loads, %.3f MB, and %llu stores, %.3f MB\n", count(kTmaLoads),
                1e-6 * static_cast<double>(total[kTmaLoadBytes]), count(kTmaStores),
                1e-6 * static_cast<double>(total[kTmaStoreBytes]));
  if (total[kBulkReductions])
    std::printf("  TMA: %llu bulk reductions, %.3f MB\n", count(kBulkReductions),
                1e-6 * static_cast<double>(total[kBulkReductionBytes]));
  if (total[kMulticasts])
    std::printf(
        "  of these loads %llu to several blocks, %.3f MB read; %llu cluster barriers "
        "(warp-wide)\n",
        count(kMulticasts), 1e-6 * static_cast<double>(total[kMulticastBytes]),
        count(kClusterBarriers));
  if (total[kMbarrierArrivals] || total[kNamedBarriers])
    std::printf(
        "  %llu mbarrier arrivals, %llu waits, %llu named barriers, %llu proxy fences "
        "(warp-wide)\n",
        count(kMbarrierArrivals), count(kMbarrierWaits), count(kNamedBarriers),
        count(kProxyFences));
  for (const auto &[link, bytes] : profile.link_bytes)
    std::printf("  link %d to %d: %.3f MB\n", link.first, link.second,
                1e-6 * static_cast<double>(bytes));
}

void print_lines(const emulator::Profile &profile) {
  using namespace emulator;
  std::printf("lines    (warp-wide requests; wavefronts of shared memory, sectors of global)\n");
  std::printf("  %-22s %-8s %10s %12s %8s  %s\n", "line", "", "requests", "wavefronts", "each",
              "source");
  for (const auto &[line, counts] : profile.lines)
    for (int i = 0; i < static_cast<int>(Kind::kKinds); i++) {
      const auto kind = static_cast<Kind>(i);
      const KindInfo &of = info(kind);
      // A line's loads of shared memory are either ldmatrix or not.
      const bool loads = kind == Kind::kSharedLoad || kind == Kind::kLdmatrix;
      if (counts[of.requests] == 0 ||
          (loads && (kind == Kind::kLdmatrix) != (counts[kLdmatrix] > 0)))
        continue;
      std::printf("  %-22s %-8s %10llu %12llu %8.2f  %s%s\n", describe(line).c_str(), of.in_lines,
                  static_cast<unsigned long long>(counts[of.requests]),
                  static_cast<unsigned long long>(counts[of.cost]),
                  static_cast<double>(counts[of.cost]) / static_cast<double>(counts[of.requests]),
                  profile.mixed.contains(line) ? "(mixed) " : "", source_text(line).c_str());
    }
  if (!profile.mixed.empty())
    std::printf(
        "  mixed: lanes came here in different ways; a GPU may count their requests apart\n");
}

namespace {

std::string named(const std::string &what, int process, int thread, const std::string &name) {
  return R"({"ph":"M","name":")" + what + R"(","pid":)" + std::to_string(process) + R"(,"tid":)" +
         std::to_string(thread) + R"(,"args":{"name":")" + name + R"("}},)";
}

/// What a slice's track stands for.
std::string name_of_track(const emulator::TraceSlice &slice) {
  using Slice = emulator::TraceSlice;
  if (slice.device >= 0)
    return "stream " + std::to_string(slice.track / 2) + (slice.track % 2 ? ", sends" : "");
  return slice.track == Slice::kTma           ? "TMA"
         : slice.track == Slice::kTensorCores ? "tensor cores"
                                              : "warp " + std::to_string(slice.track);
}

/// The lines of a JSON file in the trace event format, which Perfetto and chrome://tracing read.
std::vector<std::string> chrome_trace(const emulator::Profile &profile) {
  using Slice = emulator::TraceSlice;
  constexpr int kClusterBlocks = 8;  // of a cluster
  const auto number = [](std::uint64_t value) { return std::to_string(value); };
  const auto process = [&](const Slice &slice) {
    if (slice.device >= 0) return slice.device;
    return slice.launch * kClusterBlocks + static_cast<int>(slice.block);
  };
  const auto place = [&](const Slice &slice, std::uint64_t time) {
    return R"("pid":)" + std::to_string(process(slice)) + R"(,"tid":)" + number(slice.track) +
           R"(,"ts":)" + number(time);
  };
  const bool of_devices = !profile.slices.empty() && profile.slices[0].device >= 0;
  const std::string unit = of_devices ? "mma, not clocks" : "turns, not clocks";
  std::vector<std::string> rows = {R"({"otherData":{"time":")" + unit + R"("},)",
                                   R"("traceEvents":[)"};
  const Slice *before = nullptr;
  for (const Slice &slice : profile.slices) {
    const bool same_block = before && process(*before) == process(slice);
    if (!same_block)
      rows.push_back(named("process_name", process(slice), 0,
                           of_devices ? "device " + std::to_string(slice.device)
                                      : "launch " + std::to_string(slice.launch) + ", block " +
                                            number(slice.block)));
    if (!same_block || before->track != slice.track)
      rows.push_back(named("thread_name", process(slice), static_cast<int>(slice.track),
                           name_of_track(slice)));
    rows.push_back(R"({"ph":"X",)" + place(slice, slice.begin) + R"(,"dur":)" +
                   number(slice.end - slice.begin) + R"(,"name":")" + slice.what +
                   R"(","args":{"line":")" + describe(slice.line) + R"(","bytes":)" +
                   number(slice.bytes) +
                   (slice.peer >= 0 ? R"(,"device":)" + std::to_string(slice.peer) : "") +
                   R"(,"times":)" + number(slice.times) + "}},");
    before = &slice;
  }
  for (std::size_t i = 0; i < profile.slices.size(); i++) {
    const Slice &slice = profile.slices[i];
    if (slice.cause < 0) continue;
    const Slice &cause = profile.slices[static_cast<std::size_t>(slice.cause)];
    const std::string arrow = R"("cat":"arrow","name":"arrow","id":)" + number(i) + ",";
    // What ends a device's wait has ended then, too: the arrow begins where it began.
    rows.push_back(R"({"ph":"s",)" + arrow +
                   place(cause, of_devices ? cause.begin : cause.end - 1) + "},");
    rows.push_back(R"({"ph":"f","bp":"e",)" + arrow + place(slice, slice.end - 1) + "},");
  }
  rows.push_back(named("process_labels", 0, 0, unit));
  rows.back().pop_back();  // the comma
  rows.push_back("]}");
  return rows;
}

}  // namespace

std::vector<std::string> csv_rows(CsvKind kind, const Result &result,
                                  const emulator::Profile &profile) {
  switch (kind) {
    case kProfileCsv: return profile_rows(result, profile);
    case kTraceCsv: return trace_rows(profile);
    case kBlocksCsv: return block_rows(result, profile);
    case kEventsCsv: return event_rows(result, profile);
    case kStreamsCsv: return stream_rows(result, profile);
    case kTrace: return chrome_trace(profile);
    default: return {result_row(result)};
  }
}
