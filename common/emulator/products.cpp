// SPDX-License-Identifier: MIT
#include "common/emulator/products.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "common/emulator/sites.h"
#include "common/kernel/ptx.h"

namespace emulator {
namespace {

constexpr unsigned kAtom = 1024;  // 8 rows of 128 bytes: the 128-byte swizzle repeats after so many

std::size_t bytes_from(const void *begin, const void *end) {
  return reinterpret_cast<std::uintptr_t>(end) - reinterpret_cast<std::uintptr_t>(begin);
}

/// The value of each e4m3 number.
const std::vector<float> float_of_e4m3 = [] {
  std::vector<float> values(256);
  for (std::size_t bits = 0; bits < values.size(); bits++)
    values[bits] = e4m3_to_float(e4m3{static_cast<std::uint8_t>(bits)});
  return values;
}();

/// The value of the lowest of the elements in a register, or in memory.
inline float value_of(std::uint32_t bits, Element element) {
  switch (element) {
    case Element::kHalf: return half_to_float(half{static_cast<std::uint16_t>(bits)});
    case Element::kBf16: return bf16_to_float(bf16{static_cast<std::uint16_t>(bits)});
    case Element::kE4m3: break;
  }
  return float_of_e4m3[bits & 0xff];
}

}  // namespace

// --- operands in shared memory -------------------------------------------------------------------

Descriptor::Descriptor(std::uint64_t bits)
    : start((bits & 0x3fff) << 4),
      leading((bits >> 16 & 0x3fff) << 4),
      stride((bits >> 32 & 0x3fff) << 4),
      base(bits >> 49 & 7),
      swizzle(static_cast<unsigned>(bits >> 62)) {}

std::size_t address_of(const SharedOperand &operand, const Descriptor &descriptor, int line,
                       int term) {
  const auto in_groups_of_8 = [&](unsigned row) {
    return row / 8 * descriptor.stride + row % 8 * 128;
  };
  const auto l = static_cast<unsigned>(line), t = static_cast<unsigned>(term);
  const unsigned bytes = size_of(operand.element);
  const unsigned linear =
      descriptor.start + (operand.k_major
                              ? in_groups_of_8(l) + t * bytes
                              : in_groups_of_8(t) + l / 64 * descriptor.leading + l % 64 * bytes);
  return linear ^ (linear >> 7 & 7) << 4;
}

Error misfit(const SharedOperand &operand, char name, int lines, const std::byte *shared,
             std::size_t shared_bytes) {
  const Descriptor descriptor(operand.descriptor);
  const std::string what = std::string("wgmma's ") + name + ", from row " +
                           std::to_string(operand.row) + " and column " +
                           std::to_string(operand.col) + " of its tile on: ";
  const std::size_t tile = bytes_from(shared, operand.tile);
  if (tile >= shared_bytes) return {Fault::kBounds, what + "the tile is not in shared memory"};
  if (tile % kAtom)
    return {Fault::kMisaligned, what + "the tile begins at byte " + std::to_string(tile) +
                                    " of shared memory, which is not a multiple of " +
                                    std::to_string(kAtom)};
  const int terms = terms_of(operand.element);
  const int rows = operand.k_major ? lines : terms, cols = operand.k_major ? terms : lines;
  if (operand.row < 0 || operand.col < 0 || operand.row + rows > operand.rows ||
      operand.col + cols > operand.cols)
    return {Fault::kBounds, what + std::to_string(rows) + " x " + std::to_string(cols) +
                                " elements, and the tile has " + std::to_string(operand.rows) +
                                " x " + std::to_string(operand.cols)};
  if (descriptor.swizzle != 1)
    return {Fault::kDescriptor, what + "its descriptor names swizzle mode " +
                                    std::to_string(descriptor.swizzle) +
                                    ", and the tile's is 1, of 128 bytes"};
  // Where the pattern begins within an atom the descriptor must say so ('Matrix base offset').
  if (operand.row % 8 || descriptor.base)
    return {Fault::kDescriptor,
            what + "the first row is not a multiple of 8, the rows of a swizzle atom"};
  Error found;
  for_each_chunk(operand, 0, lines, [&](int line, int term, std::size_t address) {
    const int row = operand.row + (operand.k_major ? line : term);
    const int col = operand.col + (operand.k_major ? term : line);
    // A chunk that the tile does not have in 16 bytes is not in one row of an atom either.
    if (address == tile + operand.offset(row, col) && col % chunk_of(operand.element) == 0) return;
    if (found.empty())
      found = {Fault::kDescriptor, what + "its descriptor leads to byte " +
                                       std::to_string(address) + " of shared memory for row " +
                                       std::to_string(row) + ", column " + std::to_string(col) +
                                       ", which the tile has at byte " +
                                       std::to_string(tile + operand.offset(row, col))};
  });
  return found;
}

void read_operand(const SharedOperand &operand, int begin, int end, const std::byte *shared,
                  float *values) {
  const int lines = end - begin;
  // From one element of a chunk to the next, in `values`.
  const int step = operand.k_major ? lines : 1;
  const int size = size_of(operand.element), chunk = chunk_of(operand.element);
  for_each_chunk(operand, begin, end, [&](int line, int term, std::size_t address) {
    std::byte elements[16 + sizeof(std::uint32_t)] = {};
    std::memcpy(elements, shared + address, 16);
    float *to = values + term * lines + line - begin;
    for (int i = 0; i < chunk; i++) {
      std::uint32_t bits;
      std::memcpy(&bits, elements + i * size, sizeof bits);
      to[i * step] = value_of(bits, operand.element);
    }
  });
}

// --- the product ---------------------------------------------------------------------------------

void read_operand(const std::uint32_t *registers, Element element, unsigned lane, float *values) {
  const auto size = static_cast<unsigned>(size_of(element)), of_register = 4 / size;
  for (unsigned r = 0; r < 4; r++) {
    const unsigned row = lane / 4 + 8 * (r % 2);
    const unsigned term = lane % 4 * of_register + 4 * of_register * (r / 2);
    for (unsigned i = 0; i < of_register; i++)
      values[(term + i) * 16 + row] = value_of(registers[r] >> 8 * size * i, element);
  }
}

void multiply(const float *A, const float *B, int columns, float *D) {
  // Four floats are one register of any host's; 4 rows of 8 columns are as many as stay in registers.
  using Four = float __attribute__((vector_size(16)));
  constexpr int kRows = 4, kVectors = 2;
  for (int row = 0; row < 16; row += kRows)
    for (int column = 0; column < columns; column += 4 * kVectors) {
      Four sums[kRows][kVectors];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++)
        std::memcpy(sums[r], D + (row + r) * columns + column, sizeof sums[r]);
      for (int term = 0; term < terms_of(Element::kHalf); term++) {
        Four b[kVectors];
        std::memcpy(b, B + term * columns + column, sizeof b);
#pragma GCC unroll 4  // else the sums are not kept in registers
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; v++) sums[r][v] += A[term * 16 + row + r] * b[v];
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++)
        std::memcpy(D + (row + r) * columns + column, sums[r], sizeof sums[r]);
    }
}

