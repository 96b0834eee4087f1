// SPDX-License-Identifier: MIT
#include "common/program/placement.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "reference/parallel.h"
#include "reference/random.h"

namespace {

constexpr int kCopy = 8;  // elements that the kernels copy at once: strides are multiples of it

std::int64_t pages_of(int seqlen, int page_size) {
  return (std::int64_t{seqlen} + page_size - 1) / page_size;
}

/// A table of pages in an order of no pattern, from the pool. Those of the pool that are left, and
/// the rows after a sequence's last, are gaps.
std::vector<int> draw_pages(const Tensor &tensor, int page_size, std::uint64_t seed) {
  const std::int64_t of_sequence = pages_of(tensor.seqlen, page_size);
  std::vector<int> pages(
      static_cast<std::size_t>(pages_of_pool(tensor.batch, tensor.seqlen, page_size)));
  std::iota(pages.begin(), pages.end(), 0);
  std::uint64_t state = seed;
  for (std::size_t left = pages.size(); left > 1; left--)
    std::swap(pages[left - 1], pages[next_random(state) % left]);
  pages.resize(static_cast<std::size_t>(tensor.batch * of_sequence));
  for (int b = 0; b < tensor.batch; b++)
    for (std::int64_t i = pages_of(tensor.rows(b), page_size); i < of_sequence; i++)
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
  if (!cu_seqlens.empty()) row += cu_seqlens[element];
  if (!page_table.empty()) {
    const std::int64_t of_sequence = static_cast<std::int64_t>(page_table.size()) / batch;
    block = page_table[static_cast<std::size_t>(element * of_sequence + row / page_size)];
    row %= page_size;
  }
  return first +
         static_cast<std::size_t>(block * strides.batch + head * strides.head + row * strides.row);
}

std::int64_t pages_of_pool(int batch, int seqlen_k, int page_size) {
  return batch * pages_of(seqlen_k, page_size) * 5 / 4 + 1;
}

Placement place(const reference::Shape &shape, Layout layout, int page_size, std::uint64_t seed) {
  const auto strides = [&](int heads, std::int64_t rows, std::int64_t d, int gap) {
    if (layout == Layout::kBhnd) return Strides{heads * rows * d, rows * d, d};
    const std::int64_t row = heads * d + gap;
    return Strides{rows * row, d, row};
  };
  // The tensor, and the elements of its buffer.
  const auto make = [&](int heads, int seqlen, int d, const std::vector<int> &lengths, int gap,
                        std::size_t &elements) {
    Tensor tensor{shape.batch, heads, seqlen, d, lengths, 0, strides(heads, seqlen, d, gap),
                  {},          {},    0};
    elements = static_cast<std::size_t>(shape.batch * tensor.strides.batch);
    return tensor;
  };
  const auto pack = [](Tensor &tensor, std::size_t &elements) {
    tensor.cu_seqlens = {0};
    for (const int length : tensor.lengths)
      tensor.cu_seqlens.push_back(tensor.cu_seqlens.back() + length);
    tensor.strides.batch = 0;
    elements = static_cast<std::size_t>(std::max(1, tensor.cu_seqlens.back()) * tensor.strides.row);
  };
  const int d = shape.head_dim, d_V = shape.columns_of_v();
  const int gap = d, gap_of_V = gap + (layout == Layout::kBnhd32    ? 2 * kCopy
                                       : layout == Layout::kBnhd128 ? 8 * kCopy
                                                                    : kCopy);
  std::size_t of_Q, of_K, of_V, of_O;
  Tensor Q = make(shape.heads, shape.seqlen_q, d, shape.lengths_q, gap, of_Q);
  Tensor K = make(shape.kv_heads, shape.seqlen_k, d, shape.lengths_k, gap, of_K);
  Tensor V = make(shape.kv_heads, shape.seqlen_k, d_V, shape.lengths_k, gap_of_V, of_V);
  Tensor O = make(shape.heads, shape.seqlen_q, d_V, shape.lengths_q, gap, of_O);
  if (layout == Layout::kInterleaved) {
    const std::int64_t row = std::int64_t{shape.heads + 2 * shape.kv_heads} * d;
    const Strides of_all{shape.seqlen_q * row, d, row};
    Placement all{Q, K, K, Q, static_cast<std::size_t>(shape.batch * of_all.batch), 0, 0, of_Q};
    for (Tensor *tensor : {&all.Q, &all.K, &all.V}) tensor->strides = of_all;
    all.K.first = static_cast<std::size_t>(shape.heads) * d;
    all.V.first = static_cast<std::size_t>(shape.heads + shape.kv_heads) * d;
    return all;
  }
  if (layout == Layout::kPacked) {
    pack(Q, of_Q);
    pack(O, of_O);
  }
  if (page_size) {
    const std::int64_t pool = pages_of_pool(shape.batch, shape.seqlen_k, page_size);
    K.page_size = V.page_size = page_size;
    K.page_table = V.page_table = draw_pages(K, page_size, seed);
    K.strides = strides(shape.kv_heads, page_size, d, gap);
    V.strides = strides(shape.kv_heads, page_size, d_V, gap_of_V);
    of_K = static_cast<std::size_t>(pool * K.strides.batch);
    of_V = static_cast<std::size_t>(pool * V.strides.batch);
  } else if (layout == Layout::kPacked) {
    pack(K, of_K);
    pack(V, of_V);
  }
  if (shape.latent) {
    V = K;
    V.head_dim = d_V, of_V = 0;
  }
  return {Q, K, V, O, of_Q, of_K, of_V, of_O};
}

reference::Elements new_rows(const reference::Shape &shape, const reference::Elements &dense) {
  const int N = shape.seqlen_new;
  const auto heads = static_cast<std::size_t>(shape.batch) * shape.kv_heads;
  const std::size_t d = dense.size() / (heads * shape.seqlen_k);  // V's columns may be others
  reference::Elements rows(heads * N * d);
  for (int i = 0; i < shape.batch * shape.kv_heads; i++) {
    const std::size_t first = shape.length_k(i / shape.kv_heads) - N;
    std::copy_n(&dense[(static_cast<std::size_t>(i) * shape.seqlen_k + first) * d], N * d,
                &rows[static_cast<std::size_t>(i) * N * d]);
  }
  return rows;
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
