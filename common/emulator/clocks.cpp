#include "common/emulator/clocks.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

namespace emulator {
namespace {

std::atomic<Time> next_time = 1;  // 0 is before everything

constexpr Time kFirstSpan = 64;

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
           (known.thread == Known::kAll || known.thread == thread);
  });
}

}  // namespace

void begin_time() {
  next_time = 1;
}

Clocks::Clocks(unsigned threads) : threads_(threads), of_warp_((threads + 31) / 32) {}

void Clocks::begin_block() {
  earlier_.clear();
  span_begin_ = span_end_ = 0;
  begin_span();
  begin_ = all_ = now_;
  std::fill(of_warp_.begin(), of_warp_.end(), now_);
  exact_.clear();
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
  if (++now_ == span_end_) begin_span();
}

bool Clocks::is_of_earlier_span(Time time) const {
  return std::any_of(earlier_.begin(), earlier_.end(),
                     [=](const Span &span) { return span.begin <= time && time < span.end; });
}

std::uint32_t Clocks::unknown_exactly(unsigned thread, unsigned warp, std::uint32_t lanes,
                                      Time time) const {
  std::uint32_t unknown = 0;
  for (unsigned lane = 0; lane < 32; lane++)
    if (lanes >> lane & 1 && !knows(thread, warp * 32 + lane, time)) unknown |= 1u << lane;
  return unknown;
}

void Clocks::expand() {
  exact_.resize(std::size_t{threads_} * threads_);
  for (unsigned thread = 0; thread < threads_; thread++)
    for (unsigned other = 0; other < threads_; other++)
      exact_[thread * threads_ + other] =
          thread / 32 == other / 32 ? std::max(all_, of_warp_[thread / 32]) : all_;
  all_ = begin_;  // what is older is of another block
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
  return covers(known_to_block_, other, time) ||
         (!foreign_.empty() && covers(foreign_[thread].known, other, time));
}

void Clocks::fence(unsigned thread) {
  advance();
  foreign_.resize(threads_);
  Foreign &self = foreign_[thread];
  learn(self.known, self.heard);
  self.heard.clear();
  self.fenced = known_to_block_;
  learn(self.fenced, self.known);
  // Of its own block what every thread knows, and what it did itself. (What it knows besides, of its
  // warp, waits for a barrier of the block.)
  std::vector<Span> spans = earlier_;
  spans.push_back({span_begin_, now_});
  for (const Span &span : spans) {
    if (span.begin < all_)
      learn(self.fenced, {{span.begin, std::min(span.end, all_), Known::kAll}});
    learn(self.fenced, {{span.begin, span.end, thread}});
  }
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
  if (threads.size() == threads_) {
    all_ = now_;
    std::fill(of_warp_.begin(), of_warp_.end(), now_);
    exact_.clear();
    return;
  }
  if (exact_.empty()) expand();
  std::vector<Time> joined(threads_);
  for (const unsigned thread : threads)
    for (unsigned other = 0; other < threads_; other++)
      joined[other] = std::max(joined[other], exact_[thread * threads_ + other]);
  for (const unsigned thread : threads) joined[thread] = now_;
  for (const unsigned thread : threads)
    std::copy(joined.begin(), joined.end(), exact_.begin() + thread * threads_);
}

}  // namespace emulator
