// The product of a few rows with a matrix whose columns lie one after the other in memory.
//
// A row gets the same bits whichever others there are, and whatever the number of threads.

#pragma once

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t SHORT = 1 << 15;                          // with fewer products, to start a second thread takes longer than the work
constexpr int64_t COLUMNS = 4;                              // that share what is loaded of a row
constexpr int64_t AHEAD_IN_COLUMN = 256;                    // numbers of a column between the ones that are multiplied and fetched
constexpr int64_t LINE = 64 / sizeof(float);                // numbers that memory gives at once
constexpr int64_t PAIR = 2 * WIDTH;                         // numbers of bfloat16 of a load

// Distances in memory: from a row to the next in x and y; from a row, or from a column, to the next in w.
struct Call {
  int64_t rows, inner, columns, x_row, w_step, y_row;
};

// The even and the odd ones of a pair of vectors of bfloat16, the first and the second vector of float32.
inline Lanes load_half(const BFloat16* x, int half) {
  WideBits bits;
  std::memcpy(&bits, x, sizeof bits);
  if (half) {  // by two shifts: a mask would take a register that sums need
    bits >>= 16;
    asm("" : "+v"(bits));
  }
  return in_register(reinterpret_cast<Lanes>(bits << 16));
}

inline Lanes load_half(const float* x, int half) { return in_register(load(x + half * WIDTH)); }

// A pair of vectors, of which so many numbers are those of x.
template <typename T>
inline void with_zeros(const T* x, int64_t count, T* pair) {
  std::memset(pair, 0, PAIR * sizeof(T));
  std::memcpy(pair, x, count * sizeof(T));
}

template <int64_t ROWS, int64_t COLUMNS>
using Sums = Lanes[ROWS][COLUMNS];

// Adds the products of a pair of vectors of each row, float32 in the order of `load_half`, and of columns at `places`. What there
// are fewer of, rows or columns, is read once and stays in registers.
template <int64_t ROWS, int64_t COLUMNS, typename T>
inline void add_pair(const Call& call, const float* x, const T* w, const int64_t* places, Sums<ROWS, COLUMNS>& sums) {
  for (int half = 0; half < 2; ++half) {
    const float* from = x + half * WIDTH;
    if constexpr (ROWS < COLUMNS) {
      Lanes given[ROWS];
      for (int64_t r = 0; r < ROWS; ++r) given[r] = in_register(load(from + r * call.x_row));
      for (int64_t c = 0; c < COLUMNS; ++c) {
        const Lanes part = load_half(w + places[c], half);
        for (int64_t r = 0; r < ROWS; ++r) sums[r][c] = fused(given[r], part, sums[r][c]);
      }
    } else {
      Lanes parts[COLUMNS];
      for (int64_t c = 0; c < COLUMNS; ++c) parts[c] = load_half(w + places[c], half);
      for (int64_t r = 0; r < ROWS; ++r) {
        const Lanes given = in_register(load(from + r * call.x_row));
        for (int64_t c = 0; c < COLUMNS; ++c) sums[r][c] = fused(given, parts[c], sums[r][c]);
      }
    }
  }
}

// `count` columns, each `distance` behind the one before. Rows are float32 here, in pairs of vectors as `load_half` gives them.
// ENDS: that the last numbers of a column are no pair; with a branch in its place, fewer sums are kept in registers.
// FETCHES: that the columns come from memory, and not from the cache, where they are for further rows.
template <int64_t ROWS, int64_t COLUMNS, bool ENDS, bool FETCHES, typename T>
void multiply_columns(const Call& call, const float* x, const T* w, int64_t count, int64_t distance, T* y) {
  Sums<ROWS, COLUMNS> sums = {};
  int64_t places[COLUMNS];
  for (int64_t c = 0; c < COLUMNS; ++c) places[c] = (c < count ? c : 0) * distance * call.w_step;
  const int64_t in_pairs = call.inner / PAIR * PAIR;
  for (int64_t i = 0; i < in_pairs; i += PAIR) {
    if constexpr (FETCHES)
      for (int64_t c = 0; c < COLUMNS; ++c) __builtin_prefetch(w + places[c] + i + AHEAD_IN_COLUMN);
    add_pair<ROWS, COLUMNS>(call, x + i, w + i, places, sums);
  }
  if constexpr (ENDS) {
    T ends[COLUMNS * PAIR];
    int64_t end_places[COLUMNS];
    for (int64_t c = 0; c < COLUMNS; ++c) {
      end_places[c] = c * PAIR;
      with_zeros(w + places[c] + in_pairs, call.inner - in_pairs, ends + end_places[c]);
    }
    add_pair<ROWS, COLUMNS>(call, x + in_pairs, ends, end_places, sums);
  }
  static_assert(ROWS * COLUMNS % 4 == 0);
  for (int64_t n = 0; n < ROWS * COLUMNS; n += 4) {
    const auto sum = [&](int64_t i) { return sums[(n + i) / COLUMNS][(n + i) % COLUMNS]; };
    T four[4];
    store(sums_of(sum(0), sum(1), sum(2), sum(3)), four);
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t r = (n + i) / COLUMNS, c = (n + i) % COLUMNS;
      if (c < count) y[r * call.y_row + c * distance] = four[i];
    }
  }
}

