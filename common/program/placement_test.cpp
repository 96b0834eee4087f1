// SPDX-License-Identifier: MIT
#include "common/program/placement.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace {

using reference::Elements;

reference::Shape small() {
  reference::Shape shape;
  shape.batch = 2;
  shape.heads = 4;
  shape.kv_heads = 2;
  shape.seqlen_q = 3;
  shape.seqlen_k = 5;
  shape.head_dim = 8;
  return shape;
}

/// A dense tensor of different numbers, from `first` on.
Elements numbers(const Tensor &tensor, int first) {
  Elements values(tensor.batch * tensor.heads * tensor.seqlen * tensor.head_dim);
  std::iota(values.begin(), values.end(), first);
  return values;
}

/// Demands that a tensor comes back from a buffer as it went in, but for the rows that are not
/// there, which are 0; and that nothing of it is left. Returns how many elements it took.
std::size_t check_round_trip(const Tensor &tensor, std::size_t buffer_elements) {
  const Elements dense = numbers(tensor, 1);
  Elements buffer(buffer_elements, kPoison);
  scatter(tensor, dense, buffer);
  const auto is_poison = [](std::uint16_t element) { return element == kPoison; };
  const auto taken = buffer.size() - std::count_if(buffer.begin(), buffer.end(), is_poison);
  const Elements back = gather(tensor, buffer);
  CHECK(std::all_of(buffer.begin(), buffer.end(), is_poison));
  REQUIRE(back.size() == dense.size());
  std::size_t i = 0;
  for (int element = 0; element < tensor.batch; element++)
    for (int head = 0; head < tensor.heads; head++)
      for (int row = 0; row < tensor.seqlen; row++)
        for (int column = 0; column < tensor.head_dim; column++, i++)
          CHECK(back[i] == (row < tensor.rows(element) ? dense[i] : 0));
  return taken;
}

}  // namespace

TEST_CASE("placement: bhnd is dense") {
  const Placement plain = place(small(), Layout::kBhnd, 0, 1);
  Elements buffer(plain.K_elements, kPoison);
  scatter(plain.K, numbers(plain.K, 1), buffer);
  CHECK(buffer == numbers(plain.K, 1));
  CHECK(plain.Q.offset(1, 2, 1) == ((1 * 4 + 2) * 3 + 1) * 8);
  CHECK(plain.K.offset(1, 1, 4) == ((1 * 2 + 1) * 5 + 4) * 8);
  CHECK(check_round_trip(plain.Q, plain.Q_elements) == plain.Q_elements);
  CHECK(check_round_trip(plain.O, plain.O_elements) == plain.O_elements);
}

TEST_CASE("placement: bnhd has the heads of a row side by side, and a gap of one after them") {
  const Placement rows = place(small(), Layout::kBnhd, 0, 1);
  CHECK(rows.Q.offset(1, 2, 1) == ((1 * 3 + 1) * 5 + 2) * 8);
  CHECK(rows.K.offset(1, 1, 4) == ((1 * 5 + 4) * 3 + 1) * 8);
  CHECK(rows.K_elements == 2 * 5 * 3 * 8);
  // V's gap is 8 elements wider: K's strides lead elsewhere.
  CHECK(rows.V.offset(1, 1, 4) == ((1 * 5 + 4) * 4 + 1) * 8);
  CHECK(rows.V_elements == 2 * 5 * 4 * 8);
  CHECK(check_round_trip(rows.V, rows.V_elements) == 2 * 5 * 2 * 8);
  CHECK(place(small(), Layout::kBnhd32, 0, 1).V.strides.row == rows.K.strides.row + 32 / 2);
  CHECK(place(small(), Layout::kBnhd128, 0, 1).V.strides.row == rows.K.strides.row + 128 / 2);
}

