// SPDX-License-Identifier: MIT
// attention_backward: its answers to calls that nobody chose, beside the reference's gradients; what becomes of hostile
// arrays on the device; what it refuses; and its workspace.
//
// TESTS_SEED         draws the calls; default: another each time
// ATTENTION_LIBRARY  the library; default: that of the emulator
#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/testing/copies.h"
#include "reference/gradients.h"
#include "reference/inputs.h"
#include "steps/57-library/testing.h"

namespace {

const int kCalls = some_are_enough() ? 3 : 12;

int backward(const attention_problem &p, const attention_gradients &g) {
  return LIBRARY(attention_backward)(&p, &g);
}
std::string message() {
  return LIBRARY(attention_message)();
}
/// Which kernel a call gets.
std::string kernel_of(const attention_problem &p, const attention_gradients &g) {
  char name[32];
  REQUIRE_MESSAGE(LIBRARY(attention_backward_kernel)(&p, &g, name, sizeof name) == ATTENTION_OK,
                  message());
  return name;
}

/// A call with a forward pass that the reference has made.
class Call {
 public:
  explicit Call(std::uint64_t seed) : draw_(seed) {
    draw_sizes();
    draw_lengths();
    draw_scores();
    lay();
  }
  Call(const Call &) = delete;
  ~Call() {
    for (void *memory : memory_) LIBRARY(attention_release)(memory);
    for (const Tensor &tensor : tensors_) LIBRARY(attention_release)(tensor.view.data);
  }

  attention_problem problem{};
  attention_gradients gradients{};

  /// What is wrong with the gradients, or nothing.
  std::string complaint() {
    for (int b = 0; b < problem.batch; b++)
      for (const reference::Gradient of : reference::kGradients)
        if (const std::string wrong = complaint_of(b, of); !wrong.empty())
          return "sequence " + std::to_string(b) + ": " + wrong;
    if (const std::string wrong = complaint_of_sinks(); !wrong.empty()) return wrong;
    const char *const names[] = {"Q", "O", "dO", "dQ", "K", "V", "dK", "dV"};
    for (int i = 0; i < kTensors; i++)
      if (!tensors_[i].is_as_expected())
        return std::string(names[i]) + " is written where no row is";
    if (from_device(workspace_, 4 * 4097) != std::vector<char>(4 * 4097))
      return "the counters of the forward pass are not 0";
    return "";
  }

  /// Whether there are rows of Q, and of K.
  bool has_scores() const {
    const auto rows = [](const Lengths &of) { return of.packed ? of.total : of.longest; };
    return q_.longest && k_.longest && rows(q_) && rows(k_);
  }

  /// Whatever the arrays on the device hold: any numbers.
  void forget_arrays() {
    attention_problem &p = problem;
    for (attention_array *array :
         {&p.lengths_q, &p.lengths_k, &p.starts_k, &p.cu_seqlens_q, &p.cu_seqlens_k})
      array->host = nullptr;
    const int any[] = {INT_MIN, INT_MAX, -1, 0, 1, 7, 100, 1 << 20};
    for (const auto &[device, values] : arrays_) {
      for (int &value : *values) value = any[draw_.from(0, 7)];
      to_device(device, *values);
    }
  }

  /// Whether the gradients hold poison wherever no row may be.
  bool in_their_rows() const {
    for (const int i : {kdQ, kdK, kdV}) {
      const Lengths &of = i == kdQ ? q_ : k_;
      const Tensor &tensor = tensors_[i];
      std::vector<Bits> left = tensor.now();
      for (int b = 0; b < (of.packed ? 1 : problem.batch); b++)
        for (int h = 0; h < (i == kdQ ? problem.heads : problem.kv_heads); h++)
          for (int row = 0; row < (of.packed ? of.total : of.longest); row++)
            std::fill_n(&left[tensor.place(b, h, row)], problem.head_dim, Bits{0xffff});
      if (std::any_of(left.begin(), left.end(), [](Bits x) { return x != 0xffff; })) return false;
    }
    return true;
  }

 private:
  enum { kQ, kO, kdO, kdQ, kK, kV, kdK, kdV, kTensors };

  void draw_sizes() {
    attention_problem &p = problem;
    p.struct_bytes = sizeof p;
    gradients.struct_bytes = sizeof gradients;
    p.type = draw_.from(0, 1);
    p.head_dim = draw_.one_in(3)   ? 8 * draw_.from(17, 32)
                 : draw_.one_in(2) ? 64 * draw_.from(1, 2)
                                   : 8 * draw_.from(1, 16);
    p.batch = draw_.from(1, 3);
    p.kv_heads = draw_.from(1, 2);
    p.heads = p.kv_heads * draw_.from(1, 2);
    p.seqlen_q = draw_.one_in(3) ? draw_.from(1, 10) : draw_.from(1, 140);
    p.seqlen_k = draw_.one_in(2) ? draw_.from(1, 40) : draw_.from(1, 200);
    if (draw_.one_in(20)) p.seqlen_q = 0;
    if (draw_.one_in(20)) p.seqlen_k = 0;
    if (draw_.one_in(3)) p.scale = 0.3f;
    p.causal = draw_.one_in(2);
    if (draw_.one_in(3)) {
      p.window = 1;
      p.window_left = draw_.one_in(4) ? ATTENTION_NO_LIMIT : draw_.from(0, 80);
      p.window_right = draw_.one_in(4) ? ATTENTION_NO_LIMIT : draw_.from(0, 20);
    }
    p.mma_only = draw_.one_in(3);
    gradients.deterministic = !p.mma_only && draw_.one_in(2);
    type_ = p.type == ATTENTION_BF16 ? Type::kBf16 : Type::kFp16;
  }

