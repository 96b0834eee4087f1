// SPDX-License-Identifier: MIT
// wgmma on the emulator: where its operands lie, what it computes, when it lands, and the errors that a
// GPU answers with wrong numbers.
#include "common/kernel/wgmma.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "common/emulator/testing.h"
#include "common/program/text.h"
#include "reference/random.h"

namespace {

/// Whether a message begins with the line that the kernel noted, and says this.
bool says(const std::string &message, const std::string &what) {
  const bool found = message.starts_with(file_and(at) + ": block (0,0,0) thread (") &&
                     message.find(what) != std::string::npos;
  if (!found) MESSAGE(message << "\nnot at line " << at << ": " << what);
  return found;
}

constexpr unsigned kThreads = 128;  // a warpgroup

int warp_id() {
  return thread_id() / 32;
}

/// Small whole numbers, so that every sum is exact, and not in any regular order.
float whole_number(int i, int j, int seed) {
  return static_cast<float>((i * 37 + j * 101 + seed * 59 + i * j * 7) % 23 - 11);
}

/// Fills a tile by ordinary stores, for all threads and for the tensor cores.
template <class Tile>
void fill(Tile &tile, int rows, int cols, const std::function<float(int, int)> &number) {
  using T = std::remove_cvref_t<decltype(*tile(0, 0).pointer())>;
  for (int i = thread_id(); i < rows * cols; i += static_cast<int>(blockDim.x))
    tile(i / cols, i % cols) = from_float<T>(number(i / cols, i % cols));
  fence_proxy_async();
  __syncthreads();
}

}  // namespace

// --- where operands lie ----------------------------------------------------------------------------

namespace {

template <int Rows, int d>
struct OneTile {
  TmaTile<64, 64> before;  // so that it does not begin where shared memory does
  TmaTile<Rows, d> x;
};

/// Counts the elements of all operands of a tile that the tensor cores would find elsewhere.
template <int Rows, int d>
int misplaced() {
  int wrong = 0, seen = 0;
  run<OneTile<Rows, d>>(dim3(1), [&] {
    auto &x = shared_storage<OneTile<Rows, d>>().x;
    for (int row = 0; row < Rows; row++)
      for (int col = 0; col < d; col++)
        x(row, col) = std::bit_cast<half>(static_cast<std::uint16_t>(row * d + col));
    const auto *shared = static_cast<const std::byte *>(emulator::shared_memory());
    const auto find = [&](const emulator::SharedOperand &operand, int lines) {
      emulator::for_each_chunk(operand, 0, lines, [&](int line, int term, std::size_t address) {
        for (int i = 0; i < emulator::chunk_of(operand.element); i++) {
          const int row = operand.row + (operand.k_major ? line : term);
          const int col = operand.col + (operand.k_major ? term : line) + i;
          const auto *found = reinterpret_cast<const half *>(shared + address) + i;
          wrong += found->bits != row * d + col || found != x(row, col).pointer();
          seen++;
        }
      });
    };
    for (int row = 0; row < Rows; row += 8)
      for (int col = 0; col < d; col += 16) find(k_major(x, row, col), Rows - row);
    for (int row = 0; row + 16 <= Rows; row += 8)
      for (int col = 0; col < d; col += 64) find(mn_major(x, row, col), d - col);
  });
  CHECK(seen > Rows * d);
  return wrong;
}

}  // namespace

TEST_CASE_TEMPLATE("wgmma: descriptors lead to where the tile has each element", Tile,
                   OneTile<64, 64>, OneTile<64, 128>, OneTile<64, 256>, OneTile<128, 64>,
                   OneTile<128, 192>, OneTile<176, 128>, OneTile<256, 64>, OneTile<256, 256>) {
  const Setup setup;
  const auto count = []<int Rows, int d>(const OneTile<Rows, d> *) { return misplaced<Rows, d>(); };
  CHECK(count(static_cast<Tile *>(nullptr)) == 0);
}

// --- what is computed ------------------------------------------------------------------------------

namespace {

/// Of a warpgroup: Q and K as in the first product of attention, V as in the second.
template <class T = half, int N = 64>
struct Operands {
  TmaTile<64, 64, T> Q;
  TmaTile<N, 64, T> K;
  TmaTile<64, 256, T> V;
};

float q(int row, int col) {
  return whole_number(row, col, 1);
}
float k(int row, int col) {
  return whole_number(row, col, 2);
}
float v(int row, int col) {
  return whole_number(row, col, 3);
}
float p(int row, int col) {
  return whole_number(row, col, 4);
}

template <class T, int N>
Operands<T, N> &filled_operands() {
  auto &tiles = shared_storage<Operands<T, N>>();
  fill(tiles.Q, 64, 64, q);
  fill(tiles.K, N, 64, k);
  fill(tiles.V, 64, 256, v);
  return tiles;
}

/// The thread's registers of columns `col` to `col` + 15 of P, a0 ... a7 as the PTX ISA numbers them.
template <class T = half>
FragmentA fragment_of_p(int col) {
  const int group = lane_id() / 4, in_group = lane_id() % 4;
  float a[8];
  for (int i = 0; i < 8; i++)
    a[i] = p(warp_id() % 4 * 16 + ((i < 2 || (4 <= i && i < 6)) ? group : group + 8),
             col + (i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8));
  return {cvt_rn_x2<T>(a[0], a[1]), cvt_rn_x2<T>(a[2], a[3]), cvt_rn_x2<T>(a[4], a[5]),
          cvt_rn_x2<T>(a[6], a[7])};
}

/// How many of the thread's accumulators are not expected(row, column).
template <int N, class Expected>
int wrong(Accumulator<N> &accumulator, Expected expected) {
  int count = 0;
  for (int i = 0; i < N / 2; i++) {
    const int row = warp_id() % 4 * 16 + lane_id() / 4 + 8 * (i / 2 % 2);
    const int col = i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
    count += !(accumulator(i) == expected(row, col));
  }
  return count;
}

float qk(int row, int col) {
  float sum = 0;
  for (int i = 0; i < 64; i++) sum += q(row, i) * k(col, i);
  return sum;
}
float pv(int row, int col) {
  float sum = 0;
  for (int i = 0; i < 64; i++) sum += p(row, i) * v(i, col);
  return sum;
}

template <class T, int N>
struct Shape {
  static int count_wrong() {
    int count = 0;
    run<Operands<T, N>>(dim3(kThreads), [&] {
      auto &tiles = filled_operands<T, N>();
      Accumulator<N> S, O;
      FragmentA P[4];
      for (int col = 0; col < 64; col += 16) P[col / 16] = fragment_of_p<T>(col);
      wgmma_fence();
      for (int col = 0; col < 64; col += 16)
        wgmma<T>(S, k_major(tiles.Q, 0, col), k_major(tiles.K, 0, col), col > 0);
      wgmma_commit();
      for (int i = 0; i < O.size; i++) O(i) = 1000;
      wgmma_fence();
      for (int key = 0; key < 64; key += 16)
        wgmma<T>(O, P[key / 16], mn_major(tiles.V, key, 0), true);
      wgmma_commit();
      wgmma_wait<1>(S);
      count += wrong(S, qk);
      wgmma_wait<0>(O);
      count += wrong(O, [](int row, int col) { return 1000 + pv(row, col); });
    });
    return count;
  }
};

}  // namespace

