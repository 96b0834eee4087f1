// SPDX-License-Identifier: MIT
// The tensor-core instructions on the emulator: what each lane gives and receives, against the
// tables of the PTX ISA and plain loops, and the errors that a GPU hides.
#include "common/kernel/ptx.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "common/emulator/testing.h"

namespace {

/// An array of fp16 or bf16 in the emulator's global memory: 0, 1, 2, ...
template <class T = half>
struct Global {
  T *data;

  explicit Global(int size) : data(static_cast<T *>(emulator::allocate(size * sizeof(T)))) {
    for (int i = 0; i < size; i++) data[i] = from_float<T>(static_cast<float>(i));
  }
  Global(const Global &) = delete;
  Global &operator=(const Global &) = delete;
  ~Global() { emulator::release(data); }
};

std::string race(const std::string &operation, const std::string &operation_before, int line_before,
                 const std::string &who) {
  return operation + " races in shared memory with the " + operation_before + " at " +
         file_and(line_before) + " by " + who + ": no barrier between them";
}

std::string under_way(const std::string &operation, int line, unsigned thread) {
  return operation + " shared memory that a cp.async at " + file_and(line) + " by thread " +
         std::to_string(thread) + " may still be writing: no cp_async_wait for its group yet";
}

/// A matrix of the host, to compare with.
template <int Rows, int Cols>
using Plain = std::array<std::array<float, Cols>, Rows>;

/// Small whole numbers, so that every sum is exact, and not in any regular order.
template <int Rows, int Cols>
Plain<Rows, Cols> whole_numbers(int seed) {
  Plain<Rows, Cols> m;
  for (int i = 0; i < Rows; i++)
    for (int j = 0; j < Cols; j++)
      m[i][j] = static_cast<float>((i * 37 + j * 101 + seed * 59 + i * j * 7) % 23 - 11);
  return m;
}

/// C + A B.
Plain<16, 8> product(const Plain<16, 16> &A, const Plain<16, 8> &B, Plain<16, 8> C = {}) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 8; j++)
      for (int k = 0; k < 16; k++) C[i][j] += A[i][k] * B[k][j];
  return C;
}

// The lane's elements a0 ... a7, b0 ... b3, c0 ... c3, as the PTX ISA numbers them ('Matrix
// Fragments for mma.m16n8k16 with floating point type').

template <class T = half>
FragmentA fragment_a(const Plain<16, 16> &A) {
  const int group = lane_id() / 4, in_group = lane_id() % 4;
  std::array<float, 8> a;
  for (int i = 0; i < 8; i++)
    a[i] = A[(i < 2 || (4 <= i && i < 6)) ? group : group + 8]
            [i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8];
  return {cvt_rn_x2<T>(a[0], a[1]), cvt_rn_x2<T>(a[2], a[3]), cvt_rn_x2<T>(a[4], a[5]),
          cvt_rn_x2<T>(a[6], a[7])};
}

template <class T = half>
FragmentB fragment_b(const Plain<16, 8> &B) {
  const int group = lane_id() / 4, in_group = lane_id() % 4;
  std::array<float, 4> b;
  for (int i = 0; i < 4; i++)
    b[i] = B[i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8][group];
  return {cvt_rn_x2<T>(b[0], b[1]), cvt_rn_x2<T>(b[2], b[3])};
}

FragmentC fragment_c(const Plain<16, 8> &C) {
  const int group = lane_id() / 4, in_group = lane_id() % 4;
  FragmentC c;
  for (int i = 0; i < 4; i++) c[i] = C[i < 2 ? group : group + 8][in_group * 2 + (i & 1)];
  return c;
}

/// Adds up the elements of the lane's fragment that are not as they should be.
void compare(const FragmentC &c, const Plain<16, 8> &expected, int &wrong) {
  const FragmentC right = fragment_c(expected);
  for (int i = 0; i < 4; i++) wrong += !(c[i] == right[i]);
}

}  // namespace

// --- mma -----------------------------------------------------------------------------------------

TEST_CASE("ptx: mma is C + A B") {
  const Setup setup;
  int wrong = 0;
  run<void>(dim3(64), [&] {  // two warps, each with matrices of its own
    const int warp = thread_id() / 32;
    const auto A = whole_numbers<16, 16>(warp);
    const auto B = whole_numbers<16, 8>(2 + warp), C = whole_numbers<16, 8>(4 + warp);
    FragmentC c = fragment_c(C);
    mma(c, fragment_a(A), fragment_b(B));
    compare(c, product(A, B, C), wrong);
    mma(c, fragment_a(A), fragment_b(C));  // the sums go on from where they are
    compare(c, product(A, C, product(A, B, C)), wrong);
  });
  CHECK(wrong == 0);
}

TEST_CASE("ptx: each element of mma's operands is where the PTX ISA says") {
  const Setup setup;
  const auto numbers = whole_numbers<16, 16>(1);
  const auto B = whole_numbers<16, 8>(2);
  int wrong = 0;
  run<void>(dim3(32), [&] {
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < 16; k++) {
        Plain<16, 16> one{};
        one[i][k] = 1;  // row i of the product is row k of B, all else is zero
        FragmentC c{};
        mma(c, fragment_a(one), fragment_b(B));
        Plain<16, 8> expected{};
        expected[i] = B[k];
        compare(c, expected, wrong);
      }
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < 8; j++) {
        Plain<16, 8> one{};
        one[k][j] = 1;  // column j of the product is column k of A
        FragmentC c{};
        mma(c, fragment_a(numbers), fragment_b(one));
        Plain<16, 8> expected{};
        for (int i = 0; i < 16; i++) expected[i][j] = numbers[i][k];
        compare(c, expected, wrong);
      }
  });
  CHECK(wrong == 0);
}

