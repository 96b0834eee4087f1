// SPDX-License-Identifier: MIT
// The instructions of common/kernel/ptx.h, which includes this, on the emulator: what each lane holds and
// what the warp does with it, spelled out.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <span>

#include "common/kernel/view.h"

namespace emulator {

inline std::uint32_t pair_of(std::uint16_t low, std::uint16_t high) {
  return low | std::uint32_t{high} << 16;
}

/// ldmatrix of N matrices: gives lane 4 g + t row g, columns 2t and 2t + 1 of each, or transposed
/// rows 2t and 2t + 1 of column g.
template <int N, bool Transposed, class T>
[[gnu::noinline]] Vector<std::uint32_t, N> ldmatrix(const Reference<T> &row, const Where &where) {
  struct Lane {
    const T *row;  // null: not all within its tile, which is no error in a lane that is not read
    const Where *where;
    Vector<std::uint32_t, N> result;
  } lane{row.left() >= 8 ? row.pointer() : nullptr, &where, {}};
  constexpr const char *kName = N == 2       ? "ldmatrix.x2.trans"
                                : Transposed ? "ldmatrix.x4.trans"
                                             : "ldmatrix.x4";
  static constexpr Collective kCollective{
      kName, kLdmatrix, true, false, [](void **lanes) {
        std::array<const void *, 32> rows{};
        for (int i = 0; i < 8 * N; i++) rows[i] = static_cast<Lane *>(lanes[i])->row;
        load_rows(rows, 8 * N, *static_cast<Lane *>(lanes[0])->where);
        for (int i = 0; i < 32; i++) {
          const int g = i / 4, t = i % 4;
          for (int n = 0; n < N; n++) {
            const auto element = [&](int r, int c) {
              return static_cast<const T *>(rows[8 * n + r])[c].bits;
            };
            static_cast<Lane *>(lanes[i])->result[n] =
                Transposed ? pair_of(element(2 * t, g), element(2 * t + 1, g))
                           : pair_of(element(g, 2 * t), element(g, 2 * t + 1));
          }
        }
      }};
  collective(kCollective, 0xffffffff, where, &lane);
  return lane.result;
}

/// stmatrix of four matrices: lane 4 g + t gives row g, columns 2t and 2t + 1 of each, or transposed rows 2t
/// and 2t + 1 of column g.
template <bool Transposed, class T>
[[gnu::noinline]] void stmatrix(const Reference<T> &row, const Vector<std::uint32_t, 4> &r,
                                const Where &where) {
  struct Lane {
    T *row;
    const Vector<std::uint32_t, 4> *r;
    const Where *where;
  } lane{row.left() >= 8 ? row.pointer() : nullptr, &r, &where};
  static constexpr Collective kCollective{
      Transposed ? "stmatrix.x4.trans" : "stmatrix.x4", kCounters, true, false, [](void **lanes) {
        std::array<const void *, 32> rows;
        for (int i = 0; i < 32; i++) rows[i] = static_cast<Lane *>(lanes[i])->row;
        store_rows(rows, *static_cast<Lane *>(lanes[0])->where);
        for (int i = 0; i < 32; i++) {
          const int g = i / 4, t = i % 4;
          for (int n = 0; n < 4; n++) {
            const auto element = [&](int line, int column) -> T & {
              return static_cast<Lane *>(lanes[8 * n + line])->row[column];
            };
            const std::uint32_t pair = (*static_cast<Lane *>(lanes[i])->r)[n];
            (Transposed ? element(2 * t, g) : element(g, 2 * t)).bits =
                static_cast<std::uint16_t>(pair);
            (Transposed ? element(2 * t + 1, g) : element(g, 2 * t + 1)).bits =
                static_cast<std::uint16_t>(pair >> 16);
          }
        }
      }};
  collective(kCollective, 0xffffffff, where, &lane);
}

/// A lane's registers of an mma.
struct MmaLane {
  float *c;
  const std::uint32_t *a, *b;
};

/// Computes it for a warp, of fp16 or bf16. (In products.cpp, not compiled with each kernel.)
template <class T>
void compute_mma(void **lanes);

}  // namespace emulator

template <class T = half>
[[gnu::noinline]] void mma(FragmentC &c, const FragmentA &a, const FragmentB &b,
                           Where where = Where::current()) {
  static constexpr emulator::Collective kCollective{"mma", emulator::kMma, true, false,
                                                    emulator::compute_mma<T>};
  emulator::MmaLane lane{c.value, a.value, b.value};
  emulator::collective(kCollective, 0xffffffff, where, &lane);
}

template <class T>
Vector<std::uint32_t, 4> ldmatrix_x4(const Reference<T> &row, Where where = Where::current()) {
  return emulator::ldmatrix<4, false>(row, where);
}

