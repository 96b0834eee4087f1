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
//             global memory: at n = 4,096 0.04 ms beside 0.42 ms. So on two GPUs we expect an efficiency of 90% at
//             8,192 tokens, where step 70 has 68%, and 98% at 65,536.
#include "common/kernel/gpus.h"
#include "common/kernel/hopper_attention.h"

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

/// The stream of a GPU on which K and V arrive, and moments for which streams wait.
struct Traffic {
  cudaStream_t stream;
  cudaEvent_t begun;  // the launch
  std::vector<cudaEvent_t> arrived,
      computed;  // of each hop: its K and V are there, and have been read
};

const std::vector<Traffic> &traffic(int gpus) {
  static std::map<int, std::vector<Traffic>> made;
  std::vector<Traffic> &all = made[gpus];
  const auto new_event = [] {
    cudaEvent_t event;
    cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  };
  for (int gpu = int(all.size()); gpu < gpus; gpu++) {
    cuda_check(cudaSetDevice(gpu), "cudaSetDevice");
    Traffic of{{}, new_event(), {}, {}};
    cuda_check(cudaStreamCreateWithFlags(&of.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    for (int hop = 0; hop < gpus; hop++) {
      of.arrived.push_back(new_event());
      of.computed.push_back(new_event());
    }
    all.push_back(of);
  }
  return all;
}

constexpr int warps = 8;  // of a block that merges, with a row each

/// Merges the results of two sets of keys into that of both: O is the mean of the two O, with the sums of
/// their exponentials as weights. Stores it in fp32, or in the end as T.
template <class T, int d>
__global__ void merge(float *O,          // [batch, part_rows, heads, d]: of the hops so far
                      float *lse,        // [batch, heads, rows]: log2 of the sums
                      const float *O_2,  // the same of this hop
                      const float *lse_2,
                      T *O_final,  // null but for the last hop
                      int batch, int part_rows, int rows, int heads) {
  const int i = blockIdx.x * warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = i % heads, row = i / heads % rows, b = i / heads / rows;
  if (b >= batch) return;
  constexpr int n = d / 32;  // columns of a lane
  const int place = (b * part_rows + row) * heads + head, all_rows = batch * part_rows * heads;
  const Matrix<float> gO{O, all_rows, d},
      gLse{lse + (std::int64_t{b} * heads + head) * rows, rows, 1};
  const Matrix<const float> gO_2{O_2, all_rows, d},
      gLse_2{lse_2 + (std::int64_t{b} * heads + head) * rows, rows, 1};

  const float a = gLse(row, 0), b_ = gLse_2(row, 0), m = fmaxf(a, b_);
  const float sum = ex2(a - m) + ex2(b_ - m);
  const float weight = ex2(a - m) / sum, weight_2 = ex2(b_ - m) / sum;
  Vector<float, n> x = load<n>(gO(place, lane * n));
  const Vector<float, n> x_2 = load<n>(gO_2(place, lane * n));
  Vector<T, n> rounded;
  for (int c = 0; c < n; c++) {
    x[c] = x[c] * weight + x_2[c] * weight_2;
    rounded[c] = from_float<T>(x[c]);
  }
  if (O_final) {
    store<n>(Matrix<T>{O_final, all_rows, d}(place, lane * n), rounded);
    return;
  }
  store<n>(gO(place, lane * n), x);
  __syncwarp();  // all lanes have read lse
  if (lane == 0) gLse(row, 0) = m + log2f(sum);
}

template <class T, int d>
void run(const Problem &p) {
  const Workspace workspace(p);
  const std::vector<ncclComm_t> &comms = communicators(p.gpus);  // not within a group of messages
  const std::vector<Traffic> &traffics = traffic(p.gpus);
  const int N = p.gpus;
  const auto stream = [&](int gpu) { return static_cast<cudaStream_t>(p.parts[gpu].stream); };
  const auto wait = [](cudaStream_t on, cudaEvent_t event) {
    cuda_check(cudaStreamWaitEvent(on, event, 0), "cudaStreamWaitEvent");
  };
  const auto record = [](cudaEvent_t event, cudaStream_t on) {
    cuda_check(cudaEventRecord(event, on), "cudaEventRecord");
  };
  // K and V that a GPU computes with in a hop: its own, or what has arrived in one of two buffers.
  const auto K = [&](int gpu, int hop) {
    return hop ? workspace.K(p.parts[gpu], hop % 2) : p.parts[gpu].K;
  };
  const auto V = [&](int gpu, int hop) {
    return hop ? workspace.V(p.parts[gpu], hop % 2) : p.parts[gpu].V;
  };

  // Queues the way of K and V to each GPU for the hop after this one.
  const auto pass_on = [&](int hop) {
    for (int gpu = 0; gpu < N; gpu++) {
      const Traffic &mine = traffics[gpu];
      const int left = (gpu + N - 1) % N, right = (gpu + 1) % N;
      if (hop == 0) wait(mine.stream, mine.begun);
      if (hop > 1) wait(mine.stream, mine.computed[hop - 1]);  // it has read this buffer
      if (p.link == Link::kNccl) continue;
      wait(mine.stream, hop ? traffics[left].arrived[hop] : traffics[left].begun);
      if (hop > 1) wait(mine.stream, traffics[right].arrived[hop]);  // copied from this buffer
    }
    const std::size_t bytes = workspace.elements * sizeof(T);
    if (p.link == Link::kNccl) nccl_check(ncclGroupStart(), "ncclGroupStart");
    for (int gpu = 0; gpu < N; gpu++) {
      const int left = (gpu + N - 1) % N, right = (gpu + 1) % N;
      const auto pass = [&](const void *own, const void *lefts, void *to) {
        const cudaStream_t on = traffics[gpu].stream;
        if (p.link == Link::kCopies) {
          cuda_check(cudaMemcpyPeerAsync(to, gpu, lefts, left, bytes, on), "cudaMemcpyPeerAsync");
          return;
        }
        nccl_check(ncclSend(own, workspace.elements, nccl_type<T>, right, comms[gpu], on),
                   "ncclSend");
        nccl_check(ncclRecv(to, workspace.elements, nccl_type<T>, left, comms[gpu], on),
                   "ncclRecv");
      };
      pass(K(gpu, hop), K(left, hop), workspace.K(p.parts[gpu], (hop + 1) % 2));
      pass(V(gpu, hop), V(left, hop), workspace.V(p.parts[gpu], (hop + 1) % 2));
    }
    if (p.link == Link::kNccl) nccl_check(ncclGroupEnd(), "ncclGroupEnd");
    for (const Traffic &each : traffics) record(each.arrived[hop + 1], each.stream);
  };

  // Whether a GPU sees keys of the part that it has in a hop.
  const auto sees = [&](int gpu, int hop) {
    const int from = (gpu + N - hop) % N;
    return hop < N && rows_of(p, gpu) && rows_of(p, from) && (!p.causal || from <= gpu);
  };
  const auto compute = [&](int gpu, int hop) {
    const GpuPart &mine = p.parts[gpu];
    const int from = (gpu + N - hop) % N;
    bool last = true;
    for (int later = hop + 1; later < N; later++) last &= !sees(gpu, later);
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
                              .counter = workspace.counter(mine),
                              .leave_sms = hop + 1 < N ? p.leave_sms : 0,
                              .stream = mine.stream});
    record(traffics[gpu].computed[hop], stream(gpu));
    if (hop == 0) return;
    launch_on<void>(
        mine.stream, merge<T, d>, dim3((p.batch * rows_of(p, gpu) * p.heads + warps - 1) / warps),
        dim3(warps * 32), workspace.O(mine, 0), workspace.lse(mine, 0), workspace.O(mine, 1),
        workspace.lse(mine, 1), last ? static_cast<T *>(mine.O) : nullptr, p.batch, p.part_rows,
        rows_of(p, gpu), p.heads);
  };

  for (int gpu = 0; gpu < N; gpu++) record(traffics[gpu].begun, stream(gpu));
  for (int hop = 0; hop < N; hop++) {
    if (hop + 1 < N) pass_on(hop);
    for (int gpu = 0; gpu < N; gpu++) {
      cuda_check(cudaSetDevice(gpu), "cudaSetDevice");
      if (hop) wait(stream(gpu), traffics[gpu].arrived[hop]);
      if (sees(gpu, hop)) compute(gpu, hop);
    }
  }
  // A GPU is done when its neighbour has copied from it, too.
  for (int gpu = 0; gpu < N && N > 1; gpu++)
    wait(stream(gpu), traffics[(gpu + 1) % N].arrived[N - 1]);
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
