// SPDX-License-Identifier: MIT
// What the emulator counts: the rules of one request against cases worked out by hand and against
// measurements, then whole small kernels, line by line.
#include "common/emulator/counters.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "common/emulator/testing.h"
#include "common/kernel/ptx.h"

namespace {

using emulator::Kind;
using emulator::Line;
using emulator::Profile;
using emulator::Request;
using emulator::Wavefronts;

constexpr std::uint32_t kAll = 0xffffffff;

/// A request in which lane i asks for the address that `address` returns for it.
template <class Address>
Request request(Kind kind, int bytes, std::uint32_t active, Address address) {
  Request result{kind, bytes, active, {}, {}};
  for (int lane = 0; lane < 32; lane++)
    result.address[lane] = active >> lane & 1 ? static_cast<std::uint64_t>(address(lane)) : 0;
  return result;
}

/// The wavefronts of a load or store, and the ideal number.
struct Cost {
  int actual, ideal;
  bool operator==(const Cost &) const = default;
};

std::ostream &operator<<(std::ostream &stream, const Cost &cost) {
  return stream << cost.actual << ", ideal " << cost.ideal;
}

template <class Address>
Cost cost(Kind kind, std::uint32_t active, int bytes, Address address) {
  const Wavefronts wavefronts = emulator::shared_wavefronts(request(kind, bytes, active, address));
  return {wavefronts.actual, wavefronts.ideal};
}

template <class Address>
Cost load_cost(std::uint32_t active, int bytes, Address address) {
  return cost(Kind::kSharedLoad, active, bytes, address);
}
template <class Address>
Cost load_cost(int bytes, Address address) {
  return load_cost(kAll, bytes, address);
}

template <class Address>
Cost store_cost(std::uint32_t active, int bytes, Address address) {
  return cost(Kind::kSharedStore, active, bytes, address);
}
template <class Address>
Cost store_cost(int bytes, Address address) {
  return store_cost(kAll, bytes, address);
}

/// Of a copy to shared memory at `address` from global memory at `source`, which may be kZeros.
constexpr int kZeros = -1;
template <class Address, class Source>
Cost copy_cost(std::uint32_t active, Address address, Source source) {
  constexpr std::uint64_t kSomewhere = 1 << 20;  // a multiple of 128
  Request copy = request(Kind::kCopy, 16, active, address);
  for (int lane = 0; lane < 32; lane++)
    if (source(lane) != kZeros) copy.source[lane] = kSomewhere + source(lane);
  const Wavefronts wavefronts = emulator::shared_wavefronts(copy);
  return {wavefronts.actual, wavefronts.ideal};
}

template <class Address>
int sectors(std::uint32_t active, int bytes, Address address) {
  return emulator::global_sectors(request(Kind::kGlobalLoad, bytes, active, address));
}
template <class Address>
int sectors(int bytes, Address address) {
  return sectors(kAll, bytes, address);
}

}  // namespace

// --- shared memory: 32 banks of 4 bytes ----------------------------------------------------------

TEST_CASE("counters: 4 bytes a lane: one wavefront for each word that the fullest bank must give") {
  const auto stride = [](int words) { return [=](int lane) { return 4 * words * lane; }; };
  CHECK(load_cost(4, stride(1)) == Cost{1, 1});
  CHECK(load_cost(4, stride(0)) == Cost{1, 1});    // all lanes, one word: a broadcast
  CHECK(load_cost(4, stride(2)) == Cost{2, 1});    // 16 banks, 2 words of each
  CHECK(load_cost(4, stride(4)) == Cost{4, 1});    // 8 banks
  CHECK(load_cost(4, stride(32)) == Cost{32, 1});  // one bank: a column of a 32-wide tile
  CHECK(load_cost(4, stride(33)) == Cost{1, 1});   // the same, padded by one word
  CHECK(load_cost(4, stride(3)) == Cost{1, 1});    // odd: every bank once
  CHECK(store_cost(4, stride(1)) == Cost{1, 1});
  CHECK(store_cost(4, stride(2)) == Cost{2, 1});
  CHECK(store_cost(4, stride(32)) == Cost{32, 1});
  CHECK(store_cost(4, stride(33)) == Cost{1, 1});
}

TEST_CASE(
    "counters: two lanes at one word of a bank cost nothing, at two words one wavefront more") {
  const auto same_word = [](int lane) { return lane == 31 ? 0 : 4 * lane; };
  const auto same_bank = [](int lane) { return lane == 31 ? 128 : 4 * lane; };
  const auto three_words = [](int lane) { return lane < 3 ? 128 * lane : 4 * lane; };
  CHECK(load_cost(4, same_word) == Cost{1, 1});
  CHECK(store_cost(4, same_word) == Cost{1, 1});
  CHECK(load_cost(4, same_bank) == Cost{2, 1});
  CHECK(store_cost(4, same_bank) == Cost{2, 1});
  CHECK(load_cost(4, three_words) == Cost{3, 1});
}

TEST_CASE("counters: 2 bytes a lane: the two halves of a word are one word") {
  CHECK(load_cost(2, [](int lane) { return 2 * lane; }) == Cost{1, 1});
  CHECK(store_cost(2, [](int lane) { return 2 * lane; }) == Cost{1, 1});
  CHECK(load_cost(2, [](int lane) { return 4 * lane + 2; }) == Cost{1, 1});
  CHECK(load_cost(2, [](int lane) { return 128 * (lane / 2) + 2 * (lane % 2); }) == Cost{16, 1});
  CHECK(load_cost(2, [](int lane) { return 128 * lane; }) == Cost{32, 1});
}

TEST_CASE("counters: 8 bytes a lane: a half-warp at a time") {
  CHECK(load_cost(8, [](int lane) { return 8 * lane; }) == Cost{2, 2});
  CHECK(store_cost(8, [](int lane) { return 8 * lane; }) == Cost{2, 2});
  // Stride 16: the half-warp's 16 lanes use every second pair of banks twice.
  CHECK(load_cost(8, [](int lane) { return 16 * lane; }) == Cost{4, 2});
  // The two halves of the warp use the same banks, but never meet.
  CHECK(load_cost(8, [](int lane) { return 8 * (lane % 16) + 4096 * (lane / 16); }) == Cost{2, 2});
  // Lane 1 at the banks of lane 0: one wavefront more for the first half, none for the second.
  CHECK(load_cost(8, [](int lane) { return lane == 1 ? 128 : 8 * lane; }) == Cost{3, 2});
}

