// Step 75: merge in place. A hop begins with the registers that the hop before ended with.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --gpus, --causal, --kv-heads, --type, --link, --leave-sms
// Before      step 72: two launches in a hop. One computes, and one merges its O with that of the hops before.
// Bottleneck  The merge. With n tokens on a GPU and 16 heads of 128 the last one moves 20 n KB, and no tensor core works.
// Change      No merge. A hop continues where the hop before ended: the kernel stores its registers o, m and l in fp32 for
//             each row that meets more keys, and the next hop's launch loads them before it goes on. A row that has
//             met its last key is divided by l and stored as T.
// Prediction  On two GPUs 20 n KB move in place of 36, and all of it in kernels that compute. A tile of hop 1 waits for its m
//             and o: 1,500 clocks beside the 32,800 of its products at 8,192 tokens. So by copy engines we expect
//             an efficiency of 88% at 8,192 tokens, 97% at 32,768 and 97% at 65,536, causal, where step 72 has 76% at
//             8,192. The model of chapter 72 without a merge says 97% there.
#include "common/kernel/hopper_attention.h"
#include "common/kernel/zigzag.h"

namespace {

/// What the kernel keeps of a launch's rows from hop to hop: its registers o, m and l.
struct State {
  float *O;    // [batch * heads, part_rows, d], not divided by l
  float *m_l;  // [batch * heads, part_rows, 2]
  int heads, part_rows;
  int rows;    // of the launch
  int end;     // its rows before this one meet no more keys, so they need no state
  bool begun;  // a hop before has stored a state

  /// Fills the registers of a lane. It has two rows, `row` and row + 8; four lanes share each row.
  template <int d>
  __device__ __forceinline__ void load(const hopper_attention::Place &at, int row,
                                       Accumulator<d> &o, float (&m)[2], float (&l)[2]) const {
    const int lane = threadIdx.x % 4;
    for (int r = 0; r < 2; r++) {
      const bool inside = row + 8 * r < rows;
      if (inside) {
        const Vector<float, 2> sums = ::load<2>(of_head(m_l, 2, at)(row + 8 * r, 0));
        m[r] = sums[0];
        l[r] = lane == 0 ? sums[1] : 0;  // the kernel adds the l of the four lanes at the end
      }
#pragma unroll
      for (int i = 2 * r; i < o.size; i += 4) {
        Vector<float, 2> x{};
        if (inside) x = ::load<2>(of_head(O, d, at)(row + 8 * r, i * 2 - 4 * r + lane * 2));
        o(i) = x[0];
        o(i + 1) = x[1];
      }
    }
  }

  /// Stores the registers of the lane's rows that meet more keys.
  template <int d>
  __device__ __forceinline__ void store(const hopper_attention::Place &at, int row,
                                        Accumulator<d> &o, const float (&m)[2],
                                        const float (&l)[2]) const {
    const int lane = threadIdx.x % 4;
    for (int r = 0; r < 2; r++) {
      if (row + 8 * r < end || row + 8 * r >= rows) continue;
      if (lane == 0) ::store<2>(of_head(m_l, 2, at)(row + 8 * r, 0), Vector<float, 2>{m[r], l[r]});
#pragma unroll
      for (int i = 2 * r; i < o.size; i += 4)
        ::store<2>(of_head(O, d, at)(row + 8 * r, i * 2 - 4 * r + lane * 2),
                   Vector<float, 2>{o(i), o(i + 1)});
    }
  }

 private:
  __device__ Matrix<float> of_head(float *all, int cols, const hopper_attention::Place &at) const {
    return {all + std::int64_t{at.batch * heads + at.head} * part_rows * cols, rows, cols};
  }
};

/// What each GPU needs beside its part: two buffers for K and V of others, the state of its rows, and step 39's counter.
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
  float *O(const GpuPart &part) const { return static_cast<float *>(K(part, 2)); }
  float *m_l(const GpuPart &part) const { return O(part) + rows * d; }
  unsigned *counter(const GpuPart &part) const {
    return reinterpret_cast<unsigned *>(m_l(part) + rows * 2);
  }
  std::size_t bytes() const { return 8 * elements + 4 * rows * (d + 2) + sizeof(unsigned); }
};

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
    // The queries of the first chunk have met all keys with those of GPU 0.
    const int end = last ? at.rows_q : p.causal && at.from == 0 ? p.chunk_rows : 0;
    const std::size_t first = at.first_q * p.Q_strides.row;
    hopper_attention::launch<T, d, State>({.Q = static_cast<const T *>(mine.Q) + first,
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
                                           .O = static_cast<T *>(mine.O) + first,
                                           .counter = workspace.counter(mine),
                                           .leave_sms = hop + 1 < N ? p.leave_sms : 0,
                                           .stream = mine.stream},
                                          {.O = workspace.O(mine) + at.first_q * d,
                                           .m_l = workspace.m_l(mine) + at.first_q * 2,
                                           .heads = p.heads,
                                           .part_rows = p.part_rows,
                                           .rows = at.rows_q,
                                           .end = std::min(end, at.rows_q),
                                           .begun = hop > 0});
    record(traffics[gpu].computed[hop], stream(gpu));
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
