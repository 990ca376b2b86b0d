/* A mixture of experts in a decode step: the phases of its work. */

#ifndef EXPERTS_H
#define EXPERTS_H

#include "step.h"

/* A pair is a row and one of its K experts: pair r K + k. Rows of the products are pairs, those of
 * each expert side by side; `place` says where a pair is. Experts without pairs have none. */
typedef struct {
  const Step *step;
  const Sublayer *of;
  const float *residual;     /* or NULL */
  float *out;                /* (R, C) */
  float *logits, *choice;    /* (R, E): logits, then scores; scores for the choice */
  float *weight;             /* of each pair */
  float *pairs;              /* (R K, C): inputs, then outputs */
  float *wide, *mixed;       /* (R K, F), of wide (R K, 2 F) if the experts are clamped */
  float *shared;             /* (R, C): output of the expert that all rows share */
  int32_t *expert, *place;   /* of each pair */
  int32_t *active, *first;   /* (E,): experts that have pairs; (E + 1,): where those begin */
  int32_t *active_count;
  int64_t threads;
} Mixing;

Mixing mixing_of(const Step *step, const Sublayer *of, const float *residual, float *out,
                 unsigned threads);
int64_t up_outputs(const Mixture *mix);
int64_t expert_tasks(const Mixing *job, int64_t outputs);
void find_logits(void *job, Tasks *tasks);
void choose_experts(void *job, Tasks *tasks);
void group_by_expert(void *job, Tasks *tasks);
void gather_rows(void *job, Tasks *tasks);
void multiply_up(void *job, Tasks *tasks);
void multiply_down(void *job, Tasks *tasks);
void add_up_experts(void *job, Tasks *tasks);
/* The product of two vectors of C numbers, plus a bias or NULL, rounded to `out_dtype`. `weight` and
 * `bias` are of dtype. */
float dot(const float *x, const void *weight, const void *bias, int64_t C, int64_t dtype,
          int64_t out_dtype);

#endif