TEST_CASE("ptx: mma's products are exact and its sums are fp32") {
  const Setup setup;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  int wrong = 0;
  run<void>(dim3(32), [&] {
    const auto element = [](float a, float b, float c, int k) {
      Plain<16, 16> A{};
      Plain<16, 8> B{}, C{};
      A[3][k] = a;
      B[k][6] = b;
      C[3][6] = c;
      FragmentC fragment = fragment_c(C);
      mma(fragment, fragment_a(A), fragment_b(B));
      return fragment[0];  // of lane 4 * 3 + 3: row 3, column 6
    };
    const auto check = [&](float a, float b, float c, float expected) {
      for (int k = 4; k < 6; k++) {  // in the lower and in the upper half of a register
        const float result = element(a, b, c, k);
        if (lane_id() == 15) wrong += !(result == expected);
      }
    };
    check(1 + 0x1p-10f, 1 + 0x1p-10f, 0, 1 + 0x1p-9f + 0x1p-20f);  // 21 bits
    check(1, 1, 2048, 2049);                                       // 12 bits
    check(1, 1, 0x1p24f, 0x1p24f);                                 // 25 bits: rounded
    check(0x1p-24f, 0x1p-24f, 0, 0x1p-48f);                        // the smallest fp16
    check(65504, 65504, 0, 65504.0f * 65504.0f);                   // the largest
    check(infinity, 1, 0, infinity);
    check(infinity, -1, 0, -infinity);
    const float nan = element(infinity, 0, 0, 4);
    if (lane_id() == 15) wrong += !std::isnan(nan);
  });
  CHECK(wrong == 0);
}

TEST_CASE("ptx: mma of bf16: the same places, a range as fp32 has it, exact products") {
  const Setup setup;
  int wrong = 0;
  run<void>(dim3(32), [&] {
    const auto A = whole_numbers<16, 16>(1);
    const auto B = whole_numbers<16, 8>(2), C = whole_numbers<16, 8>(3);
    FragmentC c = fragment_c(C);
    mma<bf16>(c, fragment_a<bf16>(A), fragment_b<bf16>(B));
    compare(c, product(A, B, C), wrong);
    const auto check = [&](float a, float b, float expected) {
      for (int k = 4; k < 6; k++) {  // in the lower and in the upper half of a register
        Plain<16, 16> one{};
        Plain<16, 8> other{};
        one[3][k] = a;
        other[k][6] = b;
        FragmentC sum{};
        mma<bf16>(sum, fragment_a<bf16>(one), fragment_b<bf16>(other));
        if (lane_id() == 15) wrong += !(sum[0] == expected);  // row 3, column 6
      }
    };
    check(1 + 0x1p-7f, 1 + 0x1p-7f, 1 + 0x1p-6f + 0x1p-14f);  // 15 bits
    check(0x1p100f, 0x1p-126f, 0x1p-26f);                     // far beyond fp16
    check(1e30f, 0, 0);
  });
  CHECK(wrong == 0);
}

// --- ldmatrix ------------------------------------------------------------------------------------

namespace {

struct Squares {
  Tile<half, 32, 16> x;  // 32 rows of 2 times 8
  half end;              // so that shared memory goes on after the tile
};

float number(int row, int col) {
  return static_cast<float>(32 * row + col);
}

/// A tile that all threads may read.
Squares &written_squares() {
  auto &squares = shared_storage<Squares>();
  for (int i = thread_id(); i < 32 * 16; i += static_cast<int>(blockDim.x))
    squares.x(i / 16, i % 16) = float_to_half(number(i / 16, i % 16));
  __syncthreads();
  return squares;
}

/// A matrix whose rows lie all over the tile: row r of matrix n.
int row_of(int n, int r) {
  return (5 * n + 3 * r) % 32;
}
int col_of(int n, int r) {
  return (n + r) % 2 * 8;
}

/// What lane 4 g + t should receive of matrix n.
std::uint32_t expected_pair(int n, bool transposed) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  const auto element = [&](int r, int c) { return number(row_of(n, r), col_of(n, r) + c); };
  return transposed ? cvt_rn_f16x2(element(2 * t, g), element(2 * t + 1, g))
                    : cvt_rn_f16x2(element(g, 2 * t), element(g, 2 * t + 1));
}

}  // namespace

TEST_CASE("ptx: ldmatrix gives lane 4 g + t row g, columns 2t and 2t + 1") {
  const Setup setup;
  int wrong = 0;
  run<Squares>(dim3(64), [&] {
    auto &x = written_squares().x;
    const int n = lane_id() / 8, r = lane_id() % 8;
    const auto m = ldmatrix_x4(x(row_of(n, r), col_of(n, r)));
    for (int i = 0; i < 4; i++) wrong += m[i] != expected_pair(i, false);
  });
  CHECK(wrong == 0);
}

TEST_CASE("ptx: ldmatrix.trans gives lane 4 g + t rows 2t and 2t + 1 of column g") {
  const Setup setup;
  int wrong = 0;
  run<Squares>(dim3(64), [&] {
    auto &x = written_squares().x;
    const int n = lane_id() / 8, r = lane_id() % 8;
    const auto m4 = ldmatrix_x4_trans(x(row_of(n, r), col_of(n, r)));
    for (int i = 0; i < 4; i++) wrong += m4[i] != expected_pair(i, true);
    const auto m2 = ldmatrix_x2_trans(x(row_of(n, r), col_of(n, r)));
    for (int i = 0; i < 2; i++) wrong += m2[i] != expected_pair(i, true);
  });
  CHECK(wrong == 0);
}

TEST_CASE("ptx: ldmatrix and cp.async move the bits of bf16 as those of fp16") {
  struct Rows {
    Tile<bf16, 16, 16> x;
  };
  const Setup setup;
  const Global<bf16> global(16 * 16);
  int wrong = 0;
  run<Rows>(dim3(32), [&] {
    auto &x = shared_storage<Rows>().x;
    const Matrix<const bf16> g{global.data, 16, 16};
    const int row = lane_id() % 16, col = lane_id() / 16 * 8;
    cp_async_16_or_zeros(x(row, col), g(row, col), row > 0);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    const auto element = [](int i, int j) { return static_cast<float>(i ? 16 * i + j : 0); };
    const int group = lane_id() / 4, in_group = lane_id() % 4 * 2;
    const auto m = ldmatrix_x4(x(row, col)), trans = ldmatrix_x4_trans(x(row, col));
    wrong += m[0] != cvt_rn_bf16x2(element(group, in_group), element(group, in_group + 1));
    wrong += trans[3] !=
             cvt_rn_bf16x2(element(8 + in_group, 8 + group), element(8 + in_group + 1, 8 + group));
    __syncwarp();  // all lanes have read what is overwritten now
    store<2>(x(row, 2 * (lane_id() / 16)), Vector<bf16, 2>{from_float<bf16>(1), bf16{}});
    wrong += bf16_to_float(x(row, 2 * (lane_id() / 16))) != 1;
  });
  CHECK(wrong == 0);
}

