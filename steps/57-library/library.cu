// SPDX-License-Identifier: MIT
// The library's functions: they check what they are given, make it the Call that the kernels take, and turn what
// is thrown into a status and a message. As a step, compiled for the GPU or the emulator.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>

#include "common/kernel/kernel.h"
#include "steps/57-library/call.h"
#include "steps/57-library/check.h"
#include "steps/57-library/hopper.h"
#include "steps/69-training/backward.h"

#ifndef __CUDACC__
#include "common/emulator/memory.h"
#endif

namespace {

thread_local std::string last_message;

/// Threads of a program may call at the same time. The kernels of one call follow each other in their stream,
/// since those of another that shares the workspace must not come between. The emulator does one call at
/// a time.
std::mutex one_call;

/// A CUDA error that has been reported is not the next launch's.
void forget_error() {
#ifdef __CUDACC__
  cudaGetLastError();
#endif
}

/// Does what a call is for, and says how it went: nothing is thrown across a C interface.
template <class F>
int call(F f) {
  const auto failed = [](attention_status status, const char *message) {
    last_message = message;
    forget_error();
    return status;
  };
  try {
#ifndef __CUDACC__
    const std::lock_guard lock(one_call);
#endif
    f();
    return ATTENTION_OK;
  } catch (const Failure &failure) {
    return failed(failure.status, failure.what());
  } catch (const ShapeError &error) {
    return failed(ATTENTION_DEVICE, error.what());
  } catch (const std::bad_alloc &) {
    return failed(ATTENTION_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    return failed(ATTENTION_FAILED, error.what());
  }
}

const attention_problem &given(const attention_problem *problem) {
  if (!problem) throw Failure(ATTENTION_NULL_POINTER, "problem: it is NULL");
  return *problem;
}
const attention_gradients &given(const attention_gradients *gradients) {
  if (!gradients) throw Failure(ATTENTION_NULL_POINTER, "gradients: it is NULL");
  return *gradients;
}

/// Whether there is anything to copy.
bool is_copy(const void *device, const void *host, std::size_t bytes) {
  if (bytes == 0) return false;
  if (!device) throw Failure(ATTENTION_NULL_POINTER, "device: it is NULL");
  if (!host) throw Failure(ATTENTION_NULL_POINTER, "host: it is NULL");
  return true;
}

Strides strides(const attention_tensor &tensor, const attention_array &cu_seqlens) {
  return {cu_seqlens.device ? 0 : tensor.batch_stride, tensor.head_stride, tensor.row_stride};
}

Call call_of(const attention_problem &p) {
  const auto total = [](const attention_array &cu_seqlens, int rows) {
    return cu_seqlens.device ? rows : 0;
  };
  Call call{};
  call.Q = p.Q.data;
  call.K = p.K.data;
  call.V = p.V.data;
  call.O = p.O.data;
  call.lse = p.lse;
  call.lse_packed = p.cu_seqlens_q.device;
  call.workspace = p.workspace;
  call.stream = p.stream;
  call.Q_strides = strides(p.Q, p.cu_seqlens_q);
  call.K_strides = strides(p.K, p.cu_seqlens_k);
  call.V_strides = strides(p.V, p.cu_seqlens_k);
  call.O_strides = strides(p.O, p.cu_seqlens_q);
  call.type = p.type == ATTENTION_BF16 ? Type::kBf16 : Type::kFp16;
  call.batch = p.batch;
  call.heads = p.heads;
  call.kv_heads = p.kv_heads;
  call.seqlen_q = p.seqlen_q;
  call.seqlen_k = p.seqlen_k;
  call.head_dim = p.head_dim;
  call.head_dim_v = head_dim_of_v(p);
  call.causal = p.causal != 0;
  call.window_left = p.window ? p.window_left : ATTENTION_NO_LIMIT;
  call.window_right = p.window ? p.window_right : ATTENTION_NO_LIMIT;
  call.sinks = p.sinks;
  call.scale = p.scale > 0 ? p.scale : 1 / std::sqrt(static_cast<float>(p.head_dim));
  call.softcap = p.softcap;
  call.slopes = p.alibi_slopes;
  call.slopes_stride = p.alibi_stride;
  call.sink_logits = p.sink_logits;
  call.lengths_q = p.lengths_q.device;
  call.lengths_k = p.lengths_k.device;
  call.starts_k = p.starts_k.device;
  call.cu_seqlens_q = p.cu_seqlens_q.device;
  call.cu_seqlens_k = p.cu_seqlens_k.device;
  call.total_q = total(p.cu_seqlens_q, p.total_q);
  call.total_k = total(p.cu_seqlens_k, p.total_k);
  call.page_table = p.page_table.device;
  call.page_size = p.page_size;
  call.num_pages = p.pages;
  if (p.page_table.device)
    call.page_table_stride =
        p.page_table_stride ? p.page_table_stride : (p.seqlen_k - 1) / p.page_size + 1;
  call.cache_index = p.cache_index.device;
  call.caches = p.cache_index.device ? p.caches : p.batch;
  call.K_new = p.K_new.data;
  call.V_new = p.V_new.data;
  if (p.K_new.data) {
    const bool as_q = p.seqlen_new == 0;
    const attention_array cu_seqlens = as_q ? p.cu_seqlens_q : p.cu_seqlens_new;
    call.seqlen_new = as_q ? p.seqlen_q : p.seqlen_new;
    call.K_new_strides = strides(p.K_new, cu_seqlens);
    call.V_new_strides = strides(p.V_new, cu_seqlens);
    call.lengths_new = as_q ? p.lengths_q.device : p.lengths_new.device;
    call.cu_seqlens_new = cu_seqlens.device;
    call.total_new = total(cu_seqlens, as_q ? p.total_q : p.total_new);
  }
  call.rope = static_cast<Rope>(p.rope);
  call.rope_cos = p.rope_cos;
  call.rope_sin = p.rope_sin;
  call.rope_positions = p.rope_positions;
  call.rope_dim = p.rope_dim ? p.rope_dim : p.head_dim;
  call.rope_one_position = p.rope_one_position != 0;
  call.rope_from_new = p.K_new.data != nullptr;
  return call;
}

/// Behind the counters of the forward pass, so that both may have the same workspace.
Backward backward_of(const attention_problem &p, const attention_gradients &g) {
  Backward call{call_of(p), strides(g.dO, p.cu_seqlens_q), strides(g.dQ, p.cu_seqlens_q),
                strides(g.dK, p.cu_seqlens_k), strides(g.dV, p.cu_seqlens_k)};
  call.deterministic = g.deterministic != 0;
  call.dO = g.dO.data;
  call.dQ = g.dQ.data;
  call.dK = g.dK.data;
  call.dV = g.dV.data;
  call.d_sink_logits = g.d_sink_logits;
  call.workspace = static_cast<char *>(p.workspace) + BACKEND.counters_bytes;
  return call;
}

#ifdef __CUDACC__

/// Whether the current GPU runs what was compiled for sm_90a.
bool is_hopper() {
  int device, major, minor;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "cudaDeviceGetAttribute");
  return major == 9 && minor == 0;
}

void copy(void *to, const void *from, std::size_t bytes, cudaMemcpyKind kind) {
  cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cuda_check(cudaMemcpy(to, from, bytes, kind), "cudaMemcpy");
}
void upload(void *to, const void *from, std::size_t bytes) {
  copy(to, from, bytes, cudaMemcpyHostToDevice);
}
void download(void *to, const void *from, std::size_t bytes) {
  copy(to, from, bytes, cudaMemcpyDeviceToHost);
}
void *allocate(std::size_t bytes) {
  void *memory;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  cuda_check(error, "cudaMalloc");
  return memory;
}
void release(void *memory) {
  cuda_check(cudaFree(memory), "cudaFree");
}
void launch(const Call &call, const Hopper *hopper, std::size_t) {
  const std::lock_guard lock(one_call);
  BACKEND.forward(call, hopper);
}
void launch(const Backward &call, const BackwardKernels &kernels) {
  const std::lock_guard lock(one_call);
  kernels.backward(call);
}

__global__ void nothing() {}

std::string device_name() {
  int device = 0;
  cudaDeviceProp properties;
  cudaFuncAttributes attributes;  // the kernels were compiled with the same flags
  const auto check = [](cudaError_t error) {
    if (error != cudaSuccess) throw Failure(ATTENTION_DEVICE, cudaGetErrorString(error));
  };
  check(cudaGetDevice(&device));
  check(cudaGetDeviceProperties(&properties, device));
  check(cudaFuncGetAttributes(&attributes, nothing));
  return properties.name;
}

#else

bool is_hopper() {
  return true;  // the emulator runs every instruction
}
void check_device(const void *device, std::size_t bytes) {
  const emulator::Allocation *const all = emulator::find_allocation(device);
  if (!all ||
      bytes > std::size_t(all->memory + all->bytes - static_cast<const std::byte *>(device)))
    throw Failure(ATTENTION_FAILED, "device: " + std::to_string(bytes) +
                                        " bytes from there are not "
                                        "within what attention_allocate returned");
}
void upload(void *to, const void *from, std::size_t bytes) {
  check_device(to, bytes);
  std::memcpy(to, from, bytes);
}
void download(void *to, const void *from, std::size_t bytes) {
  check_device(from, bytes);
  std::memcpy(to, from, bytes);
}
void *allocate(std::size_t bytes) {
  return emulator::allocate(bytes);
}
void release(void *memory) {
  const emulator::Allocation *const all = emulator::find_allocation(memory);
  if (memory && (!all || all->memory != memory))
    throw Failure(ATTENTION_FAILED,
                  "memory: attention_allocate did not return this pointer, or it was released");
  emulator::release(memory);
}
/// A kernel that fails may have counted some of its parts: the counters become 0 again. (On a GPU such a
/// kernel ends all that the process does there.)
void launch(const Call &call, const Hopper *hopper, std::size_t workspace_bytes) {
  try {
    BACKEND.forward(call, hopper);
  } catch (...) {
    if (workspace_bytes > 0 && emulator::find_allocation(call.workspace))
      std::memset(call.workspace, 0, workspace_bytes);
    throw;
  }
}
void launch(const Backward &call, const BackwardKernels &kernels) {
  kernels.backward(call);
}
std::string device_name() {
  return "emulator";
}

#endif

/// Hopper's kernel, where this problem may run it.
const Hopper *hopper_for(const attention_problem &p) {
  return !p.mma_only && &HOPPER && is_hopper() ? &HOPPER : nullptr;
}

/// Those of the backward pass.
const BackwardKernels *hopper_backward_for(const attention_problem &p) {
  return !p.mma_only && &HOPPER_BACKWARD && is_hopper() ? &HOPPER_BACKWARD : nullptr;
}
bool is_for_hopper(const attention_problem &p, const attention_gradients &g) {
  return hopper_backward_for(p) && hopper_takes(backward_of(p, g));
}
const char *backward_kernel(const attention_problem &p, const attention_gradients &g) {
  return has_no_scores(p) ? "none" : is_for_hopper(p, g) ? "hopper" : "mma";
}

std::size_t workspace_bytes(const attention_problem &p) {
  check_sizes(p);
  return BACKEND.workspace_bytes(call_of(p), hopper_for(p));
}
std::size_t workspace_bytes(const attention_problem &p, const attention_gradients &g) {
  check_sizes(p, g);
  const Backward call = backward_of(p, g);
  const BackwardKernels *const hopper = hopper_backward_for(p);
  // Which kernel runs depends on pointers and strides, too, and these may be unknown here.
  return BACKEND.counters_bytes +
         std::max(BACKWARD.workspace_bytes(call), hopper ? hopper->workspace_bytes(call) : 0);
}

}  // namespace

