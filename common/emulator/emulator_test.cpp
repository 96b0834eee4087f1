// SPDX-License-Identifier: MIT
// The emulator's errors, each provoked by a kernel written here, and its promises about threads:
// drawn orders, whole blocks, fresh shared memory, stacks that survive a wait.
// The kernels here do on purpose what the compiler warns of.
#pragma GCC diagnostic ignored "-Wstringop-overflow"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <csignal>
#include <functional>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/emulator/fiber.h"
#include "common/emulator/testing.h"
#include "common/program/text.h"

namespace {

/// An array in the emulator's global memory.
template <class T>
struct Global {
  T *data;

  explicit Global(int size, T value = {})
      : data(static_cast<T *>(emulator::allocate(size * sizeof(T)))) {
    std::fill_n(data, size, value);
  }
  Global(const Global &) = delete;
  Global &operator=(const Global &) = delete;
  ~Global() { emulator::release(data); }
};

/// "store races in shared memory with the load at emulator_test.cpp:57 by thread 3: no barrier ..."
std::string race(const std::string &operation, const std::string &memory,
                 const std::string &operation_before, int line_before, const std::string &who) {
  return operation + " races in " + memory + " memory with the " + operation_before + " at " +
         file_and(line_before) + " by " + who + ": no barrier between them";
}

struct Numbers {
  Tile<float, 4, 64> x;
};

Numbers &numbers() {
  return shared_storage<Numbers>();
}

/// Writes all of shared memory, and waits until all of it is written.
Numbers &written_numbers() {
  for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) numbers().x(i / 64, i % 64) = 0.0f;
  __syncthreads();
  return numbers();
}

/// Runs a kernel of two warps under many schedules. In each the race between two threads must be
/// reported, by whichever comes second; `operation` at line `at`, `also_operation` at `also_at`.
/// Returns how often that was `also_thread`.
int check_race(const std::string &memory, const std::string &operation, unsigned thread,
               const std::string &also_operation, unsigned also_thread, const Kernel &kernel) {
  int count = 0;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<Numbers>(dim3(64), kernel);
    const std::string second = error_in_thread(
        also_at, also_thread,
        race(also_operation, memory, operation, at, "thread " + std::to_string(thread)));
    const std::string first = error_in_thread(
        at, thread,
        race(operation, memory, also_operation, also_at, "thread " + std::to_string(also_thread)));
    CAPTURE(error);
    CHECK((error == first || error == second));
    count += error == second;
  }
  return count;
}

}  // namespace

// --- errors: one access ------------------------------------------------------------------------

TEST_CASE("emulator: it says how many blocks of a launch have ended") {
  const Setup setup;
  const std::uint64_t before = emulator::launch_progress().launch;
  std::vector<std::uint64_t> ended;
  run<void>(dim3(3, 2), dim3(32), [&] {
    if (threadIdx.x == 0) ended.push_back(emulator::launch_progress().ended);
  });
  CHECK(ended == std::vector<std::uint64_t>{0, 1, 2, 3, 4, 5});
  const auto [launch, all, blocks] = emulator::launch_progress();
  CHECK(launch == before + 1);
  CHECK(all == 6);
  CHECK(blocks == 6);
}

TEST_CASE("emulator: a row or column outside of a tile is an error") {
  const Setup setup;
  struct Storage {
    Tile<float, 2, 32> before, x, after;  // memory on both sides: only the view knows
  };
  for (const auto &place : {std::array{2, 0}, {0, 32}, {-1, 0}, {1, -1}}) {
    const int row = place[0], col = place[1];
    CAPTURE(row);
    CAPTURE(col);
    const std::string error = error_of<Storage>(dim3(2, 3), dim3(8, 2, 2), [&] {
      auto &smem = shared_storage<Storage>();
      if (blockIdx.x == 1 && blockIdx.y == 0 && threadIdx.x == 5 && threadIdx.y == 1 &&
          threadIdx.z == 0)
        at = __LINE__, smem.x(row, col) = 1.0f;
    });
    CHECK(error == file_and(at) + ": block (1,0,0) thread (5,1,0): row or column out of bounds");
  }
}

namespace {

/// Padding without room for it.
struct TooSmall {
  static constexpr int size = 2 * 32;
  static constexpr int offset(int row, int col) { return row * 33 + col; }
};

}  // namespace

TEST_CASE("emulator: a layout that leaves the tile's memory is an error") {
  const Setup setup;
  struct Storage {
    Tile<float, 2, 32, TooSmall> x;
    Tile<float, 1, 32> after;
  };
  const std::string error = error_of<Storage>(dim3(64), [] {
    const int i = static_cast<int>(threadIdx.x);
    at = __LINE__, shared_storage<Storage>().x(i / 32, i % 32) = 1.0f;
  });
  CHECK(error == error_in_thread(at, 63, "row or column out of bounds"));
}

TEST_CASE("emulator: a row or column outside of a matrix is an error") {
  const Setup setup;
  const Global<float> memory(64);
  const Matrix<float> m{memory.data + 16, 2, 8};  // memory on both sides
  for (const auto &place : {std::array{2, 0}, {0, 8}, {-1, 0}, {1, -1}}) {
    const int row = place[0], col = place[1];
    CAPTURE(row);
    CAPTURE(col);
    const std::string error = error_of<void>(dim3(2, 3, 4), dim3(32), [&] {
      if (blockIdx.x == 1 && blockIdx.y == 2 && blockIdx.z == 3 && is_thread(7))
        at = __LINE__, read(m(row, col));
    });
    CHECK(error == file_and(at) + ": block (1,2,3) thread (7,0,0): row or column out of bounds");
  }
}

TEST_CASE("emulator: an access outside of every allocation is an error") {
  const Setup setup;
  const auto store_to = [](float *element) {
    return error_of<Numbers>(dim3(32), [=] {
      if (is_thread(9)) at = __LINE__, Matrix<float>{element, 1, 1}(0, 0) = 1.0f;
    });
  };
  const auto load_from = [](const float *element) {
    return error_of<Numbers>(dim3(32), [=] {
      if (is_thread(9)) at = __LINE__, read(Matrix<const float>{element, 1, 1}(0, 0));
    });
  };
  const Global<float> memory(64);
  std::string error = store_to(memory.data + 64);
  CHECK(error == error_in_thread(at, 9, "store outside of every allocation"));
  error = store_to(memory.data - 1);
  CHECK(error == error_in_thread(at, 9, "store outside of every allocation"));
  error = load_from(memory.data + 64);
  CHECK(error == error_in_thread(at, 9, "load outside of every allocation"));
  CHECK(load_from(memory.data) == "");
  CHECK(store_to(memory.data + 63) == "");

  const std::vector<float> of_host(64);
  error = load_from(of_host.data());
  CHECK(error == error_in_thread(at, 9, "load outside of every allocation"));

  auto *released = static_cast<float *>(emulator::allocate(64 * sizeof(float)));
  CHECK(load_from(released) == "");
  emulator::release(released);
  CHECK(load_from(released) != "");  // or the memory is the block's own by now, and nobody wrote it

  // A vector that begins inside.
  const Global<half> ten(10);
  error = error_of<void>(dim3(32), [&] {
    if (is_thread(3)) at = __LINE__, (void)load<8>(Matrix<half>{ten.data, 1, 16}(0, 8));
  });
  CHECK(error == error_in_thread(at, 3, "load outside of every allocation"));
}

TEST_CASE("emulator: a vector that goes on past the end of its row is an error") {
  const Setup setup;
  const Global<half> memory(128);
  struct Shared {
    Tile<half, 2, 12> x;
  };
  const auto row = [&](int col) { return at = __LINE__, Matrix<half>{memory.data, 4, 20}(1, col); };
  const auto strided = [&](int col) {
    return at = __LINE__, StridedMatrix<half>{memory.data, 4, 20, 24}(1, col);
  };
  const auto shared = [](int col) { return at = __LINE__, shared_storage<Shared>().x(1, col); };
  const auto check_store = [](auto to, int col, const std::string &what) {
    const std::string error = error_of<Shared>(dim3(32), [=] {
      if (is_thread(3)) store(to(col), Vector<half, 4>{});
    });
    CHECK(error == (what.empty() ? "" : error_in_thread(at, 3, what)));
  };
  const std::string past = "4 elements, and the row has only 2 from there on";
  check_store(row, 16, "");
  check_store(strided, 16, "");
  check_store(shared, 8, "");
  check_store(row, 18, past);
  check_store(strided, 18, past);
  check_store(shared, 10, past);
  check_store(strided, 20, "row or column out of bounds");
  const std::string error = error_of<void>(dim3(32), [&] {
    if (is_thread(3)) (void)load<8>(strided(16));
  });
  CHECK(error == error_in_thread(at, 3, "8 elements, and the row has only 4 from there on"));
}

TEST_CASE("emulator: a store past the end of shared memory is an error") {
  const Setup setup;
  struct Small {
    half x[4];
  };
  const std::string error = error_of<Small>(dim3(32), [] {
    const Matrix<half> m{shared_storage<Small>().x, 1, 8};
    if (is_thread(4)) at = __LINE__, store(m(0, 0), Vector<half, 8>{});
  });
  CHECK(error == error_in_thread(at, 4, "store past the end of shared memory"));
}

TEST_CASE("emulator: a vector that is not aligned to its size is an error") {
  const Setup setup;
  const Global<half> memory(64);
  const Matrix<half> m{memory.data, 4, 16};
  const std::string where = " at an address that is not a multiple of ";

  std::string error = error_of<void>(dim3(32), [&] {
    if (is_thread(2)) at = __LINE__, (void)load<8>(m(1, 4));
  });
  CHECK(error == error_in_thread(at, 2, "16-byte load" + where + "16"));
  error = error_of<void>(dim3(32), [&] {
    if (is_thread(2)) at = __LINE__, (void)load<4>(m(1, 2));
  });
  CHECK(error == error_in_thread(at, 2, "8-byte load" + where + "8"));
  error = error_of<void>(dim3(32), [&] {
    if (is_thread(2)) at = __LINE__, store(m(0, 1), Vector<half, 2>{});
  });
  CHECK(error == error_in_thread(at, 2, "4-byte store" + where + "4"));
  error = error_of<Numbers>(dim3(32), [&] {
    if (is_thread(2)) at = __LINE__, store(numbers().x(0, 2), Vector<float, 4>{});
  });
  CHECK(error == error_in_thread(at, 2, "16-byte store" + where + "16"));
  error = error_of<void>(dim3(32), [&] {
    (void)load<8>(m(1, 0)), (void)load<4>(m(1, 4)), (void)load<2>(m(1, 2)), read(m(1, 1));
  });
  CHECK(error == "");
}

TEST_CASE("emulator: a load of shared memory that nobody wrote is an error") {
  const Setup setup;
  std::string error = error_of<Numbers>(dim3(32), [] {
    if (is_thread(30)) at = __LINE__, read(numbers().x(3, 63));
  });
  CHECK(error == error_in_thread(at, 30, "load of shared memory that nobody wrote"));
  // A vector of which the last element was never written.
  error = error_of<Numbers>(dim3(32), [] {
    if (threadIdx.x < 3) numbers().x(0, static_cast<int>(threadIdx.x)) = 1.0f;
    __syncthreads();
    if (is_thread(8)) at = __LINE__, (void)load<4>(numbers().x(0, 0));
  });
  CHECK(error == error_in_thread(at, 8, "load of shared memory that nobody wrote"));
}