namespace {

struct Operands {
  Tile<half, 16, 16> Q, P;
  Tile<half, 8, 16> K;  // 8 keys
  Tile<half, 16, 8> V;  // 16 keys
};

}  // namespace

TEST_CASE("ptx: ldmatrix makes mma's operands: Q and K for Q K^T, P and V for P V") {
  const Setup setup;
  const auto Q = whole_numbers<16, 16>(1), P = whole_numbers<16, 16>(2);
  const auto KT = whole_numbers<16, 8>(3), V = whole_numbers<16, 8>(4);
  int wrong = 0;
  run<Operands>(dim3(32), [&] {
    auto &smem = shared_storage<Operands>();
    for (int i = lane_id(); i < 256; i += 32) {
      smem.Q(i / 16, i % 16) = float_to_half(Q[i / 16][i % 16]);
      smem.P(i / 16, i % 16) = float_to_half(P[i / 16][i % 16]);
      if (i >= 128) continue;
      smem.K(i / 16, i % 16) = float_to_half(KT[i % 16][i / 16]);
      smem.V(i / 8, i % 8) = float_to_half(V[i / 8][i % 8]);
    }
    __syncwarp();
    // A's quarters: rows 0 to 7, rows 8 to 15, then the same 8 columns further on.
    const int row = lane_id() % 16, col = lane_id() / 16 * 8;
    // K^T's two halves lie side by side in K's rows: not transposed.
    const auto k = ldmatrix_x4(smem.K(lane_id() % 8, lane_id() / 8 % 2 * 8));
    FragmentC S{}, O{};
    mma(S, ldmatrix_x4(smem.Q(row, col)), {k[0], k[1]});
    mma(O, ldmatrix_x4(smem.P(row, col)), ldmatrix_x2_trans(smem.V(row, 0)));
    compare(S, product(Q, KT), wrong);
    compare(O, product(P, V), wrong);
  });
  CHECK(wrong == 0);
}

TEST_CASE("ptx: the lanes that ldmatrix.x2 does not read may name anything") {
  const Setup setup;
  const Global memory(64);
  const std::string error = error_of<Squares>(dim3(32), [&] {
    auto &x = written_squares().x;
    const Reference<half> elsewhere(memory.data + 1, Where::current());
    (void)ldmatrix_x2_trans(lane_id() < 16 ? x(lane_id(), 8) : elsewhere);
  });
  CHECK(error == "");
}

TEST_CASE("ptx: the lanes that ldmatrix.x2 does not read may name rows that do not exist") {
  const Setup setup;
  const auto error_with_rows = [](int rows) {
    return error_of<Squares>(dim3(32), [rows] {
      auto &x = written_squares().x;
      at = __LINE__, (void)ldmatrix_x2_trans(x(32 - rows + lane_id(), 8));
    });
  };
  CHECK(error_with_rows(16) == "");
  CHECK(error_with_rows(15) == error_in_thread(at, 15, "row or column out of bounds"));
}

TEST_CASE("ptx: instructions of whole warps need one") {
  const Setup setup;
  std::string error = error_of<void>(dim3(48), [] {
    FragmentC c{};
    if (thread_id() == 35) at = __LINE__, mma(c, FragmentA{}, FragmentB{});
  });
  CHECK(error ==
        error_in_thread(at, 35, "mma: takes all 32 lanes, and the block's last warp has 16"));
  for (int seed = 1; seed <= kSeeds;
       seed++) {  // unlike a __syncwarp, mma must be reached in one place
    emulator::settings.seed = seed;
    error = error_of<void>(dim3(32), [] {
      FragmentC c{};
      if (lane_id() < 16)
        mma(c, FragmentA{}, FragmentB{});
      else
        mma(c, FragmentA{}, FragmentB{});
    });
    CHECK(error.find("lanes of one warp wait in different instructions: mma here, mma at ") !=
          std::string::npos);
  }
}

TEST_CASE("ptx: a row of ldmatrix that is misaligned, or not in shared memory, is an error") {
  const Setup setup;
  const Global memory(64);
  std::string error = error_of<Squares>(dim3(32), [] {
    auto &x = written_squares().x;
    at = __LINE__, (void)ldmatrix_x4(x(lane_id(), lane_id() == 17 ? 4 : 8));
  });
  CHECK(error ==
        error_in_thread(at, 17, "ldmatrix of a row at an address that is not a multiple of 16"));
  error = error_of<Squares>(dim3(32), [&] {
    auto &x = written_squares().x;
    const Reference<half> elsewhere(memory.data, Where::current());
    at = __LINE__, (void)ldmatrix_x4_trans(lane_id() == 9 ? elsewhere : x(lane_id(), 0));
  });
  CHECK(error == error_in_thread(at, 9, "ldmatrix of a row that is not in shared memory"));
  error = error_of<Squares>(dim3(32), [&] {
    auto &squares = written_squares();
    const Reference<half> end(&squares.end, Where::current());
    at = __LINE__, (void)ldmatrix_x2_trans(lane_id() == 15 ? end : squares.x(lane_id(), 0));
  });
  // The struct's end is padded to 16 bytes, so these are inside, and nobody wrote them.
  CHECK(error == error_in_thread(at, 15, "load of shared memory that nobody wrote"));
}

// --- stmatrix ------------------------------------------------------------------------------------

