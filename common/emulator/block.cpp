// SPDX-License-Identifier: MIT
#include "common/emulator/block.h"

namespace emulator {

thread_local constinit Block *Block::current = nullptr;

Block::Block(Dim3 grid, Dim3 dim, std::size_t shared_bytes, const std::function<void()> &thread,
             const LaunchAttributes &attributes)
    : scheduler(grid, dim, attributes.cluster,
                [this, &thread] {
                  thread();
                  exit_thread();
                }),
      clocks(scheduler.size()),
      requests(clocks.warps()),
      events(scheduler, clocks),
      shared(scheduler, shared_bytes, clocks.warps()),
      meetings(scheduler, clocks, requests, events),
      accesses(scheduler, clocks, shared, requests, events, attributes.beside),
      named_barriers(scheduler, clocks, events),
      mbarriers(scheduler, clocks, shared, events),
      registers(scheduler, meetings),
      async(scheduler, clocks, shared, accesses, mbarriers, requests, events),
      products(clocks.warps()) {}

void Block::run(std::uint64_t number) {
  scheduler.begin_block(number);
  clocks.begin_block();
  requests.begin_block(number);
  events.begin_block(number);
  shared.begin_block();
  meetings.begin_block();
  accesses.begin_block(number);
  named_barriers.begin_block();
  mbarriers.begin_block();
  registers.begin_block();
  async.begin_block();
  products.reset();
  current = this;
  scheduler.run();
  if (scheduler.is_well()) mbarriers.report_at_end();
  current = nullptr;
  scheduler.throw_error();
}

/// The running thread is done: nobody else can wait for its copies and stores.
void Block::exit_thread() {
  accesses.report_unawaited();
  if (scheduler.is_well()) async.report_unawaited();
  if (scheduler.is_well()) meetings.exit_thread();
}

std::string name_of_thread(unsigned thread, bool of_these_blocks) {
  return Block::current->scheduler.name_of(thread, of_these_blocks);
}

std::string name_of_warp(unsigned warp) {
  return Block::current->scheduler.name_of_warp(warp);
}

}  // namespace emulator
