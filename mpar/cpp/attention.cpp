// Attention on a CPU, forward and backward: by tiles of queries and keys that stay in the caches (Dao et al. 2022,
// arXiv:2205.14135). Products of tiles are made of sums of a few rows by 2 vectors, which stay in registers. All is computed in
// float32; operands of bfloat16 are widened where tiles are copied, and results rounded once.
//
// Each sum is computed by one thread, in an order that depends on shapes alone.

#include "vectors.h"

namespace {

constexpr int64_t TILE = 64;             // queries, and keys, of a tile
constexpr int64_t ROWS = REGISTERS > 16 ? 8 : 6;  // whose sums, of 2 vectors each, stay in registers

// The distances in memory from one row of a batch, one head and one position to the next; features are neighbours.
struct Layout {
  int64_t batch, head, row;
};

// Query heads `groups * n` to `groups * (n + 1)` have the head n of keys. causal: query i sees keys 0 to i. bias_batch: from one row of
// the batch to the next in a bias (batch or 1, 1, queries, keys) that is added to the scores; the bias may be missing.
struct Call {
  int64_t batch, kv_heads, groups, queries, keys, size, causal, bias_batch, parts;
  Layout q, k, v, out, dout, dq, dk, dv;
  float scale;
};

// c[r] (+)= sum over i of a[r, i] b[i], for rows r of VECTORS vectors.
template <int64_t COUNT, int VECTORS, bool ADD>
inline void multiply_rows(int64_t inner, const float* a, int64_t a_row, int64_t a_inner, const float* b, int64_t b_row, float* c,
                          int64_t c_row) {
  Lanes sums[COUNT][VECTORS];
  for (int r = 0; r < COUNT; ++r)
    for (int j = 0; j < VECTORS; ++j) sums[r][j] = ADD ? load(c + r * c_row + j * WIDTH) : Lanes{};
  for (int64_t i = 0; i < inner; ++i, b += b_row) {
    Lanes x[VECTORS];
    for (int j = 0; j < VECTORS; ++j) x[j] = in_register(load(b + j * WIDTH));
    for (int r = 0; r < COUNT; ++r) {
      const float factor = a[r * a_row + i * a_inner];
      for (int j = 0; j < VECTORS; ++j) sums[r][j] += factor * x[j];
    }
  }
  for (int r = 0; r < COUNT; ++r)
    for (int j = 0; j < VECTORS; ++j) store(sums[r][j], c + r * c_row + j * WIDTH);
}

// Which part of a product a tile on the diagonal of causal attention needs: all of it; the result without what is above its diagonal;
// or all of a result whose `a` is zero above its diagonal, or below it. Little more than that part is computed.
enum class Part { ALL, LOWER_RESULT, LOWER_A, UPPER_A };

// The same for COUNT rows from the row r on, and columns from j on.
template <int64_t COUNT, int VECTORS, bool ADD>
inline void multiply_part(Part part, int64_t r, int64_t j, int64_t inner, const float* a, int64_t a_row, int64_t a_inner,
                          const float* b, int64_t b_row, float* c, int64_t c_row) {
  if (part == Part::LOWER_RESULT && r + COUNT <= j) return;
  const int64_t start = part == Part::UPPER_A ? std::min(r, inner) : 0;
  const int64_t end = part == Part::LOWER_A ? std::min(r + COUNT, inner) : inner;
  multiply_rows<COUNT, VECTORS, ADD>(end - start, a + r * a_row + start * a_inner, a_row, a_inner, b + start * b_row + j, b_row,
                                     c + r * c_row + j, c_row);
}

// The same for any number of rows and of columns; these are whole vectors.
template <int VECTORS, bool ADD>
inline void multiply_columns(Part part, int64_t j, int64_t rows, int64_t inner, const float* a, int64_t a_row, int64_t a_inner,
                             const float* b, int64_t b_row, float* c, int64_t c_row) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS)
    multiply_part<ROWS, VECTORS, ADD>(part, r, j, inner, a, a_row, a_inner, b, b_row, c, c_row);
  for (; r + 4 <= rows; r += 4) multiply_part<4, VECTORS, ADD>(part, r, j, inner, a, a_row, a_inner, b, b_row, c, c_row);
  for (; r < rows; ++r) multiply_part<1, VECTORS, ADD>(part, r, j, inner, a, a_row, a_inner, b, b_row, c, c_row);
}

