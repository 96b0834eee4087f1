// SPDX-License-Identifier: MIT
// Trains a small GPT with the library: it reads a text and learns to say which character comes next. Attention, forward
// and backward, is the library's; all else is computed here, on the CPU. Beside it the same model is trained in double
// precision, with attention by its definition.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "reference/half.h"
#include "reference/random.h"
#include "steps/57-library/client.h"

namespace {

struct Options {
  std::string library = "./libattention.so", text = "LICENSE-prose", csv;
  int steps = 20, layers = 2, heads = 2, head_dim = 16, context = 64, batch = 2, loss_scale = 1;
  Type type = Type::kBf16;
  std::uint64_t seed = 1;

  int width() const { return heads * head_dim; }
  int rows() const { return batch * context; }
};

template <class Number>
using Values = std::vector<Number>;  // a matrix row by row, or several

double normal(std::uint64_t &state) {
  const double u = (static_cast<double>(next_random(state) >> 11) + 0.5) * 0x1p-53;
  const double angle = static_cast<double>(next_random(state) >> 11) * 0x1p-53 * 2 * M_PI;
  return std::sqrt(-2 * std::log(u)) * std::cos(angle);
}

// --- attention -----------------------------------------------------------------------------------

/// Causal attention of each layer. The rows of `qkv` are [3, heads, head_dim], those of O [heads, head_dim].
template <class Number>
struct Attention {
  virtual ~Attention() = default;
  virtual Values<Number> forward(int layer, const Values<Number> &qkv) = 0;
  /// Returns the gradient of the qkv of this layer's last forward pass.
  virtual Values<Number> backward(int layer, const Values<Number> &dO) = 0;
};

/// By the definition, which keeps the weights P.
class ByDefinition : public Attention<double> {
 public:
  explicit ByDefinition(const Options &options) : o_(options), kept_(options.layers) {}

  Values<double> forward(int layer, const Values<double> &qkv) override {
    Values<double> O(std::size_t(o_.rows()) * o_.width());
    kept_[layer] = {qkv, {}};
    const double scale = 1 / std::sqrt(static_cast<double>(o_.head_dim));
    for_each_head([&](int first, int h) {
      for (int i = 0; i < o_.context; i++) {
        Values<double> p(o_.context);
        double sum = 0;
        for (int j = 0; j <= i; j++)
          sum += p[j] = std::exp(scale * dot(&qkv[at(first + i, 0, h)], &qkv[at(first + j, 1, h)]));
        for (int j = 0; j <= i; j++) {
          p[j] /= sum;
          add(&O[at(first + i, h)], p[j], &qkv[at(first + j, 2, h)]);
        }
        kept_[layer].P.push_back(p);
      }
    });
    return O;
  }
  Values<double> backward(int layer, const Values<double> &dO) override {
    const Values<double> &qkv = kept_[layer].qkv;
    Values<double> d(qkv.size());
    const double scale = 1 / std::sqrt(static_cast<double>(o_.head_dim));
    auto P = kept_[layer].P.begin();
    for_each_head([&](int first, int h) {
      for (int i = 0; i < o_.context; i++, ++P) {
        const double *const dO_i = &dO[at(first + i, h)];
        Values<double> dP(o_.context);
        double D = 0;
        for (int j = 0; j <= i; j++) D += (*P)[j] * (dP[j] = dot(dO_i, &qkv[at(first + j, 2, h)]));
        for (int j = 0; j <= i; j++) {
          const double dS = (*P)[j] * (dP[j] - D) * scale;
          add(&d[at(first + i, 0, h)], dS, &qkv[at(first + j, 1, h)]);
          add(&d[at(first + j, 1, h)], dS, &qkv[at(first + i, 0, h)]);
          add(&d[at(first + j, 2, h)], (*P)[j], dO_i);
        }
      }
    });
    return d;
  }

