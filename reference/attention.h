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
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "reference/half.h"

namespace reference {

/// The shape of a problem, and who sees whom.
struct Shape {
  int batch = 1, heads = 1;
  int kv_heads = 1;  // divides heads: heads / kv_heads query heads in a row share keys and values
  int seqlen_q = 1, seqlen_k = 1, head_dim = 1;
  bool causal = false;  // a query sees no key after its own position
  int window = 0;       // only the last so many keys, up to its own position; 0: no window
  // What each element of the batch uses of seqlen_q and seqlen_k; empty: all.
  std::vector<int> lengths_q = {}, lengths_k = {};
};

/// The keys first, first + 1 ... end - 1.
struct Keys {
  int first, end;
};

/// The keys that a query sees: this alone knows of masks, windows and lengths.
///
/// Positions are aligned at the end, as FlashAttention has it: the last query stands where the last
/// key stands. With more keys than queries the first query sees keys before it (a cache of them);
/// with fewer, the first queries see none.
Keys keys_seen(const Shape &shape, int batch, int query);

/// Does this query see this key?
bool sees(const Shape &shape, int batch, int query, int key);

/// The pairs of a query and a key that it sees, of all heads: 4 head_dim operations each, the
/// multiplications and additions of Q K^T and P V.
double visible_pairs(const Shape &shape);

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

/// What goes in, as the bits of elements of a type.
struct Inputs {
  Shape shape;
  Type type;
  Elements Q;     // [batch, heads, seqlen_q, head_dim]
  Elements K, V;  // [batch, kv_heads, seqlen_k, head_dim]
};

/// A query of a head.
struct Place {
  int batch, head, row;
};

/// One row of the output, and what it was made of.
struct Row {
  Keys keys;                            // that the query sees
  std::vector<double> scores, weights;  // of these keys
  std::vector<double> output;           // [head_dim]
};

/// Some keys of a head and their values as numbers, for all queries that see none but these.
struct KeyValues {
  Keys keys;
  std::vector<float> K, V;  // [keys.end - keys.first, head_dim]
};
KeyValues key_values(const Inputs &inputs, Place place, Keys keys);

/// Attention for one query.
Row attention_row(const Inputs &inputs, const KeyValues &head, Place place);
inline Row attention_row(const Inputs &inputs, Place place) {
  const Keys keys = keys_seen(inputs.shape, place.batch, place.row);
  return attention_row(inputs, key_values(inputs, place, keys), place);
}

/// The row of K and V, [batch * kv_heads * seqlen_k, head_dim], that holds key 0 of a query's head.
std::size_t first_key(const Shape &shape, Place place);

}  // namespace reference
