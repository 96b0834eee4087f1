// SPDX-License-Identifier: MIT
// The emulator's engine: memory that knows who touched it, blocks of threads that run in a drawn
// order, and the report of what went wrong. Kernels see emulator.h; the program sees this.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>

#include "common/emulator/counters.h"
#include "common/emulator/fault.h"

namespace emulator {

using Where = std::source_location;

struct Dim3 {
  unsigned x, y, z;
  constexpr Dim3(unsigned of_x = 1, unsigned of_y = 1, unsigned of_z = 1)
      : x(of_x), y(of_y), z(of_z) {}
};

/// The place in its grid of the block that starts after so many others.
inline Dim3 block_index(Dim3 grid, std::uint64_t number) {
  return {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
          static_cast<unsigned>(number / grid.x / grid.y)};
}

/// What a launch throws when a kernel did something that a GPU would have let pass or hung on. The
/// message names the line, the kind of error, the block and the thread.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// --- global memory -----------------------------------------------------------------------------

/// Allocates global memory, 256-byte aligned and filled with NaN. Accesses outside of every
/// allocation are errors. Throws std::bad_alloc.
void *allocate(std::size_t bytes);
void release(void *memory);

// --- launches ----------------------------------------------------------------------------------

/// Bytes of shared memory that a block may have: 227 KB, as compute capability 9.0 has it, or as many KB as
/// the environment's EMULATED_SHARED_KB says, for a smaller GPU.
int shared_memory_per_block();

struct Settings {
  std::uint64_t seed = 0;  // draws the order in which threads run
  bool profile = false;    // count, at up to ten times the time
  bool trace = false;      // and trace block 0, or its cluster
  bool streams = false;    // and trace the streams of several devices
  int host_threads = 0;    // 0: all cores
  /// The same seed gives the same run: blocks that run at once take turns, which end at atomics and are drawn.
  bool repeatable = false;
  // A small GPU's: few enough that a test's problem fills them or does not. An H200 has 132.
  int multiprocessors = 16;
  /// The program says that its sums have the same bits in every run.
  bool same_bits = false;
};
extern Settings settings;

/// The blocks that the GPU runs at once. Each multiprocessor has 228 KB of shared memory, 1 KB of which goes to
/// each block, and 65536 registers. The emulator assumes that a kernel takes 128 of them per thread, because
/// it does not know what nvcc makes of it.
int resident_blocks(int threads, std::size_t shared_bytes);

/// Counts the launches; what a thread remembers of one is stale in the next.
extern std::uint64_t launch_number;

/// How far the last launch has come. Any thread of the host may ask.
struct LaunchProgress {
  std::uint64_t launch;  // its number, from 1
  std::uint64_t ended, blocks;
};
LaunchProgress launch_progress();

/// What cudaLaunchAttribute says of a launch.
struct LaunchAttributes {
  /// Each block has a thread of the host to itself: they can wait for each other.
  bool together = false;
  /// So many blocks that follow each other in x run on one thread of the host.
  unsigned cluster = 1;
  /// It may begin before the launch before has ended.
  bool beside = false;
};

/// Runs one kernel: every thread of every block calls `thread`. Blocks are spread over the host's
/// cores, in the order of their numbers. Throws KernelError, also for a launch that a GPU refuses.
void run(Dim3 grid, Dim3 block, std::size_t shared_bytes, const std::function<void()> &thread,
         const LaunchAttributes &attributes = {});

/// Queues a launch on a stream of devices.h, which must be the current device's. If `stream` is none, runs it
/// at once.
void launch_on(void *stream, Dim3 grid, Dim3 block, std::size_t shared_bytes,
               const std::function<void()> &thread, const LaunchAttributes &attributes = {},
               Where where = Where::current());

/// The counts of all launches so far, of this profile.
Counts counted();

/// The counts of all launches since the last call, which begins a new profile.
Profile take_profile();

// --- called by the running threads ---------------------------------------------------------------

/// Checks one access, and counts it if a profile is wanted. `bytes` is 2, 4, 8 or 16; a store is of
/// what lies at `value`.
void check_load(const void *address, int bytes, const Where &where);
void check_store(const void *address, int bytes, const void *value, const Where &where);

/// Counts one instruction that each lane executes for itself: one of the warp for all lanes that
/// do so together.
void count(Counter counter, const Where &where);

/// An instruction that lanes of a warp execute together.
struct Collective {
  const char *name;
  Counter counter;  // or kCounters: counted elsewhere
  bool aligned;  // of all 32 lanes at one place (PTX ISA, '.aligned'); else of those a mask names
  bool orders;   // what a lane did before it happens before what any of them does after it
  // Given each lane's operands and results, null for a lane that takes no part.
  void (*compute)(void **lanes);
};

/// Parks the thread until all lanes that `members` names and that have not exited are here; the last
/// to come computes for all. `lane` is this lane's operands and results, on its own stack.
/// `what` must outlive the launch.
void collective(const Collective &what, std::uint32_t members, const Where &where, void *lane);

/// The same of the four warps of a warpgroup, 128 threads at one place in the text: `compute` is given
/// 128 lanes. Counts once per warp. It orders nothing.
void warpgroup_collective(const Collective &what, const Where &where, void *lane);

/// The running thread's number in its block, or among the threads of its cluster: of each block after those
/// of the blocks before.
unsigned thread_number();

/// Checks that an ldmatrix may read its rows, and counts their wavefronts. rows[i] is the address of
/// the 16-byte row that lane i supplies; null if lane i supplies none. An error names that lane.
/// Called from within a collective.
void load_rows(const std::array<const void *, 32> &rows, int count, const Where &where);

/// Does the same for an stmatrix, which stores to 32 rows.
void store_rows(const std::array<const void *, 32> &rows, const Where &where);

/// Begins to copy 16 bytes from global to shared memory (null: 16 bytes of zeros), closes the
/// thread's group of copies, and waits until at most `groups` of them are under way. The bytes
/// arrive as late as that allows.
void begin_copy(void *shared, const void *global, const Where &where);
void commit_copies();
void wait_for_copies(int groups, const Where &where);

/// Checks that there is an unsigned in global memory at this address, and gives it this value of what
/// it was, at once for all blocks of the launch; returns what it was. Atomics do not race.
unsigned atomic(unsigned *address, const std::function<unsigned(unsigned)> &next,
                const Where &where);

/// Adds to a number in global memory, or to 4 that follow each other, at once for all blocks of the launch, in an order
/// of all such additions to one address that is drawn from the seed. Reductions do not race with each other; with loads
/// and stores they do. They are one request.
void reduce(float *first, std::span<const float> values, const Where &where);

/// __threadfence.
void fence();

/// Adds to an unsigned in global memory, at once for all blocks of the launch, and publishes what the thread has done and
/// knows of. wait_until waits until the unsigned has a value, and learns what has been published with it. A wait that no
/// block of the launch can end is reported.
void release(unsigned *address, unsigned x, const Where &where);
void wait_until(unsigned *address, unsigned value, const Where &where, bool or_more = false);

// --- asynchronous operations -------------------------------------------------------------------

/// What is done by something other than threads, after a thread has asked for it: by its number. 0 is none.
using Operation = std::uint64_t;

/// Begins an operation of the running thread: `land` does it, at a moment that is drawn from the seed,
/// as if a thread of its own did; at the latest once no thread can go on. Those of one queue land in
/// the order in which they began; those of kNoQueue in any.
constexpr unsigned kNoQueue = ~0u;
Operation begin_operation(unsigned queue, std::function<void()> land);

/// Lands it now, after those before it in its queue. Nothing is done if it has landed.
void finish(Operation operation);

/// Bytes of shared memory, at a multiple of 16 and that many.
struct SharedBytes {
  const void *first;
  std::size_t bytes;
};

/// wgmma begins to read operands on the word of a warp (of the block, from 0): checks that its lanes
/// know who wrote them, that it is visible to the tensor cores, and that nothing is writing them. Until
/// the end they are nobody's to write. Returns what end_async_read wants.
using ReadNumber = std::uint64_t;
ReadNumber begin_async_read(std::span<const SharedBytes> bytes, unsigned warp, const Where &where);

/// It has read, and the warp's lanes have waited for it: what they do from now on comes after.
void end_async_read(ReadNumber read);

/// fence.proxy.async, and that of global memory, which is counted: what it orders is not checked.
void proxy_fence(const Where &where);
void global_proxy_fence(const Where &where);

// --- mbarriers, named barriers, registers ------------------------------------------------------

/// The instructions of common/kernel/mbarrier.h, on an mbarrier at this address.
void mbarrier_init(const void *barrier, int arrivals, const char *part, const Where &where);
void mbarrier_fence_init();
void mbarrier_arrive(const void *barrier, int bytes, const Where &where);  // bytes: to expect first
void mbarrier_wait(const void *barrier, int parity, const Where &where);

/// barrier.arrive, barrier.sync.aligned, or barrier.sync without it.
enum class Named { kArrive, kSync, kMeet };
void named_barrier(int id, int threads, Named kind, const Where &where);

/// setmaxnreg.
void set_registers(int registers, bool more, const Where &where);

// --- TMA ---------------------------------------------------------------------------------------

/// A tensor [batch, heads, rows, d], as the copy engine knows it: strides in bytes.
struct Tensor {
  std::byte *data;
  std::int64_t row_stride, head_stride, batch_stride;
  int batch, heads, rows, d, tile_rows, tile_d, element_bytes;
  bool clips_columns =
      false;  // whether a box may have more columns than the tensor: zeros, or not stored
};

/// A tile of it, and in shared memory: rows x d, as the 128-byte swizzle lays it out. Or a part of a tile
/// whose bytes follow each other.
struct TmaTransfer {
  Tensor tensor;
  int row, col, head, batch;
  std::byte *tile;
  int tile_rows, d, element_bytes;
};

void tma_load(const TmaTransfer &transfer, const void *barrier, const Where &where);
void tma_load_multicast(const TmaTransfer &transfer, const void *barrier, unsigned blocks,
                        const Where &where);
/// A copy of so many bytes that follow each other.
void bulk_load(void *shared, const void *global, int bytes, const void *barrier,
               const Where &where);
void tma_store(const TmaTransfer &transfer, const Where &where);
/// Adds so many numbers.
void bulk_red_add(float *global, const float *shared, int numbers, const Where &where);
void tma_store_commit();
void tma_store_wait_read(int groups, const Where &where);
void tma_store_wait(int groups, const Where &where);

// --- launches that begin early -----------------------------------------------------------------

/// griddepcontrol.wait.
void wait_for_launch_before();

// --- clusters ----------------------------------------------------------------------------------

/// The instructions of common/kernel/cluster.h.
unsigned cluster_rank();
void cluster_barrier(const Where &where);
void mbarrier_arrive_at(const void *barrier, int rank, const Where &where);

/// __syncthreads.
void block_barrier(const Where &where);

/// The block's shared memory.
void *shared_memory();

/// Ends the launch with an error at this place, of this thread or of a lane of its warp.
[[noreturn]] void fail(const Error &error, const Where &where);
[[noreturn]] void fail_in_lane(unsigned lane, const Error &error, const Where &where);

}  // namespace emulator
