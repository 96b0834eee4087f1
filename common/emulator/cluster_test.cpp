// SPDX-License-Identifier: MIT
// Clusters on the emulator: loads that land in several blocks, arrivals at the other block's barriers, and
// blocks that wait for each other or do not.
#include "common/kernel/cluster.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "common/emulator/testing.h"
#include "common/kernel/wgmma.h"

namespace {

constexpr int kRows = 64, kCols = 64, kBytes = kRows * kCols * 2, kTiles = 3;
constexpr int kBlocks = 2, kWarps = 4;  // of a cluster, of a block
constexpr unsigned kThreads = kWarps * 32, kFewSeeds = 10;

float whole_number(int row, int col) {
  return static_cast<float>((row * 37 + col * 101 + row * col * 7) % 23 - 11);
}

/// Some tiles of small whole numbers in the emulator's global memory, one after the other.
struct Tensor {
  half *data = static_cast<half *>(emulator::allocate(kTiles * kBytes));

  Tensor() {
    for (int i = 0; i < kTiles * kRows * kCols; i++)
      data[i] = __float2half(whole_number(i / kCols, i % kCols));
  }
  Tensor(const Tensor &) = delete;
  Tensor &operator=(const Tensor &) = delete;
  ~Tensor() { emulator::release(data); }

