// SPDX-License-Identifier: MIT
// The matrix products that warpgroups have under way: where the tensor cores find their operands in
// shared memory, and what they make of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "common/emulator/fault.h"
#include "common/emulator/runtime.h"

namespace emulator {

/// The types of an operand's elements.
enum class Element : std::uint8_t { kHalf, kBf16, kE4m3 };

/// A matrix descriptor in its parts, in bytes (PTX ISA, 'Matrix descriptor').
struct Descriptor {
  unsigned start;    // in shared memory
  unsigned leading;  // MN-major: from one slab of 64 columns to the next
  unsigned stride;   // from 8 rows to the next 8
  unsigned base;     // where in the swizzle's pattern of 8 rows the matrix begins
  unsigned swizzle;  // mode 1: 128 bytes

  explicit Descriptor(std::uint64_t bits);
};

/// An operand in shared memory: its descriptor, by which the tensor cores find it, and the tile that
/// it was made of, to see whether they do. K-major: the sum runs along the tile's rows; else, MN-major,
/// down its columns.
struct SharedOperand {
  std::uint64_t descriptor;
  bool k_major;
  Element element;
  const void *tile;
  int rows, cols;                           // of the tile
  std::size_t (*offset)(int row, int col);  // of the tile's element from its beginning, in bytes
  int row, col;                             // where in the tile the operand begins
};

/// An element's bytes.
constexpr int size_of(Element element) {
  return element == Element::kE4m3 ? 1 : 2;
}

/// So many elements follow each other in memory wherever the swizzle has put them: 16 bytes, a chunk.
constexpr int chunk_of(Element element) {
  return 16 / size_of(element);
}

/// The sum of a product has so many terms: 32 bytes.
constexpr int terms_of(Element element) {
  return 32 / size_of(element);
}
constexpr int kMostTerms = 32;

/// Where in shared memory, from its beginning, the tensor cores find a chunk. K-major: row `line` (of A
/// or of D's columns), terms from `term` on; MN-major: D's columns from `line` on, one term.
std::size_t address_of(const SharedOperand &operand, const Descriptor &descriptor, int line,
                       int term);

/// Calls visit(line, term, address) for each chunk of lines [begin, end).
template <class Visit>
void for_each_chunk(const SharedOperand &operand, int begin, int end, Visit visit) {
  const Descriptor descriptor(operand.descriptor);
  const int chunk = chunk_of(operand.element);
  const int lines = operand.k_major ? 1 : chunk, terms = operand.k_major ? chunk : 1;
  for (int line = begin; line < end; line += lines)
    for (int term = 0; term < terms_of(operand.element); term += terms)
      visit(line, term, address_of(operand, descriptor, line, term));
}

/// Says why the tensor cores would not find an operand of so many lines where its tile has it; nothing if
/// they do. `shared` is where shared memory begins, `name` the operand's: A or B.
Error misfit(const SharedOperand &operand, char name, int lines, const std::byte *shared,
             std::size_t shared_bytes);

/// The values of an operand's lines [begin, end), term by term: values[term * (end - begin) + line].
void read_operand(const SharedOperand &operand, int begin, int end, const std::byte *shared,
                  float *values);

/// The same of the 16 rows of A that a warp has in registers: what this lane has of them (kernel/wgmma.h).
void read_operand(const std::uint32_t *registers, Element element, unsigned lane, float *values);

/// D += A B: 16 rows, of one warp. A and B are by terms, 16 of them, D is by rows; columns is a multiple of
/// 8.
void multiply(const float *A, const float *B, int columns, float *D);

/// The same of e4m3, 32 terms. An H100 aligns the products and the sum so far to the largest of their
/// exponents (a product's is the sum of its factors'), cuts them off 13 bits below that, adds them and cuts
/// the sum off to 13 bits of mantissa, all toward zero (MMA-Sim, Xie et al. 2025, arXiv 2511.10909).
void multiply_e4m3(const float *A, const float *B, int columns, float *D);

/// Where in a warp's 16 rows of D, and in which column, element i of a lane is (PTX ISA, 'Register
/// Fragments for wgmma.m64nNk16').
inline int row_of(unsigned lane, int i) {
  return static_cast<int>(lane) / 4 + 8 * (i / 2 % 2);
}
inline int column_of(unsigned lane, int i) {
  return i / 4 * 8 + static_cast<int>(lane) % 4 * 2 + i % 2;
}

/// What an accumulator's thread knows of it. `touched`: how many fences the thread's warp had passed
/// when the thread last read or wrote it, and 1; 0: it never did.
struct AccumulatorState {
  unsigned under_way = 0;  // products that write it and that the thread has not waited for,
  Where product{};         // the last of them,
  bool unnamed =
      false;  // and whether no wait has named it since: the compiler knows of no other wait
  std::uint64_t touched = 0;
  Where touch{};
};

/// A lane's part in a product.
struct ProductLane {
  int columns;
  Element element;
  bool add;
  const std::uint32_t *a;  // its registers of A; null: A is in shared memory
  SharedOperand A, B;
  float *d;
  AccumulatorState *accumulator;
};

constexpr unsigned kWarpsOfGroup = 4, kLanesOfGroup = 32 * kWarpsOfGroup;

/// A product of a warpgroup, from wgmma until its warps have waited for it.
struct Product {
  struct Lane {
    const std::uint32_t *a;
    std::array<std::uint32_t, 4> a_at_start;
    float *d;
    AccumulatorState *accumulator;
  };
  ProductLane common;  // what is the same for all lanes
  Where where;
  Operation operation;
  std::array<std::uint64_t, kWarpsOfGroup> group;  // of each warp's
  std::array<ReadNumber, kWarpsOfGroup> reads;     // of each warp
  std::uint32_t work;                              // in the trace
  std::array<Lane, kLanesOfGroup> lanes;
};

/// Computes a product, and adds it to the lanes' accumulators or stores it there.
void land(const Product &product, const std::byte *shared);

/// The products that the warpgroups of a block have under way. Each warp makes groups of them and waits
/// for its own.
class Products {
 public:
  explicit Products(unsigned warps)
      : warps_(warps), warpgroups_((warps + 3) / kWarpsOfGroup), registers_of_A_(32 * warps) {}

