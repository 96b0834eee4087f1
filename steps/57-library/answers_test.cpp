// SPDX-License-Identifier: MIT
// The library's answers to calls that nobody chose, of all that the header says, beside the reference: nothing but
// the rows of O, the log-sum-exp and the new keys is written. And what becomes of them if the arrays on the device
// hold anything.
//
// TESTS_SEED         draws the calls; default: another each time
// ATTENTION_LIBRARY  the library; default: that of the emulator
#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "common/testing/copies.h"
#include "reference/inputs.h"
#include "reference/random.h"
#include "reference/verdict.h"
#include "steps/57-library/testing.h"

namespace {

/// A call of the library, and what must come of it.
class Call {
 public:
  explicit Call(std::uint64_t seed) : draw_(seed) {
    draw_sizes();
    draw_lengths();
    draw_scores();
    draw_rope();
    lay();
  }
  Call(const Call &) = delete;
  ~Call() {
    for (void *memory : memory_) LIBRARY(attention_release)(memory);
    for (const Tensor *tensor : {&Q_, &K_, &V_, &O_, &K_new_, &V_new_})
      LIBRARY(attention_release)(tensor->view.data);
  }

  attention_problem problem{};

  /// What is wrong with the answer, or nothing.
  std::string complaint() {
    if (!K_.is_as_expected() || !V_.is_as_expected()) return "the cache holds something else";
    // 4096 of the kernel for new tokens, and one of Hopper's.
    const std::size_t counters = std::min<std::size_t>(problem.workspace_bytes, 4 * 4097);
    if (from_device(workspace_, counters) != std::vector<char>(counters))
      return "the counters are not 0";
    for (int b = 0; b < problem.batch; b++)
      if (const std::string wrong = complaint_of(b); !wrong.empty())
        return "sequence " + std::to_string(b) + ": " + wrong;
    if (!O_.is_as_expected()) return "O is written where no row is";
    if (!problem.lse) return "";
    const std::vector<float> lse = from_device(problem.lse, lse_written_.size());
    for (std::size_t i = 0; i < lse.size(); i++)
      if (!lse_written_[i] && !std::isnan(lse[i])) return "lse is written where no row is";
    return "";
  }

  /// Whatever the arrays on the device hold: any numbers.
  void forget_arrays() {
    attention_problem &p = problem;
    for (attention_array *array :
         {&p.lengths_q, &p.lengths_k, &p.starts_k, &p.cu_seqlens_q, &p.cu_seqlens_k, &p.page_table,
          &p.cache_index, &p.lengths_new, &p.cu_seqlens_new})
      array->host = nullptr;
    const int any[] = {INT_MIN, INT_MAX, -1, 0, 1, 7, 100, 1 << 20};
    for (const auto &[device, values] : arrays_) {
      for (int &value : *values) value = any[draw_.from(0, 7)];
      to_device(device, *values);
    }
  }

  /// Whether O holds poison wherever no query may have its row.
  bool o_in_its_rows() const {
    std::vector<Bits> left = O_.now();
    for (int b = 0; b < (q_.packed ? 1 : problem.batch); b++)
      for (int h = 0; h < problem.heads; h++)
        for (int i = 0; i < (q_.packed ? q_.total : problem.seqlen_q); i++)
          std::fill_n(&left[O_.place(b, h, i)], columns_of_v(), Bits{0xffff});
    return std::all_of(left.begin(), left.end(), [](Bits x) { return x == 0xffff; });
  }

