// SPDX-License-Identifier: MIT
#include "common/emulator/registers.h"

#include <algorithm>
#include <utility>

namespace emulator {
namespace {

/// The registers of each thread of a kernel that is to have so many threads on a multiprocessor, whose
/// file has 65536: a multiple of 8, of 255 that a thread may name.
int launch_registers(unsigned threads) {
  return std::min(248, static_cast<int>(65536 / threads / 8 * 8));
}

}  // namespace

RegisterFile::RegisterFile(Scheduler &scheduler, Meetings &meetings)
    : scheduler_(scheduler), meetings_(meetings), blocks_(scheduler.blocks()) {}

void RegisterFile::begin_block() {
  const unsigned threads = scheduler_.block_size();
  for (Cta &block : blocks_) {
    block.warpgroups.assign((threads + kWarpgroup - 1) / kWarpgroup,
                            {launch_registers(threads), 0});
    block.free = 0;
  }
}

RegisterFile::Warpgroup &RegisterFile::warpgroup_of(unsigned thread) {
  return blocks_[scheduler_.rank_of(thread)]
      .warpgroups[thread % scheduler_.block_size() / kWarpgroup];
}

void RegisterFile::set(int registers, bool more, const Where &where) {
  struct Lane {
    RegisterFile *file;
    int registers;
  };
  static constexpr auto compute = [](void **lanes) {
    const Lane &lane = *static_cast<Lane *>(lanes[0]);
    lane.file->change(lane.registers);
  };
  static constexpr Collective kMore{"setmaxnreg_inc", kCounters, true, false, compute},
      kLess{"setmaxnreg_dec", kCounters, true, false, compute};
  const Collective &what = more ? kMore : kLess;
  const std::string name = std::string(what.name) + "<" + std::to_string(registers) + ">";
  const auto fail = [&](const std::string &why) {
    scheduler_.fail({Fault::kRegisters, name + ": " + why}, where);
  };
  if (registers % 8 || registers < 24 || registers > 256)
    fail("a multiple of 8 from 24 to 256 is allowed");
  Warpgroup &group = warpgroup_of(scheduler_.running());
  if (more && registers < group.now) share(registers);
  if (more ? registers < group.now : registers > group.now)
    fail("the threads have " + std::to_string(group.now) + " registers each");
  const Cta &block = blocks_[scheduler_.rank()];
  int all = 0, least = 0;
  for (const Warpgroup &of_group : block.warpgroups) {
    all += of_group.now;
    least += std::min(of_group.now, 24);
  }
  all += block.free / static_cast<int>(kWarpgroup);
  if (registers + least - 24 > all)
    fail("the block's warpgroups have " + std::to_string(all) + " together, and keep 24 each");
  Lane lane{this, registers};
  meetings_.warpgroup_collective(what, where, &lane);
  while (group.wanted) {
    scheduler_.wait(*this, what.name, where);
    Fiber::yield();
  }
}

/// The running thread's warpgroup asks for more than it has, and for less than a block has that is alone
/// on its multiprocessor: then so many share it (the launch bounds say so to nvcc, not to the emulator)
/// that it has less.
void RegisterFile::share(int wanted) {
  const unsigned threads = scheduler_.block_size();
  int blocks = 1;
  while (blocks * threads <= 2048 && launch_registers(blocks * threads) > wanted) blocks++;
  const int each = launch_registers(blocks * threads), before = launch_registers(threads);
  if (blocks * threads > 2048 || warpgroup_of(scheduler_.running()).now != before) return;
  Cta &block = blocks_[scheduler_.rank()];
  for (Warpgroup &group : block.warpgroups)
    if (group.now == before)
      group.now = each;
    else  // it gave back less
      block.free -= (before - each) * static_cast<int>(kWarpgroup);
}

/// The running thread's warpgroup has come to setmaxnreg. Whoever waits for registers gets them once
/// there are enough, the first warpgroup first.
void RegisterFile::change(int registers) {
  warpgroup_of(scheduler_.running()).wanted = registers;
  Cta &block = blocks_[scheduler_.rank()];
  for (bool changed = true; std::exchange(changed, false);)
    for (unsigned i = 0; i < block.warpgroups.size(); i++) {
      Warpgroup &group = block.warpgroups[i];
      const int more = (group.wanted - group.now) * static_cast<int>(kWarpgroup);
      if (!group.wanted || more > block.free) continue;
      block.free -= more;
      group = {group.wanted, 0};
      changed = true;
      const unsigned first = scheduler_.rank() * scheduler_.block_size() + i * kWarpgroup;
      for (unsigned thread = first; thread < first + kWarpgroup; thread++)
        if (scheduler_.waits(thread, *this)) scheduler_.make_ready(thread);
    }
}

std::string RegisterFile::describe_wait(unsigned thread) const {
  const Cta &block = blocks_[scheduler_.rank_of(thread)];
  const Warpgroup &group = block.warpgroups[thread % scheduler_.block_size() / kWarpgroup];
  return ": it needs " + std::to_string((group.wanted - group.now) * 128) +
         " registers, and the pool has " + std::to_string(block.free);
}

}  // namespace emulator
