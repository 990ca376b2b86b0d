/* The highest logit of each row, by a copy of the head in bytes and bounds of the logits' errors.
 *
 * A product with the copy gives an upper bound of every logit. The token with the highest bound is
 * scored by the head itself, and then all tokens whose bounds reach that score. Scores by the head
 * itself repeat the operations of product.c in their order, so that they are the same bits.
 *
 * Source: ops/logit_bounds.py, which derives the bounds. */

#include "bounds.h"

#include <stdlib.h>

#include "product.h"

/* CHUNK: tokens of a task, a multiple of those of a word of a set. FREE, SHARE: a copy is given up
 * once more than FREE tries, and one in SHARE of all, have needed all logits. A try costs a quarter
 * of the head's bytes in fp32 or half of those in bf16, and saves the rest unless it needs them. */
enum { CHUNK = 4096, FREE = 4, SHARE = 4 };

/* Larger logits might overflow. */
static const double LARGEST = 1e37;

/* How far logits of x differ from those of the copy: by `norm` times the error of a token's row,
 * and by `apart`. */
typedef struct {
  float norm, apart;
} Errors;

typedef struct {
  const LogitBounds *of;
  const float *x;                 /* (R, C) */
  const uint32_t *banned;         /* (R, words of a set), or NULL */
  float *upper, *maxima, *scores; /* (R, 2, V), the second row of each pair is scratch; (R, chunks);
                                     (candidates,) */
  const Errors *errors;           /* (R,) */
  int32_t *candidates;            /* of `row`, in order */
  int64_t row, count, dtype;
} Finding;

static int64_t chunks_of(int64_t vocabulary) { return (vocabulary + CHUNK - 1) / CHUNK; }

/* Rounds a row of x to bytes, and what that leaves to the next row of bytes. Returns 0 if the
 * logits of x may not be finite. rest: scratch for a row of x. */
static int round_twice(Errors *errors, const LogitBounds *of, int8_t *bytes, float *rest,
                       const float *x, int64_t dtype) {
  const int64_t C = of->bytes.inputs, kind = of->bytes.kind, size = byte_row(C);
  const int bias = kind == BYTES_AT_ONCE ? BIAS : 0;
  float scales[2];
  for (int i = 0; i < 2; i++) {
    round_row(bytes + i * size, i ? rest : x, C, kind);
    memcpy(&scales[i], bytes + i * size + size - 4, 4);
    for (int64_t c = 0; c < C && !i; c++)
      rest[c] = x[c] - scales[0] * (float)(int8_t)(bytes[c] ^ bias);
  }
  double of_x = 0.0, of_high = 0.0, of_low = 0.0, left = 0.0;
  for (int64_t c = 0; c < C; c++) {
    const double high = (double)scales[0] * (int8_t)(bytes[c] ^ bias);
    const double low = (double)scales[1] * (int8_t)(bytes[size + c] ^ bias);
    const double other = x[c] - high - low;
    of_x += (double)x[c] * x[c], of_high += high * high, of_low += low * low;
    left += other * other;
  }
  const double norm = sqrt(of_x);
  const double most = of->longest * (norm + sqrt(of_high) + sqrt(of_low)) + of->bias;
  if (!(most < LARGEST)) return 0;
  const double unit = (double)(C + 32) * (dtype == BF16 ? 0x1p-23 : 0x1p-24) * 1.01;
  const double tiny = (double)C * 0x1p-100 * (1.0 + norm + of->longest);
  const double apart = of->longest * sqrt(left) + unit * most + tiny;
  *errors = (Errors){(float)(norm * (1.0 + 0x1p-20)), (float)(apart * (1.0 + 0x1p-20))};
  return 1;
}

INLINE void bound_chunk(const Finding *job, int64_t r, int64_t first, int64_t end,
                        const int dtype) {
  const int64_t V = job->of->bytes.outputs;
  float *upper = job->upper + 2 * r * V;
  const void *bias = job->of->bytes.bias;
  const Errors by = job->errors[r];
  for (int64_t v = first; v < end; v += WIDTH) {
    const int64_t left = end - v;
    vec y = load_some(upper, v, left, FP32) + load_some(upper + V, v, left, FP32);
    y += by.norm * load_some(job->of->errors, v, left, FP32);
    y += by.apart;
    if (bias) y += load_some(bias, v, left, dtype);
    store_some(upper, v, y, left, FP32);
  }
}

