// SPDX-License-Identifier: MIT
#include "common/program/shape.h"

#include <algorithm>
#include <cstdint>

#include "common/program/report.h"

namespace {

// Columns of a latent cache that follow those that are V's: keys rotated by their positions (DeepSeek-V2,
// arXiv:2405.04434, section 2.1.3).
constexpr int kPositionColumns = 64;

std::string given(const std::string &option, std::int64_t value) {
  return option + " " + std::to_string(value);
}

int longest(const std::vector<int> &lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

void check_multiple(const std::string &option, int rows, int unit) {
  if (rows % unit)
    throw UsageError(given(option, rows) + ": must be a multiple of " + std::to_string(unit));
}

void check_lengths(const reference::Shape &shape) {
  const std::size_t count = shape.lengths_q.size();
  if (count != static_cast<std::size_t>(shape.batch))
    throw UsageError("--lengths has " + std::to_string(count) +
                     (count == 1 ? " entry" : " entries") + ": must have " +
                     std::to_string(shape.batch) + ", one for each of --batch");
  const auto check = [](const std::string &what, int length, const std::string &option, int most) {
    if (length > most)
      throw UsageError(given("--lengths", length) + ": must be at most " + given(option, most) +
                       what);
  };
  check("", longest(shape.lengths_q), "--seqlen", shape.seqlen_q);
  check(" for keys", longest(shape.lengths_k),
        shape.seqlen_k == shape.seqlen_q ? "--seqlen" : "--seqlen-k", shape.seqlen_k);
}

/// A kernel without layouts keeps an element's place within a head in 32 bits. (One with layouts
/// has strides of 64.)
void check_head(const reference::Shape &shape) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 32;
  const std::int64_t seqlen = std::max(shape.seqlen_q, shape.seqlen_k);
  if (seqlen * shape.head_dim < kLimit) return;
  throw UsageError(given(seqlen == shape.seqlen_q ? "--seqlen" : "--seqlen-k", seqlen) +
                   ": must be at most " + std::to_string((kLimit - 1) / shape.head_dim) +
                   ", because a head must have fewer than 2^32 elements");
}

/// Keys that come beside a cache must have their rows in it.
void check_append(const Options &options) {
  const reference::Shape &shape = options.shape;
  const std::string append = given("--append", shape.seqlen_new);
  if (options.layout == Layout::kInterleaved)
    throw UsageError(append +
                     " cannot be combined with --layout interleaved, where Q's rows are "
                     "among the cache's");
  if (options.layout == Layout::kPacked && !options.page_size)
    throw UsageError(append +
                     " with --layout packed needs --page-size: packed K and V have no room for "
                     "more keys");
  int fewest = shape.seqlen_k;
  for (const int length : shape.lengths_k) fewest = std::min(fewest, length);
  if (shape.seqlen_new > 0 && fewest == 0)
    throw UsageError(append + ": each sequence needs as many keys, and one of --lengths has none");
  if (shape.seqlen_new > fewest)
    throw UsageError(append + ": must be at most " + std::to_string(fewest) + ", the keys of " +
                     (shape.lengths_k.empty() ? "a sequence" : "the shortest sequence"));
}

/// A rotation needs a position: a query before the first key has none.
void check_positions(const reference::Shape &shape) {
  for (int b = 0; b < shape.batch; b++)
    if (const int q = shape.length_q(b), k = shape.length_k(b); q > k)
      throw UsageError("--rope " + rope_names()[static_cast<int>(shape.rope) - 1] + ": " +
                       std::to_string(q) + " queries and " + std::to_string(k) +
                       " keys; a sequence must have at least as many keys as queries, because a "
                       "query before the first key has no position");
}

}  // namespace