TEST_CASE("ptx: stmatrix stores what ldmatrix loads, where the lanes say") {
  const Setup setup;
  int wrong = 0;
  run<Squares>(dim3(64), [&] {
    auto &x = shared_storage<Squares>().x;
    const int warp = thread_id() / 32, n = lane_id() / 8, r = lane_id() % 8;
    const int g = lane_id() / 4, t = lane_id() % 4;
    // Matrix n of a warp: rows 16 warp + 8 (n % 2) on, columns 8 (n / 2) on, rows in reverse.
    const auto row = [&](int matrix, int line) { return 16 * warp + matrix % 2 * 8 + 7 - line; };
    Vector<std::uint32_t, 4> m;
    for (int i = 0; i < 4; i++) {
      const int col = i / 2 * 8 + 2 * t;
      m[i] = cvt_rn_f16x2(number(row(i, g), col), number(row(i, g), col + 1));
    }
    stmatrix_x4(x(row(n, r), n / 2 * 8), m);
    __syncthreads();
    for (int i = thread_id(); i < 32 * 16; i += 64)
      wrong += half_to_float(x(i / 16, i % 16)) != number(i / 16, i % 16);
    const auto back = ldmatrix_x4(x(row(n, r), n / 2 * 8));
    for (int i = 0; i < 4; i++) wrong += back[i] != m[i];
  });
  CHECK(wrong == 0);
}

TEST_CASE("ptx: stmatrix.trans stores what ldmatrix.trans loads, rows as columns") {
  const Setup setup;
  int wrong = 0;
  run<Squares>(dim3(64), [&] {
    auto &x = shared_storage<Squares>().x;
    const int warp = thread_id() / 32, n = lane_id() / 8, r = lane_id() % 8;
    const int g = lane_id() / 4, t = lane_id() % 4;
    const int row = 16 * warp + n % 2 * 8;  // matrix n's first, columns 8 (n / 2) on
    Vector<std::uint32_t, 4> m;
    for (int i = 0; i < 4; i++) {
      const int first = 16 * warp + i % 2 * 8 + 2 * t, col = i / 2 * 8 + g;
      m[i] = cvt_rn_f16x2(number(first, col), number(first + 1, col));
    }
    stmatrix_x4_trans(x(row + r, n / 2 * 8), m);
    __syncthreads();
    for (int i = thread_id(); i < 32 * 16; i += 64)
      wrong += half_to_float(x(i / 16, i % 16)) != number(i / 16, i % 16);
    const auto back = ldmatrix_x4_trans(x(row + r, n / 2 * 8));
    for (int i = 0; i < 4; i++) wrong += back[i] != m[i];
  });
  CHECK(wrong == 0);
}

TEST_CASE("ptx: a row of stmatrix that is not its lane's to store is an error") {
  const Setup setup;
  const Global memory(64);
  enum Bug { kNone, kAddress, kMemory, kRow, kSameRow, kOtherWarp };
  const auto error_with = [&](Bug bug) {
    return error_of<Squares>(dim3(64), [&] {
      auto &x = shared_storage<Squares>().x;
      if (bug == kOtherWarp && thread_id() == 33) also_at = __LINE__, x(5, 0) = half{};
      if (thread_id() >= 32) return;
      const Reference<half> elsewhere(memory.data, Where::current());
      const int lane = lane_id();
      const auto row = x(bug == kRow && lane == 30      ? 32
                         : bug == kSameRow && lane == 9 ? 8
                                                        : lane,
                         bug == kAddress && lane == 17 ? 4 : 0);
      const auto named = bug == kMemory && lane == 3 ? elsewhere : row;
      at = __LINE__, stmatrix_x4(named, Vector<std::uint32_t, 4>{});
    });
  };
  const auto error_in = [&](Bug bug, unsigned thread, const std::string &what) {
    const std::string error = error_with(bug);
    CHECK(error == error_in_thread(at, thread, what));
  };
  CHECK(error_with(kNone) == "");
  error_in(kAddress, 17, "stmatrix to a row at an address that is not a multiple of 16");
  error_in(kMemory, 3, "stmatrix to a row that is not in shared memory");
  error_in(kRow, 30, "row or column out of bounds");
  error_in(kSameRow, 9, race("store", "store", at, "thread 8"));
  for (int seed = 0; seed < kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const std::string error = error_with(kOtherWarp);
    CAPTURE(error);
    // Whichever of the two comes second.
    CHECK((error == error_in_thread(at, 5, race("store", "store", also_at, "thread 33")) ||
           error == error_in_thread(also_at, 33, race("store", "store", at, "thread 5"))));
  }
}

TEST_CASE("ptx: stmatrix counts as rows of 16 bytes, not as a store") {
  const Setup setup;
  emulator::settings.profile = true;
  emulator::take_profile();
  run<Squares>(dim3(64), [] {
    auto &x = shared_storage<Squares>().x;
    if (thread_id() < 32) stmatrix_x4(x(lane_id(), 8), Vector<std::uint32_t, 4>{});
  });
  const emulator::Counts total = emulator::take_profile().total();
  CHECK(total[emulator::kStmatrix] == 1);
  CHECK(total[emulator::kStmatrixWavefronts] == 8);  // 4 of 8 rows lie in the same banks
  CHECK(total[emulator::kStmatrixIdeal] == 4);
  CHECK(total[emulator::kSharedStoreRequests] == 0);
}

namespace {

struct Odd {
  half x[12];  // 24 bytes
};

}  // namespace

TEST_CASE("ptx: a row of ldmatrix or a copy past the end of shared memory is an error") {
  const Setup setup;
  const Global memory(64);
  std::string error = error_of<Odd>(dim3(32), [] {
    const Reference<half> last(shared_storage<Odd>().x + 8, Where::current());
    at = __LINE__, (void)ldmatrix_x4(last);
  });
  CHECK(error == error_in_thread(at, 0, "ldmatrix of a row past the end of shared memory"));
  error = error_of<Odd>(dim3(32), [&] {
    const Reference<half> last(shared_storage<Odd>().x + 8, Where::current());
    if (thread_id() == 3)
      at = __LINE__, cp_async_16(last, Matrix<const half>{memory.data, 1, 64}(0, 0));
  });
  CHECK(error == error_in_thread(at, 3, "cp.async past the end of shared memory"));
}

