// SPDX-License-Identifier: MIT
// TMA on the emulator: what it copies, when it lands, who may touch the bytes, and what the engine does
// not see.
#include "common/kernel/tma.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string>

#include "common/emulator/testing.h"

namespace {

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

/// "load of shared memory that a TMA load at tma_test.cpp:57 by thread 0 may still be writing: ..."
std::string being_written(const std::string &operation, int line, unsigned thread) {
  return operation + " shared memory that a TMA load at " + file_and(line) + " by thread " +
         std::to_string(thread) + " may still be writing: no mbarrier_wait for its phase yet";
}

constexpr int kRows = 16, kTileBytes = kRows * 64 * 2;
using TileOf = TmaTile<kRows, 64, half>;

struct Shared {
  TileOf tile, other;
  Mbarrier landed, also_landed, read;
};

Shared &shared() {
  return shared_storage<Shared>();
}

/// Shared memory with barriers that every thread and the copy engine may use.
Shared &ready() {
  if (is_thread(0)) {
    mbarrier_init(shared().landed, 1);
    mbarrier_init(shared().also_landed, 1);
    mbarrier_init(shared().read, 1);
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
    const int first = seed % 4 * 8;  // 24: all of it lies beyond
    int wrong = 0;
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      load_tile(smem, map, first);
      mbarrier_wait(smem.landed, 0);
      for (int i = thread_id(); i < kRows * 64; i += 64) {
        const int row = first + i / 64;
        const float expected = row < 24 ? Tensor::value(row, i % 64) : 0;
        wrong += __half2float(smem.tile(i / 64, i % 64)) != expected;
      }
    });
    CHECK(error == "");
    CHECK(wrong == 0);
  }
}

TEST_CASE("tma: a sequence's tile ends where the sequence ends, loaded and stored") {
  const Setup setup;
  const Tensor tensor(60), stored(60);
  const Strides strides{0, 60 * 64, 64};
  const auto map_of = [&](const Tensor &of) {
    return sequence_map<half>(of.data, strides, 3, 1, 60, true, 64, kRows);
  };
  const SequenceMap map = map_of(tensor), map_stored = map_of(stored);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const SequenceRows rows{10 + seed % 3, 20};
    int wrong = 0;
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      if (is_thread(0)) {
        mbarrier_arrive_expect_tx(smem.landed, kTileBytes);
        tma_load(smem.tile, map, rows, 16, 0, 2, smem.landed);
      }
      mbarrier_wait(smem.landed, 0);
      for (int i = thread_id(); i < kRows * 64; i += 64) {
        const float expected = i / 64 < 4 ? Tensor::value(rows.first + 16 + i / 64, i % 64) : 0;
        wrong += __half2float(smem.tile(i / 64, i % 64)) != expected;
      }
      __syncthreads();
      if (is_thread(0)) {
        tma_store(map_stored, rows, 16, 0, 2, smem.tile);
        tma_store_commit();
        tma_store_wait_read<0>();
      }
    });
    CHECK(error == "");
    CHECK(wrong == 0);
    for (int row = 0; row < 60; row++)
      CHECK(__half2float(stored.data[row * 64]) == Tensor::value(row, 0));
  }
}

TEST_CASE(
    "tma: a box with more columns than the tensor loads zeros there, and does not store them") {
  const Setup setup;
  const Tensor tensor(60), stored(60);
  const auto map_of = [&](const Tensor &of, int columns) {
    return sequence_map<half>(of.data, {0, 60 * 64, 64}, 1, 1, 60, true, columns, kRows);
  };
  const SequenceRows rows{10, 20};
  for (const int columns : {8, 40, 56}) {
    for (int i = 0; i < 60 * 64; i++) stored.data[i] = __float2half(-1);
    const SequenceMap map = map_of(tensor, columns), map_stored = map_of(stored, columns);
    int wrong = 0;
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      if (is_thread(0)) {
        mbarrier_arrive_expect_tx(smem.landed, kTileBytes);
        tma_load(smem.tile, map, rows, 0, 0, 0, smem.landed);
      }
      mbarrier_wait(smem.landed, 0);
      for (int i = thread_id(); i < kRows * 64; i += 64) {
        const float expected = i % 64 < columns ? Tensor::value(10 + i / 64, i % 64) : 0;
        wrong += __half2float(smem.tile(i / 64, i % 64)) != expected;
      }
      __syncthreads();
      if (is_thread(0)) {
        tma_store(map_stored, rows, 0, 0, 0, smem.tile);
        tma_store_commit();
        tma_store_wait_read<0>();
      }
    });
    CHECK(error == "");
    CHECK(wrong == 0);
    int different = 0;
    for (int i = 0; i < 60 * 64; i++) {
      const int row = i / 64 - rows.first, col = i % 64;
      const bool is_stored = 0 <= row && row < kRows && col < columns;
      different += __half2float(stored.data[i]) != (is_stored ? Tensor::value(i / 64, col) : -1);
    }
    CHECK(different == 0);
  }
}

TEST_CASE("tma: a box without a column of the tensor is refused") {
  const Setup setup;
  const Tensor tensor(60);
  struct Wide {
    TmaTile<kRows, 128> tile;
    Mbarrier landed;
  };
  const SequenceMap map =
      sequence_map<half>(tensor.data, {0, 60 * 64, 64}, 1, 1, 60, true, 64, kRows);
  const std::string error = error_of<Wide>(dim3(32), [&] {
    auto &smem = shared_storage<Wide>();
    if (!is_thread(0)) return;
    mbarrier_init(smem.landed, 1);
    mbarrier_fence_init();
    mbarrier_arrive_expect_tx(smem.landed, sizeof smem.tile);
    tma_load(smem.tile, map, {0, 60}, 0, 0, 0, smem.landed);
  });
  CAPTURE(error);
  CHECK(error.find("TMA load: columns to 128 of a tensor that has 64") != std::string::npos);
}

TEST_CASE("tma: a sequence that is not in the tensor") {
  const Setup setup;
  const Tensor tensor(60);
  const SequenceMap map =
      sequence_map<half>(tensor.data, {0, 60 * 64, 64}, 1, 1, 60, true, 64, kRows);
  for (const SequenceRows rows :
       {SequenceRows{-1, 5}, SequenceRows{50, 11}, SequenceRows{0, -1}, SequenceRows{61, 0}}) {
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      if (!is_thread(0)) return;
      mbarrier_arrive_expect_tx(smem.landed, kTileBytes);
      tma_load(smem.tile, map, rows, 0, 0, 0, smem.landed);
    });
    const std::string expected = "TMA: a sequence of " + std::to_string(rows.count) +
                                 " rows from " + std::to_string(rows.first) +
                                 " on, of a tensor that has 60";
    CHECK(error.find(expected) != std::string::npos);
  }
}

TEST_CASE("tma: boxes of pages make a tile, and the last one ends where the sequence ends") {
  const Setup setup;
  const Tensor tensor(64);  // 4 pages of 16 rows; a box has 8
  const Strides strides{16 * 64, 64 * 64, 64};
  const auto map_of = [&](int box_rows) {
    return sequence_map<half>(tensor.data, strides, 4, 1, 16, false, 64, box_rows);
  };
  const SequenceMap map = map_of(8), whole_tiles = map_of(kRows);
  REQUIRE(kRows == 16);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    int wrong = 0;
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      if (is_thread(0)) mbarrier_arrive_expect_tx(smem.landed, kTileBytes);
      // Rows 8 to 15 of page 3, and 8 to 12 of page 1.
      if (is_thread(0)) tma_load_rows(smem.tile, 0, map, {0, 16}, 8, 0, 3, smem.landed);
      if (is_thread(1)) tma_load_rows(smem.tile, 8, map, {0, 13}, 8, 0, 1, smem.landed);
      mbarrier_wait(smem.landed, 0);
      for (int i = thread_id(); i < kRows * 64; i += 64) {
        const int row = i / 64, from = row < 8 ? 3 * 16 + 8 + row : 16 + row;
        const float expected = row < 13 ? Tensor::value(from, i % 64) : 0;
        wrong += __half2float(smem.tile(row, i % 64)) != expected;
      }
    });
    CHECK(error == "");
    CHECK(wrong == 0);
  }
  const auto error_at = [&](int to_row, int rows, int row, int head, int page) {
    return error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      if (!is_thread(0)) return;
      mbarrier_arrive_expect_tx(smem.landed, kTileBytes / 2);
      tma_load_rows(smem.tile, to_row, map, {0, rows}, row, head, page, smem.landed);
    });
  };
  const auto says = [](const std::string &error, const std::string &text) {
    CAPTURE(error);
    CHECK(error.find(text) != std::string::npos);
  };
  for (const int page : {-1, 4})
    says(error_at(0, 16, 0, 0, page),
         "head 0 of batch element " + std::to_string(page) + ", of a tensor of 4 x 1 heads");
  says(error_at(0, 16, 0, 1, 0), "head 1 of batch element 0");
  for (const int row : {13, -8})
    says(error_at(0, 13, row, 0, 0), "a box of 8 rows from row " + std::to_string(row) +
                                         " on has no row of its sequence, which has 13");
  says(error_at(4, 16, 0, 0, 0), "it begins at a multiple of 8 rows");
  for (const int to_row : {-8, 16})
    says(error_at(to_row, 16, 0, 0, 0), "it does not lie in the tile");
  const auto tile_of = [&](const SequenceMap &of) {
    return error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      if (is_thread(0)) mbarrier_arrive_expect_tx(smem.landed, kTileBytes);
      if (is_thread(0)) tma_load(smem.tile, of, {0, 16}, 0, 0, 0, smem.landed);
      mbarrier_wait(smem.landed, 0);
    });
  };
  CHECK(tile_of(whole_tiles) == "");
  says(tile_of(map), "the tile is 16 x 64 of 2 bytes, the map's box 8 x 64 of 2 bytes");
}