// --- errors: races -----------------------------------------------------------------------------

TEST_CASE("emulator: a store and a load of two warps race, and both lines are named") {
  const Setup setup;
  const int loads_second = check_race("shared", "store", 3, "load", 40, [] {
    auto &smem = written_numbers();
    if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
    if (is_thread(40)) also_at = __LINE__, read(smem.x(1, 5));
  });
  CHECK(loads_second > 0);  // both orders are drawn
  CHECK(loads_second < kSeeds);
}

TEST_CASE("emulator: two stores of two warps race, and both lines are named") {
  const Setup setup;
  check_race("shared", "store", 63, "store", 0, [] {
    auto &smem = written_numbers();
    if (is_thread(63)) at = __LINE__, smem.x(1, 5) = 1.0f;
    if (is_thread(0)) also_at = __LINE__, smem.x(1, 5) = 1.0f;
  });
}

TEST_CASE("emulator: accesses of different widths race where they overlap") {
  const Setup setup;
  check_race("shared", "store", 1, "load", 33, [] {
    auto &smem = written_numbers();
    if (is_thread(1)) at = __LINE__, store(smem.x(1, 4), Vector<float, 4>{});
    if (is_thread(33)) also_at = __LINE__, read(smem.x(1, 7));
  });
  const std::string side_by_side = error_of<Numbers>(dim3(64), [] {
    auto &smem = written_numbers();
    if (is_thread(1)) store(smem.x(1, 4), Vector<float, 4>{});
    if (is_thread(33)) read(smem.x(1, 3)), read(smem.x(1, 8));
  });
  CHECK(side_by_side == "");
}

TEST_CASE("emulator: what was accessed in large pieces is remembered when small ones come") {
  const Setup setup;
  // Until a thread stores one float, all of shared memory is accessed by fours.
  const auto written_by_fours = []() -> Numbers & {
    auto &smem = numbers();
    for (int i = static_cast<int>(threadIdx.x); i < 64; i += static_cast<int>(blockDim.x))
      store(smem.x(i / 16, i % 16 * 4), Vector<float, 4>{});
    __syncthreads();
    return smem;
  };
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    for (int col = 4; col < 8; col++) {
      CAPTURE(col);
      // The shuffles make one come after the other, without putting them in order.
      std::string error = error_of<Numbers>(dim3(64), [&] {
        auto &smem = written_by_fours();
        if (threadIdx.x >= 32) at = __LINE__, load<4>(smem.x(1, 4));
        __shfl_xor_sync(kAllLanes, 0, 1);
        if (is_thread(40)) also_at = __LINE__, smem.x(1, col) = 1.0f;
      });
      CHECK(error ==
            error_in_thread(also_at, 40,
                            race("store", "shared", "load", at, "several threads of warp 1")));
      error = error_of<Numbers>(dim3(32), [&] {
        auto &smem = written_by_fours();
        if (is_thread(3)) at = __LINE__, store(smem.x(1, 4), Vector<float, 4>{});
        __shfl_xor_sync(kAllLanes, 0, 1);
        if (is_thread(2)) also_at = __LINE__, smem.x(1, col) = 1.0f;
      });
      CHECK(error == error_in_thread(also_at, 2, race("store", "shared", "store", at, "thread 3")));
    }
  }
}

TEST_CASE("emulator: what is wrong with a warp's first load is wrong with those after it") {
  const Setup setup;
  // The warps have loaded what all know, and the next loads are checked in short.
  const auto after_loads = []() -> Numbers & {
    auto &smem = written_numbers();
    read(smem.x(0, 0));
    __syncwarp();
    return smem;
  };
  for (const unsigned loader : {1, 40}) {  // of the same warp, and of another
    CAPTURE(loader);
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      // One element, and the last of four.
      for (const bool four : {false, true}) {
        const std::string error = error_of<Numbers>(dim3(64), [&] {
          auto &smem = after_loads();
          if (is_thread(0)) at = __LINE__, smem.x(1, 7) = 1.0f;
          if (!is_thread(static_cast<int>(loader))) return;
          also_at = __LINE__, four ? (void)load<4>(smem.x(1, 4)) : read(smem.x(1, 7));
        });
        const std::string of_loader = "thread " + std::to_string(loader);
        CHECK(
            (error == error_in_thread(also_at, loader,
                                      race("load", "shared", "store", at, "thread 0")) ||
             error == error_in_thread(at, 0, race("store", "shared", "load", also_at, of_loader))));
      }
    }
  }
  const std::string error = error_under_all_seeds<Numbers>(dim3(32), [] {
    numbers().x(0, lane_id()) = 0.0f;
    __syncwarp();
    read(numbers().x(0, 0));
    if (is_thread(3)) read(numbers().x(1, 0));
  });
  CHECK(contains(error, "load of shared memory that nobody wrote"));
  // One lane's load is known to another of its warp, which may store after a load of its own.
  CHECK(error_under_all_seeds<Numbers>(dim3(32), [&] {
          auto &smem = after_loads();
          if (is_thread(0)) read(smem.x(1, 7));
          __syncwarp();
          if (is_thread(1)) read(smem.x(1, 7)), smem.x(1, 7) = 1.0f;
        }) == "");
}

TEST_CASE("emulator: a small load is checked where all before it were large") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const std::string error = error_of<Numbers>(dim3(64), [&] {
      auto &smem = numbers();
      if (threadIdx.x < 16) store(smem.x(0, 4 * lane_id()), Vector<float, 4>{});
      __syncthreads();
      (void)load<4>(smem.x(0, 0));
      if (is_thread(0)) at = __LINE__, store(smem.x(0, 8), Vector<float, 4>{});
      if (is_thread(40)) also_at = __LINE__, read(smem.x(0, 9));
    });
    CHECK((error == error_in_thread(also_at, 40, race("load", "shared", "store", at, "thread 0")) ||
           error == error_in_thread(at, 0, race("store", "shared", "load", also_at, "thread 40"))));
  }
}

TEST_CASE("emulator: lanes of one warp race without a __syncwarp") {
  const Setup setup;
  check_race("shared", "store", 3, "load", 4, [] {
    auto &smem = written_numbers();
    if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
    if (is_thread(4)) also_at = __LINE__, read(smem.x(1, 5));
  });
  check_race("shared", "store", 3, "store", 4, [] {
    auto &smem = written_numbers();
    if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
    if (is_thread(4)) also_at = __LINE__, smem.x(1, 5) = 1.0f;
  });
}

TEST_CASE("emulator: a shuffle orders nothing") {
  const Setup setup;
  const int loads_second = check_race("shared", "store", 3, "load", 4, [] {
    auto &smem = written_numbers();
    if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
    __shfl_xor_sync(kAllLanes, 0, 1);
    if (is_thread(4)) also_at = __LINE__, read(smem.x(1, 5));
  });
  CHECK(loads_second == kSeeds);
}

TEST_CASE("emulator: a __syncwarp orders the lanes of its warp, and no others") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<Numbers>(dim3(32), [] {
      auto &smem = written_numbers();
      if (is_thread(3)) smem.x(1, 5) = 1.0f;
      __syncwarp();
      read(smem.x(1, 5));
      __syncwarp();
      if (is_thread(7)) smem.x(1, 5) = 2.0f;
      __syncwarp();
      if (is_thread(8)) smem.x(1, 5) = 3.0f;
    });
    CHECK(error == "");
  }
  check_race("shared", "store", 3, "load", 40, [] {
    auto &smem = written_numbers();
    if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
    __syncwarp();
    if (is_thread(40)) also_at = __LINE__, read(smem.x(1, 5));
  });
  check_race("shared", "store", 3, "load", 40, [] {  // warps that have passed different numbers
    auto &smem = written_numbers();
    if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
    if (threadIdx.x >= 32) __syncwarp();
    if (is_thread(40)) also_at = __LINE__, read(smem.x(1, 5));
  });
}

TEST_CASE("emulator: a __syncthreads orders all threads of the block") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<Numbers>(dim3(64), [] {
      auto &smem = written_numbers();
      if (is_thread(3)) smem.x(1, 5) = 1.0f;
      __syncthreads();
      read(smem.x(1, 5));
      __syncthreads();
      if (is_thread(40)) smem.x(1, 5) = 2.0f;
      __syncthreads();
      if (is_thread(8)) smem.x(1, 5) = 3.0f;
    });
    CHECK(error == "");
  }
}

TEST_CASE("emulator: loads do not race, nor does a thread with itself") {
  const Setup setup;
  const std::string error = error_of<Numbers>(dim3(64), [] {
    auto &smem = written_numbers();
    read(smem.x(1, 5));
    read(smem.x(1, 5));
    const int mine = static_cast<int>(threadIdx.x);
    smem.x(0, mine) = 1.0f;
    read(smem.x(0, mine));
    smem.x(0, mine) = 2.0f;
  });
  CHECK(error == "");
}

TEST_CASE("emulator: a store races with the loads of several threads") {
  const Setup setup;
  int of_warp_0 = 0, several_warps = 0;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    // The shuffle makes the loads come first, without putting them in order with the store.
    std::string error = error_of<Numbers>(dim3(64), [] {
      auto &smem = written_numbers();
      if (threadIdx.x >= 32) at = __LINE__, read(smem.x(1, 5));
      __shfl_xor_sync(kAllLanes, 0, 1);
      if (is_thread(40)) also_at = __LINE__, smem.x(1, 5) = 1.0f;
    });
    CHECK(error ==
          error_in_thread(also_at, 40,
                          race("store", "shared", "load", at, "several threads of warp 1")));
    // The __syncwarp puts warp 1's loads in order with its store, but not those of warp 0.
    error = error_of<Numbers>(dim3(64), [] {
      auto &smem = written_numbers();
      at = __LINE__, read(smem.x(1, 5));
      __syncwarp();
      if (is_thread(40)) also_at = __LINE__, smem.x(1, 5) = 1.0f;
    });
    CAPTURE(error);
    // It races with those of warp 0 that came before it.
    const bool store_second =
        error.starts_with(error_in_thread(
            also_at, 40,
            "store races in shared memory with the load at " + file_and(at) + " by ")) &&
        !contains(error, "warp 1") && !contains(error, "several warps");
    const bool load_second = error.starts_with(file_and(at) + ": ") &&
                             error.ends_with(race("load", "shared", "store", also_at, "thread 40"));
    CHECK((store_second || load_second));
    of_warp_0 += contains(error, "several threads of warp 0");
    error =
        error_of<Numbers>(dim3(96), [] {  // two warps read, and have done so when a third stores
          auto &smem = written_numbers();
          for (int i = 0; i < 2; i++) {
            if (threadIdx.x / 32 != 1) at = __LINE__, read(smem.x(1, 5));
            if (threadIdx.x / 32 == 1)
              for (int turn = 0; turn < 50; turn++) __shfl_xor_sync(kAllLanes, 0, 1);
          }
          if (is_thread(40)) also_at = __LINE__, smem.x(1, 5) = 1.0f;
        });
    several_warps += contains(error, "by threads of several warps: no barrier");
  }
  CHECK(of_warp_0 > 0);
  CHECK(several_warps > 0);
}

