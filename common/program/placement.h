// SPDX-License-Identifier: MIT
// Where Q, K, V and O lie in the memory of the device: the layout, the pages and the gaps between
// what is there. The reference has them dense, [batch, heads, seqlen, head_dim or columns_of_v].
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/kernel/step.h"
#include "common/program/options.h"
#include "reference/attention.h"

/// What a gap holds: every element 0xffff, NaN as fp16, as bf16 and as fp8. Devices fill new memory
/// so.
constexpr std::uint16_t kPoison = 0xffff;

/// A tensor in a buffer.
struct Tensor {
  int batch, heads, seqlen, head_dim;
  std::vector<int> lengths;     // of each batch element, the rows that are there; empty: all
  std::size_t first;            // element of the buffer at which it begins
  Strides strides;              // of a paged tensor, `batch` leads from a page to the next
  std::vector<int> cu_seqlens;  // as Problem has it; empty: not packed
  std::vector<int> page_table;  // as Problem has it; empty: not paged
  int page_size;

  /// The rows of a batch element that are there.
  int rows(int element) const { return lengths.empty() ? seqlen : lengths[element]; }
  /// The element of the buffer at which a row begins.
  std::size_t offset(int element, int head, int row) const;
};

/// The tensors of one problem. Those of Q, K and V are in one buffer if they are interleaved, and those of K and V if V is
/// the first columns of K.
struct Placement {
  Tensor Q, K, V, O;
  // Of the buffers; 0: it is in the one before.
  std::size_t Q_elements, K_elements, V_elements, O_elements;
};

/// The pages of a pool that K is cut into: a quarter more than its sequences need.
std::int64_t pages_of_pool(int batch, int seqlen_k, int page_size);

/// Pages are drawn with this seed from the pool. Where the heads of a row lie side by side, a gap
/// as wide as a head follows them, which no kernel can know of but by the strides; that of V is 16
/// bytes wider, 32 or 128 where the layout says so, so that its strides are not K's. (Of interleaved Q, K and V the others are such a
/// gap, and the strides are the same.)
Placement place(const reference::Shape &shape, Layout layout, int page_size, std::uint64_t seed);

/// Of K or V, dense, the rows that are not in the cache: [batch, kv_heads, seqlen_new, its columns].
reference::Elements new_rows(const reference::Shape &shape, const reference::Elements &dense);

/// Copies the rows that are there from a dense tensor into a buffer.
void scatter(const Tensor &tensor, const reference::Elements &dense, reference::Elements &buffer);

/// Copies them back and leaves kPoison behind: what else is left in the buffer are its gaps. Rows
/// that are not there are 0.
reference::Elements gather(const Tensor &tensor, reference::Elements &buffer);

/// A buffer of nothing but kPoison, and how many elements of one are something else.
reference::Elements poisoned(std::size_t elements);
std::size_t not_poison(const reference::Elements &buffer);
