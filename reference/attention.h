// Attention, by its definition. Everything else in this book computes this, faster.
//
// For each head there are N queries, N keys and N values: the rows of Q, K and V, each d numbers
// long. A query asks every key how well they match: the score is their dot product. The softmax
// turns a query's N scores into N weights, positive and summing to 1. The output for that query is
// the average of all values under those weights:
//
//     s_j = (q . k_j) / sqrt(d)            how well key j matches
//     p_j = e^(s_j) / sum_i e^(s_i)        its weight
//     o   = sum_j p_j v_j                  the weighted average
//
// (Vaswani et al. 2017, 'Attention Is All You Need', equation 1; 1 / sqrt(d) keeps the scores of
// random vectors at variance 1.) All arithmetic here is in double precision.
#pragma once

#include <vector>

#include "reference/half.h"

namespace reference {

/// What goes in: fp16, each [batch * heads, seqlen, head_dim].
struct Inputs {
  int batch_heads, seqlen, head_dim;
  std::vector<half> Q, K, V;
};

/// One row of the output, twice.
struct Row {
  std::vector<double> exact;    // [head_dim], the definition
  std::vector<double> rounded;  // [head_dim], with P and O rounded to fp16 and no other error
};

/// The output for one query of one head.
Row attention_row(const Inputs &inputs, int head, int row);

/// The outputs for many queries, on all cores of the host.
struct Place {
  int head, row;
};
std::vector<Row> attention_rows(const Inputs &inputs, const std::vector<Place> &places);

}  // namespace reference