  void draw_lengths() {
    attention_problem &p = problem;
    const bool lengths_q = draw_.one_in(2), lengths_k = draw_.one_in(2), starts = draw_.one_in(4);
    const bool packed_q = draw_.one_in(2), packed_k = !starts && draw_.one_in(2);
    q_.longest = p.seqlen_q, k_.longest = p.seqlen_k;
    for (int b = 0; b < p.batch; b++) {
      q_.start.push_back(0);
      q_.count.push_back(lengths_q || packed_q ? draw_.from(0, p.seqlen_q) : p.seqlen_q);
      k_.start.push_back(starts ? draw_.from(0, p.seqlen_k) : 0);
      const int most = p.seqlen_k - k_.start[b];
      k_.count.push_back(lengths_k || packed_k ? draw_.from(0, most) : most);
    }
    if (packed_q) q_.pack(draw_, lengths_q);
    if (packed_k) k_.pack(draw_, lengths_k);
    if (lengths_q) p.lengths_q = array(q_.count);
    if (lengths_k) p.lengths_k = array(k_.count);
    if (starts) p.starts_k = array(k_.start);
    if (packed_q) p.cu_seqlens_q = array(q_.cu_seqlens), p.total_q = q_.total;
    if (packed_k) p.cu_seqlens_k = array(k_.cu_seqlens), p.total_k = k_.total;
  }

  void draw_scores() {
    attention_problem &p = problem;
    if (p.head_dim > 128 && gradients.deterministic) return;  // no kernel has both
    if (draw_.one_in(3)) p.softcap = 0.5f * static_cast<float>(draw_.from(1, 40));
    if (draw_.one_in(3)) {
      p.alibi_stride = draw_.one_in(2) ? 0 : p.heads + draw_.from(0, 2);
      for (int i = 0; i < (p.batch - 1) * p.alibi_stride + p.heads; i++)
        slopes_.push_back(0.02f * static_cast<float>(draw_.from(0, 15)));
      p.alibi_slopes = memory<float>(slopes_.size());
      to_device(const_cast<float *>(p.alibi_slopes), slopes_);
    }
    if (draw_.one_in(3)) {
      for (int h = 0; h < p.heads; h++) sink_logits_.push_back(draw_.normal());
      p.sink_logits = memory<float>(sink_logits_.size());
      to_device(const_cast<float *>(p.sink_logits), sink_logits_);
      if (!draw_.one_in(4)) gradients.d_sink_logits = memory<float>(sink_logits_.size());
    }
  }

  /// Draws each sequence's rows and its dO, and lays them, and what the forward pass leaves, where the problem says.
  void lay() {
    attention_problem &p = problem;
    for (int i = 0; i < kTensors; i++) {
      const Lengths &of = i < kK ? q_ : k_;
      tensors_[i].lay(draw_, of.packed ? 1 : p.batch, i < kK ? p.heads : p.kv_heads,
                      of.packed ? of.total : of.longest, p.head_dim);
    }
    const int lse_rows = q_.packed ? q_.total : q_.longest;
    std::vector<float> lse(std::size_t(q_.packed ? 1 : p.batch) * p.heads * lse_rows, NAN);
    for (int b = 0; b < p.batch; b++) {
      reference::Inputs &inputs = inputs_.emplace_back(inputs_of(b));
      reference::Forward &forward = forward_.emplace_back();
      if (q_.count[b] > 0) forward = reference::forward_pass(inputs);
      for (const auto &[i, rows] : {std::pair{kQ, &inputs.Q},
                                    {kO, &forward.O},
                                    {kdO, &inputs.dO},
                                    {kK, &inputs.K},
                                    {kV, &inputs.V}})
        for_rows(b, i, [&, i = i, rows = rows](std::size_t at, std::size_t place) {
          std::copy_n(&(*rows)[at], p.head_dim, &tensors_[i].expected[place]);
        });
      for (int h = 0; h < p.heads; h++)
        for (int i = 0; i < q_.count[b]; i++)
          lse[((q_.packed ? 0 : b * p.heads) + h) * lse_rows + q_.row(b, i)] =
              forward.lse[h * q_.count[b] + i];
    }
    for (const Tensor &tensor : tensors_) tensor.fill();
    p.Q = tensors_[kQ].view, p.K = tensors_[kK].view, p.V = tensors_[kV].view;
    p.O = tensors_[kO].view;
    if (!lse.empty()) p.lse = memory<float>(lse.size());
    to_device(p.lse, lse);
    gradients.dO = tensors_[kdO].view, gradients.dQ = tensors_[kdQ].view;
    gradients.dK = tensors_[kdK].view, gradients.dV = tensors_[kdV].view;
    REQUIRE_MESSAGE(LIBRARY(attention_backward_workspace_bytes)(&p, &gradients,
                                                                &p.workspace_bytes) == ATTENTION_OK,
                    message());
    workspace_ = memory<char>(p.workspace_bytes);
    to_device(workspace_, std::vector<char>(4 * 4097));  // the rest is poison
    p.workspace = workspace_;
  }

