/* Attention of one decode step, or of an encoder's layer: the work that threads share. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include "dtype.h"
#include "team.h"

enum { ROWS = 128 }; /* most beams times query heads per key head */

/* Strides are in elements; the last dimension is contiguous everywhere. */
typedef struct {
  float *out;                         /* (B, M, H, D), contiguous but for the first dimension */
  const float *query, *mask, *bias;   /* (B, M, H, D + E); (B, H, M, N) or NULL; (B, H, N) or NULL */
  void *keys, *values;                /* (B, Hkv, N, D), of `dtype` */
  const void *common_keys, *common_values; /* (Hkv, C, D): the first `common` keys of all sentences,
                                              which `keys` then does not hold; or NULL */
  const void *rope_keys, *common_rope; /* (B, N, E) and (C, E), the last dimensions of latent keys,
                                          which are the values without these; or NULL */
  const float *new_keys, *new_values; /* of the newest tokens, written from `slot` on; or NULL */
  const void *sinks;                  /* (H,) of `out_dtype`: a score of no key; or NULL */
  float *weights;                     /* (B, M, N) contiguous, the mean over the heads; or NULL */
  int64_t sentences, beams, key_heads, groups, count, dims, slot;
  int64_t dtype, out_dtype;           /* out is rounded to the latter */
  float scale, softcap;               /* scores become softcap tanh(score / softcap); 0 for none */
  int64_t out_b, query_b, query_m, query_h, keys_b, keys_h, keys_n, values_b, values_h, values_n;
  int64_t mask_b, mask_h, mask_m, bias_b, bias_h;
  int64_t common, common_h;           /* their number C, and the stride of a head */
  int64_t rope, rope_b, rope_n;       /* their number E, or 0; strides */
  int64_t new_row;                    /* between the newest keys, and values, of two beams */
  int64_t of_text;                    /* whether the keys from `slot` on are those of the rows */
  int64_t successive;                 /* whether the beams are successive tokens of one text */
  int64_t at_once;                    /* heads per task */
  int without_memory;                 /* whether a thread could not allocate its scores */
} Attention;

INLINE void write_row(void *to, int64_t at, const float *from, int64_t dims, const int dtype) {
  for (int64_t d = 0; d < dims; d += WIDTH) store_as(to, at + d, load(from + d), dtype);
}

int64_t prepare_attention(Attention *job, unsigned threads);
void work_on_attention(void *job, Tasks *tasks);

#endif
