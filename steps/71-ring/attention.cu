// Step 71: a ring. K and V go around while each GPU computes with the part that is there.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --gpus, --causal, --kv-heads, --type, --link, --leave-sms
// Before      step 70: each GPU gathers all keys and values, and computes after that.
// Bottleneck  The links are idle while the multiprocessors compute, and the multiprocessors while the bytes
//             travel. And every GPU needs memory for all keys and values.
// Change      In hop h, GPU g computes with the part of GPU g - h, while the part for the next hop travels on a
//             stream of its own, from the GPU before it in the ring. Each hop gives a partial O in fp32 and the
//             logarithm of each row's sum, by which a second kernel merges it with those before.
// Prediction  A hop costs the longer of computing and travelling. With n tokens on a GPU and 16 heads of 128,
//             8 n KB travel while 8,192 n^2 operations are computed: at 650 TFLOP/s and 170 GB/s these take
//             the same time at n = 3,800. Partial results of two hops and their merge move 36 n KB to and from
//             global memory: at n = 4,096 0.04 ms beside 0.42 ms. So on two GPUs we expect an efficiency of 92% at
//             8,192 tokens, where step 70 has 68%, and 99% at 65,536.
#include "common/kernel/gpus.h"
#include "common/kernel/hopper_attention.h"
#include "common/kernel/merge_hops.h"

