// The product of a few rows with a matrix that is read once, as it comes: row by row or column by column.
//
// A row gets the same bits whichever others there are, and whatever the number of threads.

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t SHORT = 1 << 15;                          // with fewer products, to start a second thread takes longer than the work
constexpr int64_t CHUNK = 4;                                // vectors of a row that one thread computes
constexpr int64_t TALL = (REGISTERS - 4) / 2;               // rows whose sums with 2 vectors stay in registers
constexpr int64_t COLUMNS = 4;                              // that share what is loaded of a row
constexpr int64_t AHEAD = 8;                                // rows between the one that is multiplied and the one that is fetched
constexpr int64_t AHEAD_IN_COLUMN = 256;                    // the same in numbers of a column and the next, which lie one after the other
constexpr int64_t LINE = 64 / sizeof(float);                // numbers that memory gives at once
constexpr int64_t SUMS = REGISTERS / 2, PAIR = 2 * WIDTH;   // vectors that stay in registers; numbers of bfloat16 of a load

// Distances in memory: from a row to the next in x and y; from a row, or from a column, to the next in w.
struct Call {
  int64_t rows, inner, columns, x_row, w_step, y_row;
};

// VECTORS vectors of the results of ROWS rows.
template <int64_t VECTORS, int64_t ROWS>
inline void multiply_rows(const Call& call, const float* x, const float* w, float* y) {
  Lanes sums[ROWS][VECTORS] = {};
  for (int64_t i = 0; i < call.inner; ++i, w += call.w_step) {
    Lanes part[VECTORS];
    for (int64_t j = 0; j < VECTORS * WIDTH; j += LINE) __builtin_prefetch(w + AHEAD * call.w_step + j);
    for (int64_t j = 0; j < VECTORS; ++j) part[j] = in_register(load(w + j * WIDTH));
    for (int64_t r = 0; r < ROWS; ++r)
      for (int64_t j = 0; j < VECTORS; ++j) sums[r][j] = fused(x[r * call.x_row + i], part[j], sums[r][j]);
  }
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t j = 0; j < VECTORS; ++j) store(sums[r][j], y + r * call.y_row + j * WIDTH);
}

template <int64_t VECTORS>
void multiply_all_rows(const Call& call, const float* x, const float* w, float* y) {
  constexpr int64_t pair = std::min<int64_t>(VECTORS, 2), together = std::min<int64_t>(VECTORS, SUMS / 4);
  const int64_t in_talls = call.rows / TALL * TALL, in_fours = in_talls + (call.rows - in_talls) / 4 * 4;
  for (int64_t j = 0; j < VECTORS * WIDTH; j += pair * WIDTH)  // a strip of w stays in the cache for the next rows
    for (int64_t r = 0; r < in_talls; r += TALL)
      multiply_rows<pair, TALL>(call, x + r * call.x_row, w + j, y + r * call.y_row + j);
  for (int64_t j = 0; j < VECTORS * WIDTH; j += together * WIDTH)
    for (int64_t r = in_talls; r < in_fours; r += 4)
      multiply_rows<together, 4>(call, x + r * call.x_row, w + j, y + r * call.y_row + j);
  int64_t r = in_fours;
  for (; r + 2 <= call.rows; r += 2) multiply_rows<VECTORS, 2>(call, x + r * call.x_row, w, y + r * call.y_row);
  if (r < call.rows) multiply_rows<VECTORS, 1>(call, x + r * call.x_row, w, y + r * call.y_row);
}

// The even and the odd ones of a pair of vectors.
inline void load_pair(const BFloat16* x, Lanes* even, Lanes* odd) {
  WideBits bits;
  std::memcpy(&bits, x, sizeof bits);
  *even = in_register(reinterpret_cast<Lanes>(bits << 16));
  *odd = in_register(reinterpret_cast<Lanes>(bits & 0xffff0000u));
}

inline void load_pair(const float* x, Lanes* first, Lanes* second) {
  *first = in_register(load(x));
  *second = in_register(load(x + WIDTH));
}

