// SPDX-License-Identifier: MIT
// A program that calls the library as a model would: the attention of a transformer's block, with
// prompts of several lengths first and then a token at a time, from a cache in pages. What is not
// attention is computed here, on the CPU. Each query's output is compared with the reference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "reference/inputs.h"
#include "reference/random.h"
#include "reference/verdict.h"
#include "steps/57-library/client.h"

namespace {

struct Options {
  std::string library = "./libattention.so";
  std::vector<int> prompts = {37, 100, 1};
  int tokens = 64, heads = 8, kv_heads = 2, head_dim = 64;
  int window = 0;  // keys that a query sees; 0: all
  Type type = Type::kFp16;
  std::uint64_t seed = 1;
};

using Matrix = std::vector<float>;  // row by row

/// `rows` rows of x, each times a matrix of [columns, width].
Matrix product(const Matrix &x, const Matrix &weights, int rows, int width) {
  const std::size_t columns = weights.size() / width;
  Matrix y(rows * columns);
  for (int row = 0; row < rows; row++)
    for (std::size_t column = 0; column < columns; column++)
      y[row * columns + column] = std::inner_product(&x[row * width], &x[row * width] + width,
                                                     &weights[column * width], 0.0f);
  return y;
}

/// Every row divided by its root mean square.
Matrix normalised(Matrix x, int width) {
  for (std::size_t first = 0; first < x.size(); first += width) {
    float squares = 0;
    for (int i = 0; i < width; i++) squares += x[first + i] * x[first + i];
    for (int i = 0; i < width; i++) x[first + i] /= std::sqrt(squares / width + 1e-6f);
  }
  return x;
}

/// The block: x += W_O attention(W_Q n, W_K n, W_V n) with n = x, normalised; and all that it
/// remembers of its sequences, on the device as the library has it and here as the reference has it.
class Block {
 public:
  Block(const Library &library, const Options &options)
      : library_(library),
        options_(options),
        width_(options.heads * options.head_dim),
        longest_(*std::max_element(options.prompts.begin(), options.prompts.end()) +
                 options.tokens),
        of_sequence_((longest_ + kPageSize - 1) / kPageSize),
        state_(options.seed),
        W_Q_(random(width_, width_)),
        W_K_(random(options.kv_heads * options.head_dim, width_)),
        W_V_(random(options.kv_heads * options.head_dim, width_)),
        W_O_(random(width_, width_)),
        table_(batch() * of_sequence_),
        lengths_(batch()),
        pages_(library, 2 * table_.size() * page_elements()),
        device_table_(library, table_.size()),
        cos_(library, rotation().cos.size()),
        sin_(library, rotation().sin.size()) {
    // Pages in an order of no pattern.
    std::iota(table_.begin(), table_.end(), 0);
    for (std::size_t left = table_.size(); left > 1; left--)
      std::swap(table_[left - 1], table_[next_random(state_) % left]);
    device_table_.upload(table_);
    const reference::Rotation turns = rotation();
    cos_.upload({turns.cos.begin(), turns.cos.end()});
    sin_.upload({turns.sin.begin(), turns.sin.end()});
    inputs_.type = options.type;
    inputs_.shape = shape();
    inputs_.rotation = turns;
    for (reference::Elements *cache : {&inputs_.K, &inputs_.V})
      cache->resize(static_cast<std::size_t>(batch()) * options.kv_heads * longest_ *
                    options.head_dim);
  }

  int batch() const { return static_cast<int>(options_.prompts.size()); }

  /// Rows that nothing is known of but that they are normal.
  Matrix random_rows(int rows) { return random(rows, 1.0f); }

