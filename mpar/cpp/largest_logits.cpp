// Logits of a few rows of which only the largest ones are asked for, by a screen: a copy of the output matrix in 8 bits.
//
// The screen gives each logit with a bound of its error (Cauchy-Schwarz). Those that can be the largest of their row are then
// computed from the matrix itself, and have the bits of `by_columns_*`; all others are -inf. Rows are rows of features here, and each
// column of the matrix is that of a token.

#include "columns.h"

namespace {

constexpr float LARGEST = 127.0f, CENTER = 128.0f;  // a code is CENTER and a number of this magnitude at most
constexpr float NUMBERS = 8191.0f;                  // the largest number that stands for one of a row
constexpr double ROUNDING = 0x1p-20;                // of what is computed in float32 here, above any that occurs
constexpr double EQUAL = 0x1p-7;                    // numbers within this share of one may be rounded to the same one of bfloat16
constexpr double TINY = 0x1p-120;                   // below it, rounding is no share of a number
constexpr int64_t PART = 32, FETCHED = 64;          // codes that are multiplied at once; those of a line of memory
constexpr int64_t SUMMED = 1024;                    // so many products of codes and numbers fit 32 bits
constexpr int64_t WORTH = 16;                       // if more than one logit of so many can be the largest, all are computed

// A column is `errors` away from `(codes - CENTER) * absmax / LARGEST`, at most; the rounding of its exact products is in that. If
// `errors` is infinite or no number, the logit is computed, and bounds no others.
struct Screen {
  const uint8_t* codes;
  const float *absmax, *errors;
};

// A row as `numbers * step`, the length of the row, and how far that is away from it. In each PART of the numbers, those at even
// places come first. `zero` is CENTER times their sum.
struct Row {
  const int16_t* numbers;
  double zero = 0, step = 1, norm = 0, error = 0;
};

// False if a number is not finite.
template <typename T>
bool to_whole_numbers(const T* x, int64_t inner, int16_t* numbers, Row& row) {
  float largest = 0;
  for (int64_t i = 0; i < inner; ++i) {
    const double value = widened(x[i]);
    largest = std::max(largest, std::fabs(widened(x[i])));
    row.norm += value * value;
  }
  if (!std::isfinite(row.norm)) return false;
  if (largest > 0) row.step = static_cast<double>(largest) / NUMBERS;
  for (int64_t i = 0; i < inner; ++i) {
    const double value = widened(x[i]), number = std::nearbyint(value / row.step), rest = value - number * row.step;
    numbers[i / PART * PART + i % 2 * (PART / 2) + i % PART / 2] = static_cast<int16_t>(number);
    row.zero += number * CENTER;
    row.error += rest * rest;
  }
  row.numbers = numbers;
  row.norm = std::sqrt(row.norm);
  row.error = std::sqrt(row.error) + ROUNDING * row.norm;
  return true;
}

inline __m256i load(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }

// The sums of four vectors.
inline __m128i sums_of(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

// Adds the products of PART numbers of each row and of the codes of each column.
template <int64_t ROWS>
inline void add_part(const Row* rows, int64_t i, const uint8_t* const (&codes)[COLUMNS], __m256i (&sums)[ROWS][COLUMNS]) {
  const __m256i low_bits = _mm256_set1_epi16(0xff);
  for (int64_t c = 0; c < COLUMNS; ++c) {
    const __m256i both = load(codes[c]), even = _mm256_and_si256(both, low_bits), odd = _mm256_srli_epi16(both, 8);
    for (int64_t r = 0; r < ROWS; ++r) {
      const int16_t* numbers = rows[r].numbers + i;
      sums[r][c] = _mm256_add_epi32(sums[r][c], _mm256_madd_epi16(even, load(numbers)));
      sums[r][c] = _mm256_add_epi32(sums[r][c], _mm256_madd_epi16(odd, load(numbers + PART / 2)));
    }
  }
}

// The products of ROWS rows of whole numbers with the codes of `count` columns, each `distance` behind the one before.
template <int64_t ROWS>
void multiply_codes(const Call& call, const Row* rows, const uint8_t* first, int64_t count, int64_t distance, double* products) {
  static_assert(COLUMNS == 4);
  const uint8_t* codes[COLUMNS];
  for (int64_t c = 0; c < COLUMNS; ++c) codes[c] = first + (c < count ? c : 0) * distance * call.inner;
  double totals[ROWS][COLUMNS] = {};
  for (int64_t start = 0; start < call.inner; start += SUMMED) {
    const int64_t end = std::min(start + SUMMED, call.inner), in_parts = end / PART * PART;
    __m256i sums[ROWS][COLUMNS];
    for (int64_t r = 0; r < ROWS; ++r)
      for (int64_t c = 0; c < COLUMNS; ++c) sums[r][c] = _mm256_setzero_si256();
    for (int64_t i = start; i < in_parts; i += PART) {
      if (i % FETCHED == 0)
        for (int64_t c = 0; c < COLUMNS; ++c) __builtin_prefetch(codes[c] + 8 * FETCHED);
      add_part<ROWS>(rows, i, codes, sums);
      for (int64_t c = 0; c < COLUMNS; ++c) codes[c] += PART;
    }
    if (in_parts < end) {
      uint8_t ends[COLUMNS][PART] = {};
      for (int64_t c = 0; c < COLUMNS; ++c) {
        std::memcpy(ends[c], codes[c], end - in_parts);
        codes[c] = ends[c];
      }
      add_part<ROWS>(rows, in_parts, codes, sums);
    }
    for (int64_t r = 0; r < ROWS; ++r) {
      int32_t four[COLUMNS];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(four), sums_of(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
      for (int64_t c = 0; c < COLUMNS; ++c) totals[r][c] += four[c];
    }
  }
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t c = 0; c < count; ++c) products[r * call.columns + c * distance] = totals[r][c];
}

// Upper bounds of the logits of a row in place of its products with codes; returns the largest lower bound.
double bound(const Row& row, Screen screen, int64_t columns, int64_t inner, double* products) {
  const double step = row.step / LARGEST;
  const double error = std::sqrt(static_cast<double>(inner)) * row.error;  // absmax times that is enough
  double low = NOTHING;
  for (int64_t v = 0; v < columns; ++v) {
    const double center = (products[v] - row.zero) * screen.absmax[v] * step;
    const double away = screen.errors[v] * row.norm + screen.absmax[v] * error;
    products[v] = center + away;
    low = center - away > low ? center - away : low;  // of what is no number, low
  }
  return low;
}

// Bounds of the logits of all rows: upper ones in `uppers`, and in `lows` for each row the number below which none is the largest, or
// is rounded to the same. Returns how many logits are not below it.
int64_t bound_all(const Call& call, const Row* rows, Screen screen, double* uppers, double* lows) {
  const int64_t threads = threads_for(call), part = (call.columns + threads - 1) / threads;
  for_columns(call, threads, [&](int64_t, int64_t v, int64_t count, int64_t distance) {
    const uint8_t* codes = screen.codes + v * call.inner;
    int64_t r = 0;
    for (; r + 2 <= call.rows; r += 2) multiply_codes<2>(call, rows + r, codes, count, distance, uppers + r * call.columns + v);
    if (r < call.rows) multiply_codes<1>(call, rows + r, codes, count, distance, uppers + r * call.columns + v);
  });
  int64_t found = 0;
  for (int64_t r = 0; r < call.rows; ++r) {
    double low = NOTHING, *upper = uppers + r * call.columns;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(max : low)
    for (int64_t v = 0; v < call.columns; v += part) {
      const Screen from = {nullptr, screen.absmax + v, screen.errors + v};
      low = std::max(low, bound(rows[r], from, std::min(part, call.columns - v), call.inner, upper + v));
    }
    lows[r] = low -= std::fabs(low) * EQUAL + TINY;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(+ : found)
    for (int64_t v = 0; v < call.columns; ++v) found += !(upper[v] < low);
  }
  return found;
}

// greedy: of which rows only the largest logits are asked for. If those are not all, if a row has numbers that are not finite, or if
// too many logits can be the largest, the product is that of all columns.
template <typename T>
void largest_logits(const Call& call, const T* x, const T* w, Screen screen, const bool* greedy, T* y) {
  static thread_local std::vector<int16_t> numbers;
  static thread_local std::vector<double> memory;  // kept, as new memory is slow when it is first used
  const int64_t padded = (call.inner + PART - 1) / PART * PART, size = call.rows * call.columns;
  numbers.assign(call.rows * padded, 0);
  std::vector<Row> rows(call.rows);
  bool all = true;
  for (int64_t r = 0; r < call.rows && all; ++r)
    all = greedy[r] && to_whole_numbers(x + r * call.x_row, call.inner, numbers.data() + r * padded, rows[r]);
  if (all) memory.resize(std::max<size_t>(memory.size(), size + call.rows));
  double *uppers = memory.data(), *lows = uppers + size;
  if (!all || bound_all(call, rows.data(), screen, uppers, lows) > call.rows + size / WORTH) {
    multiply_all_columns(call, x, w, y);
    return;
  }
  Call inside = call;
  const float* wide = widen_rows(inside, x);
  const auto multiply =
      call.inner % PAIR ? multiply_columns<1, COLUMNS, true, false, T> : multiply_columns<1, COLUMNS, false, false, T>;
  const int64_t threads = threads_for(call);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t v = 0; v < call.columns; ++v)
    for (int64_t r = 0; r < call.rows; ++r) {
      T* logit = y + r * call.y_row + v;
      *logit = rounded<T>(NOTHING);
      if (!(uppers[r * call.columns + v] < lows[r])) multiply(inside, wide + r * inside.x_row, w + v * call.w_step, 1, 0, logit);
    }
}

typedef int32_t Whole __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t Codes __attribute__((vector_size(WIDTH)));

// Calls `compute(numbers, place)` for all vectors of a column; the numbers that the last one lacks are zero.
template <typename T, typename Compute>
inline void for_vectors(const T* w, int64_t inner, const Compute& compute) {
  const int64_t in_vectors = inner / WIDTH * WIDTH;
  for (int64_t i = 0; i < in_vectors; i += WIDTH) compute(load(w + i), i);
  if (in_vectors == inner) return;
  T ends[WIDTH] = {};
  std::memcpy(ends, w + in_vectors, (inner - in_vectors) * sizeof(T));
  compute(load(ends), in_vectors);
}

// A column in 8 bits. `errors` is infinite if a number is not finite; it stays no number, which says that this is no token.
template <typename T>
void screen_column(const T* w, int64_t inner, uint8_t* codes, float* absmax, float* errors) {
  constexpr float to_nearest = 0x1.8p23f;  // what is added to it has no fraction
  Lanes largest = {}, squares = {}, norms = {};
  for_vectors(w, inner, [&](Lanes x, int64_t) { largest = larger(x < 0 ? -x : x, largest); });
  const float most = largest_of(largest), factor = most > 0 ? LARGEST / most : 0;
  for_vectors(w, inner, [&](Lanes x, int64_t i) {
    const Lanes scaled = x * factor, number = scaled + to_nearest - to_nearest, rest = scaled - number;
    const Codes found = __builtin_convertvector(__builtin_convertvector(number + CENTER, Whole), Codes);
    if (i + WIDTH <= inner) {
      std::memcpy(codes + i, &found, WIDTH);
    } else {
      std::memcpy(codes + i, &found, inner - i);
    }
    squares += rest * rest;
    norms += scaled * scaled;
  });
  const float rounding = (inner + 4) * 0x1p-23f * std::sqrt(sum_of(norms));  // here, and of exact products
  const float error = most / LARGEST * 1.001f * (std::sqrt(sum_of(squares)) + rounding);
  *absmax = std::isfinite(error) ? most : 0;
  if (!std::isnan(*errors)) *errors = std::isfinite(error) ? error : -NOTHING;
}

template <typename T>
void screen_columns(const Call& call, const T* w, uint8_t* codes, float* absmax, float* errors) {
#pragma omp parallel for schedule(static)
  for (int64_t v = 0; v < call.columns; ++v)
    screen_column(w + v * call.w_step, call.inner, codes + v * call.inner, absmax + v, errors + v);
}

}  // namespace

extern "C" void largest_logits_bfloat16(const Call* call, const BFloat16* x, const BFloat16* w, const uint8_t* codes,
                                        const float* absmax, const float* errors, const bool* greedy, BFloat16* y) {
  largest_logits(*call, x, w, {codes, absmax, errors}, greedy, y);
}

extern "C" void largest_logits_float32(const Call* call, const float* x, const float* w, const uint8_t* codes,
                                       const float* absmax, const float* errors, const bool* greedy, float* y) {
  largest_logits(*call, x, w, {codes, absmax, errors}, greedy, y);
}

extern "C" void screen_bfloat16(const Call* call, const BFloat16* w, uint8_t* codes, float* absmax, float* errors) {
  screen_columns(*call, w, codes, absmax, errors);
}

extern "C" void screen_float32(const Call* call, const float* w, uint8_t* codes, float* absmax, float* errors) {
  screen_columns(*call, w, codes, absmax, errors);
}
