// SPDX-License-Identifier: MIT
/* Attention for a model: the C interface of libattention.so (`make libattention.so`).
 *
 *     O = softmax(scores) V,  scores = scale Q K^T, changed as a model asks
 *
 * for a batch of sequences: prompts of any length, new tokens with a cache, or both in one call.
 * Every call looks at all of its arguments before it launches or writes anything. It returns 0, or
 * one of the failures below. Then attention_message() says in one line which argument is wrong, what
 * it holds, and what it must be. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum attention_status {
  ATTENTION_OK = 0,
  ATTENTION_NULL_POINTER = 1, /* an argument that is needed is missing */
  ATTENTION_STRUCT_SIZE = 2,  /* compiled with another version of this header */
  ATTENTION_TYPE = 3,
  ATTENTION_HEAD_DIM = 4,
  ATTENTION_SIZE = 5,   /* no batch or heads, or a size that is negative or too large */
  ATTENTION_HEADS = 6,  /* kv_heads does not divide heads */
  ATTENTION_LENGTH = 7, /* a sequence does not fit its tensor */
  ATTENTION_PAGE = 8,   /* a page that the cache does not have, or a table that makes no sense */
  ATTENTION_WINDOW = 9, /* a limit below -1, or limits or sinks without a window */
  ATTENTION_ROPE = 10,  /* no such rotation, or tables that are too short */
  ATTENTION_ALIGNMENT = 11, /* a pointer or a stride that is no multiple of 16 bytes */
  ATTENTION_STRIDE = 12,    /* negative, or rows that are written overlap each other */
  ATTENTION_OVERLAP = 13,   /* O, the cache or the workspace overlaps what is read, or each other */
  ATTENTION_WORKSPACE = 14, /* smaller than attention_workspace_bytes says */
  ATTENTION_MEMORY = 15,    /* attention_allocate: the device has no room */
  ATTENTION_DEVICE = 16,    /* no GPU, or one that the library was not compiled for */
  ATTENTION_FAILED = 17,    /* a launch or a copy failed; on the emulator: the kernel, too */
  ATTENTION_SCORES = 18,    /* a scale, a soft cap or a stride of slopes that is no such number */
  ATTENTION_CACHE = 19,     /* a sequence of the cache that K and V do not have */
  ATTENTION_BACKWARD = 20   /* what attention_forward takes, and attention_backward does not */
};

enum attention_type { ATTENTION_FP16 = 0, ATTENTION_BF16 = 1 };

/* Which of the first rope_dim elements of a row turn together (RoFormer, equation 34). */
enum attention_rope {
  ATTENTION_ROPE_NONE = 0,
  ATTENTION_ROPE_HALVES = 1,    /* c and c + rope_dim / 2, as Llama has it */
  ATTENTION_ROPE_NEIGHBOURS = 2 /* 2 c and 2 c + 1, as GPT-J has it */
};

#define ATTENTION_NO_LIMIT (-1)

/* Row i of head h of sequence b begins b * batch_stride + h * head_stride + i * row_stride elements
 * after `data`. The elements of a row, head_dim or head_dim_v, follow each other. `data` and the
 * strides are multiples of 16 bytes. */
struct attention_tensor {
  void *data; /* in the memory of the device */
  int64_t batch_stride, head_stride, row_stride;
};

/* Integers that the kernels read on the device. Whoever has the same numbers on the host gives them,
 * too, and they are checked before anything is launched. Without them (host is NULL) the kernels
 * clamp what they read: whatever the array holds, nothing outside of the tensors is read or written.
 * Both NULL: there is no such array. */
struct attention_array {
  const int *device;
  const int *host;
};

/* Set all of it to 0 first, then struct_bytes and what there is. Every length may be 0. Without
 * queries a call does nothing but store K_new. Without keys O is 0. Where seqlen_q is 0, or total_q of
 * packed sequences, Q and O are not looked at, and may be NULL; so are K and V where seqlen_k or
 * total_k is 0. */
struct attention_problem {
  size_t struct_bytes; /* sizeof(struct attention_problem) */
  int type;            /* enum attention_type, of Q, K, V, O, K_new and V_new */
  int head_dim;        /* of Q and K: a multiple of 8, at most 256 */
  int batch;           /* sequences */
  int heads;           /* of Q and O; batch * heads is at most 65535 */
  int kv_heads;        /* of K and V; divides heads. Query head h reads h / (heads / kv_heads) */
  int seqlen_q;        /* queries of the longest sequence: 0 to 65535 * 128 */
  int seqlen_k;        /* keys of the longest sequence, with the new ones: 0 to 2^27 */
  int head_dim_v;      /* of V, V_new and O, as head_dim; 0: head_dim */

  struct attention_tensor Q;    /* [batch, heads, seqlen_q, head_dim], in any order of strides */
  struct attention_tensor K, V; /* [batch, kv_heads, seqlen_k, head_dim], of V head_dim_v */
  struct attention_tensor O;    /* [batch, heads, seqlen_q, head_dim_v] */

