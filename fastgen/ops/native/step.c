/* All sublayers of a decode step, as a list of phases.
 *
 * Source: Wang et al. 2021 (LightSeq), section 2.1; models/runtime/decode_step.py. */

#include "step.h"

#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "experts.h"
#include "latent.h"
#include "product.h"

/* out = norm(in), for several pieces of each row. If there is `own`, sum = residual + own(sum)
 * before. */
typedef struct {
  float *out;
  const float *in;
  const Norm *norm, *own;
  float *sum;
  const float *residual;
  int64_t rows, row, pieces, width, dtype;
} Norming;

/* Brings the outputs of a single product, which lie block by block, in the order queries, keys,
 * values; a key head of which there are too few is repeated for the query heads that read it. */
typedef struct {
  float *out;
  const float *in;
  const Sublayer *of;
} Ordering;

/* Rotary positions (Su et al. 2021) of all heads of queries and keys. */
typedef struct {
  float *x;
  const Sublayer *of;
  int64_t rows, row, heads, first, dtype;
} Turning;

/* out = down(x) of an adapter. */
typedef struct {
  float *out;
  const float *x;
  const Adapter *of;
  int64_t rows, inputs, dtype;
} Lowering;

typedef union {
  Product product;
  Attention attention;
  Norming norming;
  Ordering ordering;
  Rounding rounding;
  Turning turning;
  Mixing mixing;
  Lowering lowering;
  Keeping keeping;
  Heads heads;
} Job;

typedef struct {
  Phase *phases;
  Job *jobs;
  int64_t count;
} Program;

static void add(Program *to, void (*work)(void *, Tasks *), const void *job, size_t size,
                int64_t tasks, int together) {
  Job *copy = &to->jobs[to->count];
  memcpy(copy, job, size);
  to->phases[to->count++] = (Phase){work, copy, tasks, together};
}

/* The scaled and shifted rest of a row whose values are `y` so far. RMSNorm rounds before the
 * weight, unless that is stored as the difference from one; LayerNorm rounds such a sum, as the
 * toolkits' modules do. */
#define FINISHED(y, weight_at_c, bias_at_c, round) \
  if (norm->kind == RMS_NORM && !norm->offset) y = round(y, dtype); \
  if (norm->weight && norm->kind == LAYER_NORM) y *= round(weight_at_c + offset, dtype); \
  if (norm->weight && norm->kind == RMS_NORM) y *= weight_at_c + offset; \
  if (norm->bias) y += bias_at_c; \
  y = round(y, dtype);

INLINE void norm_row_as(float *out, const float *in, const Norm *norm, int64_t C, const int dtype) {
  const int64_t whole = C / WIDTH * WIDTH;
  float mean = 0.0f, square = 0.0f;
  vec total = {};
  if (norm->kind == LAYER_NORM) {
    for (int64_t c = 0; c < whole; c += WIDTH) total += load(in + c);
    for (int64_t c = whole; c < C; c++) mean += in[c];
    mean = (mean + sum(total)) / C;
    total = splat(0.0f);
  }
  for (int64_t c = 0; c < whole; c += WIDTH) {
    vec x = load(in + c) - mean;
    total += x * x;
  }
  for (int64_t c = whole; c < C; c++) square += (in[c] - mean) * (in[c] - mean);
  const float scale = 1.0f / sqrtf((square + sum(total)) / C + (float)norm->eps);
  const float offset = norm->offset;
  for (int64_t c = 0; c < whole; c += WIDTH) {
    vec y = (load(in + c) - mean) * scale;
    FINISHED(y, load_as(norm->weight, c, dtype), load_as(norm->bias, c, dtype), rounded)
    store(out + c, y);
  }
  for (int64_t c = whole; c < C; c++) {
    float y = (in[c] - mean) * scale;
    FINISHED(y, number_at(norm->weight, c, dtype), number_at(norm->bias, c, dtype), rounded_number)
    out[c] = y;
  }
}

INLINE void scale_row(float *out, const float *in, float scale, int64_t C, const int dtype) {
  for (int64_t c = 0; c < C; c++) out[c] = rounded_number(in[c] * scale, dtype);
}

