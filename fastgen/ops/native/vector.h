/* Vectors of `WIDTH` floats, and functions of them. isa/ holds what differs by instruction set. */

#ifndef VECTOR_H
#define VECTOR_H

#include <math.h>
#include <stdint.h>

#if defined(__x86_64__)
#include "isa/x86.h"
#elif defined(__aarch64__)
#include "isa/neon.h"
#else
#error "isa/ has no header for this architecture"
#endif

/* Unrolls a loop over vectors completely, so that they stay in registers. */
#define UNROLLED _Pragma("GCC unroll 32")

INLINE float sum(vec x) { return sums(x, x, x, x)[0]; }

/* The smaller of each pair; NaN where y is. */
INLINE vec smaller(vec x, vec y) { return -higher(-x, -y); }

INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* e^x for x <= 0, to 2 units in the last place. NaN stays NaN. x below -87 gives e^-87 = 1.6e-38,
 * which vanishes beside the 1 of the largest element of a softmax.
 *
 * x = n ln 2 + f with |f| <= ln 2 / 2: 2^n is made in the exponent bits, e^f is a polynomial.
 * Source: Moshier's Cephes library, expf. */
INLINE vec exponential(vec x) {
  const vec lowest = splat(-87.0f), rounding = splat(12582912.0f); /* 1.5 * 2^23 rounds a sum */
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
  ivec low = (ivec)(power / (1.0f + power)) & ~none; /* of -|x| */
  return (vec)((negative & low) | (~negative & (ivec)(1.0f - (vec)low)));
}

/* The hyperbolic tangent, to 3 units in the last place: a polynomial near 0, else
 * 1 - 2 / (1 + e^2x). Source: Moshier's Cephes library, tanhf. */
INLINE vec hyperbolic_tangent(vec x) {
  const vec square = x * x;
  vec y = splat(-5.70498872745e-3f);
  y = y * square + 2.06390887954e-2f;
  y = y * square - 5.37397155531e-2f;
  y = y * square + 1.33314422036e-1f;
  y = y * square - 3.33332819422e-1f;
  const ivec small = magnitude(x) < 0.625f, near = (ivec)(y * square * x + x);
  return (vec)((small & near) | (~small & (ivec)(1.0f - 2.0f * logistic(-2.0f * x))));
}

/* The error function, to 2e-7. Source: Abramowitz and Stegun 1964, 7.1.26. */
INLINE vec error_function(vec x) {
  vec size = magnitude(x), t = 1.0f / (1.0f + 0.3275911f * size), y = splat(1.061405429f);
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  y = 1.0f - y * t * exponential(-size * size);
  return (vec)((ivec)y | ((ivec)x & (int32_t)0x80000000));
}

#endif
