// SPDX-License-Identifier: MIT
// Hopper's barriers on the emulator: what they order, whom they let go on, and what is told of a kernel
// that uses them wrongly.
#include "common/kernel/mbarrier.h"
#include "common/kernel/ring.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "common/emulator/testing.h"

namespace {

struct Shared {
  Tile<float, 4, 64> x;
  Mbarrier a, b;
};

Shared &shared() {
  return shared_storage<Shared>();
}

int init_at;  // the line that made barrier a

/// Makes barrier a for so many arrivals, b for one, and lets all threads know.
Shared &with_barriers(int arrivals) {
  if (is_thread(0)) {
    init_at = __LINE__, mbarrier_init(shared().a, arrivals);
    mbarrier_init(shared().b, 1);
  }
  __syncthreads();
  return shared();
}

/// "the mbarrier shared().a of mbarrier_test.cpp:57 (at byte 1024, phase 0, 1 of 2 ...)"
std::string barrier(int phase, int to_come, int count) {
  return "the mbarrier shared().a of " + file_and(init_at) + " (at byte 1024, phase " +
         std::to_string(phase) + ", " + std::to_string(to_come) + " of " + std::to_string(count) +
         " arrivals to come)";
}

/// Where one of two racing accesses is reported, the first or the second.
bool is_race(const std::string &error, const std::string &operation, int line, unsigned thread,
             const std::string &other, int other_line, unsigned other_thread) {
  const auto race = [](const std::string &second, int second_line, unsigned second_thread,
                       const std::string &first, int first_line, unsigned first_thread) {
    return error_in_thread(second_line, second_thread,
                           second + " races in shared memory with the " + first + " at " +
                               file_and(first_line) + " by thread " + std::to_string(first_thread) +
                               ": no barrier between them");
  };
  return error == race(operation, line, thread, other, other_line, other_thread) ||
         error == race(other, other_line, other_thread, operation, line, thread);
}

}  // namespace

// --- mbarriers -----------------------------------------------------------------------------------

TEST_CASE("mbarrier: what is done before arriving comes before what is done after waiting") {
  const Setup setup;
  enum Mistake { kNone, kNoWait, kArrivesFirst };
  for (const Mistake mistake : {kNone, kNoWait, kArrivesFirst})
    for (int seed = 1; seed <= kSeeds; seed++) {
      CAPTURE(mistake);
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      float found = 0;
      const std::string error = error_of<Shared>(dim3(64), [&] {
        Shared &smem = with_barriers(2);
        if (is_thread(3)) mbarrier_arrive(smem.a);
        if (is_thread(5)) {
          if (mistake == kArrivesFirst) mbarrier_arrive(smem.a);
          at = __LINE__, smem.x(1, 1) = 7.0f;
          if (mistake != kArrivesFirst) mbarrier_arrive(smem.a);
        }
        if (is_thread(40)) {
          if (mistake != kNoWait) mbarrier_wait(smem.a, 0);
          also_at = __LINE__, found = smem.x(1, 1);
        }
      });
      CAPTURE(error);
      if (mistake == kNone) {
        CHECK(error == "");
        CHECK(found == 7);
      } else {
        CHECK((is_race(error, "store", at, 5, "load", also_at, 40) ||
               error == error_in_thread(also_at, 40, "load of shared memory that nobody wrote")));
      }
    }
}

TEST_CASE("mbarrier: who arrives learns nothing, and who waits does not tell") {
  const Setup setup;
  for (const bool waiter_writes : {false, true})
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const std::string error = error_of<Shared>(dim3(64), [&] {
        Shared &smem = with_barriers(2);
        if (is_thread(5)) {
          if (!waiter_writes) at = __LINE__, smem.x(1, 1) = 7.0f;
          mbarrier_arrive(smem.a);
          if (waiter_writes) at = __LINE__, smem.x(1, 1) = 7.0f;
        }
        if (is_thread(40)) {
          mbarrier_arrive(smem.a);
          if (waiter_writes) mbarrier_wait(smem.a, 0);
          also_at = __LINE__, smem.x(1, 1) = 8.0f;
        }
      });
      CAPTURE(error);
      CHECK(is_race(error, "store", at, 5, "store", also_at, 40));
    }
}

