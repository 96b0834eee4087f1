// SPDX-License-Identifier: MIT
#include "common/emulator/clocks.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace emulator {
namespace {

std::atomic<Time> next_time = 1;  // 0 is before everything

constexpr Time kFirstSpan = 64;

constexpr unsigned kMoreAgents = 48;

/// Four moments are one register of any host's.
using Four = Moment __attribute__((vector_size(16)));

Four four_at(const Moment *moments) {
  Four four;
  std::memcpy(&four, moments, sizeof four);
  return four;
}

/// Raises each of some moments to another, if that is later.
void raise(Moment *moments, const Moment *others, std::size_t count) {
  std::size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const Four is = four_at(moments + i), other = four_at(others + i),
               later = is > other ? is : other;
    std::memcpy(moments + i, &later, sizeof later);
  }
  for (; i < count; i++) moments[i] = std::max(moments[i], others[i]);
}

/// The earliest moment of a warp's lanes, of which the last warp may have fewer than 32.
Moment earliest(const Moment *lanes, unsigned count) {
  if (count < 32) return *std::min_element(lanes, lanes + count);
  Four least = four_at(lanes);
  for (unsigned i = 4; i < 32; i += 4) {
    const Four other = four_at(lanes + i);
    least = other < least ? other : least;
  }
  return std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
}

void learn(Knowledge &knowledge, const Knowledge &more) {
  for (const Known &one : more) {
    const auto same = std::find_if(knowledge.begin(), knowledge.end(), [&](const Known &known) {
      return known.begin == one.begin && known.thread == one.thread;
    });
    if (same == knowledge.end())
      knowledge.push_back(one);
    else
      same->end = std::max(same->end, one.end);
  }
}

bool covers(const Knowledge &knowledge, unsigned thread, Time time) {
  return std::any_of(knowledge.begin(), knowledge.end(), [=](const Known &known) {
    return known.begin <= time && time < known.end &&
           (known.thread == Known::kAll || known.thread == Known::kWarp + thread / 32 ||
            known.thread == thread);
  });
}

}  // namespace

void begin_time() {
  next_time = 1;
}

Clocks::Clocks(unsigned threads)
    : threads_(threads), of_warp_((threads + 31) / 32), capacity_(threads) {}

void Clocks::begin_block() {
  earlier_.clear();
  span_begin_ = span_end_ = 0;
  begin_span();
  begin_ = all_ = now_;
  std::fill(of_warp_.begin(), of_warp_.end(), now_);
  exact_.clear();
  agents_ = 0;
  has_agents_ = false;
  foreign_.clear();
  known_to_block_.clear();
}

/// Takes moments for this block, each time twice as many: a block has few spans.
void Clocks::begin_span() {
  Time size = kFirstSpan;
  if (span_end_ > span_begin_) {
    size = 2 * (span_end_ - span_begin_);
    earlier_.push_back({span_begin_, span_end_});
  }
  span_begin_ = next_time.fetch_add(size);
  span_end_ = span_begin_ + size;
  if (span_end_ >> kTimeBits)
    throw std::length_error("the emulator's clock is exhausted: 2^" + std::to_string(kTimeBits) +
                            " synchronisations in one launch");
  now_ = span_begin_;
}

void Clocks::advance() {
  if (++now_ < span_end_) return;
  begin_span();
  if (span_end_ - begin_ > std::numeric_limits<Moment>::max())
    throw std::length_error(
        "the emulator's clock is exhausted: 2^31 synchronisations in one block");
}

bool Clocks::is_of_earlier_span(Time time) const {
  return std::any_of(earlier_.begin(), earlier_.end(),
                     [=](const Span &span) { return span.begin <= time && time < span.end; });
}

std::uint32_t Clocks::unknown_exactly(unsigned thread, unsigned warp, std::uint32_t lanes,
                                      Time time) const {
  if (time < least(thread, warp)) return 0;
  std::uint32_t unknown = 0;
  for (; lanes; lanes &= lanes - 1) {
    const unsigned lane = static_cast<unsigned>(std::countr_zero(lanes));
    if (!knows(thread, warp * 32 + lane, time)) unknown |= 1u << lane;
  }
  return unknown;
}

