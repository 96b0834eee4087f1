// SPDX-License-Identifier: MIT
// A kernel that takes every problem, and nothing clever about it: a thread per query, an fp32 sum
// per score. It shows that the program poses and checks problems that no step takes yet; the tests
// (problem_test.cpp) plant bugs in it.
//
// Needs       sm_75
// Takes       --causal, --seqlen-k, --kv-heads, --window, --type, --layout, --page-size, --lengths,
//             --sinks, --append, --rope, --rope-dim, --window-size, --scale, --softcap, --alibi, --sink-logits
#include <cstring>

#include "common/kernel/kernel.h"

namespace {

constexpr int threads = 32;        // per block
constexpr int max_head_dim = 256;  // of `head_dims` below

/// The value of 16 bits of either type: bf16 is the upper half of an fp32 number.
__device__ float value_of(half bits, Type type) {
  if (type == Type::kFp16) return __half2float(bits);
  std::uint16_t upper;
  memcpy(&upper, &bits, sizeof upper);
  const std::uint32_t word = std::uint32_t{upper} << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

/// The nearest of the type's numbers, ties to even.
__device__ half nearest(float value, Type type) {
  if (type == Type::kFp16) return __float2half(value);
  std::uint32_t word;
  memcpy(&word, &value, sizeof word);
  word += 0x7fff + (word >> 16 & 1);
  const auto upper = static_cast<std::uint16_t>(word >> 16);
  half bits;
  memcpy(&bits, &upper, sizeof bits);
  return bits;
}

/// A row of d elements that begins so many elements after the first of a tensor.
template <class T>
__device__ Matrix<T> row_of(T *first, std::int64_t offset, int d) {
  return {first + offset, 1, d};
}

/// Element c of the row at a position, rotated where the problem says so.
__device__ float rotated(const Problem &p, const Matrix<const half> &row, int position, int c) {
  const float own = value_of(row(0, c), p.type);
  if (c >= p.rope_dim) return own;
  const int pairs = p.rope_dim / 2;
  const bool halves = p.rope == Rope::kHalves;
  const int pair = halves ? c % pairs : c / 2;
  const bool is_first = halves ? c < pairs : c % 2 == 0;
  const int distance = halves ? pairs : 1;
  const float other = value_of(row(0, is_first ? c + distance : c - distance), p.type);
  const float cos = Matrix<const float>{p.rope_cos, p.seqlen_k, pairs}(position, pair);
  const float sin = Matrix<const float>{p.rope_sin, p.seqlen_k, pairs}(position, pair);
  const float turned = is_first ? own * cos - other * sin : other * sin + own * cos;
  return value_of(nearest(turned, p.type), p.type);
}

/// How many keys a batch element has, and queries.
__device__ int keys_of(const Problem &p, int batch) {
  return p.lengths_k ? Matrix<const int>{p.lengths_k, 1, p.batch}(0, batch) : p.seqlen_k;
}
__device__ int queries_of(const Problem &p, int batch) {
  return p.lengths_q ? Matrix<const int>{p.lengths_q, 1, p.batch}(0, batch) : p.seqlen_q;
}

/// The offset of row i of a head of Q or O.
__device__ std::int64_t q_offset(const Problem &p, const Strides &strides, int batch, int head,
                                 int i) {
  if (p.cu_seqlens_q) i += Matrix<const int>{p.cu_seqlens_q, 1, p.batch + 1}(0, batch);
  return batch * strides.batch + head * strides.head + i * strides.row;
}

/// The offset of row i of a head of K or V.
__device__ std::int64_t kv_offset(const Problem &p, const Strides &strides, int batch, int head,
                                  int i) {
  std::int64_t block = batch;
  if (p.cu_seqlens_k) i += Matrix<const int>{p.cu_seqlens_k, 1, p.batch + 1}(0, batch);
  if (p.page_table) {
    const int pages = (p.seqlen_k + p.page_size - 1) / p.page_size;
    const Matrix<const int> page_table{p.page_table, p.batch, pages};
    block = page_table(batch, i / p.page_size);
    i %= p.page_size;
  }
  return block * strides.batch + head * strides.head + i * strides.row;
}

/// Stores the keys and values that come beside a cache in it: a thread per row.
__global__ void __launch_bounds__(threads) append(Problem p) {
  const int i = blockIdx.x * threads + threadIdx.x, d = p.head_dim;
  if (i >= p.batch * p.kv_heads * p.seqlen_new) return;
  const int batch = i / p.seqlen_new / p.kv_heads, head = i / p.seqlen_new % p.kv_heads;
  const int j = keys_of(p, batch) - p.seqlen_new + i % p.seqlen_new;
  const std::int64_t from = std::int64_t{i} * d;
  const auto K_new = row_of(static_cast<const half *>(p.K_new), from, d);
  const auto V_new = row_of(static_cast<const half *>(p.V_new), from, d);
  const auto K = row_of(static_cast<half *>(p.K), kv_offset(p, p.K_strides, batch, head, j), d);
  const auto V = row_of(static_cast<half *>(p.V), kv_offset(p, p.V_strides, batch, head, j), d);
  for (int c = 0; c < d; c++) K(0, c) = nearest(rotated(p, K_new, j, c), p.type);
  for (int c = 0; c < d; c++) V(0, c) = V_new(0, c);
}

__global__ void __launch_bounds__(threads) attention(Problem p) {
  const int i = blockIdx.x * threads + threadIdx.x;
  const int batch = blockIdx.y / p.heads, head = blockIdx.y % p.heads;
  const int kv_head = head / (p.heads / p.kv_heads);
  const int N_q = queries_of(p, batch), N_k = keys_of(p, batch), d = p.head_dim;
  if (i >= N_q) return;
  const auto Q =
      row_of(static_cast<const half *>(p.Q), q_offset(p, p.Q_strides, batch, head, i), d);
  const auto O = row_of(static_cast<half *>(p.O), q_offset(p, p.O_strides, batch, head, i), d);

  const int position = i + N_k - N_q;  // the last query's is that of the last key
  int end = p.causal || p.window ? position + 1 : N_k;
  if (p.window_right >= 0 && p.window_right < end - 1 - position)
    end = position + 1 + p.window_right;
  int begin = p.window && p.window < end ? end - p.window : 0;
  if (p.window_left >= 0 && p.window_left < position) begin = position - p.window_left;
  float m = -INFINITY, l = 0, o[max_head_dim] = {}, q[max_head_dim];
  if (p.sink_logits) {  // a key without a value, and the first
    m = Matrix<const float>{p.sink_logits, 1, p.heads}(0, head);
    l = 1;
  }
  const float slope = p.slopes ? Matrix<const float>{p.slopes, 1, p.heads}(0, head) : 0.f;
  for (int c = 0; c < d && begin < end; c++) q[c] = rotated(p, Q, position, c);
  for (int j = 0; j < end; j++) {
    if (j >= p.sinks && j < begin) continue;
    const auto K =
        row_of(static_cast<const half *>(p.K), kv_offset(p, p.K_strides, batch, kv_head, j), d);
    const auto V =
        row_of(static_cast<const half *>(p.V), kv_offset(p, p.V_strides, batch, kv_head, j), d);
    float s = 0;
    for (int c = 0; c < d; c++)
      s += q[c] * (p.K_new ? value_of(K(0, c), p.type) : rotated(p, K, j, c));
    s *= p.scale;
    if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap);
    s -= slope * (position < j ? j - position : position - j);
    const float m_new = fmaxf(m, s);
    const float alpha = __expf(m - m_new), weight = __expf(s - m_new);
    l = l * alpha + weight;
    for (int c = 0; c < d; c++) o[c] = o[c] * alpha + weight * value_of(V(0, c), p.type);
    m = m_new;
  }
  for (int c = 0; c < d; c++) O(0, c) = nearest(l > 0 ? o[c] / l : 0, p.type);
  Matrix<float>{p.lse, p.batch * p.heads, p.seqlen_q}(batch * p.heads + head, i) = m + logf(l);
}

}  // namespace

EXPORT_STEP({
    .tile = 1,
    .default_batch = 1,
    .launch =
        [](const Problem &p) {
          const int rows = p.batch * p.kv_heads * p.seqlen_new;
          if (rows) launch<void>(append, dim3((rows + threads - 1) / threads), dim3(threads), p);
          const dim3 grid((p.seqlen_q + threads - 1) / threads, p.batch * p.heads);
          launch<void>(attention, grid, dim3(threads), p);
        },
    .head_dims = {64, 32, 80, 128, max_head_dim},
    .writes_lse = true,
});
