// SPDX-License-Identifier: MIT
#include "steps/50-in-a-model/check.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace {

constexpr int kElementBytes = 2;                 // of fp16 and of bf16
constexpr int kAlignment = 16;                   // bytes that one instruction copies
constexpr int kMostBlocks = 65535;               // of a grid in y and in z
constexpr int kMostQueries = kMostBlocks * 128;  // a block of the kernel for prompts has 128
// The kernel that stores keys numbers its threads with an int, and a key of 256 elements has 16 of them.
constexpr int kMostKeys = 1 << 27;

std::string number(std::int64_t value) {
  return std::to_string(value);
}

/// Throws, in the one form of all messages: what an argument holds, and what is allowed.
[[noreturn]] void refuse(attention_status status, const std::string &argument,
                         const std::string &allowed) {
  throw Failure(status, argument + ": " + allowed);
}
[[noreturn]] void refuse(attention_status status, const std::string &name, std::int64_t value,
                         const std::string &allowed) {
  refuse(status, name + " " + number(value), allowed);
}

void check_at_most(const char *name, std::int64_t value, int most) {
  if (value > most) refuse(ATTENTION_SIZE, name, value, number(most) + " or less is allowed");
}
void check_at_least(attention_status status, const char *name, std::int64_t value, int least) {
  if (value < least) refuse(status, name, value, number(least) + " or more is allowed");
}

bool is_given(const attention_array &array) {
  return array.device || array.host;
}

/// The length of a sequence, or -1 if only the device knows.
int length_of(const attention_array &lengths, int b, int longest) {
  return lengths.host ? lengths.host[b] : lengths.device ? -1 : longest;
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

void check_aligned(const std::string &name, const void *pointer) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % kAlignment)
    refuse(ATTENTION_ALIGNMENT, name, "a multiple of " + number(kAlignment) + " bytes is allowed");
}

void check_tensor(const char *name, const attention_tensor &tensor) {
  if (!tensor.data) refuse(ATTENTION_NULL_POINTER, std::string(name) + ".data", "it is NULL");
  check_aligned(std::string(name) + ".data", tensor.data);
  const std::pair<const char *, std::int64_t> strides[] = {{".batch_stride", tensor.batch_stride},
                                                           {".head_stride", tensor.head_stride},
                                                           {".row_stride", tensor.row_stride}};
  for (const auto &[stride, value] : strides) {
    if (value < 0)
      refuse(ATTENTION_STRIDE, std::string(name) + stride, value, "0 or more is allowed");
    if (value * kElementBytes % kAlignment)
      refuse(ATTENTION_ALIGNMENT, std::string(name) + stride, value,
             "a multiple of " + number(kAlignment / kElementBytes) + " elements is allowed");
  }
}

/// The lengths fit the longest, and if packed their rows are there and follow each other.
void check_lengths(const attention_problem &p, const char *name, const attention_array &lengths,
                   int longest, const char *cu_name, const attention_array &cu_seqlens, int total) {
  for (int b = 0; lengths.host && b < p.batch; b++)
    if (lengths.host[b] < 0 || lengths.host[b] > longest)
      refuse(ATTENTION_LENGTH, at(name, b), lengths.host[b],
             "0 to " + number(longest) + " is allowed");
  int before = 0;
  for (int b = 0; cu_seqlens.host && b <= p.batch; b++) {
    const int here = cu_seqlens.host[b];
    if (here < before || here > total)
      refuse(ATTENTION_LENGTH, at(cu_name, b), here,
             number(before) + " to " + number(total) + " is allowed");
    if (b > 0 && lengths.host && lengths.host[b - 1] > here - before)
      refuse(ATTENTION_LENGTH, at(name, b - 1), lengths.host[b - 1],
             "at most the " + number(here - before) + " rows that " + cu_name + " has for it");
    before = here;
  }
}

void check_pages(const attention_problem &p) {
  if (!p.page_table.host) return;
  const int of_sequence = (p.seqlen_k - 1) / p.page_size + 1;
  for (int b = 0; b < p.batch; b++) {
    const int length = length_of(p.lengths_k, b, p.seqlen_k);
    const int used = length <= 0 ? 0 : (length - 1) / p.page_size + 1;
    for (int i = 0; i < used; i++) {
      const std::int64_t index = std::int64_t{b} * of_sequence + i;
      const int page = p.page_table.host[index];
      if (page < 0 || page >= p.pages)
        refuse(ATTENTION_PAGE, at("page_table", index), page,
               "0 to " + number(p.pages - 1) + " is allowed");
    }
  }
}

}  // namespace

