// What happens before what. Each thread of a block has a vector clock: for every thread, the time
// up to which it knows what that one did. An access by u at time t happens before one by v if v
// knows u beyond t. A thread always knows itself; of others it learns where they synchronise.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace emulator {

/// Time passes at each synchronisation. One launch has one time: no two blocks share a moment of it.
using Time = std::uint64_t;

/// Stamps keep this many bits of it. A launch that lasted longer ends with an error.
constexpr int kTimeBits = 37;

/// What threads of other blocks did from `begin` to before `end`: all of a block's, or one.
struct Known {
  static constexpr unsigned kAll = ~0u;
  Time begin, end;
  unsigned thread;
};
using Knowledge = std::vector<Known>;

/// Begins the time of a launch.
void begin_time();

/// The clocks of the threads of one block.
class Clocks {
 public:
  explicit Clocks(unsigned threads);

  /// The threads of a block begin, and know nothing of each other.
  void begin_block();

  unsigned warps() const { return static_cast<unsigned>(of_warp_.size()); }

  /// When an access is made now.
  Time now() const { return now_; }

  /// True if `thread` knows what `other` did at `time`, both of this block.
  bool knows(unsigned thread, unsigned other, Time time) const {
    if (time < all_ || thread == other) return true;
    if (!exact_.empty()) return time < exact_[thread * threads_ + other];
    return thread / 32 == other / 32 && time < of_warp_[thread / 32];
  }

  /// Those among the lanes of a warp of whose doing at `time` the thread does not know.
  std::uint32_t unknown(unsigned thread, unsigned warp, std::uint32_t lanes, Time time) const {
    if (time < all_) return 0;
    if (!exact_.empty()) return unknown_exactly(thread, warp, lanes, time);
    if (thread / 32 != warp) return lanes;
    return time < of_warp_[warp] ? 0 : lanes & ~(1u << thread % 32);
  }

  /// True if the time is one of this block.
  bool is_of_block(Time time) const {
    return time >= span_begin_ ? time < span_end_ : is_of_earlier_span(time);
  }

  /// When the block began; until when every thread knows of every other; until when a thread knows
  /// at least of the lanes of its warp. What is older needs no closer look.
  Time begin() const { return begin_; }
  Time known_by_all() const { return all_; }
  Time known_in_warp(unsigned thread) const {
    return exact_.empty() ? std::max(all_, of_warp_[thread / 32]) : all_;
  }

  /// True if `thread` knows what `other` did at `time`, of another block. (PTX ISA, 'Memory
  /// Consistency Model': a fence before an atomic releases, a fence after one acquires.)
  bool knows_of_block(unsigned thread, unsigned other, Time time) const;

  /// A fence: the thread's next atomics tell what it knows now, and it knows what its atomics heard.
  void fence(unsigned thread);

  /// An atomic: tells what the thread's last fence covers, and hears what others have told.
  void atomic(unsigned thread, Knowledge &told);

  /// These lanes of a warp, or these threads, now know all that any of them knew or did.
  void join_lanes(unsigned warp, std::uint32_t lanes);
  void join(const std::vector<unsigned> &threads);

 private:
  struct Span {
    Time begin, end;
  };
  void advance();
  void begin_span();
  bool is_of_earlier_span(Time time) const;
  std::uint32_t unknown_exactly(unsigned thread, unsigned warp, std::uint32_t lanes,
                                Time time) const;
  void expand();
  void share(const std::vector<unsigned> &threads);

  const unsigned threads_;
  Time begin_ = 0, now_ = 0;
  Time span_begin_ = 0, span_end_ = 0;  // the block has taken these moments for itself,
  std::vector<Span> earlier_;           // and before them these

  // As long as whole warps and whole blocks synchronise, all clocks of a block are the same but
  // for what the lanes of a warp know of each other: all of them are these few numbers.
  Time all_ = 0;               // what everybody knows of everybody
  std::vector<Time> of_warp_;  // what a warp's lanes know of each other
  // From any other synchronisation to the next of the whole block: what `thread` knows of `other`,
  // by thread * threads + other. Empty otherwise.
  std::vector<Time> exact_;

  // Of other blocks. By thread, and empty where no atomic has told anything.
  struct Foreign {
    Knowledge known;   // by the thread
    Knowledge heard;   // by its atomics since its last fence
    Knowledge fenced;  // what its last fence covers, of its own block, too
  };
  std::vector<Foreign> foreign_;
  Knowledge known_to_block_;  // to all threads
};

}  // namespace emulator