TEST_CASE("counters: 16 bytes a lane: a quarter-warp at a time") {
  CHECK(load_cost(16, [](int lane) { return 16 * lane; }) == Cost{4, 4});
  CHECK(store_cost(16, [](int lane) { return 16 * lane; }) == Cost{4, 4});
  // Rows of 128 bytes: each quarter's 8 lanes at the same 4 banks.
  CHECK(load_cost(16, [](int lane) { return 128 * lane; }) == Cost{32, 4});
  // The same with the XOR swizzle: each quarter's lanes at 8 different columns.
  CHECK(load_cost(16, [](int lane) { return 128 * lane + 16 * (lane % 8); }) == Cost{4, 4});
  // Rows of 256 bytes, two lanes a row.
  CHECK(load_cost(16, [](int lane) { return 256 * (lane / 2) + 16 * (lane % 2); }) == Cost{16, 4});
}

TEST_CASE("counters: groups of a load merge when lanes share addresses with a neighbour") {
  // Lanes i and i^1, then i and i^2: the whole warp asks for half as much.
  const auto pairs = [](int bytes) { return [=](int lane) { return bytes * (lane / 2); }; };
  const auto second = [](int bytes) {
    return [=](int lane) { return bytes * (lane / 4 * 2 + lane % 2); };
  };
  const auto fourth = [](int bytes) {  // i and i^4: too far
    return [=](int lane) { return bytes * (lane / 8 * 4 + lane % 4); };
  };
  const auto halves = [](int bytes) { return [=](int lane) { return bytes * (lane % 16); }; };
  CHECK(load_cost(8, pairs(8)) == Cost{1, 1});
  CHECK(load_cost(8, second(8)) == Cost{1, 1});
  CHECK(load_cost(8, fourth(8)) == Cost{2, 2});
  CHECK(load_cost(8, halves(8)) == Cost{2, 2});
  CHECK(load_cost(16, pairs(16)) == Cost{2, 2});
  CHECK(load_cost(16, second(16)) == Cost{2, 2});
  CHECK(load_cost(16, fourth(16)) == Cost{4, 4});
  // Both at once merge no further.
  CHECK(load_cost(16, [](int lane) { return 16 * (lane / 4); }) == Cost{2, 2});
  CHECK(load_cost(16, [](int) { return 0; }) == Cost{2, 2});
  CHECK(load_cost(8, [](int) { return 0; }) == Cost{1, 1});
  // Merged groups can conflict: 16 lanes of a merged half at 8 rows of 128 bytes.
  CHECK(load_cost(16, [](int lane) { return 128 * (lane / 2); }) == Cost{16, 4});
  // Some lanes i and i^1, the others i and i^2: not throughout the warp.
  CHECK(load_cost(8, [](int lane) {
          return lane < 16 ? 8 * (lane / 2) : 8 * (lane / 4 * 2 + lane % 2);
        }) == Cost{2, 2});
  CHECK(load_cost(8, [](int lane) { return lane == 31 ? 8 * 16 : 8 * (lane / 2); }) == Cost{2, 2});
}

TEST_CASE("counters: groups of a store never merge") {
  CHECK(store_cost(8, [](int lane) { return 8 * (lane / 2); }) == Cost{2, 2});
  CHECK(store_cost(8, [](int lane) { return 8 * (lane / 4 * 2 + lane % 2); }) == Cost{2, 2});
  CHECK(store_cost(16, [](int lane) { return 16 * (lane / 2); }) == Cost{4, 4});
  CHECK(store_cost(16, [](int) { return 0; }) == Cost{4, 4});
}

TEST_CASE("counters: ldmatrix: an 8 x 8 matrix at a time, whose rows never merge with another's") {
  const auto x4 = [](auto address) { return cost(Kind::kLdmatrix, kAll, 16, address); };
  const auto x2 = [](auto address) { return cost(Kind::kLdmatrix, 0xffff, 16, address); };
  // Rows of 128 fp16: 8 of them begin in the same bank.
  CHECK(x4([](int lane) { return 256 * (lane % 16) + 16 * (lane / 16); }) == Cost{32, 4});
  CHECK(x2([](int lane) { return 256 * lane; }) == Cost{16, 2});
  // The same, each row's 16-byte chunks swizzled by XOR with the row.
  CHECK(x4([](int lane) { return 256 * (lane % 16) + 16 * (lane / 16 ^ lane % 8); }) == Cost{4, 4});
  CHECK(x2([](int lane) { return 256 * lane + 16 * (lane % 8); }) == Cost{2, 2});
  // Padded by 16 bytes, or one after the other.
  CHECK(x4([](int lane) { return 272 * lane; }) == Cost{4, 4});
  CHECK(x4([](int lane) { return 16 * lane; }) == Cost{4, 4});
  // Rows of 32 fp16, 64 bytes: 2 of them begin 16 banks apart.
  CHECK(x4([](int lane) { return 64 * lane; }) == Cost{16, 4});
  // One row eight times is one row; the same matrix four times is still four.
  CHECK(x4([](int lane) { return 1024 * (lane / 8); }) == Cost{4, 4});
  CHECK(x4([](int) { return 512; }) == Cost{4, 4});
}

TEST_CASE("counters: cp.async stores zeros as a store of 16 bytes a lane") {
  const auto zeros = [](std::uint32_t active, auto address) {
    return cost(Kind::kCopy, active, 16, address);
  };
  CHECK(zeros(kAll, [](int lane) { return 16 * lane; }) == Cost{4, 4});
  CHECK(zeros(kAll, [](int lane) { return 256 * lane; }) == Cost{32, 4});
  CHECK(zeros(kAll, [](int) { return 64; }) == Cost{4, 4});  // never merged, unlike a load
  CHECK(zeros(0xff, [](int lane) { return 16 * lane; }) == Cost{1, 1});
}