INLINE void add_row(float *sum, const float *added, int64_t C, const int dtype) {
  for (int64_t c = 0; c < C; c++) sum[c] = rounded_number(sum[c] + added[c], dtype);
}

/* Normalises a row of C numbers; out may be in. */
void norm_row(float *out, const float *in, const Norm *norm, int64_t C, int64_t dtype) {
  if (norm->kind == CONSTANT_SCALE) {
    WITH_DTYPE(dtype, scale_row, out, in, norm->offset, C)
  } else if (norm->kind != UNNORMED) {
    WITH_DTYPE(dtype, norm_row_as, out, in, norm, C)
  } else if (out != in) {
    memcpy(out, in, sizeof(float) * C);
  }
}

static void normalise_rows(void *given, Tasks *tasks) {
  Norming *job = given;
  for (int64_t r; (r = next(tasks)) >= 0;) {
    if (job->own) {
      float *sum = job->sum + r * job->row;
      norm_row(sum, sum, job->own, job->width, job->dtype);
      WITH_DTYPE(job->dtype, add_row, sum, job->residual + r * job->row, job->width)
    }
    for (int64_t i = 0; i < job->pieces; i++) {
      const int64_t at = r * job->row + i * job->width;
      norm_row(job->out + at, job->in + at, job->norm, job->width, job->dtype);
    }
  }
}

/* Key heads that a single product of queries, keys and values outputs. */
static int64_t key_heads_made(const Sublayer *of) {
  return (of->part[0].outputs / of->dims - of->heads) / 2;
}

static void order_rows(void *given, Tasks *tasks) {
  const Ordering *job = given;
  const Sublayer *of = job->of;
  const int64_t D = of->dims, block = of->part[0].outputs / of->blocks;
  const int64_t queries = of->heads / of->blocks, keys = key_heads_made(of) / of->blocks;
  const int64_t key_heads = of->key_heads / of->blocks, times = key_heads / keys;
  const int64_t row = (of->heads + 2 * of->key_heads) * D;
  for (int64_t r; (r = next(tasks)) >= 0;)
    for (int64_t b = 0; b < of->blocks; b++) {
      const float *in = job->in + r * of->part[0].outputs + b * block;
      float *out = job->out + r * row;
      memcpy(out + b * queries * D, in, sizeof(float) * queries * D);
      for (int64_t i = 0; i < 2; i++) {
        const float *heads = in + (queries + (of->values_first ? 1 - i : i) * keys) * D;
        float *to = out + (of->heads + i * of->key_heads + b * key_heads) * D;
        for (int64_t h = 0; h < key_heads; h++)
          memcpy(to + h * D, heads + h / times * D, sizeof(float) * D);
      }
    }
}

/* The result is rounded to dtype, each operation to `within`. */
INLINE void turn_head_as(float *out, const float *in, const Sublayer *of, int64_t at,
                         const int within, const int dtype) {
  const int64_t half = of->turned / 2, pairs = of->interleaved || of->pairs_apart;
  const int64_t step = of->interleaved ? 2 : 1, apart = of->interleaved ? 1 : half;
  const float *cosine = of->cosine + at, *sine = of->sine + at;
#define PRODUCT(x, y) rounded_number((x) * (y), within)
  for (int64_t i = 0; i < half; i++) {
    const int64_t one = i * step, other = one + apart;
    const float first = in[pairs ? 2 * i : i], second = in[pairs ? 2 * i + 1 : i + half];
    out[one] = rounded_number(PRODUCT(first, cosine[one]) - PRODUCT(second, sine[one]), dtype);
    out[other] =
        rounded_number(PRODUCT(second, cosine[other]) + PRODUCT(first, sine[other]), dtype);
  }
#undef PRODUCT
}

void turn_head(float *out, const float *in, const Sublayer *of, int64_t at, int64_t dtype) {
  if (of->turned_wide) {
    WITH_DTYPE(dtype, turn_head_as, out, in, of, at, FP32)
  } else {
    switch (dtype) {
      case BF16: turn_head_as(out, in, of, at, BF16, BF16); break;
      case FP16: turn_head_as(out, in, of, at, FP16, FP16); break;
      default: turn_head_as(out, in, of, at, FP32, FP32);
    }
  }
}

