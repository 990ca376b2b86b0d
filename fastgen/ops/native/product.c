/* Products of few or many rows with packed weights of fp32, bf16 or fp16, whose sums are fp32, or
 * of int8, whose sums are int32.
 *
 * A weight (N, K) is packed in panels of `PANEL` outputs: all elements of a panel for the first
 * input, then for the second, and so on. A block of up to `TALL` rows times a panel is accumulated
 * in registers. Memory traffic is the panel, read sequentially, once for all blocks of a task. A
 * weight of 16 bits has half the traffic. Numbers of fp16 are widened as they are loaded.
 *
 * A panel of bf16 holds pairs: the first two inputs of the first output, of the second, and so on.
 * That is the order of instructions that multiply pairs. Without them, a vector of pairs becomes
 * two of fp32 by one operation each. An odd last input is paired with zeros.
 *
 * A weight of int8 is packed alike, in groups of four inputs: four bytes of the first output, then
 * of the second. Each row of x is rounded to bytes, too. Sums of integers are exact, so that all
 * instruction sets give the same result.
 *
 * Source: Goto and van de Geijn 2008, Anatomy of high-performance matrix multiplication. */

#include "product.h"

/* WIDE: vectors per row of a panel. AHEAD: bytes between a load and its prefetch. BLOCKS: most
 * blocks per task, whose inputs stay in the cache. SIDE: most panels per task. */
enum { WIDE = REGISTERS == 32 ? 4 : 2, AHEAD = WIDTH == 16 ? 2048 : 4096 };
enum { PANEL = WIDE * WIDTH, TALL = 6, BLOCKS = 24, SIDE = 8, LINE = 64 };

int panel(void) { return PANEL; }

static __attribute__((noinline)) vec activation(vec x, int64_t kind) {
  switch (kind) {
    case RELU: return higher(splat(0.0f), x);
    case GELU: return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    case GELU_TANH: return x * logistic(1.59576912f * (x + 0.044715f * x * x * x));
    case SILU: return x * logistic(x);
    case RELU_SQUARED: x = higher(splat(0.0f), x); return x * x;
    default: return x;
  }
}

/* Adds what follows the sums of a block in the last, partly filled panel. `total` holds the sums of
 * this piece; if `from` > 0, the output holds those of the inputs before it. */
INLINE void finish_part(const Product *job, const float *total, int64_t row, int64_t rows,
                        int64_t p, int64_t from, int64_t to, const int dtype) {
  for (int64_t r = row; r < row + rows; r++, total += PANEL)
    for (int64_t at = 0, left; at < PANEL && (left = job->outputs - p * PANEL - at) > 0;
         at += WIDTH) {
      const int64_t column = p * PANEL + at;
      float *out = job->out + r * job->out_row;
      vec y = load(total + at);
      if (from) y += load_some(out, column, left, FP32);
      if (to == job->inputs) {
        if (job->bias) y += load_some(job->bias, column, left, dtype);
        y = rounded(y, dtype);
        for (int64_t i = 0; i < job->adapter_count; i++) {
          const float *added = job->added + (i * job->rows + r) * job->outputs;
          const float scaling = job->adapters[i].scaling;
          y = rounded(y + rounded(scaling * load_some(added, column, left, FP32), dtype), dtype);
        }
        if (job->activation) y = rounded(activation(y, job->activation), dtype);
        if (job->gate)
          y = rounded(y * load_some(job->gate + r * job->gate_row, column, left, FP32), dtype);
        if (job->residual) {
          const float *residual = job->residual + r * job->residual_row;
          y = rounded(y + load_some(residual, column, left, FP32), dtype);
        }
      }
      store_some(out, column, y, left, FP32);
    }
}

static __attribute__((noinline)) void finish(const Product *job, const float *total, int64_t row,
                                             int64_t rows, int64_t p, int64_t from, int64_t to) {
  WITH_DTYPE(job->dtype, finish_part, job, total, row, rows, p, from, to)
}

#define EACH UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int i = 0; i < WIDE; i++)