  /// Calls f with the place of each row of a sequence in a dense tensor, and in tensor i.
  template <class F>
  void for_rows(int b, int i, F f) const {
    const Lengths &of = i < kK ? q_ : k_;
    std::size_t at = 0;
    for (int h = 0; h < (i < kK ? problem.heads : problem.kv_heads); h++)
      for (int row = 0; row < of.count[b]; row++, at += problem.head_dim)
        f(at, tensors_[i].place(of.packed ? 0 : b, h, of.row(b, row)));
  }

  reference::Inputs inputs_of(int b) {
    const attention_problem &p = problem;
    const int queries = q_.count[b], keys = k_.count[b];
    reference::Inputs inputs;
    inputs.shape = {.batch = 1,
                    .heads = p.heads,
                    .kv_heads = p.kv_heads,
                    .seqlen_q = std::max(1, queries),
                    .seqlen_k = std::max(1, keys),
                    .head_dim = p.head_dim,
                    .causal = p.causal != 0};
    inputs.shape.lengths_q = {queries}, inputs.shape.lengths_k = {keys};
    if (p.window)
      inputs.shape.window_left = p.window_left, inputs.shape.window_right = p.window_right;
    if (p.scale > 0) inputs.shape.scale = p.scale;
    inputs.shape.softcap = p.softcap;
    inputs.shape.alibi = p.alibi_slopes, inputs.shape.sink_logits = p.sink_logits;
    if (p.alibi_slopes)
      inputs.slopes.assign(&slopes_[b * p.alibi_stride], &slopes_[b * p.alibi_stride] + p.heads);
    inputs.sink_logits = sink_logits_;
    inputs.type = type_;
    const auto draw = [&](int heads, int rows) {
      reference::Elements all(std::size_t(heads) * std::max(1, rows) * p.head_dim);
      for (Bits &x : all) x = float_to_element(type_, draw_.normal());
      return all;
    };
    inputs.Q = draw(p.heads, queries), inputs.dO = draw(p.heads, queries);
    inputs.K = draw(p.kv_heads, keys), inputs.V = draw(p.kv_heads, keys);
    return inputs;
  }

  /// Compares a sequence's rows of a gradient with the reference, and forgets them.
  std::string complaint_of(int b, reference::Gradient of) {
    const bool of_queries = of == reference::Gradient::kQ;
    const int i = of_queries ? kdQ : of == reference::Gradient::kK ? kdK : kdV;
    const int d = problem.head_dim;
    const int rows = of_queries ? q_.count[b] : k_.count[b];
    const std::vector<Bits> data = tensors_[i].now();
    reference::Elements gradient;
    std::vector<reference::Place> places;
    for_rows(b, i, [&](std::size_t at, std::size_t place) {
      gradient.insert(gradient.end(), &data[place], &data[place] + d);
      std::copy_n(&data[place], d, &tensors_[i].expected[place]);
      const int number = static_cast<int>(at / d);
      places.push_back({0, number / rows, number % rows});
    });
    if (places.empty()) return "";
    if (q_.count[b] == 0)  // no query sees these keys
      return std::all_of(gradient.begin(), gradient.end(), [](Bits x) { return x % 0x8000 == 0; })
                 ? ""
                 : "dK or dV of keys without a query is not 0";
    const reference::Verdict verdict =
        reference::judge_gradient(inputs_[b], forward_[b], of, gradient, places);
    if (verdict.passed()) return "";
    return std::string(of_queries ? "dQ"
                       : i == kdK ? "dK"
                                  : "dV") +
           " is wrong, most in head " + std::to_string(verdict.worst.head) + ", row " +
           std::to_string(verdict.worst.row) + ", column " + std::to_string(verdict.worst_column) +
           ": " + std::to_string(verdict.worst_output) + ", not " +
           std::to_string(verdict.worst_expected);
  }