TEST_CASE(
    "tma: a tile lies as Slabs says, in slabs of 128 bytes, for elements of 2 and of 4 bytes") {
  const Setup setup;
  const auto check = [](auto element, auto value_of) {
    using T = decltype(element);
    constexpr int kWide = 128;
    struct Storage {
      TmaTile<8, kWide, T> tile;
      Mbarrier landed;
    };
    auto *data = static_cast<T *>(emulator::allocate(2 * 3 * 20 * kWide * sizeof(T)));
    for (int i = 0; i < 2 * 3 * 20 * kWide; i++) data[i] = value_of(i % 1999);
    // [batch, rows, heads, d], of which head 2 of batch element 1.
    const TensorMap map =
        tensor_map<T>(data, {20 * 3 * kWide, kWide, 3 * kWide}, 2, 3, 20, kWide, 8);
    int wrong = 0;
    const std::string error = error_of<Storage>(dim3(32), [&] {
      auto &smem = shared_storage<Storage>();
      if (is_thread(0)) {
        mbarrier_init(smem.landed, 1);
        mbarrier_fence_init();
        mbarrier_arrive_expect_tx(smem.landed, sizeof smem.tile);
        tma_load(smem.tile, map, 7, 2, 1, smem.landed);
        mbarrier_wait(smem.landed, 0);
        for (int i = 0; i < 8 * kWide; i++) {
          const int row = 7 + i / kWide;
          const T expected = value_of((((20 + row) * 3 + 2) * kWide + i % kWide) % 1999);
          const T found = smem.tile(i / kWide, i % kWide);
          wrong += std::memcmp(&found, &expected, sizeof(T)) != 0;
        }
      }
    });
    emulator::release(data);
    CHECK(error == "");
    CHECK(wrong == 0);
  };
  check(half{}, [](int i) { return __float2half(static_cast<float>(i)); });
  check(float{}, [](int i) { return static_cast<float>(i); });
}

TEST_CASE("tma: a tensor map takes what the engine takes") {
  const Setup setup;
  const Tensor tensor(64);
  const auto map_of = [&](const half *data, Strides strides, int tile_rows) {
    (void)tensor_map<half>(data, strides, 1, 1, 32, 64, tile_rows);
  };
  CHECK_NOTHROW(map_of(tensor.data, {0, 0, 64}, 32));
  CHECK_THROWS_AS(map_of(tensor.data + 4, {0, 0, 64}, 32), ShapeError);
  CHECK_THROWS_AS(map_of(tensor.data, {0, 0, 68}, 32), ShapeError);
  CHECK_THROWS_AS(map_of(tensor.data, {4, 0, 64}, 32), ShapeError);
  CHECK_THROWS_AS(map_of(tensor.data, {0, 4, 64}, 32), ShapeError);
  CHECK_THROWS_AS(map_of(tensor.data, {0, 0, 64}, 264), ShapeError);
}

TEST_CASE("tma: a tile is nobody's to touch until the thread knows that its phase has ended") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  // A thread that does not wait, whether it has landed or not; not even behind a barrier.
  std::string error = error_under_all_seeds<Shared>(dim3(64), [&] {
    Shared &smem = ready();
    load_tile(smem, map);
    if (is_thread(0)) also_at = __LINE__, read(smem.tile(3, 5));
  });
  CHECK(error == error_in_thread(also_at, 0, being_written("load of", at, 0)));
  error = error_under_all_seeds<Shared>(dim3(64), [&] {
    Shared &smem = ready();
    load_tile(smem, map);
    __syncthreads();
    if (is_thread(40)) also_at = __LINE__, smem.tile(3, 5) = half{};
  });
  CHECK(error == error_in_thread(also_at, 40, being_written("store to", at, 0)));
  error = error_under_all_seeds<Shared>(dim3(64), [&] {
    Shared &smem = ready();
    load_tile(smem, map);
    __syncthreads();
    if (is_thread(40)) also_at = __LINE__, read(smem.tile(3, 5));
  });
  CHECK(error == error_in_thread(also_at, 40, being_written("load of", at, 0)));
  // One waits, and tells the others.
  error = error_under_all_seeds<Shared>(dim3(64), [&] {
    Shared &smem = ready();
    load_tile(smem, map);
    if (is_thread(33)) mbarrier_wait(smem.landed, 0);
    __syncthreads();
    read(smem.tile(3, 5));
  });
  CHECK(error == "");
}

TEST_CASE("tma: a wait for the wrong parity passes at once, and the tile is read too early") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  int early = 0, stuck = 0;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    int wait = 0;
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      load_tile(smem, map);
      __syncthreads();
      if (is_thread(40)) {
        wait = __LINE__, mbarrier_wait(smem.landed, 1);
        also_at = __LINE__, read(smem.tile(3, 5));
      }
    });
    early += error == error_in_thread(also_at, 40, being_written("load of", at, 0));
    // Or the phase has ended by then, and the next one never does.
    stuck += error.find(error_in_thread(wait, 40,
                                        "1 of 64 threads wait for ever in mbarrier_wait for parity "
                                        "1 of the mbarrier shared().landed of")) == 0;
  }
  CHECK(early > 0);
  CHECK(stuck > 0);
  CHECK(early + stuck == kSeeds);
}

TEST_CASE("tma: two loads to one tile need a wait between them") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  for (const bool waits : {false, true}) {
    const std::string error = error_under_all_seeds<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      load_tile(smem, map);
      if (!is_thread(0)) return;
      if (waits) mbarrier_wait(smem.landed, 0);
      mbarrier_arrive_expect_tx(smem.also_landed, kTileBytes);
      also_at = __LINE__, tma_load(smem.tile, map, 0, 0, 0, smem.also_landed);
      mbarrier_wait(smem.also_landed, 0);
    });
    CHECK(error == (waits ? "" : error_in_thread(also_at, 0, being_written("TMA load to", at, 0))));
  }
}

TEST_CASE("tma: a load over what others have read is a race, but for a barrier") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  for (const bool waits : {false, true}) {
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const std::string error = error_of<Shared>(dim3(64), [&] {
        Shared &smem = ready();
        load_tile(smem, map);
        if (is_thread(40)) {
          mbarrier_wait(smem.landed, 0);
          also_at = __LINE__, read(smem.tile(3, 5));
          if (waits) mbarrier_arrive(smem.read);
        }
        if (is_thread(0)) {
          mbarrier_wait(smem.landed, 0);
          if (waits) mbarrier_wait(smem.read, 0);
          mbarrier_arrive_expect_tx(smem.also_landed, kTileBytes);
          at = __LINE__, tma_load(smem.tile, map, 0, 0, 0, smem.also_landed);
          mbarrier_wait(smem.also_landed, 0);
        }
      });
      const std::string second =
          error_in_thread(at, 0,
                          "TMA load races in shared memory with the load at " + file_and(also_at) +
                              " by thread 40: no barrier between them");
      const std::string first = error_in_thread(also_at, 40, being_written("load of", at, 0));
      CAPTURE(error);
      CHECK((waits ? error == "" : error == first || error == second));
    }
  }
}

