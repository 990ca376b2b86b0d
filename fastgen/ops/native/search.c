/* Whole steps of a search, from the newest tokens to the choice of the next, until a callback has
 * to observe one. They call the functions of single steps: `embed`, `step_at`, `product`, `k_best`,
 * `choose` and `move_rows`.
 *
 * Source: decoding/search/beam_search.py, first_finished.py and sampling.py. */

#include "search.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bounds.h"
#include "choice.h"
#include "draws.h"
#include "rows.h"
#include "tables.h"

enum { THREAD_WORK = 32 * 1024 }; /* as in ops/native/__init__.py */

/* Seconds after which a call returns to Python, which may have signals to handle. */
static const double PATIENCE = 0.1;

/* In place of `run`, for what the team of threads does that the search leads. */
static const parallel OURS = NULL;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

static unsigned threads_for(const Decoder *model, int64_t work) {
  const int64_t threads = work / THREAD_WORK;
  return threads < 1 ? 1 : threads < model->threads ? (unsigned)threads : (unsigned)model->threads;
}

INLINE void add_row(float *out, const void *row, int64_t width, const int dtype) {
  for (int64_t c = 0; c < width; c += WIDTH) {
    const vec total = load_some(out, c, width - c, FP32) + load_some(row, c, width - c, dtype);
    store_some(out, c, rounded(total, dtype), width - c, FP32);
  }
}

INLINE void scale_all(float *x, int64_t count, float scale, const int dtype) {
  for (int64_t i = 0; i < count; i += WIDTH)
    store_some(x, i, rounded(load_some(x, i, count - i, FP32) * scale, dtype), count - i, FP32);
}

/* Writes the input of the first sublayer, and the stream: the embeddings of the newest tokens.
 * Returns 0 if a token is not a row of the embedding. */
static int read_tokens(const Decoder *model, const Texts *texts, int64_t beams) {
  const Step *step = model->step;
  const int64_t C = step->width, V = model->vocabulary, R = step->rows, D = step->dtype;
  const int between = model->norm_tokens && model->embedded.kind != UNNORMED;
  float *sum = step->norm_first ? step->stream : step->x;
  for (int64_t r = 0; r < R; r++) {
    const int64_t *id = text_of(texts, beams, r) + texts->length - 1;
    const void *position = NULL, *other = NULL;
    if (model->positions) {
      const int64_t at = model->position[r];
      const int64_t before = model->padding_row < 0 ? at - 1 : model->padding_row;
      position = after(model->positions, at * model->position_row, D);
      if (model->padding >= 0) other = after(model->positions, before * model->position_row, D);
      if (other && *id == model->padding) position = other;
    }
    float *out = sum + r * C;
    if (!embed(NULL, 1, out, id, model->tokens, between ? NULL : position, NULL, 1, C, V, 1,
               model->token_row, 0, 0, -1, D, (float)model->scale))
      return 0;
    norm_row(out, out, &model->embedded, C, D);
    if (between && position) WITH_DTYPE(D, add_row, out, position, C)
    if (step->norm_first) norm_row(step->x + r * C, out, &model->first, C, D);
  }
  return 1;
}

/* The multiplications of an average product, or of the largest attention with `more` keys. */
static int64_t work_of(const Decoder *model, int64_t more) {
  const Step *step = model->step;
  const Seen *seen = model->seen;
  int64_t most = step->rows * model->work;
  for (int64_t i = 0; i < step->sublayer_count; i++) {
    const Sublayer *of = &step->sublayers[i];
    if (!attends(of)) continue;
    const int64_t keys = (seen++)->count + (attends_to_text(of) ? more : 0);
    const int64_t work = step->rows * of->heads * (of->latent ? of->latent : of->dims) * keys;
    if (work > most) most = work;
  }
  return most;
}

/* Runs all sublayers for the newest tokens, whose keys and values take the next slots. Returns why
 * it could not. */
