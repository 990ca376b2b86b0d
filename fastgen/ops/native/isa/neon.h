/* AArch64: Advanced SIMD (NEON), which every ARMv8 processor has, with vectors of 4 floats. */

#ifndef ISA_NEON_H
#define ISA_NEON_H

#include <arm_neon.h>

#define WIDTH 4
#define REGISTERS 32

#include "types.h"

INLINE vec higher(vec x, vec y) { return (vec)vmaxq_f32((float32x4_t)x, (float32x4_t)y); }

INLINE quad sums(vec a, vec b, vec c, vec d) {
  const float32x4_t of_ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b);
  const float32x4_t of_cd = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
  return (quad)vpaddq_f32(of_ab, of_cd);
}

INLINE float highest(vec x) { return vmaxvq_f32((float32x4_t)x); }

#endif