void Clocks::expand() {
  exact_.assign(threads_ * stride(), 0);
  for (unsigned thread = 0; thread < threads_; thread++) {
    const unsigned warp = thread / 32;
    const Moment of_all = moment(all_), of_warp = moment(std::max(all_, of_warp_[warp]));
    Moment *const self = row(thread), *const least = self + 2 * std::size_t{capacity_};
    std::fill_n(self, threads_, of_all);
    std::fill(self + warp * 32, self + std::min(threads_, warp * 32 + 32), of_warp);
    std::fill_n(least, of_warp_.size(), of_all);
    least[warp] = of_warp;
  }
  all_ = begin_;  // what is older is of another block
}

/// Notes the least that a thread knows of the other lanes of each warp.
void Clocks::note_least(unsigned thread) {
  Moment *const self = row(thread), *const least = self + 2 * std::size_t{capacity_};
  const Moment own = std::exchange(self[thread], std::numeric_limits<Moment>::max());
  for (unsigned warp = 0; warp < of_warp_.size(); warp++)
    least[warp] = earliest(self + warp * 32, std::min(32u, threads_ - warp * 32));
  self[thread] = own;
}

void Clocks::join_lanes(unsigned warp, std::uint32_t lanes) {
  const unsigned size = std::min(32u, threads_ - warp * 32);
  if (foreign_.empty() && exact_.empty() && lanes == 0xffffffff >> (32 - size)) {
    advance();
    of_warp_[warp] = now_;
    return;
  }
  std::vector<unsigned> threads;
  for (unsigned lane = 0; lane < size; lane++)
    if (lanes >> lane & 1) threads.push_back(warp * 32 + lane);
  join(threads);
}

bool Clocks::knows_of_block(unsigned thread, unsigned other, Time time) const {
  if (other >= kFirstAgent) return false;
  return covers(known_to_block_, other, time) ||
         (!foreign_.empty() && covers(foreign_[thread].known, other, time));
}

void Clocks::fence(unsigned thread) {
  advance();
  foreign_.resize(threads_);
  Foreign &self = foreign_[thread];
  learn(self.known, self.heard);
  self.heard.clear();
  self.fenced = to_publish(thread);
}

/// What a thread knows now, to tell other blocks.
Knowledge Clocks::to_publish(unsigned thread) const {
  Knowledge all_of_it = known_to_block_;
  learn(all_of_it, foreign_[thread].known);
  // Of its own block what it knows of every thread, or of every lane of its warp, and what it did itself. (What it
  // knows besides waits for a barrier of the block.)
  Time all = all_;
  const Time of_warp = known_in_warp(thread);
  if (!exact_.empty()) {
    const Moment *least_of_warp = row(thread) + 2 * std::size_t{capacity_};
    const Moment least = *std::min_element(least_of_warp, least_of_warp + of_warp_.size());
    all = std::min(begin_ + static_cast<Time>(least), now_);
  }
  std::vector<Span> spans = earlier_;
  spans.push_back({span_begin_, now_});
  for (const Span &span : spans) {
    if (span.begin < all) learn(all_of_it, {{span.begin, std::min(span.end, all), Known::kAll}});
    if (span.begin < of_warp)
      learn(all_of_it, {{span.begin, std::min(span.end, of_warp), Known::kWarp + thread / 32}});
    learn(all_of_it, {{span.begin, span.end, thread}});
  }
  return all_of_it;
}

void Clocks::atomic_release(unsigned thread, Knowledge &told) {
  advance();
  foreign_.resize(threads_);
  learn(told, to_publish(thread));
}

void Clocks::atomic_acquire(unsigned thread, const Knowledge &told) {
  foreign_.resize(threads_);
  learn(foreign_[thread].known, told);
}

bool Clocks::knows_of_blocks(unsigned thread) const {
  return !known_to_block_.empty() || (!foreign_.empty() && !foreign_[thread].known.empty());
}