  TensorMap map(int rows, int slabs = 0, int d = kCols) const {
    const int all = kTiles * kRows * kCols;
    return tensor_map<half>(data, {all, all, d}, 1, 1, all / d, d, rows, slabs);
  }
};

struct Shared {
  TmaTile<kRows, kCols> tile;
  TmaTile<16, 128> wide;
  Mbarrier landed, read, done;
};

Shared &shared() {
  return shared_storage<Shared>();
}

/// The message of the KernelError that a launch of clusters ends with, or "" if it ends well.
std::string error_of(const Kernel &kernel, unsigned blocks = kBlocks, int cluster = kBlocks,
                     unsigned threads = kThreads) {
  return error_of_work([&] {
    launch_clusters<Shared>(
        cluster, +[](const Kernel *body) { (*body)(); }, dim3(blocks), dim3(threads), &kernel);
  });
}

/// Checks, under each of some seeds, that a launch ends with an error that says one of these, or well if
/// there are none.
void errors_with(const Kernel &kernel, std::initializer_list<std::string> expected) {
  for (unsigned seed = 1; seed <= kFewSeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of(kernel);
    const bool found = std::any_of(expected.begin(), expected.end(), [&](const std::string &one) {
      return error.find(one) != std::string::npos;
    });
    CHECK_MESSAGE((expected.size() ? found : error.empty()), "seed " << seed << ": " << error);
  }
}

/// Of the first cluster.
bool is_thread_of(unsigned block, unsigned x) {
  return blockIdx.x == block && is_thread(x);
}

/// Makes the barriers: `read` for so many arrivals.
Shared &ready(int readers = 1) {
  if (is_thread(0)) {
    mbarrier_init(shared().landed, 1);
    mbarrier_init(shared().read, readers);
    mbarrier_init(shared().done, 1);
    mbarrier_fence_init();
  }
  cluster_sync();
  return shared();
}

// --- tiles that two blocks share -------------------------------------------------------------------

enum class Bug {
  kNone,
  kFewReaders,        // the tile counts as empty when the warps of one block have read it
  kReleasesToItself,  // and each block's warps say so to it alone
  kWrongHalf,         // both blocks copy the same
  kHalfOfBytes,       // expects only what it has asked for itself
  kOrdinaryRead,      // reads by loads, which the arrival at the other block does not order
  kNoEnd,             // exits while the other may still arrive
  kNoStart,           // begins before the other has made its barriers
  kNoFence,           // makes the barriers, and not that the other sees them
};

/// Each block multiplies each tile with itself: half of it comes by either block's load.
void share_tiles(const TensorMap &map, Bug bug) {
  Shared &smem = shared();
  const int rank = cluster_rank(), lane = static_cast<int>(threadIdx.x % 32),
            warp = static_cast<int>(threadIdx.x / 32);
  const bool few = bug == Bug::kFewReaders || bug == Bug::kReleasesToItself;
  if (is_thread(0)) {
    mbarrier_init(smem.landed, 1);
    mbarrier_init(smem.read, few ? kWarps : kBlocks * kWarps);
    if (bug != Bug::kNoFence) mbarrier_fence_init();
  }
  if (bug == Bug::kNoStart)
    __syncthreads();
  else
    cluster_sync();
  for (int tile = 0; tile < kTiles; tile++) {
    if (is_thread(0)) {
      mbarrier_wait(smem.read, tile % 2 ^ 1);
      mbarrier_arrive_expect_tx(smem.landed, bug == Bug::kHalfOfBytes ? kBytes / 2 : kBytes);
      const int part = bug == Bug::kWrongHalf ? 0 : rank * kRows / 2;
      at = __LINE__,
      tma_load_multicast(smem.tile, part, 0, map, tile * kRows + part, 0, 0, smem.landed, 3);
    }
    mbarrier_wait(smem.landed, tile % 2);
    const auto check = [&](float found, int row, int col) {
      float sum = 0;
      for (int i = 0; i < kCols; i++)
        sum += whole_number(tile * kRows + row, i) * whole_number(tile * kRows + col, i);
      CHECK(found == sum);
    };
    if (bug == Bug::kOrdinaryRead) {
      also_at = __LINE__, (void)static_cast<half>(smem.tile(8 * warp, lane));
      __syncwarp();
    } else {
      Accumulator<kRows> s;
      wgmma_fence();
      for (int i = 0; i < kCols; i += 16)
        also_at = __LINE__,
        wgmma<half>(s, k_major(smem.tile, 0, i), k_major(smem.tile, 0, i), i > 0);
      wgmma_commit();
      wgmma_wait<0>(s);
      for (int i = 0; i < s.size; i += 9)
        check(s(i), 16 * warp + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
    }
    if (bug == Bug::kReleasesToItself ? lane == rank : lane < kBlocks)
      mbarrier_arrive_at(smem.read, lane);
  }
  if (bug != Bug::kNoEnd) cluster_sync();
}

}  // namespace

TEST_CASE("cluster: blocks know their rank, and clusters follow each other") {
  const Setup setup;
  std::vector<int> ranks(6, -1);
  CHECK(error_of([&] { ranks[blockIdx.x] = cluster_rank(); }, 6) == "");
  CHECK(ranks == std::vector{0, 1, 0, 1, 0, 1});
  CHECK(error_of([&] { ranks[blockIdx.x] = cluster_rank(); }, 6, 3) == "");
  CHECK(ranks == std::vector{0, 1, 2, 0, 1, 2});
}

TEST_CASE("cluster: the last thread to come to a meeting is seldom the first to go on") {
  const Setup setup;
  struct Meeting {
    unsigned threads;
    void (*meet)();
  };
  for (const auto &[threads, meet] :
       {Meeting{32, [] { __syncwarp(); }}, Meeting{32, [] { __shfl_xor_sync(kAllLanes, 0, 1); }},
        Meeting{kThreads, [] { __syncthreads(); }},
        Meeting{kThreads, [] { named_barrier_sync(1, kThreads); }},
        Meeting{kThreads, [] { setmaxnreg_dec<24>(); }},
        Meeting{kBlocks * kThreads, [] { cluster_sync(); }}}) {
    int overtaken = 0;
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      unsigned come = 0, gone = 0, last = 0, first = 0;
      CHECK(error_of([&, threads = threads, meet = meet] {
              const unsigned self = cluster_rank() * kThreads + threadIdx.x;
              if (self >= threads) return;
              if (++come == threads) last = self;
              meet();
              if (gone++ == 0) first = self;
            }) == "");
      overtaken += first != last;
    }
    CAPTURE(threads);
    CHECK(overtaken > kSeeds * 3 / 4);
  }
}