TEST_CASE_TEMPLATE("wgmma: both products of attention, of every shape", Shape, Shape<half, 64>,
                   Shape<half, 96>, Shape<half, 128>, Shape<half, 160>, Shape<half, 176>,
                   Shape<half, 192>, Shape<half, 256>, Shape<bf16, 64>, Shape<bf16, 176>) {
  const Setup setup;
  CHECK(Shape::count_wrong() == 0);
}

namespace {

/// K^T dS^T, as step 66 has it: A runs down the columns of its tile, B along the rows.
template <class T, int N>
struct TransposedA {
  struct Tiles {
    TmaTile<64, 128, T> A;
    TmaTile<N, 64, T> B;
  };
  static int count_wrong() {
    int count = 0;
    run<Tiles>(dim3(kThreads), [&] {
      auto &tiles = shared_storage<Tiles>();
      fill(tiles.A, 64, 128, q);
      fill(tiles.B, N, 64, k);
      Accumulator<N> D[2];
      wgmma_fence();
      for (int half_of = 0; half_of < 2; half_of++)
        for (int term = 0; term < 64; term += 16)
          wgmma<T>(D[half_of], mn_major(tiles.A, term, 64 * half_of), k_major(tiles.B, 0, term),
                   term > 0);
      wgmma_commit();
      wgmma_wait<0>(D[0], D[1]);
      for (int half_of = 0; half_of < 2; half_of++)
        count += wrong(D[half_of], [&](int row, int col) {
          float sum = 0;
          for (int i = 0; i < 64; i++) sum += q(i, 64 * half_of + row) * k(col, i);
          return sum;
        });
    });
    return count;
  }
};

}  // namespace

TEST_CASE_TEMPLATE("wgmma: A may be MN-major", Product, TransposedA<half, 64>,
                   TransposedA<half, 80>, TransposedA<bf16, 128>) {
  const Setup setup;
  CHECK(Product::count_wrong() == 0);
}

TEST_CASE("wgmma: a warp's part of an MN-major A is 16 of its columns") {
  const Setup setup;
  using Tiles = TransposedA<half, 64>::Tiles;
  for (const bool own : {true, false})
    for (int seed = 1; seed <= kSeeds; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const std::string error = error_of<Tiles>(dim3(kThreads), [&] {
        auto &tiles = shared_storage<Tiles>();
        fill(tiles.A, 64, 128, q);
        fill(tiles.B, 64, 64, k);
        Accumulator<64> D;
        wgmma_fence();
        also_at = __LINE__, wgmma(D, mn_major(tiles.A, 0, 0), k_major(tiles.B, 0, 0), false);
        wgmma_commit();
        wgmma_wait<0>(D);
        if (is_thread(64)) at = __LINE__, tiles.A(3, own ? 32 : 48) = half{};
      });
      CAPTURE(error);
      const std::string product = "wgmma at " + file_and(also_at);
      CHECK(
          (own ? error == ""
               : error == error_in_thread(at, 64,
                                          "store races in shared memory with the " + product +
                                              " by warp 3: no barrier between them") ||
                     error.find("store to shared memory that a " + product) != std::string::npos));
    }
}

// --- e4m3 ------------------------------------------------------------------------------------------

namespace {

template <int N>
struct Operands8 {
  TmaTile<64, 128, e4m3> Q;
  TmaTile<N, 128, e4m3> K, V_transposed;
};

std::uint32_t four(const std::function<float(int)> &number) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 4; i++) bits |= std::uint32_t{float_to_e4m3(number(i)).bits} << 8 * i;
  return bits;
}

/// As fill, four elements at once: single bytes are not stored.
template <class Tile>
void fill_by_four(Tile &tile, int rows, const std::function<float(int, int)> &number) {
  for (int i = thread_id(); i < rows * 32; i += static_cast<int>(blockDim.x)) {
    const int row = i / 32, col = i % 32 * 4;
    store(tile(row, col),
          std::bit_cast<Vector<e4m3, 4>>(four([&](int k) { return number(row, col + k); })));
  }
  fence_proxy_async();
  __syncthreads();
}

/// The thread's registers of columns `col` to `col` + 31 of P, a0 ... a15 as the PTX ISA numbers them.
FragmentA fragment_of_p8(int col) {
  const int group = lane_id() / 4, in_group = lane_id() % 4;
  FragmentA a;
  for (int i = 0; i < 16; i += 4) {
    const int row = i < 4 || (8 <= i && i < 12) ? group : group + 8;
    const int first = i < 8 ? in_group * 4 : in_group * 4 + 16;
    a[i / 4] = four([&](int k) { return p(warp_id() % 4 * 16 + row, col + first + k); });
  }
  return a;
}

