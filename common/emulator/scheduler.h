// SPDX-License-Identifier: MIT
// Which thread of a block runs: each is a fiber, and runs until it waits for others; then one that can go on
// is drawn at random. What engines do for threads is drawn among them. If no thread can go on, the report of the
// deadlock says who waits for whom.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/emulator/fiber.h"
#include "common/emulator/runtime.h"

namespace emulator {

constexpr unsigned kWarpgroup = 128;

/// "(1,0,0)"
std::string text(const Dim3 &d);

/// A part of the block in which threads wait. The report of a deadlock asks it about them.
class Waits {
 public:
  /// Returns what a thread waits for, to be read after the name of its instruction.
  virtual std::string describe_wait(unsigned) const { return ""; }

  /// Returns true if copies alone can let a thread go on.
  virtual bool is_for_copies(unsigned) const { return false; }

  /// Returns true if a thread is more likely the cause of a deadlock than others that wait.
  virtual bool is_suspect(unsigned) const { return false; }

  /// Returns why a thread is the cause, to be read after what it waits for; "" if it is not known to be.
  virtual std::string blame(unsigned) const { return ""; }

 protected:
  ~Waits() = default;
};

/// Another block has failed, and says why: this one was given up.
struct Abandoned {};

/// Runs the threads of one block, or those of a cluster's blocks, which are numbered one block after the other.
class Scheduler {
 public:
  /// So many blocks of a grid run together; each of their threads does what `thread` does.
  Scheduler(Dim3 grid, Dim3 dim, unsigned blocks, std::function<void()> thread);

  /// Begins the block with this number, or the cluster that begins with it.
  void begin_block(std::uint64_t number);

  /// Runs the threads and lands the operations until all are done or one has failed.
  void run();

  /// Throws KernelError if a thread has failed, Abandoned if the block was given up.
  void throw_error() const;

  /// Returns true as long as nothing has failed, and the block was not given up.
  bool is_well() const { return error_.empty() && !abandoned_; }

  // --- who is who --------------------------------------------------------------------------------

  /// The running thread, and the rank of its block in the cluster. An operation lands as its thread's.
  unsigned running() const { return running_; }
  unsigned rank() const { return rank_; }

  unsigned blocks() const { return static_cast<unsigned>(blocks_.size()); }
  unsigned block_size() const { return block_size_; }
  unsigned size() const { return size_; }  // threads of all blocks that run together
  unsigned rank_of(unsigned thread) const { return thread / block_size_; }

  /// "thread 3" and "warp 3"; in a cluster with " of block (1,0,0)", which in_block returns.
  std::string name_of(unsigned thread, bool of_these_blocks = true) const;
  std::string name_of_warp(unsigned warp) const;
  std::string in_block(unsigned rank) const;

  // --- waiting -----------------------------------------------------------------------------------

  /// The running thread waits from its next yield on, in an instruction at this place.
  void wait(const Waits &in, const char *instruction, const Where &where);

  /// A thread that waits can go on when it is drawn. The running one, which may be the last to come to a barrier,
  /// must yield after this: behind a barrier any thread may be the first.
  void make_ready(unsigned thread);

  /// The running thread may be delayed here, where it could go on.
  void pause();

  /// The running thread tries again later: it waits for what another block does.
  void try_later();

  /// Returns true if all other threads wait or try again, and no operation is under way.
  bool is_last_to_try() const { return ready_.size() == trying_ && under_way_.empty(); }

  /// The running thread exits. What it still does is done as another thread.
  void exit_thread() { threads_[running_].exited = true; }
  void act_as(unsigned thread) { running_ = thread; }

  bool has_exited(unsigned thread) const { return threads_[thread].exited; }
  bool waits(unsigned thread, const Waits &in) const { return threads_[thread].waits == &in; }

  /// Where a thread waits, or waited last: the instruction, and its place.
  const char *instruction(unsigned thread) const { return threads_[thread].instruction; }
  const Where &where(unsigned thread) const { return threads_[thread].where; }

  // --- for a debugger ----------------------------------------------------------------------------

  /// Returns who waits for what, and who can go on: a line for each place.
  std::string describe_threads() const;

  /// Returns what a thread does now, in words.
  std::string describe_thread(unsigned thread) const;

  /// Returns where another thread has a variable of the running one's kernel.
  const void *in_thread(const void *variable, unsigned thread) const;

  // --- operations --------------------------------------------------------------------------------

  /// See runtime.h.
  Operation begin_operation(unsigned queue, std::function<void()> land);
  void finish(Operation operation);

  // --- errors ------------------------------------------------------------------------------------

  /// Ends the block with an error of the running thread, or of this one.
  [[noreturn]] void fail(const Error &error, const Where &where);
  [[noreturn]] void fail_in_thread(unsigned thread, const Error &error, const Where &where);

  /// The same, from where no thread runs that could be left: at this line.
  void report(unsigned thread, const Error &error, const std::string &line = "");

  /// The running thread goes on no more: the block is given up.
  [[noreturn]] void abandon();

 private:
  struct Thread {
    Fiber fiber;
    Dim3 index;
    bool exited = false;
    const Waits *waits = nullptr;  // where; null: it can go on
    const char *instruction = "";
    Where where;
  };
  struct UnderWay {  // an operation
    Operation number;
    unsigned queue, thread;
    bool drawn;  // among the threads; else it lands once none can go on
    std::function<void()> land;
  };
  struct LandingFailed {};

  void run_thread();
  std::uint64_t draw(std::uint64_t choices);
  void land_drawn(std::size_t n);
  void land(std::size_t i);
  bool some_wait_for_copies() const;
  std::string describe_wait(unsigned thread) const;
  void report_stuck();

  const Dim3 grid_;
  const unsigned block_size_, size_;
  const std::function<void()> body_;
  std::vector<Dim3> blocks_;  // by rank: their place in the grid
  std::vector<Thread> threads_;
  std::vector<unsigned> ready_;
  unsigned trying_ = 0;  // how many of them try again
  unsigned running_ = 0, rank_ = 0;
  unsigned slow_ = 0;  // goes on once no other thread can, nor waits for copies; or kNoThread
  unsigned passed_over_ = 0;
  std::vector<UnderWay> under_way_;  // in the order in which they began
  std::size_t drawn_ = 0;            // how many of them are drawn among the threads
  Operation operations_ = 0;
  std::uint64_t turns_ = 0;  // of threads, while operations are under way
  bool landing_ = false;
  std::uint64_t random_ = 0;
  std::string error_;
  bool abandoned_ = false;
};

}  // namespace emulator