static void turn_rows(void *given, Tasks *tasks) {
  Turning *job = given;
  for (int64_t r; (r = next(tasks)) >= 0;)
    for (int64_t h = 0; h < job->heads; h++) {
      float *x = job->x + r * job->row + h * job->of->dims;
      turn_head(x, x, job->of, job->first + r * job->of->turn_row, job->dtype);
    }
}

static Product of_weight(const Step *step, const Weight *weight, const float *x, float *out,
                         int64_t out_row) {
  return (Product){.out = out, .x = x, .bytes = step->bytes, .panels = weight->panels,
                   .bias = weight->bias, .scales = weight->scales, .sums = weight->sums,
                   .rows = step->rows, .outputs = weight->outputs, .inputs = weight->inputs,
                   .out_row = out_row, .x_row = weight->inputs, .dtype = step->dtype,
                   .kind = weight->kind};
}

/* out = x times a weight plus its bias, for the rows of a step. */
void multiply(parallel run, unsigned threads, const Step *step, const Weight *weight,
              const float *x, float *out) {
  const Product product = of_weight(step, weight, x, out, weight->outputs);
  multiply_rows(run, threads, &product, step->bytes);
}

/* Rounds x for products with weights in bytes. */
static void add_rounding(Program *to, const Step *step, const Weight *weight, const float *x) {
  if (weight->kind == NUMBERS) return;
  Rounding job = {.bytes = step->bytes, .x = x, .rows = step->rows, .inputs = weight->inputs,
                  .x_row = weight->inputs, .kind = weight->kind};
  add(to, work_on_rounding, &job, sizeof job, step->rows, 0);
}

static void add_product(Program *to, Product product, unsigned threads, int together) {
  const int64_t tasks = prepare_product(&product, threads);
  add(to, work_on_product, &product, sizeof product, tasks, together);
}

/* Multiplies all rows by a row of `down`; a task is such a row. */
static void lower(void *given, Tasks *tasks) {
  Lowering *job = given;
  for (int64_t i; (i = next(tasks)) >= 0;) {
    const void *weight = after(job->of->down, i * job->inputs, job->dtype);
    for (int64_t r = 0; r < job->rows; r++)
      job->out[r * job->of->rank + i] = dot(job->x + r * job->inputs, weight, NULL, job->inputs,
                                            job->dtype, job->dtype);
  }
}

static int64_t adapters_of(const Weight *weights, int64_t count) {
  int64_t adapters = 0;
  for (int64_t i = 0; i < count; i++) adapters += weights[i].adapter_count;
  return adapters;
}

/* Adds up(down(x)) of the adapters of weights that read the same x. They are written to `low`, one
 * after the other: down(x) of each, then up of each. */
static void add_adapters(Program *to, const Step *step, const Weight *weights, int64_t count,
                         const float *x, unsigned threads) {
  const int64_t adapters = adapters_of(weights, count);
  float *out = step->low;
  for (int64_t i = 0, left = adapters; i < count; i++)
    for (int64_t a = 0; a < weights[i].adapter_count; a++) {
      const Adapter *of = &weights[i].adapters[a];
      Lowering job = {.out = out, .x = x, .of = of, .rows = step->rows,
                      .inputs = weights[i].inputs, .dtype = step->dtype};
      add(to, lower, &job, sizeof job, of->rank, --left > 0);
      out += step->rows * of->rank;
    }
  const float *low = step->low;
  for (int64_t i = 0, left = adapters; i < count; i++)
    for (int64_t a = 0; a < weights[i].adapter_count; a++) {
      const Adapter *of = &weights[i].adapters[a];
      Product up = {.out = out, .x = low, .panels = of->panels, .bias = of->bias,
                    .rows = step->rows, .outputs = weights[i].outputs, .inputs = of->rank,
                    .out_row = weights[i].outputs, .x_row = of->rank, .dtype = step->dtype,
                    .kind = NUMBERS};
      add_product(to, up, threads, --left > 0);
      low += step->rows * of->rank, out += step->rows * weights[i].outputs;
    }
}

