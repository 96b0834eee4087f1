// SPDX-License-Identifier: MIT
// What attention_backward asks for: a Call, whose O and lse the forward pass has left, and where each gradient lies.
#pragma once

#include "steps/57-library/call.h"

struct Backward : Call {  // dO, dQ, dK and dV are a Problem's
  Strides dO_strides, dQ_strides, dK_strides, dV_strides;
};

/// What the library calls, and the program of this step.
struct BackwardKernels {
  void (*backward)(const Backward &);
  std::size_t (*workspace_bytes)(const Backward &);
};
#ifdef __CUDACC__
#define BACKWARD gpu_backward
#define HOPPER_BACKWARD gpu_hopper_backward
#define HOPPER_WIDE_BACKWARD gpu_hopper_wide_backward
#else
#define BACKWARD cpu_backward
#define HOPPER_BACKWARD cpu_hopper_backward
#define HOPPER_WIDE_BACKWARD cpu_hopper_wide_backward
#endif
extern const BackwardKernels BACKWARD;
extern const BackwardKernels HOPPER_BACKWARD
    [[gnu::weak]];                            // steps 92's and 87's, for sm_90a alone
void HOPPER_WIDE_BACKWARD(const Backward &);  // step 87's

/// The call that a program's problem is: dO and dQ lie as O does, dK as K and dV as V.
static inline Backward backward_of(const Problem &problem, bool deterministic = false) {
  Call call = call_of(problem);
  call.deterministic = deterministic;
  return {call, call.O_strides, call.O_strides, call.K_strides, call.V_strides};
}
