// The product of two matrices of float32, for CPUs on which it takes MKL longer.
//
// Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication", section 4: a strip of a few columns of b stays
// in the first cache, a block of rows of a in the second, and a tile of the result in registers. Strips are copied, so that their
// numbers lie one after the other. The rows of a do, and are read where they are.
//
// A number of the result has the same bits whichever rows and columns there are beside it, and whatever the number of threads.

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t SHORT = 1 << 18;                     // with fewer products, to start a second thread takes longer than the work
constexpr int64_t ROWS = (REGISTERS - 4) / 2;          // of a tile of two vectors of columns
constexpr int64_t MOST_DEPTH = 384, MOST_COLUMNS = 2048, BLOCK = 96;  // rows of strips; columns that are copied; rows of a block
constexpr int64_t LINE = 64 / sizeof(float);           // numbers that memory gives at once
constexpr int64_t AHEAD = 24;                          // rows between what is copied and what is fetched
constexpr int64_t PAGE = 4096 / sizeof(float);         // rows that are pages apart push each other out of the first cache

// Distances in memory: from a row to the next in a; from a row, and from a number of a row, to the next in b. Rows of c are side
// by side. adds: to what c holds.
struct Call {
  int64_t rows, inner, columns, a_row, b_row, b_step, adds;
};

// A tile: HEIGHT rows and `columns` of VECTORS vectors. `next` is how far the row lies that is fetched, from each that is read.
template <int64_t HEIGHT, int64_t VECTORS>
void multiply_tile(int64_t depth, const float* a, int64_t a_row, int64_t next, const float* strip, int64_t columns, float* c,
                   int64_t c_row, bool adds) {
  for (int64_t r = 0; r < HEIGHT; ++r)
    for (int64_t j = 0; j < VECTORS * WIDTH; j += LINE) __builtin_prefetch(c + r * c_row + j, 1);
  Lanes sums[HEIGHT][VECTORS] = {};
  for (int64_t start = 0; start < depth; start += LINE) {
    for (int64_t r = 0; r < HEIGHT; ++r) __builtin_prefetch(a + r * a_row + next, 0, 2);
    const int64_t end = std::min(start + LINE, depth);
#pragma GCC unroll 4
    for (int64_t k = start; k < end; ++k, ++a, strip += VECTORS * WIDTH) {
      Lanes part[VECTORS];
      for (int64_t j = 0; j < VECTORS; ++j) part[j] = in_register(load(strip + j * WIDTH));
      for (int64_t r = 0; r < HEIGHT; ++r)
        for (int64_t j = 0; j < VECTORS; ++j) sums[r][j] = fused(a[r * a_row], part[j], sums[r][j]);
    }
  }
  for (int64_t r = 0; r < HEIGHT; ++r, c += c_row) {
    if (columns == VECTORS * WIDTH) {
      for (int64_t j = 0; j < columns; j += WIDTH) store(adds ? load(c + j) + sums[r][j / WIDTH] : sums[r][j / WIDTH], c + j);
    } else {
      float line[VECTORS * WIDTH];
      for (int64_t j = 0; j < VECTORS; ++j) store(sums[r][j], line + j * WIDTH);
      for (int64_t j = 0; j < columns; ++j) c[j] = adds ? c[j] + line[j] : line[j];
    }
  }
}

using Tile = decltype(&multiply_tile<1, 1>);

template <int64_t VECTORS, int64_t... HEIGHTS>
Tile tile_of(int64_t height, std::integer_sequence<int64_t, HEIGHTS...>) {
  static constexpr Tile all[] = {multiply_tile<HEIGHTS + 1, VECTORS>...};
  return all[height - 1];
}

Tile tile_of(int64_t height, bool thin) {
  return thin ? tile_of<1>(height, std::make_integer_sequence<int64_t, 2 * ROWS>{})
              : tile_of<2>(height, std::make_integer_sequence<int64_t, ROWS>{});
}

constexpr int64_t SIDE = 8;  // numbers of a vector of AVX, which all CPUs have that have wider ones

// to[j][k] = from[k][j].
inline void transpose_square(const float* from, int64_t from_row, float* to, int64_t to_row) {
  __m256 rows[SIDE], pairs[SIDE], fours[SIDE];
  for (int64_t k = 0; k < SIDE; ++k) rows[k] = _mm256_loadu_ps(from + k * from_row);
  for (int64_t k = 0; k < SIDE; k += 2) {
    pairs[k] = _mm256_unpacklo_ps(rows[k], rows[k + 1]);
    pairs[k + 1] = _mm256_unpackhi_ps(rows[k], rows[k + 1]);
  }
  for (int64_t k = 0; k < SIDE; k += 4)
    for (int64_t i = 0; i < 2; ++i) {
      fours[k + 2 * i] = _mm256_shuffle_ps(pairs[k + i], pairs[k + i + 2], 0x44);
      fours[k + 2 * i + 1] = _mm256_shuffle_ps(pairs[k + i], pairs[k + i + 2], 0xee);
    }
  for (int64_t j = 0; j < 4; ++j) {
    _mm256_storeu_ps(to + j * to_row, _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x20));
    _mm256_storeu_ps(to + (j + 4) * to_row, _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x31));
  }
}