TEST_CASE("counters: cp.async of rows of global memory costs what ncu counts on an H200") {
  // Rows of `lanes` chunks of 16 bytes, in global memory `pitch` bytes apart from chunk `first` on, in shared
  // memory one after the other, each with its chunks permuted by an XOR.
  const auto copy = [](int lanes, int pitch, int first, int swizzle = 0) {
    return copy_cost(
        kAll, [=](int lane) { return 16 * (lane ^ swizzle); },
        [=](int lane) { return 16 * first + lane / lanes * pitch + lane % lanes * 16; });
  };
  // Rows of 128 bytes that begin 0 to 7 chunks after a line does. The line has whole sectors of the row, or by an
  // odd shift first halves and second halves, and so has the next line: 8 and 0 lanes, 7 and 1, 6 and 2 ...
  const int of_shift[] = {4, 12, 8, 16, 8, 16, 8, 12};
  for (int first = 0; first < 8; first++) {
    CAPTURE(first);
    CHECK(copy(8, 1024, first) == Cost{of_shift[first], 4});
    if (first < 6) CHECK(copy(8, 128, first) == Cost{of_shift[first], 4});  // in one piece
    for (int swizzle : {1, 2, 5})
      if (first < 4) CHECK(copy(8, 1024, first, swizzle) == Cost{of_shift[first], 4});
  }
  CHECK(copy(16, 1024, 0) == Cost{4, 4});
  // Rows of 64 bytes.
  const int of_shift_4[] = {8, 16, 8, 16};
  for (int first = 0; first < 4; first++) CHECK(copy(4, 256, first) == Cost{of_shift_4[first], 4});
  // Rows of a sector each, or of two halves: step 29 at d = 80 has a pitch of 160.
  for (int pitch : {64, 128, 160, 256}) {
    CHECK(copy(2, pitch, 0) == Cost{16, 4});
    CHECK(copy(2, pitch, 1) == Cost{32, 4});
  }
  CHECK(copy(2, 32, 0) == Cost{4, 4});
  CHECK(copy(2, 32, 1) == Cost{12, 4});
  // A chunk per row: of each sector, of each line.
  CHECK(copy(1, 32, 0) == Cost{32, 4});
  CHECK(copy(1, 128, 0) == Cost{32, 4});
}

TEST_CASE("counters: cp.async of chunks in any order costs what ncu counts on an H200") {
  const auto linear = [](int lane) { return 16 * lane; };
  const auto from = [&](auto source) { return copy_cost(kAll, linear, source); };
  const auto to = [&](auto address) { return copy_cost(kAll, address, linear); };
  CHECK(from([](int) { return 0; }) == Cost{32, 4});
  CHECK(from([](int lane) { return lane / 8 * 128; }) == Cost{32, 4});
  CHECK(from([](int lane) { return lane / 8 * 128 + (7 - lane % 8) * 16; }) == Cost{4, 4});
  CHECK(from([](int lane) { return 16 * (lane ^ 1); }) == Cost{4, 4});
  CHECK(from([](int lane) { return lane % 8 * 128 + lane / 8 * 16; }) == Cost{32, 4});
  CHECK(to([](int lane) { return 128 * lane; }) == Cost{32, 4});
  CHECK(to([](int lane) { return lane / 2 * 128 + lane % 2 * 16; }) == Cost{16, 4});
  CHECK(to([](int lane) { return lane / 2 * 16 + lane % 2 * 512; }) == Cost{32, 4});
  CHECK(to([](int lane) { return lane / 2 * 32 + lane % 2 * (512 + 16); }) == Cost{8, 4});
  CHECK(to([](int lane) { return lane / 8 * 128 + lane % 8 / 2 * 16 + lane % 2 * 64; }) ==
        Cost{32, 4});
  // Lanes that take part.
  const auto some = [&](std::uint32_t active) {
    return copy_cost(active, linear, [](int lane) { return lane / 8 * 1024 + lane % 8 * 16; });
  };
  CHECK(some(0x000000ff) == Cost{1, 1});
  CHECK(some(0x0000ffff) == Cost{2, 2});
  CHECK(some(0xffffff00) == Cost{3, 3});
  CHECK(some(0x55555555) == Cost{4, 2});
  CHECK(some(0x01010101) == Cost{4, 1});
  CHECK(some(0x80000000) == Cost{1, 1});
  // At random.
  struct Measured {
    std::array<int, 32> from, to;  // in chunks of 16 bytes
    int wavefronts;
  };
  for (const auto &[chunks, slots, wavefronts] : {
           Measured{{5, 11, 12, 8,  31, 9, 11, 5,  15, 0,  16, 1,  12, 7,  13, 28,
                     6, 25, 18, 20, 30, 5, 18, 20, 11, 28, 10, 28, 29, 14, 18, 4},
                    {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31},
                    30},
           Measured{{23, 23, 9,  17, 23, 30, 0,  22, 13, 9,  9,  7, 31, 29, 22, 25,
                     1,  0,  28, 17, 8,  24, 13, 19, 15, 10, 25, 8, 30, 7,  3,  6},
                    {26, 13, 15, 10, 12, 0,  8,  5,  2, 22, 7,  31, 17, 6, 18, 14,
                     9,  20, 11, 30, 19, 28, 29, 21, 3, 27, 24, 23, 16, 4, 1,  25},
                    28},
           Measured{{15, 0,  4, 25, 15, 2,  23, 7, 26, 25, 8, 22, 9,  3,  7,  30,
                     23, 29, 4, 27, 5,  25, 19, 6, 8,  0,  2, 10, 23, 15, 15, 23},
                    {29, 16, 19, 14, 5,  8,  6, 15, 27, 25, 18, 1,  28, 26, 9,  21,
                     30, 24, 11, 10, 23, 22, 0, 7,  31, 12, 17, 20, 3,  4,  13, 2},
                    30},
           Measured{{56, 61, 13, 6,  52, 21, 6, 2,  12, 27, 21, 11, 7,  13, 8,  11,
                     12, 43, 20, 30, 36, 39, 7, 45, 4,  57, 48, 60, 18, 32, 13, 10},
                    {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31},
                    29},
           Measured{{33, 53, 20, 10, 32, 55, 61, 56, 25, 21, 39, 32, 57, 19, 25, 49,
                     14, 13, 20, 52, 43, 6,  13, 56, 59, 15, 24, 59, 9,  2,  7,  53},
                    {8, 14, 13, 27, 3,  22, 21, 23, 30, 19, 4,  20, 29, 24, 16, 6,
                     2, 5,  10, 0,  31, 25, 18, 11, 28, 7,  26, 12, 9,  1,  15, 17},
                    31},
       }) {
    CHECK(copy_cost(
              kAll, [&](int lane) { return 16 * slots[lane]; },
              [&](int lane) { return 16 * chunks[lane]; }) == Cost{wavefronts, 4});
  }
}

TEST_CASE("counters: cp.async of zeros and data writes zeros for all lanes, and then the data") {
  const auto copy = [](std::uint32_t with_data) {
    return copy_cost(
        kAll, [](int lane) { return 16 * lane; },
        [=](int lane) { return with_data >> lane & 1 ? lane / 8 * 1024 + lane % 8 * 16 : kZeros; });
  };
  CHECK(copy(0) == Cost{4, 4});
  CHECK(copy(0x000000ff) == Cost{5, 5});
  CHECK(copy(0x0000ffff) == Cost{6, 6});
  CHECK(copy(0x00ffffff) == Cost{7, 7});
  CHECK(copy(0xffffffff) == Cost{4, 4});
}

