/* x86-64: AVX-512 with vectors of 16 floats, else AVX2 and FMA with vectors of 8. */

#ifndef ISA_X86_H
#define ISA_X86_H

#include <immintrin.h>

#ifdef __AVX512F__
#define WIDTH 16
#define REGISTERS 32
#else
#define WIDTH 8
#define REGISTERS 16
#endif

#include "types.h"

INLINE void relax(void) { _mm_pause(); }

INLINE vec higher(vec x, vec y) {
#if WIDTH == 16
  return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#else
  return (vec)_mm256_max_ps((__m256)x, (__m256)y);
#endif
}

/* Four numbers with the same sum as all elements. */
INLINE __m128 folded(vec x) {
#if WIDTH == 16
  const __m512 whole = (__m512)x;
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
#else
  __m256 half = (__m256)x;
#endif
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

INLINE quad sums(vec a, vec b, vec c, vec d) {
  const __m128 of_ab = _mm_hadd_ps(folded(a), folded(b)), of_cd = _mm_hadd_ps(folded(c), folded(d));
  return (quad)_mm_hadd_ps(of_ab, of_cd);
}

INLINE float highest(vec x) {
#if WIDTH == 16
  const __m512 whole = (__m512)x;
  __m256 half = _mm256_max_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
#else
  __m256 half = (__m256)x;
#endif
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

INLINE vec load_bf16(const uint16_t *p) {
#if WIDTH == 16
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return (vec)_mm512_slli_epi32(wide, 16);
#else
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return (vec)_mm256_slli_epi32(wide, 16);
#endif
}

INLINE vec load_fp16(const uint16_t *p) {
#if WIDTH == 16
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
  return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#endif
}

INLINE void store_fp16(uint16_t *p, vec x) {
#if WIDTH == 16
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#else
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#endif
}

INLINE vec round_to_fp16(vec x) {
#if WIDTH == 16
  return (vec)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#else
  return (vec)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#endif
}

#endif