/* Writes the upper bounds of a chunk of tokens, -inf for banned ones, and their maximum. */
static void find_upper(void *given, Tasks *tasks) {
  const Finding *job = given;
  const int64_t V = job->of->bytes.outputs, chunks = chunks_of(V), words = (V + 31) / 32;
  for (int64_t task; (task = next(tasks)) >= 0;) {
    const int64_t r = task / chunks, first = task % chunks * CHUNK;
    const int64_t end = first + CHUNK < V ? first + CHUNK : V;
    float *upper = job->upper + 2 * r * V, top = -INFINITY;
    if (job->dtype == BF16)
      bound_chunk(job, r, first, end, BF16);
    else
      bound_chunk(job, r, first, end, FP32);
    for (int64_t v = first; job->banned && v < end; v++) {
      const uint32_t word = job->banned[r * words + v / 32];
      if (word == 0)
        v |= 31; /* none of this word */
      else if (word >> v % 32 & 1)
        upper[v] = -INFINITY;
    }
    vec most = splat(-INFINITY);
    const int64_t whole = first + (end - first) / WIDTH * WIDTH;
    for (int64_t v = first; v < whole; v += WIDTH) most = higher(load(upper + v), most);
    top = highest(most);
    for (int64_t v = whole; v < end; v++) top = upper[v] > top ? upper[v] : top;
    job->maxima[task] = top;
  }
}

#ifdef PAIRS
/* Adds up the products of pairs of inputs, the last of which may lack its second. */
INLINE vec add_pairs(const float *x, const char *const *at, int64_t from, int64_t to) {
  vec total = {};
  for (int64_t c = from; c < to; c += 2) {
    const int64_t count = c + 1 < to ? 2 : 1;
    uint16_t inputs[2] = {}, weights[WIDTH][2] = {};
    ivec input, weight;
    for (int64_t i = 0; i < count; i++) store_some(inputs, i, splat(x[c + i]), 1, BF16);
    for (int i = 0; i < WIDTH; i++) memcpy(weights[i], at[i] + 2 * c, (size_t)(2 * count));
    memcpy(&weight, weights, sizeof weight);
    int32_t pair;
    memcpy(&pair, inputs, sizeof pair);
    input = pair - (ivec){};
    total = dots_of_pairs(total, input, weight);
  }
  return total;
}
#endif

INLINE vec add_products(const float *x, const char *const *at, int64_t from, int64_t to,
                        const int dtype) {
  vec total = {};
  for (int64_t c = from; c < to; c++) {
    vec weight;
    for (int i = 0; i < WIDTH; i++) {
      uint32_t bits = 0;
      memcpy((char *)&bits + (dtype == BF16 ? 2 : 0), at[i] + c * size_of(dtype),
             (size_t)size_of(dtype));
      memcpy((char *)&weight + 4 * i, &bits, 4);
    }
    const vec input = splat(x[c]);
    total += input * weight;
  }
  return total;
}

/* Computes the logits of up to WIDTH tokens as product.c does. */
INLINE void score_some(float *scores, const LogitBounds *of, const float *x,
                       const int32_t *tokens, int64_t count, const int dtype) {
  const int64_t C = of->bytes.inputs;
  const char *at[WIDTH];
  for (int i = 0; i < WIDTH; i++)
    at[i] = after(of->weight, of->weight_row * tokens[i < count ? i : 0], dtype);
  vec y = {};
  for (int64_t from = 0; from < C; from += DEPTH) {
    const int64_t to = from + DEPTH < C ? from + DEPTH : C;
    vec total;
#ifdef PAIRS
    total = dtype == BF16 ? add_pairs(x, at, from, to) : add_products(x, at, from, to, dtype);
#else
    total = add_products(x, at, from, to, dtype);
#endif
    y = from ? total + y : total;
  }
  for (int64_t i = 0; i < count; i++) {
    float score = y[i];
    if (of->bytes.bias) score += number_at(of->bytes.bias, tokens[i], dtype);
    scores[i] = rounded_number(score, dtype);
  }
}

static void score(void *given, Tasks *tasks) {
  const Finding *job = given;
  const float *x = job->x + job->row * job->of->bytes.inputs;
  for (int64_t task; (task = next(tasks)) >= 0;) {
    const int64_t first = task * WIDTH, left = job->count - first;
    const int64_t count = left < WIDTH ? left : WIDTH;
    float *scores = job->scores + first;
    const int32_t *tokens = job->candidates + first;
    if (job->dtype == BF16)
      score_some(scores, job->of, x, tokens, count, BF16);
    else
      score_some(scores, job->of, x, tokens, count, FP32);
  }
}

/* Returns the least upper bound with which a token may score as high as `score`. Half of the space
 * between numbers of bf16 is at most 1/256 of them. */
static float least_bound(float score, int64_t dtype) {
  return dtype == BF16 ? score - fabsf(score) * 0x1p-8f : score;
}

/* Returns the first token with the highest upper bound; -1 if all are banned. */
static int64_t most_likely(const Finding *job, int64_t r) {
  const int64_t V = job->of->bytes.outputs, chunks = chunks_of(V);
  const float *upper = job->upper + 2 * r * V, *maxima = job->maxima + r * chunks;
  int64_t best = 0;
  for (int64_t i = 1; i < chunks; i++)
    if (maxima[i] > maxima[best]) best = i;
  if (!(maxima[best] > -INFINITY)) return -1;
  int64_t v = best * CHUNK;
  while (upper[v] != maxima[best]) v++;
  return v;
}