TEST_CASE("placement: V and O may have rows of their own width") {
  reference::Shape shape = small();
  shape.head_dim_v = 24;
  const Placement dense = place(shape, Layout::kBhnd, 0, 1),
                  rows = place(shape, Layout::kBnhd, 0, 1);
  CHECK(dense.Q.strides.row == 8);
  CHECK(dense.K.strides.row == 8);
  CHECK(dense.V.strides.row == 24);
  CHECK(dense.V_elements == 3 * dense.K_elements);
  CHECK(dense.O_elements == 3 * dense.Q_elements);
  CHECK(check_round_trip(rows.V, rows.V_elements) == 2 * 5 * 2 * 24);
  CHECK(check_round_trip(rows.O, rows.O_elements) == 3 * check_round_trip(rows.Q, rows.Q_elements));
}

TEST_CASE("placement: V may lie in K, whatever the layout") {
  reference::Shape shape = small();
  shape.head_dim = 24, shape.head_dim_v = 16, shape.latent = true;
  shape.lengths_q = {1, 3}, shape.lengths_k = {5, 2};
  for (const auto &[layout, page_size] :
       {std::pair(Layout::kBhnd, 0), std::pair(Layout::kBnhd, 0), std::pair(Layout::kPacked, 0),
        std::pair(Layout::kBnhd, 2)}) {
    const Placement all = place(shape, layout, page_size, 1);
    CHECK(all.V_elements == 0);
    CHECK(all.V.head_dim == 16);
    for (const auto &[element, row] : {std::pair(0, 4), std::pair(1, 1)})
      for (int head = 0; head < 2; head++)
        CHECK(all.V.offset(element, head, row) == all.K.offset(element, head, row));
  }
}

TEST_CASE("placement: interleaved has Q, K and V in one buffer, and O for itself") {
  reference::Shape shape = small();
  shape.seqlen_k = shape.seqlen_q;
  const Placement all = place(shape, Layout::kInterleaved, 0, 1);
  CHECK(all.Q_elements == 2 * 3 * (4 + 2 + 2) * 8);
  CHECK(all.K_elements == 0);
  CHECK(all.V_elements == 0);
  CHECK(all.Q.offset(1, 3, 2) == ((1 * 3 + 2) * 8 + 3) * 8);
  CHECK(all.K.offset(1, 1, 2) == ((1 * 3 + 2) * 8 + 4 + 1) * 8);
  CHECK(all.V.offset(1, 1, 2) == ((1 * 3 + 2) * 8 + 4 + 2 + 1) * 8);
  CHECK(all.O.offset(1, 3, 2) == ((1 * 3 + 2) * 5 + 3) * 8);
  // The three fill the buffer, and none of it twice.
  Elements buffer(all.Q_elements, kPoison);
  int first = 1;
  for (const Tensor &tensor : {all.Q, all.K, all.V}) {
    const Elements dense = numbers(tensor, first);
    scatter(tensor, dense, buffer);
    first += static_cast<int>(dense.size());
  }
  const std::set<std::uint16_t> different(buffer.begin(), buffer.end());
  CHECK(different.size() == all.Q_elements);
  CHECK(!different.contains(kPoison));
}

TEST_CASE("placement: rows that are not there are gaps") {
  reference::Shape shape = small();
  shape.lengths_q = {1, 3};
  shape.lengths_k = {5, 0};
  for (const Layout layout : {Layout::kBhnd, Layout::kBnhd}) {
    const Placement ragged = place(shape, layout, 0, 1);
    CHECK(check_round_trip(ragged.Q, ragged.Q_elements) == (1 + 3) * 4 * 8);
    CHECK(check_round_trip(ragged.K, ragged.K_elements) == (5 + 0) * 2 * 8);
    CHECK(check_round_trip(ragged.O, ragged.O_elements) == (1 + 3) * 4 * 8);
  }
}