 private:
  void draw_sizes() {
    attention_problem &p = problem;
    p.struct_bytes = sizeof p;
    p.type = draw_.from(0, 1);
    // Hopper's kernels take more than a few queries. At head dims 64 and 128 they take most features.
    const bool for_hopper = draw_.one_in(2), others = draw_.one_in(2);
    p.mma_only = draw_.one_in(5);
    p.head_dim = 8 * (!for_hopper ? draw_.one_in(4) ? draw_.from(1, 32) : draw_.from(1, 9)
                      : others ? draw_.from(5, 32)
                                  : 8 * draw_.from(1, 2));
    if (others && draw_.one_in(2)) {
      const int eights = p.head_dim / 8;  // Hopper's kernels want few columns less or more
      p.head_dim_v = 8 * (for_hopper ? draw_.from(std::max(1, eights - 8), std::min(32, eights + 3))
                                     : draw_.from(1, 16));
    }
    p.batch = draw_.from(1, 3);
    p.kv_heads = draw_.from(1, 3);
    p.heads = p.kv_heads * draw_.from(1, 4);
    p.seqlen_q = !for_hopper && draw_.one_in(2) ? draw_.from(1, 5) : draw_.from(1, 150);
    p.seqlen_k = draw_.one_in(2) ? draw_.from(1, 40) : draw_.from(1, 300);
    if (draw_.one_in(20)) p.seqlen_q = 0;
    if (draw_.one_in(20)) p.seqlen_k = 0;
    type_ = p.type == ATTENTION_BF16 ? Type::kBf16 : Type::kFp16;
    rope_ = p.head_dim >= 16 && draw_.one_in(3);
    append_ = draw_.one_in(3);
    paged_ = draw_.one_in(3);
    indexed_ = !paged_ && draw_.one_in(4);
  }

  int columns_of_v() const { return problem.head_dim_v ? problem.head_dim_v : problem.head_dim; }

  void draw_lengths() {
    attention_problem &p = problem;
    const bool lengths_q = draw_.one_in(2), lengths_k = draw_.one_in(2), starts = draw_.one_in(4);
    as_q_ = append_ && draw_.one_in(2);
    if (append_ && !as_q_ && draw_.one_in(5)) p.seqlen_q = 0;  // it only stores
    p.seqlen_new = append_ && !as_q_ ? draw_.from(1, std::max(1, p.seqlen_k)) : 0;
    q_.longest = p.seqlen_q, k_.longest = p.seqlen_k;
    new_.longest = as_q_ ? p.seqlen_q : p.seqlen_new;
    const bool lengths_new = !as_q_ && draw_.one_in(2);
    const bool packed_q = draw_.one_in(3);
    const bool packed_new = append_ && !as_q_ && draw_.one_in(3);
    const bool packed_k = !paged_ && !indexed_ && !starts && draw_.one_in(3);
    // Without lengths all sequences are full: there must be as many keys as the call needs.
    if ((as_q_ || (rope_ && !append_)) && !lengths_q && !starts)
      k_.longest = p.seqlen_k = std::max(p.seqlen_k, p.seqlen_q);
    for (int b = 0; b < p.batch; b++) {
      k_.start.push_back(starts ? draw_.from(0, p.seqlen_k) : 0);
      const int most = p.seqlen_k - k_.start[b];
      k_.count.push_back(lengths_k || packed_k ? draw_.from(0, most) : most);
      q_.start.push_back(0), new_.start.push_back(0);
      q_.count.push_back(lengths_q || packed_q ? draw_.from(0, p.seqlen_q) : p.seqlen_q);
      new_.count.push_back(lengths_new || packed_new ? draw_.from(0, p.seqlen_new) : p.seqlen_new);
    }
    // What a sequence needs more of than it has, it has no more of: then the lengths are given, or the packing says so.
    bool give_q = lengths_q, give_new = lengths_new;
    for (int b = 0; b < p.batch; b++) {
      if ((as_q_ || (rope_ && !append_)) && q_.count[b] > k_.count[b])
        q_.count[b] = k_.count[b], give_q |= !packed_q;
      if (append_ && !as_q_ && new_.count[b] > k_.count[b])
        new_.count[b] = k_.count[b], give_new |= !packed_new;
    }
    if (as_q_) new_ = q_;
    if (packed_q) q_.pack(draw_, give_q);
    if (as_q_) new_ = q_;
    if (packed_new) new_.pack(draw_, give_new);
    if (packed_k) k_.pack(draw_, lengths_k);
    if (give_q) p.lengths_q = array(q_.count);
    if (lengths_k) p.lengths_k = array(k_.count);
    if (starts) p.starts_k = array(k_.start);
    if (packed_q) p.cu_seqlens_q = array(q_.cu_seqlens), p.total_q = q_.total;
    if (k_.packed) p.cu_seqlens_k = array(k_.cu_seqlens), p.total_k = k_.total;
    if (append_ && !as_q_) {
      if (give_new) p.lengths_new = array(new_.count);
      if (new_.packed) p.cu_seqlens_new = array(new_.cu_seqlens), p.total_new = new_.total;
    }
    block_.resize(p.batch);
    std::iota(block_.begin(), block_.end(), 0);
    if (indexed_) {
      p.caches = p.batch + draw_.from(0, 2);
      for (int &block : block_) block = (block + 1) % p.caches;
      p.cache_index = array(block_);
    }
    if (paged_) {
      p.page_size = draw_.one_in(2) ? 8 * draw_.from(1, 5) : draw_.from(1, 40);
      const int each = (p.seqlen_k - 1) / p.page_size + 1;
      p.page_table_stride = draw_.one_in(2) ? 0 : each + draw_.from(0, 3);
      const int stride = p.page_table_stride ? static_cast<int>(p.page_table_stride) : each;
      p.pages = p.batch * each + 1;
      std::vector<int> table(p.batch * stride, INT_MAX);
      for (int b = 0; b < p.batch; b++)  // backwards, the first page left out
        for (int i = k_.start[b] / p.page_size; i * p.page_size < k_.start[b] + k_.count[b]; i++)
          table[b * stride + i] = p.pages - 1 - (b * each + i);
      page_table_ = table;
      p.page_table = array(table);
    }
  }