/* A product of a weight, plus what `add_adapters` has written for weight `number` of `weights`. */
static Product adapted(const Step *step, const Weight *weights, int64_t count, int64_t number,
                       const float *x, float *out, int64_t out_row) {
  const Weight *weight = &weights[number];
  Product product = of_weight(step, weight, x, out, out_row);
  int64_t before = 0; /* elements of a row in `low` */
  for (int64_t i = 0; i < count; i++) {
    for (int64_t a = 0; a < weights[i].adapter_count; a++) before += weights[i].adapters[a].rank;
    if (i < number) before += weights[i].adapter_count * weights[i].outputs;
  }
  product.adapters = weight->adapters, product.adapter_count = weight->adapter_count;
  product.added = step->low + step->rows * before;
  return product;
}

/* Adds the products of x, whose outputs lie side by side in `wide`; returns the length of a row. */
static int64_t add_parts(Program *to, const Step *step, const Sublayer *of, const float *x,
                         unsigned threads) {
  int64_t row = 0;
  for (int64_t i = 0; i < of->parts; i++) row += of->part[i].outputs;
  float *out = of->blocks ? step->mixed : step->wide;
  add_adapters(to, step, of->part, of->parts, x, threads);
  for (int64_t i = 0; i < of->parts; out += of->part[i++].outputs)
    add_product(to, adapted(step, of->part, of->parts, i, x, out, row), threads,
                i + 1 < of->parts);
  if (!of->blocks) return row;
  Ordering job = {.out = step->wide, .in = step->mixed, .of = of};
  add(to, order_rows, &job, sizeof job, step->rows, 0);
  return (of->heads + 2 * of->key_heads) * of->dims;
}

static void add_head_norm(Program *to, const Step *step, const Sublayer *of, const Norm *norm,
                          float *x, int64_t row, int64_t heads) {
  Norming job = {.out = x, .in = x, .norm = norm, .rows = step->rows, .row = row,
                 .pieces = of->norms_all_heads ? 1 : heads,
                 .width = of->norms_all_heads ? heads * of->dims : of->dims, .dtype = step->dtype};
  add(to, normalise_rows, &job, sizeof job, step->rows, 0);
}

/* Rows of a sentence that attend at once: all beams, or some of the tokens of an encoder. */
static int64_t at_once(const Sublayer *of, const Rows *call) {
  const int64_t most = ROWS / (of->heads / of->key_heads);
  return call->successive || call->beams < most ? call->beams : most;
}

/* Where the angles of the rows of a step begin. */
static int64_t angles_of(const Step *step, const Sublayer *of, int64_t number) {
  return number * of->turned * (of->turn_row ? step->rows : 1);
}

static void add_rotation(Program *to, const Step *step, const Sublayer *of, int64_t row,
                         int64_t number) {
  Turning job = {.x = step->wide, .of = of, .rows = step->rows, .row = row,
                 .heads = of->heads + of->key_heads, .dtype = step->dtype,
                 .first = angles_of(step, of, number)};
  add(to, turn_rows, &job, sizeof job, step->rows, 0);
}

static void add_head_norms(Program *to, const Step *step, const Sublayer *of, int64_t row) {
  if (of->query_norm.kind == UNNORMED) return;
  add_head_norm(to, step, of, &of->query_norm, step->wide, row, of->heads);
  float *keys = step->wide + of->heads * of->dims;
  add_head_norm(to, step, of, &of->key_norm, keys, row, of->key_heads);
}

