/* All sublayers of a decode step, by all threads together: a list of phases, each of which needs the whole of the one
 * before. Source: Wang et al. 2021 (LightSeq), section 2.1; models/runtime/decode_step.py. */

#include "step.h"

#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "product.h"

/* out = norm(in), for as many pieces, side by side, of each row. */
typedef struct {
  float *out;
  const float *in;
  const Norm *norm;
  int64_t rows, row, pieces, width, next;
} Norming;

/* Rotary positions (Su et al. 2021) of all heads of queries and keys. */
typedef struct {
  float *x;
  const Sublayer *of;
  int64_t rows, row, heads, first, next;
} Turning;

typedef struct {
  void (*work)(void *);
  union {
    Product product;
    Attention attention;
    Norming norming;
    Turning turning;
  } job;
  int together; /* whether the next phase needs nothing of this one */
} Phase;

typedef struct {
  Phase *phases;
  int64_t count;
  barrier wait;
} Program;

/* A row of so many numbers; out may be in. */
void norm_row(float *out, const float *in, const Norm *norm, int64_t C) {
  if (norm->kind == UNNORMED) {
    if (out != in) memcpy(out, in, sizeof(float) * C);
    return;
  }
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
  const float scale = 1.0f / sqrtf((square + sum(total)) / C + (float)norm->eps), offset = norm->offset;
  for (int64_t c = 0; c < whole; c += WIDTH) {
    vec y = (load(in + c) - mean) * scale;
    if (norm->weight) y *= load(norm->weight + c) + offset;
    store(out + c, norm->bias ? y + load(norm->bias + c) : y);
  }
  for (int64_t c = whole; c < C; c++) {
    float y = (in[c] - mean) * scale;
    if (norm->weight) y *= norm->weight[c] + offset;
    out[c] = norm->bias ? y + norm->bias[c] : y;
  }
}

static void normalise_rows(void *given) {
  Norming *job = given;
  for (int64_t r; (r = next(&job->next)) < job->rows;)
    for (int64_t i = 0; i < job->pieces; i++) {
      const int64_t at = r * job->row + i * job->width;
      norm_row(job->out + at, job->in + at, job->norm, job->width);
    }
}

static void turn_rows(void *given) {
  Turning *job = given;
  const Sublayer *of = job->of;
  const int64_t half = of->turned / 2, step = of->neighbours ? 2 : 1, apart = of->neighbours ? 1 : half;
  for (int64_t r; (r = next(&job->next)) < job->rows;) {
    const int64_t at = job->first + r * of->turn_row;
    const float *cosine = of->cosine + at, *sine = of->sine + at;
    for (int64_t h = 0; h < job->heads; h++) {
      float *x = job->x + r * job->row + h * of->dims;
      for (int64_t i = 0; i < half; i++) {
        const int64_t one = i * step, other = one + apart;
        const float first = x[one], second = x[other];
        x[one] = first * cosine[one] - second * sine[one];
        x[other] = second * cosine[other] + first * sine[other];
      }
    }
  }
}

static Product of_weight(const Weight *weight, const float *x, float *out, int64_t rows, int64_t out_row) {
  return (Product){.out = out, .x = x, .panels = weight->panels, .bias = weight->bias, .rows = rows,
                   .outputs = weight->outputs, .inputs = weight->inputs, .out_row = out_row, .x_row = weight->inputs};
}

static void add_product(Program *to, Product product, unsigned threads, int together) {
  prepare_product(&product, threads);
  to->phases[to->count++] = (Phase){.work = work_on_product, .job.product = product, .together = together};
}

/* Products of x side by side in `wide`, which has rows of so many numbers. */
static int64_t add_parts(Program *to, const Step *step, const Sublayer *of, const float *x, unsigned threads) {
  int64_t row = 0;
  for (int64_t i = 0; i < of->parts; i++) row += of->part[i].outputs;
  float *out = step->wide;
  for (int64_t i = 0; i < of->parts; out += of->part[i++].outputs)
    add_product(to, of_weight(&of->part[i], x, out, step->rows, row), threads, i + 1 < of->parts);
  return row;
}

static void add_head_norm(Program *to, const Step *step, const Sublayer *of, const Norm *norm, float *x, int64_t row,
                          int64_t heads) {
  Norming job = {.out = x, .in = x, .norm = norm, .rows = step->rows, .row = row,
                 .pieces = of->whole_norms ? 1 : heads, .width = of->whole_norms ? heads * of->dims : of->dims};
  to->phases[to->count++] = (Phase){.work = normalise_rows, .job.norming = job};
}

/* Rows of a sentence that attend at once: all beams, or some of more tokens. */
static int64_t at_once(const Sublayer *of, const Rows *call) {
  const int64_t most = ROWS / (of->heads / of->key_heads);
  return call->beams < most ? call->beams : most;
}

