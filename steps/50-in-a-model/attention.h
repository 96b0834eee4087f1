// SPDX-License-Identifier: MIT
/* Attention for a model: the C interface of libattention.so (`make libattention.so`).
 *
 *     O = softmax(Q K^T / sqrt(head_dim)) V
 *
 * for a batch of sequences: prompts of any length, new tokens that ask a cache, or both in one call.
 * Every call looks at all of its arguments before it launches or writes anything. It returns 0, or
 * one of the failures below, and then attention_message() says in one line which argument it is,
 * what it holds, and what is allowed. */
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
  ATTENTION_SIZE = 5,   /* batch, heads or a length is 0, negative or too large */
  ATTENTION_HEADS = 6,  /* kv_heads does not divide heads */
  ATTENTION_LENGTH = 7, /* a sequence does not fit its tensor */
  ATTENTION_PAGE = 8,   /* a page that the cache does not have, or a table that makes no sense */
  ATTENTION_WINDOW = 9, /* a window of 0, or sinks without a window */
  ATTENTION_ROPE = 10,  /* no such rotation, or tables that are too short */
  ATTENTION_ALIGNMENT = 11, /* a pointer or a stride that is no multiple of 16 bytes */
  ATTENTION_STRIDE = 12,    /* negative, or rows that are written overlap each other */
  ATTENTION_OVERLAP = 13,   /* O, the cache or the workspace overlaps what is read, or each other */
  ATTENTION_WORKSPACE = 14, /* smaller than attention_workspace_bytes says */
  ATTENTION_MEMORY = 15,    /* attention_allocate: the device has no room */
  ATTENTION_DEVICE = 16,    /* no GPU, or one that the library was not compiled for */
  ATTENTION_FAILED = 17     /* a launch or a copy failed; on the emulator: the kernel, too */
};

enum attention_type { ATTENTION_FP16 = 0, ATTENTION_BF16 = 1 };

/* Which elements of a row turn together (RoFormer, equation 34), of head_dim / 2 pairs. */
enum attention_rope {
  ATTENTION_ROPE_NONE = 0,
  ATTENTION_ROPE_HALVES = 1,    /* c and c + head_dim / 2, as Llama has it */
  ATTENTION_ROPE_NEIGHBOURS = 2 /* 2 c and 2 c + 1, as GPT-J has it */
};

#define ATTENTION_NO_WINDOW (-1)

/* Row i of head h of sequence b begins b * batch_stride + h * head_stride + i * row_stride elements
 * after `data`. The head_dim elements of a row follow each other. `data` and the strides are
 * multiples of 16 bytes. */
struct attention_tensor {
  void *data; /* in the memory of the device */
  int64_t batch_stride, head_stride, row_stride;
};

/* Integers that the kernels read on the device. Whoever has the same numbers on the host gives them,
 * too, and they are checked before anything is launched. Without them (host is NULL) nobody checks:
 * to read them back would wait for the device. Both NULL: there is no such array. */
struct attention_array {
  const int *device;
  const int *host;
};

/* Set all of it to 0 first, then struct_bytes, window and what there is. */
struct attention_problem {
  size_t struct_bytes; /* sizeof(struct attention_problem) */
  int type;            /* enum attention_type, of Q, K, V, O, K_new and V_new */
  int head_dim;        /* 32, 64, 80, 96, 128, 192 or 256 */
  int batch;           /* sequences */
  int heads;           /* of Q and O; batch * heads is at most 65535 */
  int kv_heads;        /* of K and V; divides heads. Query head h reads h / (heads / kv_heads) */
  int seqlen_q;        /* queries of the longest sequence: 1 to 65535 * 128 */
  int seqlen_k;        /* keys of the longest sequence, with the new ones: 1 to 2^27 */

  struct attention_tensor Q;    /* [batch, heads, seqlen_q, head_dim], in any order of strides */
  struct attention_tensor K, V; /* [batch, kv_heads, seqlen_k, head_dim] */
  struct attention_tensor O;    /* as Q */

  /* The last query of a sequence stands at its last key. A query that sees no key has O = 0. */
  int causal; /* not 0: a query sees the keys up to its own position */
  int window; /* and of these only the last `window`, at least 1; or ATTENTION_NO_WINDOW */
  int sinks;  /* with a window: and the first `sinks` keys */

  /* [batch]: the lengths of the sequences, where they differ; at most seqlen_q and seqlen_k. Rows
   * of O beyond them are not written. */
  struct attention_array lengths_q, lengths_k;

  /* Packed sequences. [batch + 1]: row i of sequence b is row cu_seqlens[b] + i of a tensor without
   * a batch, of total rows; its batch_stride is 0. The lengths are given, too. */
  struct attention_array cu_seqlens_q, cu_seqlens_k;
  int total_q, total_k;

  /* K and V in pages. [batch, ceil(seqlen_k / page_size)]: row i of sequence b is row i % page_size
   * of page page_table[b, i / page_size], and batch_stride leads from a page to the next. */
  struct attention_array page_table;
  int page_size, pages; /* rows per page, and pages that K and V have */

  /* The keys and values of the new tokens, which are those of Q: [batch, kv_heads, seqlen_q,
   * head_dim], with the lengths and, if packed, the rows of Q. The call stores them in K and V (and
   * rotates the keys) as the last rows of their sequences, where the queries see them. lengths_k
   * counts them. data NULL: K and V hold all keys. */
  struct attention_tensor K_new, V_new;

  /* Rotary embedding: the pair c of the row at position t turns by the angle with this cosine and
   * sine, [rope_positions, head_dim / 2], in the memory of the device. Key j of a sequence is at
   * position j. Q and K are not changed: their rotated rows go into the workspace. With K_new only
   * the new keys turn, for what is in the cache has been rotated when it was stored. */
  int rope; /* enum attention_rope */
  const float *rope_cos, *rope_sin;
  int rope_positions; /* at least seqlen_k */

  /* On the device, at least attention_workspace_bytes, a multiple of 16 bytes in address; NULL if no
   * bytes are needed. Set it to 0 before its first use. The calls of one stream may share it: each
   * leaves the counters in it at 0, and so does a call that fails. (On a GPU a kernel that faults
   * ends the process's use of that GPU, and its memory is lost.) */
  void *workspace;
  size_t workspace_bytes;
  void *stream; /* a cudaStream_t; NULL: the default stream */
};

/* How much workspace a problem takes. Looks at the sizes alone: the pointers may be NULL. */
int attention_workspace_bytes(const struct attention_problem *problem, size_t *bytes);

/* Queues the attention of a problem on its stream and does not wait for it. Threads may call at the
 * same time. Calls that share a workspace must be of one stream. */
int attention_forward(const struct attention_problem *problem);

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
