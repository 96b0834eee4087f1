// The emulator's errors, each provoked once by a kernel written here, and its promises about
// threads: drawn orders, whole blocks, fresh shared memory, stacks that survive a wait.
//
// A kernel notes the line of an access by `at = __LINE__` on the same line, before it.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "common/kernel.h"

namespace {

using emulator::KernelError;

int at, also_at;  // lines that a kernel noted

/// Sets the emulator up for one test, and leaves it as it was.
struct Setup {
  emulator::Settings before = emulator::settings;

  explicit Setup(int host_threads = 1) {
    emulator::settings = {.host_threads = host_threads};
    at = also_at = 0;
  }
  ~Setup() { emulator::settings = before; }
};

/// An array in the emulator's global memory.
template <class T>
struct Global {
  T *data;
  int size;

  explicit Global(int n, T value = {})
      : data(static_cast<T *>(emulator::allocate(n * sizeof(T)))), size(n) {
    std::fill_n(data, n, value);
  }
  Global(const Global &) = delete;
  Global &operator=(const Global &) = delete;
  ~Global() { emulator::release(data); }
};

/// The message of the KernelError that a launch throws, or "" if it throws none.
template <class Launch>
std::string error_of(Launch launch) {
  try {
    launch();
  } catch (const KernelError &error) {
    return error.what();
  }
  return "";
}

/// The message of the error that a kernel of one block ends with, or "".
template <class Storage>
std::string error_of(void (*kernel)(), dim3 block) {
  return error_of([&] { launch<Storage>(kernel, dim3(1), block); });
}

std::string here(int line) {
  return "emulator_test.cpp:" + std::to_string(line);
}

/// "emulator_test.cpp:57: block (0,0,0) thread (3,0,0): what"
std::string message(int line, const std::string &block, const std::string &thread,
                    const std::string &what) {
  return here(line) + ": block " + block + " thread " + thread + ": " + what;
}

bool contains(const std::string &text, const std::string &part) {
  return text.find(part) != std::string::npos;
}

/// Reads an element and forgets it.
template <class T>
void read(const Reference<T> &element) {
  (void)static_cast<std::remove_const_t<T>>(element);
}

bool is_thread(unsigned x) {
  return threadIdx.x == x;
}

struct Numbers {
  Tile<float, 4, 64> x;
};

/// Writes all of shared memory, and waits until all of it is written.
Numbers &written_numbers() {
  auto &smem = shared_storage<Numbers>();
  for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) smem.x(i / 64, i % 64) = 0.0f;
  __syncthreads();
  return smem;
}

/// Runs a kernel of two warps with a race in it, under many schedules. Each must be reported, by
/// either of the two threads: whoever comes second. `first` and `second` are "store" or "load".
void check_race(void (*kernel)(), const char *memory, const std::string &first,
                unsigned first_thread, const std::string &second, unsigned second_thread) {
  const auto report = [&](int line, unsigned thread, const std::string &operation, int line_before,
                          unsigned thread_before, const std::string &operation_before) {
    return message(line, "(0,0,0)", "(" + std::to_string(thread) + ",0,0)",
                   operation + " races in " + memory + " memory with the " + operation_before +
                       " at " + here(line_before) + " by thread " + std::to_string(thread_before) +
                       ": no barrier between them");
  };
  int second_came_second = 0, first_came_second = 0;
  for (std::uint64_t seed = 1; seed <= 20; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<Numbers>(kernel, dim3(64));
    CAPTURE(error);
    const bool in_order = error == report(also_at, second_thread, second, at, first_thread, first);
    const bool reversed = error == report(at, first_thread, first, also_at, second_thread, second);
    CHECK((in_order || reversed));
    second_came_second += in_order;
    first_came_second += reversed;
  }
  // Twenty seeds that all draw the same order have a chance of one in 500000.
  CHECK(second_came_second > 0);
  CHECK(first_came_second > 0);
}

}  // namespace

// --- errors: one access ------------------------------------------------------------------------

TEST_CASE("emulator: a row or column outside of a tile is an error") {
  const Setup setup;
  struct Storage {
    Tile<float, 2, 32> x;
    Tile<float, 2, 32> next;  // there is memory after x: only the view knows
  };
  const auto check = [](void (*kernel)(), const char *thread) {
    CHECK(error_of<Storage>(kernel, dim3(32, 2)) ==
          message(at, "(0,0,0)", thread, "row or column out of bounds"));
  };
  check(
      +[] {
        auto &smem = shared_storage<Storage>();
        if (is_thread(5) && threadIdx.y == 1) at = __LINE__, smem.x(2, 0) = 1.0f;
      },
      "(5,1,0)");
  check(
      +[] {
        auto &smem = shared_storage<Storage>();
        if (is_thread(31) && threadIdx.y == 0) at = __LINE__, smem.x(0, 32) = 1.0f;
      },
      "(31,0,0)");
  check(
      +[] {
        auto &smem = shared_storage<Storage>();
        if (is_thread(0) && threadIdx.y == 0) at = __LINE__, smem.next(-1, 0) = 1.0f;
      },
      "(0,0,0)");
  check(
      +[] {
        auto &smem = shared_storage<Storage>();
        if (is_thread(1) && threadIdx.y == 0) at = __LINE__, smem.next(1, -1) = 1.0f;
      },
      "(1,0,0)");
}