template <int N>
struct Shape8 {
  static int count_wrong() {
    int count = 0;
    run<Operands8<N>>(dim3(kThreads), [&] {
      auto &tiles = shared_storage<Operands8<N>>();
      fill_by_four(tiles.Q, 64, q);
      fill_by_four(tiles.K, N, k);
      fill_by_four(tiles.V_transposed, N, [](int row, int col) { return v(col, row); });
      Accumulator<N> S, O;
      FragmentA P[4];
      for (int col = 0; col < 128; col += 32) P[col / 32] = fragment_of_p8(col);
      wgmma_fence();
      for (int col = 0; col < 128; col += 32)
        wgmma<e4m3>(S, k_major(tiles.Q, 0, col), k_major(tiles.K, 0, col), col > 0);
      wgmma_commit();
      for (int i = 0; i < O.size; i++) O(i) = 1000;
      wgmma_fence();
      for (int key = 0; key < 128; key += 32)
        wgmma<e4m3>(O, P[key / 32], k_major(tiles.V_transposed, 0, key), true);
      wgmma_commit();
      wgmma_wait<0>(S, O);
      // Whole numbers of up to 13 bits: their sums are exact.
      count += wrong(S, [](int row, int col) {
        float sum = 0;
        for (int i = 0; i < 128; i++) sum += q(row, i) * k(col, i);
        return sum;
      });
      count += wrong(O, [](int row, int col) {
        float sum = 1000;
        for (int i = 0; i < 128; i++) sum += p(row, i) * v(i, col);
        return sum;
      });
    });
    return count;
  }
};

/// One sum of 32 products and what was there, the slow way.
float sum_as_the_hardware(const float *a, const float *b, float d) {
  const auto exponent = [](float x, int smallest) {
    return x == 0 ? -126 : std::max(std::ilogb(x), smallest);
  };
  int largest = exponent(d, -126);
  for (int i = 0; i < 32; i++)
    if (a[i] != 0 && b[i] != 0)
      largest = std::max(largest, exponent(a[i], -6) + exponent(b[i], -6));
  double sum = std::trunc(std::ldexp(double{d}, 13 - largest));
  for (int i = 0; i < 32; i++) sum += std::trunc(std::ldexp(double{a[i]} * b[i], 13 - largest));
  int bits;
  const double mantissa = std::frexp(std::ldexp(sum, largest - 13), &bits);
  return static_cast<float>(std::ldexp(std::trunc(std::ldexp(mantissa, 14)), bits - 14));
}

}  // namespace

TEST_CASE_TEMPLATE("wgmma: e4m3: both products of attention, of every shape", Shape, Shape8<64>,
                   Shape8<96>, Shape8<128>, Shape8<192>, Shape8<224>, Shape8<256>) {
  const Setup setup;
  CHECK(Shape::count_wrong() == 0);
}

TEST_CASE("wgmma: e4m3: sums keep 13 bits, the rest is cut off") {
  const auto sum = [](const std::vector<std::pair<float, float>> &factors, float before) {
    float A[32 * 16] = {}, B[32 * 8] = {}, D[16 * 8] = {};
    for (std::size_t i = 0; i < factors.size(); i++) {
      A[i * 16 + 5] = factors[i].first;
      B[i * 8 + 3] = factors[i].second;
    }
    D[5 * 8 + 3] = before;
    emulator::multiply_e4m3(A, B, 8, D);
    return D[5 * 8 + 3];
  };
  CHECK(sum({{3, 5}, {-2, 0.5f}}, 1) == 15);
  CHECK(sum({{128, 64}, {1, 1}}, 0) == 8193);              // 2^13 and 1
  CHECK(sum({{128, 128}, {1, 1}}, 0) == 16384);            // 1 is below 2^14 by more than 13 bits,
  CHECK(sum({{128, 128}, {1, 1}, {1, 1}}, 0) == 16384);    // also twice,
  CHECK(sum({{128, 128}, {-1, 1}}, 0) == 16384);           // and cut off toward zero
  CHECK(sum({{128, 64}, {128, 64}, {1, 1}}, 0) == 16384);  // of the sum, 16385, the last bit
  CHECK(sum({{128, 128}}, 1.5f) == 16384);                 // what was there is cut off, too
  CHECK(sum({{1, 1}}, 16384) == 16384);
  // 1.5 x 1.5 has the exponent 0 of its factors, so 2^-13 stays.
  CHECK(sum({{1.5f, 1.5f}, {-1, 1}, {0x1p-9f, 0x1p-4f}}, 0) == 1.25f + 0x1p-13f);
  CHECK(std::isnan(sum({{NAN, 1}}, 0)));
  CHECK(sum({{0, 0}}, 0x1p-80f) == 0x1p-80f);
}

TEST_CASE("wgmma: e4m3: sums as the slow way has them") {
  std::uint64_t state = 1;
  float A[32 * 16], B[32 * 16], D[16 * 16];
  for (int round = 0; round < 50; round++) {
    const auto draw = [&] {
      const auto bits = static_cast<std::uint8_t>(next_random(state));
      return (bits & 0x7f) == 0x7f ? 0 : e4m3_to_float(e4m3{bits});
    };
    for (float &x : A) x = draw();
    for (float &x : B) x = draw();
    for (float &x : D) x = draw() * (round % 2 ? 1000 : 0.001f);
    float expected[16 * 16];
    for (int row = 0; row < 16; row++)
      for (int col = 0; col < 16; col++) {
        float a[32], b[32];
        for (int i = 0; i < 32; i++) a[i] = A[i * 16 + row], b[i] = B[i * 16 + col];
        expected[row * 16 + col] = sum_as_the_hardware(a, b, D[row * 16 + col]);
      }
    emulator::multiply_e4m3(A, B, 16, D);
    CHECK(std::equal(D, D + 16 * 16, expected));
  }
}