static void add_attention(Program *to, const Step *step, const Sublayer *of, const Seen *seen,
                          int64_t row, unsigned threads, int64_t number) {
  const int64_t of_queries = of->heads * of->dims, of_keys = of->key_heads * of->dims;
  if (!of->norms_rotated) add_head_norms(to, step, of, row);
  if (of->cosine) add_rotation(to, step, of, row, number);
  if (of->norms_rotated) add_head_norms(to, step, of, row);
  for (int64_t i = 0; i < step->call_count; i++) {
    const Rows *call = &step->calls[i];
    const Seen *at = &seen[i];
    float *query = step->wide + call->first_row * row;
    Attention job = {
        .out = step->mixed + call->first_row * of_queries, .query = query, .mask = at->mask,
        .keys = at->keys, .values = at->values, .sentences = call->sentences, .beams = call->beams,
        .key_heads = of->key_heads, .groups = of->heads / of->key_heads, .count = at->count,
        .dims = of->dims, .sinks = of->sinks, .slot = at->slot, .dtype = step->dtype,
        .out_dtype = step->dtype, .of_text = of->kind == SELF_ATTENTION && at->keys,
        .scale = of->scale, .softcap = of->softcap, .out_b = call->beams * of_queries,
        .query_b = call->beams * row,
        .query_m = row, .query_h = of->dims, .keys_b = at->keys_b, .keys_h = at->keys_h,
        .keys_n = at->keys_n, .values_b = at->values_b, .values_h = at->values_h,
        .values_n = at->values_n,
        .common_keys = at->common_keys, .common_values = at->common_values,
        .common = at->common, .common_h = at->common_h,
        .mask_b = at->mask_b, .mask_h = at->mask_h, .mask_m = at->mask_m,
        .bias_b = at->bias_b, .bias_h = at->bias_h, .new_row = row,
        .successive = call->successive};
    if (at->bias) job.bias = at->bias + number * at->bias_step;
    if (at->weights) job.weights = at->weights + number * call->sentences * call->beams * at->count;
    if (!at->keys) {
      job.keys = query + of_queries, job.values = query + of_queries + of_keys;
      job.count = call->beams, job.dtype = FP32;
      job.keys_b = job.values_b = call->beams * row, job.keys_n = job.values_n = row;
      job.keys_h = job.values_h = of->dims;
    } else if (of->kind == SELF_ATTENTION) {
      job.new_keys = query + of_queries, job.new_values = query + of_queries + of_keys;
    }
    for (int64_t first = 0; first < call->beams; first += at_once(of, call)) {
      Attention part = job;
      const int64_t left = call->beams - first;
      part.beams = left < at_once(of, call) ? left : at_once(of, call);
      part.query += first * row, part.out += first * of_queries;
      if (job.mask) part.mask += first * job.mask_m;
      const int64_t tasks = prepare_attention(&part, threads);
      const int last = i + 1 == step->call_count && first + part.beams == call->beams;
      add(to, work_on_attention, &part, sizeof part, tasks, !last);
    }
  }
}

/* Adds latent attention without its output projection. Its queries are multiplied with the weights
 * of keys, and its outputs with those of values, so that it reads latent vectors as they are. */
