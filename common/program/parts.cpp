// SPDX-License-Identifier: MIT
#include "common/program/parts.h"

#include <algorithm>
#include <cmath>

#include "common/kernel/processes.h"
#include "common/program/placement.h"

namespace {

/// A GPU's part of a tensor of so many heads: [batch, part_rows, heads, head_dim], as the step sees it.
Tensor part_of(const Problem &problem, int heads, int gpu) {
  const std::int64_t row = std::int64_t{heads} * problem.head_dim;
  const std::vector<int> lengths(static_cast<std::size_t>(problem.batch), rows_of(problem, gpu));
  return {problem.batch,
          heads,
          problem.part_rows,
          problem.head_dim,
          lengths,
          0,
          {problem.part_rows * row, problem.head_dim, row},
          {},
          {},
          0};
}

std::size_t elements_of(const Tensor &tensor) {
  return static_cast<std::size_t>(tensor.batch * tensor.strides.batch);
}

/// Calls it with the places of each head's rows of each chunk of a part: the first element in the tensor of the whole
/// sequence, the first in one of the part alone, both [batch, heads, rows, head_dim], and how many elements there are.
template <class Work>
void for_each_head(const Problem &problem, int heads, int gpu, const Work &work) {
  const auto d = static_cast<std::size_t>(problem.head_dim);
  for (int i = 0; i < problem.batch * heads; i++)
    for (int which = 0; which < problem.chunks; which++) {
      const auto first = static_cast<std::size_t>(first_row_of(problem, gpu, which));
      const auto rows = static_cast<std::size_t>(rows_of(problem, gpu, which));
      if (rows == 0) continue;
      work((static_cast<std::size_t>(i) * problem.seqlen_q + first) * d,
           (static_cast<std::size_t>(i) * problem.part_rows + which * problem.chunk_rows) * d,
           rows * d);
    }
}

/// A copy of a GPU's part of a tensor, in its memory, with NaN in the rows that are not there.
void *upload_part(Device &device, const Problem &problem, int heads, int gpu,
                  const reference::Elements &whole) {
  const Tensor tensor = part_of(problem, heads, gpu);
  reference::Elements part(elements_of(tensor)), buffer = poisoned(elements_of(tensor));
  for_each_head(problem, heads, gpu, [&](std::size_t from, std::size_t to, std::size_t count) {
    std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(from), count,
                part.begin() + static_cast<std::ptrdiff_t>(to));
  });
  scatter(tensor, part, buffer);
  void *memory = device.allocate(buffer.size() * sizeof(std::uint16_t));
  device.upload(memory, buffer.data(), buffer.size() * sizeof(std::uint16_t));
  return memory;
}

}  // namespace

void cut_into_parts(Problem &problem, bool two_ends) {
  problem.chunks = two_ends ? 2 : 1;
  const int all = problem.gpus * problem.chunks;
  problem.chunk_rows = (problem.seqlen_k + all - 1) / all;
  problem.part_rows = problem.chunks * problem.chunk_rows;
}

void fill_parts(Device &device, const reference::Inputs &inputs, Problem &problem,
                std::vector<GpuPart> &parts) {
  const int gpus = problem.gpus;
  const Tensor of_Q = part_of(problem, problem.heads, 0),
               of_K = part_of(problem, problem.kv_heads, 0);
  problem.Q_strides = problem.O_strides = of_Q.strides;
  problem.K_strides = problem.V_strides = of_K.strides;
  const std::size_t workspace =
      device.step().workspace_bytes ? device.step().workspace_bytes(problem) : 0;
  parts.assign(static_cast<std::size_t>(gpus), GpuPart{});
  for (int gpu = 0; gpu < gpus; gpu++) {
    if (!is_own(gpu)) continue;
    device.memory_of = gpu;
    const auto upload = [&](int heads, const reference::Elements &whole) {
      return upload_part(device, problem, heads, gpu, whole);
    };
    parts[gpu] = {upload(problem.heads, inputs.Q),
                  upload(problem.kv_heads, inputs.K),
                  upload(problem.kv_heads, inputs.V),
                  device.allocate(elements_of(of_Q) * sizeof(std::uint16_t)),
                  workspace ? device.allocate(workspace) : nullptr,
                  device.stream(gpu),
                  nullptr};
  }
  device.memory_of = 0;
  problem.parts = parts.data();
}

void fill_backward_parts(Device &device, const reference::Inputs &inputs,
                         const reference::Forward &forward, const Problem &problem,
                         std::vector<GpuPart> &parts) {
  const auto all_heads = static_cast<std::size_t>(problem.batch) * problem.heads;
  for (int gpu = 0; gpu < problem.gpus; gpu++) {
    if (!is_own(gpu)) continue;
    device.memory_of = gpu;
    const auto upload = [&](const reference::Elements &whole) {
      return upload_part(device, problem, problem.heads, gpu, whole);
    };
    const auto room = [&](int heads) {
      return device.allocate(elements_of_part(problem, heads) * sizeof(std::uint16_t));
    };
    GpuPart &part = parts[gpu];
    part.O = upload(forward.O);
    part.dO = upload(inputs.dO);
    std::vector<float> lse(all_heads * problem.part_rows, NAN);
    for (std::size_t head = 0; head < all_heads; head++)
      for (int which = 0; which < problem.chunks; which++)
        for (int row = 0; row < rows_of(problem, gpu, which); row++)
          lse[head * problem.part_rows + which * problem.chunk_rows + row] =
              forward.lse[head * problem.seqlen_q + first_row_of(problem, gpu, which) + row];
    void *const memory = device.allocate(lse.size() * sizeof(float));
    device.upload(memory, lse.data(), lse.size() * sizeof(float));
    part.lse = static_cast<const float *>(memory);
    part.dQ = room(problem.heads);
    part.dK = room(problem.kv_heads);
    part.dV = room(problem.kv_heads);
  }
  device.memory_of = 0;
}

std::vector<reference::Place> own_places(const Problem &problem,
                                         std::vector<reference::Place> places) {
  std::erase_if(places, [&](const reference::Place &place) {
    for (int gpu = 0; gpu < problem.gpus; gpu++)
      for (int which = 0; which < problem.chunks && is_own(gpu); which++) {
        const std::int64_t row = place.row - first_row_of(problem, gpu, which);
        if (0 <= row && row < problem.chunk_rows) return false;
      }
    return true;
  });
  return places;
}

std::size_t elements_of_part(const Problem &problem, int heads) {
  return elements_of(part_of(problem, heads, 0));
}

reference::Elements gather_parts(Device &device, const Problem &problem, PartOfAll what,
                                 std::size_t &strays) {
  reference::Elements whole(static_cast<std::size_t>(problem.batch) * what.heads *
                            problem.seqlen_q * problem.head_dim);
  strays = 0;
  for (int gpu = 0; gpu < problem.gpus; gpu++) {
    if (!is_own(gpu)) continue;
    const Tensor tensor = part_of(problem, what.heads, gpu);
    reference::Elements buffer(elements_of(tensor));
    device.download(buffer.data(), problem.parts[gpu].*what.memory,
                    buffer.size() * sizeof(std::uint16_t));
    const reference::Elements part = gather(tensor, buffer);
    strays += not_poison(buffer);
    for_each_head(problem, what.heads, gpu,
                  [&](std::size_t to, std::size_t from, std::size_t count) {
                    std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(from), count,
                                whole.begin() + static_cast<std::ptrdiff_t>(to));
                  });
  }
  return whole;
}