namespace {

/// Runs a kernel for a warpgroup under several seeds; all must end well.
template <class Storage = Operands<>>
void check_legal(const Kernel &kernel, unsigned threads = kThreads) {
  for (int seed = 0; seed < kSeeds; seed++) {
    CAPTURE(seed);
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    CHECK(error_of<Storage>(dim3(threads), kernel) == "");
  }
}

/// The same of one that must end with an error at the line that it noted.
template <class Storage = Operands<>>
void check_error(const std::string &what, const Kernel &kernel, unsigned threads = kThreads) {
  for (int seed = 0; seed < kSeeds; seed++) {
    CAPTURE(seed);
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    CHECK(says(error_of<Storage>(dim3(threads), kernel), what));
  }
}

}  // namespace

TEST_CASE("wgmma: a product lands at any time until the wait") {
  const Setup setup;
  int early = 0, late = 0, missing = 0;
  check_legal([&] {
    auto &tiles = filled_operands<half, 64>();
    Accumulator<64> S;
    wgmma_fence();
    wgmma(S, k_major(tiles.Q, 0, 0), k_major(tiles.K, 0, 0), false);
    wgmma_commit();
    for (int i = 0; i < 4; i++) __syncwarp();
    const bool landed = !std::isnan(*S.data());  // around the check
    early += landed;
    late += !landed;
    wgmma_wait<0>(S);
    missing += std::isnan(*S.data());
  });
  CHECK(early > 0);
  CHECK(late > 0);
  CHECK(missing == 0);
}

TEST_CASE("wgmma: accumulators that nobody wrote are NaN") {
  const Setup setup;
  int numbers = 0;
  check_legal([&] {
    auto &tiles = filled_operands<half, 64>();
    Accumulator<64> S;
    wgmma_fence();
    wgmma(S, k_major(tiles.Q, 0, 0), k_major(tiles.K, 0, 0), true);
    wgmma_commit();
    wgmma_wait<0>(S);
    for (int i = 0; i < S.size; i++) numbers += !std::isnan(S(i));
  });
  CHECK(numbers == 0);
}

TEST_CASE("wgmma: two warpgroups have operands and groups of their own") {
  const Setup setup;
  int count = 0;
  check_legal(
      [&] {
        auto &tiles = filled_operands<half, 64>();
        if (warp_id() < 4) {
          Accumulator<64> S;
          wgmma_fence();
          for (int col = 0; col < 64; col += 16)
            wgmma(S, k_major(tiles.Q, 0, col), k_major(tiles.K, 0, col), col > 0);
          wgmma_commit();
          wgmma_wait<0>(S);
          count += wrong(S, qk);
        } else {
          Accumulator<128> O;
          FragmentA P[4];
          for (int key = 0; key < 64; key += 16) {
            P[key / 16] = fragment_of_p(key);
            wgmma_fence();
            wgmma(O, P[key / 16], mn_major(tiles.V, key, 0), key > 0);
            wgmma_commit();
          }
          wgmma_wait<0>(O);
          count += wrong(O, pv);
        }
      },
      2 * kThreads);
  CHECK(count == 0);
}

TEST_CASE("wgmma: counted once per warp, at its line") {
  const Setup setup;
  emulator::settings.profile = true;
  emulator::take_profile();
  run<Operands<>>(dim3(kThreads), [] {
    auto &tiles = filled_operands<half, 64>();
    Accumulator<64> S;
    wgmma_fence();
    for (int col = 0; col < 64; col += 16)
      at = __LINE__, wgmma(S, k_major(tiles.Q, 0, col), k_major(tiles.K, 0, col), col > 0);
    wgmma_commit();
    wgmma_wait<0>(S);
  });
  const emulator::Profile profile = emulator::take_profile();
  const emulator::Counts total = profile.total();
  CHECK(total[emulator::kWgmma] == 4 * 4);
  CHECK(total[emulator::kWgmmaSyncs] == 4 * 3);
  CHECK(total[emulator::kWgmmaWavefronts] == 4 * (64 + 64) * 32 / 128);
  CHECK(total[emulator::kSharedLoadRequests] == 0);  // the warps ask for none
  for (const auto &[line, counts] : profile.lines)
    if (counts[emulator::kWgmma]) CHECK(line.line == static_cast<unsigned>(at));
}

// --- accumulators and registers ----------------------------------------------------------------------

TEST_CASE("wgmma: accumulators are not touched before the wait for their group") {
  const Setup setup;
  enum Bug { kNone, kRead, kWritten, kNotCommitted, kYoungerGroup, kNamed, kUnnamed, kScope };
  const auto kernel = [](Bug bug) {
    return [=] {
      auto &tiles = filled_operands<half, 64>();
      Accumulator<64> S;
      {
        Accumulator<64> S2;
        wgmma_fence();
        also_at = __LINE__, wgmma(S, k_major(tiles.Q, 0, 0), k_major(tiles.K, 0, 0), false);
        if (bug != kNotCommitted) wgmma_commit();
        if (bug == kScope) at = __LINE__ + 1;
        wgmma(S2, k_major(tiles.Q, 0, 16), k_major(tiles.K, 0, 16), false);
        if (bug != kNotCommitted) wgmma_commit();
        if (bug == kRead) at = __LINE__, (void)S(3);
        if (bug == kWritten) at = __LINE__, S(3) = 0;
        if (bug == kNamed) at = __LINE__, wgmma_wait<2>(S);
        if (bug == kYoungerGroup) wgmma_wait<2>();
        if (bug == kScope) return;
        if (bug == kNotCommitted || bug == kUnnamed) wgmma_wait<1>();
        if (bug == kUnnamed) at = __LINE__, (void)S(0);
        if (bug != kNotCommitted && bug != kYoungerGroup) wgmma_wait<1>(S);
        if (bug == kYoungerGroup || bug == kNotCommitted) at = __LINE__, (void)S(0);
        (void)S(0);
        wgmma_wait<0>(S, S2);
        (void)S2(0);
      }
    };
  };
  check_legal(kernel(kNone));
  for (const Bug bug : {kRead, kWritten, kNotCommitted, kYoungerGroup}) {
    CAPTURE(bug);
    check_error("accumulators are touched that the wgmma at wgmma_test.cpp:", kernel(bug));
    const std::string error = error_of<Operands<>>(dim3(kThreads), kernel(bug));
    CHECK(says(error, "accumulators are touched that the wgmma at " + file_and(also_at) +
                          " may still be writing: no wgmma_wait for its group yet"));
  }
  check_error("accumulators are touched that no wgmma_wait has named since the wgmma at",
              kernel(kUnnamed));
  check_error(
      "wgmma_wait names accumulators that are still under way after a wait for all but 2 groups",
      kernel(kNamed));
  check_error(
      "the accumulators of this wgmma have gone out of scope, and no wgmma_wait for its group yet",
      kernel(kScope));
}