TEST_CASE("tma: a load over ordinary stores needs a proxy fence after them") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  enum Fence { kNone, kTooEarly, kByWriter, kByIssuer, kByOther };
  for (const Fence fence : {kNone, kTooEarly, kByWriter, kByIssuer, kByOther}) {
    CAPTURE(fence);
    const std::string error = error_under_all_seeds<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      if (is_thread(40)) {
        if (fence == kTooEarly) fence_proxy_async();
        also_at = __LINE__, smem.tile(3, 5) = half{};
        if (fence == kByWriter) fence_proxy_async();
      }
      __syncthreads();
      if (is_thread(50) && fence == kByOther) fence_proxy_async();
      if (fence == kByOther) __syncthreads();
      if (is_thread(0) && fence == kByIssuer) fence_proxy_async();
      load_tile(smem, map);
      mbarrier_wait(smem.landed, 0);
    });
    if (fence == kNone || fence == kTooEarly)
      CHECK(error == error_in_thread(at, 0,
                                     "TMA load may not see the store to shared memory at " +
                                         file_and(also_at) +
                                         " by thread 40: no fence_proxy_async between them"));
    else
      CHECK(error == "");
  }
}

TEST_CASE("tma: the engine sees a barrier after a fence of the thread that initialised it") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  enum Fence { kNone, kTooEarly, kByAnother, kTooLate, kOfInit, kOfProxy };
  for (const Fence fence : {kNone, kTooEarly, kByAnother, kTooLate, kOfInit, kOfProxy}) {
    CAPTURE(fence);
    const std::string error = error_under_all_seeds<Shared>(dim3(64), [&] {
      Shared &smem = shared();
      if (is_thread(40)) {
        if (fence == kTooEarly) mbarrier_fence_init();
        also_at = __LINE__, mbarrier_init(smem.landed, 1);
        if (fence == kOfInit) mbarrier_fence_init();
        if (fence == kOfProxy) fence_proxy_async();
      }
      __syncthreads();
      if (is_thread(40) && fence == kTooLate) mbarrier_fence_init();
      if (is_thread(0) && fence == kByAnother) mbarrier_fence_init();
      load_tile(smem, map);
      if (is_thread(0)) mbarrier_wait(smem.landed, 0);
    });
    if (fence == kOfInit || fence == kOfProxy)
      CHECK(error == "");
    else
      CHECK(error ==
            error_in_thread(at, 0,
                            "TMA load: the copy engine may not see the mbarrier that "
                            "thread 40 initialises at " +
                                file_and(also_at) + ": no mbarrier_fence_init between them"));
  }
}

TEST_CASE("tma: what lies outside of the tensor is zeros to load, and nothing to store") {
  const Setup setup;
  const Tensor tensor(32);
  const TensorMap map = tensor.map(kRows);
  const auto row_of = [](int row, int head, int batch, int i) {
    return head == 0 && batch == 0 && row + i >= 0 && row + i < 32 ? row + i : -1;
  };
  for (const auto &[row, head, batch] :
       {std::array{-5, 0, 0}, {-16, 0, 0}, {32, 0, 0}, {0, 1, 0}, {0, -1, 0}, {0, 0, 1}}) {
    int wrong = 0;
    CHECK(error_of<Shared>(dim3(64), [&, row = row, head = head, batch = batch] {
            Shared &smem = ready();
            if (is_thread(0)) {
              mbarrier_arrive_expect_tx(smem.landed, kTileBytes);
              tma_load(smem.tile, map, row, head, batch, smem.landed);
            }
            mbarrier_wait(smem.landed, 0);
            for (int i = thread_id(); i < kRows * 64; i += 64) {
              const int from = row_of(row, head, batch, i / 64);
              wrong += __half2float(smem.tile(i / 64, i % 64)) !=
                       (from < 0 ? 0 : Tensor::value(from, i % 64));
            }
            if (is_thread(0) && row >= 0 && head >= 0) {
              tma_store(map, row, head, batch, smem.tile);
              tma_store_commit();
              tma_store_wait_read<0>();
            }
          }) == "");
    CHECK(wrong == 0);
  }
  for (int i = 0; i < 32 * 64; i++)
    CHECK(__half2float(tensor.data[i]) == Tensor::value(i / 64, i % 64));
}

TEST_CASE("tma: a store reads the columns that the tensor has, and no others") {
  const Setup setup;
  const Tensor stored(60);
  const SequenceMap map =
      sequence_map<half>(stored.data, {0, 60 * 64, 64}, 1, 1, 60, true, 40, kRows);
  for (const int written : {40, 32}) {
    const std::string error = error_of<Shared>(dim3(32), [&] {
      TileOf &tile = shared().tile;
      for (int i = thread_id(); i < kRows * written; i += 32)
        tile(i / written, i % written) = __float2half(1);
      fence_proxy_async();
      __syncwarp();
      if (!is_thread(0)) return;
      at = __LINE__, tma_store(map, {0, 60}, 0, 0, 0, tile);
      tma_store_commit();
      tma_store_wait_read<0>();
    });
    if (written == 40)
      CHECK(error == "");
    else
      CHECK(error == error_in_thread(at, 0, "TMA store of shared memory that nobody wrote"));
  }
  CHECK(__half2float(stored.data[39]) == 1);
  CHECK(__half2float(stored.data[40]) == Tensor::value(0, 40));
}

TEST_CASE("tma: a tile's place and box, and the tensor's memory") {
  const Setup setup;
  const Tensor tensor(32);
  struct Storage {
    TileOf tile;
    TmaTile<8, 64, half> small;
    alignas(1024) char bytes[512 + sizeof(TileOf)];
    Mbarrier landed;
  };
  const auto error_with = [](const TensorMap &map, int row, int head, int batch, auto tile_of) {
    return error_of<Storage>(dim3(32), [&] {
      auto &smem = shared_storage<Storage>();
      if (!is_thread(0)) return;
      mbarrier_init(smem.landed, 1);
      mbarrier_fence_init();
      at = __LINE__, tma_load(tile_of(smem), map, row, head, batch, smem.landed);
    });
  };
  const auto tile = [](Storage &smem) -> TileOf & { return smem.tile; };
  const TensorMap map = tensor.map(kRows);
  const auto check = [](const std::string &error, const std::string &what) {
    CHECK(error == error_in_thread(at, 0, what));
  };
  const auto shifted = [](Storage &smem) -> TileOf & {
    return reinterpret_cast<TileOf &>(smem.bytes[512]);
  };
  check(error_with(map, 0, 0, 0, shifted),
        "TMA load: the tile begins at byte 3584 of shared memory, which is not a multiple of 1024");
  const auto small = [](Storage &smem) -> TmaTile<8, 64, half> & { return smem.small; };
  check(error_with(map, 0, 0, 0, small),
        "TMA load: the tile is 8 x 64 of 2 bytes, the map's box 16 x 64 of 2 bytes");
  const TensorMap longer =
      tensor_map<half>(tensor.data, {0, 0, Tensor::d}, 1, 1, 33, Tensor::d, kRows);
  check(error_with(longer, 20, 0, 0, tile), "load outside of every allocation");
  static TileOf of_host;
  check(error_with(map, 0, 0, 0, [](Storage &) -> TileOf & { return of_host; }),
        "TMA load: the tile is not in shared memory");
}

TEST_CASE(
    "tma: bytes expected and bytes landed that differ, when the block is stuck and when it ends") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  for (const int expected : {kTileBytes - 8, kTileBytes + 128}) {
    const std::string counts =
        "0 of 1 arrivals to come, " + std::to_string(expected) + " bytes expected, 2048 arrived";
    int init = 0;
    const auto begin = [&](Shared &smem) {
      if (!is_thread(0)) return;
      init = __LINE__, mbarrier_init(smem.landed, 1);
      mbarrier_fence_init();
      mbarrier_arrive_expect_tx(smem.landed, expected);
      tma_load(smem.tile, map, 0, 0, 0, smem.landed);
    };
    std::string error = error_under_all_seeds<Shared>(dim3(64), [&] {
      begin(shared());
      __syncthreads();
      at = __LINE__, mbarrier_wait(shared().landed, 0);
    });
    CHECK(error == error_in_thread(at, 0,
                                   "64 of 64 threads wait for ever in mbarrier_wait for parity 0 "
                                   "of the mbarrier smem.landed of " +
                                       file_and(init) + " (at byte " +
                                       std::to_string(offsetof(Shared, landed)) + ", phase 0, " +
                                       counts + ")"));
    error = error_under_all_seeds<Shared>(dim3(64), [&] { begin(shared()); });
    CHECK(error ==
          error_in_thread(init, 0,
                          "the block ends, and the mbarrier smem.landed of " + file_and(init) +
                              " (at byte " + std::to_string(offsetof(Shared, landed)) +
                              ", phase 0, " + counts + ") has not what it expects"));
  }
}

