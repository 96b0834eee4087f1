// Step 72: zigzag. Each GPU has two ends of the sequence, and keys that it does not see are not sent to it.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --gpus, --causal, --kv-heads, --type, --link, --leave-sms
// Before      step 71: with a causal mask the last of N GPUs computes in N hops, and the first one in one.
// Bottleneck  On two GPUs the second one has 3/4 of the work, so the efficiency is 67% at most.
// Change      The sequence is cut into 2 N chunks, and GPU g has chunks g and 2 N - 1 - g. Then all GPUs have as much to
//             do, in each hop: an earlier GPU's first chunk meets all queries, and both chunks of a later GPU
//             meet the queries of the second chunk alone. What they do not meet is not sent, so keys come from the
//             GPU that has them and no longer through others.
// Prediction  With n tokens on a GPU and 16 heads of 128, a hop computes 4,096 n^2 operations, while at most 8 n KB
//             travel: level at n = 4,200 with 700 TFLOP/s and 336 GB/s. The partial results cost 0.06 ms at 8,192
//             tokens on two GPUs, as in step 71, and grow with the length. So by copy engines we expect an
//             efficiency of 74% at 8,192 tokens, 92% at 32,768 and 96% at 65,536, where step 71 has at most 67%.
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

/// What meets on a GPU in a hop: its queries from row `first_q` on, and the first rows of the keys of GPU `from`.
struct Meeting {
  int from, first_q, rows_q, rows_k;
};

/// In hop h, GPU g has keys of GPU g - h. All its queries see the first chunk of an earlier GPU. Those of its second
/// chunk see both chunks of a later GPU.
inline Meeting meeting(const Problem &p, int gpu, int hop) {
  const int from = (gpu + p.gpus - hop) % p.gpus;
  const bool earlier = p.causal && from < gpu, later = p.causal && from > gpu;
  return {from, later ? p.chunk_rows : 0, later ? rows_of(p, gpu, 1) : rows_of(p, gpu),
          earlier ? rows_of(p, from, 0) : rows_of(p, from)};
}

/// Whether there is anything to do in a hop.
inline bool sees(const Problem &p, int gpu, int hop) {
  const Meeting at = meeting(p, gpu, hop);
  return at.rows_q > 0 && at.rows_k > 0;
}

/// Queues on the GPUs' second streams that the first rows of a tensor with K's shape go from one GPU to another. NCCL's
/// calls must be in a group.
template <class T>
void pass(const Problem &p, int to, T *target, int from, const T *source, int rows) {
  const std::vector<Traffic> &traffics = traffic(p);
  const std::vector<ncclComm_t> &comms = communicators(p);
  const std::size_t count = std::size_t(rows) * p.kv_heads * p.head_dim;
  for (int b = 0; b < p.batch; b++, target += p.K_strides.batch, source += p.K_strides.batch) {
    if (p.link == Link::kCopies) {
      cuda_check(
          cudaMemcpyPeerAsync(target, to, source, from, count * sizeof(T), traffics[to].stream),
          "cudaMemcpyPeerAsync");
      continue;
    }
    if (is_own(from))
      nccl_check(ncclSend(source, count, nccl_type<T>, to, comms[from], traffics[from].stream),
                 "ncclSend");
    if (is_own(to))
      nccl_check(ncclRecv(target, count, nccl_type<T>, from, comms[to], traffics[to].stream),
                 "ncclRecv");
  }
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

  // Queues the transfer of K and V to each GPU for a hop, from the GPU that has them.
  const auto send = [&](int hop) {
    for (const int gpu : own) {
      const Traffic &mine = traffics[gpu];
      if (hop == 1) wait(mine.stream, mine.begun);
      if (hop > 2) wait(mine.stream, mine.computed[hop - 2]);  // it has read this buffer
      if (p.link == Link::kCopies) wait(mine.stream, traffics[meeting(p, gpu, hop).from].begun);
    }
    if (p.link == Link::kNccl) nccl_check(ncclGroupStart(), "ncclGroupStart");
    for (int gpu = 0; gpu < N; gpu++) {
      if (sees(p, gpu, hop)) {
        const Meeting at = meeting(p, gpu, hop);
        const GpuPart &mine = p.parts[gpu], &theirs = p.parts[at.from];
        pass(p, gpu, static_cast<T *>(workspace.K(mine, hop % 2)), at.from,
             static_cast<const T *>(theirs.K), at.rows_k);
        pass(p, gpu, static_cast<T *>(workspace.V(mine, hop % 2)), at.from,
             static_cast<const T *>(theirs.V), at.rows_k);
      }
    }
    if (p.link == Link::kNccl) nccl_check(ncclGroupEnd(), "ncclGroupEnd");
    for (const int gpu : own) record(traffics[gpu].arrived[hop], traffics[gpu].stream);
  };

  const auto compute = [&](int gpu, int hop) {
    const GpuPart &mine = p.parts[gpu];
    const Meeting at = meeting(p, gpu, hop);
    bool last = true;
    for (int later = hop + 1; later < N; later++) last &= !sees(p, gpu, later);
    const bool whole = hop == 0 && last;  // O is done, without a merge
    const std::size_t first = at.first_q * p.Q_strides.row;
    hopper_attention::launch(p.type, d,
                             {.Q = static_cast<const T *>(mine.Q) + first,
                              .K = K(gpu, hop),
                              .V = V(gpu, hop),
                              .Q_strides = p.Q_strides,
                              .K_strides = p.K_strides,
                              .batch = p.batch,
                              .heads = p.heads,
                              .kv_heads = p.kv_heads,
                              .rows_q = at.rows_q,
                              .rows_k = at.rows_k,
                              .causal = p.causal && hop == 0,
                              .O = whole ? mine.O : nullptr,
                              .O_partial = workspace.O(mine, hop > 0) + first,
                              .lse = workspace.lse(mine, hop > 0) + at.first_q,
                              .lse_rows = p.part_rows,
                              .counter = workspace.counter(mine),
                              .leave_sms = hop + 1 < N ? p.leave_sms : 0,
                              .stream = mine.stream});
    record(traffics[gpu].computed[hop], stream(gpu));
    // The queries of the first chunk have met all keys with those of GPU 0.
    const int end = last ? p.part_rows : p.causal && at.from == 0 ? p.chunk_rows : 0;
    if (whole || (hop == 0 && end == 0)) return;
    // In hop 0 the result is merged with itself, which leaves it as it is.
    const int rows = hop ? at.rows_q : end;
    launch_on<void>(
        mine.stream, merge<T, d>, dim3((p.batch * rows * p.heads + merge_warps - 1) / merge_warps),
        dim3(merge_warps * 32), workspace.O(mine, 0), workspace.lse(mine, 0),
        workspace.O(mine, hop > 0), workspace.lse(mine, hop > 0), static_cast<T *>(mine.O),
        MergedRows{p.batch, p.heads, p.part_rows, at.first_q, rows, end});
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
  // A GPU is done when all others have copied from it, too.
  for (int gpu = 0; gpu < N; gpu++)
    for (const Traffic &each : traffics) wait(stream(gpu), each.arrived[N - 1]);
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
    .two_ends = true,
});
