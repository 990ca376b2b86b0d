/* Vector types that every instruction set shares, for the WIDTH that its header defines.
 *
 * They are the compiler's own (GCC, clang), so that arithmetic, comparisons and bit operations need
 * no intrinsics. The header of an instruction set defines what is missing:
 *
 *   WIDTH                      floats per vector
 *   REGISTERS                  vector registers, which decide the blocks of products and attention
 *   vec higher(vec x, vec y)   the larger of each pair; NaN where y is; if x alone is, either
 *   quad sums(vec a, vec b, vec c, vec d)   the sum of each
 *   float highest(vec x)       the largest element
 *   vec load_bf16(const uint16_t *p), load_fp16(const uint16_t *p)   numbers of 16 bits, widened
 *   void store_fp16(uint16_t *p, vec x)   numbers rounded to fp16: to nearest, ties to even
 *   vec round_to_fp16(vec x)   the same, widened again
 *   void relax(void)           what a thread that waits does between two looks
 *   vec dots_of_pairs(vec total, ivec x, ivec w)   where `PAIRS` is defined: total plus, for each
 *                              element, the dot product of its two numbers of bf16 in x and in w;
 *                              subnormal numbers count as 0
 *   ivec nearest(vec x)        the nearest integers, ties to even
 *   ivec dots(ivec total, ivec x, ivec w)   total plus, for each element, the dot product of its
 *                              four signed bytes in x and w, none of which is -128
 *   BIAS                       0 or 128, added to each byte of x for `dots_at_once`
 *   ivec dots_at_once(ivec total, ivec x, ivec w)   the same by one instruction, if there is one
 *   int has_dots(void)         whether this processor has that instruction
 */

#ifndef ISA_TYPES_H
#define ISA_TYPES_H

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* Aligned as single floats are, so that they can be loaded from any address of one. */
typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16)));

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE void store_quad(float *p, quad x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE quad load_quad(const float *p) {
  quad x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
INLINE ivec load_integers(const void *p) { return *(const ivec *)p; }
INLINE vec splat(float x) { return x - (vec){}; }

#endif
