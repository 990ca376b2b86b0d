/* Selection of the next token of each row: the first of those with the highest score.
 *
 * Source: decoding/search/sampling.py, decoding/logits/repetition_penalty.py and
 * sequence_bias.py. */

#include "rows.h"

#include <string.h>

static int64_t words_of(int64_t vocabulary) { return (vocabulary + 31) / 32; }

/* Bytes of scratch memory of each thread for scores that are updated: V scores, a set of tokens. */
int64_t row_size(int64_t vocabulary) { return 4 * (vocabulary + words_of(vocabulary)); }

/* Multiplies the negative scores of a text's tokens by a penalty and divides the others by it.
 * Returns 0 if a token has no score. */
static int penalise(float *scores, uint32_t *seen, const int64_t *ids, int64_t count, int64_t V,
                    float penalty) {
  memset(seen, 0, 4 * words_of(V));
  for (int64_t i = 0; i < count; i++) {
    if (ids[i] < 0 || ids[i] >= V) return 0;
    uint32_t *word = seen + ids[i] / 32, bit = 1u << ids[i] % 32;
    if (*word & bit) continue;
    *word |= bit;
    float *score = scores + ids[i];
    *score = *score < 0.0f ? *score * penalty : *score / penalty;
  }
  return 1;
}

static int add_offsets(float *scores, const Update *of, int64_t V) {
  for (int64_t i = 0; i < of->count; i++) {
    if (of->tokens[i] < 0 || of->tokens[i] >= V) return 0;
    scores[of->tokens[i]] += of->offsets[i];
  }
  return 1;
}

/* Applies all updates to the scores of row r. Returns 0 if a token has no score. */
int update_row(float *scores, uint32_t *seen, const Texts *texts, int64_t beams, int64_t r,
               int64_t vocabulary) {
  const int64_t V = vocabulary, *ids = text_of(texts, beams, r);
  for (int64_t i = 0; i < texts->update_count; i++) {
    const Update *of = &texts->updates[i];
    if (of->penalty == 0.0) {
      if (!add_offsets(scores, of, V)) return 0;
    } else {
      const int64_t start = of->starts[r] < texts->length ? of->starts[r] : texts->length;
      if (!penalise(scores, seen, ids + start, texts->length - start, V, (float)of->penalty))
        return 0;
    }
  }
  return 1;
}

/* Returns the first of the highest scores of a row that is not banned; -1 if a score is NaN or
 * infinite, or all are banned. */
static int64_t highest_of(const float *scores, int64_t V, const uint32_t *banned) {
  int64_t best = -1;
  float most = -INFINITY, total = 0.0f;
  for (int64_t first = 0; first < V; first += 32) {
    const int64_t end = first + 32 < V ? first + 32 : V;
    vec top = splat(-INFINITY), sum_of = {};
    float here = -INFINITY;
    const uint32_t out = banned ? banned[first / 32] : 0;
    if (end - first == 32 && !out) {
      for (int64_t v = first; v < end; v += WIDTH)
        top = higher(load(scores + v), top), sum_of += load(scores + v);
      here = highest(top), total += 0.0f * sum(sum_of);
    } else {
      for (int64_t v = first; v < end; v++) {
        total += 0.0f * scores[v];
        if (!(out >> (v - first) & 1) && scores[v] > here) here = scores[v];
      }
    }
    if (!(here > most)) continue;
    most = here;
    for (best = first; scores[best] != here || out >> (best - first) & 1;) best++;
  }
  return total == 0.0f ? best : -1;
}

typedef struct {
  const float *logits;
  const uint32_t *banned;
  const Texts *texts;
  int64_t *tokens, beams, vocabulary;
  char *held;
} Highest;

static void find(void *given, Tasks *tasks) {
  Highest *job = given;
  const int64_t V = job->vocabulary;
  float *held = job->held ? (float *)(job->held + tasks->thread * row_size(V)) : NULL;
  for (int64_t r; (r = next(tasks)) >= 0;) {
    const float *scores = job->logits + r * V;
    int updated = 1;
    if (held) {
      scores = memcpy(held, scores, 4 * V);
      updated = update_row(held, (uint32_t *)(held + V), job->texts, job->beams, r, V);
    }
    const uint32_t *banned = job->banned ? job->banned + r * words_of(V) : NULL;
    job->tokens[r] = updated ? highest_of(scores, V, banned) : -1;
  }
}

/* Finds the first of the highest logits of each row that is not banned, after the updates of its
 * text. The logits stay as they are.
 *
 * banned: (R, words of a set), or NULL. held: `row_size` bytes for each thread, or NULL without
 * updates. Returns 0 if a row has none, a logit is NaN or infinite, or a token of a text has no
 * logit. */
int find_highest(parallel run, unsigned threads, int64_t *tokens, const float *logits,
                 const uint32_t *banned, const Texts *texts, void *held, int64_t rows,
                 int64_t beams, int64_t vocabulary) {
  Highest job = {.logits = logits, .banned = banned, .texts = texts, .tokens = tokens,
                 .beams = beams, .vocabulary = vocabulary, .held = held};
  in_parallel(run, threads, find, &job, rows);
  for (int64_t r = 0; r < rows; r++)
    if (tokens[r] < 0) return 0;
  return 1;
}