  void draw_scores() {
    attention_problem &p = problem;
    if (draw_.one_in(3)) p.scale = 0.3f;
    if (draw_.one_in(4)) p.softcap = static_cast<float>(draw_.from(1, 20));
    p.causal = draw_.one_in(2);
    if (draw_.one_in(3)) {
      p.window = 1;
      p.window_left = draw_.one_in(4) ? ATTENTION_NO_LIMIT : draw_.from(0, 80);
      p.window_right = draw_.one_in(4) ? ATTENTION_NO_LIMIT : draw_.from(0, 20);
      // The reference has such sinks with a causal window.
      if (p.window_left >= 0 && p.causal && draw_.one_in(2)) p.sinks = draw_.from(0, 10);
    }
    if (draw_.one_in(4)) {
      p.alibi_stride = draw_.one_in(2) ? 0 : p.heads + draw_.from(0, 2);
      for (int i = 0; i < (p.batch - 1) * p.alibi_stride + p.heads; i++)
        slopes_.push_back(0.02f * static_cast<float>(draw_.from(0, 15)));
      p.alibi_slopes = numbers(slopes_);
    }
    if (draw_.one_in(4)) {
      for (int h = 0; h < p.heads; h++) sink_logits_.push_back(draw_.normal());
      p.sink_logits = numbers(sink_logits_);
    }
  }

  void draw_rope() {
    attention_problem &p = problem;
    // nvcc fuses a rotation's product with its sum, so that a last bit may differ: step 57 checks that with its bound.
    rope_ = rope_ && environment("ATTENTION_LIBRARY", "").empty();
    if (!rope_) return;
    p.rope = draw_.from(1, 2);
    p.rope_positions = std::max(1, p.seqlen_k) + draw_.from(0, 3);
    if (p.head_dim % 16 || draw_.one_in(2)) p.rope_dim = 16 * draw_.from(1, p.head_dim / 16);
    p.rope_one_position = draw_.one_in(4);
    rope_dim_ = p.rope_dim ? p.rope_dim : p.head_dim;
    for (int i = 0; i < p.rope_positions * rope_dim_ / 2; i++) {
      const double angle = 0.001 * draw_.from(0, 6283);
      cos_.push_back(static_cast<float>(std::cos(angle)));
      sin_.push_back(static_cast<float>(std::sin(angle)));
    }
    p.rope_cos = numbers(cos_), p.rope_sin = numbers(sin_);
  }

