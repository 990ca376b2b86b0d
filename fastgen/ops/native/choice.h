/* Candidates of a step of beam search, and the selection among them. */

#ifndef CHOICE_H
#define CHOICE_H

#include "team.h"

enum {
  LEAST_BLOCK = 64
}; /* least tokens per maximum of `k_best`; same in ops/native/__init__.py */

int k_best(parallel run, unsigned threads, float* values, int64_t* indices, float* maxima,
           float* shifts, const float* in, const float* scores, const uint32_t* banned,
           int64_t sentences, int64_t beams, int64_t vocabulary, int64_t wanted, int64_t in_b,
           int64_t in_m, int64_t banned_row);
int choose(parallel run, unsigned threads, const float* values, const int64_t* beam,
           const int64_t* token, const uint8_t* hits, const float* finished, const uint8_t* done,
           const uint8_t* improvable, int64_t* parents, int64_t* tokens, int64_t* order,
           float* scores, float* merged, uint8_t* merged_done, uint8_t* flags, int64_t sentences,
           int64_t beams, int64_t candidates, int64_t stops_early, float mask_value, float power,
           float far);

#endif
