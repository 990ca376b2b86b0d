/* Latent attention in a decode step: what comes before and after the attention itself. */

#ifndef LATENT_H
#define LATENT_H

#include "product.h"
#include "step.h"

/* The newest latent vectors, and rotated parts of queries and keys, of the rows of a call. */
typedef struct {
  const Step *step;
  const Sublayer *of;
  const Rows *call;
  const Seen *at;
  int64_t angles;     /* where those of the step begin */
  const float *asked; /* (R, H, dims): queries */
  const float *made;  /* (R, C + E): latent vectors before the norm, keys before the rotation */
  float *kept;        /* (R, C + E): the same afterwards */
  float *asking;      /* (R, H, C + E): queries in the space of latent vectors, and rotated */
} Keeping;

/* The products of each head's part of the rows with weights of its own, whose panels follow one
 * another. `product` is that of the first head. */
typedef struct {
  Product product;
  int64_t heads, x_head, out_head; /* elements from one head to the next */
} Heads;

void keep_latents(void *job, Tasks *tasks);
void multiply_heads(void *job, Tasks *tasks);

#endif
