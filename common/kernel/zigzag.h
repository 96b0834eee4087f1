// SPDX-License-Identifier: MIT
// Which queries meet which keys where each GPU has both ends of a sequence, as step 72 has it, for the steps after it.
#pragma once

#include "common/kernel/gpus.h"

namespace {

/// What meets on a GPU in a hop: its queries from row `first_q` on, and the first rows of the keys of GPU `from`.
struct Meeting {
  int from, first_q, rows_q, rows_k;
};

/// In hop h, GPU g has keys of GPU g - h. All its queries see the first chunk of an earlier GPU. Those of its second
/// chunk see both chunks of a later GPU.
inline Meeting meeting(const Problem &p, int gpu, int hop) {
  const int from = (gpu + p.gpus - hop) % p.gpus;
  const bool earlier = p.causal && from < gpu, later = p.causal && from > gpu;
  return {from, later ? p.chunk_rows : 0, later ? rows_of(p, gpu, 1) : rows_of(p, gpu),
          earlier ? rows_of(p, from, 0) : rows_of(p, from)};
}

/// Whether there is anything to do in a hop.
inline bool sees(const Problem &p, int gpu, int hop) {
  const Meeting at = meeting(p, gpu, hop);
  return at.rows_q > 0 && at.rows_k > 0;
}

/// Queues on the GPUs' second streams that the first rows of a tensor with K's shape go from one GPU to another. NCCL's
/// calls must be in a group.
template <class T>
void pass(const Problem &p, int to, T *target, int from, const T *source, int rows) {
  const std::vector<Traffic> &traffics = traffic(p);
  const std::vector<ncclComm_t> &comms = communicators(p);
  const std::size_t count = std::size_t(rows) * p.kv_heads * p.head_dim;
  for (int b = 0; b < p.batch; b++, target += p.K_strides.batch, source += p.K_strides.batch) {
    if (p.link == Link::kCopies) {
      cuda_check(
          cudaMemcpyPeerAsync(target, to, source, from, count * sizeof(T), traffics[to].stream),
          "cudaMemcpyPeerAsync");
      continue;
    }
    if (is_own(from))
      nccl_check(ncclSend(source, count, nccl_type<T>, to, comms[from], traffics[from].stream),
                 "ncclSend");
    if (is_own(to))
      nccl_check(ncclRecv(target, count, nccl_type<T>, from, comms[to], traffics[to].stream),
                 "ncclRecv");
  }
}

}  // namespace