static int run_layers(Decoder *model, Texts *texts, int64_t beams) {
  const Step *step = model->step;
  int64_t at = 0;
  model->began[texts->run] = seconds();
  if (!read_tokens(model, texts, beams)) return NO_ROW;
  for (int64_t i = 0; i < step->sublayer_count; i++) {
    const Sublayer *of = &step->sublayers[i];
    if (!attends(of)) continue;
    Seen *seen = &model->seen[at++];
    if (attends_to_text(of)) seen->slot = seen->count, seen->count += beams;
  }
  if (!step_at(OURS, threads_for(model, work_of(model, 0)), step, texts->run)) return NO_MEMORY;
  if (model->head_scale != 1.0)
    WITH_DTYPE(step->dtype, scale_all, step->x, step->rows * step->width,
               (float)model->head_scale)
  if (model->positions)
    for (int64_t r = 0; r < step->rows; r++) model->position[r]++;
  texts->run++;
  return GOES_ON;
}

static unsigned threads_of_head(const Decoder *model) {
  return threads_for(model, model->step->rows * model->step->width * model->head.outputs);
}

/* logits = softcap tanh(logits / softcap), where each operation is rounded, as in the toolkit. */
INLINE void cap_row(float *logits, int64_t count, float softcap, const int dtype) {
  for (int64_t v = 0; v < count; v += WIDTH) {
    const vec share = rounded(load_some(logits, v, count - v, FP32) / softcap, dtype);
    const vec capped = rounded(hyperbolic_tangent(share), dtype) * softcap;
    store_some(logits, v, rounded(capped, dtype), count - v, FP32);
  }
}

static void cap_rows(void *given, Tasks *tasks) {
  const Decoder *model = given;
  const int64_t V = model->head.outputs;
  for (int64_t r; (r = next(tasks)) >= 0;)
    WITH_DTYPE(model->step->dtype, cap_row, model->logits + r * V, V, (float)model->softcap)
}

static void multiply_head(const Decoder *model) {
  const unsigned threads = threads_of_head(model);
  multiply(OURS, threads, model->step, &model->head, model->step->x, model->logits);
  if (model->softcap) in_parallel(OURS, threads, cap_rows, (void *)model, model->step->rows);
}

/* Computes the logits of the newest tokens. Returns why it could not. */
static int make_logits(Decoder *model, Texts *texts, int64_t beams) {
  const int found = run_layers(model, texts, beams);
  if (found == GOES_ON) multiply_head(model);
  return found;
}

/* Returns the sets of banned tokens, or NULL if there are none. */
static const uint32_t *ban(const Decoder *model, const Texts *texts, int64_t beams) {
  const int64_t V = model->head.outputs, words = (V + 31) / 32, R = model->step->rows;
  if (!texts->sets) return NULL;
  for (int64_t r = 0; r < R; r++)
    if (texts->banned)
      memcpy(texts->sets + r * words, texts->banned, 4 * words);
    else
      memset(texts->sets + r * words, 0, 4 * words);
  for (int64_t i = 0; i < texts->ngram_count; i++) {
    const NGrams *of = &texts->ngrams[i];
    for (int64_t b = 0; b < R / beams && texts->length >= of->shortest; b++) {
      const int64_t *ids = texts->ids + b * texts->ids_b;
      const int64_t length = of->source ? of->source_length : texts->length;
      const int64_t *text = of->source ? of->source + b * of->source_b : ids;
      add_repeats(OURS, threads_for(model, beams * length), texts->sets + b * beams * words, ids,
                  text, beams, words, of->n, texts->length, length, V, of->source ? beams : 1,
                  texts->ids_m, texts->ids_m);
    }
  }
  return texts->sets;
}

static int ends(const Texts *texts, int64_t token) {
  int found = texts->length + 1 >= texts->ends_at;
  for (int64_t i = 0; i < texts->end_count; i++) found |= token == texts->ends[i];
  return found;
}

