/* x86-64: AVX-512 with vectors of 16 floats, else AVX2 and FMA with vectors of 8. */

#ifndef ISA_X86_H
#define ISA_X86_H

#include <cpuid.h>
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

INLINE ivec nearest(vec x) {
#if WIDTH == 16
  return (ivec)_mm512_cvtps_epi32((__m512)x);
#else
  return (ivec)_mm256_cvtps_epi32((__m256)x);
#endif
}

/* A product of bytes takes unsigned ones times signed ones, and its sums of pairs saturate at 16
 * bits: |w| times x with the sign of w stays below, as 2 * 127 * 127 < 2^15. */
INLINE ivec dots(ivec total, ivec x, ivec w) {
#if WIDTH == 16
  const __m512i bytes = (__m512i)w, ones = _mm512_set1_epi16(1), zeros = _mm512_setzero_si512();
  const __m512i turned =
      _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask(bytes), zeros, (__m512i)x);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(bytes), turned);
  return total + (ivec)_mm512_madd_epi16(pairs, ones);
#else
  const __m256i bytes = (__m256i)w, turned = _mm256_sign_epi8((__m256i)x, bytes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), turned);
  return total + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

#define BIAS 128

/* AVX512-VNNI, or AVX-VNNI. Written in assembly, as the library is compiled for processors that
 * have neither. */
#if WIDTH == 16
INLINE ivec dots_at_once(ivec total, ivec x, ivec w) {
  __m512i sum = (__m512i)total;
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"((__m512i)x), "v"((__m512i)w));
  return (ivec)sum;
}

INLINE int has_dots(void) { return __builtin_cpu_supports("avx512vnni") != 0; }
#elif (defined(__clang__) && __clang_major__ >= 14) || (!defined(__clang__) && __GNUC__ >= 12)
INLINE ivec dots_at_once(ivec total, ivec x, ivec w) {
  __m256i sum = (__m256i)total;
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"((__m256i)x), "x"((__m256i)w));
  return (ivec)sum;
}

/* Leaf 7.1 of CPUID, as some compilers do not know the name of AVX-VNNI. */
INLINE int has_dots(void) {
  unsigned eax = 0, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#else
INLINE ivec dots_at_once(ivec total, ivec x, ivec w) {
  return dots(total, x ^ (int32_t)0x80808080, w);
}

INLINE int has_dots(void) { return 0; }
#endif

#ifdef __AVX512BF16__
#define PAIRS

INLINE vec dots_of_pairs(vec total, ivec x, ivec w) {
  return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)w);
}
#endif

#endif