int attention_workspace_bytes(const attention_problem *problem, std::size_t *bytes) {
  return call([&] {
    if (!bytes) throw Failure(ATTENTION_NULL_POINTER, "bytes: it is NULL");
    *bytes = workspace_bytes(given(problem));
  });
}

int attention_forward(const attention_problem *problem) {
  return call([&] {
    const attention_problem &p = given(problem);
    const std::size_t needed = workspace_bytes(p);
    check_tensors(p, needed);
    launch(call_of(p), hopper_for(p), needed);
  });
}

int attention_backward_workspace_bytes(const attention_problem *problem,
                                       const attention_gradients *gradients, std::size_t *bytes) {
  return call([&] {
    if (!bytes) throw Failure(ATTENTION_NULL_POINTER, "bytes: it is NULL");
    *bytes = workspace_bytes(given(problem), given(gradients));
  });
}

int attention_backward(const attention_problem *problem, const attention_gradients *gradients) {
  return call([&] {
    const attention_problem &p = given(problem);
    const attention_gradients &g = given(gradients);
    check_tensors(p, workspace_bytes(p, g), &g);
    const std::string kernel = backward_kernel(p, g);
    if (g.deterministic && kernel == "mma")
      throw Failure(ATTENTION_BACKWARD,
                    "deterministic " + std::to_string(g.deterministic) +
                        ": must be 0 for a problem whose attention_backward_kernel is \"mma\"");
    // Without scores the kernels of mma.sync write the zeros.
    launch(backward_of(p, g), kernel == "hopper" ? *hopper_backward_for(p) : BACKWARD);
  });
}