/* Scratch memory of a step of beam search, in one piece. */
typedef struct {
  int64_t *indices, *beam, *token, *origin;  /* (B, K + 1), then (B, K) each */
  int64_t *parents, *tokens, *order, *from;  /* (B, M) each */
  float *values, *candidates, *running, *merged, *maxima, *shifts;
  float *scores;  /* (B, M, V), and a set of tokens; NULL where no scores are updated */
  uint8_t *hits, *merged_done, *flags;
} Room;

static void *make_room(Room *room, int64_t B, int64_t M, int64_t K, int64_t V, int updates) {
  const int64_t longs = B * (K + 1) + 3 * B * K + 4 * B * M;
  const int64_t blocks = (V + LEAST_BLOCK - 1) / LEAST_BLOCK;
  const int64_t updated = updates ? B * M * V + (V + 31) / 32 : 0;
  const int64_t floats = B * (K + 1) + B * K + 2 * B * M + 2 * B * M + B * M * blocks + updated;
  char *held = malloc(8 * longs + 4 * floats + B * K + B * M + 4 * B);
  if (!held) return NULL;
  int64_t *at = (int64_t *)held;
  room->indices = at, at += B * (K + 1);
  room->beam = at, at += B * K;
  room->token = at, at += B * K;
  room->origin = at, at += B * K;
  room->parents = at, at += B * M;
  room->tokens = at, at += B * M;
  room->order = at, at += B * M;
  room->from = at, at += B * M;
  float *number = (float *)at;
  room->values = number, number += B * (K + 1);
  room->candidates = number, number += B * K;
  room->running = number, number += B * M;
  room->merged = number, number += B * M;
  room->shifts = number, number += 2 * B * M;
  room->maxima = number, number += B * M * blocks;
  room->scores = updates ? number : NULL, number += updated;
  uint8_t *byte = (uint8_t *)number;
  room->hits = byte, byte += B * K;
  room->merged_done = byte, byte += B * M;
  room->flags = byte;
  return held;
}

static Table table_of(void *rows, int64_t size, int64_t row_b, int64_t row_m, int64_t prefix,
                      int64_t filled) {
  return (Table){.rows = rows, .row_b = size * row_b, .row_m = size * row_m, .prefix = prefix,
                 .filled = filled, .columns = 1, .size = size, .newest_size = 8, .newest_m = 1,
                 .newest_c = 1};
}

/* Describes the tables of tokens and of origins, and their newest elements, `each` per sentence. */
static void list_tables(Table *tables, const Texts *texts, const Beams *job, const int64_t *tokens,
                        const int64_t *origins, int64_t each) {
  const int64_t filled = texts->length - texts->prompt;
  tables[0] = table_of(texts->ids, 8, texts->ids_b, texts->ids_m, texts->prompt, filled);
  tables[1] = table_of(job->origins, 4, job->origins_b, job->origins_m, 0, filled);
  tables[0].newest = (const char *)tokens, tables[1].newest = (const char *)origins;
  tables[0].newest_b = tables[1].newest_b = each;
  tables[0].finished = (char *)job->finished_ids;
  tables[1].finished = (char *)job->finished_origins;
  tables[0].finished_b = 8 * job->finished_ids_b, tables[0].finished_m = 8 * job->finished_ids_m;
  tables[1].finished_b = 4 * job->finished_origins_b;
  tables[1].finished_m = 4 * job->finished_origins_m;
}

/* Moves the mask of each beam's slots to the beams that continue it, and opens the slots of the
 * newest tokens if there is room. */
static int descend(const Decoder *model, SlotMask *of, const int64_t *parents, int64_t B,
                   int64_t M) {
  Table seen = table_of(of->mask, 4, of->mask_b, of->mask_m, of->prefix, of->filled);
  of->open = of->filled + M <= of->room ? M : 0;
  seen.newest = (const char *)of->own, seen.newest_size = 4, seen.newest_m = M;
  seen.columns = of->open;
  const int64_t bytes = 4 * M * (of->filled + M);
  return move_rows(OURS, threads_for(model, B * bytes / 4), &seen, parents, NULL, 1, B, M, M,
                   bytes);
}

