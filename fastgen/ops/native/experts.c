/* A mixture of experts: each row is multiplied with the weights of its own experts only.
 *
 * Source: Shazeer et al. 2017, Outrageously large neural networks, section 2; rows are grouped by
 * expert, so that each weight is read once for all rows that chose it. */

#include "experts.h"

#include <math.h>
#include <string.h>

#include "product.h"

enum { MOST_GROUPS = 64 }; /* models/runtime/native/experts.py has the same number */

/* Divides the scratch memory, whose size `scratch` in models/runtime/native/experts.py returns. */
Mixing mixing_of(const Step *step, const Sublayer *of, const float *residual, float *out,
                 unsigned threads) {
  const Mixture *mix = of->experts;
  const int64_t rows = step->rows, pairs = rows * mix->chosen;
  Mixing job = {.step = step, .of = of, .residual = residual, .out = out, .threads = threads};
  job.logits = step->routed;
  job.choice = job.logits + rows * mix->count;
  job.weight = job.choice + rows * mix->count;
  job.pairs = job.weight + pairs;
  job.wide = job.pairs + pairs * step->width;
  job.mixed = job.wide + pairs * mix->inner * (1 + mix->clamped);
  job.shared = job.mixed + pairs * mix->inner;
  job.expert = (int32_t *)(job.shared + rows * step->width);
  job.place = job.expert + pairs;
  job.active = job.place + pairs;
  job.first = job.active + mix->count;
  job.active_count = job.first + mix->count + 1;
  return job;
}

INLINE float dot_as(const float *x, const void *weight, const void *bias, int64_t C,
                    const int dtype) {
  const int64_t whole = C / WIDTH * WIDTH;
  vec total = {};
  float rest = bias ? number_at(bias, 0, dtype) : 0.0f;
  for (int64_t c = 0; c < whole; c += WIDTH) total += load(x + c) * load_as(weight, c, dtype);
  for (int64_t c = whole; c < C; c++) rest += x[c] * number_at(weight, c, dtype);
  return sum(total) + rest;
}

static float to_dtype(float x, int64_t dtype) {
  return dtype == BF16   ? rounded_number(x, BF16)
         : dtype == FP16 ? rounded_number(x, FP16)
                         : x;
}

float dot(const float *x, const void *weight, const void *bias, int64_t C, int64_t dtype,
          int64_t out_dtype) {
  float y;
  switch (dtype) {
    case BF16: y = dot_as(x, weight, bias, C, BF16); break;
    case FP16: y = dot_as(x, weight, bias, C, FP16); break;
    default: y = dot_as(x, weight, bias, C, FP32);
  }
  return to_dtype(y, out_dtype);
}

/* The logits of an expert for all rows; a task is an expert. */
void find_logits(void *given, Tasks *tasks) {
  Mixing *job = given;
  const Step *step = job->step;
  const Mixture *mix = job->of->experts;
  const int64_t dtype = mix->wide ? FP32 : step->dtype;
  const int64_t out_dtype = mix->precise ? FP32 : step->dtype;
  for (int64_t e; (e = next(tasks)) >= 0;) {
    const void *weight = after(mix->router, e * step->width, dtype);
    const void *bias = mix->router_bias ? after(mix->router_bias, e, dtype) : NULL;
    for (int64_t r = 0; r < step->rows; r++)
      job->logits[r * mix->count + e] =
          dot(step->x + r * step->width, weight, bias, step->width, dtype, out_dtype);
  }
}

/* Replaces logits by scores. */
static void score(float *p, const Mixture *mix) {
  float highest = p[0], all = 0.0f;
  for (int64_t e = 1; e < mix->count; e++) highest = p[e] > highest ? p[e] : highest;
  for (int64_t e = 0; e < mix->count; e++)
    if (mix->sigmoid)
      p[e] = 1.0f / (1.0f + expf(-p[e]));
    else
      all += p[e] = expf(p[e] - highest);
  for (int64_t e = 0; !mix->sigmoid && e < mix->count; e++) p[e] /= all;
}

/* Hides the experts of all but the best groups.
 *
 * Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2. */
