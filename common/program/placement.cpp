#include "common/program/placement.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "reference/parallel.h"
#include "reference/random.h"

namespace {

/// A table of pages in an order of no pattern, from a pool with a quarter more of them. Those of the
/// pool that are left, and the rows after a sequence's last, are gaps.
std::vector<int> draw_pages(const Tensor &tensor, int page_size, std::uint64_t seed,
                            std::int64_t &pool) {
  const std::int64_t of_sequence = (std::int64_t{tensor.seqlen} + page_size - 1) / page_size;
  pool = tensor.batch * of_sequence * 5 / 4 + 1;
  std::vector<int> pages(static_cast<std::size_t>(pool));
  std::iota(pages.begin(), pages.end(), 0);
  std::uint64_t state = seed;
  for (std::size_t left = pages.size(); left > 1; left--)
    std::swap(pages[left - 1], pages[next_random(state) % left]);
  pages.resize(static_cast<std::size_t>(tensor.batch * of_sequence));
  for (int b = 0; b < tensor.batch; b++)
    for (std::int64_t i = (std::int64_t{tensor.rows(b)} + page_size - 1) / page_size;
         i < of_sequence; i++)
      pages[static_cast<std::size_t>(b * of_sequence + i)] = -1;
  return pages;
}

/// Calls f(offset in the dense tensor, batch element, head, row) for every row, on all cores.
template <class F>
void for_each_row(const Tensor &tensor, F f) {
  const auto heads = static_cast<std::size_t>(tensor.heads);
  parallel_for(static_cast<std::size_t>(tensor.batch) * heads, [&](std::size_t i) {
    const int element = static_cast<int>(i / heads);
    const int head = static_cast<int>(i % heads);
    for (int row = 0; row < tensor.rows(element); row++)
      f((i * tensor.seqlen + row) * tensor.head_dim, element, head, row);
  });
}

/// Calls f(first, last) for ranges that together are the whole buffer, on all cores.
template <class Buffer, class F>
void for_each_range(Buffer &buffer, F f) {
  const std::size_t length = std::size_t{1} << 20;
  parallel_for((buffer.size() + length - 1) / length, [&](std::size_t i) {
    f(buffer.data() + i * length, buffer.data() + std::min((i + 1) * length, buffer.size()));
  });
}

}  // namespace

std::size_t Tensor::offset(int element, int head, int row) const {
  std::int64_t block = element;
  if (!page_table.empty()) {
    const std::int64_t of_sequence = static_cast<std::int64_t>(page_table.size()) / batch;
    block = page_table[static_cast<std::size_t>(element * of_sequence + row / page_size)];
    row %= page_size;
  }
  return first +
         static_cast<std::size_t>(block * strides.batch + head * strides.head + row * strides.row);
}

Placement place(const reference::Shape &shape, Layout layout, int page_size, std::uint64_t seed) {
  const std::int64_t d = shape.head_dim;
  const auto dense = [&](int heads, int rows) {
    return layout == Layout::kBhnd ? Strides{heads * rows * d, rows * d, d}
                                   : Strides{heads * rows * d, d, heads * d};
  };
  const auto elements = [&](int heads, int rows) {
    return static_cast<std::size_t>(shape.batch * heads * rows * d);
  };
  const Tensor Q{shape.batch,
                 shape.heads,
                 shape.seqlen_q,
                 shape.head_dim,
                 shape.lengths_q,
                 0,
                 dense(shape.heads, shape.seqlen_q),
                 {},
                 0};
  Tensor K{shape.batch,
           shape.kv_heads,
           shape.seqlen_k,
           shape.head_dim,
           shape.lengths_k,
           0,
           dense(shape.kv_heads, shape.seqlen_k),
           {},
           page_size};
  const std::size_t of_Q = elements(shape.heads, shape.seqlen_q);
  if (layout == Layout::kInterleaved) {
    const std::int64_t heads = shape.heads + 2 * shape.kv_heads;
    Placement all{Q, K, K, Q, elements(static_cast<int>(heads), shape.seqlen_q), 0, 0, of_Q};
    for (Tensor *tensor : {&all.Q, &all.K, &all.V})
      tensor->strides = {shape.seqlen_q * heads * d, d, heads * d};
    all.K.first = static_cast<std::size_t>(shape.heads * d);
    all.V.first = static_cast<std::size_t>((shape.heads + shape.kv_heads) * d);
    return all;
  }
  std::size_t of_K = elements(shape.kv_heads, shape.seqlen_k);
  if (page_size) {
    std::int64_t pool;
    K.page_table = draw_pages(K, page_size, seed, pool);
    K.strides = dense(shape.kv_heads, page_size);
    of_K = static_cast<std::size_t>(pool * K.strides.batch);
  }
  return {Q, K, K, Q, of_Q, of_K, of_K, of_Q};
}

void scatter(const Tensor &tensor, const reference::Elements &dense, reference::Elements &buffer) {
  for_each_row(tensor, [&](std::size_t from, int element, int head, int row) {
    std::copy_n(&dense[from], tensor.head_dim, &buffer[tensor.offset(element, head, row)]);
  });
}

reference::Elements gather(const Tensor &tensor, reference::Elements &buffer) {
  reference::Elements dense(static_cast<std::size_t>(tensor.batch) * tensor.heads * tensor.seqlen *
                            tensor.head_dim);
  if (!tensor.lengths.empty()) std::fill(dense.begin(), dense.end(), 0);
  for_each_row(tensor, [&](std::size_t to, int element, int head, int row) {
    std::uint16_t *from = &buffer[tensor.offset(element, head, row)];
    std::copy_n(from, tensor.head_dim, &dense[to]);
    std::fill_n(from, tensor.head_dim, kPoison);
  });
  return dense;
}

reference::Elements poisoned(std::size_t elements) {
  reference::Elements buffer(elements);
  for_each_range(buffer, [](auto *first, auto *last) { std::fill(first, last, kPoison); });
  return buffer;
}

std::size_t not_poison(const reference::Elements &buffer) {
  std::atomic<std::size_t> count = 0;
  for_each_range(buffer, [&](const auto *first, const auto *last) {
    count += static_cast<std::size_t>(last - first - std::count(first, last, kPoison));
  });
  return count;
}
