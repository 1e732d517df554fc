// Paged attention of a few tokens on a CPU: every token reads the keys and values of its row where they lie, in their pages.
//
// Tokens and blocks of heads are divided among threads. What a token gets is computed by one thread, in an order that depends on its
// own row alone, so that it has the same bits whichever other tokens there are.

#include <tuple>

#include "vectors.h"

namespace {

constexpr int64_t MOST_VECTORS = 1024 / WIDTH, BLOCK = 8;

// Sizes and parameters of a call, which has a batch of groups of tokens, each with pools of its own. Numbers of elements: `q_batch` from
// group to group in q, `q_distance` from token to token there; `row_pages` from row to row in pages.
struct Call {
  int64_t batch, tokens, q_batch, q_distance, kv_heads, groups, size, places, rows, row_pages, page_size, window, shard;
  float scale, soft_cap;
};

// The places of positions [first, end) of a row in runs of neighbours: fn(the first place, how many). Pages of other ranks are not
// in the pools.
template <typename Fn>
void each_run(const Call& call, const int64_t* pages, int64_t first, int64_t end, Fn fn) {
  for (int64_t position = first; position < end;) {
    const int64_t page = pages[position / call.page_size], offset = position % call.page_size;
    const int64_t count = std::min(call.page_size - offset, end - position);
    if (page >= 0 && page < call.places / call.page_size) fn(page * call.page_size + offset, count);
    position += count;
  }
}

// Replaces scores by their exponentials behind the largest; returns the sum of these, and log(sum of exp(scores)).
inline std::pair<float, float> softmax(float* scores, int64_t count, const float* sink) {
  float top = sink ? *sink : NOTHING, total = 0;
  for (int64_t i = 0; i < count; ++i) top = larger(scores[i], top);
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = exp_of(scores[i] - top);
    total += scores[i];
  }
  if (sink) total += exp_of(*sink - top);
  return {total, top + std::log(total)};
}

// The results of `block` query heads of one head of keys, for a token that sees positions [first, end) of its row. VECTORS: of a
// head; 0: as many as the call says.
template <int64_t VECTORS, typename T>
void attend(const Call& call, int64_t block, const T* q, const T* keys, const T* values, const int64_t* pages, int64_t first,
            int64_t end, const float* sinks, T* out, float* lse) {
  constexpr int64_t most = VECTORS ? VECTORS : MOST_VECTORS;
  const int64_t vectors = VECTORS ? VECTORS : call.size / WIDTH, distance = call.kv_heads * call.size, length = end - first;
  std::vector<float> buffer(block * length);
  float* scores = buffer.data();
  Lanes queries[BLOCK][most], sums[BLOCK][most], x[most];
  for (int64_t head = 0; head < block; ++head)
    for (int64_t j = 0; j < vectors; ++j) {
      queries[head][j] = load(q + head * call.size + j * WIDTH) * call.scale;
      sums[head][j] = Lanes{};
    }
  int64_t seen = 0;
  each_run(call, pages, first, end, [&](int64_t place, int64_t count) {
    for (const T* key = keys + place * distance; count--; key += distance, ++seen) {
      for (int64_t j = 0; j < vectors; ++j) x[j] = load(key + j * WIDTH);
      for (int64_t head = 0; head < block; ++head) {
        Lanes dot = queries[head][0] * x[0];
        for (int64_t j = 1; j < vectors; ++j) dot += queries[head][j] * x[j];
        scores[head * length + seen] = sum_of(dot);
      }
    }
  });
  if (call.soft_cap > 0)
    for (int64_t i = 0; i < block * length; ++i) scores[i] = call.soft_cap * std::tanh(scores[i] / call.soft_cap);
  float totals[BLOCK];
  for (int64_t head = 0; head < block; ++head)
    std::tie(totals[head], lse[head]) = softmax(scores + head * length, seen, sinks ? sinks + head : nullptr);
  each_run(call, pages, first, end, [&](int64_t place, int64_t count) {
    for (const T* value = values + place * distance; count--; value += distance, ++scores) {
      for (int64_t j = 0; j < vectors; ++j) x[j] = load(value + j * WIDTH);
      for (int64_t head = 0; head < block; ++head)
        for (int64_t j = 0; j < vectors; ++j) sums[head][j] += scores[head * length] * x[j];
    }
  });
  for (int64_t head = 0; head < block; ++head) {
    const bool sees = seen || sinks;
    if (!sees) lse[head] = NOTHING;
    for (int64_t j = 0; j < vectors; ++j)
      store(sees ? sums[head][j] / totals[head] : Lanes{}, out + head * call.size + j * WIDTH);
  }
}

