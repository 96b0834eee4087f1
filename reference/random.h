// SPDX-License-Identifier: MIT
// Random numbers that are the same with every standard library.
#pragma once

#include <cstdint>

/// splitmix64 (Steele, Lea and Flood 2014): a sequence of well-mixed numbers from any seed.
inline std::uint64_t next_random(std::uint64_t &state) {
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