TEST_CASE("emulator: threads of two blocks race in global memory") {
  const Setup setup;
  const Global<float> memory(64);
  const Matrix<float> m{memory.data, 1, 64};
  const auto in_block_2 = [](unsigned thread, const std::string &what) {
    return file_and(also_at) + ": block (2,0,0) thread (" + std::to_string(thread) +
           ",0,0): " + what +
           " (the other is of another block; no fences and atomics order the two)";
  };
  std::string error = error_of<void>(dim3(3), dim3(64), [&] {
    if (blockIdx.x == 1 && is_thread(2)) at = __LINE__, m(0, 5) = 1.0f;
    __syncthreads();
    if (blockIdx.x == 2 && is_thread(2)) also_at = __LINE__, read(m(0, 5));
  });
  CHECK(error == in_block_2(2, race("load", "global", "store", at, "thread 2")));
  error = error_of<void>(dim3(3), dim3(64), [&] {
    if (blockIdx.x == 1 && is_thread(2)) at = __LINE__, read(m(0, 5));
    if (blockIdx.x == 2 && is_thread(3)) also_at = __LINE__, m(0, 5) = 1.0f;
  });
  CHECK(error == in_block_2(3, race("store", "global", "load", at, "thread 2")));
  error = error_of<void>(dim3(3), dim3(64), [&] {
    if (blockIdx.x == 1 && is_thread(60)) at = __LINE__, m(0, 5) = 1.0f;
    if (blockIdx.x == 2 && is_thread(61)) also_at = __LINE__, m(0, 5) = 1.0f;
  });
  CHECK(error == in_block_2(61, race("store", "global", "store", at, "thread 60")));

  error = error_of<void>(dim3(4), dim3(64), [&] {
    if (blockIdx.x < 3 && is_thread(2)) at = __LINE__, read(m(0, 5));
    if (blockIdx.x == 3 && is_thread(3)) also_at = __LINE__, m(0, 5) = 1.0f;
  });
  CHECK(error == file_and(also_at) + ": block (3,0,0) thread (3,0,0): " +
                     race("store", "global", "load", at, "thread 2") +
                     " (the other is of several other blocks; no fences and atomics order them)");

  error = error_of<void>(dim3(3), dim3(64), [&] {  // all load one element, each stores another
    read(m(0, 5));
    if (is_thread(0)) m(0, 8 + static_cast<int>(blockIdx.x)) = 1.0f;
  });
  CHECK(error == "");
}

/// What a launch ends with in which each of four blocks stores its part, counts itself, and the last
/// reads all parts. What is false is left out.
struct Order {
  bool barrier_before = true, fence_before = true, fence_after = true, barrier_after = true;
};
std::string last_of_four(const Order &order) {
  const Global<float> memory(256);
  const Global<unsigned> counter(1, ~0u);
  const Matrix<float> parts{memory.data, 4, 64};
  const Matrix<unsigned> missing{counter.data, 1, 1};
  return error_of<Numbers>(dim3(4), dim3(64), [&] {
    parts(static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)) = 1.0f;
    if (order.barrier_before) __syncthreads();
    if (is_thread(0)) {
      if (order.fence_before) __threadfence();
      numbers().x(0, 0) = atomic_dec(missing(0, 0), 3) == 1 ? 1.0f : 0.0f;
      if (order.fence_after) __threadfence();
    }
    if (order.barrier_after) __syncthreads();
    if (order.barrier_after ? numbers().x(0, 0) == 0.0f : blockIdx.x < 3) return;
    for (int block = 0; block < 4; block++) read(parts(block, static_cast<int>(threadIdx.x)));
  });
}

TEST_CASE("emulator: a fence, an atomic and a fence order two blocks, and nothing less does") {
  const Setup setup;
  const std::string other = "no fences and atomics order the two";
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    CHECK(last_of_four({}) == "");
    CHECK(contains(last_of_four({.barrier_before = false}), other));
    CHECK(contains(last_of_four({.fence_before = false}), other));
    CHECK(contains(last_of_four({.fence_after = false}), other));
    CHECK(contains(last_of_four({.barrier_after = false}), other));
  }
  emulator::settings.host_threads = 4;
  for (int seed = 1; seed <= kSeeds; seed++) CHECK(last_of_four({}) == "");
}

/// In place of a number of host threads: they take turns.
constexpr int kInTurns = 0;

TEST_CASE("emulator: wait_until learns what red_release_add publishes, and nothing less does") {
  const Setup setup;
  const Global<float> memory(4);
  const Global<unsigned> counters(2, 0);
  const Matrix<float> m{memory.data, 1, 4};
  const Matrix<unsigned> counter{counters.data, 1, 2};
  const auto error_with = [&](bool releases, bool acquires, bool early) {
    counters.data[0] = counters.data[1] = 0;
    return error_of<void>(dim3(2), dim3(1), [&, releases, acquires, early] {
      if (blockIdx.x == 0) {
        if (early) red_release_add(counter(0, 0), 1);
        m(0, 0) = 1.0f;
        if (releases && !early) red_release_add(counter(0, 0), 1);
        if (!releases || early) atomic_dec(counter(0, early ? 1 : 0), 1);  // 0 becomes 1
      } else {
        if (acquires)
          wait_until(counter(0, 0), 1);
        else
          while (atomic_read(counter(0, 0)) != 1) continue;
        if (early) wait_until(counter(0, 1), 1);
        read(m(0, 0));
      }
    });
  };
  for (const int host_threads : {1, 2, kInTurns}) {
    emulator::settings.host_threads = host_threads;
    emulator::settings.repeatable = host_threads == kInTurns;
    const std::string other = "no fences and atomics order the two";
    CHECK(error_with(true, true, false) == "");
    CHECK(contains(error_with(false, true, false), other));
    CHECK(contains(error_with(true, false, false), other));
    CHECK(contains(error_with(true, true, true), other));
  }
}

TEST_CASE(
    "emulator: a lane publishes what its warp has done before a __syncwarp, and no other warp's") {
  const Setup setup;
  const Global<float> memory(64);
  const Global<unsigned> counters(1, 0);
  const Matrix<float> m{memory.data, 1, 64};
  const Matrix<unsigned> counter{counters.data, 1, 1};
  struct Publishing {
    bool before = true, after = true;  // __syncwarp
    int other_lane = 5;                // whose store a thread of the other block reads
    bool exact = false;                // lanes that synchronise in halves make the clocks exact
  };
  const auto error_with = [&](const Publishing &order) {
    counters.data[0] = 0;
    return error_of<void>(dim3(2), dim3(64), [&, order] {
      const int thread = static_cast<int>(threadIdx.x);
      if (order.exact) __syncwarp(thread % 32 < 16 ? 0xffffu : 0xffff0000u);
      if (blockIdx.x == 0) {
        m(0, thread) = 1.0f;
        if (order.before) __syncwarp();
        if (thread == 0) red_release_add(counter(0, 0), 1);
      } else if (thread < 32) {
        if (thread == 0) wait_until(counter(0, 0), 1);
        if (order.after) __syncwarp();
        if (thread == (order.after ? 7 : 0)) read(m(0, order.other_lane));
        if (!order.after && thread == 7) read(m(0, 0));
      }
    });
  };
  const std::string other = "no fences and atomics order the two";
  for (const bool exact : {false, true}) {
    CAPTURE(exact);
    CHECK(error_with({.exact = exact}) == "");
    CHECK(contains(error_with({.before = false, .exact = exact}), other));
    CHECK(contains(error_with({.after = false, .exact = exact}), other));
    CHECK(contains(error_with({.other_lane = 40, .exact = exact}), other));
  }
}

TEST_CASE("emulator: a wait_until that no block can end is reported, and no other") {
  const Setup setup;
  const Global<unsigned> counters(2, 0);
  const Matrix<unsigned> counter{counters.data, 1, 2};
  // Each block does `kernel` with its number and its thread's.
  const auto error_with = [&](int host_threads, unsigned blocks, unsigned threads,
                              const std::function<void(unsigned, unsigned)> &kernel) {
    emulator::settings.host_threads = host_threads;
    emulator::settings.repeatable = host_threads == kInTurns;
    counters.data[0] = counters.data[1] = 0;
    return error_of<void>(dim3(blocks), dim3(threads), [&] { kernel(blockIdx.x, threadIdx.x); });
  };
  const std::string stuck = ": it is 0, and all blocks that have begun have ended or wait, too";
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    for (const int host_threads : {1, 2, 3, kInTurns}) {
      CAPTURE(host_threads);
      // Each block waits for the one before.
      CHECK(error_with(host_threads, 6, 32, [&](unsigned block, unsigned thread) {
              if (thread > 0) return;
              wait_until(counter(0, 0), block);
              red_release_add(counter(0, 0), 1);
            }) == "");
      // Two threads of a block wait for each other, and for a third.
      CHECK(error_with(host_threads, 1, 64, [&](unsigned, unsigned thread) {
              if (thread == 1) {
                wait_until(counter(0, 1), 1);
                red_release_add(counter(0, 0), 1);
              } else if (thread == 40) {
                red_release_add(counter(0, 1), 1);
                wait_until(counter(0, 0), 1);
              }
            }) == "");
      // Nobody changes the number.
      CHECK(contains(error_with(host_threads, 3, 32,
                                [&](unsigned block, unsigned thread) {
                                  if (block == 1 && thread == 5) wait_until(counter(0, 0), 7);
                                }),
                     "block (1,0,0) thread (5,0,0): waits for ever until the number is 7" + stuck));
      // The number skips a value: a wait for that value or more ends, and one for that value does not.
      for (const bool or_more : {true, false}) {
        const std::string error = error_with(host_threads, 2, 1, [&](unsigned block, unsigned) {
          if (block == 0) return red_release_add(counter(0, 0), 3);
          wait_until(counter(0, 0), 3);
          or_more ? wait_until_at_least(counter(0, 0), 2) : wait_until(counter(0, 0), 2);
        });
        CHECK(error.empty() == or_more);
        CHECK((or_more || contains(error, "waits for ever until the number is 2: it is 3")));
      }
      // Nobody makes it as large.
      CHECK(contains(error_with(host_threads, 1, 1,
                                [&](unsigned, unsigned) { wait_until_at_least(counter(0, 0), 7); }),
                     "waits for ever until the number is 7 or more" + stuck));
      // In a circle.
      CHECK(contains(error_with(host_threads, 2, 1,
                                [&](unsigned block, unsigned) {
                                  wait_until(counter(0, static_cast<int>(block)), 1);
                                  red_release_add(counter(0, 1 - static_cast<int>(block)), 1);
                                }),
                     "waits for ever until the number is 1" + stuck));
    }
    // A block waits for a later one, which begins only if there is room for both.
    const auto later = [&](unsigned block, unsigned) {
      if (block == 0) wait_until(counter(0, 0), 1);
      if (block == 1) red_release_add(counter(0, 0), 1);
    };
    CHECK(contains(error_with(1, 2, 1, later), "block (0,0,0) thread (0,0,0): waits for ever"));
    CHECK(error_with(2, 2, 1, later) == "");
    CHECK(error_with(kInTurns, 2, 1, later) == "");
  }
}

