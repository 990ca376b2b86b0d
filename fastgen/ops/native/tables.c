/* Operations that move data: tables of a beam search, keys and values, rows of an embedding, and
 * sets of tokens.
 *
 * Source: ops/tables.py, ops/cache.py, ops/embedding.py, ops/selection/token_mask.py,
 * ops/selection/ngram_block.py. */

#include <stdlib.h>
#include <string.h>

#include "tables.h"

typedef struct {
  const Table *tables;
  const int64_t *parents, *order; /* (B, M or K), rows to continue; (B, M), into M finished rows,
                                     then K candidates */
  char *held;                     /* scratch memory of each thread */
  int64_t count, sentences, beams, candidates, held_size;
} Moving;

/* Writes the newest elements of a row, in the row's own size: the low bytes of wider integers. */
static void write_newest(char *to, const Table *table, int64_t b, int64_t m) {
  const int64_t at = b * table->newest_b + m * table->newest_m;
  const char *from = table->newest + at * table->newest_size;
  for (int64_t c = 0; c < table->columns; c++)
    memcpy(to + c * table->size, from + c * table->newest_c * table->newest_size, table->size);
}

static void extend(void *given, Tasks *tasks) {
  Moving *job = given;
  char *held = job->held + tasks->thread * job->held_size;
  for (int64_t i; (i = next(tasks)) >= 0;) {
    const int64_t b = i % job->sentences, M = job->beams;
    const Table *table = &job->tables[i / job->sentences];
    const int64_t length = table->filled * table->size;
    char *rows = table->rows + b * table->row_b + table->prefix * table->size;
    for (int64_t m = 0; m < M; m++)
      if (job->parents[b * M + m] != m)
        memcpy(held + m * length, rows + job->parents[b * M + m] * table->row_m, length);
    for (int64_t m = 0; m < M; m++) {
      if (job->parents[b * M + m] != m) memcpy(rows + m * table->row_m, held + m * length, length);
      write_newest(rows + m * table->row_m + length, table, b, m);
    }
  }
}

static void finish(void *given, Tasks *tasks) {
  Moving *job = given;
  char *held = job->held + tasks->thread * job->held_size;
  for (int64_t i; (i = next(tasks)) >= 0;) {
    const int64_t b = i % job->sentences, M = job->beams;
    const Table *table = &job->tables[i / job->sentences];
    const int64_t length = table->filled * table->size, whole = length + table->size;
    const int64_t first = table->prefix * table->size;
    const char *rows = table->rows + b * table->row_b + first;
    char *finished = table->finished + b * table->finished_b + first;
    for (int64_t m = 0; m < M; m++) {
      const int64_t from = job->order[b * M + m];
      if (from < M) {
        memcpy(held + m * whole, finished + from * table->finished_m, whole);
      } else {
        const int64_t parent = job->parents[b * job->candidates + from - M];
        memcpy(held + m * whole, rows + parent * table->row_m, length);
        write_newest(held + m * whole + length, table, b, from - M);
      }
    }
    for (int64_t m = 0; m < M; m++)
      memcpy(finished + m * table->finished_m, held + m * whole, whole);
  }
}

static int all_below(const int64_t *numbers, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; i++)
    if (numbers[i] < 0 || numbers[i] >= limit) return 0;
  return 1;
}

/* Reorders the rows of each table and appends their newest elements; with an order, selects the
 * finished rows instead. held_size: bytes of M rows of any table.
 *
 * Returns 0 if there was no memory, -1 if an index is out of range. */
int move_rows(parallel run, unsigned threads, const Table *tables, const int64_t *parents,
              const int64_t *order, int64_t count, int64_t sentences, int64_t beams,
              int64_t candidates, int64_t held_size) {
  const int64_t each = order ? candidates : beams;
  if (!all_below(parents, sentences * each, beams)) return -1;
  if (order && !all_below(order, sentences * beams, beams + candidates)) return -1;
  Moving job = {.tables = tables, .parents = parents, .order = order,
                .held = malloc(team_size(threads) * held_size), .count = count,
                .sentences = sentences, .beams = beams, .candidates = candidates,
                .held_size = held_size};
  if (!job.held) return 0;
  in_parallel(run, threads, order ? finish : extend, &job, count * sentences);
  free(job.held);
  return 1;
}

typedef struct {
  char *buffer;
  const int64_t *to, *origin;
  int64_t count, heads, size, sentence, head;
} Moves;

static void move(void *given, Tasks *tasks) {
  Moves *job = given;
  for (int64_t i; (i = next(tasks)) >= 0;) {
    char *head = job->buffer + i % job->heads * job->head;
    const int64_t to = job->to[i / job->heads], origin = job->origin[i / job->heads];
    memcpy(head + to * job->sentence, head + origin * job->sentence, job->size);
  }
}