namespace {

using FourInts = std::int32_t __attribute__((vector_size(16)));
using FourFloats = float __attribute__((vector_size(16)));

/// The values of the lower fp16 or bf16 numbers of four registers: half_to_float and bf16_to_float for all
/// of them at once.
template <class T>
FourFloats values_of(FourInts registers) {
  if constexpr (std::is_same_v<T, bf16>) return std::bit_cast<FourFloats>(registers << 16);
  const FourInts magnitude = registers & 0x7fff, not_finite = magnitude >= 0x7c00;
  const auto finite = std::bit_cast<FourFloats>(magnitude << 13) * 0x1p112f;
  const FourInts value = (std::bit_cast<FourInts>(finite) & ~not_finite) |
                         ((0x7f800000 | (magnitude & 0x3ff) << 13) & not_finite);
  return std::bit_cast<FourFloats>(value | (registers & 0x8000) << 16);
}

}  // namespace

template <class T>
void compute_mma(void **lanes) {
  constexpr int kColumns = 8, kTerms = terms_of(Element::kHalf);
  float A[kTerms][16], B[kTerms][kColumns], C[16][kColumns];
  for (unsigned i = 0; i < 32; i++) {
    const auto &lane = *static_cast<const MmaLane *>(lanes[i]);
    const unsigned g = i / 4, t = i % 4;
    FourInts a, b{};
    std::memcpy(&a, lane.a, sizeof a);
    std::memcpy(&b, lane.b, 2 * sizeof *lane.b);
    const FourFloats a_low = values_of<T>(a), a_high = values_of<T>(a >> 16);
    const FourFloats b_low = values_of<T>(b), b_high = values_of<T>(b >> 16);
    for (unsigned r = 0; r < 4; r++) {
      const unsigned row = g + 8 * (r % 2), term = 2 * t + 8 * (r / 2);
      A[term][row] = a_low[r];
      A[term + 1][row] = a_high[r];
      C[g + 8 * (r / 2)][2 * t + r % 2] = lane.c[r];
    }
    for (unsigned r = 0; r < 2; r++) {
      B[2 * t + 8 * r][g] = b_low[r];
      B[2 * t + 8 * r + 1][g] = b_high[r];
    }
  }
  // A product of two fp16, or of two bf16, is exact in fp32. The hardware adds them in another
  // order and rounds otherwise within one instruction; the verdict's bound is far above that.
  multiply(A[0], B[0], kColumns, C[0]);
  for (unsigned i = 0; i < 32; i++) {
    const unsigned g = i / 4, t = i % 4;
    for (unsigned r = 0; r < 4; r++)
      static_cast<const MmaLane *>(lanes[i])->c[r] = C[g + 8 * (r / 2)][2 * t + r % 2];
  }
}