void check_sizes(const attention_problem &p, const std::vector<int> &head_dims) {
  if (p.struct_bytes != sizeof p)
    refuse(ATTENTION_STRUCT_SIZE, "struct_bytes", static_cast<std::int64_t>(p.struct_bytes),
           "this library's is " + number(sizeof p));
  if (p.type != ATTENTION_FP16 && p.type != ATTENTION_BF16)
    refuse(ATTENTION_TYPE, "type", p.type, "ATTENTION_FP16 or ATTENTION_BF16 is allowed");
  if (std::find(head_dims.begin(), head_dims.end(), p.head_dim) == head_dims.end()) {
    std::vector<int> sorted = head_dims;
    std::sort(sorted.begin(), sorted.end());
    std::string all;
    for (const int d : sorted) all += (all.empty() ? "" : ", ") + number(d);
    refuse(ATTENTION_HEAD_DIM, "head_dim", p.head_dim, "allowed are " + all);
  }
  const std::pair<const char *, int> sizes[] = {{"batch", p.batch},
                                                {"heads", p.heads},
                                                {"kv_heads", p.kv_heads},
                                                {"seqlen_q", p.seqlen_q},
                                                {"seqlen_k", p.seqlen_k}};
  for (const auto &[name, value] : sizes) check_at_least(ATTENTION_SIZE, name, value, 1);
  if (std::int64_t{p.batch} * p.heads > kMostBlocks)
    refuse(ATTENTION_SIZE, "batch " + number(p.batch) + ", heads", p.heads,
           "a product of at most " + number(kMostBlocks) + " is allowed");
  check_at_most("seqlen_q", p.seqlen_q, kMostQueries);
  check_at_most("seqlen_k", p.seqlen_k, kMostKeys);
  if (p.heads % p.kv_heads)
    refuse(ATTENTION_HEADS, "kv_heads", p.kv_heads,
           "a divisor of heads " + number(p.heads) + " is allowed");
  if (p.window != ATTENTION_NO_WINDOW && p.window < 1)
    refuse(ATTENTION_WINDOW, "window", p.window, "1 or more, or ATTENTION_NO_WINDOW is allowed");
  check_at_least(ATTENTION_WINDOW, "sinks", p.sinks, 0);
  if (p.sinks > 0 && p.window == ATTENTION_NO_WINDOW)
    refuse(ATTENTION_WINDOW, "sinks", p.sinks, "only with a window");
  if (p.rope < ATTENTION_ROPE_NONE || p.rope > ATTENTION_ROPE_NEIGHBOURS)
    refuse(ATTENTION_ROPE, "rope", p.rope, "a value of enum attention_rope is allowed");
  if (p.rope && p.rope_positions < p.seqlen_k)
    refuse(ATTENTION_ROPE, "rope_positions", p.rope_positions,
           "seqlen_k " + number(p.seqlen_k) + " or more is allowed");
  if (is_given(p.page_table)) {
    check_at_least(ATTENTION_PAGE, "page_size", p.page_size, 1);
    check_at_least(ATTENTION_PAGE, "pages", p.pages, 1);
    if (is_given(p.cu_seqlens_k))
      refuse(ATTENTION_PAGE, "cu_seqlens_k", "not with a page_table: pages are not packed");
  }
  const std::pair<bool, std::pair<const char *, int>> totals[] = {
      {is_given(p.cu_seqlens_q), {"total_q", p.total_q}},
      {is_given(p.cu_seqlens_k), {"total_k", p.total_k}}};
  for (const auto &[packed, total] : totals)
    if (packed) check_at_least(ATTENTION_LENGTH, total.first, total.second, 1);
}

