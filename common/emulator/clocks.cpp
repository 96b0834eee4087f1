#include "common/emulator/clocks.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

namespace emulator {
namespace {

std::atomic<Time> next_time = 1;  // 0 is before everything

constexpr Time kFirstSpan = 64;

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
  if (exact_.empty() && lanes == 0xffffffff >> (32 - size)) {
    advance();
    of_warp_[warp] = now_;
    return;
  }
  std::vector<unsigned> threads;
  for (unsigned lane = 0; lane < size; lane++)
    if (lanes >> lane & 1) threads.push_back(warp * 32 + lane);
  join(threads);
}

void Clocks::join(const std::vector<unsigned> &threads) {
  advance();
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