TEST_CASE("counters: lanes that take no part cost nothing and ask for nothing") {
  const auto linear = [](int bytes) { return [=](int lane) { return bytes * lane; }; };
  CHECK(load_cost(0x1, 4, [](int lane) { return 128 * lane; }) == Cost{1, 1});
  CHECK(load_cost(0xff, 4, [](int lane) { return 128 * lane; }) == Cost{8, 1});
  CHECK(load_cost(0x80000001, 4, [](int lane) { return 128 * lane; }) == Cost{2, 1});
  CHECK(load_cost(0x5555, 4, [](int lane) { return 8 * lane; }) == Cost{1, 1});
  // 16 lanes of 8 bytes are 128 bytes: one wavefront at best, and if they are of one half-warp.
  CHECK(load_cost(0x0000ffff, 8, linear(8)) == Cost{1, 1});
  CHECK(load_cost(0x00ffff00, 8, linear(8)) == Cost{2, 1});
  CHECK(load_cost(0x000000ff, 16, linear(16)) == Cost{1, 1});
  CHECK(load_cost(0x000001ff, 16, linear(16)) == Cost{2, 2});
  // A lane whose neighbour takes no part keeps no groups apart: the last row of step 24's rotation is
  // lanes 0, 8, 16 and 24, each with a chunk of it.
  const auto quarters = [](int lane) { return 16 * (lane / 8 + 4 * (lane % 8)); };
  CHECK(load_cost(0x01010101, 16, quarters) == Cost{2, 1});
  CHECK(load_cost(0x7fffffff, 8, [](int lane) { return 8 * (lane / 2); }) == Cost{1, 1});
  CHECK(load_cost(0x3fffffff, 8, [](int lane) { return 8 * (lane / 2); }) == Cost{1, 1});
  CHECK(load_cost(0x03030303, 16, quarters) == Cost{2, 1});  // no lane i^2
  const auto thirds = [](int lane) { return 16 * ((lane % 8 + 3 * (lane / 8)) % 8); };
  CHECK(load_cost(0x07070707, 16, thirds) == Cost{4, 2});  // lanes 0 and 1 differ, and 0 and 2
  CHECK(store_cost(0x01010101, 16, quarters) == Cost{4, 1});
}

TEST_CASE("counters: the ideal is 128 bytes a wavefront, but never more than it costs") {
  CHECK(load_cost(4, [](int lane) { return 128 * lane; }) == Cost{32, 1});
  CHECK(load_cost(8, [](int lane) { return 128 * lane; }) == Cost{32, 2});
  CHECK(load_cost(16, [](int lane) { return 512 * lane; }) == Cost{32, 4});
  CHECK(load_cost(0x7, 16, [](int lane) { return 128 * lane; }) == Cost{3, 1});
  CHECK(load_cost(16, [](int lane) { return 16 * (lane / 2); }) == Cost{2, 2});  // 512 bytes asked
}

TEST_CASE("counters: the wavefront that serves each lane") {
  const auto of_lane = [](int bytes, auto address) {
    return emulator::shared_wavefronts(request(Kind::kSharedLoad, bytes, kAll, address)).of_lane;
  };
  std::array<int, 32> expected{};
  CHECK(of_lane(4, [](int lane) { return 4 * lane; }) == expected);
  for (int lane = 0; lane < 32; lane++) expected[lane] = lane;
  CHECK(of_lane(4, [](int lane) { return 128 * lane; }) == expected);
  for (int lane = 0; lane < 32; lane++) expected[lane] = lane / 16;
  CHECK(of_lane(4, [](int lane) { return 8 * lane; }) == expected);
  CHECK(of_lane(8, [](int lane) { return 8 * lane; }) == expected);
  for (int lane = 0; lane < 32; lane++) expected[lane] = lane / 8;
  CHECK(of_lane(16, [](int lane) { return 16 * lane; }) == expected);
  CHECK(of_lane(8, [](int lane) { return 16 * lane; }) == expected);
  for (int lane = 0; lane < 32; lane++) expected[lane] = lane / 16;  // merged
  CHECK(of_lane(16, [](int lane) { return 16 * (lane / 2); }) == expected);
  // Lane 31 meets lane 0's word, one wavefront later; lane 30 shares it.
  expected = {};
  expected[30] = expected[31] = 1;
  CHECK(of_lane(4, [](int lane) { return lane >= 30 ? 128 : 4 * lane; }) == expected);
}

// --- global memory -------------------------------------------------------------------------------

TEST_CASE("counters: sectors of neighbouring lanes") {
  CHECK(sectors(2, [](int lane) { return 2 * lane; }) == 2);
  CHECK(sectors(4, [](int lane) { return 4 * lane; }) == 4);
  CHECK(sectors(8, [](int lane) { return 8 * lane; }) == 8);
  CHECK(sectors(16, [](int lane) { return 16 * lane; }) == 16);
  CHECK(sectors(4, [](int lane) { return 4 * lane + 16; }) == 5);  // begins inside a sector
  CHECK(sectors(2, [](int lane) { return 2 * lane + 30; }) == 3);
}

TEST_CASE("counters: sectors of lanes far apart, together, and absent") {
  CHECK(sectors(4, [](int lane) { return 32 * lane; }) == 32);
  CHECK(sectors(4, [](int lane) { return 8 * lane; }) == 8);
  CHECK(sectors(4, [](int lane) { return 16384 * lane; }) == 32);
  CHECK(sectors(4, [](int) { return 64; }) == 1);
  CHECK(sectors(4, [](int lane) { return 32 * (lane % 2); }) == 2);  // back and forth
  CHECK(sectors(4, [](int lane) { return 4 * ((lane * 7) % 32); }) == 4);
  CHECK(sectors(0x000000ff, 4, [](int lane) { return 4 * lane; }) == 1);
  CHECK(sectors(0x80000001, 4, [](int lane) { return 4 * lane; }) == 2);
  CHECK(sectors(0x00ff0000, 4, [](int lane) { return 32 * lane; }) == 8);
}

// --- measured ------------------------------------------------------------------------------------