  /// Compares the gradient of the sinks with the reference's, of all sequences together.
  std::string complaint_of_sinks() const {
    if (!gradients.d_sink_logits) return "";
    const int heads = problem.heads, d = problem.head_dim, longest = std::max(1, q_.longest);
    reference::Inputs all;
    all.shape = {.batch = problem.batch,
                 .heads = heads,
                 .seqlen_q = longest,
                 .head_dim = d,
                 .lengths_q = q_.count};
    all.type = type_, all.sink_logits = sink_logits_;
    reference::Forward forward;
    const std::size_t rows = std::size_t(problem.batch) * heads * longest;
    all.dO.resize(rows * d), forward.O.resize(rows * d), forward.lse.resize(rows);
    for (int b = 0; b < problem.batch; b++)
      for (int h = 0; h < heads; h++)
        for (int i = 0; i < q_.count[b]; i++) {
          const std::size_t from = std::size_t(h) * q_.count[b] + i;
          const std::size_t to = (std::size_t(b) * heads + h) * longest + i;
          std::copy_n(&inputs_[b].dO[from * d], d, &all.dO[to * d]);
          std::copy_n(&forward_[b].O[from * d], d, &forward.O[to * d]);
          forward.lse[to] = forward_[b].lse[from];
        }
    const reference::SinkVerdict verdict =
        reference::judge_sink_gradients(all, forward, from_device(gradients.d_sink_logits, heads));
    return verdict.passed()
               ? ""
               : "d_sink_logits of head " + std::to_string(verdict.head) + " is " +
                     std::to_string(verdict.value) + ", not " + std::to_string(verdict.expected);
  }

  template <class T>
  T *memory(std::size_t size) {
    memory_.push_back(allocate<T>(size));
    return static_cast<T *>(memory_.back());
  }
  attention_array array(const std::vector<int> &values) {
    int *const device = memory<int>(values.size());
    to_device(device, values);
    arrays_.emplace_back(device, std::make_unique<std::vector<int>>(values));
    return {device, draw_.one_in(2) ? nullptr : arrays_.back().second->data()};
  }

  Draw draw_;
  Type type_ = Type::kFp16;
  Lengths q_, k_;
  std::vector<float> slopes_, sink_logits_;
  Tensor tensors_[kTensors];
  std::vector<reference::Inputs> inputs_;
  std::vector<reference::Forward> forward_;
  std::vector<void *> memory_;
  std::vector<std::pair<int *, std::unique_ptr<std::vector<int>>>> arrays_;  // device and host
  char *workspace_ = nullptr;
};

/// A call with one tile, in memory of its own: what mistakes are made in.
struct Plain {
  static constexpr int kHeads = 2, kRows = 20, kHeadDim = 64, kSize = kHeads * kRows * kHeadDim;
  std::vector<Bits *> all;  // Q, K, V, O, dO, dQ, dK, dV
  float *lse = allocate<float>(kHeads * kRows, 65536);
  int *lengths = allocate<int>(4, 65536);
  float *numbers = allocate<float>(2 * kHeads, 65536);  // slopes, or sinks, and their gradient
  std::vector<int> known = {20};
  attention_problem problem{};
  attention_gradients gradients{};

