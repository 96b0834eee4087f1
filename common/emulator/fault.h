// SPDX-License-Identifier: MIT
// What can be wrong with a kernel: the kinds of errors, and the tag by which a message names each.
#pragma once

#include <cstdint>
#include <string>

namespace emulator {

/// README.md says what each means and what a GPU does instead.
enum class Fault : std::uint8_t {
  kRace,
  kInFlight,
  kInUse,
  kUninitialised,
  kBounds,
  kMisaligned,
  kFence,
  kBarrier,
  kDeadlock,
  kDivergence,
  kRegisters,
  kDescriptor,
  kMessage,
  kLaunch,
  kDivision,
  kException
};

/// "[race]"
constexpr const char *tag_of(Fault fault) {
  switch (fault) {
    case Fault::kRace: return "[race]";
    case Fault::kInFlight: return "[in-flight]";
    case Fault::kInUse: return "[in-use]";
    case Fault::kUninitialised: return "[uninitialised]";
    case Fault::kBounds: return "[bounds]";
    case Fault::kMisaligned: return "[misaligned]";
    case Fault::kFence: return "[fence]";
    case Fault::kBarrier: return "[barrier]";
    case Fault::kDeadlock: return "[deadlock]";
    case Fault::kDivergence: return "[divergence]";
    case Fault::kRegisters: return "[registers]";
    case Fault::kDescriptor: return "[descriptor]";
    case Fault::kMessage: return "[message]";
    case Fault::kLaunch: return "[launch]";
    case Fault::kDivision: return "[division]";
    case Fault::kException: break;
  }
  return "[exception]";
}

/// An error, or none: then it says nothing.
struct Error {
  Fault fault{};
  std::string what;

  bool empty() const { return what.empty(); }
};

}  // namespace emulator
