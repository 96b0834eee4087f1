// SPDX-License-Identifier: MIT
// The forward pass whose O and log-sum-exp a backward pass starts from, on a GPU: as plain as can be, in fp32.
// The program checks it like any kernel. (On the emulator the reference computes it.)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/kernel/step.h"

namespace {

constexpr int threads = 128;

/// O and the log-sum-exp of a query per thread. The block's threads read the same keys at the same time.
template <class T, int d>
__global__ void __launch_bounds__(threads) forward(Problem p, float scale) {
  const int query = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, b = blockIdx.z;
  if (query >= p.seqlen_q) return;
  const int kv_head = head / (p.heads / p.kv_heads);
  const T *const Q = static_cast<const T *>(p.Q) + b * p.Q_strides.batch + head * p.Q_strides.head +
                     query * p.Q_strides.row;
  const T *K = static_cast<const T *>(p.K) + b * p.K_strides.batch + kv_head * p.K_strides.head;
  const T *V = static_cast<const T *>(p.V) + b * p.V_strides.batch + kv_head * p.V_strides.head;
  T *const O = static_cast<T *>(p.O) + b * p.O_strides.batch + head * p.O_strides.head +
               query * p.O_strides.row;
  T q[d];
  float o[d] = {}, m = -INFINITY, l = 0;
  for (int k = 0; k < d; k++) q[k] = Q[k];
  const int end = p.causal ? query + 1 + p.seqlen_k - p.seqlen_q : p.seqlen_k;
  for (int key = 0; key < end; key++, K += p.K_strides.row, V += p.V_strides.row) {
    float s = 0;
#pragma unroll
    for (int k = 0; k < d; k++) s += float(q[k]) * float(K[k]);
    s *= scale;
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
    for (int k = 0; k < d; k++) o[k] += weight * float(V[k]);
  }
#pragma unroll
  for (int k = 0; k < d; k++) O[k] = T(end > 0 ? o[k] / l : 0.0f);
  p.lse[(std::int64_t{b} * p.heads + head) * p.seqlen_q + query] =
      end > 0 ? m + logf(l) : -INFINITY;
}

template <class T>
void launch(const Problem &p) {
  const dim3 grid((p.seqlen_q + threads - 1) / threads, p.heads, p.batch);
  const float scale = 1 / sqrtf(float(p.head_dim));
  if (p.head_dim == 64)
    forward<T, 64><<<grid, threads>>>(p, scale);
  else if (p.head_dim == 128)
    forward<T, 128><<<grid, threads>>>(p, scale);
}

}  // namespace

/// Head dim 64 or 128; dense or strided; causal; grouped heads.
extern "C" cudaError_t forward_pass(const Problem &p) {
  p.type == Type::kBf16 ? launch<__nv_bfloat16>(p) : launch<__half>(p);
  return cudaGetLastError();
}
