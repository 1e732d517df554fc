// Norms, activations, rotations, softmax and largest numbers on a CPU: one pass over memory for each, where torch's ops take several.
//
// Rows are divided among threads. Each sum is computed in an order that depends on shapes alone. All is computed in float32;
// operands and results of bfloat16 are rounded where torch's ops round them, which store each step.

#include "vectors.h"

namespace {

constexpr int64_t SHORT = 1 << 14;  // with fewer elements, to start a second thread takes longer than the work
constexpr int64_t CHUNK = 1 << 12;  // elements of one turn of a thread
constexpr int64_t STRIP = 64;       // rows over which a sum of rows is made first

inline float sigmoid(float x) {
  const float e = exp_of(-std::fabs(x)), small = e / (1 + e);
  return x < 0 ? small : 1 - small;
}

template <typename T>
inline float sum_of_row(int64_t size, const float* x, const T* y) {
  Lanes sums{};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) sums += load(x + i) * load(y + i);
  float sum = sum_of(sums);
  for (; i < size; ++i) sum += x[i] * widened(y[i]);
  return sum;
}

template <typename T>
inline float sum_of_squares(int64_t size, const T* x) {
  Lanes sums{};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) sums += load(x + i) * load(x + i);
  float sum = sum_of(sums);
  for (; i < size; ++i) sum += widened(x[i]) * widened(x[i]);
  return sum;
}

template <typename T>
inline float scale_of(int64_t size, const T* x, float eps) {
  return 1 / std::sqrt(sum_of_squares(size, x) / static_cast<float>(size) + eps);
}

inline float largest_of_row(int64_t size, const float* x) {
  Lanes most = Lanes{} + NOTHING;
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) most = larger(load(x + i), most);
  float found = largest_of(most);
  for (; i < size; ++i) found = larger(x[i], found);
  return found;
}

// Of exp(x - most).
inline float sum_of_exponentials(int64_t size, const float* x, float most) {
  constexpr int64_t together = 8 * WIDTH;
  Lanes sums{};
  int64_t i = 0;
  for (; i + together <= size; i += together) {
    float part[together];
#pragma omp simd
    for (int64_t j = 0; j < together; ++j) part[j] = exp_of(x[i + j] - most);
    for (int64_t j = 0; j < together; j += WIDTH) sums += load(part + j);
  }
  float sum = sum_of(sums);
  for (; i < size; ++i) sum += exp_of(x[i] - most);
  return sum;
}

// Rows of `size` numbers; `gate_row` and `up_row`: from one to the next in gate and up.
struct Gated {
  int64_t rows, size, gate_row, up_row;
};

struct Norm {
  int64_t rows, size;
  float eps;
};

// A batch of positions of heads of `size` features, of which the first 2 * `half` are rotated. `x_*`: distances in x from one batch, position
// and head to the next; `table_batch`: from one batch to the next in cos and sin, which are (batch or 1, positions, half).
struct Rotation {
  int64_t batch, positions, heads, size, half, interleaved, x_batch, x_position, x_head, y_batch, y_position, y_head, table_batch;
};

// The log of the sum of exponentials of a row whose largest logit is infinite: NaN if one is NaN, otherwise that logit.
inline float lse_of_infinite(int64_t size, const float* x, float most) {
  for (int64_t i = 0; i < size; ++i)
    if (std::isnan(x[i])) return x[i];
  return most;
}

// The first place of the largest number. A NaN counts as larger than all others.
inline int64_t place_of_largest(int64_t size, const float* x) {
  constexpr int64_t block = 64 * WIDTH;
  float most = NOTHING;
  int64_t place = 0;  // of the block that it is in
  for (int64_t i = 0; i < size; i += block) {
    const int64_t count = std::min(block, size - i);
    int32_t has_nan = 0;
#pragma omp simd reduction(| : has_nan)
    for (int64_t j = i; j < i + count; ++j) has_nan |= x[j] != x[j];
    if (has_nan) return std::find_if(x + i, x + size, [](float y) { return std::isnan(y); }) - x;
    const float here = largest_of_row(count, x + i);
    if (here > most) most = here, place = i;
  }
  return std::find(x + place, x + size, most) - x;
}

// Rows of logits; `x_row` and `y_row`: from one to the next in x and y.
struct Logits {
  int64_t rows, columns, x_row, y_row;
};