 private:
  struct Kept {
    Values<double> qkv;
    std::vector<Values<double>> P;
  };
  template <class F>
  void for_each_head(F f) const {
    for (int b = 0; b < o_.batch; b++)
      for (int h = 0; h < o_.heads; h++) f(b * o_.context, h);
  }
  std::size_t at(int row, int of_three, int h) const {
    return ((std::size_t(row) * 3 + of_three) * o_.heads + h) * o_.head_dim;
  }
  std::size_t at(int row, int h) const { return (std::size_t(row) * o_.heads + h) * o_.head_dim; }
  double dot(const double *a, const double *b) const {
    return std::inner_product(a, a + o_.head_dim, b, 0.0);
  }
  void add(double *to, double factor, const double *from) const {
    for (int k = 0; k < o_.head_dim; k++) to[k] += factor * from[k];
  }

  Options o_;
  std::vector<Kept> kept_;
};

/// By the library: tensors of 16 bits on the device. Q, K and V are three parts of one tensor, as are their gradients.
/// A layer keeps qkv, O and the log-sum-exp.
class ByLibrary : public Attention<float> {
 public:
  ByLibrary(const Library &library, const Options &options) : library_(library), o_(options) {
    const std::size_t size = std::size_t(o_.rows()) * o_.width();
    dO_ = std::make_unique<Device>(library, size);
    dqkv_ = std::make_unique<Device>(library, 3 * size);
    std::size_t bytes = 0;
    for (int layer = 0; layer < o_.layers; layer++) {
      kept_.push_back(
          {std::make_unique<Device>(library, 3 * size), std::make_unique<Device>(library, size),
           std::make_unique<DeviceVector<float>>(library, std::size_t(o_.rows()) * o_.heads)});
      const attention_problem problem = problem_of(layer);
      const attention_gradients gradients = gradients_of();
      std::size_t forward, backward;
      CALL(library_, attention_workspace_bytes, &problem, &forward);
      CALL(library_, attention_backward_workspace_bytes, &problem, &gradients, &backward);
      bytes = std::max({bytes, forward, backward});
    }
    workspace_ = std::make_unique<DeviceVector<char>>(library, std::vector<char>(bytes));
    workspace_bytes_ = bytes;
  }

  Values<float> forward(int layer, const Values<float> &qkv) override {
    kept_[layer].qkv->upload(elements(qkv, 1));
    const attention_problem problem = problem_of(layer);
    CALL(library_, attention_forward, &problem);
    return numbers(*kept_[layer].O, 1);
  }
  /// The loss scale multiplies dO before it is rounded, and divides the gradients.
  Values<float> backward(int layer, const Values<float> &dO) override {
    dO_->upload(elements(dO, static_cast<float>(o_.loss_scale)));
    const attention_problem problem = problem_of(layer);
    const attention_gradients gradients = gradients_of();
    CALL(library_, attention_backward, &problem, &gradients);
    return numbers(*dqkv_, 1 / static_cast<float>(o_.loss_scale));
  }

 private:
  using Device = DeviceVector<std::uint16_t>;
  struct Kept {
    std::unique_ptr<Device> qkv, O;
    std::unique_ptr<DeviceVector<float>> lse;
  };

  attention_tensor tensor(const Device &of, int parts, int part) const {
    const std::int64_t row = parts * o_.width();
    return {of.data() + part * o_.width(), o_.context * row, o_.head_dim, row};
  }
  attention_problem problem_of(int layer) const {
    attention_problem p{};
    p.struct_bytes = sizeof p;
    p.type = o_.type == Type::kBf16 ? ATTENTION_BF16 : ATTENTION_FP16;
    p.head_dim = o_.head_dim;
    p.batch = o_.batch, p.heads = p.kv_heads = o_.heads, p.seqlen_q = p.seqlen_k = o_.context;
    p.causal = 1;
    const Kept &kept = kept_[layer];
    p.Q = tensor(*kept.qkv, 3, 0), p.K = tensor(*kept.qkv, 3, 1), p.V = tensor(*kept.qkv, 3, 2);
    p.O = tensor(*kept.O, 1, 0), p.lse = kept.lse->data();
    if (workspace_) p.workspace = workspace_->data(), p.workspace_bytes = workspace_bytes_;
    return p;
  }
  attention_gradients gradients_of() const {
    attention_gradients g{};
    g.struct_bytes = sizeof g;
    g.dO = tensor(*dO_, 1, 0);
    g.dQ = tensor(*dqkv_, 3, 0), g.dK = tensor(*dqkv_, 3, 1), g.dV = tensor(*dqkv_, 3, 2);
    return g;
  }
  std::vector<std::uint16_t> elements(const Values<float> &values, float factor) const {
    std::vector<std::uint16_t> bits;
    for (const float x : values) bits.push_back(float_to_element(o_.type, x * factor));
    return bits;
  }
  Values<float> numbers(const Device &of, float factor) const {
    Values<float> values;
    for (const std::uint16_t bits : of.download())
      values.push_back(element_to_float(o_.type, bits) * factor);
    return values;
  }

