/* fp32 products of few or many rows with packed weights.
 *
 * A weight (N, K) lies in panels of `PANEL` outputs: all of a panel's numbers for the first input, then for the second.
 * A block of `TALL` rows times a panel is summed up in registers; what is read from memory is the panel, as it lies
 * there, once for all blocks of a task. Source: Goto and van de Geijn 2008, Anatomy of high-performance matrix
 * multiplication. */

#include "product.h"

/* WIDE: vectors of a panel. AHEAD: inputs whose numbers are fetched before they are needed, some KiB of a panel.
 * DEPTH: inputs of a piece of a panel. BLOCKS: that a task has at most, whose inputs stay near. SIDE: its panels. */
enum { WIDE = REGISTERS == 32 ? 4 : 2, AHEAD = WIDTH == 16 ? 8 : 64 };
enum { PANEL = WIDE * WIDTH, TALL = 6, DEPTH = 512, BLOCKS = 24, SIDE = 8 };

int panel(void) { return PANEL; }

static __attribute__((noinline)) vec behind(vec x, int64_t kind) {
  switch (kind) {
    case RELU: return higher(splat(0.0f), x);
    case GELU: return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    case GELU_TANH: return x * logistic(1.59576912f * (x + 0.044715f * x * x * x));
    case SILU: return x * logistic(x);
    default: return x;
  }
}

/* The part of a row that is a vector, or what is left of one. */
INLINE vec some(const float *p, int64_t count) {
  if (count >= WIDTH) return load(p);
  float held[WIDTH] = {};
  for (int64_t i = 0; i < count; i++) held[i] = p[i];
  return load(held);
}

INLINE void store_some(float *p, vec x, int64_t count) {
  if (count >= WIDTH) {
    store(p, x);
    return;
  }
  float held[WIDTH];
  store(held, x);
  for (int64_t i = 0; i < count; i++) p[i] = held[i];
}

/* What is behind the sums of a block, which lie in `total`; of the inputs up to `from` there are sums in the output. */
static void finish(const Product *job, const float *total, int64_t row, int64_t rows, int64_t p, int64_t from, int64_t to) {
  for (int64_t r = row; r < row + rows; r++, total += PANEL)
    for (int64_t at = 0, left; at < PANEL && (left = job->outputs - p * PANEL - at) > 0; at += WIDTH) {
      const int64_t column = p * PANEL + at;
      float *out = job->out + r * job->out_row + column;
      vec y = load(total + at);
      if (from) y += some(out, left);
      if (to == job->inputs) {
        if (job->bias) y += some(job->bias + column, left);
        if (job->behind) y = behind(y, job->behind);
        if (job->gate) y *= some(job->gate + r * job->gate_row + column, left);
        if (job->residual) y += some(job->residual + r * job->residual_row + column, left);
      }
      store_some(out, y, left);
    }
}

#define EACH UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int i = 0; i < WIDE; i++)

/* The same of a whole panel, whose sums stay in registers. */
INLINE void finish_whole(const Product *job, vec total[TALL][WIDE], int64_t row, int64_t column, int64_t from, int64_t to,
                         const int rows) {
  float *out = job->out + row * job->out_row + column;
  if (from) EACH total[r][i] += load(out + r * job->out_row + i * WIDTH);
  if (to == job->inputs) {
    if (job->bias) {
      vec bias[WIDE];
      UNROLLED for (int i = 0; i < WIDE; i++) bias[i] = load(job->bias + column + i * WIDTH);
      EACH total[r][i] += bias[i];
    }
    if (job->behind) EACH total[r][i] = behind(total[r][i], job->behind);
    if (job->gate) EACH total[r][i] *= load(job->gate + (row + r) * job->gate_row + column + i * WIDTH);
    if (job->residual) EACH total[r][i] += load(job->residual + (row + r) * job->residual_row + column + i * WIDTH);
  }
  EACH store(out + r * job->out_row + i * WIDTH, total[r][i]);
}

/* What is fetched meanwhile: from `at` on, for each input so many bytes further. */
typedef struct {
  const float *at;
  int64_t step;
} Fetch;

