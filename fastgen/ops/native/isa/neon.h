/* AArch64: Advanced SIMD (NEON), which every ARMv8 processor has, with vectors of 4 floats. */

#ifndef ISA_NEON_H
#define ISA_NEON_H

#include <arm_neon.h>
#ifdef __linux__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define WIDTH 4
#define REGISTERS 32

#include "types.h"

INLINE void relax(void) { __asm__ volatile("yield"); }

INLINE vec higher(vec x, vec y) { return (vec)vmaxq_f32((float32x4_t)x, (float32x4_t)y); }

INLINE quad sums(vec a, vec b, vec c, vec d) {
  const float32x4_t of_ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b);
  const float32x4_t of_cd = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
  return (quad)vpaddq_f32(of_ab, of_cd);
}

INLINE float highest(vec x) { return vmaxvq_f32((float32x4_t)x); }

INLINE vec load_bf16(const uint16_t *p) {
  return (vec)vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16);
}

INLINE vec load_fp16(const uint16_t *p) {
  return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

INLINE void store_fp16(uint16_t *p, vec x) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
}

INLINE vec round_to_fp16(vec x) { return (vec)vcvt_f32_f16(vcvt_f16_f32((float32x4_t)x)); }

INLINE ivec nearest(vec x) { return (ivec)vcvtnq_s32_f32((float32x4_t)x); }

/* Sums of two products of bytes fit 16 bits, as 2 * 127 * 127 < 2^15. */
INLINE ivec dots(ivec total, ivec x, ivec w) {
  const int8x16_t a = (int8x16_t)x, b = (int8x16_t)w;
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return (ivec)vpadalq_s16((int32x4_t)total, vpaddq_s16(low, high));
}

#define BIAS 0

/* SDOT of ARMv8.2. Written in assembly, as the library is compiled for processors without it. */
INLINE ivec dots_at_once(ivec total, ivec x, ivec w) {
  int32x4_t sum = (int32x4_t)total;
  __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b"
          : "+w"(sum) : "w"((int8x16_t)x), "w"((int8x16_t)w));
  return (ivec)sum;
}

INLINE int has_dots(void) {
#if defined(__ARM_FEATURE_DOTPROD)
  return 1;
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return 0;
#endif
}

#endif
