/* Attention of one decode step over keys and values that the beams of a sentence share, in fp32.
 *
 * A task is one key head of a sentence, with all beams and query heads that read it. Keys that all of them see are read
 * once for four of these rows at a time; of the others a row reads those that it sees, so that slots which no beam sees
 * any more are not read at all. Source: ops/beam_attention.py. */

#include <stdlib.h>
#include <string.h>

#include "attention.h"

/* TOGETHER: rows, PAIR: keys, ACROSS: vectors of a value whose sums stay in registers. NEAR: values that stay near. */
enum { TOGETHER = 4, PAIR = 2, ACROSS = REGISTERS == 32 ? 4 : 2, NEAR = 32, AHEAD = 16, MOST = 128 / WIDTH };

/* What a thread works with. */
typedef struct {
  int64_t rows, pitch;             /* of the scores, (rows, pitch): first of shared keys, then of a row's own */
  float *scores;
  int32_t *shared, *own;           /* keys that all rows see, if there are several; what a row sees beside, (rows, N) */
  int64_t shared_count, own_count[ROWS];
  const float *query[ROWS], *mask[ROWS], *bias[ROWS];
  float *out[ROWS];
} Space;

static void place_rows(const Attention *job, Space *at, int64_t b, int64_t head) {
  for (int64_t r = 0; r < at->rows; r++) {
    int64_t m = r % job->beams, h = head * job->groups + r / job->beams;
    at->query[r] = job->query + b * job->query_b + m * job->query_m + h * job->query_h;
    at->out[r] = job->out + b * job->out_b + (m * job->key_heads * job->groups + h) * job->dims;
    at->mask[r] = job->mask + b * job->mask_b + m * job->mask_m + h * job->mask_h;
    at->bias[r] = job->bias + b * job->bias_b + h * job->bias_h;
  }
}

static void list_keys(const Attention *job, Space *at) {
  at->shared_count = 0;
  for (int64_t r = 0; r < at->rows; r++) at->own_count[r] = 0;
  for (int64_t n = 0; n < job->count; n++) {
    int64_t seeing = at->rows;
    if (job->mask)
      for (int64_t r = 0; r < at->rows; r++) seeing -= at->mask[r][n] == -INFINITY;
    if (seeing == at->rows && at->rows > 1)
      at->shared[at->shared_count++] = (int32_t)n;
    else if (seeing)
      for (int64_t r = 0; r < at->rows; r++) {
        at->own[r * job->count + at->own_count[r]] = (int32_t)n;
        at->own_count[r] += !job->mask || at->mask[r][n] != -INFINITY;
      }
  }
}

INLINE void fetch(const float *rows, int64_t pitch, const int32_t *list, int64_t at, int64_t count, const int D) {
  if (at + AHEAD < count)
    for (int i = 0; i < D; i += 16) __builtin_prefetch(rows + list[at + AHEAD] * pitch + i);
}