void check_tensors(const attention_problem &p, std::size_t workspace_bytes) {
  const std::pair<const char *, const attention_array &> arrays[] = {
      {"lengths_q", p.lengths_q},
      {"lengths_k", p.lengths_k},
      {"cu_seqlens_q", p.cu_seqlens_q},
      {"cu_seqlens_k", p.cu_seqlens_k},
      {"page_table", p.page_table}};
  for (const auto &[name, array] : arrays)
    if (array.host && !array.device)
      refuse(ATTENTION_NULL_POINTER, std::string(name) + ".device", "it is NULL, and .host is not");
  const bool appends = p.K_new.data || p.V_new.data;
  const auto need = [](const char *name, const void *pointer) {
    if (!pointer) refuse(ATTENTION_NULL_POINTER, name, "it is NULL");
  };
  if (p.cu_seqlens_q.device) need("lengths_q.device", p.lengths_q.device);
  if (p.cu_seqlens_k.device) need("lengths_k.device", p.lengths_k.device);
  if (p.rope) {
    for (const auto &[name, table] :
         {std::pair{"rope_cos", p.rope_cos}, {"rope_sin", p.rope_sin}}) {
      need(name, table);
      check_aligned(name, table);
    }
  }

  check_lengths(p, "lengths_q", p.lengths_q, p.seqlen_q, "cu_seqlens_q", p.cu_seqlens_q, p.total_q);
  check_lengths(p, "lengths_k", p.lengths_k, p.seqlen_k, "cu_seqlens_k", p.cu_seqlens_k, p.total_k);
  for (int b = 0; b < p.batch; b++) {
    const int all = length_of(p.lengths_k, b, p.seqlen_k);
    const int of_new = length_of(p.lengths_q, b, p.seqlen_q);
    if (!appends && p.rope && all >= 0 && of_new > all)
      refuse(ATTENTION_ROPE, at("lengths_q", b), of_new,
             "at most " + at("lengths_k", b) + " " + number(all) +
                 " is allowed with a rotation: a query before the first key has no position");
    if (appends && all >= 0 && of_new > all)
      refuse(ATTENTION_LENGTH, at("lengths_k", b), all,
             "must be " + number(of_new) + " or more, because it counts the new keys of K_new");
  }
  check_pages(p);

  const auto bytes_of = [&](const char *name, const attention_tensor &tensor, bool is_of_q,
                            int heads) -> Bytes {
    check_tensor(name, tensor);
    const bool packed = is_given(is_of_q ? p.cu_seqlens_q : p.cu_seqlens_k);
    const bool paged = !is_of_q && is_given(p.page_table);
    const std::int64_t blocks = packed ? 1 : paged ? p.pages : p.batch;
    const std::int64_t rows = packed  ? (is_of_q ? p.total_q : p.total_k)
                              : paged ? p.page_size
                                      : (is_of_q ? p.seqlen_q : p.seqlen_k);
    return {name,
            static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data)),
            std::int64_t{p.head_dim} * kElementBytes,
            {{blocks, tensor.batch_stride * kElementBytes},
             {heads, tensor.head_stride * kElementBytes},
             {rows, tensor.row_stride * kElementBytes}}};
  };
  std::vector<Bytes> read = {bytes_of("Q", p.Q, true, p.heads)};
  std::vector<Bytes> written = {bytes_of("O", p.O, true, p.heads)};
  std::vector<Bytes> &cache = appends ? written : read;
  cache.push_back(bytes_of("K", p.K, false, p.kv_heads));
  cache.push_back(bytes_of("V", p.V, false, p.kv_heads));
  if (appends) {
    read.push_back(bytes_of("K_new", p.K_new, true, p.kv_heads));
    read.push_back(bytes_of("V_new", p.V_new, true, p.kv_heads));
  }
  const auto whole = [](const char *name, const void *memory, std::int64_t bytes) -> Bytes {
    return {name,
            static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory)),
            bytes,
            {{1, 0}, {1, 0}, {1, 0}}};
  };
  const std::int64_t sizes[] = {
      p.batch, p.batch, p.batch + 1, p.batch + 1,
      p.page_table.device ? std::int64_t{p.batch} * ((p.seqlen_k - 1) / p.page_size + 1) : 0};
  for (std::size_t i = 0; i < std::size(arrays); i++)
    if (const int *const device = arrays[i].second.device)
      read.push_back(whole(arrays[i].first, device, sizes[i] * sizeof(int)));
  if (p.rope) {
    const std::int64_t bytes = std::int64_t{p.rope_positions} * (p.head_dim / 2) * sizeof(float);
    read.push_back(whole("rope_cos", p.rope_cos, bytes));
    read.push_back(whole("rope_sin", p.rope_sin, bytes));
  }
  if (workspace_bytes > 0) {
    if (p.workspace_bytes < workspace_bytes)
      refuse(ATTENTION_WORKSPACE, "workspace_bytes", p.workspace_bytes,
             number(workspace_bytes) + " or more is allowed");
    need("workspace", p.workspace);
    check_aligned("workspace", p.workspace);
    written.push_back(whole("workspace", p.workspace, workspace_bytes));
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
