/* AArch64: Advanced SIMD (NEON), which every ARMv8 processor has, with vectors of 4 floats. */

#ifndef ISA_NEON_H
#define ISA_NEON_H

#include <arm_neon.h>

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

#endif