  const Library &library_;
  Options o_;
  std::vector<Kept> kept_;
  std::unique_ptr<Device> dO_, dqkv_;
  std::unique_ptr<DeviceVector<char>> workspace_;
  std::size_t workspace_bytes_ = 0;
};

// --- the model -----------------------------------------------------------------------------------

/// The rows of x, [rows, in], times W, [in, out].
template <class Number>
Values<Number> product(const Values<Number> &x, const Number *W, int in, int out) {
  const std::size_t rows = x.size() / in;
  Values<Number> y(rows * out);
  for (std::size_t row = 0; row < rows; row++)
    for (int i = 0; i < in; i++)
      for (int k = 0; k < out; k++) y[row * out + k] += x[row * in + i] * W[i * out + k];
  return y;
}
/// Returns its gradient with respect to x, and adds that with respect to W.
template <class Number>
Values<Number> product_back(const Values<Number> &x, const Number *W, const Values<Number> &dy,
                            int in, int out, Number *dW) {
  const std::size_t rows = x.size() / in;
  Values<Number> dx(x.size());
  for (std::size_t row = 0; row < rows; row++)
    for (int i = 0; i < in; i++) {
      const Number *const dy_row = &dy[row * out];
      dx[row * in + i] = std::inner_product(dy_row, dy_row + out, &W[i * out], Number{0});
      for (int k = 0; k < out; k++) dW[i * out + k] += x[row * in + i] * dy_row[k];
    }
  return dx;
}

/// Each row divided by its root mean square.
template <class Number>
struct Normalised {
  Values<Number> y, factor;

  Normalised(const Values<Number> &x, int width) : y(x) {
    for (std::size_t first = 0; first < x.size(); first += width) {
      const Number squares = std::inner_product(&x[first], &x[first] + width, &x[first], Number{0});
      factor.push_back(1 / std::sqrt(squares / width + Number{1e-6}));
      for (int i = 0; i < width; i++) y[first + i] *= factor.back();
    }
  }
  /// Adds to dx what dy gives.
  void back(const Values<Number> &dy, Values<Number> &dx) const {
    const std::size_t width = y.size() / factor.size();
    for (std::size_t row = 0; row < factor.size(); row++) {
      const Number *const y_row = &y[row * width], *const dy_row = &dy[row * width];
      const Number mean = std::inner_product(y_row, y_row + width, dy_row, Number{0}) / width;
      for (std::size_t i = 0; i < width; i++)
        dx[row * width + i] += factor[row] * (dy_row[i] - y_row[i] * mean);
    }
  }
};

template <class Number>
void add(Values<Number> &to, const Values<Number> &from) {
  std::transform(to.begin(), to.end(), from.begin(), to.begin(), std::plus<>());
}

/// Where the weights of each matrix lie among all.
struct Part {
  std::string name;
  std::size_t first, size;
};

/// A GPT: per layer attention and a perceptron, each behind a norm and added to what came before.
template <class Number>
class Model {
 public:
  Model(const Options &options, int characters) : o_(options), characters_(characters) {
    const int C = o_.width();
    const auto part = [&](const std::string &name, std::size_t size) {
      parts.push_back({name, parts.empty() ? 0 : parts.back().first + parts.back().size, size});
    };
    part("characters", std::size_t(characters) * C);
    part("positions", std::size_t(o_.context) * C);
    part("logits", std::size_t(characters) * C);
    for (int layer = 0; layer < o_.layers; layer++)
      for (const auto &[name, size] : {std::pair{"qkv", 3}, {"out", 1}, {"up", 4}, {"down", 4}})
        part(name + (" " + std::to_string(layer)), std::size_t(size) * C * C);
    weights.resize(parts.back().first + parts.back().size);
  }

