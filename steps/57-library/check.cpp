// SPDX-License-Identifier: MIT
#include "steps/57-library/check.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <tuple>
#include <utility>

namespace {

constexpr int kMostHeadDim = 256;
constexpr float kMostScale = 1e6f,
                kLeastCap = 1e-3f;               // beyond, a score times them may not be finite
constexpr int kElementBytes = 2;                 // of fp16 and of bf16
constexpr int kAlignment = 16;                   // bytes that one instruction copies
constexpr int kMostBlocks = 65535;               // of a grid in y and in z
constexpr int kMostQueries = kMostBlocks * 128;  // a block of the kernel for prompts has 128
// The kernel that stores keys numbers its blocks of 128 threads with an int, and a key has up to 32 threads.
constexpr int kMostKeys = 1 << 27;
// Of the backward pass: a block has 128 keys, or 64 above head dim 128, and its workspace has room behind each packed
// sequence.
constexpr int kMostKeysBackward = kMostBlocks * 128, kMostKeysOfWideHeads = kMostBlocks * 64;
constexpr int kMostPackedBackward = 1 << 30;

std::string number(std::int64_t value) {
  return std::to_string(value);
}

/// Throws, in the one form of all messages: what an argument holds, and what it must be.
[[noreturn]] void refuse(attention_status status, const std::string &argument,
                         const std::string &must) {
  throw Failure(status, argument + ": " + must);
}
[[noreturn]] void refuse(attention_status status, const std::string &name, std::int64_t value,
                         const std::string &must) {
  refuse(status, name + " " + number(value), must);
}

void check_at_most(const char *name, std::int64_t value, int most) {
  if (value > most) refuse(ATTENTION_SIZE, name, value, "must be " + number(most) + " or less");
}
void check_at_least(attention_status status, const char *name, std::int64_t value,
                    std::int64_t least) {
  if (value < least) refuse(status, name, value, "must be " + number(least) + " or more");
}

bool is_given(const attention_array &array) {
  return array.device || array.host;
}

/// The sequences of Q, of K, or of the new keys, as a caller describes them.
struct Sequences {
  const char *lengths_name, *cu_name, *total_name;
  attention_array lengths, cu_seqlens, starts;
  int longest, total;

  /// The length of a sequence, or -1 if only the device knows.
  int length(int b) const {
    if (lengths.host) return lengths.host[b];
    if (lengths.device) return -1;
    if (cu_seqlens.host) return cu_seqlens.host[b + 1] - cu_seqlens.host[b];
    if (starts.host) return longest - starts.host[b];
    return cu_seqlens.device || starts.device ? -1 : longest;
  }
  /// Whether no sequence has a row, by the sizes.
  bool no_rows() const { return longest == 0 || (is_given(cu_seqlens) && total == 0); }
  /// The row at which its keys begin, or -1.
  int start(int b) const { return starts.host ? starts.host[b] : starts.device ? -1 : 0; }
};
Sequences queries_of(const attention_problem &p) {
  return {"lengths_q", "cu_seqlens_q", "total_q", p.lengths_q, p.cu_seqlens_q,
          {},          p.seqlen_q,     p.total_q};
}
Sequences keys_of(const attention_problem &p) {
  return {"lengths_k",    "cu_seqlens_k", "total_k",  p.lengths_k,
          p.cu_seqlens_k, p.starts_k,     p.seqlen_k, p.total_k};
}
Sequences new_keys_of(const attention_problem &p) {
  if (p.seqlen_new == 0) return queries_of(p);
  return {"lengths_new", "cu_seqlens_new", "total_new", p.lengths_new, p.cu_seqlens_new, {},
          p.seqlen_new,  p.total_new};
}

bool appends(const attention_problem &p) {
  return p.K_new.data || p.V_new.data;
}

/// The entries of a page table that a sequence may use.
std::int64_t pages_of_sequence(const attention_problem &p) {
  return p.seqlen_k == 0 ? 0 : (p.seqlen_k - 1) / p.page_size + 1;
}

std::string at(const char *name, std::int64_t index) {
  return std::string(name) + "[" + number(index) + "]";
}

// --- where the elements of a tensor lie ----------------------------------------------------------

/// A dimension of a tensor: so many steps, so many bytes apart.
struct Dimension {
  std::int64_t count, stride;
};

/// The bytes of a tensor: runs of `row` bytes.
struct Bytes {
  const char *name;
  std::int64_t first, row;
  Dimension dimensions[3];  // batch, head, row