  /// The rows of x, of `counts` new tokens of each sequence, one sequence after the other, become the
  /// block's output. Returns what the comparison with the reference says.
  reference::Verdict run(Matrix &x, const std::vector<int> &counts) {
    const int rows = std::accumulate(counts.begin(), counts.end(), 0);
    const int d = options_.head_dim, kv_width = options_.kv_heads * d;
    const Matrix n = normalised(x, width_);
    const auto elements = [&](const Matrix &values) {
      std::vector<std::uint16_t> bits(values.size());
      std::transform(values.begin(), values.end(), bits.begin(),
                     [&](float value) { return float_to_element(options_.type, value); });
      return bits;
    };
    const std::vector<std::uint16_t> Q = elements(product(n, W_Q_, rows, width_)),
                                     K = elements(product(n, W_K_, rows, width_)),
                                     V = elements(product(n, W_V_, rows, width_));
    std::vector<int> starts = {0};
    for (int b = 0; b < batch(); b++) {
      starts.push_back(starts.back() + counts[b]);
      lengths_[b] += counts[b];
    }

    const std::vector<std::uint16_t> O = attention(Q, K, V, counts, starts);

    // The reference has every tensor as [batch, heads, seqlen, head_dim].
    inputs_.shape.seqlen_q = *std::max_element(counts.begin(), counts.end());
    inputs_.shape.lengths_q = counts;
    inputs_.shape.lengths_k = lengths_;
    const auto at = [&](int b, int heads, int h, int seqlen, int i) {
      return ((static_cast<std::size_t>(b) * heads + h) * seqlen + i) * d;
    };
    const int seqlen_q = inputs_.shape.seqlen_q;
    inputs_.Q.assign(at(batch(), options_.heads, 0, seqlen_q, 0), 0);
    reference::Elements output(inputs_.Q.size(), 0);
    std::vector<reference::Place> places;
    for (int b = 0; b < batch(); b++)
      for (int i = 0; i < counts[b]; i++) {
        const int row = starts[b] + i, key = lengths_[b] - counts[b] + i;
        for (int h = 0; h < options_.heads; h++) {
          const std::size_t from = static_cast<std::size_t>(row) * width_ + h * d;
          const std::size_t to = at(b, options_.heads, h, seqlen_q, i);
          std::copy_n(&Q[from], d, &inputs_.Q[to]);
          std::copy_n(&O[from], d, &output[to]);
          places.push_back({b, h, i});
        }
        for (int h = 0; h < options_.kv_heads; h++) {
          const std::size_t from = static_cast<std::size_t>(row) * kv_width + h * d;
          const std::size_t to = at(b, options_.kv_heads, h, longest_, key);
          std::copy_n(&K[from], d, &inputs_.K[to]);
          std::copy_n(&V[from], d, &inputs_.V[to]);
        }
      }

    Matrix o(O.size());
    std::transform(O.begin(), O.end(), o.begin(),
                   [&](std::uint16_t bits) { return element_to_float(options_.type, bits); });
    const Matrix y = product(o, W_O_, rows, width_);
    std::transform(x.begin(), x.end(), y.begin(), x.begin(), std::plus<>());
    std::sort(places.begin(), places.end(), [](const auto &a, const auto &b) {
      return std::tie(a.batch, a.head, a.row) < std::tie(b.batch, b.head, b.row);
    });
    return reference::judge(inputs_, output, places);
  }

  char kernel[32] = "";  // which one the last call got

 private:
  static constexpr int kPageSize = 16;

  std::size_t page_elements() const {
    return std::size_t{kPageSize} * options_.kv_heads * options_.head_dim;
  }

  /// Normal numbers of a variance of 1 / width: products of normalised rows with them have 1.
  Matrix random(int rows, int width) {
    return random(rows, 1 / std::sqrt(static_cast<float>(width)));
  }
  Matrix random(int rows, float deviation) {
    Matrix values(static_cast<std::size_t>(rows) * width_);
    for (float &value : values) {  // Box and Muller
      const double u = (static_cast<double>(next_random(state_) >> 11) + 0.5) * 0x1p-53;
      const double angle = static_cast<double>(next_random(state_) >> 11) * 0x1p-53 * 2 * M_PI;
      value = deviation * static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(angle));
    }
    return values;
  }

