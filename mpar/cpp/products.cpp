// The product of a few rows with a matrix that is read once, as it comes: row by row or column by column.
//
// A row gets the same bits whichever others there are, and whatever the number of threads.

#include "columns.h"

namespace {

constexpr int64_t CHUNK = 4;                   // vectors of a row that one thread computes
constexpr int64_t TALL = (REGISTERS - 4) / 2;  // rows whose sums with 2 vectors stay in registers
constexpr int64_t AHEAD = 8;                   // rows between the one that is multiplied and the one that is fetched
constexpr int64_t SUMS = REGISTERS / 2;        // vectors that stay in registers

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

}  // namespace

// Of a matrix whose columns lie one after the other.
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