template <bool ADD>
void multiply(Part part, int64_t rows, int64_t columns, int64_t inner, const float* a, int64_t a_row, int64_t a_inner,
              const float* b, int64_t b_row, float* c, int64_t c_row) {
  int64_t j = 0;
  for (; j + 2 * WIDTH <= columns; j += 2 * WIDTH)
    multiply_columns<2, ADD>(part, j, rows, inner, a, a_row, a_inner, b, b_row, c, c_row);
  if (j < columns) multiply_columns<1, ADD>(part, j, rows, inner, a, a_row, a_inner, b, b_row, c, c_row);
}

// Rows beside each other, times `scale`: in a head of many they are so far apart that they push each other out of the cache.
template <typename T>
void pack(int64_t rows, int64_t size, const T* from, int64_t from_row, float scale, float* to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t h = 0; h < size; h += WIDTH) store(scale * load(from + i * from_row + h), to + i * size + h);
}

template <typename T>
void unpack(int64_t rows, int64_t size, const float* from, float scale, T* to, int64_t to_row) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t h = 0; h < size; h += WIDTH) store(scale * load(from + i * size + h), to + i * to_row + h);
}

// Columns are rows within each tile: to[tile][h][i] = from[tile][i][h], with zeros for the rows that are missing to a whole tile.
template <typename T>
void transpose(int64_t rows, int64_t size, const T* from, int64_t from_row, float* to) {
  for (int64_t first = 0; first < rows; first += TILE, to += TILE * size) {
    const int64_t count = std::min(TILE, rows - first);
    for (int64_t h = 0; h < size; ++h) {
      for (int64_t i = 0; i < count; ++i) to[h * TILE + i] = widened(from[(first + i) * from_row + h]);
      std::fill(to + h * TILE + count, to + (h + 1) * TILE, 0.0f);
    }
  }
}

int64_t in_tiles(int64_t count) { return (count + TILE - 1) / TILE * TILE; }

// How many numbers of a row of a tile are computed: those of the keys that a query sees, in vectors.
int64_t in_vectors(int64_t seen) { return (seen + WIDTH - 1) / WIDTH * WIDTH; }

// The tile of some queries and keys. `first_q`, `first_k`: the first ones. In the tile on the diagonal, query i sees keys 0 to i.
struct Tile {
  int64_t first_q, first_k, most;
  bool causal;

  Tile(const Call& call, int64_t first_q, int64_t first_k)
      : first_q(first_q), first_k(first_k), most(std::min(TILE, call.keys - first_k)), causal(call.causal && first_q == first_k) {}

  int64_t seen(int64_t i) const { return causal ? std::min(i + 1, most) : most; }
  Part part(Part of_diagonal) const { return causal ? of_diagonal : Part::ALL; }
};

// The scores of a tile of queries that are scaled, of each row in whole vectors, with -inf for what is hidden.
template <typename T>
void score(const Call& call, const Tile& tile, const float* q, const float* keys_by_size, const T* bias, int64_t rows,
           float* scores) {
  const auto [first_q, first_k, most, causal] = tile;
  const float* keys = keys_by_size + first_k * call.size;
  multiply<false>(tile.part(Part::LOWER_RESULT), rows, TILE, call.size, q, call.size, 1, keys, TILE, scores, TILE);
  for (int64_t i = 0; i < rows; ++i) {
    float* row = scores + i * TILE;
    const int64_t seen = tile.seen(i);
    if (bias) {
      const T* added = bias + (first_q + i) * call.keys + first_k;
#pragma omp simd
      for (int64_t j = 0; j < most; ++j) row[j] += widened(added[j]);
    }
    std::fill(row + seen, row + in_vectors(seen), NOTHING);
  }
}

inline float largest(const float* row, int64_t count) {
  Lanes top = load(row);
  for (int64_t j = WIDTH; j < count; j += WIDTH) top = larger(load(row + j), top);
  return largest_of(top);
}

// row[j] = exp(row[j] - top) for the first `count`, and the sum of these, where a `top` of -inf stands for a row that sees nothing so
// far; 0 for the others.
inline float exponentials(float* row, int64_t count, float top) {
  const float level = top == NOTHING ? 0.0f : top;
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) row[j] = exp_of(row[j] - level);
  std::fill(row + count, row + TILE, 0.0f);
  Lanes total = load(row);
  for (int64_t j = WIDTH; j < count; j += WIDTH) total += load(row + j);
  return sum_of(total);
}