  std::vector<Part> parts;
  Values<Number> weights;

  /// The mean of -ln of the probability of each next character. `text` has context + 1 characters for each sequence.
  /// If `gradient` is not null, it becomes the loss' gradient with respect to the weights.
  Number loss(const std::vector<int> &text, Attention<Number> &attention,
              Values<Number> *gradient) {
    const int C = o_.width(), rows = o_.rows();
    Values<Number> x;
    for (int row = 0; row < rows; row++)
      for (int i = 0; i < C; i++)
        x.push_back(weights[std::size_t(character(text, row)) * C + i] +
                    weights[parts[1].first + row % o_.context * C + i]);
    std::vector<Layer> layers;
    for (int layer = 0; layer < o_.layers; layer++) {
      const Number *const W = of_layer(layer);
      Normalised<Number> n(x, C);
      Values<Number> O = attention.forward(layer, product(n.y, W, C, 3 * C));
      add(x, product(O, W + 3 * C * C, C, C));
      Normalised<Number> m(x, C);
      Values<Number> up = product(m.y, W + 4 * C * C, C, 4 * C), act = up;
      for (Number &a : act) a /= 1 + std::exp(-a);
      add(x, product(act, W + 8 * C * C, 4 * C, C));
      layers.push_back({n, m, O, up, act});
    }
    const Normalised<Number> last(x, C);
    Values<Number> logits = product(last.y, &weights[parts[2].first], C, characters_);
    const Number loss = to_gradient(text, logits);
    if (!gradient) return loss;

    gradient->assign(weights.size(), 0);
    Number *const dW_all = gradient->data();
    const Values<Number> dlast = product_back(last.y, &weights[parts[2].first], logits, C,
                                              characters_, dW_all + parts[2].first);
    Values<Number> dx(x.size());
    last.back(dlast, dx);
    for (int layer = o_.layers - 1; layer >= 0; layer--) {
      const Layer &of = layers[layer];
      const Number *const W = of_layer(layer);
      Number *const dW = dW_all + (W - weights.data());
      Values<Number> dup = product_back(of.act, W + 8 * C * C, dx, 4 * C, C, dW + 8 * C * C);
      for (std::size_t i = 0; i < dup.size(); i++) {
        const Number s = 1 / (1 + std::exp(-of.up[i]));
        dup[i] *= s * (1 + of.up[i] * (1 - s));
      }
      of.m.back(product_back(of.m.y, W + 4 * C * C, dup, C, 4 * C, dW + 4 * C * C), dx);
      const Values<Number> dO = product_back(of.O, W + 3 * C * C, dx, C, C, dW + 3 * C * C);
      const Values<Number> dqkv = attention.backward(layer, dO);
      of.n.back(product_back(of.n.y, W, dqkv, C, 3 * C, dW), dx);
    }
    for (int row = 0; row < rows; row++)
      for (int i = 0; i < C; i++) {
        dW_all[std::size_t(character(text, row)) * C + i] += dx[row * C + i];
        dW_all[parts[1].first + row % o_.context * C + i] += dx[row * C + i];
      }
    return loss;
  }

 private:
  struct Layer {
    Normalised<Number> n, m;
    Values<Number> O, up, act;
  };
  const Number *of_layer(int layer) const { return &weights[parts[3 + 4 * layer].first]; }
  int character(const std::vector<int> &text, int row) const {
    return text[row / o_.context * (o_.context + 1) + row % o_.context];
  }
  /// Returns the loss. The logits become its gradient.
  Number to_gradient(const std::vector<int> &text, Values<Number> &logits) const {
    Number loss = 0;
    for (int row = 0; row < o_.rows(); row++) {
      Number *const of = &logits[std::size_t(row) * characters_], sum = 0;
      const Number most = *std::max_element(of, of + characters_);
      for (int c = 0; c < characters_; c++) sum += of[c] = std::exp(of[c] - most);
      const int next = text[row / o_.context * (o_.context + 1) + row % o_.context + 1];
      loss -= std::log(of[next] / sum) / o_.rows();
      for (int c = 0; c < characters_; c++) of[c] = (of[c] / sum - (c == next)) / o_.rows();
    }
    return loss;
  }