TEST_CASE("mbarrier: lanes that read one place and arrive one by one") {
  const Setup setup;
  for (const int late : {-1, 45})  // this lane arrives before it reads
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const std::string error = error_of<Shared>(dim3(64), [&] {
        Shared &smem = with_barriers(32);
        if (is_thread(0)) smem.x(1, 1) = 7.0f;
        __syncthreads();
        if (threadIdx.x >= 32) {
          if (is_thread(late)) mbarrier_arrive(smem.a);
          at = __LINE__, read(smem.x(1, 1));
          if (!is_thread(late)) mbarrier_arrive(smem.a);
        }
        if (is_thread(0)) {
          mbarrier_wait(smem.a, 0);
          also_at = __LINE__, smem.x(1, 1) = 8.0f;
        }
      });
      CAPTURE(error);
      if (late < 0)
        CHECK(error == "");
      else
        CHECK(is_race(error, "load", at, 45, "store", also_at, 0));
    }
}

TEST_CASE("mbarrier: what one lane has not told is not known, whichever it is") {
  const Setup setup;
  for (int silent = 0; silent < 32; silent++) {
    emulator::settings.seed = static_cast<std::uint64_t>(silent);
    const std::string error = error_of<Shared>(dim3(64), [&] {
      Shared &smem = with_barriers(31);
      if (is_thread(40)) smem.x(1, 1) = 7.0f;
      __syncthreads();
      if (threadIdx.x < 32) {
        at = __LINE__, read(smem.x(1, 1));
        __shfl_xor_sync(kAllLanes, 0, 1);  // orders nothing: all have read before the first arrives
        if (!is_thread(silent)) mbarrier_arrive(smem.a);
      }
      if (!is_thread(40)) return;
      mbarrier_wait(smem.a, 0);
      also_at = __LINE__, smem.x(1, 1) = 8.0f;
    });
    CAPTURE(error);
    CHECK(is_race(error, "load", at, static_cast<unsigned>(silent), "store", also_at, 40));
  }
}

TEST_CASE("mbarrier: with the first arrival nothing that warps know is lost, and nothing won") {
  const Setup setup;
  CHECK(error_under_all_seeds<Shared>(dim3(64), [] {
          Shared &smem = with_barriers(1);
          if (is_thread(0)) smem.x(1, 1) = 7.0f;
          __syncwarp();
          if (!is_thread(1)) return;
          mbarrier_arrive(smem.a);
          read(smem.x(1, 1));
        }) == "");
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const std::string error = error_of<Shared>(dim3(64), [] {
      Shared &smem = with_barriers(1);
      if (is_thread(32)) smem.x(1, 1) = 7.0f;
      __syncthreads();
      if (is_thread(0)) at = __LINE__, read(smem.x(1, 1));
      __syncwarp();  // warp 1's lanes know of each other from here on, and not of warp 0's
      if (!is_thread(32)) return;
      mbarrier_arrive(smem.a);
      also_at = __LINE__, smem.x(1, 1) = 8.0f;
    });
    CAPTURE(error);
    CHECK(is_race(error, "load", at, 0, "store", also_at, 32));
  }
}

TEST_CASE("mbarrier: the phase before the first has ended, with parity 1") {
  const Setup setup;
  std::string error = error_under_all_seeds<Shared>(dim3(64), [] {
    Shared &smem = with_barriers(1);
    mbarrier_wait(smem.a, 1);
  });
  CHECK(error == "");
  error = error_under_all_seeds<Shared>(dim3(64), [] {
    Shared &smem = with_barriers(2);
    if (is_thread(7)) mbarrier_arrive(smem.a);
    at = __LINE__, mbarrier_wait(smem.a, 0);
  });
  CHECK(error == error_in_thread(at, 0,
                                 "64 of 64 threads wait for ever in mbarrier_wait for parity "
                                 "0 of " +
                                     barrier(0, 1, 2)));
}