static void add_latent_attention(Program *to, const Step *step, const Sublayer *of,
                                 const Seen *seen, unsigned threads, int64_t number) {
  const int64_t rows = step->rows, heads = of->heads, C = of->latent, E = of->turned;
  const Weight *query = &of->part[0], *compress = &of->part[1], *from_query = &of->part[2];
  float *asked = step->wide, *made = asked + rows * query->outputs;
  float *kept = made + rows * (C + E), *asking = kept + rows * (C + E);
  float *mixed = step->mixed + rows * heads * of->value_dims;
  add_adapters(to, step, of->part, 2, step->x, threads);
  add_product(to, adapted(step, of->part, 2, 0, step->x, asked, query->outputs), threads, 1);
  add_product(to, adapted(step, of->part, 2, 1, step->x, made, compress->outputs), threads, 0);
  if (of->parts == 3) {
    Norming norming = {.out = asked, .in = asked, .norm = &of->query_norm, .rows = rows,
                       .row = query->outputs, .pieces = 1, .width = query->outputs,
                       .dtype = step->dtype};
    add(to, normalise_rows, &norming, sizeof norming, rows, 0);
    add_adapters(to, step, from_query, 1, asked, threads);
    float *queries = asking + rows * heads * (C + E);
    add_product(to, adapted(step, from_query, 1, 0, asked, queries, from_query->outputs), threads,
                0);
    asked = queries;
  }
  for (int64_t i = 0; i < step->call_count; i++) {
    Keeping job = {.step = step, .of = of, .call = &step->calls[i], .at = &seen[i],
                   .angles = angles_of(step, of, number), .asked = asked, .made = made,
                   .kept = kept, .asking = asking};
    add(to, keep_latents, &job, sizeof job, job.call->sentences * job.call->beams, 1);
  }
  const Product to_latent = {.out = asking, .x = asked, .panels = of->to_latent, .rows = rows,
                             .outputs = C, .inputs = of->dims - E, .out_row = heads * (C + E),
                             .x_row = heads * of->dims, .dtype = step->dtype};
  const Heads keys = {.product = to_latent, .heads = heads, .x_head = of->dims, .out_head = C + E};
  add(to, multiply_heads, &keys, sizeof keys, heads, 0);
  for (int64_t i = 0; i < step->call_count; i++) {
    const Rows *call = &step->calls[i];
    const Seen *at = &seen[i];
    Attention job = {
        .out = mixed + call->first_row * heads * C, .mask = at->mask, .keys = at->keys,
        .query = asking + call->first_row * heads * (C + E), .values = at->keys,
        .rope_keys = at->values, .common_keys = at->common_keys, .common_values = at->common_keys,
        .common_rope = at->common_values, .common = at->common, .sentences = call->sentences,
        .beams = call->beams, .key_heads = 1, .groups = heads, .count = at->count, .dims = C,
        .rope = E, .slot = at->slot, .of_text = 1, .dtype = step->dtype, .out_dtype = step->dtype,
        .scale = of->scale, .out_b = call->beams * heads * C,
        .query_b = call->beams * heads * (C + E), .query_m = heads * (C + E), .query_h = C + E,
        .keys_b = at->keys_b, .keys_n = at->keys_n, .values_b = at->keys_b,
        .values_n = at->keys_n, .rope_b = at->values_b, .rope_n = at->values_n,
        .mask_b = at->mask_b, .mask_h = at->mask_h, .mask_m = at->mask_m,
        .successive = call->successive};
    const int64_t tasks = prepare_attention(&job, threads);
    add(to, work_on_attention, &job, sizeof job, tasks, i + 1 < step->call_count);
  }
  const Product of_latent = {.out = step->mixed, .x = mixed, .panels = of->of_latent, .rows = rows,
                             .outputs = of->value_dims, .inputs = C,
                             .out_row = heads * of->value_dims, .x_row = heads * C,
                             .dtype = step->dtype};
  const Heads values = {.product = of_latent, .heads = heads, .x_head = C,
                        .out_head = of->value_dims};
  add(to, multiply_heads, &values, sizeof values, heads, 0);
}

/* Adds a feed-forward sublayer without its output projection; returns the input of that. */
static const float *add_feed_forward(Program *to, const Step *step, const Sublayer *of,
                                     unsigned threads) {
  add_adapters(to, step, of->part, of->parts, step->x, threads);
  Product wide =
      adapted(step, of->part, of->parts, 0, step->x, step->wide, of->part[0].outputs);
  wide.activation = of->activation;
  add_product(to, wide, threads, 0);
  if (of->parts == 1) return step->wide;
  Product gated =
      adapted(step, of->part, of->parts, 1, step->x, step->mixed, of->part[1].outputs);
  gated.gate = step->wide, gated.gate_row = of->part[0].outputs;
  add_product(to, gated, threads, 0);
  return step->mixed;
}

/* Adds a mixture of experts: out = residual, unless that is
 * NULL, + the weighted outputs of each row's experts. */
static void add_experts(Program *to, const Step *step, const Sublayer *of, const float *residual,
                        float *out, unsigned threads) {
  Mixing job = mixing_of(step, of, residual, out, threads);
  if (of->parts) {
    const float *mixed = add_feed_forward(to, step, of, threads);
    add_product(to, of_weight(step, &of->out, mixed, job.shared, step->width), threads, 1);
  }
  add(to, find_logits, &job, sizeof job, of->experts->count, 0);
  add(to, choose_experts, &job, sizeof job, step->rows, 0);
  add(to, group_by_expert, &job, sizeof job, 1, 0);
  add(to, gather_rows, &job, sizeof job, step->rows, 0);
  add(to, multiply_up, &job, sizeof job, expert_tasks(&job, up_outputs(of->experts)), 0);
  add(to, multiply_down, &job, sizeof job, expert_tasks(&job, step->width), 0);
  add(to, add_up_experts, &job, sizeof job, step->rows, 0);
}

