/* Log-probabilities, and the k best of them over beams and vocabulary, in fp32.
 *
 * Source: ops/selection/kbest.py. */

#include "choice.h"

enum { VECTORS = 8 * WIDTH < LEAST_BLOCK ? LEAST_BLOCK / WIDTH : 8, BLOCK = VECTORS * WIDTH };
enum { SUMS = 8 }; /* independent sums, so that additions need not wait for each other */
_Static_assert((int)BLOCK >= (int)LEAST_BLOCK, "callers have room for one maximum per LEAST_BLOCK");
_Static_assert(BLOCK % 32 == 0, "a block has whole words of a token mask");

typedef struct {
  float* out;
  const float* in;
  int64_t rows, vocabulary, in_row;
} Softmax;

/* Loads the last elements of a row that do not fill a vector, padded with -inf. */
INLINE vec rest_of(const float* row, int64_t first, int64_t end) {
  float held[WIDTH];
  for (int i = 0; i < WIDTH; i++) held[i] = first + i < end ? row[first + i] : -INFINITY;
  return load(held);
}

/* Log-probabilities of a row are logits - top - log_total. */
typedef struct {
  float top, log_total;
} Shift;

static Shift shift_of(const float* in, int64_t V) {
  const int64_t whole = V / WIDTH * WIDTH, blocks = V / (SUMS * WIDTH) * (SUMS * WIDTH);
  vec most[SUMS], total[SUMS];
  for (int i = 0; i < SUMS; i++) most[i] = splat(-INFINITY), total[i] = splat(0.0f);
  for (int64_t v = 0; v < blocks; v += SUMS * WIDTH)
    for (int i = 0; i < SUMS; i++) most[i] = higher(load(in + v + WIDTH * i), most[i]);
  for (int64_t v = blocks; v < whole; v += WIDTH) most[0] = higher(load(in + v), most[0]);
  most[0] = higher(rest_of(in, whole, V), most[0]);
  for (int i = 1; i < SUMS; i++) most[0] = higher(most[i], most[0]);
  const float top = highest(most[0]);
  for (int64_t v = 0; v < blocks; v += SUMS * WIDTH)
    for (int i = 0; i < SUMS; i++) total[i] += exponential(load(in + v + WIDTH * i) - top);
  for (int64_t v = blocks; v < whole; v += WIDTH) total[0] += exponential(load(in + v) - top);
  if (whole < V) total[1] += exponential(rest_of(in, whole, V) - top);
  for (int i = 1; i < SUMS; i++) total[0] += total[i];
  return (Shift){top, logf(sum(total[0]))};
}

static void normalise(void* given, Tasks* tasks) {
  Softmax* job = given;
  const int64_t V = job->vocabulary, whole = V / WIDTH * WIDTH;
  for (int64_t r; (r = next(tasks)) >= 0;) {
    const float* in = job->in + r * job->in_row;
    float* out = job->out + r * V;
    const Shift by = shift_of(in, V);
    for (int64_t v = 0; v < whole; v += WIDTH) store(out + v, load(in + v) - by.top - by.log_total);
    for (int64_t v = whole; v < V; v++) out[v] = in[v] - by.top - by.log_total;
  }
}

/* out = log_softmax(in). in: (rows, V), rows `in_row` elements apart; out: (rows, V) contiguous;
 * may be in. */
void log_softmax(parallel run, unsigned threads, float* out, const float* in, int64_t rows,
                 int64_t vocabulary, int64_t in_row) {
  Softmax job = {out, in, rows, vocabulary, in_row};
  in_parallel(run, threads, normalise, &job, rows);
}

typedef struct {
  float *values, *maxima; /* (B, k + 1), and of the blocks of each row, (B, M, blocks) */
  int64_t* indices;
  Shift* shifts; /* (B, M); NULL where log-probabilities are given */
  const float *in, *scores;
  const uint32_t* banned; /* sets of tokens, a bit for each, or NULL */
  int64_t sentences, beams, vocabulary, wanted, in_b, in_m, banned_row;
  int undefined; /* whether a sum is NaN */
} Best;

static int64_t blocks_of(int64_t vocabulary) { return (vocabulary + BLOCK - 1) / BLOCK; }

static const uint32_t* banned_of(const Best* job, int64_t r) {
  return job->banned ? job->banned + r * job->banned_row : NULL;
}

INLINE int is_banned(const uint32_t* banned, int64_t v) {
  return banned && banned[v / 32] >> v % 32 & 1;
}

static int any_banned(const uint32_t* banned, int64_t first, int64_t end) {
  uint32_t any = 0;
  for (int64_t word = first / 32; banned && 32 * word < end; word++) any |= banned[word];
  return any != 0;
}

/* The score of a token, summed in the order in which the toolkits round. */
INLINE float summed(float x, Shift by, float score) { return x - by.top - by.log_total + score; }

