// SPDX-License-Identifier: MIT
// How a kernel reads and writes memory: m(row, col). On a GPU that is a plain reference and costs
// nothing. On the emulator it is a proxy that knows its place in the source, so that every access
// can be checked and counted.
#pragma once

#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__

/// A place in the source, which only the emulator uses.
struct Where {
  __host__ __device__ static constexpr Where current() { return {}; }
};

template <class T>
using Reference = T &;

template <class T>
__device__ __forceinline__ T &element(T *pointer, int /*left*/, Where) {
  return *pointer;
}

#else

#include <climits>
#include <string>

#include "common/emulator/emulator.h"

using Where = emulator::Where;

/// An element of memory that is not read or written yet.
template <class T>
class Reference {
  using Value = std::remove_const_t<T>;

 public:
  /// `left`: how many elements the row of its matrix has from this one on; 0 if there is no such
  /// element. Too few are an error only when they are read, written or copied, because some lanes'
  /// operands are not used.
  Reference(T *pointer, Where where, int left = INT_MAX)
      : pointer_(pointer), where_(where), left_(left) {}
  Reference(const Reference &) = default;

  operator Value() const {
    static_assert(!std::is_same_v<Value, e4m3>,
                  "load or store several: single bytes are not tracked");
    emulator::check_load(checked(), sizeof(T), where_);
    return *pointer_;
  }
  const Reference &operator=(Value value) const {
    static_assert(!std::is_same_v<Value, e4m3>,
                  "load or store several: single bytes are not tracked");
    emulator::check_store(checked(), sizeof(T), &value, where_);
    *pointer_ = value;
    return *this;
  }
  const Reference &operator=(const Reference &other) const { return *this = Value(other); }

  T *pointer() const { return pointer_; }
  /// Returns where `elements` elements begin; all of them must be in the row.
  T *checked(int elements = 1) const {
    if (elements > left_) fail(elements);
    return pointer_;
  }
  int left() const { return left_; }
  Where where() const { return where_; }

 private:
  [[noreturn, gnu::noinline]] void fail(int elements) const {
    if (left_ == 0)
      emulator::fail({emulator::Fault::kBounds, "row or column out of bounds"}, where_);
    emulator::fail(
        {emulator::Fault::kBounds, std::to_string(elements) + " elements, and the row has only " +
                                       std::to_string(left_) + " from there on"},
        where_);
  }

  T *pointer_;
  Where where_;
  int left_;
};

template <class T>
Reference<T> element(T *pointer, int left, Where where) {
  return {pointer, where, left};
}

#endif

/// A row-major matrix in global memory.
template <class T>
struct Matrix {
  T *data;
  int rows, cols;

  __device__ __forceinline__ Reference<T> operator()(int row, int col,
                                                     Where where = Where::current()) const {
    // 64 bits: a matrix of scores passes 2^31 elements at seqlen 46341.
    const bool inside = unsigned(row) < unsigned(rows) && unsigned(col) < unsigned(cols);
    return element(data + static_cast<std::int64_t>(row) * cols + col, inside ? cols - col : 0,
                   where);
  }
};

/// A matrix in global memory whose rows begin `stride` elements apart: a head of a tensor, in
/// whatever order the tensor has its batch, its heads and its rows.
template <class T>
struct StridedMatrix {
  T *data;
  int rows, cols;
  std::int64_t stride;

  __device__ __forceinline__ Reference<T> operator()(int row, int col,
                                                     Where where = Where::current()) const {
    const bool inside = unsigned(row) < unsigned(rows) && unsigned(col) < unsigned(cols);
    return element(data + row * stride + col, inside ? cols - col : 0, where);
  }
  /// Returns the part from a row and a column on. It has no rows if the row is after the last.
  __device__ __forceinline__ StridedMatrix from(int row, int col) const {
    return {data + row * stride + col, rows - row, cols - col, stride};
  }
};

/// The layout of a tile whose rows follow each other.
template <int Rows, int Cols>
struct RowMajor {
  static constexpr int size = Rows * Cols;
  __device__ static constexpr int offset(int row, int col) { return row * Cols + col; }
};

/// A matrix in shared memory. Layout says where in the tile's memory an element lies.
template <class T, int Rows, int Cols, class Layout = RowMajor<Rows, Cols>>
class Tile {
 public:
  __device__ __forceinline__ Reference<T> operator()(int row, int col,
                                                     Where where = Where::current()) {
    const int offset = Layout::offset(row, col);
    const bool inside = unsigned(row) < unsigned(Rows) && unsigned(col) < unsigned(Cols) &&
                        unsigned(offset) < unsigned(Layout::size);
    return element(data_ + offset, inside ? Cols - col : 0, where);
  }

 private:
  alignas(16) T data_[Layout::size];  // around the view, the emulator would see no access
};

/// N values that one instruction moves; N * sizeof(T) is 4, 8 or 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T value[N];

  __device__ __forceinline__ T &operator[](int i) { return value[i]; }
  __device__ __forceinline__ const T &operator[](int i) const { return value[i]; }
};

#ifdef __CUDACC__

// One access of a built-in type: nvcc would copy a struct of fp16 values one by one.
template <int Bytes>
using Raw = std::conditional_t<Bytes == 16, uint4, std::conditional_t<Bytes == 8, uint2, unsigned>>;

/// Loads N consecutive elements as one access; the first must be aligned to all of them.
template <int N, class T>
__device__ __forceinline__ Vector<std::remove_const_t<T>, N> load(T &first) {
  Vector<std::remove_const_t<T>, N> values;
  reinterpret_cast<Raw<N * sizeof(T)> &>(values) =
      reinterpret_cast<const Raw<N * sizeof(T)> &>(first);
  return values;
}

/// Stores N consecutive elements as one access; the first must be aligned to all of them.
template <int N, class T>
__device__ __forceinline__ void store(T &first, const Vector<T, N> &values) {
  // nvcc splits a uint2 into two stores where its halves are not neighbouring registers.
  using Word = std::conditional_t<N * sizeof(T) == 8, unsigned long long, Raw<N * sizeof(T)>>;
  reinterpret_cast<Word &>(first) = reinterpret_cast<const Word &>(values);
}

#else

template <int N, class T>
Vector<std::remove_const_t<T>, N> load(const Reference<T> &first) {
  emulator::check_load(first.checked(N), N * sizeof(T), first.where());
  Vector<std::remove_const_t<T>, N> values;
  for (int i = 0; i < N; i++) values[i] = first.pointer()[i];
  return values;
}

template <int N, class T>
void store(const Reference<T> &first, const Vector<T, N> &values) {
  emulator::check_store(first.checked(N), N * sizeof(T), &values, first.where());
  for (int i = 0; i < N; i++) first.pointer()[i] = values[i];
}

#endif