TEST_CASE("wgmma: a fence comes before the first, and after registers were touched") {
  const Setup setup;
  const auto kernel = [](bool first, bool after_read, bool after_write) {
    return [=] {
      auto &tiles = filled_operands<half, 64>();
      Accumulator<64> S;
      if (first) wgmma_fence();
      const auto product = [&] {
        at = __LINE__, wgmma(S, k_major(tiles.Q, 0, 0), k_major(tiles.K, 0, 0), false);
      };
      product();
      product();  // in the same accumulators: no fence between
      wgmma_commit();
      wgmma_wait<0>(S);
      also_at = __LINE__, (void)S(5);
      if (after_read) wgmma_fence();
      product();
      wgmma_commit();
      wgmma_wait<0>(S);
      also_at = __LINE__, S(5) = 1;
      if (after_write) wgmma_fence();
      product();
      wgmma_commit();
      wgmma_wait<0>(S);
    };
  };
  check_legal(kernel(true, true, true));
  check_error("wgmma: no wgmma_fence before the first of this warp", kernel(false, true, true));
  for (const bool read : {true, false}) {
    check_error("wgmma: its accumulators were touched at wgmma_test.cpp:",
                kernel(true, !read, read));
    const std::string error = error_of<Operands<>>(dim3(kThreads), kernel(true, !read, read));
    CHECK(says(error, "touched at " + file_and(also_at) + ", and no wgmma_fence since"));
  }
}

TEST_CASE("wgmma: registers of A stay as they are until the wait") {
  const Setup setup;
  const auto kernel = [](bool too_early) {
    return [=] {
      auto &tiles = filled_operands<half, 64>();
      Accumulator<64> O;
      FragmentA P = fragment_of_p(0);
      wgmma_fence();
      also_at = __LINE__, wgmma(O, P, mn_major(tiles.V, 0, 0), false);
      wgmma_commit();
      if (too_early && thread_id() == 37) P[2]++;
      at = __LINE__, wgmma_wait<0>(O);
      P[2]++;
    };
  };
  check_legal(kernel(false));
  check_error("reads were written, or are gone, before this wait for it", kernel(true));
  const std::string error = error_of<Operands<>>(dim3(kThreads), kernel(true));
  CHECK(says(error, "thread (37,0,0): the registers of A that the wgmma at " + file_and(also_at)));
}

TEST_CASE("wgmma: a fence comes after registers of A were written") {
  const Setup setup;
  const auto kernel = [](bool fenced) {
    return [=] {
      auto &tiles = filled_operands<half, 64>();
      Accumulator<64> O;
      FragmentA P[2];
      for (int tile = 0; tile < 2; tile++) {
        if (!fenced) wgmma_fence();
        for (int i = 0; i < 2; i++) P[i] = fragment_of_p(16 * (tile + i));
        if (fenced) wgmma_fence();
        for (int i = 0; i < 2; i++)
          at = __LINE__, wgmma(O, P[i], mn_major(tiles.V, 16 * i, 0), tile + i > 0);
        wgmma_commit();
        wgmma_wait<0>(O);
      }
    };
  };
  check_legal(kernel(true));
  check_error("wgmma: its registers of A were written since the last wgmma_fence", kernel(false));
}

TEST_CASE("wgmma: a thread has so many accumulators") {
  const Setup setup;
  check_error("accumulator 32, and a thread has 32", [] {
    Accumulator<64> S;
    at = __LINE__, S(32) = 0;
  });
}

// --- operands in shared memory -------------------------------------------------------------------------

TEST_CASE("wgmma: operands are not written before the wait") {
  const Setup setup;
  enum Bug { kNone, kInFlight, kNoBarrier };
  const auto kernel = [](Bug bug) {
    return [=] {
      auto &tiles = filled_operands<half, 64>();
      Accumulator<64> S;
      wgmma_fence();
      also_at = __LINE__, wgmma(S, k_major(tiles.Q, 0, 16), k_major(tiles.K, 0, 16), false);
      wgmma_commit();
      if (thread_id() == 7) {
        tiles.K(5, 15) = half{};  // not among the operands
        if (bug == kInFlight) at = __LINE__, tiles.K(5, 16) = half{};
      }
      wgmma_wait<0>(S);
      if (bug != kNoBarrier) __syncthreads();
      if (thread_id() == 7) at = __LINE__, tiles.K(5, 16) = half{};
    };
  };
  check_legal(kernel(kNone));
  check_error("store to shared memory that a wgmma at ", kernel(kInFlight));
  for (int seed = 0; seed < kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const std::string error = error_of<Operands<>>(dim3(kThreads), kernel(kNoBarrier));
    // Other warps read it, or have: neither is known.
    const bool reading = error.find("that a wgmma at " + file_and(also_at)) != std::string::npos;
    const bool race = error.find("races in shared memory with the wgmma at " + file_and(also_at)) !=
                      std::string::npos;
    CAPTURE(error);
    CHECK((reading || race));
    CHECK(error.starts_with(file_and(at)));
  }
}

