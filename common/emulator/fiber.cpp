// glibc's fortified longjmp takes a jump to another stack for a corrupted one and aborts.
#undef _FORTIFY_SOURCE

#include "common/emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace emulator {
namespace {

thread_local Fiber *running = nullptr;

}  // namespace

Fiber::~Fiber() {
  if (stack_) munmap(stack_, kStackBytes);
}

void Fiber::start(void (*function)(void *), void *argument) {
  function_ = function;
  argument_ = argument;
  if (!finished_)
    started_ = false;  // abandoned in the middle: only a new context can run this stack
  finished_ = false;
}

void Fiber::trampoline() {
  Fiber *self = running;
  for (;;) {
    self->function_(self->argument_);
    self->finished_ = true;
    yield();
  }
}

bool Fiber::resume() {
  if (!stack_) {
    void *memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    stack_ = static_cast<std::byte *>(memory);
    mprotect(stack_, static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);  // guard page
  }
  running = this;
  if (!_setjmp(resume_point_)) {
    if (started_) _longjmp(yield_point_, 1);
    started_ = true;
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, &Fiber::trampoline, 0);
    swapcontext(&origin_, &context_);
  }
  return finished_;
}

void Fiber::yield() {
  Fiber *self = running;
  if (!_setjmp(self->yield_point_)) _longjmp(self->resume_point_, 1);
}

}  // namespace emulator