  /// Bytes from the first to behind the last one, of the dimensions whose stride is no multiple of
  /// `period` (0: of all).
  std::int64_t extent(std::int64_t period) const {
    std::int64_t bytes = row;
    for (const Dimension &dim : dimensions)
      if (period == 0 || dim.stride % period) bytes += (dim.count - 1) * dim.stride;
    return bytes;
  }
};

/// Whether no byte belongs to two rows: each dimension steps over all of the smaller ones.
bool rows_apart(const Bytes &tensor) {
  Dimension sorted[3];
  std::copy(std::begin(tensor.dimensions), std::end(tensor.dimensions), sorted);
  std::sort(sorted, sorted + 3,
            [](const Dimension &a, const Dimension &b) { return a.stride < b.stride; });
  std::int64_t extent = tensor.row;
  for (const Dimension &dim : sorted) {
    if (dim.count > 1 && dim.stride < extent) return false;
    extent += (dim.count - 1) * dim.stride;
  }
  return true;
}

/// Whether two tensors share no byte: they lie one behind the other, or side by side, as the heads of
/// Q, K and V in one interleaved tensor do: within each period of a common stride.
bool apart(const Bytes &a, const Bytes &b) {
  if (a.first + a.extent(0) <= b.first || b.first + b.extent(0) <= a.first) return true;
  for (const Dimension &dim : a.dimensions) {
    const std::int64_t period = dim.stride;
    if (period == 0) continue;
    const std::int64_t from_a_to_b = ((b.first - a.first) % period + period) % period;
    if (a.extent(period) <= from_a_to_b && from_a_to_b + b.extent(period) <= period) return true;
  }
  return false;
}

// --- the checks ----------------------------------------------------------------------------------

void check_aligned(const std::string &name, const void *pointer, int bytes = kAlignment) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % bytes)
    refuse(ATTENTION_ALIGNMENT, name, "must be a multiple of " + number(bytes) + " bytes");
}

void check_tensor(const char *name, const attention_tensor &tensor) {
  if (!tensor.data) refuse(ATTENTION_NULL_POINTER, std::string(name) + ".data", "it is NULL");
  check_aligned(std::string(name) + ".data", tensor.data);
  const std::pair<const char *, std::int64_t> strides[] = {{".batch_stride", tensor.batch_stride},
                                                           {".head_stride", tensor.head_stride},
                                                           {".row_stride", tensor.row_stride}};
  for (const auto &[stride, value] : strides) {
    if (value < 0) refuse(ATTENTION_STRIDE, std::string(name) + stride, value, "must be 0 or more");
    if (value * kElementBytes % kAlignment)
      refuse(ATTENTION_ALIGNMENT, std::string(name) + stride, value,
             "must be a multiple of " + number(kAlignment / kElementBytes) + " elements");
  }
}