  /// Draws the rows, and lays them where the problem says. effective_* are those that the attention is of.
  void lay() {
    attention_problem &p = problem;
    const int d = p.head_dim, dv = columns_of_v();
    const int rows_q = q_.packed ? q_.total : q_.longest;
    for (Tensor *tensor : {&Q_, &O_})
      tensor->lay(draw_, q_.packed ? 1 : p.batch, p.heads, rows_q, tensor == &Q_ ? d : dv);
    const int blocks = k_.packed ? 1 : paged_ ? p.pages : indexed_ ? p.caches : p.batch;
    const int rows_k = k_.packed ? k_.total : paged_ ? p.page_size : k_.longest;
    for (Tensor *tensor : {&K_, &V_})
      tensor->lay(draw_, blocks, p.kv_heads, rows_k, tensor == &K_ ? d : dv);
    if (append_)
      for (Tensor *tensor : {&K_new_, &V_new_})
        tensor->lay(draw_, new_.packed ? 1 : p.batch, p.kv_heads,
                    new_.packed ? new_.total : new_.longest, tensor == &K_new_ ? d : dv);
    effective_.resize(p.batch);
    for (int b = 0; b < p.batch; b++) {
      reference::Inputs &inputs = effective_[b];
      const int added = append_ ? new_.count[b] : 0, old = k_.count[b] - added;
      const int offset = p.starts_k.device ? k_.start[b] : 0;
      const int query_0 = offset + (append_ ? old : k_.count[b] - q_.count[b]);
      for (int h = 0; h < p.heads; h++)
        for (int i = 0; i < q_.count[b]; i++) {
          const std::vector<Bits> row = random_row(d);
          put(Q_, q_.packed ? 0 : b, h, q_.row(b, i), row);
          add(inputs.Q, turned(row, query_0 + (p.rope_one_position ? 0 : i)));
        }
      for (int h = 0; h < p.kv_heads; h++)
        for (int j = 0; j < k_.count[b]; j++) {
          const std::vector<Bits> K = random_row(d), V = random_row(dv);
          const bool is_new = j >= old;
          const std::vector<Bits> seen = is_new || !append_ ? turned(K, offset + j) : K;
          add(inputs.K, seen), add(inputs.V, V);
          int block = k_.packed ? 0 : block_[b], row = k_.row(b, j);
          if (paged_) {
            const int stride = static_cast<int>(page_table_.size()) / p.batch;
            block = page_table_[b * stride + row / p.page_size], row %= p.page_size;
          }
          if (!is_new) {
            put(K_, block, h, row, K), put(V_, block, h, row, V);
            continue;
          }
          new_rows_.push_back({K_.place(block, h, row), V_.place(block, h, row), seen, V});
          const int from = new_.packed ? new_.cu_seqlens[b] + j - old : j - old;
          put(K_new_, new_.packed ? 0 : b, h, from, K),
              put(V_new_, new_.packed ? 0 : b, h, from, V);
        }
    }
    for (const Tensor *tensor : {&Q_, &K_, &V_, &O_}) tensor->fill();
    if (append_) K_new_.fill(), V_new_.fill();
    for (const NewRow &row : new_rows_) {
      std::copy(row.K_row.begin(), row.K_row.end(), &K_.expected[row.K]);
      std::copy(row.V_row.begin(), row.V_row.end(), &V_.expected[row.V]);
    }
    p.Q = Q_.view, p.O = O_.view, p.K = K_.view, p.V = V_.view;
    p.K_new = K_new_.view, p.V_new = V_new_.view;
    if (rows_q > 0 && !draw_.one_in(4)) {
      lse_written_.resize(static_cast<std::size_t>(q_.packed ? 1 : p.batch) * p.heads * rows_q);
      p.lse = memory<float>(lse_written_.size());
      to_device(p.lse, std::vector<float>(lse_written_.size(), NAN));
    }
    REQUIRE_MESSAGE(LIBRARY(attention_workspace_bytes)(&p, &p.workspace_bytes) == ATTENTION_OK,
                    LIBRARY(attention_message)());
    workspace_ = memory<char>(p.workspace_bytes + 1);
    to_device(workspace_, std::vector<char>(p.workspace_bytes));
    p.workspace = workspace_;
  }

