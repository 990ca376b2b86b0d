/* What becomes of the candidates of a step of beam search. Source: decoding/search/finishing_rules.py, whose rules these are. */

#include "choice.h"

typedef struct {
  const float *values, *finished;                  /* of candidates (B, K), descending, and of finished ones (B, M) */
  const int64_t *beam, *token;                     /* (B, K) */
  const uint8_t *hits, *done, *improvable;         /* (B, K), (B, M), (B,) */
  int64_t *parents, *tokens, *order;               /* (B, M) each */
  float *scores, *merged;                          /* (B, M) each */
  uint8_t *merged_done, *flags;                    /* (B, M), (4, B) */
  int64_t sentences, beams, candidates, stops_early;
  float never, power, far;                         /* powers of lengths that scores are divided by, now and at last */
} Choice;

/* A finished hypothesis, or a candidate, while they are ranked. */
typedef struct {
  float value;
  int done;
  int64_t index;
} Ranked;

/* The candidates that live on. 0 where there are too few, or which stand first is for others to say. */
static int choose_running(const Choice *job, int64_t b) {
  const int64_t M = job->beams, K = job->candidates, at = b * K;
  int64_t found = 0;
  for (int64_t k = 0; k < K; k++) {
    if (!(job->values[at + k] > job->never / 2) || (k && job->values[at + k] >= job->values[at + k - 1])) return 0;
    if (job->hits[at + k] || found == M) continue;
    job->parents[b * M + found] = job->beam[at + k];
    job->tokens[b * M + found] = job->token[at + k];
    job->scores[b * M + found++] = job->values[at + k];
  }
  return found == M;
}

/* The finished hypotheses, with what has finished now. 0 where equals are not alike. */
static int choose_finished(const Choice *job, int64_t b, Ranked *all) {
  const int64_t M = job->beams, K = job->candidates;
  int full = 1;
  for (int64_t m = 0; m < M; m++) {
    all[m] = (Ranked){job->finished[b * M + m], job->done[b * M + m], m};
    full &= all[m].done;
  }
  for (int64_t k = 0; k < K; k++) {
    const int finishing = k < M && job->hits[b * K + k];
    float value = job->values[b * K + k] / job->power;
    if (job->stops_early && full) value += job->never; /* one after the other, as the sums round that way */
    if (!job->improvable[b]) value += job->never;
    if (!finishing) value += job->never;
    all[M + k] = (Ranked){value, finishing, M + k};
  }
  for (int64_t m = 0; m < M; m++) {
    int64_t best = m;
    for (int64_t i = m + 1; i < M + K; i++)
      if (all[i].value > all[best].value) best = i;
    Ranked chosen = all[best];
    for (; best > m; best--) all[best] = all[best - 1]; /* so that equals stay in order */
    all[m] = chosen;
  }
  for (int64_t m = 0; m < M; m++)
    for (int64_t i = m + 1; i < M + K; i++)
      if (!(all[i].value < all[m].value) && (all[m].value > job->never / 2 || all[m].done || all[i].done)) return 0;
  return 1;
}

/* Returns 0 where a sentence cannot be decided: two values are equal, one is no number, or too few live on. */
int choose(parallel run, unsigned threads, const float *values, const int64_t *beam, const int64_t *token,
           const uint8_t *hits, const float *finished, const uint8_t *done, const uint8_t *improvable, int64_t *parents,
           int64_t *tokens, int64_t *order, float *scores, float *merged, uint8_t *merged_done, uint8_t *flags,
           int64_t sentences, int64_t beams, int64_t candidates, int64_t stops_early, float never, float power,
           float far) {
  Choice job = {.values = values, .finished = finished, .beam = beam, .token = token, .hits = hits, .done = done,
                .improvable = improvable, .parents = parents, .tokens = tokens, .order = order, .scores = scores,
                .merged = merged, .merged_done = merged_done, .flags = flags, .sentences = sentences, .beams = beams,
                .candidates = candidates, .stops_early = stops_early, .never = never, .power = power, .far = far};
  const int64_t B = sentences, M = beams;
  int open = 0, all_hit = 1, all_done = 1;
  (void)run, (void)threads; /* too little work for more than one */
  Ranked all[beams + candidates];
  for (int64_t b = 0; b < B; b++) {
    if (!choose_running(&job, b) || !choose_finished(&job, b, all)) return 0;
    int changed = 0, full = 1, better = 0;
    for (int64_t m = 0; m < M; m++) {
      merged[b * M + m] = all[m].value, merged_done[b * M + m] = all[m].done, order[b * M + m] = all[m].index;
      changed |= all[m].index != m;
      full &= all[m].done;
    }
    const float possible = scores[b * M] / far, worst = all[M - 1].value;
    for (int64_t m = 0; m < M; m++) better |= possible > (all[m].done ? worst : never);
    flags[b] = changed, flags[B + b] = improvable[b] && better, flags[2 * B + b] = full;
    open |= flags[B + b], all_done &= full;
    for (int64_t k = 0; k < candidates; k++) all_hit &= hits[b * candidates + k];
  }
  for (int64_t b = 0; b < B; b++) flags[3 * B + b] = !open || all_hit || (stops_early && all_done);
  return 1;
}