TEST_CASE("emulator: a row or column outside of a matrix is an error") {
  const Setup setup;
  const Global<float> memory(64);  // larger than the matrix: only the view knows
  const auto check = [&](void (*kernel)(float *)) {
    CHECK(error_of([&] { launch<void>(kernel, dim3(2, 3), dim3(32), memory.data + 16); }) ==
          message(at, "(1,2,0)", "(7,0,0)", "row or column out of bounds"));
  };
  check(+[](float *data) {
    const Matrix<float> m{data, 2, 8};
    if (is_thread(7) && blockIdx.x == 1 && blockIdx.y == 2) at = __LINE__, m(2, 0) = 1.0f;
  });
  check(+[](float *data) {
    const Matrix<const float> m{data, 2, 8};
    if (is_thread(7) && blockIdx.x == 1 && blockIdx.y == 2) at = __LINE__, read(m(0, 8));
  });
  check(+[](float *data) {
    const Matrix<float> m{data, 2, 8};
    if (is_thread(7) && blockIdx.x == 1 && blockIdx.y == 2) at = __LINE__, read(m(-1, 0));
  });
  check(+[](float *data) {
    const Matrix<float> m{data, 2, 8};
    if (is_thread(7) && blockIdx.x == 1 && blockIdx.y == 2) at = __LINE__, m(1, -1) = 1.0f;
  });
}

TEST_CASE("emulator: an access outside of every allocation is an error") {
  const Setup setup;
  const Global<float> memory(64);
  const auto run = [&](void (*kernel)(float *), float *data) {
    return error_of([&] { launch<void>(kernel, dim3(1), dim3(32), data); });
  };
  const auto store = +[](float *data) {
    const Matrix<float> m{data, 1, 1000};
    if (is_thread(9)) at = __LINE__, m(0, 64) = 1.0f;
  };
  const auto load_one = +[](float *data) {
    const Matrix<float> m{data, 1, 1000};
    if (is_thread(9)) at = __LINE__, read(m(0, 63));
  };
  const std::string outside = "outside of every allocation";
  CHECK(run(store, memory.data) == message(at, "(0,0,0)", "(9,0,0)", "store " + outside));
  CHECK(run(store, memory.data - 65) == message(at, "(0,0,0)", "(9,0,0)", "store " + outside));
  CHECK(run(load_one, memory.data + 1) == message(at, "(0,0,0)", "(9,0,0)", "load " + outside));
  CHECK(run(load_one, memory.data) == "");    // the last element
  CHECK(run(store, memory.data - 64) == "");  // the first

  // Memory of the host, and memory that was released.
  std::vector<float> host(64);
  CHECK(contains(run(load_one, host.data()), outside));
  auto *released = static_cast<float *>(emulator::allocate(64 * sizeof(float)));
  CHECK(run(load_one, released) == "");
  emulator::release(released);
  CHECK(contains(run(load_one, released), outside));

  // A vector of which only the beginning is inside.
  const Global<half> ten(10);
  const std::string error = error_of([&] {
    launch<void>(
        +[](half *data) {
          const Matrix<half> m{data, 1, 100};
          if (is_thread(3)) at = __LINE__, (void)load<8>(m(0, 8));
        },
        dim3(1), dim3(32), ten.data);
  });
  CHECK(error == message(at, "(0,0,0)", "(3,0,0)", "load " + outside));
}

TEST_CASE("emulator: an access past the end of shared memory is an error") {
  const Setup setup;
  struct Small {
    half x[4];
  };
  const std::string error = error_of<Small>(
      +[] {
        auto &smem = shared_storage<Small>();
        const Matrix<half> m{smem.x, 1, 100};
        if (is_thread(4)) at = __LINE__, store(m(0, 0), Vector<half, 8>{});
      },
      dim3(32));
  CHECK(error == message(at, "(0,0,0)", "(4,0,0)", "store past the end of shared memory"));
}

TEST_CASE("emulator: a vector that is not aligned to its size is an error") {
  const Setup setup;
  const Global<half> memory(64);
  const auto run = [&](void (*kernel)(half *)) {
    return error_of([&] { launch<Numbers>(kernel, dim3(1), dim3(32), memory.data); });
  };
  const std::string not_aligned = " at an address that is not a multiple of ";
  const auto message_of = [&](const std::string &what) {
    return message(at, "(0,0,0)", "(2,0,0)", what);
  };
  CHECK(run(+[](half *data) {
          const Matrix<half> m{data, 8, 8};
          if (is_thread(2)) at = __LINE__, (void)load<8>(m(1, 4));
        }) == message_of("16-byte load" + not_aligned + "16"));
  CHECK(run(+[](half *data) {
          const Matrix<half> m{data, 8, 8};
          if (is_thread(2)) at = __LINE__, (void)load<4>(m(1, 2));
        }) == message_of("8-byte load" + not_aligned + "8"));
  CHECK(run(+[](half *data) {
          const Matrix<half> m{data, 8, 8};
          if (is_thread(2)) at = __LINE__, store(m(0, 1), Vector<half, 2>{});
        }) == message_of("4-byte store" + not_aligned + "4"));
  CHECK(run(+[](half *) {
          auto &smem = shared_storage<Numbers>();
          if (is_thread(2)) at = __LINE__, store(smem.x(0, 2), Vector<float, 4>{});
        }) == message_of("16-byte store" + not_aligned + "16"));
  CHECK(run(+[](half *data) {
          const Matrix<half> m{data, 8, 8};
          (void)load<8>(m(1, 0)), (void)load<4>(m(1, 4)), (void)load<2>(m(1, 2));
        }) == "");
}