TEST_CASE("emulator: what a block has heard of another it tells a third") {
  const Setup setup;
  const Global<float> memory(4);
  const Global<unsigned> counters(2, ~0u);
  const Matrix<float> m{memory.data, 1, 4};
  const Matrix<unsigned> counter{counters.data, 1, 2};
  const auto kernel = [&](bool second_fences) {
    return error_of<void>(dim3(3), dim3(1), [&, second_fences] {
      if (blockIdx.x == 0) {
        m(0, 0) = 1.0f;
        __threadfence();
        atomic_dec(counter(0, 0), 1);
      } else if (blockIdx.x == 1) {
        atomic_dec(counter(0, 0), 1);
        if (second_fences) __threadfence();
        atomic_dec(counter(0, 1), 1);
      } else {
        atomic_dec(counter(0, 1), 1);
        __threadfence();
        read(m(0, 0));
        m(0, 0) = 2.0f;
      }
    });
  };
  CHECK(kernel(true) == "");
  CHECK(contains(kernel(false), "no fences and atomics order the two"));
}

TEST_CASE(
    "emulator: reductions add in an order that the seed draws, however many host threads there "
    "are") {
  const Setup setup;
  const Global<float> memory(4);
  const Matrix<float> m{memory.data, 1, 4};
  const auto sum = [&](std::uint64_t seed, int host_threads) {
    emulator::settings.seed = seed;
    emulator::settings.host_threads = host_threads;
    m.data[1] = 1;
    CHECK(error_of<void>(dim3(20), dim3(2), [&] {
            red_add(m(0, 1), 1 / (3.0f + static_cast<float>(blockIdx.x)));
          }) == "");
    return m.data[1];
  };
  std::set<float> sums;
  for (std::uint64_t seed = 1; seed <= 20; seed++) {
    sums.insert(sum(seed, 1));
    CHECK(sum(seed, 1) == sum(seed, 4));
  }
  CHECK(sums.size() > 1);
  for (const float x : sums) CHECK(x == doctest::Approx(*sums.begin()).epsilon(1e-5));
}

TEST_CASE("emulator: reductions do not race with each other, with loads and stores they do") {
  const Setup setup;
  const Global<float> memory(4);
  const Matrix<float> m{memory.data, 1, 4};
  // In each block a thread of each warp adds; one thread stores before, or loads after.
  const auto kernel = [&](int blocks, bool stores, bool loads, bool barrier) {
    m.data[0] = 0;
    return error_of<void>(dim3(blocks), dim3(64), [&, stores, loads, barrier] {
      if (stores && is_thread(0)) m(0, 0) = 3.0f;
      if (barrier) __syncthreads();
      if (threadIdx.x % 32 == 1) red_add(m(0, 0), 1);
      if (barrier) __syncthreads();
      if (loads && is_thread(0)) read(m(0, 0));
    });
  };
  const auto races = [](const std::string &error) {
    return contains(error, "races in global memory with the") && contains(error, "reduction");
  };
  CHECK(kernel(2, false, false, false) == "");
  CHECK(m.data[0] == 4);
  CHECK(kernel(1, true, true, true) == "");
  CHECK(m.data[0] == 5);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    CHECK(races(kernel(1, true, false, false)));
    CHECK(races(kernel(1, false, true, false)));
    CHECK(races(kernel(2, true, false, true)));  // the other block's
    CHECK(races(kernel(2, false, true, true)));
  }
}

TEST_CASE("emulator: a reduction is of memory that is there, and subnormal numbers are 0 to it") {
  const Setup setup;
  const Global<float> memory(2);
  const Matrix<float> m{memory.data, 1, 2};
  m.data[0] = 0x1p-127f;
  CHECK(error_of<void>(dim3(1), dim3(1), [&] { red_add(m(0, 0), 0x1p-126f); }) == "");
  CHECK(m.data[0] == 0x1p-126f);
  CHECK(contains(error_of<void>(dim3(1), dim3(1), [&] { red_add(m(0, 2), 1); }),
                 "row or column out of bounds"));
  const Matrix<float> nowhere{reinterpret_cast<float *>(16), 1, 1};
  CHECK(contains(error_of<void>(dim3(1), dim3(1), [&] { red_add(nowhere(0, 0), 1); }),
                 "reduction outside of every allocation"));
  const Matrix<float> odd{reinterpret_cast<float *>(reinterpret_cast<char *>(memory.data) + 2), 1,
                          1};
  CHECK(contains(error_of<void>(dim3(1), dim3(1), [&] { red_add(odd(0, 0), 1); }),
                 "4-byte reduction at an address that is not a multiple of 4"));
}

TEST_CASE("emulator: atomic_dec counts down and begins anew; atomics are of memory that is there") {
  const Setup setup;
  const Global<unsigned> counters(1, ~0u);
  const Matrix<unsigned> counter{counters.data, 1, 1};
  std::vector<unsigned> was;
  CHECK(error_of<void>(dim3(8), dim3(1), [&] { was.push_back(atomic_dec(counter(0, 0), 2)); }) ==
        "");
  CHECK(was == std::vector<unsigned>{~0u, 2, 1, 0, 2, 1, 0, 2});
  CHECK(contains(error_of<void>(dim3(1), dim3(1), [&] { atomic_dec(counter(0, 1), 2); }),
                 "row or column out of bounds"));
  const Matrix<unsigned> nowhere{reinterpret_cast<unsigned *>(16), 1, 1};
  CHECK(contains(error_of<void>(dim3(1), dim3(1), [&] { atomic_dec(nowhere(0, 0), 2); }),
                 "atomic outside of every allocation"));
}

TEST_CASE("emulator: blocks that are there together can wait for each other") {
  const Setup setup;
  const Global<unsigned> counters(1);
  const Matrix<unsigned> counter{counters.data, 1, 1};
  const auto meet = [&](unsigned blocks, bool one_fails) {
    const Kernel kernel = [&, blocks, one_fails] {
      if (one_fails && blockIdx.x == blocks - 1) read(counter(0, 1));
      atomic_dec(counter(0, 0), blocks - 1);
      while (atomic_read(counter(0, 0)) != 0) continue;
    };
    return error_of_work([&] {
      launch_together<Numbers>(
          +[](const Kernel *body) { (*body)(); }, dim3(blocks), dim3(1), &kernel);
    });
  };
  for (int i = 0; i < 5; i++) CHECK(meet(20, false) == "");
  // The others would wait for it for ever; they end with it.
  CHECK(contains(meet(20, true), "block (19,0,0) thread (0,0,0): row or column out of bounds"));
  CHECK(meet(257, false) == "launch refused: 257 blocks at once; at most 256 are allowed");
}

TEST_CASE(
    "emulator: with turns the same seed gives the blocks the same order, and each order is drawn") {
  const Setup setup;
  emulator::settings.repeatable = true;
  const Global<unsigned> counters(1);
  const Matrix<unsigned> counter{counters.data, 1, 1};
  const auto order = [&](std::uint64_t seed, bool together) {
    emulator::settings.seed = seed;
    counters.data[0] = 0;
    std::string came;  // who has the turn runs alone
    const Kernel kernel = [&] {
      for (int i = 0; i < 2; i++) {
        atomic_dec(counter(0, 0), 99);
        came += char('0' + blockIdx.x);
      }
    };
    const auto body = +[](const Kernel *what) { (*what)(); };
    if (together)
      launch_together<Numbers>(body, dim3(6), dim3(1), &kernel);
    else
      launch<Numbers>(body, dim3(6), dim3(1), &kernel);
    return came;
  };
  for (const bool together : {false, true}) {
    std::set<std::string> orders;
    for (std::uint64_t seed = 1; seed <= kSeeds; seed++) {
      const std::string first = order(seed, together);
      CHECK(first.size() == 12);
      for (int i = 0; i < 3; i++) CHECK(order(seed, together) == first);
      orders.insert(first);
    }
    CHECK(orders.size() == kSeeds);
  }
}

TEST_CASE("emulator: a launch beside the one before waits for what that touched") {
  const Setup setup;
  const Global<float> memory(64);
  const Matrix<float> m{memory.data, 1, 64};
  // The launch before writes elements 0 and 1, and reads 8.
  const auto error_beside = [&](const Kernel &kernel) {
    CHECK(error_of<void>(dim3(2), dim3(32), [&] {
            if (is_thread(0)) m(0, int(blockIdx.x)) = 1.0f;
            read(m(0, 8));
          }) == "");
    return error_of_work([&] {
      launch_beside<Numbers>(
          +[](const Kernel *body) { (*body)(); }, dim3(2), dim3(64), &kernel);
    });
  };
  const auto check_too_early = [&](const char *access, unsigned thread, const Kernel &kernel) {
    const std::string error = error_beside(kernel);
    CHECK(error ==
          error_in_thread(at, thread,
                          std::string(access) + " of what the launch before may still be using: no "
                                                "griddepcontrol_wait"));
  };
  const auto in_block_0 = [](int thread) { return blockIdx.x == 0 && is_thread(thread); };
  check_too_early("load", 5, [&] {
    if (in_block_0(5)) at = __LINE__, read(m(0, 1));
  });
  check_too_early("store", 5, [&] {
    if (in_block_0(5)) at = __LINE__, m(0, 8) = 2.0f;
  });
  check_too_early("load", 5, [&] {
    if (in_block_0(5)) at = __LINE__, read(m(0, 0));
    griddepcontrol_wait();
  });
  std::string error = error_beside([&] {
    read(m(0, 8));  // neither writes it
    if (in_block_0(5)) m(0, 20) = 2.0f;
    griddepcontrol_wait();
    read(m(0, 1));
    if (in_block_0(0)) m(0, 0) = 2.0f;
  });
  CHECK(error == "");
  // One thread waits for all that meet it afterwards, and for no others.
  error = error_beside([&] {
    if (is_thread(0)) griddepcontrol_wait();
    __syncthreads();
    read(m(0, 1));
  });
  CHECK(error == "");
  check_too_early("load", 40, [&] {
    if (is_thread(0)) griddepcontrol_wait();
    __syncwarp();
    if (in_block_0(40)) at = __LINE__, read(m(0, 1));
  });
  // Each block for itself: what a thread of block 0 waited for, that of block 1 did not.
  const std::string of_block_1 = error_beside([&] {
    if (in_block_0(5)) griddepcontrol_wait();
    if (blockIdx.x == 1 && is_thread(5)) at = __LINE__, read(m(0, 1));
  });
  CHECK(of_block_1.starts_with(file_and(at) + ": block (1,0,0) thread (5,0,0): load of what"));
  const Global<unsigned> counters(2);
  const Matrix<unsigned> counter{counters.data, 1, 2};
  CHECK(error_of<void>(dim3(1), dim3(1), [&] { read(counter(0, 1)); }) == "");
  CHECK(contains(error_of_work([&] {
                   const Kernel early = [&] { atomic_dec(counter(0, 1), 2); };
                   launch_beside<Numbers>(
                       +[](const Kernel *body) { (*body)(); }, dim3(1), dim3(1), &early);
                 }),
                 ": atomic of what the launch before may still be using"));
  // A launch that is not beside another needs no wait. A launch after two is beside both: it may begin
  // when the first still runs, and if the second has not waited, it cannot know when that ends.
  const auto beside = [&](const Kernel &kernel) {
    return error_of_work([&] {
      launch_beside<Numbers>(
          +[](const Kernel *body) { (*body)(); }, dim3(1), dim3(1), &kernel);
    });
  };
  error = error_of<void>(dim3(1), dim3(1), [&] { read(m(0, 1)); });
  CHECK(error == "");
  CHECK(error_beside([&] { griddepcontrol_wait(); }) == "");
  CHECK(contains(beside([&] { read(m(0, 1)); }), "no griddepcontrol_wait"));
  CHECK(error_beside([&] { griddepcontrol_wait(); }) == "");
  CHECK(beside([&] { griddepcontrol_wait(), read(m(0, 1)); }) == "");
  CHECK(error_beside([&] {}) == "");
  CHECK(contains(beside([&] { griddepcontrol_wait(); }), "launch refused: it may begin beside"));
  CHECK(error_of<void>(dim3(1), dim3(1), [&] { read(m(0, 1)); }) == "");
}