TEST_CASE("tma: with fewer bytes expected than land, the phase ends without the rest") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  for (const int expected : {kTileBytes - 128, kTileBytes / 2, 128}) {
    const int rows = expected / 128;
    const auto kernel = [&](int first, int end) {
      return error_under_all_seeds<Shared>(dim3(64), [=, &map] {
        Shared &smem = ready();
        if (is_thread(0)) {
          mbarrier_arrive_expect_tx(smem.landed, expected);
          also_at = __LINE__, tma_load(smem.tile, map, 0, 0, 0, smem.landed);
        }
        mbarrier_wait(smem.landed, 0);
        for (int row = first; row < end; row++)
          if (is_thread(9)) at = __LINE__, read(smem.tile(row, 3));
        __syncthreads();
        if (is_thread(0)) mbarrier_arrive_expect_tx(smem.landed, kTileBytes - expected);
        mbarrier_wait(smem.landed, 1);
      });
    };
    CHECK(kernel(0, rows) == "");
    CHECK(kernel(rows, rows + 1) ==
          error_in_thread(at, 9,
                          "load of shared memory that a TMA load at " + file_and(also_at) +
                              " by thread 0 may still be writing: the mbarrier expected fewer "
                              "bytes than its loads copy, and its phase ended before these "
                              "arrived"));
    CHECK(tag == "[in-flight] ");
  }
}

TEST_CASE("tma: a load that nobody waits for is still under way when the block ends") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  for (const bool waits : {true, false}) {
    const std::string error = error_under_all_seeds<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      load_tile(smem, map);
      mbarrier_wait(smem.landed, 0);
      __syncthreads();
      load_tile(smem, map);
      if (waits && is_thread(40)) mbarrier_wait(smem.landed, 1);
    });
    CHECK((error == "") == waits);
    if (waits) continue;
    CHECK(error.starts_with(error_in_thread(
        at, 0,
        "the block ends, and this TMA load may still be writing shared memory: nobody waits at "
        "the mbarrier shared().landed of ")));
    CHECK(tag == "[in-flight] ");
  }
}

TEST_CASE("tma: what a load reads in global memory must not be stored meanwhile") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      load_tile(smem, map);
      if (is_thread(40)) also_at = __LINE__, Matrix<half>{tensor.data, kRows, 64}(3, 5) = half{};
    });
    const std::string race = " races in global memory with the ";
    CAPTURE(error);
    CHECK((error == error_in_thread(at, 0,
                                    "load" + race + "store at " + file_and(also_at) +
                                        " by thread 40: no barrier between them") ||
           error == error_in_thread(also_at, 40,
                                    "store" + race + "load at " + file_and(at) +
                                        " by thread 0: no barrier between them")));
  }
}

// --- stores --------------------------------------------------------------------------------------

namespace {

enum class Mistake { kNone, kNoFence, kNoWait, kNoCommit, kGroupLeft };

/// All threads write the tile, and thread 0 has it stored from `row` on.
void store_tile(Shared &smem, const TensorMap &map, int row, Mistake mistake) {
  for (int i = thread_id(); i < kRows * 64; i += 64)
    also_at = __LINE__, smem.tile(i / 64, i % 64) = __float2half(Tensor::value(i % 64, i / 64));
  if (mistake != Mistake::kNoFence) fence_proxy_async();
  __syncthreads();
  if (is_thread(0)) {
    at = __LINE__, tma_store(map, row, 0, 0, smem.tile);
    if (mistake != Mistake::kNoCommit) tma_store_commit();
    if (mistake == Mistake::kGroupLeft) tma_store_wait_read<1>();
    if (mistake == Mistake::kNone || mistake == Mistake::kNoCommit) tma_store_wait_read<0>();
  }
  __syncthreads();
}

}  // namespace

TEST_CASE("tma: a store writes the rows that the tensor has, and no others") {
  const Setup setup;
  const Tensor tensor(32);
  const TensorMap map =
      tensor_map<half>(tensor.data, {0, 0, Tensor::d}, 1, 1, 24, Tensor::d, kRows);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    for (int i = 0; i < 32 * 64; i++) tensor.data[i] = __float2half(-1);
    CHECK(error_of<Shared>(dim3(64), [&] {
            store_tile(ready(), map, 16, Mistake::kNone);
            shared().tile(thread_id() / 8, thread_id() % 8) = half{};  // it has been read
          }) == "");
    int wrong = 0;
    for (int i = 0; i < 32 * 64; i++) {
      const int row = i / 64, col = i % 64;
      const float expected = 16 <= row && row < 24 ? Tensor::value(col, row - 16) : -1;
      wrong += __half2float(tensor.data[i]) != expected;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("tma: a store may begin behind the tensor, and not before it") {
  const Setup setup;
  const Tensor tensor(32);
  const TensorMap map = tensor.map(kRows);
  const auto error = [&](int row, int head) {
    return error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      for (int i = thread_id(); i < kRows * 64; i += 64) smem.tile(i / 64, i % 64) = half{};
      fence_proxy_async();
      __syncthreads();
      if (!is_thread(0)) return;
      at = __LINE__, tma_store(map, row, head, 0, smem.tile);
      tma_store_commit();
      tma_store_wait_read<0>();
    });
  };
  CHECK(error(32, 0) == "");
  CHECK(error(1000, 1) == "");
  for (const auto &[row, head] : {std::pair{-1, 0}, {-kRows, 0}, {0, -1}})
    CHECK(error(row, head) == error_in_thread(at, 0,
                                              "TMA store at row " + std::to_string(row) +
                                                  " of head " + std::to_string(head) +
                                                  " of batch 0: none may be negative in a store"));
}

TEST_CASE("tma: a store sees ordinary stores after a proxy fence and a barrier") {
  const Setup setup;
  const Tensor tensor(32);
  const TensorMap map = tensor.map(kRows);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    std::string error =
        error_of<Shared>(dim3(64), [&] { store_tile(ready(), map, 0, Mistake::kNoFence); });
    CHECK(error == error_in_thread(at, 0,
                                   "TMA store may not see the store to shared memory at " +
                                       file_and(also_at) +
                                       " by thread 0: no fence_proxy_async between them"));
    error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      if (is_thread(40)) {
        for (int i = 0; i < kRows * 64; i++) also_at = __LINE__, smem.tile(i / 64, i % 64) = half{};
        fence_proxy_async();
      }
      if (is_thread(0)) at = __LINE__, tma_store(map, 0, 0, 0, smem.tile);
    });
    const std::string still_read =
        error_in_thread(also_at, 40,
                        "store to shared memory that a TMA store at " + file_and(at) +
                            " by thread 0 may still be reading: no "
                            "tma_store_wait_read for its group yet");
    CAPTURE(error);
    CHECK((error == still_read ||
           error == error_in_thread(at, 0, "TMA store of shared memory that nobody wrote") ||
           error ==
               error_in_thread(at, 0,
                               "TMA store races in shared memory with the store at " +
                                   file_and(also_at) + " by thread 40: no barrier between them")));
  }
}

TEST_CASE("tma: a store that its thread has not waited for is under way when that exits") {
  const Setup setup;
  const Tensor tensor(32);
  const TensorMap map = tensor.map(kRows);
  for (const Mistake mistake :
       {Mistake::kNone, Mistake::kNoWait, Mistake::kNoCommit, Mistake::kGroupLeft}) {
    const std::string error =
        error_under_all_seeds<Shared>(dim3(64), [&] { store_tile(ready(), map, 0, mistake); });
    CHECK(error ==
          (mistake == Mistake::kNone
               ? ""
               : error_in_thread(at, 0,
                                 "the thread exits, and this TMA store may still be reading shared "
                                 "memory: no tma_store_wait_read for its group yet")));
    if (mistake != Mistake::kNone) CHECK(tag == "[in-use] ");
  }
}

TEST_CASE("tma: a tile is not to be written until a wait covers the group of its store") {
  const Setup setup;
  const Tensor tensor(32);
  const TensorMap map = tensor.map(kRows);
  for (const Mistake mistake :
       {Mistake::kNone, Mistake::kNoWait, Mistake::kNoCommit, Mistake::kGroupLeft}) {
    CAPTURE(static_cast<int>(mistake));
    int line = 0;
    const std::string error = error_under_all_seeds<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      store_tile(smem, map, 0, mistake);
      if (is_thread(40)) {
        read(smem.tile(3, 5));
        line = __LINE__, smem.tile(3, 5) = half{};
      }
      __syncthreads();
    });
    CHECK(error ==
          (mistake == Mistake::kNone
               ? ""
               : error_in_thread(line, 40,
                                 "store to shared memory that a TMA store at " + file_and(at) +
                                     " by thread 0 may still be reading: no "
                                     "tma_store_wait_read for its group yet")));
  }
}