TEST_CASE("ptx: ldmatrix of a row that nobody wrote is an error") {
  const Setup setup;
  const std::string error = error_of<Squares>(dim3(32), [] {
    auto &x = shared_storage<Squares>().x;
    for (int col = 0; col < 8; col++)
      if (lane_id() != 20 || col != 7) x(lane_id(), col) = half{};
    __syncwarp();
    at = __LINE__, (void)ldmatrix_x4(x(lane_id(), 0));
  });
  CHECK(error == error_in_thread(at, 20, "load of shared memory that nobody wrote"));
}

TEST_CASE("ptx: ldmatrix races with another warp's store, whichever comes first") {
  const Setup setup;
  int count = 0;
  constexpr int kManySeeds = 200;  // 32 lanes come before another warp's in few orders
  for (int seed = 1; seed <= kManySeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<Squares>(dim3(64), [] {
      auto &x = written_squares().x;
      if (thread_id() < 32)
        at = __LINE__, (void)ldmatrix_x4(x(lane_id(), 8));
      else if (lane_id() == 2)
        also_at = __LINE__, x(13, 11) = half{};
    });
    const bool store_first =
        error == error_in_thread(at, 13, race("load", "store", also_at, "thread 34"));
    const bool load_first =
        error == error_in_thread(also_at, 34, race("store", "load", at, "thread 13"));
    CAPTURE(error);
    CHECK((store_first || load_first));
    count += store_first;
  }
  CHECK(count > 0);
  CHECK(count < kManySeeds);
}

TEST_CASE("ptx: lanes of a warp in different instructions are an error") {
  const Setup setup;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<Squares>(dim3(32), [] {
      auto &x = written_squares().x;
      FragmentC c{};
      if (lane_id() < 7)
        at = __LINE__, mma(c, FragmentA{}, FragmentB{});
      else
        also_at = __LINE__, (void)ldmatrix_x4(x(lane_id(), 0));
    });
    const std::string two = "lanes of one warp wait in different instructions: ";
    CAPTURE(error);
    CHECK(((error.starts_with(file_and(at) + ": block (0,0,0) thread (") &&
            error.ends_with("): " + two + "mma here, ldmatrix.x4 at " + file_and(also_at) +
                            " in lane 7")) ||
           (error.starts_with(file_and(also_at) + ": block (0,0,0) thread (") &&
            error.ends_with("): " + two + "ldmatrix.x4 here, mma at " + file_and(at) +
                            " in lane 0"))));
  }
  const std::string error = error_of<void>(dim3(32), [] {
    FragmentC c{};
    if (lane_id() != 5) at = __LINE__, mma(c, FragmentA{}, FragmentB{});
  });
  CHECK(error == error_in_thread(at, 0,
                                 "31 of 32 threads wait for ever in mma; 1 have exited without "
                                 "reaching it"));
}

// --- cp.async ------------------------------------------------------------------------------------

namespace {

struct Buffer {
  Tile<half, 8, 64> x;  // 64 times 16 bytes
};

/// Copies 16 bytes: those with number i of global memory, to those with number i of the buffer.
void copy(const Global<> &memory, int i, Where where = Where::current()) {
  cp_async_16(shared_storage<Buffer>().x(i / 8, i % 8 * 8),
              Matrix<const half>{memory.data, 8, 64}(i / 8, i % 8 * 8), where);
}

/// An element of 16 bytes with number i of the buffer.
Reference<half> element_of(int i, Where where = Where::current()) {
  return shared_storage<Buffer>().x(i / 8, i % 8 * 8 + 5, where);
}
float expected_element(int i) {
  return static_cast<float>(8 * i + 5);
}

/// Zeros in the whole buffer, for all to see.
void clear_buffer() {
  for (int i = thread_id(); i < 512; i += static_cast<int>(blockDim.x))
    shared_storage<Buffer>().x(i / 64, i % 64) = half{};
  __syncthreads();
}

/// What the buffer's memory holds, without a check.
float peek(int i) {
  return half_to_float(*element_of(i).pointer());
}

}  // namespace

TEST_CASE("ptx: what cp.async copies is there after the wait, and after a barrier for all") {
  const Setup setup;
  const Global memory(512);
  int wrong = 0;
  const std::string error = error_of<Buffer>(dim3(64), [&] {
    for (int turn = 0; turn < 3; turn++) {
      const int i = thread_id(), other = 63 - i;
      copy(memory, i);
      cp_async_commit();
      cp_async_wait<0>();
      wrong += half_to_float(element_of(i)) != expected_element(i);
      __syncthreads();
      wrong += half_to_float(element_of(other)) != expected_element(other);
      __syncthreads();  // read by all: the next turn may overwrite it
    }
  });
  CHECK(error == "");
  CHECK(wrong == 0);
}

TEST_CASE("ptx: what cp.async copies arrives as late as the waits allow") {
  const Setup setup;
  const Global memory(512);
  std::vector<float> seen;
  const std::string error = error_of<Buffer>(dim3(32), [&] {
    clear_buffer();
    if (thread_id()) return;
    const auto look = [&] {
      for (int i = 0; i < 4; i++) seen.push_back(peek(i));
    };
    copy(memory, 0), copy(memory, 1);
    cp_async_commit();
    copy(memory, 2);
    cp_async_commit();
    copy(memory, 3);  // in no group yet
    look();
    cp_async_wait<2>();
    look();
    cp_async_wait<1>();
    look();
    cp_async_wait<0>();
    look();
    cp_async_wait<0>();
    look();
    cp_async_commit();
    cp_async_commit();  // a group of none
    look();
    cp_async_wait<1>();
    look();
  });
  CHECK(error == "");
  const std::vector<float> expected{0,  0, 0, 0,  0,  0, 0, 0,  5,  13, 0, 0,  5,  13,
                                    21, 0, 5, 13, 21, 0, 5, 13, 21, 0,  5, 13, 21, 29};
  CHECK(seen == expected);
}