TEST_CASE("wgmma: what ordinary stores have written is made visible to the tensor cores") {
  const Setup setup;
  enum Bug { kNone, kNoFence, kNoBarrier, kFenceOfReader, kNothingWritten };
  const auto kernel = [](Bug bug) {
    return [=] {
      auto &tiles = shared_storage<Operands<>>();
      for (int i = thread_id(); i < 64 * 64; i += kThreads) {
        tiles.Q(i / 64, i % 64) = half{};
        if (bug != kNothingWritten) also_at = __LINE__, tiles.K(i / 64, i % 64) = half{};
      }
      if (bug != kNoFence && bug != kFenceOfReader) fence_proxy_async();
      if (bug != kNoBarrier) __syncthreads();
      if (bug == kFenceOfReader) fence_proxy_async();
      Accumulator<64> S;
      wgmma_fence();
      at = __LINE__, wgmma(S, k_major(tiles.Q, 0, 0), k_major(tiles.K, 0, 0), false);
      wgmma_commit();
      wgmma_wait<0>(S);
    };
  };
  check_legal(kernel(kNone));
  check_legal(kernel(kFenceOfReader));
  check_error("no fence_proxy_async between them", kernel(kNoFence));
  check_error("wgmma races in shared memory with the store at ", kernel(kNoBarrier));
  check_error("wgmma of shared memory that nobody wrote", kernel(kNothingWritten));
}

namespace {

struct Tiles {
  TmaTile<64, 128> x;
  TmaTile<64, 128> y;
};

}  // namespace

TEST_CASE("wgmma: an operand fits its tile") {
  const Setup setup;
  enum Bug { kNone, kRow, kRows, kSlab, kColumns, kPlace, kStride, kSwizzle, kColumn, kLeading };
  const auto kernel = [](Bug bug) {
    return [=] {
      auto &tiles = shared_storage<Tiles>();
      fill(tiles.x, 64, 128, q);
      fill(tiles.y, 64, 128, k);
      auto *x = &tiles.x;
      if (bug == kPlace)
        x = reinterpret_cast<TmaTile<64, 128> *>(reinterpret_cast<std::byte *>(x) + 512);
      Accumulator<64> S;
      Accumulator<128> O;
      FragmentA P{};
      wgmma_fence();
      KMajor B = k_major(*x, bug == kRow ? 4 : bug == kRows ? 8 : 0, bug == kSlab ? 56 : 48);
      if (bug == kStride) B.descriptor += std::uint64_t{1} << 32;
      if (bug == kSwizzle) B.descriptor ^= std::uint64_t{3} << 62;  // mode 2: 64 bytes
      at = __LINE__, wgmma(S, k_major(tiles.y, 0, 64), B, false);
      MNMajor V = mn_major(tiles.y, 48, bug == kColumns ? 64 : bug == kColumn ? 32 : 0);
      if (bug == kLeading) V.descriptor += 1 << 16;
      if (bug == kColumn)
        at = __LINE__, wgmma(S, P, V, true);
      else
        at = __LINE__, wgmma(O, P, V, false);
      wgmma_commit();
      wgmma_wait<0>(S, O);
    };
  };
  check_legal<Tiles>(kernel(kNone));
  const std::string elsewhere = "its descriptor leads to byte ";
  const struct {
    Bug bug;
    std::string what;
  } cases[] = {
      {kRow, "wgmma's B, from row 4 and column 48 of its tile on: 64 x 16 elements, and the tile "},
      {kRows, "64 x 16 elements, and the tile has 64 x 128"},
      {kSlab,
       elsewhere + "144 of shared memory for row 0, column 64, which the tile has at byte 8192"},
      {kColumns, "16 x 128 elements, and the tile has 64 x 128"},
      {kPlace, "the tile begins at byte 512 of shared memory, which is not a multiple of 1024"},
      {kStride, elsewhere},
      {kSwizzle, "its descriptor names swizzle mode 2, and the tile's is 1, of 128 bytes"},
      {kColumn, elsewhere},
      {kLeading, elsewhere},
  };
  for (const auto &[bug, what] : cases) {
    CAPTURE(bug);
    CHECK(says(error_of<Tiles>(dim3(kThreads), kernel(bug)), what));
  }
}

TEST_CASE("wgmma: an operand begins at an atom of 8 rows") {
  const Setup setup;
  const auto kernel = [](int row) {
    return [=] {
      auto &tiles = shared_storage<Operands<>>();
      fill(tiles.V, 64, 256, v);
      Accumulator<64> O;
      FragmentA P{};
      wgmma_fence();
      at = __LINE__, wgmma(O, P, mn_major(tiles.V, row, 0), false);
      wgmma_commit();
      wgmma_wait<0>(O);
    };
  };
  check_legal(kernel(8));
  check_error("the first row is not a multiple of 8, the rows of a swizzle atom", kernel(12));
}

TEST_CASE("wgmma: the operands' type is the instruction's") {
  const Setup setup;
  check_error("wgmma of bf16 with a tile of fp16", [] {
    auto &tiles = filled_operands<half, 64>();
    Accumulator<64> S;
    wgmma_fence();
    at = __LINE__, wgmma<bf16>(S, k_major(tiles.Q, 0, 0), k_major(tiles.K, 0, 0), false);
  });
  check_error("wgmma of fp16 with a tile of bf16", [] {
    auto &tiles = filled_operands<bf16, 64>();
    Accumulator<64> O;
    const FragmentA P = fragment_of_p(0);
    wgmma_fence();
    at = __LINE__, wgmma(O, P, mn_major(tiles.V, 0, 0), false);
  });
}

// --- a warpgroup -----------------------------------------------------------------------------------------

