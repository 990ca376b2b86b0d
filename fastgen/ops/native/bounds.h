/* The highest logit of each row, by a copy of the head in bytes and bounds of the logits' errors. */

#ifndef BOUNDS_H
#define BOUNDS_H

#include "search.h"

int find_by_bounds(parallel run, unsigned threads, int64_t *tokens, const float *x, float *upper,
                   const uint32_t *banned, const LogitBounds *of, int64_t rows, int64_t dtype);

#endif