  Plain() {
    attention_problem &p = problem;
    p.struct_bytes = sizeof p, gradients.struct_bytes = sizeof gradients;
    p.head_dim = kHeadDim;
    p.batch = 1, p.heads = p.kv_heads = kHeads, p.seqlen_q = p.seqlen_k = kRows;
    attention_gradients &g = gradients;
    for (attention_tensor *tensor : {&p.Q, &p.K, &p.V, &p.O, &g.dO, &g.dQ, &g.dK, &g.dV}) {
      all.push_back(allocate<Bits>(kSize, 65536));
      *tensor = {all.back(), kSize, kRows * kHeadDim, kHeadDim};
    }
    for (int i = 0; i < 5; i++)
      for (int x = 0; x < kSize; x++) all[i][x] = static_cast<Bits>(0x3000 + (x * 7 + i) % 1999);
    std::fill_n(lse, kHeads * kRows, 5.0f);
    std::fill_n(numbers, kHeads, 0.25f);
    p.lse = lse;
    lengths[0] = kRows;
    p.lengths_k = {lengths, known.data()};
    REQUIRE(LIBRARY(attention_backward_workspace_bytes)(&p, &g, &p.workspace_bytes) ==
            ATTENTION_OK);
    p.workspace = workspace = allocate<char>(2 * p.workspace_bytes, 65536);  // also for widen()
    std::memset(workspace, 0, 2 * p.workspace_bytes);
  }
  Plain(const Plain &) = delete;
  ~Plain() {
    for (Bits *memory : all) LIBRARY(attention_release)(memory);
    for (void *memory : {static_cast<void *>(lse), static_cast<void *>(lengths),
                         static_cast<void *>(numbers), workspace})
      LIBRARY(attention_release)(memory);
  }
  bool untouched() const {
    for (int i = 5; i < 8; i++)
      if (std::any_of(all[i], all[i] + kSize, [](Bits x) { return x != 0xffff; })) return false;
    return true;
  }
  void *workspace = nullptr;
};

struct Mistake {
  attention_status status;
  std::string message;
  std::function<void(Plain &, attention_problem &, attention_gradients &)> make;
};
using L = Plain;
using P = attention_problem;
using G = attention_gradients;

const std::vector<Mistake> kMistakes = {
    // The arguments that the forward pass has, too, are checked by the same code.
    {ATTENTION_TYPE, "type 2: must be ATTENTION_FP16 or ATTENTION_BF16",
     [](L &, P &p, G &) { p.type = 2; }},
    {ATTENTION_LENGTH, "lengths_k[0] 21: must be 0 to 20", [](L &l, P &, G &) { l.known[0] = 21; }},
    {ATTENTION_STRUCT_SIZE,
     "gradients->struct_bytes 8: must be " + std::to_string(sizeof(G)) +
         ", as this library's header has it",
     [](L &, P &, G &g) { g.struct_bytes = 8; }},
    {ATTENTION_HEAD_DIM, "head_dim 264: must be a multiple of 8 from 8 to 256",
     [](L &, P &p, G &) { p.head_dim = 264; }},
    {ATTENTION_BACKWARD, "head_dim_v 128: must be 0 or head_dim 64 in attention_backward",
     [](L &, P &p, G &) { p.head_dim_v = 128; }},
    {ATTENTION_SIZE, "seqlen_k 8388481: must be 8388480 or less in attention_backward",
     [](L &, P &p, G &) { p.seqlen_k = 8388481; }},
    {ATTENTION_SIZE, "seqlen_k 4194241: must be 4194240 or less in attention_backward",
     [](L &, P &p, G &) { p.head_dim = 136, p.seqlen_k = 4194241; }},
    {ATTENTION_SIZE, "total_q 1073741825: must be 1073741824 or less in attention_backward",
     [](L &l, P &p, G &) { p.cu_seqlens_q.device = l.lengths, p.total_q = (1 << 30) + 1; }},
    {ATTENTION_BACKWARD, "sinks 1: must be 0 in attention_backward",
     [](L &, P &p, G &) { p.window = p.window_left = p.sinks = 1; }},
    {ATTENTION_BACKWARD, "rope 1: must be 0 in attention_backward",
     [](L &, P &p, G &) { p.rope = 1, p.rope_positions = 20; }},
    {ATTENTION_BACKWARD,
     "deterministic 1: must be 0 for a problem whose attention_backward_kernel is \"mma\"",
     [](L &, P &p, G &g) { g.deterministic = p.mma_only = 1; }},
    {ATTENTION_BACKWARD,
     "deterministic 2: must be 0 for a problem whose attention_backward_kernel is \"mma\"",
     [](L &, P &p, G &g) { g.deterministic = 2, p.K.head_stride = 0; }},
    {ATTENTION_SCORES, "softcap -20: must be 0, or from 0.001 to 1e+06",
     [](L &, P &p, G &) { p.softcap = -20; }},
    {ATTENTION_BACKWARD, "d_sink_logits: must be NULL without sink_logits",
     [](L &l, P &, G &g) { g.d_sink_logits = l.numbers; }},
    {ATTENTION_ALIGNMENT, "d_sink_logits: must be a multiple of 4 bytes",
     [](L &l, P &p, G &g) {
       p.sink_logits = l.numbers;
       g.d_sink_logits = reinterpret_cast<float *>(reinterpret_cast<char *>(l.numbers) + 9);
     }},
    {ATTENTION_OVERLAP, "d_sink_logits is written: it overlaps sink_logits",
     [](L &l, P &p, G &g) { p.sink_logits = l.numbers, g.d_sink_logits = l.numbers + 1; }},
    {ATTENTION_OVERLAP, "d_sink_logits is written: it overlaps dV",
     [](L &l, P &p, G &g) {
       p.sink_logits = l.numbers, g.d_sink_logits = reinterpret_cast<float *>(l.all[7]);
     }},
    {ATTENTION_BACKWARD, "page_table: must be NULL in attention_backward",
     [](L &l, P &p, G &) { p.page_table.device = l.lengths, p.page_size = 20, p.pages = 1; }},
    {ATTENTION_BACKWARD, "cache_index: must be NULL in attention_backward",
     [](L &l, P &p, G &) { p.cache_index.device = l.lengths, p.caches = 1; }},
    {ATTENTION_BACKWARD, "K_new.data: must be NULL in attention_backward",
     [](L &l, P &p, G &) { p.K_new.data = l.all[0]; }},
    {ATTENTION_NULL_POINTER, "lse: it is NULL", [](L &, P &p, G &) { p.lse = nullptr; }},
    {ATTENTION_NULL_POINTER, "dO.data: it is NULL", [](L &, P &, G &g) { g.dO.data = nullptr; }},
    {ATTENTION_NULL_POINTER, "dV.data: it is NULL", [](L &, P &, G &g) { g.dV.data = nullptr; }},
    {ATTENTION_ALIGNMENT, "dQ.data: must be a multiple of 16 bytes",
     [](L &l, P &, G &g) { g.dQ.data = l.all[5] + 4; }},
    {ATTENTION_ALIGNMENT, "dO.row_stride 68: must be a multiple of 8 elements",
     [](L &, P &, G &g) { g.dO.row_stride = 68; }},
    {ATTENTION_STRIDE, "dK is written: its strides let two rows share elements",
     [](L &, P &, G &g) { g.dK.head_stride = 0; }},
    {ATTENTION_OVERLAP, "dQ is written: it overlaps dO",
     [](L &l, P &, G &g) { g.dQ.data = l.all[4]; }},
    {ATTENTION_OVERLAP, "dK is written: it overlaps K",
     [](L &l, P &, G &g) { g.dK.data = l.all[1] + Plain::kSize - 64; }},
    {ATTENTION_OVERLAP, "dV is written: it overlaps dK",
     [](L &l, P &, G &g) { g.dV.data = l.all[6]; }},
    {ATTENTION_OVERLAP, "dQ is written: it overlaps lse",
     [](L &l, P &, G &g) { g.dQ.data = l.lse; }},
    {ATTENTION_OVERLAP, "dV is written: it overlaps O",
     [](L &l, P &, G &g) { g.dV.data = l.all[3]; }},
    {ATTENTION_OVERLAP, "workspace is written: it overlaps O",
     [](L &, P &p, G &) { p.O.data = p.workspace; }},
    {ATTENTION_WORKSPACE, "", [](L &, P &p, G &) { p.workspace_bytes--; }},
    {ATTENTION_NULL_POINTER, "workspace: it is NULL",
     [](L &, P &p, G &) { p.workspace = nullptr; }},
};

std::size_t bytes_of(const attention_problem &p) {
  attention_gradients g{};
  g.struct_bytes = sizeof g;
  std::size_t bytes = 0;
  REQUIRE_MESSAGE(LIBRARY(attention_backward_workspace_bytes)(&p, &g, &bytes) == ATTENTION_OK,
                  message());
  return bytes;
}

}  // namespace