/* Copies sentences over others, which are not copied themselves. Strides and the size of a head are
 * in bytes. Returns 0 if an index is out of range. */
int move_sentences(parallel run, unsigned threads, char *buffer, const int64_t *to,
                   const int64_t *origin, int64_t count, int64_t heads, int64_t size,
                   int64_t sentence, int64_t head, int64_t sentences) {
  if (!all_below(to, count, sentences) || !all_below(origin, count, sentences)) return 0;
  Moves job = {buffer, to, origin, count, heads, size, sentence, head};
  in_parallel(run, threads, move, &job, count * heads);
  return 1;
}

/* out = a token's row times scale, plus another row if `added` is not NULL. */
INLINE void embed_row(float *out, const void *token, const void *added, int64_t width, float scale,
                      const int dtype) {
  for (int64_t c = 0; c < width; c += WIDTH) {
    vec x = rounded(load_some(token, c, width - c, dtype) * scale, dtype);
    if (added) x = rounded(x + load_some(added, c, width - c, dtype), dtype);
    store_some(out, c, x, width - c, FP32);
  }
}

/* out = rows of tokens (V, C) times scale, plus `position`, or `other` for the token `padding`.
 * tokens, position and other have the dtype, to which the results are rounded. The latter two lie
 * `position_row` and `other_row` elements further for each row, which is 0 if all have the same.
 *
 * Returns 0 if an id is out of range. */
int embed(parallel run, unsigned threads, float *out, const int64_t *ids, const void *tokens,
          const void *position, const void *other, int64_t rows, int64_t width, int64_t vocabulary,
          int64_t id_row, int64_t token_row, int64_t position_row, int64_t other_row,
          int64_t padding, int64_t dtype, float scale) {
  (void)run, (void)threads; /* too little work for more than one */
  for (int64_t r = 0; r < rows; r++) {
    const int64_t id = ids[r * id_row];
    if (id < 0 || id >= vocabulary) return 0;
    const void *token = after(tokens, id * token_row, dtype);
    const void *added = position ? after(position, r * position_row, dtype) : NULL;
    if (other && id == padding) added = after(other, r * other_row, dtype);
    WITH_DTYPE(dtype, embed_row, out + r * width, token, added, width, scale)
  }
  return 1;
}

static void add(uint32_t *set, int64_t token, int64_t vocabulary) {
  if (token >= 0 && token < vocabulary) set[token / 32] |= 1u << token % 32;
}

/* Adds tokens (R, N), rows `tokens_row` apart, to the sets in mask (R, words). */
void add_tokens(parallel run, unsigned threads, uint32_t *mask, const int64_t *tokens, int64_t rows,
                int64_t words, int64_t count, int64_t vocabulary, int64_t tokens_row) {
  (void)run, (void)threads; /* too little work for more than one */
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < count; i++)
      add(mask + r * words, tokens[r * tokens_row + i], vocabulary);
}

typedef struct {
  uint32_t *mask;
  const int64_t *ids, *text;
  int64_t rows, words, n, length, text_length, vocabulary, rows_per_text, ids_row, text_row;
} Grams;

static void find_grams(void *given, Tasks *tasks) {
  Grams *job = given;
  for (int64_t r; (r = next(tasks)) >= 0;) {
    const int64_t before = job->n - 1;
    const int64_t *newest = job->ids + r * job->ids_row + job->length - before;
    const int64_t *text = job->text + r / job->rows_per_text * job->text_row;
    for (int64_t at = 0; at + before < job->text_length; at++) {
      int64_t same = 0;
      while (same < before && text[at + same] == newest[same]) same++;
      if (same == before) add(job->mask + r * job->words, text[at + before], job->vocabulary);
    }
  }
}

/* Adds to the set of each row what follows its newest n - 1 tokens elsewhere in a text. */
void add_repeats(parallel run, unsigned threads, uint32_t *mask, const int64_t *ids,
                 const int64_t *text, int64_t rows, int64_t words, int64_t n, int64_t length,
                 int64_t text_length, int64_t vocabulary, int64_t rows_per_text, int64_t ids_row,
                 int64_t text_row) {
  Grams job = {.mask = mask, .ids = ids, .text = text, .rows = rows, .words = words, .n = n,
               .length = length, .text_length = text_length, .vocabulary = vocabulary,
               .rows_per_text = rows_per_text, .ids_row = ids_row, .text_row = text_row};
  in_parallel(run, threads, find_grams, &job, rows);
}