static void keep_groups(float *choice, const Mixture *mix) {
  const int64_t size = mix->count / mix->groups;
  float best[MOST_GROUPS];
  for (int64_t g = 0; g < mix->groups; g++) {
    const float *of = choice + g * size;
    float first = of[0], second = -INFINITY;
    for (int64_t e = 1; e < size; e++)
      if (of[e] > first)
        second = first, first = of[e];
      else if (of[e] > second)
        second = of[e];
    best[g] = mix->group_scores == 2 ? first + second : first;
  }
  for (int64_t left = mix->groups - mix->kept; left > 0; left--) {
    int64_t worst = -1;
    for (int64_t g = 0; g < mix->groups; g++)
      if (best[g] > -INFINITY && (worst < 0 || best[g] <= best[worst])) worst = g;
    if (worst < 0) return;
    best[worst] = -INFINITY;
    for (int64_t e = 0; e < size; e++) choice[worst * size + e] = -INFINITY;
  }
}

/* The weight of the best expert of a choice from logits, of which those of earlier experts are
 * hidden. Source: Liu et al. 2023, Sparse backpropagation for MoE training. */
static float thinned_weight(const float *logits, const float *choice, int32_t best,
                            const Mixture *mix, int64_t dtype) {
  const float top = choice[best], margin = to_dtype(mix->margin, dtype);
  float all = 0.0f;
  for (int64_t e = 0; e < mix->count; e++) {
    const float size = fabsf(logits[e]), factor = size < top ? top : size;
    const float below = to_dtype(to_dtype(top - logits[e], dtype) / factor, dtype);
    if (choice[e] > -INFINITY && !(below > margin)) all += expf(choice[e] - top);
  }
  return 1.0f / all;
}

/* The experts of a row, best first, and their weights; a task is a row. Overwrites its logits. */
void choose_experts(void *given, Tasks *tasks) {
  Mixing *job = given;
  const Mixture *mix = job->of->experts;
  for (int64_t r; (r = next(tasks)) >= 0;) {
    float *p = job->logits + r * mix->count, *weight = job->weight + r * mix->chosen;
    float *choice = job->choice + r * mix->count, chosen = 0.0f;
    int32_t *expert = job->expert + r * mix->chosen;
    if (!mix->thinned) score(p, mix);
    for (int64_t e = 0; e < mix->count; e++)
      choice[e] = mix->correction ? p[e] + mix->correction[e] : p[e];
    if (mix->groups > 1) keep_groups(choice, mix);
    for (int64_t k = 0; k < mix->chosen; k++) {
      int32_t best = 0;
      for (int32_t e = 1; e < mix->count; e++)
        if (choice[e] > choice[best]) best = e;
      expert[k] = best, weight[k] = p[best];
      if (mix->thinned)
        weight[k] = thinned_weight(p, choice, best, mix, mix->precise ? FP32 : job->step->dtype);
      chosen += weight[k];
      choice[best] = -INFINITY; /* not chosen again */
    }
    for (int64_t k = 0; k < mix->chosen; k++) {
      if (mix->normalised) weight[k] /= chosen;
      weight[k] *= mix->factor;
      if (mix->rounded) weight[k] = to_dtype(weight[k], job->step->dtype);
    }
  }
}

/* A place for each pair, by expert. */
void group_by_expert(void *given, Tasks *tasks) {
  Mixing *job = given;
  const Mixture *mix = job->of->experts;
  const int64_t pairs = job->step->rows * mix->chosen;
  while (next(tasks) >= 0) {
    int32_t *at = job->active, placed = 0, active = 0;
    memset(at, 0, sizeof *at * mix->count);
    for (int64_t p = 0; p < pairs; p++) at[job->expert[p]]++;
    for (int64_t e = 0, begin = 0; e < mix->count; e++) {
      const int64_t count = at[e];
      at[e] = begin, begin += count;
    }
    for (int64_t p = 0; p < pairs; p++) job->place[p] = at[job->expert[p]]++;
    for (int64_t e = 0; e < mix->count; e++) { /* where its pairs end; fewer are active */
      const int32_t end = at[e];
      if (end > placed) job->active[active] = e, job->first[active++] = placed, placed = end;
    }
    job->first[active] = placed, *job->active_count = active;
  }
}