TEST_CASE("ptx: memory that a cp.async may still be writing is nobody's to touch") {
  const Setup setup;
  const Global memory(512);
  // The thread itself reads, writes and copies once more.
  std::string error = error_of<Buffer>(dim3(32), [&] {
    clear_buffer();
    if (thread_id() == 9) at = __LINE__, copy(memory, 3), also_at = __LINE__, read(element_of(3));
  });
  CHECK(error == error_in_thread(also_at, 9, under_way("load of", at, 9)));
  error = error_of<Buffer>(dim3(32), [&] {
    if (thread_id() != 9) return;
    at = __LINE__, copy(memory, 3);
    cp_async_commit();
    also_at = __LINE__, element_of(3) = half{};
  });
  CHECK(error == error_in_thread(also_at, 9, under_way("store to", at, 9)));
  error = error_of<Buffer>(dim3(32), [&] {
    if (thread_id() != 9) return;
    at = __LINE__, copy(memory, 3);
    also_at = __LINE__, copy(memory, 3);
  });
  CHECK(error == error_in_thread(also_at, 9, under_way("cp.async to", at, 9)));
  // Another thread, a barrier later; its neighbours are free.
  error = error_of<Buffer>(dim3(64), [&] {
    clear_buffer();
    if (thread_id() == 9) at = __LINE__, copy(memory, 3);
    cp_async_commit();
    __syncthreads();
    if (thread_id() == 40) read(element_of(2)), read(element_of(4));
    if (thread_id() == 40) also_at = __LINE__, read(element_of(3));
    __syncthreads();
  });
  CHECK(error == error_in_thread(also_at, 40, under_way("load of", at, 9)));
  // Another warp's ldmatrix; row 1 of the buffer holds numbers 8 to 15.
  error = error_of<Buffer>(dim3(64), [&] {
    clear_buffer();
    if (thread_id() == 9) at = __LINE__, copy(memory, 8 * 6 + 1);
    cp_async_commit();
    __syncthreads();
    auto &x = shared_storage<Buffer>().x;
    if (thread_id() >= 32) also_at = __LINE__, (void)ldmatrix_x4(x(lane_id() % 8, 8));
    __syncthreads();
  });
  CHECK(error == error_in_thread(also_at, 32 + 6, under_way("load of", at, 9)));
}

TEST_CASE("ptx: a cp.async that its thread has not waited for is under way when that exits") {
  const Setup setup;
  const Global memory(512);
  enum Mistake { kNone, kNoWait, kNoCommit, kGroupLeft };
  for (const Mistake mistake : {kNone, kNoWait, kNoCommit, kGroupLeft}) {
    const std::string error = error_of<Buffer>(dim3(32), [&] {
      if (thread_id() != 9) return;
      at = __LINE__, copy(memory, 3);
      if (mistake != kNoCommit) cp_async_commit();
      if (mistake == kGroupLeft) cp_async_wait<1>();
      if (mistake == kNone || mistake == kNoCommit) cp_async_wait<0>();
    });
    CHECK(error ==
          (mistake == kNone
               ? ""
               : error_in_thread(at, 9,
                                 "the thread exits, and this cp.async may still be writing "
                                 "shared memory: no cp_async_wait for its group yet")));
    if (mistake != kNone) CHECK(tag == "[in-flight] ");
  }
}

TEST_CASE("ptx: a wait for all but N groups leaves the youngest N under way") {
  const Setup setup;
  const Global memory(512);
  const auto error_when_reading = [&](int which) {
    return error_of<Buffer>(dim3(32), [&, which] {
      if (thread_id()) return;
      copy(memory, 0);
      cp_async_commit();
      at = __LINE__, copy(memory, 1);
      cp_async_commit();
      cp_async_wait<1>();
      also_at = __LINE__, read(element_of(which));
      cp_async_wait<0>();
    });
  };
  CHECK(error_when_reading(0) == "");
  const std::string error = error_when_reading(1);
  CHECK(error == error_in_thread(also_at, 0, under_way("load of", at, 0)));
}

TEST_CASE("ptx: a wait covers committed copies only, and those of its own thread") {
  const Setup setup;
  const Global memory(512);
  std::string error = error_of<Buffer>(dim3(32), [&] {
    if (thread_id()) return;
    copy(memory, 0);
    cp_async_commit();
    at = __LINE__, copy(memory, 1);
    cp_async_wait<0>();
    read(element_of(0));
    also_at = __LINE__, read(element_of(1));
  });
  CHECK(error == error_in_thread(also_at, 0, under_way("load of", at, 0)));
  error = error_of<Buffer>(dim3(32), [&] {
    if (thread_id() == 0) at = __LINE__, copy(memory, 0);
    cp_async_commit();
    __syncwarp();
    if (thread_id() == 1) {
      cp_async_wait<0>();
      also_at = __LINE__, read(element_of(0));
    }
  });
  CHECK(error == error_in_thread(also_at, 1, under_way("load of", at, 0)));
}

TEST_CASE("ptx: after its wait a copy is a store by its thread: others need a barrier") {
  const Setup setup;
  const Global memory(512);
  int races = 0;
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    const std::string error = error_of<Buffer>(dim3(64), [&] {
      clear_buffer();
      if (thread_id() == 9) {
        at = __LINE__, copy(memory, 3);
        cp_async_commit();
        cp_async_wait<0>();
      }
      if (thread_id() == 40) also_at = __LINE__, read(element_of(3));
    });
    // Whoever comes second says so; the copy may land as soon as it begins.
    const bool copied_first =
        error == error_in_thread(also_at, 40, race("load", "cp.async", at, "thread 9"));
    const bool read_first =
        error == error_in_thread(at, 9, race("cp.async", "load", also_at, "thread 40"));
    CAPTURE(error);
    CHECK((copied_first || read_first));
    races += copied_first;
  }
  CHECK(races > 0);
  CHECK(races < kSeeds);
}

