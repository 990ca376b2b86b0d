/* The arguments of a search that runs whole steps.
 *
 * ops/native/search.py declares the same structures. */

#ifndef SEARCH_H
#define SEARCH_H

#include "step.h"

/* Why a search stopped: all requested steps are made; it is over; enough sentences have finished;
 * the caller has to choose the next tokens by the logits; a token is not a row of the embedding;
 * there was no memory. */
enum { GOES_ON, OVER, LEAVING, UNDECIDED, NO_ROW, NO_MEMORY };

/* A copy of the head in bytes, and bounds of the logits' errors (bounds.c). */
typedef struct {
  Weight bytes;                     /* with the head's bias; panels: NULL if there is no copy */
  const float *errors;              /* (V,), bounds of the norms of the rounding errors of rows */
  const void *weight;               /* (V, C), `weight_row` apart, of the step's dtype: the head */
  int64_t weight_row;
  double longest, bias;             /* bounds of the norms of rows, and of the bias */
  int64_t most;                     /* candidates per row of x; with more, all logits are computed */
  int64_t *counts;                  /* steps that bounds may decide; those that were tried; those
                                       of them that needed all logits */
} LogitBounds;

/* A decoder from token ids to logits. */
typedef struct {
  const Step *step;                 /* its x and stream are filled here */
  Seen *seen;                       /* of the step, one call; the keys of the text grow */
  const void *tokens, *positions;   /* (V, C), `token_row` apart; (P, C), `position_row` apart, or
                                       NULL; of the step's dtype, as the norms and the head */
  int64_t *position;                /* (R,), rows of positions for the next tokens */
  int64_t vocabulary, token_row, position_row;
  int64_t padding, padding_row;     /* padding_row: -1 for the row before */
  double scale;                     /* of tokens */
  Norm embedded, first;             /* of the embedding; before the first sublayer */
  int64_t norm_tokens, work;        /* whether `embedded` excludes positions; multiplications per
                                       row in a product, on average */
  Weight head;
  double head_scale, softcap;       /* softcap: of the logits, or 0 */
  float *logits;                    /* (R, V), rounded to the step's dtype; (2 R, V) with bounds */
  LogitBounds *bounds;              /* of the head, or NULL */
  int64_t threads;                  /* the most to use */
  double *began;                    /* (steps,), when each step began, in seconds */
} Decoder;

/* N-grams that must not be repeated: those of the text itself, or those of a source. */
typedef struct {
  int64_t n, shortest;              /* shortest: the length of a text from which they count */
  const int64_t *source;            /* (B or 1, S), or NULL for the text itself */
  int64_t source_b, source_length;  /* source_b: 0 if all sentences share one source */
} NGrams;

/* A change of a row's scores: a repetition penalty, or offsets of some tokens. */
typedef struct {
  double penalty;                   /* of the tokens of the row's text; 0 for offsets */
  const int64_t *starts;            /* (R,), the first token of each text that is penalised */
  const int64_t *tokens;            /* (count,), distinct */
  const float *offsets;             /* (count,) */
  int64_t count;
} Update;

/* The texts of a search, and the tokens that are banned from them. */
typedef struct {
  int64_t *ids;                     /* (B, M, L) */
  int64_t ids_b, ids_m, length, prompt, ends_at; /* ends_at: the length at which all texts end */
  const int64_t *ends;              /* tokens that end a text */
  const NGrams *ngrams;
  const Update *updates;            /* in this order; not in beam search */
  int64_t end_count, ngram_count, update_count;
  const uint32_t *banned;           /* a set of tokens, one bit each, or NULL */
  uint32_t *sets;                   /* (R, words of a set), scratch, if any tokens are banned */
  int64_t leave;                    /* finished sentences at which to stop; 0 for never */
  int64_t steps, made, run;         /* the most steps; those made; those that the decoder ran */
} Texts;

/* How tokens are drawn: filters of the scores, in this order, and the random numbers. */
typedef struct {
  double temperature, top_p, min_p; /* 1, 1 and 0 for none */
  int64_t top_k;                    /* 0 for all */
  const float *noise;               /* (steps, R, V), exponential; NULL to make it by `generator` */
  uint8_t *generator;               /* the state of torch's generator, which is advanced */
} Draws;

/* Which slots of the text each beam sees. */
typedef struct {
  float *mask;                      /* (B, M, N) additive */
  const float *own;                 /* (M, M), of the newest slots */
  int64_t mask_b, mask_m, prefix;
  int64_t filled, room, open;       /* slots after the prefix: filled; in all; opened for the next
                                       tokens, 0 or M */
} SlotMask;

/* Beam search by the rules of decoding/search/finishing_rules.py. */
typedef struct {
  int32_t *origins;                 /* (B, M, T), the rows that tokens came from */
  int64_t *finished_ids;            /* the same tables of the finished hypotheses */
  int32_t *finished_origins;
  int64_t origins_b, origins_m, finished_ids_b, finished_ids_m;
  int64_t finished_origins_b, finished_origins_m;
  float *scores, *finished_scores;  /* (B, M) each */
  uint8_t *finished_done, *improvable, *flags; /* (B, M), (B,), (4, B) */
  const int64_t *sentences;         /* (B,), their indices in the whole batch */
  SlotMask slot_mask;
  int64_t candidates, stops_early;
  int64_t far;                      /* length by which running beams are judged; 0 for their own */
  double mask_value, penalty;
} Beams;

/* Beam search by the rules of decoding/search/first_finished.py. Texts begin with one token, and
 * one token, `ends`, ends them. */
typedef struct {
  float *scores;                    /* (B, M, T), the running score after each step */
  int64_t *origins;                 /* (B, M, T), the beams that texts came from; or NULL */
  int64_t scores_b, scores_m, origins_b, origins_m;
  uint8_t *over;                    /* (B,), sentences that have all their hypotheses */
  int64_t *counts;                  /* (B,), the number of their hypotheses */
  int64_t *places;                  /* (N, 3), sentence, beam and step of finished hypotheses */
  int64_t *finished_tokens, *finished_origins; /* (N, width), the latter or NULL */
  float *finished_scores;           /* (N, width) */
  int64_t width, found;
  SlotMask slot_mask;
} FirstFinished;

#endif
