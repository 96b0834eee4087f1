// SPDX-License-Identifier: MIT
// What happens before what. Each thread of a block has a vector clock: for every thread, the time
// up to which it knows what that one did. An access by u at time t happens before one by v if v
// knows u beyond t. A thread always knows itself; of others it learns where they synchronise.
//
// Beside the threads there are agents, which copy or multiply on a thread's word: each knows nothing, and
// is known as far as a thread has waited for what it did. And beside each clock there is one of the
// asynchronous proxy, by which agents reach shared memory: what a thread knows to be visible there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace emulator {

/// Time passes at each synchronisation. One launch has one time: no two blocks share a moment of it.
using Time = std::uint64_t;

/// Stamps keep this many bits of it. A launch that lasted longer ends with an error.
constexpr int kTimeBits = 36;

/// Agents are numbered after the threads that a block may have, as bits of a stamp allow.
constexpr unsigned kFirstAgent = 1024;
constexpr int kActorBits = 11;

/// The same within a block: since its beginning, so that what every thread knows of every other is small, and is
/// compared four at a time. 0 is before it.
using Moment = std::int32_t;

/// What threads of other blocks did from `begin` to before `end`: all of a block's, those of a warp (kWarp + its number),
/// or one.
struct Known {
  static constexpr unsigned kAll = ~0u, kWarp = 1u << 31;
  Time begin, end;
  unsigned thread;
};
using Knowledge = std::vector<Known>;

/// What some threads and agents have told to whoever asks: all that they knew and did.
struct Told {
  std::vector<Moment> known, visible;  // by column: of the threads, then of the agents
  Knowledge foreign;
};

/// Begins the time of a launch.
void begin_time();

/// The clocks of the threads of one block, or of the blocks of a cluster, to which all that is said of a
/// block here applies.
class Clocks {
 public:
  explicit Clocks(unsigned threads);

  /// The threads of a block begin, and know nothing of each other.
  void begin_block();

  unsigned warps() const { return static_cast<unsigned>(of_warp_.size()); }

  /// When an access is made now.
  Time now() const { return now_; }

  /// A moment after all accesses so far.
  Time next() {
    advance();
    return now_;
  }

  /// True if `thread` knows what `other`, a thread or an agent, did at `time`, both of this block.
  bool knows(unsigned thread, unsigned other, Time time) const {
    if (time < all_ || thread == other) return true;
    if (!exact_.empty()) return moment(time) < row(thread)[column(other)];
    return thread / 32 == other / 32 && time < of_warp_[thread / 32];
  }

  /// True if what `other` stored at `time` is visible to what agents do on the thread's word: a proxy
  /// fence lies between the two.
  bool visible(unsigned thread, unsigned other, Time time) const {
    return time < begin_ ||
           (!exact_.empty() && moment(time) < row(thread)[capacity_ + column(other)]);
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
    return exact_.empty() ? std::max(all_, of_warp_[thread / 32]) : least(thread, thread / 32);
  }

  /// True if `thread` knows what `other` did at `time`, of another block. (PTX ISA, 'Memory
  /// Consistency Model': a fence before an atomic releases, a fence after one acquires.)
  bool knows_of_block(unsigned thread, unsigned other, Time time) const;

  /// A fence: the thread's next atomics tell what it knows now, and it knows what its atomics heard.
  void fence(unsigned thread);

  /// An atomic: tells what the thread's last fence covers, and hears what others have told.
  void atomic(unsigned thread, Knowledge &told);

  /// An atomic that releases: tells what the thread did and knows now. One that acquires: the thread knows at once
  /// what others have told. Returns true if a thread knows of other blocks at all.
  void atomic_release(unsigned thread, Knowledge &told);
  void atomic_acquire(unsigned thread, const Knowledge &told);
  bool knows_of_blocks(unsigned thread) const;

  /// These lanes of a warp, or these threads, now know all that any of them knew or did.
  void join_lanes(unsigned warp, std::uint32_t lanes);
  void join(const std::vector<unsigned> &threads);

  /// Whether whole warps and whole blocks alone have synchronised since the last barrier of the block.
  bool are_of_warps() const { return exact_.empty(); }

  /// Whether threads of the block synchronise with agents, or one by one.
  bool has_agents() const { return has_agents_; }

  /// A new agent of the block; returns its number.
  unsigned add_agent();

  /// The thread tells all that it knows and did; or learns all that was told.
  void release(unsigned thread, Told &to);
  void acquire(unsigned thread, const Told &from);

  /// The thread tells what it knows of agents, and nothing of what threads did.
  void release_agents(unsigned thread, Told &to);

  /// The agent tells what it did, and nothing else; or these lanes of a warp learn of it.
  void release_agent(unsigned agent, Told &to);
  void learn_of_agent(unsigned agent, unsigned warp, std::uint32_t lanes);

  /// fence.proxy.async: what the thread did and knows of is visible to agents.
  void proxy_fence(unsigned thread);

 private:
  struct Span {
    Time begin, end;
  };
  void advance();
  Knowledge to_publish(unsigned thread) const;
  void begin_span();
  bool is_of_earlier_span(Time time) const;
  std::uint32_t unknown_exactly(unsigned thread, unsigned warp, std::uint32_t lanes,
                                Time time) const;
  void expand();
  void share(const std::vector<unsigned> &threads);
  unsigned columns() const { return threads_ + agents_; }
  unsigned column(unsigned actor) const {
    return actor < kFirstAgent ? actor : threads_ + actor - kFirstAgent;
  }
  std::size_t stride() const { return 2 * std::size_t{capacity_} + of_warp_.size(); }
  Moment *row(unsigned thread) { return exact_.data() + thread * stride(); }
  const Moment *row(unsigned thread) const { return exact_.data() + thread * stride(); }
  Moment moment(Time time) const { return static_cast<Moment>(time - begin_); }
  Time least(unsigned thread, unsigned warp) const {
    return begin_ + static_cast<Time>(row(thread)[2 * capacity_ + warp]);
  }
  void note_least(unsigned thread);
  void use_agents();

  const unsigned threads_;
  Time begin_ = 0, now_ = 0;
  Time span_begin_ = 0, span_end_ = 0;  // the block has taken these moments for itself,
  std::vector<Span> earlier_;           // and before them these

  // As long as whole warps and whole blocks synchronise, all clocks of a block are the same but
  // for what the lanes of a warp know of each other: all of them are these few numbers.
  Time all_ = 0;               // what everybody knows of everybody
  std::vector<Time> of_warp_;  // what a warp's lanes know of each other
  // From any other synchronisation to the next of the whole block, or to the block's end if there are
  // agents: a row per thread of what it knows of each column, then of what it knows to be visible
  // to agents, then the least that it knows of another lane of each warp. Empty otherwise.
  std::vector<Moment> exact_;
  unsigned agents_ = 0, capacity_;  // of columns
  bool has_agents_ = false;

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