TEST_CASE("cluster: tiles that two blocks share, and each rule of it broken") {
  const Setup setup;
  const Tensor tensor;
  const TensorMap half_tile = tensor.map(kRows / 2);
  const auto with = [&](Bug bug) { return [&half_tile, bug] { share_tiles(half_tile, bug); }; };
  const std::string reading = "memory that a wgmma at ", writing = "memory that a TMA load at ";
  errors_with(with(Bug::kNone), {});
  errors_with(with(Bug::kFewReaders), {"one arrival more than", reading, writing});
  errors_with(with(Bug::kReleasesToItself), {reading, writing, "with the wgmma at"});
  errors_with(with(Bug::kWrongHalf), {writing});
  // Nobody wrote the other half: its load, by a slow thread, has yet to begin.
  errors_with(with(Bug::kHalfOfBytes),
              {writing, "4096 bytes expected, 8192 arrived", "shared memory that nobody wrote"});
  errors_with(with(Bug::kOrdinaryRead), {"TMA load races in shared memory with the load at "});
  errors_with(with(Bug::kNoEnd), {"which may have exited: no cluster_sync and no wait for it"});
  errors_with(with(Bug::kNoStart), {"that nobody has initialised", "no cluster_sync between them"});
  errors_with(with(Bug::kNoFence), {"no mbarrier_fence_init between them"});
}

TEST_CASE("cluster: a tile overwritten in the other block names both lines and both blocks") {
  const Setup setup;
  const Tensor tensor;
  const TensorMap map = tensor.map(kRows);
  int lines[2] = {};
  const auto load = [&](Shared &smem, int i) {
    lines[i] = __LINE__, tma_load_multicast(smem.tile, 0, 0, map, 0, 0, 0, smem.landed, 2);
  };
  // Block 1 multiplies what block 0 has loaded, and lets it load again too early: before the product, while it
  // is under way, or when only one warp has waited for it.
  int moment = 0;
  const auto kernel = [&] {
    Shared &smem = ready();
    if (is_thread_of(0, 5)) {
      load(smem, 0);
      mbarrier_wait(smem.done, 0);
      load(smem, 1);
    }
    if (blockIdx.x == 1) {
      if (is_thread(0)) mbarrier_arrive_expect_tx(smem.landed, kBytes);
      mbarrier_wait(smem.landed, 0);
      if (is_thread(0) && moment == 0) mbarrier_arrive_at(smem.done, 0);
      Accumulator<8> s;
      wgmma_fence();
      also_at = __LINE__, wgmma<half>(s, k_major(smem.tile, 0, 0), k_major(smem.tile, 0, 0), false);
      wgmma_commit();
      if (is_thread(0) && moment == 1) mbarrier_arrive_at(smem.done, 0);
      wgmma_wait<0>(s);
      if (is_thread(0) && moment == 2) mbarrier_arrive_at(smem.done, 0);
    }
    cluster_sync();
  };
  (void)error_of(kernel);  // notes the lines
  const std::string load_at = file_and(lines[1]), product_at = file_and(also_at);
  const std::string loader = load_at + ": block (0,0,0) thread (5,0,0): TMA load ";
  const std::string theirs = "; the memory is that of block (1,0,0)";
  struct Kind {
    std::string begin, end;
    bool seen = false;
  };
  Kind kinds[] = {
      {product_at + ": block (1,0,0) thread (", "wgmma of shared memory that a TMA load at " +
                                                    load_at +
                                                    " by thread 5 of block (0,0,0) may still be "
                                                    "writing: no mbarrier_wait for its phase yet"},
      {loader + "to shared memory that a wgmma at " + product_at + " by thread ",
       " of block (1,0,0) may still be reading: no wgmma_wait for its group yet" + theirs},
      {loader + "races in shared memory with the wgmma at " + product_at + " by warp ",
       " of block (1,0,0): no barrier between them" + theirs}};
  for (unsigned seed = 1; seed <= 3 * kFewSeeds; seed++) {
    emulator::settings.seed = seed;
    moment = static_cast<int>(seed % 3);
    const std::string error = error_of(kernel);
    const auto kind = std::find_if(std::begin(kinds), std::end(kinds), [&](const Kind &one) {
      return error.starts_with(one.begin) && error.ends_with(one.end);
    });
    CHECK_MESSAGE(kind != std::end(kinds), error);
    if (kind != std::end(kinds)) kind->seen = true;
  }
  for (const Kind &kind : kinds) CHECK_MESSAGE(kind.seen, kind.begin);
}