TEST_CASE("counters: 260 patterns cost what ncu measured on an H200") {
  std::ifstream file("common/emulator/wavefronts_h200.csv");
  REQUIRE_MESSAGE(file.is_open(), "run the tests from the root of the repository");
  std::string line;
  std::getline(file, line);
  REQUIRE(line ==
          "pattern,bytes,active,load_wavefronts,load_ideal,store_wavefronts,global_sectors,"
          "addresses");
  int rows = 0;
  while (std::getline(file, line)) {
    rows++;
    CAPTURE(line);
    std::istringstream fields(line);
    std::string pattern, text;
    std::getline(fields, pattern, ',');
    std::uint32_t numbers[6];
    for (std::uint32_t &number : numbers) {
      std::getline(fields, text, ',');
      number = static_cast<std::uint32_t>(std::stoul(text));
    }
    const auto [bytes, active, load, load_ideal, store, global] = numbers;
    std::vector<int> addresses;
    for (int address; fields >> address;) addresses.push_back(address);
    REQUIRE(addresses.size() == 32);

    const auto address = [&](int lane) { return addresses[lane]; };
    const Request of_load = request(Kind::kSharedLoad, static_cast<int>(bytes), active, address);
    const Wavefronts wavefronts = emulator::shared_wavefronts(of_load);
    CHECK(wavefronts.actual == static_cast<int>(load));
    CHECK(wavefronts.ideal == static_cast<int>(load_ideal));
    CHECK(store_cost(active, static_cast<int>(bytes), address).actual == static_cast<int>(store));
    CHECK(sectors(active, static_cast<int>(bytes), address) == static_cast<int>(global));
    std::set<int> serving;  // every wavefront serves some lane
    for (int lane = 0; lane < 32; lane++)
      if (active >> lane & 1) serving.insert(wavefronts.of_lane[lane]);
    CHECK(*serving.begin() == 0);
    CHECK(*serving.rbegin() == wavefronts.actual - 1);
    CHECK(static_cast<int>(serving.size()) == wavefronts.actual);
  }
  CHECK(rows == 260);
}

// --- whole kernels -------------------------------------------------------------------------------

namespace {

/// An array in the emulator's global memory, of zeros.
struct Global {
  float *data;

  explicit Global(int size) : data(static_cast<float *>(emulator::allocate(size * sizeof(float)))) {
    std::fill_n(data, size, 0.0f);
  }
  Global(const Global &) = delete;
  Global &operator=(const Global &) = delete;
  ~Global() { emulator::release(data); }
};

struct Storage {
  Tile<float, 32, 32> x;
  Tile<half, 32, 32> h;
};

Storage &shared() {
  return shared_storage<Storage>();
}

/// Sets the emulator up, and leaves it as it was.
struct SettingsOf {
  const emulator::Settings before = emulator::settings;
  explicit SettingsOf(const emulator::Settings &settings) { emulator::settings = settings; }
  ~SettingsOf() { emulator::settings = before; }
};

void run_with(const emulator::Settings &settings, dim3 grid, dim3 block, const Kernel &kernel) {
  const SettingsOf set(settings);
  ::run<Storage>(grid, block, kernel);
}

/// Counts a kernel on one thread of the host; does not begin a new profile.
void run(dim3 grid, dim3 block, const Kernel &kernel) {
  run_with({.profile = true, .host_threads = 1}, grid, block, kernel);
}

/// The counts of one launch.
Profile profile_of(dim3 grid, dim3 block, const Kernel &kernel) {
  emulator::take_profile();
  run(grid, block, kernel);
  return emulator::take_profile();
}

/// What was counted at a line of this file, as "shared load requests 1, ..."; zeros are left out.
std::string counts_at(const Profile &profile, int line) {
  const auto found = profile.lines.find(Line{__FILE__, static_cast<unsigned>(line)});
  if (found == profile.lines.end()) return "";
  std::string text;
  for (int i = 0; i < emulator::kCounters; i++)
    if (found->second[i])
      text += (text.empty() ? "" : ", ") + std::string(name(static_cast<emulator::Counter>(i))) +
              " " + std::to_string(found->second[i]);
  return text;
}

/// The counts that counts_at should name.
std::string shared_loads(int requests, int wavefronts, int ideal) {
  return "shared load requests " + std::to_string(requests) + ", shared load wavefronts " +
         std::to_string(wavefronts) + ", shared load wavefronts, ideal " + std::to_string(ideal);
}
std::string shared_stores(int requests, int wavefronts, int ideal) {
  return "shared store requests " + std::to_string(requests) + ", shared store wavefronts " +
         std::to_string(wavefronts) + ", shared store wavefronts, ideal " + std::to_string(ideal);
}
std::string global_loads(int requests, int sectors) {
  return "global load requests " + std::to_string(requests) + ", global load sectors " +
         std::to_string(sectors);
}
std::string global_stores(int requests, int sectors) {
  return "global store requests " + std::to_string(requests) + ", global store sectors " +
         std::to_string(sectors);
}

}  // namespace

TEST_CASE("counters: each counter has a name of its own") {
  std::set<std::string> names;
  for (int i = 0; i < emulator::kCounters; i++)
    names.insert(name(static_cast<emulator::Counter>(i)));
  CHECK(names.size() == emulator::kCounters);
  CHECK(names.count("?") == 0);
}

TEST_CASE("counters: a tile is written along its rows and read along a column, line by line") {
  const Profile profile = profile_of(dim3(1), dim3(32), [] {
    for (int row = 0; row < 32; row++) at = __LINE__, shared().x(row, lane_id()) = 1.0f;
    __syncthreads();
    for (int col = 0; col < 3; col++) also_at = __LINE__, read(shared().x(lane_id(), col));
  });
  REQUIRE(at != also_at);
  CHECK(counts_at(profile, at) == shared_stores(32, 32, 32));
  CHECK(counts_at(profile, also_at) == shared_loads(3, 3 * 32, 3));
  CHECK(profile.total()[emulator::kSharedStoreWavefronts] == 32);
  CHECK(profile.total()[emulator::kSharedLoadWavefronts] == 96);
  CHECK(profile.total()[emulator::kBlockBarriers] == 1);
}

TEST_CASE("counters: two accesses on one line are two requests of that line") {
  const Global memory(1024);
  const Profile profile = profile_of(dim3(1), dim3(32), [&] {
    const Matrix<float> m{memory.data, 32, 32};
    at = __LINE__, shared().x(0, lane_id()) = m(0, lane_id()) + m(lane_id(), 1);
  });
  CHECK(counts_at(profile, at) == shared_stores(1, 1, 1) + ", " + global_loads(2, 4 + 32));
}