  /// Compares a sequence's rows with the reference, and forgets them.
  std::string complaint_of(int b) {
    attention_problem &p = problem;
    const int d = p.head_dim, dv = columns_of_v(), queries = q_.count[b];
    if (queries == 0) return "";
    reference::Inputs &inputs = effective_[b];
    reference::Shape &shape = inputs.shape;
    shape = {.batch = 1,
             .heads = p.heads,
             .kv_heads = p.kv_heads,
             .seqlen_q = queries,
             .seqlen_k = std::max(1, k_.count[b]),
             .head_dim = d,
             .head_dim_v = dv,
             .causal = p.causal != 0};
    shape.lengths_q = {queries}, shape.lengths_k = {k_.count[b]};
    if (k_.count[b] == 0) inputs.K.assign(p.kv_heads * d, 0), inputs.V.assign(p.kv_heads * dv, 0);
    if (p.window && p.sinks)
      shape.window = p.window_left + 1, shape.sinks = p.sinks;
    else if (p.window)
      shape.window_left = p.window_left, shape.window_right = p.window_right;
    if (p.scale > 0) shape.scale = p.scale;
    shape.softcap = p.softcap;
    shape.alibi = p.alibi_slopes, shape.sink_logits = p.sink_logits;
    inputs.type = type_;
    if (shape.alibi)
      inputs.slopes.assign(&slopes_[b * p.alibi_stride], &slopes_[b * p.alibi_stride] + p.heads);
    inputs.sink_logits = sink_logits_;
    const std::vector<Bits> O = O_.now();
    const std::vector<float> all_lse =
        p.lse ? from_device(p.lse, lse_written_.size()) : std::vector<float>{};
    reference::Elements output;
    std::vector<float> lse;
    std::vector<reference::Place> places;
    for (int h = 0; h < p.heads; h++)
      for (int i = 0; i < queries; i++) {
        const std::size_t at = O_.place(q_.packed ? 0 : b, h, q_.row(b, i));
        output.insert(output.end(), &O[at], &O[at] + dv);
        std::copy_n(&O[at], dv, &O_.expected[at]);
        places.push_back({0, h, i});
        if (!p.lse) continue;
        const std::size_t row = ((q_.packed ? 0 : static_cast<std::size_t>(b) * p.heads) + h) *
                                    (q_.packed ? q_.total : q_.longest) +
                                q_.row(b, i);
        lse.push_back(all_lse[row]);
        lse_written_[row] = true;
      }
    const reference::Verdict verdict = reference::judge(inputs, output, places, lse);
    if (!verdict.o_passed())
      return "O is wrong, most in head " + std::to_string(verdict.worst.head) + ", query " +
             std::to_string(verdict.worst.row) + ", column " +
             std::to_string(verdict.worst_column) + ": " + std::to_string(verdict.worst_output) +
             ", not " + std::to_string(verdict.worst_expected);
    if (!verdict.lse_passed())
      return "lse is wrong, most in head " + std::to_string(verdict.lse_worst.head) + ", query " +
             std::to_string(verdict.lse_worst.row) + ": " + std::to_string(verdict.lse) + ", not " +
             std::to_string(verdict.lse_expected);
    return "";
  }

  std::vector<Bits> random_row(int columns) {
    std::vector<Bits> row(columns);
    for (Bits &x : row) x = float_to_element(type_, draw_.normal());
    return row;
  }
  /// Turns a row by its position in fp32, as the header says.
  std::vector<Bits> turned(const std::vector<Bits> &row, int position) const {
    if (!rope_) return row;
    position = std::clamp(position, 0, problem.rope_positions - 1);
    std::vector<Bits> result = row;
    const int pairs = rope_dim_ / 2;
    for (int c = 0; c < pairs; c++) {
      const bool halves = problem.rope == ATTENTION_ROPE_HALVES;
      const int x = halves ? c : 2 * c, y = halves ? c + pairs : 2 * c + 1;
      const float cos = cos_[position * pairs + c], sin = sin_[position * pairs + c];
      const float a = element_to_float(type_, row[x]), b = element_to_float(type_, row[y]);
      result[x] = float_to_element(type_, a * cos - b * sin);
      result[y] = float_to_element(type_, a * sin + b * cos);
    }
    return result;
  }
  static void put(Tensor &tensor, int block, int head, int row, const std::vector<Bits> &values) {
    std::copy(values.begin(), values.end(), &tensor.expected[tensor.place(block, head, row)]);
  }
  static void add(reference::Elements &to, const std::vector<Bits> &row) {
    to.insert(to.end(), row.begin(), row.end());
  }
  template <class T>
  T *memory(std::size_t size) {
    memory_.push_back(allocate<T>(size));
    return static_cast<T *>(memory_.back());
  }
  /// An array on the device, whose numbers the host knows, too, or not.
  attention_array array(const std::vector<int> &values) {
    int *const device = memory<int>(values.size());
    to_device(device, values);
    arrays_.emplace_back(device, std::make_unique<std::vector<int>>(values));
    return {device, draw_.one_in(2) ? nullptr : arrays_.back().second->data()};
  }
  const float *numbers(const std::vector<float> &values) {
    float *const device = memory<float>(values.size());
    to_device(device, values);
    return device;
  }

