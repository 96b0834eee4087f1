// SPDX-License-Identifier: MIT
// Work on all cores of the host.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

/// Calls f(0), f(1) ... f(n - 1), on as many threads as there are cores, each when a thread is free
/// for it. The first exception ends the work and is thrown here.
template <class F>
void parallel_for(std::size_t n, F f) {
  std::atomic<std::size_t> next = 0;
  std::exception_ptr failure;
  std::mutex failing;
  const auto work = [&] {
    try {
      for (std::size_t i; (i = next++) < n;) f(i);
    } catch (...) {
      const std::lock_guard lock(failing);
      if (!failure) failure = std::current_exception();
      next = n;
    }
  };
  std::vector<std::thread> threads;
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  for (std::size_t i = 1; i < std::min(cores, n); i++) threads.emplace_back(work);
  work();
  for (std::thread &thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}