  Options o_;
  int characters_;
};

/// Adam (Kingma and Ba 2015, algorithm 1).
template <class Number>
struct Adam {
  Values<Number> m, v;
  int t = 0;

  void step(Values<Number> &weights, const Values<Number> &gradient) {
    constexpr Number rate = 3e-3, b1 = 0.9, b2 = 0.95;
    m.resize(weights.size()), v.resize(weights.size()), t++;
    for (std::size_t i = 0; i < weights.size(); i++) {
      m[i] = b1 * m[i] + (1 - b1) * gradient[i];
      v[i] = b2 * v[i] + (1 - b2) * gradient[i] * gradient[i];
      const Number up = m[i] / (1 - std::pow(b1, Number(t)));
      const Number down = std::sqrt(v[i] / (1 - std::pow(b2, Number(t)))) + Number{1e-8};
      weights[i] -= rate * up / down;
    }
  }
};

// --- training ------------------------------------------------------------------------------------

/// How far two vectors are apart, as a part of the second one's length.
template <class A, class B>
double distance(const A *a, const B *b, std::size_t size) {
  double apart = 0, length = 0;
  for (std::size_t i = 0; i < size; i++)
    apart += std::pow(double(a[i]) - double(b[i]), 2), length += double(b[i]) * double(b[i]);
  return std::sqrt(apart / length);
}

int run(const Options &options) {
  const Library library(options.library);
  std::ofstream csv(options.csv.empty() ? "/dev/null" : options.csv);
  csv.precision(9);
  csv << "step,library,double\n" << std::flush;
  if (!csv) throw UsageError("--csv " + options.csv + ": writing failed");
  std::ifstream file(options.text);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (static_cast<int>(text.size()) < options.context + 2)
    throw UsageError("--text " + options.text + ": a file of at least " +
                     std::to_string(options.context + 2) + " characters is needed");
  const std::set<char> all(text.begin(), text.end());
  const auto number = [&](char c) { return int(std::distance(all.begin(), all.find(c))); };

  Model<float> model(options, int(all.size()));
  Model<double> exact(options, int(all.size()));
  ByLibrary by_library(library, options);
  ByDefinition by_definition(options);
  std::uint64_t state = options.seed;
  for (float &x : model.weights) x = static_cast<float>(0.1 * normal(state));
  exact.weights.assign(model.weights.begin(), model.weights.end());
  const auto draw_text = [&] {
    std::vector<int> batch;
    for (int b = 0; b < options.batch; b++) {
      const std::size_t first = next_random(state) % (text.size() - options.context);
      for (int i = 0; i <= options.context; i++) batch.push_back(number(text[first + i]));
    }
    return batch;
  };
  char device[256];
  CALL(library, attention_device, device, sizeof device);
  std::printf("%d layers, %d heads of %d, %zu weights; attention in %s on %s\n", options.layers,
              options.heads, options.head_dim, model.weights.size(),
              options.type == Type::kBf16 ? "bf16" : "fp16", device);

  // The model in double: its gradient along a direction, and the difference of two losses.
  std::vector<int> batch = draw_text();
  Values<double> direction, gradient;
  exact.loss(batch, by_definition, &gradient);
  for (std::size_t i = 0; i < gradient.size(); i++) direction.push_back(normal(state));
  const auto moved = [&](double by) {
    Model<double> there = exact;
    for (std::size_t i = 0; i < direction.size(); i++) there.weights[i] += by * direction[i];
    return there.loss(batch, by_definition, nullptr);
  };
  constexpr double h = 1e-5;
  const double slope = (moved(h) - moved(-h)) / (2 * h);
  const double along = std::inner_product(gradient.begin(), gradient.end(), direction.begin(), 0.0);
  const bool slope_right = std::abs(slope / along - 1) < 1e-5;
  std::printf("in double the slope is %.8f by the gradient and %.8f by two losses: %s\n", along,
              slope, slope_right ? "passed" : "WRONG");

  // The library's gradients, of the same weights.
  Values<float> of_library;
  model.loss(batch, by_library, &of_library);
  // Roundings of Q, K, V, O, dO, P and dS, and their sums: eight of u in all.
  const double most = 8 * (options.type == Type::kBf16 ? 0x1p-8 : 0x1p-11);
  bool right = slope_right;
  for (const Part &part : model.parts) {
    const double off = distance(&of_library[part.first], &gradient[part.first], part.size);
    const bool passed = off < most;
    std::printf("gradient of %-10s off by %.4f%%: %s\n", part.name.c_str(), 100 * off,
                passed ? "passed" : "WRONG");
    right &= passed;
  }

  Adam<float> adam;
  Adam<double> exact_adam;
  float first = 0, last = 0;
  for (int step = 0; step <= options.steps; step++) {
    last = model.loss(batch, by_library, &of_library);
    const double exactly = exact.loss(batch, by_definition, &gradient);
    if (step == 0) first = last;
    std::printf("step %3d  loss %.5f, in double %.5f\n", step, last, exactly);
    std::fflush(stdout);
    csv << step << ',' << last << ',' << exactly << '\n';
    adam.step(model.weights, of_library);
    exact_adam.step(exact.weights, gradient);
    batch = draw_text();
  }
  const bool learns = options.steps == 0 || last < first;
  if (!learns) std::printf("the loss does not fall: WRONG\n");
  if (!csv.flush()) throw UsageError("--csv " + options.csv + ": writing failed");
  return right && learns ? kPassed : kWrongAnswer;
}

const char *const kHelp =
    "usage: ./train [options]\n"
    "\n"
    "Trains a small GPT on a text, with the library's attention and its gradients, and beside it "
    "the\n"
    "same model in double precision.\n"
    "\n"
    "  --library FILE      default ./libattention.so\n"
    "  --text FILE         default LICENSE-prose\n"
    "  --steps N           default 20\n"
    "  --layers N          default 2\n"
    "  --heads N           default 2\n"
    "  --head-dim N        a multiple of 8 up to 128, default 16\n"
    "  --context N         characters of a sequence, default 64\n"
    "  --batch N           sequences of a step, default 2\n"
    "  --type fp16|bf16    of attention's tensors, default bf16\n"
    "  --loss-scale N      multiplies dO, and divides the gradients; default 1\n"
    "  --csv FILE          writes the losses\n"
    "  --seed N            draws weights and texts, default 1\n"
    "  --help              this\n"
    "\n"
    "Exit status: 0 passed; 1 wrong gradients, a loss that does not fall, or the library failed; "
    "2 bad\n"
    "arguments; 3 no such device, or out of memory.\n";

void take(Options &options, const std::string &name, const std::string &text) {
  const std::string option = "--" + name;
  if (name == "library") options.library = text;
  if (name == "text") options.text = text;
  if (name == "csv") options.csv = text;
  if (name == "type") options.type = type_of(option, text);
  if (name == "seed") options.seed = whole_number(option, text, 0);
  if (name == "steps") options.steps = whole_number(option, text, 0);
  const std::pair<const char *, int Options::*> sizes[] = {
      {"layers", &Options::layers},     {"heads", &Options::heads},
      {"head-dim", &Options::head_dim}, {"context", &Options::context},
      {"batch", &Options::batch},       {"loss-scale", &Options::loss_scale}};
  for (const auto &[of, member] : sizes)
    if (name == of) options.*member = whole_number(option, text, 1);
}

}  // namespace

int main(int argc, char **argv) {
  Options options;
  return run_program(
      "train", kHelp, argc, argv,
      {"library", "text", "steps", "layers", "heads", "head-dim", "context", "batch", "type",
       "loss-scale", "csv", "seed"},
      [&](const std::string &name, const std::string &text) { take(options, name, text); },
      [&] { return run(options); });
}
