// What every step's program does: read the options, draw inputs, run the kernel, check the answer,
// then time it (on a GPU) or say what it cost (on the emulator).
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "common/emulator/runtime.h"
#include "common/emulator/sites.h"
#include "common/program/csv.h"
#include "common/program/device.h"
#include "common/program/options.h"
#include "reference/inputs.h"
#include "reference/verdict.h"

namespace {

enum ExitStatus { kPassed = 0, kWrongAnswer = 1, kBadArguments = 2, kNoDevice = 3 };

struct Shape {
  int batch, heads, seqlen, head_dim;

  int batch_heads() const { return batch * heads; }
  std::size_t elements() const {
    return static_cast<std::size_t>(batch_heads()) * seqlen * head_dim;
  }
};

/// The result of a run, as a row of --csv.
struct Result {
  std::string step, device;
  Shape shape;
  std::optional<double> median_ms, min_ms, tflops;
  double rms_error;
};

constexpr const char *kCsvHeader =
    "step,device,batch,heads,seqlen,head_dim,causal,median_ms,min_ms,tflops,rms_error";
constexpr const char *kProfileCsvHeader =
    "step,source,batch,heads,seqlen,head_dim,kernel,line,counter,value";
constexpr const char *kTraceCsvHeader = "line,op,request,lane,address,bytes,bank,wavefront";

std::string format(const char *pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

// --- before the run ------------------------------------------------------------------------------

std::unique_ptr<Device> choose_device(const Options &options, std::string &note) {
  const bool counts = options.profile || !options.profile_csv.empty() || !options.trace_csv.empty();
  if (options.device == DeviceChoice::kCpu) return make_cpu_device();
  if (options.device == DeviceChoice::kAuto && counts) return make_cpu_device();
  std::string why_not;
  if (std::unique_ptr<Device> gpu = make_gpu_device(why_not)) return gpu;
  if (options.device == DeviceChoice::kGpu)
    throw DeviceError("--device gpu: no GPU (" + why_not + "); --device cpu runs the emulator");
  note = "no GPU: " + why_not;
  return make_cpu_device();
}

Shape choose_shape(const Options &options, const Device &device) {
  const Step &step = device.step();
  const bool gpu = device.is_gpu();
  const Shape shape{options.batch.value_or(gpu ? step.default_batch : 1),
                    options.heads.value_or(gpu ? 16 : 2), options.seqlen.value_or(gpu ? 8192 : 256),
                    options.head_dim.value_or(gpu ? 128 : 64)};
  if (shape.seqlen % step.tile)
    throw UsageError("--seqlen " + std::to_string(shape.seqlen) + ": a multiple of " +
                     std::to_string(step.tile) + " is allowed, the rows of this step's tile");
  const std::int64_t batch_heads = std::int64_t{shape.batch} * shape.heads;
  if (batch_heads > 65535)  // the y and z of a grid
    throw UsageError("--batch " + std::to_string(shape.batch) + " --heads " +
                     std::to_string(shape.heads) + ": a product of at most 65535 is allowed");
  return shape;
}

/// Throws DeviceError unless the tensors and the workspace fit.
void check_fits(const Problem &problem, const Device &device) {
  // In double first: the product of the sizes may pass 2^64.
  const double rows = static_cast<double>(problem.batch) * problem.heads * problem.seqlen_q;
  const Step &step = device.step();
  double bytes = rows * problem.head_dim * 2 * 4;
  if (step.workspace_bytes && bytes < 1e15)
    bytes = bytes + static_cast<double>(step.workspace_bytes(problem));
  const auto free = static_cast<double>(device.free_bytes());
  if (bytes > free)
    throw DeviceError("out of memory: this shape needs " + format("%.3g", bytes / 1e9) +
                      " GB, the device has room for " + format("%.3g", free / 1e9) +
                      " GB; --batch, --heads or --seqlen must be smaller");
}

// --- the run -------------------------------------------------------------------------------------

void print_verdict(const reference::Verdict &verdict, std::size_t places, std::size_t rows) {
  std::printf(
      "check    %zu of %zu rows: error %.2e rms (at most %.2e), %.2e max (at most %.2e): %s\n",
      places, rows, verdict.rms_error, verdict.rms_bound, verdict.max_error, verdict.max_bound,
      verdict.passed() ? "passed" : "WRONG");
  if (verdict.passed()) return;
  if (verdict.not_finite) std::printf("         %zu elements are not finite\n", verdict.not_finite);
  std::printf("         worst: head %d, row %d, column %d is %g, should be %g\n",
              verdict.worst.head, verdict.worst.row, verdict.worst_column, verdict.worst_output,
              verdict.worst_expected);
}

/// Times launches: as many as --iters says, else 20, or fewer if they would take over two seconds.
void time_launches(Device &device, const std::function<void()> &launch, const Options &options,
                   Result &result) {
  std::vector<float> ms = device.time(launch, 1);  // warm: the check ran the same launch
  const int iterations =
      options.iters.value_or(std::clamp(static_cast<int>(2000 / std::max(ms[0], 1e-3f)), 3, 20));
  for (const float next : device.time(launch, iterations - 1)) ms.push_back(next);
  std::sort(ms.begin(), ms.end());
  const std::size_t half = ms.size() / 2;
  result.median_ms = ms.size() % 2 ? ms[half] : (ms[half - 1] + ms[half]) / 2;
  result.min_ms = ms.front();
  // Two products, Q K^T and P V, of N x N x d multiplications and additions each.
  const double operations =
      4.0 * static_cast<double>(result.shape.elements()) * result.shape.seqlen;
  result.tflops = operations / *result.median_ms / 1e9;
  std::printf("time     %.4g ms median, %.4g ms min of %d\n", *result.median_ms, *result.min_ms,
              iterations);
  std::printf("speed    %.4g TFLOP/s\n", *result.tflops);
}

// --- the emulator's counts -----------------------------------------------------------------------

void print_row(const char *what, std::uint64_t requests, std::uint64_t cost, const char *unit,
               std::uint64_t ideal) {
  if (requests == 0) return;
  std::printf("  %-14s %12llu requests %13llu %s, %.2f a request", what,
              static_cast<unsigned long long>(requests), static_cast<unsigned long long>(cost),
              unit, static_cast<double>(cost) / static_cast<double>(requests));
  if (ideal)
    std::printf(" (%.1fx the ideal)", static_cast<double>(cost) / static_cast<double>(ideal));
  std::printf("\n");
}

void print_totals(const emulator::Profile &profile) {
  using namespace emulator;
  const Counts total = profile.total();
  std::printf("counts\n");
  print_row("shared loads", total[kSharedLoadRequests], total[kSharedLoadWavefronts], "wavefronts",
            total[kSharedLoadIdeal]);
  print_row("shared stores", total[kSharedStoreRequests], total[kSharedStoreWavefronts],
            "wavefronts", total[kSharedStoreIdeal]);
  print_row("cp.async", total[kCopyRequests], total[kCopyWavefronts], "wavefronts",
            total[kCopyIdeal]);
  print_row("global loads", total[kGlobalLoadRequests], total[kGlobalLoadSectors], "sectors   ", 0);
  print_row("global stores", total[kGlobalStoreRequests], total[kGlobalStoreSectors], "sectors   ",
            0);
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
  std::printf("%llu warp barriers, %llu block barriers (warp-wide)\n", count(kWarpBarriers),
              count(kBlockBarriers));
  if (total[kMma] || total[kLdmatrix] || total[kCopyRequests])
    std::printf("  %llu mma, %llu ldmatrix, %llu cp.async (warp-wide)\n", count(kMma),
                count(kLdmatrix), count(kCopyRequests));
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

void print_lines(const emulator::Profile &profile) {
  using namespace emulator;
  std::printf("lines    (warp-wide requests; wavefronts of shared memory, sectors of global)\n");
  std::printf("  %-22s %-8s %10s %12s %8s  %s\n", "line", "", "requests", "wavefronts", "each",
              "source");
  const auto row = [&](const Line &line, const char *what, std::uint64_t requests,
                       std::uint64_t cost) {
    if (requests)
      std::printf("  %-22s %-8s %10llu %12llu %8.2f  %s\n", describe(line).c_str(), what,
                  static_cast<unsigned long long>(requests), static_cast<unsigned long long>(cost),
                  static_cast<double>(cost) / static_cast<double>(requests),
                  source_text(line).c_str());
  };
  for (const auto &[line, c] : profile.lines) {
    row(line, c[kLdmatrix] ? "ldmatrix" : "shared R", c[kSharedLoadRequests],
        c[kSharedLoadWavefronts]);
    row(line, "shared W", c[kSharedStoreRequests], c[kSharedStoreWavefronts]);
    row(line, "cp.async", c[kCopyRequests], c[kCopyWavefronts]);
    row(line, "global R", c[kGlobalLoadRequests], c[kGlobalLoadSectors]);
    row(line, "global W", c[kGlobalStoreRequests], c[kGlobalStoreSectors]);
  }
}

std::vector<std::string> profile_rows(const Result &result, const emulator::Profile &profile) {
  using namespace emulator;
  const Shape &shape = result.shape;
  const std::string prefix = result.step + ",emulator," + std::to_string(shape.batch) + "," +
                             std::to_string(shape.heads) + "," + std::to_string(shape.seqlen) +
                             "," + std::to_string(shape.head_dim) + ",total,";
  std::vector<std::string> rows;
  const auto add = [&](unsigned line, const std::string &counter, std::uint64_t value) {
    rows.push_back(prefix + std::to_string(line) + ",\"" + counter + "\"," + std::to_string(value));
  };
  const Counts total = profile.total();
  for (int i = 0; i < kCounters; i++)
    if (const auto counter = static_cast<Counter>(i); total[i] || !is_optional(counter))
      add(0, name(counter), total[i]);
  add(0, "shared wavefronts, ideal",
      total[kSharedLoadIdeal] + total[kSharedStoreIdeal] + total[kCopyIdeal]);
  add(0, "global bytes read", 32 * total[kGlobalLoadSectors]);
  add(0, "global bytes written", 32 * total[kGlobalStoreSectors]);
  add(0, "unique global bytes read", profile.unique_read_bytes);
  add(0, "unique global bytes written", profile.unique_written_bytes);
  for (const auto &[line, counts] : profile.lines)
    for (int i = 0; i < kCounters; i++)
      if (counts[i]) add(line.line, name(static_cast<Counter>(i)), counts[i]);
  return rows;
}

std::vector<std::string> trace_rows(const emulator::Profile &profile) {
  std::vector<std::string> rows;
  const auto operation = [](emulator::Kind kind) {
    switch (kind) {
      case emulator::Kind::kSharedStore: return ",store,";
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

std::string csv_row(const Result &result) {
  const auto number = [](const std::optional<double> &value) {
    return value ? format("%.6g", *value) : std::string();
  };
  return result.step + ",\"" + result.device + "\"," + std::to_string(result.shape.batch) + "," +
         std::to_string(result.shape.heads) + "," + std::to_string(result.shape.seqlen) + "," +
         std::to_string(result.shape.head_dim) + ",0," + number(result.median_ms) + "," +
         number(result.min_ms) + "," + number(result.tflops) + "," +
         format("%.4g", result.rms_error);
}

// --- all of it -----------------------------------------------------------------------------------

ExitStatus run(const Options &options) {
  std::string note;
  const std::unique_ptr<Device> device = choose_device(options, note);
  const Step &step = device->step();
  const Shape shape = choose_shape(options, *device);

  std::optional<CsvFile> csv, profile_csv, trace_csv;
  if (!options.csv.empty()) csv.emplace("--csv", options.csv, kCsvHeader);
  if (!options.profile_csv.empty())
    profile_csv.emplace("--profile-csv", options.profile_csv, kProfileCsvHeader);
  if (!options.trace_csv.empty())
    trace_csv.emplace("--trace-csv", options.trace_csv, kTraceCsvHeader);

  Problem problem{nullptr,     nullptr,     nullptr,      nullptr,        nullptr,
                  shape.batch, shape.heads, shape.seqlen, shape.head_dim, options.variant};
  check_fits(problem, *device);

  Result result{step.name, device->is_gpu() ? device->name() : "emulator", shape, {}, {}, {}, 0};
  if (options.variant) result.step += ":" + std::string(step.variants[options.variant]);
  std::printf("%s on %s%s\n", result.step.c_str(), device->name().c_str(),
              note.empty() ? "" : (" (" + note + ")").c_str());
  std::printf("shape    batch %d, heads %d, seqlen %d, head dim %d, %s inputs%s\n", shape.batch,
              shape.heads, shape.seqlen, shape.head_dim,
              reference::family_names()[static_cast<int>(options.inputs)].c_str(),
              device->is_gpu() && !options.batch && shape.batch < 16
                  ? " (16 would take this step too long)"
                  : "");
  std::fflush(stdout);

  const reference::Inputs inputs = reference::make_inputs(
      options.inputs, shape.batch_heads(), shape.seqlen, shape.head_dim, options.seed);
  std::vector<half> O(shape.elements());
  const std::size_t bytes = O.size() * sizeof(half);
  for (auto &[on_device, on_host] :
       {std::pair{&problem.Q, &inputs.Q}, {&problem.K, &inputs.K}, {&problem.V, &inputs.V}}) {
    void *memory = device->allocate(bytes);
    device->upload(memory, on_host->data(), bytes);
    *on_device = memory;
  }
  problem.O = device->allocate(bytes);  // poisoned with NaN: what is not written cannot pass
  const std::size_t workspace = step.workspace_bytes ? step.workspace_bytes(problem) : 0;
  if (workspace) problem.workspace = device->allocate(workspace);

  const bool profiled = !device->is_gpu() && !options.check_only;
  emulator::settings.seed = options.seed;
  emulator::settings.profile = profiled;
  const auto launch = [&] { step.launch(problem); };
  device->run(launch);
  const emulator::Profile profile = emulator::take_profile();

  const std::vector<reference::Place> places =
      reference::places_to_check(inputs, step.tile, options.seed);
  const auto check = [&] {
    device->download(O.data(), problem.O, bytes);
    return reference::judge(inputs, O, places);
  };
  const reference::Verdict verdict = check();
  result.rms_error = verdict.rms_error;
  print_verdict(verdict, places.size(),
                static_cast<std::size_t>(shape.batch_heads()) * shape.seqlen);
  if (!verdict.passed()) return kWrongAnswer;

  if (profiled) {
    print_totals(profile);
    if (options.profile) print_lines(profile);
  } else if (!options.check_only) {
    time_launches(*device, launch, options, result);
    const reference::Verdict after = check();  // the launches that were timed gave it, too
    if (!after.passed()) {
      print_verdict(after, places.size(), O.size() / shape.head_dim);
      return kWrongAnswer;
    }
  }
  if (csv) csv->append({csv_row(result)});
  if (profile_csv) profile_csv->append(profile_rows(result, profile));
  if (trace_csv) trace_csv->append(trace_rows(profile));
  return kPassed;
}

}  // namespace

int main(int argc, char **argv) {
  const auto complain = [](const char *message) {
    std::fprintf(stderr, "%s: %s\n", cpu_step.name, message);
  };
  try {
    const Options options = parse_options(argc, argv, cpu_step);
    if (options.help) {
      std::fputs(help_text(cpu_step).c_str(), stdout);
      return kPassed;
    }
    return run(options);
  } catch (const UsageError &error) {
    complain(error.what());
    return kBadArguments;
  } catch (const ShapeError &error) {
    complain(error.what());
    return kBadArguments;
  } catch (const DeviceError &error) {
    complain(error.what());
    return kNoDevice;
  } catch (const std::bad_alloc &) {
    complain("out of memory; --batch, --heads or --seqlen must be smaller");
    return kNoDevice;
  } catch (const emulator::KernelError &error) {
    std::fflush(stdout);
    std::fprintf(stderr, "emulator: %s\n", error.what());
    return kWrongAnswer;
  } catch (const std::exception &error) {
    complain(error.what());
    return kWrongAnswer;
  }
}