/// The lengths fit the longest, and if packed their rows are there and follow each other.
void check_lengths(const attention_problem &p, const Sequences &of) {
  for (int b = 0; of.starts.host && b < p.batch; b++)
    if (of.starts.host[b] < 0 || of.starts.host[b] > of.longest)
      refuse(ATTENTION_LENGTH, at("starts_k", b), of.starts.host[b],
             "must be 0 to " + number(of.longest));
  for (int b = 0; of.lengths.host && b < p.batch; b++)
    if (const int most = of.longest - std::max(0, of.start(b));
        of.lengths.host[b] < 0 || of.lengths.host[b] > most)
      refuse(ATTENTION_LENGTH, at(of.lengths_name, b), of.lengths.host[b],
             "must be 0 to " + number(most));
  int before = 0;
  for (int b = 0; of.cu_seqlens.host && b <= p.batch; b++) {
    const int here = of.cu_seqlens.host[b];
    if (here < before || here > of.total)
      refuse(ATTENTION_LENGTH, at(of.cu_name, b), here,
             "must be " + number(before) + " to " + number(of.total));
    if (b > 0 && of.lengths.host && of.lengths.host[b - 1] > here - before)
      refuse(ATTENTION_LENGTH, at(of.lengths_name, b - 1), of.lengths.host[b - 1],
             "must be at most the " + number(here - before) + " rows that " + of.cu_name +
                 " has for it");
    if (b > 0 && !of.lengths.device && here - before > of.longest)
      refuse(ATTENTION_LENGTH, at(of.cu_name, b), here,
             "must be at most " + number(before + of.longest) +
                 ", because no sequence has more than " + number(of.longest) + " rows");
    before = here;
  }
}

/// Each page is one that K and V have, and a page that a sequence appends to is its own.
void check_pages(const attention_problem &p) {
  if (!p.page_table.host) return;
  const Sequences keys = keys_of(p), added = new_keys_of(p);
  const std::int64_t stride = p.page_table_stride ? p.page_table_stride : pages_of_sequence(p);
  std::vector<int> user(appends(p) ? p.pages : 0, -1), writer = user;
  for (int b = 0; b < p.batch; b++) {
    const int length = keys.length(b), start = keys.start(b);
    // What only the device knows is clamped there.
    if (length <= 0 || start < 0) continue;
    const int count = appends(p) ? added.length(b) : 0;
    const int first_new = count < 0 ? start : start + length - count;
    for (int i = start / p.page_size; i <= (start + length - 1) / p.page_size; i++) {
      const std::int64_t index = b * stride + i;
      const int page = p.page_table.host[index];
      if (page < 0 || page >= p.pages)
        refuse(ATTENTION_PAGE, at("page_table", index), page,
               "must be 0 to " + number(p.pages - 1));
      if (!appends(p)) continue;
      const bool writes = count != 0 && (i + std::int64_t{1}) * p.page_size > first_new;
      const int other = writes ? user[page] : writer[page];
      if (other >= 0 && other != b)
        refuse(ATTENTION_PAGE, at("page_table", index), page,
               "must not be a page of sequence " + number(other) +
                   ", because one of the two appends to it");
      user[page] = b;
      if (writes) writer[page] = b;
    }
  }
}

/// Each sequence of the cache is there, and one that is appended to is in the batch once.
void check_cache_index(const attention_problem &p) {
  if (!p.cache_index.host) return;
  std::vector<int> user(p.caches, -1);
  for (int b = 0; b < p.batch; b++) {
    const int index = p.cache_index.host[b];
    if (index < 0 || index >= p.caches)
      refuse(ATTENTION_CACHE, at("cache_index", b), index, "must be 0 to " + number(p.caches - 1));
    if (appends(p) && user[index] >= 0)
      refuse(ATTENTION_CACHE, at("cache_index", b), index,
             "must not be that of sequence " + number(user[index]) + ", because both append to it");
    user[index] = b;
  }
}

void check_number(const char *name, float value, float least, float most) {
  if (value == 0 || (value >= least && value <= most)) return;
  char text[64], range[64];
  std::snprintf(text, sizeof text, "%s %g", name, double{value});
  std::snprintf(range, sizeof range, "must be 0, or from %g to %g", double{least}, double{most});
  refuse(ATTENTION_SCORES, text, range);
}

