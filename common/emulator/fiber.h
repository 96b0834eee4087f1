// A fiber: a function with a stack of its own that can stop in the middle and go on later. The
// emulator runs each CUDA thread of a block as one fiber, all of them on one thread of the host.
#pragma once

#include <ucontext.h>
#include <csetjmp>

#include <cstddef>

namespace emulator {

/// One stack and the place where its function stopped. The function is run again from its beginning
/// by each start(), on the same stack: a context costs two system calls to make.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber &) = delete;
  Fiber &operator=(const Fiber &) = delete;
  ~Fiber();

  /// Sets what the next resume() begins to run. Abandons whatever the fiber was in the middle of.
  void start(void (*function)(void *), void *argument);

  /// Runs the fiber until it yields or its function returns; true if the function returned.
  bool resume();

  /// Called from inside a fiber: back to whoever resumed it.
  static void yield();

 private:
  static void trampoline();

  static constexpr std::size_t kStackBytes = 256 * 1024;  // touched pages only are ever real

  void (*function_)(void *) = nullptr;
  void *argument_ = nullptr;
  bool finished_ = true;
  bool started_ = false;  // context_ holds this stack, stopped somewhere
  std::byte *stack_ = nullptr;
  ucontext_t context_{};
  ucontext_t origin_{};
  std::jmp_buf resume_point_{};
  std::jmp_buf yield_point_{};
};

}  // namespace emulator