/* Finds the highest score of each block of tokens, row by row. */
static void find_maxima(void* given, Tasks* tasks) {
  Best* job = given;
  const int64_t V = job->vocabulary, G = blocks_of(V);
  for (int64_t r; (r = next(tasks)) >= 0;) {
    const float *in = job->in + r / job->beams * job->in_b + r % job->beams * job->in_m,
                score = job->scores[r];
    const uint32_t* banned = banned_of(job, r);
    const Shift by = job->shifts ? job->shifts[r] = shift_of(in, V) : (Shift){0.0f, 0.0f};
    float* maxima = job->maxima + r * G;
    vec total = {};
    float rest = 0.0f;
    for (int64_t g = 0; g < G; g++) {
      const int64_t first = g * BLOCK, end = first + BLOCK < V ? first + BLOCK : V;
      if (end - first == BLOCK) {
        vec most = splat(-INFINITY);
        for (int i = 0; i < VECTORS; i++) {
          vec x = load(in + first + WIDTH * i) - by.top - by.log_total + score;
          total += x;
          most = higher(x, most);
        }
        maxima[g] = highest(most);
      }
      if (end - first < BLOCK || any_banned(banned, first, end)) {
        maxima[g] = -INFINITY;
        for (int64_t v = first; v < end; v++) {
          const float x = summed(in[v], by, score);
          rest += x;
          if (x > maxima[g] && !is_banned(banned, v)) maxima[g] = x;
        }
      }
    }
    rest += sum(total);
    if (rest != rest) __atomic_store_n(&job->undefined, 1, __ATOMIC_RELAXED);
  }
}

/* Inserts a value into the K highest, in descending order; equal values keep their order. */
INLINE void put(float* values, int64_t* indices, int64_t K, float value, int64_t index) {
  if (!(value > values[K - 1])) return;
  int64_t at = K - 1;
  for (; at > 0 && value > values[at - 1]; at--)
    values[at] = values[at - 1], indices[at] = indices[at - 1];
  values[at] = value, indices[at] = index;
}

/* The K highest scores of a sentence are in the K blocks with the highest maxima, up to equal ones.
 */
static void rank(void* given, Tasks* tasks) {
  Best* job = given;
  const int64_t V = job->vocabulary, G = blocks_of(V), K = job->wanted, M = job->beams;
  for (int64_t b; (b = next(tasks)) >= 0;) {
    const float* maxima = job->maxima + b * M * G;
    float* values = job->values + b * K;
    int64_t* indices = job->indices + b * K;
    for (int64_t i = 0; i < K; i++) values[i] = -INFINITY, indices[i] = 0;
    for (int64_t g = 0; g < M * G; g++) put(values, indices, K, maxima[g], 0);
    const float least = values[K - 1];
    for (int64_t i = 0; i < K; i++) values[i] = -INFINITY;
    for (int64_t g = 0; g < M * G; g++) {
      if (maxima[g] < least) continue;
      const int64_t m = g / G, first = g % G * BLOCK, end = first + BLOCK < V ? first + BLOCK : V;
      const float *in = job->in + b * job->in_b + m * job->in_m, score = job->scores[b * M + m];
      const uint32_t* banned = banned_of(job, b * M + m);
      const Shift by = job->shifts ? job->shifts[b * M + m] : (Shift){0.0f, 0.0f};
      for (int64_t v = first; v < end; v++)
        if (!is_banned(banned, v)) put(values, indices, K, summed(in[v], by, score), m * V + v);
    }
  }
}

/* Finds the K highest of in (B, M, V) + scores (B, M) of each sentence.
 *
 * values: (B, K); -inf where fewer are above -inf.
 * indices: (B, K), beam * V + token; 0 where fewer are above -inf.
 * maxima: (B, M, blocks of LEAST_BLOCK tokens), scratch memory.
 * shifts: (B, M, 2), scratch memory, if `in` are logits; NULL if they are log-probabilities.
 * banned: token masks of the rows of `in`, 32 tokens a word, `banned_row` words apart; or NULL.
 *
 * Returns 0 if two values of a sentence are equal or a sum is NaN: the caller then breaks the tie.
 */
int k_best(parallel run, unsigned threads, float* values, int64_t* indices, float* maxima,
           float* shifts, const float* in, const float* scores, const uint32_t* banned,
           int64_t sentences, int64_t beams, int64_t vocabulary, int64_t wanted, int64_t in_b,
           int64_t in_m, int64_t banned_row) {
  Best job = {.values = values,
              .maxima = maxima,
              .indices = indices,
              .shifts = (Shift*)shifts,
              .in = in,
              .scores = scores,
              .banned = banned,
              .sentences = sentences,
              .beams = beams,
              .vocabulary = vocabulary,
              .wanted = wanted,
              .in_b = in_b,
              .in_m = in_m,
              .banned_row = banned_row};
  in_parallel(run, threads, find_maxima, &job, sentences * beams);
  if (job.undefined) return 0;
  in_parallel(run, threads, rank, &job, sentences);
  for (int64_t i = 0; i < sentences * wanted; i++)
    if (i % wanted && values[i] == values[i - 1]) return 0;
  return 1;
}
