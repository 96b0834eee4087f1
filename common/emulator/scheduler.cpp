// SPDX-License-Identifier: MIT
#include "common/emulator/scheduler.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/emulator/emulator.h"
#include "common/emulator/sites.h"
#include "reference/random.h"

thread_local constinit dim3 threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

namespace emulator {
namespace {

constexpr unsigned kNoThread = ~0u;
constexpr std::uint64_t kPauses = 4;  // of so many points at which a thread may be delayed, at one

}  // namespace

std::string text(const Dim3 &d) {
  return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
}

Scheduler::Scheduler(Dim3 grid, Dim3 dim, unsigned blocks, std::function<void()> thread)
    : grid_(grid),
      block_size_(dim.x * dim.y * dim.z),
      size_(block_size_ * blocks),
      body_(std::move(thread)),
      blocks_(blocks),
      threads_(size_) {
  for (unsigned i = 0; i < size_; i++)
    threads_[i].index = {i % dim.x, i / dim.x % dim.y, i % block_size_ / dim.x / dim.y};
  blockDim = dim;
  gridDim = grid;
}

void Scheduler::begin_block(std::uint64_t number) {
  random_ = settings.seed * 0x2545f4914f6cdd1du + number;
  error_.clear();
  abandoned_ = false;
  for (Dim3 &block : blocks_) block = block_index(grid_, number++);
  under_way_.clear();
  drawn_ = operations_ = turns_ = 0;
  // Else the order would depend on which blocks this thread of the host has run before.
  passed_over_ = 0;
  ready_.clear();
  trying_ = 0;
  slow_ = draw(2) ? static_cast<unsigned>(draw(size_)) : kNoThread;
  for (unsigned i = 0; i < size_; i++) {
    threads_[i].exited = false;
    threads_[i].fiber.start([](void *self) { static_cast<Scheduler *>(self)->run_thread(); }, this);
    make_ready(i);
  }
}

void Scheduler::run() {
  while ((!ready_.empty() || !under_way_.empty()) && is_well()) {
    if (ready_.size() == trying_ && !under_way_.empty() && (ready_.empty() || draw(2))) {
      land(draw(under_way_.size()));
      continue;
    }
    // A thread that reads an atomic again and again always can go on: nothing lands later than this.
    constexpr std::uint64_t kPatience = 1 << 14;
    if (!under_way_.empty()) {
      turns_++;
      if (turns_ % kPatience == 0) {
        land(0);
        continue;
      }
    }
    std::uint64_t drawn = draw(ready_.size() + drawn_);
    if (drawn < ready_.size() && ready_[drawn] == slow_ &&
        (ready_.size() > 1 || some_wait_for_copies())) {
      passed_over_++;
      if (passed_over_ % kPatience) {
        // Else it would catch up whenever the others wait for copies.
        if (ready_.size() == 1) {
          land(draw(under_way_.size()));
          continue;
        }
        drawn = (drawn + 1) % ready_.size();
      }
    }
    if (drawn >= ready_.size()) {
      land_drawn(drawn - ready_.size());
      continue;
    }
    running_ = std::exchange(ready_[drawn], ready_.back());
    ready_.pop_back();
    rank_ = rank_of(running_);
    threadIdx = threads_[running_].index;
    blockIdx = blocks_[rank_];
    Fiber &fiber = threads_[running_].fiber;
    fiber.resume();
    if (fiber.overflowed())
      report(running_,
             {Fault::kLaunch, "its stack is full: a GPU allows 512 KB of local memory per thread"});
    if (fiber.divided_by_0()) report(running_, {Fault::kDivision, "divides a whole number by 0"});
  }
  if (is_well()) report_stuck();
}

void Scheduler::throw_error() const {
  if (abandoned_) throw Abandoned();
  if (!error_.empty()) throw KernelError(error_);
}

/// Returns one of so many numbers, from 0.
std::uint64_t Scheduler::draw(std::uint64_t choices) {
  return (next_random(random_) >> 32) * choices >> 32;
}

/// What a thread's fiber runs.
void Scheduler::run_thread() {
  try {
    body_();
  } catch (const std::exception &exception) {
    report(running_, {Fault::kException, exception.what()});
  } catch (...) {
    report(running_, {Fault::kException, "an exception that is no std::exception"});
  }
}

// --- waiting -------------------------------------------------------------------------------------

void Scheduler::make_ready(unsigned thread) {
  threads_[thread].waits = nullptr;
  ready_.push_back(thread);
}

void Scheduler::pause() {
  if (draw(kPauses)) return;
  make_ready(running_);
  Fiber::yield();
}

void Scheduler::try_later() {
  make_ready(running_);
  trying_++;
  Fiber::yield();
  trying_--;
}

void Scheduler::wait(const Waits &in, const char *instruction, const Where &where) {
  Thread &self = threads_[running_];
  self.waits = &in;
  self.instruction = instruction;
  self.where = where;
}

std::string Scheduler::describe_wait(unsigned thread) const {
  const Thread &self = threads_[thread];
  return self.instruction + self.waits->describe_wait(thread) + in_block(rank_of(thread));
}

std::string Scheduler::describe_thread(unsigned thread) const {
  const Thread &self = threads_[thread];
  if (thread == running_) return "runs";
  if (self.exited) return "has exited";
  const bool has_met = *self.instruction != 0;
  const std::string place = has_met ? " at " + describe(self.where) : "";
  if (self.waits) return "waits in " + describe_wait(thread) + place;
  return has_met ? std::string("can go on after ") + self.instruction + place
                 : "has yet to begin, or to wait";
}

std::string Scheduler::describe_threads() const {
  std::vector<std::pair<std::string, unsigned>> places;  // what, and how many threads
  for (unsigned i = 0; i < size_; i++) {
    const std::string what = describe_thread(i);
    const auto same = std::find_if(places.begin(), places.end(),
                                   [&](const auto &place) { return place.first == what; });
    if (same == places.end())
      places.push_back({what, 1});
    else
      same->second++;
  }
  std::string lines;
  for (const auto &[what, threads] : places)
    lines +=
        std::to_string(threads) + (threads == 1 ? " thread " : " threads: each ") + what + "\n";
  return lines;
}

const void *Scheduler::in_thread(const void *variable, unsigned thread) const {
  return threads_[thread].fiber.stack() +
         (static_cast<const std::byte *>(variable) - threads_[running_].fiber.stack());
}

void Scheduler::report_stuck() {
  unsigned exited = 0;
  // The thread to name: one that is the cause, or a suspect, before who else waits.
  unsigned first = kNoThread, suspect = kNoThread;
  std::string blame;
  for (unsigned i = 0; i < size_; i++) {
    const Thread &thread = threads_[i];
    exited += thread.exited;
    if (thread.exited || !blame.empty()) continue;
    blame = thread.waits->blame(i);
    if (first == kNoThread || !blame.empty()) first = i;
    if (suspect == kNoThread && thread.waits->is_suspect(i)) suspect = i;
  }
  if (suspect != kNoThread && blame.empty()) first = suspect;
  if (first == kNoThread) return;
  struct Waiting {  // threads at one place, for one thing
    Where where;
    std::string what;
    unsigned threads;
  };
  std::vector<Waiting> places{{threads_[first].where, describe_wait(first), 0}};
  for (unsigned i = 0; i < size_; i++) {
    const Thread &thread = threads_[i];
    if (thread.exited) continue;
    const std::string what = describe_wait(i);
    const auto same = std::find_if(places.begin(), places.end(), [&](const Waiting &place) {
      return same_place(place.where, thread.where) && place.what == what;
    });
    if (same == places.end())
      places.push_back({thread.where, what, 1});
    else
      same->threads++;
  }
  std::string what = std::to_string(places[0].threads) + " of " + std::to_string(size_) +
                     " threads wait for ever in " + places[0].what + blame;
  if (exited) what += "; " + std::to_string(exited) + " have exited without reaching it";
  for (std::size_t i = 1; i < places.size(); i++)
    what += "; " + std::to_string(places[i].threads) + " wait in " + places[i].what + " at " +
            describe(places[i].where);
  report(first, {Fault::kDeadlock, what}, describe(places[0].where));
}

// --- operations ----------------------------------------------------------------------------------

Operation Scheduler::begin_operation(unsigned queue, std::function<void()> land) {
  const bool drawn = draw(2) == 0;
  under_way_.push_back({++operations_, queue, running_, drawn, std::move(land)});
  drawn_ += drawn;
  return operations_;
}

void Scheduler::finish(Operation operation) {
  while (error_.empty()) {
    const auto found = std::find_if(under_way_.begin(), under_way_.end(),
                                    [=](const UnderWay &one) { return one.number == operation; });
    if (found == under_way_.end()) return;
    land(static_cast<std::size_t>(found - under_way_.begin()));
  }
  for (;;) Fiber::yield();
}

/// Returns true if an operation that lands could let another thread go on.
bool Scheduler::some_wait_for_copies() const {
  if (under_way_.empty()) return false;
  for (unsigned i = 0; i < size_; i++)
    if (threads_[i].waits && threads_[i].waits->is_for_copies(i)) return true;
  return false;
}

/// Lands the n-th of those that are drawn among the threads.
void Scheduler::land_drawn(std::size_t n) {
  for (std::size_t i = 0;; i++) {
    if (!under_way_[i].drawn) continue;
    if (n == 0) return land(i);
    n--;
  }
}

/// Lands an operation, or the first of its queue.
void Scheduler::land(std::size_t i) {
  if (const unsigned queue = under_way_[i].queue; queue != kNoQueue)
    for (i = 0; under_way_[i].queue != queue;) i++;
  const UnderWay one = std::move(under_way_[i]);
  under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(i));
  drawn_ -= one.drawn;
  const unsigned running = std::exchange(running_, one.thread);
  const unsigned rank = std::exchange(rank_, rank_of(one.thread));
  landing_ = true;
  try {
    one.land();
  } catch (const LandingFailed &) {
    // error_ says why.
  }
  landing_ = false;
  running_ = running;
  rank_ = rank;
}