  reference::Shape shape() const {
    reference::Shape shape;
    shape.batch = batch();
    shape.heads = options_.heads;
    shape.kv_heads = options_.kv_heads;
    shape.seqlen_k = longest_;
    shape.head_dim = options_.head_dim;
    shape.causal = true;
    shape.window = options_.window;
    shape.rope = Rope::kHalves;
    return shape;
  }
  reference::Rotation rotation() const { return reference::rotation_of(shape()); }

  /// What a model's code does at this place: it fills in the struct and calls the library.
  std::vector<std::uint16_t> attention(const std::vector<std::uint16_t> &Q,
                                       const std::vector<std::uint16_t> &K,
                                       const std::vector<std::uint16_t> &V,
                                       const std::vector<int> &counts,
                                       const std::vector<int> &starts) {
    const int d = options_.head_dim, kv_width = options_.kv_heads * d;
    const DeviceVector<std::uint16_t> on_device[] = {
        {library_, Q}, {library_, K}, {library_, V}, {library_, Q.size()}};
    const DeviceVector<int> device_counts(library_, counts), device_starts(library_, starts),
        device_lengths(library_, lengths_);

    attention_problem p{};
    p.struct_bytes = sizeof p;
    p.type = options_.type == Type::kBf16 ? ATTENTION_BF16 : ATTENTION_FP16;
    p.head_dim = d;
    p.batch = batch();
    p.heads = options_.heads;
    p.kv_heads = options_.kv_heads;
    p.seqlen_q = *std::max_element(counts.begin(), counts.end());
    p.seqlen_k = longest_;
    p.causal = 1;
    p.window = options_.window > 0;
    p.window_left = p.window ? options_.window - 1 : 0;
    // The rows of all sequences follow each other: [tokens, heads, head_dim].
    p.Q = {on_device[0].data(), 0, d, width_};
    p.O = {on_device[3].data(), 0, d, width_};
    p.K_new = {on_device[1].data(), 0, d, kv_width};
    p.V_new = {on_device[2].data(), 0, d, kv_width};
    p.lengths_q = {device_counts.data(), counts.data()};
    p.cu_seqlens_q = {device_starts.data(), starts.data()};
    p.total_q = starts.back();
    // A page holds kPageSize rows of K, [kv_heads, head_dim] each, and then as many of V.
    const std::int64_t page = static_cast<std::int64_t>(2 * page_elements());
    p.K = {pages_.data(), page, d, kv_width};
    p.V = {pages_.data() + page / 2, page, d, kv_width};
    p.lengths_k = {device_lengths.data(), lengths_.data()};
    p.page_table = {device_table_.data(), table_.data()};
    p.page_size = kPageSize;
    p.pages = static_cast<int>(table_.size());
    p.rope = ATTENTION_ROPE_HALVES;
    p.rope_cos = cos_.data();
    p.rope_sin = sin_.data();
    p.rope_positions = longest_;
    CALL(library_, attention_workspace_bytes, &p, &p.workspace_bytes);
    const DeviceVector<char> workspace(library_, std::vector<char>(p.workspace_bytes + 1));
    p.workspace = workspace.data();
    CALL(library_, attention_forward, &p);
    CALL(library_, attention_kernel, &p, kernel, sizeof kernel);
    return on_device[3].download();
  }

  const Library &library_;
  const Options &options_;
  int width_, longest_;  // of x; tokens of the longest sequence at the end
  int of_sequence_;      // pages
  std::uint64_t state_;
  Matrix W_Q_, W_K_, W_V_, W_O_;
  std::vector<int> table_, lengths_;
  DeviceVector<std::uint16_t> pages_;
  DeviceVector<int> device_table_;
  DeviceVector<float> cos_, sin_;
  reference::Inputs inputs_;
};

/// The worst that verdicts said so far.
struct Phase {
  int queries = 0;
  bool passed = true;
  double ratio = 0;  // of error and bound

  void add(const reference::Verdict &verdict, int rows) {
    queries += rows;
    passed = passed && verdict.passed();
    ratio = std::max(ratio, verdict.not_finite ? INFINITY : verdict.max_error / verdict.max_bound);
  }
  void print(const char *name, int sequences, const char *kernel) const {
    std::printf(
        "%-8s %d tokens of %d sequences by the kernel '%s', each like the reference but for "
        "rounding: the largest error is %.2f of its bound: %s\n",
        name, queries, sequences, kernel, ratio, passed ? "passed" : "WRONG");
  }
};

