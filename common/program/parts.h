// SPDX-License-Identifier: MIT
// A sequence that several GPUs share: where each has its rows.
#pragma once

#include <vector>

#include "common/program/device.h"
#include "reference/gradients.h"
#include "reference/inputs.h"

/// Cuts the sequence into a chunk for each GPU, or into two.
void cut_into_parts(Problem &problem, bool two_ends);

/// Fills each GPU's memory with its part of Q, K and V, NaN in the rows that are not there, and O of nothing
/// but NaN. `parts` becomes what `problem` points to.
void fill_parts(Device &device, const reference::Inputs &inputs, Problem &problem,
                std::vector<GpuPart> &parts);

/// Gives each GPU its part of what a backward pass starts from, O, lse and dO, and room for the gradients.
void fill_backward_parts(Device &device, const reference::Inputs &inputs,
                         const reference::Forward &forward, const Problem &problem,
                         std::vector<GpuPart> &parts);

/// Of these places, those whose rows are in this process's GPUs' parts.
std::vector<reference::Place> own_places(const Problem &problem,
                                         std::vector<reference::Place> places);

/// A result of each GPU: O or dQ, of so many heads, or dK or dV.
struct PartOfAll {
  void *GpuPart::*memory;
  int heads;
};
/// The elements of the buffer of each GPU.
std::size_t elements_of_part(const Problem &problem, int heads);
/// A result of all parts that this process has, dense: [batch, heads, seqlen, head_dim]. `strays`: elements that were written beside it.
reference::Elements gather_parts(Device &device, const Problem &problem, PartOfAll what,
                                 std::size_t &strays);
