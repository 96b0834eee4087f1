// SPDX-License-Identifier: MIT
// Numbers, as the pages and the exercises read and print them.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace docs {

/// A mistake of the author's: the message says what is wrong and what is allowed.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A value as `how` asks, the FORMAT of a value in a page: see main.cpp.
std::string format(double value, const std::string &how);

/// 1,234,568 if it is whole, else three digits.
std::string count(double value);

/// The value of arithmetic over numbers and [keys], whose values are asked for. Throws Error.
double arithmetic(const std::string &text,
                  const std::function<double(const std::string &)> &value_of);

}  // namespace docs
