/* Attention of one decode step over keys and values that the beams of a sentence share.
 *
 * Successive tokens of one text attend one by one, each to the keys up to its own, so that the
 * result of each is, bit by bit, that of a decode step of its own.
 *
 * Keys and values are fp32, bf16 or fp16; scores, softmax and sums are fp32. A task is one key head
 * of a sentence, with all beams and query heads that read it. Keys that all of these rows see are
 * read once for four rows at a time. Of the other keys, a row reads those that it sees, so that
 * slots that no beam sees any more are not read at all. Source: ops/beam_attention.py.
 *
 * The dimensions of a head are read in pieces of at most 128, whose vectors stay in registers: the
 * score of a key is the sum of those of its pieces. With latent attention
 * (ops/latent_attention.py), all heads read one key, whose last pieces, `rope_keys`, are no part of
 * the values; the others are the values. Parts of the heads then take the place of key heads. */

#include <stdlib.h>
#include <string.h>

#include "attention.h"

/* TOGETHER: rows, PAIR: keys, ACROSS: vectors of a value, with sums in registers. NEAR: values that
 * stay in the cache. AHEAD: keys between a load and its prefetch. MOST: vectors of a piece. */
enum { TOGETHER = 4, PAIR = 2, ACROSS = REGISTERS == 32 ? 4 : 2, NEAR = 32, AHEAD = 16 };
enum { MOST = 128 / WIDTH, LINE = 64 };

/* The state of a thread. */
typedef struct {
  int64_t rows, pitch;
  float *scores;         /* (rows, pitch): of the shared keys, then of a row's own */
  int32_t *shared, *own; /* keys that all of several rows see; (rows, N), what else a row sees */
  int64_t shared_count, own_count[ROWS];
  const float *query[ROWS], *mask[ROWS], *bias[ROWS];
  float *out[ROWS], sink[ROWS];
} Space;

static void place_rows(const Attention *job, Space *at, int64_t b, int64_t head) {
  for (int64_t r = 0; r < at->rows; r++) {
    int64_t m = r % job->beams, h = head * job->groups + r / job->beams;
    at->query[r] = job->query + b * job->query_b + m * job->query_m + h * job->query_h;
    at->out[r] = job->out + b * job->out_b + (m * job->key_heads * job->groups + h) * job->dims;
    at->mask[r] = job->mask + b * job->mask_b + m * job->mask_m + h * job->mask_h;
    at->bias[r] = job->bias + b * job->bias_b + h * job->bias_h;
    at->sink[r] = job->sinks ? any_number(job->sinks, h, job->out_dtype) : -INFINITY;
  }
}

