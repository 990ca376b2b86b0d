/* Numbers in memory: fp32, or 16 bits that are widened to fp32 in registers.
 *
 * All arithmetic is fp32. A model in half precision stores its weights, keys and values in 16 bits;
 * activations are fp32 buffers whose values are rounded to the model's dtype where its modules
 * round. Functions take `dtype` as a constant wherever speed matters, so that branches on it
 * disappear. ops/native/__init__.py has the same codes. */

#ifndef DTYPE_H
#define DTYPE_H

#include <string.h>

#include "vector.h"

enum { FP32, BF16, FP16 };

typedef uint32_t bits_vec __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint16_t half_vec __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

INLINE int64_t size_of(int64_t dtype) { return dtype == FP32 ? 4 : 2; }

/* The address of a number `at` elements after p. */
INLINE const void *after(const void *p, int64_t at, int64_t dtype) {
  return (const char *)p + at * size_of(dtype);
}

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE vec round_to_bf16(vec x) {
  const bits_vec bits = (bits_vec)x, is_nan = (bits_vec)(x != x);
  const bits_vec nearest = bits + 0x7fff + ((bits >> 16) & 1), quiet = bits | 0x400000;
  return (vec)(((nearest & ~is_nan) | (quiet & is_nan)) & 0xffff0000);
}

INLINE void store_bf16(uint16_t *p, vec x) {
  *(half_vec *)p = __builtin_convertvector((bits_vec)round_to_bf16(x) >> 16, half_vec);
}

/* The vector that begins `at` elements after p. */
INLINE vec load_as(const void *p, int64_t at, const int dtype) {
  switch (dtype) {
    case BF16: return load_bf16((const uint16_t *)p + at);
    case FP16: return load_fp16((const uint16_t *)p + at);
    default: return load((const float *)p + at);
  }
}

INLINE void store_as(void *p, int64_t at, vec x, const int dtype) {
  switch (dtype) {
    case BF16: store_bf16((uint16_t *)p + at, x); break;
    case FP16: store_fp16((uint16_t *)p + at, x); break;
    default: store((float *)p + at, x);
  }
}

/* The same of the first `count` elements of a vector, if that is fewer; the others are 0. */
INLINE vec load_some(const void *p, int64_t at, int64_t count, const int dtype) {
  if (count >= WIDTH) return load_as(p, at, dtype);
  float held[WIDTH] = {};
  memcpy(held, after(p, at, dtype), count * size_of(dtype));
  return load_as(held, 0, dtype);
}

INLINE void store_some(void *p, int64_t at, vec x, int64_t count, const int dtype) {
  if (count >= WIDTH) {
    store_as(p, at, x, dtype);
    return;
  }
  float held[WIDTH];
  store_as(held, 0, x, dtype);
  memcpy((char *)p + at * size_of(dtype), held, count * size_of(dtype));
}

INLINE vec rounded(vec x, const int dtype) {
  switch (dtype) {
    case BF16: return round_to_bf16(x);
    case FP16: return round_to_fp16(x);
    default: return x;
  }
}

INLINE float rounded_number(float x, const int dtype) {
  return dtype == FP32 ? x : rounded(splat(x), dtype)[0];
}

INLINE float number_at(const void *p, int64_t at, const int dtype) {
  return dtype == FP32 ? ((const float *)p)[at] : load_some(p, at, 1, dtype)[0];
}

/* The same of a dtype that is not known at compile time. */
INLINE float any_number(const void *p, int64_t at, int64_t dtype) {
  return dtype == BF16   ? number_at(p, at, BF16)
         : dtype == FP16 ? number_at(p, at, FP16)
                         : number_at(p, at, FP32);
}

/* Calls f(..., dtype) with a constant in place of a variable. */
#define WITH_DTYPE(dtype, f, ...) \
  switch (dtype) { \
    case BF16: f(__VA_ARGS__, BF16); break; \
    case FP16: f(__VA_ARGS__, FP16); break; \
    default: f(__VA_ARGS__, FP32); \
  }

#endif