/* The same for a full panel, whose sums stay in registers. */
INLINE void finish_whole(const Product *job, vec total[TALL][WIDE], int64_t row, int64_t column,
                         int64_t from, int64_t to, const int rows, const int dtype) {
  float *out = job->out + row * job->out_row + column;
  if (from) EACH total[r][i] += load(out + r * job->out_row + i * WIDTH);
  if (to == job->inputs) {
    if (job->bias) {
      vec bias[WIDE];
      UNROLLED for (int i = 0; i < WIDE; i++)
        bias[i] = load_as(job->bias, column + i * WIDTH, dtype);
      EACH total[r][i] += bias[i];
    }
    EACH total[r][i] = rounded(total[r][i], dtype);
    for (int64_t a = 0; a < job->adapter_count; a++) {
      const float *added = job->added + (a * job->rows + row) * job->outputs + column;
      const float scaling = job->adapters[a].scaling;
      EACH {
        const vec scaled = scaling * load(added + r * job->outputs + i * WIDTH);
        total[r][i] = rounded(total[r][i] + rounded(scaled, dtype), dtype);
      }
    }
    if (job->activation)
    EACH total[r][i] = rounded(activation(total[r][i], job->activation), dtype);
    if (job->gate) {
      const float *gate = job->gate + row * job->gate_row + column;
      EACH total[r][i] =
          rounded(total[r][i] * load(gate + r * job->gate_row + i * WIDTH), dtype);
    }
    if (job->residual) {
      const float *residual = job->residual + row * job->residual_row + column;
      EACH total[r][i] =
          rounded(total[r][i] + load(residual + r * job->residual_row + i * WIDTH), dtype);
    }
  }
  EACH store(out + r * job->out_row + i * WIDTH, total[r][i]);
}

/* Memory to prefetch during a block: from `at` on, `step` bytes for each input. */
typedef struct {
  const char *at;
  int64_t step;
} Fetch;

/* Inputs of a panel of numbers, with one that fills the last pair. */
INLINE int64_t panel_inputs(const Product *job, int64_t dtype) {
  return dtype == BF16 ? (job->inputs + 1) / 2 * 2 : job->inputs;
}

INLINE void prefetch(const char *at, int64_t size) {
  UNROLLED for (int64_t i = 0; i < PANEL * size; i += LINE) __builtin_prefetch(at + i);
}

/* Adds up the products of `rows` rows with the inputs from `from` to `to` of a panel. */
INLINE void add_products(vec total[TALL][WIDE], const float *x, int64_t x_row, const char *panel,
                         int64_t from, int64_t to, Fetch fetch, const int rows, const int dtype) {
  for (int64_t k = from; k < to; k++, fetch.at += fetch.step) {
    vec weight[WIDE];
    prefetch(fetch.at, size_of(dtype));
    UNROLLED for (int i = 0; i < WIDE; i++)
      weight[i] = load_as(panel, k * PANEL + i * WIDTH, dtype);
    UNROLLED for (int r = 0; r < rows; r++) {
      vec input = splat(x[r * x_row + k]);
      UNROLLED for (int i = 0; i < WIDE; i++) total[r][i] += input * weight[i];
    }
  }
}

typedef bits_vec PairsOfInputs[WIDE];

INLINE void load_pairs(PairsOfInputs pairs, const char *panel, int64_t k) {
  UNROLLED for (int i = 0; i < WIDE; i++)
    pairs[i] = *(const bits_vec *)(panel + (k * PANEL + i * 2 * WIDTH) * size_of(BF16));
}

