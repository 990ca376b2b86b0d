/* Attention of one decode step, or of an encoder's layer: what a thread needs to work on it. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include "vector.h"

enum { ROWS = 128 }; /* most beams times query heads of a key head */

/* Strides are in elements; the last dimension is contiguous everywhere. */
typedef struct {
  float *out;                                   /* (B, M, H, D), contiguous but for the first */
  const float *query, *mask, *bias;             /* (B, M, H, D); (B, H, M, N); (B, H, N); the last two or NULL */
  float *keys, *values;                         /* (B, Hkv, N, D) */
  const float *new_keys, *new_values;           /* of the newest tokens, to be written from `slot` on; or NULL */
  float *weights;                               /* (B, M, N) contiguous: their mean over the heads; or NULL */
  int64_t sentences, beams, key_heads, groups, count, dims, slot;
  float scale;
  int64_t out_b, query_b, query_m, query_h, keys_b, keys_h, keys_n, values_b, values_h, values_n, mask_b, mask_h, mask_m;
  int64_t bias_b, bias_h;
  int64_t new_row;                              /* from one beam's newest keys, and values, to the next one's */
  int64_t at_once, next;                        /* heads that a task has; the next task */
  int without_memory;                           /* whether a thread got none */
} Attention;

void prepare_attention(Attention *job, unsigned threads);
void work_on_attention(void *job);

#endif