TEST_CASE("ptx: a __syncwarp after the wait is enough within a warp, and for no other") {
  const Setup setup;
  const Global memory(512);
  const auto error_when_read_by = [&](int reader) {
    return error_of<Buffer>(dim3(64), [&, reader] {
      clear_buffer();
      if (thread_id() == 9) at = __LINE__, copy(memory, 3);
      cp_async_commit();
      cp_async_wait<0>();
      __syncwarp();
      // Wait for the other warp in a way that orders nothing.
      for (int i = 0; i < 100; i++) __syncwarp();
      if (thread_id() == reader) also_at = __LINE__, read(element_of(3));
    });
  };
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    CHECK(error_when_read_by(10) == "");
    const std::string error = error_when_read_by(40);
    CAPTURE(error);
    CHECK((error == error_in_thread(also_at, 40, race("load", "cp.async", at, "thread 9")) ||
           error == error_in_thread(at, 9, race("cp.async", "load", also_at, "thread 40")) ||
           error == error_in_thread(also_at, 40, under_way("load of", at, 9))));
  }
}

TEST_CASE("ptx: a copy over what others have read or written without a barrier since is a race") {
  const Setup setup;
  const Global memory(512);
  std::string error;
  const auto try_copy = [&](bool store, bool wait) {
    error = error_of<Buffer>(dim3(32), [&, store, wait] {
      clear_buffer();
      if (thread_id() == 1) {
        if (store)
          also_at = __LINE__, element_of(3) = half{};
        else
          also_at = __LINE__, read(element_of(3));
      }
      __shfl_xor_sync(kAllLanes, 1.0f, 1);  // what comes after it is not ordered by it
      if (wait) __syncwarp();
      if (thread_id() == 9) at = __LINE__, copy(memory, 3);
      cp_async_commit();
      cp_async_wait<0>();
    });
  };
  try_copy(false, false);
  CHECK(error == error_in_thread(at, 9, race("cp.async", "load", also_at, "thread 1")));
  try_copy(true, false);
  CHECK(error == error_in_thread(at, 9, race("cp.async", "store", also_at, "thread 1")));
  try_copy(false, true);
  CHECK(error == "");
  try_copy(true, true);
  CHECK(error == "");
  // A tile that other warps read through ldmatrix.
  const auto error_after_ldmatrix = [&](bool wait) {
    return error_of<Buffer>(dim3(128), [&, wait] {
      clear_buffer();
      auto &x = shared_storage<Buffer>().x;
      at = __LINE__, (void)ldmatrix_x4(x(lane_id() % 8, lane_id() / 8 * 8));
      if (wait) __syncthreads();
      if (thread_id() < 64) also_at = __LINE__, copy(memory, thread_id());
      cp_async_commit();
      cp_async_wait<0>();
    });
  };
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    CHECK(error_after_ldmatrix(true) == "");
    error = error_after_ldmatrix(false);
    CAPTURE(error);
    CHECK((error.find(": cp.async races in shared memory with the load at " + file_and(at)) !=
               std::string::npos ||
           error.find(": load races in shared memory with the cp.async at " + file_and(also_at)) !=
               std::string::npos ||
           error.find(": load of shared memory that a cp.async at " + file_and(also_at)) !=
               std::string::npos));
  }
}

TEST_CASE("ptx: cp.async's addresses: aligned, from an allocation, to shared memory") {
  const Setup setup;
  const Global memory(512);
  std::string error;
  const auto try_copy = [&](int shared_col, int global_col) {
    error = error_of<Buffer>(dim3(32), [&, shared_col, global_col] {
      auto &x = shared_storage<Buffer>().x;
      const Matrix<const half> g{memory.data, 8, 64};
      if (thread_id() == 5) at = __LINE__, cp_async_16(x(0, shared_col), g(0, global_col));
      cp_async_commit();
      cp_async_wait<0>();
    });
  };
  try_copy(8, 16);
  CHECK(error == "");
  try_copy(4, 16);
  CHECK(error == error_in_thread(at, 5, "cp.async to an address that is not a multiple of 16"));
  try_copy(8, 20);
  CHECK(error == error_in_thread(at, 5, "cp.async from an address that is not a multiple of 16"));
  try_copy(64, 16);
  CHECK(error == error_in_thread(at, 5, "row or column out of bounds"));
  try_copy(8, 64);
  CHECK(error == error_in_thread(at, 5, "row or column out of bounds"));

  error = error_of<Buffer>(dim3(32), [&] {
    const Matrix<const half> g{memory.data, 9, 64};  // one row too many
    if (thread_id() == 5) at = __LINE__, cp_async_16(shared_storage<Buffer>().x(0, 0), g(8, 0));
  });
  CHECK(error == error_in_thread(at, 5, "load outside of every allocation"));
  error = error_of<Buffer>(dim3(32), [&] {
    const Matrix<half> to{memory.data, 8, 64};
    const Matrix<const half> g{memory.data, 8, 64};
    if (thread_id() == 5) at = __LINE__, cp_async_16(to(0, 0), g(1, 0));
  });
  CHECK(error == error_in_thread(at, 5, "cp.async: the destination is not in shared memory"));
}

TEST_CASE("ptx: cp.async past the end of a row is an error, unless it copies zeros") {
  const Setup setup;
  const Global memory(512);
  // Rows of 12 elements, a gap of 4 after each.
  const auto error_of_copy = [&](int row, int col, bool there) {
    return error_of<Buffer>(dim3(32), [&, row, col, there] {
      auto &x = shared_storage<Buffer>().x;
      const StridedMatrix<const half> g{memory.data, 8, 12, 16};
      if (thread_id() != 5) return;
      at = __LINE__, cp_async_16_or_zeros(x(0, 0), g(row, col), there);
      cp_async_commit();
      cp_async_wait<0>();
      for (int i = 0; i < 8; i++)
        if (!there && half(x(0, i)).bits != 0) throw std::runtime_error("not zero");
    });
  };
  CHECK(error_of_copy(1, 0, true) == "");
  CHECK(error_of_copy(1, 8, true) ==
        error_in_thread(at, 5, "8 elements, and the row has only 4 from there on"));
  CHECK(error_of_copy(8, 0, true) == error_in_thread(at, 5, "row or column out of bounds"));
  for (const auto &[row, col] : {std::pair{1, 8}, {8, 0}, {-1, 0}, {1, 16}, {1000000, 0}})
    CHECK(error_of_copy(row, col, false) == "");
}