TEST_CASE("emulator: a load of shared memory that nobody wrote is an error") {
  const Setup setup;
  const auto message_of = [](unsigned thread) {
    return message(at, "(0,0,0)", "(" + std::to_string(thread) + ",0,0)",
                   "load of shared memory that nobody wrote");
  };
  CHECK(error_of<Numbers>(
            +[] {
              auto &smem = shared_storage<Numbers>();
              if (is_thread(30)) at = __LINE__, read(smem.x(3, 63));
            },
            dim3(32)) == message_of(30));
  // A vector of which one element was never written.
  CHECK(error_of<Numbers>(
            +[] {
              auto &smem = shared_storage<Numbers>();
              if (threadIdx.x < 3) smem.x(0, static_cast<int>(threadIdx.x)) = 1.0f;
              __syncthreads();
              if (is_thread(8)) at = __LINE__, (void)load<4>(smem.x(0, 0));
            },
            dim3(32)) == message_of(8));
}

// --- errors: races -----------------------------------------------------------------------------

TEST_CASE("emulator: a store and a load of two warps race, and both lines are named") {
  const Setup setup;
  check_race(
      +[] {
        auto &smem = written_numbers();
        if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
        if (is_thread(40)) also_at = __LINE__, read(smem.x(1, 5));
      },
      "shared", "store", 3, "load", 40);
}

TEST_CASE("emulator: two stores of two warps race, and both lines are named") {
  const Setup setup;
  check_race(
      +[] {
        auto &smem = written_numbers();
        if (is_thread(63)) at = __LINE__, smem.x(1, 5) = 1.0f;
        if (is_thread(0)) also_at = __LINE__, smem.x(1, 5) = 1.0f;
      },
      "shared", "store", 63, "store", 0);
}

TEST_CASE("emulator: accesses of different widths race where they overlap") {
  const Setup setup;
  check_race(
      +[] {
        auto &smem = written_numbers();
        if (is_thread(1)) at = __LINE__, store(smem.x(1, 4), Vector<float, 4>{});
        if (is_thread(33)) also_at = __LINE__, read(smem.x(1, 7));
      },
      "shared", "store", 1, "load", 33);
  const std::string beside = error_of<Numbers>(
      +[] {
        auto &smem = written_numbers();
        if (is_thread(1)) store(smem.x(1, 4), Vector<float, 4>{});
        if (is_thread(33)) read(smem.x(1, 8)), read(smem.x(1, 3));
      },
      dim3(64));
  CHECK(beside == "");
}

TEST_CASE("emulator: lanes of one warp race without a __syncwarp") {
  const Setup setup;
  check_race(
      +[] {
        auto &smem = written_numbers();
        if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
        if (is_thread(4)) also_at = __LINE__, read(smem.x(1, 5));
      },
      "shared", "store", 3, "load", 4);
  check_race(
      +[] {
        auto &smem = written_numbers();
        if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
        if (is_thread(4)) also_at = __LINE__, smem.x(1, 5) = 1.0f;
      },
      "shared", "store", 3, "store", 4);
}

TEST_CASE("emulator: a shuffle orders nothing") {
  const Setup setup;
  for (std::uint64_t seed = 1; seed <= 10; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<Numbers>(
        +[] {
          auto &smem = written_numbers();
          if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
          __shfl_xor_sync(kAllLanes, 0, 1);
          if (is_thread(4)) also_at = __LINE__, read(smem.x(1, 5));
        },
        dim3(32));
    CHECK(error == message(also_at, "(0,0,0)", "(4,0,0)",
                           "load races in shared memory with the store at " + here(at) +
                               " by thread 3: no barrier between them"));
  }
}

TEST_CASE("emulator: a __syncwarp orders the lanes of its warp, and no others") {
  const Setup setup;
  CHECK(error_of<Numbers>(
            +[] {
              auto &smem = written_numbers();
              if (is_thread(3)) smem.x(1, 5) = 1.0f;
              __syncwarp();
              read(smem.x(1, 5));
              __syncwarp();
              if (is_thread(7)) smem.x(1, 5) = 2.0f;
              __syncwarp();
              if (is_thread(8)) smem.x(1, 5) = 3.0f;
            },
            dim3(32)) == "");
  check_race(
      +[] {
        auto &smem = written_numbers();
        if (is_thread(3)) at = __LINE__, smem.x(1, 5) = 1.0f;
        __syncwarp();
        if (is_thread(40)) also_at = __LINE__, read(smem.x(1, 5));
      },
      "shared", "store", 3, "load", 40);
}

TEST_CASE("emulator: a __syncthreads orders all threads of the block") {
  const Setup setup;
  for (std::uint64_t seed = 1; seed <= 10; seed++) {
    emulator::settings.seed = seed;
    CHECK(error_of<Numbers>(
              +[] {
                auto &smem = written_numbers();
                if (is_thread(3)) smem.x(1, 5) = 1.0f;
                __syncthreads();
                read(smem.x(1, 5));
                __syncthreads();
                if (is_thread(40)) smem.x(1, 5) = 2.0f;
                __syncthreads();
                if (is_thread(8)) smem.x(1, 5) = 3.0f;
              },
              dim3(64)) == "");
  }
}