// The results of a tile of queries of one head.
template <typename T>
void attend_tile(const Call& call, const T* q, const float* keys_by_size, const float* values, const T* bias, int64_t first_q,
                 T* out, float* lse) {
  const int64_t rows = std::min(TILE, call.queries - first_q), end = call.causal ? std::min(call.keys, first_q + rows) : call.keys;
  std::vector<float> buffer(TILE * (TILE + 2 * call.size));
  float *scores = buffer.data(), *sums = scores + TILE * TILE, *queries = sums + TILE * call.size;
  pack(rows, call.size, q + first_q * call.q.row, call.q.row, call.scale, queries);
  float tops[TILE], found[TILE], kept[TILE], totals[TILE];
  std::fill(tops, tops + TILE, NOTHING);
  std::fill(found, found + TILE, NOTHING);
  std::fill(totals, totals + TILE, 0.0f);
  for (int64_t first_k = 0; first_k < end; first_k += TILE) {
    const Tile tile(call, first_q, first_k);
    score(call, tile, queries, keys_by_size, bias, rows, scores);
    for (int64_t i = 0; i < rows; ++i) found[i] = larger(largest(scores + i * TILE, in_vectors(tile.seen(i))), tops[i]);
#pragma omp simd
    for (int64_t i = 0; i < TILE; ++i) {
      kept[i] = tops[i] == NOTHING ? 0.0f : exp_of(tops[i] - found[i]);
      tops[i] = found[i];
    }
    for (int64_t i = 0; i < rows; ++i)
      totals[i] = totals[i] * kept[i] + exponentials(scores + i * TILE, in_vectors(tile.seen(i)), tops[i]);
    for (int64_t i = 0; i < rows && first_k > 0; ++i)
      for (int64_t h = 0; h < call.size; h += WIDTH) store(kept[i] * load(sums + i * call.size + h), sums + i * call.size + h);
    const int64_t inner = std::min(TILE, end - first_k);
    const auto add = first_k > 0 ? multiply<true> : multiply<false>;
    const float* seen = values + first_k * call.size;
    add(tile.part(Part::LOWER_A), rows, call.size, inner, scores, TILE, 1, seen, call.size, sums, call.size);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const bool sees = totals[i] != 0;  // also where it is no number
    const float share = sees ? 1 / totals[i] : 0.0f;
    T* row = out + (first_q + i) * call.out.row;
#pragma omp simd
    for (int64_t h = 0; h < call.size; ++h) row[h] = rounded<T>(sees ? sums[i * call.size + h] * share : 0.0f);
    lse[first_q + i] = sees ? tops[i] + std::log(totals[i]) : NOTHING;
  }
}

// The gradients of one head of keys, and of the query heads that have it.
template <typename T>
void attend_head_backward(const Call& call, int64_t b, int64_t kv_head, const T* dout_all, const T* q_all, const T* k, const T* v,
                          const T* out_all, const float* lse_all, const T* bias, T* dq_all, T* dk, T* dv) {
  const int64_t size = call.size, all_keys = in_tiles(call.keys) * size;
  std::vector<float> buffer(5 * all_keys + 2 * TILE * TILE + 3 * TILE * size + TILE);
  float *keys_by_size = buffer.data(), *values_by_size = keys_by_size + all_keys, *keys = values_by_size + all_keys;
  float *dkeys = keys + all_keys, *dvalues = dkeys + all_keys, *shares = dvalues + all_keys, *slopes = shares + TILE * TILE;
  float *queries = slopes + TILE * TILE, *douts = queries + TILE * size, *dqueries = douts + TILE * size;
  float* means = dqueries + TILE * size;
  transpose(call.keys, size, k, call.k.row, keys_by_size);
  transpose(call.keys, size, v, call.v.row, values_by_size);
  pack(call.keys, size, k, call.k.row, 1, keys);
  for (int64_t group = 0; group < call.groups; ++group) {
    const int64_t head = kv_head * call.groups + group;
    const T* q = q_all + b * call.q.batch + head * call.q.head;
    const T* dout = dout_all + b * call.dout.batch + head * call.dout.head;
    const T* out = out_all + b * call.out.batch + head * call.out.head;
    const float* lse = lse_all + (b * call.kv_heads * call.groups + head) * call.queries;
    T* dq = dq_all + b * call.dq.batch + head * call.dq.head;
    for (int64_t first_q = 0; first_q < call.queries; first_q += TILE) {
      const int64_t rows = std::min(TILE, call.queries - first_q);
      const int64_t end = call.causal ? std::min(call.keys, first_q + rows) : call.keys;
      pack(rows, size, dout + first_q * call.dout.row, call.dout.row, 1, douts);
      pack(rows, size, q + first_q * call.q.row, call.q.row, call.scale, queries);
      for (int64_t i = 0; i < rows; ++i) {
        const float* x = douts + i * size;
        const T* y = out + (first_q + i) * call.out.row;
        Lanes sum = load(x) * load(y);
        for (int64_t h = WIDTH; h < size; h += WIDTH) sum += load(x + h) * load(y + h);
        means[i] = sum_of(sum);
      }
      for (int64_t first_k = 0; first_k < end; first_k += TILE) {
        const int64_t inner = std::min(TILE, end - first_k);
        const Tile tile(call, first_q, first_k);
        const float* values = values_by_size + first_k * size;
        score(call, tile, queries, keys_by_size, bias, rows, shares);
        multiply<false>(tile.part(Part::LOWER_RESULT), rows, TILE, size, douts, size, 1, values, TILE, slopes, TILE);
        for (int64_t i = 0; i < rows; ++i) {
          float *share = shares + i * TILE, *slope = slopes + i * TILE;
          const float level = lse[first_q + i] == NOTHING ? -NOTHING : lse[first_q + i], mean = means[i];
          const int64_t count = in_vectors(tile.seen(i));
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) {
            share[j] = exp_of(share[j] - level);
            slope[j] = share[j] * (slope[j] - mean);
          }
          std::fill(share + count, share + TILE, 0.0f);
          std::fill(slope + count, slope + TILE, 0.0f);
        }
        const Part upper = tile.part(Part::UPPER_A);
        multiply<true>(upper, inner, size, rows, shares, 1, TILE, douts, size, dvalues + first_k * size, size);
        multiply<true>(upper, inner, size, rows, slopes, 1, TILE, queries, size, dkeys + first_k * size, size);
        const auto add = first_k > 0 ? multiply<true> : multiply<false>;
        add(tile.part(Part::LOWER_A), rows, size, inner, slopes, TILE, 1, keys + first_k * size, size, dqueries, size);
      }
      unpack(rows, size, dqueries, call.scale, dq + first_q * call.dq.row, call.dq.row);
    }
  }
  unpack(call.keys, size, dkeys, 1, dk, call.dk.row);
  unpack(call.keys, size, dvalues, 1, dv, call.dv.row);
}