  /* NULL, or where the natural logarithm of each row's sum of e^score goes: [batch, heads, seqlen_q],
   * if Q is packed [heads, total_q]. -infinity for a query that sees no key and has no sink. */
  float *lse;

  /* A score is scale q . k; then, with a soft cap, softcap tanh(score / softcap); then ALiBi adds
   * -slope |position of the query - position of the key|. */
  float scale;               /* 0: 1 / sqrt(head_dim) */
  float softcap;             /* 0: none */
  const float *alibi_slopes; /* [heads], or [batch, heads] with the stride; NULL: no bias */
  int64_t alibi_stride;      /* from a sequence's slopes to the next one's; 0: all have the same */
  const float *sink_logits; /* [heads]: the score of one more key, which has no value; NULL: none */

  /* The last query of a sequence stands at its last key. With a window a query sees the keys from
   * window_left before its own position to window_right after it, as FlashAttention's window_size
   * has it, and the first `sinks` keys up to there; ATTENTION_NO_LIMIT: all on that side. A query
   * that sees no key has O = 0. */
  int causal;                    /* not 0: a query sees no key after its own position */
  int window;                    /* not 0: these two hold. 0: they are 0, and so is `sinks` */
  int window_left, window_right; /* 0 or more, or ATTENTION_NO_LIMIT */
  int sinks;

  /* [batch]: the lengths of the sequences, where they differ; at most seqlen_q and seqlen_k. Rows
   * of O beyond them are not written. */
  struct attention_array lengths_q, lengths_k;

  /* [batch]: the row at which a sequence's keys begin, where its first rows are padding: key j is
   * row starts_k[b] + j, lengths_k does not count the rows before, and both together are at most
   * seqlen_k. Not with cu_seqlens_k. */
  struct attention_array starts_k;

  /* Packed sequences. [batch + 1]: row i of sequence b is row cu_seqlens[b] + i of a tensor without
   * a batch, of total rows; its batch_stride is 0. Without lengths a sequence ends where the next
   * begins. */
  struct attention_array cu_seqlens_q, cu_seqlens_k;
  int total_q, total_k;

  /* K and V in pages: row i of sequence b is row i % page_size of page
   * page_table[b * page_table_stride + i / page_size], and batch_stride leads from a page to the
   * next. Not with cu_seqlens_k. */
  struct attention_array page_table;
  int64_t page_table_stride; /* at least ceil(seqlen_k / page_size); 0: that */
  int page_size, pages;      /* rows per page, and pages that K and V have */

  /* [batch]: sequence b has its keys in sequence cache_index[b] of K and V, which have `caches` of
   * them. Not with cu_seqlens_k or page_table. */
  struct attention_array cache_index;
  int caches;

  /* New keys and their values: [batch, kv_heads, seqlen_new, head_dim], of V_new head_dim_v. The call
   * stores them in K and V (and turns the keys) as the last rows of their sequences, where the queries
   * see them. lengths_k counts them. Their lengths, and if packed their rows, may differ. seqlen_new 0: they are those
   * of Q, as are lengths_new and cu_seqlens_new. data NULL: K and V hold all keys. No two sequences
   * may have the rows in common that one of them appends to. */
  struct attention_tensor K_new, V_new;
  int seqlen_new;
  struct attention_array lengths_new, cu_seqlens_new;
  int total_new;

  /* Rotary embedding: the pair c of the row at position t turns by the angle with this cosine and
   * sine, [rope_positions, rope_dim / 2], in the memory of the device. Key j of a sequence is at
   * position j, or starts_k[b] + j. Query 0 turns as the first new key; without K_new the last query
   * turns as the last key. Q and K are not changed: their turned rows go into the workspace. With
   * K_new only the new keys turn, because those in the cache turned when they were stored. A
   * position that the tables do not have is their last. */
  int rope; /* enum attention_rope */
  const float *rope_cos, *rope_sin;
  int rope_positions;    /* at least seqlen_k */
  int rope_dim;          /* a multiple of 16; 0: head_dim, which is one then */
  int rope_one_position; /* not 0: all queries of a sequence turn as its query 0 */

  /* On the device, at least attention_workspace_bytes, a multiple of 16 bytes in address; NULL if no
   * bytes are needed. Set it to 0 before its first use. The calls of one stream may share it: each
   * leaves the counters in it at 0, and so does a call that fails. Streams that run at the same time
   * need one each. (On a GPU a kernel that faults ends the process's use of that GPU, and its
   * memory is lost.) */
  void *workspace;
  size_t workspace_bytes;
  void *stream; /* a cudaStream_t; NULL: the default stream */

  /* Not 0: the kernels for every GPU from sm_80 on, also where there is a faster one; of both passes. */
  int mma_only;
};

/* How much workspace a problem needs. Looks at the sizes alone: the pointers may be NULL, but which
 * are NULL counts. The bytes grow with batch, heads, seqlen_q, seqlen_k, total_q and total_k: what is
 * enough for the largest of each is enough for every call that is smaller in all and else the same. */
