/* A decode step of a decoder, or an encoder's layers: what is given. ops/native/step.py has the same structures. */

#ifndef STEP_H
#define STEP_H

#include "vector.h"

typedef void (*barrier)(void);

enum { TEXT, SOURCE, FEED_FORWARD }; /* kinds of sublayers */
enum { UNNORMED, LAYER_NORM, RMS_NORM };

typedef struct {
  const float *panels, *bias; /* as `Product` has them */
  int64_t outputs, inputs;
} Weight;

typedef struct {
  const float *weight, *bias; /* (C,), or NULL for 1 and 0 */
  double eps, offset;         /* of the scale, which is weight + offset */
  int64_t kind;
} Norm;

/* x = norm(sum), sum = residual + out(mixed): attention to the text or the source, or the wide layer of a feed-forward
 * one, whose activation function may be multiplied by a gate. */
typedef struct {
  int64_t kind, parts;        /* products of x: one or three with queries, keys and values; the wide layer and a gate */
  Weight part[3], out;
  Norm norm, query_norm, key_norm;
  int64_t parallel;           /* whether the norm behind is of the stream that came in, without the sum */
  int64_t heads, key_heads, dims;
  int64_t whole_norms;        /* whether norms of queries and keys are of all heads together */
  double scale;
  int64_t behind;                 /* the wide layer */
  const float *cosine, *sine;     /* (R or 1, E), by which the first E of each head are turned; or NULL */
  int64_t turned, turn_row, neighbours;
} Sublayer;

/* What a sublayer attends to, of the sentences of one call; without keys, to the call's own rows. */
typedef struct {
  float *keys, *values, *weights; /* weights: (.., B, M, N) for each step in a row, or NULL */
  const float *mask, *bias;   /* bias: (.., B, H, N) for each step in a row, or NULL */
  int64_t count, slot, keys_b, keys_h, keys_n, values_b, values_h, values_n, mask_b, mask_h, mask_m;
  int64_t bias_b, bias_h, bias_step;
} Seen;

/* The rows of one call: of its beams, or tokens, sentence by sentence. */
typedef struct {
  int64_t first_row, sentences, beams;
} Rows;

typedef struct {
  const Sublayer *sublayers;
  const Seen *seen;           /* (attending sublayers, calls) */
  const Rows *calls;
  int64_t sublayer_count, call_count, rows, width, norm_first;
  float *x, *stream;          /* (R, C) each: what the next sublayer reads, and the sum; the same at first unless norm_first */
  float *spare, *wide, *mixed;/* room for (R, C), and for what products of x, and what is mixed, take at most */
} Step;

void norm_row(float *out, const float *in, const Norm *norm, int64_t width);
int step_at(parallel run, unsigned threads, barrier wait, const Step *step, int64_t number);

#endif
