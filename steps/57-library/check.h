// SPDX-License-Identifier: MIT
// What a caller of the library gets wrong, found before anything is launched.
#pragma once

#include <stdexcept>
#include <string>

#include "steps/57-library/attention.h"

/// What a call of the library fails with.
struct Failure : std::runtime_error {
  Failure(attention_status code, const std::string &message)
      : std::runtime_error(message), status(code) {}

  attention_status status;
};

/// Throws Failure unless the sizes make a problem. Of the pointers it asks only which are NULL.
void check_sizes(const attention_problem &problem);

/// Throws Failure unless the tensors, the workspace, and what is known of the arrays on the host, are what a
/// problem of these sizes needs.
void check_tensors(const attention_problem &problem, std::size_t workspace_bytes);