TEST_SUITE_BEGIN("library");

TEST_CASE("backward: calls that nobody chose have the reference's gradients") {
  std::uint64_t state = tests_seed();
  for (int i = 0; i < kCalls; i++) {
    const std::uint64_t seed = next_random(state);
    CAPTURE(seed);
    Call call(seed);
    const P &p = call.problem;
    const bool functions = p.softcap > 0 || p.alibi_slopes || p.sink_logits;
    CHECK(kernel_of(p, call.gradients) == (!call.has_scores() ? "none"
                                           : p.mma_only || (p.head_dim > 128 && functions)
                                               ? "mma"
                                               : "hopper"));
    const int status = backward(call.problem, call.gradients);
    CHECK_MESSAGE(status == ATTENTION_OK, message());
    if (status == ATTENTION_OK) CHECK(call.complaint() == "");
  }
}

namespace {

struct Case {
  std::string kernel, what;
  std::function<void(Plain &, attention_problem &, attention_gradients &)> make;
  bool runs = true;  // false: there is no such memory
};

/// One head of 160 columns, in the memory of two of 64.
void widen(P &p, G &g) {
  p.head_dim = 160, p.heads = p.kv_heads = 1;
  p.seqlen_q = std::min(p.seqlen_q, 16), p.seqlen_k = std::min(p.seqlen_k, 16);
  p.lengths_q = p.lengths_k = {}, p.workspace_bytes *= 2;
  for (attention_tensor *tensor : {&p.Q, &p.K, &p.V, &p.O, &g.dO, &g.dQ, &g.dK, &g.dV})
    tensor->row_stride = 160;
}

const std::vector<Case> kCases = {
    {"hopper", "a plain problem", [](L &, P &, G &) {}},
    {"mma", "mma_only", [](L &, P &p, G &) { p.mma_only = 1; }},
    {"hopper", "head dim 40", [](L &, P &p, G &) { p.head_dim = 40; }},
    {"hopper", "one key head for two heads",
     [](L &, P &p, G &g) {
       p.kv_heads = 1;
       for (attention_tensor *tensor : {&p.K, &p.V, &g.dK, &g.dV}) tensor->head_stride = 0;
     }},
    {"mma", "one head of K for all", [](L &, P &p, G &) { p.K.head_stride = 0; }},
    {"mma", "one row of dO for all", [](L &, P &, G &g) { g.dO.row_stride = 0; }},
    {"mma", "one row of Q for all", [](L &, P &p, G &) { p.Q.row_stride = 0; }},
    {"hopper", "one row of O for all: no map has it", [](L &, P &p, G &) { p.O.row_stride = 0; }},
    {"hopper", "one sequence, of any stride",
     [](L &, P &p, G &g) {
       for (attention_tensor *tensor : {&p.Q, &p.K, &p.V, &p.O, &g.dO, &g.dQ, &g.dK, &g.dV})
         tensor->batch_stride = 0;
     }},
    {"hopper", "a soft cap, ALiBi and sinks",
     [](L &l, P &p, G &g) {
       p.softcap = 0.5f, p.alibi_slopes = p.sink_logits = l.numbers;
       g.d_sink_logits = l.numbers + Plain::kHeads;
     }},
    {"hopper", "head dim 160", [](L &, P &p, G &g) { widen(p, g); }},
    {"mma", "head dim 160 with a soft cap", [](L &, P &p, G &g) { widen(p, g), p.softcap = 0.5f; }},
    {"mma", "head dim 160 with ALiBi and sinks",
     [](L &l, P &p, G &g) { widen(p, g), p.alibi_slopes = p.sink_logits = l.numbers; }},
    {"hopper", "strides of 2^39 bytes",
     [](L &, P &p, G &g) { p.batch = 2, g.dV.batch_stride = std::int64_t{1} << 38; }, false},
    {"mma", "strides of 2^40 bytes",
     [](L &, P &p, G &g) { p.batch = 2, g.dV.batch_stride = std::int64_t{1} << 39; }, false},
    {"mma", "more bytes than there are before dK",
     [](L &, P &p, G &g) { p.seqlen_k = 1000, g.dK.row_stride = std::int64_t{1} << 38; }, false},
    {"mma", "more tiles of keys than 2^30",
     [](L &, P &p, G &) { p.heads = p.kv_heads = 65535, p.seqlen_k = 65535 * 128; }, false},
};

}  // namespace