/* Copies a row to the places of its pairs. */
void gather_rows(void *given, Tasks *tasks) {
  Mixing *job = given;
  const int64_t C = job->step->width, chosen = job->of->experts->chosen;
  for (int64_t r; (r = next(tasks)) >= 0;)
    for (int64_t p = r * chosen; p < (r + 1) * chosen; p++)
      memcpy(job->pairs + job->place[p] * C, job->step->x + r * C, sizeof(float) * C);
}

/* Experts that may have pairs. */
static int64_t most_active(const Mixing *job) {
  const int64_t pairs = job->step->rows * job->of->experts->chosen;
  return pairs < job->of->experts->count ? pairs : job->of->experts->count;
}

/* Panels of a task, so that each thread has some eight tasks if there are as many panels. */
static int64_t side_of(const Mixing *job, int64_t panels) {
  const int64_t share = panels * most_active(job) / (8 * job->threads);
  return job->threads == 1 || share > panels ? panels : share < 1 ? 1 : share;
}

/* Tasks of products with `outputs` outputs per expert: parts of an expert's panels. */
int64_t expert_tasks(const Mixing *job, int64_t outputs) {
  const int64_t panels = outputs / panel(), side = side_of(job, panels);
  return most_active(job) * ((panels + side - 1) / side);
}

/* Part of an expert's panels. */
typedef struct {
  int64_t expert, first, rows, begin, end;
} Part;

/* Takes the next task whose expert has pairs; returns whether there is one. */
static int next_part(const Mixing *job, Tasks *tasks, int64_t outputs, Part *part) {
  const int64_t panels = outputs / panel(), side = side_of(job, panels);
  const int64_t sides = (panels + side - 1) / side;
  for (int64_t task; (task = next(tasks)) >= 0;) {
    const int64_t at = task / sides, begin = task % sides * side;
    if (at >= *job->active_count) continue;
    *part = (Part){.expert = job->active[at], .first = job->first[at],
                   .rows = job->first[at + 1] - job->first[at], .begin = begin,
                   .end = begin + side < panels ? begin + side : panels};
    return 1;
  }
  return 0;
}

/* Outputs of the first product of an expert that tasks divide; those of the other half of a weight
 * whose halves are the gate and what it gates lie beside them. */
int64_t up_outputs(const Mixture *mix) { return mix->inner * (1 + mix->clamped); }

/* mixed = min(g, limit) sigmoid(alpha g) (u + 1), u within the limit, for some of the outputs of a
 * row, which are pairs of g and u. Each operation is rounded, as in the module.
 *
 * Source: OpenAI 2025, gpt-oss model card, section 2.2. */
INLINE void clamped_gate(float *mixed, const float *wide, int64_t outputs, const Mixture *mix,
                         const int dtype) {
  const float most = rounded_number(mix->limit, dtype), alpha = mix->alpha;
  for (int64_t f = 0; f < outputs; f += WIDTH) {
    float gates[WIDTH], ups[WIDTH];
    for (int i = 0; i < WIDTH; i++) gates[i] = wide[2 * (f + i)], ups[i] = wide[2 * (f + i) + 1];
    const vec gate = smaller(splat(most), load(gates));
    const vec up = higher(splat(-most), smaller(splat(most), load(ups)));
    const vec share = rounded(logistic(rounded(gate * alpha, dtype)), dtype);
    const vec y = rounded(up + 1.0f, dtype) * rounded(gate * share, dtype);
    store(mixed + f, rounded(y, dtype));
  }
}

static void gate_part(const Mixing *job, const Part *part) {
  const int64_t F = job->of->experts->inner, first = part->begin * panel() / 2;
  const int64_t outputs = part->end * panel() / 2 - first;
  for (int64_t r = part->first; r < part->first + part->rows; r++)
    WITH_DTYPE(job->step->dtype, clamped_gate, job->mixed + r * F + first,
               job->wide + 2 * (r * F + first), outputs, job->of->experts)
}

