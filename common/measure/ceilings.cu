// SPDX-License-Identifier: MIT
// What this GPU can do at most, and at which clock: tensor cores through mma.sync, shared memory and
// HBM; on Hopper also tensor cores through wgmma, and the copy engine. A program of its own, which `make
// ceilings` builds and runs; the steps are measured against it.
//
// Needs       sm_80: mma.m16n8k16
#include <cuda_fp16.h>
#include <getopt.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iomanip>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/kernel/wgmma.h"

namespace {

// 8 warps a multiprocessor, as many as two blocks of FlashAttention-2 have, or of step 11.
constexpr int warps = 4, blocks_per_sm = 2;
// A warp's loops have this many mma or ldmatrix, none of which waits for another.
constexpr int independent = 16;
constexpr int words_per_thread = 32;  // of random data: more than what a thread starts from

/// Two standard normal fp16 a word (Box and Muller), from a hash of the word's index (splitmix64).
__global__ void draw(std::uint32_t *words, std::size_t count) {
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x ^= x >> 31;
    const float radius = sqrtf(-2 * logf((static_cast<float>(x >> 40) + 0.5f) * 0x1p-24f));
    const float turn = static_cast<float>(x & 0xffffff) * 0x1p-23f;  // in units of pi
    words[i] = cvt_rn_f16x2(radius * cospif(turn), radius * sinpif(turn));
  }
}

__device__ double clock_ghz;  // of the last kernel, from its own two clocks

/// The two clocks: cycles of the multiprocessor and nanoseconds.
struct Clocks {
  long long cycles;
  std::uint64_t ns;
};

__device__ Clocks read_clocks() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return {clock64(), ns};
}

/// Ends what began at `begin`. The first thread keeps the clock, as the kernel itself saw it:
/// nvidia-smi samples it, and from outside.
__device__ void keep_clock(const Clocks &begin) {
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  const Clocks end = read_clocks();
  clock_ghz =
      static_cast<double>(end.cycles - begin.cycles) / static_cast<double>(end.ns - begin.ns);
}

/// Fragments to multiply: `rows` of A, 4 of B, from the thread's own random words.
template <int rows>
struct Operands {
  FragmentA a[rows];
  FragmentB b[4];

  __device__ explicit Operands(const std::uint32_t *random) {
    random += (blockIdx.x * blockDim.x + threadIdx.x) * words_per_thread;
    for (FragmentA &fragment : a)
      for (int i = 0; i < 4; i++) fragment[i] = *random++;
    for (FragmentB &fragment : b)
      for (int i = 0; i < 2; i++) fragment[i] = *random++;
  }
};

/// Something that depends on all sums, so that none of them is optimised away.
template <int rows, int cols>
__device__ float total(const FragmentC (&c)[rows][cols]) {
  float sum = 0;
  for (const auto &row : c)
    for (const FragmentC &fragment : row)
      for (int i = 0; i < 4; i++) sum += fragment[i];
  return sum;
}

/// mma from registers alone, with one ex2 in every `mma_per_ex2` of them (0: none).
template <int mma_per_ex2>
__global__ void __launch_bounds__(warps * 32, blocks_per_sm)
    multiply(const std::uint32_t *random, float *sink, int iterations) {
  const Operands<4> operands(random);
  FragmentC c[4][4] = {};
  float e[4] = {0.1f, 0.2f, 0.3f, 0.4f};
  const Clocks begin = read_clocks();
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
#pragma unroll
    for (int j = 0; j < independent; j++) {
      mma(c[j / 4][j % 4], operands.a[j / 4], operands.b[j % 4]);
      if constexpr (mma_per_ex2 > 0)
        if (j % mma_per_ex2 == 0) e[j / mma_per_ex2 % 4] = ex2(-e[j / mma_per_ex2 % 4]);
    }
  }
  keep_clock(begin);
  sink[blockIdx.x * blockDim.x + threadIdx.x] = total(c) + e[0] + e[1] + e[2] + e[3];
}

/// A part of shared memory for each warp, which it alone reads and writes.
struct SharedStorage {
  alignas(16) std::uint32_t words[warps][independent][4 * 32];
};

