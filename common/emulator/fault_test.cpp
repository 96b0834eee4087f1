// SPDX-License-Identifier: MIT
// Each kind of error has its tag, between the line and the thread.
#include "common/emulator/fault.h"

#include <doctest/doctest.h>

#include "common/emulator/testing.h"
#include "common/kernel/tma.h"
#include "common/kernel/wgmma.h"

namespace {

struct Shared {
  TmaTile<64, 64> tile;
  Tile<half, 4, 64> x;
  Mbarrier barrier;
};

Shared &shared() {
  return shared_storage<Shared>();
}

/// An array in global memory, rows x 64.
struct Rows {
  half *data;
  int rows;
  explicit Rows(int number)
      : data(static_cast<half *>(emulator::allocate(number * 64 * sizeof(half)))), rows(number) {}
  Rows(const Rows &) = delete;
  Rows &operator=(const Rows &) = delete;
  ~Rows() { emulator::release(data); }
};

/// The tag of the error that a warpgroup's kernel ends with.
std::string tag_after(const Kernel &kernel) {
  const std::string error = error_of<Shared>(dim3(128), kernel);
  CHECK(error.find("block (0,0,0) thread (") != std::string::npos);
  return tag;
}

}  // namespace

TEST_CASE("fault: each kind of error has its tag") {
  const Setup setup;
  const Rows memory(64);
  const Matrix<half> m{memory.data, 64, 64};
  const Matrix<const half> source{memory.data, 64, 64};
  const TensorMap map = tensor_map<half>(memory.data, {0, 0, 64}, 1, 1, 64, 64, 32);

  CHECK(tag_after([] { shared().x(0, 0) = half{static_cast<std::uint16_t>(threadIdx.x)}; }) ==
        "[race] ");
  CHECK(tag_after([&] {
          cp_async_16(shared().x(0, 0), source(0, 0));
          read(shared().x(0, 0));
        }) == "[in-flight] ");
  CHECK(tag_after([&] {
          if (is_thread(0)) cp_async_16(shared().x(0, 0), source(0, 0)), m(0, 0) = half{};
        }) == "[in-use] ");
  CHECK(tag_after([] { read(shared().x(0, 0)); }) == "[uninitialised] ");
  CHECK(tag_after([] { read(shared().x(4, 0)); }) == "[bounds] ");
  CHECK(tag_after([&] { (void)load<8>(m(0, 4)); }) == "[misaligned] ");
  CHECK(tag_after([] {
          Accumulator<64> sum;
          wgmma<half>(sum, k_major(shared().tile, 0, 0), k_major(shared().tile, 0, 0), false);
        }) == "[fence] ");
  CHECK(tag_after([] { named_barrier_sync(16, 128); }) == "[barrier] ");
  CHECK(tag_after([] {
          if (is_thread(0)) named_barrier_sync(1, 64);
        }) == "[deadlock] ");
  CHECK(tag_after([] {
          if (is_thread(0))
            __syncwarp();
          else
            __any_sync(0xffffffff, 1);
        }) == "[divergence] ");
  CHECK(tag_after([] { setmaxnreg_inc<20>(); }) == "[registers] ");
  CHECK(tag_after([&] {
          if (is_thread(0)) tma_load(shared().tile, map, 0, 0, 0, shared().barrier);
        }) == "[descriptor] ");
  CHECK(tag_after([] { throw std::runtime_error("no such page"); }) == "[exception] ");

  const std::string refused = error_of<void>(dim3(2000), [] {});
  CHECK(refused.starts_with("launch refused: "));
  CHECK(tag == "[launch] ");
  CHECK(error_of<Shared>(dim3(128), [] {}) == "");
  CHECK(tag == "");
}
