// SPDX-License-Identifier: MIT
// Linked into a reader's program, and only there: says where a kernel crashed, or what it was still at
// when its time was up. As addresses, one line on standard error; programs.cpp makes lines of source of
// them.
//
// EXERCISE_SECONDS  how long a program may compute, default 10: of CPU time, so that other work on the
//                   machine does not count. It ends after six times as long in any case, as it may sleep
#include <dirent.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>

namespace {

std::atomic<int> threads_to_tell = 0;
char end_of_time[32];  // "endless 10", when the time is up

/// "watch: WORD 0x4012a4 0x4011b0", innermost first, by one system call.
void tell(const char *word) {
  void *frames[48];
  const int count = backtrace(frames, 48);
  char text[2048];
  int length = std::snprintf(text, sizeof text, "watch: %s", word);
  for (int i = 0; i < count && length < 1900; i++)
    length += std::snprintf(text + length, sizeof text - static_cast<std::size_t>(length), " %p",
                            frames[i]);
  text[length++] = '\n';
  if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) _exit(126);
}

/// The limit on the size of a file, which programs.cpp sets for what a program prints.
void on_too_much(int) {
  signal(SIGXFSZ,
         SIG_IGN);  // where standard error itself is full, tell() fails and ends the program
  tell("output");
  _exit(126);
}

void on_crash(int signal) {
  tell(signal == SIGFPE ? "crash-division" : signal == SIGSEGV ? "crash-memory" : "crash");
  _exit(125);
}

void on_end_of_time(int) {
  tell(end_of_time);
  threads_to_tell--;
}

/// When the time is up, every thread but this one tells where it is, and the program ends.
void wait_for_end_of_time() {
  const char *seconds = std::getenv("EXERCISE_SECONDS");
  const double most = seconds ? std::atof(seconds) : 10;
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(6 * most);
  bool late = false;
  while (!late && static_cast<double>(std::clock()) < most * CLOCKS_PER_SEC) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    late = Clock::now() >= end;
  }
  std::snprintf(end_of_time, sizeof end_of_time, "endless %g", late ? 6 * most : most);
  const auto self = syscall(SYS_gettid);
  if (DIR *tasks = opendir("/proc/self/task")) {
    while (const dirent *task = readdir(tasks))
      if (const long id = std::atol(task->d_name); id > 0 && id != self) {
        threads_to_tell++;
        syscall(SYS_tgkill, getpid(), id, SIGUSR1);
      }
    closedir(tasks);
  }
  for (int i = 0; i < 100 && threads_to_tell > 0; i++)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  _exit(124);
}

struct Watch {
  Watch() {
    void *frame;
    backtrace(&frame, 1);  // loads what it needs, which a signal's handler should not
    struct sigaction action = {};
    action.sa_flags = SA_ONSTACK | SA_NODEFER;
    action.sa_handler = on_crash;
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
      sigaction(signal, &action, nullptr);
    action.sa_handler = on_end_of_time;
    sigaction(SIGUSR1, &action, nullptr);
    action.sa_handler = on_too_much;
    sigaction(SIGXFSZ, &action, nullptr);
    std::thread(wait_for_end_of_time).detach();
  }
} watch;

}  // namespace