TEST_CASE(
    "tma: after its wait a store has read, as far as its thread knows: a write needs a barrier") {
  const Setup setup;
  const Tensor tensor(32);
  const TensorMap map = tensor.map(kRows);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    int line = 0;
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = ready();
      for (int i = thread_id(); i < kRows * 64; i += 64) smem.tile(i / 64, i % 64) = half{};
      fence_proxy_async();
      __syncthreads();
      if (is_thread(0)) {
        at = __LINE__, tma_store(map, 0, 0, 0, smem.tile);
        tma_store_commit();
        tma_store_wait_read<0>();
      }
      if (is_thread(40)) line = __LINE__, smem.tile(3, 5) = half{};
    });
    CAPTURE(error);
    CHECK(
        (error == error_in_thread(line, 40,
                                  "store races in shared memory with the TMA store at " +
                                      file_and(at) + " by thread 0: no barrier between them") ||
         error == error_in_thread(at, 0,
                                  "TMA store races in shared memory with the store at " +
                                      file_and(line) + " by thread 40: no barrier between them") ||
         // Between the TMA store and the wait for it.
         error == error_in_thread(line, 40,
                                  "store to shared memory that a TMA store at " + file_and(at) +
                                      " by thread 0 may still be reading: no "
                                      "tma_store_wait_read for its group yet")));
  }
}

TEST_CASE("tma: what a store writes is nobody's to read in the same launch") {
  const Setup setup;
  const Tensor tensor(32);
  const TensorMap map = tensor.map(kRows);
  int line = 0;
  const std::string error = error_under_all_seeds<Shared>(dim3(64), [&] {
    store_tile(ready(), map, 0, Mistake::kNone);
    if (is_thread(0)) line = __LINE__, read(Matrix<half>{tensor.data, 32, 64}(3, 5));
  });
  CHECK(error == error_in_thread(line, 0,
                                 "load races in global memory with the store at " + file_and(at) +
                                     " by the TMA: no barrier between them"));
}

// --- reductions ----------------------------------------------------------------------------------

namespace {

constexpr int kNumbers = 64;

struct Summands {
  Tile<float, 1, kNumbers + 4> x;
  Mbarrier unused;
};

/// fp32 numbers in the emulator's global memory.
struct Sums {
  float *data = static_cast<float *>(emulator::allocate(2 * kNumbers * sizeof(float)));

  explicit Sums(float value) { std::fill_n(data, 2 * kNumbers, value); }
  Sums(const Sums &) = delete;
  Sums &operator=(const Sums &) = delete;
  ~Sums() { emulator::release(data); }

  Reference<float> operator()(int col, Where where = Where::current()) const {
    return Matrix<float>{data, 1, 2 * kNumbers}(0, col, where);
  }
};

/// All threads write the numbers, and thread 0 has them added.
void add_numbers(const Sums &sums, Mistake mistake, float number = 1) {
  auto &smem = shared_storage<Summands>();
  if (thread_id() < kNumbers) also_at = __LINE__, smem.x(0, thread_id()) = number;
  if (mistake != Mistake::kNoFence) fence_proxy_async();
  __syncthreads();
  if (is_thread(0)) {
    at = __LINE__, bulk_red_add<kNumbers>(sums(0), smem.x(0, 0));
    if (mistake != Mistake::kNoCommit) tma_store_commit();
    if (mistake == Mistake::kGroupLeft) tma_store_wait_read<1>();
    if (mistake == Mistake::kNone || mistake == Mistake::kNoCommit) tma_store_wait_read<0>();
  }
  __syncthreads();
}

}  // namespace

TEST_CASE("bulk: a reduction adds each number once, whichever blocks add") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const Sums sums(100);
    CHECK(error_of<Summands>(dim3(5), dim3(64), [&] {
            add_numbers(sums, Mistake::kNone, static_cast<float>(blockIdx.x + 1));
          }) == "");
    for (int i = 0; i < 2 * kNumbers; i++) CHECK(sums.data[i] == (i < kNumbers ? 115 : 100));
  }
}

TEST_CASE("bulk: the order of additions is drawn from the seed") {
  const Setup setup;
  const auto sum_with = [](std::uint64_t seed) {
    emulator::settings.seed = seed;
    const Sums sums(1);
    CHECK(error_of<Summands>(dim3(3), dim3(64), [&] {
            add_numbers(sums, Mistake::kNone, blockIdx.x == 2 ? -1.0f : 0x1p-24f);
          }) == "");
    return sums.data[0];
  };
  bool differ = false;
  for (std::uint64_t seed = 2; seed <= kSeeds; seed++) differ |= sum_with(seed) != sum_with(1);
  CHECK(differ);
  CHECK(sum_with(1) == sum_with(1));
}

TEST_CASE(
    "bulk: blocks that tell each other add in order, if they wait for all and not for the read") {
  const Setup setup;
  const auto sum_with = [](std::uint64_t seed, bool all) {
    emulator::settings.seed = seed;
    const Sums sums(1);
    auto *const turn = static_cast<unsigned *>(emulator::allocate(256));
    *turn = 3;  // blocks that are to come
    CHECK(error_of<Summands>(dim3(3), dim3(64), [&] {
            const Matrix<unsigned> left{turn, 1, 1};
            if (is_thread(0)) {
              while (atomic_read(left(0, 0)) != 3 - blockIdx.x) {
              }
              __threadfence();
            }
            add_numbers(sums, Mistake::kNone, blockIdx.x == 2 ? -1.0f : 0x1p-24f);
            if (is_thread(0)) {
              if (all) tma_store_wait<0>();
              __threadfence();
              atomic_dec(left(0, 0), 3);
            }
          }) == "");
    emulator::release(turn);
    return sums.data[0];
  };
  bool differ = false;
  for (std::uint64_t seed = 1; seed <= kSeeds; seed++) {
    CHECK(sum_with(seed, true) == 0);  // 1 + 2^-24 is 1
    differ |= sum_with(seed, false) != 0;
  }
  CHECK(differ);
}

TEST_CASE("bulk: sums with the same bits in every run need a wait for all before the signal") {
  const Setup setup;
  const auto error_with = [&](int host_threads, bool all, bool same_bits, float *sum) {
    emulator::settings.host_threads = host_threads;
    emulator::settings.same_bits = same_bits;
    const Sums sums(1);
    auto *const turn = static_cast<unsigned *>(emulator::allocate(256));
    *turn = 0;
    const std::string error = error_of<Summands>(dim3(3), dim3(64), [&] {
      const Matrix<unsigned> turns{turn, 1, 1};
      if (is_thread(0)) wait_until(turns(0, 0), blockIdx.x);
      add_numbers(sums, Mistake::kNone, blockIdx.x == 2 ? -1.0f : 0x1p-24f);
      if (is_thread(0)) {
        if (all) tma_store_wait<0>();
        red_release_add(turns(0, 0), 1);
      }
    });
    *sum = sums.data[0];
    emulator::release(turn);
    return error;
  };
  bool differ = false;
  for (const int host_threads : {1, 3})
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      float sum = 0;
      CHECK(error_with(host_threads, true, true, &sum) == "");
      CHECK(sum == 0);  // 1 + 2^-24 is 1
      CHECK(error_with(host_threads, false, true, &sum)
                .ends_with(": reduction in no order with the reduction at " + file_and(at) +
                           " by the TMA: no tma_store_wait and signal between them, and this step "
                           "says that its bits are the same in every run"));
      CHECK(error_with(host_threads, false, false, &sum) == "");  // legal, if any order will do
      differ |= sum != 0;
    }
  CHECK(differ);
}

TEST_CASE("bulk: a reduction sees ordinary stores after a proxy fence and a barrier") {
  const Setup setup;
  const Sums sums(0);
  const std::string error =
      error_under_all_seeds<Summands>(dim3(64), [&] { add_numbers(sums, Mistake::kNoFence); });
  CHECK(error ==
        error_in_thread(at, 0,
                        "bulk reduction may not see the store to shared memory at " +
                            file_and(also_at) + " by thread 0: no fence_proxy_async between them"));
}

