// Step 70: all-gather. Several GPUs share a sequence, and each gathers all keys and values.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --gpus, --causal, --kv-heads, --type, --leave-sms
// Before      step 39: one GPU has the whole sequence.
// Bottleneck  At 64k tokens one H200 computes 54 ms for 16 heads of 128, and cannot hold the cache of a model
//             that long.
// Change      GPU g has the rows from g * part_rows on of Q, K, V and O. It gathers all parts of K and V by
//             NCCL, and then runs step 39's kernel with its own rows of Q. The kernel is a header from here
//             on (common/kernel/hopper_attention.h): it learns at which position its queries begin.
// Prediction  t_N = t_1 / N + bytes / bandwidth, because nothing overlaps. A GPU receives (N - 1) / N of K and V:
//             on two GPUs, 16 heads of 128 at 8,192 tokens, 33.6 MB. At the 170 GB/s that we measured for
//             messages of 32 MB this takes 0.2 ms, beside 0.42 ms of computing: an efficiency of 68%. At
//             65,536 tokens the message is 268 MB, 0.93 ms beside 27 ms: 97%.
#include "common/kernel/gpus.h"
#include "common/kernel/hopper_attention.h"

namespace {

/// What each GPU needs beside its part: all keys and all values, and step 39's counter.
struct Workspace {
  std::size_t kv_bytes;  // of all keys, [batch, gpus * part_rows, kv_heads, d]
  explicit Workspace(const Problem &p)
      : kv_bytes(std::size_t(2) * p.batch * p.gpus * p.part_rows * p.kv_heads * p.head_dim) {}
  std::byte *K(const GpuPart &part) const { return static_cast<std::byte *>(part.workspace); }
  std::byte *V(const GpuPart &part) const { return K(part) + kv_bytes; }
  unsigned *counter(const GpuPart &part) const {
    return reinterpret_cast<unsigned *>(K(part) + 2 * kv_bytes);
  }
  std::size_t bytes() const { return 2 * kv_bytes + sizeof(unsigned); }
};

template <class T, int d>
void run(const Problem &p) {
  const Workspace workspace(p);
  const std::vector<ncclComm_t> &comms = communicators(p);  // not within a group of messages
  const int N = p.gpus;
  const std::vector<int> own = own_gpus(p);
  const auto stream = [&](int gpu) { return static_cast<cudaStream_t>(p.parts[gpu].stream); };
  // All parts have the rows of the first one in memory, so the gathered rows follow each other: those that are
  // missing would come after the last.
  const std::size_t part = std::size_t(p.part_rows) * p.kv_heads * d;

  nccl_check(ncclGroupStart(), "ncclGroupStart");  // one thread calls for all GPUs
  for (const int gpu : own)
    for (int b = 0; b < p.batch; b++) {
      const auto gather = [&](const void *from, std::byte *to) {
        nccl_check(ncclAllGather(static_cast<const T *>(from) + b * part,
                                 reinterpret_cast<T *>(to) + b * N * part, part, nccl_type<T>,
                                 comms[gpu], stream(gpu)),
                   "ncclAllGather");
      };
      gather(p.parts[gpu].K, workspace.K(p.parts[gpu]));
      gather(p.parts[gpu].V, workspace.V(p.parts[gpu]));
    }
  nccl_check(ncclGroupEnd(), "ncclGroupEnd");

  Strides all = p.K_strides;  // of the gathered rows
  all.batch *= N;
  const auto compute = [&](int gpu) {
    const GpuPart &mine = p.parts[gpu];
    hopper_attention::launch(p.type, d,
                             {.Q = mine.Q,
                              .K = workspace.K(mine),
                              .V = workspace.V(mine),
                              .Q_strides = p.Q_strides,
                              .K_strides = all,
                              .batch = p.batch,
                              .heads = p.heads,
                              .kv_heads = p.kv_heads,
                              .rows_q = rows_of(p, gpu),
                              .rows_k = p.seqlen_k,
                              .first_q = gpu * p.part_rows,
                              .first_k = 0,
                              .causal = p.causal,
                              .O = mine.O,
                              .counter = workspace.counter(mine),
                              .leave_sms = p.leave_sms,
                              .stream = mine.stream});
  };

  for (const int gpu : own) {
    set_device(gpu);
    if (rows_of(p, gpu)) compute(gpu);
  }
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