int attention_kernel(const attention_problem *problem, char *name, std::size_t bytes) {
  return call([&] {
    const attention_problem &p = given(problem);
    if (!name) throw Failure(ATTENTION_NULL_POINTER, "name: it is NULL");
    check_sizes(p);
    std::snprintf(name, bytes, "%s", BACKEND.kernel(call_of(p), hopper_for(p)));
  });
}

int attention_backward_kernel(const attention_problem *problem,
                              const attention_gradients *gradients, char *name, std::size_t bytes) {
  return call([&] {
    const attention_problem &p = given(problem);
    const attention_gradients &g = given(gradients);
    if (!name) throw Failure(ATTENTION_NULL_POINTER, "name: it is NULL");
    check_sizes(p, g);
    std::snprintf(name, bytes, "%s", backward_kernel(p, g));
  });
}

const char *attention_message(void) {
  return last_message.c_str();
}

int attention_device(char *name, std::size_t bytes) {
  return call([&] {
    if (!name) throw Failure(ATTENTION_NULL_POINTER, "name: it is NULL");
    std::snprintf(name, bytes, "%s", device_name().c_str());
  });
}

int attention_allocate(void **memory, std::size_t bytes) {
  return call([&] {
    if (!memory) throw Failure(ATTENTION_NULL_POINTER, "memory: it is NULL");
    *memory = allocate(bytes);
  });
}
int attention_release(void *memory) {
  return call([&] { release(memory); });
}
int attention_upload(void *device, const void *host, std::size_t bytes) {
  return call([&] {
    if (is_copy(device, host, bytes)) upload(device, host, bytes);
  });
}
int attention_download(void *host, const void *device, std::size_t bytes) {
  return call([&] {
    if (is_copy(device, host, bytes)) download(host, device, bytes);
  });
}
