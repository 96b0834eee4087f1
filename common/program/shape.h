// The shape of a run, from what was asked for, what the step takes and what a device does by default.
#pragma once

#include "common/program/options.h"
#include "reference/attention.h"

/// Throws UsageError for a shape that the step does not take, or that is none.
reference::Shape choose_shape(const Options &options, const Step &step, bool gpu);

/// The multiplications and additions of Q K^T and P V: 4 head_dim for each pair of a query and a key
/// that it sees.
double operations(const reference::Shape &shape);

/// The bytes of the keys that some query sees, and of their values: what must be read at least once.
double kv_bytes(const reference::Shape &shape, Type type);

/// What sets the problem apart from the plain one: "causal kv-heads=2 type=bf16"; empty for the plain
/// one.
std::string departures(const reference::Shape &shape, const Options &options);
