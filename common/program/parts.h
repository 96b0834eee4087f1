// SPDX-License-Identifier: MIT
// A sequence that several GPUs share: where each has its rows.
#pragma once

#include <vector>

#include "common/program/device.h"
#include "reference/inputs.h"

/// Cuts the sequence into a chunk for each GPU, or into two.
void cut_into_parts(Problem &problem, bool two_ends);

/// Fills each GPU's memory with its part of Q, K and V, NaN in the rows that are not there, and O of nothing
/// but NaN. `parts` becomes what `problem` points to.
void fill_parts(Device &device, const reference::Inputs &inputs, Problem &problem,
                std::vector<GpuPart> &parts);

/// O of all parts, dense: [batch, heads, seqlen, head_dim]. `strays`: elements that were written beside it.
reference::Elements gather_parts(Device &device, const Problem &problem, std::size_t &strays);