TEST_CASE("wgmma: the four warps of a warpgroup execute it together") {
  const Setup setup;
  enum Bug { kNone, kOwnRows, kOwnAdd, kOtherLine, kExited, kElsewhere, kNoFence };
  const auto kernel = [](Bug bug) {
    return [=] {
      auto &tiles = filled_operands<half, 64>();
      const bool third = warp_id() == 2;
      Accumulator<64> S;
      if (bug != kNoFence || !third) wgmma_fence();
      if (bug == kExited && third) return;
      if (bug == kElsewhere && third) also_at = __LINE__, __syncthreads();
      if (bug == kOtherLine && third)
        wgmma(S, k_major(tiles.Q, 0, 0), k_major(tiles.K, 0, 0), false);
      else
        at = __LINE__, wgmma(S, k_major(tiles.Q, bug == kOwnRows && third ? 8 : 0, 0),
                             k_major(tiles.K, 0, 0), bug == kOwnAdd && third);
      wgmma_commit();
      wgmma_wait<0>(S);
    };
  };
  check_legal(kernel(kNone));
  const std::string operands = "this lane's operands are not those of the warpgroup's first lane";
  check_error("thread (64,0,0): wgmma: " + operands, kernel(kOwnRows));
  check_error(operands, kernel(kOwnAdd));
  check_error("thread (64,0,0): wgmma: no wgmma_fence before the first of this warp",
              kernel(kNoFence));
  for (int seed = 0; seed < kSeeds; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    std::string error = error_of<Operands<>>(dim3(kThreads), kernel(kOtherLine));
    CHECK(
        error.find("warps of one warpgroup are at different instructions: wgmma here, wgmma at ") !=
        std::string::npos);
    error = error_of<Operands<>>(dim3(kThreads), kernel(kExited));
    CHECK(error.find("wgmma") != std::string::npos);
    CHECK(error.find("exited") != std::string::npos);
    error = error_of<Operands<>>(dim3(kThreads), kernel(kElsewhere));
    CHECK(says(error, "96 of 128 threads wait for ever in wgmma; 32 wait in __syncthreads at " +
                          file_and(also_at)));
  }
  CHECK(error_of<Operands<>>(dim3(64), kernel(kNone)).find("takes a warpgroup of 128 threads") !=
        std::string::npos);
}

// --- attention -------------------------------------------------------------------------------------------