void Clocks::atomic(unsigned thread, Knowledge &told) {
  foreign_.resize(threads_);
  learn(foreign_[thread].heard, told);
  learn(told, foreign_[thread].fenced);
}

/// What these threads know of other blocks all of them know.
void Clocks::share(const std::vector<unsigned> &threads) {
  if (foreign_.empty()) return;
  Knowledge all;
  for (const unsigned thread : threads) learn(all, foreign_[thread].known);
  if (threads.size() == threads_)
    learn(known_to_block_, all);
  else
    for (const unsigned thread : threads) learn(foreign_[thread].known, all);
}

void Clocks::join(const std::vector<unsigned> &threads) {
  advance();
  share(threads);
  if (threads.size() == threads_ && !has_agents_) {
    all_ = now_;
    std::fill(of_warp_.begin(), of_warp_.end(), now_);
    exact_.clear();
    return;
  }
  if (exact_.empty()) expand();
  std::vector<Moment> joined(2 * std::size_t{capacity_});
  for (const unsigned thread : threads) raise(joined.data(), row(thread), joined.size());
  for (const unsigned thread : threads) joined[thread] = moment(now_);
  for (const unsigned thread : threads) {
    std::copy(joined.begin(), joined.end(), row(thread));
    note_least(thread);
  }
}

// --- agents, and what one tells the other --------------------------------------------------------

/// From now on the block's clocks are exact.
void Clocks::use_agents() {
  if (exact_.empty()) expand();
  has_agents_ = true;
}

unsigned Clocks::add_agent() {
  use_agents();
  if ((kFirstAgent + agents_) >> kActorBits)
    throw std::length_error(
        "the emulator accepts at most 1024 mbarriers and reading warps per block");
  if (columns() == capacity_) {
    const std::vector<Moment> before = std::move(exact_);
    const std::size_t stride_before = stride(), columns_before = capacity_;
    capacity_ += kMoreAgents;
    exact_.assign(threads_ * stride(), 0);
    for (unsigned thread = 0; thread < threads_; thread++) {
      const Moment *from = before.data() + thread * stride_before;
      std::copy_n(from, columns_before, row(thread));
      std::copy_n(from + columns_before, columns_before, row(thread) + capacity_);
      note_least(thread);
    }
  }
  return kFirstAgent + agents_++;
}

void Clocks::release(unsigned thread, Told &to) {
  use_agents();
  advance();
  to.known.resize(columns());
  to.visible.resize(columns());
  raise(to.known.data(), row(thread), columns());
  raise(to.visible.data(), row(thread) + capacity_, columns());
  to.known[thread] = moment(now_);
  if (!foreign_.empty()) learn(to.foreign, foreign_[thread].known);
}

void Clocks::acquire(unsigned thread, const Told &from) {
  use_agents();
  raise(row(thread), from.known.data(), from.known.size());
  raise(row(thread) + capacity_, from.visible.data(), from.visible.size());
  note_least(thread);
  if (from.foreign.empty()) return;
  foreign_.resize(threads_);
  learn(foreign_[thread].known, from.foreign);
}

void Clocks::release_agents(unsigned thread, Told &to) {
  use_agents();
  advance();
  to.known.resize(columns());
  raise(to.known.data() + threads_, row(thread) + threads_, agents_);
}

void Clocks::release_agent(unsigned agent, Told &to) {
  advance();
  to.known.resize(columns());
  to.known[column(agent)] = moment(now_);
}

void Clocks::learn_of_agent(unsigned agent, unsigned warp, std::uint32_t lanes) {
  advance();
  for (; lanes; lanes &= lanes - 1)
    row(warp * 32 + static_cast<unsigned>(std::countr_zero(lanes)))[column(agent)] = moment(now_);
}

void Clocks::proxy_fence(unsigned thread) {
  use_agents();
  advance();
  Moment *const visible = row(thread) + capacity_;
  raise(visible, row(thread), columns());
  visible[thread] = moment(now_);
}

}  // namespace emulator