TEST_CASE("emulator: two warps of a block race in global memory without a __syncthreads") {
  const Setup setup;
  const Global<float> memory(64);
  const Matrix<float> m{memory.data, 1, 64};
  check_race("global", "store", 2, "load", 32, [&] {
    if (is_thread(2)) at = __LINE__, m(0, 5) = 1.0f;
    if (is_thread(32)) also_at = __LINE__, read(m(0, 5));
  });
  check_race("global", "store", 2, "store", 32, [&] {
    if (is_thread(2)) at = __LINE__, m(0, 5) = 1.0f;
    __syncwarp();
    if (is_thread(32)) also_at = __LINE__, m(0, 5) = 1.0f;
  });
  int of_warp_1 = 0;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    std::string error = error_of<void>(dim3(64), [&] {
      if (is_thread(2)) m(0, 5) = 1.0f;
      __syncthreads();
      read(m(0, 5));
      __syncthreads();
      if (is_thread(32)) m(0, 5) = 2.0f;
      __syncthreads();
      if (is_thread(0)) m(0, 5) = 3.0f;
    });
    CHECK(error == "");
    error = error_of<void>(dim3(64), [&] {
      at = __LINE__, read(m(0, 5));
      __syncwarp();
      if (is_thread(0)) also_at = __LINE__, m(0, 5) = 1.0f;
    });
    CAPTURE(error);
    CHECK(contains(error, " races in global memory with the "));
    of_warp_1 +=
        error == error_in_thread(also_at, 0,
                                 race("store", "global", "load", at, "several threads of warp 1"));
  }
  CHECK(of_warp_1 > 0);
}

TEST_CASE("emulator: lanes of one warp race in global memory without a __syncwarp") {
  const Setup setup;
  const Global<float> memory(64);
  const Matrix<float> m{memory.data, 1, 64};
  check_race("global", "store", 3, "load", 4, [&] {
    if (is_thread(3)) at = __LINE__, m(0, 5) = 1.0f;
    if (is_thread(4)) also_at = __LINE__, read(m(0, 5));
  });
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    std::string error = error_of<void>(dim3(64), [&] {
      if (threadIdx.x >= 32) at = __LINE__, read(m(0, 5));
      __shfl_xor_sync(kAllLanes, 0, 1);
      if (is_thread(40)) also_at = __LINE__, m(0, 5) = 1.0f;
    });
    CHECK(error ==
          error_in_thread(also_at, 40,
                          race("store", "global", "load", at, "several threads of warp 1")));
    error = error_of<void>(dim3(64), [&] {
      const int col = static_cast<int>(threadIdx.x / 32);  // an element for each warp
      if (threadIdx.x % 32 == 3) m(0, col) = 1.0f;
      __syncwarp();
      read(m(0, col));
      __syncwarp();
      if (threadIdx.x % 32 == 8) m(0, col) = 2.0f;
    });
    CHECK(error == "");
  }
}

TEST_CASE("emulator: one launch comes after the other") {
  const Setup setup;
  const Global<float> memory(64);
  const Matrix<float> m{memory.data, 1, 64};
  for (int i = 0; i < 2; i++) {
    std::string error = error_of<void>(dim3(3), dim3(64), [&] {
      if (is_thread(0)) m(0, static_cast<int>(blockIdx.x)) = 1.0f;
    });
    CHECK(error == "");
    error = error_of<void>(dim3(3), dim3(64), [&] {
      for (int col = 0; col < 3; col++) read(m(0, col));
    });
    CHECK(error == "");
  }
}

// --- errors: threads that wait for each other ----------------------------------------------------

TEST_CASE("emulator: threads that have exited do not count for a barrier") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    int passed = 0;
    const auto error_when_these_stay = [&](const std::function<bool()> &stays, const Kernel &rest) {
      passed = 0;
      return error_of<Numbers>(dim3(96), [&] {
        if (!stays()) return;
        rest();
        passed++;
      });
    };
    const Kernel barrier = [] { __syncthreads(); };
    CHECK(error_when_these_stay([] { return threadIdx.x < 32; }, barrier) == "");
    CHECK(passed == 32);
    CHECK(error_when_these_stay([] { return threadIdx.x % 32 < 20; }, barrier) == "");
    CHECK(passed == 60);
    CHECK(error_when_these_stay([] { return is_thread(95); }, barrier) == "");
    CHECK(passed == 1);
    const Kernel of_warp = [] { __syncwarp(); };
    CHECK(error_when_these_stay([] { return threadIdx.x % 32 > 3; }, of_warp) == "");
    CHECK(passed == 84);
    // The barrier orders those who are left.
    const Kernel exchange = [] {
      numbers().x(0, static_cast<int>(threadIdx.x % 32)) = 1.0f;
      __syncthreads();
      read(numbers().x(0, static_cast<int>(threadIdx.x % 32 ^ 1)));
    };
    CHECK(error_when_these_stay([] { return threadIdx.x / 32 == 1; }, exchange) == "");
    CHECK(passed == 32);
  }
}

TEST_CASE("emulator: a barrier orders nothing that an exited thread did") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<Numbers>(dim3(64), [] {
      auto &smem = written_numbers();
      if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
      if (threadIdx.x < 32) return;
      __syncthreads();
      if (is_thread(40)) also_at = __LINE__, read(smem.x(1, 5));
    });
    CAPTURE(error);
    CHECK((error == error_in_thread(also_at, 40, race("load", "shared", "store", at, "thread 3")) ||
           error == error_in_thread(at, 3, race("store", "shared", "load", also_at, "thread 40"))));
  }
}

TEST_CASE("emulator: a barrier that a thread never reaches though it has not exited") {
  const Setup setup;
  std::string error = error_of<void>(dim3(64), [] {
    if (is_thread(0))
      at = __LINE__, __syncwarp();
    else if (threadIdx.x < 40)
      also_at = __LINE__, __syncthreads();
  });
  CHECK(error == error_in_thread(at, 0,
                                 "1 of 64 threads wait for ever in __syncwarp; 24 have exited "
                                 "without reaching it; 39 wait in __syncthreads at " +
                                     file_and(also_at)));
}

TEST_CASE("emulator: a barrier that some threads never reach because they wait elsewhere") {
  const Setup setup;
  const std::string error = error_of<void>(dim3(64), [] {
    if (threadIdx.x % 32 < 10)
      at = __LINE__, __syncwarp();
    else
      also_at = __LINE__, __syncthreads();
  });
  CHECK(error == error_in_thread(at, 0,
                                 "20 of 64 threads wait for ever in __syncwarp; 44 wait in "
                                 "__syncthreads at " +
                                     file_and(also_at)));
}

TEST_CASE("emulator: a barrier is one wherever in the text threads reach it") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    std::string error = error_of<Numbers>(dim3(64), [] {
      auto &smem = written_numbers();
      if (threadIdx.x < 32) {
        if (is_thread(3)) smem.x(1, 5) = 1.0f;
        __syncthreads();
      } else {
        __syncthreads();
        read(smem.x(1, 5));
      }
    });
    CHECK(error == "");
    error = error_of<Numbers>(dim3(32), [] {
      auto &smem = written_numbers();
      if (threadIdx.x < 7) {
        if (is_thread(3)) smem.x(1, 5) = 1.0f;
        __syncwarp();
      } else {
        __syncwarp();
        read(smem.x(1, 5));
      }
    });
    CHECK(error == "");
  }
}

TEST_CASE("emulator: uniform wants all lanes, and one number of them all") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    CHECK(error_of<void>(dim3(64), [] { uniform(threadIdx.x / 32); }) == "");
    const auto says = [](const std::string &error, const std::string &what) {
      CHECK_MESSAGE(error.find(what) != std::string::npos, error);
    };
    says(error_of<void>(dim3(32), [] { uniform(threadIdx.x / 31); }),
         "uniform: a lane's number is not that of lane 0");
    says(error_of<void>(dim3(32),
                        [] {
                          if (threadIdx.x < 5)
                            uniform(1);
                          else
                            __syncwarp();
                        }),
         "lanes of one warp wait in different instructions");
  }
}

TEST_CASE("emulator: lanes of a warp that wait in two different instructions") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<void>(dim3(32), [] {
      if (threadIdx.x < 5)
        at = __LINE__, __shfl_xor_sync(kAllLanes, 1.0f, 1);
      else
        also_at = __LINE__, __syncwarp();
    });
    const std::string two = "lanes of one warp wait in different instructions: ";
    CAPTURE(error);
    CHECK(((error.starts_with(file_and(at) + ": block (0,0,0) thread (") &&
            error.ends_with("): " + two + "__shfl_xor_sync here, __syncwarp at " +
                            file_and(also_at) + " in lane 5")) ||
           (error.starts_with(file_and(also_at) + ": block (0,0,0) thread (") &&
            error.ends_with("): " + two + "__syncwarp here, __shfl_xor_sync at " + file_and(at) +
                            " in lane 0"))));
  }
}

