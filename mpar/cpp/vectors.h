// Vectors of the CPU's own width, and what all kernels compute with them.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();
#ifdef __AVX512F__
constexpr int64_t WIDTH = 16, REGISTERS = 32;
#else
constexpr int64_t WIDTH = 8, REGISTERS = 16;
#endif

// Vectors of GCC and Clang.
typedef float Lanes __attribute__((vector_size(4 * WIDTH)));
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t WideBits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t NarrowBits __attribute__((vector_size(2 * WIDTH)));
typedef uint32_t FourWideBits __attribute__((vector_size(16)));
typedef uint16_t FourNarrowBits __attribute__((vector_size(8)));

struct BFloat16 {
  uint16_t bits;
};

inline Lanes load(const float* x) {
  Lanes y;
  std::memcpy(&y, x, sizeof y);
  return y;
}

inline Lanes load(const BFloat16* x) {
  NarrowBits bits;
  std::memcpy(&bits, x, sizeof bits);
  return reinterpret_cast<Lanes>(__builtin_convertvector(bits, WideBits) << 16);
}

// The same vector, which the compiler then loads once and not again wherever it is read.
inline Lanes in_register(Lanes x) {
  asm("" : "+v"(x));
  return x;
}

// a x + y, rounded once. Of `a * x + y` a compiler makes this or two roundings, as it finds faster where it stands.
inline Lanes fused(Lanes a, Lanes x, Lanes y) {
#ifdef __AVX512F__
  return _mm512_fmadd_ps(a, x, y);
#else
  return _mm256_fmadd_ps(a, x, y);
#endif
}

inline Lanes fused(float a, Lanes x, Lanes y) {
#ifdef __AVX512F__
  return fused(_mm512_set1_ps(a), x, y);
#else
  return fused(_mm256_set1_ps(a), x, y);
#endif
}

inline void store(Lanes x, float* y) { std::memcpy(y, &x, sizeof x); }
inline void store(Four x, float* y) { std::memcpy(y, &x, sizeof x); }

// To the nearest, to the even one of two that are equally near.
template <typename Wide, typename Narrow, typename Vector>
inline void store_rounded(Vector x, BFloat16* y) {
  Wide bits = reinterpret_cast<Wide>(x);
  Wide rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Narrow narrow = __builtin_convertvector(x == x ? rounded : rounded * 0 + 0x7fc0, Narrow);
  std::memcpy(y, &narrow, sizeof narrow);
}

inline void store(Lanes x, BFloat16* y) { store_rounded<WideBits, NarrowBits>(x, y); }
inline void store(Four x, BFloat16* y) { store_rounded<FourWideBits, FourNarrowBits>(x, y); }

inline float widened(float x) { return x; }

inline float widened(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// x as a number of type T: one of bfloat16 is the nearest, the even one of two that are equally near.
template <typename T>
inline T rounded(float x) {
  if constexpr (sizeof(T) == sizeof x) {
    return x;
  } else {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return {static_cast<uint16_t>(x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0)};
  }
}

// The larger one of each pair, `b` if one is no number.
template <typename X>
inline X larger(X a, X b) {
  return a > b ? a : b;
}

// One number of all of a vector: by halves, so that no step waits for more than three before it.
template <typename Vector, typename Fn>
inline float reduced(Vector x, Fn fn) {
  if constexpr (sizeof x == 4 * sizeof(float)) {
    return fn(fn(x[0], x[2]), fn(x[1], x[3]));
  } else {
    typedef float Half __attribute__((vector_size(sizeof(Vector) / 2)));
    Half low, high;
    std::memcpy(&low, &x, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof low, sizeof high);
    return reduced(fn(low, high), fn);
  }
}

inline float sum_of(Lanes x) {
  return reduced(x, [](auto a, auto b) { return a + b; });
}

// The sums of four vectors, in fewer steps than one after the other.
inline Four sums_of(Lanes a, Lanes b, Lanes c, Lanes d) {
#ifdef __AVX512F__
  const auto halves = [](__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    return _mm256_castsi256_ps(_mm512_castsi512_si256(bits)) + _mm256_castsi256_ps(_mm512_extracti64x4_epi64(bits, 1));
  };
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(halves(a), halves(b)), _mm256_hadd_ps(halves(c), halves(d)));
#else
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
#endif
  return _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1);
}

inline float largest_of(Lanes x) {
  return reduced(x, [](auto a, auto b) { return larger(a, b); });
}

// exp(x) for x <= 0, with a relative error below 2e-7; 0 below the smallest normal number. x = n ln 2 + r, and exp(r) by its Taylor
// series (|r| <= ln 2 / 2). A loop of it is vectorised, which one of std::exp is not.
inline float exp_of(float x) {
  float bounded = x > -88.1f ? x : -88.1f;
  float n = std::nearbyint(bounded * 1.44269504f);
  float r = std::fma(n, -1.42860677e-6f, std::fma(n, -0.693145752f, bounded));
  float p = 1.0f / 5040;
  p = std::fma(p, r, 1.0f / 720);
  p = std::fma(p, r, 1.0f / 120);
  p = std::fma(p, r, 1.0f / 24);
  p = std::fma(p, r, 1.0f / 6);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x == x ? p * scale : x;
}

}  // namespace
