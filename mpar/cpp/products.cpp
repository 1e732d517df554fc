// The product of a few rows with a matrix of bfloat16 whose columns lie one after the other: the matrix is read once, as it comes.
//
// A row gets the same bits whichever others there are.

#include "vectors.h"

namespace {

constexpr int64_t COLUMNS = 4;  // that share what is loaded of a row

struct Call {
  int64_t rows, inner, columns, x_row, w_column, y_row;
};

// The even and the odd ones of 32 neighbouring numbers.
inline void load_pairs(const BFloat16* x, Lanes* even, Lanes* odd) {
  WideBits bits;
  std::memcpy(&bits, x, sizeof bits);
  *even = reinterpret_cast<Lanes>(bits << 16);
  *odd = reinterpret_cast<Lanes>(bits & 0xffff0000u);
}

// Rows are float32 here, in pairs of vectors as `load_pairs` makes them. `count`: how many of the columns there are.
template <int ROWS>
void multiply_columns(const Call& call, const float* x, const BFloat16* w, int64_t count, BFloat16* y) {
  Lanes sums[ROWS][COLUMNS] = {};
  for (int64_t i = 0; i < call.inner; i += 2 * WIDTH) {
    Lanes even[COLUMNS], odd[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) __builtin_prefetch(w + (c + COLUMNS) * call.w_column + i);  // what this thread reads next
    for (int c = 0; c < COLUMNS; ++c) load_pairs(w + (c < count ? c : 0) * call.w_column + i, even + c, odd + c);
    for (int r = 0; r < ROWS; ++r) {
      const Lanes left = load(x + r * call.inner + i), right = load(x + r * call.inner + i + WIDTH);
      for (int c = 0; c < COLUMNS; ++c) {
        sums[r][c] += left * even[c];
        sums[r][c] += right * odd[c];
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < count; ++c) {
      BFloat16 rounded[WIDTH];
      store(Lanes{} + sum_of(sums[r][c]), rounded);
      y[r * call.y_row + c] = rounded[0];
    }
}

}  // namespace

// `inner` is a multiple of 32; y has `columns` of them.
extern "C" void few_rows_bfloat16(const Call* given, const BFloat16* x, const BFloat16* w, BFloat16* y) {
  const Call& call = *given;
  std::vector<float> wide(call.rows * call.inner);
  for (int64_t r = 0; r < call.rows; ++r)
    for (int64_t i = 0; i < call.inner; i += 2 * WIDTH) {
      Lanes even, odd;
      load_pairs(x + r * call.x_row + i, &even, &odd);
      store(even, wide.data() + r * call.inner + i);
      store(odd, wide.data() + r * call.inner + i + WIDTH);
    }
#pragma omp parallel for schedule(static)
  for (int64_t c = 0; c < call.columns; c += COLUMNS) {
    const int64_t count = std::min(COLUMNS, call.columns - c);
    int64_t r = 0;
    for (; r + 4 <= call.rows; r += 4)
      multiply_columns<4>(call, wide.data() + r * call.inner, w + c * call.w_column, count, y + r * call.y_row + c);
    for (; r < call.rows; ++r)
      multiply_columns<1>(call, wide.data() + r * call.inner, w + c * call.w_column, count, y + r * call.y_row + c);
  }
}
