#include "common/program/shape.h"

#include <algorithm>
#include <cstdint>

namespace {

std::string given(const std::string &option, std::int64_t value) {
  return option + " " + std::to_string(value);
}

void check_multiple(const std::string &option, int seqlen, int tile) {
  if (seqlen % tile)
    throw UsageError(given(option, seqlen) + ": a multiple of " + std::to_string(tile) +
                     " is allowed, the rows of this step's tile");
}

std::string lengths_text(const reference::Shape &shape) {
  std::string text;
  for (int b = 0; b < shape.batch; b++) {
    const int q = shape.lengths_q[b], k = shape.lengths_k[b];
    text += (b ? "," : "") + std::to_string(q) + (q == k ? "" : ":" + std::to_string(k));
  }
  return text;
}

void check_lengths(const reference::Shape &shape) {
  const std::string option = "--lengths " + lengths_text(shape);
  const auto longest = [](const std::vector<int> &lengths) {
    return *std::max_element(lengths.begin(), lengths.end());
  };
  if (longest(shape.lengths_q) > shape.seqlen_q)
    throw UsageError(option + ": at most " + given("--seqlen", shape.seqlen_q) + " is allowed");
  if (longest(shape.lengths_k) > shape.seqlen_k)
    throw UsageError(option + ": for keys at most " +
                     (shape.seqlen_k == shape.seqlen_q ? given("--seqlen", shape.seqlen_k)
                                                       : given("--seqlen-k", shape.seqlen_k)) +
                     " is allowed");
}

/// Kernels keep an element's place within a head in 32 bits.
void check_head(const reference::Shape &shape, Layout layout) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 32;
  const int seqlen = std::max(shape.seqlen_q, shape.seqlen_k);
  const std::int64_t row = layout == Layout::kBhnd ? shape.head_dim
                           : layout == Layout::kBnhd
                               ? std::int64_t{shape.heads} * shape.head_dim
                               : (shape.heads + std::int64_t{2} * shape.kv_heads) * shape.head_dim;
  if (seqlen * row < kLimit) return;
  throw UsageError(given(seqlen == shape.seqlen_q ? "--seqlen" : "--seqlen-k", seqlen) +
                   ": at most " + std::to_string((kLimit - 1) / row) +
                   " is allowed: a head's rows, " + std::to_string(row) +
                   " elements apart, must span fewer than 2^32 elements");
}

}  // namespace

reference::Shape choose_shape(const Options &options, const Step &step, bool gpu) {
  const DefaultShape by_default = default_shape(step, gpu);
  reference::Shape shape;
  const int sequences = static_cast<int>(options.lengths.size());
  shape.batch = options.batch.value_or(sequences ? sequences : by_default.batch);
  shape.heads = options.heads.value_or(by_default.heads);
  shape.kv_heads = options.kv_heads.value_or(shape.heads);
  shape.seqlen_q = options.seqlen.value_or(by_default.seqlen);
  shape.seqlen_k = options.seqlen_k.value_or(shape.seqlen_q);
  shape.head_dim = options.head_dim.value_or(by_default.head_dim);
  shape.causal = options.causal;
  shape.window = options.window;

  check_multiple("--seqlen", shape.seqlen_q, step.tile);
  check_multiple("--seqlen-k", shape.seqlen_k, step.tile);
  if (std::int64_t{shape.batch} * shape.heads > 65535)  // the y and z of a grid
    throw UsageError(given("--batch", shape.batch) + " " + given("--heads", shape.heads) +
                     ": a product of at most 65535 is allowed");
  if (shape.heads % shape.kv_heads)
    throw UsageError(given("--kv-heads", shape.kv_heads) + ": a divisor of " +
                     given("--heads", shape.heads) + " is allowed");
  if (options.layout == Layout::kInterleaved && shape.seqlen_k != shape.seqlen_q)
    throw UsageError(given("--seqlen-k", shape.seqlen_k) + ": with --layout interleaved only " +
                     given("--seqlen", shape.seqlen_q) + " is allowed: a row has Q, K and V");
  if (options.page_size && options.layout == Layout::kInterleaved)
    throw UsageError(
        given("--page-size", options.page_size) +
        ": with --layout bhnd or bnhd only; of interleaved K and V there are no pages");
  if (options.page_size && options.page_size % step.tile && step.tile % options.page_size)
    throw UsageError(given("--page-size", options.page_size) + ": a multiple or a divisor of " +
                     std::to_string(step.tile) + " is allowed, the rows of this step's tile");
  check_head(shape, options.layout);
  if (sequences) {
    for (const Lengths &length : options.lengths) {
      shape.lengths_q.push_back(length.q);
      shape.lengths_k.push_back(length.k);
    }
    if (sequences != shape.batch)
      throw UsageError("--lengths: " + std::to_string(sequences) + " of them; " +
                       std::to_string(shape.batch) + " are allowed, one for each of --batch");
    check_lengths(shape);
  }
  return shape;
}

std::string departures(const reference::Shape &shape, const Options &options) {
  std::string text;
  const auto add = [&](const std::string &departure) {
    text += (text.empty() ? "" : " ") + departure;
  };
  if (shape.causal) add("causal");
  if (shape.seqlen_k != shape.seqlen_q) add("seqlen-k=" + std::to_string(shape.seqlen_k));
  if (shape.kv_heads != shape.heads) add("kv-heads=" + std::to_string(shape.kv_heads));
  if (shape.window) add("window=" + std::to_string(shape.window));
  if (options.type != Type::kFp16) add("type=" + type_names()[static_cast<int>(options.type)]);
  if (options.layout != Layout::kBhnd)
    add("layout=" + layout_names()[static_cast<int>(options.layout)]);
  if (options.page_size) add("page-size=" + std::to_string(options.page_size));
  if (!shape.lengths_q.empty()) add("lengths=" + lengths_text(shape));
  return text;
}