namespace {

/// What each GPU needs beside its part: two buffers for K and V of others, the result of the hops so far and
/// that of one hop, and step 39's counter.
struct Workspace {
  std::size_t elements;  // of K or V of one part, [batch, part_rows, kv_heads, d]
  std::size_t rows;      // of O: [batch, part_rows, heads]
  std::size_t d;
  explicit Workspace(const Problem &p)
      : elements(std::size_t(p.batch) * p.part_rows * p.kv_heads * p.head_dim),
        rows(std::size_t(p.batch) * p.part_rows * p.heads),
        d(p.head_dim) {}
  void *K(const GpuPart &part, int buffer) const {
    return static_cast<std::byte *>(part.workspace) + std::size_t(buffer) * 4 * elements;
  }
  void *V(const GpuPart &part, int buffer) const {
    return static_cast<std::byte *>(K(part, buffer)) + 2 * elements;
  }
  float *O(const GpuPart &part, int which) const {  // 0: of all hops so far, 1: of one hop
    return static_cast<float *>(K(part, 2)) + which * rows * d;
  }
  float *lse(const GpuPart &part, int which) const { return O(part, 2) + which * rows; }
  unsigned *counter(const GpuPart &part) const {
    return reinterpret_cast<unsigned *>(lse(part, 2));
  }
  std::size_t bytes() const { return 8 * elements + 8 * rows * (d + 1) + sizeof(unsigned); }
};

/// Whether there is anything to do in a hop.
inline bool sees(const Problem &p, int gpu, int hop) {
  const int from = (gpu + p.gpus - hop) % p.gpus;
  return rows_of(p, gpu) && rows_of(p, from) && (!p.causal || from <= gpu);
}

/// Queues the transfer of a tensor with K's shape from one GPU to another, on their second streams. NCCL's calls must be
/// in a group.
template <class T>
void pass(const Problem &p, int to, T *target, int from, const T *source) {
  const std::vector<Traffic> &traffics = traffic(p);
  const std::vector<ncclComm_t> &comms = communicators(p);
  const std::size_t count = Workspace(p).elements;
  if (p.link == Link::kCopies) {
    cuda_check(
        cudaMemcpyPeerAsync(target, to, source, from, count * sizeof(T), traffics[to].stream),
        "cudaMemcpyPeerAsync");
    return;
  }
  if (is_own(from))
    nccl_check(ncclSend(source, count, nccl_type<T>, to, comms[from], traffics[from].stream),
               "ncclSend");
  if (is_own(to))
    nccl_check(ncclRecv(target, count, nccl_type<T>, from, comms[to], traffics[to].stream),
               "ncclRecv");
}

template <class T, int d>
void run(const Problem &p) {
  const Workspace workspace(p);
  communicators(p);  // made here, not within a group of messages
  const std::vector<Traffic> &traffics = traffic(p);
  const int N = p.gpus;
  const std::vector<int> own = own_gpus(p);
  const auto stream = [&](int gpu) { return static_cast<cudaStream_t>(p.parts[gpu].stream); };
  // K and V that a GPU computes with in a hop: its own, or what has arrived in one of two buffers.
  const auto K = [&](int gpu, int hop) {
    return hop ? workspace.K(p.parts[gpu], hop % 2) : p.parts[gpu].K;
  };
  const auto V = [&](int gpu, int hop) {
    return hop ? workspace.V(p.parts[gpu], hop % 2) : p.parts[gpu].V;
  };

  // Queues the transfer of K and V to each GPU for a hop, from the GPU before it.
  const auto send = [&](int hop) {
    for (const int gpu : own) {
      const Traffic &mine = traffics[gpu];
      const int left = (gpu + N - 1) % N, right = (gpu + 1) % N;
      if (hop == 1) wait(mine.stream, mine.begun);
      if (hop > 2) wait(mine.stream, mine.computed[hop - 2]);  // it has read this buffer
      if (p.link == Link::kNccl) continue;
      wait(mine.stream, hop > 1 ? traffics[left].arrived[hop - 1] : traffics[left].begun);
      if (hop > 2) wait(mine.stream, traffics[right].arrived[hop - 1]);  // copied from this buffer
    }
    if (p.link == Link::kNccl) nccl_check(ncclGroupStart(), "ncclGroupStart");
    for (int gpu = 0; gpu < N; gpu++) {
      const GpuPart &mine = p.parts[gpu];
      const int left = (gpu + N - 1) % N;
      pass(p, gpu, static_cast<T *>(workspace.K(mine, hop % 2)), left,
           static_cast<const T *>(K(left, hop - 1)));
      pass(p, gpu, static_cast<T *>(workspace.V(mine, hop % 2)), left,
           static_cast<const T *>(V(left, hop - 1)));
    }
    if (p.link == Link::kNccl) nccl_check(ncclGroupEnd(), "ncclGroupEnd");
    for (const int gpu : own) record(traffics[gpu].arrived[hop], traffics[gpu].stream);
  };

  const auto compute = [&](int gpu, int hop) {
    const GpuPart &mine = p.parts[gpu];
    const int from = (gpu + N - hop) % N;
    bool last = true;
    for (int later = hop + 1; later < N; later++) last &= !sees(p, gpu, later);
    const bool whole = hop == 0 && last;  // O is done, without a merge
    hopper_attention::launch(p.type, d,
                             {.Q = mine.Q,
                              .K = K(gpu, hop),
                              .V = V(gpu, hop),
                              .Q_strides = p.Q_strides,
                              .K_strides = p.K_strides,
                              .batch = p.batch,
                              .heads = p.heads,
                              .kv_heads = p.kv_heads,
                              .rows_q = rows_of(p, gpu),
                              .rows_k = rows_of(p, from),
                              .first_q = gpu * p.part_rows,
                              .first_k = from * p.part_rows,
                              .causal = p.causal && from == gpu,
                              .O = whole ? mine.O : nullptr,
                              .O_partial = workspace.O(mine, hop > 0),
                              .lse = workspace.lse(mine, hop > 0),
                              .lse_rows = p.part_rows,
                              .counter = workspace.counter(mine),
                              .leave_sms = hop + 1 < N ? p.leave_sms : 0,
                              .stream = mine.stream});
    record(traffics[gpu].computed[hop], stream(gpu));
    if (hop == 0) return;
    const int rows = rows_of(p, gpu);
    launch_on<void>(mine.stream, merge<T, d>,
                    dim3((p.batch * rows * p.heads + merge_warps - 1) / merge_warps),
                    dim3(merge_warps * 32), workspace.O(mine, 0), workspace.lse(mine, 0),
                    workspace.O(mine, 1), workspace.lse(mine, 1), static_cast<T *>(mine.O),
                    MergedRows{p.batch, p.heads, p.part_rows, 0, rows, last ? rows : 0});
  };

  for (const int gpu : own) record(traffics[gpu].begun, stream(gpu));
  for (int hop = 0; hop < N; hop++) {
    if (hop + 1 < N) send(hop + 1);
    for (const int gpu : own) {
      set_device(gpu);
      if (hop) wait(stream(gpu), traffics[gpu].arrived[hop]);
      if (sees(p, gpu, hop)) compute(gpu, hop);
    }
  }
  if (p.link == Link::kNccl || N == 1) return;
  // A GPU is done when its neighbour has copied from it, too.
  for (int gpu = 0; gpu < N; gpu++) wait(stream(gpu), traffics[(gpu + 1) % N].arrived[N - 1]);
}

template <class T>
void run(const Problem &p) {
  p.head_dim == 64 ? run<T, 64>(p) : run<T, 128>(p);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 1,
    .launch = [](const Problem &p) { p.type == Type::kBf16 ? run<bf16>(p) : run<half>(p); },
    .workspace_bytes = [](const Problem &p) { return Workspace(p).bytes(); },
});
