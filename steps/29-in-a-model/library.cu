// The library's calls: they check what they are given, make it the Problem that step 29 takes, and
// turn what is thrown into a status and a message. As a step, compiled for the GPU or the emulator.
#include <cstdio>
#include <cstring>
#include <new>

#include "common/kernel/kernel.h"
#include "steps/29-in-a-model/check.h"

extern const Step BACKEND_STEP;

namespace {

thread_local std::string last_message;

/// Does what a call is for, and says how it went: nothing is thrown across a C interface.
template <class F>
int call(F f) {
  const auto failed = [](attention_status status, const char *message) {
    last_message = message;
    return status;
  };
  try {
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

Problem problem_of(const attention_problem &p) {
  const auto strides = [](const attention_tensor &tensor, const attention_array &cu_seqlens) {
    return Strides{cu_seqlens.device ? 0 : tensor.batch_stride, tensor.head_stride,
                   tensor.row_stride};
  };
  Problem problem{};
  problem.Q = p.Q.data;
  problem.K = p.K.data;
  problem.V = p.V.data;
  problem.O = p.O.data;
  problem.workspace = p.workspace;
  problem.stream = p.stream;
  problem.Q_strides = strides(p.Q, p.cu_seqlens_q);
  problem.K_strides = strides(p.K, p.cu_seqlens_k);
  problem.V_strides = strides(p.V, p.cu_seqlens_k);
  problem.O_strides = strides(p.O, p.cu_seqlens_q);
  problem.type = p.type == ATTENTION_BF16 ? Type::kBf16 : Type::kFp16;
  problem.batch = p.batch;
  problem.heads = p.heads;
  problem.kv_heads = p.kv_heads;
  problem.seqlen_q = p.seqlen_q;
  problem.seqlen_k = p.seqlen_k;
  problem.head_dim = p.head_dim;
  problem.causal = p.causal != 0;
  problem.window = p.window == ATTENTION_NO_WINDOW ? 0 : p.window;
  problem.sinks = p.sinks;
  problem.lengths_q = p.lengths_q.device;
  problem.lengths_k = p.lengths_k.device;
  problem.cu_seqlens_q = p.cu_seqlens_q.device;
  problem.cu_seqlens_k = p.cu_seqlens_k.device;
  problem.total_k = p.cu_seqlens_k.device ? p.total_k : 0;
  problem.page_table = p.page_table.device;
  problem.page_size = p.page_size;
  problem.K_new = p.K_new.data;
  problem.V_new = p.V_new.data;
  if (p.K_new.data) {  // as many as there are queries
    problem.seqlen_new = p.seqlen_q;
    problem.K_new_strides = strides(p.K_new, p.cu_seqlens_q);
    problem.V_new_strides = strides(p.V_new, p.cu_seqlens_q);
    problem.lengths_new = p.lengths_q.device;
    problem.cu_seqlens_new = p.cu_seqlens_q.device;
  }
  problem.rope = static_cast<Rope>(p.rope);
  problem.rope_cos = p.rope_cos;
  problem.rope_sin = p.rope_sin;
  return problem;
}

std::size_t workspace_bytes(const attention_problem &p) {
  check_sizes(p, BACKEND_STEP.head_dims);
  return BACKEND_STEP.workspace_bytes ? BACKEND_STEP.workspace_bytes(problem_of(p)) : 0;
}

#ifdef __CUDACC__

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

void upload(void *to, const void *from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
void download(void *to, const void *from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
void *allocate(std::size_t bytes) {
  return emulator::allocate(bytes);
}
void release(void *memory) {
  emulator::release(memory);
}
std::string device_name() {
  return "emulator";
}

#endif

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
    check_tensors(p);
    if (p.workspace_bytes < needed)
      throw Failure(ATTENTION_WORKSPACE, "workspace_bytes " + std::to_string(p.workspace_bytes) +
                                             ": " + std::to_string(needed) + " or more is allowed");
    if (needed > 0 && !p.workspace) throw Failure(ATTENTION_NULL_POINTER, "workspace: it is NULL");
    BACKEND_STEP.launch(problem_of(p));
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
  return call([&] { upload(device, host, bytes); });
}
int attention_download(void *host, const void *device, std::size_t bytes) {
  return call([&] { download(host, device, bytes); });
}
