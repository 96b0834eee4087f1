// SPDX-License-Identifier: MIT
#include "common/emulator/async.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "common/emulator/memory.h"

namespace emulator {
namespace {

/// A slab's row, which the copy engine copies as one.
constexpr int kRowBytes = 128;

}  // namespace

AsyncEngine::AsyncEngine(Scheduler &scheduler, Clocks &clocks, SharedMemory &shared,
                         Accesses &accesses, Mbarriers &mbarriers, Requests &requests,
                         Events &events)
    : scheduler_(scheduler),
      clocks_(clocks),
      shared_(shared),
      accesses_(accesses),
      mbarriers_(mbarriers),
      requests_(requests),
      events_(events) {}

void AsyncEngine::begin_block() {
  reads_.clear();
  readers_.assign(clocks_.warps(), 0);
  stores_.assign(scheduler_.size(), {});
  tma_agent_ = 0;
}

// --- the tensor cores' reads ---------------------------------------------------------------------

ReadNumber AsyncEngine::begin_read(std::span<const SharedBytes> bytes, unsigned warp,
                                   const Where &where) {
  AsyncRead read{
      &kWgmmaEngine, {}, warp * 32, std::min(32u, scheduler_.size() - warp * 32), site_of(where)};
  for (const SharedBytes &some : bytes) {
    const std::size_t offset = shared_.offset(some.first);
    if (offset >= shared_.bytes() || offset + some.bytes > shared_.bytes())
      scheduler_.fail({Fault::kBounds, "wgmma: an operand is not in shared memory"}, where);
    read.pieces.push_back({offset, some.bytes});
  }
  const Error error = shared_.shadow().begin_async_read(read, clocks_);
  if (!error.empty()) scheduler_.fail_in_thread(read.first_thread, error, where);
  reads_.emplace(++read_numbers_, std::move(read));
  return read_numbers_;
}

void AsyncEngine::end_read(ReadNumber number) {
  const auto found = reads_.find(number);
  end(found->second);
  reads_.erase(found);
}

/// An engine has read, and the lanes on whose word it did know.
void AsyncEngine::end(const AsyncRead &read) {
  const unsigned warp = read.first_thread / 32;
  if (!readers_[warp]) readers_[warp] = clocks_.add_agent();
  shared_.shadow().end_async_read(read, readers_[warp], clocks_.now());
  const std::uint32_t lanes = ~0u >> (32 - read.threads) << read.first_thread % 32;
  clocks_.learn_of_agent(readers_[warp], warp, lanes);
}

// --- TMA -----------------------------------------------------------------------------------------

/// Fails unless the copy engine takes this; returns where the tile is in shared memory.
std::size_t AsyncEngine::check_transfer(bool store, const TmaTransfer &transfer,
                                        const Where &where) {
  const std::string name = store ? kStoreEngine.name : kLoadEngine.name;
  const Tensor &tensor = transfer.tensor;
  const auto shape = [](int rows, int d, int bytes) {
    return std::to_string(rows) + " x " + std::to_string(d) + " of " + std::to_string(bytes) +
           " bytes";
  };
  const std::size_t offset = shared_.offset(transfer.tile);
  const auto bytes =
      static_cast<std::size_t>(transfer.tile_rows) * transfer.d * transfer.element_bytes;
  if (offset >= shared_.bytes() || offset + bytes > shared_.bytes())
    scheduler_.fail({Fault::kBounds, name + ": the tile is not in shared memory"}, where);
  if (offset % 1024)
    scheduler_.fail(
        {Fault::kMisaligned, name + ": the tile begins at byte " + std::to_string(offset) +
                                 " of shared memory, which is not a multiple of 1024"},
        where);
  if (transfer.tile_rows != tensor.tile_rows || transfer.d != tensor.tile_d ||
      transfer.element_bytes != tensor.element_bytes)
    scheduler_.fail(
        {Fault::kDescriptor,
         name + ": the tile is " + shape(transfer.tile_rows, transfer.d, transfer.element_bytes) +
             ", the map's box " + shape(tensor.tile_rows, tensor.tile_d, tensor.element_bytes)},
        where);
  if (tensor.clips_columns ? transfer.col >= tensor.d : transfer.col + transfer.d > tensor.d)
    scheduler_.fail(
        {Fault::kBounds, name + ": columns to " + std::to_string(transfer.col + transfer.d) +
                             " of a tensor that has " + std::to_string(tensor.d)},
        where);
  // The PTX ISA does not say so. Measured on an H200: a store with a negative row or head ends with an illegal
  // instruction, also if some of its rows are in the tensor. Loads may begin before a tensor, and both may end
  // behind it.
  if (store && (transfer.row < 0 || transfer.head < 0 || transfer.batch < 0))
    scheduler_.fail(
        {Fault::kBounds, name + " at row " + std::to_string(transfer.row) + " of head " +
                             std::to_string(transfer.head) + " of batch " +
                             std::to_string(transfer.batch) + ": none may be negative in a store"},
        where);
  return offset;
}

namespace {

/// Whether the tensor has this row of a tile, and where.
bool is_there(const TmaTransfer &transfer, int row) {
  const Tensor &tensor = transfer.tensor;
  return transfer.head >= 0 && transfer.head < tensor.heads && transfer.batch >= 0 &&
         transfer.batch < tensor.batch && transfer.row + row >= 0 &&
         transfer.row + row < tensor.rows;
}
std::byte *row_of(const TmaTransfer &transfer, int row) {
  const Tensor &tensor = transfer.tensor;
  return tensor.data + transfer.batch * tensor.batch_stride + transfer.head * tensor.head_stride +
         (transfer.row + row) * tensor.row_stride + transfer.col * tensor.element_bytes;
}

/// Where in the tile's memory the 16 bytes with this number of a row lie: in a slab of 8, permuted by
/// the row (PTX ISA, 'Tensor swizzling modes').
std::byte *chunk_of(const TmaTransfer &transfer, int row, int chunk) {
  return transfer.tile + chunk / 8 * (transfer.tile_rows * 128) + row * 128 +
         (chunk % 8 ^ row % 8) * 16;
}

/// How many of them the tensor has.
int chunks_there(const TmaTransfer &transfer) {
  const int columns = std::min(transfer.d, transfer.tensor.d - transfer.col);
  return columns * transfer.element_bytes / kCopyBytes;
}

std::size_t bytes_of(const TmaTransfer &transfer) {
  return static_cast<std::size_t>(transfer.tile_rows) * transfer.d * transfer.element_bytes;
}

}  // namespace

/// Checks the accesses to global memory, as the running thread's.
void AsyncEngine::access_tensor(const TmaTransfer &transfer, bool store, SiteId site,
                                const Where &where) {
  for (int row = 0; row < transfer.tile_rows; row++)
    for (int chunk = 0; is_there(transfer, row) && chunk < chunks_there(transfer); chunk++)
      accesses_.access_global({clocks_, scheduler_.running(), site, store, kCopyBytes,
                               row_of(transfer, row) + chunk * kCopyBytes},
                              where);
}

/// A load counts once, its bytes in each block where they land, as ncu counts them.
void AsyncEngine::count_load(std::size_t bytes, const Where &where, int blocks) {
  if (!settings.profile) return;
  requests_.count(site_of(where), kTmaLoads, 1);
  requests_.count(site_of(where), kTmaLoadBytes, blocks * bytes);
}

void AsyncEngine::tma_load(const TmaTransfer &transfer, const void *barrier, const Where &where) {
  check_transfer(false, transfer, where);
  count_load(bytes_of(transfer), where);
  begin_load(scheduler_.rank(), transfer, shared_.offset(barrier), where);
}

void AsyncEngine::tma_load_multicast(const TmaTransfer &transfer, const void *barrier,
                                     unsigned blocks, const Where &where) {
  check_transfer(false, transfer, where);
  if (!blocks || blocks >> scheduler_.blocks())
    scheduler_.fail({Fault::kBounds, "TMA load to the blocks " + std::to_string(blocks) +
                                         ", as bits, of a cluster that has " +
                                         std::to_string(scheduler_.blocks())},
                    where);
  count_load(bytes_of(transfer), where, std::popcount(blocks));
  if (settings.profile) {
    requests_.count(site_of(where), kMulticasts, 1);
    requests_.count(site_of(where), kMulticastBytes, bytes_of(transfer));
  }
  for (unsigned rank = 0; rank < scheduler_.blocks(); rank++)
    if (blocks >> rank & 1) begin_load(rank, transfer, shared_.offset(barrier), where);
}

/// A copy of bytes that follow each other: no tensor, no swizzle, and nothing is filled in.
void AsyncEngine::bulk_load(void *shared, const void *global, int bytes, const void *barrier,
                            const Where &where) {
  const Piece to{shared_.offset(shared), static_cast<std::size_t>(bytes)};
  const auto misaligned = [](std::size_t address) { return address % kCopyBytes != 0; };
  if (!shared_.has(to.offset, to.bytes))
    scheduler_.fail({Fault::kBounds, "bulk load: the destination is not in shared memory"}, where);
  if (misaligned(to.offset) || misaligned(reinterpret_cast<std::uintptr_t>(global)))
    scheduler_.fail(
        {Fault::kMisaligned,
         std::string("bulk load: the ") + (misaligned(to.offset) ? "destination" : "source") +
             " begins at an address that is not a multiple of " + std::to_string(kCopyBytes)},
        where);
  count_load(to.bytes, where);
  const auto *from = static_cast<const std::byte *>(global);
  std::byte *const memory = shared_.memory();
  const SiteId site = site_of(where);
  const unsigned thread = scheduler_.running();
  begin_load(
      scheduler_.rank(),
      {to, kCopyBytes,
       [=, this] {
         for (std::size_t i = 0; i < to.bytes; i += kCopyBytes)
           accesses_.access_global({clocks_, thread, site, false, kCopyBytes, from + i}, where);
       },
       [=](std::size_t first, std::size_t some) {
         std::memcpy(memory + to.offset + first, from + first, some);
       }},
      "bulk_load", shared_.offset(barrier), where);
}

/// Begins the load's part that lands in this block, at the barrier with this place there.
void AsyncEngine::begin_load(unsigned to, const TmaTransfer &transfer, std::size_t barrier,
                             const Where &where) {
  const Piece piece{shared_.offset(transfer.tile), bytes_of(transfer)};
  TmaTransfer there = transfer;
  there.tile = shared_.memory(to) + piece.offset;
  const auto copy = [there](std::size_t from, std::size_t bytes) {
    const auto rows = static_cast<std::size_t>(there.tile_rows);
    for (std::size_t line = from / kRowBytes; line < (from + bytes) / kRowBytes; line++) {
      const int row = static_cast<int>(line % rows), first = static_cast<int>(line / rows) * 8;
      for (int chunk = first; chunk < first + 8; chunk++)
        if (std::byte *place = chunk_of(there, row, chunk);
            is_there(there, row) && chunk < chunks_there(there))
          std::memcpy(place, row_of(there, row) + chunk * kCopyBytes, kCopyBytes);
        else
          std::memset(place, 0, kCopyBytes);
    }
  };
  begin_load(to,
             {piece, kRowBytes,
              [=, this] { access_tensor(transfer, false, site_of(where), where); }, copy},
             "tma_load", barrier, where);
}

void AsyncEngine::begin_load(unsigned to, const Load &load, const char *name,
                             std::size_t barrier_offset, const Where &where) {
  BarrierState &barrier = mbarriers_.usable("TMA load", to, barrier_offset, where);
  if (!mbarriers_.is_fenced(barrier) &&
      !clocks_.visible(scheduler_.running(), barrier.thread, barrier.time))
    scheduler_.fail({Fault::kFence, "TMA load: the copy engine may not see the mbarrier that " +
                                        scheduler_.name_of(barrier.thread) + " initialises at " +
                                        describe(line_of(barrier.site)) +
                                        ": no mbarrier_fence_init between them"},
                    where);
  const SliceId asked =
      events_.note(scheduler_.running(), name, static_cast<std::int64_t>(barrier_offset), where);
  if (!barrier.agent) barrier.agent = clocks_.add_agent();
  const SiteId site = site_of(where);
  const Error error = shared_.shadow(to).begin_async_write(
      load.to, {clocks_, scheduler_.running(), site, true, static_cast<int>(load.to.bytes)});
  if (!error.empty())
    scheduler_.fail(
        {error.fault,
         error.what +
             (to == scheduler_.rank() ? "" : "; the memory is that" + scheduler_.in_block(to))},
        where);
  load.check();
  const SliceId work = events_.begin_work(to, TraceSlice::kTma, name, site, load.to.bytes, asked);
  scheduler_.begin_operation(kNoQueue,
                             [=, this, &barrier] { land_load(to, load, 0, barrier, work, where); });
  scheduler_.pause();
}

/// Copies a load's bytes from this one on. If its barrier's phase ends with fewer, because it expects fewer,
/// the rest lands at another moment, as on a GPU.
void AsyncEngine::land_load(unsigned to, const Load &load, std::size_t from, BarrierState &barrier,
                            SliceId work, const Where &where) {
  std::size_t bytes = load.to.bytes - from;
  if (const std::int64_t missing = barrier.expected - barrier.landed;
      !barrier.to_come && missing > 0 && missing < static_cast<std::int64_t>(bytes) &&
      missing % static_cast<std::int64_t>(load.step) == 0) {
    bytes = static_cast<std::size_t>(missing);
    const std::size_t next = from + bytes;
    shared_.shadow(to).note_short({load.to.offset + next, load.to.bytes - next});
    scheduler_.begin_operation(
        kNoQueue, [=, this, &barrier] { land_load(to, load, next, barrier, work, where); });
  }
  load.check();  // it read until now
  load.copy(from, bytes);
  const SiteId site = site_of(where);
  shared_.shadow(to).end_async_write({load.to.offset + from, bytes}, barrier.agent,
                                     {clocks_, scheduler_.running(), site, true, 0});
  events_.end_work(work);
  mbarriers_.land(barrier, to, bytes, site, work);
}

/// Begins a store or a reduction, whose accesses are right: what it stores is the engine's until its thread
/// has waited for all of it.
void AsyncEngine::begin_store(Store store, const char *name, std::function<void()> land,
                              const Where &where) {
  const Error error = shared_.shadow().begin_async_read(store.read, clocks_);
  if (!error.empty()) scheduler_.fail(error, where);
  if (!tma_agent_) tma_agent_ = clocks_.add_agent();
  const bool reduces = store.read.engine == &kReductionEngine;
  const SiteId site = store.read.site;
  store.stamp = {clocks_.next(), site, tma_agent_, reduces};
  std::size_t bytes = 0;
  for (const GlobalBytes &to : store.to) {
    Allocation &allocation = *find_allocation(to.first);
    allocation.shadow.mark_stored(static_cast<std::size_t>(to.first - allocation.memory), to.bytes,
                                  store.stamp);
    bytes += to.bytes;
  }
  if (settings.profile) {
    requests_.count(site, reduces ? kBulkReductions : kTmaStores, 1);
    requests_.count(site, reduces ? kBulkReductionBytes : kTmaStoreBytes, bytes);
  }
  store.work = events_.begin_work(scheduler_.rank(), TraceSlice::kTma, name, site, bytes,
                                  events_.slice(scheduler_.running(), name, site));
  store.operation =
      scheduler_.begin_operation(kNoQueue, [this, land = std::move(land), work = store.work] {
        land();
        events_.end_work(work);
      });
  Stores &self = stores_[scheduler_.running()];
  store.group = self.groups;
  self.not_complete.push_back(std::move(store));
  scheduler_.pause();
}

void AsyncEngine::tma_store(const TmaTransfer &transfer, const Where &where) {
  const std::size_t offset = check_transfer(true, transfer, where);
  const SiteId site = site_of(where);
  // What lies outside of the tensor is not stored, and not read.
  int first = 0, rows = 0;
  for (int row = transfer.tile_rows - 1; row >= 0; row--)
    if (is_there(transfer, row)) first = row, rows++;
  Store store{};
  store.read = {&kStoreEngine, {}, scheduler_.running(), 1, site};
  const int there = chunks_there(transfer);
  for (int slab = 0; slab < there / 8; slab++)
    store.read.pieces.push_back(
        {offset + static_cast<std::size_t>(slab * transfer.tile_rows + first) * kRowBytes,
         static_cast<std::size_t>(rows) * kRowBytes});
  for (int row = first; row < first + rows; row++)
    for (int chunk = there / 8 * 8; chunk < there; chunk++)
      store.read.pieces.push_back({shared_.offset(chunk_of(transfer, row, chunk)), kCopyBytes});
  for (int row = first; row < first + rows; row++)
    store.to.push_back(
        {row_of(transfer, row), static_cast<std::size_t>(chunks_there(transfer)) * kCopyBytes});
  access_tensor(transfer, true, site, where);
  begin_store(
      std::move(store), "tma_store",
      [=] {
        for (int row = first; row < first + rows; row++)
          for (int chunk = 0; chunk < chunks_there(transfer); chunk++)
            std::memcpy(row_of(transfer, row) + chunk * kCopyBytes, chunk_of(transfer, row, chunk),
                        kCopyBytes);
      },
      where);
}

void AsyncEngine::bulk_red_add(float *global, const float *shared, int numbers,
                               const Where &where) {
  const Piece from{shared_.offset(shared), static_cast<std::size_t>(numbers) * sizeof(float)};
  const auto misaligned = [](std::size_t address) { return address % kCopyBytes != 0; };
  if (!shared_.has(from.offset, from.bytes))
    scheduler_.fail({Fault::kBounds, "bulk reduction of what is not in shared memory"}, where);
  if (misaligned(from.offset) || misaligned(reinterpret_cast<std::uintptr_t>(global)))
    scheduler_.fail({Fault::kMisaligned,
                     std::string("bulk reduction ") + (misaligned(from.offset) ? "from" : "to") +
                         " an address that is not a multiple of " + std::to_string(kCopyBytes)},
                    where);
  const unsigned thread = scheduler_.running();
  const SiteId site = site_of(where);
  std::vector<bool> last;  // of each four
  for (int i = 0; i < numbers; i += 4) {
    Access access{clocks_, thread, site, true, kCopyBytes, global + i};
    access.reduction = true;
    last.push_back(accesses_.is_last(access));
    accesses_.check_order(access, where);
    accesses_.access_global(access, where);
  }
  Store store{};
  store.read = {&kReductionEngine, {from}, thread, 1, site};
  store.to = {{reinterpret_cast<std::byte *>(global), from.bytes}};
  begin_store(
      std::move(store), "bulk_red_add",
      [=, this] {
        for (int i = 0; i < numbers; i++) accesses_.add(global + i, shared[i], thread, last[i / 4]);
      },
      where);
}

void AsyncEngine::tma_store_commit() {
  stores_[scheduler_.running()].groups++;
  scheduler_.pause();
}

void AsyncEngine::tma_store_wait_read(int groups, const Where &where) {
  Stores &self = stores_[scheduler_.running()];
  SliceId last = 0;
  // One that is not committed has the group that comes next: no wait covers it.
  for (Store &store : self.not_complete) {
    if (store.group + groups >= self.groups) break;
    if (std::exchange(store.read_awaited, true)) continue;
    scheduler_.finish(store.operation);
    last = store.work;
    end(store.read);
  }
  events_.slice(scheduler_.running(), "tma_store_wait_read", site_of(where), 0, last);
}

void AsyncEngine::tma_store_wait(int groups, const Where &where) {
  tma_store_wait_read(groups, where);
  Stores &self = stores_[scheduler_.running()];
  auto store = self.not_complete.begin();
  for (; store != self.not_complete.end() && store->group + groups < self.groups; ++store) {
    // From now on the thread counts as having stored or added it.
    Stamp by_thread = store->stamp;
    by_thread.time = clocks_.next();
    by_thread.thread = scheduler_.running();
    for (const GlobalBytes &to : store->to)
      if (Allocation *const allocation = find_allocation(to.first))
        allocation->shadow.mark_again(static_cast<std::size_t>(to.first - allocation->memory),
                                      to.bytes, store->stamp, by_thread);
  }
  self.not_complete.erase(self.not_complete.begin(), store);
}

void AsyncEngine::report_unawaited() {
  for (const Store &store : stores_[scheduler_.running()].not_complete)
    if (const Engine &engine = *store.read.engine; !store.read_awaited) {
      scheduler_.report(
          scheduler_.running(),
          {Fault::kInUse, std::string("the thread exits, and this ") + engine.name +
                              " may still be reading shared memory: " + engine.missing},
          describe(line_of(store.read.site)));
      return;
    }
}

}  // namespace emulator