static void add_attention(Program *to, const Step *step, const Sublayer *of, const Seen *seen, int64_t row,
                          unsigned threads, int64_t number) {
  const int64_t of_queries = of->heads * of->dims, of_keys = of->key_heads * of->dims;
  if (of->query_norm.kind != UNNORMED) {
    add_head_norm(to, step, of, &of->query_norm, step->wide, row, of->heads);
    add_head_norm(to, step, of, &of->key_norm, step->wide + of_queries, row, of->key_heads);
  }
  if (of->cosine)
    to->phases[to->count++] = (Phase){
        .work = turn_rows, .job.turning = {.x = step->wide, .of = of, .rows = step->rows, .row = row,
                                           .heads = of->heads + of->key_heads,
                                           .first = number * of->turned * (of->turn_row ? step->rows : 1)}};
  for (int64_t i = 0; i < step->call_count; i++) {
    const Rows *call = &step->calls[i];
    const Seen *at = &seen[i];
    float *query = step->wide + call->first_row * row;
    Attention job = {
        .out = step->mixed + call->first_row * of_queries, .query = query, .mask = at->mask, .keys = at->keys,
        .values = at->values, .sentences = call->sentences, .beams = call->beams,
        .key_heads = of->key_heads, .groups = of->heads / of->key_heads, .count = at->count, .dims = of->dims,
        .slot = at->slot, .scale = of->scale, .out_b = call->beams * of_queries, .query_b = call->beams * row,
        .query_m = row, .query_h = of->dims, .keys_b = at->keys_b, .keys_h = at->keys_h, .keys_n = at->keys_n,
        .values_b = at->values_b, .values_h = at->values_h, .values_n = at->values_n, .mask_b = at->mask_b,
        .mask_h = at->mask_h, .mask_m = at->mask_m, .bias_b = at->bias_b, .bias_h = at->bias_h, .new_row = row};
    if (at->bias) job.bias = at->bias + number * at->bias_step;
    if (at->weights) job.weights = at->weights + number * call->sentences * call->beams * at->count;
    if (!at->keys) {
      job.keys = query + of_queries, job.values = query + of_queries + of_keys, job.count = call->beams;
      job.keys_b = job.values_b = call->beams * row, job.keys_n = job.values_n = row;
      job.keys_h = job.values_h = of->dims;
    } else if (of->kind == TEXT) {
      job.new_keys = query + of_queries, job.new_values = query + of_queries + of_keys;
    }
    for (int64_t first = 0; first < call->beams; first += at_once(of, call)) {
      Attention part = job;
      const int64_t left = call->beams - first;
      part.beams = left < at_once(of, call) ? left : at_once(of, call);
      part.query += first * row, part.out += first * of_queries;
      if (job.mask) part.mask += first * job.mask_m;
      prepare_attention(&part, threads);
      const int last = i + 1 == step->call_count && first + part.beams == call->beams;
      to->phases[to->count++] = (Phase){.work = work_on_attention, .job.attention = part, .together = !last};
    }
  }
}

static void list_phases(Program *to, const Step *step, unsigned threads, int64_t number) {
  const Seen *seen = step->seen;
  float *stream = step->stream, *spare = step->spare;
  for (int64_t i = 0; i < step->sublayer_count; i++) {
    const Sublayer *of = &step->sublayers[i];
    const float *mixed = step->mixed;
    if (of->kind == FEED_FORWARD) {
      Product wide = of_weight(&of->part[0], step->x, step->wide, step->rows, of->part[0].outputs);
      wide.behind = of->behind;
      add_product(to, wide, threads, 0);
      mixed = step->wide;
      if (of->parts > 1) {
        Product gated = of_weight(&of->part[1], step->x, step->mixed, step->rows, of->part[1].outputs);
        gated.gate = step->wide, gated.gate_row = of->part[0].outputs;
        add_product(to, gated, threads, 0);
        mixed = step->mixed;
      }
    } else {
      add_attention(to, step, of, seen, add_parts(to, step, of, step->x, threads), threads, number);
      seen += step->call_count;
    }
    Product out = of_weight(&of->out, mixed, spare, step->rows, step->width);
    out.residual = step->norm_first ? stream : step->x, out.residual_row = step->width;
    add_product(to, out, threads, 0);
    Norming norming = {.out = step->x, .in = of->parallel ? stream : spare, .norm = &of->norm, .rows = step->rows,
                       .row = step->width, .pieces = 1, .width = step->width};
    to->phases[to->count++] = (Phase){.work = normalise_rows, .job.norming = norming};
    float *sum = spare;
    spare = stream, stream = sum;
  }
}

static void work_on_phases(void *given) {
  const Program *program = given;
  for (int64_t i = 0; i < program->count; i++) {
    Phase *phase = &program->phases[i];
    phase->work(&phase->job);
    if (!phase->together && program->wait) program->wait();
  }
}

/* Of all structures that a step is given, for a caller who has declared them, too. */
int64_t step_size(void) { return sizeof(Step) + sizeof(Sublayer) + sizeof(Seen) + sizeof(Rows); }

/* Runs all sublayers; what the head reads comes out in x. number: of the step, where cosines and sines, biases, and
 * weights of the source, of several lie one behind the other. Returns 0 where there was no memory. */
int step_at(parallel run, unsigned threads, barrier wait, const Step *step, int64_t number) {
  /* Of a sublayer: three products of x, two norms of heads, a turn, attention of each call, the projection, the norm. */
  int64_t most = 0;
  for (int64_t s = 0; s < step->sublayer_count; s++) {
    const Sublayer *of = &step->sublayers[s];
    most += 8;
    for (int64_t i = 0; i < step->call_count && of->kind != FEED_FORWARD; i++)
      most += step->calls[i].beams / at_once(of, &step->calls[i]) + 1;
  }
  Program program = {.phases = malloc(sizeof(Phase) * most), .wait = threads > 1 ? wait : NULL};
  if (!program.phases) return 0;
  list_phases(&program, step, threads, number);
  in_parallel(run, threads, work_on_phases, &program);
  int done = 1;
  for (int64_t i = 0; i < program.count; i++)
    if (program.phases[i].work == work_on_attention && program.phases[i].job.attention.without_memory) done = 0;
  free(program.phases);
  return done;
}

int step(parallel run, unsigned threads, barrier wait, const Step *step) { return step_at(run, threads, wait, step, 0); }
