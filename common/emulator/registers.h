// SPDX-License-Identifier: MIT
// How the warpgroups of a block share its registers: setmaxnreg.
#pragma once

#include <string>
#include <vector>

#include "common/emulator/meetings.h"
#include "common/emulator/runtime.h"
#include "common/emulator/scheduler.h"

namespace emulator {

/// The pool has the registers that the block was launched with and that warpgroups gave back.
class RegisterFile : public Waits {
 public:
  RegisterFile(Scheduler &scheduler, Meetings &meetings);

  void begin_block();

  /// See runtime.h. (PTX ISA 'setmaxnreg': undefined where inc asks for fewer, or dec for more.)
  void set(int registers, bool more, const Where &where);

  std::string describe_wait(unsigned thread) const override;
  bool is_suspect(unsigned) const override { return true; }

 private:
  struct Warpgroup {  // registers per thread
    int now = 0;
    int wanted = 0;  // 0: it waits for none
  };
  struct Cta {  // a block
    std::vector<Warpgroup> warpgroups;
    int free = 0;
  };

  Warpgroup &warpgroup_of(unsigned thread);
  void share(int wanted);
  void change(int registers);

  Scheduler &scheduler_;
  Meetings &meetings_;
  std::vector<Cta> blocks_;  // by rank
};

}  // namespace emulator
