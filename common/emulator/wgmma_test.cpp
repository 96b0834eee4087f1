// wgmma on the emulator: where its operands lie, what it computes, when it lands, and the errors that a
// GPU answers with wrong numbers.
//
// A kernel notes the line of an instruction by `at = __LINE__` on the same line, before it.
#include "common/kernel/wgmma.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "common/kernel/kernel.h"

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

std::string file_and(int line) {
  return "wgmma_test.cpp:" + std::to_string(line);
}

/// Whether a message begins with a line and says this.
bool says(const std::string &message, int line, const std::string &what) {
  const bool found = message.starts_with(file_and(line) + ": block (0,0,0) thread (") &&
                     message.find(what) != std::string::npos;
  if (!found) MESSAGE(message << "\nnot at line " << line << ": " << what);
  return found;
}

constexpr int kSeeds = 20;
constexpr unsigned kThreads = 128;  // a warpgroup

int thread_id() {
  return static_cast<int>(threadIdx.x);
}
int lane_id() {
  return thread_id() % 32;
}
int warp_id() {
  return thread_id() / 32;
}

/// Small whole numbers, so that every sum is exact, and not in any regular order.
float whole_number(int i, int j, int seed) {
  return static_cast<float>((i * 37 + j * 101 + seed * 59 + i * j * 7) % 23 - 11);
}

/// Fills a tile by ordinary stores, for all threads and for the tensor cores.
template <class Tile>
void fill(Tile &tile, int rows, int cols, const std::function<float(int, int)> &number) {
  using T = std::remove_cvref_t<decltype(*tile(0, 0).pointer())>;
  for (int i = thread_id(); i < rows * cols; i += static_cast<int>(blockDim.x))
    tile(i / cols, i % cols) = from_float<T>(number(i / cols, i % cols));
  fence_proxy_async();
  __syncthreads();
}

}  // namespace

// --- where operands lie ----------------------------------------------------------------------------

namespace {

template <int Rows, int d>
struct OneTile {
  TmaTile<64, 64> before;  // so that it does not begin where shared memory does
  TmaTile<Rows, d> x;
};

/// Counts the elements of all operands of a tile that the tensor cores would find elsewhere.
template <int Rows, int d>
int misplaced() {
  int wrong = 0, seen = 0;
  run<OneTile<Rows, d>>(dim3(1), [&] {
    auto &x = shared_storage<OneTile<Rows, d>>().x;
    for (int row = 0; row < Rows; row++)
      for (int col = 0; col < d; col++)
        x(row, col) = std::bit_cast<half>(static_cast<std::uint16_t>(row * d + col));
    const auto *shared = static_cast<const std::byte *>(emulator::shared_memory());
    const auto find = [&](const emulator::SharedOperand &operand, int lines) {
      emulator::for_each_chunk(operand, 0, lines, [&](int line, int term, std::size_t address) {
        for (int i = 0; i < emulator::kChunk; i++) {
          const int row = operand.row + (operand.k_major ? line : term);
          const int col = operand.col + (operand.k_major ? term : line) + i;
          const auto *found = reinterpret_cast<const half *>(shared + address) + i;
          wrong += found->bits != row * d + col || found != x(row, col).pointer();
          seen++;
        }
      });
    };
    for (int row = 0; row < Rows; row += 8)
      for (int col = 0; col < d; col += 16) find(k_major(x, row, col), Rows - row);
    for (int row = 0; row + 16 <= Rows; row += 8)
      for (int col = 0; col < d; col += 64) find(mn_major(x, row, col), d - col);
  });
  CHECK(seen > Rows * d);
  return wrong;
}

}  // namespace

TEST_CASE_TEMPLATE("wgmma: descriptors lead to where the tile has each element", Tile,
                   OneTile<64, 64>, OneTile<64, 128>, OneTile<64, 256>, OneTile<128, 64>,
                   OneTile<128, 192>, OneTile<176, 128>, OneTile<256, 64>, OneTile<256, 256>) {
  const Setup setup;
  const auto count = []<int Rows, int d>(const OneTile<Rows, d> *) { return misplaced<Rows, d>(); };
  CHECK(count(static_cast<Tile *>(nullptr)) == 0);
}
