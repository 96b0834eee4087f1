// SPDX-License-Identifier: MIT
#include "common/emulator/meetings.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "common/emulator/sites.h"

namespace emulator {
namespace {

std::string hex(std::uint32_t mask) {
  char buffer[11];
  std::snprintf(buffer, sizeof buffer, "0x%08x", mask);
  return buffer;
}

}  // namespace

Meetings::Meetings(Scheduler &scheduler, Clocks &clocks, Requests &requests, Events &events)
    : scheduler_(scheduler),
      clocks_(clocks),
      requests_(requests),
      events_(events),
      lanes_(scheduler.size()),
      warps_(clocks.warps()),
      blocks_(scheduler.blocks()) {}

void Meetings::begin_block() {
  std::fill(warps_.begin(), warps_.end(), Warp{});
  for (unsigned i = 0; i < scheduler_.size(); i++) warps_[i / 32].lanes |= 1u << i % 32;
  for (Warp &warp : warps_) warp.live = warp.lanes;
  std::fill(blocks_.begin(), blocks_.end(), Cta{scheduler_.block_size()});
  live_ = scheduler_.size();
  in_cluster_barrier_ = 0;
}

void Meetings::exit_thread() {
  Warp &warp = this->warp();
  scheduler_.exit_thread();
  warp.live &= ~lane_bit();
  live_--;
  Cta &block = blocks_[scheduler_.rank()];
  block.live--;
  const unsigned warp_index = scheduler_.running() / 32;
  for (unsigned lane = 0; lane < 32; lane++)
    if (warp.waiting >> lane & 1) {
      const unsigned thread = warp_index * 32 + lane;
      const Lane &other = lanes_[thread];
      scheduler_.act_as(thread);  // the thread to name if something is wrong
      meet(*other.collective, warp_index, other.members);
    }
  if (!warp.live) requests_.flush(warp_index);
  if (block.live && block.in_barrier == block.live) end_block_barrier();
  if (live_ && in_cluster_barrier_ == live_) end_cluster_barrier();
}

// --- collectives ---------------------------------------------------------------------------------

void Meetings::collective(const Collective &what, std::uint32_t members, const Where &where,
                          void *lane) {
  const unsigned thread = scheduler_.running(), warp = thread / 32;
  if (!(members & lane_bit()))
    scheduler_.fail({Fault::kDivergence,
                     std::string(what.name) + ": the mask does not name the lane that executes it"},
                    where);
  if (what.aligned && scheduler_.size() - warp * 32 < 32)
    scheduler_.fail(
        {Fault::kDivergence, std::string(what.name) +
                                 ": takes all 32 lanes, and the block's last warp has " +
                                 std::to_string(scheduler_.size() % 32)},
        where);
  scheduler_.wait(*this, what.name, where);
  lanes_[thread] = {&what, members, lane};
  warps_[warp].waiting |= lane_bit();
  meet(what, warp, members);
  Fiber::yield();
}

/// If all lanes that the running one waits for have come to their collective, does it and lets
/// them go on.
void Meetings::meet(const Collective &what, unsigned warp_index, std::uint32_t members) {
  Warp &warp = warps_[warp_index];
  const std::uint32_t lanes = what.aligned ? members : members & warp.live;
  if (lanes & ~warp.waiting) return;
  void *operands[32] = {};
  for (unsigned lane = 0; lane < 32; lane++)
    if (lanes >> lane & 1) {
      const Lane &other = lanes_[warp_index * 32 + lane];
      if (other.members != members) return;  // it meets others first
      operands[lane] = other.operands;
    }
  check_same(what, warp_index, lanes);

  what.compute(operands);
  if (what.orders) clocks_.join_lanes(warp_index, lanes);
  if (settings.profile) {
    if (lanes == warp.lanes)  // not `live`: that others exited before is the schedule's doing
      requests_.flush(warp_index);
    else
      requests_.meet(warp_index, lanes, site_of(scheduler_.where(scheduler_.running())));
    if (what.counter != kCounters) count_each_place(warp_index, lanes, what.counter);
    if (what.counter == kMma) trace_product(warp_index * 32);
  }
  warp.waiting &= ~lanes;
  for (unsigned lane = 0; lane < 32; lane++)
    if (lanes >> lane & 1) scheduler_.make_ready(warp_index * 32 + lane);
}

/// These threads have met. The running one was the last to come, unless another's exit has ended the barrier.
void Meetings::trace_barrier(const std::vector<unsigned> &threads) {
  const auto trace = [&](unsigned thread, SliceId cause) {
    return events_.slice(thread, scheduler_.instruction(thread), site_of(scheduler_.where(thread)),
                         0, cause);
  };
  const unsigned last = scheduler_.running();
  const bool arrives = std::binary_search(threads.begin(), threads.end(), last);
  const SliceId arrival = arrives ? trace(last, 0) : 0;
  for (const unsigned thread : threads)
    if (thread != last) trace(thread, arrival);
}

/// The lanes of a warp have multiplied, at once.
void Meetings::trace_product(unsigned thread) {
  const SiteId site = site_of(scheduler_.where(thread));
  const SliceId asked = events_.slice(thread, "mma", site);
  events_.end_work(
      events_.begin_work(scheduler_.rank(), TraceSlice::kTensorCores, "mma", site, 0, asked));
}

/// Fails unless these lanes wait in one instruction.
void Meetings::check_same(const Collective &what, unsigned warp, std::uint32_t lanes) {
  const Where &where = scheduler_.where(scheduler_.running());
  for (unsigned lane = 0; lane < 32; lane++) {
    if (!(lanes >> lane & 1)) continue;
    const unsigned thread = warp * 32 + lane;
    const char *const instruction = scheduler_.instruction(thread);
    if ((instruction == what.name || std::strcmp(instruction, what.name) == 0) &&
        (!what.aligned || same_place(scheduler_.where(thread), where)))
      continue;
    scheduler_.fail({Fault::kDivergence,
                     std::string("lanes of one warp wait in different instructions: ") + what.name +
                         " here, " + instruction + " at " + describe(scheduler_.where(thread)) +
                         " in lane " + std::to_string(lane)},
                    where);
  }
}

void Meetings::warpgroup_collective(const Collective &what, const Where &where, void *lane) {
  const unsigned running = scheduler_.running(), first = running / kWarpgroup * kWarpgroup;
  const unsigned end = first + kWarpgroup;
  if (scheduler_.size() - first < kWarpgroup)
    scheduler_.fail(
        {Fault::kDivergence, std::string(what.name) +
                                 ": takes a warpgroup of 128 threads, and the block's last has " +
                                 std::to_string(scheduler_.size() - first)},
        where);
  scheduler_.wait(*this, what.name, where);
  lanes_[running] = {&what, 0, lane};
  warp().in_warpgroup |= lane_bit();
  void *operands[kWarpgroup];
  for (unsigned i = 0; i < kWarpgroup; i++) {
    const unsigned thread = first + i;
    if (scheduler_.has_exited(thread))
      scheduler_.fail({Fault::kDivergence, std::string(what.name) +
                                               ": takes all 128 threads of the warpgroup, and " +
                                               scheduler_.name_of(thread) + " has exited"},
                      where);
    if (!(warps_[thread / 32].in_warpgroup >> thread % 32 & 1)) return Fiber::yield();
    operands[i] = lanes_[thread].operands;
  }
  for (unsigned thread = first; thread < end; thread++)
    if (lanes_[thread].collective != &what || !same_place(scheduler_.where(thread), where))
      scheduler_.fail(
          {Fault::kDivergence,
           std::string("warps of one warpgroup are at different instructions: ") + what.name +
               " here, " + scheduler_.instruction(thread) + " at " +
               describe(scheduler_.where(thread)) + " in " + scheduler_.name_of_warp(thread / 32)},
          where);
  what.compute(operands);
  for (unsigned warp = first / 32; warp < end / 32; warp++) {
    warps_[warp].in_warpgroup = 0;
    if (!settings.profile) continue;
    requests_.flush(warp);
    if (what.counter == kCounters) continue;
    requests_.count(site_of(where), what.counter, 1);
    count_mma(what.counter);
  }
  for (unsigned thread = first; thread < end; thread++) scheduler_.make_ready(thread);
  Fiber::yield();
}

// --- barriers ------------------------------------------------------------------------------------

void Meetings::block_barrier(const Where &where) {
  scheduler_.wait(*this, "__syncthreads", where);
  events_.begin_wait();
  warp().in_block |= lane_bit();
  Cta &block = blocks_[scheduler_.rank()];
  if (++block.in_barrier == block.live) end_block_barrier();
  Fiber::yield();
}

/// All threads of the block that have not exited wait at the barrier: they go on.
void Meetings::end_block_barrier() {
  blocks_[scheduler_.rank()].in_barrier = 0;
  end_barrier(&Warp::in_block, scheduler_.rank() * scheduler_.block_size(), scheduler_.block_size(),
              kBlockBarriers);
}

void Meetings::cluster_barrier(const Where &where) {
  scheduler_.wait(*this, "cluster_sync", where);
  events_.begin_wait();
  warp().in_cluster |= lane_bit();
  if (++in_cluster_barrier_ == live_) end_cluster_barrier();
  Fiber::yield();
}

void Meetings::end_cluster_barrier() {
  in_cluster_barrier_ = 0;
  end_barrier(&Warp::in_cluster, 0, scheduler_.size(), kClusterBarriers);
}

/// Of so many threads from the first on, those that wait at the barrier have met.
void Meetings::end_barrier(std::uint32_t Warp::*in, unsigned first, unsigned count,
                           Counter counter) {
  std::vector<unsigned> threads;
  for (unsigned i = first; i < first + count; i++)
    if (warps_[i / 32].*in >> i % 32 & 1) threads.push_back(i);
  clocks_.join(threads);
  for (unsigned warp = first / 32; warp * 32 < first + count; warp++) {
    warps_[warp].*in = 0;
    if (!settings.profile) continue;
    requests_.flush(warp);
    count_each_place(warp, warps_[warp].live, counter);
  }
  if (settings.trace) trace_barrier(threads);
  for (const unsigned thread : threads) scheduler_.make_ready(thread);
}

// --- counts --------------------------------------------------------------------------------------

void Meetings::count_mma(Counter counter) {
  if (counter == kMma || counter == kWgmma) blocks_[scheduler_.rank()].mma++;
}

/// Counts an instruction that these lanes execute: once for each place of the source where they do.
void Meetings::count_each_place(unsigned warp, std::uint32_t lanes, Counter counter) {
  count_mma(counter);
  while (lanes) {
    const Where &where = scheduler_.where(warp * 32 + std::countr_zero(lanes));
    requests_.count(site_of(where), counter, 1);
    for (unsigned lane = 0; lane < 32; lane++)
      if (lanes >> lane & 1 && same_place(scheduler_.where(warp * 32 + lane), where))
        lanes &= ~(1u << lane);
  }
}

/// Of a lane that waits for one that waits for others than it does: what to say; else "".
std::string Meetings::blame(unsigned thread) const {
  const unsigned first = thread / 32 * 32;
  const std::uint32_t waiting = warps_[thread / 32].waiting;
  if (!(waiting >> thread % 32 & 1)) return "";
  const Lane &self = lanes_[thread];
  for (unsigned lane = 0; lane < 32; lane++)
    if (self.members & waiting & 1u << lane)
      if (const Lane &other = lanes_[first + lane]; other.members != self.members)
        return "; lane " + std::to_string(thread - first) + "'s mask is " + hex(self.members) +
               ", that of lane " + std::to_string(lane) + ", which it names, " + hex(other.members);
  return "";
}

}  // namespace emulator
