// SPDX-License-Identifier: MIT
// The barriers of common/kernel/mbarrier.h, which includes this, on the emulator. What is checked of them is in
// README.md, 'What happens before what'.
#pragma once

#include "common/emulator/runtime.h"

inline void mbarrier_init(Mbarrier &barrier, int arrivals, Where where = Where::current(),
                          const char *part = "") {
  emulator::mbarrier_init(&barrier, arrivals, part, where);
}

inline void mbarrier_fence_init() {
  emulator::mbarrier_fence_init();
}

inline void mbarrier_arrive(Mbarrier &barrier, Where where = Where::current()) {
  emulator::mbarrier_arrive(&barrier, 0, where);
}

inline void mbarrier_arrive_expect_tx(Mbarrier &barrier, int bytes,
                                      Where where = Where::current()) {
  emulator::mbarrier_arrive(&barrier, bytes, where);
}

template <bool by_trap = true>
void mbarrier_wait(Mbarrier &barrier, int parity, Where where = Where::current()) {
  emulator::mbarrier_wait(&barrier, parity, where);
}

inline void named_barrier_sync(int id, int threads, Where where = Where::current()) {
  emulator::named_barrier(id, threads, emulator::Named::kSync, where);
}

inline void named_barrier_meet(int id, int threads, Where where = Where::current()) {
  emulator::named_barrier(id, threads, emulator::Named::kMeet, where);
}

inline void named_barrier_arrive(int id, int threads, Where where = Where::current()) {
  emulator::named_barrier(id, threads, emulator::Named::kArrive, where);
}

template <int Registers>
void setmaxnreg_dec(Where where = Where::current()) {
  emulator::set_registers(Registers, false, where);
}

template <int Registers>
void setmaxnreg_inc(Where where = Where::current()) {
  emulator::set_registers(Registers, true, where);
}