// `count` columns, each `distance` behind the one before. Rows are float32 here, in pairs of vectors as `load_pair` makes them.
template <int64_t ROWS, typename T>
void multiply_columns(const Call& call, const float* x, const T* w, int64_t count, int64_t distance, T* y) {
  const int64_t step = distance * call.w_step;
  Lanes sums[ROWS][COLUMNS] = {};
  for (int64_t i = 0; i < call.inner; i += PAIR) {
    for (int64_t c = 0; c < COLUMNS; ++c) __builtin_prefetch(w + c * step + i + AHEAD_IN_COLUMN);
    for (int64_t c = 0; c < COLUMNS; ++c) {
      Lanes even, odd;
      load_pair(w + (c < count ? c : 0) * step + i, &even, &odd);
      for (int64_t r = 0; r < ROWS; ++r) {
        sums[r][c] += load(x + r * call.inner + i) * even;
        sums[r][c] += load(x + r * call.inner + i + WIDTH) * odd;
      }
    }
  }
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t c = 0; c < count; ++c) {
      T rounded[WIDTH];
      store(Lanes{} + sum_of(sums[r][c]), rounded);
      y[r * call.y_row + c * distance] = rounded[0];
    }
}

template <typename T>
void multiply_all_columns(const Call& call, const T* x, const T* w, T* y) {
  constexpr int64_t together = SUMS / COLUMNS, most = together * 3 / 2;
  std::vector<float> wide(call.rows * call.inner);
  for (int64_t r = 0; r < call.rows; ++r)
    for (int64_t i = 0; i < call.inner; i += PAIR) {
      Lanes first, second;
      load_pair(x + r * call.x_row + i, &first, &second);
      store(first, wide.data() + r * call.inner + i);
      store(second, wide.data() + r * call.inner + i + WIDTH);
    }
  // Columns that are computed together are far apart, as memory gives several streams of a thread faster than one.
  const int64_t threads = call.rows * call.inner * call.columns > SHORT ? omp_get_max_threads() : 1;
  const int64_t distance = (call.columns + threads * COLUMNS - 1) / (threads * COLUMNS);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < threads; ++t) {
    const int64_t start = t * COLUMNS * distance;
    for (int64_t c = start; c < std::min(start + distance, call.columns); ++c) {
      const int64_t count = std::min(COLUMNS, (call.columns - c + distance - 1) / distance);
      int64_t r = 0;
      for (; r + most <= call.rows; r += most)
        multiply_columns<most>(call, wide.data() + r * call.inner, w + c * call.w_step, count, distance, y + r * call.y_row + c);
      for (; r + together <= call.rows; r += together)
        multiply_columns<together>(call, wide.data() + r * call.inner, w + c * call.w_step, count, distance, y + r * call.y_row + c);
      for (; r < call.rows; ++r)
        multiply_columns<1>(call, wide.data() + r * call.inner, w + c * call.w_step, count, distance, y + r * call.y_row + c);
    }
  }
}

}  // namespace

// Of a matrix whose columns lie one after the other. `inner` is a multiple of the numbers of a pair.
extern "C" void by_columns_bfloat16(const Call* call, const BFloat16* x, const BFloat16* w, BFloat16* y) {
  multiply_all_columns(*call, x, w, y);
}

extern "C" void by_columns_float32(const Call* call, const float* x, const float* w, float* y) {
  multiply_all_columns(*call, x, w, y);
}

// Of a matrix whose rows lie one after the other. `columns` is a multiple of the width of a vector.
extern "C" void by_rows_float32(const Call* given, const float* x, const float* w, float* y) {
  const Call& call = *given;
#pragma omp parallel for schedule(static) if (call.rows * call.inner * call.columns > SHORT)
  for (int64_t c = 0; c < call.columns; c += CHUNK * WIDTH) {
    if (c + CHUNK * WIDTH <= call.columns) {
      multiply_all_rows<CHUNK>(call, x, w + c, y + c);
    } else {
      for (int64_t j = c; j < call.columns; j += WIDTH) multiply_all_rows<1>(call, x, w + j, y + j);
    }
  }
}