TEST_CASE("emulator: a __syncwarp with a mask orders the lanes that it names, and no others") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    // Both halves of the warp at once, for themselves.
    const auto exchange = [](unsigned flip) {
      return error_of<Numbers>(dim3(64), [flip] {
        auto &smem = written_numbers();
        const unsigned half = threadIdx.x % 32 / 16;
        at = __LINE__, smem.x(1, static_cast<int>(threadIdx.x)) = 1.0f;
        __syncwarp(0xffffu << 16 * half);
        also_at = __LINE__, read(smem.x(1, static_cast<int>(threadIdx.x ^ flip)));
      });
    };
    CHECK(exchange(5) == "");
    const std::string error = exchange(16);
    CAPTURE(error);
    CHECK(contains(error, "races in shared memory"));
    // Lane 2 knows of lane 0 by lane 1.
    const auto by_way_of_lane_1 = [](bool ordered) {
      return error_of<Numbers>(dim3(32), [ordered] {
        auto &smem = written_numbers();
        if (is_thread(0)) at = __LINE__, smem.x(1, 5) = 1.0f;
        if (threadIdx.x < 2) __syncwarp(ordered ? 3 : 1u << threadIdx.x);
        if (threadIdx.x == 1 || threadIdx.x == 2) __syncwarp(6);
        __shfl_xor_sync(kAllLanes, 0, 1);
        if (is_thread(2)) also_at = __LINE__, smem.x(1, 5) = 2.0f;
      });
    };
    CHECK(by_way_of_lane_1(true) == "");
    CHECK(by_way_of_lane_1(false) ==
          error_in_thread(also_at, 2, race("store", "shared", "store", at, "thread 0")));
    // Three lanes read; the two that meet the third are known to it.
    const auto after_reads = [](std::uint32_t mask) {
      return error_of<Numbers>(dim3(32), [mask] {
        auto &smem = written_numbers();
        if (threadIdx.x < 2) at = __LINE__, read(smem.x(1, 5));
        if (mask >> threadIdx.x & 1) __syncwarp(mask);
        __shfl_xor_sync(kAllLanes, 0, 1);
        if (is_thread(2)) also_at = __LINE__, smem.x(1, 5) = 2.0f;
      });
    };
    CHECK(after_reads(7) == "");
    CHECK(after_reads(6).starts_with(error_in_thread(
        also_at, 2, "store races in shared memory with the load at " + file_and(at) + " by ")));
  }
}

TEST_CASE("emulator: shuffles and votes among the lanes that a mask names") {
  const Setup setup;
  int wrong = 0;
  const std::string error = error_of<void>(dim3(64), [&] {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    if (lane < 8) {
      wrong += __shfl_xor_sync(0xffu, 100 * warp + lane, 4) != 100 * warp + (lane ^ 4);
      wrong += __shfl_sync(0xffu, lane, 5) != 5;
    } else {
      wrong += !__any_sync(0xffffff00u, lane == 9) || __all_sync(0xffffff00u, lane == 9);
      wrong += !__all_sync(0xffffff00u, 1);
    }
    if (lane == 31) return;  // a full mask names those that have exited, too
    wrong += __shfl_sync(kAllLanes, lane, 12) != 12;
    wrong += !__all_sync(kAllLanes, 1);
  });
  CHECK(error == "");
  CHECK(wrong == 0);
}

TEST_CASE("emulator: a shuffle with a width stays within segments of so many lanes") {
  const Setup setup;
  int wrong = 0;
  run<void>(dim3(1), dim3(64), [&] {
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int width = 1; width <= 32; width *= 2) {
      const int segment = lane / width * width;
      for (int i = 0; i < 40; i++) {
        wrong += __shfl_sync(kAllLanes, lane, i, width) != segment + i % width;
        // Values of earlier segments can be had; instead of those of later ones, the lane's own.
        const int other = lane ^ i % 32;
        wrong += __shfl_xor_sync(kAllLanes, lane, i % 32, width) !=
                 (other < segment + width ? other : lane);
      }
    }
  });
  CHECK(wrong == 0);
  const std::string error = error_of<void>(dim3(32), [] {
    if (is_thread(6)) at = __LINE__, __shfl_sync(1u << 6, 1.0f, 1, 12);
  });
  CHECK(error ==
        error_in_thread(at, 6, "__shfl_sync: a width of 12, which is no power of two up to 32"));
}

TEST_CASE("emulator: what is wrong with a mask") {
  const Setup setup;
  std::string error = error_of<void>(dim3(32), [] {
    if (is_thread(16)) at = __LINE__, __shfl_xor_sync(0xffffu, 1.0f, 1);
  });
  CHECK(error == error_in_thread(
                     at, 16, "__shfl_xor_sync: the mask does not name the lane that executes it"));
  error = error_of<void>(dim3(32), [] {
    if (threadIdx.x < 4) at = __LINE__, __shfl_xor_sync(0xfu, 1.0f, 4);
  });
  CHECK(error.starts_with(file_and(at) + ": block (0,0,0) thread ("));
  CHECK(error.ends_with("__shfl_xor_sync from lane 4, which takes no part"));
  // A lane that is named, has not exited and does not come.
  error = error_of<void>(dim3(32), [] {
    if (threadIdx.x < 3)
      at = __LINE__, __syncwarp(0xfu);
    else
      also_at = __LINE__, __syncthreads();
  });
  CHECK(error == error_in_thread(at, 0,
                                 "3 of 32 threads wait for ever in __syncwarp; 29 wait in "
                                 "__syncthreads at " +
                                     file_and(also_at)));
  // Lanes that name different lanes.
  error = error_of<void>(dim3(32), [] {
    if (threadIdx.x < 2) at = __LINE__, __any_sync(threadIdx.x ? 0x7u : 0x3u, 1);
  });
  CHECK(error == error_in_thread(at, 0,
                                 "2 of 32 threads wait for ever in __any_sync; lane 0's mask is "
                                 "0x00000003, that of lane 1, which it names, 0x00000007; 30 have "
                                 "exited without reaching it"));
  // The second warp's; the first waits for it.
  error = error_of<void>(dim3(64), [] {
    if (threadIdx.x >= 32) at = __LINE__, __syncwarp(threadIdx.x < 48 ? 0x1ffffu : 0xffff8000u);
    also_at = __LINE__, __syncthreads();
  });
  CHECK(error == error_in_thread(at, 32,
                                 "32 of 64 threads wait for ever in __syncwarp; lane 0's mask is "
                                 "0x0001ffff, that of lane 16, which it names, 0xffff8000; 32 "
                                 "wait in __syncthreads at " +
                                     file_and(also_at)));
}

TEST_CASE("emulator: a block whose last warp is not whole") {
  const Setup setup;
  int wrong = 0, ran = 0;
  const std::string error = error_of<Numbers>(dim3(48), [&] {
    const int i = static_cast<int>(threadIdx.x);
    numbers().x(0, i) = static_cast<float>(i);
    __syncthreads();
    wrong += numbers().x(0, 47 - i) != static_cast<float>(47 - i);
    wrong += __shfl_xor_sync(kAllLanes, i, 8) != (i ^ 8);
    __syncwarp();
    numbers().x(1, i) = 1.0f;
    __syncwarp();
    read(numbers().x(1, i ^ 1));
    ran++;
  });
  CHECK(error == "");
  CHECK(ran == 48);
  CHECK(wrong == 0);
  CHECK(error_of<void>(dim3(1), [] { __syncthreads(), __syncwarp(); }) == "");
}

TEST_CASE("emulator: a launch beyond a GPU's limits is refused") {
  const Setup setup;
  bool ran = false;
  const auto try_launch = [&](dim3 grid, dim3 block) {
    return error_of<void>(grid, block, [&] { ran = true; });
  };
  const auto refused = [](const char *what, const char *value, const char *allowed) {
    return std::string("launch refused: ") + what + " is " + value + "; " + allowed + " is allowed";
  };
  CHECK(try_launch(dim3(2147483648u), dim3(32)) ==
        refused("grid.x", "2147483648", "1 to 2147483647"));
  CHECK(try_launch(dim3(2, 0), dim3(32)) == refused("grid.y", "0", "1 to 65535"));
  CHECK(try_launch(dim3(1, 65536), dim3(32)) == refused("grid.y", "65536", "1 to 65535"));
  CHECK(try_launch(dim3(1, 1, 65536), dim3(32)) == refused("grid.z", "65536", "1 to 65535"));
  CHECK(try_launch(dim3(1), dim3(0)) == refused("block.x", "0", "1 to 1024"));
  CHECK(try_launch(dim3(1), dim3(1056)) == refused("block.x", "1056", "1 to 1024"));
  CHECK(try_launch(dim3(1), dim3(1, 2048)) == refused("block.y", "2048", "1 to 1024"));
  CHECK(try_launch(dim3(1), dim3(1, 1, 65)) == refused("block.z", "65", "1 to 64"));
  CHECK(try_launch(dim3(1), dim3(64, 32)) == refused("threads per block", "2048", "1 to 1024"));
  struct Large {
    std::byte bytes[227 * 1024];
  };
  struct TooLarge {
    std::byte bytes[227 * 1024 + 1];
  };
  CHECK(error_of<TooLarge>(dim3(32), [&] { ran = true; }) ==
        refused("shared memory per block, in bytes,", "232449", "0 to 232448"));
  CHECK(!ran);
  CHECK(error_of<Large>(dim3(32), [] {}) == "");
  CHECK(try_launch(dim3(1), dim3(8, 2, 2)) == "");
  CHECK(try_launch(dim3(1, 65535), dim3(1)) == "");
  CHECK(try_launch(dim3(1), dim3(1024)) == "");
  CHECK(ran);
}

TEST_CASE("emulator: an exception in a thread ends the launch and names the thread") {
  const Setup setup;
  for (const int host_threads : {1, 2}) {
    emulator::settings.host_threads = host_threads;
    std::string error = error_of<void>(dim3(3), dim3(64), [] {
      __syncthreads();
      if (blockIdx.x == 1 && is_thread(33)) throw std::runtime_error("no such page");
      __syncthreads();
    });
    CHECK(error == "block (1,0,0) thread (33,0,0): no such page");
    CHECK(tag == "[exception] ");
    error = error_of<void>(dim3(64), [] {
      if (is_thread(7)) throw 7;
    });
    CHECK(error == "block (0,0,0) thread (7,0,0): an exception that is no std::exception");
    CHECK(error_of<void>(dim3(64), [] { __syncthreads(); }) == "");
  }
}

TEST_CASE("emulator: a program may touch memory in thousands of places") {
  const Setup setup;
  // A place as the compiler makes it (libstdc++ and libc++ alike): a pointer to these.
  struct Place {
    const char *file, *function;
    unsigned line, column;
  };
  static_assert(sizeof(Where) == sizeof(const Place *));
  std::vector<Place> places(3001);
  for (unsigned i = 0; i < places.size(); i++) places[i] = {"many.cu", "kernel", i + 1, 1};
  const auto touch = [&](int count, bool race) {
    return error_of<Numbers>(dim3(1), [&, count, race] {
      for (int i = 0; i < count; i++) numbers().x(0, 0, std::bit_cast<Where>(&places[i])) = 1.0f;
      if (race) read(numbers().x(1, 1, std::bit_cast<Where>(&places[count])));
    });
  };
  CHECK(touch(3000, false) == "");
  CHECK(touch(3000, true) ==
        "many.cu:3001: block (0,0,0) thread (0,0,0): load of shared memory that nobody wrote");
}