TEST_CASE("mbarrier: two threads take turns by the parity of two barriers") {
  const Setup setup;
  constexpr int kRounds = 9;
  for (const int wrong_round : {-1, 4})
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      std::vector<float> received;
      const std::string error = error_of<Shared>(dim3(64), [&] {
        Shared &smem = with_barriers(1);
        for (int i = 0; i < kRounds; i++) {
          if (is_thread(0)) {
            mbarrier_wait(smem.b, (i % 2) ^ 1);
            at = __LINE__, smem.x(0, 0) = static_cast<float>(i);
            mbarrier_arrive(smem.a);
          }
          if (is_thread(40)) {
            mbarrier_wait(smem.a, (i % 2) ^ (i == wrong_round));
            received.push_back(smem.x(0, 0));
            mbarrier_arrive(smem.b);
          }
        }
      });
      CAPTURE(error);
      if (wrong_round < 0) {
        CHECK(error == "");
        CHECK(received.size() == kRounds);
        CHECK(std::is_sorted(received.begin(), received.end()));
      } else {
        CHECK(error != "");
      }
    }
}

TEST_CASE("mbarrier: what is wrong with its use") {
  const Setup setup;
  const auto check = [](const Kernel &kernel, const std::function<std::string()> &what) {
    const std::string error = error_under_all_seeds<Shared>(dim3(64), kernel);
    CHECK(error == error_in_thread(at, 0, what()));
  };
  check(
      [] {
        if (is_thread(0)) at = __LINE__, mbarrier_arrive(shared().a);
      },
      [] { return std::string("mbarrier_arrive of an mbarrier that nobody has initialised"); });
  check(
      [] {
        if (is_thread(0)) at = __LINE__, mbarrier_wait(shared().a, 0);
      },
      [] { return std::string("mbarrier_wait of an mbarrier that nobody has initialised"); });
  check(
      [] {
        static Mbarrier elsewhere;
        if (is_thread(0)) at = __LINE__, mbarrier_init(elsewhere, 1);
      },
      [] { return std::string("mbarrier_init: the mbarrier is not in shared memory"); });
  check(
      [] {
        auto *shifted = reinterpret_cast<Mbarrier *>(reinterpret_cast<char *>(&shared().a) + 4);
        if (is_thread(0)) at = __LINE__, mbarrier_init(*shifted, 1);
      },
      [] { return std::string("mbarrier_init at an address that is not a multiple of 8"); });
  check(
      [] {
        if (is_thread(0)) at = __LINE__, mbarrier_init(shared().a, 0);
      },
      [] { return std::string("mbarrier_init for 0 arrivals: 1 to 1048575 are allowed"); });
  check(
      [] {
        Shared &smem = with_barriers(3);
        if (is_thread(0)) at = __LINE__, mbarrier_init(smem.a, 1);
      },
      [] { return "mbarrier_init of " + barrier(0, 3, 3) + ", which is in use"; });
  check(
      [] {
        Shared &smem = with_barriers(1);
        if (is_thread(0)) at = __LINE__, mbarrier_wait(smem.a, 2);
      },
      [] { return std::string("mbarrier_wait for parity 2: 0 and 1 are allowed"); });
  check(
      [] {
        Shared &smem = with_barriers(1);
        if (is_thread(0)) at = __LINE__, mbarrier_arrive_expect_tx(smem.a, 1 << 20);
      },
      [] {
        return std::string(
            "mbarrier_arrive_expect_tx of 1048576 bytes: a phase has at most 1048575");
      });
  check(
      [] {
        Shared &smem = with_barriers(1);
        if (!is_thread(0)) return;
        mbarrier_arrive_expect_tx(smem.a, 64);
        at = __LINE__, mbarrier_arrive(smem.a);
      },
      [] {
        return "mbarrier_arrive: one arrival more than the mbarrier shared().a of " +
               file_and(init_at) +
               " (at byte 1024, phase 0, 0 of 1 arrivals to come, 64 bytes expected, 0 arrived) "
               "has "
               "room for";
      });
}