/* mixed = activation(gate(x)) times up(x), or their function `clamped_gate`. */
void multiply_up(void *given, Tasks *tasks) {
  Mixing *job = given;
  const Step *step = job->step;
  const Mixture *mix = job->of->experts;
  const int64_t C = step->width, F = mix->inner;
  for (Part part; next_part(job, tasks, up_outputs(mix), &part);) {
    const void *gate = after(mix->up, part.expert * 2 * F * C, step->dtype);
    const void *bias = mix->up_bias ? after(mix->up_bias, part.expert * 2 * F, step->dtype) : NULL;
    if (mix->clamped) {
      Product both = {.out = job->wide + part.first * 2 * F, .x = job->pairs + part.first * C,
                      .panels = gate, .bias = bias, .rows = part.rows, .outputs = 2 * F,
                      .inputs = C, .out_row = 2 * F, .x_row = C, .dtype = step->dtype};
      multiply_panels(&both, part.begin, part.end);
      gate_part(job, &part);
      continue;
    }
    Product product = {.out = job->wide + part.first * F, .x = job->pairs + part.first * C,
                       .panels = gate, .bias = bias, .rows = part.rows, .outputs = F, .inputs = C,
                       .out_row = F, .x_row = C, .gate_row = F, .activation = job->of->activation,
                       .dtype = step->dtype};
    multiply_panels(&product, part.begin, part.end);
    product.gate = product.out, product.activation = NOTHING;
    product.out = job->mixed + part.first * F, product.panels = after(gate, F * C, step->dtype);
    if (bias) product.bias = after(bias, F, step->dtype);
    multiply_panels(&product, part.begin, part.end);
  }
}

/* The outputs of all pairs. */
void multiply_down(void *given, Tasks *tasks) {
  Mixing *job = given;
  const Step *step = job->step;
  const Mixture *mix = job->of->experts;
  const int64_t C = step->width, F = mix->inner;
  for (Part part; next_part(job, tasks, C, &part);) {
    const void *bias = mix->down_bias ? after(mix->down_bias, part.expert * C, step->dtype) : NULL;
    Product product = {.out = job->pairs + part.first * C, .x = job->mixed + part.first * F,
                       .panels = after(mix->down, part.expert * C * F, step->dtype), .bias = bias,
                       .rows = part.rows, .outputs = C, .inputs = F, .out_row = C, .x_row = F,
                       .dtype = step->dtype};
    multiply_panels(&product, part.begin, part.end);
  }
}

/* Adds the outputs of a row's experts to one another, then the shared one's, then the residual. */
INLINE void add_up_row(const Mixing *job, int64_t r, float share, const int dtype) {
  const Step *step = job->step;
  const Mixture *mix = job->of->experts;
  const int64_t C = step->width, first = r * mix->chosen;
  for (int64_t c = 0; c < C; c += WIDTH) {
    vec total = {};
    for (int64_t p = first; p < first + mix->chosen; p++) {
      vec y = load(job->pairs + job->place[p] * C + c) * job->weight[p];
      total += mix->rounded ? rounded(y, dtype) : y;
    }
    total = rounded(total, dtype);
    if (job->of->parts) {
      vec y = load(job->shared + r * C + c);
      if (mix->shared_gate) y = rounded(y * share, dtype);
      total = rounded(total + y, dtype);
    }
    if (job->residual) total = rounded(total + load(job->residual + r * C + c), dtype);
    store(job->out + r * C + c, total);
  }
}

void add_up_experts(void *given, Tasks *tasks) {
  Mixing *job = given;
  const Step *step = job->step;
  const void *gate = job->of->experts->shared_gate;
  for (int64_t r; (r = next(tasks)) >= 0;) {
    float share = 1.0f;
    if (gate) {
      const float logit = dot(step->x + r * step->width, gate, NULL, step->width, step->dtype,
                              step->dtype);
      share = to_dtype(1.0f / (1.0f + expf(-logit)), step->dtype);
    }
    WITH_DTYPE(step->dtype, add_up_row, job, r, share)
  }
}