namespace {

constexpr int kRows = 128, kKeys = 128, kDim = 64, kStages = 2;

struct Attention {
  TmaTile<kRows, kDim> Q;  // O takes its place
  TmaTile<kKeys, kDim> K[kStages], V[kStages];
  Mbarrier q_full, k_full[kStages], v_full[kStages], k_empty[kStages], v_empty[kStages];
};

/// What is planted in the kernel below, each one line of it.
enum Bug {
  kNone,
  kNoWaitForK,       // a product begins before its operand has landed
  kNoWaitForS,       // the softmax begins before the product has ended
  kReleaseTooEarly,  // V's stage is given back before the product that reads it has ended
  kNoFenceOfO,       // the engine stores O, and no proxy fence comes before
  kNoWgmmaFence,     // O was rescaled, and a product begins
};

/// One warpgroup copies, two compute 64 rows each: softmax(Q K^T) V.
void attention(const __grid_constant__ TensorMap map_Q, const __grid_constant__ TensorMap map_K,
               const __grid_constant__ TensorMap map_V, const __grid_constant__ TensorMap map_O,
               int keys, float scale, Bug bug) {
  auto &smem = shared_storage<Attention>();
  const int row = static_cast<int>(blockIdx.x) * kRows, head = static_cast<int>(blockIdx.y);
  if (thread_id() == 0) {
    mbarrier_init(smem.q_full, 1);
    for (int s = 0; s < kStages; s++) {
      mbarrier_init(smem.k_full[s], 1);
      mbarrier_init(smem.v_full[s], 1);
      mbarrier_init(smem.k_empty[s], 8);
      mbarrier_init(smem.v_empty[s], 8);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  if (warp_id() < 4) {
    setmaxnreg_dec<24>();
    if (thread_id() > 0) return;
    constexpr int kBytes = kKeys * kDim * sizeof(half);
    mbarrier_arrive_expect_tx(smem.q_full, kRows * kDim * sizeof(half));
    tma_load(smem.Q, map_Q, row, head, 0, smem.q_full);
    for (int i = 0; i < keys / kKeys; i++) {
      const int s = i % kStages, parity = i / kStages % 2;
      mbarrier_wait(smem.k_empty[s], parity ^ 1);
      mbarrier_arrive_expect_tx(smem.k_full[s], kBytes);
      tma_load(smem.K[s], map_K, i * kKeys, head, 0, smem.k_full[s]);
      mbarrier_wait(smem.v_empty[s], parity ^ 1);
      mbarrier_arrive_expect_tx(smem.v_full[s], kBytes);
      tma_load(smem.V[s], map_V, i * kKeys, head, 0, smem.v_full[s]);
    }
    return;
  }
  setmaxnreg_inc<240>();
  const int consumer = warp_id() / 4 - 1, first_row = consumer * 64;
  Accumulator<kDim> O;
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {};
  for (int i = 0; i < O.size; i++) O(i) = 0;
  mbarrier_wait(smem.q_full, 0);
  for (int i = 0; i < keys / kKeys; i++) {
    const int s = i % kStages, parity = i / kStages % 2;
    Accumulator<kKeys> S;
    FragmentA P[kKeys / 16];
    if (bug != kNoWaitForK) mbarrier_wait(smem.k_full[s], parity);
    wgmma_fence();
    for (int col = 0; col < kDim; col += 16)
      wgmma(S, k_major(smem.Q, first_row, col), k_major(smem.K[s], 0, col), col > 0);
    wgmma_commit();
    if (bug != kNoWaitForS) wgmma_wait<0>(S);
    if (lane_id() == 0) mbarrier_arrive(smem.k_empty[s]);
    for (int half_row = 0; half_row < 2; half_row++) {
      float largest = m[half_row];
      for (int j = 2 * half_row; j < S.size; j += 4)
        largest = max(largest, scale * max(S(j), S(j + 1)));
      for (int lanes = 1; lanes < 4; lanes *= 2)
        largest = max(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
      const float factor = ex2(m[half_row] - largest);
      m[half_row] = largest;
      l[half_row] *= factor;
      for (int j = 2 * half_row; j < O.size; j += 4) O(j) *= factor, O(j + 1) *= factor;
      for (int j = 2 * half_row; j < S.size; j += 4) {
        S(j) = ex2(scale * S(j) - largest);
        S(j + 1) = ex2(scale * S(j + 1) - largest);
        l[half_row] += S(j) + S(j + 1);
      }
    }
    for (int j = 0; j < S.size; j += 2) P[j / 8][j / 2 % 4] = cvt_rn_f16x2(S(j), S(j + 1));
    mbarrier_wait(smem.v_full[s], parity);
    if (bug != kNoWgmmaFence) wgmma_fence();
    for (int key = 0; key < kKeys; key += 16)
      wgmma(O, P[key / 16], mn_major(smem.V[s], key, 0), true);
    wgmma_commit();
    if (bug == kReleaseTooEarly && lane_id() == 0) mbarrier_arrive(smem.v_empty[s]);
    wgmma_wait<0>(O);
    if (bug != kReleaseTooEarly && lane_id() == 0) mbarrier_arrive(smem.v_empty[s]);
  }
  for (int half_row = 0; half_row < 2; half_row++)
    for (int lanes = 1; lanes < 4; lanes *= 2)
      l[half_row] += __shfl_xor_sync(kAllLanes, l[half_row], lanes);
  // Each consumer's rows of Q are its own, and it has read them; the engine stores all rows at once.
  for (int j = 0; j < O.size; j += 8) {
    Vector<std::uint32_t, 4> o;
    for (int r = 0; r < 4; r++) {
      const float sum = l[r % 2];
      o[r] = cvt_rn_f16x2(O(j + 2 * r) / sum, O(j + 2 * r + 1) / sum);
    }
    stmatrix_x4(smem.Q(first_row + warp_id() % 4 * 16 + lane_id() % 16, j * 2 + lane_id() / 16 * 8),
                o);
  }
  if (bug != kNoFenceOfO) fence_proxy_async();
  named_barrier_sync(1, 256);
  if (thread_id() == kThreads) {
    tma_store(map_O, row, head, 0, smem.Q);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}

/// Heads of 16-bit numbers in the emulator's global memory.
struct Heads {
  half *data;
  int heads, rows;

  Heads(int heads_, int rows_, int seed)
      : data(static_cast<half *>(emulator::allocate(sizeof(half) * heads_ * rows_ * kDim))),
        heads(heads_),
        rows(rows_) {
    for (int i = 0; i < heads * rows * kDim; i++)
      data[i] = float_to_half(whole_number(i / kDim, i % kDim, seed) / 8);
  }
  Heads(const Heads &) = delete;
  Heads &operator=(const Heads &) = delete;
  ~Heads() { emulator::release(data); }

  TensorMap map(int tile_rows) const {
    const Strides strides{heads * rows * kDim, rows * kDim, kDim};
    return tensor_map<half>(data, strides, 1, heads, rows, kDim, tile_rows);
  }
  float operator()(int head, int row, int col) const {
    return half_to_float(data[(head * rows + row) * kDim + col]);
  }
};

/// Runs the kernel, and returns the largest difference to a plain loop, or the error.
struct Outcome {
  std::string error;
  double worst = 0;
};
Outcome run_attention(int heads, int rows, Bug bug) {
  const Heads Q(heads, rows, 1), K(heads, rows, 2), V(heads, rows, 3), O(heads, rows, 4);
  constexpr float kScale = 0.125f * 1.44269504f;  // 1 / sqrt(d), and 2^x for e^x
  Outcome outcome;
  try {
    launch<Attention>(attention, dim3(rows / kRows, heads), dim3(3 * kThreads), Q.map(kRows),
                      K.map(kKeys), V.map(kKeys), O.map(kRows), rows, kScale, bug);
  } catch (const emulator::KernelError &error) {
    outcome.error = error.what();
    return outcome;
  }
  for (int head = 0; head < heads; head++)
    for (int i = 0; i < rows; i++) {
      std::vector<double> weights(rows);
      double sum = 0, out[kDim] = {};
      for (int key = 0; key < rows; key++) {
        double score = 0;
        for (int c = 0; c < kDim; c++) score += Q(head, i, c) * K(head, key, c);
        weights[key] = std::exp(score / 8);
        sum += weights[key];
        for (int c = 0; c < kDim; c++) out[c] += weights[key] * V(head, key, c);
      }
      for (int c = 0; c < kDim; c++)
        outcome.worst = std::max(outcome.worst, std::abs(out[c] / sum - O(head, i, c)));
    }
  return outcome;
}

}  // namespace

TEST_CASE("wgmma: a producer and two consumers compute attention") {
  const Setup setup;
  for (int seed = 0; seed < 5; seed++) {
    emulator::settings.seed = static_cast<std::uint64_t>(seed);
    const Outcome outcome = run_attention(1, 384, kNone);
    CHECK(outcome.error == "");
    // |V| is at most 11 / 8. P is rounded to fp16, by 2^-11 of itself at most: so is the sum with V. O, below
    // 2, is rounded by 2^-11, or half of it. The rest, fp32's and ex2's, is less than a sixteenth of that.
    CHECK(outcome.worst < 17. / 16 * (11. / 8 * 0x1p-11 + 0x1p-11));
  }
}

TEST_CASE("wgmma: what is planted in a kernel is found under every seed") {
  const Setup setup;
  const struct {
    Bug bug;
    std::string what, or_what = what;
  } cases[] = {
      // Nobody wrote K: a slow producer has yet to load it.
      {kNoWaitForK, "no mbarrier_wait for its phase yet", "shared memory that nobody wrote"},
      {kNoWaitForS, "accumulators are touched that the wgmma at "},
      {kReleaseTooEarly, " wgmma at wgmma_test.cpp:"},
      {kNoFenceOfO, "no fence_proxy_async between them"},
      {kNoWgmmaFence, "and no wgmma_fence since"},
  };
  for (const auto &[bug, what, or_what] : cases)
    for (int seed = 0; seed < 5; seed++) {
      emulator::settings.seed = static_cast<std::uint64_t>(seed);
      const Outcome outcome = run_attention(1, 384, bug);
      CAPTURE(bug);
      CAPTURE(outcome.error);
      const bool found = contains(outcome.error, what) || contains(outcome.error, or_what);
      CHECK(found);
    }
}
