// SPDX-License-Identifier: MIT
// The forward pass whose O and log-sum-exp a backward pass starts from, on a GPU: as plain as can be, in fp32.
// The program checks it like any kernel. (On the emulator the reference computes it.)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/kernel/step.h"

namespace {

constexpr int threads = 128;

/// O and the log-sum-exp of a query per thread. The block's threads read the same keys at the same time. A row has
/// p.head_dim columns, d at most.
template <class T, int d>
__global__ void __launch_bounds__(threads) forward(Problem p) {
  const int query = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, b = blockIdx.z;
  const int seqlen_q = p.lengths_q ? p.lengths_q[b] : p.seqlen_q;
  const int seqlen_k = p.lengths_k ? p.lengths_k[b] : p.seqlen_k;
  if (query >= seqlen_q) return;
  // The keys from `begin` to `end` - 1, as keys_seen of reference/attention.h.
  const int own = query + seqlen_k - seqlen_q;
  const int begin = p.window_left >= 0 && p.window_left < own ? own - p.window_left : 0;
  int end = p.causal ? own + 1 : seqlen_k;
  if (p.window_right >= 0 && p.window_right < end - 1 - own) end = own + 1 + p.window_right;
  const int q_row = query + (p.cu_seqlens_q ? p.cu_seqlens_q[b] : 0);
  const int k_row = begin + (p.cu_seqlens_k ? p.cu_seqlens_k[b] : 0);
  const int kv_head = head / (p.heads / p.kv_heads);
  const T *const Q = static_cast<const T *>(p.Q) + b * p.Q_strides.batch + head * p.Q_strides.head +
                     q_row * p.Q_strides.row;
  const T *K = static_cast<const T *>(p.K) + b * p.K_strides.batch + kv_head * p.K_strides.head +
               k_row * p.K_strides.row;
  const T *V = static_cast<const T *>(p.V) + b * p.V_strides.batch + kv_head * p.V_strides.head +
               k_row * p.V_strides.row;
  T *const O = static_cast<T *>(p.O) + b * p.O_strides.batch + head * p.O_strides.head +
               q_row * p.O_strides.row;
  T q[d];
  // A sink is a key of no value: its power is 1 relative to the maximum that it is.
  float o[d] = {}, m = p.sink_logits ? p.sink_logits[head] : -INFINITY, l = p.sink_logits ? 1 : 0;
#pragma unroll
  for (int k = 0; k < d; k++) q[k] = k < p.head_dim ? Q[k] : T(0.0f);
  for (int key = begin; key < end; key++, K += p.K_strides.row, V += p.V_strides.row) {
    float s = 0;
#pragma unroll
    for (int k = 0; k < d; k++)
      if (k < p.head_dim) s += float(q[k]) * float(K[k]);
    s *= p.scale;
    if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap);
    if (p.slopes) s -= p.slopes[head] * fabsf(float(own - key));
    if (s > m) {
      const float alpha = __expf(m - s);
      m = s;
      l *= alpha;
#pragma unroll
      for (int k = 0; k < d; k++) o[k] *= alpha;
    }
    const float weight = __expf(s - m);
    l += weight;
#pragma unroll
    for (int k = 0; k < d; k++)
      if (k < p.head_dim) o[k] += weight * float(V[k]);
  }
#pragma unroll
  for (int k = 0; k < d; k++)
    if (k < p.head_dim) O[k] = T(begin < end ? o[k] / l : 0.0f);
  p.lse[(std::int64_t{b} * p.heads + head) * p.seqlen_q + query] = l > 0 ? m + logf(l) : -INFINITY;
}

template <class T>
void launch(const Problem &p) {
  const dim3 grid((p.seqlen_q + threads - 1) / threads, p.heads, p.batch);
  if (p.head_dim <= 64)
    forward<T, 64><<<grid, threads>>>(p);
  else if (p.head_dim <= 128)
    forward<T, 128><<<grid, threads>>>(p);
  else
    forward<T, 256><<<grid, threads>>>(p);
}

}  // namespace

/// Head dims up to 256; any layout, but pages; any scale; causal; windows to both sides; lengths; grouped heads;
/// soft caps, ALiBi and sinks.
extern "C" cudaError_t forward_pass(const Problem &p) {
  p.type == Type::kBf16 ? launch<__nv_bfloat16>(p) : launch<__half>(p);
  return cudaGetLastError();
}
