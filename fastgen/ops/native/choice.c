/* Selects running beams and finished hypotheses among the candidates of a step of beam search.
 *
 * Source: decoding/search/finishing_rules.py, which has the same rules. */

#include "choice.h"

typedef struct {
  const float *values, *finished;          /* (B, K) candidates, descending; (B, M) finished */
  const int64_t *beam, *token;             /* (B, K) */
  const uint8_t *hits, *done, *improvable; /* (B, K), (B, M), (B,) */
  int64_t *parents, *tokens, *order;       /* (B, M) each */
  float *scores, *merged;                  /* (B, M) each */
  uint8_t *merged_done, *flags;            /* (B, M), (4, B) */
  int64_t sentences, beams, candidates, stops_early;
  float mask_value, power, far; /* power, far: divisors of scores at this and at the final length */
} Choice;

/* A finished hypothesis or a candidate, for ranking. */
typedef struct {
  float value;
  int done;
  int64_t index;
} Ranked;

/* Selects the beams that continue. Returns 0 if there are too few, or on a tie. */
static int choose_running(const Choice* job, int64_t b) {
  const int64_t M = job->beams, K = job->candidates, at = b * K;
  int64_t found = 0;
  for (int64_t k = 0; k < K; k++) {
    if (!(job->values[at + k] > job->mask_value / 2) ||
        (k && job->values[at + k] >= job->values[at + k - 1]))
      return 0;
    if (job->hits[at + k] || found == M) continue;
    job->parents[b * M + found] = job->beam[at + k];
    job->tokens[b * M + found] = job->token[at + k];
    job->scores[b * M + found++] = job->values[at + k];
  }
  return found == M;
}

/* Merges the newly finished hypotheses into the finished ones. Returns 0 on a tie that matters. */
static int choose_finished(const Choice* job, int64_t b, Ranked* all) {
  const int64_t M = job->beams, K = job->candidates;
  int full = 1;
  for (int64_t m = 0; m < M; m++) {
    all[m] = (Ranked){job->finished[b * M + m], job->done[b * M + m], m};
    full &= all[m].done;
  }
  for (int64_t k = 0; k < K; k++) {
    const int finishing = k < M && job->hits[b * K + k];
    float value = job->values[b * K + k] / job->power;
    if (job->stops_early && full)
      value += job->mask_value; /* separate additions, as they round differently */
    if (!job->improvable[b]) value += job->mask_value;
    if (!finishing) value += job->mask_value;
    all[M + k] = (Ranked){value, finishing, M + k};
  }
  for (int64_t m = 0; m < M; m++) {
    int64_t best = m;
    for (int64_t i = m + 1; i < M + K; i++)
      if (all[i].value > all[best].value) best = i;
    Ranked chosen = all[best];
    for (; best > m; best--) all[best] = all[best - 1]; /* stable */
    all[m] = chosen;
  }
  for (int64_t m = 0; m < M; m++)
    for (int64_t i = m + 1; i < M + K; i++)
      if (!(all[i].value < all[m].value) &&
          (all[m].value > job->mask_value / 2 || all[m].done || all[i].done))
        return 0;
  return 1;
}

/* Returns 0 if a sentence is undecided: two values are equal, one is NaN, or too few beams
 * continue. */
int choose(parallel run, unsigned threads, const float* values, const int64_t* beam,
           const int64_t* token, const uint8_t* hits, const float* finished, const uint8_t* done,
           const uint8_t* improvable, int64_t* parents, int64_t* tokens, int64_t* order,
           float* scores, float* merged, uint8_t* merged_done, uint8_t* flags, int64_t sentences,
           int64_t beams, int64_t candidates, int64_t stops_early, float mask_value, float power,
           float far) {
  Choice job = {.values = values,
                .finished = finished,
                .beam = beam,
                .token = token,
                .hits = hits,
                .done = done,
                .improvable = improvable,
                .parents = parents,
                .tokens = tokens,
                .order = order,
                .scores = scores,
                .merged = merged,
                .merged_done = merged_done,
                .flags = flags,
                .sentences = sentences,
                .beams = beams,
                .candidates = candidates,
                .stops_early = stops_early,
                .mask_value = mask_value,
                .power = power,
                .far = far};
  const int64_t B = sentences, M = beams;
  int open = 0, all_hit = 1, all_done = 1;
  (void)run, (void)threads; /* too little work for several threads */
  Ranked all[beams + candidates];
  for (int64_t b = 0; b < B; b++) {
    if (!choose_running(&job, b) || !choose_finished(&job, b, all)) return 0;
    int changed = 0, full = 1, better = 0;
    for (int64_t m = 0; m < M; m++) {
      merged[b * M + m] = all[m].value, merged_done[b * M + m] = all[m].done,
                     order[b * M + m] = all[m].index;
      changed |= all[m].index != m;
      full &= all[m].done;
    }
    const float possible = scores[b * M] / far, worst = all[M - 1].value;
    for (int64_t m = 0; m < M; m++) better |= possible > (all[m].done ? worst : mask_value);
    flags[b] = changed, flags[B + b] = improvable[b] && better, flags[2 * B + b] = full;
    open |= flags[B + b], all_done &= full;
    for (int64_t k = 0; k < candidates; k++) all_hit &= hits[b * candidates + k];
  }
  for (int64_t b = 0; b < B; b++) flags[3 * B + b] = !open || all_hit || (stops_early && all_done);
  return 1;
}