/* Finds the K highest scores of each sentence: log-probabilities, after the updates of the texts,
 * plus those of the beams. Returns 0 if Python has to. */
static int rank_tokens(const Decoder *model, const Texts *texts, const Room *room,
                       const float *beam_scores, int64_t B, int64_t M, int64_t K) {
  const int64_t V = model->head.outputs, words = (V + 31) / 32;
  const unsigned threads = threads_for(model, B * M * V);
  const uint32_t *banned = ban(model, texts, M);
  const float *in = model->logits;
  if (room->scores) {
    log_softmax(OURS, threads, room->scores, in, B * M, V, V);
    uint32_t *seen = (uint32_t *)(room->scores + B * M * V);
    for (int64_t r = 0; r < B * M; r++)
      if (!update_row(room->scores + r * V, seen, texts, M, r, V)) return 0;
    in = room->scores;
  }
  return k_best(OURS, threads, room->values, room->indices, room->maxima,
                room->scores ? NULL : room->shifts, in, beam_scores, banned, B, M, V, K, M * V, V,
                words);
}

/* Chooses by the logits. Texts, scores and finished hypotheses are all updated, or none of them. */
static int choose_beams(const Decoder *model, Texts *texts, Beams *job, Room *room,
                        int64_t B, int64_t M) {
  const int64_t K = job->candidates, V = model->head.outputs;
  const int64_t new_tokens = texts->length - texts->prompt + 1;
  if (!rank_tokens(model, texts, room, job->scores, B, M, K + 1)) return UNDECIDED;
  for (int64_t i = 0; i < B * K; i++) {
    const int64_t b = i / K, index = room->indices[b * (K + 1) + i % K];
    room->candidates[i] = room->values[b * (K + 1) + i % K];
    room->beam[i] = index / V, room->token[i] = index % V;
    room->origin[i] = room->beam[i] + job->sentences[b] * M;
    room->hits[i] = (uint8_t)ends(texts, room->token[i]);
  }
  const float power = (float)pow((double)new_tokens, job->penalty);
  const float far = job->far ? (float)pow((double)job->far, job->penalty) : power;
  if (!choose(OURS, 1, room->candidates, room->beam, room->token, room->hits, job->finished_scores,
              job->finished_done, job->improvable, room->parents, room->tokens, room->order,
              room->running, room->merged, room->merged_done, room->flags, B, M, K,
              job->stops_early, (float)job->mask_value, power, far))
    return UNDECIDED;
  int changed = 0;
  for (int64_t b = 0; b < B; b++) changed |= room->flags[b];
  Table tables[2];
  const int64_t bytes = 8 * M * new_tokens;
  const unsigned movers = threads_for(model, 2 * B * bytes / 4);
  if (changed) {
    list_tables(tables, texts, job, room->token, room->origin, K);
    if (!move_rows(OURS, movers, tables, room->beam, room->order, 2, B, M, K, bytes))
      return NO_MEMORY;
  }
  for (int64_t i = 0; i < B * M; i++) room->from[i] = room->parents[i] + job->sentences[i / M] * M;
  list_tables(tables, texts, job, room->tokens, room->from, M);
  if (!move_rows(OURS, movers, tables, room->parents, NULL, 2, B, M, M, bytes)) return NO_MEMORY;
  memcpy(job->scores, room->running, 4 * B * M);
  memcpy(job->finished_scores, room->merged, 4 * B * M);
  memcpy(job->finished_done, room->merged_done, B * M);
  memcpy(job->improvable, room->flags + B, B);
  memcpy(job->flags, room->flags, 4 * B);
  texts->length++, texts->made++;
  int64_t leaving = 0;
  for (int64_t b = 0; b < B; b++)
    leaving += room->flags[2 * B + b] && (!room->flags[B + b] || job->stops_early);
  if (!descend(model, &job->slot_mask, room->parents, B, M)) return NO_MEMORY;
  if (room->flags[3 * B] || leaving == B) return OVER;
  return texts->leave && leaving >= texts->leave ? LEAVING : GOES_ON;
}