/* Lists the keys that rows see: those that neither the mask nor a bias of all heads hides. */
static void list_keys(const Attention *job, Space *at) {
  const int hides = job->bias && !job->bias_h;
  at->shared_count = 0;
  for (int64_t r = 0; r < at->rows; r++) at->own_count[r] = 0;
  for (int64_t n = 0; n < job->count; n++) {
    int64_t seeing = at->rows;
    if (hides && at->bias[0][n] == -INFINITY) continue;
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

/* A piece of the keys, or values, of one head, from dimension `column` of the query, or output, on.
 * Those of the first `common` slots lie elsewhere. */
typedef struct {
  const void *common_rows, *rows;
  int64_t common, pitch, column;
} Lines;

INLINE const void *line(const Lines *of, int64_t slot, const int dtype) {
  return after(slot < of->common ? of->common_rows : of->rows, slot * of->pitch, dtype);
}

INLINE void fetch(const Lines *lines, const int32_t *list, int64_t at, int64_t count, const int D,
                  const int dtype) {
  if (at + AHEAD < count) {
    const char *row = line(lines, list[at + AHEAD], dtype);
    for (int i = 0; i < D * size_of(dtype); i += LINE) __builtin_prefetch(row + i);
  }
}

/* Adds query times keys, of a piece of D dimensions, to the scores: those of the shared keys, for
 * four rows at once, and of each row's own, for four keys at once. The first piece begins them. */
INLINE void multiply_keys(const Attention *job, Space *at, const Lines *keys, const int D,
                          const int dtype) {
  const int C = D / WIDTH;
  for (int64_t r = 0; r < at->rows; r += TOGETHER) {
    vec query[TOGETHER][MOST];
    int64_t there = at->rows - r < TOGETHER ? at->rows - r : TOGETHER;
    UNROLLED for (int t = 0; t < TOGETHER; t++)
      UNROLLED for (int i = 0; i < C; i++)
        query[t][i] =
            load(at->query[r + (t < there ? t : 0)] + keys->column + WIDTH * i) * job->scale;
    for (int64_t s = 0; s < at->shared_count; s += PAIR) {
      const void *key[PAIR];
      vec product[PAIR][TOGETHER] = {};
      UNROLLED for (int p = 0; p < PAIR; p++) {
        const int64_t here = s + p < at->shared_count ? s + p : s;
        key[p] = line(keys, at->shared[here], dtype);
        fetch(keys, at->shared, here, at->shared_count, D, dtype);
      }
      UNROLLED for (int i = 0; i < C; i++) {
        vec part[PAIR];
        UNROLLED for (int p = 0; p < PAIR; p++) part[p] = load_as(key[p], WIDTH * i, dtype);
        UNROLLED for (int t = 0; t < TOGETHER; t++)
          UNROLLED for (int p = 0; p < PAIR; p++) product[p][t] += query[t][i] * part[p];
      }
      UNROLLED for (int p = 0; p < PAIR; p++) {
        const quad found = sums(product[p][0], product[p][1], product[p][2], product[p][3]);
        for (int t = 0; t < there && s + p < at->shared_count; t++) {
          float *score = at->scores + (r + t) * at->pitch + s + p;
          *score = keys->column ? *score + found[t] : found[t];
        }
      }
    }
  }
  for (int64_t r = 0; r < at->rows; r++) {
    const int32_t *own = at->own + r * job->count;
    const int64_t count = at->own_count[r];
    float *scores = at->scores + r * at->pitch + at->shared_count;
    vec query[MOST];
    UNROLLED for (int i = 0; i < C; i++)
      query[i] = load(at->query[r] + keys->column + WIDTH * i) * job->scale;
    for (int64_t s = 0; s < count; s += TOGETHER) {
      vec product[TOGETHER] = {};
      UNROLLED for (int t = 0; t < TOGETHER; t++) {
        const void *key = line(keys, own[s + t < count ? s + t : count - 1], dtype);
        fetch(keys, own, s + t, count, D, dtype);
        UNROLLED for (int i = 0; i < C; i++)
          product[t] += query[i] * load_as(key, WIDTH * i, dtype);
      }
      /* The pitch has room for a whole store. */
      const quad found = sums(product[0], product[1], product[2], product[3]);
      store_quad(scores + s, keys->column ? load_quad(scores + s) + found : found);
    }
  }
}

INLINE void add_to_scores(float *scores, const float *added, const int32_t *own, int64_t shared,
                          int64_t count, const int32_t *of_all) {
  for (int64_t s = 0; s < shared; s++) scores[s] += added[of_all[s]];
  for (int64_t s = shared; s < count; s++) scores[s] += added[own[s - shared]];
}

/* Replaces scores by weights, and returns their sum, by which they are not divided yet. */
INLINE float weigh(const Attention *job, Space *at, int64_t r) {
  float *scores = at->scores + r * at->pitch;
  const int32_t *own = at->own + r * job->count;
  const int64_t shared = at->shared_count, count = shared + at->own_count[r];
  if (job->softcap)
    for (int64_t n = 0; n < count; n += WIDTH)
      store(scores + n, hyperbolic_tangent(load(scores + n) / job->softcap) * job->softcap);
  if (job->bias) add_to_scores(scores, at->bias[r], own, shared, count, at->shared);
  if (job->mask) add_to_scores(scores, at->mask[r], own, shared, count, at->shared);
  for (int64_t s = count; s % WIDTH; s++) scores[s] = -INFINITY;
  vec most = splat(-INFINITY), total = {};
  for (int64_t s = 0; s < count; s += WIDTH) most = higher(load(scores + s), most);
  const float own_top = highest(most), sink = at->sink[r];
  const float top = sink > own_top ? sink : own_top;
  for (int64_t s = 0; s < count; s += WIDTH) {
    vec weight = exponential(load(scores + s) - top);
    store(scores + s, weight);
    total += weight;
  }
  return sum(total) + (job->sinks ? exponential(splat(sink - top))[0] : 0.0f);
}

/* Adds weights times the values that all rows see, for four rows at once. Values are processed in
 * groups that stay in the cache while their columns are added one after the other. */
INLINE void add_shared(Space *at, const Lines *values, int64_t r, const int D, const int dtype) {
  const int C = D / WIDTH;
  const int64_t there = at->rows - r < TOGETHER ? at->rows - r : TOGETHER;
  const float *weights[TOGETHER];
  float mixed[TOGETHER][WIDTH * MOST];
  for (int t = 0; t < TOGETHER; t++)
    weights[t] = at->scores + (r + (t < there ? t : 0)) * at->pitch;
  UNROLLED for (int t = 0; t < TOGETHER; t++)
    UNROLLED for (int i = 0; i < C; i++) store(mixed[t] + WIDTH * i, splat(0.0f));
  for (int64_t first = 0; first < at->shared_count; first += NEAR) {
    const int64_t left = at->shared_count - first, end = first + (left < NEAR ? left : NEAR);
    UNROLLED for (int c = 0; c < C; c += ACROSS) {
      vec sum_of[TOGETHER][ACROSS];
#define EACH_PART UNROLLED for (int i = 0; i < ACROSS && c + i < C; i++)
#define EACH UNROLLED for (int t = 0; t < TOGETHER; t++) EACH_PART
      EACH sum_of[t][i] = load(mixed[t] + WIDTH * (c + i));
      for (int64_t s = first; s < end; s++) {
        const void *value = after(line(values, at->shared[s], dtype), WIDTH * c, dtype);
        if (c == 0) fetch(values, at->shared, s, at->shared_count, D, dtype);
        vec part[ACROSS];
        EACH_PART part[i] = load_as(value, WIDTH * i, dtype);
        EACH sum_of[t][i] += weights[t][s] * part[i];
      }
      EACH store(mixed[t] + WIDTH * (c + i), sum_of[t][i]);
#undef EACH
#undef EACH_PART
    }
  }
  for (int t = 0; t < there; t++)
    UNROLLED for (int i = 0; i < C; i++)
      store(at->out[r + t] + values->column + WIDTH * i, load(mixed[t] + WIDTH * i));
}

/* Writes weights times a piece of the values, of the shared keys and of each row's own, to the
 * output. */
INLINE void add_values(const Attention *job, Space *at, const Lines *values, const float *total,
                       const int D, const int dtype) {
  const int C = D / WIDTH;
  for (int64_t r = 0; r < at->rows; r += TOGETHER) add_shared(at, values, r, D, dtype);
  for (int64_t r = 0; r < at->rows; r++) {
    const int32_t *own = at->own + r * job->count;
    const int64_t count = at->own_count[r];
    const float *weights = at->scores + r * at->pitch + at->shared_count;
    float *to = at->out[r] + values->column;
    vec even[MOST], odd[MOST]; /* two sums, so that additions need not wait for each other */
    UNROLLED for (int i = 0; i < C; i++) even[i] = load(to + WIDTH * i), odd[i] = splat(0.0f);
    int64_t s = 0;
    for (; s + 1 < count; s += 2) {
      const void *one = line(values, own[s], dtype), *other = line(values, own[s + 1], dtype);
      fetch(values, own, s, count, D, dtype);
      fetch(values, own, s + 1, count, D, dtype);
      UNROLLED for (int i = 0; i < C; i++) {
        even[i] += weights[s] * load_as(one, WIDTH * i, dtype);
        odd[i] += weights[s + 1] * load_as(other, WIDTH * i, dtype);
      }
    }
    if (s < count)
      UNROLLED for (int i = 0; i < C; i++)
        even[i] += weights[s] * load_as(line(values, own[s], dtype), WIDTH * i, dtype);
    const float share = 1.0f / total[r]; /* of a row that sees nothing inf; it gets 0 * inf, NaN */
    UNROLLED for (int i = 0; i < C; i++) {
      const vec mixed = (even[i] + odd[i]) * share;
      /* Keys in memory have the dtype of the output; keys of an encoder are fp32 buffers. */
      const vec out = dtype == FP32 ? rounded(mixed, (int)job->out_dtype) : rounded(mixed, dtype);
      store(to + WIDTH * i, out);
    }
  }
}

/* Writes the newest tokens' keys and values of one head to their slots. */
static void keep_newest(const Attention *job, int64_t b, int64_t head) {
  for (int64_t m = 0; m < job->beams; m++) {
    const int64_t from = (b * job->beams + m) * job->new_row + head * job->dims;
    const int64_t slot = job->slot + m;
    const int64_t key = b * job->keys_b + head * job->keys_h + slot * job->keys_n;
    const int64_t value = b * job->values_b + head * job->values_h + slot * job->values_n;
    WITH_DTYPE(job->dtype, write_row, job->keys, key, job->new_keys + from, job->dims)
    WITH_DTYPE(job->dtype, write_row, job->values, value, job->new_values + from, job->dims)
  }
}

/* Adds the weights of a head to the mean over all heads, which one thread computes. */
static void note_weights(const Attention *job, const Space *at, const float *total, int64_t b,
                         int64_t head) {
  float *of_beams = job->weights + b * job->beams * job->count;
  if (head == 0) memset(of_beams, 0, sizeof(float) * job->beams * job->count);
  for (int64_t r = 0; r < at->rows; r++) {
    float *weights = of_beams + r % job->beams * job->count;
    const float *scores = at->scores + r * at->pitch;
    const float share = 1.0f / (total[r] * job->key_heads * job->groups);
    const int32_t *own = at->own + r * job->count;
    if (!(total[r] > 0.0f)) /* the row sees nothing, or a score is NaN */
      for (int64_t n = 0; n < job->count; n++) weights[n] = NAN;
    for (int64_t s = 0; s < at->shared_count; s++) weights[at->shared[s]] += scores[s] * share;
    for (int64_t s = 0; s < at->own_count[r]; s++)
      weights[own[s]] += scores[at->shared_count + s] * share;
  }
}

/* Functions of pieces of as many dimensions: in one function they take a compiler a minute. */
#define PIECES OF(16) OF(32) OF(48) OF(64) OF(80) OF(96) OF(128)
#define OF(dims) \
  static __attribute__((noinline)) void multiply_##dims(const Attention *job, Space *at, \
                                                        const Lines *keys) { \
    WITH_DTYPE(job->dtype, multiply_keys, job, at, keys, dims) \
  } \
  static __attribute__((noinline)) void add_##dims(const Attention *job, Space *at, \
                                                   const Lines *values, const float *total) { \
    WITH_DTYPE(job->dtype, add_values, job, at, values, total, dims) \
  }
