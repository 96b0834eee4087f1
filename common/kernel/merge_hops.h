// SPDX-License-Identifier: MIT
// The results of two sets of keys become that of both, as step 27 has it, between kernels: for the steps of Part
// VII, where each hop's keys give such a result.
#pragma once

#include "common/kernel/kernel.h"

constexpr int merge_warps = 8;  // of a block, with a row each

/// Which rows of a part: of all batch elements and heads, `count` rows from `first` on. Of them those before
/// `end` have now met all keys.
struct MergedRows {
  int batch, heads, part_rows, first, count, end;
};

/// Merges a hop's result into that of the hops before: O is the mean of the two O, with the sums of their
/// exponentials as weights. Stores it in fp32, or as T if the row has met all keys.
template <class T, int d>
__global__ void merge(float *O,          // [batch, part_rows, heads, d]: of the hops so far
                      float *lse,        // [batch, heads, part_rows]: log2 of the sums
                      const float *O_2,  // the same of this hop
                      const float *lse_2, T *O_final, MergedRows rows) {
  const int i = blockIdx.x * merge_warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = i % rows.heads, b = i / rows.heads / rows.count;
  const int row = rows.first + i / rows.heads % rows.count;
  if (b >= rows.batch) return;
  constexpr int n = d / 32;  // columns of a lane
  const int place = (b * rows.part_rows + row) * rows.heads + head;
  const int all_rows = rows.batch * rows.part_rows * rows.heads;
  const int lse_place = (b * rows.heads + head) * rows.part_rows + row;
  const Matrix<float> gO{O, all_rows, d}, gLse{lse, all_rows, 1};
  const Matrix<const float> gO_2{O_2, all_rows, d}, gLse_2{lse_2, all_rows, 1};

  const float a = gLse(lse_place, 0), b_ = gLse_2(lse_place, 0), m = fmaxf(a, b_);
  const float sum = ex2(a - m) + ex2(b_ - m);
  const float weight = ex2(a - m) / sum, weight_2 = ex2(b_ - m) / sum;
  Vector<float, n> x = load<n>(gO(place, lane * n));
  const Vector<float, n> x_2 = load<n>(gO_2(place, lane * n));
  Vector<T, n> rounded;
  for (int c = 0; c < n; c++) {
    x[c] = x[c] * weight + x_2[c] * weight_2;
    rounded[c] = from_float<T>(x[c]);
  }
  if (row < rows.end) {
    store<n>(Matrix<T>{O_final, all_rows, d}(place, lane * n), rounded);
    return;
  }
  store<n>(gO(place, lane * n), x);
  __syncwarp();  // all lanes have read lse
  if (lane == 0) gLse(lse_place, 0) = m + log2f(sum);
}