void check_window(const attention_problem &p) {
  const std::pair<const char *, int> limits[] = {{"window_left", p.window_left},
                                                 {"window_right", p.window_right}};
  for (const auto &[name, value] : limits) {
    if (p.window && value < ATTENTION_NO_LIMIT)
      refuse(ATTENTION_WINDOW, name, value, "must be 0 or more, or ATTENTION_NO_LIMIT");
    if (!p.window && value != 0)
      refuse(ATTENTION_WINDOW, name, value, "must be 0 without a window");
  }
  check_at_least(ATTENTION_WINDOW, "sinks", p.sinks, 0);
  if (p.sinks > 0 && (!p.window || p.window_left == ATTENTION_NO_LIMIT))
    refuse(ATTENTION_WINDOW, "sinks", p.sinks, "must be 0 without a window to the left");
}

void check_rope(const attention_problem &p) {
  if (p.rope < ATTENTION_ROPE_NONE || p.rope > ATTENTION_ROPE_NEIGHBOURS)
    refuse(ATTENTION_ROPE, "rope", p.rope, "must be a value of enum attention_rope");
  if (!p.rope) return;
  check_at_least(ATTENTION_ROPE, "rope_positions", p.rope_positions, 1);
  if (p.rope_positions < p.seqlen_k)
    refuse(ATTENTION_ROPE, "rope_positions", p.rope_positions,
           "must be seqlen_k " + number(p.seqlen_k) + " or more");
  if (p.rope_dim == 0 && p.head_dim % 16)
    refuse(ATTENTION_ROPE, "rope_dim 0, head_dim", p.head_dim,
           "must be a multiple of 16, or rope_dim must be one");
  if (p.rope_dim < 0 || p.rope_dim > p.head_dim || p.rope_dim % 16)
    refuse(ATTENTION_ROPE, "rope_dim", p.rope_dim,
           "must be a multiple of 16, and at most head_dim " + number(p.head_dim));
}

}  // namespace

bool has_no_scores(const attention_problem &p) {
  return queries_of(p).no_rows() || keys_of(p).no_rows();
}