TEST_CASE("counters: vectors and fp16 are counted with the bytes they move") {
  const Global memory(1024);
  int lines[5];
  const Profile profile = profile_of(dim3(1), dim3(32), [&] {
    const Matrix<float> m{memory.data, 32, 32};
    const int lane = lane_id();
    lines[0] = __LINE__, store(m(lane / 8, lane % 8 * 4), Vector<float, 4>{});
    __syncwarp();
    lines[1] = __LINE__, (void)load<2>(m(lane / 16, lane % 16 * 2));
    lines[2] = __LINE__, store(shared().h(lane / 4, lane % 4 * 8), Vector<half, 8>{});
    lines[3] = __LINE__, shared().h(31, lane) = half{};
    lines[4] = __LINE__, red_add(m(4 + lane / 8, lane % 8 * 4), Vector<float, 4>{});
  });
  CHECK(counts_at(profile, lines[4]) == "global reduction requests 1, global reduction sectors 16");
  CHECK(counts_at(profile, lines[0]) == global_stores(1, 16));
  CHECK(counts_at(profile, lines[1]) == global_loads(1, 8));
  CHECK(counts_at(profile, lines[2]) == shared_stores(1, 4, 4));
  CHECK(counts_at(profile, lines[3]) == shared_stores(1, 1, 1));
}

TEST_CASE("counters: every warp of every block makes its own requests") {
  const Global memory(1024);
  const Profile profile = profile_of(dim3(3, 2), dim3(64, 2), [&] {
    const Matrix<const float> m{memory.data, 32, 32};
    for (int i = 0; i < 5; i++) at = __LINE__, read(m(i, lane_id()));
  });
  CHECK(counts_at(profile, at) == global_loads(6 * 4 * 5, 6 * 4 * 5 * 4));
}

TEST_CASE("counters: lanes that do not come by are not in the request") {
  const Global memory(1024);
  const Profile profile = profile_of(dim3(1), dim3(32), [&] {
    const Matrix<const float> m{memory.data, 32, 32};
    if (lane_id() < 8) at = __LINE__, read(m(0, lane_id()));
    if (lane_id() >= 4 && lane_id() < 9) also_at = __LINE__, shared().x(lane_id(), 0) = 1.0f;
  });
  CHECK(counts_at(profile, at) == global_loads(1, 1));
  CHECK(counts_at(profile, also_at) == shared_stores(1, 5, 1));
}

TEST_CASE("counters: the n-th accesses of the lanes at one place are one request") {
  const Global memory(1024);
  const Matrix<const float> m{memory.data, 32, 32};
  // Lane i comes by i % 4 times: 24 lanes a first time, 16 a second, 8 a third.
  Profile profile = profile_of(dim3(1), dim3(32), [&] {
    for (int i = 0; i < lane_id() % 4; i++) at = __LINE__, read(m(lane_id(), 0));
  });
  CHECK(counts_at(profile, at) == global_loads(3, 24 + 16 + 8));
}

TEST_CASE(
    "counters: lanes that come to one place in different iterations make requests of their own") {
  const Global memory(1024);
  const Matrix<const float> m{memory.data, 32, 32};
  // Even lanes come by in the first round, odd lanes in the second; all come by what is between.
  const auto take_turns = [&](auto between) {
    return profile_of(dim3(1), dim3(32), [&] {
      for (int round = 0; round < 2; round++) {
        if (lane_id() % 2 == round) at = __LINE__, read(m(0, lane_id()));
        between();
      }
    });
  };
  Profile profile = take_turns([&] { also_at = __LINE__, read(m(1, lane_id())); });
  CHECK(counts_at(profile, at) == global_loads(2, 8));
  CHECK(counts_at(profile, also_at) == global_loads(2, 8));
  profile = take_turns([] { (void)__expf(1); });
  CHECK(counts_at(profile, at) == global_loads(2, 8));
  profile = take_turns([] { __syncwarp(); });
  CHECK(counts_at(profile, at) == global_loads(2, 8));
  profile = take_turns([] { __syncthreads(); });
  CHECK(counts_at(profile, at) == global_loads(2, 8));
  profile = take_turns([] { __shfl_xor_sync(kAllLanes, 0, 1); });
  CHECK(counts_at(profile, at) == global_loads(2, 8));
  profile = take_turns([] { __syncwarp(lane_id() < 16 ? 0xffffu : 0xffff0000u); });
  CHECK(counts_at(profile, at) == global_loads(2, 8));

  // All lanes come by twice, but not at once: odd lanes take the branch in the first round.
  profile = profile_of(dim3(1), dim3(32), [&] {
    for (int round = 0; round < 2; round++) {
      at = __LINE__, read(m(0, lane_id()));
      if (lane_id() % 2 != round) also_at = __LINE__, read(m(1, lane_id()));
    }
  });
  CHECK(counts_at(profile, at) == global_loads(2, 8));
  CHECK(counts_at(profile, also_at) == global_loads(2, 8));

  // An inner loop that some lanes leave early: they wait for the others after it.
  profile = profile_of(dim3(1), dim3(32), [&] {
    for (int round = 0; round < 2; round++) {
      for (int i = 0; i <= lane_id() % 2; i++) at = __LINE__, read(m(i, lane_id()));
      also_at = __LINE__, read(m(2, lane_id()));
    }
  });
  CHECK(counts_at(profile, at) == global_loads(4, 16));
  CHECK(counts_at(profile, also_at) == global_loads(2, 8));
}

/// Lanes that a branch parts, which call the same function: two requests on a GPU.
__global__ void call_from_both_sides(const Matrix<const float> &m) {
  const auto access = [&](int row) {  // four loads: too much for the compiler to copy unasked
    at = __LINE__, read(m(row, lane_id())), read(m(row + 2, lane_id())),
    read(m(row + 4, lane_id())), read(m(row + 6, lane_id()));
  };
  if (lane_id() < 16)
    access(0);
  else
    access(1);
}

/// Even and odd lanes take turns, and nothing else is counted: a request for each iteration on a GPU.
__global__ void take_turns(const Matrix<const float> &m) {
  for (int i = 0; i < 2; i++)
    if (lane_id() % 2 == i % 2) at = __LINE__, read(m(i, lane_id()));
}

/// Lanes that part only where they access no memory, or that stay away.
__global__ void part_between_accesses(const Matrix<const float> &m) {
  float sum = 0;
  for (int i = 0; i < 8; i++) {
    float x = m(i, lane_id());
    if (lane_id() % 2 == i % 2) x = std::exp(x);
    if (lane_id() == 0) read(m(i + 8, lane_id()));
    sum += x * m(i + 16, lane_id());
  }
  if (sum > 0) read(m(31, lane_id()));
}