// --- errors --------------------------------------------------------------------------------------

std::string Scheduler::in_block(unsigned rank) const {
  return blocks_.size() == 1 ? "" : " of block " + text(blocks_[rank]);
}

std::string Scheduler::name_of(unsigned thread, bool of_these_blocks) const {
  return "thread " + std::to_string(thread % block_size_) +
         (of_these_blocks ? in_block(rank_of(thread)) : "");
}

std::string Scheduler::name_of_warp(unsigned warp) const {
  return "warp " + std::to_string(warp * 32 % block_size_ / 32) + in_block(rank_of(warp * 32));
}

void Scheduler::report(unsigned thread, const Error &error, const std::string &line) {
  error_ = (line.empty() ? "" : line + ": ") + tag_of(error.fault) + " block " +
           text(blocks_[rank_of(thread)]) + " thread " + text(threads_[thread].index) + ": " +
           error.what;
}

void Scheduler::fail(const Error &error, const Where &where) {
  fail_in_thread(running_, error, where);
}

void Scheduler::fail_in_thread(unsigned thread, const Error &error, const Where &where) {
  report(thread, error, describe(where));
  if (landing_) throw LandingFailed();
  for (;;) Fiber::yield();  // run() sees error_ and never resumes this fiber
}

void Scheduler::abandon() {
  abandoned_ = true;
  for (;;) Fiber::yield();
}

}  // namespace emulator