template <typename T>
void multiply_by_silu(const Gated& all, const T* gate, const T* up, T* y) {
#pragma omp parallel for collapse(2) if (all.rows * all.size > SHORT)
  for (int64_t row = 0; row < all.rows; ++row) {
    for (int64_t start = 0; start < all.size; start += CHUNK) {
      const int64_t end = std::min(all.size, start + CHUNK);
      const T *gates = gate + row * all.gate_row, *ups = up + row * all.up_row;
      T* to = y + row * all.size;
#pragma omp simd
      for (int64_t i = start; i < end; ++i) {
        const float x = widened(gates[i]), silu = widened(rounded<T>(x * sigmoid(x)));
        to[i] = rounded<T>(silu * widened(ups[i]));
      }
    }
  }
}

template <typename T>
void multiply_by_silu_backward(const T* gate, const T* up, const T* dy, T* dgate, T* dup, int64_t count) {
#pragma omp parallel for if (count > SHORT)
  for (int64_t start = 0; start < count; start += CHUNK) {
    const int64_t end = std::min(count, start + CHUNK);
#pragma omp simd
    for (int64_t i = start; i < end; ++i) {
      const float x = widened(gate[i]), share = sigmoid(x), grad = widened(dy[i]);
      const float dsilu = widened(rounded<T>(grad * widened(up[i]))), silu = widened(rounded<T>(x * share));
      dup[i] = rounded<T>(grad * silu);
      dgate[i] = rounded<T>(dsilu * share * (1 + x * (1 - share)));
    }
  }
}

template <typename T>
void normalise(const Norm& norm, const T* x, const T* weight, T* y) {
#pragma omp parallel for if (norm.rows * norm.size > SHORT)
  for (int64_t row = 0; row < norm.rows; ++row) {
    const T* from = x + row * norm.size;
    const float scale = scale_of(norm.size, from, norm.eps);
    T* to = y + row * norm.size;
    if (weight) {
#pragma omp simd
      for (int64_t i = 0; i < norm.size; ++i)
        to[i] = rounded<T>(widened(rounded<T>(widened(from[i]) * scale)) * widened(weight[i]));
    } else {
#pragma omp simd
      for (int64_t i = 0; i < norm.size; ++i) to[i] = rounded<T>(widened(from[i]) * scale);
    }
  }
}

// With r the scale and w the weight: dx = r (w dy - x r^2 mean(w dy x)), dweight = sum over rows of r dy x. The weight and its gradient
// may be missing. `strips` has room for a row of each strip, and for one more.
template <typename T>
void normalise_backward(const Norm& norm, const T* x, const T* weight, const T* dy, T* dx, T* dweight, float* strips) {
  const int64_t size = norm.size, count = (norm.rows + STRIP - 1) / STRIP;
#pragma omp parallel for if (norm.rows * size > SHORT)
  for (int64_t strip = 0; strip < count; ++strip) {
    std::vector<float> scaled(size);
    float *sums = dweight ? strips + strip * size : nullptr, *grads = scaled.data();
    if (sums) std::fill(sums, sums + size, 0.0f);
    for (int64_t row = strip * STRIP; row < std::min(norm.rows, (strip + 1) * STRIP); ++row) {
      const T *from = x + row * size, *grad = dy + row * size;
      T* to = dx + row * size;
      const float scale = scale_of(size, from, norm.eps);
      if (weight) {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) grads[i] = widened(weight[i]) * widened(grad[i]);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) grads[i] = widened(grad[i]);
      }
      const float slope = sum_of_row(size, grads, from) * scale * scale / static_cast<float>(size);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) to[i] = rounded<T>((grads[i] - widened(from[i]) * slope) * scale);
      if (sums) {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) sums[i] += widened(grad[i]) * widened(from[i]) * scale;
      }
    }
  }
  if (!dweight) return;
  float* total = strips + count * size;
  std::fill(total, total + size, 0.0f);
  for (int64_t strip = 0; strip < count; ++strip)
    for (int64_t i = 0; i < size; ++i) total[i] += strips[strip * size + i];
  for (int64_t i = 0; i < size; ++i) dweight[i] = rounded<T>(total[i]);
}

