// SPDX-License-Identifier: MIT
#include "common/kernel/wgmma.h"

#include <algorithm>
#include <vector>

#include "common/emulator/block.h"
#include "common/emulator/sites.h"

namespace emulator {
namespace {

/// The bytes of an operand's lines, in as few pieces as they lie in.
std::vector<SharedBytes> bytes_of(const SharedOperand &operand, int begin, int end) {
  std::vector<std::size_t> chunks;
  for_each_chunk(operand, begin, end,
                 [&](int, int, std::size_t address) { chunks.push_back(address); });
  std::sort(chunks.begin(), chunks.end());
  constexpr std::size_t kBytes = 16;
  const auto *shared = static_cast<const std::byte *>(shared_memory());
  std::vector<SharedBytes> pieces;
  for (const std::size_t chunk : chunks)
    if (!pieces.empty() &&
        static_cast<const std::byte *>(pieces.back().first) + pieces.back().bytes == shared + chunk)
      pieces.back().bytes += kBytes;
    else
      pieces.push_back({shared + chunk, kBytes});
  return pieces;
}

struct WgmmaLane {
  ProductLane product;
  Where where;
};

void start(void **lanes) {
  Block &block = *Block::current;
  const unsigned warpgroup = thread_number() / kLanesOfGroup;
  const auto *shared = static_cast<const std::byte *>(shared_memory());
  const auto &first = *static_cast<const WgmmaLane *>(lanes[0]);
  std::array<const ProductLane *, kLanesOfGroup> products;
  for (unsigned i = 0; i < kLanesOfGroup; i++)
    products[i] = &static_cast<const WgmmaLane *>(lanes[i])->product;
  unsigned lane = 0;
  const Error error = block.products.check(warpgroup, products, shared, block.shared.bytes(), lane);
  if (!error.empty())
    block.scheduler.fail_in_thread(warpgroup * kLanesOfGroup + lane, error, first.where);

  const std::vector<SharedBytes> bytes_of_B = bytes_of(first.product.B, 0, first.product.columns);
  std::array<ReadNumber, kWarpsOfGroup> reads;
  for (int warp = 0; warp < static_cast<int>(kWarpsOfGroup); warp++) {
    std::vector<SharedBytes> bytes = bytes_of_B;
    if (!first.product.a)
      for (const SharedBytes &piece : bytes_of(first.product.A, 16 * warp, 16 * warp + 16))
        bytes.push_back(piece);
    reads[warp] = begin_async_read(bytes, warpgroup * kWarpsOfGroup + warp, first.where);
  }
  // Shared memory gives the warpgroup its operands once, 128 bytes in a wavefront: 32 bytes in each of A's
  // 64 rows, if these are there, and of B's. (The H200's count; no swizzle that is
  // described as it is has conflicts.)
  const int wavefronts = ((first.product.a ? 0 : 64) + first.product.columns) * 32 / 128;
  if (settings.profile) block.requests.count(site_of(first.where), kWgmmaWavefronts, wavefronts);
  SliceId asked = 0;
  for (unsigned warp = 0; warp < kWarpsOfGroup; warp++)
    asked = block.events.note(
        warpgroup * kLanesOfGroup + 32 * warp,
        first.product.a ? "wgmma with A in registers" : "wgmma with A in shared memory", -1,
        first.where);
  Product &product = block.products.start(warpgroup, products, first.where);
  product.reads = reads;
  product.work = block.events.begin_work(block.scheduler.rank(), TraceSlice::kTensorCores, "wgmma",
                                         site_of(first.where), 0, asked);
  product.operation = begin_operation(warpgroup, [&block, &product, shared] {
    land(product, shared);
    block.events.end_work(product.work);
  });
}

struct WaitLane {
  int groups;
  const std::array<AccumulatorState *, 4> *named;
  const Where *where;
};

void wait(void **lanes) {
  const unsigned warp = thread_number() / 32;
  const auto &first = *static_cast<const WaitLane *>(lanes[0]);
  SliceId last = 0;  // product
  while (Product *product = Block::current->products.end_one(warp, first.groups)) {
    finish(product->operation);
    last = product->work;
    end_async_read(product->reads[warp % kWarpsOfGroup]);
    for (unsigned i = 0; i < 32; i++) {
      const Product::Lane &lane = product->lanes[warp % kWarpsOfGroup * 32 + i];
      lane.accumulator->under_way--;
      if (lane.a && !std::equal(lane.a_at_start.begin(), lane.a_at_start.end(), lane.a))
        fail_in_lane(
            i,
            {Fault::kInUse, "the registers of A that the wgmma at " + describe(product->where) +
                                " reads were written, or are gone, before this wait for it"},
            *first.where);
    }
  }
  for (unsigned i = 0; i < 32; i++)
    for (AccumulatorState *named : *static_cast<const WaitLane *>(lanes[i])->named) {
      if (!named) continue;
      named->unnamed = false;
      if (named->under_way)
        fail_in_lane(
            i,
            {Fault::kInFlight,
             "wgmma_wait names accumulators that are still under way after a wait for all but " +
                 std::to_string(first.groups) + " groups: the wgmma at " +
                 describe(named->product) + " may still be writing them"},
            *first.where);
    }
  Block::current->events.note(warp * 32, "wgmma_wait", first.groups, *first.where, last);
}

}  // namespace

void touch(AccumulatorState &accumulator, int i, int size, const Where &where) {
  if (i < 0 || i >= size)
    fail({Fault::kBounds,
          "accumulator " + std::to_string(i) + ", and a thread has " + std::to_string(size)},
         where);
  if (accumulator.under_way)
    fail({Fault::kInFlight, "accumulators are touched that the wgmma at " +
                                describe(accumulator.product) +
                                " may still be writing: no wgmma_wait for its group yet"},
         where);
  if (accumulator.unnamed)
    fail({Fault::kInFlight,
          "accumulators are touched that no wgmma_wait has named since the wgmma at " +
              describe(accumulator.product) + ": the compiler may read them before the wait"},
         where);
  accumulator.touched = Block::current->products.fences(thread_number() / 32) + 1;
  accumulator.touch = where;
}

void end_accumulator(const AccumulatorState &accumulator) {
  if (accumulator.under_way)
    fail({Fault::kInFlight,
          "the accumulators of this wgmma have gone out of scope, and no wgmma_wait for its group "
          "yet"},
         accumulator.product);
}

void start_product(const ProductLane &product, const Where &where) {
  static constexpr Collective kCollective{"wgmma", kWgmma, true, false, start};
  WgmmaLane lane{product, where};
  warpgroup_collective(kCollective, where, &lane);
}

void fence_products(const Where &where) {
  static constexpr Collective kCollective{"wgmma_fence", kWgmmaSyncs, true, false, [](void **) {
                                            Block::current->products.fence(thread_number() / 32);
                                          }};
  collective(kCollective, 0xffffffff, where, nullptr);
}

void commit_products(const Where &where) {
  static constexpr Collective kCollective{
      "wgmma_commit", kWgmmaSyncs, true, false, [](void **lanes) {
        const unsigned warp = thread_number() / 32;
        Block::current->products.commit(warp);
        Block::current->events.note(warp * 32, "wgmma_commit", -1,
                                    *static_cast<const Where *>(lanes[0]));
      }};
  Where lane = where;
  collective(kCollective, 0xffffffff, where, &lane);
}

void wait_for_products(int groups, const std::array<AccumulatorState *, 4> &named,
                       const Where &where) {
  static constexpr Collective kCollective{"wgmma_wait", kWgmmaSyncs, true, false, wait};
  WaitLane lane{groups, &named, &where};
  collective(kCollective, 0xffffffff, where, &lane);
}

}  // namespace emulator