int attention_workspace_bytes(const struct attention_problem *problem, size_t *bytes);

/* Queues the attention of a problem on its stream and does not wait for it. Threads may call at the
 * same time. Calls that share a workspace must be of one stream.
 *
 * A stream that is being captured into a CUDA graph captures the call. A replay reads the device's
 * memory anew: tensors, lengths, starts, pages, indices, slopes and tables may hold other numbers
 * then. All that the struct holds stays as it was captured: sizes, strides, the addresses, and with
 * the sizes the kernels and the number of splits. So seqlen_q and seqlen_k must be the largest
 * that any replay has, and the memory and the workspace must live as long as the graph. What `host`
 * points to is read by the call alone. */
int attention_forward(const struct attention_problem *problem);

/* What the backward pass reads and writes beside a problem's tensors. Set all of it to 0 first. */
struct attention_gradients {
  size_t struct_bytes;            /* sizeof(struct attention_gradients) */
  struct attention_tensor dO;     /* as Q: the derivative of the loss with respect to O */
  struct attention_tensor dQ;     /* as Q. Here, too, rows beyond the lengths are not written */
  struct attention_tensor dK, dV; /* as K and V */
  /* Not 0: the same bits in every run. Only the kernel "hopper" has this; attention_backward_kernel
   * says which kernel a problem gets. 0: blocks add to dQ in any order, so its last bits may differ. */
  int deterministic;
  /* [heads], or NULL: the derivative of the loss with respect to each of sink_logits, summed over all queries of all
   * sequences. It has the same bits in every run, also where dQ has not. Must be NULL without sink_logits. */
  float *d_sink_logits;
};

/* Queues the backward pass of a problem: dQ, dK and dV from dO. The problem is that of attention_forward,
 * with the O and the lse that it wrote; they are read here, and lse must be given. The backward pass takes
 * at most 65535 * 128 keys, half of that above head dim 128, and 2^30 packed queries. It takes no sinks,
 * rope, pages, cache_index, K_new and no head_dim_v but head_dim: they are ATTENTION_BACKWARD. It has no
 * gradient of alibi_slopes.
 *
 * The workspace may be the one that the calls of this stream share. Its bytes grow as those of the
 * forward pass do; with cu_seqlens_q by batch and total_q, and not by seqlen_q. What is said above
 * of threads, streams, graphs and arrays on the device holds here, too. */
int attention_backward(const struct attention_problem *problem,
                       const struct attention_gradients *gradients);
int attention_backward_workspace_bytes(const struct attention_problem *problem,
                                       const struct attention_gradients *gradients, size_t *bytes);

/* Which kernel attention_backward launches for this problem on the current GPU, as text. Both give the
 * gradients within the same bound.
 *     "hopper"   on a GPU of compute capability 9.0, by TMA and wgmma. The library must be compiled for
 *                sm_90. Q, dO, K, V, dK and dV need strides that are not 0 (but for a dimension of one),
 *                and less than 2^40 bytes. Above head dim 128 softcap must be 0, and alibi_slopes and
 *                sink_logits NULL
 *     "mma"      else, by mma.sync. It adds to dQ in any order: `deterministic` must be 0
 *     "none"     there are no queries, or no keys: the gradients are 0 */
int attention_backward_kernel(const struct attention_problem *problem,
                              const struct attention_gradients *gradients, char *name,
                              size_t bytes);

/* Which kernel attention_forward launches for the queries of this problem on the current GPU, as
 * text. A kernel does not change an answer but by rounding; its speed may be another.
 *     "tokens"   few queries beside the keys: blocks share a sequence's keys
 *     "hopper"   more, on a GPU of compute capability 9.0, by TMA and wgmma. The library must be
 *                compiled for sm_90. It needs a head_dim of 40 or more. head_dim and head_dim_v must
 *                have the same next one of 64, 96, 128, 192 and 256, or 192 and 128. With pages both
 *                are 64 or 128, a page has a multiple of 8 rows, and there is no starts_k (unless a rotation
 *                without K_new copies them). Strides
 *                are not 0 (but for a dimension of one), and less than 2^40 bytes. There are no
 *                `sinks`, no alibi_stride, and no lse of a packed Q
 *     "prompts"  else, by mma.sync
 *     "none"     there are no queries */
int attention_kernel(const struct attention_problem *problem, char *name, size_t bytes);

/* What was wrong in this thread's last call that failed: one line, valid until the next. */
const char *attention_message(void);

/* What the library runs on: the name of the current GPU, or "emulator". */
int attention_device(char *name, size_t bytes);

/* Memory of the device, for a program that has no CUDA of its own. The copies wait for all that was
 * queued before them. NULL is ATTENTION_NULL_POINTER. What is no memory of the device, or ends
 * before these bytes do, is ATTENTION_FAILED; so is the release of what was not allocated. */
int attention_allocate(void **memory, size_t bytes);
int attention_release(void *memory);
int attention_upload(void *device, const void *host, size_t bytes);
int attention_download(void *host, const void *device, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
