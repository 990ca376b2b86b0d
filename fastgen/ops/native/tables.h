/* Tables of a search that are reordered and extended, and what else a step moves. */

#ifndef TABLES_H
#define TABLES_H

#include "vector.h"

/* Rows of beams, and what comes next to them. Strides of rows are in bytes, those of what comes next in numbers. */
typedef struct {
  char *rows;
  const char *newest;
  char *finished; /* rows of another table, or NULL */
  int64_t row_b, row_m, finished_b, finished_m, newest_b, newest_m, newest_c;
  int64_t prefix, filled;              /* numbers that no beam changes, and those behind them that go on */
  int64_t columns, size, newest_size;  /* columns: of one step; sizes: of a number */
} Table;

int move_rows(parallel run, unsigned threads, const Table *tables, const int64_t *parents, const int64_t *order,
              int64_t count, int64_t sentences, int64_t beams, int64_t candidates, int64_t held_size);
int embed(parallel run, unsigned threads, float *out, const int64_t *ids, const float *tokens, const float *position,
          const float *other, int64_t rows, int64_t width, int64_t vocabulary, int64_t id_row, int64_t token_row,
          int64_t padding, float scale);
void add_repeats(parallel run, unsigned threads, uint32_t *mask, const int64_t *ids, const int64_t *text, int64_t rows,
                 int64_t words, int64_t n, int64_t length, int64_t text_length, int64_t vocabulary,
                 int64_t rows_per_text, int64_t ids_row, int64_t text_row);

#endif