static void list_phases(Program *to, const Step *step, unsigned threads, int64_t number) {
  const Seen *seen = step->seen;
  float *stream = step->stream, *spare = step->spare;
  for (int64_t i = 0; i < step->sublayer_count; i++) {
    const Sublayer *of = &step->sublayers[i];
    const float *mixed = step->mixed, *residual = step->norm_first ? stream : step->x;
    const int is_normed = of->own.kind != UNNORMED;
    add_rounding(to, step, &of->part[0], step->x);
    if (of->kind == FEED_FORWARD) {
      mixed = add_feed_forward(to, step, of, threads);
    } else if (of->kind == LATENT_ATTENTION) {
      add_latent_attention(to, step, of, seen, threads, number);
      seen += step->call_count;
    } else if (attends(of)) {
      const int64_t row = add_parts(to, step, of, step->x, threads);
      add_attention(to, step, of, seen, row, threads, number);
      seen += step->call_count;
    }
    if (of->kind == EXPERTS) {
      add_experts(to, step, of, is_normed ? NULL : residual, spare, threads);
    } else {
      add_rounding(to, step, &of->out, mixed);
      add_adapters(to, step, &of->out, 1, mixed, threads);
      Product out = adapted(step, &of->out, 1, 0, mixed, spare, step->width);
      if (!is_normed) out.residual = residual, out.residual_row = step->width;
      add_product(to, out, threads, 0);
    }
    Norming norming = {.out = step->x, .in = of->parallel ? stream : spare, .norm = &of->norm,
                       .rows = step->rows, .row = step->width, .pieces = 1, .width = step->width,
                       .dtype = step->dtype};
    if (is_normed) norming.own = &of->own, norming.sum = spare, norming.residual = residual;
    add(to, normalise_rows, &norming, sizeof norming, step->rows, 0);
    float *sum = spare;
    spare = stream, stream = sum;
  }
}

/* The size of all structures of a step, which ops/native/step.py compares with its own. */
int64_t step_size(void) {
  return sizeof(Step) + sizeof(Sublayer) + sizeof(Seen) + sizeof(Rows) + sizeof(Mixture) +
         sizeof(Adapter);
}

/* Runs all sublayers, and leaves the input of the head in x. Returns 0 if there was no memory.
 * number: index of the step, among several whose rotations, biases and weights are concatenated. */
int step_at(parallel run, unsigned threads, const Step *step, int64_t number) {
  /* Phases of a sublayer: three products of x, or one and its order, two norms of heads, the
   * rotation, the output projection, the norm, and two roundings to bytes; two products of each
   * adapter; and attention of each call. Experts have three products of the expert that all rows
   * share, a rounding, seven phases of their own, and the norm. */
  int64_t most = 0;
  for (int64_t s = 0; s < step->sublayer_count; s++) {
    const Sublayer *of = &step->sublayers[s];
    most += 12 + 2 * (adapters_of(of->part, of->parts) + adapters_of(&of->out, 1));
    for (int64_t i = 0; i < step->call_count && attends(of); i++)
      most += of->kind == LATENT_ATTENTION
                  ? 2
                  : step->calls[i].beams / at_once(of, &step->calls[i]) + 1;
  }
  Program program = {.jobs = malloc((sizeof(Job) + sizeof(Phase)) * most)};
  if (!program.jobs) return 0;
  program.phases = (Phase *)(program.jobs + most);
  list_phases(&program, step, threads, number);
  run_phases(run, threads, program.phases, program.count);
  int done = 1;
  for (int64_t i = 0; i < program.count; i++)
    if (program.phases[i].work == work_on_attention && program.jobs[i].attention.without_memory)
      done = 0;
  free(program.jobs);
  return done;
}

int step(parallel run, unsigned threads, const Step *step) {
  return step_at(run, threads, step, 0);
}