template void compute_mma<half>(void **);
template void compute_mma<bf16>(void **);

namespace {

/// A float's exponent; of zero, one that is smaller than all others.
int exponent_of(float value) {
  return static_cast<int>(std::bit_cast<std::uint32_t>(value) >> 23 & 0xff) - 127;
}

/// An e4m3 number's exponent: those of the subnormal ones are that of the smallest normal one.
int exponent_of_e4m3(float value) {
  constexpr int kOfZero = -150, kSmallest = -6;
  return value == 0 ? kOfZero : std::max(exponent_of(value), kSmallest);
}

}  // namespace

void multiply_e4m3(const float *A, const float *B, int columns, float *D) {
  constexpr int kTerms = terms_of(Element::kE4m3), kBits = 13, kWidth = 4;
  using Floats = float __attribute__((vector_size(4 * kWidth)));
  using Ints = int __attribute__((vector_size(4 * kWidth)));
  std::vector<int> exponents(static_cast<std::size_t>(kTerms) * columns);
  bool finite = true;
  for (int i = 0; i < kTerms * columns; i++) {
    exponents[i] = exponent_of_e4m3(B[i]);
    finite = finite && std::isfinite(B[i]);
  }
  for (int i = 0; i < kTerms * 16; i++) finite = finite && std::isfinite(A[i]);
  for (int i = 0; i < 16 * columns; i++) finite = finite && std::isfinite(D[i]);
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < columns; column += kWidth) {
      float *const d = D + row * columns + column;
      Floats sum;
      std::memcpy(&sum, d, sizeof sum);
      if (!finite) {  // so is what comes out
        for (int term = 0; term < kTerms; term++)
          for (int i = 0; i < kWidth; i++)
            sum[i] += A[term * 16 + row] * B[term * columns + column + i];
        std::memcpy(d, &sum, sizeof sum);
        continue;
      }
      Ints largest{};
      for (int i = 0; i < kWidth; i++) largest[i] = std::max(exponent_of(sum[i]), -100);
      for (int term = 0; term < kTerms; term++) {
        Ints exponent;
        std::memcpy(&exponent, &exponents[term * columns + column], sizeof exponent);
        exponent += exponent_of_e4m3(A[term * 16 + row]);
        largest = exponent > largest ? exponent : largest;
      }
      // 2^n as a float is n + 127 in its bits of exponent. A cast to whole numbers cuts off.
      const Ints up = (kBits - largest + 127) << 23, down = (largest - kBits + 127) << 23;
      Floats scale, back;
      std::memcpy(&scale, &up, sizeof scale);
      std::memcpy(&back, &down, sizeof back);
      Ints whole = __builtin_convertvector(sum * scale, Ints);
      for (int term = 0; term < kTerms; term++) {
        Floats b;
        std::memcpy(&b, B + term * columns + column, sizeof b);
        whole += __builtin_convertvector(A[term * 16 + row] * b * scale, Ints);
      }
      sum = __builtin_convertvector(whole, Floats) * back;
      Ints bits;
      std::memcpy(&bits, &sum, sizeof bits);
      bits &= ~((1 << (23 - kBits)) - 1);
      std::memcpy(d, &bits, sizeof bits);
    }
}