/* Query times keys: the scores of the shared keys, for four rows at once, and of each row's own, four keys at once. */
INLINE void multiply_keys(const Attention *job, Space *at, const float *keys, const int D) {
  const int C = D / WIDTH;
  const int64_t pitch = job->keys_n;
  for (int64_t r = 0; r < at->rows; r += TOGETHER) {
    vec query[TOGETHER][MOST];
    int64_t there = at->rows - r < TOGETHER ? at->rows - r : TOGETHER;
    UNROLLED for (int t = 0; t < TOGETHER; t++)
      UNROLLED for (int i = 0; i < C; i++) query[t][i] = load(at->query[r + (t < there ? t : 0)] + WIDTH * i) * job->scale;
    for (int64_t s = 0; s < at->shared_count; s += PAIR) {
      const float *key[PAIR];
      vec product[PAIR][TOGETHER] = {};
      UNROLLED for (int p = 0; p < PAIR; p++) {
        const int64_t here = s + p < at->shared_count ? s + p : s;
        key[p] = keys + at->shared[here] * pitch;
        fetch(keys, pitch, at->shared, here, at->shared_count, D);
      }
      UNROLLED for (int i = 0; i < C; i++) {
        vec part[PAIR];
        UNROLLED for (int p = 0; p < PAIR; p++) part[p] = load(key[p] + WIDTH * i);
        UNROLLED for (int t = 0; t < TOGETHER; t++)
          UNROLLED for (int p = 0; p < PAIR; p++) product[p][t] += query[t][i] * part[p];
      }
      UNROLLED for (int p = 0; p < PAIR; p++) { /* behind an odd number the pitch has room, and own scores come later */
        const quad found = sums(product[p][0], product[p][1], product[p][2], product[p][3]);
        for (int t = 0; t < there; t++) at->scores[(r + t) * at->pitch + s + p] = found[t];
      }
    }
  }
  for (int64_t r = 0; r < at->rows; r++) {
    const int32_t *own = at->own + r * job->count;
    const int64_t count = at->own_count[r];
    float *scores = at->scores + r * at->pitch + at->shared_count;
    vec query[MOST];
    UNROLLED for (int i = 0; i < C; i++) query[i] = load(at->query[r] + WIDTH * i) * job->scale;
    for (int64_t s = 0; s < count; s += TOGETHER) {
      vec product[TOGETHER] = {};
      UNROLLED for (int t = 0; t < TOGETHER; t++) {
        const float *key = keys + own[s + t < count ? s + t : count - 1] * pitch;
        fetch(keys, pitch, own, s + t, count, D);
        UNROLLED for (int i = 0; i < C; i++) product[t] += query[i] * load(key + WIDTH * i);
      }
      store_quad(scores + s, sums(product[0], product[1], product[2], product[3])); /* the pitch has room */
    }
  }
}

INLINE void add_to_scores(float *scores, const float *added, const int32_t *own, int64_t shared, int64_t count,
                          const int32_t *of_all) {
  for (int64_t s = 0; s < shared; s++) scores[s] += added[of_all[s]];
  for (int64_t s = shared; s < count; s++) scores[s] += added[own[s - shared]];
}

/* Scores become weights, without the division by their sum, which is returned. */
INLINE float weigh(const Attention *job, Space *at, int64_t r) {
  float *scores = at->scores + r * at->pitch;
  const int32_t *own = at->own + r * job->count;
  const int64_t shared = at->shared_count, count = shared + at->own_count[r];
  if (job->bias) add_to_scores(scores, at->bias[r], own, shared, count, at->shared);
  if (job->mask) add_to_scores(scores, at->mask[r], own, shared, count, at->shared);
  for (int64_t s = count; s % WIDTH; s++) scores[s] = -INFINITY;
  vec most = splat(-INFINITY), total = {};
  for (int64_t s = 0; s < count; s += WIDTH) most = higher(load(scores + s), most);
  const float top = highest(most);
  for (int64_t s = 0; s < count; s += WIDTH) {
    vec weight = exponential(load(scores + s) - top);
    store(scores + s, weight);
    total += weight;
  }
  return sum(total);
}

/* Weights times the values that all rows see, of four rows at once: some values after the other, so that they are near
 * while one part of them after the other is added. */
INLINE void add_shared(const Attention *job, Space *at, const float *values, int64_t r, const int D) {
  const int C = D / WIDTH;
  const int64_t pitch = job->values_n, there = at->rows - r < TOGETHER ? at->rows - r : TOGETHER;
  const float *weights[TOGETHER];
  float mixed[TOGETHER][WIDTH * MOST];
  for (int t = 0; t < TOGETHER; t++) weights[t] = at->scores + (r + (t < there ? t : 0)) * at->pitch;
  UNROLLED for (int t = 0; t < TOGETHER; t++)
    UNROLLED for (int i = 0; i < C; i++) store(mixed[t] + WIDTH * i, splat(0.0f));
  for (int64_t first = 0; first < at->shared_count; first += NEAR) {
    const int64_t end = first + NEAR < at->shared_count ? first + NEAR : at->shared_count;
    UNROLLED for (int c = 0; c < C; c += ACROSS) {
      vec sum_of[TOGETHER][ACROSS];
#define EACH UNROLLED for (int t = 0; t < TOGETHER; t++) UNROLLED for (int i = 0; i < ACROSS && c + i < C; i++)
      EACH sum_of[t][i] = load(mixed[t] + WIDTH * (c + i));
      for (int64_t s = first; s < end; s++) {
        const float *value = values + at->shared[s] * pitch + WIDTH * c;
        if (c == 0) fetch(values, pitch, at->shared, s, at->shared_count, D);
        vec part[ACROSS];
        UNROLLED for (int i = 0; i < ACROSS && c + i < C; i++) part[i] = load(value + WIDTH * i);
        EACH sum_of[t][i] += weights[t][s] * part[i];
      }
      EACH store(mixed[t] + WIDTH * (c + i), sum_of[t][i]);
#undef EACH
    }
  }
  for (int t = 0; t < there; t++)
    UNROLLED for (int i = 0; i < C; i++) store(at->out[r + t] + WIDTH * i, load(mixed[t] + WIDTH * i));
}