template <class T>
Vector<std::uint32_t, 4> ldmatrix_x4_trans(const Reference<T> &row,
                                           Where where = Where::current()) {
  return emulator::ldmatrix<4, true>(row, where);
}

template <class T>
Vector<std::uint32_t, 2> ldmatrix_x2_trans(const Reference<T> &row,
                                           Where where = Where::current()) {
  return emulator::ldmatrix<2, true>(row, where);
}

template <class T>
void stmatrix_x4(const Reference<T> &row, const Vector<std::uint32_t, 4> &r,
                 Where where = Where::current()) {
  emulator::stmatrix<false>(row, r, where);
}

template <class T>
void stmatrix_x4_trans(const Reference<T> &row, const Vector<std::uint32_t, 4> &r,
                       Where where = Where::current()) {
  emulator::stmatrix<true>(row, r, where);
}

inline void store_global(const Reference<float> &first, const Vector<float, 4> &x) {
  store<4>(first, x);
}

template <class T>
void cp_async_16(const Reference<T> &shared, const Reference<const T> &global,
                 Where where = Where::current()) {
  constexpr int elements = 16 / sizeof(T);
  emulator::begin_copy(shared.checked(elements), global.checked(elements), where);
}

template <class T>
void cp_async_16_or_zeros(const Reference<T> &shared, const Reference<const T> &global, bool there,
                          Where where = Where::current()) {
  constexpr int elements = 16 / sizeof(T);
  emulator::begin_copy(shared.checked(elements), there ? global.checked(elements) : nullptr, where);
}

inline void cp_async_commit() {
  emulator::commit_copies();
}

template <int N>
void cp_async_wait(Where where = Where::current()) {
  static_assert(N >= 0);
  emulator::wait_for_copies(N, where);
}

[[gnu::noinline]] inline std::uint32_t cvt_rn_f16x2(float low, float high) {
  return emulator::pair_of(float_to_half(low).bits, float_to_half(high).bits);
}

[[gnu::noinline]] inline std::uint32_t cvt_rn_bf16x2(float low, float high) {
  return emulator::pair_of(float_to_bf16(low).bits, float_to_bf16(high).bits);
}

template <class T>
[[gnu::noinline]] Vector<float, 2> to_floats(std::uint32_t pair) {
  const auto value = [](std::uint32_t bits) {
    if constexpr (std::is_same_v<T, bf16>)
      return bf16_to_float(bf16{static_cast<std::uint16_t>(bits)});
    else
      return half_to_float(half{static_cast<std::uint16_t>(bits)});
  };
  return {value(pair), value(pair >> 16)};
}

[[gnu::noinline]] inline std::uint16_t cvt_rn_e4m3x2(float low, float high) {
  return static_cast<std::uint16_t>(float_to_e4m3(low).bits | float_to_e4m3(high).bits << 8);
}

inline std::uint32_t pack_here(std::uint16_t low, std::uint16_t high) {
  return emulator::pair_of(low, high);
}

inline float ex2(float x, Where where = Where::current()) {
  emulator::count(emulator::kExp2, where);
  const float y = std::exp2(x);  // 1 for a denormal x, as for zero
  return y < 0x1p-126f ? 0 : y;
}

inline float lg2(float x) {
  return std::log2(x < 0x1p-126f ? 0 : x);
}

inline float tanh_approx(float x) {
  return std::tanh(x);
}

[[gnu::noinline]] inline unsigned atomic_dec(const Reference<unsigned> &counter, unsigned limit) {
  return emulator::atomic(
      counter.checked(),
      [limit](unsigned before) { return before == 0 || before > limit ? limit : before - 1; },
      counter.where());
}

[[gnu::noinline]] inline unsigned atomic_read(const Reference<unsigned> &counter) {
  return emulator::atomic(
      counter.checked(), [](unsigned before) { return before; }, counter.where());
}

[[gnu::noinline]] inline void wait_until(const Reference<unsigned> &number, unsigned value) {
  emulator::wait_until(number.checked(), value, number.where());
}

[[gnu::noinline]] inline void wait_until_at_least(const Reference<unsigned> &number,
                                                  unsigned value) {
  emulator::wait_until(number.checked(), value, number.where(), true);
}

[[gnu::noinline]] inline void red_release_add(const Reference<unsigned> &number, unsigned x) {
  emulator::release(number.checked(), x, number.where());
}

inline void red_add(const Reference<float> &sum, float x) {
  emulator::reduce(sum.checked(), std::span(&x, 1), sum.where());
}

inline void red_add(const Reference<float> &first, const Vector<float, 4> &x) {
  emulator::reduce(first.checked(4), std::span(&x[0], 4), first.where());
}

/// Nothing: on the emulator a launch follows the one before.
inline void griddepcontrol_launch_dependents() {}

/// Until then what the launch before touched is refused.
inline void griddepcontrol_wait() {
  emulator::wait_for_launch_before();
}
