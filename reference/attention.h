// SPDX-License-Identifier: MIT
// Attention, by its definition. Everything else in this book computes this, faster.
//
// For each head there are queries, keys and values: the rows of Q, K and V, each d numbers long. A
// query asks every key that it sees how well they match: the score is their dot product. The
// softmax turns a query's scores into weights, positive and summing to 1. The output for that query
// is the average of the values under those weights:
//
//     s_j = (q . k_j) / sqrt(d)            how well key j matches
//     p_j = e^(s_j) / sum_i e^(s_i)        its weight
//     o   = sum_j p_j v_j                  the weighted average
//
// (Vaswani et al. 2017, 'Attention Is All You Need', equation 1; 1 / sqrt(d) keeps the scores of
// random vectors at variance 1.) A query that sees no key has the output 0. All arithmetic here is
// in double precision.
//
// With rotary embedding (Su et al. 2021, 'RoFormer') queries and keys are turned first: each pair of
// a row's elements, by an angle that grows with the row's position in its sequence. The dot product
// of two rows that are turned depends on the distance of their positions, not on the positions.
//
// A model may change a score before the softmax, in this order: another scale in place of 1 / sqrt(d); a
// soft cap, cap tanh(s / cap), which stays between -cap and cap (Gemma 2); a bias that falls with the distance
// of query and key, -slope |distance|, with a slope per head (Press et al. 2021, 'ALiBi'). And a sink: a logit
// per head, learned, of a key without a value. It is in the denominator alone (gpt-oss).
//
// Beside o, a caller may want the logarithm of the denominator, the log-sum-exp: ln sum_i e^(s_i), the sink
// included. Two results over different keys can be merged with it, and the backward pass needs it. It is
// -infinity for a query that sees nothing and has no sink.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "reference/half.h"
#include "reference/type.h"

namespace reference {

/// The shape of a problem, and who sees whom.
struct Shape {
  int batch = 1, heads = 1;
  int kv_heads = 1;  // divides heads: heads / kv_heads query heads in a row share keys and values
  int seqlen_q = 1, seqlen_k = 1, head_dim = 1;
  int head_dim_v = 0;   // of V and O; 0: head_dim
  bool latent = false;  // V is the first columns_of_v columns of K
  bool causal = false;  // a query sees no key after its own position
  int window = 0;       // it sees only the last `window` keys up to its own position; 0: no window
  int sinks = 0;        // with a window: and the first `sinks` of these keys
  // Or, as FlashAttention's window_size: the keys from window_left before its own position to window_right
  // after it; -1: no limit.
  int window_left = -1, window_right = -1;
  std::optional<float> scale = {};  // of the scores; none: 1 / sqrt(head_dim)
  float softcap = 0;                // 0: none
  bool alibi = false;
  bool sink_logits = false;
  // What each element of the batch uses of seqlen_q and seqlen_k; empty: all.
  std::vector<int> lengths_q = {}, lengths_k = {};
  Rope rope = Rope::kNone;
  int rope_dim = 0;  // so many columns turn, the first ones; 0: all
  // So many keys of each sequence, the last, come beside a cache that has the others. Those of a
  // cache are rotated already.
  int seqlen_new = 0;

  int length_q(int element) const { return lengths_q.empty() ? seqlen_q : lengths_q[element]; }
  int length_k(int element) const { return lengths_k.empty() ? seqlen_k : lengths_k[element]; }
  int columns_of_v() const { return head_dim_v ? head_dim_v : head_dim; }
  int turned_columns() const { return rope == Rope::kNone ? 0 : rope_dim ? rope_dim : head_dim; }
  double softmax_scale() const {
    return scale ? double{*scale} : 1 / std::sqrt(static_cast<double>(head_dim));
  }
};

/// The keys first, first + 1 ... end - 1, and before them 0, 1 ... sinks - 1; sinks <= first.
struct Keys {
  int first, end, sinks = 0;

  int count() const { return sinks + end - first; }
  int operator[](int i) const { return i < sinks ? i : first + i - sinks; }
};

/// The keys that a query sees: this alone knows of masks, windows and lengths.
///
/// Positions are aligned at the end, as FlashAttention has it: the last query stands where the last
/// key stands. With more keys than queries the first query sees keys before it (a cache of them);
/// with fewer, the first queries see none.
Keys keys_seen(const Shape &shape, int batch, int query);

/// Where a query stands: at the key of this number. (Below 0, before all keys.)
int position_of(const Shape &shape, int batch, int query);

/// Does this query see this key?
bool sees(const Shape &shape, int batch, int query, int key);

/// The pairs of a query and a key that it sees, of all heads: 2 head_dim operations each, the
/// multiplications and additions of Q K^T, and 2 for each column of V, those of P V.
double visible_pairs(const Shape &shape);

/// The keys that any query sees, of one head of each element of the batch: what must be read of K, or
/// of V.
double keys_read(const Shape &shape);

/// The bits of a tensor's elements. A vector of n of them is not set to zero: whoever draws or copies
/// them does so on all cores, and one core would take seconds to write 2^30 zeros before.
template <class T>
struct Unset : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = Unset<U>;
  };
  template <class U>
  void construct(U *place) {
    ::new (static_cast<void *>(place)) U;
  }
  template <class U, class... Values>
  void construct(U *place, Values &&...values) {
    ::new (static_cast<void *>(place)) U(std::forward<Values>(values)...);
  }
};
using Elements = std::vector<std::uint16_t, Unset<std::uint16_t>>;