TEST_CASE(
    "emulator: races are told apart from accesses long ago, however many barriers lie between") {
  const Setup setup;
  // 16,384 barriers, what 14 bits can count.
  std::string error = error_of<Numbers>(dim3(64), [] {
    auto &smem = written_numbers();
    if (is_thread(3)) smem.x(1, 5) = 1.0f;
    for (int i = 0; i < 16384; i++) __syncthreads();
    if (is_thread(40)) smem.x(1, 5) = 2.0f;
    for (int i = 0; i < 16384; i++) __syncwarp();
    if (is_thread(41)) smem.x(1, 5) = 3.0f;
  });
  CHECK(error == "");
  const Global<float> memory(64);
  const Matrix<float> m{memory.data, 1, 64};
  error = error_of<void>(dim3(64), [&] {
    if (is_thread(3)) m(0, 5) = 1.0f;
    for (int i = 0; i < 16384; i++) __syncthreads();
    if (is_thread(40)) m(0, 5) = 2.0f;
    for (int i = 0; i < 16384; i++) __syncwarp();
    if (is_thread(41)) m(0, 5) = 3.0f;
  });
  CHECK(error == "");
  // Blocks 0 and 32,767, what 15 bits can count.
  error = error_of<void>(dim3(32768), dim3(1), [&] {
    if (blockIdx.x == 0) at = __LINE__, m(0, 5) = 1.0f;
    if (blockIdx.x == 32767) also_at = __LINE__, m(0, 5) = 1.0f;
  });
  CHECK(error == file_and(also_at) + ": block (32767,0,0) thread (0,0,0): " +
                     race("store", "global", "store", at, "thread 0") +
                     " (the other is of another block; no fences and atomics order the two)");
}

TEST_CASE("emulator: lanes of a warp may store one value to one place in one line") {
  const Setup setup;
  const Global<float> memory(64);
  const Matrix<float> m{memory.data, 1, 64};
  const auto error_of_stores = [&](unsigned threads, bool same_value, bool same_line) {
    return error_of<Numbers>(dim3(threads), [&, same_value, same_line] {
      const float value = same_value ? 7.0f : static_cast<float>(threadIdx.x);
      if (same_line || threadIdx.x % 2)
        numbers().x(0, 0) = value, m(0, 5) = value;
      else
        numbers().x(0, 0) = value, m(0, 5) = value;
    });
  };
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    CHECK(error_of_stores(32, true, true) == "");
    CHECK(
        contains(error_of_stores(32, false, true), "store races in shared memory with the store"));
    CHECK(
        contains(error_of_stores(32, true, false), "store races in shared memory with the store"));
    CHECK(contains(error_of_stores(64, true, true), "store races in shared memory with the store"));
  }
}

TEST_CASE("emulator: registers hold no zeros by luck") {
  const Setup setup;
  // Two blocks: the second runs on the stacks of the first, which left zeros there.
  for (const bool waits : {false, true}) {
    int not_nan = 0;
    run<void>(dim3(2), dim3(64), [&] {
      volatile float l[16];
      for (int i = 0; i < 16; i++) not_nan += !std::isnan(l[i]);
      for (int i = 0; i < 16; i++) l[i] = 0;
      if (waits) __syncthreads();
    });
    CHECK(not_nan == 0);
  }
}

TEST_CASE("emulator: after an error it works as before") {
  const Setup setup;
  const Global<float> memory(64);
  const auto check_good_launch = [&] {
    std::fill_n(memory.data, 64, 0.0f);
    const std::string error = error_of<Numbers>(dim3(64), [&] {
      const int i = static_cast<int>(threadIdx.x);
      numbers().x(0, i) = static_cast<float>(i);
      __syncthreads();
      const float other = __shfl_xor_sync(kAllLanes, static_cast<float>(1000 * i), 1);
      Matrix<float>{memory.data, 1, 64}(0, i) = numbers().x(0, 63 - i) + other;
    });
    CHECK(error == "");
    int wrong = 0;
    for (int i = 0; i < 64; i++)
      wrong += memory.data[i] != static_cast<float>(63 - i + 1000 * (i ^ 1));
    CHECK(wrong == 0);
  };
  check_good_launch();
  for (int i = 0; i < 3; i++) {
    // Threads that wait for ever.
    std::string error = error_of<Numbers>(dim3(64), [] {
      if (!is_thread(5))
        __syncthreads();
      else
        __syncwarp();
    });
    CHECK(contains(error, "63 of 64 threads wait for ever"));
    check_good_launch();
    // Threads stopped in the middle by another's error.
    error = error_of<Numbers>(dim3(64), [] {
      auto &smem = written_numbers();
      if (is_thread(5)) smem.x(9, 9) = 1.0f;
      __syncwarp();
      __shfl_xor_sync(kAllLanes, 1, 1);
    });
    CHECK(contains(error, "thread (5,0,0): row or column out of bounds"));
    check_good_launch();
  }
  // The same while other blocks run on other threads of the host.
  emulator::settings.host_threads = 3;
  const std::string error = error_of<Numbers>(dim3(20), dim3(64), [] {
    auto &smem = written_numbers();
    if (blockIdx.x == 7 && is_thread(5)) smem.x(9, 9) = 1.0f;
    __syncthreads();
  });
  CHECK(contains(error, "block (7,0,0) thread (5,0,0): row or column out of bounds"));
  check_good_launch();
}

// --- blocks and threads --------------------------------------------------------------------------

TEST_CASE("emulator: every thread of every block runs once and knows where it is") {
  const Setup setup;
  for (const int host_threads : {1, 3}) {
    emulator::settings.host_threads = host_threads;
    std::vector<std::atomic<int>> runs(3 * 4 * 5 * 64);
    std::atomic<int> elsewhere = 0;
    run<void>(dim3(3, 4, 5), dim3(8, 2, 4), [&] {
      const bool right_sizes = gridDim.x == 3 && gridDim.y == 4 && gridDim.z == 5 &&
                               blockDim.x == 8 && blockDim.y == 2 && blockDim.z == 4;
      const bool inside = blockIdx.x < 3 && blockIdx.y < 4 && blockIdx.z < 5 && threadIdx.x < 8 &&
                          threadIdx.y < 2 && threadIdx.z < 4;
      const unsigned block = (blockIdx.z * 4 + blockIdx.y) * 3 + blockIdx.x;
      const unsigned thread = (threadIdx.z * 2 + threadIdx.y) * 8 + threadIdx.x;
      if (right_sizes && inside)
        runs[block * 64 + thread]++;
      else
        elsewhere++;
    });
    CHECK(std::all_of(runs.begin(), runs.end(), [](const auto &count) { return count == 1; }));
    CHECK(elsewhere == 0);
  }
}

TEST_CASE("emulator: a warp is 32 threads in the order of x, then y, then z") {
  const Setup setup;
  int wrong = 0;
  run<void>(dim3(1), dim3(4, 4, 4), [&] {
    const int thread = static_cast<int>((threadIdx.z * 4 + threadIdx.y) * 4 + threadIdx.x);
    for (int mask = 1; mask < 32; mask *= 2)
      wrong += __shfl_xor_sync(kAllLanes, thread, mask) != (thread ^ mask);
    for (int lane = 0; lane < 32; lane++)
      wrong += __shfl_sync(kAllLanes, thread, lane) != thread / 32 * 32 + lane;
  });
  CHECK(wrong == 0);
}