/* Lists the tokens whose upper bounds are at least `least`. Returns 0 if they are too many. */
static int list_candidates(Finding *job, int64_t r, float least) {
  const int64_t V = job->of->bytes.outputs, chunks = chunks_of(V);
  const float *upper = job->upper + 2 * r * V;
  job->row = r, job->count = 0;
  for (int64_t i = 0; i < chunks; i++) {
    const int64_t first = i * CHUNK, end = first + CHUNK < V ? first + CHUNK : V;
    if (job->maxima[r * chunks + i] < least) continue;
    for (int64_t v = first; v < end; v++) {
      if (upper[v] < least) continue;
      if (job->count == job->of->most) return 0;
      job->candidates[job->count++] = (int32_t)v;
    }
  }
  return 1;
}

/* Returns the first of the highest logits of a row; -1 if all logits are needed. */
static int64_t find_in_row(parallel run, unsigned threads, Finding *job, int64_t r) {
  const int64_t likely = most_likely(job, r), tasks_of = WIDTH;
  if (likely < 0) return -1;
  float known;
  const int32_t token = (int32_t)likely;
  const float *x = job->x + r * job->of->bytes.inputs;
  if (job->dtype == BF16)
    score_some(&known, job->of, x, &token, 1, BF16);
  else
    score_some(&known, job->of, x, &token, 1, FP32);
  if (!list_candidates(job, r, least_bound(known, job->dtype))) return -1;
  in_parallel(run, threads, score, job, (job->count + tasks_of - 1) / tasks_of);
  int64_t best = 0;
  for (int64_t i = 1; i < job->count; i++)
    if (job->scores[i] > job->scores[best]) best = i;
  return job->candidates[best];
}

/* Rounds the rows, bounds their logits, and finds the highest of each. */
static int find_in_rows(parallel run, unsigned threads, int64_t *tokens, Finding *job,
                        Errors *errors, int8_t *bytes, float *rest, int64_t rows) {
  const LogitBounds *of = job->of;
  const int64_t C = of->bytes.inputs, V = of->bytes.outputs;
  for (int64_t r = 0; r < rows; r++)
    if (!round_twice(&errors[r], of, bytes + 2 * r * byte_row(C), rest, job->x + r * C,
                     job->dtype))
      return 0;
  Product product = {.out = job->upper, .bytes = bytes, .panels = of->bytes.panels,
                     .scales = of->bytes.scales, .sums = of->bytes.sums, .rows = 2 * rows,
                     .outputs = V, .inputs = C, .out_row = V, .kind = of->bytes.kind};
  const Phase phases[] = {{work_on_product, &product, prepare_product(&product, threads), 0},
                          {find_upper, job, rows * chunks_of(V), 0}};
  run_phases(run, threads, phases, 2);
  for (int64_t r = 0; r < rows; r++)
    if ((tokens[r] = find_in_row(run, threads, job, r)) < 0) return 0;
  return 1;
}

/* Finds the first of the highest logits of each row that is not banned, all of which are finite.
 *
 * upper: scratch for (2 R, V). banned: (R, words of a set), or NULL. Returns 0 if all logits are
 * needed: there is no copy, too many tokens may be the best, a logit may not be finite, all tokens
 * are banned, or there is no memory. */
int find_by_bounds(parallel run, unsigned threads, int64_t *tokens, const float *x, float *upper,
                   const uint32_t *banned, const LogitBounds *of, int64_t rows, int64_t dtype) {
  const int64_t C = of->bytes.inputs, chunks = chunks_of(of->bytes.outputs);
  int64_t *counts = of->counts;
  counts[0]++;
  if (!of->bytes.panels || counts[2] > FREE + counts[1] / SHARE) return 0;
  counts[1]++;
  const int64_t floats = C + rows * chunks + of->most, size = 2 * rows * byte_row(C);
  char *held = malloc((size_t)(4 * floats + 4 * of->most + (int64_t)sizeof(Errors) * rows + size));
  int found = 0;
  if (held) {
    float *rest = (float *)held, *maxima = rest + C, *scores = maxima + rows * chunks;
    int32_t *candidates = (int32_t *)(scores + of->most);
    Errors *errors = (Errors *)(candidates + of->most);
    Finding job = {.of = of, .x = x, .banned = banned, .upper = upper, .maxima = maxima,
                   .scores = scores, .errors = errors, .candidates = candidates, .dtype = dtype};
    found = find_in_rows(run, threads, tokens, &job, errors, (int8_t *)(errors + rows), rest, rows);
    free(held);
  }
  counts[2] += !found;
  return found;
}