TEST_CASE("mbarrier: a thread may use one whose initialisation it knows of") {
  const Setup setup;
  int unknown = 0;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const std::string error = error_of<Shared>(dim3(64), [] {
      if (is_thread(0)) init_at = __LINE__, mbarrier_init(shared().a, 1);
      if (is_thread(40)) at = __LINE__, mbarrier_arrive(shared().a);
    });
    const bool is_unknown =
        error == error_in_thread(at, 40,
                                 "mbarrier_arrive of an mbarrier that thread 0 initialises "
                                 "at " +
                                     file_and(init_at) + ": no barrier between them");
    CHECK((is_unknown ||
           error == error_in_thread(at, 40,
                                    "mbarrier_arrive of an mbarrier that nobody has initialised")));
    unknown += is_unknown;
  }
  CHECK(unknown > 0);
}

TEST_CASE("mbarrier: a deadlock is told as who waits for what") {
  const Setup setup;
  const std::string error = error_under_all_seeds<Shared>(dim3(128), [] {
    Shared &smem = with_barriers(2);
    const int warp = warp_index();
    if (warp == 0) at = __LINE__, mbarrier_wait(smem.a, 0);
    if (warp == 1) also_at = __LINE__, named_barrier_sync(3, 96);
    if (warp == 2 && is_thread(64)) mbarrier_arrive(smem.a);
    if (warp == 3) mbarrier_wait(smem.b, 1);
  });
  CHECK(error == error_in_thread(at, 0,
                                 "32 of 128 threads wait for ever in mbarrier_wait for "
                                 "parity 0 of " +
                                     barrier(0, 1, 2) +
                                     "; 64 have exited without reaching it; 32 wait in "
                                     "named_barrier_sync(3, 96), to which 32 have come at " +
                                     file_and(also_at)));
}

TEST_CASE("mbarrier: an operation lands though a thread is busy until it has") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    auto *done = static_cast<unsigned *>(emulator::allocate(sizeof(unsigned)));
    *done = 0;
    const std::string error = error_of<Shared>(dim3(32), [&] {
      if (is_thread(0)) emulator::begin_operation(emulator::kNoQueue, [=] { *done = 1; });
      __syncwarp();
      while (__any_sync(kAllLanes, atomic_read(Matrix<unsigned>{done, 1, 1}(0, 0)) == 0)) {
      }
    });
    CHECK(error == "");
    emulator::release(done);
  }
}

// --- named barriers ------------------------------------------------------------------------------

TEST_CASE("named barrier: orders what its threads did, and lets others alone") {
  const Setup setup;
  enum Mistake { kNone, kOtherBarrier, kArrives };
  for (const Mistake mistake : {kNone, kOtherBarrier, kArrives})
    for (int seed = 1; seed <= kSeeds; seed++) {
      CAPTURE(mistake);
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const std::string error = error_of<Shared>(dim3(128), [&] {
        Shared &smem = shared();
        const int warp = warp_index();
        if (warp == 0) {
          if (is_thread(5)) at = __LINE__, smem.x(1, 1) = 7.0f;
          if (mistake == kArrives)
            named_barrier_sync(1, 64);
          else
            named_barrier_arrive(1, 64);
        }
        if (warp == 1) {
          if (mistake == kArrives)
            named_barrier_arrive(1, 64);
          else
            named_barrier_sync(1, 64);
        }
        if (warp > 1) named_barrier_sync(2, 64);
        if (is_thread(mistake == kOtherBarrier ? 70 : 40)) also_at = __LINE__, smem.x(1, 1) = 8.0f;
      });
      CAPTURE(error);
      if (mistake == kNone)
        CHECK(error == "");
      else
        CHECK(is_race(error, "store", at, 5, "store", also_at, mistake == kOtherBarrier ? 70 : 40));
    }
}