TEST_CASE("counters: lanes that come to one place by other code are noted") {
  const Global memory(1024);
  const Matrix<const float> m{memory.data, 32, 32};
  // Nothing but where in the compiled code they are tells the lanes apart, so they are counted as
  // one, and noted.
  Profile profile = profile_of(dim3(1), dim3(32), [&] { call_from_both_sides(m); });
  CHECK(profile.mixed.count(Line{__FILE__, static_cast<unsigned>(at)}) == 1);
  profile = profile_of(dim3(1), dim3(32), [&] { take_turns(m); });
  CHECK(profile.mixed.count(Line{__FILE__, static_cast<unsigned>(at)}) == 1);

  profile = profile_of(dim3(1), dim3(32), [&] { part_between_accesses(m); });
  CHECK(profile.mixed.empty());
}

TEST_CASE("counters: an instruction that lanes reach at two places is issued at each") {
  const Profile profile = profile_of(dim3(1), dim3(64), [] {
    if (lane_id() < 16)
      at = __LINE__, __syncwarp();
    else
      also_at = __LINE__, __syncwarp();
  });
  CHECK(counts_at(profile, at) == "warp barriers 2");
  CHECK(counts_at(profile, also_at) == "warp barriers 2");
}

TEST_CASE("counters: accesses in two places of one line are never one request") {
  const Global memory(1024);
  const Matrix<const float> m{memory.data, 32, 32};
  const Profile profile = profile_of(dim3(1), dim3(32), [&] {
    at = __LINE__, lane_id() < 16 ? read(m(0, lane_id())) : read(m(0, lane_id()));
  });
  CHECK(counts_at(profile, at) == global_loads(2, 2 + 2));
}

TEST_CASE("counters: special-function and warp-wide instructions, and barriers, are per warp") {
  int lines[4];
  const Profile profile = profile_of(dim3(2), dim3(96), [&] {
    float x = static_cast<float>(threadIdx.x);
    for (int i = 0; i < 4; i++) lines[0] = __LINE__, x = __expf(-x);
    for (int mask = 16; mask > 0; mask /= 2)
      lines[1] = __LINE__, x += __shfl_xor_sync(kAll, x, mask);
    for (int i = 0; i < 3; i++) lines[2] = __LINE__, __syncwarp();
    for (int i = 0; i < 2; i++) lines[3] = __LINE__, __syncthreads();
    if (threadIdx.x < 10) x = __expf(x);  // on the line of nothing else: one warp of each block
  });
  CHECK(counts_at(profile, lines[0]) == "exp2 instructions " + std::to_string(2 * 3 * 4));
  CHECK(counts_at(profile, lines[1]) == "shuffles " + std::to_string(2 * 3 * 5));
  CHECK(counts_at(profile, lines[2]) == "warp barriers " + std::to_string(2 * 3 * 3));
  CHECK(counts_at(profile, lines[3]) == "block barriers " + std::to_string(2 * 3 * 2));
  CHECK(profile.total()[emulator::kExp2] == 2 * 3 * 4 + 2);
}

TEST_CASE("counters: ldmatrix is a shared load, by matrix, and an instruction of its own") {
  const Profile profile = profile_of(dim3(1), dim3(32), [] {
    auto &h = shared().h;  // rows of 64 bytes: 8 of them in 4 wavefronts
    for (int row = lane_id() / 4; row < 32; row += 8) store<8>(h(row, lane_id() % 4 * 8), {});
    __syncwarp();
    at = __LINE__, (void)ldmatrix_x4(h(lane_id(), 8));
    also_at = __LINE__, (void)ldmatrix_x2_trans(h(lane_id() / 4, lane_id() % 4 * 8));
  });
  CHECK(counts_at(profile, at) == shared_loads(1, 16, 4) + ", ldmatrix 1");
  CHECK(counts_at(profile, also_at) == shared_loads(1, 2, 2) + ", ldmatrix 1");
}

TEST_CASE("counters: cp.async is a global load and a store of its own kind") {
  const Global memory(32 * 64);
  const Profile profile = profile_of(dim3(2), dim3(64), [&] {
    const Matrix<const half> g{reinterpret_cast<const half *>(memory.data), 32, 128};
    const int row = static_cast<int>(threadIdx.x) / 4, col = static_cast<int>(threadIdx.x) % 4 * 8;
    // Each warp: 8 rows of 64 bytes, which follow each other in shared memory, each of another line of global
    // memory; twice.
    for (int i = 0; i < 2; i++)
      at = __LINE__, cp_async_16(shared().h(row + 16 * i, col), g(row + 16 * i, col));
    cp_async_commit();
    cp_async_wait<0>();
  });
  CHECK(counts_at(profile, at) ==
        global_loads(8, 8 * 16) +
            ", cp.async requests 8, cp.async wavefronts 64, cp.async wavefronts, ideal 32");
  CHECK(profile.total()[emulator::kSharedStoreRequests] == 0);
  CHECK(profile.unique_read_bytes == 32 * 64);
}

TEST_CASE("counters: mma, votes and ex2 are per warp, too") {
  const Profile profile = profile_of(dim3(3), dim3(64), [] {
    FragmentC c{};
    for (int i = 0; i < 5; i++) at = __LINE__, mma(c, FragmentA{}, FragmentB{});
    also_at = __LINE__, (void)(__any_sync(kAll, 1) && __all_sync(kAll, 1)), (void)ex2(1);
  });
  CHECK(counts_at(profile, at) == "mma 30");
  CHECK(counts_at(profile, also_at) == "exp2 instructions 6, votes 12");
}