  struct NewRow {
    std::size_t K, V;
    std::vector<Bits> K_row, V_row;
  };
  Draw draw_;
  Type type_ = Type::kFp16;
  bool rope_ = false, append_ = false, as_q_ = false, paged_ = false, indexed_ = false;
  int rope_dim_ = 0;
  Lengths q_, k_, new_;
  std::vector<int> block_, page_table_;
  std::vector<float> slopes_, sink_logits_, cos_, sin_;
  Tensor Q_, K_, V_, O_, K_new_, V_new_;
  std::vector<reference::Inputs> effective_;
  std::vector<NewRow> new_rows_;
  std::vector<bool> lse_written_;
  std::vector<void *> memory_;
  std::vector<std::pair<int *, std::unique_ptr<std::vector<int>>>> arrays_;  // device and host
  char *workspace_ = nullptr;
};

}  // namespace

TEST_SUITE_BEGIN("library");

TEST_CASE("calls that nobody chose have the reference's answers") {
  std::uint64_t state = tests_seed();
  std::map<std::string, int> calls;  // of each kernel
  const auto all_kernels = [&] {
    return calls["tokens"] && calls["hopper"] && calls["hopper, step 56"] && calls["prompts"];
  };
  for (int i = 0; i < (!all_kernels() ? 200 : some_are_enough() ? 20 : 60); i++) {
    const std::uint64_t seed = next_random(state);
    CAPTURE(seed);
    Call call(seed);
    const bool of_56 = call.problem.head_dim % 64 || call.problem.head_dim > 128;
    const std::string kernel = kernel_of(call.problem);
    calls[kernel + (kernel == "hopper" && of_56 ? ", step 56" : "")]++;
    const int status = LIBRARY(attention_forward)(&call.problem);
    CHECK_MESSAGE(status == ATTENTION_OK, LIBRARY(attention_message)());
    if (status == ATTENTION_OK) CHECK(call.complaint() == "");
  }
  CHECK(all_kernels());
}

TEST_CASE(
    "whatever hostile arrays on the device hold, nothing outside of the tensors is read or "
    "written") {
  std::uint64_t state = tests_seed();
  for (int i = 0; i < (some_are_enough() ? 20 : 60); i++) {
    const std::uint64_t seed = next_random(state);
    CAPTURE(seed);
    Call call(seed);
    call.forget_arrays();
    const int status = LIBRARY(attention_forward)(&call.problem);
    const std::string message = LIBRARY(attention_message)();
    // Two sequences that have the same rows write them both: that is a race, and no more.
    CHECK_MESSAGE((status == ATTENTION_OK || contains(message, "[race]")), message);
    CHECK(call.o_in_its_rows());
  }
}

TEST_CASE("the workspace grows with every size") {
  std::uint64_t state = tests_seed();
  Draw draw(next_random(state));
  const auto bytes_of = [](attention_problem p, int batch, int heads, int seqlen_q, int seqlen_k) {
    p.batch = batch, p.heads = heads * p.kv_heads;
    p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k, p.rope_positions = std::max(1, seqlen_k);
    std::size_t bytes;
    REQUIRE(LIBRARY(attention_workspace_bytes)(&p, &bytes) == ATTENTION_OK);
    return bytes;
  };
  for (int i = 0; i < 200; i++) {
    attention_problem p{};
    p.struct_bytes = sizeof p;
    p.type = draw.from(0, 1);
    p.head_dim = 16 * draw.from(1, 16);
    p.kv_heads = draw.from(1, 8);
    p.rope = draw.from(0, 2);
    int sizes[] = {draw.from(1, 40), draw.from(1, 8), draw.from(0, 40), draw.from(1, 20000)};
    if (draw.one_in(4)) sizes[3] = draw.from(0, 3);
    const std::size_t before = bytes_of(p, sizes[0], sizes[1], sizes[2], sizes[3]);
    for (int &size : sizes) size += draw.one_in(2) ? draw.from(0, 3) : 0;
    CHECK(before <= bytes_of(p, sizes[0], sizes[1], sizes[2], sizes[3]));
  }
}

TEST_SUITE_END();
