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
                     " is allowed");
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

/// A kernel that takes no layout keeps an element's place within a head in 32 bits. (One that does has
/// strides of 64.)
void check_head(const reference::Shape &shape) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 32;
  const std::int64_t seqlen = std::max(shape.seqlen_q, shape.seqlen_k);
  if (seqlen * shape.head_dim < kLimit) return;
  throw UsageError(given(seqlen == shape.seqlen_q ? "--seqlen" : "--seqlen-k", seqlen) +
                   ": at most " + std::to_string((kLimit - 1) / shape.head_dim) +
                   " is allowed: a head must have fewer than 2^32 elements");
}

/// Keys that come beside a cache must have their rows in it.
void check_append(const reference::Shape &shape, const Options &options) {
  const std::string append = given("--append", shape.seqlen_new);
  if (options.layout == Layout::kInterleaved)
    throw UsageError(append + ": with --layout interleaved not; Q's rows are no cache of K and V");
  if (options.layout == Layout::kPacked && !options.page_size)
    throw UsageError(append +
                     ": with --layout packed only beside --page-size; packed K and V leave no room "
                     "for more");
  int fewest = shape.seqlen_k;
  for (const int length : shape.lengths_k) fewest = std::min(fewest, length);
  if (shape.seqlen_new > fewest)
    throw UsageError(append + ": at most " + std::to_string(fewest) + " is allowed, the keys of " +
                     (shape.lengths_k.empty() ? "a sequence" : "the shortest sequence"));
}

/// A rotation needs a position: a query before the first key has none.
void check_positions(const reference::Shape &shape) {
  for (int b = 0; b < shape.batch; b++) {
    const int q = shape.lengths_q.empty() ? shape.seqlen_q : shape.lengths_q[b];
    const int k = shape.lengths_k.empty() ? shape.seqlen_k : shape.lengths_k[b];
    if (q > k)
      throw UsageError("--rope " + rope_names()[static_cast<int>(shape.rope) - 1] + ": " +
                       std::to_string(q) + " queries and " + std::to_string(k) +
                       " keys; as many queries as keys are allowed, or fewer: one before the "
                       "first key has no position");
  }
}

}  // namespace

reference::Shape choose_shape(const Options &options, const Step &step, bool gpu) {
  const DefaultShape by_default = default_shape(step, gpu);
  reference::Shape shape;
  const int sequences = static_cast<int>(options.lengths.size());
  Lengths longest{1, 1};
  for (const Lengths &length : options.lengths)
    longest = {std::max(longest.q, length.q), std::max(longest.k, length.k)};
  shape.batch = options.batch.value_or(sequences ? sequences : by_default.batch);
  shape.heads = options.heads.value_or(by_default.heads);
  shape.kv_heads = options.kv_heads.value_or(options.heads ? shape.heads : by_default.kv_heads);
  shape.seqlen_q = options.seqlen.value_or(sequences ? longest.q : by_default.seqlen_q);
  shape.seqlen_k = options.seqlen_k.value_or(options.seqlen ? shape.seqlen_q
                                             : sequences    ? longest.k
                                                            : by_default.seqlen_k);
  shape.head_dim = options.head_dim.value_or(by_default.head_dim);
  shape.causal = options.causal;
  shape.window = options.window;
  shape.sinks = options.sinks;
  shape.seqlen_new = options.append;
  shape.rope = options.rope;

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
    throw UsageError(given("--page-size", options.page_size) +
                     ": with --layout interleaved not; of interleaved K and V there are no pages");
  if (options.page_size && options.page_size % step.tile && step.tile % options.page_size)
    throw UsageError(given("--page-size", options.page_size) + ": a multiple or a divisor of " +
                     std::to_string(step.tile) + " is allowed, the rows of this step's tile");
  if (!takes(step.takes, "--layout")) check_head(shape);
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
  if (shape.seqlen_new) check_append(shape, options);
  if (shape.rope != Rope::kNone) check_positions(shape);
  return shape;
}

double operations(const reference::Shape &shape) {
  return 4.0 * shape.head_dim * reference::visible_pairs(shape);
}

double kv_bytes(const reference::Shape &shape, Type type) {
  const double row = shape.head_dim * (type == Type::kFp8 ? 1.0 : 2.0);
  return 2 * row * shape.kv_heads * reference::keys_read(shape);
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
  if (shape.sinks) add("sinks=" + std::to_string(shape.sinks));
  if (options.type != Type::kFp16) add("type=" + type_names()[static_cast<int>(options.type)]);
  if (options.layout != Layout::kBhnd)
    add("layout=" + layout_names()[static_cast<int>(options.layout)]);
  if (options.page_size) add("page-size=" + std::to_string(options.page_size));
  if (!shape.lengths_q.empty()) add("lengths=" + lengths_text(shape));
  if (shape.seqlen_new) add("append=" + std::to_string(shape.seqlen_new));
  if (shape.rope != Rope::kNone) add("rope=" + rope_names()[static_cast<int>(shape.rope) - 1]);
  if (options.splits) add("splits=" + std::to_string(options.splits));
  return text;
}