#ifdef PAIRS
/* The same for bf16. The values of x are numbers of bf16, so their upper half is all of them. */
INLINE void add_pairs(vec total[TALL][WIDE], const float *x, int64_t x_row, const char *panel,
                      int64_t from, int64_t to, Fetch fetch, const int rows) {
  uint16_t inputs[TALL][DEPTH];
  const int64_t count = to - from, whole = count / WIDTH * WIDTH;
  for (int r = 0; r < rows; r++) {
    const float *row = x + r * x_row + from;
    for (int64_t k = 0; k < whole; k += WIDTH)
      *(half_vec *)&inputs[r][k] =
          __builtin_convertvector((bits_vec)load(row + k) >> 16, half_vec);
    for (int64_t k = whole; k < count; k++) store_some(inputs[r], k, splat(row[k]), 1, BF16);
    if (count % 2) inputs[r][count] = 0;
  }
  for (int64_t k = 0; k < count; k += 2, fetch.at += 2 * fetch.step) {
    PairsOfInputs weight;
    prefetch(fetch.at, 2 * size_of(BF16));
    load_pairs(weight, panel, from + k);
    UNROLLED for (int r = 0; r < rows; r++) {
      int32_t pair;
      memcpy(&pair, &inputs[r][k], sizeof pair);
      const ivec input = pair - (ivec){};
      UNROLLED for (int i = 0; i < WIDE; i++)
        total[r][i] = dots_of_pairs(total[r][i], input, (ivec)weight[i]);
    }
  }
}
#else
INLINE void add_halves(vec total[TALL][WIDE], const float *x, int64_t x_row,
                       const PairsOfInputs weight,
                       const int rows) {
  UNROLLED for (int r = 0; r < rows; r++) {
    vec input = splat(x[r * x_row]);
    UNROLLED for (int i = 0; i < WIDE; i++) total[r][i] += input * (vec)weight[i];
  }
}

INLINE void add_pairs(vec total[TALL][WIDE], const float *x, int64_t x_row, const char *panel,
                      int64_t from, int64_t to, Fetch fetch, const int rows) {
  for (int64_t k = from; k < to; k += 2, fetch.at += 2 * fetch.step) {
    PairsOfInputs pairs, half;
    prefetch(fetch.at, 2 * size_of(BF16));
    load_pairs(pairs, panel, k);
    UNROLLED for (int i = 0; i < WIDE; i++) half[i] = pairs[i] << 16;
    add_halves(total, x + k, x_row, half, rows);
    if (k + 1 == to) break;
    UNROLLED for (int i = 0; i < WIDE; i++) half[i] = pairs[i] & 0xffff0000;
    add_halves(total, x + k + 1, x_row, half, rows);
  }
}
#endif

/* Multiplies rows from `row` on with a panel, over the inputs from `from` to `to`. */
INLINE void multiply(const Product *job, int64_t row, int64_t p, int64_t from, int64_t to,
                     Fetch fetch, const int rows, const int dtype) {
  const float *x = job->x + row * job->x_row;
  const char *panel = after(job->panels, p * panel_inputs(job, dtype) * PANEL, dtype);
  vec total[TALL][WIDE];
  EACH total[r][i] = splat(0.0f);
  if (dtype == BF16)
    add_pairs(total, x, job->x_row, panel, from, to, fetch, rows);
  else
    add_products(total, x, job->x_row, panel, from, to, fetch, rows, dtype);
  if ((p + 1) * PANEL <= job->outputs) {
    finish_whole(job, total, row, p * PANEL, from, to, rows, dtype);
    return;
  }
  float kept[TALL * PANEL];
  EACH store(kept + r * PANEL + i * WIDTH, total[r][i]);
  finish(job, kept, row, rows, p, from, to);
}

/* Inputs of a weight in bytes, in groups of four. */
INLINE int64_t groups_of(int64_t inputs) { return (inputs + 3) / 4; }

