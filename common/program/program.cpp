// SPDX-License-Identifier: MIT
// What every step's program does: read the options, draw inputs, run the kernel, check the answer,
// then time it (on a GPU) or say what it cost (on the emulator).
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/emulator/devices.h"
#include "common/emulator/runtime.h"
#include "common/kernel/processes.h"
#include "common/program/csv.h"
#include "common/program/device.h"
#include "common/program/options.h"
#include "common/program/parts.h"
#include "common/program/placement.h"
#include "common/program/ranks.h"
#include "common/program/report.h"
#include "common/program/shape.h"
#include "reference/gradients.h"
#include "reference/inputs.h"
#include "reference/random.h"
#include "reference/verdict.h"

namespace {

enum ExitStatus { kPassed = 0, kWrongAnswer = 1, kBadArguments = 2, kNoDevice = 3 };

// --- during a run -----------------------------------------------------------------------------------

/// While it lives, it says on a terminal how far the emulator has come: after 5 s, 10 s, 20 s, ...; of several GPUs,
/// whose launches are all queued at once, after 1 s, 2 s, 4 s, ..., and how long the rest will take.
class Patience {
 public:
  Patience(bool wanted, int gpus) : first_(gpus > 1 ? 1 : 5) {
    if (wanted && isatty(STDERR_FILENO)) thread_ = std::thread([this] { watch(); });
  }
  ~Patience() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void watch() {
    const auto begin = std::chrono::steady_clock::now();
    const std::uint64_t before = emulator::launch_progress().launch;
    std::unique_lock lock(mutex_);
    for (int seconds = first_;; seconds *= 2) {
      const auto over = [this] { return over_; };
      if (changed_.wait_until(lock, begin + std::chrono::seconds(seconds), over)) return;
      const auto [launch, ended, blocks] = emulator::launch_progress();
      const std::uint64_t queued = emulator::queued_launches();
      if (queued > 0 && launch > before) {
        const std::uint64_t left = seconds * queued / (launch - before);
        if (left >= 5)
          std::fprintf(stderr,
                       "         after %d s: launch %llu of %llu, %llu s to go at this rate. Fewer "
                       "GPUs are faster; Ctrl-C ends the run\n",
                       seconds, static_cast<unsigned long long>(launch - before),
                       static_cast<unsigned long long>(launch - before + queued),
                       static_cast<unsigned long long>(left));
        continue;
      }
      if (seconds < 5) continue;
      std::fprintf(stderr,
                   "         after %d s: launch %llu, %llu of %llu blocks done. Smaller sizes are "
                   "faster; Ctrl-C ends the run\n",
                   seconds, static_cast<unsigned long long>(launch),
                   static_cast<unsigned long long>(ended), static_cast<unsigned long long>(blocks));
    }
  }

