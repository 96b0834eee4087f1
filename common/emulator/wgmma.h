// SPDX-License-Identifier: MIT
// wgmma on the emulator: common/kernel/wgmma.h includes this. What the tensor cores do is in products.h; here
// is how a kernel asks for it.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "common/emulator/products.h"

/// The accumulators of a thread. A new one holds NaN. To touch one that a product is writing is an error,
/// and so is to start a product of one that was touched since the last wgmma_fence.
template <int N>
class Accumulator {
  static_assert(N % 8 == 0 && 8 <= N && N <= 256, "PTX ISA, 'Matrix Shape' of wgmma");

 public:
  static constexpr int size = N / 2;

  Accumulator() { std::fill_n(x_, size, std::numeric_limits<float>::quiet_NaN()); }
  Accumulator(const Accumulator &) = delete;  // products know it by its place
  Accumulator &operator=(const Accumulator &) = delete;
  ~Accumulator() { emulator::end_accumulator(state_); }

  float &operator()(int i, Where where = Where::current()) {
    emulator::touch(state_, i, size, where);
    return x_[i];
  }

  /// For the engine: where they are, and what it knows of them.
  float *data() { return x_; }
  emulator::AccumulatorState &state() { return state_; }

 private:
  float x_[size];
  emulator::AccumulatorState state_;
};

/// The operands; on the emulator they know the tile that they were made of.
struct KMajor : emulator::SharedOperand {};
struct MNMajor : emulator::SharedOperand {};

namespace emulator {

template <class T>
constexpr Element element_type() {
  if constexpr (std::is_same_v<T, bf16>) return Element::kBf16;
  if constexpr (std::is_same_v<T, e4m3>) return Element::kE4m3;
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bf16> || std::is_same_v<T, e4m3>);
  return Element::kHalf;
}

}  // namespace emulator

namespace ptx {

/// Where in the block's shared memory.
inline unsigned shared_address(const void *pointer) {
  return static_cast<unsigned>(static_cast<const std::byte *>(pointer) -
                               static_cast<std::byte *>(emulator::shared_memory()));
}

template <class Operand, class T, int Rows, int d>
Operand operand(std::uint64_t descriptor, const TmaTile<Rows, d, T> &tile, int row, int col) {
  return {{descriptor, std::is_same_v<Operand, KMajor>, emulator::element_type<T>(), &tile, Rows, d,
           [](int r, int c) { return Slabs<Rows, d, T>::offset(r, c) * sizeof(T); }, row, col}};
}

}  // namespace ptx

inline void wgmma_fence(Where where = Where::current()) {
  emulator::fence_products(where);
}

inline void wgmma_commit(Where where = Where::current()) {
  emulator::commit_products(where);
}

/// Accumulators that a wait names, or none.
class Awaited {
 public:
  Awaited() = default;
  template <int N>
  Awaited(Accumulator<N> &accumulator) : state_(&accumulator.state()) {}
  emulator::AccumulatorState *state() const { return state_; }

 private:
  emulator::AccumulatorState *state_ = nullptr;
};

template <int N>
void wgmma_wait(Awaited a = {}, Awaited b = {}, Awaited c = {}, Awaited d = {},
                Where where = Where::current()) {
  static_assert(N >= 0);
  emulator::wait_for_products(N, {a.state(), b.state(), c.state(), d.state()}, where);
}

template <class T = half, int N>
void wgmma(Accumulator<N> &D, const KMajor &A, const KMajor &B, bool add,
           Where where = Where::current()) {
  emulator::start_product(
      {N, emulator::element_type<T>(), add, nullptr, A, B, D.data(), &D.state()}, where);
}

template <class T = half, int N>
void wgmma(Accumulator<N> &D, const MNMajor &A, const KMajor &B, bool add,
           Where where = Where::current()) {
  static_assert(!std::is_same_v<T, e4m3>,
                "8-bit operands are K-major: the sum runs along their rows");
  emulator::start_product(
      {N, emulator::element_type<T>(), add, nullptr, A, B, D.data(), &D.state()}, where);
}

template <class T, int N>
void wgmma(Accumulator<N> &D, const FragmentA &A, const KMajor &B, bool add,
           Where where = Where::current()) {
  static_assert(std::is_same_v<T, e4m3>);
  emulator::start_product(
      {N, emulator::element_type<T>(), add, A.value, {}, B, D.data(), &D.state()}, where);
}

template <class T = half, int N>
void wgmma(Accumulator<N> &D, const FragmentA &A, const MNMajor &B, bool add,
           Where where = Where::current()) {
  static_assert(!std::is_same_v<T, e4m3>,
                "8-bit operands are K-major: the sum runs along their rows");
  emulator::start_product(
      {N, emulator::element_type<T>(), add, A.value, {}, B, D.data(), &D.state()}, where);
}
