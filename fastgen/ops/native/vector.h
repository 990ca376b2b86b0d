/* Vectors of `WIDTH` floats, in the compiler's own vector types: one source for AVX2 and AVX-512. GCC and clang have
 * these types; only what they lack is written in intrinsics. */

#ifndef VECTOR_H
#define VECTOR_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#ifndef WIDTH
#define WIDTH 8
#endif

#define INLINE static inline __attribute__((always_inline))

/* Before a loop over vectors that are to stay in registers: it has to be gone for that. */
#define UNROLLED _Pragma("GCC unroll 16")

/* Aligned as single floats are, so that they can be read from anywhere. */
typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH), aligned(4)));

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE vec splat(float x) { return x - (vec){}; }

/* x where it is higher than y, else y: y where either is NaN. */
INLINE vec higher(vec x, vec y) {
#if WIDTH == 16
  return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#else
  return (vec)_mm256_max_ps((__m256)x, (__m256)y);
#endif
}

INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* Four numbers whose sum is that of all. */
INLINE __m128 folded(vec x) {
#if WIDTH == 16
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
  __m256 h = (__m256)x;
#endif
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

/* The sums of four vectors. */
INLINE __m128 sums(vec a, vec b, vec c, vec d) {
  return _mm_hadd_ps(_mm_hadd_ps(folded(a), folded(b)), _mm_hadd_ps(folded(c), folded(d)));
}

INLINE float sum(vec x) { return _mm_cvtss_f32(sums(x, x, x, x)); }

INLINE float highest(vec x) {
#if WIDTH == 16
  __m256 h = _mm256_max_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
  __m256 h = (__m256)x;
#endif
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

/* e to the power of x <= 0, to 2 units in the last place; below -87 that of -87, 1.6e-38, which is nothing beside the 1
 * that the highest of all has. NaN stays.
 *
 * x = n ln 2 + f with |f| <= ln 2 / 2: the power of two goes into the exponent's bits, a polynomial of f gives the rest
 * (Moshier's Cephes library, expf). */
INLINE vec exponential(vec x) {
  const vec lowest = splat(-87.0f), rounding = splat(12582912.0f); /* 1.5 * 2^23: a sum with it has no fraction */
  x = higher(lowest, x);
  vec n = x * 1.44269504f + rounding;
  vec power = (vec)(((ivec)n << 23) + 0x3f800000);
  n -= rounding;
  vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec y = splat(1.9875691500e-4f);
  y = y * f + 1.3981999507e-3f;
  y = y * f + 8.3334519073e-3f;
  y = y * f + 4.1665795894e-2f;
  y = y * f + 1.6666665459e-1f;
  y = y * f + 5.0000001201e-1f;
  return (y * f * f + f + 1.0f) * power;
}

/* 1 / (1 + e^-x). */
INLINE vec logistic(vec x) {
  vec size = magnitude(x), power = exponential(-size);
  ivec negative = x < 0.0f, none = size > 87.0f;
  ivec low = (ivec)(power / (1.0f + power)) & ~none; /* that of -|x| */
  return (vec)((negative & low) | (~negative & (ivec)(1.0f - (vec)low)));
}

/* The error function, to 2e-7 (Abramowitz and Stegun 1964, 7.1.26). */
INLINE vec error_function(vec x) {
  vec size = magnitude(x), t = 1.0f / (1.0f + 0.3275911f * size), y = splat(1.061405429f);
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  y = 1.0f - y * t * exponential(-size * size);
  return (vec)((ivec)y | ((ivec)x & (int32_t)0x80000000));
}

/* How work is shared among threads: `run` is what OpenMP's runtime calls GOMP_parallel, in the library that torch has
 * loaded, so that these are torch's own threads. It is not called for one thread. */
typedef void (*parallel)(void (*work)(void *), void *job, unsigned threads, unsigned flags);

INLINE void in_parallel(parallel run, unsigned threads, void (*work)(void *), void *job) {
  if (threads > 1)
    run(work, job, threads, 0);
  else
    work(job);
}

/* The next of what is counted there. */
INLINE int64_t next(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

#endif
