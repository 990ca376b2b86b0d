/* Products with packed weights: the work that threads share. */

#ifndef PRODUCT_H
#define PRODUCT_H

#include "dtype.h"
#include "team.h"

/* Activation functions after a product; ops/native/__init__.py has the same codes. */
enum { NOTHING, RELU, GELU, GELU_TANH, SILU, RELU_SQUARED };

/* How a weight is stored and multiplied: numbers of the dtype; bytes; bytes, by one instruction,
 * which `can_dot` detects. ops/native/products.py has the same codes. */
enum { NUMBERS, BYTES, BYTES_AT_ONCE };

/* Inputs per piece of a panel: their products are added up before they are added to the sum of the
 * earlier pieces. */
enum { DEPTH = 512 };

/* A low-rank adapter of a weight, whose product gets scaling * up(down(x)) before its activation. */
typedef struct {
  const void *down;          /* (rank, inputs), of the weight's dtype, not packed */
  const void *panels, *bias; /* of up, as in `Product` */
  int64_t rank;
  double scaling;
} Adapter;

/* out = activation(x times the weight + bias + scaling * added) + residual, or times gate, where
 * `added` are the outputs of up of all adapters, one array (rows, outputs) after the other.
 *
 * The result of each of these operations is rounded to `dtype`, that of the weight and the bias.
 * Bytes are multiplied with `bytes`, rows of x that `work_on_rounding` has rounded; sums are int32,
 * times the scales of row and output. */
typedef struct {
  float *out;
  const float *x;
  const int8_t *bytes;                            /* x of int8 products */
  const void *panels, *bias;                      /* of dtype, or panels of bytes; bias or NULL */
  const float *scales;                            /* of the outputs of a weight in bytes */
  const int32_t *sums;                            /* of the weights of each of these outputs */
  const float *residual, *gate, *added;           /* or NULL */
  int64_t rows, outputs, inputs;
  int64_t out_row, x_row, residual_row, gate_row; /* elements from one row to the next */
  const Adapter *adapters;
  int64_t adapter_count;
  int64_t activation, dtype, kind;
  int64_t chunk, side; /* blocks of rows, and panels, of a task */
} Product;

/* bytes = x rounded, (rows, byte_row(inputs)). */
typedef struct {
  int8_t *bytes;
  const float *x;
  int64_t rows, inputs, x_row, kind;
} Rounding;

int64_t byte_row(int64_t inputs);
void round_row(int8_t *bytes, const float *x, int64_t inputs, int64_t kind);
void work_on_rounding(void *job, Tasks *tasks);
void multiply_rows(parallel run, unsigned threads, const Product *job, int8_t *bytes);
int panel(void);
void multiply_panels(const Product *job, int64_t begin, int64_t end);
int64_t prepare_product(Product *job, unsigned threads);
void work_on_product(void *job, Tasks *tasks);
void product(parallel run, unsigned threads, float *out, const float *x, const void *panels,
             const void *bias, const float *residual, int64_t rows, int64_t outputs, int64_t inputs,
             int64_t x_row, int64_t activation, int64_t dtype);

#endif
