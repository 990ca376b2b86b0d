/* Tables of a search that are reordered and extended, and other data that a step moves. */

#ifndef TABLES_H
#define TABLES_H

#include "dtype.h"
#include "team.h"

/* Rows of beams, and the newest elements of each. Strides of rows are in bytes, those of the newest
 * in elements. */
typedef struct {
  char *rows;
  const char *newest;
  char *finished; /* rows of another table, or NULL */
  int64_t row_b, row_m, finished_b, finished_m, newest_b, newest_m, newest_c;
  int64_t prefix, filled;              /* elements that all beams share; filled ones after them */
  int64_t columns, size, newest_size;  /* elements per step; bytes per element */
} Table;

int move_rows(parallel run, unsigned threads, const Table *tables, const int64_t *parents,
              const int64_t *order, int64_t count, int64_t sentences, int64_t beams,
              int64_t candidates, int64_t held_size);
int embed(parallel run, unsigned threads, float *out, const int64_t *ids, const void *tokens,
          const void *position, const void *other, int64_t rows, int64_t width, int64_t vocabulary,
          int64_t id_row, int64_t token_row, int64_t position_row, int64_t other_row,
          int64_t padding, int64_t dtype, float scale);
void add_repeats(parallel run, unsigned threads, uint32_t *mask, const int64_t *ids,
                 const int64_t *text, int64_t rows, int64_t words, int64_t n, int64_t length,
                 int64_t text_length, int64_t vocabulary, int64_t rows_per_text, int64_t ids_row,
                 int64_t text_row);

#endif