  /// A block begins.
  void reset();

  void fence(unsigned warp);
  std::uint64_t fences(unsigned warp) const { return warps_[warp].fences; }
  void commit(unsigned warp) { warps_[warp].groups++; }

  /// What is wrong with a product that a warpgroup is about to start, and in which of its lanes.
  Error check(unsigned warpgroup, const std::array<const ProductLane *, kLanesOfGroup> &lanes,
              const std::byte *shared, std::size_t shared_bytes, unsigned &lane) const;

  /// Starts it. It stays where it is until all warps have ended it.
  Product &start(unsigned warpgroup, const std::array<const ProductLane *, kLanesOfGroup> &lanes,
                 const Where &where);

  /// The oldest product that the warp has not waited for, if it is not of its youngest `groups` groups:
  /// now it has. Null: there is none.
  Product *end_one(unsigned warp, int groups);

 private:
  struct Warp {
    std::uint64_t fences = 0, groups = 0;  // so far
    std::uint64_t ended = 0;               // products that it has waited for
  };
  struct RegistersOfA {  // of a thread
    const std::uint32_t *a;
    std::array<std::uint32_t, 4>
        fenced;  // what they held at the last fence, or at their first product
  };
  struct Warpgroup {
    std::deque<Product> products;  // those that a warp has still to wait for, the oldest first,
    std::uint64_t first = 0;       // the number of that
  };
  std::vector<Warp> warps_;
  std::vector<Warpgroup> warpgroups_;
  std::vector<std::vector<RegistersOfA>> registers_of_A_;  // by thread: of its products so far
};

// --- called by the running threads ---------------------------------------------------------------

/// An accumulator is read or written, element i of so many; or it is gone.
void touch(AccumulatorState &accumulator, int i, int size, const Where &where);
void end_accumulator(const AccumulatorState &accumulator);

/// wgmma.mma_async, wgmma.fence, wgmma.commit_group, wgmma.wait_group. Accumulators that the wait names
/// (null: none) must be done after it.
void start_product(const ProductLane &lane, const Where &where);
void fence_products(const Where &where);
void commit_products(const Where &where);
void wait_for_products(int groups, const std::array<AccumulatorState *, 4> &named,
                       const Where &where);

}  // namespace emulator