TEST_CASE("emulator: loads do not race, nor does a thread with itself") {
  const Setup setup;
  CHECK(error_of<Numbers>(
            +[] {
              auto &smem = written_numbers();
              read(smem.x(1, 5));
              read(smem.x(1, 5));
              const int mine = static_cast<int>(threadIdx.x);
              smem.x(0, mine) = 1.0f;
              read(smem.x(0, mine));
              smem.x(0, mine) = 2.0f;
            },
            dim3(64)) == "");
}

TEST_CASE("emulator: a store races with the loads of several threads") {
  const Setup setup;
  int several_warps = 0;
  for (std::uint64_t seed = 1; seed <= 20; seed++) {
    emulator::settings.seed = seed;
    // The shuffle makes the loads come first, without putting them in order with the store.
    const std::string lanes = error_of<Numbers>(
        +[] {
          auto &smem = written_numbers();
          if (threadIdx.x >= 32) at = __LINE__, read(smem.x(1, 5));
          __shfl_xor_sync(kAllLanes, 0, 1);
          if (is_thread(40)) also_at = __LINE__, smem.x(1, 5) = 1.0f;
        },
        dim3(64));
    CHECK(lanes == message(also_at, "(0,0,0)", "(40,0,0)",
                           "store races in shared memory with the load at " + here(at) +
                               " by several threads of warp 1: no barrier between them"));
    // Warp 1's own loads are in order with its store. Those of warp 0 are not, early or late.
    const std::string warps = error_of<Numbers>(
        +[] {
          auto &smem = written_numbers();
          at = __LINE__, read(smem.x(1, 5));
          __syncwarp();
          if (is_thread(40)) also_at = __LINE__, smem.x(1, 5) = 1.0f;
        },
        dim3(64));
    CHECK(contains(warps, here(at)));
    CHECK(contains(warps, here(also_at)));
    CHECK(contains(warps, " races in shared memory with the "));
    several_warps += contains(warps, "by threads of several warps: no barrier between them");
  }
  CHECK(several_warps > 0);
}

TEST_CASE("emulator: threads of two blocks race in global memory") {
  const Setup setup;
  const Global<float> memory(64);
  const auto run = [&](void (*kernel)(float *), unsigned blocks) {
    return error_of([&] { launch<void>(kernel, dim3(blocks), dim3(64), memory.data); });
  };
  const std::string of_block = " (the other is of block number 1; nothing orders two blocks)";
  CHECK(run(
            +[](float *data) {
              const Matrix<float> m{data, 1, 64};
              if (blockIdx.x == 1 && is_thread(2)) at = __LINE__, m(0, 5) = 1.0f;
              __syncthreads();
              if (blockIdx.x == 2 && is_thread(2)) also_at = __LINE__, read(m(0, 5));
            },
            3) == message(also_at, "(2,0,0)", "(2,0,0)",
                          "load races in global memory with the store at " + here(at) +
                              " by thread 2: no barrier between them" + of_block));
  CHECK(run(
            +[](float *data) {
              const Matrix<float> m{data, 1, 64};
              if (blockIdx.x == 1 && is_thread(2)) at = __LINE__, read(m(0, 5));
              if (blockIdx.x == 2 && is_thread(3)) also_at = __LINE__, m(0, 5) = 1.0f;
            },
            3) == message(also_at, "(2,0,0)", "(3,0,0)",
                          "store races in global memory with the load at " + here(at) +
                              " by thread 2: no barrier between them" + of_block));
  CHECK(run(
            +[](float *data) {
              const Matrix<float> m{data, 1, 64};
              if (is_thread(2)) at = __LINE__, m(0, 5) = 1.0f;
            },
            2) == message(at, "(1,0,0)", "(2,0,0)",
                          "store races in global memory with the store at " + here(at) +
                              " by thread 2: no barrier between them (the other is of block number "
                              "0; nothing orders two blocks)"));
  // Loads of several blocks are fine, until somebody stores.
  CHECK(run(
            +[](float *data) {
              const Matrix<float> m{data, 1, 64};
              read(m(0, 5));
              m(0, 8 + static_cast<int>(blockIdx.x)) = 1.0f;
            },
            3) != "");  // the 64 threads of a block store to one place
  CHECK(run(
            +[](float *data) {
              const Matrix<float> m{data, 1, 64};
              read(m(0, 5));
              if (is_thread(0)) m(0, 8 + static_cast<int>(blockIdx.x)) = 1.0f;
            },
            3) == "");
  CHECK(contains(run(
                     +[](float *data) {
                       const Matrix<float> m{data, 1, 64};
                       if (blockIdx.x < 3) read(m(0, 5));
                       if (blockIdx.x == 3 && is_thread(0)) m(0, 5) = 1.0f;
                     },
                     4),
                 "(the other is of several other blocks; nothing orders two blocks)"));
}

