// What the program (common/program/program.cpp) and a step (steps/NN-idea/attention.cu) know of each other.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <vector>

/// One forward pass of attention: O = softmax(Q K^T / sqrt(head_dim)) V for each of batch * heads
/// independent heads.
struct Problem {
  const void *Q, *K, *V;  // fp16 [batch, heads, seqlen, head_dim], in the memory of the device
  void *O;                // fp16 [batch, heads, seqlen, head_dim]
  void *workspace;        // what Step::workspace_bytes asked for
  int batch, heads, seqlen_q, head_dim;
  int variant;  // index into Step::variants
};

/// This device does not take the step at this shape.
struct ShapeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The device cannot do what was asked for: it is absent, too small or too old.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Step {
  const char *name = nullptr;  // "02-loop-inverted": the directory, and the label in all results
  int tile;                    // seqlen must be a multiple of this
  int default_batch;  // on a GPU; less than 16 where a step's time or memory does not allow it
  void (*launch)(const Problem &);  // all of the step's kernels; throws the above
  std::size_t (*workspace_bytes)(const Problem &) = nullptr;
  const char *variant_option = nullptr;     // "k-layout": the option that chooses among
  std::vector<const char *> variants = {};  // these; the first is the default
};

// One source, compiled once for each backend.
extern const Step cpu_step;
extern const Step gpu_step;