TEST_CASE("backward: which kernel a problem gets, and that both have one answer") {
  char name[32];
  CHECK(LIBRARY(attention_backward_kernel)(nullptr, nullptr, name, sizeof name) ==
        ATTENTION_NULL_POINTER);
  for (const Case &one : kCases) {
    CAPTURE(one.what);
    Plain plain;
    one.make(plain, plain.problem, plain.gradients);
    CHECK(kernel_of(plain.problem, plain.gradients) == one.kernel);
    if (!one.runs) continue;
    const auto answer = [&](int mma_only) {
      plain.problem.mma_only = mma_only;
      CHECK_MESSAGE(backward(plain.problem, plain.gradients) == ATTENTION_OK, message());
      std::vector<float> all;
      for (int i = 5; i < 8; i++)
        for (int x = 0; x < Plain::kSize; x++)
          all.push_back(element_to_float(Type::kFp16, plain.all[i][x]));
      if (plain.gradients.d_sink_logits)
        all.insert(all.end(), plain.gradients.d_sink_logits,
                   plain.gradients.d_sink_logits + Plain::kHeads);
      return all;
    };
    const std::vector<float> one_kernel = answer(plain.problem.mma_only), other = answer(1);
    float largest = 0, apart = 0;
    for (std::size_t i = 0; i < other.size(); i++) {
      if (std::isnan(other[i]) && std::isnan(one_kernel[i])) continue;  // poison: no row is there
      largest = std::max(largest, std::abs(other[i]));
      apart = std::max(apart, std::abs(other[i] - one_kernel[i]));
    }
    CHECK(largest > 0);
    CHECK(apart <= largest / 256);
  }
}

TEST_CASE("backward: without queries dK and dV are 0, and without keys dQ is") {
  for (const auto &[packed, wide] : {std::pair{false, false}, {true, false}, {false, true}})
    for (const bool queries : {false, true})
      for (const bool keys : {false, true}) {
        if (queries && keys) continue;
        CAPTURE(packed);
        CAPTURE(wide);
        CAPTURE(queries);
        CAPTURE(keys);
        Plain plain;
        P &p = plain.problem;
        G &g = plain.gradients;
        p.lengths_k = {};
        g.deterministic = 1, p.mma_only = packed;
        if (packed) {
          for (int b = 0; b < 2; b++) {
            plain.lengths[b] = b * queries * Plain::kRows;
            plain.lengths[2 + b] = b * keys * Plain::kRows;
          }
          p.cu_seqlens_q = {plain.lengths, nullptr}, p.total_q = queries * Plain::kRows;
          p.cu_seqlens_k = {plain.lengths + 2, nullptr}, p.total_k = keys * Plain::kRows;
        } else {
          p.seqlen_q = queries * Plain::kRows, p.seqlen_k = keys * Plain::kRows;
          if (wide) widen(p, g);
        }
        if (!queries) p.Q = p.O = g.dO = g.dQ = {}, p.lse = nullptr;
        if (!keys) p.K = p.V = g.dK = g.dV = {};
        CHECK(kernel_of(p, g) == "none");
        std::vector<char> zeros(bytes_of(p));
        p.workspace = allocate<char>(zeros.size()), p.workspace_bytes = zeros.size();
        to_device(static_cast<char *>(p.workspace), zeros);
        CHECK_MESSAGE(backward(p, g) == ATTENTION_OK, message());
        for (int i = 5; i < 8; i++) {
          const Bits expected = (i == 5 ? queries : keys) ? 0 : 0xffff;
          CHECK(std::count(plain.all[i], plain.all[i] + Plain::kSize, expected) == Plain::kSize);
        }
        LIBRARY(attention_release)(p.workspace);
      }
}

TEST_CASE("backward: whatever hostile arrays hold, nothing outside of the tensors is touched") {
  std::uint64_t state = tests_seed();
  for (int i = 0; i < kCalls; i++) {
    const std::uint64_t seed = next_random(state);
    CAPTURE(seed);
    Call call(seed);
    call.forget_arrays();
    const int status = backward(call.problem, call.gradients);
    // Sequences that have the same rows write them both: that is a race, and no more.
    CHECK_MESSAGE((status == ATTENTION_OK || contains(message(), "[race]")), message());
    CHECK(call.in_their_rows());
  }
}