TEST_CASE(
    "emulator: two warps of a block race in global memory, unless a barrier is between them") {
  const Setup setup;
  const Global<float> memory(64);
  const auto run = [&](void (*kernel)(float *)) {
    return error_of([&] { launch<void>(kernel, dim3(1), dim3(64), memory.data); });
  };
  const auto store_and_load = +[](float *data) {
    const Matrix<float> m{data, 1, 64};
    if (is_thread(2)) at = __LINE__, m(0, 5) = 1.0f;
    if (is_thread(32)) also_at = __LINE__, read(m(0, 5));
  };
  for (std::uint64_t seed = 1; seed <= 10; seed++) {
    emulator::settings.seed = seed;
    const std::string error = run(store_and_load);
    CHECK((error == message(also_at, "(0,0,0)", "(32,0,0)",
                            "load races in global memory with the store at " + here(at) +
                                " by thread 2: no barrier between them") ||
           error == message(at, "(0,0,0)", "(2,0,0)",
                            "store races in global memory with the load at " + here(also_at) +
                                " by thread 32: no barrier between them")));
    CHECK(run(+[](float *data) {
            const Matrix<float> m{data, 1, 64};
            if (is_thread(2)) m(0, 5) = 1.0f;
            __syncthreads();
            read(m(0, 5));
            __syncthreads();
            if (is_thread(32)) m(0, 5) = 2.0f;
          }) == "");
    // Loads of both warps, then a store of one of them.
    CHECK(contains(run(+[](float *data) {
                     const Matrix<float> m{data, 1, 64};
                     read(m(0, 5));
                     __syncwarp();
                     if (is_thread(0)) m(0, 5) = 1.0f;
                   }),
                   " races in global memory with the "));
  }
}

TEST_CASE("emulator: one launch comes after the other") {
  const Setup setup;
  const Global<float> memory(64);
  for (int i = 0; i < 2; i++)
    CHECK(error_of([&] {
            launch<void>(
                +[](float *data) {
                  if (is_thread(0))
                    Matrix<float>{data, 1, 64}(0, static_cast<int>(blockIdx.x)) = 1.0f;
                },
                dim3(3), dim3(32), memory.data);
            launch<void>(
                +[](float *data) {
                  const Matrix<float> m{data, 1, 64};
                  for (int col = 0; col < 3; col++) read(m(0, col));
                },
                dim3(3), dim3(32), memory.data);
          }) == "");
  CHECK(memory.data[2] == 1.0f);
}

// --- errors: threads that wait for each other ----------------------------------------------------

TEST_CASE("emulator: a barrier that some threads never reach, because they exited") {
  const Setup setup;
  CHECK(error_of<void>(
            +[] {
              if (threadIdx.x % 32 >= 20) return;
              at = __LINE__, __syncthreads();
            },
            dim3(64)) == message(at, "(0,0,0)", "(0,0,0)",
                                 "40 of 64 threads wait for ever in __syncthreads; 24 have exited "
                                 "without reaching it"));
  CHECK(error_of<void>(
            +[] {
              if (is_thread(0) || threadIdx.x >= 32) return;
              at = __LINE__, __syncwarp();
            },
            dim3(64)) == message(at, "(0,0,0)", "(1,0,0)",
                                 "31 of 64 threads wait for ever in __syncwarp; 33 have exited "
                                 "without reaching it"));
}

TEST_CASE("emulator: a barrier that some threads never reach, because they wait elsewhere") {
  const Setup setup;
  CHECK(error_of<void>(
            +[] {
              if (threadIdx.x < 10) {
                also_at = __LINE__, __syncwarp();
              } else {
                at = __LINE__, __syncthreads();
              }
            },
            dim3(32, 2)) == message(also_at, "(0,0,0)", "(0,0,0)",
                                    "20 of 64 threads wait for ever in __syncwarp; others wait in "
                                    "__syncthreads at " +
                                        here(at)));
}

TEST_CASE("emulator: threads of a block that wait at two different barriers") {
  const Setup setup;
  for (std::uint64_t seed = 1; seed <= 10; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<void>(
        +[] {
          if (threadIdx.x < 32) {
            at = __LINE__, __syncthreads();
          } else {
            also_at = __LINE__, __syncthreads();
          }
        },
        dim3(64));
    // The last thread to come says so, whichever it is, and names the first of the others.
    const std::string two = "threads of one block wait at different barriers: here, and thread ";
    CAPTURE(error);
    CHECK(((error.starts_with(here(also_at) + ": block (0,0,0) thread (") &&
            error.ends_with("): " + two + "0 at " + here(at))) ||
           (error.starts_with(here(at) + ": block (0,0,0) thread (") &&
            error.ends_with("): " + two + "32 at " + here(also_at)))));
  }
}

TEST_CASE("emulator: lanes of a warp that wait in two different instructions") {
  const Setup setup;
  for (std::uint64_t seed = 1; seed <= 10; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<void>(
        +[] {
          if (threadIdx.x < 5) {
            at = __LINE__, __shfl_xor_sync(kAllLanes, 1.0f, 1);
          } else {
            also_at = __LINE__, __syncwarp();
          }
        },
        dim3(32));
    const std::string two = "lanes of one warp wait in different instructions: ";
    CAPTURE(error);
    CHECK(((error.starts_with(here(at) + ": block (0,0,0) thread (") &&
            error.ends_with("): " + two + "__shfl_xor_sync here, __syncwarp at " + here(also_at) +
                            " in lane 5")) ||
           (error.starts_with(here(also_at) + ": block (0,0,0) thread (") &&
            error.ends_with("): " + two + "__syncwarp here, __shfl_xor_sync at " + here(at) +
                            " in lane 0"))));
  }
}