/// What turns the rows: pair c of the row at position t by the angle t / 10000^(2 c / head_dim), whose
/// cosine and sine these are. In fp32, as kernels get them.
struct Rotation {
  std::vector<float, Unset<float>> cos, sin;  // [seqlen_k, head_dim / 2]; empty: nothing turns
};
Rotation rotation_of(const Shape &shape);

/// By what the elements of each head are multiplied, where they are fp8; empty: by nothing.
struct Scales {
  std::vector<float> Q;     // [batch, heads]
  std::vector<float> K, V;  // [batch, kv_heads]
};

/// What goes in, as the bits of elements of a type.
struct Inputs {
  Shape shape;
  Type type;
  Elements Q;  // [batch, heads, seqlen_q, head_dim]
  Elements K;  // [batch, kv_heads, seqlen_k, head_dim]
  Elements V;  // [batch, kv_heads, seqlen_k, columns_of_v]
  Rotation rotation = {};
  Scales scales = {};
  std::vector<float> slopes = {};       // of ALiBi, [heads]; empty: no bias
  std::vector<float> sink_logits = {};  // [heads]; empty: no sinks
  Elements dO = {};                     // as Q; of a backward pass (gradients.h), else empty
};

/// The columns of pair c.
struct Pair {
  int x, y;
};
Pair pair_of(const Shape &shape, int c);

/// Turns a row as its position wants it, where the problem has a rotation.
void rotate(const Inputs &inputs, int position, double *row);

/// Whether a key is turned as it is read, or has come so.
bool is_rotated_here(const Shape &shape, int batch, int key);

/// A query of a head.
struct Place {
  int batch, head, row;
};

/// One row of the output, and what it was made of.
struct Row {
  std::vector<double> query;   // rotated, [head_dim]
  Keys keys;                   // that the query sees
  std::vector<double> scaled;  // of these keys: q . k times the scale
  std::vector<double> biases;  // ALiBi's; empty: none
  std::vector<double> scores, weights;
  std::vector<double> output;  // [columns_of_v]
  double sink_weight = 0;      // the weights and this sum to 1, if there are any
  double log_sum_exp = -INFINITY;
};

/// Some keys of a head, rotated, and their values as numbers, for all queries that see none but these.
struct KeyValues {
  int first;
  std::vector<double, Unset<double>> K;          // [some keys from `first` on, head_dim]
  std::vector<float, Unset<float>> V;            // [some keys, columns_of_v]
  std::vector<double, Unset<double>> K_columns;  // K transposed: [head_dim, some keys]
};
KeyValues key_values(const Inputs &inputs, Place place, int first, int end);

/// A function that g++ compiles twice, once for CPUs whose vectors have 32 bytes. The loader chooses, with the
/// same results. (Not with sanitizers, which are not there yet when it does.)
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOR_WIDE_VECTORS [[gnu::target_clones("avx2", "default")]]
#else
#define FOR_WIDE_VECTORS
#endif

/// Calls f(width, first) for all columns of a row: eight of them, `width` a constant, and what is left
/// one by one. Their sums over the keys are then in registers, and compilers make vectors of them.
template <class F>
[[gnu::always_inline]] inline void in_columns(int columns, F f) {
  int first = 0;
  for (; first + 8 <= columns; first += 8) f(std::integral_constant<int, 8>(), first);
  for (; first < columns; first++) f(std::integral_constant<int, 1>(), first);
}

/// Attention for one query.
Row attention_row(const Inputs &inputs, const KeyValues &head, Place place);
inline Row attention_row(const Inputs &inputs, Place place) {
  const Keys keys = keys_seen(inputs.shape, place.batch, place.row);
  return attention_row(inputs, key_values(inputs, place, keys[0], keys.end), place);
}

/// The row of K and V, [batch * kv_heads * seqlen_k, head_dim], that holds key 0 of a query's head.
std::size_t first_key(const Shape &shape, Place place);

}  // namespace reference