TEST_CASE("named barrier: one is used again and again, in turns") {
  const Setup setup;
  constexpr int kRounds = 5;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    std::vector<int> order;
    const std::string error = error_of<Shared>(dim3(64), [&] {
      const int warp = warp_index();
      if (warp == 1) named_barrier_arrive(1, 64);  // warp 0 begins
      for (int i = 0; i < kRounds; i++) {
        named_barrier_sync(1 + warp, 64);
        if (threadIdx.x % 32 == 0) order.push_back(warp);
        named_barrier_arrive(2 - warp, 64);
      }
      if (warp == 0) named_barrier_sync(1, 64);  // takes what warp 1 said last
    });
    CHECK(error == "");
    CHECK(order == std::vector<int>{0, 1, 0, 1, 0, 1, 0, 1, 0, 1});
  }
}

TEST_CASE("named barrier: who uses it again knows that the use before has ended") {
  const Setup setup;
  enum Use { kOrdered, kOtherCount, kSameCount };
  for (const Use use : {kOrdered, kOtherCount, kSameCount})
    for (int seed = 1; seed <= kSeeds; seed++) {
      CAPTURE(use);
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const int threads = use == kSameCount ? 64 : 32;
      const std::string error = error_of<Shared>(dim3(96), [&] {
        const int warp = warp_index();
        if (warp < 2) at = __LINE__, named_barrier_sync(1, 64);
        if (use == kOrdered) __syncthreads();
        if (warp == 2 || use == kSameCount) also_at = __LINE__, named_barrier_sync(1, threads);
      });
      if (use == kOrdered)
        CHECK(error == "");
      else if (use == kOtherCount)
        CHECK(tag == "[barrier] ");
      else  // which warps meet is the schedule's, and one may be left
        CHECK((tag == "[barrier] " || tag == "[deadlock] "));
    }
}

TEST_CASE("named barrier: threads wait in it at one place, or meet from several") {
  const Setup setup;
  enum Use { kOnePlace, kTwo, kOneOfTwoMeets, kMeet, kArriveElsewhere };
  for (const Use use : {kOnePlace, kTwo, kOneOfTwoMeets, kMeet, kArriveElsewhere})
    for (int seed = 1; seed <= kSeeds; seed++) {
      CAPTURE(use);
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const std::string error = error_of<Shared>(dim3(64), [&] {
        const bool first = warp_index() == 0;
        if (use == kOnePlace) named_barrier_sync(1, 64);
        if (use == kMeet && first) named_barrier_meet(1, 64);
        if (use == kMeet && !first) named_barrier_meet(1, 64);
        if (use == kArriveElsewhere && first) named_barrier_sync(1, 64);
        if (use == kArriveElsewhere && !first) named_barrier_arrive(1, 64);
        if ((use == kTwo || use == kOneOfTwoMeets) && first)
          at = __LINE__, named_barrier_sync(1, 64);
        if (use == kTwo && !first) also_at = __LINE__, named_barrier_sync(1, 64);
        if (use == kOneOfTwoMeets && !first) also_at = __LINE__, named_barrier_meet(1, 64);
      });
      const bool wrong = use == kTwo || use == kOneOfTwoMeets;
      CHECK(tag == (wrong ? "[barrier] " : ""));
      if (!wrong) continue;
      CHECK((error.find("and all must wait at one place") != std::string::npos));
      CHECK((error.find(file_and(at)) != std::string::npos));
      CHECK((error.find(file_and(also_at)) != std::string::npos));
    }
}