TEST_CASE("emulator: a shuffle among some lanes of a warp is refused") {
  const Setup setup;
  const std::string error = error_of<void>(
      +[] {
        if (threadIdx.x < 16) at = __LINE__, __shfl_xor_sync(0xffffu, 1.0f, 1);
      },
      dim3(32));
  CHECK(contains(error, here(at) + ": block (0,0,0) thread ("));
  CHECK(error.ends_with("): __shfl_xor_sync: not all 32 lanes take part"));
}

TEST_CASE("emulator: a launch that is not one of whole warps is refused") {
  const Setup setup;
  static bool ran;
  ran = false;
  const auto try_launch = [](dim3 grid, dim3 block) {
    return error_of([&] {
      launch<void>(
          +[] { ran = true; }, grid, block);
    });
  };
  const std::string refused =
      "a launch needs at least one block, of 32 to 1024 threads in whole warps";
  CHECK(try_launch(dim3(1), dim3(33)) == refused);
  CHECK(try_launch(dim3(1), dim3(16)) == refused);
  CHECK(try_launch(dim3(1), dim3(0)) == refused);
  CHECK(try_launch(dim3(1), dim3(1056)) == refused);
  CHECK(try_launch(dim3(2, 0), dim3(32)) == refused);
  CHECK(!ran);
  CHECK(try_launch(dim3(1), dim3(8, 2, 2)) == "");
  CHECK(try_launch(dim3(1), dim3(1024)) == "");
  CHECK(ran);
}

TEST_CASE("emulator: after an error it works as before") {
  const Setup setup;
  const Global<float> memory(64);
  const auto good = [&] {
    std::fill_n(memory.data, 64, 0.0f);
    launch<Numbers>(
        +[](float *data) {
          auto &smem = shared_storage<Numbers>();
          const int i = static_cast<int>(threadIdx.x);
          smem.x(0, i) = static_cast<float>(i);
          __syncthreads();
          const float sum = smem.x(0, 63 - i) + __shfl_xor_sync(kAllLanes, 1000.0f, 1);
          Matrix<float>{data, 1, 64}(0, i) = sum;
        },
        dim3(1), dim3(64), memory.data);
    for (int i = 0; i < 64; i++)
      if (memory.data[i] != static_cast<float>(1000 + 63 - i)) return false;
    return true;
  };
  REQUIRE(good());
  for (int i = 0; i < 3; i++) {
    // Threads that wait for ever, and threads stopped by another's error, in the middle of things.
    CHECK(error_of<Numbers>(
              +[] {
                if (is_thread(5)) return;
                __syncthreads();
              },
              dim3(64)) != "");
    CHECK(good());
    CHECK(error_of<Numbers>(
              +[] {
                auto &smem = written_numbers();
                if (is_thread(5)) smem.x(9, 9) = 1.0f;
                __syncwarp();
                __shfl_xor_sync(kAllLanes, 1, 1);
              },
              dim3(64)) != "");
    CHECK(good());
  }
  // An error in one block, while other blocks run on other threads of the host.
  emulator::settings.host_threads = 3;
  const std::string error = error_of([&] {
    launch<Numbers>(
        +[] {
          auto &smem = written_numbers();
          __syncthreads();
          if (blockIdx.x == 7 && is_thread(5)) smem.x(9, 9) = 1.0f;
        },
        dim3(20), dim3(64));
  });
  CHECK(contains(error, "block (7,0,0) thread (5,0,0): row or column out of bounds"));
  CHECK(good());
}

// --- blocks and threads --------------------------------------------------------------------------

TEST_CASE("emulator: every thread of every block runs once and knows where it is") {
  const Setup setup;
  const dim3 grid(3, 4, 5), block(8, 2, 4);
  for (const int host_threads : {1, 3}) {
    emulator::settings.host_threads = host_threads;
    std::vector<std::atomic<int>> runs(60 * 64);
    std::atomic<int> wrong_size = 0;
    emulator::run(grid, block, 0, [&] {
      const unsigned in_grid = (blockIdx.z * 4 + blockIdx.y) * 3 + blockIdx.x;
      const unsigned in_block = (threadIdx.z * 2 + threadIdx.y) * 8 + threadIdx.x;
      if (threadIdx.x < 8 && threadIdx.y < 2 && threadIdx.z < 4 && blockIdx.x < 3 &&
          blockIdx.y < 4 && blockIdx.z < 5)
        runs[in_grid * 64 + in_block]++;
      const bool right = gridDim.x == 3 && gridDim.y == 4 && gridDim.z == 5 && blockDim.x == 8 &&
                         blockDim.y == 2 && blockDim.z == 4;
      wrong_size += !right;
    });
    CHECK(std::all_of(runs.begin(), runs.end(), [](const auto &count) { return count == 1; }));
    CHECK(wrong_size == 0);
  }
}