/* The size of all structures of a search, which ops/native/search.py compares with its own. */
int64_t search_size(void) {
  return sizeof(LogitBounds) + sizeof(Decoder) + sizeof(NGrams) + sizeof(Update) + sizeof(Texts) + sizeof(Draws) +
         sizeof(SlotMask) + sizeof(Beams) + sizeof(FirstFinished);
}

/* A search, and why it stopped. */
typedef struct {
  Decoder *model;
  Texts *texts;
  void *job;
  int found;
} Search;

static int goes_on(const Search *search) {
  const Texts *texts = search->texts;
  return search->found == GOES_ON && texts->made < texts->steps &&
         (!texts->made || seconds() - search->model->began[0] < PATIENCE);
}

/* Runs a search on as many threads as its largest operation pays for. Returns why it stopped. */
static int run_search(parallel run, unsigned threads, void (*work)(void *), Decoder *model,
                      Texts *texts, void *job) {
  Search search = {model, texts, job, GOES_ON};
  const int64_t head = model->step->rows * model->step->width * model->head.outputs;
  const int64_t others = work_of(model, texts->steps * model->step->calls[0].beams);
  model->threads = threads;
  threads = threads_for(model, head > others ? head : others);
  do lead(run, threads, work, &search); /* again where its team has parted */
  while (goes_on(&search));
  return search.found;
}

static void work_on_beams(void *given) {
  Search *search = given;
  Decoder *model = search->model;
  Beams *job = search->job;
  const int64_t B = model->step->calls[0].sentences, M = model->step->calls[0].beams;
  Room room;
  void *held = make_room(&room, B, M, job->candidates, model->head.outputs,
                         search->texts->update_count > 0);
  search->found = held ? GOES_ON : NO_MEMORY;
  while (goes_on(search) && !should_part()) {
    search->found = make_logits(model, search->texts, M);
    if (search->found != GOES_ON) break;
    job->slot_mask.filled += M, job->slot_mask.open = 0; /* this step has filled the open slots */
    search->found = choose_beams(model, search->texts, job, &room, B, M);
  }
  free(held);
}

/* Runs steps of a beam search: the decoder, then the choice. Returns why it stopped. */
int search_beams(parallel run, unsigned threads, Decoder *model, Texts *texts, Beams *job) {
  return run_search(run, threads, work_on_beams, model, texts, job);
}

/* Chooses the best candidates that do not end. Returns 0 if there are too few. */
static int choose_going_on(const Texts *texts, Room *room, int64_t b, int64_t M, int64_t K) {
  int64_t found = 0;
  for (int64_t k = 0; k < K && found < M; k++) {
    if (room->token[b * K + k] == texts->ends[0]) continue;
    room->parents[b * M + found] = room->beam[b * K + k];
    room->tokens[b * M + found] = room->token[b * K + k];
    room->merged[b * M + found++] = room->candidates[b * K + k];
  }
  return found == M;
}

/* Stores a hypothesis that ends, with its scores. */
static void note_finished(const Texts *texts, FirstFinished *job, int64_t b, int64_t m,
                          float score) {
  const int64_t step = texts->length - 1, at = job->found++;
  const int64_t *ids = texts->ids + b * texts->ids_b + m * texts->ids_m;
  const float *scores = job->scores + b * job->scores_b + m * job->scores_m;
  job->places[3 * at] = b, job->places[3 * at + 1] = m, job->places[3 * at + 2] = step;
  memcpy(job->finished_tokens + at * job->width, ids + 1, 8 * step);
  memcpy(job->finished_scores + at * job->width, scores, 4 * step);
  job->finished_tokens[at * job->width + step] = texts->ends[0];
  job->finished_scores[at * job->width + step] = score;
  if (!job->origins) return;
  const int64_t *origins = job->origins + b * job->origins_b + m * job->origins_m;
  memcpy(job->finished_origins + at * job->width, origins, 8 * step);
  job->finished_origins[at * job->width + step] = m;
}

