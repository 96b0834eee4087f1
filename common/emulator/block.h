// One block of threads at work on one thread of the host.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/emulator/fiber.h"
#include "common/emulator/memory.h"
#include "common/emulator/runtime.h"

namespace emulator {

/// Runs the blocks of a launch one after the other. A thread runs until it waits for others; then
/// one that can go on is drawn at random.
class Block {
 public:
  Block(Dim3 grid, Dim3 dim, std::size_t shared_bytes, const std::function<void()> &thread);

  /// Runs the block with this number to its end. Throws KernelError.
  void run(std::uint64_t number);

  /// Adds what was counted to a profile.
  void add_counts(Profile &profile) const;

  /// The block that this host thread is running.
  static thread_local Block *current;

  // What the running thread asks for; see runtime.h.
  void access(const void *address, int bytes, bool store, const Where &where);
  void count(Kind kind, int bytes, std::uint64_t address, SiteId site);
  void collective(const char *instruction, Counter counter, const Where &where, void *lane,
                  void (*compute)(void **lanes));
  void load_rows(const std::array<const void *, 32> &rows, int count, const Where &where);
  void begin_copy(void *shared, const void *global, const Where &where);
  void commit_copies();
  void wait_for_copies(int groups);
  void warp_barrier(const Where &where);
  void block_barrier(const Where &where);
  [[noreturn]] void fail(const std::string &what, const Where &where);
  void *shared_memory() { return shared_.get(); }

 private:
  enum class State { kReady, kInWarp, kInBlock, kExited };
  struct Copy {  // a cp.async under way
    std::size_t offset;
    const void *global;
    SiteId site;
    std::uint64_t group;
  };
  struct Thread {
    Fiber fiber;
    Dim3 index;
    State state = State::kReady;
    const char *waits_for = "";
    Where where;
    void *lane = nullptr;      // operands of the collective it waits in
    std::vector<Copy> copies;  // the oldest first
    std::uint64_t groups = 0;  // of copies, committed so far
  };
  struct Pending {  // requests from one place of the source that lanes are still joining
    std::vector<Request> requests;
    std::array<std::uint32_t, 32> next{};  // how often each lane has come by
  };
  struct Warp {
    int waiting = 0;  // lanes in a warp-wide instruction
    int exited = 0;
    std::uint64_t barriers = 0;
    std::vector<Pending> pending;  // by site
    std::vector<SiteId> touched;
  };

  void wait(State state, const char *what, const Where &where);
  void make_ready(unsigned thread);
  Position here(unsigned thread) const;
  std::size_t shared_offset(const void *address) const;
  void access_global(const void *address, int bytes, bool store, SiteId site, const Where &where);
  Counts &counts_of(SiteId site);
  void count_request(unsigned warp, SiteId site, const Request &request);
  void flush(unsigned warp);
  void trace(SiteId site, const Request &request, const Wavefronts &wavefronts);
  void report_stuck();
  std::string position() const;

  const Dim3 grid_, dim_;
  const unsigned size_;
  const std::function<void()> &entry_;
  const std::size_t shared_bytes_;
  const std::unique_ptr<std::byte[], void (*)(void *)> shared_;
  SharedShadow shadow_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<unsigned> ready_;
  std::uint64_t number_ = 0;
  Dim3 index_;
  unsigned running_ = 0;
  unsigned in_block_barrier_ = 0;
  std::uint64_t barriers_ = 0;
  std::uint64_t random_ = 0;
  std::string error_;
  std::vector<Counts> counts_;  // by site
  std::vector<int> traced_;     // by site: requests of block 0, warp 0 traced so far
  std::vector<TraceRow> trace_rows_;
};

}  // namespace emulator
