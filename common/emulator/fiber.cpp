// SPDX-License-Identifier: MIT
#include "common/emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

namespace emulator {
namespace {

// The system provides a page of a stack when it is first touched. A kernel may have 512 KB of local
// arrays; the rest is for what it calls. A guard lies below the stack. No frame steps over it, because
// the compiler touches a large frame page by page, or every 64 KB (-fstack-clash-protection).
constexpr std::size_t kStackBytes = 640 * 1024, kGuardBytes = 64 * 1024;
constexpr std::size_t kMappedBytes = kGuardBytes + kStackBytes;

// The top of a new stack is accessible, and poisoned. Deeper pages become so when they are touched: most
// kernels never touch them, and a block has up to 1024 stacks.
const std::size_t kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), kNewPoison = 2 * kPage;

// When a stack is reused, it is poisoned down to the deepest yield of the thread that used it, plus a
// margin; or to the second depth, if that thread never yielded.
constexpr std::size_t kMorePoison = 256, kLeastPoison = 4096;

thread_local Fiber *running = nullptr;

/// A stack that no fiber has, and down to where it was touched.
struct FreeStack {
  std::byte *stack, *accessible;
};

// Mapping a stack costs as much as running a short thread, so stacks are mapped many at a time, and a launch reuses
// those of the launch before.
constexpr std::size_t kMappedAtOnce = 64;
std::mutex freeing;  // guards free_stacks
std::vector<FreeStack> &free_stacks =
    *new std::vector<FreeStack>;  // not destroyed: fibers may outlive it

void map_stacks() {
  void *memory = mmap(nullptr, kMappedAtOnce * kMappedBytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  for (std::size_t i = 1; i <= kMappedAtOnce; i++) {
    std::byte *const top = static_cast<std::byte *>(memory) + i * kMappedBytes;
    mprotect(top - kNewPoison, kNewPoison, PROT_READ | PROT_WRITE);
    free_stacks.push_back({top - kStackBytes, top - kNewPoison});
  }
}

struct sigaction handler_before, division_before;

}  // namespace

#ifndef FIBER_UCONTEXT

/// Saves the registers that a function must keep, and the stack pointer to *from; goes on with the
/// stack and the registers that were saved at `to`.
extern "C" void switch_stacks(void **from, void *to) asm("emulator_switch_stacks");

#if defined(__x86_64__)

// System V ABI: rbx, rbp and r12 to r15. The return address lies above them.
constexpr std::size_t kSavedWords = 6, kReturnWord = 6, kFrameWords = 8, kCallersWord = 7;
asm(R"(
  .text
  .p2align 4
  .globl emulator_switch_stacks
emulator_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

#else

// AAPCS64: x19 to x28, the frame pointer, the link register and d8 to d15.
constexpr std::size_t kSavedWords = 20, kReturnWord = 11, kFrameWords = 20, kCallersWord = 10;
asm(R"(
  .text
  .p2align 2
  .globl emulator_switch_stacks
emulator_switch_stacks:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");

#endif
#endif

Fiber::~Fiber() {
  if (!stack_) return;
  const std::lock_guard lock(freeing);
  free_stacks.push_back({stack_, accessible_});
}

/// Gets a stack, of which all that is accessible is still to be poisoned.
void Fiber::get_stack() {
  const std::lock_guard lock(freeing);
  if (free_stacks.empty()) map_stacks();
  stack_ = free_stacks.back().stack;
  deepest_ = accessible_ = free_stacks.back().accessible;
  free_stacks.pop_back();
}

void Fiber::poison() {
  std::byte *const top = stack_ + kStackBytes;
  std::size_t bytes = kLeastPoison;
  if (deepest_) bytes = static_cast<std::size_t>(top - deepest_) + kMorePoison;
  bytes = std::min(bytes, static_cast<std::size_t>(top - accessible_));
  std::memset(top - bytes, 0xff, bytes);
}

/// Makes the stack accessible down to what was touched, and poisons what that adds.
void Fiber::deepen(const std::byte *touched) {
  std::byte *const before = accessible_;
  accessible_ = stack_ + static_cast<std::size_t>(touched - stack_) / kPage * kPage;
  const auto added = static_cast<std::size_t>(before - accessible_);
  mprotect(accessible_, added, PROT_READ | PROT_WRITE);
  std::memset(accessible_, 0xff, added);
}

void Fiber::start(void (*function)(void *), void *argument) {
  function_ = function;
  argument_ = argument;
  finished_ = overflowed_ = divided_by_0_ = false;
  if (!stack_) get_stack();
  poison();
  deepest_ = nullptr;
#ifdef FIBER_UCONTEXT
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::run, 0);
#else
  // As if run() had called switch_stacks: the registers that it saved, poisoned too, then where to
  // return to. The frame pointer and run()'s own return address are zero, where who unwinds stops.
  auto *frame = reinterpret_cast<std::uint64_t *>(stack_ + kStackBytes) - kFrameWords;
  std::memset(frame, 0xff, kSavedWords * sizeof *frame);
  frame[kReturnWord - 1] = frame[kCallersWord] = 0;
  frame[kReturnWord] = reinterpret_cast<std::uint64_t>(&Fiber::run);
  context_ = frame;
#endif
}

void Fiber::run() {
  Fiber *self = running;
  self->function_(self->argument_);
  self->finished_ = true;
  for (;;) yield();
}

bool Fiber::resume() {
  running = this;
#ifdef FIBER_UCONTEXT
  swapcontext(&resumer_, &context_);
#else
  switch_stacks(&resumer_, context_);
#endif
  return finished_;
}

void Fiber::yield() {
  Fiber *self = running;
  std::byte here;
  if (std::byte *const depth = &here;
      !self->finished_ && (!self->deepest_ || depth < self->deepest_))
    self->deepest_ = depth;
  switch_to_resumer();
}

void Fiber::switch_to_resumer() {
  Fiber *self = running;
#ifdef FIBER_UCONTEXT
  swapcontext(&self->context_, &self->resumer_);
#else
  switch_stacks(&self->context_, self->resumer_);
#endif
}

// --- a stack that is full, and a division by 0 -----------------------------------------------

/// Handles SIGSEGV, on the signal stack. It does not return to a fiber that touched its guard.
void Fiber::on_fault(int, siginfo_t *fault, void *) {
  const auto *address = static_cast<const std::byte *>(fault->si_addr);
  if (running && address >= running->stack_ && address < running->accessible_)
    return running->deepen(address);
  if (running && address >= running->stack_ - kGuardBytes && address < running->stack_) {
    running->overflowed_ = true;
    switch_to_resumer();
  }
  sigaction(SIGSEGV, &handler_before, nullptr);  // it happens again, and is not ours
}

/// Handles SIGFPE, on the signal stack: of whole numbers alone.
void Fiber::on_division(int) {
  if (running) {
    running->divided_by_0_ = true;
    switch_to_resumer();
  }
  sigaction(SIGFPE, &division_before, nullptr);
}

OverflowHandler::OverflowHandler() {
  struct sigaction action = {};
  action.sa_sigaction = Fiber::on_fault;
  // Not blocked: the handler is left without returning.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &handler_before);
  action.sa_handler = Fiber::on_division;
  action.sa_flags = SA_ONSTACK | SA_NODEFER;
  sigaction(SIGFPE, nullptr, &division_before);
  if (division_before.sa_handler == SIG_DFL) sigaction(SIGFPE, &action, nullptr);
}

OverflowHandler::~OverflowHandler() {
  sigaction(SIGSEGV, &handler_before, nullptr);
  sigaction(SIGFPE, &division_before, nullptr);
}

SignalStack::SignalStack() : memory_(64 * 1024) {
  stack_t stack = {};
  stack.ss_sp = memory_.data();
  stack.ss_size = memory_.size();
  sigaltstack(&stack, &before_);
}

SignalStack::~SignalStack() {
  sigaltstack(&before_, nullptr);
}

}  // namespace emulator