// --- products under way --------------------------------------------------------------------------

namespace {

std::string name_of(Element element) {
  switch (element) {
    case Element::kHalf: return "fp16";
    case Element::kBf16: return "bf16";
    case Element::kE4m3: break;
  }
  return "e4m3";
}

}  // namespace

void land(const Product &product, const std::byte *shared) {
  const int columns = product.common.columns;
  const bool e4m3 = product.common.element == Element::kE4m3;
  std::vector<float> B(static_cast<std::size_t>(terms_of(product.common.element) * columns));
  std::vector<float> D(static_cast<std::size_t>(16 * columns));
  read_operand(product.common.B, 0, columns, shared, B.data());
  for (unsigned warp = 0; warp < kWarpsOfGroup; warp++) {
    const Product::Lane *lanes = &product.lanes[32 * warp];
    float A[kMostTerms * 16];
    if (!product.common.a) read_operand(product.common.A, 16 * warp, 16 * warp + 16, shared, A);
    for (unsigned lane = 0; lane < 32; lane++) {
      if (product.common.a)
        read_operand(lanes[lane].a_at_start.data(), product.common.element, lane, A);
      for (int i = 0; i < columns / 2; i++)
        D[row_of(lane, i) * columns + column_of(lane, i)] =
            product.common.add ? lanes[lane].d[i] : 0;
    }
    (e4m3 ? multiply_e4m3 : multiply)(A, B.data(), columns, D.data());
    for (unsigned lane = 0; lane < 32; lane++)
      for (int i = 0; i < columns / 2; i++)
        lanes[lane].d[i] = D[row_of(lane, i) * columns + column_of(lane, i)];
  }
}

void Products::reset() {
  std::fill(warps_.begin(), warps_.end(), Warp{});
  std::fill(warpgroups_.begin(), warpgroups_.end(), Warpgroup{});
  for (std::vector<RegistersOfA> &of_thread : registers_of_A_) of_thread.clear();
}

void Products::fence(unsigned warp) {
  warps_[warp].fences++;
  for (unsigned thread = 32 * warp; thread < 32 * warp + 32; thread++)
    for (RegistersOfA &registers : registers_of_A_[thread])
      std::copy_n(registers.a, registers.fenced.size(), registers.fenced.begin());
}

