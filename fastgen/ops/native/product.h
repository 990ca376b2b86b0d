/* Products with packed weights: what a thread needs to work on one. */

#ifndef PRODUCT_H
#define PRODUCT_H

#include "vector.h"

enum { NOTHING, RELU, GELU, GELU_TANH, SILU }; /* what comes behind a product; see ops/native/__init__.py */

/* out = behind(x times the weight + bias) + residual, or times gate. */
typedef struct {
  float *out;
  const float *x, *panels, *bias, *residual, *gate; /* the last three or NULL */
  int64_t rows, outputs, inputs;
  int64_t out_row, x_row, residual_row, gate_row;   /* elements from one row to the next */
  int64_t behind;
  int64_t chunk, side, next;                        /* blocks of rows, and panels, that a task has; the next task */
} Product;

void prepare_product(Product *job, unsigned threads);
void work_on_product(void *job);
void product(parallel run, unsigned threads, float *out, const float *x, const float *panels, const float *bias,
             const float *residual, int64_t rows, int64_t outputs, int64_t inputs, int64_t x_row, int64_t behind);

#endif