TEST_CASE("emulator: threads keep their place across a wait") {
  const Setup setup;
  std::atomic<int> wrong = 0;
  emulator::run(dim3(2, 2), dim3(16, 4), 0, [&] {
    const dim3 thread = threadIdx, block = blockIdx;
    for (int i = 0; i < 3; i++) {
      __syncthreads();
      wrong += thread.x != threadIdx.x || thread.y != threadIdx.y || thread.z != threadIdx.z;
      wrong += block.x != blockIdx.x || block.y != blockIdx.y || block.z != blockIdx.z;
      __syncwarp();
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("emulator: parameters arrive, converted to the kernel's types") {
  const Setup setup;
  static double sum;
  sum = 0;
  launch<void>(
      +[](float a, long b, const int *c) {
        if (is_thread(0)) sum = a + static_cast<double>(b) + (c == nullptr ? 1000 : 0);
      },
      dim3(1), dim3(32), 0.5, 7, nullptr);
  CHECK(sum == 1007.5);
}

TEST_CASE("emulator: the order of threads is drawn from the seed") {
  const Setup setup;
  // The missing barrier: a later reader would see whichever thread came last. It goes around the
  // views, which would report it.
  const auto order = [](std::uint64_t seed) {
    emulator::settings.seed = seed;
    std::vector<unsigned> threads;
    emulator::run(dim3(1), dim3(64), 0, [&] {
      threads.push_back(threadIdx.x);
      __syncthreads();
      threads.push_back(threadIdx.x);
    });
    return threads;
  };
  std::vector<std::vector<unsigned>> orders;
  for (std::uint64_t seed = 1; seed <= 5; seed++) {
    orders.push_back(order(seed));
    CHECK(order(seed) == orders.back());
    // Each thread once before the barrier, once after it.
    std::vector<unsigned> all(64);
    std::iota(all.begin(), all.end(), 0u);
    CHECK(std::is_permutation(orders.back().begin(), orders.back().begin() + 64, all.begin()));
    CHECK(std::is_permutation(orders.back().begin() + 64, orders.back().end(), all.begin()));
  }
  const auto different = [&](auto key) {
    std::vector<decltype(key(orders[0]))> keys;
    for (const auto &each : orders) keys.push_back(key(each));
    std::sort(keys.begin(), keys.end());
    return std::unique(keys.begin(), keys.end()) - keys.begin();
  };
  CHECK(different([](const auto &each) { return each; }) == 5);
  CHECK(different([](const auto &each) { return each[63]; }) >= 2);        // who comes last
  CHECK(different([](const auto &each) { return each[127] / 32; }) == 2);  // and of which warp
}

TEST_CASE("emulator: blocks of one launch run in different orders") {
  const Setup setup;
  std::array<std::vector<unsigned>, 4> orders;
  emulator::run(dim3(4), dim3(64), 0, [&] { orders[blockIdx.x].push_back(threadIdx.x); });
  CHECK(orders[0] != orders[1]);
  CHECK(orders[2] != orders[3]);
}

TEST_CASE("emulator: shared memory is NaN at the start of each block, and aligned") {
  const Setup setup;
  struct Storage {
    Tile<float, 4, 32> a;
    Tile<half, 1, 40> b;
  };
  int blocks = 0, not_nan = 0, not_aligned = 0;
  emulator::run(dim3(3), dim3(32), sizeof(Storage), [&] {
    auto &smem = shared_storage<Storage>();
    if (is_thread(0)) {
      blocks++;
      for (const float x : smem.a.data) not_nan += !std::isnan(x);
      for (const half x : smem.b.data) not_nan += !std::isnan(half_to_float(x));
      not_aligned += reinterpret_cast<std::uintptr_t>(&smem) % 1024 != 0;
    }
    __syncthreads();
    for (int row = 0; row < 4; row++) smem.a(row, static_cast<int>(threadIdx.x)) = 1.0f;
    smem.b(0, static_cast<int>(threadIdx.x)) = __float2half(1.0f);
  });
  CHECK(blocks == 3);
  CHECK(not_nan == 0);
  CHECK(not_aligned == 0);
  // What the block before wrote counts for nothing.
  const std::string error = error_of([] {
    launch<Numbers>(
        +[] {
          if (blockIdx.x == 0) written_numbers();
          if (blockIdx.x == 1 && is_thread(6))
            at = __LINE__, read(shared_storage<Numbers>().x(1, 1));
        },
        dim3(2), dim3(32));
  });
  CHECK(error == message(at, "(1,0,0)", "(6,0,0)", "load of shared memory that nobody wrote"));
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

TEST_CASE("emulator: loads and stores move the values") {
  const Setup setup;
  const Global<half> in(256), out(256);
  for (int i = 0; i < 256; i++) in.data[i] = half{static_cast<std::uint16_t>(i)};
  struct Storage {
    Tile<half, 4, 64> x;
  };
  launch<Storage>(
      +[](const half *from, half *to) {
        auto &smem = shared_storage<Storage>();
        const Matrix<const half> gin{from, 4, 64};
        const Matrix<half> gout{to, 4, 64};
        const int lane = static_cast<int>(threadIdx.x);
        if (lane < 8) store(smem.x(0, 8 * lane), load<8>(gin(0, 8 * lane)));
        store(smem.x(1, 2 * lane), load<2>(gin(1, 2 * lane)));
        smem.x(2, lane) = gin(2, 63 - lane);
        __syncthreads();
        if (lane < 16) store(gout(0, 4 * lane), load<4>(smem.x(0, 4 * lane)));
        if (lane < 8) store(gout(1, 8 * lane), load<8>(smem.x(1, 8 * lane)));
        gout(2, lane) = smem.x(2, lane);
      },
      dim3(1), dim3(32), in.data, out.data);
  for (int i = 0; i < 256; i++) {
    CAPTURE(i);
    const int expected = i < 128 ? i : i < 160 ? 128 + 63 - (i - 128) : 0;
    CHECK(out.data[i].bits == expected);
  }
}

// --- collectives and fibers
// ------------------------------------------------------------------------

TEST_CASE("emulator: a shuffle gives each lane the value of lane ^ mask of its own warp") {
  const Setup setup;
  int wrong = 0, calls = 0;
  emulator::run(dim3(1), dim3(64), 0, [&] {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (unsigned mask = 0; mask < 32; mask++) {
      const unsigned other = lane ^ mask;
      const int got =
          __shfl_xor_sync(kAllLanes, static_cast<int>(1000 * warp + lane), static_cast<int>(mask));
      wrong += got != static_cast<int>(1000 * warp + other);
      const float f = __shfl_xor_sync(kAllLanes, 0.5f + static_cast<float>(lane + 32 * mask),
                                      static_cast<int>(mask));
      wrong += f != 0.5f + static_cast<float>(other + 32 * mask);
      calls++;
    }
  });
  CHECK(calls == 64 * 32);
  CHECK(wrong == 0);
}

TEST_CASE("emulator: a sum over a warp by shuffles") {
  const Setup setup;
  int wrong = 0;
  emulator::run(dim3(1), dim3(32), 0, [&] {
    auto x = static_cast<float>(threadIdx.x);
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
    wrong += x != 31 * 32 / 2;
  });
  CHECK(wrong == 0);
}

TEST_CASE("emulator: __expf is e^x to fp32's precision") {
  const Setup setup;
  float worst = 0;
  emulator::run(dim3(1), dim3(32), 0, [&] {
    for (float x = -80; x < 80; x += 0.37f) {
      const float right = std::exp(x);
      // The product x * log2(e) is rounded: half an ulp of it is 2^-24 |x| 1.44, in the exponent.
      worst = std::max(worst, std::abs(__expf(x) / right - 1) / (2 + std::abs(x)));
    }
  });
  CHECK(worst < 0x1p-23f);
  CHECK(worst > 0);
}

TEST_CASE("emulator: local variables survive a wait") {
  const Setup setup;
  int wrong = 0;
  emulator::run(dim3(2), dim3(96), 0, [&] {
    std::array<unsigned, 100> numbers;
    for (unsigned i = 0; i < 100; i++) numbers[i] = threadIdx.x * 1000 + i;
    const std::string text = "a string long enough for the heap, " + std::to_string(threadIdx.x);
    double sum = threadIdx.x;
    for (int round = 0; round < 4; round++) {
      __syncthreads();
      sum += 0.25;
      __syncwarp();
    }
    for (unsigned i = 0; i < 100; i++) wrong += numbers[i] != threadIdx.x * 1000 + i;
    wrong += text != "a string long enough for the heap, " + std::to_string(threadIdx.x);
    wrong += sum != threadIdx.x + 1.0;
  });
  CHECK(wrong == 0);
}

TEST_CASE("emulator: a thread may use 100 KB of stack") {
  const Setup setup;
  int wrong = 0;
  emulator::run(dim3(1), dim3(64), 0, [&] {
    volatile unsigned char stack[100 * 1024];
    for (int i = 0; i < 100 * 1024; i += 64)
      stack[i] = static_cast<unsigned char>(threadIdx.x + static_cast<unsigned>(i) / 64);
    __syncthreads();
    for (int i = 0; i < 100 * 1024; i += 64)
      wrong += stack[i] != static_cast<unsigned char>(threadIdx.x + static_cast<unsigned>(i) / 64);
  });
  CHECK(wrong == 0);
}

TEST_CASE("emulator: three threads of the host compute and count what one does") {
  const Setup setup;
  const int blocks = 40;
  const Global<float> in(blocks * 64, 1.0f), out(blocks * 64);
  const auto counts = [&](int host_threads) {
    emulator::settings.host_threads = host_threads;
    emulator::settings.profile = true;
    emulator::take_profile();
    std::fill_n(out.data, blocks * 64, 0.0f);
    launch<Numbers>(
        +[](const float *from, float *to) {
          auto &smem = shared_storage<Numbers>();
          const int i = static_cast<int>(threadIdx.x), b = static_cast<int>(blockIdx.x);
          const Matrix<const float> gin{from, 40, 64};
          smem.x(i % 4, i / 4) = gin(b, i) + gin(0, i);
          __syncthreads();
          if (i % 4 == b % 4) read(smem.x(0, 3));
          __expf(static_cast<float>(i));
          Matrix<float>{to, 40, 64}(b, i) = smem.x(0, i / 4) + static_cast<float>(b);
        },
        dim3(40), dim3(64), in.data, out.data);
    return emulator::take_profile();
  };
  const emulator::Profile one = counts(1);
  const std::vector<float> values(out.data, out.data + blocks * 64);
  for (int i = 0; i < blocks * 64; i++) CHECK(values[i] == static_cast<float>(2 + i / 64));
  const emulator::Profile three = counts(3);
  CHECK(std::vector<float>(out.data, out.data + blocks * 64) == values);
  CHECK(one.total() == three.total());
  CHECK(one.lines == three.lines);
  CHECK(one.unique_read_bytes == three.unique_read_bytes);
  CHECK(one.unique_written_bytes == three.unique_written_bytes);
  CHECK(one.trace.size() == three.trace.size());
  CHECK(one.total()[emulator::kSharedLoadRequests] == blocks * 2 * 2);
  CHECK(one.unique_read_bytes == blocks * 64 * 4);
}
