// SPDX-License-Identifier: MIT
#include "common/emulator/counters.h"

#include <algorithm>
#include <bit>

namespace emulator {

const CounterInfo &info(Counter counter) {
  using enum Listed;
  static constexpr CounterInfo kTable[kCounters] = {
#define COUNTER(id, name, ncu, listed) {name, ncu, listed},
#include "common/emulator/counters.def"
#undef COUNTER
  };
  return kTable[counter];
}

const KindInfo &info(Kind kind) {
  static constexpr KindInfo kTable[static_cast<int>(Kind::kKinds)] = {
      {"shared loads", "shared R", true, kSharedLoadRequests, kSharedLoadWavefronts,
       kSharedLoadIdeal},
      {"shared loads", "ldmatrix", true, kSharedLoadRequests, kSharedLoadWavefronts,
       kSharedLoadIdeal},
      {"shared stores", "shared W", true, kSharedStoreRequests, kSharedStoreWavefronts,
       kSharedStoreIdeal},
      {"stmatrix", "stmatrix", true, emulator::kStmatrix, kStmatrixWavefronts, kStmatrixIdeal},
      {"cp.async", "cp.async", true, kCopyRequests, kCopyWavefronts, kCopyIdeal},
      {"global loads", "global R", false, kGlobalLoadRequests, kGlobalLoadSectors, kCounters},
      {"global stores", "global W", false, kGlobalStoreRequests, kGlobalStoreSectors, kCounters},
      {"global reductions", "global +=", false, kReductionRequests, kReductionSectors, kCounters},
  };
  return kTable[static_cast<int>(kind)];
}

std::uint64_t Profile::next_time() const {
  std::uint64_t time = 0;
  for (const TraceSlice &slice : slices) time = std::max(time, slice.end);
  return time;
}

Counts Profile::total() const {
  Counts sum{};
  for (const auto &[line, counts] : lines)
    for (int i = 0; i < kCounters; i++) sum[i] += counts[i];
  return sum;
}

namespace {

constexpr int kBanks = 32;

/// True if no active lane asks for another address than lane ^ flip does.
bool pairs_agree(const Request &request, unsigned flip) {
  for (unsigned lane = 0; lane < 32; lane++) {
    const unsigned other = lane ^ flip;
    if (!(request.active >> lane & 1) || !(request.active >> other & 1)) continue;
    if (request.address[lane] != request.address[other]) return false;
  }
  return true;
}

/// The wavefronts by banks: of all requests but a copy of data.
Wavefronts by_banks(const Request &request) {
  int groups = std::max(1, request.bytes / 4);
  if (groups > 1 && request.kind == Kind::kSharedLoad &&
      (pairs_agree(request, 1) || pairs_agree(request, 2)))
    groups /= 2;
  const int lanes = 32 / groups;

  Wavefronts result{0, 0, {}};
  int active = 0;
  for (int group = 0; group < groups; group++) {
    // The distinct words that each bank must deliver: one a wavefront.
    std::array<std::array<std::uint64_t, 32 * 4>, kBanks> words;
    std::array<int, kBanks> depth{};
    int deepest = 0;
    for (int lane = group * lanes; lane < (group + 1) * lanes; lane++) {
      if (!(request.active >> lane & 1)) continue;
      active++;
      const std::uint64_t first = request.address[lane] / 4;
      const std::uint64_t last = (request.address[lane] + request.bytes - 1) / 4;
      for (std::uint64_t word = first; word <= last; word++) {
        const int bank = static_cast<int>(word % kBanks);
        auto *begin = words[bank].data(), *end = begin + depth[bank];
        const auto *found = std::find(begin, end, word);
        if (found == end) {
          *end = word;
          depth[bank]++;
        }
        const int wavefront = static_cast<int>(found - begin);
        result.of_lane[lane] = std::max(result.of_lane[lane], result.actual + wavefront);
        deepest = std::max(deepest, depth[bank]);
      }
    }
    result.actual += deepest;
  }
  result.ideal = std::min(result.actual, (active * request.bytes + 127) / 128);
  return result;
}

/// The wavefronts by sectors of global memory: of a copy of data.
Wavefronts by_sectors(const Request &request) {
  // What a lane copies, in chunks of 16 bytes: 2 are a sector, 8 a line.
  const auto from = [&](unsigned lane) { return request.source[lane] / 16; };
  const auto to = [&](unsigned lane) { return request.address[lane] / 16; };
  const auto same = [](std::uint64_t a, std::uint64_t b, int chunks) {
    return a / chunks == b / chunks;
  };
  // The halves of a sector that belongs together: both, or one of them.
  std::array<unsigned, 32> halves{};
  for (unsigned lane = 0; lane < 32; lane++) {
    halves[lane] = 1u << from(lane) % 2;
    for (unsigned other = 0; other < 32; other++)
      if (request.active >> other & 1 && same(from(lane), from(other), 2) &&
          same(to(lane), to(other), 2) && to(lane) % 2 != to(other) % 2)
        halves[lane] |= 1u << from(other) % 2;
  }
  const auto together = [&](unsigned lane, unsigned other) {
    return halves[lane] == halves[other] && from(lane) != from(other) &&
           same(from(lane), from(other), 8) && same(to(lane), to(other), 8) &&
           same(from(lane), from(other), 2) == same(to(lane), to(other), 2) &&
           (from(lane) ^ to(lane)) % 4 == (from(other) ^ to(other)) % 4;
  };
  Wavefronts result{0, 0, {}};
  std::array<std::uint32_t, 32> served{};  // the lanes of each wavefront
  for (unsigned lane = 0; lane < 32; lane++) {
    if (!(request.active >> lane & 1)) continue;
    const auto fits = [&](std::uint32_t lanes) {
      for (; lanes; lanes &= lanes - 1)
        if (!together(lane, std::countr_zero(lanes))) return false;
      return true;
    };
    int wavefront = 0;
    while (!fits(served[wavefront])) wavefront++;  // an empty one at the latest
    served[wavefront] |= 1u << lane;
    result.of_lane[lane] = wavefront;
    result.actual = std::max(result.actual, wavefront + 1);
  }
  result.ideal = (std::popcount(request.active) * request.bytes + 127) / 128;
  return result;
}

/// Zeros are stored. If some lanes copy data, it follows.
Wavefronts copy_wavefronts(const Request &request) {
  Request data = request;
  for (unsigned lane = 0; lane < 32; lane++)
    if (!request.source[lane]) data.active &= ~(1u << lane);
  if (!data.active) return by_banks(request);
  Wavefronts result = by_sectors(data);
  if (data.active == request.active) return result;
  const Wavefronts zeros = by_banks(request);
  for (unsigned lane = 0; lane < 32; lane++)
    if (data.active >> lane & 1)
      result.of_lane[lane] += zeros.actual;
    else
      result.of_lane[lane] = zeros.of_lane[lane];
  result.actual += zeros.actual;
  result.ideal += zeros.ideal;
  return result;
}

}  // namespace

Wavefronts shared_wavefronts(const Request &request) {
  return request.kind == Kind::kCopy ? copy_wavefronts(request) : by_banks(request);
}

int global_sectors(const Request &request) {
  std::array<std::uint64_t, 64> sectors;
  int count = 0;
  for (int lane = 0; lane < 32; lane++) {
    if (!(request.active >> lane & 1)) continue;
    const std::uint64_t sector = request.address[lane] / 32;  // an aligned access stays in one
    if (count && sectors[count - 1] == sector) continue;
    if (std::find(sectors.begin(), sectors.begin() + count, sector) == sectors.begin() + count)
      sectors[count++] = sector;
  }
  return count;
}

}  // namespace emulator
