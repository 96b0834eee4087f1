// SPDX-License-Identifier: MIT
// What engines do with shared memory on a thread's word: the tensor cores' reads, and TMA's loads and stores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "common/emulator/accesses.h"
#include "common/emulator/clocks.h"
#include "common/emulator/events.h"
#include "common/emulator/mbarriers.h"
#include "common/emulator/requests.h"
#include "common/emulator/runtime.h"
#include "common/emulator/scheduler.h"
#include "common/emulator/shared.h"

namespace emulator {

class AsyncEngine {
 public:
  AsyncEngine(Scheduler &scheduler, Clocks &clocks, SharedMemory &shared, Accesses &accesses,
              Mbarriers &mbarriers, Requests &requests, Events &events);

  void begin_block();

  /// See runtime.h.
  ReadNumber begin_read(std::span<const SharedBytes> bytes, unsigned warp, const Where &where);
  void end_read(ReadNumber number);
  void tma_load(const TmaTransfer &transfer, const void *barrier, const Where &where);
  void tma_load_multicast(const TmaTransfer &transfer, const void *barrier, unsigned blocks,
                          const Where &where);
  void bulk_load(void *shared, const void *global, int bytes, const void *barrier,
                 const Where &where);
  void tma_store(const TmaTransfer &transfer, const Where &where);
  void bulk_red_add(float *global, const float *shared, int numbers, const Where &where);
  void tma_store_commit();
  void tma_store_wait_read(int groups, const Where &where);
  void tma_store_wait(int groups, const Where &where);

  /// Reports a store of the running thread that it has not waited for: it exits.
  void report_unawaited();

 private:
  struct GlobalBytes {
    std::byte *first;
    std::size_t bytes;
  };
  struct Store {  // or a reduction
    Operation operation;
    AsyncRead read;
    std::uint64_t group;  // of its thread's
    SliceId work;
    std::vector<GlobalBytes> to;
    Stamp stamp;  // of these bytes, by the engine, until its thread knows that they are stored
    bool read_awaited;  // the thread knows that shared memory has been read
  };
  struct Stores {                     // of a thread
    std::vector<Store> not_complete;  // as far as the thread knows; the oldest first
    std::uint64_t groups = 0;         // committed so far
  };

  struct Load {  // of the copy engine, to the shared memory of a block
    Piece to;
    std::size_t step;                                    // it lands in multiples of so many bytes
    std::function<void()> check;                         // its accesses to global memory
    std::function<void(std::size_t, std::size_t)> copy;  // so many bytes from the first on
  };

  void end(const AsyncRead &read);
  std::size_t check_transfer(bool store, const TmaTransfer &transfer, const Where &where);
  void access_tensor(const TmaTransfer &transfer, bool store, SiteId site, const Where &where);
  void begin_store(Store store, const char *name, std::function<void()> land, const Where &where);
  void count_load(std::size_t bytes, const Where &where, int blocks = 1);
  void begin_load(unsigned to, const TmaTransfer &transfer, std::size_t barrier,
                  const Where &where);
  void begin_load(unsigned to, const Load &load, const char *name, std::size_t barrier,
                  const Where &where);
  void land_load(unsigned to, const Load &load, std::size_t from, BarrierState &barrier,
                 SliceId work, const Where &where);

  Scheduler &scheduler_;
  Clocks &clocks_;
  SharedMemory &shared_;
  Accesses &accesses_;
  Mbarriers &mbarriers_;
  Requests &requests_;
  Events &events_;
  std::map<ReadNumber, AsyncRead> reads_;  // under way
  ReadNumber read_numbers_ = 0;
  std::vector<unsigned> readers_;  // by warp: the agent that reads for it, 0 if none has
  std::vector<Stores> stores_;     // by thread
  unsigned tma_agent_ = 0;         // of all stores; 0: there were none
};

}  // namespace emulator
