/* Selection of the next token of each row, in a search whose rows do not compete. */

#ifndef ROWS_H
#define ROWS_H

#include "search.h"

/* The tokens of row r, of `beams` rows per sentence. */
INLINE int64_t *text_of(const Texts *texts, int64_t beams, int64_t r) {
  return texts->ids + r / beams * texts->ids_b + r % beams * texts->ids_m;
}

int64_t row_size(int64_t vocabulary);
int update_row(float *scores, uint32_t *seen, const Texts *texts, int64_t beams, int64_t r,
               int64_t vocabulary);
int find_highest(parallel run, unsigned threads, int64_t *tokens, const float *logits,
                 const uint32_t *banned, const Texts *texts, void *held, int64_t rows,
                 int64_t beams, int64_t vocabulary);

#endif