ExitStatus run(const Options &options) {
  const Library library(options.library);
  char device[256];
  CALL(library, attention_device, device, sizeof device);
  std::printf("a block of %d query heads on %d key heads of %d, %s, on %s\n", options.heads,
              options.kv_heads, options.head_dim, options.type == Type::kBf16 ? "bf16" : "fp16",
              device);
  Block block(library, options);

  Phase prefill;
  const int rows = std::accumulate(options.prompts.begin(), options.prompts.end(), 0);
  Matrix x = block.random_rows(rows);
  prefill.add(block.run(x, options.prompts), rows);
  prefill.print("prefill", block.batch(), block.kernel);

  // Each sequence goes on with what came out for its last token.
  Phase decode;
  const std::size_t width = x.size() / rows;
  Matrix next;
  for (int b = 0, end = 0; b < block.batch(); b++) {
    end += options.prompts[b];
    next.insert(next.end(), &x[(end - 1) * width], &x[(end - 1) * width] + width);
  }
  const Matrix embedding = block.random_rows(options.tokens * block.batch());
  for (int token = 0; token < options.tokens; token++) {
    next = normalised(next, static_cast<int>(width));
    for (std::size_t i = 0; i < next.size(); i++) next[i] += embedding[token * next.size() + i];
    decode.add(block.run(next, std::vector<int>(block.batch(), 1)), block.batch());
  }
  decode.print("decode", block.batch(), block.kernel);
  if (std::fflush(stdout) != 0) throw UsageError("standard output: writing failed");
  return prefill.passed && decode.passed ? kPassed : kWrongAnswer;
}

const char *const kHelp =
    "usage: ./client [options]\n"
    "\n"
    "Runs the attention of a transformer's block through the library, prompts and then tokens, "
    "and\n"
    "compares each query's output with the reference.\n"
    "\n"
    "  --library FILE      default ./libattention.so\n"
    "  --prompts LIST      their lengths, default 37,100,1\n"
    "  --tokens N          after the prompts, default 64\n"
    "  --heads N           of queries, default 8\n"
    "  --kv-heads N        of keys and values, default 2\n"
    "  --head-dim N        default 64\n"
    "  --window N          a query sees the last N keys, default all\n"
    "  --type fp16|bf16    default fp16\n"
    "  --seed N            draws weights and tokens, default 1\n"
    "  --help              this\n"
    "\n"
    "Exit status: 0 passed; 1 wrong answer, or the library failed; 2 bad arguments; 3 no such "
    "device,\n"
    "or out of memory.\n";

void take(Options &options, const std::string &name, const std::string &text) {
  const std::string option = "--" + name;
  if (name == "library") options.library = text;
  if (name == "tokens") options.tokens = whole_number(option, text, 0);
  if (name == "heads") options.heads = whole_number(option, text, 1);
  if (name == "kv-heads") options.kv_heads = whole_number(option, text, 1);
  if (name == "head-dim") options.head_dim = whole_number(option, text, 1);
  if (name == "window") options.window = whole_number(option, text, 1);
  if (name == "seed") options.seed = whole_number(option, text, 0);
  if (name == "type") options.type = type_of(option, text);
  if (name != "prompts") return;
  options.prompts.clear();
  for (std::size_t from = 0, comma; from <= text.size(); from = comma + 1) {
    comma = std::min(text.find(',', from), text.size());
    options.prompts.push_back(whole_number(option, text.substr(from, comma - from), 1));
  }
}

}  // namespace

int main(int argc, char **argv) {
  Options options;
  return run_program(
      "client", kHelp, argc, argv,
      {"library", "prompts", "tokens", "heads", "kv-heads", "head-dim", "window", "type", "seed"},
      [&](const std::string &name, const std::string &text) { take(options, name, text); },
      [&] { return run(options); });
}