TEST_CASE("placement: pages, in an order drawn from the seed, in a pool that has more") {
  reference::Shape shape = small();
  shape.batch = 3;
  shape.seqlen_k = 40;
  shape.lengths_k = {40, 0, 17};
  for (const Layout layout : {Layout::kBhnd, Layout::kBnhd})
    for (const int page_size : {1, 7, 8, 64}) {
      CAPTURE(page_size);
      const Placement paged = place(shape, layout, page_size, 1);
      const int of_sequence = (40 + page_size - 1) / page_size;
      const int used = of_sequence + (17 + page_size - 1) / page_size;
      REQUIRE(static_cast<int>(paged.K.page_table.size()) == 3 * of_sequence);
      CHECK(paged.K.page_table == paged.V.page_table);
      CHECK(paged.Q.page_table.empty());
      std::set<int> pages(paged.K.page_table.begin(), paged.K.page_table.end());
      pages.erase(-1);
      CHECK(static_cast<int>(pages.size()) == used);  // none twice
      CHECK(std::count(paged.K.page_table.begin(), paged.K.page_table.end(), -1) ==
            3 * of_sequence - used);
      CHECK(std::size_t(*pages.rbegin() + 1) * page_size * 2 * 8 <= paged.K_elements);
      CHECK(paged.K_elements > std::size_t(3) * of_sequence * page_size * 2 * 8);
      CHECK(check_round_trip(paged.K, paged.K_elements) == (40 + 0 + 17) * 2 * 8);
    }
  const auto table = [&](std::uint64_t seed) {
    return place(shape, Layout::kBhnd, 1, seed).K.page_table;
  };
  CHECK(table(1) == table(1));
  CHECK(table(1) != table(2));
  const Placement rows = place(shape, Layout::kBnhd, 8, 1);
  CHECK(rows.K.offset(2, 1, 9) ==
        std::size_t(rows.K.page_table[2 * 5 + 1] * 8 * 3 * 8 + 1 * 3 * 8 + 1 * 8));
}

TEST_CASE("placement: packed sequences follow each other without a gap") {
  reference::Shape shape = small();
  shape.batch = 3;
  shape.lengths_q = {1, 0, 3};
  shape.lengths_k = {5, 2, 0};
  const Placement packed = place(shape, Layout::kPacked, 0, 1);
  CHECK(packed.Q.cu_seqlens == std::vector<int>{0, 1, 1, 4});
  CHECK(packed.K.cu_seqlens == std::vector<int>{0, 5, 7, 7});
  CHECK(packed.Q.strides.batch == 0);
  CHECK(packed.K.strides.batch == 0);
  CHECK(packed.Q_elements == 4 * 5 * 8);
  CHECK(packed.K_elements == 7 * 3 * 8);
  CHECK(packed.Q.offset(2, 3, 1) == ((1 + 1) * 5 + 3) * 8);
  CHECK(packed.V.offset(1, 1, 1) == ((5 + 1) * 4 + 1) * 8);
  CHECK(check_round_trip(packed.Q, packed.Q_elements) == 4 * 4 * 8);
  CHECK(check_round_trip(packed.K, packed.K_elements) == 7 * 2 * 8);
  CHECK(check_round_trip(packed.O, packed.O_elements) == 4 * 4 * 8);
  // Pages are not packed: each sequence has its own.
  const Placement paged = place(shape, Layout::kPacked, 2, 1);
  CHECK(paged.Q.cu_seqlens.size() == 4);
  CHECK(paged.K.cu_seqlens.empty());
  CHECK(paged.K.page_table.size() == 3 * 3);
  CHECK(check_round_trip(paged.K, paged.K_elements) == 7 * 2 * 8);
  shape.lengths_q = shape.lengths_k = {0, 0, 0};  // memory of nothing is no memory
  CHECK(place(shape, Layout::kPacked, 0, 1).Q_elements == 5 * 8);
}

TEST_CASE("placement: the rows that come beside a cache are each sequence's last") {
  reference::Shape shape = small();
  shape.lengths_k = {5, 3};
  shape.seqlen_new = 2;
  const Placement plain = place(shape, Layout::kBhnd, 0, 1);
  const Elements dense = numbers(plain.K, 0), rows = new_rows(shape, dense);
  REQUIRE(rows.size() == 2 * 2 * 2 * 8);
  std::size_t i = 0;
  for (int element = 0; element < 2; element++)
    for (int head = 0; head < 2; head++)
      for (int row = 0; row < 2; row++)
        for (int column = 0; column < 8; column++)
          CHECK(rows[i++] ==
                ((element * 2 + head) * 5 + shape.lengths_k[element] - 2 + row) * 8 + column);
}