TEST_CASE("bulk: what a reduction reads is not to be written until a wait covers its group") {
  const Setup setup;
  const Sums sums(0);
  for (const Mistake mistake :
       {Mistake::kNone, Mistake::kNoWait, Mistake::kNoCommit, Mistake::kGroupLeft}) {
    CAPTURE(static_cast<int>(mistake));
    int line = 0;
    std::string error = error_under_all_seeds<Summands>(dim3(64), [&] {
      add_numbers(sums, mistake);
      if (is_thread(40)) line = __LINE__, shared_storage<Summands>().x(0, 5) = 0.0f;
      __syncthreads();
    });
    const bool right = mistake == Mistake::kNone;
    CHECK(error == (right ? ""
                          : error_in_thread(line, 40,
                                            "store to shared memory that a bulk reduction at " +
                                                file_and(at) +
                                                " by thread 0 may still be reading: no "
                                                "tma_store_wait_read for its group yet")));
    error = error_under_all_seeds<Summands>(dim3(64), [&] { add_numbers(sums, mistake); });
    CHECK(error ==
          (right ? ""
                 : error_in_thread(at, 0,
                                   "the thread exits, and this bulk reduction may still be reading "
                                   "shared memory: no tma_store_wait_read for its group yet")));
  }
}

TEST_CASE("bulk: a wait for the read does not say that the sum is there; a wait for all does") {
  const Setup setup;
  enum class Wait { kRead, kAllButOne, kAll };
  for (const Wait wait : {Wait::kRead, Wait::kAllButOne, Wait::kAll}) {
    CAPTURE(static_cast<int>(wait));
    const Sums sums(2);
    int line = 0;
    float seen = 0;
    const auto wait_for = [&] {
      if (wait == Wait::kRead) tma_store_wait_read<0>();
      if (wait == Wait::kAllButOne) tma_store_wait<1>();
      if (wait == Wait::kAll) tma_store_wait<0>();
    };
    std::string error = error_under_all_seeds<Summands>(dim3(64), [&] {
      add_numbers(sums, Mistake::kNone);
      if (is_thread(0)) wait_for();
      __syncthreads();
      if (is_thread(40)) line = __LINE__, seen = sums(3);
    });
    const std::string race = "load races in global memory with the reduction at " + file_and(at) +
                             " by the TMA: no barrier between them";
    CHECK(error == (wait == Wait::kAll ? "" : error_in_thread(line, 40, race)));
    if (wait == Wait::kAll) CHECK(seen == 2 + kSeeds);

    // Another block that an atomic has told.
    unsigned *const counter = static_cast<unsigned *>(emulator::allocate(256));
    const auto told = [&](int threads) {
      *counter = 1;
      return error_of<Summands>(dim3(2), dim3(static_cast<unsigned>(threads)), [&] {
        const Matrix<unsigned> flag{counter, 1, 1};
        if (blockIdx.x == 0) {
          add_numbers(sums, Mistake::kNone);
          if (!is_thread(0)) return;
          wait_for();
          __threadfence();
          atomic_dec(flag(0, 0), 1);
        } else if (is_thread(0)) {
          while (atomic_read(flag(0, 0))) {
          }
          __threadfence();
          line = __LINE__, read(sums(3));
        }
      });
    };
    emulator::settings.seed = 1;
    error = told(64);
    if (wait == Wait::kAll)
      CHECK(error == "");
    else
      CHECK(error.find("load races in global memory with the reduction at " + file_and(at) +
                       " by the TMA: no barrier between them") != std::string::npos);
    emulator::release(counter);
  }
}

TEST_CASE("bulk: a reduction races with a store and a load, and not with another reduction") {
  const Setup setup;
  const Sums sums(0);
  for (const bool loads : {true, false})
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      int line = 0;
      const std::string error = error_of<Summands>(dim3(64), [&] {
        if (is_thread(40)) {
          if (loads)
            line = __LINE__, read(sums(7));
          else
            line = __LINE__, sums(7) = 1.0f;
        }
        auto &smem = shared_storage<Summands>();
        if (!is_thread(0)) return;
        for (int i = 0; i < kNumbers; i++) smem.x(0, i) = 1.0f;
        fence_proxy_async();
        at = __LINE__, bulk_red_add<kNumbers>(sums(0), smem.x(0, 0));
        red_add(sums(7), 1);  // is as good as the other
        tma_store_commit();
        tma_store_wait_read<0>();
      });
      const std::string name = loads ? "load" : "store", race = " races in global memory with the ";
      CAPTURE(error);
      CHECK((error == error_in_thread(at, 0,
                                      "reduction" + race + name + " at " + file_and(line) +
                                          " by thread 40: no barrier between them") ||
             error.find(name + race + "reduction at ") != std::string::npos));
    }
}

TEST_CASE("bulk: a reduction's numbers lie in their memories, 16 bytes at a time") {
  const Setup setup;
  const Sums sums(0);
  const auto error_with = [&](int to, int from) {
    return error_of<Summands>(dim3(32), [&] {
      auto &smem = shared_storage<Summands>();
      if (!is_thread(0)) return;
      for (int i = 0; i < kNumbers + 4; i++) smem.x(0, i) = 0.0f;
      fence_proxy_async();
      at = __LINE__, bulk_red_add<kNumbers>(sums(to), smem.x(0, from));
      tma_store_commit();
      tma_store_wait_read<0>();
    });
  };
  CHECK(error_with(kNumbers, 4) == "");
  CHECK(error_with(2, 0) ==
        error_in_thread(at, 0, "bulk reduction to an address that is not a multiple of 16"));
  CHECK(error_with(0, 1) ==
        error_in_thread(at, 0, "bulk reduction from an address that is not a multiple of 16"));
  CHECK(error_with(kNumbers + 4, 0) ==
        error_in_thread(at, 0, "64 elements, and the row has only 60 from there on"));
  CHECK(error_with(0, 8) ==
        error_in_thread(at, 0, "64 elements, and the row has only 60 from there on"));
}

TEST_CASE("bulk: reductions and their bytes are counted") {
  const Setup setup;
  emulator::settings.profile = true;
  const Sums sums(0);
  run<Summands>(dim3(3), dim3(64), [&] { add_numbers(sums, Mistake::kNone); });
  const auto counts = emulator::take_profile().total();
  CHECK(counts[emulator::kBulkReductions] == 3);
  CHECK(counts[emulator::kBulkReductionBytes] == 3 * kNumbers * 4);
  CHECK(counts[emulator::kTmaStores] == 0);
}

TEST_CASE("tma: loads land in an order drawn from the seed, early or late") {
  const Setup setup;
  const Tensor tensor(kRows);
  const TensorMap map = tensor.map(kRows);
  int other_first = 0, before_thread_1 = 0;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    std::string order;
    CHECK(error_of<Shared>(dim3(64), [&] {
            Shared &smem = ready();
            load_tile(smem, map);
            if (is_thread(0)) {
              mbarrier_arrive_expect_tx(smem.also_landed, kTileBytes);
              tma_load(smem.other, map, 0, 0, 0, smem.also_landed);
              mbarrier_wait(smem.landed, 0);
              order += 'a';
            }
            if (is_thread(1)) order += '1';
            if (is_thread(32)) {
              mbarrier_wait(smem.also_landed, 0);
              order += 'b';
            }
          }) == "");
    other_first += order.find('b') < order.find('a');
    before_thread_1 += order.find('a') < order.find('1');
  }
  CHECK(other_first > 0);
  CHECK(other_first < kSeeds);
  CHECK(before_thread_1 > 0);
  CHECK(before_thread_1 < kSeeds);
}

// --- bulk copies ---------------------------------------------------------------------------------

namespace {

/// Rows with 16 bytes of nothing behind each, and barriers.
struct Rows {
  Tile<half, kRows, 72> rows, other;
  Mbarrier landed, also_landed, read;
};

constexpr int kRowBytes = 64 * 2;

Rows &ready_for_rows() {
  auto &smem = shared_storage<Rows>();
  if (is_thread(0)) {
    mbarrier_init(smem.landed, 1);
    mbarrier_init(smem.also_landed, 1);
    mbarrier_init(smem.read, 1);
    mbarrier_fence_init();
  }
  __syncthreads();
  return smem;
}

/// Lane i of the first warp copies row i, if there is one: `at` is the line.
void load_rows(Rows &smem, const Tensor &tensor, int expected = kRows * kRowBytes) {
  const Matrix<const half> from{tensor.data, tensor.rows, 64};
  if (is_thread(0)) mbarrier_arrive_expect_tx(smem.landed, expected);
  if (thread_id() < kRows)
    at = __LINE__, bulk_load<64>(smem.rows(thread_id(), 0), from(thread_id(), 0), smem.landed);
}

}  // namespace