TEST_CASE("backward: every mistake has its status and one line, and nothing is written") {
  CHECK(LIBRARY(attention_backward)(nullptr, nullptr) == ATTENTION_NULL_POINTER);
  CHECK(message() == "problem: it is NULL");
  for (const Mistake &mistake : kMistakes) {
    Plain plain;
    mistake.make(plain, plain.problem, plain.gradients);
    CAPTURE(mistake.message);
    CHECK(backward(plain.problem, plain.gradients) == mistake.status);
    if (!mistake.message.empty()) CHECK(message() == mistake.message);
    CHECK(message().find('\n') == std::string::npos);
    CHECK(plain.untouched());
  }
  Plain plain;
  CHECK(LIBRARY(attention_backward)(&plain.problem, nullptr) == ATTENTION_NULL_POINTER);
  CHECK(message() == "gradients: it is NULL");
  plain.problem.Q.data = plain.problem.K.data;  // they are read, and may be one
  CHECK_MESSAGE(backward(plain.problem, plain.gradients) == ATTENTION_OK, message());
  CHECK(!plain.untouched());
}

TEST_CASE("backward: threads may call at the same time, with the forward's workspace") {
  constexpr int kThreads = 3;
  std::vector<Plain> all(kThreads);
  REQUIRE(backward(all[0].problem, all[0].gradients) == ATTENTION_OK);
  const std::vector<Bits> dV(all[0].all[7], all[0].all[7] + Plain::kSize);
  std::vector<int> wrong(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; i++)
    threads.emplace_back([&, i] {
      attention_problem forward = all[i].problem;
      forward.O.data = all[i].all[5], forward.lse = nullptr;
      wrong[i] += LIBRARY(attention_forward)(&forward) != ATTENTION_OK;
      wrong[i] += backward(all[i].problem, all[i].gradients) != ATTENTION_OK;
      wrong[i] += !std::equal(dV.begin(), dV.end(), all[i].all[7]);
    });
  for (std::thread &thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(kThreads));
}

TEST_CASE(
    "backward: the workspace grows with every size, and with packed rows, not their longest") {
  std::uint64_t state = tests_seed();
  Draw draw(next_random(state));
  for (int i = 0; i < 100; i++) {
    attention_problem p{};
    p.struct_bytes = sizeof p;
    p.head_dim = 8 * draw.from(1, 32);
    p.kv_heads = draw.from(1, 4);
    int array = 0;
    if (draw.one_in(2)) p.cu_seqlens_q.device = &array;
    const auto bytes = [&](const int *sizes) {
      p.batch = sizes[0], p.heads = sizes[1] * p.kv_heads;
      p.seqlen_q = sizes[2], p.seqlen_k = sizes[3], p.total_q = sizes[4];
      return bytes_of(p);
    };
    int sizes[] = {draw.from(1, 40), draw.from(1, 8), draw.from(1, 5000), draw.from(1, 20000),
                   draw.from(0, 1 << 20)};
    for (const int of : {2, 3})
      if (draw.one_in(5)) sizes[of] = 0;
    const std::size_t before = bytes(sizes);
    for (int &size : sizes) size += draw.one_in(2) ? draw.from(0, size) : 0;
    CHECK(before <= bytes(sizes));
  }
  int array = 0;
  attention_problem p{};
  p.struct_bytes = sizeof p;
  p.head_dim = 64, p.batch = 100, p.heads = p.kv_heads = 1, p.seqlen_k = 1;
  p.cu_seqlens_q.device = &array, p.total_q = 70000, p.seqlen_q = 65536;
  CHECK(bytes_of(p) < (70000 + 101 * 128) * 66 * 4 + 20000);
}

TEST_CASE("train: the gradients are those in double, the loss falls, and mistakes are told") {
  const std::string train = "build/host/bin/train --library build/host/bin/libattention.so ";
  const std::string small = "--layers 1 --batch 1 --csv build/library/train.csv ";
  std::filesystem::create_directories("build/library");
  const Finished passed = run_command(train + small + "--steps 3");
  CHECK_MESSAGE(passed.status == 0, passed.out, passed.err);
  CHECK(contains(passed.out, "gradient of qkv 0"));
  CHECK(lines_of(read_text("build/library/train.csv")).size() == 5);
  for (const auto &[options, status, complaint] :
       {std::tuple{"--steps -1", 2, "train: --steps -1: a whole number from 0 to 1000000"},
        std::tuple{"--text none", 2,
                   "train: --text none: a file of at least 66 characters is needed"},
        std::tuple{"--csv none/none", 2, "train: --csv none/none: writing failed"},
        std::tuple{"--head-dim 68", 1, "train: attention_workspace_bytes: head_dim 68: must be"}}) {
    CAPTURE(options);
    const Finished refused = run_command(train + "--steps 0 --layers 1 --batch 1 " + options);
    CHECK(refused.status == status);
    CHECK_MESSAGE(refused.err.starts_with(complaint), refused.err);
    CHECK(lines_of(refused.err).size() == 1);
  }
}

TEST_SUITE_END();
