#include "common/emulator/counters.h"

#include <algorithm>

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
  };
  return kTable[static_cast<int>(kind)];
}

Counts Profile::total() const {
  Counts sum{};
  for (const auto &[line, counts] : lines)
    for (int i = 0; i < kCounters; i++) sum[i] += counts[i];
  return sum;
}

namespace {

constexpr int kBanks = 32;

/// True if every active lane shares its address with lane ^ flip.
bool pairs_agree(const Request &request, unsigned flip) {
  for (unsigned lane = 0; lane < 32; lane++) {
    if (!(request.active >> lane & 1)) continue;
    const unsigned other = lane ^ flip;
    if (!(request.active >> other & 1)) return false;
    if (request.address[lane] != request.address[other]) return false;
  }
  return true;
}

}  // namespace

Wavefronts shared_wavefronts(const Request &request) {
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
