// SPDX-License-Identifier: MIT
// One block of threads, or the blocks of a cluster, at work on one thread of the host: who runs, who
// waits for whom. What they do to memory is checked in shadow.h and counted in requests.h; what orders
// it is in clocks.h.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/emulator/clocks.h"
#include "common/emulator/copies.h"
#include "common/emulator/events.h"
#include "common/emulator/fiber.h"
#include "common/emulator/mbarriers.h"
#include "common/emulator/products.h"
#include "common/emulator/requests.h"
#include "common/emulator/runtime.h"
#include "common/emulator/shadow.h"

namespace emulator {

struct Allocation;

constexpr unsigned kWarpgroup = 128;

/// A launch begins: nothing has been told by its atomics.
void begin_atomics();

/// Whether a thread of the launch has waited for the launch before.
extern std::atomic<bool> has_waited;

/// The registers of each thread of a kernel that is to have so many threads on a multiprocessor, whose
/// file has 65536: a multiple of 8, of 255 that a thread may name.
int launch_registers(unsigned threads);

/// A block has failed: others may wait for its atomics, and must not for ever. Their next atomics end
/// them, and run() throws this.
void abandon_atomics();
struct Abandoned {};

/// Runs the blocks of a launch one after the other, and those of a cluster together: their threads are
/// numbered one block after the other. A thread runs until it waits for others; then one that can go on
/// is drawn at random.
class Block {
 public:
  Block(Dim3 grid, Dim3 dim, std::size_t shared_bytes, const std::function<void()> &thread,
        const LaunchAttributes &attributes);

  /// Runs the block with this number to its end, or the cluster that begins with it. Throws KernelError.
  void run(std::uint64_t number);

  /// Adds what was counted to a profile.
  void add_counts(Profile &profile) const {
    requests_.add_to(profile);
    events_.add_to(profile);
  }

  /// The mma and wgmma of the block with this rank in the cluster that ran last.
  std::uint64_t mma(unsigned rank) const { return ctas_[rank].mma; }

  /// The block that this host thread is running.
  static thread_local constinit Block *current;

  // What the running thread asks for; see runtime.h. `caller` is where in the compiled code.
  /// Checks a load as `access` does, if it is one of those that SharedShadow::load_in_short takes: else false.
  [[gnu::always_inline]] bool load_in_short(const void *address, int bytes, const Where &where) {
    const std::size_t offset = shared_offset(address);
    return offset < shared_bytes_ && offset + bytes <= shared_bytes_ &&
           (offset & (bytes - 1)) == 0 &&
           cta_->shadow.load_in_short(offset, bytes, running_, site_of(where), clocks_);
  }
  void access(const void *address, int bytes, const void *value, bool store, const Where &where,
              const void *caller);
  void count(Counter counter, const Where &where, const void *caller);
  void count_wgmma(int wavefronts, const Where &where) {
    if (settings.profile) requests_.count(site_of(where), kWgmmaWavefronts, wavefronts);
  }
  void note(unsigned thread, const char *what, std::int64_t of, const Where &where) {
    if (settings.profile && number_ == 0 && thread < block_size_ && thread % kWarpgroup == 0)
      events_.add(thread / kWarpgroup, what, of, site_of(where), clocks_);
  }
  void collective(const Collective &what, std::uint32_t members, const Where &where, void *lane);
  void warpgroup_collective(const Collective &what, const Where &where, void *lane);
  unsigned thread_number() const { return running_; }
  void load_rows(const std::array<const void *, 32> &rows, int count, const Where &where);
  void store_rows(const std::array<const void *, 32> &rows, const Where &where);
  void begin_copy(void *shared, const void *global, const Where &where, const void *caller);
  void commit_copies() { copies_.commit(running_); }
  void wait_for_copies(int groups);
  unsigned atomic(unsigned *address, const std::function<unsigned(unsigned)> &next,
                  const Where &where);
  void fence() { clocks_.fence(running_); }
  Operation begin_operation(unsigned queue, std::function<void()> land);
  void finish(Operation operation);
  ReadNumber begin_async_read(std::span<const SharedBytes> bytes, unsigned warp,
                              const Where &where);
  void end_async_read(ReadNumber number);
  void proxy_fence() {
    clocks_.proxy_fence(running_);
    pause();
  }
  void mbarrier_init(const void *address, int arrivals, const char *part, const Where &where);
  void mbarrier_fence_init();
  void mbarrier_arrive(const void *address, int bytes, const Where &where);
  void mbarrier_wait(const void *address, int parity, const Where &where);
  void named_barrier(int id, int threads, bool sync, const Where &where);
  void set_registers(int registers, bool more, const Where &where);
  void wait_for_launch_before();
  unsigned cluster_rank() const { return rank_of(running_); }
  void cluster_barrier(const Where &where);
  void mbarrier_arrive_at(const void *address, int rank, const Where &where);
  void tma_load(const TmaTransfer &transfer, const void *barrier, const Where &where);
  void tma_load_multicast(const TmaTransfer &transfer, const void *barrier, unsigned blocks,
                          const Where &where);
  void tma_store(const TmaTransfer &transfer, const Where &where);
  void tma_store_commit();
  void tma_store_wait_read(int groups);
  void block_barrier(const Where &where);
  [[noreturn]] void fail(const Error &error, const Where &where);
  [[noreturn]] void fail_in_lane(unsigned lane, const Error &error, const Where &where);
  [[noreturn]] void fail_in_thread(unsigned thread, const Error &error, const Where &where);
  void *shared_memory() { return cta_->shared.get(); }
  std::size_t shared_bytes() const { return shared_bytes_; }
  Products &products() { return products_; }
  std::string name_of(unsigned thread, bool of_these_blocks = true) const;
  std::string name_of_warp(unsigned warp) const;