/* Multiplies rows of bytes from `row` on with a panel of bytes. */
INLINE void multiply_bytes(const Product *job, int64_t row, int64_t p, Fetch fetch, const int rows,
                           const int kind) {
  const int64_t groups = groups_of(job->inputs), x_row = byte_row(job->inputs);
  const int8_t *x = job->bytes + row * x_row;
  const int8_t *panel = (const int8_t *)job->panels + p * groups * 4 * PANEL;
  ivec total[TALL][WIDE];
  EACH {
    total[r][i] = (ivec){};
    if (kind == BYTES_AT_ONCE && BIAS)
      total[r][i] -= BIAS * load_integers(job->sums + p * PANEL + i * WIDTH);
  }
  for (int64_t k = 0; k < groups; k++, fetch.at += fetch.step) {
    ivec weight[WIDE];
    UNROLLED for (int i = 0; i < WIDE; i++) {
      weight[i] = load_integers(panel + 4 * (k * PANEL + i * WIDTH));
      if (4 * i * WIDTH % LINE == 0) __builtin_prefetch(fetch.at + 4 * i * WIDTH);
    }
    UNROLLED for (int r = 0; r < rows; r++) {
      int32_t four;
      memcpy(&four, x + r * x_row + 4 * k, 4);
      const ivec input = four - (ivec){};
      UNROLLED for (int i = 0; i < WIDE; i++)
        total[r][i] = kind == BYTES_AT_ONCE ? dots_at_once(total[r][i], input, weight[i])
                                            : dots(total[r][i], input, weight[i]);
    }
  }
  float made[TALL * PANEL];
  UNROLLED for (int r = 0; r < rows; r++) {
    float of_row;
    memcpy(&of_row, x + r * x_row + 4 * groups, 4);
    UNROLLED for (int i = 0; i < WIDE; i++) {
      const vec scale = of_row * load(job->scales + p * PANEL + i * WIDTH);
      store(made + r * PANEL + i * WIDTH, __builtin_convertvector(total[r][i], vec) * scale);
    }
  }
  finish(job, made, row, rows, p, 0, job->inputs);
}

static int64_t blocks_of(const Product *job) { return (job->rows + TALL - 1) / TALL; }

/* Divides the work: with few rows so that all threads have tasks, with many so that panels are read
 * as few times as possible. Returns the number of tasks. */
int64_t prepare_product(Product *job, unsigned threads) {
  const int64_t panels = (job->outputs + PANEL - 1) / PANEL, blocks = blocks_of(job);
  const int64_t chunks = blocks ? (blocks + BLOCKS - 1) / BLOCKS : 1;
  job->chunk = blocks ? (blocks + chunks - 1) / chunks : 1;
  while (threads > 1 && job->chunk > 1 &&
         panels * ((blocks + job->chunk - 1) / job->chunk) < 4 * threads)
    job->chunk = (job->chunk + 1) / 2;
  const int64_t share = panels / (8 * threads);
  job->side = threads == 1 ? panels : share < SIDE ? share : SIDE;
  job->side = job->side < 1 ? 1 : job->side;
  return (panels + job->side - 1) / job->side * ((blocks + job->chunk - 1) / job->chunk);
}

/* Multiplies a piece of a panel with all rows of a task. The first block prefetches the piece
 * itself, the others prefetch what follows it. */
INLINE void multiply_piece(const Product *job, int64_t p, int64_t from, int64_t to, int64_t first,
                           int64_t last, const int dtype, const int kind) {
  const int64_t blocks = blocks_of(job), others = last - first - 1;
  const int64_t bytes = PANEL * (kind == NUMBERS ? size_of(dtype) : 4); /* per input, or four */
  const int64_t count = kind == NUMBERS ? panel_inputs(job, dtype) : groups_of(job->inputs);
  const char *panel = (const char *)job->panels + p * count * bytes;
  Fetch fetch = {panel + from * bytes + AHEAD, bytes};
  for (int64_t block = first; block < last; block++) {
    const int64_t row = block * job->rows / blocks; /* blocks differ by at most one row */
    switch ((block + 1) * job->rows / blocks - row) {
#define OF(rows) \
  case rows: \
    if (kind == NUMBERS) \
      multiply(job, row, p, from, to, fetch, rows, dtype); \
    else \
      multiply_bytes(job, row, p, fetch, rows, kind); \
    break;
      OF(1) OF(2) OF(3) OF(4) OF(5) OF(6)
#undef OF
    }
    if (others)
      fetch = (Fetch){panel + (to + (block - first) * (to - from) / others) * bytes,
                      bytes / others};
  }
}