TEST_CASE("mbarrier: a ring's are named by the ring, the part and the stage") {
  const Setup setup;
  struct Storage {
    Ring<TmaTile<8, 64>, 3> K;
  };
  const std::string error = error_of<Storage>(dim3(32), [] {
    auto &smem = shared_storage<Storage>();
    if (is_thread(0)) at = __LINE__, ring_init(smem.K, 7);
    __syncwarp();
    if (is_thread(9)) mbarrier_wait(smem.K.empty[2], 0);
  });
  CHECK(error.find("of the mbarrier smem.K.empty[2] of " + file_and(at) + " (at byte ") !=
        std::string::npos);
}

TEST_CASE("mbarrier: a thread may be delayed where it need not wait") {
  const Setup setup;
  bool in_turns = false;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    std::string order;
    CHECK(error_of<Shared>(dim3(64), [&] {
            Shared &smem = with_barriers(1000);
            for (int i = 0; i < 4 && threadIdx.x % 32 == 0; i++) {
              mbarrier_arrive(smem.a);
              order += warp_index() ? 'b' : 'a';
            }
          }) == "");
    in_turns |= order != "aaaabbbb" && order != "bbbbaaaa";
  }
  CHECK(in_turns);
}

TEST_CASE("mbarrier: the last to come to a __syncthreads may be overtaken behind it") {
  const Setup setup;
  // One thread arrives twice. Unless it waits in between, the phase may end without the arrival of the thread that
  // came last, whose store a third one then loads.
  const auto count_errors = [](bool waits) {
    int errors = 0;
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      int come = 0;
      errors += !error_of<Shared>(dim3(3), [&] {
                   const int place = come++;
                   Shared &smem = with_barriers(2);
                   if (place == 0) {
                     mbarrier_arrive(smem.a);
                     if (waits) mbarrier_wait(smem.a, 0);
                     mbarrier_arrive(smem.a);
                   } else if (place == 1) {
                     mbarrier_wait(smem.a, 0);
                     read(smem.x(0, 0));
                   } else {
                     smem.x(0, 0) = 1.0f;
                     mbarrier_arrive(smem.a);
                   }
                 }).empty();
    }
    return errors;
  };
  CHECK(count_errors(true) == 0);
  CHECK(count_errors(false) > 0);
}

TEST_CASE("named barrier: numbers and counts") {
  const Setup setup;
  const auto error_with = [](int id, int threads) {
    return error_of<Shared>(dim3(64), [=] {
      if (is_thread(0)) at = __LINE__, named_barrier_sync(id, threads);
    });
  };
  const auto check = [](const std::string &error, const std::string &what) {
    CHECK(error == error_in_thread(at, 0, what));
  };
  check(error_with(0, 64), "named_barrier_sync(0, 64): barriers 1 to 15 are allowed");
  check(error_with(16, 64), "named_barrier_sync(16, 64): barriers 1 to 15 are allowed");
  for (const int threads : {0, 40, 96})
    check(error_with(1, threads),
          "named_barrier_sync(1, " + std::to_string(threads) +
              "): a multiple of 32 up to the block's 64 threads is allowed");
  check(error_with(1, 32),
        "1 of 64 threads wait for ever in named_barrier_sync(1, 32), to which 1 have come; 63 have "
        "exited without reaching it");
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const std::string error = error_of<Shared>(dim3(96), [] {
      if (is_thread(0)) at = __LINE__, named_barrier_sync(1, 64);
      if (is_thread(40)) also_at = __LINE__, named_barrier_arrive(1, 96);
    });
    CHECK((error == error_in_thread(at, 0,
                                    "named_barrier_sync(1, 64): the barrier is for 96 "
                                    "threads at " +
                                        file_and(also_at)) ||
           error == error_in_thread(also_at, 40,
                                    "named_barrier_arrive(1, 96): the barrier is for "
                                    "64 threads at " +
                                        file_and(at))));
  }
}

// --- registers -----------------------------------------------------------------------------------

