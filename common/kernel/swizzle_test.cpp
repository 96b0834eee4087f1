// SPDX-License-Identifier: MIT
// The swizzle at every head dim: no element is lost, and 8 rows of a column are in all banks.
#include "common/kernel/swizzle.h"

#include <doctest/doctest.h>

#include <set>

namespace {

constexpr int kRows = 32;

template <int d>
void check() {
  CAPTURE(d);
  using Layout = Swizzled<kRows, d>;
  std::set<int> offsets;
  for (int row = 0; row < kRows; row++)
    for (int col = 0; col < d; col++) {
      offsets.insert(Layout::offset(row, col));
      // 8 elements from a multiple of 8 on stay together: 16 bytes, what one lane reads or copies.
      CHECK(Layout::offset(row, col) == Layout::offset(row, col / 8 * 8) + col % 8);
    }
  CHECK(offsets.size() == kRows * d);
  CHECK(*offsets.begin() == 0);
  CHECK(*offsets.rbegin() == Layout::size - 1);
  for (int first = 0; first < kRows; first += 8)
    for (int col = 0; col < d; col += 8) {
      std::set<int> banks;  // in units of 4: 16 bytes
      for (int row = first; row < first + 8; row++) banks.insert(Layout::offset(row, col) / 8 % 8);
      CHECK(banks.size() == 8);
    }
}

}  // namespace

TEST_CASE("swizzle: at every head dim a column of 8 rows is in all banks") {
  check<16>();
  check<32>();
  check<48>();
  check<64>();
  check<80>();
  check<96>();
  check<112>();
  check<128>();
  check<160>();
  check<192>();
  check<256>();
}