PIECES
#undef OF

/* Dimensions of the first piece of a multiple of 16 dimensions. */
static int64_t piece_of(int64_t dims) { return dims > 128 ? 128 : dims == 112 ? 96 : dims; }

static Lines piece_at(const Lines *of, int64_t column, int64_t first, int64_t dtype) {
  Lines piece = *of;
  piece.rows = after(of->rows, column, dtype), piece.column = first + column;
  if (of->common) piece.common_rows = after(of->common_rows, column, dtype);
  return piece;
}

/* Adds the scores of the keys' dimensions, which the query has from `first` on. */
static void add_scores(const Attention *job, Space *at, const Lines *keys, int64_t first,
                       int64_t dims) {
  for (int64_t c = 0, size; c < dims; c += size) {
    const Lines piece = piece_at(keys, c, first, job->dtype);
    switch (size = piece_of(dims - c)) {
#define OF(dims) \
  case dims: multiply_##dims(job, at, &piece); break;
      PIECES
#undef OF
    }
  }
}

static void write_output(const Attention *job, Space *at, const Lines *values,
                         const float *total) {
  for (int64_t c = 0, size; c < job->dims; c += size) {
    const Lines piece = piece_at(values, c, 0, job->dtype);
    switch (size = piece_of(job->dims - c)) {
#define OF(dims) \
  case dims: add_##dims(job, at, &piece, total); break;
      PIECES
#undef OF
    }
  }
}

