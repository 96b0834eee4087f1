// SPDX-License-Identifier: MIT
// What the program (common/program/program.cpp) and a step (steps/NN-idea/attention.cu) know of
// each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "reference/type.h"

/// Where the rows of a tensor lie: row i of head h of batch element b begins b * batch + h * head +
/// i * row elements after the first. The elements of a row follow each other.
struct Strides {
  std::int64_t batch, head, row;
};

/// By what the elements of each head are multiplied: [batch, heads] of Q, [batch, kv_heads] of K
/// and V.
struct HeadScales {
  const float *Q, *K, *V;
};

struct Problem;

/// What one of several GPUs has of a sequence, in its own memory: `part_rows` rows, or at the sequence's end
/// fewer. All are dense, [batch, part_rows, heads or kv_heads, head_dim]. The rows that exist come first.
struct GpuPart {
  const void *Q, *K, *V;
  void *O;
  void *workspace;
  void *stream;  // on which the step's work begins and ends
  // Where the step decodes, and else null: the problem of all queries and this GPU's part of the keys, as one GPU has
  // it, with its pages, its own O of all queries, workspace and stream. The four tensors above are null then.
  const Problem *own;
  // Of a backward pass, as Problem has them. lse is [batch, heads, part_rows]; O is an input.
  const void *dO = nullptr;
  const float *lse = nullptr;
  void *dQ = nullptr, *dK = nullptr, *dV = nullptr;
};

/// Who carries bytes from one GPU to another: NCCL's kernels, or the copy engines.
enum class Link { kNccl, kCopies };

/// One forward pass of attention: O = softmax(scale Q K^T) V for each of batch * heads
/// independent heads. A step takes the plain problem, and of the rest what its header's 'Takes'
/// names. Plain: fp16, dense [batch, heads, seqlen, head_dim], as many keys as queries and as many
/// key heads as query heads, the scale 1 / sqrt(head_dim), and every query sees every key.
///
/// Or one backward pass (Step::gradients): dQ, dK and dV from Q, K, V, O, lse and dO (reference/gradients.h).
struct Problem {
  const void *Q;  // in the memory of the device, as are all that follow
  void *K, *V;    // written only where K_new is given
  void *O;        // an input of a backward pass
  // Where the step writes it (Step::writes_lse), and an input of a backward pass: the natural logarithm of each
  // row's sum of e^score, dense [batch, heads, seqlen_q]; -infinity for a row that sees no key, and nothing for
  // rows that are not there.
  float *lse;
  const void *dO;      // of a backward pass: the derivative of the loss with respect to O, as O
  void *dQ, *dK, *dV;  // and its results, as O, K and V
  // And the derivative of the loss with respect to each sink's logit, [heads]; null: there are no sinks, or nobody asks.
  float *d_sink_logits;
  void *workspace;  // as large as Step::workspace_bytes says
  void *stream;     // a cudaStream_t; null, the default stream, but for a library's caller
  Strides Q_strides, K_strides, V_strides, O_strides;
  Type type;          // of the elements of Q, K, V and O
  int head_dim_v;     // of V and O; head_dim but for a step that takes --head-dim-v
  HeadScales scales;  // where the type is fp8
  int batch, heads;
  int kv_heads;  // divides heads: query heads of one h / (heads / kv_heads) share a head of K, V
  int seqlen_q, seqlen_k, head_dim;
  bool causal;  // query i sees keys up to i + seqlen_k - seqlen_q, of its sequence's lengths
  int window;   // it sees only the last `window` of those keys; 0: all of them
  int sinks;    // with a window: it also sees the first `sinks` of those keys
  // It sees the keys from window_left before its own position, i + seqlen_k - seqlen_q, to window_right after
  // it, as FlashAttention's window_size has it; -1: no limit.
  int window_left, window_right;
  // A score is scale q . k; then, with a soft cap, cap tanh(score / cap); then ALiBi adds
  // -slope |i + seqlen_k - seqlen_q - j|. A sink is one more key of each row, which has no value: its score is
  // the head's logit.
  float scale;               // 0 or more
  float softcap;             // 0: none
  const float *slopes;       // of ALiBi, [heads]; null: no bias
  const float *sink_logits;  // [heads]; null: no sinks
  // Where the sequences differ in length: [batch], null if all are full. Rows beyond do not exist:
  // those of Q, K and V must not be read, and those of O must not be written.
  const int *lengths_q, *lengths_k;
  // Where the sequences follow each other without a gap: row i of batch element b is row
  // cu_seqlens[b] + i of a tensor that has no batch (strides.batch is 0). [batch + 1], the lengths
  // added up; null if they do not. The lengths are given then, too.
  const int *cu_seqlens_q, *cu_seqlens_k;
  int total_q, total_k;  // rows of such a Q, and of such a K and V; 0 if not known
  // Where K and V are cut into pages: row i of batch element b is row i % page_size of page
  // page_table[b, i / page_size], and K_strides.batch leads from a page to the next. A sequence's
  // entries beyond its last key are -1.
  const int *page_table;     // [batch, ceil(seqlen_k / page_size)], null if K and V are not paged
  int page_size, num_pages;  // keys of a page, and the pages that K and V have
  // And for a caller of step 57 as a library: from the first page of a sequence to the next one's first (0: as above);
  // the row at which each sequence's keys begin (null: 0), and, if K and V are `caches` sequences, which of them it
  // reads (null: that of its number).
  std::int64_t page_table_stride;
  const int *starts_k, *cache_index;  // [batch]
  int caches;
  // Where K and V are a cache that lacks each sequence's last seqlen_new keys: these keys and their
  // values, dense [batch, kv_heads, seqlen_new, head_dim]. The step stores them in K and V, at
  // their rows, and their queries see them. Null if K and V have all.
  const void *K_new, *V_new;
  int seqlen_new;
  // And for a caller of step 57, the library: in any order, and of each sequence as many as it
  // says.
  Strides K_new_strides, V_new_strides;
  const int *lengths_new, *cu_seqlens_new;  // as lengths_k and cu_seqlens_k
  // Rotary embedding (Su et al. 2021, 'RoFormer', equation 34) of Q and K before the scores: the
  // pair c of the row at position t turns by the angle whose cosine and sine these hold. Key j is
  // at position j, query i at i + seqlen_k - seqlen_q (of its sequence's lengths). In a cache that
  // K_new is added to, the keys are rotated already.
  Rope rope;
  int rope_dim;                      // columns that turn, the first ones: a multiple of 2
  const float *rope_cos, *rope_sin;  // [seqlen_k or more, rope_dim / 2], null without
  int splits;                        // how many blocks share a sequence's keys; 0: the step decides
  // Where several GPUs share the sequence: it is cut into gpus * chunks chunks of chunk_rows rows, and GPU g has
  // chunk g of all four tensors. If a GPU has two chunks (Step::two_ends), the second is the g-th from the end. Q, K,
  // V, O and the workspace above are null, and the strides are those of a part.
  int gpus;    // 0: this GPU has it all
  int chunks;  // of a GPU: 1 or 2
  int chunk_rows;
  int part_rows;         // chunks * chunk_rows
  const GpuPart *parts;  // [gpus], in the memory of the host
  Link link;
  int leave_sms;  // multiprocessors that a kernel leaves free
};