/// Fills the warp's part with random data, and names the lane's first row. 8 rows of 16 bytes that
/// follow each other lie in all banks: an ldmatrix.x4 takes 4 wavefronts, the fewest for 512 bytes.
__device__ const half *fill(SharedStorage &smem, const std::uint32_t *random) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int j = 0; j < independent; j++)
    for (int i = lane; i < 4 * 32; i += 32) smem.words[warp][j][i] = random[j * 128 + i];
  __syncwarp();
  return reinterpret_cast<const half *>(smem.words[warp][0]) + lane * 8;
}
constexpr int halfs_per_x4 = 4 * 64;  // from one ldmatrix.x4 to the next

/// ldmatrix.x4 alone.
__global__ void __launch_bounds__(warps * 32, blocks_per_sm)
    read_shared(const std::uint32_t *random, float *sink, int iterations) {
  __shared__ SharedStorage smem;
  const half *row = fill(smem, random);
  std::uint32_t x = 0;
  const Clocks begin = read_clocks();
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
#pragma unroll
    for (int j = 0; j < independent; j++) {
      const Vector<std::uint32_t, 4> r = ldmatrix_x4(row[j * halfs_per_x4]);
      x ^= r[0] ^ r[1] ^ r[2] ^ r[3];
    }
  }
  keep_clock(begin);
  sink[blockIdx.x * blockDim.x + threadIdx.x] = static_cast<float>(x);
}

/// mma whose B comes from shared memory, as in a warp that owns 32 rows: an ldmatrix.x4 brings two
/// fragments, each is multiplied with two of A.
__global__ void __launch_bounds__(warps * 32, blocks_per_sm)
    multiply_shared(const std::uint32_t *random, float *sink, int iterations) {
  __shared__ SharedStorage smem;
  const half *row = fill(smem, random);
  const Operands<2> operands(random);
  FragmentC c[2][8] = {};
  const Clocks begin = read_clocks();
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const Vector<std::uint32_t, 4> b = ldmatrix_x4(row[n / 2 * halfs_per_x4]);
      for (int m = 0; m < 2; m++) {
        mma(c[m][n], operands.a[m], {b[0], b[1]});
        mma(c[m][n + 1], operands.a[m], {b[2], b[3]});
      }
    }
  }
  keep_clock(begin);
  sink[blockIdx.x * blockDim.x + threadIdx.x] = total(c);
}

// --- Hopper ---------------------------------------------------------------------------------------
// Their bodies are there for sm_90a alone: on_hopper says whether they are.

// As the steps of Part IV have it: two warpgroups with 64 rows of Q each, and tiles of 128 keys.
constexpr int warpgroups = 2, keys = 128;

template <int d>
struct AttentionTiles {
  TmaTile<warpgroups * 64, d> Q;
  TmaTile<keys, d> K, V;
};

/// Attention's products for a tile of keys in each iteration, by wgmma: Q K^T with both operands in
/// shared memory, P V with P in registers, or one of the two; with the tile's ex2 beside them or without.
template <int d, bool scores, bool outputs, bool exponentials>
__global__ void __launch_bounds__(warpgroups * 128, 1)
    multiply_warpgroup(const std::uint32_t *random, float *sink, int iterations) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto &smem = shared_storage<AttentionTiles<d>>();
  for (int i = threadIdx.x; i < int(sizeof smem / sizeof *random); i += blockDim.x)
    reinterpret_cast<std::uint32_t *>(&smem)[i] = random[i];
  fence_proxy_async();
  __syncthreads();
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, warpgroup = warp_index() / 4;
  FragmentA p[keys / 16];
  for (int i = 0; i < words_per_thread; i++)
    p[i / 4][i % 4] = random[thread * words_per_thread + i];
  Accumulator<keys> s;
  Accumulator<d> o;
  for (int i = 0; i < s.size; i++) s(i) = 0;
  for (int i = 0; i < o.size; i++) o(i) = 0;
  float e[8] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f};
  const Clocks begin = read_clocks();
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
    wgmma_fence();
    if constexpr (scores) {
#pragma unroll
      for (int col = 0; col < d; col += 16)
        wgmma(s, k_major(smem.Q, warpgroup * 64, col), k_major(smem.K, 0, col), col > 0);
      wgmma_commit();
    }
    if constexpr (outputs) {
#pragma unroll
      for (int key = 0; key < keys; key += 16)
        wgmma(o, p[key / 16], mn_major(smem.V, key, 0), true);
      wgmma_commit();
    }
    if constexpr (exponentials) {
#pragma unroll
      for (int j = 0; j < s.size; j++) e[j % 8] = ex2(-e[j % 8]);
    }
    wgmma_wait<1>();  // the last product is under way while the next is started
  }
  wgmma_wait<0>(s, o);
  keep_clock(begin);
  float sum = 0;
  for (int i = 0; i < s.size; i++) sum += s(i);
  for (int i = 0; i < o.size; i++) sum += o(i);
  for (const float x : e) sum += x;
  sink[thread] = sum;