void check_sizes(const attention_problem &p) {
  if (p.struct_bytes != sizeof p)
    refuse(ATTENTION_STRUCT_SIZE, "struct_bytes", static_cast<std::int64_t>(p.struct_bytes),
           "must be " + number(sizeof p) + ", as this library's header has it");
  if (p.type != ATTENTION_FP16 && p.type != ATTENTION_BF16)
    refuse(ATTENTION_TYPE, "type", p.type, "must be ATTENTION_FP16 or ATTENTION_BF16");
  const auto check_head_dim = [](const char *name, int value, const char *or_zero) {
    if (value < 8 || value > kMostHeadDim || value % 8)
      refuse(
          ATTENTION_HEAD_DIM, name, value,
          std::string("must be ") + or_zero + "a multiple of 8 from 8 to " + number(kMostHeadDim));
  };
  check_head_dim("head_dim", p.head_dim, "");
  if (p.head_dim_v != 0) check_head_dim("head_dim_v", p.head_dim_v, "0, or ");
  const std::tuple<const char *, int, int> sizes[] = {
      {"batch", p.batch, 1},       {"heads", p.heads, 1},       {"kv_heads", p.kv_heads, 1},
      {"seqlen_q", p.seqlen_q, 0}, {"seqlen_k", p.seqlen_k, 0}, {"seqlen_new", p.seqlen_new, 0}};
  for (const auto &[name, value, least] : sizes) check_at_least(ATTENTION_SIZE, name, value, least);
  if (std::int64_t{p.batch} * p.heads > kMostBlocks)
    refuse(ATTENTION_SIZE, "batch " + number(p.batch) + ", heads", p.heads,
           "their product must be at most " + number(kMostBlocks));
  check_at_most("seqlen_q", p.seqlen_q, kMostQueries);
  check_at_most("seqlen_k", p.seqlen_k, kMostKeys);
  check_at_most("seqlen_new", p.seqlen_new, kMostKeys);
  if (p.heads % p.kv_heads)
    refuse(ATTENTION_HEADS, "kv_heads", p.kv_heads,
           "must be a divisor of heads " + number(p.heads));
  check_number("scale", p.scale, 0, kMostScale);
  check_number("softcap", p.softcap, kLeastCap, kMostScale);
  check_at_least(ATTENTION_SCORES, "alibi_stride", p.alibi_stride, 0);
  check_window(p);
  check_rope(p);
  if (is_given(p.page_table)) {
    check_at_least(ATTENTION_PAGE, "page_size", p.page_size, 1);
    check_at_least(ATTENTION_PAGE, "pages", p.pages, 1);
    if (p.page_table_stride != 0)
      check_at_least(ATTENTION_PAGE, "page_table_stride", p.page_table_stride,
                     pages_of_sequence(p));
  }
  if (is_given(p.cache_index)) check_at_least(ATTENTION_CACHE, "caches", p.caches, 1);
  // Each of these says where a sequence's keys lie.
  const std::tuple<attention_status, const char *, bool, const char *, bool> apart[] = {
      {ATTENTION_PAGE, "cu_seqlens_k", is_given(p.cu_seqlens_k), "page_table",
       is_given(p.page_table)},
      {ATTENTION_CACHE, "cache_index", is_given(p.cache_index), "page_table",
       is_given(p.page_table)},
      {ATTENTION_CACHE, "cache_index", is_given(p.cache_index), "cu_seqlens_k",
       is_given(p.cu_seqlens_k)},
      {ATTENTION_LENGTH, "starts_k", is_given(p.starts_k), "cu_seqlens_k",
       is_given(p.cu_seqlens_k)},
      {ATTENTION_LENGTH, "lengths_new", is_given(p.lengths_new), "seqlen_new 0", p.seqlen_new == 0},
      {ATTENTION_LENGTH, "cu_seqlens_new", is_given(p.cu_seqlens_new), "seqlen_new 0",
       p.seqlen_new == 0}};
  for (const auto &[status, name, is, other, is_other] : apart)
    if (is && is_other) refuse(status, name, std::string("must be NULL with ") + other);
  for (const Sequences &of : {queries_of(p), keys_of(p), new_keys_of(p)})
    if (is_given(of.cu_seqlens)) check_at_least(ATTENTION_LENGTH, of.total_name, of.total, 0);
}

void check_sizes(const attention_problem &p, const attention_gradients &g) {
  check_sizes(p);
  if (g.struct_bytes != sizeof g)
    refuse(ATTENTION_STRUCT_SIZE, "gradients->struct_bytes",
           static_cast<std::int64_t>(g.struct_bytes),
           "must be " + number(sizeof g) + ", as this library's header has it");
  const std::string where = " in attention_backward";
  if (head_dim_of_v(p) != p.head_dim)
    refuse(ATTENTION_BACKWARD, "head_dim_v", p.head_dim_v,
           "must be 0 or head_dim " + number(p.head_dim) + where);
  const std::tuple<const char *, int, int> sizes[] = {
      {"seqlen_k", p.seqlen_k, p.head_dim > 128 ? kMostKeysOfWideHeads : kMostKeysBackward},
      {"total_q", p.total_q, kMostPackedBackward}};
  for (const auto &[name, value, most] : sizes)
    if (value > most)
      refuse(ATTENTION_SIZE, name, value, "must be " + number(most) + " or less" + where);
  const std::pair<const char *, int> zeros[] = {{"sinks", p.sinks}, {"rope", p.rope}};
  for (const auto &[name, value] : zeros)
    if (value) refuse(ATTENTION_BACKWARD, name, value, "must be 0" + where);
  const std::pair<const char *, bool> nulls[] = {{"page_table", is_given(p.page_table)},
                                                 {"cache_index", is_given(p.cache_index)},
                                                 {"K_new.data", p.K_new.data},
                                                 {"V_new.data", p.V_new.data}};
  for (const auto &[name, is] : nulls)
    if (is) refuse(ATTENTION_BACKWARD, name, "must be NULL" + where);
  if (g.d_sink_logits && !p.sink_logits)
    refuse(ATTENTION_BACKWARD, "d_sink_logits", "must be NULL without sink_logits");
}