/// The rows of the sequence before a GPU's chunk, its first (0) or its second (1).
inline std::int64_t first_row_of(const Problem &problem, int gpu, int which) {
  return std::int64_t{which == 0 ? gpu : 2 * problem.gpus - 1 - gpu} * problem.chunk_rows;
}

/// The rows of the sequence that a chunk has, or all chunks of a GPU.
static inline int rows_of(const Problem &problem, int gpu, int which) {
  const std::int64_t left = problem.seqlen_k - first_row_of(problem, gpu, which);
  return left < 0 ? 0 : left < problem.chunk_rows ? static_cast<int>(left) : problem.chunk_rows;
}
static inline int rows_of(const Problem &problem, int gpu) {
  return rows_of(problem, gpu, 0) + (problem.chunks == 2 ? rows_of(problem, gpu, 1) : 0);
}

/// This device does not take the step at this shape.
struct ShapeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The device cannot do what was asked for: it is absent, too small or too old.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Step {
  const char *name = nullptr;   // "02-loop-inverted": the directory, and the label in all results
  const char *needs = nullptr;  // "sm_80": the header's 'Needs'
  const char *takes =
      nullptr;        // "--causal --window": the header's 'Takes', beyond the plain problem
  int tile;           // the sequence lengths must be multiples of this
  int default_batch;  // on a GPU; less than 16 where a step's time or memory does not allow it
  void (*launch)(const Problem &);  // all of the step's kernels; throws the above
  std::size_t (*workspace_bytes)(const Problem &) = nullptr;
  std::vector<int> head_dims = {64, 128};  // those it takes; the first is the emulator's default
  int page_rows = 1;                       // page sizes must be multiples of this
  bool decodes = false;     // its default problem: a query per head and a long cache of K and V
  bool writes_lse = false;  // beside O
  bool gradients = false;   // a backward pass: it writes dQ, dK and dV
  bool same_bits = true;    // in every run; false where blocks add to one number in any order
  bool two_ends = false;    // each of several GPUs has two chunks of the sequence
};

// One source, compiled once for each backend.
extern const Step cpu_step;
extern const Step gpu_step;