static void attend(const Attention *job, Space *at, int64_t b, int64_t head) {
  const int64_t of_head = head * job->common_h, dtype = job->dtype;
  const Lines keys = {.common_rows = after(job->common_keys, of_head, dtype),
                      .rows = after(job->keys, b * job->keys_b + head * job->keys_h, dtype),
                      .common = job->common, .pitch = job->keys_n};
  const Lines values = {.common_rows = after(job->common_values, of_head, dtype),
                        .rows = after(job->values, b * job->values_b + head * job->values_h, dtype),
                        .common = job->common, .pitch = job->values_n};
  float total[ROWS];
  add_scores(job, at, &keys, 0, job->dims);
  if (job->rope) {
    const Lines rope = {.common_rows = job->common_rope, .common = job->common,
                        .rows = after(job->rope_keys, b * job->rope_b, dtype),
                        .pitch = job->rope_n};
    add_scores(job, at, &rope, job->dims, job->rope);
  }
  for (int64_t r = 0; r < at->rows; r++) total[r] = weigh(job, at, r);
  if (job->weights) note_weights(job, at, total, b, head);
  write_output(job, at, &values, total);
}

/* The attention of one of several successive tokens. */
static Attention of_token(const Attention *job, int64_t token) {
  Attention one = *job;
  one.beams = 1;
  one.query += token * job->query_m;
  one.out += token * job->key_heads * job->groups * job->dims;
  if (job->mask) one.mask += token * job->mask_m;
  if (job->of_text) one.count = job->slot + token + 1;
  return one;
}

