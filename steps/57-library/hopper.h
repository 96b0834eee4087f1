// SPDX-License-Identifier: MIT
// Which calls the kernels of steps 53, 54, 56, 81 and 87 take, and such a call as the Problem that they take.
#pragma once

#include "steps/57-library/call.h"
#include "steps/69-training/backward.h"

namespace {

/// A tensor that TMA reads or writes: as many blocks (sequences, or pages), heads and rows.
struct Mapped {
  const void *data;
  Strides strides;
  int blocks, heads, rows;
};

/// Whether a tensor map can describe it (CUDA driver API, 'cuTensorMapEncodeTiled'): strides are multiples of 16
/// bytes, as the library demands of all tensors, and less than 2^40 bytes. Tensors without rows, or that repeat
/// themselves by a stride of 0, are left to the other kernels. The map begins as many rows before the data as there are (sequence_map), and an
/// address is not negative.
inline bool has_map(const Mapped &tensor) {
  const auto fits = [](int count, std::int64_t stride) {
    return count == 1 || (stride > 0 && stride < std::int64_t{1} << 39);  // of 2 bytes each
  };
  return tensor.rows > 0 && fits(tensor.blocks, tensor.strides.batch) &&
         fits(tensor.heads, tensor.strides.head) && fits(tensor.rows, tensor.strides.row) &&
         (tensor.rows == 1 ||
          reinterpret_cast<std::uintptr_t>(tensor.data) / 2 / std::uintptr_t(tensor.strides.row) >=
              std::uintptr_t(tensor.rows));
}

/// Q or O, and K or V, of a call.
inline Mapped mapped_queries(const Call &p, const void *data, const Strides &strides) {
  return {data, strides, p.cu_seqlens_q ? 1 : p.batch, p.heads,
          p.cu_seqlens_q ? p.total_q : p.seqlen_q};
}
inline Mapped mapped_keys(const Call &p, const void *data, const Strides &strides) {
  if (p.cu_seqlens_k) return {data, strides, 1, p.kv_heads, p.total_k};
  if (p.page_table) return {data, strides, p.num_pages, p.kv_heads, p.page_size};
  return {data, strides, p.caches, p.kv_heads, p.seqlen_k};
}

/// Strides that a map takes where a dimension has one element, so that the caller's may be anything. (The sequences of
/// packed rows are 0 apart.)
inline Strides strides_for_map(const Problem &p, const Mapped &tensor, bool packed) {
  const auto step = [&](int count, std::int64_t stride) { return count > 1 ? stride : p.head_dim; };
  return Strides{packed ? 0 : step(tensor.blocks, tensor.strides.batch),
                 step(tensor.heads, tensor.strides.head), step(tensor.rows, tensor.strides.row)};
}

/// The most tiles of Q that steps 53, 54 and 56 number, and of keys that steps 92 and 87 do.
constexpr std::int64_t most_hopper_tiles = 1 << 30;

/// Whether they take calls of this kind at all. Up to 16 queries are new tokens (decodes). Up to 32 columns the kernels
/// of mma.sync have tiles of 32, and these have 64.
inline bool may_be_hoppers(const Call &p, const Hopper &hopper) {
  return p.seqlen_q > 16 && p.head_dim > 32 && hopper.has_tiles(p);
}

/// Whether they take the call, once the keys are stored and all rows are turned.
inline bool hopper_takes(const Call &p, const Hopper &hopper) {
  if (!may_be_hoppers(p, hopper) || p.sinks > 0 || p.seqlen_k == 0) return false;
  if (p.page_table && (!has_head_dims_of_53(p) || p.page_size % 8 || p.starts_k)) return false;
  if ((p.slopes_stride > 0 && p.batch > 1) || (p.lse && p.lse_packed)) return false;
  if (std::int64_t{p.batch} * p.heads * ((p.seqlen_q + 127) / 128) > most_hopper_tiles)
    return false;
  return has_map(mapped_queries(p, p.Q, p.Q_strides)) &&
         has_map(mapped_queries(p, p.O, p.O_strides)) &&
         has_map(mapped_keys(p, p.K, p.K_strides)) && has_map(mapped_keys(p, p.V, p.V_strides));
}

/// Whether the kernel of step 92, or above head dim 128 of step 87, takes the backward pass.
inline bool hopper_takes(const Backward &p) {
  const bool wide = p.head_dim > 128;
  if (wide && (p.softcap > 0 || p.slopes || p.sink_logits)) return false;
  const int keys = wide ? 64 : 128;  // of a tile
  if (std::int64_t{p.batch} * p.kv_heads * ((p.seqlen_k + keys - 1) / keys) > most_hopper_tiles)
    return false;
  return has_map(mapped_queries(p, p.Q, p.Q_strides)) &&
         has_map(mapped_queries(p, p.dO, p.dO_strides)) &&
         has_map(mapped_keys(p, p.K, p.K_strides)) && has_map(mapped_keys(p, p.V, p.V_strides)) &&
         has_map(mapped_keys(p, p.dK, p.dK_strides)) && has_map(mapped_keys(p, p.dV, p.dV_strides));
}

/// The problem that is left for steps 53, 54 and 56: with one window, and with strides for maps.
inline Problem problem_for_hopper(const Call &call, void *workspace) {
  Problem p = call;
  p.workspace = workspace;
  p.causal = false, p.window = 0;  // window_left and window_right say it
  const auto of_q = [&](const void *data, const Strides &strides) {
    return strides_for_map(p, mapped_queries(call, data, strides), p.cu_seqlens_q);
  };
  const auto of_k = [&](const void *data, const Strides &strides) {
    return strides_for_map(p, mapped_keys(call, data, strides), p.cu_seqlens_k);
  };
  p.Q_strides = of_q(p.Q, p.Q_strides), p.O_strides = of_q(p.O, p.O_strides);
  p.K_strides = of_k(p.K, p.K_strides), p.V_strides = of_k(p.V, p.V_strides);
  return p;
}

}  // namespace
