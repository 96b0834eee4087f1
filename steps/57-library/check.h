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

/// The columns of V and O.
inline int head_dim_of_v(const attention_problem &p) {
  return p.head_dim_v ? p.head_dim_v : p.head_dim;
}

/// Whether no query sees a key, by the sizes: there are no rows of Q, or none of K.
bool has_no_scores(const attention_problem &problem);

/// Throws Failure unless the sizes make a problem. Of the pointers it asks only which are NULL.
void check_sizes(const attention_problem &problem);

/// The same for the backward pass.
void check_sizes(const attention_problem &problem, const attention_gradients &gradients);

/// Throws Failure unless the tensors, the workspace, and what is known of the arrays on the host, are what a
/// problem of these sizes needs: for the forward pass, or with gradients for the backward pass.
void check_tensors(const attention_problem &problem, std::size_t workspace_bytes,
                   const attention_gradients *gradients = nullptr);