TEST_CASE("emulator: threads keep their indices across a wait") {
  const Setup setup;
  int wrong = 0;
  run<void>(dim3(2, 2), dim3(16, 4), [&] {
    const dim3 thread = threadIdx, block = blockIdx;
    for (int i = 0; i < 3; i++) {
      __syncthreads();
      wrong += thread.x != threadIdx.x || thread.y != threadIdx.y || block.x != blockIdx.x ||
               block.y != blockIdx.y;
      __syncwarp();
      wrong += thread.x != threadIdx.x || thread.y != threadIdx.y;
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("emulator: a launch passes its arguments, converted to the kernel's parameters") {
  const Setup setup;
  static double sum;
  sum = 0;
  launch<void>(
      +[](float a, long b, const int *c) {
        if (is_thread(0)) sum = a + static_cast<double>(b) + (c ? 0 : 1000);
      },
      dim3(1), dim3(32), 0.5, 7, nullptr);
  CHECK(sum == 1007.5);
}

TEST_CASE("emulator: the order of threads is drawn from the seed") {
  const Setup setup;
  // Two writers of one variable with no barrier between them; it goes around the views, which would
  // report the race. Its value is that of whoever came last.
  std::vector<std::vector<unsigned>> orders;
  std::vector<unsigned> values;
  for (int seed = 1; seed <= 5; seed++) {
    emulator::settings.seed = seed;
    std::vector<unsigned> order[2];
    unsigned value[2];
    for (const int i : {0, 1})
      run<void>(dim3(1), dim3(64), [&] {
        __syncthreads();
        order[i].push_back(threadIdx.x);
        value[i] = threadIdx.x / 32;
      });
    CHECK(order[0] == order[1]);
    CHECK(value[0] == value[1]);
    CHECK(value[0] == order[0].back() / 32);
    orders.push_back(order[0]);
    values.push_back(value[0]);
    std::vector<unsigned> all(64);
    std::iota(all.begin(), all.end(), 0u);
    CHECK(std::is_permutation(order[0].begin(), order[0].end(), all.begin(), all.end()));
  }
  std::sort(orders.begin(), orders.end());
  CHECK(std::unique(orders.begin(), orders.end()) - orders.begin() >= 2);
  CHECK(std::count(values.begin(), values.end(), 0) > 0);
  CHECK(std::count(values.begin(), values.end(), 1) > 0);
}

TEST_CASE("emulator: the blocks of a launch run their threads in different orders") {
  const Setup setup;
  std::array<std::vector<unsigned>, 4> orders;
  run<void>(dim3(4), dim3(64), [&] { orders[blockIdx.x].push_back(threadIdx.x); });
  CHECK(orders[0] != orders[1]);
  CHECK(orders[1] != orders[2]);
  CHECK(orders[2] != orders[3]);
}

TEST_CASE("emulator: shared memory is NaN at the start of each block, and aligned") {
  const Setup setup;
  struct Storage {
    Tile<float, 4, 32> a;
    Tile<half, 1, 32> b;
  };
  int blocks = 0, not_nan = 0, not_aligned = 0;
  run<Storage>(dim3(3), dim3(32), [&] {
    auto &smem = shared_storage<Storage>();
    if (is_thread(0)) {
      blocks++;
      for (int i = 0; i < 4 * 32; i++) not_nan += !std::isnan(*smem.a(i / 32, i % 32).pointer());
      for (int i = 0; i < 32; i++) not_nan += !std::isnan(half_to_float(*smem.b(0, i).pointer()));
      not_aligned += reinterpret_cast<std::uintptr_t>(&smem) % 1024 != 0;
    }
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x);
    for (int row = 0; row < 4; row++) smem.a(row, lane) = 1.0f;
    smem.b(0, lane) = __float2half(1.0f);
  });
  CHECK(blocks == 3);
  CHECK(not_nan == 0);
  CHECK(not_aligned == 0);
  // What the block before wrote counts for nothing.
  const std::string error = error_of<Numbers>(dim3(2), dim3(32), [] {
    if (blockIdx.x == 0) written_numbers();
    if (blockIdx.x == 1 && is_thread(6)) at = __LINE__, read(numbers().x(1, 1));
  });
  CHECK(error ==
        file_and(at) + ": block (1,0,0) thread (6,0,0): load of shared memory that nobody wrote");
}

TEST_CASE("emulator: global memory is NaN when allocated, and aligned to 256 bytes") {
  for (const std::size_t bytes : {2, 100, 4096, 5000}) {
    CAPTURE(bytes);
    auto *memory = static_cast<unsigned char *>(emulator::allocate(bytes));
    CHECK(reinterpret_cast<std::uintptr_t>(memory) % 256 == 0);
    CHECK(std::all_of(memory, memory + bytes, [](unsigned char byte) { return byte == 0xff; }));
    emulator::release(memory);
  }
}

TEST_CASE("emulator: a small step outside of one allocation does not land in another") {
  std::vector<std::uintptr_t> begins;
  for (int i = 0; i < 20; i++)
    begins.push_back(reinterpret_cast<std::uintptr_t>(emulator::allocate(256)));
  std::sort(begins.begin(), begins.end());
  for (std::size_t i = 1; i < begins.size(); i++) CHECK(begins[i] - begins[i - 1] >= 256 + 4096);
  for (const std::uintptr_t begin : begins) emulator::release(reinterpret_cast<void *>(begin));
}

TEST_CASE("emulator: loads and stores move the values") {
  const Setup setup;
  const Global<half> in(256), out(256);
  for (int i = 0; i < 256; i++) in.data[i] = half{static_cast<std::uint16_t>(i)};
  struct Storage {
    Tile<half, 4, 64> x;
  };
  run<Storage>(dim3(1), dim3(32), [&] {
    auto &smem = shared_storage<Storage>();
    const Matrix<const half> from{in.data, 4, 64};
    const Matrix<half> to{out.data, 4, 64};
    const int lane = static_cast<int>(threadIdx.x);
    if (lane < 8) store(smem.x(0, 8 * lane), load<8>(from(0, 8 * lane)));
    store(smem.x(1, 2 * lane), load<2>(from(1, 2 * lane)));
    smem.x(2, lane) = from(2, 63 - lane);
    __syncthreads();
    if (lane < 16) store(to(0, 4 * lane), load<4>(smem.x(0, 4 * lane)));
    if (lane < 8) store(to(1, 8 * lane), load<8>(smem.x(1, 8 * lane)));
    to(2, lane) = smem.x(2, lane);
  });
  for (int i = 0; i < 256; i++) {
    CAPTURE(i);
    // Two rows as they are, half a row back to front, the rest untouched.
    CHECK(out.data[i].bits == (i < 128 ? i : i < 160 ? 191 - (i - 128) : 0));
  }
}

// --- warp-wide instructions and fibers -----------------------------------------------------------

TEST_CASE("emulator: a shuffle gives each lane the value of lane ^ mask in its own warp") {
  const Setup setup;
  int wrong = 0, calls = 0;
  run<void>(dim3(1), dim3(64), [&] {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    for (int mask = 0; mask < 32; mask++) {
      wrong += __shfl_xor_sync(kAllLanes, 1000 * warp + lane, mask) != 1000 * warp + (lane ^ mask);
      const float x = __shfl_xor_sync(kAllLanes, static_cast<float>(lane) + 0.5f, mask);
      wrong += x != static_cast<float>(lane ^ mask) + 0.5f;
      calls++;
    }
  });
  CHECK(calls == 64 * 32);
  CHECK(wrong == 0);
}

TEST_CASE("emulator: a vote tells each lane whether any or all of its own warp agree") {
  const Setup setup;
  int wrong = 0;
  const auto check_votes = [&](int predicate, bool any, bool all) {
    wrong += (__any_sync(kAllLanes, predicate) != 0) != any;
    wrong += (__all_sync(kAllLanes, predicate) != 0) != all;
  };
  run<void>(dim3(1), dim3(64), [&] {
    const bool second_warp = threadIdx.x >= 32;
    check_votes(0, false, false);
    check_votes(1, true, true);
    check_votes(-2, true, true);  // whatever is not zero
    check_votes(is_thread(21), !second_warp, false);
    check_votes(!is_thread(21), true, second_warp);
    check_votes(second_warp, second_warp, second_warp);
  });
  CHECK(wrong == 0);
}

TEST_CASE("emulator: __expf is e^x, with one rounding of x log2(e)") {
  const Setup setup;
  double worst = 0;
  run<void>(dim3(1), dim3(32), [&] {
    for (float x = -80; x < 80; x += 0.37f) {
      // The rounded factor and the rounded product are each off by up to 2^-24, in the exponent.
      const double allowed = (2 * std::abs(x) + 2) * 0x1p-24;
      const double right = std::exp(static_cast<double>(x));
      worst = std::max(worst, std::abs(__expf(x) / right - 1) / allowed);
    }
  });
  CHECK(worst < 1);
}

TEST_CASE("emulator: a fiber goes on where it stopped, and starts anew when told to") {
  std::string log;
  const auto letters = [](void *text) {
    for (const char letter : {'a', 'b', 'c'}) {
      *static_cast<std::string *>(text) += letter;
      emulator::Fiber::yield();
    }
  };
  const auto one_digit = [](void *text) { *static_cast<std::string *>(text) += '1'; };
  emulator::Fiber fiber, other;
  fiber.start(letters, &log);
  other.start(letters, &log);
  CHECK(!fiber.resume());
  CHECK(!other.resume());
  CHECK(!fiber.resume());
  CHECK(log == "aab");
  fiber.start(one_digit, &log);  // abandons it in the middle
  CHECK(fiber.resume());
  CHECK(log == "aab1");
  fiber.start(letters, &log);  // after its function returned
  CHECK(!fiber.resume());
  CHECK(!other.resume());
  CHECK(!other.resume());
  CHECK(other.resume());
  CHECK(log == "aab1abc");
}

TEST_CASE("emulator: local variables survive a wait") {
  const Setup setup;
  int wrong = 0;
  run<void>(dim3(2), dim3(96), [&] {
    std::array<unsigned, 100> array;
    for (unsigned i = 0; i < 100; i++) array[i] = threadIdx.x * 1000 + i;
    const std::string text = "too long to lie in the string itself: " + std::to_string(threadIdx.x);
    double sum = threadIdx.x;
    for (int round = 0; round < 4; round++) {
      __syncthreads();
      sum += 0.25;
      __syncwarp();
    }
    for (unsigned i = 0; i < 100; i++) wrong += array[i] != threadIdx.x * 1000 + i;
    wrong += text != "too long to lie in the string itself: " + std::to_string(threadIdx.x);
    wrong += sum != threadIdx.x + 1.0;
  });
  CHECK(wrong == 0);
}

TEST_CASE("emulator: a thread may use 100 KB of stack, which hold no zeros by luck") {
  const Setup setup;
  constexpr unsigned kBytes = 100 * 1024;
  // The second launch runs on the stacks of the first.
  for (int launch = 0; launch < 2; launch++) {
    int wrong = 0;
    run<void>(dim3(1), dim3(64), [&] {
      volatile unsigned char stack[kBytes];
      for (unsigned i = 0; i < kBytes; i += 64) wrong += stack[i] != 0xff;
      for (unsigned i = 0; i < kBytes; i += 64)
        stack[i] = static_cast<unsigned char>(threadIdx.x + i / 64);
      __syncthreads();
      for (unsigned i = 0; i < kBytes; i += 64)
        wrong += stack[i] != static_cast<unsigned char>(threadIdx.x + i / 64);
    });
    CHECK(wrong == 0);
  }
}

/// Uses a local array of so many KB. (A function of its own: only who calls it has the array.)
template <int KB>
[[gnu::noinline]] int use_local_memory() {
  volatile unsigned char array[KB * 1024];
  for (int i = 0; i < KB * 1024; i += 64) array[i] = 1;
  __syncwarp(1u << threadIdx.x);
  return array[KB * 512];
}

TEST_CASE("emulator: a thread has the 512 KB of local memory that a GPU allows") {
  const Setup setup;
  int used = 0;
  const auto error_with = [&](int (*use)()) {
    return error_of<void>(dim3(2), dim3(32), [&] {
      if (blockIdx.x == 1 && threadIdx.x == 5) used += use();
    });
  };
  for (const int host_threads : {1, 2}) {
    emulator::settings.host_threads = host_threads;
    const std::string full =
        "block (1,0,0) thread (5,0,0): its stack is full: a GPU allows 512 KB of local memory per "
        "thread";
    CHECK(error_with(use_local_memory<3 * 1024>) == full);
    CHECK(error_with(use_local_memory<100 * 1024>) == full);
    // The thread is gone; the next launch is as good as any.
    CHECK(error_with(use_local_memory<512>) == "");
  }
  CHECK(used == 2);
}

#if defined(__x86_64__)  // other processors go on with 0
TEST_CASE("emulator: a whole number divided by 0 ends the launch with a message") {
  const Setup setup;
  const auto of_doctest = std::signal(SIGFPE, SIG_DFL);
  int sum = 0;
  const auto error_with = [&](int divisor) {
    return error_of<void>(dim3(2), dim3(32), [&] {
      if (blockIdx.x == 1 && threadIdx.x == 5) sum += 7 % divisor;
    });
  };
  for (const int host_threads : {1, 2}) {
    emulator::settings.host_threads = host_threads;
    CHECK(error_with(0) == "block (1,0,0) thread (5,0,0): divides a whole number by 0");
    CHECK(error_with(4) == "");  // the next launch is as good as any
  }
  CHECK(sum == 2 * 3);
  std::signal(SIGFPE, of_doctest);
}
#endif

TEST_CASE("emulator: three threads of the host compute and count what one does") {
  const Setup setup;
  constexpr int kBlocks = 40;
  const Global<float> in(kBlocks * 64, 1.0f), out(kBlocks * 64);
  const auto profile_on = [&](int host_threads) {
    emulator::settings.host_threads = host_threads;
    emulator::settings.profile = true;
    emulator::take_profile();
    std::fill_n(out.data, kBlocks * 64, 0.0f);
    run<Numbers>(dim3(kBlocks), dim3(64), [&] {
      const int i = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
      const Matrix<const float> from{in.data, kBlocks, 64};
      numbers().x(i % 4, i / 4) = from(block, i) + from(0, i);
      __syncthreads();
      if (i % 4 == block % 4) read(numbers().x(0, 3));
      const float one = __expf(0);
      Matrix<float>{out.data, kBlocks, 64}(block, i) =
          numbers().x(3, i / 4) + one + static_cast<float>(block);
    });
    return emulator::take_profile();
  };
  const emulator::Profile alone = profile_on(1);
  const std::vector<float> values(out.data, out.data + kBlocks * 64);
  int wrong = 0;
  for (int i = 0; i < kBlocks * 64; i++) wrong += values[i] != static_cast<float>(3 + i / 64);
  CHECK(wrong == 0);
  CHECK(alone.total()[emulator::kSharedLoadRequests] == kBlocks * 2 * 2);
  CHECK(alone.unique_read_bytes == kBlocks * 64 * 4);

  const emulator::Profile together = profile_on(3);
  CHECK(std::equal(values.begin(), values.end(), out.data));
  CHECK(together.total() == alone.total());
  CHECK(together.lines == alone.lines);
  CHECK(together.unique_read_bytes == alone.unique_read_bytes);
  CHECK(together.unique_written_bytes == alone.unique_written_bytes);
  CHECK(together.trace.size() == alone.trace.size());
}
