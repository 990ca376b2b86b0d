/* Products with packed weights: the work that threads share. */

#ifndef PRODUCT_H
#define PRODUCT_H

#include "dtype.h"
#include "team.h"

/* Activation functions after a product; ops/native/__init__.py has the same codes. */
enum { NOTHING, RELU, GELU, GELU_TANH, SILU };

/* out = activation(x times the weight + bias) + residual, or times gate.
 *
 * The result of each of these operations is rounded to `dtype`, that of the weight and the bias. */
typedef struct {
  float *out;
  const float *x;
  const void *panels, *bias;                      /* of dtype; bias may be NULL */
  const float *residual, *gate;                   /* or NULL */
  int64_t rows, outputs, inputs;
  int64_t out_row, x_row, residual_row, gate_row; /* elements from one row to the next */
  int64_t activation, dtype;
  int64_t chunk, side; /* blocks of rows, and panels, of a task */
} Product;

int64_t prepare_product(Product *job, unsigned threads);
void work_on_product(void *job, Tasks *tasks);
void product(parallel run, unsigned threads, float *out, const float *x, const void *panels,
             const void *bias, const float *residual, int64_t rows, int64_t outputs, int64_t inputs,
             int64_t x_row, int64_t activation, int64_t dtype);

#endif