/* Weights times values, as the scores. */
INLINE void add_values(const Attention *job, Space *at, const float *values, const float *total, const int D) {
  const int C = D / WIDTH;
  const int64_t pitch = job->values_n;
  for (int64_t r = 0; r < at->rows; r += TOGETHER) add_shared(job, at, values, r, D);
  for (int64_t r = 0; r < at->rows; r++) {
    const int32_t *own = at->own + r * job->count;
    const int64_t count = at->own_count[r];
    const float *weights = at->scores + r * at->pitch + at->shared_count;
    vec even[MOST], odd[MOST]; /* two sums, so that one addition need not wait for the other */
    UNROLLED for (int i = 0; i < C; i++) even[i] = load(at->out[r] + WIDTH * i), odd[i] = splat(0.0f);
    int64_t s = 0;
    for (; s + 1 < count; s += 2) {
      const float *one = values + own[s] * pitch, *other = values + own[s + 1] * pitch;
      fetch(values, pitch, own, s, count, D);
      fetch(values, pitch, own, s + 1, count, D);
      UNROLLED for (int i = 0; i < C; i++) {
        even[i] += weights[s] * load(one + WIDTH * i);
        odd[i] += weights[s + 1] * load(other + WIDTH * i);
      }
    }
    if (s < count)
      UNROLLED for (int i = 0; i < C; i++) even[i] += weights[s] * load(values + own[s] * pitch + WIDTH * i);
    const float share = 1.0f / total[r]; /* of a row that sees nothing 1 / 0, and its values become 0 * inf: NaN */
    UNROLLED for (int i = 0; i < C; i++) store(at->out[r] + WIDTH * i, (even[i] + odd[i]) * share);
  }
}

/* The newest tokens' keys and values of one head, written to their slots. */
static void keep_newest(const Attention *job, int64_t b, int64_t head) {
  const size_t bytes = sizeof(float) * job->dims;
  for (int64_t m = 0; m < job->beams; m++) {
    const int64_t from = (b * job->beams + m) * job->new_row + head * job->dims, slot = job->slot + m;
    memcpy(job->keys + b * job->keys_b + head * job->keys_h + slot * job->keys_n, job->new_keys + from, bytes);
    memcpy(job->values + b * job->values_b + head * job->values_h + slot * job->values_n, job->new_values + from, bytes);
  }
}

/* What the heads of a sentence give to each key; one thread has all of them. */
static void note_weights(const Attention *job, const Space *at, const float *total, int64_t b, int64_t head) {
  float *of_beams = job->weights + b * job->beams * job->count;
  if (head == 0) memset(of_beams, 0, sizeof(float) * job->beams * job->count);
  for (int64_t r = 0; r < at->rows; r++) {
    float *weights = of_beams + r % job->beams * job->count;
    const float *scores = at->scores + r * at->pitch, share = 1.0f / (total[r] * job->key_heads * job->groups);
    const int32_t *own = at->own + r * job->count;
    if (!(total[r] > 0.0f)) /* nothing is seen, or NaN */
      for (int64_t n = 0; n < job->count; n++) weights[n] = NAN;
    for (int64_t s = 0; s < at->shared_count; s++) weights[at->shared[s]] += scores[s] * share;
    for (int64_t s = 0; s < at->own_count[r]; s++) weights[own[s]] += scores[at->shared_count + s] * share;
  }
}