TEST_CASE("cluster: an arrival at another block tells it what a store has read") {
  const Setup setup;
  const Tensor tensor;
  const TensorMap map = tensor.map(kRows);
  const auto kernel = [&](bool waits) {
    Shared &smem = ready();
    if (is_thread_of(1, 0)) {
      mbarrier_arrive_expect_tx(smem.landed, kBytes);
      tma_load(smem.tile, map, 0, 0, 0, smem.landed);
      mbarrier_wait(smem.landed, 0);
      tma_store(map, kRows, 0, 0, smem.tile);
      tma_store_commit();
      if (waits) tma_store_wait_read<0>();
      mbarrier_arrive_expect_tx(smem.landed, kBytes);
      mbarrier_arrive_at(smem.read, 0);
      mbarrier_wait(smem.landed, 1);
    }
    if (is_thread_of(0, 0)) {
      mbarrier_wait(smem.read, 0);
      tma_load_multicast(smem.tile, 0, 0, map, 0, 0, 0, smem.landed, 2);
    }
    cluster_sync();
  };
  errors_with([&] { kernel(true); }, {});
  errors_with([&] { kernel(false); }, {"TMA load to shared memory that a TMA store at "});
}

TEST_CASE("cluster: bytes may land before the block expects them") {
  const Setup setup;
  const Tensor tensor;
  const TensorMap map = tensor.map(kRows);
  errors_with(
      [&] {
        Shared &smem = ready();
        if (is_thread_of(0, 0)) tma_load_multicast(smem.tile, 0, 0, map, 0, 0, 0, smem.landed, 2);
        if (is_thread_of(0, 0)) mbarrier_arrive_at(smem.done, 1);
        if (blockIdx.x == 1) {
          if (is_thread(0)) {
            mbarrier_wait(smem.done, 0);
            mbarrier_arrive_expect_tx(smem.landed, kBytes);
          }
          mbarrier_wait(smem.landed, 0);
          CHECK(__half2float(smem.tile(3, 4)) == whole_number(3, 4));
        }
        cluster_sync();
      },
      {});
}

TEST_CASE("cluster: a block that has waited for all that others do to it may exit") {
  const Setup setup;
  const Tensor tensor;
  const TensorMap map = tensor.map(kRows);
  const auto kernel = [&](bool copies, bool waits) {
    Shared &smem = ready();
    if (is_thread_of(1, 0)) {
      if (copies)
        at = __LINE__, tma_load_multicast(smem.tile, 0, 0, map, 0, 0, 0, smem.landed, 1);
      else
        at = __LINE__, mbarrier_arrive_at(smem.done, 0);
    }
    if (!is_thread_of(0, 0)) return;
    if (copies) mbarrier_arrive_expect_tx(smem.landed, kBytes);
    if (waits) mbarrier_wait(copies ? smem.landed : smem.done, 0);
  };
  for (const bool copies : {false, true}) {
    errors_with([&] { kernel(copies, true); }, {});
    errors_with([&] { kernel(copies, false); }, {"of block (0,0,0), which may have exited: no "});
    CHECK(error_of([&] {
            kernel(copies, false);
          }).starts_with(file_and(at) + ": block (1,0,0) thread (0,0,0): "));
  }
}