#endif
}

constexpr int copy_rows = 128, copy_d = 128, copy_stages = 6;  // tiles of 32 KB, 192 KB under way

struct CopiedTiles {
  TmaTile<copy_rows, copy_d> tile[copy_stages];
  Mbarrier full[copy_stages];
};

/// One thread per multiprocessor copies tiles of a tensor of so many to shared memory, again and again from
/// the first, each into the place of one that has landed.
__global__ void __launch_bounds__(32, 1) copy_tiles(const __grid_constant__ TensorMap map,
                                                    int tiles, int tiles_of_head, int iterations) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto &smem = shared_storage<CopiedTiles>();
  if (threadIdx.x > 0) return;
  for (Mbarrier &full : smem.full) mbarrier_init(full, 1);
  mbarrier_fence_init();
  const Clocks begin = read_clocks();
  int tile = blockIdx.x % tiles, stage = 0, parity = 1;
  for (int i = 0; i < iterations + copy_stages; i++) {
    if (i >= copy_stages) mbarrier_wait(smem.full[stage], parity);
    if (i < iterations) {
      mbarrier_arrive_expect_tx(smem.full[stage], sizeof *smem.tile);
      tma_load(smem.tile[stage], map, tile % tiles_of_head * copy_rows, tile / tiles_of_head, 0,
               smem.full[stage]);
    }
    tile = (tile + gridDim.x) % tiles;
    if (++stage == copy_stages) stage = 0, parity ^= 1;
  }
  keep_clock(begin);
#endif
}

// --- the program ---------------------------------------------------------------------------------

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct NoGpu : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The median milliseconds of launches, after 5 that warm the GPU up.
template <class Launch>
float median_ms(const Launch &launch, int launches = 21) {
  cudaEvent_t begin, end;
  cuda_check(cudaEventCreate(&begin), "cudaEventCreate");
  cuda_check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> ms(5 + launches);
  for (float &elapsed : ms) {
    cuda_check(cudaEventRecord(begin), "cudaEventRecord");
    launch();
    cuda_check(cudaGetLastError(), "kernel launch");
    cuda_check(cudaEventRecord(end), "cudaEventRecord");
    cuda_check(cudaEventSynchronize(end), "the kernel failed");
    cuda_check(cudaEventElapsedTime(&elapsed, begin, end), "cudaEventElapsedTime");
  }
  cuda_check(cudaEventDestroy(begin), "cudaEventDestroy");
  cuda_check(cudaEventDestroy(end), "cudaEventDestroy");
  std::sort(ms.begin() + 5, ms.end());
  return ms[5 + launches / 2];
}

using Kernel = void (*)(const std::uint32_t *random, float *sink, int iterations);

/// What a kernel did in a second, and the clock that it ran at.
struct Rate {
  double value, ghz;
};

enum Data { kRandom, kZeros };

/// Runs kernels with two blocks on each multiprocessor.
class Bench {
 public:
  Bench(const cudaDeviceProp &gpu, double seconds)
      : blocks_(blocks_per_sm * gpu.multiProcessorCount),
        launches_(std::max(21, static_cast<int>(seconds * 1000 / launch_ms))) {
    const std::size_t words = std::size_t(blocks_) * warps * 32 * words_per_thread;
    for (std::uint32_t *&data : data_)
      cuda_check(cudaMalloc(&data, words * sizeof *data), "cudaMalloc");
    cuda_check(cudaMalloc(&sink_, std::size_t(blocks_) * warps * 32 * sizeof *sink_), "cudaMalloc");
    draw<<<blocks_, 256>>>(data_[kRandom], words);
    cuda_check(cudaMemset(data_[kZeros], 0, words * sizeof *data_[kZeros]), "cudaMemset");
    cuda_check(cudaDeviceSynchronize(), "the kernel failed");
  }
  ~Bench() {
    for (std::uint32_t *data : data_) cudaFree(data);
    cudaFree(sink_);
  }

  /// What the grid does in a second, if each warp does `work` in an iteration. A launch has as many
  /// iterations as take the time of a fast step at the default shape: the clock that the GPU then
  /// keeps within its power limit is the one that the steps meet.
  Rate rate(Kernel kernel, double work, Data data = kRandom) const {
    return rate_of(work * warps * blocks_, [&](int iterations) {
      kernel<<<blocks_, warps * 32>>>(data_[data], sink_, iterations);
    });
  }