TEST_CASE("bulk: each lane's row comes, and nothing beside it") {
  const Setup setup;
  const Tensor tensor(kRows);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    int wrong = 0;
    std::string error = error_of<Rows>(dim3(64), [&] {
      Rows &smem = ready_for_rows();
      load_rows(smem, tensor);
      mbarrier_wait(smem.landed, 0);
      for (int i = thread_id(); i < kRows * 64; i += 64)
        wrong += __half2float(smem.rows(i / 64, i % 64)) != Tensor::value(i / 64, i % 64);
    });
    CHECK(error == "");
    CHECK(wrong == 0);
    error = error_of<Rows>(dim3(64), [&] {
      Rows &smem = ready_for_rows();
      load_rows(smem, tensor);
      mbarrier_wait(smem.landed, 0);
      if (is_thread(3)) at = __LINE__, read(smem.rows(5, 64));
    });
    CHECK(error == error_in_thread(at, 3, "load of shared memory that nobody wrote"));
  }
}

TEST_CASE("bulk: a row is nobody's to touch until the thread knows that its phase has ended") {
  const Setup setup;
  const Tensor tensor(kRows);
  const std::string error = error_under_all_seeds<Rows>(dim3(64), [&] {
    Rows &smem = ready_for_rows();
    load_rows(smem, tensor);
    __syncthreads();
    if (is_thread(40)) also_at = __LINE__, read(smem.rows(3, 5));
  });
  CHECK(error == error_in_thread(also_at, 40, being_written("load of", at, 3)));
  CHECK(tag == "[in-flight] ");
}

TEST_CASE("bulk: with fewer bytes expected than land, the phase ends before the last copies") {
  const Setup setup;
  const Tensor tensor(kRows);
  for (const int missing : {kRowBytes, 48}) {
    int early = 0, late = 0;
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const std::string error = error_of<Rows>(dim3(64), [&] {
        Rows &smem = ready_for_rows();
        load_rows(smem, tensor, kRows * kRowBytes - missing);
        mbarrier_wait(smem.landed, 0);
        for (int i = 0; i < kRows * 64; i++)
          if (is_thread(9)) also_at = __LINE__, read(smem.rows(i / 64, i % 64));
      });
      CAPTURE(error);
      const bool is_early =
          error.find("may still be writing") != std::string::npos && tag == "[in-flight] ";
      const bool is_late = error.find("has not what it expects") != std::string::npos;
      early += is_early, late += is_late;
      // Or the lane whose copy is the last has not started it.
      CHECK((is_early || is_late || tag == "[uninitialised] "));
    }
    CHECK(early > 0);
  }
}

TEST_CASE("bulk: with more bytes expected than land, the phase never ends") {
  const Setup setup;
  const Tensor tensor(kRows);
  const std::string error = error_of<Rows>(dim3(64), [&] {
    Rows &smem = ready_for_rows();
    load_rows(smem, tensor, kRows * kRowBytes + 16);
    mbarrier_wait(smem.landed, 0);
  });
  CAPTURE(error);
  CHECK(tag == "[deadlock] ");
  CHECK(error.find("2064 bytes expected, 2048 arrived") != std::string::npos);
}

TEST_CASE("bulk: a copy over what others have read, or ordinary stores wrote, comes after them") {
  const Setup setup;
  const Tensor tensor(kRows);
  const Matrix<const half> from{tensor.data, kRows, 64};
  for (const bool waits : {false, true})
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const std::string error = error_of<Rows>(dim3(64), [&] {
        Rows &smem = ready_for_rows();
        load_rows(smem, tensor);
        mbarrier_wait(smem.landed, 0);
        if (is_thread(40)) {
          read(smem.rows(3, 5));
          if (waits) mbarrier_arrive(smem.read);
        }
        if (!is_thread(0)) return;
        if (waits) mbarrier_wait(smem.read, 0);
        mbarrier_arrive_expect_tx(smem.also_landed, kRowBytes);
        bulk_load<64>(smem.rows(3, 0), from(1, 0), smem.also_landed);
        mbarrier_wait(smem.also_landed, 0);
      });
      CAPTURE(error);
      CHECK((error == "") == waits);
      if (!waits) CHECK((tag == "[race] " || tag == "[in-flight] "));
    }
  for (const bool fenced : {false, true}) {
    const std::string error = error_under_all_seeds<Rows>(dim3(64), [&] {
      Rows &smem = ready_for_rows();
      if (is_thread(3)) {
        also_at = __LINE__, smem.rows(3, 5) = half{};
        if (fenced) fence_proxy_async();
      }
      __syncwarp();
      load_rows(smem, tensor);
      mbarrier_wait(smem.landed, 0);
    });
    CHECK(error == (fenced ? ""
                           : error_in_thread(at, 3,
                                             "TMA load may not see the store to shared memory at " +
                                                 file_and(also_at) +
                                                 " by thread 3: no fence_proxy_async between "
                                                 "them")));
  }
}

TEST_CASE("bulk: both places begin at a multiple of 16 bytes, and lie in their rows and memories") {
  const Setup setup;
  const Tensor tensor(kRows);
  const auto error_with = [&](int row, int col, int from_row, int from_col) {
    return error_of<Rows>(dim3(32), [&] {
      Rows &smem = ready_for_rows();
      const Matrix<const half> from{tensor.data, kRows + 1, 64};
      if (!is_thread(0)) return;
      mbarrier_arrive_expect_tx(smem.landed, 32);
      at = __LINE__, bulk_load<16>(smem.rows(row, col), from(from_row, from_col), smem.landed);
      mbarrier_wait(smem.landed, 0);
    });
  };
  CHECK(error_with(1, 8, 2, 8) == "");
  CHECK(error_with(1, 4, 2, 8) ==
        error_in_thread(at, 0,
                        "bulk load: the destination begins at an address that is not a multiple of "
                        "16"));
  CHECK(tag == "[misaligned] ");
  CHECK(error_with(1, 8, 2, 12) ==
        error_in_thread(at, 0,
                        "bulk load: the source begins at an address that is not a multiple of 16"));
  CHECK(error_with(1, 64, 2, 8) ==
        error_in_thread(at, 0, "16 elements, and the row has only 8 from there on"));
  CHECK(error_with(1, 8, 2, 56) ==
        error_in_thread(at, 0, "16 elements, and the row has only 8 from there on"));
  CHECK(error_with(1, 8, kRows, 0) == error_in_thread(at, 0, "load outside of every allocation"));
  CHECK(tag == "[bounds] ");
  Tile<half, 1, 64> elsewhere;
  const std::string error = error_of<Rows>(dim3(32), [&] {
    Rows &smem = ready_for_rows();
    const Matrix<const half> from{tensor.data, kRows, 64};
    if (is_thread(0)) at = __LINE__, bulk_load<64>(elsewhere(0, 0), from(0, 0), smem.landed);
  });
  CHECK(error == error_in_thread(at, 0, "bulk load: the destination is not in shared memory"));
}

TEST_CASE("bulk: many copies may get ahead of a thread, and those that wait for them, too") {
  const Setup setup;
  const Tensor tensor(1);
  const Matrix<const half> from{tensor.data, 1, 64};
  constexpr int kCopies = 16;
  int latest = 0;  // how many copies some thread came after
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    int copied = 0;
    CHECK(error_of<Rows>(dim3(32), [&] {
            Rows &smem = ready_for_rows();
            if (is_thread(0)) mbarrier_arrive(smem.read);
            mbarrier_wait(smem.read, 0);  // who comes to a barrier last goes on first
            if (!is_thread(0)) latest = std::max(latest, copied);
            for (int i = 0; i < kCopies && is_thread(0); i++) {
              mbarrier_arrive_expect_tx(smem.landed, kRowBytes);
              bulk_load<64>(smem.rows(0, 0), from(0, 0), smem.landed);
              mbarrier_wait(smem.landed, i % 2);
              copied++;
            }
          }) == "");
  }
  CHECK(latest == kCopies);
}

TEST_CASE("bulk: a thread goes on in the end though another one copies until it has") {
  const Setup setup;
  const Tensor tensor(1);
  const Matrix<const half> from{tensor.data, 1, 64};
  int most = 0;  // copies
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    bool told = false;
    CHECK(error_of<Rows>(dim3(2), [&] {
            Rows &smem = ready_for_rows();
            if (is_thread(0)) mbarrier_arrive(smem.read);
            mbarrier_wait(smem.read, 0);
            if (is_thread(1)) told = true;
            for (int i = 0; !told && is_thread(0); i++) {
              mbarrier_arrive_expect_tx(smem.landed, kRowBytes);
              bulk_load<64>(smem.rows(0, 0), from(0, 0), smem.landed);
              mbarrier_wait(smem.landed, i % 2);
              most = std::max(most, i + 1);
            }
          }) == "");
  }
  CHECK(most > 100);
}