// `columns` of b, row by row; `width` numbers of a row, the last ones zero.
void copy_strip(const Call& call, const float* b, int64_t depth, int64_t columns, int64_t width, float* strip) {
  if (columns < width) std::fill(strip, strip + depth * width, 0.0f);
  if (call.b_step == 1) {
    for (int64_t k = 0; k < depth; ++k, b += call.b_row, strip += width) {
      __builtin_prefetch(b + AHEAD * call.b_row);
      if (columns == 2 * WIDTH) {
        for (int64_t j = 0; j < 2 * WIDTH; j += WIDTH) store(load(b + j), strip + j);
      } else {
        std::copy(b, b + columns, strip);
      }
    }
    return;
  }
  const int64_t in_squares = call.b_row == 1 ? depth / SIDE * SIDE : 0, columns_in_squares = columns / SIDE * SIDE;
  for (int64_t k = 0; k < in_squares; k += SIDE)
    for (int64_t j = 0; j < columns_in_squares; j += SIDE)
      transpose_square(b + j * call.b_step + k, call.b_step, strip + k * width + j, width);
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t k = j < columns_in_squares ? in_squares : 0; k < depth; ++k)
      strip[k * width + j] = b[k * call.b_row + j * call.b_step];
}

// Memory of this thread, which is kept for the next call.
float* at_least(std::vector<float>& kept, int64_t size) {
  if (static_cast<int64_t>(kept.size()) < size + LINE) kept = std::vector<float>(size + LINE);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) / 64 * 64);
}

thread_local std::vector<float> of_strips;

int64_t parts(int64_t size, int64_t most) { return (size + most - 1) / most; }

// The tiles of a block of rows and some strips.
void multiply_block(const Call& call, const float* a, int64_t depth, int64_t rows, int64_t height, const float* strips,
                    int64_t width, int64_t columns, float* c, bool adds) {
  const int64_t next = call.a_row % PAGE ? height * call.a_row : 0;
  for (int64_t j = 0; j < columns; j += width)
    for (int64_t r = 0; r < rows; r += height) {
      const Tile multiply = tile_of(std::min(height, rows - r), width == WIDTH);
      const float *from = a + r * call.a_row, *strip = strips + j * depth;
      multiply(depth, from, call.a_row, next, strip, std::min(width, columns - j), c + r * call.columns + j, call.columns, adds);
    }
}

}  // namespace

// Of `a`, the numbers of whose rows are side by side in memory, and any `b`. No size is 0.
extern "C" void matmul_float32(const Call* given, const float* a, const float* b, float* c) {
  const Call& call = *given;
  const int64_t width = call.columns <= WIDTH ? WIDTH : 2 * WIDTH, most = width == WIDTH ? 2 * ROWS : ROWS;
  const int64_t threads = call.rows * call.inner * call.columns > SHORT ? omp_get_max_threads() : 1;
  const int64_t depths = parts(call.inner, parts(call.inner, MOST_DEPTH)), height = parts(call.rows, parts(call.rows, most));
  const int64_t rows = parts(parts(call.rows, parts(parts(call.rows, BLOCK), threads) * threads), height) * height;
  // strips are in groups only if there are more threads than blocks
  const int64_t blocks = parts(call.rows, rows), groups = parts(threads, blocks);
  for (int64_t first = 0; first < call.columns; first += MOST_COLUMNS) {
    const int64_t columns = std::min(MOST_COLUMNS, call.columns - first), num_strips = parts(columns, width);
    float* strips = at_least(of_strips, num_strips * width * depths);
    for (int64_t begin = 0; begin < call.inner; begin += depths) {
      const int64_t depth = std::min(depths, call.inner - begin);
#pragma omp parallel num_threads(threads) if (threads > 1)
      {
#pragma omp for schedule(static)
        for (int64_t s = 0; s < num_strips; ++s) {
          const float* from = b + begin * call.b_row + (first + s * width) * call.b_step;
          copy_strip(call, from, depth, std::min(width, columns - s * width), width, strips + s * width * depth);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < blocks * groups; ++t) {
          const int64_t r = t / groups * rows, group = t % groups;
          const int64_t j = num_strips * group / groups * width;
          const int64_t end = std::min(num_strips * (group + 1) / groups * width, columns);
          const float* from = a + r * call.a_row + begin;
          float* to = c + r * call.columns + first + j;
          const bool adds = call.adds || begin > 0;
          multiply_block(call, from, depth, std::min(rows, call.rows - r), height, strips + j * depth, width, end - j, to, adds);
        }
      }
    }
  }
}