  /// The same of a kernel with one block on each multiprocessor, two warpgroups, which does `work` in an
  /// iteration.
  template <class SharedStorage>
  Rate rate_of_warpgroups(Kernel kernel, double work, Data data = kRandom) const {
    const int blocks = blocks_ / blocks_per_sm;
    return rate_of(work * blocks, [&](int iterations) {
      launch<SharedStorage>(kernel, dim3(blocks), dim3(warpgroups * 128), data_[data], sink_,
                            iterations);
    });
  }

  /// The same of the copy engine, from a tensor of so many bytes.
  Rate rate_of_copies(std::size_t bytes) const {
    constexpr int rows = 4096;
    const int blocks = blocks_ / blocks_per_sm, heads = bytes / (rows * copy_d * sizeof(half));
    std::uint32_t *from = nullptr;
    cuda_check(cudaMalloc(&from, bytes), "cudaMalloc");
    draw<<<1024, 256>>>(from, bytes / sizeof *from);
    const TensorMap map =
        tensor_map<half>(from, {0, rows * copy_d, copy_d}, 1, heads, rows, copy_d, copy_rows);
    const int tiles_of_head = rows / copy_rows;
    const Rate rate =
        rate_of(double(blocks) * sizeof(TmaTile<copy_rows, copy_d>), [&](int iterations) {
          launch<CopiedTiles>(copy_tiles, dim3(blocks), dim3(32), map, heads * tiles_of_head,
                              tiles_of_head, iterations);
        });
    cudaFree(from);
    return rate;
  }

 private:
  /// Of launches that do `work` in an iteration.
  template <class Launch>
  Rate rate_of(double work, const Launch &launch) const {
    int iterations = 1000;
    const auto once = [&] { launch(iterations); };
    iterations = std::max(1, static_cast<int>(launch_ms / median_ms(once) * 1000));
    const double ms = median_ms(once, launches_);
    double ghz;
    cuda_check(cudaMemcpyFromSymbol(&ghz, clock_ghz, sizeof ghz), "cudaMemcpyFromSymbol");
    return {work * iterations / (ms * 1e-3), ghz};
  }

  static constexpr double launch_ms = 20;
  int blocks_, launches_;
  std::uint32_t *data_[2] = {};  // kRandom, kZeros
  float *sink_ = nullptr;
};

/// Bytes a second, read plus written, of a copy between two buffers far larger than the L2 cache.
Rate copy_rate() {
  std::size_t free = 0, all = 0;
  cuda_check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
  const std::size_t bytes = std::min(std::size_t{2} << 30, free / 3 / 256 * 256);
  std::uint32_t *from = nullptr, *to = nullptr;
  cuda_check(cudaMalloc(&from, bytes), "cudaMalloc");
  cuda_check(cudaMalloc(&to, bytes), "cudaMalloc");
  draw<<<1024, 256>>>(from, bytes / sizeof *from);
  const float ms = median_ms([&] {
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice), "cudaMemcpyAsync");
  });
  cudaFree(from);
  cudaFree(to);
  return {2.0 * static_cast<double>(bytes) / (ms * 1e-3), 0};
}

/// Reads it all, and writes nothing: of random bits no thread's are all ones.
__global__ void read_all(const uint4 *from, std::size_t count, float *sink) {
  uint4 bits = {~0u, ~0u, ~0u, ~0u};
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
#pragma unroll 8
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
    const uint4 read = from[i];
    bits = {bits.x & read.x, bits.y & read.y, bits.z & read.z, bits.w & read.w};
  }
  if ((bits.x & bits.y & bits.z & bits.w) == ~0u) *sink = 1;
}

/// Bytes a second, read only: what a decoding step does.
Rate read_rate(const cudaDeviceProp &gpu) {
  std::size_t free = 0, all = 0;
  cuda_check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
  const std::size_t bytes = std::min(std::size_t{4} << 30, free / 2 / 256 * 256);
  std::uint32_t *from = nullptr;
  cuda_check(cudaMalloc(&from, bytes), "cudaMalloc");
  draw<<<1024, 256>>>(from, bytes / sizeof *from);
  const float ms = median_ms([&] {
    read_all<<<8 * gpu.multiProcessorCount, 256>>>(reinterpret_cast<const uint4 *>(from),
                                                   bytes / sizeof(uint4),
                                                   reinterpret_cast<float *>(from));
  });
  cudaFree(from);
  return {static_cast<double>(bytes) / (ms * 1e-3), 0};
}