Error Products::check(unsigned warpgroup,
                      const std::array<const ProductLane *, kLanesOfGroup> &lanes,
                      const std::byte *shared, std::size_t shared_bytes, unsigned &lane) const {
  const ProductLane &first = *lanes[0];
  const auto same = [](const SharedOperand &a, const SharedOperand &b) {
    return a.descriptor == b.descriptor && a.tile == b.tile && a.row == b.row && a.col == b.col;
  };
  for (lane = 0; lane < kLanesOfGroup; lane++) {
    const ProductLane &self = *lanes[lane];
    if ((!first.a && !same(self.A, first.A)) || !same(self.B, first.B) || self.add != first.add)
      return {Fault::kDivergence,
              "wgmma: this lane's operands are not those of the warpgroup's first lane"};
    const std::uint64_t fences = warps_[warpgroup * kWarpsOfGroup + lane / 32].fences;
    if (fences == 0) return {Fault::kFence, "wgmma: no wgmma_fence before the first of this warp"};
    if (self.accumulator->touched == fences + 1)
      return {Fault::kFence, "wgmma: its accumulators were touched at " +
                                 describe(self.accumulator->touch) + ", and no wgmma_fence since"};
    for (const RegistersOfA &registers : registers_of_A_[warpgroup * kLanesOfGroup + lane])
      if (registers.a == self.a &&
          !std::equal(registers.fenced.begin(), registers.fenced.end(), self.a))
        return {Fault::kFence, "wgmma: its registers of A were written since the last wgmma_fence"};
  }
  lane = 0;
  if ((!first.a && first.A.element != first.element) || first.B.element != first.element)
    return {Fault::kDescriptor,
            "wgmma of " + name_of(first.element) + " with a tile of " +
                name_of(!first.a && first.A.element != first.element ? first.A.element
                                                                     : first.B.element)};
  Error error;
  if (!first.a) error = misfit(first.A, 'A', 64, shared, shared_bytes);
  if (error.empty()) error = misfit(first.B, 'B', first.columns, shared, shared_bytes);
  return error;
}

Product &Products::start(unsigned warpgroup,
                         const std::array<const ProductLane *, kLanesOfGroup> &lanes,
                         const Where &where) {
  Warpgroup &self = warpgroups_[warpgroup];
  const auto ended = [&](const Warp &warp) { return warp.ended > self.first; };
  const auto warps = warps_.begin() + warpgroup * kWarpsOfGroup;
  for (; std::all_of(warps, warps + kWarpsOfGroup, ended); self.first++) self.products.pop_front();
  Product &product = self.products.emplace_back();
  product.common = *lanes[0];
  product.where = where;
  for (unsigned warp = 0; warp < kWarpsOfGroup; warp++)
    product.group[warp] = warps_[warpgroup * kWarpsOfGroup + warp].groups;
  for (unsigned i = 0; i < kLanesOfGroup; i++) {
    const ProductLane &operands = *lanes[i];
    Product::Lane &lane = product.lanes[i];
    lane = {operands.a, {}, operands.d, operands.accumulator};
    if (lane.a) {
      std::copy_n(lane.a, lane.a_at_start.size(), lane.a_at_start.begin());
      std::vector<RegistersOfA> &known = registers_of_A_[warpgroup * kLanesOfGroup + i];
      if (std::none_of(known.begin(), known.end(),
                       [&](const RegistersOfA &registers) { return registers.a == lane.a; }))
        known.push_back({lane.a, lane.a_at_start});
    }
    lane.accumulator->under_way++;
    lane.accumulator->product = where;
    lane.accumulator->unnamed = true;
  }
  return product;
}

Product *Products::end_one(unsigned warp, int groups) {
  Warpgroup &warpgroup = warpgroups_[warp / kWarpsOfGroup];
  Warp &self = warps_[warp];
  if (self.ended == warpgroup.first + warpgroup.products.size()) return nullptr;
  // A product that is not committed has the group that comes next: no wait covers it.
  Product &product = warpgroup.products[self.ended - warpgroup.first];
  if (product.group[warp % kWarpsOfGroup] + groups >= self.groups) return nullptr;
  self.ended++;
  return &product;
}

}  // namespace emulator