// Rows that are not multiplied yet, and whether others were, so that the columns are in the cache.
template <typename T>
struct Left {
  int64_t rows;
  const float* x;
  T* y;
  bool is_cached = false;
};

// The same for ROWS rows at a time.
template <int64_t ROWS, int64_t COLUMNS, typename T>
void multiply_rows_of_columns(const Call& call, Left<T>& left, const T* w, int64_t count, int64_t distance) {
  const auto of = [&](auto ends, auto fetches) { return multiply_columns<ROWS, COLUMNS, ends, fetches, T>; };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  for (; left.rows >= ROWS; left = {left.rows - ROWS, left.x + ROWS * call.x_row, left.y + ROWS * call.y_row, true}) {
    const bool ends = call.inner % PAIR != 0;
    const auto multiply = left.is_cached ? (ends ? of(yes, no) : of(no, no)) : (ends ? of(yes, yes) : of(no, yes));
    for (int64_t c = 0; c < count; c += COLUMNS)
      multiply(call, left.x, w + c * distance * call.w_step, count - c, distance, left.y + c * distance);
  }
}

// All rows. Many are multiplied with two columns at a time, as each number of these is widened for more of them; few with more
// columns, as memory gives several streams of a thread faster than one.
template <int64_t ROWS, typename T>
void multiply_few_rows(const Call& call, Left<T>& left, const T* w, int64_t count, int64_t distance) {
  multiply_rows_of_columns<ROWS, COLUMNS>(call, left, w, count, distance);
  if constexpr (ROWS > 1) multiply_few_rows<ROWS - 1>(call, left, w, count, distance);
}

// A row in float32, in pairs of vectors as `load_half` gives them; the numbers that the last pair lacks are zero.
template <typename T>
void widen_row(const T* x, int64_t count, float* y) {
  const auto widen_pair = [&](const T* pair, int64_t i) {
    for (int half = 0; half < 2; ++half) store(load_half(pair, half), y + i + half * WIDTH);
  };
  const int64_t in_pairs = count / PAIR * PAIR;
  for (int64_t i = 0; i < in_pairs; i += PAIR) widen_pair(x + i, i);
  if (in_pairs < count) {
    T pair[PAIR];
    with_zeros(x + in_pairs, count - in_pairs, pair);
    widen_pair(pair, in_pairs);
  }
}

// The first place from here on at which memory gives a line: a vector that lies in two of them is loaded twice.
inline float* first_of_line(float* x) {
  constexpr uintptr_t bytes = LINE * sizeof(float);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(x) + bytes - 1) / bytes * bytes);
}

// The rows in float32, from the first place of a line on. `call` gets the distance between them.
template <typename T>
const float* widen_rows(Call& call, const T* x) {
  const int64_t x_row = (call.inner + PAIR - 1) / PAIR * PAIR;
  static thread_local std::vector<float> memory;  // kept, as new memory is slow when it is first used
  memory.resize(std::max<size_t>(memory.size(), call.rows * x_row + LINE));
  float* wide = first_of_line(memory.data());
  for (int64_t r = 0; r < call.rows; ++r) widen_row(x + r * call.x_row, call.inner, wide + r * x_row);
  call.x_row = x_row;
  return wide;
}

// Columns that are computed together are far apart, as memory gives several streams of a thread faster than one. Calls
// `compute(thread, column, count, distance)` for each such group of up to COLUMNS of them.
template <typename Compute>
void for_columns(const Call& call, int64_t threads, const Compute& compute) {
  const int64_t distance = (call.columns + threads * COLUMNS - 1) / (threads * COLUMNS);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < threads; ++t) {
    const int64_t start = t * COLUMNS * distance;
    for (int64_t c = start; c < std::min(start + distance, call.columns); ++c)
      compute(t, c, std::min(COLUMNS, (call.columns - c + distance - 1) / distance), distance);
  }
}

inline int64_t threads_for(const Call& call) {
  return call.rows * call.inner * call.columns > SHORT ? omp_get_max_threads() : 1;
}

template <typename T>
void multiply_all_columns(const Call& call, const T* x, const T* w, T* y) {
  constexpr int64_t most = (REGISTERS - 1) / (COLUMNS + 1);  // their sums and vectors of x, and one of w, stay in registers
  Call inside = call;
  const float* wide = widen_rows(inside, x);
  for_columns(inside, threads_for(call), [&](int64_t, int64_t c, int64_t count, int64_t distance) {
    Left<T> left = {inside.rows, wide, y + c};
    multiply_rows_of_columns<2 * most, COLUMNS / 2>(inside, left, w + c * inside.w_step, count, distance);
    multiply_few_rows<most>(inside, left, w + c * inside.w_step, count, distance);
  });
}

}  // namespace