TEST_CASE(
    "cluster: cluster_sync orders what the blocks do, and waits for all that have not exited") {
  const Setup setup;
  const Tensor tensor;
  const auto kernel = [&](bool sync) {
    Matrix<half> numbers{tensor.data, kRows, kCols};
    if (is_thread_of(0, 7)) at = __LINE__, numbers(0, 0) = __float2half(5);
    if (sync) cluster_sync();
    if (is_thread_of(1, 3)) also_at = __LINE__, (void)static_cast<half>(numbers(0, 0));
  };
  errors_with([&] { kernel(true); }, {});
  errors_with(
      [&] { kernel(false); },
      {"in global memory with the store at " + file_and(at) + " by thread 7 of block (0,0,0)",
       "in global memory with the load at " + file_and(also_at) + " by thread 3 of block (1,0,0)"});
  errors_with(
      [&] {
        if (blockIdx.x == 1 && threadIdx.x >= 32) return;
        cluster_sync();
      },
      {});
}

TEST_CASE("cluster: a thread of another cluster is named without a block") {
  const Setup setup;
  const Tensor tensor;
  const std::string error = error_of(
      [&] {
        Matrix<half> numbers{tensor.data, kRows, kCols};
        if (is_thread_of(1, 7) || is_thread_of(2, 9))
          at = __LINE__, numbers(0, 0) = __float2half(5);
      },
      4);
  CHECK(error ==
        file_and(at) + ": block (2,0,0) thread (9,0,0): store races in global memory with the " +
            "store at " + file_and(at) + " by thread 7: no barrier between them (the other is " +
            "of another block; no fences and atomics order the two)");
}

TEST_CASE("cluster: who waits for ever is told with the block") {
  const Setup setup;
  const auto kernel = [&] {
    Shared &smem = ready();
    if (is_thread_of(1, 0)) at = __LINE__, mbarrier_wait(smem.done, 0);
    also_at = __LINE__, cluster_sync();
  };
  for (unsigned seed = 1; seed <= kFewSeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of(kernel);
    CHECK(error.find("cluster_sync of block (0,0,0)") != std::string::npos);
    CHECK(error.find("127 wait in cluster_sync of block (1,0,0)") != std::string::npos);
    CHECK(error.find("1 wait in mbarrier_wait for parity 0 of the mbarrier shared().done of " +
                     file_and(0).substr(0, 17)) != std::string::npos);
    CHECK(error.find("1 of 1 arrivals to come) of block (1,0,0) at " + file_and(at)) !=
          std::string::npos);
  }
}

TEST_CASE("cluster: arrivals at a block that is not there, or more than its barrier has room for") {
  const Setup setup;
  const auto arrive = [](int rank, int times) {
    return [=] {
      Shared &smem = ready();
      if (is_thread_of(0, 0))
        for (int i = 0; i < times; i++) at = __LINE__, mbarrier_arrive_at(smem.read, rank);
      cluster_sync();
    };
  };
  errors_with(arrive(1, 3), {});
  errors_with(arrive(0, 3), {});
  errors_with(arrive(2, 1), {"mbarrier_arrive_at: block 2 of a cluster that has 2"});
  errors_with(arrive(-1, 1), {"mbarrier_arrive_at: block -1 of a cluster that has 2"});
  errors_with(
      [] {
        if (is_thread(0)) {
          mbarrier_init(shared().read, 2);
          mbarrier_init(shared().landed, 1);
          mbarrier_fence_init();
        }
        cluster_sync();
        // The bytes hold the phase open, of which both arrivals have come.
        if (is_thread_of(1, 0)) mbarrier_arrive_expect_tx(shared().read, 64);
        cluster_sync();
        if (is_thread_of(0, 0))
          for (int i = 0; i < 2; i++) mbarrier_arrive_at(shared().read, 1);
        cluster_sync();
      },
      {"mbarrier_arrive_at: one arrival more than"});
}