 private:
  enum class State {
    kReady,
    kInWarp,
    kInWarpgroup,
    kInBlock,
    kInCluster,
    kAtMbarrier,
    kAtNamedBarrier,
    kForRegisters,
    kExited
  };
  struct Cta;
  struct Thread {
    Fiber fiber;
    Dim3 index;
    Cta *cta = nullptr;  // its block
    State state = State::kReady;
    // While it waits: in what, and where in the source.
    const char *waits_in = "";
    Where where;
    // While it waits in a collective: in which, for which lanes, with which operands.
    const Collective *collective = nullptr;
    std::uint32_t members = 0;
    void *lane = nullptr;
    int barrier = 0;                         // while it waits at a named one
    const BarrierState *mbarrier = nullptr;  // or at an mbarrier, for this phase's end
    std::uint64_t phase = 0;
  };
  struct Warp {
    std::uint32_t lanes = 0;    // all that exist: the last warp may have fewer than 32
    std::uint32_t live = 0;     // those that have not exited
    std::uint32_t waiting = 0;  // those in a collective
  };
  struct UnderWay {  // an operation
    Operation number;
    unsigned queue, thread;
    bool drawn;  // among the threads; else it lands once none can go on
    std::function<void()> land;
  };
  struct LandingFailed {};
  struct Arrival {
    unsigned thread;
    bool sync;
    Time time;
  };
  struct NamedBarrier {
    int threads = 0;                        // that it is for, while some have come
    int come = 0;                           // and arrived
    Where where;                            // one of them
    std::vector<unsigned> waiting;          // those that came to wait
    std::vector<Arrival> arrivals, before;  // in this phase and in the last one
    int threads_before = 0;                 // that the last one was for
    Told told;
  };
  struct Store {  // a TMA store
    Operation operation;
    AsyncRead read;
    std::uint64_t group;  // of its thread's
  };
  struct Stores {                  // of a thread
    std::vector<Store> under_way;  // the oldest first
    std::uint64_t groups = 0;      // committed so far
  };
  struct Registers {  // of a warpgroup, per thread
    int now = 0;
    int wanted = 0;  // 0: it waits for none
  };
  struct Cta {  // what a block has for itself
    std::unique_ptr<std::byte[], void (*)(void *)> shared;
    SharedShadow shadow;
    Dim3 index;
    Mbarriers mbarriers;
    std::array<NamedBarrier, 16> named_barriers;
    std::vector<Registers> registers;  // by warpgroup
    int free_registers = 0;
    unsigned live = 0;  // threads that have not exited
    unsigned in_block_barrier = 0;
    std::uint64_t mma = 0;  // and wgmma, where a profile is wanted
  };