TEST_CASE("counters: unique bytes: each sector once a launch, however often it is touched") {
  const Global memory(1024);
  const Matrix<float> m{memory.data, 32, 32};
  const Kernel kernel = [&] {
    read(m(0, lane_id()));  // 128 bytes, by all blocks
    if (lane_id() == 0) {
      read(m(8, 1)), read(m(8, 6));                            // two elements of one sector
      m(16 + static_cast<int>(blockIdx.x), 0) = 1.0f;          // a sector a block
      m(16 + static_cast<int>(blockIdx.x), 1) = 1.0f;          // the same sector
      (void)load<4>(m(24 + static_cast<int>(blockIdx.x), 4));  // half a sector
      read(m(16 + static_cast<int>(blockIdx.x), 0));           // read and written
    }
  };
  const Profile once = profile_of(dim3(3), dim3(32), kernel);
  CHECK(once.unique_read_bytes == 128 + 32 + 3 * 32 + 3 * 32);
  CHECK(once.unique_written_bytes == 3 * 32);

  emulator::take_profile();
  run(dim3(3), dim3(32), kernel);
  run(dim3(3), dim3(32), kernel);
  const Profile twice = emulator::take_profile();
  CHECK(twice.unique_read_bytes == 2 * once.unique_read_bytes);
  CHECK(twice.unique_written_bytes == 2 * once.unique_written_bytes);

  // A launch that touches something else does not count this again.
  emulator::take_profile();
  run(dim3(3), dim3(32), kernel);
  run(dim3(1), dim3(32), [&] { m(31, lane_id()) = 1.0f; });
  const Profile other = emulator::take_profile();
  CHECK(other.unique_read_bytes == once.unique_read_bytes);
  CHECK(other.unique_written_bytes == once.unique_written_bytes + 128);
}

TEST_CASE("counters: a profile adds up launches, and taking it begins a new one") {
  const Global memory(1024);
  const Matrix<const float> m{memory.data, 32, 32};
  const Kernel kernel = [&] { at = __LINE__, read(m(0, lane_id())); };
  emulator::take_profile();
  run(dim3(1), dim3(32), kernel);
  run(dim3(2), dim3(64), kernel);
  CHECK(counts_at(emulator::take_profile(), at) == global_loads(5, 20));
  run(dim3(1), dim3(32), kernel);
  CHECK(counts_at(emulator::take_profile(), at) == global_loads(1, 4));
  CHECK(counts_at(emulator::take_profile(), at) == "");
}

TEST_CASE("counters: nothing is counted unless a profile is wanted") {
  const Global memory(1024);
  const Matrix<float> m{memory.data, 32, 32};
  emulator::take_profile();
  run_with({.profile = false, .host_threads = 1}, dim3(1), dim3(32), [&] {
    shared().x(0, lane_id()) = m(0, lane_id()) + __expf(1);
    __syncthreads();
    m(1, lane_id()) = shared().x(0, lane_id()) + __shfl_xor_sync(kAllLanes, 1.0f, 1);
    __syncwarp();
  });
  const Profile profile = emulator::take_profile();
  CHECK(profile.total() == emulator::Counts{});
  CHECK(profile.unique_read_bytes == 0);
  CHECK(profile.unique_written_bytes == 0);
  CHECK(profile.trace.empty());
}

TEST_CASE("counters: the trace has the first two requests of block 0, warp 0 at each place") {
  const Profile profile = profile_of(dim3(2), dim3(64), [] {
    const int lane = lane_id(), warp = static_cast<int>(threadIdx.x / 32);
    for (int i = 0; i < 4; i++) at = __LINE__, shared().h(8 * warp + i, lane) = half{};
    __syncthreads();
    for (int i = 0; i < 3; i++)
      if (lane % 2 == 1) also_at = __LINE__, (void)load<4>(shared().h(i + 1, lane / 8 * 4));
  });
  // Each row once, whatever order the requests are in.
  using Row = std::tuple<int, bool, int, int, std::uint64_t, int, int>;
  std::set<Row> rows, expected;
  for (const emulator::TraceRow &row : profile.trace) {
    CHECK(row.line.file == __FILE__);
    rows.insert({static_cast<int>(row.line.line), row.kind == Kind::kSharedStore, row.request,
                 row.lane, row.address, row.bytes, row.wavefront});
  }
  // Before h lie 32 x 32 floats. Stores: 32 lanes, one wavefront, rows 0 and 1.
  for (int i = 0; i < 2; i++)
    for (int lane = 0; lane < 32; lane++)
      expected.insert({at, true, i, lane, 4096 + 64 * i + 2 * lane, 2, 0});
  CHECK(profile.trace.size() == 64 + 32);
  CHECK(rows.size() == 64 + 32);
  // Loads: 16 odd lanes, 8 bytes each, four lanes at one address, but none with its neighbour i^1;
  // with i^2 throughout, so the half-warps merge.
  for (int i = 0; i < 2; i++)
    for (int lane = 1; lane < 32; lane += 2)
      expected.insert({also_at, false, i, lane, 4096 + 64 * (i + 1) + 8 * (lane / 8), 8, 0});
  CHECK(rows == expected);
}

TEST_CASE("counters: the trace has the rows of ldmatrix and the writes of cp.async") {
  const Global memory(32 * 16);
  const Profile profile = profile_of(dim3(1), dim3(64), [&] {
    auto &h = shared().h;
    const Matrix<const half> g{reinterpret_cast<const half *>(memory.data), 32, 32};
    if (threadIdx.x >= 32) return;
    for (int i = 0; i < 4; i++)
      at = __LINE__, cp_async_16(h(8 * i + lane_id() % 8, lane_id() / 8 * 8),
                                 g(8 * i + lane_id() / 4, lane_id() % 4 * 8));
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    also_at = __LINE__, (void)ldmatrix_x2_trans(h(lane_id() % 16, 24));
  });
  CHECK(profile.trace.size() == 2 * 32 + 16);
  int copies = 0, rows = 0, wrong = 0;
  for (const emulator::TraceRow &row : profile.trace) {
    const int r = row.lane % 8, eighth = row.lane / 8;
    const bool copy = row.kind == Kind::kCopy;
    (copy ? copies : rows)++;
    wrong += !copy && row.kind != Kind::kLdmatrix;
    wrong += static_cast<int>(row.line.line) != (copy ? at : also_at);
    wrong += row.bytes != 16;
    // Before h lie 32 x 32 floats; its rows of 64 bytes begin 16 banks apart.
    wrong += static_cast<int>(row.address) !=
             4096 + (copy ? 64 * (8 * row.request + r) + 16 * eighth : 64 * row.lane + 48);
    // A pair of rows of a matrix at a time; of a sector, the lanes write to two rows.
    wrong += row.wavefront != (copy ? row.lane : 4 * eighth + r / 2);
  }
  CHECK(copies == 64);
  CHECK(rows == 16);
  CHECK(wrong == 0);
}

TEST_CASE("counters: the trace tells which wavefront serves a lane") {
  const Profile profile = profile_of(dim3(1), dim3(32), [] { shared().x(lane_id(), 0) = 1.0f; });
  REQUIRE(profile.trace.size() == 32);
  for (const emulator::TraceRow &row : profile.trace) {
    CHECK(row.address == 128u * static_cast<unsigned>(row.lane));
    CHECK(row.wavefront == row.lane);
  }
}