/* Chooses by the logits. Hypotheses finish and texts are updated, or nothing is. */
static int choose_first_finished(const Decoder *model, Texts *texts,
                                 FirstFinished *job, Room *room, int64_t B, int64_t M) {
  const int64_t K = 2 * M, V = model->head.outputs, step = texts->length - 1;
  for (int64_t r = 0; r < B * M; r++) {
    const int64_t row = r / M * job->scores_b + r % M * job->scores_m;
    room->running[r] = step ? job->scores[row + step - 1] : 0.0f;
  }
  if (!rank_tokens(model, texts, room, room->running, B, M, K + 1)) return UNDECIDED;
  for (int64_t b = 0; b < B; b++) {
    for (int64_t k = 0; k < K; k++) {
      const int64_t index = room->indices[b * (K + 1) + k];
      room->candidates[b * K + k] = room->values[b * (K + 1) + k];
      room->beam[b * K + k] = index / V, room->token[b * K + k] = index % V;
    }
    if (!choose_going_on(texts, room, b, M, K)) return UNDECIDED;
  }
  int64_t leaving = 0;
  for (int64_t b = 0; b < B; b++) {
    for (int64_t k = 0; k < M && !job->over[b]; k++)
      if (room->token[b * K + k] == texts->ends[0] && job->counts[b] < M) {
        note_finished(texts, job, b, room->beam[b * K + k], room->candidates[b * K + k]);
        job->counts[b]++;
      }
    job->over[b] |= job->counts[b] >= M;
    leaving += job->over[b];
  }
  if (leaving == B) return OVER;
  Table tables[3] = {table_of(texts->ids, 8, texts->ids_b, texts->ids_m, 1, step),
                     table_of(job->scores, 4, job->scores_b, job->scores_m, 0, step),
                     table_of(job->origins, 8, job->origins_b, job->origins_m, 0, step)};
  tables[0].newest = (const char *)room->tokens, tables[1].newest = (const char *)room->merged;
  tables[2].newest = (const char *)room->parents, tables[1].newest_size = 4;
  for (int i = 0; i < 3; i++) tables[i].newest_b = M;
  const int64_t bytes = 8 * M * (step + 1);
  if (!move_rows(OURS, threads_for(model, 2 * B * bytes / 4), tables, room->parents, NULL,
                 job->origins ? 3 : 2, B, M, M, bytes))
    return NO_MEMORY;
  texts->length++, texts->made++;
  if (!descend(model, &job->slot_mask, room->parents, B, M)) return NO_MEMORY;
  return texts->leave && leaving >= texts->leave ? LEAVING : GOES_ON;
}

static void work_on_first_finished(void *given) {
  Search *search = given;
  Decoder *model = search->model;
  FirstFinished *job = search->job;
  const int64_t B = model->step->calls[0].sentences, M = model->step->calls[0].beams;
  Room room;
  void *held = make_room(&room, B, M, 2 * M, model->head.outputs, search->texts->update_count > 0);
  search->found = held ? GOES_ON : NO_MEMORY;
  while (goes_on(search) && !should_part()) {
    search->found = make_logits(model, search->texts, M);
    if (search->found != GOES_ON) break;
    job->slot_mask.filled += M, job->slot_mask.open = 0;
    search->found = choose_first_finished(model, search->texts, job, &room, B, M);
  }
  free(held);
}

/* Runs steps of a beam search that ends a sentence with its M-th hypothesis. Returns why it
 * stopped. */
int search_first_finished(parallel run, unsigned threads, Decoder *model, Texts *texts,
                          FirstFinished *job) {
  return run_search(run, threads, work_on_first_finished, model, texts, job);
}