// The first token whose positions are in no page, or whose pages are not in the pools though all are; -1: there is none.
int64_t first_wrong(const Call& call, const int64_t* rows, const int64_t* positions, const int64_t* pages) {
  for (int64_t token = 0; token < call.tokens; ++token) {
    if (rows[token] < 0) continue;
    const int64_t last = positions[token] / call.page_size;
    if (rows[token] >= call.rows || positions[token] < 0 || last >= call.row_pages) return token;
    const int64_t first = call.window > 0 ? std::max<int64_t>(0, positions[token] + 1 - call.window) / call.page_size : 0;
    for (int64_t i = first; i <= last && !call.shard; ++i) {
      const int64_t page = pages[rows[token] * call.row_pages + i];
      if (page < 0 || page >= call.places / call.page_size) return token;
    }
  }
  return -1;
}

template <int64_t VECTORS, typename T>
void attend_all(const Call& call, const T* q, const T* keys, const T* values, const int64_t* rows, const int64_t* positions,
                const int64_t* pages, const float* sinks, T* out, float* lse, int64_t* wrong) {
  *wrong = first_wrong(call, rows, positions, pages);
  if (*wrong >= 0) return;
  const int64_t heads = call.kv_heads * call.groups, blocks = (call.groups + BLOCK - 1) / BLOCK;
#pragma omp parallel for collapse(2) schedule(guided)
  for (int64_t token = 0; token < call.tokens; ++token) {
    for (int64_t part = 0; part < call.kv_heads * blocks; ++part) {
      const int64_t kv_head = part / blocks, start = part % blocks * BLOCK;
      const int64_t head = kv_head * call.groups + start, result = token * heads + head;
      const int64_t end = rows[token] < 0 ? 0 : positions[token] + 1;
      const int64_t first = call.window > 0 ? std::max<int64_t>(0, end - call.window) : 0;
      attend<VECTORS>(call, std::min(BLOCK, call.groups - start), q + token * call.q_distance + head * call.size,
                      keys + kv_head * call.size, values + kv_head * call.size,
                      pages + std::max<int64_t>(0, rows[token]) * call.row_pages, first, end,
                      sinks && end ? sinks + head : nullptr, out + result * call.size, lse + result);
    }
  }
}

template <typename T>
void attend_in_vectors(const Call& call, const T* q, const T* keys, const T* values, const int64_t* rows, const int64_t* positions,
                       const int64_t* pages, const float* sinks, T* out, float* lse, int64_t* wrong) {
  const auto attend_group = call.size == 32    ? attend_all<32 / WIDTH, T>
                            : call.size == 64  ? attend_all<64 / WIDTH, T>
                            : call.size == 128 ? attend_all<128 / WIDTH, T>
                                               : attend_all<0, T>;
  const int64_t heads = call.tokens * call.kv_heads * call.groups, pool = call.places * call.kv_heads * call.size;
  for (int64_t b = 0; b < call.batch; ++b) {
    attend_group(call, q + b * call.q_batch, keys + b * pool, values + b * pool, rows + b * call.tokens, positions + b * call.tokens,
                 pages + b * call.rows * call.row_pages, sinks, out + b * heads * call.size, lse + b * heads, wrong);
    if (*wrong >= 0) {
      *wrong += b * call.tokens;
      return;
    }
  }
}

}  // namespace

extern "C" void paged_attention_float32(const Call* call, const float* q, const float* keys, const float* values,
                                        const int64_t* rows, const int64_t* positions, const int64_t* pages,
                                        const float* sinks, float* out, float* lse, int64_t* wrong) {
  attend_in_vectors(*call, q, keys, values, rows, positions, pages, sinks, out, lse, wrong);
}

extern "C" void paged_attention_bfloat16(const Call* call, const BFloat16* q, const BFloat16* keys, const BFloat16* values,
                                         const int64_t* rows, const int64_t* positions, const int64_t* pages,
                                         const float* sinks, BFloat16* out, float* lse,
                                         int64_t* wrong) {
  attend_in_vectors(*call, q, keys, values, rows, positions, pages, sinks, out, lse, wrong);
}