  void run_thread();
  void exit_thread();
  void wait(State state, const char *what, const Where &where);
  void make_ready(unsigned thread);
  void pause();
  void land_drawn(std::size_t n);
  void land(std::size_t i);
  std::uint64_t draw(std::uint64_t choices);
  bool meet(const Collective &what, unsigned warp, std::uint32_t members);
  void check_same(const Collective &what, unsigned warp, std::uint32_t lanes);
  void end_block_barrier();
  void end_cluster_barrier();
  void end_barrier(State state, unsigned first, unsigned threads, Counter counter);
  unsigned rank_of(unsigned thread) const { return thread / block_size_; }
  Cta &cta_of(unsigned thread) { return *threads_[thread].cta; }
  Registers &registers_of(unsigned thread) {
    return cta_of(thread).registers[thread % block_size_ / kWarpgroup];
  }
  std::string in_block(const Cta &cta) const;
  void count_mma(Counter counter);
  void count_each_place(unsigned warp, std::uint32_t lanes, Counter counter);
  void flush(unsigned warp) { requests_.flush(warp, number_ == 0 && warp == 0); }
  std::string other_mask(unsigned thread) const;
  BarrierState &usable_mbarrier(const char *what, Cta &cta, std::size_t offset, const Where &where);
  bool is_fenced(const BarrierState &barrier) const {
    return barrier.fenced && clocks_.knows(running_, barrier.thread, barrier.fenced);
  }
  void count_load(const TmaTransfer &transfer, const Where &where, int blocks = 1);
  void begin_load(Cta &to, const TmaTransfer &transfer, std::size_t barrier, const Where &where);
  void land_load(Cta &to, const TmaTransfer &transfer, std::size_t from, BarrierState &barrier,
                 const Where &where);
  void end_read(const AsyncRead &read, std::uint32_t lanes);
  void note_remote(BarrierState &barrier, bool copy, SiteId site);
  void go_on_if_ended(BarrierState &barrier);
  void share_registers(int wanted);
  void change_registers(int registers);
  std::size_t check_transfer(bool store, const TmaTransfer &transfer, const Where &where);
  void access_tensor(const TmaTransfer &transfer, bool store, SiteId site, const Where &where);
  bool report_unawaited();
  void report_bytes();
  void report_loads();
  void report_late();
  std::string waits_for(const Thread &thread) const;
  void report_stuck();
  void report(const Error &error, const std::string &line = "");
  /// Where in shared memory an address lies; at least shared_bytes_ if elsewhere.
  std::size_t shared_offset(const void *address) const {
    return reinterpret_cast<std::uintptr_t>(address) -
           reinterpret_cast<std::uintptr_t>(cta_->shared.get());
  }
  void access_global(const Access &access, const Where &where);
  void check_launch_before(const Allocation &allocation, const Access &access,
                           const char *operation, const Where &where);

  const SignalStack signal_stack_;
  const Dim3 grid_, dim_;
  const unsigned block_size_, size_;  // threads of a block; of all that are run together
  const std::function<void()> &entry_;
  const std::size_t shared_bytes_;
  const bool beside_;  // it may have begun before the launch before has ended
  Clocks clocks_;
  std::vector<Cta> ctas_;  // by rank in the cluster
  Cta *cta_ = nullptr;     // the running thread's
  Copies copies_;
  Products products_;
  std::vector<UnderWay> under_way_;  // in the order in which they began
  std::size_t drawn_ = 0;            // how many of them are drawn among the threads
  Operation operations_ = 0;
  std::uint64_t turns_ = 0;  // of threads, while operations are under way
  bool landing_ = false;
  std::map<ReadNumber, AsyncRead> reads_;  // under way
  ReadNumber read_numbers_ = 0;
  std::vector<unsigned> readers_;  // by warp: the agent that reads for it, 0 if none has
  std::vector<Stores> stores_;     // by thread
  unsigned tma_agent_ = 0;         // of all stores; 0: there were none
  std::vector<std::pair<unsigned, Time>> waits_;  // for the launch before: which thread, and when
  Requests requests_;
  Events events_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<unsigned> ready_;
  unsigned slow_ = 0;  // goes on once no other thread can; kNoThread: there is none
  unsigned passed_over_ = 0;
  std::uint64_t number_ = 0;
  unsigned running_ = 0;
  unsigned live_ = 0;  // threads that have not exited
  unsigned in_cluster_barrier_ = 0;
  std::uint64_t random_ = 0;
  std::string error_;
  bool abandoned_ = false;
};

}  // namespace emulator