/* Multiplies a panel with all rows of a task, piece by piece. */
INLINE void multiply_panel(const Product *job, int64_t p, int64_t first, int64_t last,
                           const int dtype) {
  for (int64_t from = 0; from < job->inputs; from += DEPTH) {
    const int64_t to = from + DEPTH < job->inputs ? from + DEPTH : job->inputs;
    multiply_piece(job, p, from, to, first, last, dtype, NUMBERS);
  }
}

/* Multiplies all rows with the panels from `begin` to `end`, which are of no bytes. */
void multiply_panels(const Product *job, int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; p++)
    WITH_DTYPE(job->dtype, multiply_panel, job, p, 0, blocks_of(job))
}

/* The same for bytes, whose panels are a quarter as large. */
static void multiply_panel_of_bytes(const Product *job, int64_t p, int64_t first, int64_t last) {
  const int64_t groups = groups_of(job->inputs);
  if (job->kind == BYTES_AT_ONCE)
    multiply_piece(job, p, 0, groups, first, last, FP32, BYTES_AT_ONCE);
  else
    multiply_piece(job, p, 0, groups, first, last, FP32, BYTES);
}

void work_on_product(void *given, Tasks *tasks) {
  Product *job = given;
  const int64_t blocks = blocks_of(job), panels = (job->outputs + PANEL - 1) / PANEL;
  const int64_t sides = (panels + job->side - 1) / job->side;
  for (int64_t task; (task = next(tasks)) >= 0;) {
    const int64_t first = task / sides * job->chunk, begin = task % sides * job->side;
    const int64_t last = first + job->chunk < blocks ? first + job->chunk : blocks;
    const int64_t end = begin + job->side < panels ? begin + job->side : panels;
    for (int64_t p = begin; p < end; p++)
      if (job->kind == NUMBERS) {
        WITH_DTYPE(job->dtype, multiply_panel, job, p, first, last)
      } else {
        multiply_panel_of_bytes(job, p, first, last);
      }
  }
}

/* Runs a product; `bytes`: scratch for rounded rows, if its weight is of bytes. */
void multiply_rows(parallel run, unsigned threads, const Product *product, int8_t *bytes) {
  Product job = *product;
  Rounding rounding = {.bytes = bytes, .x = job.x, .rows = job.rows, .inputs = job.inputs,
                       .x_row = job.x_row, .kind = job.kind};
  job.bytes = bytes;
  const int64_t tasks = prepare_product(&job, threads);
  const Phase phases[] = {{work_on_rounding, &rounding, job.rows, 0},
                          {work_on_product, &job, tasks, 0}};
  const int first = job.kind == NUMBERS;
  run_phases(run, threads, phases + first, 2 - first);
}

/* out, residual: (rows, outputs) contiguous; x: (rows, inputs) with rows `x_row` elements apart. */
void product(parallel run, unsigned threads, float *out, const float *x, const void *panels,
             const void *bias, const float *residual, int64_t rows, int64_t outputs, int64_t inputs,
             int64_t x_row, int64_t activation, int64_t dtype) {
  Product job = {.out = out, .x = x, .panels = panels, .bias = bias, .residual = residual,
                 .rows = rows, .outputs = outputs, .inputs = inputs, .out_row = outputs,
                 .x_row = x_row, .residual_row = outputs, .activation = activation, .dtype = dtype};
  in_parallel(run, threads, work_on_product, &job, prepare_product(&job, threads));
}

/* The same with a weight of bytes, and scratch for the rows of x. */
void product_of_bytes(parallel run, unsigned threads, float *out, const float *x,
                      const void *panels, const float *scales, const int32_t *sums,
                      const void *bias, const float *residual, int8_t *bytes, int64_t rows,
                      int64_t outputs, int64_t inputs, int64_t x_row, int64_t activation,
                      int64_t dtype, int64_t kind) {
  const Product job = {.out = out, .x = x, .panels = panels, .bias = bias, .residual = residual,
                       .scales = scales, .sums = sums, .rows = rows, .outputs = outputs,
                       .inputs = inputs, .out_row = outputs, .x_row = x_row,
                       .residual_row = outputs, .activation = activation, .dtype = dtype,
                       .kind = kind};
  multiply_rows(run, threads, &job, bytes);
}