template <typename T>
void attend(const Call& call, const T* q, const T* k, const T* v, const T* bias, T* out, float* lse) {
  const int64_t tiles = in_tiles(call.queries) / TILE, items = call.groups * tiles, all_keys = in_tiles(call.keys) * call.size;
#pragma omp parallel for collapse(3) schedule(dynamic)
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
      for (int64_t part = 0; part < call.parts; ++part) {
        std::vector<float> buffer(2 * all_keys);
        float *keys_by_size = buffer.data(), *values = keys_by_size + all_keys;
        transpose(call.keys, call.size, k + b * call.k.batch + kv_head * call.k.head, call.k.row, keys_by_size);
        pack(call.keys, call.size, v + b * call.v.batch + kv_head * call.v.head, call.v.row, 1, values);
        for (int64_t item = part; item < items; item += call.parts) {
          const int64_t head = kv_head * call.groups + item % call.groups, first_q = item / call.groups * TILE;
          attend_tile(call, q + b * call.q.batch + head * call.q.head, keys_by_size, values,
                      bias ? bias + b * call.bias_batch : nullptr, first_q, out + b * call.out.batch + head * call.out.head,
                      lse + (b * call.kv_heads * call.groups + head) * call.queries);
        }
      }
    }
  }
}

template <typename T>
void attend_backward(const Call& call, const T* dout, const T* q, const T* k, const T* v, const T* out, const float* lse,
                     const T* bias, T* dq, T* dk, T* dv) {
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
      attend_head_backward(call, b, kv_head, dout, q, k + b * call.k.batch + kv_head * call.k.head,
                           v + b * call.v.batch + kv_head * call.v.head, out, lse, bias ? bias + b * call.bias_batch : nullptr, dq,
                           dk + b * call.dk.batch + kv_head * call.dk.head, dv + b * call.dv.batch + kv_head * call.dv.head);
    }
  }
}

}  // namespace

// Each for numbers of type T.
#define FOR_TYPE(T, NAME)                                                                                                        \
  extern "C" void attention_forward_##NAME(const Call* call, const T* q, const T* k, const T* v, const T* bias, T* out,          \
                                           float* lse) {                                                                         \
    attend(*call, q, k, v, bias, out, lse);                                                                                      \
  }                                                                                                                              \
  extern "C" void attention_backward_##NAME(const Call* call, const T* dout, const T* q, const T* k, const T* v, const T* out,   \
                                            const float* lse, const T* bias, T* dq, T* dk, T* dv) {                              \
    attend_backward(*call, dout, q, k, v, out, lse, bias, dq, dk, dv);                                                           \
  }

FOR_TYPE(float, float32)
FOR_TYPE(BFloat16, bfloat16)