  std::mutex mutex_;  // guards over_
  std::condition_variable changed_;
  bool over_ = false;
  const int first_;
  std::thread thread_;
};

// --- before the run ------------------------------------------------------------------------------

std::unique_ptr<Device> choose_device(const Options &options, std::string &note) {
  const bool counts = !counting_option(options).empty();
  if (options.device == DeviceChoice::kCpu) return make_cpu_device();
  if (options.device == DeviceChoice::kAuto && counts) return make_cpu_device();
  std::string why_not;
  if (std::unique_ptr<Device> gpu = make_gpu_device(why_not)) return gpu;
  if (options.device == DeviceChoice::kGpu)
    throw DeviceError("--device gpu: no GPU (" + why_not +
                      "); run it on the emulator with --device cpu");
  note = "no GPU: " + why_not;
  return make_cpu_device();
}

/// Names the sizes that there is no memory for.
std::string out_of_memory(const Options &options, const std::string &needs) {
  return "out of memory: " + (options.sizes.empty() ? "the default problem" : options.sizes) +
         " needs " + needs + "; choose smaller sizes";
}

/// Throws DeviceError unless the tensors and the workspace fit.
void check_fits(const Problem &problem, const Options &options, const Device &device) {
  const reference::Shape &shape = options.shape;
  // In double first: the product of the sizes may pass 2^64.
  const bool gaps = options.layout != Layout::kBhnd;  // each as wide as a head
  const auto rows = [&](const std::vector<int> &lengths, int seqlen) {
    return options.layout == Layout::kPacked ? std::accumulate(lengths.begin(), lengths.end(), 0.0)
                                             : static_cast<double>(problem.batch) * seqlen;
  };
  const double of_Q = rows(shape.lengths_q, shape.seqlen_q) * (problem.heads + gaps);
  double of_K = rows(shape.lengths_k, shape.seqlen_k) * (problem.kv_heads + gaps);
  if (problem.page_size)
    of_K = static_cast<double>(pages_of_pool(shape.batch, shape.seqlen_k, problem.page_size)) *
           problem.page_size * (problem.kv_heads + gaps);
  const double of_new = static_cast<double>(problem.batch) * problem.kv_heads * problem.seqlen_new;
  const double element = problem.type == Type::kFp8 ? 1 : 2;  // of Q, K and V, in bytes
  double bytes = element * (of_Q + of_K + of_new) * problem.head_dim +
                 (element * (shape.latent ? 0 : of_K + of_new) + sizeof(std::uint16_t) * of_Q) *
                     problem.head_dim_v;
  if (problem.rope != Rope::kNone)  // cosines and sines
    bytes += static_cast<double>(problem.seqlen_k) * problem.rope_dim * sizeof(float);
  const Step &step = device.step();
  if (step.writes_lse || step.gradients)
    bytes += sizeof(float) * static_cast<double>(problem.batch) * problem.heads * problem.seqlen_q;
  if (step.gradients)  // dO and dQ, dK and dV
    bytes += sizeof(std::uint16_t) * 2 * (of_Q + of_K) * problem.head_dim;
  // Each GPU has its part and a workspace; the emulator's are all in the host's memory. (Before a backward pass one GPU
  // computes O of the whole sequence.)
  if (problem.gpus && device.is_gpu() && !step.gradients) bytes /= problem.gpus;
  if (step.workspace_bytes && bytes < 1e15)
    bytes = bytes + (device.is_gpu() ? 1 : std::max(1, problem.gpus)) *
                        static_cast<double>(step.workspace_bytes(problem));
  const auto free = static_cast<double>(device.free_bytes());
  if (bytes > free)
    throw DeviceError(out_of_memory(options, format("%.3g", bytes / 1e9) +
                                                 " GB, and the device has room for " +
                                                 format("%.3g", free / 1e9) + " GB"));
}

/// The sizes and the kind of problem, with nothing in memory yet.
Problem pose(const Options &options, const Step &step) {
  const reference::Shape &shape = options.shape;
  Problem problem{};
  problem.type = options.type;
  problem.batch = shape.batch;
  problem.heads = shape.heads;
  problem.kv_heads = shape.kv_heads;
  problem.seqlen_q = shape.seqlen_q;
  problem.seqlen_k = shape.seqlen_k;
  problem.head_dim = shape.head_dim;
  problem.head_dim_v = shape.columns_of_v();
  problem.causal = shape.causal;
  problem.window = shape.window;
  problem.sinks = shape.sinks;
  problem.window_left = shape.window_left;
  problem.window_right = shape.window_right;
  problem.scale = static_cast<float>(shape.softmax_scale());
  problem.softcap = shape.softcap;
  problem.page_size = options.page_size;
  problem.seqlen_new = shape.seqlen_new;
  problem.rope = shape.rope;
  problem.rope_dim = shape.turned_columns();
  problem.splits = options.splits;
  problem.gpus = options.gpus;
  if (problem.gpus) cut_into_parts(problem, step.two_ends);
  problem.link = options.link;
  problem.leave_sms = options.leave_sms;
  return problem;
}

/// A copy in the memory of the device, null of nothing.
template <class T, class Allocator>
T *upload(Device &device, const std::vector<T, Allocator> &values) {
  if (values.empty()) return nullptr;
  void *memory = device.allocate(values.size() * sizeof(T));
  device.upload(memory, values.data(), values.size() * sizeof(T));
  return static_cast<T *>(memory);
}

/// A copy of elements of 8 bits, the lower half of each of these.
std::byte *upload_bytes(Device &device, const reference::Elements &elements) {
  std::vector<std::byte, reference::Unset<std::byte>> bytes(elements.size());
  std::transform(elements.begin(), elements.end(), bytes.begin(),
                 [](std::uint16_t bits) { return static_cast<std::byte>(bits); });
  return upload(device, bytes);
}

/// Makes the rows of K and V that the step has to store NaN: a launch that does not store them is
/// found out, also if one before it did.
void forget_new_rows(Device &device, const Placement &placement, const reference::Shape &shape,
                     const Problem &problem) {
  // The whole cache at once: for 4096 new rows of 64 heads, a copy of each took a minute.
  const auto forget = [&](const Tensor &tensor, void *cache, std::size_t elements) {
    reference::Elements buffer(elements);
    device.download(buffer.data(), cache, elements * sizeof(std::uint16_t));
    for (int b = 0; b < tensor.batch; b++)
      for (int head = 0; head < tensor.heads; head++)
        for (int row = tensor.rows(b) - shape.seqlen_new; row < tensor.rows(b); row++)
          std::fill_n(&buffer[tensor.offset(b, head, row)], tensor.head_dim, kPoison);
    device.upload(cache, buffer.data(), elements * sizeof(std::uint16_t));
  };
  forget(placement.K, problem.K, placement.K_elements);
  forget(placement.V, problem.V, placement.V_elements);
}

/// The log-sum-exp, and the sinks' gradient, have so many elements around them that no step may write.
constexpr int kAround = 64;

std::size_t lse_elements(const reference::Shape &shape) {
  return static_cast<std::size_t>(shape.batch) * shape.heads * shape.seqlen_q + 2 * kAround;
}

/// Fills the device's memory with the problem: Q, K and V where the placement says, NaN in the gaps
/// between, and O of nothing but NaN: what is not written cannot pass.
void fill(Device &device, const Placement &placement, const reference::Inputs &inputs,
          Problem &problem) {
  struct Part {
    const Tensor &tensor;
    const reference::Elements &values;
    std::size_t elements;
    std::byte *first = nullptr;
  };
  const std::size_t element = inputs.type == Type::kFp8 ? 1 : 2;  // bytes
  std::byte *memory = nullptr;
  reference::Elements buffer;
  Part parts[] = {{placement.Q, inputs.Q, placement.Q_elements},
                  {placement.K, inputs.K, placement.K_elements},
                  {placement.V, inputs.V, placement.V_elements}};
  for (std::size_t i = 0; i < std::size(parts); i++) {
    if (parts[i].elements) buffer = poisoned(parts[i].elements);
    scatter(parts[i].tensor, parts[i].values, buffer);
    if (i + 1 < std::size(parts) && parts[i + 1].elements == 0) continue;  // the next one joins it
    memory = element == 1 ? upload_bytes(device, buffer)
                          : reinterpret_cast<std::byte *>(upload(device, buffer));
    for (std::size_t j = 0; j <= i; j++)
      if (!parts[j].first) parts[j].first = memory + parts[j].tensor.first * element;
  }
  problem.Q = parts[0].first;
  problem.K = parts[1].first;
  problem.V = parts[2].first;
  problem.O = device.allocate(placement.O_elements * sizeof(std::uint16_t));
  problem.Q_strides = placement.Q.strides;
  problem.K_strides = placement.K.strides;
  problem.V_strides = placement.V.strides;
  problem.O_strides = placement.O.strides;
  problem.lengths_q = upload(device, placement.Q.lengths);
  problem.lengths_k = upload(device, placement.K.lengths);
  problem.cu_seqlens_q = upload(device, placement.Q.cu_seqlens);
  problem.cu_seqlens_k = upload(device, placement.K.cu_seqlens);
  problem.total_q = placement.Q.cu_seqlens.empty() ? 0 : placement.Q.cu_seqlens.back();
  problem.total_k = placement.K.cu_seqlens.empty() ? 0 : placement.K.cu_seqlens.back();
  problem.page_table = upload(device, placement.K.page_table);
  if (problem.page_table)
    problem.num_pages =
        static_cast<int>(pages_of_pool(problem.batch, problem.seqlen_k, problem.page_size));
  if (inputs.shape.seqlen_new) {
    problem.K_new = upload(device, new_rows(inputs.shape, inputs.K));
    problem.V_new = upload(device, new_rows(inputs.shape, inputs.V));
    const auto dense = [&](int columns) {
      const std::int64_t head = std::int64_t{problem.seqlen_new} * columns;
      return Strides{problem.kv_heads * head, head, columns};
    };
    problem.K_new_strides = dense(problem.head_dim);
    problem.V_new_strides = dense(problem.head_dim_v);
    forget_new_rows(device, placement, inputs.shape, problem);
  }
  problem.scales = {upload(device, inputs.scales.Q), upload(device, inputs.scales.K),
                    upload(device, inputs.scales.V)};
  problem.slopes = upload(device, inputs.slopes);
  problem.sink_logits = upload(device, inputs.sink_logits);
  problem.rope_cos = upload(device, inputs.rotation.cos);
  problem.rope_sin = upload(device, inputs.rotation.sin);
  const Step &step = device.step();
  const std::size_t workspace = step.workspace_bytes ? step.workspace_bytes(problem) : 0;
  if (workspace) problem.workspace = device.allocate(workspace);
  if (step.writes_lse)
    problem.lse =
        static_cast<float *>(device.allocate(lse_elements(inputs.shape) * sizeof(float))) + kAround;
}

/// A cache that several GPUs share: on each of them all queries, its part of the keys in pages of its own, and an O.
struct SharedCache {
  std::vector<Placement> placements;  // one for each GPU, as what follows
  std::vector<Problem> problems;
  std::vector<GpuPart> parts;
};

SharedCache fill_shared_cache(Device &device, const reference::Inputs &inputs,
                              const Options &options, Problem &problem) {
  SharedCache cache;
  const auto gpus = static_cast<std::size_t>(problem.gpus);
  cache.problems.assign(gpus, problem);
  cache.placements.resize(gpus);
  const auto d = static_cast<std::ptrdiff_t>(problem.head_dim);
  cache.parts.resize(gpus);
  for (int gpu = 0; gpu < problem.gpus; gpu++) {
    if (!is_own(gpu)) continue;
    device.memory_of = gpu;
    reference::Inputs part = inputs;
    part.shape.seqlen_k = problem.part_rows;
    part.shape.lengths_q.assign(static_cast<std::size_t>(problem.batch), problem.seqlen_q);
    part.shape.lengths_k.assign(static_cast<std::size_t>(problem.batch), rows_of(problem, gpu));
    const auto cut = [&](const reference::Elements &whole, reference::Elements &to) {
      to.assign(static_cast<std::size_t>(problem.batch * problem.kv_heads * problem.part_rows * d),
                0);
      for (std::ptrdiff_t head = 0; head < problem.batch * problem.kv_heads; head++)
        std::copy_n(whole.begin() + (head * problem.seqlen_k + first_row_of(problem, gpu, 0)) * d,
                    rows_of(problem, gpu) * d, to.begin() + head * problem.part_rows * d);
    };
    cut(inputs.K, part.K);
    cut(inputs.V, part.V);
    Placement &placement = cache.placements[static_cast<std::size_t>(gpu)];
    placement = place(part.shape, options.layout, options.page_size, options.seed + gpu);
    Problem &own = cache.problems[static_cast<std::size_t>(gpu)];
    own.seqlen_k = problem.part_rows;
    own.stream = device.stream(gpu);
    fill(device, placement, part, own);
    cache.parts[static_cast<std::size_t>(gpu)].own = &own;
  }
  device.memory_of = 0;
  problem.parts = cache.parts.data();
  return cache;
}

/// O of this process's first GPU, and in `strays` also how many elements another one has otherwise.
reference::Elements gather_shared_cache(Device &device, const SharedCache &cache,
                                        std::size_t &strays) {
  reference::Elements first;
  strays = 0;
  for (std::size_t gpu = 0; gpu < cache.problems.size(); gpu++) {
    if (!is_own(static_cast<int>(gpu))) continue;
    reference::Elements buffer(cache.placements[gpu].O_elements);
    device.download(buffer.data(), cache.problems[gpu].O, buffer.size() * sizeof(std::uint16_t));
    const reference::Elements O = gather(cache.placements[gpu].O, buffer);
    strays += not_poison(buffer);
    if (first.empty()) first = O;
    for (std::size_t i = 0; i < O.size(); i++) strays += O[i] != first[i];
  }
  return first;
}

/// Calls f(row) for each row of Q that does not exist, counted in [batch, heads, seqlen_q].
template <class F>
void for_rows_not_there(const reference::Shape &shape, F f) {
  for (int head = 0; head < shape.batch * shape.heads; head++)
    for (int row = shape.length_q(head / shape.heads); row < shape.seqlen_q; row++)
      f(static_cast<std::size_t>(head) * shape.seqlen_q + row);
}

/// What a step has written of the log-sum-exp: [batch, heads, seqlen_q], -infinity for rows that are not there,
/// and how many elements that are of no row.
struct LogSumExp {
  std::vector<float> rows;
  std::size_t strays = 0;
};

/// Whether somebody has written a number that was poison.
bool is_stray(float value) {
  return std::bit_cast<std::uint32_t>(value) != 0xffffffff;
}
std::size_t strays_around(const std::vector<float> &all) {
  return std::count_if(all.begin(), all.begin() + kAround, is_stray) +
         std::count_if(all.end() - kAround, all.end(), is_stray);
}

LogSumExp download_lse(Device &device, const reference::Shape &shape, const Problem &problem) {
  std::vector<float> all(lse_elements(shape));
  device.download(all.data(), problem.lse - kAround, all.size() * sizeof(float));
  LogSumExp lse{{all.begin() + kAround, all.end() - kAround}, strays_around(all)};
  for_rows_not_there(shape, [&](std::size_t row) {
    lse.strays += is_stray(lse.rows[row]);
    lse.rows[row] = -INFINITY;
  });
  return lse;
}

/// The elements of the buffer of dK or dV. Where Q, K and V are interleaved, each gradient has a buffer as large as
/// theirs.
std::size_t elements_of_gradient(const Placement &placement, std::size_t own) {
  return own ? own : placement.Q_elements;
}

/// Gives a backward pass what the layers before and after it in a network would: dO, O and lse, and room for
/// the gradients. Returns O and lse as they are in the memory of the device.
reference::Forward fill_backward(Device &device, const Placement &placement,
                                 const reference::Inputs &inputs, Problem &problem) {
  reference::Elements buffer = poisoned(placement.O_elements);
  scatter(placement.O, inputs.dO, buffer);
  problem.dO = upload(device, buffer);
  problem.dQ = device.allocate(placement.O_elements * sizeof(std::uint16_t));
  const auto gradient = [&](const Tensor &tensor, std::size_t elements) {
    elements = elements_of_gradient(placement, elements);
    return static_cast<std::uint16_t *>(device.allocate(elements * sizeof(std::uint16_t))) +
           tensor.first;
  };
  problem.dK = gradient(placement.K, placement.K_elements);
  problem.dV = gradient(placement.V, placement.V_elements);
  if (problem.sink_logits)
    problem.d_sink_logits =
        static_cast<float *>(device.allocate((problem.heads + 2 * kAround) * sizeof(float))) +
        kAround;
  reference::Forward forward;
  if (!device.is_gpu()) {
    forward = reference::forward_pass(inputs);
    buffer = poisoned(placement.O_elements);
    scatter(placement.O, forward.O, buffer);
    device.upload(problem.O, buffer.data(), buffer.size() * sizeof(std::uint16_t));
    std::vector<float> lse = forward.lse;
    for_rows_not_there(inputs.shape, [&](std::size_t row) { lse[row] = NAN; });
    problem.lse = upload(device, lse);
    return forward;
  }
  forward.lse.resize(static_cast<std::size_t>(problem.batch) * problem.heads * problem.seqlen_q);
  problem.lse = static_cast<float *>(device.allocate(forward.lse.size() * sizeof(float)));
  device.forward(problem);
  device.download(buffer.data(), problem.O, buffer.size() * sizeof(std::uint16_t));
  forward.O = gather(placement.O, buffer);
  device.download(forward.lse.data(), problem.lse, forward.lse.size() * sizeof(float));
  for_rows_not_there(inputs.shape, [&](std::size_t row) { forward.lse[row] = -INFINITY; });
  return forward;
}

/// O and lse of a sequence that several GPUs share. One of them has computed both.
reference::Forward forward_of_parts(Device &device, const Placement &placement,
                                    const reference::Inputs &inputs, Problem problem) {
  problem.gpus = 0;
  fill(device, placement, inputs, problem);
  return fill_backward(device, placement, inputs, problem);
}

/// Launches with lengths and pages of any numbers, as the memory of a caller may hold. Returns true if the kernel
/// writes rows of O and nothing beside them. The emulator, and compute-sanitizer, see what it reads.
bool survives_garbage(Device &device, const Placement &placement, Problem problem,
                      std::uint64_t seed) {
  const auto fill = [&](const int *&array, std::size_t count, bool only_one = false) {
    if (!array) return;
    std::vector<int> values(count);
    for (int &value : values) {
      const auto bits = static_cast<std::int64_t>(next_random(seed) >> 32);
      const std::int64_t ends[] = {INT_MIN, INT_MAX, -1, bits % 100, bits};
      value = static_cast<int>(ends[next_random(seed) % std::size(ends)]);
    }
    for (std::size_t i = 1; i < count && only_one; i++) values[i] |= INT_MIN;
    array = upload(device, values);
  };
  const auto batch = static_cast<std::size_t>(problem.batch);
  // Two packed sequences would write the same rows, so one alone has rows then. A step that turns K copies it.
  const bool turns = problem.rope != Rope::kNone;
  fill(problem.lengths_q, batch, problem.cu_seqlens_q);
  fill(problem.lengths_k, batch, problem.cu_seqlens_k && turns);
  fill(problem.cu_seqlens_q, batch + 1);
  fill(problem.cu_seqlens_k, batch + 1);
  if (problem.K_new) {  // the step writes K and V, so these launches have their own
    const auto own = [&](const Tensor &tensor, std::size_t elements) {
      return upload(device, poisoned(elements)) + tensor.first;
    };
    problem.K = own(placement.K, placement.K_elements);
    problem.V = own(placement.V, placement.V_elements);
  }
  if (problem.K_new || turns) {
    // Two entries that name one page would write the same rows, so there is one that clamps to the first page, and one
    // that clamps to the last.
    std::vector<int> pages(placement.K.page_table.size());
    std::iota(pages.begin(), pages.end(), 0);
    if (!pages.empty()) pages.front() = INT_MIN, pages.back() = INT_MAX;
    problem.page_table = upload(device, pages);
  } else {
    fill(problem.page_table, placement.K.page_table.size());
  }
  problem.O = device.allocate(placement.O_elements * sizeof(std::uint16_t));
  if (problem.lse)  // its rows are those of the garbage
    problem.lse = static_cast<float *>(
        device.allocate(sizeof(float) * problem.batch * problem.heads * problem.seqlen_q));
  device.run([&] { device.step().launch(problem); });
  reference::Elements buffer(placement.O_elements);
  device.download(buffer.data(), problem.O, buffer.size() * sizeof(std::uint16_t));
  Tensor all = placement.O;
  if (all.cu_seqlens.empty()) all.lengths.clear();  // any of its rows may be there
  gather(all, buffer);
  const std::size_t strays = not_poison(buffer);
  if (strays) std::printf("check    garbage: %zu elements beside O's rows are written\n", strays);
  return strays == 0;
}

// --- the run -------------------------------------------------------------------------------------

/// The median. Sorts.
template <class T>
double median(std::vector<T> &values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

/// Times launches: this many, or if it is 0, 20, or fewer if they would take over two seconds.
/// Those of a tenth of a millisecond or less ten at a time: an event costs microseconds. A launch
/// takes `estimate` milliseconds.
void time_launches(Device &device, const std::function<void()> &launch, float estimate,
                   int iterations, Result &result) {
  if (!iterations)
    iterations = std::clamp(static_cast<int>(2000 / std::max(estimate, 1e-3f)), 3, 20);
  const int warm_up = estimate < 100 ? 3 : 0;  // as peers.py does; a long launch was its own
  const int each = estimate < 0.1f ? 10 : 1;
  Times times = device.time(launch, warm_up, iterations, each);
  result.median_ms = median(times.ms);
  result.min_ms = times.ms.front();
  if (!times.clocks.empty()) result.sm_clocks = median(times.clocks);
  result.tflops = result.operations / *result.median_ms / 1e9;
  std::printf("time     %.4g ms median, %.4g ms min of %d\n", *result.median_ms, *result.min_ms,
              iterations);
  if (result.sm_clocks)
    std::printf("clocks   %.0f elapsed on an SM, %.4g GHz\n", *result.sm_clocks,
                *result.sm_clocks / *result.median_ms / 1e6);
  std::printf("speed    %.4g TFLOP/s\n", *result.tflops);
  // Where a key serves few queries, reading it takes longer than computing with it.
  const reference::Shape &shape = result.shape;
  if (std::int64_t{shape.seqlen_q} * (shape.heads / shape.kv_heads) > 128) return;
  std::printf("bandwidth %.4g TB/s of K and V\n", result.kv_bytes / *result.median_ms / 1e9);
}

/// Times the same problem on one of the GPUs alone, in turns with all of them, and says how well they share it:
/// the medians of seven rounds. `alone` becomes the result of the one.
void time_sharing(Device &device, const std::function<void()> &together,
                  const std::function<void()> &by_one, int iterations, int gpus, Result &result,
                  Result &alone) {
  std::vector<double> ms, ms_alone, clocks, clocks_alone, efficiencies, in_clocks;
  for (int round = 0; round < 7; round++) {
    for (const bool one : {false, true}) {
      const std::function<void()> &launch = one ? by_one : together;
      const float estimate = device.time(launch, 0, 1, 1).ms[0];
      time_launches(device, launch, estimate, iterations, one ? alone : result);
    }
    ms.push_back(*result.median_ms);
    ms_alone.push_back(*alone.median_ms);
    clocks.push_back(*result.sm_clocks);
    clocks_alone.push_back(*alone.sm_clocks);
    efficiencies.push_back(ms_alone.back() / gpus / ms.back());
    in_clocks.push_back(clocks_alone.back() / gpus / clocks.back());
  }
  const auto settle = [](Result &of, std::vector<double> &of_ms, std::vector<double> &of_clocks) {
    of.median_ms = median(of_ms);
    of.min_ms = of_ms.front();
    of.sm_clocks = median(of_clocks);
    of.tflops = of.operations / *of.median_ms / 1e9;
  };
  settle(result, ms, clocks);
  settle(alone, ms_alone, clocks_alone);
  const auto percent = [](std::vector<double> &of) {
    char text[64];
    const double middle = 100 * median(of);
    std::snprintf(text, sizeof text, "%.1f%% (%.1f to %.1f)", middle, 100 * of.front(),
                  100 * of.back());
    return std::string(text);
  };
  std::printf("sharing  %.4g ms on %d GPUs, %.4g ms on one: efficiency %s, in clocks %s\n",
              *result.median_ms, gpus, *alone.median_ms, percent(efficiencies).c_str(),
              percent(in_clocks).c_str());
}

void print_shape(const Result &result, const Options &options, bool gpu) {
  const reference::Shape &shape = result.shape;
  std::printf(
      "shape    batch %d, heads %d, seqlen %d, head dim %d, %s inputs%s\n", shape.batch,
      shape.heads, shape.seqlen_q, shape.head_dim,
      reference::family_names()[static_cast<int>(options.inputs)].c_str(),
      gpu && shape.batch < 16 && !options.gpus && options.sizes.find("--batch") == std::string::npos
          ? " (16 would take this step too long)"
          : "");
  if (!result.options.empty()) std::printf("         %s\n", result.options.c_str());
}

/// What a full disk or a closed pipe has swallowed was not said.
void finish_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout))
    throw UsageError("standard output: writing failed");
}