Options with_defaults(Options options, const Step &step, bool gpu) {
  reference::Shape &shape = options.shape;
  const auto choose = [](int &size, int otherwise) { size = size ? size : otherwise; };
  const bool lengths = !shape.lengths_q.empty(), heads = shape.heads, seqlen = shape.seqlen_q;
  const bool has_128 =
      std::find(step.head_dims.begin(), step.head_dims.end(), 128) != step.head_dims.end();
  choose(shape.batch, lengths ? static_cast<int>(shape.lengths_q.size())
                      : gpu   ? step.default_batch
                              : 1);
  shape.latent = takes(step.takes, "--latent");
  choose(shape.heads, shape.latent ? 128 : step.decodes ? (gpu ? 64 : 8) : (gpu ? 16 : 2));
  choose(shape.kv_heads, shape.latent ? 1 : step.decodes && !heads ? (gpu ? 8 : 2) : shape.heads);
  choose(shape.seqlen_q, lengths        ? std::max(1, longest(shape.lengths_q))
                         : step.decodes ? 1
                                        : (gpu ? 8192 : 256));
  choose(shape.seqlen_k, seqlen         ? shape.seqlen_q
                         : lengths      ? std::max(1, longest(shape.lengths_k))
                         : step.decodes ? (gpu ? 65536 : 256)
                                        : shape.seqlen_q);
  choose(options.gpus, takes(step.takes, "--gpus") ? 2 : 0);
  choose(shape.head_dim, !gpu ? step.head_dims.front() : has_128 ? 128 : step.head_dims.back());
  if (shape.latent) shape.head_dim_v = shape.head_dim - kPositionColumns;
  return options;
}

void check_problem(const Options &options, const Step &step) {
  const reference::Shape &shape = options.shape;
  if (step.gradients && shape.softmax_scale() > 1)
    throw UsageError("--scale " + format("%g", shape.softmax_scale()) +
                     ": must be at most 1 with a backward pass, because the fp32 log-sum-exp "
                     "cannot hold larger scores");
  if (options.rank >= options.gpus)
    throw UsageError(given("--rank", options.rank) + ": must be less than " +
                     given("--gpus", options.gpus));
  check_multiple("--seqlen", shape.seqlen_q, step.tile);
  check_multiple("--seqlen-k", shape.seqlen_k, step.tile);
  if (std::int64_t{shape.batch} * shape.heads > 65535)  // the y and z of a grid
    throw UsageError(given("--batch", shape.batch) + " " + given("--heads", shape.heads) +
                     ": their product must be at most 65535");
  if (shape.heads % shape.kv_heads)
    throw UsageError(given("--kv-heads", shape.kv_heads) + ": must be a divisor of " +
                     given("--heads", shape.heads));
  if (shape.latent && options.layout == Layout::kInterleaved)
    throw UsageError(
        "--layout interleaved cannot be combined with a latent cache, where V is a part of K");
  if (options.layout == Layout::kInterleaved && shape.seqlen_k != shape.seqlen_q)
    throw UsageError(given("--seqlen-k", shape.seqlen_k) + ": must be " +
                     given("--seqlen", shape.seqlen_q) +
                     " with --layout interleaved, because a row has Q, K and V");
  if (shape.head_dim_v && options.layout == Layout::kInterleaved)
    throw UsageError(given("--head-dim-v", shape.head_dim_v) +
                     " cannot be combined with --layout interleaved, where V's rows are as far "
                     "apart as Q's");
  if (options.page_size && options.layout == Layout::kInterleaved)
    throw UsageError(given("--page-size", options.page_size) +
                     " cannot be combined with --layout interleaved");
  if (options.page_size && options.page_size % step.tile && step.tile % options.page_size)
    throw UsageError(given("--page-size", options.page_size) +
                     ": must be a multiple or a divisor of " + std::to_string(step.tile) +
                     ", the rows of this step's tile");
  check_multiple("--page-size", options.page_size, step.page_rows);
  if (!takes(step.takes, "--layout")) check_head(shape);
  if (!shape.lengths_q.empty()) check_lengths(shape);
  if (shape.seqlen_new) check_append(options);
  if (shape.rope != Rope::kNone) check_positions(shape);
  if (shape.rope_dim > shape.head_dim)
    throw UsageError(given("--rope-dim", shape.rope_dim) + ": must be at most " +
                     std::to_string(shape.head_dim) + ", the head dim");
}

double operations(const reference::Shape &shape, bool gradients) {
  const double columns = gradients ? 5.0 * shape.head_dim : shape.head_dim + shape.columns_of_v();
  return 2 * columns * reference::visible_pairs(shape);
}

double kv_bytes(const reference::Shape &shape, Type type) {
  const int columns = shape.head_dim + (shape.latent ? 0 : shape.columns_of_v());
  const double row = columns * (type == Type::kFp8 ? 1.0 : 2.0);
  return row * shape.kv_heads * reference::keys_read(shape);
}