TEST_CASE("bulk: the engine sees a barrier after mbarrier_fence_init, and somebody waits for it") {
  const Setup setup;
  const Tensor tensor(kRows);
  const Matrix<const half> from{tensor.data, kRows, 64};
  for (const bool fenced : {false, true})
    for (const bool waits : {false, true}) {
      const std::string error = error_under_all_seeds<Rows>(dim3(32), [&] {
        auto &smem = shared_storage<Rows>();
        if (!is_thread(0)) return;
        mbarrier_init(smem.landed, 1);
        if (fenced) mbarrier_fence_init();
        mbarrier_arrive_expect_tx(smem.landed, kRowBytes);
        bulk_load<64>(smem.rows(0, 0), from(0, 0), smem.landed);
        if (waits) mbarrier_wait(smem.landed, 0);
      });
      CHECK(tag == (!fenced ? "[fence] " : !waits ? "[in-flight] " : ""));
    }
}

TEST_CASE(
    "bulk: copies and bytes are counted as the TMA's, and land in an order drawn from the seed") {
  const Setup setup;
  emulator::settings.profile = true;
  const Tensor tensor(kRows);
  const Matrix<const half> from{tensor.data, kRows, 64};
  (void)emulator::take_profile();
  int second_first = 0;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    std::string order;
    CHECK(error_of<Rows>(dim3(64), [&] {
            Rows &smem = ready_for_rows();
            load_rows(smem, tensor);
            if (is_thread(0)) {
              mbarrier_arrive_expect_tx(smem.also_landed, kRowBytes);
              bulk_load<64>(smem.other(0, 0), from(0, 0), smem.also_landed);
              mbarrier_wait(smem.landed, 0);
              order += 'a';
            }
            if (is_thread(32)) {
              mbarrier_wait(smem.also_landed, 0);
              order += 'b';
            }
          }) == "");
    second_first += order == "ba";
  }
  CHECK(second_first > 0);
  CHECK(second_first < kSeeds);
  const emulator::Counts counts = emulator::take_profile().total();
  CHECK(counts[emulator::kTmaLoads] == kSeeds * (kRows + 1));
  CHECK(counts[emulator::kTmaLoadBytes] == kSeeds * (kRows + 1) * kRowBytes);
}

// --- a whole kernel ------------------------------------------------------------------------------

namespace {

enum class Bug {
  kNone,
  kNoWaitForFull,    // a consumer reads a stage before it has landed
  kNoWaitForEmpty,   // the producer overwrites a stage that is being read
  kArrivesTooEarly,  // a consumer gives a stage back before it has read it
  kSameParity,       // a consumer forgets that the second round has the other parity
  kFewerBytes,       // the producer expects less than it loads
  kOneArrives,       // one consumer of two does not give the stages back
  kNoProxyFence,     // between the sums and the store of them
};

constexpr int kStages = 2, kTiles = 7, kConsumers = 2;

struct Ring {
  TileOf stage[kStages], sum;
  Mbarrier full[kStages], empty[kStages];
};

/// A warp that copies, through a ring of stages, and two that add up its tiles, half of the rows each.
void add_up(const TensorMap &from, const TensorMap &to, Bug bug) {
  auto &smem = shared_storage<Ring>();
  if (is_thread(0)) {
    for (int s = 0; s < kStages; s++) {
      mbarrier_init(smem.full[s], 1);
      mbarrier_init(smem.empty[s], kConsumers);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  const int warp = warp_index(), lane = thread_id() % 32;
  if (warp == 0) {
    if (lane != 0) return;
    for (int tile = 0; tile < kTiles; tile++) {
      const int s = tile % kStages, parity = tile / kStages % 2;
      if (bug != Bug::kNoWaitForEmpty) mbarrier_wait(smem.empty[s], parity ^ 1);
      mbarrier_arrive_expect_tx(smem.full[s], kTileBytes - (bug == Bug::kFewerBytes ? 512 : 0));
      tma_load(smem.stage[s], from, tile * kRows, 0, 0, smem.full[s]);
    }
    return;
  }
  constexpr int kRowsOfWarp = kRows / kConsumers, kPerLane = kRowsOfWarp * 64 / 32;
  const int first_row = (warp - 1) * kRowsOfWarp;
  float sum[kPerLane] = {};
  for (int tile = 0; tile < kTiles; tile++) {
    const int s = tile % kStages, parity = bug == Bug::kSameParity ? 0 : tile / kStages % 2;
    if (bug != Bug::kNoWaitForFull) mbarrier_wait(smem.full[s], parity);
    if (bug == Bug::kArrivesTooEarly && lane == 0) mbarrier_arrive(smem.empty[s]);
    for (int i = 0; i < kPerLane; i++)
      sum[i] += __half2float(smem.stage[s](first_row + i / 2, i % 2 * 32 + lane));
    __syncwarp();
    if (bug != Bug::kArrivesTooEarly && lane == 0 && !(bug == Bug::kOneArrives && warp == 2))
      mbarrier_arrive(smem.empty[s]);
  }
  for (int i = 0; i < kPerLane; i++)
    smem.sum(first_row + i / 2, i % 2 * 32 + lane) = __float2half(sum[i]);
  if (bug != Bug::kNoProxyFence) fence_proxy_async();
  named_barrier_sync(1, kConsumers * 32);
  if (is_thread(32)) {
    tma_store(to, 0, 0, 0, smem.sum);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}

}  // namespace

TEST_CASE("tma: a ring of stages, a producer and two consumers, and what can be wrong with it") {
  const Setup setup;
  const Tensor tiles(kTiles * kRows), sums(kRows);
  for (int i = 0; i < kTiles * kRows * 64; i++)
    tiles.data[i] = __float2half(static_cast<float>(i * 37 % 101));
  const TensorMap from = tiles.map(kRows), to = sums.map(kRows);
  const auto errors_with = [&](Bug bug, std::initializer_list<const char *> texts) {
    CAPTURE(static_cast<int>(bug));
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      for (int i = 0; i < kRows * 64; i++) sums.data[i] = half{};
      const std::string error = error_of<Ring>(dim3(96), [&] { add_up(from, to, bug); });
      CAPTURE(error);
      const bool known = std::any_of(texts.begin(), texts.end(), [&](const char *text) {
        return error.find(text) != std::string::npos;
      });
      CHECK((bug == Bug::kNone ? error == "" : known));
      if (bug != Bug::kNone) continue;
      int wrong = 0;
      for (int i = 0; i < kRows * 64; i++) {
        float sum = 0;
        for (int tile = 0; tile < kTiles; tile++)
          sum += static_cast<float>((tile * kRows * 64 + i) * 37 % 101);
        wrong += __half2float(sums.data[i]) != sum;
      }
      CHECK(wrong == 0);
    }
  };
  const char *early = "may still be writing",
             *race = "TMA load races in shared memory with the load";
  errors_with(Bug::kNone, {});
  errors_with(Bug::kNoWaitForFull, {early, race, "nobody wrote"});
  errors_with(Bug::kNoWaitForEmpty, {early, race, "one arrival more"});
  errors_with(Bug::kArrivesTooEarly, {early, race});
  errors_with(Bug::kSameParity, {early, race, "wait for ever in mbarrier_wait"});
  errors_with(Bug::kFewerBytes, {"the mbarrier expected fewer bytes than its loads copy"});
  errors_with(Bug::kOneArrives, {"1 of 2 arrivals to come"});
  errors_with(Bug::kNoProxyFence, {"no fence_proxy_async between them"});
}

TEST_CASE("tma: copies, bytes, arrivals, waits, named barriers and fences are counted") {
  const Setup setup;
  emulator::settings.profile = true;
  const Tensor tiles(kTiles * kRows), sums(kRows);
  const TensorMap from = tiles.map(kRows), to = sums.map(kRows);
  (void)emulator::take_profile();
  CHECK(error_of<Ring>(dim3(96), [&] { add_up(from, to, Bug::kNone); }) == "");
  const emulator::Counts counts = emulator::take_profile().total();
  CHECK(counts[emulator::kTmaLoads] == kTiles);
  CHECK(counts[emulator::kTmaLoadBytes] == kTiles * kTileBytes);
  CHECK(counts[emulator::kTmaStores] == 1);
  CHECK(counts[emulator::kTmaStoreBytes] == kTileBytes);
  CHECK(counts[emulator::kMbarrierArrivals] == kTiles * (1 + kConsumers));
  CHECK(counts[emulator::kMbarrierWaits] == kTiles * (1 + kConsumers));
  CHECK(counts[emulator::kNamedBarriers] == kConsumers);
  CHECK(counts[emulator::kProxyFences] == kConsumers);
}