struct Row {
  const char *name, *what, *unit;
  std::function<Rate()> measure;
};

/// What the fp32 units could do if they never waited: a multiplication and an addition per lane and
/// cycle, at the highest clock. Lanes per multiprocessor: CUDA C++ Programming Guide, 'Arithmetic
/// Instructions'.
Rate fp32_peak(const cudaDeviceProp &gpu) {
  int khz = 0;
  cuda_check(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0), "cudaDeviceGetAttribute");
  const int lanes = gpu.major == 8 && gpu.minor == 0 ? 64 : 128;
  return {2.0 * lanes * gpu.multiProcessorCount * khz * 1e3, khz * 1e-6};
}

/// Whether this program has Hopper's kernels for this GPU: they are compiled for sm_90a, one chip's.
bool on_hopper(const cudaDeviceProp &gpu) {
  cudaFuncAttributes kernel;
  cuda_check(cudaFuncGetAttributes(&kernel, copy_tiles), "cudaFuncGetAttributes");
  return gpu.major == 9 && gpu.minor == 0 && kernel.ptxVersion >= 90;
}

template <int d, bool scores, bool outputs, bool exponentials>
std::function<Rate()> wgmma_rate(const Bench &bench, Data data = kRandom) {
  constexpr double work = 2.0 * warpgroups * 64 * keys * d * (scores + outputs);
  return [&bench, data] {
    return bench.rate_of_warpgroups<AttentionTiles<d>>(
        multiply_warpgroup<d, scores, outputs, exponentials>, work, data);
  };
}

/// A tile of 64 x 128 scores is one ex2 for each, 64 of a thread, beside the d / 16 + 8 wgmma of the two
/// products.
std::vector<Row> hopper_rows(const Bench &bench) {
  return {
      {"wgmma-shared", "wgmma.m64n128k16, both operands from shared memory", "FLOP/s",
       wgmma_rate<128, true, false, false>(bench)},
      {"wgmma-registers", "with A from registers", "FLOP/s",
       wgmma_rate<128, false, true, false>(bench)},
      {"wgmma", "half of each, as in attention", "FLOP/s",
       wgmma_rate<128, true, true, false>(bench)},
      {"wgmma-zeros", "the same on zeros", "FLOP/s",
       wgmma_rate<128, true, true, false>(bench, kZeros)},
      {"wgmma-ex2", "with attention's ex2 at head dim 128", "FLOP/s",
       wgmma_rate<128, true, true, true>(bench)},
      {"wgmma-ex2-64", "with attention's ex2 at head dim 64", "FLOP/s",
       wgmma_rate<64, true, true, true>(bench)},
      {"tma-l2", "TMA: 16 MB, which the L2 cache holds", "B/s",
       [&bench] { return bench.rate_of_copies(std::size_t{16} << 20); }},
      {"tma-hbm", "TMA: 2 GB, which it does not", "B/s",
       [&bench] { return bench.rate_of_copies(std::size_t{2} << 30); }},
  };
}

std::vector<Row> rows(const Bench &bench, const cudaDeviceProp &gpu) {
  const double mma_work = independent * 2.0 * 16 * 8 * 16, load_work = independent * 512.0;
  const auto rate = [&bench](Kernel kernel, double work, Data data = kRandom) {
    return [&bench, kernel, work, data] { return bench.rate(kernel, work, data); };
  };
  // A 16 x 8 tile of scores is d / 16 mma in Q K^T, and half of a 16 x 16 operand in P V, which is
  // d / 8 mma: d / 8 in all. Its 128 exponentials are 4 ex2 of a warp. So d / 32 mma for an ex2.
  std::vector<Row> rows = {
      {"mma", "mma.m16n8k16 from registers", "FLOP/s", rate(multiply<0>, mma_work)},
      {"mma-zeros", "the same on zeros", "FLOP/s", rate(multiply<0>, mma_work, kZeros)},
      {"mma-ex2", "with attention's ex2 at head dim 128, one for 4 mma", "FLOP/s",
       rate(multiply<128 / 32>, mma_work)},
      {"mma-ex2-64", "with attention's ex2 at head dim 64, one for 2 mma", "FLOP/s",
       rate(multiply<64 / 32>, mma_work)},
      {"mma-ldmatrix", "with an ldmatrix.x4 for 4 mma", "FLOP/s", rate(multiply_shared, mma_work)},
      {"ldmatrix", "shared memory, by ldmatrix.x4", "B/s", rate(read_shared, load_work)},
      {"copy", "HBM: a copy, bytes read and written", "B/s", copy_rate},
      {"read", "HBM: bytes read, and none written", "B/s", [&gpu] { return read_rate(gpu); }},
      {"fp32-peak", "fp32 units, computed", "FLOP/s", [&gpu] { return fp32_peak(gpu); }},
  };
  if (on_hopper(gpu))
    for (const Row &row : hopper_rows(bench)) rows.push_back(row);
  else
    std::puts("SKIP: wgmma and TMA need an sm_90 GPU, and ARCH=sm_90a");
  return rows;
}