// `y` may be `x`.
template <typename T>
void turn(const Rotation& all, const T* x, const float* cos, const float* sin, T* y) {
  const int64_t half = all.half, first = all.interleaved ? 1 : half, step = all.interleaved ? 2 : 1;
#pragma omp parallel for collapse(2) if (all.batch * all.positions * all.heads * all.size > SHORT)
  for (int64_t b = 0; b < all.batch; ++b) {
    for (int64_t position = 0; position < all.positions; ++position) {
      const float *c = cos + b * all.table_batch + position * half, *s = sin + b * all.table_batch + position * half;
      for (int64_t head = 0; head < all.heads; ++head) {
        const T* from = x + b * all.x_batch + position * all.x_position + head * all.x_head;
        T* to = y + b * all.y_batch + position * all.y_position + head * all.y_head;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          const float left = widened(from[i * step]), right = widened(from[i * step + first]);
          to[i * step] = rounded<T>(left * c[i] - right * s[i]);
          to[i * step + first] = rounded<T>(right * c[i] + left * s[i]);
        }
        if (to != from) std::copy(from + 2 * half, from + all.size, to + 2 * half);
      }
    }
  }
}

}  // namespace

// Of each row the log of the sum of exponentials, the logit of its label, and the log of the probability of the label.
extern "C" void softmax_statistics(const Logits* given, const float* x, const int64_t* labels, float* lse, float* logits, float* logp) {
  const Logits& all = *given;
#pragma omp parallel for if (all.rows * all.columns > SHORT)
  for (int64_t row = 0; row < all.rows; ++row) {
    const float* from = x + row * all.x_row;
    const float most = largest_of_row(all.columns, from), log_sum = std::log(sum_of_exponentials(all.columns, from, most));
    logits[row] = from[labels[row]];
    lse[row] = std::isinf(most) ? lse_of_infinite(all.columns, from, most) : most + log_sum;
    logp[row] = logits[row] - most - log_sum;  // a label that is almost certain loses no digits to the size of its logit
  }
}

// Of each row the largest number and its place.
extern "C" void largest(const Logits* given, const float* x, float* values, int64_t* places) {
  const Logits& all = *given;
#pragma omp parallel for if (all.rows > 1 && all.rows * all.columns > SHORT)
  for (int64_t row = 0; row < all.rows; ++row) {
    const float* from = x + row * all.x_row;
    places[row] = place_of_largest(all.columns, from);
    values[row] = from[places[row]];
  }
}

// y = scale exp(x - lse), with a scale and an lse of each row. `y` may be `x`.
extern "C" void softmax(const Logits* given, const float* x, const float* lse, const float* scale, float* y) {
  const Logits& all = *given;
#pragma omp parallel for if (all.rows * all.columns > SHORT)
  for (int64_t row = 0; row < all.rows; ++row) {
    const float *from = x + row * all.x_row, level = lse[row], factor = scale[row];
    float* to = y + row * all.y_row;
#pragma omp simd
    for (int64_t i = 0; i < all.columns; ++i) to[i] = factor * exp_of(from[i] - level);
  }
}

// Each for numbers of type T.
#define FOR_TYPE(T, NAME)                                                                                                        \
  extern "C" void swiglu_##NAME(const Gated* all, const T* gate, const T* up, T* y) { multiply_by_silu(*all, gate, up, y); }     \
  extern "C" void swiglu_backward_##NAME(const T* gate, const T* up, const T* dy, T* dgate, T* dup, int64_t count) {             \
    multiply_by_silu_backward(gate, up, dy, dgate, dup, count);                                                                  \
  }                                                                                                                              \
  extern "C" void rms_norm_##NAME(const Norm* norm, const T* x, const T* weight, T* y) { normalise(*norm, x, weight, y); }       \
  extern "C" void rms_norm_backward_##NAME(const Norm* norm, const T* x, const T* weight, const T* dy, T* dx, T* dweight,        \
                                           float* strips) {                                                                      \
    normalise_backward(*norm, x, weight, dy, dx, dweight, strips);                                                               \
  }                                                                                                                              \
  extern "C" void rotate_##NAME(const Rotation* all, const T* x, const float* cos, const float* sin, T* y) {                     \
    turn(*all, x, cos, sin, y);                                                                                                  \
  }

// The weight of a norm may be missing.
FOR_TYPE(float, float32)
FOR_TYPE(BFloat16, bfloat16)
