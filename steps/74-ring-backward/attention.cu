// Step 74: a ring, backward. What a GPU adds to the gradients of others' keys goes home in fp32, a hop later.
// SPDX-License-Identifier: MIT
// Needs       sm_80: cp.async, mma.m16n8k16
// Takes       --gpus, --causal, --kv-heads, --type, --link
// Before      step 72: the forward pass alone.
// Bottleneck  dK and dV are sums over all queries, and the queries are spread over the GPUs.
// Change      K and V go around as in step 72, with step 65's kernel. What a hop adds to dK and dV of another GPU's keys
//             goes straight to that GPU in fp32, while the next hop computes. That GPU adds it to its sums.
// Prediction  With n tokens on a GPU and 16 heads of 128, a hop computes 10,240 n^2 operations, while at most 24 n KB
//             travel: level at n = 2,300 with 322 TFLOP/s and 336 GB/s. The last hop's gradients, 16 n KB, have no
//             kernel to hide behind, and storing and adding the sums moves 64 n KB at 2.5 TB/s. So on two GPUs by copy
//             engines we expect an efficiency of 78% at 8,192 tokens, 93% at 32,768 and 97% at 65,536, causal.
#include "common/kernel/mma_gradients.h"
#include "common/kernel/zigzag.h"

namespace {

using mma_gradients::threads;  // of a block of any kernel here

/// dK and dV of a part, or of what a hop adds to them, in fp32: [batch, part_rows, kv_heads, d] each.
struct Sums {
  float *dK, *dV;
};

/// What each GPU needs beside its part: two buffers for K and V of others; the sums of dK and dV of its own keys, two
/// buffers for what a hop adds to those of others, and two for what others have sent; and step 65's arrays.
struct Workspace {
  std::size_t elements;  // of K or V of one part, [batch, part_rows, kv_heads, d]
  std::size_t rows;      // of the arrays, [batch, heads, all_rows]
  int all_rows, d;
  explicit Workspace(const Problem &p)
      : elements(std::size_t(p.batch) * p.part_rows * p.kv_heads * p.head_dim),
        rows(std::size_t(p.batch) * p.heads * mma_gradients::rows_in_arrays(p.part_rows)),
        all_rows(mma_gradients::rows_in_arrays(p.part_rows)),
        d(p.head_dim) {}
  void *K(const GpuPart &part, int buffer) const {
    return static_cast<std::byte *>(part.workspace) + std::size_t(buffer) * 4 * elements;
  }
  void *V(const GpuPart &part, int buffer) const {
    return static_cast<std::byte *>(K(part, buffer)) + 2 * elements;
  }
  Sums sums(const GpuPart &part, int which) const {
    float *const dK = static_cast<float *>(K(part, 2)) + which * 2 * elements;
    return {dK, dK + elements};
  }
  Sums own(const GpuPart &part) const { return sums(part, 0); }
  Sums of_hop(const GpuPart &part, int hop) const { return sums(part, hop ? 1 + hop % 2 : 0); }
  Sums received(const GpuPart &part, int hop) const { return sums(part, 3 + hop % 2); }
  float *lse(const GpuPart &part, bool late) const { return sums(part, 5).dK + late * rows; }
  float *D(const GpuPart &part) const { return lse(part, 0) + 2 * rows; }
  float *dQ(const GpuPart &part) const { return lse(part, 0) + 3 * rows; }
  std::size_t bytes() const { return 8 * elements + 40 * elements + 4 * rows * (3 + d); }
};

/// Adds what another GPU has found to dK (z = 0) and dV (z = 1) of the first `count` elements of each batch element. A
/// thread adds 4 of them.
__global__ void __launch_bounds__(threads)
    add(Sums sums, Sums received, int count, std::int64_t batch_stride) {
  const int i = (blockIdx.x * threads + threadIdx.x) * 4;
  if (i >= count) return;
  const std::int64_t b = blockIdx.y * batch_stride;
  const Matrix<float> to{(blockIdx.z ? sums.dV : sums.dK) + b, 1, count};
  const Matrix<const float> from{(blockIdx.z ? received.dV : received.dK) + b, 1, count};
  Vector<float, 4> x = load<4>(to(0, i));
  const Vector<float, 4> more = load<4>(from(0, i));
  for (int e = 0; e < 4; e++) x[e] += more[e];
  store<4>(to(0, i), x);
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
  const auto elements = [&](int rows) { return rows * p.kv_heads * d; };  // of a batch element
  const auto blocks = [&](int count) {
    return dim3((count / 4 + threads - 1) / threads, p.batch, 2);
  };

  // Which GPU has computed with a GPU's keys in the hop before the last, and what it sends home in this one.
  const auto helper = [&](int gpu, int hop) { return (gpu + hop - 2) % N; };
  const auto comes_home = [&](int gpu, int hop) {
    return hop > 2 && sees(p, helper(gpu, hop), hop - 2);
  };

  // Queues the transfers for a hop: its K and V go to the GPU that computes with them, and what hop - 2 has added to dK and
  // dV goes to the GPU that has these keys.
  const auto send = [&](int hop) {
    for (const int gpu : own) {
      const Traffic &mine = traffics[gpu];
      if (hop == 1) wait(mine.stream, mine.begun);
      // The sums of that hop are complete, its K and V have been read, and what arrived for it has been added.
      if (hop > 2) wait(mine.stream, mine.computed[hop - 2]);
      if (p.link == Link::kNccl) continue;
      if (hop < N) wait(mine.stream, traffics[meeting(p, gpu, hop).from].begun);
      if (hop > 2) wait(mine.stream, traffics[helper(gpu, hop)].computed[hop - 2]);
    }
    if (p.link == Link::kNccl) nccl_check(ncclGroupStart(), "ncclGroupStart");
    for (int gpu = 0; gpu < N; gpu++) {
      if (hop < N && sees(p, gpu, hop)) {
        const Meeting at = meeting(p, gpu, hop);
        const GpuPart &mine = p.parts[gpu], &theirs = p.parts[at.from];
        pass(p, gpu, static_cast<T *>(workspace.K(mine, hop % 2)), at.from,
             static_cast<const T *>(theirs.K), at.rows_k);
        pass(p, gpu, static_cast<T *>(workspace.V(mine, hop % 2)), at.from,
             static_cast<const T *>(theirs.V), at.rows_k);
      }
      if (comes_home(gpu, hop)) {
        const int from = helper(gpu, hop), rows = meeting(p, from, hop - 2).rows_k;
        const Sums to = workspace.received(p.parts[gpu], hop),
                   found = workspace.of_hop(p.parts[from], hop - 2);
        pass(p, gpu, to.dK, from, found.dK, rows);
        pass(p, gpu, to.dV, from, found.dV, rows);
      }
    }
    if (p.link == Link::kNccl) nccl_check(ncclGroupEnd(), "ncclGroupEnd");
    for (const int gpu : own) record(traffics[gpu].arrived[hop], traffics[gpu].stream);
  };

  const auto add_received = [&](int gpu, int hop) {
    const int count = elements(meeting(p, helper(gpu, hop), hop - 2).rows_k);
    launch_on<void>(stream(gpu), add, blocks(count), dim3(threads), workspace.own(p.parts[gpu]),
                    workspace.received(p.parts[gpu], hop), count, p.K_strides.batch);
  };
  const auto compute = [&](int gpu, int hop) {
    const GpuPart &mine = p.parts[gpu];
    const Meeting at = meeting(p, gpu, hop);
    const Sums sums = workspace.of_hop(mine, hop);
    // The arrays begin with whole tiles. In the first of them the rows before `first_q` have no weights.
    const int first_row = at.first_q / mma_gradients::Br * mma_gradients::Br;
    const std::size_t first = first_row * p.Q_strides.row;
    mma_gradients::launch<T, d>({.Q = static_cast<const T *>(mine.Q) + first,
                                 .K = K(gpu, hop),
                                 .V = V(gpu, hop),
                                 .dO = static_cast<const T *>(mine.dO) + first,
                                 .Q_strides = p.Q_strides,
                                 .K_strides = p.K_strides,
                                 .batch = p.batch,
                                 .heads = p.heads,
                                 .kv_heads = p.kv_heads,
                                 .rows_q = at.rows_q + at.first_q - first_row,
                                 .rows_k = at.rows_k,
                                 .causal = p.causal && hop == 0,
                                 .lse_log2 = workspace.lse(mine, at.first_q > 0) + first_row,
                                 .D = workspace.D(mine) + first_row,
                                 .dQ_sum = workspace.dQ(mine) + std::int64_t{first_row} * d,
                                 .all_rows = workspace.all_rows,
                                 .dK = sums.dK,
                                 .dV = sums.dV,
                                 .stream = mine.stream});
  };

  for (const int gpu : own) record(traffics[gpu].begun, stream(gpu));
  for (const int gpu : own) {
    const GpuPart &mine = p.parts[gpu];
    set_device(gpu);
    launch_on<void>(stream(gpu), mma_gradients::begin<T, d>,
                    dim3(workspace.all_rows / mma_gradients::num_warps, p.batch * p.heads),
                    dim3(threads), mine.O, mine.dO, p.Q_strides, mine.lse, p.part_rows,
                    rows_of(p, gpu), p.heads, p.chunk_rows, workspace.lse(mine, false),
                    workspace.lse(mine, true), workspace.D(mine), workspace.dQ(mine),
                    workspace.all_rows);
  }
  const int hops = N == 1 ? 1 : N + 2;  // in the last two nothing is computed
  for (int hop = 0; hop < hops; hop++) {
    if (hop + 1 < hops) send(hop + 1);
    for (const int gpu : own) {
      set_device(gpu);
      if (hop) wait(stream(gpu), traffics[gpu].arrived[hop]);
      // What hop - 2 has found here has been copied: this hop, or the next launch, may overwrite it.
      if (hop > 2 && p.link == Link::kCopies)
        wait(stream(gpu), traffics[(gpu + 2 * N - hop + 2) % N].arrived[hop]);
      if (comes_home(gpu, hop)) add_received(gpu, hop);
      if (hop < N && sees(p, gpu, hop)) compute(gpu, hop);
      if (hop < N) record(traffics[gpu].computed[hop], stream(gpu));
    }
  }
  for (const int gpu : own) {
    const GpuPart &mine = p.parts[gpu];
    const int rows = rows_of(p, gpu);
    set_device(gpu);
    if (rows == 0) continue;
    launch_on<void>(stream(gpu), mma_gradients::round_dQ<T, d>,
                    dim3(workspace.all_rows / 16 / mma_gradients::num_warps, p.batch * p.heads),
                    dim3(threads), workspace.dQ(mine), mine.dQ, p.Q_strides, rows, p.heads,
                    workspace.all_rows, 1 / sqrtf(d));
    launch_on<void>(stream(gpu), mma_gradients::round_sums<T>, blocks(elements(rows)),
                    dim3(threads), workspace.own(mine).dK, workspace.own(mine).dV,
                    static_cast<T *>(mine.dK), static_cast<T *>(mine.dV), elements(rows),
                    p.K_strides.batch);
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
    .gradients = true,
    .same_bits = false,
    .two_ends = true,
});