TEST_CASE("setmaxnreg: what a warpgroup gives back others get") {
  const Setup setup;
  const std::string error = error_under_all_seeds<Shared>(dim3(384), [] {
    if (warp_index() / 4 == 0)
      setmaxnreg_dec<24>();
    else
      setmaxnreg_inc<240>();
  });
  CHECK(error == "");
}

TEST_CASE("setmaxnreg: the registers of two blocks on a multiprocessor") {
  const Setup setup;
  const std::string error = error_under_all_seeds<Shared>(dim3(256), [] {
    if (warp_index() / 4 == 0)
      setmaxnreg_dec<24>();
    else
      setmaxnreg_inc<232>();
  });
  CHECK(error == "");
}

TEST_CASE("setmaxnreg: registers that are not there") {
  const Setup setup;
  std::string error = error_of<Shared>(dim3(384), [] {
    if (warp_index() / 4 == 0)
      setmaxnreg_dec<64>();
    else
      at = __LINE__, setmaxnreg_inc<224>();
    __syncthreads();
  });
  CHECK(error.find("128 of 384 threads wait for ever in setmaxnreg_inc: it needs 7168 registers, "
                   "and the pool has 6144; 256 wait in __syncthreads at") != std::string::npos);
  error = error_of<Shared>(dim3(128), [] { setmaxnreg_inc<256>(); });
  CHECK(error.find(
            "setmaxnreg_inc<256>: the block's warpgroups have 248 together, and keep 24 each") !=
        std::string::npos);
  const auto check = [](const Kernel &kernel, const std::string &what) {
    const std::string found = error_of<Shared>(dim3(512), kernel);
    CHECK(found.find("setmaxnreg_" + what) != std::string::npos);
    CHECK(found.find(file_and(at) + ": block (0,0,0) thread (") == 0);
  };
  check([] { at = __LINE__, setmaxnreg_dec<20>(); },
        "dec<20>: a multiple of 8 from 24 to 256 is allowed");
  check([] { at = __LINE__, setmaxnreg_inc<264>(); },
        "inc<264>: a multiple of 8 from 24 to 256 is allowed");
  check([] { at = __LINE__, setmaxnreg_dec<100>(); },
        "dec<100>: a multiple of 8 from 24 to 256 is allowed");
  check([] { at = __LINE__, setmaxnreg_dec<136>(); }, "dec<136>: the threads have 128 registers");
  // Of 4 blocks on a multiprocessor, each thread has 32.
  check([] { at = __LINE__, setmaxnreg_inc<24>(); }, "inc<24>: the threads have 128 registers");
}

TEST_CASE("setmaxnreg: takes a warpgroup, all of it, at one place") {
  const Setup setup;
  std::string error = error_of<Shared>(dim3(192), [] {
    if (warp_index() == 5) at = __LINE__, setmaxnreg_dec<24>();
  });
  CHECK(
      error.find("setmaxnreg_dec: takes a warpgroup of 128 threads, and the block's last has 64") !=
      std::string::npos);
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    error = error_of<Shared>(dim3(128), [] {
      if (warp_index() == 2)
        at = __LINE__, setmaxnreg_dec<24>();
      else
        also_at = __LINE__, setmaxnreg_dec<24>();
    });
    CHECK((error.find("warps of one warpgroup are at different instructions: setmaxnreg_dec here, "
                      "setmaxnreg_dec at " +
                      file_and(at)) != std::string::npos ||
           error.find("warps of one warpgroup are at different instructions: setmaxnreg_dec here, "
                      "setmaxnreg_dec at " +
                      file_and(also_at)) != std::string::npos));
    error = error_of<Shared>(dim3(128), [] {
      if (warp_index() != 2) at = __LINE__, setmaxnreg_dec<24>();
    });
    CHECK((error.find("has exited") != std::string::npos ||
           error.find("96 of 128 threads wait for ever in setmaxnreg_dec; 32 have exited") !=
               std::string::npos));
  }
}