INLINE void attend(const Attention *job, Space *at, int64_t b, int64_t head, const int D) {
  float total[ROWS];
  multiply_keys(job, at, job->keys + b * job->keys_b + head * job->keys_h, D);
  for (int64_t r = 0; r < at->rows; r++) total[r] = weigh(job, at, r);
  if (job->weights) note_weights(job, at, total, b, head);
  add_values(job, at, job->values + b * job->values_b + head * job->values_h, total, D);
}

void work_on_attention(void *given) {
  Attention *job = given;
  /* All keys, up to a whole vector and a whole store of four, wherever that begins. */
  Space at = {.rows = job->beams * job->groups, .pitch = ((job->count + TOGETHER - 1) / WIDTH + 1) * WIDTH};
  const int64_t tasks = job->sentences * job->key_heads, size = at.rows * at.pitch + (at.rows + 1) * job->count;
  at.scores = malloc(4 * size);
  if (!at.scores) {
    __atomic_store_n(&job->without_memory, 1, __ATOMIC_RELAXED);
    return;
  }
  at.shared = (int32_t *)(at.scores + at.rows * at.pitch);
  at.own = at.shared + job->count;
  int64_t listed = -1;
  for (int64_t chunk; (chunk = next(&job->next)) * job->at_once < tasks;)
    for (int64_t i = 0; i < job->at_once; i++) {
      const int64_t task = chunk * job->at_once + i, b = task / job->key_heads, head = task % job->key_heads;
      if (task >= tasks) break;
      if (job->new_keys) keep_newest(job, b, head);
      place_rows(job, &at, b, head);
      if (b != listed || job->mask_h) list_keys(job, &at);
      listed = b;
      switch (job->dims) {
        case 16: attend(job, &at, b, head, 16); break;
        case 32: attend(job, &at, b, head, 32); break;
        case 48: attend(job, &at, b, head, 48); break;
        case 64: attend(job, &at, b, head, 64); break;
        case 80: attend(job, &at, b, head, 80); break;
        case 96: attend(job, &at, b, head, 96); break;
        case 128: attend(job, &at, b, head, 128); break;
      }
    }
  free(at.scores);
}

/* All heads of a sentence at once share a list of keys; with few sentences, threads share the heads. */
void prepare_attention(Attention *job, unsigned threads) {
  job->at_once = threads > 1 && job->sentences < 4 * threads && !job->weights ? 1 : job->key_heads;
  job->next = job->without_memory = 0;
}

/* Arguments as those of `Attention`. Returns 0 where there was no memory for the scores. */
int beam_attention(parallel run, unsigned threads, float *out, const float *query, const float *keys,
                   const float *values, const float *mask, int64_t sentences, int64_t beams, int64_t key_heads,
                   int64_t groups, int64_t count, int64_t dims, float scale, int64_t query_b, int64_t query_m,
                   int64_t query_h, int64_t keys_b, int64_t keys_h, int64_t keys_n, int64_t values_b, int64_t values_h,
                   int64_t values_n, int64_t mask_b, int64_t mask_h, int64_t mask_m) {
  Attention job = {.out = out, .query = query, .mask = mask, .keys = (float *)keys, .values = (float *)values,
                   .sentences = sentences, .beams = beams, .key_heads = key_heads, .groups = groups, .count = count,
                   .dims = dims, .scale = scale, .out_b = beams * key_heads * groups * dims, .query_b = query_b, .query_m = query_m, .query_h = query_h,
                   .keys_b = keys_b, .keys_h = keys_h, .keys_n = keys_n, .values_b = values_b, .values_h = values_h,
                   .values_n = values_n, .mask_b = mask_b, .mask_h = mask_h, .mask_m = mask_m};
  prepare_attention(&job, threads);
  in_parallel(run, threads, work_on_attention, &job);
  return !job.without_memory;
}