ExitStatus run(const Options &asked) {
  std::string note;
  const std::unique_ptr<Device> device = choose_device(asked, note);
  if (asked.iters && !device->is_gpu())
    throw UsageError("--iters " + std::to_string(asked.iters) +
                     " needs a GPU, where launches are timed (" + note + "); leave it out");
  if (asked.again && !device->is_gpu())
    throw UsageError("--again needs a GPU, where launches are timed (" + note + "); leave it out");
  if (asked.rank >= 0 && !device->is_gpu())
    throw UsageError("--rank " + std::to_string(asked.rank) +
                     " needs GPUs: the emulator runs all of --gpus in one process; leave it out");
  std::optional<Ranks> ranks;
  if (asked.rank >= 0)
    ranks.emplace(asked.id_file, [](const std::string &text) {
      std::fflush(stdout);
      std::fprintf(stderr, "%s: %s\n", cpu_step.name, one_line(text).c_str());
      std::_Exit(kWrongAnswer);
    });
  if (asked.sms && device->is_gpu())
    throw UsageError("--sms " + std::to_string(asked.sms) +
                     " needs the emulator: add --device cpu, or leave it out");
  if (asked.repeatable && device->is_gpu())
    throw UsageError("--repeatable needs the emulator: add --device cpu, or leave it out");
  if (asked.sms) emulator::settings.multiprocessors = asked.sms;
  const Step &step = device->step();
  const Options options = with_defaults(asked, step, device->is_gpu());
  const reference::Shape &shape = options.shape;
  check_problem(options, step);

  std::vector<std::pair<CsvKind, CsvFile>> files;
  for (int i = 0; i < kCsvKinds; i++)
    if (!options.files[i].empty())
      files.emplace_back(static_cast<CsvKind>(i), CsvFile(std::string("--") + kCsv[i].option,
                                                          options.files[i], kCsv[i].header));

  Problem problem = pose(options, step);
  emulator::settings.seed = options.seed;
  emulator::settings.repeatable = options.repeatable;
  processes = {options.rank, 0, options.id_file};
  if (options.rank >= 0 && !step.decodes && rows_of(problem, options.rank) == 0)
    throw UsageError("--rank " + std::to_string(options.rank) +
                     ": no rows are left for it of --seqlen " + std::to_string(problem.seqlen_q) +
                     "; use fewer GPUs");
  if (!options.files[kStreamsCsv].empty() && problem.gpus < 2)
    throw UsageError("--streams-csv needs several GPUs: add --gpus 2, which steps 70 to 76 accept");
  if (problem.gpus) device->use_gpus(problem.gpus);
  check_fits(problem, options, *device);

  Result result{step.name,
                device->is_gpu() ? device->name() : "emulator",
                shape,
                departures(options, step),
                operations(shape, step.gradients),
                kv_bytes(shape, options.type),
                {},
                {},
                {},
                {},
                0};
  std::printf("%s on %s%s\n", result.step.c_str(), device->name().c_str(),
              note.empty() ? "" : (" (" + note + ")").c_str());
  print_shape(result, options, device->is_gpu());
  std::fflush(stdout);

  reference::Inputs inputs =
      reference::make_inputs(options.inputs, shape, options.type, options.seed);
  if (step.gradients) reference::add_dO(inputs, options.inputs, options.seed);
  const Placement placement = place(shape, options.layout, options.page_size, options.seed);
  std::vector<GpuPart> parts;
  SharedCache shared_cache;
  if (problem.gpus && step.decodes)
    shared_cache = fill_shared_cache(*device, inputs, options, problem);
  else if (problem.gpus)
    fill_parts(*device, inputs, problem, parts);
  else
    fill(*device, placement, inputs, problem);
  reference::Forward forward;
  if (step.gradients && problem.gpus) {
    forward = forward_of_parts(*device, placement, inputs, problem);
    fill_backward_parts(*device, inputs, forward, problem, parts);
  } else if (step.gradients) {
    forward = fill_backward(*device, placement, inputs, problem);
  }

  const bool profiled = !device->is_gpu() && !options.check_only;
  for (int i = 0; i < 3 && options.garbage; i++)
    if (!survives_garbage(*device, placement, problem, options.seed + i)) return kWrongAnswer;
  emulator::settings.profile = profiled;
  emulator::settings.same_bits = step.gradients && step.same_bits;
  const bool streams = problem.gpus > 1;  // of one GPU the trace has the first block
  emulator::settings.trace = !streams && !options.files[kTrace].empty();
  emulator::settings.streams =
      streams && !(options.files[kTrace].empty() && options.files[kStreamsCsv].empty());
  const auto launch = [&] { step.launch(problem); };
  // As processes with a GPU each would, one after the other.
  const auto launch_by_rank = [&] {
    for (int rank = 0; rank < problem.gpus; rank++) {
      processes = {rank, rank, ""};
      std::vector<GpuPart> own(static_cast<std::size_t>(problem.gpus));
      own[static_cast<std::size_t>(rank)] = problem.parts[rank];
      Problem of_rank = problem;
      of_rank.parts = own.data();
      try {
        step.launch(of_rank);
      } catch (const emulator::KernelError &error) {
        throw emulator::KernelError(error.what() + (" (launched as a process that has GPU " +
                                                    std::to_string(rank) + " alone)"));
      }
    }
    processes = {};
  };
  try {
    // Several GPUs twice in a row: one may begin the second launch while another has not ended the first.
    const int times = problem.gpus > 1 && options.check_only ? 2 : 1;
    const Patience patience(!device->is_gpu(), problem.gpus);
    device->run([&] {
      for (int i = 0; i < times; i++) {
        i > 0 && !device->is_gpu() && problem.link == Link::kNccl ? launch_by_rank() : launch();
        if (device->is_gpu()) continue;
        // The step is done with its inputs: who called it writes the next ones.
        for (std::size_t gpu = 0; gpu < parts.size(); gpu++)
          for (const auto &[memory, strides] : {std::pair(parts[gpu].Q, problem.Q_strides),
                                                std::pair(parts[gpu].K, problem.K_strides),
                                                std::pair(parts[gpu].V, problem.K_strides),
                                                std::pair(parts[gpu].dO, problem.Q_strides)})
            if (memory)
              emulator::rewrite(parts[gpu].stream, memory,
                                sizeof(std::uint16_t) * problem.batch * strides.batch);
      }
    });
  } catch (const emulator::KernelError &) {
    for (const auto &[kind, file] : files)
      if (kind == kTrace) file.append(csv_rows(kind, result, emulator::take_profile()));
    throw;
  }
  const emulator::Profile profile = emulator::take_profile();

  // Of several processes each checks what it has. (The answer of a decoding step is on every GPU.)
  const auto places_here = [&](std::vector<reference::Place> places) {
    return problem.gpus && !step.decodes ? own_places(problem, std::move(places)) : places;
  };
  const std::vector<reference::Place> places =
      places_here(reference::places_to_check(shape, step.tile, options.seed));
  const auto cache_passes = [&](bool say) {
    bool passed = true;
    for (const bool keys : {true, false}) {
      const Tensor &cache = keys ? placement.K : placement.V;
      reference::Elements buffer(keys ? placement.K_elements : placement.V_elements);
      device->download(buffer.data(), keys ? problem.K : problem.V,
                       buffer.size() * sizeof(std::uint16_t));
      const reference::CacheVerdict verdict =
          reference::judge_cache(inputs, gather(cache, buffer), keys);
      const std::size_t strays = not_poison(buffer);
      passed = passed && verdict.wrong == 0 && strays == 0;
      if (say || verdict.wrong || strays) print_cache_verdict(verdict, strays, keys);
    }
    return passed;
  };
  struct Output {
    const char *name;
    const Tensor *tensor;
    void *memory;
    std::size_t elements;
    reference::Gradient gradient;
    PartOfAll of_parts = {};  // of several GPUs, whose memory this is
  };
  using enum reference::Gradient;
  std::vector<Output> outputs = {
      {"O", &placement.O, problem.O, placement.O_elements, kQ, {&GpuPart::O, problem.heads}}};
  if (step.gradients && problem.gpus) {
    outputs = {{"dQ", nullptr, nullptr, 0, kQ, {&GpuPart::dQ, problem.heads}},
               {"dK", nullptr, nullptr, 0, kK, {&GpuPart::dK, problem.kv_heads}},
               {"dV", nullptr, nullptr, 0, kV, {&GpuPart::dV, problem.kv_heads}}};
  } else if (step.gradients) {
    const auto of_keys = [&](const char *name, const Tensor &tensor, void *first, std::size_t own,
                             reference::Gradient gradient) {
      return Output{name, &tensor, static_cast<std::uint16_t *>(first) - tensor.first,
                    elements_of_gradient(placement, own), gradient};
    };
    outputs = {{"dQ", &placement.O, problem.dQ, placement.O_elements, kQ},
               of_keys("dK", placement.K, problem.dK, placement.K_elements, kK),
               of_keys("dV", placement.V, problem.dV, placement.V_elements, kV)};
  }
  const auto download = [&](const Output &output) {
    reference::Elements buffer(output.elements);
    device->download(buffer.data(), output.memory, buffer.size() * sizeof(std::uint16_t));
    return buffer;
  };
  const auto rows_of_output = [&](const Output &output, std::size_t &strays) {
    if (problem.gpus) return gather_parts(*device, problem, output.of_parts, strays);
    reference::Elements buffer = download(output);
    reference::Elements rows = gather(*output.tensor, buffer);
    strays = not_poison(buffer);
    return rows;
  };
  const auto gradients_pass = [&](bool say) {
    bool right = true;
    result.rms_error = 0;
    for (const Output &output : outputs) {
      std::size_t strays;
      const reference::Elements rows = rows_of_output(output, strays);
      const std::vector<reference::Place> of_rows = places_here(
          reference::places_of_gradient(shape, output.gradient, step.tile, options.seed));
      const reference::Verdict verdict =
          reference::judge_gradient(inputs, forward, output.gradient, rows, of_rows);
      result.rms_error = std::max(result.rms_error, verdict.rms_error);
      const bool passed = verdict.passed() && strays == 0;
      right = right && passed;
      if (say || !passed)
        print_gradient_verdict(verdict, output.name, strays, of_rows.size(),
                               rows.size() / static_cast<std::size_t>(shape.head_dim));
    }
    if (!problem.d_sink_logits) return right;
    std::vector<float> all(static_cast<std::size_t>(shape.heads) + 2 * kAround);
    device->download(all.data(), problem.d_sink_logits - kAround, all.size() * sizeof(float));
    const std::size_t strays = strays_around(all);
    const reference::SinkVerdict verdict = reference::judge_sink_gradients(
        inputs, forward, std::span(all).subspan(kAround, static_cast<std::size_t>(shape.heads)));
    const bool passed = verdict.passed() && strays == 0;
    if (say || !passed) print_sink_verdict(verdict, strays);
    return right && passed;
  };
  const auto passes = [&](bool say) {
    if (step.gradients) return gradients_pass(say);
    std::size_t strays = 0;
    const auto rows_of_O = [&] {
      if (problem.gpus && step.decodes) return gather_shared_cache(*device, shared_cache, strays);
      return rows_of_output(outputs[0], strays);
    };
    const reference::Elements O = rows_of_O();
    LogSumExp lse;
    if (step.writes_lse) lse = download_lse(*device, shape, problem);
    const reference::Verdict verdict = reference::judge(inputs, O, places, lse.rows);
    result.rms_error = verdict.rms_error;
    const bool right = verdict.passed() && strays + lse.strays == 0;
    if (say || !right)
      print_verdict(verdict, strays, places.size(),
                    O.size() / static_cast<std::size_t>(shape.columns_of_v()));
    if (step.writes_lse && (say || !right)) print_lse_verdict(verdict, lse.strays);
    return (!shape.seqlen_new || cache_passes(say)) && right;
  };
  if (step.gradients && device->is_gpu() &&
      !reference::judge(inputs, forward.O, places, forward.lse).passed())
    throw std::runtime_error("the program's own forward pass is wrong");
  if (!passes(true)) return kWrongAnswer;
  if (options.repeat) {
    emulator::settings.profile = emulator::settings.trace = emulator::settings.streams = false;
    // What is compared and poisoned: of several GPUs the buffer of each.
    std::vector<Output> buffers = outputs;
    if (problem.gpus) buffers.clear();
    if (problem.d_sink_logits)
      buffers.push_back({"d sinks", nullptr, problem.d_sink_logits,
                         static_cast<std::size_t>(shape.heads) * 2, kQ});
    for (int gpu = 0; gpu < problem.gpus; gpu++)
      for (Output output : outputs) {
        if (!is_own(gpu)) continue;
        output.memory =
            step.decodes ? problem.parts[gpu].own->O : problem.parts[gpu].*output.of_parts.memory;
        output.elements = step.decodes ? shared_cache.placements[gpu].O_elements
                                       : elements_of_part(problem, output.of_parts.heads);
        buffers.push_back(output);
      }
    std::vector<reference::Elements> first;
    for (const Output &output : buffers) first.push_back(download(output));
    int other_runs = 0;
    const Patience patience(!device->is_gpu(), problem.gpus);
    for (int i = 1; i <= options.repeat; i++) {
      emulator::settings.seed = options.seed + static_cast<std::uint64_t>(i);
      for (const Output &output : buffers) {
        const reference::Elements poison = poisoned(output.elements);
        device->upload(output.memory, poison.data(), poison.size() * sizeof(std::uint16_t));
      }
      device->run(launch);
      bool same = true;
      for (std::size_t j = 0; j < buffers.size(); j++)
        same = same && download(buffers[j]) == first[j];
      other_runs += !same;
    }
    print_bits(options.repeat, other_runs, step.same_bits);
    if (step.same_bits && other_runs) return kWrongAnswer;
  }
  if (options.type == Type::kFp8 && options.check_only) {
    // The check is against what the kernel was given. What was lost before:
    const reference::Inputs drawn =
        reference::make_inputs_to_quantise(options.inputs, shape, options.seed);
    reference::Elements buffer(placement.O_elements);
    device->download(buffer.data(), problem.O, buffer.size() * sizeof(std::uint16_t));
    print_quantisation(reference::judge(drawn, gather(placement.O, buffer), places));
  }

  const auto append_rows = [&] {
    for (const auto &[kind, file] : files) file.append(csv_rows(kind, result, profile));
  };
  if (profiled) {
    print_totals(profile);
    if (options.profile) print_lines(profile);
  } else if (!options.check_only) {
    if (shape.seqlen_new) forget_new_rows(*device, placement, shape, problem);
    if (!options.files[kStreamsCsv].empty()) {
      emulator::Profile measured;
      for (const auto &[gpu, stream, what, begin, end] : device->trace(launch)) {
        emulator::TraceSlice &slice = measured.slices.emplace_back();
        slice.device = gpu;
        slice.track = 2 * static_cast<unsigned>(stream);
        slice.what = what;
        slice.begin = begin;
        slice.end = end;
      }
      for (const auto &[kind, file] : files)
        if (kind == kStreamsCsv) file.append(csv_rows(kind, result, measured));
    }
    // Of several processes none goes by its own time: all must launch as often.
    const float estimate = options.rank < 0 ? device->time(launch, 0, 1, 1).ms[0] : 1;
    if (options.again) {
      for (std::string line; finish_output(), std::getline(std::cin, line);) {
        time_launches(*device, launch, estimate, std::atoi(line.c_str()), result);
        append_rows();
      }
    } else if (problem.gpus > 1 && options.rank < 0) {
      Options of_one = options;
      of_one.gpus = 1;
      Problem whole = pose(of_one, step);
      std::vector<GpuPart> part;
      SharedCache of_whole;
      if (step.decodes)
        of_whole = fill_shared_cache(*device, inputs, of_one, whole);
      else
        fill_parts(*device, inputs, whole, part);
      if (step.gradients) fill_backward_parts(*device, inputs, forward, whole, part);
      Result alone = result;
      alone.options = departures(of_one, step);
      time_sharing(
          *device, launch, [&] { step.launch(whole); }, options.iters, problem.gpus, result, alone);
      for (const auto &[kind, file] : files) file.append(csv_rows(kind, alone, profile));
    } else {
      time_launches(*device, launch, estimate, options.iters, result);
    }
    if (!passes(false)) return kWrongAnswer;  // the launches that were timed gave it, too
  }
  finish_output();
  if (!options.again) append_rows();
  if (ranks) ranks->passed();
  return kPassed;
}

/// What --describe says of the problem that the other options make, which has a GPU's sizes where they name none.
std::string describe_problem(const Options &asked, const Step &step) {
  const Options options = with_defaults(asked, step, true);
  check_problem(options, step);
  return "operations " + format("%.0f", operations(options.shape, step.gradients)) + "\nkv-bytes " +
         format("%.0f", kv_bytes(options.shape, options.type)) + "\n";
}

}  // namespace

int main(int argc, char **argv) {
  const auto complain = [](const char *message) {
    std::fprintf(stderr, "%s: %s\n", cpu_step.name, one_line(message).c_str());
  };
  Options options;
  try {
    options = parse_options(argc, argv, cpu_step, ladder());
    ExitStatus status = kPassed;
    if (options.help)
      std::fputs(help_text(argv[0], cpu_step).c_str(), stdout);
    else if (options.describe)
      std::fputs((describe_text(cpu_step) + describe_problem(options, cpu_step)).c_str(), stdout);
    else
      status = run(options);
    finish_output();
    return status;
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
    complain(out_of_memory(options, "more than there is").c_str());
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
