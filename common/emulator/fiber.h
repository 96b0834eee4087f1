// SPDX-License-Identifier: MIT
// A fiber: a function with a stack of its own that can stop in the middle and go on later. The
// emulator runs each CUDA thread of a block as one fiber, all of them on one thread of the host.
#pragma once

#include <signal.h>

#include <cstddef>
#include <vector>

// Switching is 15 lines of assembly on x86-64 and arm64. Elsewhere, and with -DFIBER_UCONTEXT, it
// is POSIX's swapcontext, with two system calls a switch. (So it is under AddressSanitizer, which
// knows of swapcontext.)
#if !defined(FIBER_UCONTEXT) && \
    (!(defined(__x86_64__) || defined(__aarch64__)) || defined(__SANITIZE_ADDRESS__))
#define FIBER_UCONTEXT
#endif

#ifdef FIBER_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

/// One stack and the place where its function stopped. The stack is filled with 0xff (NaN as fp16
/// and as fp32) where the function's variables will lie: one that is read before it is written is
/// not zero by luck.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber &) = delete;
  Fiber &operator=(const Fiber &) = delete;
  ~Fiber();

  /// Sets what the next resume() begins to run, whatever the fiber was in the middle of.
  void start(void (*function)(void *), void *argument);

  /// Runs the fiber until it yields, its function returns, its stack is full or it divides by 0; true if the
  /// function returned.
  bool resume();

  /// Whether the stack was full. The fiber is in the middle of something then, and must not go on.
  bool overflowed() const { return overflowed_; }
  /// The same of a whole number that it divided by 0, where the processor reports that.
  bool divided_by_0() const { return divided_by_0_; }

  /// The lowest address of the stack. Two fibers that run one function have a variable at one distance from it.
  std::byte *stack() const { return stack_; }

  /// Called from inside a fiber: back to whoever resumed it.
  static void yield();

 private:
  friend class OverflowHandler;
  static void run();
  static void on_fault(int, siginfo_t *fault, void *);
  static void on_division(int);
  static void switch_to_resumer();
  void take_stack();
  void poison();
  void deepen(const std::byte *touched);

  void (*function_)(void *) = nullptr;
  void *argument_ = nullptr;
  bool finished_ = true, overflowed_ = false, divided_by_0_ = false;
  std::byte *stack_ = nullptr;       // its lowest address
  std::byte *accessible_ = nullptr;  // the lowest that was touched, to a page
  std::byte *deepest_ = nullptr;     // where the stack was at its deepest yield since the start
#ifdef FIBER_UCONTEXT
  ucontext_t context_{}, resumer_{};
#else
  void *context_ = nullptr, *resumer_ = nullptr;  // stack pointers; the registers lie there
#endif
};

/// While it lives, a fiber whose stack is full, or that divides by 0, goes back to who resumed it, on those
/// threads of the host that have a SignalStack. (Division by 0 is left to a handler that the program has.)
class OverflowHandler {
 public:
  OverflowHandler();
  OverflowHandler(const OverflowHandler &) = delete;
  OverflowHandler &operator=(const OverflowHandler &) = delete;
  ~OverflowHandler();
};

/// A stack for this thread of the host to handle signals on: that of the fiber may be full.
class SignalStack {
 public:
  SignalStack();
  SignalStack(const SignalStack &) = delete;
  SignalStack &operator=(const SignalStack &) = delete;
  ~SignalStack();

 private:
  std::vector<std::byte> memory_;
  stack_t before_;
};

}  // namespace emulator
