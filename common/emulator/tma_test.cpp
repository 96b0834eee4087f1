// TMA on the emulator: what it copies, when it lands, who may touch the bytes, and what the engine does
// not see.
//
// A kernel notes the line of an instruction by `at = __LINE__` on the same line, before it.
#include "common/kernel/tma.h"

#include <doctest/doctest.h>

#include <array>
#include <functional>
#include <string>

namespace {

int at, also_at;  // lines that a kernel noted

/// Sets the emulator up for one test, and leaves it as it was.
struct Setup {
  const emulator::Settings before = emulator::settings;

  Setup() {
    emulator::settings = {.host_threads = 1};
    at = also_at = 0;
  }
  ~Setup() { emulator::settings = before; }
};

/// Rows of 64 fp16 in the emulator's global memory: row i holds 100 i, 100 i + 1, ... of 2048.
struct Tensor {
  static constexpr int d = 64;
  half *data;
  const int rows;

  static float value(int row, int col) { return static_cast<float>((row * 100 + col) % 2048); }

  explicit Tensor(int rows_of_it)
      : data(static_cast<half *>(emulator::allocate(rows_of_it * d * sizeof(half)))),
        rows(rows_of_it) {
    for (int i = 0; i < rows * d; i++) data[i] = __float2half(value(i / d, i % d));
  }
  Tensor(const Tensor &) = delete;
  Tensor &operator=(const Tensor &) = delete;
  ~Tensor() { emulator::release(data); }

  TensorMap map(int tile_rows) const {
    const Strides strides{rows * d, rows * d, d};
    return tensor_map<half>(data, strides, 1, 1, rows, d, tile_rows);
  }
};

using Kernel = std::function<void()>;

template <class Storage>
void run(dim3 block, const Kernel &kernel) {
  launch<Storage>(
      +[](const Kernel *body) { (*body)(); }, dim3(1), block, &kernel);
}

/// The message of the KernelError that a launch of one block ends with, or "" if it ends well.
template <class Storage>
std::string error_of(dim3 block, const Kernel &kernel) {
  try {
    run<Storage>(block, kernel);
  } catch (const emulator::KernelError &error) {
    return error.what();
  }
  return "";
}

constexpr int kSeeds = 20;

/// Under each of some seeds, the error of a kernel of two warps: the same, which it returns.
template <class Storage>
std::string error_under_all_seeds(const Kernel &kernel) {
  std::string first;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const std::string error = error_of<Storage>(dim3(64), kernel);
    if (seed == 1) first = error;
    CHECK(error == first);
  }
  return first;
}

std::string file_and(int line) {
  return "tma_test.cpp:" + std::to_string(line);
}

std::string error_in_thread(int line, unsigned thread, const std::string &what) {
  return file_and(line) + ": block (0,0,0) thread (" + std::to_string(thread) + ",0,0): " + what;
}

/// "load of shared memory that a TMA load at tma_test.cpp:57 by thread 0 may still be writing: ..."
std::string being_written(const std::string &operation, int line, unsigned thread) {
  return operation + " shared memory that a TMA load at " + file_and(line) + " by thread " +
         std::to_string(thread) + " may still be writing: no mbarrier_wait for its phase yet";
}

int thread_id() {
  return static_cast<int>(threadIdx.x);
}
bool is_thread(int x) {
  return thread_id() == x;
}

/// Reads an element and forgets it.
template <class T>
void read(const Reference<T> &element) {
  (void)static_cast<std::remove_const_t<T>>(element);
}

constexpr int kRows = 16, kTileBytes = kRows * 64 * 2;
using TileOf = TmaTile<kRows, 64, half>;

struct Shared {
  TileOf tile, other;
  Mbarrier landed, also_landed;
};

Shared &shared() {
  return shared_storage<Shared>();
}

/// Shared memory with barriers that every thread and the copy engine may use.
Shared &ready() {
  if (is_thread(0)) {
    mbarrier_init(shared().landed, 1);
    mbarrier_init(shared().also_landed, 1);
    mbarrier_fence_init();
  }
  __syncthreads();
  return shared();
}

/// Loads the tile as thread 0: `at` is the line.
void load_tile(Shared &smem, const TensorMap &map, int row = 0) {
  if (!is_thread(0)) return;
  mbarrier_arrive_expect_tx(smem.landed, kTileBytes);
  at = __LINE__, tma_load(smem.tile, map, row, 0, 0, smem.landed);
}

}  // namespace

TEST_CASE("tma: a load brings the tile's rows, and zeros for rows that the tensor has not") {
  const Setup setup;
  const Tensor tensor(24);
  const TensorMap map = tensor.map(kRows);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    int wrong = 0;
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      load_tile(smem, map, 16);
      mbarrier_wait(smem.landed, 0);
      for (int i = thread_id(); i < kRows * 64; i += 64) {
        const float expected = i / 64 < 8 ? Tensor::value(16 + i / 64, i % 64) : 0;
        wrong += __half2float(smem.tile(i / 64, i % 64)) != expected;
      }
    });
    CHECK(error == "");
    CHECK(wrong == 0);
  }
}