TEST_CASE("cluster: what a load to several blocks refuses") {
  const Setup setup;
  const Tensor tensor;
  const auto error = [&](int row, int col, int blocks, const TensorMap &map) {
    return error_of([&, row, col, blocks] {
      Shared &smem = ready();
      if (is_thread_of(0, 0))
        tma_load_multicast(smem.wide, row, col, map, 0, 0, 0, smem.landed, blocks);
    });
  };
  const auto says = [](const std::string &found, const std::string &what) {
    CHECK_MESSAGE(found.find(what) != std::string::npos, found);
  };
  const TensorMap part = tensor.map(8, 1, 128);
  says(error(8, 64, 1, part), "the block ends, and the mbarrier");  // nobody expects it
  says(error(0, 0, 0, part), "TMA load to the blocks 0, as bits, of a cluster that has 2");
  says(error(0, 0, 5, part), "TMA load to the blocks 5, as bits, of a cluster that has 2");
  says(error(16, 0, 1, part), "at row 16 and column 0 of a tile of 16 x 128: it does not lie in");
  says(error(-8, 0, 1, part), "it does not lie in the tile");
  says(error(0, 128, 1, part), "it does not lie in the tile");
  says(error(4, 0, 1, part), "it begins at a multiple of 8 rows, and at a slab");
  says(error(0, 32, 1, part), "it begins at a multiple of 8 rows, and at a slab");
  says(error(8, 0, 1, tensor.map(8, 2, 128)), "a box of several slabs has all of the tile's rows");
  says(error(0, 0, 1, tensor.map(32, 1, 128)), "a part of 32 rows and 64 columns, the map's box");
  says(error(0, 64, 1, tensor.map(8, 1)), "TMA load: columns to 128 of a tensor that has 64");
}

TEST_CASE("cluster: launches that are refused") {
  const Setup setup;
  const auto error = [](unsigned blocks, int cluster, unsigned threads) {
    return error_of([] {}, blocks, cluster, threads);
  };
  CHECK(error(8, 8, 128) == "");
  CHECK(error(3, 2, 128) ==
        "launch refused: clusters of 2 blocks: grid.x is 3: must be a multiple of 2");
  CHECK(error(16, 16, 128) == "launch refused: clusters of 16 blocks: 1 to 8 are allowed");
  CHECK(error(2, 2, 96) ==
        "launch refused: clusters of 2 blocks: 96 threads each: must be a "
        "multiple of 128, and at most 1024 in a cluster");
  CHECK(error(4, 4, 384) != "");
}

TEST_CASE("cluster: a load to several blocks counts once, and so do its bytes") {
  const Setup setup;
  emulator::settings.profile = true;
  const Tensor tensor;
  const TensorMap half_tile = tensor.map(kRows / 2);
  (void)emulator::take_profile();
  CHECK(error_of([&] { share_tiles(half_tile, Bug::kNone); }, 4) == "");
  const emulator::Profile profile = emulator::take_profile();
  const emulator::Counts counts = profile.total();
  constexpr int kClusters = 2;
  CHECK(counts[emulator::kMulticasts] == kClusters * kBlocks * kTiles);
  CHECK(counts[emulator::kMulticastBytes] == kClusters * kTiles * kBytes);
  CHECK(counts[emulator::kTmaLoads] == counts[emulator::kMulticasts]);
  CHECK(counts[emulator::kTmaLoadBytes] == kBlocks * counts[emulator::kMulticastBytes]);
  CHECK(counts[emulator::kClusterBarriers] == kClusters * kBlocks * kWarps * 2);
  REQUIRE(profile.blocks.size() == kClusters * kBlocks);
  for (const emulator::BlockRow &block : profile.blocks)
    CHECK(block.mma == kTiles * (kCols / 16) * kWarps);
}
