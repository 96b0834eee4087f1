// SPDX-License-Identifier: MIT
#include "common/emulator/runtime.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/emulator/block.h"
#include "common/emulator/clocks.h"
#include "common/emulator/devices.h"
#include "common/emulator/memory.h"

namespace emulator {

int shared_memory_per_block() {
  static const char *const kb = std::getenv("EMULATED_SHARED_KB");
  return (kb ? std::clamp(std::atoi(kb), 0, 227) : 227) * 1024;
}

Settings settings;
std::uint64_t launch_number = 0;

namespace {

// What launch_progress() says: atomic, unlike launch_number, because a thread that runs no block reads them.
std::atomic<std::uint64_t> launches = 0, ended = 0, blocks_of_launch = 0;

}  // namespace

LaunchProgress launch_progress() {
  return {launches, ended, blocks_of_launch};
}

int resident_blocks(int threads, std::size_t shared_bytes) {
  const auto by_memory =
      static_cast<int>((shared_memory_per_block() + 1024) / (shared_bytes + 1024));
  return settings.multiprocessors * std::max(1, std::min(by_memory, 65536 / (128 * threads)));
}

namespace {

Profile profile;

}  // namespace

namespace {

KernelError refused(const std::string &why) {
  return KernelError(std::string(tag_of(Fault::kLaunch)) + " launch refused: " + why);
}

/// Throws unless a launch keeps the limits of CUDA C++ Programming Guide, 'Technical Specifications
/// per Compute Capability'; of shared memory see shared_memory_per_block.
void check_limits(Dim3 grid, Dim3 block, std::size_t shared_bytes) {
  const auto check = [](const char *what, std::uint64_t value, std::uint64_t least,
                        std::uint64_t most) {
    if (value < least || value > most)
      throw refused(std::string(what) + " is " + std::to_string(value) + "; " +
                    std::to_string(least) + " to " + std::to_string(most) + " is allowed");
  };
  check("grid.x", grid.x, 1, 2147483647);
  check("grid.y", grid.y, 1, 65535);
  check("grid.z", grid.z, 1, 65535);
  check("block.x", block.x, 1, 1024);
  check("block.y", block.y, 1, 1024);
  check("block.z", block.z, 1, 64);
  check("threads per block", std::uint64_t{block.x} * block.y * block.z, 1, 1024);
  check("shared memory per block, in bytes,", shared_bytes, 0, shared_memory_per_block());
}

/// The same of clusters (CUDA C++ Programming Guide, 'Thread Block Clusters'). The emulator numbers the threads
/// of a cluster as those of one block, and wants whole warpgroups of each.
void check_cluster(Dim3 grid, Dim3 block, unsigned cluster) {
  if (cluster == 1) return;
  const auto refuse = [&](const std::string &why) {
    throw refused("clusters of " + std::to_string(cluster) + " blocks: " + why);
  };
  if (cluster < 1 || cluster > 8) refuse("1 to 8 are allowed");
  if (grid.x % cluster)
    refuse("grid.x is " + std::to_string(grid.x) + ": must be a multiple of " +
           std::to_string(cluster));
  const unsigned threads = block.x * block.y * block.z;
  if (threads % kWarpgroup || threads * cluster > 1024)
    refuse(std::to_string(threads) +
           " threads each: must be a multiple of 128, and at most 1024 in a cluster");
}

}  // namespace

void run(Dim3 grid, Dim3 block, std::size_t shared_bytes, const std::function<void()> &thread,
         const LaunchAttributes &attributes) {
  const auto [together, cluster, beside] = attributes;
  check_limits(grid, block, shared_bytes);
  check_cluster(grid, block, cluster);
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  constexpr std::uint64_t kMostTogether = 256;
  // Of three blocks one can wait for another while the third runs.
  constexpr unsigned kInTurns = 3;
  if (together && blocks > kMostTogether)
    throw refused(std::to_string(blocks) + " blocks at once; at most " +
                  std::to_string(kMostTogether) + " are allowed");
  // Who waits for that launch would not know that the one before it has ended.
  static bool beside_and_unwaited = false;
  if (beside && beside_and_unwaited)
    throw refused(
        "it may begin beside a launch that did so itself, and of which no thread "
        "has waited: no griddepcontrol_wait");
  launch_number++;
  launches = launch_number;
  ended = 0;
  blocks_of_launch = blocks;
  has_waited = false;
  begin_launch(settings.profile, beside);
  begin_time();
  const OverflowHandler overflow_handler;
  std::atomic<std::uint64_t> next = 0;  // block to begin
  std::atomic<bool> stop = false;
  std::mutex mutex;  // guards profile, failed and first_error
  // Of several blocks that fail the first counts, whichever thread was faster: those before it
  // have begun, and each finishes.
  std::uint64_t failed = blocks;
  std::exception_ptr first_error;
  std::vector<std::uint64_t> mma(settings.profile ? blocks : 0);  // of each block
  const auto work = [&] {
    std::uint64_t number = 0;
    try {
      Block worker(grid, block, shared_bytes, thread, attributes);
      while (!stop && (number = next.fetch_add(cluster)) < blocks) {
        try {
          worker.run(number);
          next_turn();
        } catch (...) {
          // The trace shows what came before the error.
          const std::lock_guard lock(mutex);
          if (settings.trace) worker.events.add_to(profile);
          throw;
        }
        ended += cluster;
        if (settings.profile)
          for (unsigned rank = 0; rank < cluster; rank++)
            mma[number + rank] = worker.meetings.mma(rank);
      }
      const std::lock_guard lock(mutex);
      worker.add_counts(profile);
    } catch (const Abandoned &) {
      // Another block has failed, and says why.
    } catch (...) {
      stop = true;
      abandon_atomics();
      const std::lock_guard lock(mutex);
      if (number < failed) {
        failed = number;
        first_error = std::current_exception();
      }
    }
  };
  unsigned workers = settings.host_threads > 0 ? static_cast<unsigned>(settings.host_threads)
                                               : std::max(1u, std::thread::hardware_concurrency());
  if (settings.repeatable) workers = kInTurns;
  if (together) workers = kMostTogether;
  workers = static_cast<unsigned>(std::min<std::uint64_t>(workers, blocks / cluster));
  begin_atomics(workers);
  const auto enter_and_work = [&](unsigned host_thread) {
    enter_atomics(host_thread);
    work();
    leave_atomics();
  };
  std::vector<std::thread> pool;
  for (unsigned i = 1; i < workers; i++) pool.emplace_back(enter_and_work, i);
  enter_and_work(0);
  for (std::thread &worker : pool) worker.join();
  beside_and_unwaited = beside && !has_waited;
  if (first_error) std::rethrow_exception(first_error);
  if (!settings.profile) return;
  count_unique_bytes(profile.unique_read_bytes, profile.unique_written_bytes);
  const int launch = profile.next_launch();
  for (std::uint64_t i = 0; i < blocks; i++) {
    const Dim3 index = block_index(grid, i);
    profile.blocks.push_back({launch, i, index.x, index.y, index.z, mma[i]});
  }
}

Counts counted() {
  return profile.total();
}

Profile take_profile() {
  profile.link_bytes = take_link_bytes();
  if (std::vector<TraceSlice> streams = take_streams(); !streams.empty())
    profile.slices = std::move(streams);
  return std::exchange(profile, Profile{});
}

// A kernel's thread is always inside a block; these are the doors to it.

void check_load(const void *address, int bytes, const Where &where) {
  Block &block = *Block::current;
  if (settings.profile || !block.load_in_short(address, bytes, where))
    block.accesses.access(address, bytes, nullptr, false, where, __builtin_return_address(0));
}

void check_store(const void *address, int bytes, const void *value, const Where &where) {
  Block::current->accesses.access(address, bytes, value, true, where, __builtin_return_address(0));
}

void count(Counter counter, const Where &where) {
  if (!settings.profile) return;
  Block &block = *Block::current;
  const unsigned thread = block.scheduler.running();
  block.requests.add(thread, counter, site_of(where), __builtin_return_address(0));
  if (counter == kExp2) block.events.note(thread, "exp2", -1, where);
}

void collective(const Collective &what, std::uint32_t members, const Where &where, void *lane) {
  Block::current->meetings.collective(what, members, where, lane);
}

void warpgroup_collective(const Collective &what, const Where &where, void *lane) {
  Block::current->meetings.warpgroup_collective(what, where, lane);
}

unsigned thread_number() {
  return Block::current->scheduler.running();
}

void load_rows(const std::array<const void *, 32> &rows, int count, const Where &where) {
  Block::current->accesses.access_rows(false, rows, count, where);
}

void store_rows(const std::array<const void *, 32> &rows, const Where &where) {
  Block::current->accesses.access_rows(true, rows, 32, where);
}

void begin_copy(void *shared, const void *global, const Where &where) {
  Block::current->accesses.begin_copy(shared, global, where, __builtin_return_address(0));
}

void commit_copies() {
  Block::current->accesses.commit_copies();
}

void wait_for_copies(int groups, const Where &where) {
  Block::current->accesses.wait_for_copies(groups, where);
}

unsigned atomic(unsigned *address, const std::function<unsigned(unsigned)> &next,
                const Where &where) {
  count(kAtomics, where);
  return Block::current->accesses.atomic(address, next, where);
}

void reduce(float *first, std::span<const float> values, const Where &where) {
  Block::current->accesses.reduce(first, values, where, __builtin_return_address(0));
}

void fence() {
  Block::current->clocks.fence(thread_number());
}

void release(unsigned *address, unsigned x, const Where &where) {
  count(kAtomics, where);
  Block::current->accesses.release(address, x, where);
}

void wait_until(unsigned *address, unsigned value, const Where &where, bool or_more) {
  count(kAtomics, where);
  Block::current->accesses.wait_until(address, value, where, or_more);
}

Operation begin_operation(unsigned queue, std::function<void()> land) {
  return Block::current->scheduler.begin_operation(queue, std::move(land));
}

void finish(Operation operation) {
  Block::current->scheduler.finish(operation);
}

ReadNumber begin_async_read(std::span<const SharedBytes> bytes, unsigned warp, const Where &where) {
  return Block::current->async.begin_read(bytes, warp, where);
}

void end_async_read(ReadNumber read) {
  Block::current->async.end_read(read);
}

void proxy_fence(const Where &where) {
  count(kProxyFences, where);
  Block &block = *Block::current;
  block.clocks.proxy_fence(block.scheduler.running());
  block.scheduler.pause();
}

void global_proxy_fence(const Where &where) {
  count(kProxyFences, where);
  Block::current->scheduler.pause();
}

void mbarrier_init(const void *barrier, int arrivals, const char *part, const Where &where) {
  Block::current->mbarriers.init(barrier, arrivals, part, where);
}

void mbarrier_fence_init() {
  Block::current->mbarriers.fence_init();
}

void mbarrier_arrive(const void *barrier, int bytes, const Where &where) {
  count(kMbarrierArrivals, where);
  Block::current->mbarriers.arrive(barrier, bytes, where);
}

void mbarrier_wait(const void *barrier, int parity, const Where &where) {
  count(kMbarrierWaits, where);
  Block::current->mbarriers.wait(barrier, parity, where);
}

void named_barrier(int id, int threads, Named kind, const Where &where) {
  count(kNamedBarriers, where);
  Block::current->named_barriers.named_barrier(id, threads, kind, where);
}

void set_registers(int registers, bool more, const Where &where) {
  Block::current->registers.set(registers, more, where);
}

void tma_load(const TmaTransfer &transfer, const void *barrier, const Where &where) {
  Block::current->async.tma_load(transfer, barrier, where);
}

void tma_load_multicast(const TmaTransfer &transfer, const void *barrier, unsigned blocks,
                        const Where &where) {
  Block::current->async.tma_load_multicast(transfer, barrier, blocks, where);
}

void bulk_load(void *shared, const void *global, int bytes, const void *barrier,
               const Where &where) {
  Block::current->async.bulk_load(shared, global, bytes, barrier, where);
}

void tma_store(const TmaTransfer &transfer, const Where &where) {
  Block::current->async.tma_store(transfer, where);
}

void bulk_red_add(float *global, const float *shared, int numbers, const Where &where) {
  Block::current->async.bulk_red_add(global, shared, numbers, where);
}

void tma_store_commit() {
  Block::current->async.tma_store_commit();
}

void tma_store_wait_read(int groups, const Where &where) {
  Block::current->async.tma_store_wait_read(groups, where);
}

void tma_store_wait(int groups, const Where &where) {
  Block::current->async.tma_store_wait(groups, where);
}

void block_barrier(const Where &where) {
  Block::current->meetings.block_barrier(where);
}

void wait_for_launch_before() {
  Block::current->accesses.wait_for_launch_before();
}

unsigned cluster_rank() {
  return Block::current->scheduler.rank();
}

void cluster_barrier(const Where &where) {
  Block::current->meetings.cluster_barrier(where);
}

void mbarrier_arrive_at(const void *barrier, int rank, const Where &where) {
  count(kMbarrierArrivals, where);
  Block::current->mbarriers.arrive_at(barrier, rank, where);
}

void *shared_memory() {
  return Block::current->shared.memory();
}

void fail(const Error &error, const Where &where) {
  Block::current->scheduler.fail(error, where);
}

void fail_in_lane(unsigned lane, const Error &error, const Where &where) {
  Block::current->scheduler.fail_in_thread(thread_number() / 32 * 32 + lane, error, where);
}

}  // namespace emulator
