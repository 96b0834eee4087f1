#include "common/emulator/runtime.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/emulator/block.h"
#include "common/emulator/memory.h"

namespace emulator {

Settings settings;
std::uint64_t launch_number = 0;

namespace {

Profile profile;

}  // namespace

void run(Dim3 grid, Dim3 block, std::size_t shared_bytes, const std::function<void()> &thread) {
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  const unsigned threads = block.x * block.y * block.z;
  if (blocks == 0 || threads == 0 || threads > 1024 || threads % 32)
    throw KernelError("a launch needs at least one block, of 32 to 1024 threads in whole warps");

  launch_number++;
  begin_launch(settings.profile);
  std::atomic<std::uint64_t> next = 0;
  std::atomic<bool> stop = false;
  std::mutex mutex;  // guards profile, failed and first_error
  // Of several blocks that fail the first counts, whichever thread was faster: those before it
  // have begun, and each finishes.
  std::uint64_t failed = blocks;
  std::exception_ptr first_error;
  const auto work = [&] {
    std::uint64_t number = 0;
    try {
      Block worker(grid, block, shared_bytes, thread);
      while (!stop && (number = next++) < blocks) worker.run(number);
      const std::lock_guard lock(mutex);
      worker.add_counts(profile);
    } catch (...) {
      stop = true;
      const std::lock_guard lock(mutex);
      if (number < failed) {
        failed = number;
        first_error = std::current_exception();
      }
    }
  };
  unsigned workers = settings.host_threads > 0 ? static_cast<unsigned>(settings.host_threads)
                                               : std::max(1u, std::thread::hardware_concurrency());
  workers = static_cast<unsigned>(std::min<std::uint64_t>(workers, blocks));
  std::vector<std::thread> pool;
  for (unsigned i = 1; i < workers; i++) pool.emplace_back(work);
  work();
  for (std::thread &worker : pool) worker.join();
  if (first_error) std::rethrow_exception(first_error);
  if (settings.profile) count_unique_bytes(profile.unique_read_bytes, profile.unique_written_bytes);
}

Profile take_profile() {
  return std::exchange(profile, Profile{});
}

// A kernel's thread is always inside a block; these are the doors to it.

void access(const void *address, int bytes, bool store, const Where &where) {
  Block::current->access(address, bytes, store, where);
}

void count_exp2(const Where &where) {
  if (settings.profile) Block::current->count(Kind::kExp2, 0, 0, site_of(where));
}

void collective(const char *instruction, Counter counter, const Where &where, void *lane,
                void (*compute)(void **lanes)) {
  Block::current->collective(instruction, counter, where, lane, compute);
}

void load_rows(const std::array<const void *, 32> &rows, int count, const Where &where) {
  Block::current->load_rows(rows, count, where);
}

void begin_copy(void *shared, const void *global, const Where &where) {
  Block::current->begin_copy(shared, global, where);
}

void commit_copies() {
  Block::current->commit_copies();
}

void wait_for_copies(int groups) {
  Block::current->wait_for_copies(groups);
}

void warp_barrier(const Where &where) {
  Block::current->warp_barrier(where);
}

void block_barrier(const Where &where) {
  Block::current->block_barrier(where);
}

void *shared_memory() {
  return Block::current->shared_memory();
}

void fail(const std::string &what, const Where &where) {
  Block::current->fail(what, where);
}

}  // namespace emulator
