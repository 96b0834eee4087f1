// Step 76: two chains. Half of the heads go from hop to hop on a stream of their own.
// SPDX-License-Identifier: MIT
// Needs       sm_90a: TMA, wgmma
// Takes       --gpus, --causal, --kv-heads, --type, --link
// Before      step 75: a hop is one launch, which begins when the launch of the hop before has ended.
// Bottleneck  The end of a launch. At 65,536 tokens without a mask two GPUs have 31.03 rounds of tiles in a hop, which
//             take as long as 32: in the last round most multiprocessors have nothing to do.
// Change      The heads are two halves, which do not depend on each other. Each goes through its hops on its own
//             stream, so blocks of one half begin on multiprocessors that the other half has left.
// Prediction  By copy engines, without a mask, in clocks: at 65,536 tokens 62.06 rounds take as long as 63, not 64:
//             98.0% where step 75 has 96.5%. At 131,072 tokens 125 and not 126: 98.2% where it has 97.5%. Else no
//             round fewer, and two launches more, 2 us each: a point less at 8,192 tokens, with a mask as well. There
//             both halves wait for the same K and V. By NCCL at 8,192 tokens with a mask 0.29 ms, where step 75 takes
//             0.35, if NCCL's blocks begin where those of the first half end.
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

constexpr int chains = 2;  // of hops, each of some heads

/// What each GPU needs beside its part: two buffers for K and V of others, the state of its rows, and step 39's counter
/// for each chain.
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
  unsigned *counter(const GpuPart &part, int chain) const {
    return reinterpret_cast<unsigned *>(m_l(part) + rows * 2) + chain;
  }
  std::size_t bytes() const {
    return 8 * elements + 4 * rows * (d + 2) + chains * sizeof(unsigned);
  }
};

/// The heads of a chain, from `first` on. All heads of Q that share one of K and V are in the same chain, if there are
/// several of those.
struct Heads {
  int first, count, first_kv, count_kv;
  Heads(const Problem &p, int chain) {
    const int split = p.kv_heads > 1 ? p.kv_heads : p.heads, group = p.heads / split;
    const int begin = split * chain / chains, end = split * (chain + 1) / chains;
    first = begin * group, count = (end - begin) * group;
    first_kv = p.kv_heads > 1 ? begin : 0, count_kv = p.kv_heads > 1 ? end - begin : 1;
  }
};

template <class T, int d>
void run(const Problem &p) {
  const Workspace workspace(p);
  communicators(p);  // made here, not within a group of messages
  const std::vector<Traffic> &traffics = traffic(p);
  const std::vector<Traffic> &seconds = traffic(p, 1);  // the second chain's stream and moments
  const int N = p.gpus;
  const std::vector<int> own = own_gpus(p);
  const auto stream = [&](int gpu, int chain = 0) {
    return chain ? seconds[gpu].stream : static_cast<cudaStream_t>(p.parts[gpu].stream);
  };
  const auto computed = [&](int gpu, int chain) -> const HopEvents & {
    return (chain ? seconds : traffics)[gpu].computed;
  };
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
      for (int chain = 0; chain < chains && hop > 2; chain++)  // both have read this buffer
        wait(mine.stream, computed(gpu, chain)[hop - 2]);
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

  const auto compute = [&](int gpu, int hop, int chain) {
    const GpuPart &mine = p.parts[gpu];
    const Heads heads(p, chain);
    const Meeting at = meeting(p, gpu, hop);
    bool last = true;
    for (int later = hop + 1; later < N; later++) last &= !sees(p, gpu, later);
    // The queries of the first chunk have met all keys with those of GPU 0.
    const int end = last ? at.rows_q : p.causal && at.from == 0 ? p.chunk_rows : 0;
    const std::size_t first = at.first_q * p.Q_strides.row + heads.first * p.Q_strides.head;
    const std::size_t first_kv = heads.first_kv * p.K_strides.head;
    const std::size_t row = std::size_t(heads.first) * p.part_rows + at.first_q;  // of the state
    hopper_attention::launch<T, d, State>({.Q = static_cast<const T *>(mine.Q) + first,
                                           .K = static_cast<const T *>(K(gpu, hop)) + first_kv,
                                           .V = static_cast<const T *>(V(gpu, hop)) + first_kv,
                                           .Q_strides = p.Q_strides,
                                           .K_strides = p.K_strides,
                                           .batch = p.batch,
                                           .heads = heads.count,
                                           .kv_heads = heads.count_kv,
                                           .rows_q = at.rows_q,
                                           .rows_k = at.rows_k,
                                           .causal = p.causal && hop == 0,
                                           .O = static_cast<T *>(mine.O) + first,
                                           .counter = workspace.counter(mine, chain),
                                           .leave_sms = 0,  // the other chain would begin there
                                           .stream = stream(gpu, chain)},
                                          {.O = workspace.O(mine) + row * d,
                                           .m_l = workspace.m_l(mine) + row * 2,
                                           .heads = p.heads,
                                           .part_rows = p.part_rows,
                                           .rows = at.rows_q,
                                           .end = std::min(end, at.rows_q),
                                           .begun = hop > 0});
    record(computed(gpu, chain)[hop], stream(gpu, chain));
  };

  for (const int gpu : own) {
    record(traffics[gpu].begun, stream(gpu));
    wait(stream(gpu, 1), traffics[gpu].begun);
  }
  for (int hop = 0; hop < N; hop++) {
    if (hop + 1 < N) send(hop + 1);
    for (const int gpu : own) {
      set_device(gpu);
      for (int chain = 0; chain < chains; chain++) {
        if (hop) wait(stream(gpu, chain), traffics[gpu].arrived[hop]);
        if (sees(p, gpu, hop) && Heads(p, chain).count > 0) compute(gpu, hop, chain);
      }
    }
  }
  for (const int gpu : own) {
    record(seconds[gpu].begun, stream(gpu, 1));  // and ended
    wait(stream(gpu), seconds[gpu].begun);
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