TEST_CASE("ptx: cp.async races in global memory as a load does") {
  const Setup setup;
  const Global memory(512);
  const std::string error = error_of<Buffer>(dim3(32), [&] {
    if (thread_id() == 1) also_at = __LINE__, Matrix<half>{memory.data, 8, 64}(0, 30) = half{};
    __shfl_xor_sync(kAllLanes, 1.0f, 1);
    if (thread_id() == 9) at = __LINE__, copy(memory, 3);
  });
  CHECK(error == error_in_thread(at, 9,
                                 "load races in global memory with the store at " +
                                     file_and(also_at) + " by thread 1: no barrier between them"));
}

TEST_CASE("ptx: what a cp.async reads must not change until its wait") {
  const Setup setup;
  const Global memory(512);
  const auto error_of_store = [&](int writer, bool wait, bool barrier) {
    return error_of<Buffer>(dim3(64), [&, writer, wait, barrier] {
      if (thread_id() == 9) at = __LINE__, copy(memory, 3);
      cp_async_commit();
      if (wait) cp_async_wait<0>();
      if (barrier) __syncthreads();
      if (thread_id() == writer)
        also_at = __LINE__, Matrix<half>{memory.data, 8, 64}(0, 30) = half{};
      if (!wait) cp_async_wait<0>();
    });
  };
  const std::string reading = "store to global memory that a cp.async at ";
  for (int seed = 1; seed <= kSeeds; seed++) {
    emulator::settings.seed = seed;
    CHECK(error_of_store(9, true, false) == "");
    CHECK(error_of_store(40, true, true) == "");
    std::string error = error_of_store(9, false, false);  // its own thread's
    CHECK(error ==
          error_in_thread(also_at, 9,
                          reading + file_and(at) +
                              " by thread 9 may still be reading: no cp_async_wait for its "
                              "group yet"));
    error = error_of_store(40, false, true);
    CAPTURE(error);
    // Thread 9 may have waited before the store of thread 40: that is no barrier between them.
    CHECK((error.find(reading) != std::string::npos ||
           error.find("races in global memory") != std::string::npos));
  }
}

// --- arithmetic ----------------------------------------------------------------------------------

TEST_CASE(
    "ptx: cvt_rn_f16x2 rounds to the nearest fp16, ties to even, the first into the lower half") {
  CHECK(cvt_rn_f16x2(1, -2) == 0xc0003c00u);
  CHECK(cvt_rn_f16x2(0, -0.0f) == 0x80000000u);
  // Between 2048 and 4096 fp16 has even numbers only.
  CHECK(cvt_rn_f16x2(2049, 2051) == cvt_rn_f16x2(2048, 2052));
  CHECK(cvt_rn_f16x2(2049.01f, 2050.99f) == cvt_rn_f16x2(2050, 2050));
  CHECK(cvt_rn_f16x2(65504, 65519.99f) == 0x7bff7bffu);
  CHECK(cvt_rn_f16x2(65520, -1e30f) == 0xfc007c00u);
  CHECK(cvt_rn_f16x2(0x1p-24f, 0x1p-25f) == 0x00000001u);  // the smallest, and a tie with zero
  CHECK(cvt_rn_f16x2(0x1.8p-24f, 0x1.8p-25f) == 0x00010002u);
  CHECK((cvt_rn_f16x2(NAN, 1) & 0x7fffu) > 0x7c00u);
}

TEST_CASE("ptx: cvt_rn_bf16x2 rounds to the nearest bf16, ties to even") {
  CHECK(cvt_rn_bf16x2(1, -2) == 0xc0003f80u);
  // Between 256 and 512 bf16 has even numbers only.
  CHECK(cvt_rn_bf16x2(257, 259) == cvt_rn_bf16x2(256, 260));
  CHECK(cvt_rn_bf16x2(257.01f, 258.99f) == cvt_rn_bf16x2(258, 258));
  CHECK(cvt_rn_bf16x2(0x1p127f, 3.4e38f) == 0x7f807f00u);  // beyond the largest + half a step
  CHECK((cvt_rn_bf16x2(NAN, 1) & 0x7fffu) > 0x7f80u);
  CHECK(cvt_rn_x2<half>(1, -2) == cvt_rn_f16x2(1, -2));
  CHECK(cvt_rn_x2<bf16>(1, -2) == cvt_rn_bf16x2(1, -2));
  CHECK(from_float<half>(65519.99f).bits == 0x7bff);
  CHECK(from_float<bf16>(259).bits == 0x4382);
}

TEST_CASE("ptx: ex2 is 2^x, and denormals are zero") {
  const Setup setup;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<float, float>> cases{
      {0, 1},          {-0.0f, 1},          {1, 2},         {-1, 0.5f},
      {10, 1024},      {0.5f, 1.41421356f}, {-infinity, 0}, {infinity, infinity},
      {128, infinity}, {-126, 0x1p-126f},  // the smallest that is not denormal
      {-126.5f, 0},    {-149, 0},           {-1000, 0},     {0x1p-140f, 1},  // denormal
      {-0x1p-140f, 1},
  };
  std::vector<float> results;
  float nan = 0;
  run<void>(dim3(32), [&] {
    if (thread_id()) return;
    for (const auto &[x, expected] : cases) results.push_back(ex2(x));
    nan = ex2(NAN);
  });
  REQUIRE(results.size() == cases.size());
  for (std::size_t i = 0; i < cases.size(); i++) {
    CAPTURE(cases[i].first);
    CHECK(results[i] == cases[i].second);
  }
  CHECK(std::isnan(nan));
}