void check_tensors(const attention_problem &p, std::size_t workspace_bytes,
                   const attention_gradients *g) {
  const std::int64_t table = p.page_table_stride      ? p.page_table_stride
                             : is_given(p.page_table) ? pages_of_sequence(p)
                                                      : 0;
  const std::tuple<const char *, attention_array, std::int64_t> arrays[] = {
      {"lengths_q", p.lengths_q, p.batch},
      {"lengths_k", p.lengths_k, p.batch},
      {"starts_k", p.starts_k, p.batch},
      {"cu_seqlens_q", p.cu_seqlens_q, p.batch + 1},
      {"cu_seqlens_k", p.cu_seqlens_k, p.batch + 1},
      {"page_table", p.page_table,
       is_given(p.page_table) ? (p.batch - 1) * table + pages_of_sequence(p) : 0},
      {"cache_index", p.cache_index, p.batch},
      {"lengths_new", p.lengths_new, p.batch},
      {"cu_seqlens_new", p.cu_seqlens_new, p.batch + 1}};
  const auto need = [](const char *name, const void *pointer) {
    if (!pointer) refuse(ATTENTION_NULL_POINTER, name, "it is NULL");
  };
  for (const auto &[name, array, size] : arrays)
    if (array.host && !array.device)
      refuse(ATTENTION_NULL_POINTER, std::string(name) + ".device",
             std::string("it is NULL, and ") + name + ".host is not");
  const std::pair<const char *, const float *> tables[] = {{"rope_cos", p.rope_cos},
                                                           {"rope_sin", p.rope_sin}};
  for (const auto &[name, values] : tables) {
    if (!p.rope) continue;
    need(name, values);
    check_aligned(name, values);
  }
  const std::pair<const char *, const float *> numbers[] = {
      {"lse", p.lse}, {"alibi_slopes", p.alibi_slopes}, {"sink_logits", p.sink_logits}};
  for (const auto &[name, values] : numbers) check_aligned(name, values, sizeof(float));
  if (g) check_aligned("d_sink_logits", g->d_sink_logits, sizeof(float));

  const Sequences queries = queries_of(p), keys = keys_of(p), added = new_keys_of(p);
  check_lengths(p, queries);
  check_lengths(p, keys);
  if (appends(p) && p.seqlen_new) check_lengths(p, added);
  for (int b = 0; b < p.batch; b++) {
    const int all = keys.length(b), of_q = queries.length(b), of_new = added.length(b);
    if (!appends(p) && p.rope && all >= 0 && of_q > all)
      refuse(ATTENTION_ROPE, at("lengths_q", b), of_q,
             "must be at most " + at("lengths_k", b) + " " + number(all) +
                 " with a rotation, because a query before the first key has no position");
    if (appends(p) && all >= 0 && of_new > all)
      refuse(ATTENTION_LENGTH, at("lengths_k", b), all,
             "must be " + number(of_new) + " or more, because it counts the new keys of K_new");
  }
  check_pages(p);
  check_cache_index(p);

  const int d = p.head_dim, dv = head_dim_of_v(p);
  // A tensor without rows may be NULL, as an empty one of PyTorch is.
  const auto add = [&](std::vector<Bytes> &to, const char *name, const attention_tensor &tensor,
                       const Sequences &of, int heads, int columns) {
    if (of.no_rows()) return;
    check_tensor(name, tensor);
    const bool of_cache = name[1] == '\0' && (*name == 'K' || *name == 'V');
    const bool packed = is_given(of.cu_seqlens), paged = of_cache && is_given(p.page_table);
    const std::int64_t blocks = packed                                ? 1
                                : paged                               ? p.pages
                                : of_cache && is_given(p.cache_index) ? p.caches
                                                                      : p.batch;
    const std::int64_t rows = packed ? of.total : paged ? p.page_size : of.longest;
    to.push_back({name,
                  static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data)),
                  std::int64_t{columns} * kElementBytes,
                  {{blocks, tensor.batch_stride * kElementBytes},
                   {heads, tensor.head_stride * kElementBytes},
                   {rows, tensor.row_stride * kElementBytes}}});
  };
  const auto add_whole = [](std::vector<Bytes> &to, const char *name, const void *memory,
                            std::int64_t bytes) {
    if (memory && bytes > 0)
      to.push_back({name,
                    static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory)),
                    bytes,
                    {{1, 0}, {1, 0}, {1, 0}}});
  };
  std::vector<Bytes> read, written;
  add(read, "Q", p.Q, queries, p.heads, d);
  std::vector<Bytes> &of_forward = g ? read : written;
  add(of_forward, "O", p.O, queries, p.heads, dv);
  if (g && !queries.no_rows()) need("lse", p.lse);
  const std::int64_t lse_rows =
      is_given(p.cu_seqlens_q) ? p.total_q : std::int64_t{p.batch} * p.seqlen_q;
  if (!queries.no_rows()) add_whole(of_forward, "lse", p.lse, lse_rows * p.heads * sizeof(float));
  if (g) {
    add(read, "dO", g->dO, queries, p.heads, dv);
    add(written, "dQ", g->dQ, queries, p.heads, d);
    add(written, "dK", g->dK, keys, p.kv_heads, d);
    add(written, "dV", g->dV, keys, p.kv_heads, dv);
    add_whole(written, "d_sink_logits", g->d_sink_logits, p.heads * sizeof(float));
  }
  std::vector<Bytes> &cache = appends(p) ? written : read;
  add(cache, "K", p.K, keys, p.kv_heads, d);
  add(cache, "V", p.V, keys, p.kv_heads, dv);
  if (appends(p)) {
    need("K_new.data", p.K_new.data);  // also without rows: NULL says that K and V hold all keys
    add(read, "K_new", p.K_new, added, p.kv_heads, d);
    add(read, "V_new", p.V_new, added, p.kv_heads, dv);
  }
  for (const auto &[name, array, size] : arrays)
    add_whole(read, name, array.device, size * sizeof(int));
  for (const auto &[name, values] : tables)
    if (p.rope)
      add_whole(read, name, values,
                std::int64_t{p.rope_positions} * ((p.rope_dim ? p.rope_dim : p.head_dim) / 2) *
                    sizeof(float));
  add_whole(read, "alibi_slopes", p.alibi_slopes,
            ((p.batch - 1) * p.alibi_stride + p.heads) * sizeof(float));
  add_whole(read, "sink_logits", p.sink_logits, p.heads * sizeof(float));
  if (workspace_bytes > 0) {
    if (p.workspace_bytes < workspace_bytes)
      refuse(ATTENTION_WORKSPACE, "workspace_bytes", p.workspace_bytes,
             "must be " + number(workspace_bytes) + " or more");
    need("workspace", p.workspace);
    check_aligned("workspace", p.workspace);
    add_whole(written, "workspace", p.workspace, workspace_bytes);
  }
  for (std::size_t i = 0; i < written.size(); i++) {
    const std::string name = written[i].name;
    if (!rows_apart(written[i]))
      refuse(ATTENTION_STRIDE, name + " is written", "its strides let two rows share elements");
    for (const Bytes &other : read)
      if (!apart(written[i], other))
        refuse(ATTENTION_OVERLAP, name + " is written", std::string("it overlaps ") + other.name);
    for (std::size_t j = 0; j < i; j++)
      if (!apart(written[i], written[j]))
        refuse(ATTENTION_OVERLAP, name + " is written",
               std::string("it overlaps ") + written[j].name);
  }
}