/* What chooses the next token of each row; the arguments of `search_rows`. */
typedef struct {
  const Draws *draws;
  SlotMask *slot_mask;
  Twister twister;
  uint8_t *running;
  const int64_t *parents;
  int64_t *tokens, pad;
} Choosing;

/* Chooses by bounds of the logits where they decide, else by the logits. Returns 0 if Python has to
 * choose by them. */
static int choose_tokens(const Decoder *model, const Texts *texts, Choosing *job, void *held) {
  const int64_t R = model->step->rows, M = model->step->calls[0].beams, V = model->head.outputs;
  const uint32_t *banned = ban(model, texts, M);
  if (model->bounds && !job->draws && !texts->update_count &&
      find_by_bounds(OURS, threads_of_head(model), job->tokens, model->step->x, model->logits,
                     banned, model->bounds, R, model->step->dtype))
    return 1;
  multiply_head(model);
  if (!job->draws)
    return find_highest(OURS, 1, job->tokens, model->logits, banned, texts, held, R, M, V);
  return draw_rows(job->draws, &job->twister, job->tokens, model->logits, banned, texts, held, R,
                   M, V);
}

/* Appends the tokens that are chosen. Returns why the search stops. */
static int append_tokens(const Decoder *model, Texts *texts, const Choosing *job) {
  const int64_t B = model->step->calls[0].sentences, M = model->step->calls[0].beams;
  int64_t ended = 0;
  for (int64_t r = 0; r < B * M; r++) {
    const int64_t token = job->running[r] || job->pad < 0 ? job->tokens[r] : job->pad;
    text_of(texts, M, r)[texts->length] = token;
    job->running[r] = job->running[r] && !ends(texts, token);
    ended += !job->running[r];
  }
  texts->length++, texts->made++;
  if (job->slot_mask && !descend(model, job->slot_mask, job->parents, B, M)) return NO_MEMORY;
  if (ended == B * M) return OVER;
  return texts->leave && ended >= texts->leave ? LEAVING : GOES_ON;
}

static void work_on_rows(void *given) {
  Search *search = given;
  Decoder *model = search->model;
  Texts *texts = search->texts;
  Choosing *job = search->job;
  const int64_t M = model->step->calls[0].beams, V = model->head.outputs;
  const int64_t updated = texts->update_count ? row_size(V) : 0;
  const int64_t size = job->draws ? draw_size(V) : team_size(1) * updated;
  void *held = size ? malloc(size) : NULL;
  if (size && !held) search->found = NO_MEMORY;
  while (goes_on(search) && !should_part()) {
    search->found = run_layers(model, texts, M);
    if (search->found != GOES_ON) break;
    /* This step has filled the open slots. */
    if (job->slot_mask) job->slot_mask->filled += M, job->slot_mask->open = 0;
    const int chosen = choose_tokens(model, texts, job, held);
    search->found = chosen ? append_tokens(model, texts, job) : UNDECIDED;
  }
  free(held);
}

/* Runs steps of a greedy search, or of sampling. Returns why it stopped.
 *
 * draws: how tokens are drawn, or NULL for the most probable ones. slot_mask: of the rows of a
 * sentence, or NULL where each has one row. running: (R,), texts that have not ended; the others
 * continue with `pad`, or with their own tokens if that is negative. parents: (R,), the row that
 * each continues, of its sentence's rows: itself. tokens: scratch for (R,). */
int search_rows(parallel run, unsigned threads, Decoder *model, Texts *texts, const Draws *draws,
                SlotMask *slot_mask, uint8_t *running, const int64_t *parents, int64_t *tokens,
                int64_t pad) {
  Choosing job = {.draws = draws, .slot_mask = slot_mask, .running = running, .parents = parents,
                  .tokens = tokens, .pad = pad};
  const int twists = draws && !draws->noise;
  if (twists) read_generator(&job.twister, draws->generator);
  const int found = run_search(run, threads, work_on_rows, model, texts, &job);
  if (twists && texts->made) write_generator(draws->generator, &job.twister);
  return found;
}
