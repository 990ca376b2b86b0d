/* Selection of the next token of each row, in a search whose texts are one row each. */

#ifndef ROWS_H
#define ROWS_H

#include "search.h"

int64_t row_size(int64_t vocabulary);
int update_row(float *scores, uint32_t *seen, const Texts *texts, int64_t r, int64_t vocabulary);
int find_highest(parallel run, unsigned threads, int64_t *tokens, const float *logits,
                 const uint32_t *banned, const Texts *texts, void *held, int64_t rows,
                 int64_t vocabulary);

#endif