constexpr const char *kHelp =
    "usage: ceilings [options]\n"
    "\n"
    "Measures what this GPU can do at most: mma.m16n8k16, with and without the exponentials of\n"
    "attention and the loads of its operands, shared memory and HBM; on Hopper wgmma and TMA, "
    "too.\n"
    "\n"
    "  --csv FILE   write the results: name,value,unit\n"
    "  --only NAME  measure this one: mma or mma-zeros\n"
    "  --seconds N  for about so long each; default 0.5\n"
    "  --help       this\n"
    "\n"
    "Exit status: 0 measured; 1 a kernel failed; 2 bad arguments; 3 no GPU, or one before sm_80.\n";

int run(int argc, char **argv) {
  const option table[] = {{"csv", required_argument, nullptr, 'c'},
                          {"only", required_argument, nullptr, 'o'},
                          {"seconds", required_argument, nullptr, 's'},
                          {"help", no_argument, nullptr, 'h'},
                          {}};
  std::ofstream csv;
  std::string only;
  double seconds = 0;
  for (int key; (key = getopt_long(argc, argv, "h", table, nullptr)) != -1;) {
    if (key == 'h') {
      std::fputs(kHelp, stdout);
      return 0;
    }
    if (key == 'o') {
      only = optarg;
      if (only != "mma" && only != "mma-zeros")
        throw UsageError("--only " + only + ": allowed are mma, mma-zeros");
    } else if (key == 's') {
      char *end;
      seconds = std::strtod(optarg, &end);
      if (*optarg == '\0' || *end != '\0' || !(seconds >= 0.5 && seconds <= 60))
        throw UsageError(std::string("--seconds ") + optarg + ": 0.5 to 60 is allowed");
    } else if (key == 'c') {
      csv.open(optarg);
      if (!csv) throw UsageError(std::string("--csv ") + optarg + ": cannot be written");
    } else {
      return 2;  // getopt_long has said what is wrong
    }
  }
  if (optind < argc)
    throw UsageError(std::string(argv[optind]) + ": not an option; --help lists the options");

  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) throw NoGpu("no GPU here");
  cudaDeviceProp gpu;
  cuda_check(cudaGetDeviceProperties(&gpu, 0), "cudaGetDeviceProperties");
  if (gpu.major < 8) throw NoGpu("mma.m16n8k16 needs a GPU of sm_80 or later");
  std::printf("%s, %d multiprocessors\n", gpu.name, gpu.multiProcessorCount);

  const Bench bench(gpu, seconds);
  csv << "name,value,unit\n";
  for (const Row &row : rows(bench, gpu)) {
    if (!only.empty() && only != row.name) continue;
    const Rate rate = row.measure();
    std::printf("%-15s %6.4g T%-6s", row.name, rate.value / 1e12, row.unit);
    csv << row.name << "," << std::setprecision(4) << rate.value / 1e12 << ",T" << row.unit << "\n";
    if (rate.ghz > 0) {
      std::printf("  at %.3f GHz", rate.ghz);
      csv << row.name << "-clock," << rate.ghz << ",GHz\n";
    }
    std::printf("  %s\n", row.what);
  }
  return 0;
}

}  // namespace

int main(int argc, char **argv) {
  const auto complain = [](const std::exception &error, int status) {
    std::fprintf(stderr, "ceilings: %s\n", error.what());
    return status;
  };
  try {
    return run(argc, argv);
  } catch (const UsageError &error) {
    return complain(error, 2);
  } catch (const NoGpu &error) {
    return complain(error, 3);
  } catch (const std::exception &error) {
    return complain(error, 1);
  }
}