/* Rows from `row` on times a panel, over the inputs from `from` to `to`. fetch: NULL for the panel itself, ahead. */
INLINE void multiply(const Product *job, int64_t row, int64_t p, int64_t from, int64_t to, const Fetch *fetch,
                     const int rows) {
  const int64_t x_row = job->x_row;
  const float *x = job->x + row * x_row, *panel = job->panels + p * job->inputs * PANEL;
  vec total[TALL][WIDE];
  const char *coming = fetch ? (const char *)fetch->at : NULL;
  EACH total[r][i] = splat(0.0f);
  for (int64_t k = from; k < to; k++) {
    vec weight[WIDE];
    const char *near = fetch ? coming : (const char *)(panel + (k + AHEAD) * PANEL);
    if (fetch) coming += fetch->step;
    UNROLLED for (int i = 0; i < WIDE; i++) {
      weight[i] = load(panel + k * PANEL + i * WIDTH);
      if (i * WIDTH % 16 == 0) __builtin_prefetch(near + 4 * i * WIDTH);
    }
    UNROLLED for (int r = 0; r < rows; r++) {
      vec input = splat(x[r * x_row + k]);
      UNROLLED for (int i = 0; i < WIDE; i++) total[r][i] += input * weight[i];
    }
  }
  if ((p + 1) * PANEL <= job->outputs) {
    finish_whole(job, total, row, p * PANEL, from, to, rows);
    return;
  }
  float kept[TALL * PANEL];
  EACH store(kept + r * PANEL + i * WIDTH, total[r][i]);
  finish(job, kept, row, rows, p, from, to);
}

static int64_t blocks_of(const Product *job) { return (job->rows + TALL - 1) / TALL; }

/* Tasks of few rows, so that all threads have some; of many, so that a panel is seldom read. */
void prepare_product(Product *job, unsigned threads) {
  const int64_t panels = (job->outputs + PANEL - 1) / PANEL, blocks = blocks_of(job);
  const int64_t chunks = blocks ? (blocks + BLOCKS - 1) / BLOCKS : 1;
  job->chunk = blocks ? (blocks + chunks - 1) / chunks : 1;
  while (threads > 1 && job->chunk > 1 && panels * ((blocks + job->chunk - 1) / job->chunk) < 4 * threads)
    job->chunk = (job->chunk + 1) / 2;
  job->side = threads == 1 ? panels : panels / (8 * threads) < SIDE ? panels / (8 * threads) : SIDE;
  job->side = job->side < 1 ? 1 : job->side;
  job->next = 0;
}

/* A piece of a panel times all rows of a task. While its first block is computed the rest of the piece is fetched,
 * while the others are, what comes behind it. */
static void multiply_piece(const Product *job, int64_t p, int64_t from, int64_t to, int64_t first, int64_t last) {
  const int64_t blocks = blocks_of(job), others = last - first - 1;
  const float *panel = job->panels + p * job->inputs * PANEL;
  Fetch fetch = {};
  for (int64_t block = first; block < last; block++) {
    const int64_t row = block * job->rows / blocks; /* blocks of nearly equal height */
    switch ((block + 1) * job->rows / blocks - row) {
#define OF(rows) \
  case rows: \
    if (block > first) multiply(job, row, p, from, to, &fetch, rows); \
    else multiply(job, row, p, from, to, NULL, rows); \
    break;
      OF(1) OF(2) OF(3) OF(4) OF(5) OF(6)
#undef OF
    }
    if (others) fetch = (Fetch){panel + (to + (block - first) * (to - from) / others) * PANEL, 4 * PANEL / others};
  }
}

void work_on_product(void *given) {
  Product *job = given;
  const int64_t blocks = blocks_of(job), panels = (job->outputs + PANEL - 1) / PANEL, K = job->inputs;
  const int64_t sides = (panels + job->side - 1) / job->side;
  const int64_t tasks = sides * ((blocks + job->chunk - 1) / job->chunk);
  for (int64_t task; (task = next(&job->next)) < tasks;) {
    const int64_t first = task / sides * job->chunk, last = first + job->chunk < blocks ? first + job->chunk : blocks;
    const int64_t begin = task % sides * job->side, end = begin + job->side < panels ? begin + job->side : panels;
    for (int64_t p = begin; p < end; p++)
      for (int64_t from = 0; from < K; from += DEPTH)
        multiply_piece(job, p, from, from + DEPTH < K ? from + DEPTH : K, first, last);
  }
}

/* out, residual: (rows, outputs) contiguous; x: (rows, inputs) with rows `x_row` elements apart. */
void product(parallel run, unsigned threads, float *out, const float *x, const float *panels, const float *bias,
             const float *residual, int64_t rows, int64_t outputs, int64_t inputs, int64_t x_row, int64_t behind) {
  Product job = {.out = out, .x = x, .panels = panels, .bias = bias, .residual = residual, .rows = rows,
                 .outputs = outputs, .inputs = inputs, .out_row = outputs, .x_row = x_row, .residual_row = outputs,
                 .behind = behind};
  prepare_product(&job, threads);
  in_parallel(run, threads, work_on_product, &job);
}