/* Attends with heads from `head` to `end` of a sentence; lists keys unless they are listed. */
static void attend_heads(const Attention *job, Space *at, int64_t b, int64_t head, int64_t end,
                         int listed) {
  for (; head < end; head++) {
    place_rows(job, at, b, head);
    if (!listed || job->mask_h) list_keys(job, at);
    listed = 1;
    attend(job, at, b, head);
  }
}

void work_on_attention(void *given, Tasks *tasks) {
  Attention *job = given;
  /* The pitch has room for all keys, in whole vectors and whole stores of four, from any key on. */
  Space at = {.rows = (job->successive ? 1 : job->beams) * job->groups,
              .pitch = ((job->count + TOGETHER - 1) / WIDTH + 1) * WIDTH};
  at.scores = malloc(4 * (at.rows * at.pitch + (at.rows + 1) * job->count));
  if (!at.scores) {
    __atomic_store_n(&job->without_memory, 1, __ATOMIC_RELAXED);
    while (next(tasks) >= 0) {}
    return;
  }
  at.shared = (int32_t *)(at.scores + at.rows * at.pitch);
  at.own = at.shared + job->count;
  int64_t listed = -1;
  for (int64_t chunk; (chunk = next(tasks)) >= 0;) {
    const int64_t first = chunk * job->at_once, b = first / job->key_heads;
    const int64_t head = first % job->key_heads, end = head + job->at_once;
    for (int64_t h = head; job->new_keys && h < end; h++) keep_newest(job, b, h);
    for (int64_t token = 0; job->successive && token < job->beams; token++) {
      const Attention one = of_token(job, token);
      attend_heads(&one, &at, b, head, end, 0);
    }
    if (!job->successive) attend_heads(job, &at, b, head, end, b == listed);
    listed = b;
  }
  free(at.scores);
}

/* Divides the heads that read the same keys, so that no part has too many rows, and all threads
 * have tasks. No part has a single row of several, which would add up in another order. */
static void part_heads(Attention *job, unsigned threads) {
  const int64_t heads = job->groups, beams = job->successive ? 1 : job->beams;
  for (int64_t parts = 1, fits = 0; parts <= heads; parts++) {
    const int64_t rows = heads / parts * beams;
    if (heads % parts) continue;
    if (fits && rows == 1) return;
    job->key_heads = parts, job->groups = heads / parts;
    fits = rows <= ROWS;
    const int has_tasks = threads == 1 || job->sentences * parts >= 2 * threads;
    if (fits && (has_tasks || rows <= 2 * TOGETHER)) return;
  }
}

/* All heads of a sentence share its list of keys; with few sentences, threads share the heads.
 * Returns the number of tasks. */
int64_t prepare_attention(Attention *job, unsigned threads) {
  if (job->rope) part_heads(job, threads);
  job->at_once = threads > 1 && job->sentences < 4 * threads && !job->weights ? 1 : job->key_heads;
  job->without_memory = 0;
  return (job->sentences * job->key_heads + job->at_once - 1) / job->at_once;
}

/* fp32; arguments as those of `Attention`. Returns 0 if there was no memory for the scores. */
int beam_attention(parallel run, unsigned threads, float *out, const float *query,
                   const float *keys, const float *values, const float *mask, const float *sinks,
                   int64_t sentences, int64_t beams, int64_t key_heads, int64_t groups,
                   int64_t count, int64_t dims, float scale, int64_t query_b, int64_t query_m, int64_t query_h, int64_t keys_b,
                   int64_t keys_h, int64_t keys_n, int64_t values_b, int64_t values_h,
                   int64_t values_n, int64_t mask_b, int64_t mask_h, int64_t mask_m) {
  Attention job = {
      .out = out, .query = query, .mask = mask, .sinks = sinks,
      .keys = (void *)keys, .values = (void *)values,
      .sentences = sentences, .beams = beams, .key_heads = key_heads, .groups = groups,
      .count = count, .dims = dims, .dtype = FP32, .out_dtype = FP32, .scale = scale,
      .out_b = beams * key_heads * groups * dims, .query_b = query_b, .query_m = query_m,
      .query_h = query_h, .keys_b = keys_b, .keys_h = keys_h, .keys_n = keys_n,
      .values_b = values_b, .values_h = values_h, .values_n = values_n, .mask_b = mask_b,
      .mask_h = mask_h, .mask_m = mask_m};
  in_parallel(run, threads, work_on_attention, &job, prepare_attention(&job, threads));
  return !job.without_memory;
}
