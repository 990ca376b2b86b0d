/* The arguments of a decode step of a decoder, or of an encoder's layers.
 *
 * ops/native/step.py declares the same structures. */

#ifndef STEP_H
#define STEP_H

#include "dtype.h"
#include "product.h"
#include "team.h"

/* Kinds of sublayers. */
enum { SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD, EXPERTS, LATENT_ATTENTION };
enum { UNNORMED, LAYER_NORM, RMS_NORM, CONSTANT_SCALE };

typedef struct {
  const void *panels, *bias; /* as in `Product`, of the step's dtype */
  const float *scales;       /* of a weight in bytes, as the sums */
  const int32_t *sums;
  int64_t outputs, inputs, kind;
  const Adapter *adapters;   /* (adapter_count,); or NULL */
  int64_t adapter_count;
} Weight;

typedef struct {
  const void *weight, *bias; /* (C,) of the step's dtype, or NULL for 1 and 0 */
  double eps, offset;        /* the scale is weight + offset; a constant scale is offset alone */
  int64_t kind;
} Norm;

/* A mixture of E experts, of which each row has the K with the highest scores of the router. Scores
 * are the softmax of all logits, or the sigmoid of each. The panels of all experts follow one
 * another. */
typedef struct {
  const void *router;           /* (E, C), not packed; of the step's dtype, or fp32 if `wide` */
  const void *router_bias;      /* (E,), of the same dtype; or NULL */
  const float *correction;      /* (E,), added to scores for the choice only; or NULL */
  const void *up, *down;        /* panels of (E, 2 F, C), F of which gate the rest; of (E, C, F) */
  const void *up_bias, *down_bias; /* (E, 2 F) and (E, C), or NULL */
  const void *shared_gate;      /* (C,): its sigmoid scales the shared expert's output; or NULL */
  int64_t count, chosen, inner; /* E, K, F */
  int64_t normalised;           /* whether the weights of the chosen experts add up to 1 */
  int64_t rounded;              /* whether those weights are rounded to the step's dtype */
  int64_t wide, precise;        /* whether logits are not rounded to the step's dtype */
  int64_t sigmoid;
  int64_t groups, kept;         /* of equal size, of which those with the highest sums of their
                                   best scores are kept; 1 for no groups */
  int64_t group_scores;         /* how many are added: 1 or 2 */
  double factor;                /* of the weights */
  int64_t thinned;              /* whether a weight is the softmax of the logits that are neither
                                   chosen before nor, relatively, more than `margin` below it */
  double margin;
  int64_t clamped;              /* whether outputs of up are pairs of a gate and what it gates,
                                   which `clamped_gate` in experts.c multiplies */
  double alpha, limit;          /* parameters of that function */
} Mixture;

/* x = norm(sum), sum = residual + own(out(mixed)), where mixed is attention to the text or the source,
 * or the wide layer of a feed-forward sublayer, whose activation a gate may multiply. To a mixture
 * of experts, a feed-forward sublayer is the expert that all rows share, if `parts` is not 0.
 *
 * Latent attention has a product of the queries, one of latent vectors (C) with the rotated part of
 * the keys (E), and, if it has three, one of the queries from the output of the first, which
 * `query_norm` normalises; `key_norm` normalises latent vectors. Heads read the rotated part in the
 * last E of their `dims`. Keys in memory are latent vectors, values the rotated part. */
typedef struct {
  int64_t kind, parts;          /* products of x: queries, keys, values in 1 or 3; wide and gate;
                                   all in bytes, or none */
  Weight part[3], out;
  Norm norm, own, query_norm, key_norm;
  int64_t parallel;             /* whether norm applies to the incoming stream, without the sum */
  int64_t heads, key_heads, dims;
  int64_t norms_all_heads;      /* whether norms of queries and keys cover all heads together */
  int64_t norms_rotated;        /* whether these norms come after the rotation */
  int64_t blocks, values_first; /* of a single product, which alternates queries, keys and values
                                   of some heads, or queries, values and keys; 0 for all at once */
  double scale, softcap;        /* softcap: of scores, or 0 */
  const void *sinks;            /* as in `Attention`, of the step's dtype; or NULL */
  int64_t activation;           /* the activation of the wide layer */
  const Mixture *experts;       /* of a mixture of experts, else NULL */
  const float *cosine, *sine;   /* (R or 1, E), which rotate the first E of each head; or NULL */
  int64_t turned, turn_row, interleaved;
  int64_t turned_wide;              /* whether only the result of the rotation is rounded */
  int64_t latent, value_dims;       /* C, and outputs of a head (D); or 0 */
  int64_t pairs_apart;              /* whether pairs that are adjacent are half of E apart afterwards */
  const void *to_latent, *of_latent; /* panels of (heads, C, dims - E) and (heads, D, C) */
} Sublayer;

INLINE int attends_to_text(const Sublayer *of) {
  return of->kind == SELF_ATTENTION || of->kind == LATENT_ATTENTION;
}

INLINE int attends(const Sublayer *of) {
  return attends_to_text(of) || of->kind == CROSS_ATTENTION;
}

/* The keys and values that a sublayer attends to, for the sentences of one call; without keys, it
 * attends to the call's own rows. */
typedef struct {
  void *keys, *values;        /* of the step's dtype */
  const void *common_keys, *common_values; /* as in `Attention` */
  float *weights;             /* (.., B, M, N) of each of several steps, or NULL */
  const float *mask, *bias;   /* bias: (.., B, H, N) of each of several steps, or NULL */
  int64_t count, slot, keys_b, keys_h, keys_n, values_b, values_h, values_n, mask_b, mask_h, mask_m;
  int64_t bias_b, bias_h, bias_step, common, common_h;
} Seen;

/* The rows of one call: its beams, or tokens, sentence by sentence. If the rows of a sentence are
 * successive tokens of its text, each sees the keys up to its own. */
typedef struct {
  int64_t first_row, sentences, beams, successive;
} Rows;

/* All buffers are fp32; their values are rounded to dtype. */
typedef struct {
  const Sublayer *sublayers;
  const Seen *seen;             /* (attending sublayers, calls) */
  const Rows *calls;
  int64_t sublayer_count, call_count, rows, width, norm_first, dtype;
  float *x, *stream;            /* (R, C): input of the next sublayer; sum, x unless norm_first */
  float *spare, *wide, *mixed;  /* scratch: (R, C), products of x, attention or gated outputs */
  float *routed;                /* scratch of a mixture of experts (experts.c); or NULL */
  int8_t *bytes;                /* scratch: rows of x or mixed, if weights are in bytes */
  float *low;                   /* scratch: outputs of both parts of all adapters of a sublayer */
} Step;

/* Rotates the first dimensions of a head; out may be in, unless pairs move apart. at: that of the
 * row's first angle. */
void turn_head(float *out, const float *in, const Sublayer *of, int64_t at, int64_t dtype);
void norm_row(float *out, const float *in, const Norm *norm, int64_t width, int64_t dtype);
void multiply(parallel run, unsigned threads, const Step *step, const Weight *weight,
              const float *x, float *out);
int step_at(parallel run, unsigned threads, const Step *step, int64_t number);

#endif
