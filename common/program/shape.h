// SPDX-License-Identifier: MIT
// The sizes of a problem: those that were not given, and those that a step accepts.
#pragma once

#include "common/program/options.h"

/// The options with the sizes of the device's default problem where the user gave none.
Options with_defaults(Options options, const Step &step, bool gpu);

/// Throws UsageError for a problem that the step does not accept, or that is none.
void check_problem(const Options &options, const Step &step);

/// The multiplications and additions of Q K^T and P V: 2 for each column of K and of V for each pair of a query and a
/// key that it sees. Of a backward pass those of its five products, 10 head_dim.
double operations(const reference::Shape &shape, bool gradients = false);

/// The bytes of the keys that some query sees, and of their values, if these are not a part of the keys: what must be
/// read at least once.
double kv_bytes(const reference::Shape &shape, Type type);
