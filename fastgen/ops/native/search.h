/* Whole steps of a search: what is given. ops/native/search.py has the same structures. */

#ifndef SEARCH_H
#define SEARCH_H

#include "step.h"

/* Why no further step is made: as many as were asked for; the search is over; enough sentences have finished; which
 * token comes next is for others to say, by the logits; a token is no row of the embedding; there is no memory. */
enum { GOES_ON, OVER, LEAVING, UNDECIDED, NO_ROW, NO_MEMORY };

/* A decoder from token ids to logits. */
typedef struct {
  const Step *step;                 /* whose `x` and `stream` are filled here */
  Seen *seen;                       /* of the step, one call; keys of the text become more */
  const float *tokens, *positions;  /* (V, C), `token_row` apart; (P, C), `position_row` apart, or NULL */
  int64_t *position;                /* (R,), the rows of positions that the next tokens have */
  int64_t vocabulary, token_row, position_row, padding, padding_row; /* padding_row: -1 for the row before */
  double scale;                     /* of tokens */
  Norm embedded, first;             /* of tokens and positions, or of tokens alone; before the first sublayer */
  int64_t norm_tokens, work;        /* work: multiplications of one row in a product, about */
  Weight head;
  double head_scale;
  float *logits;                    /* (R, V) */
  int64_t threads;                  /* at most */
  double *began;                    /* (steps,), seconds, when each step began */
} Decoder;

/* N-grams that may not come again: those of a text itself, or those of a source. */
typedef struct {
  int64_t n, shortest;              /* length of a text from which on it is looked at */
  const int64_t *source;            /* (B or 1, S), or NULL */
  int64_t source_b, source_length;  /* source_b: 0 where all sentences have the same */
} NGrams;

/* The texts of a search, and what may not come next. */
typedef struct {
  int64_t *ids;                     /* (B, M, L), rows as far apart as said */
  int64_t ids_b, ids_m, length, prompt, ends_at; /* ends_at: the length at which all texts end */
  const int64_t *ends;              /* tokens that end a text */
  const NGrams *ngrams;
  int64_t end_count, ngram_count;
  const uint32_t *banned;           /* a set of tokens, a bit for each, or NULL */
  uint32_t *sets;                   /* (R, words of a set), where any are banned */
  int64_t leave;                    /* how many sentences leave together; 0 for none */
  int64_t steps, made, run;         /* steps that may be made; those that were, and of those that the decoder made */
} Texts;

/* What beams see of the slots of the text. */
typedef struct {
  float *mask;                      /* (B, M, N) additive, rows as far apart as said */
  const float *own;                 /* (M, M), of the newest slots */
  int64_t mask_b, mask_m, prefix, filled, room, open; /* slots behind the prefix; of them, open ones that wait: 0 or M */
} Sight;

/* Beam search by the rules of decoding/search/finishing_rules.py. */
typedef struct {
  int32_t *origins;                 /* (B, M, T), the rows that tokens came from */
  int64_t *finished_ids;            /* tables of finished hypotheses, of the same shapes */
  int32_t *finished_origins;
  int64_t origins_b, origins_m, finished_ids_b, finished_ids_m, finished_origins_b, finished_origins_m;
  float *scores, *finished_scores;  /* (B, M) each */
  uint8_t *finished_done, *improvable, *flags; /* (B, M), (B,), (4, B) */
  const int64_t *sentences;         /* (B,), their numbers in the whole batch */
  Sight sight;
  int64_t candidates, stops_early, far; /* far: length by which running beams are judged; 0 for their own */
  double never, penalty;
} Beams;

/* Beam search by the rules of decoding/search/first_finished.py. Texts begin with one token; `ends` is the one that ends them. */
typedef struct {
  float *scores;                    /* (B, M, T), what texts had come to behind each step */
  int64_t *origins;                 /* (B, M, T), beams that texts came by; or NULL */
  int64_t scores_b, scores_m, origins_b, origins_m;
  uint8_t *over;                    /* (B,), sentences that have all their hypotheses */
  int64_t *counts;                  /* (B,), how many they have */
  int64_t *places;                  /* (N, 3), of hypotheses that finish: sentence, beam, step */
  int64_t *finished_tokens, *finished_origins; /* (N, width), the latter or NULL */
  float *finished_scores;           /* (N, width) */
  int64_t width, found;
  Sight sight;
} FirstFinished;

#endif
