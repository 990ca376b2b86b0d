/* Log-probabilities, and the k best of them over beams and vocabulary, in fp32. Source: ops/kbest.py. */

#include "vector.h"

enum { BLOCK = 8 * WIDTH };

typedef struct {
  float *out;
  const float *in;
  int64_t rows, vocabulary, in_row, next;
} Softmax;

/* The last numbers of a row, where they do not fill a vector, and -inf. */
INLINE vec rest_of(const float *row, int64_t first, int64_t end) {
  float held[WIDTH];
  for (int i = 0; i < WIDTH; i++) held[i] = first + i < end ? row[first + i] : -INFINITY;
  return load(held);
}

static void normalise(void *given) {
  Softmax *job = given;
  const int64_t V = job->vocabulary, whole = V / WIDTH * WIDTH, blocks = V / BLOCK * BLOCK;
  for (int64_t r; (r = next(&job->next)) < job->rows;) {
    const float *in = job->in + r * job->in_row;
    float *out = job->out + r * V;
    vec most[8], total[8];
    for (int i = 0; i < 8; i++) most[i] = splat(-INFINITY), total[i] = splat(0.0f);
    for (int64_t v = 0; v < blocks; v += BLOCK)
      for (int i = 0; i < 8; i++) most[i] = higher(load(in + v + WIDTH * i), most[i]);
    for (int64_t v = blocks; v < whole; v += WIDTH) most[0] = higher(load(in + v), most[0]);
    most[0] = higher(rest_of(in, whole, V), most[0]);
    for (int i = 1; i < 8; i++) most[0] = higher(most[i], most[0]);
    const float top = highest(most[0]);
    for (int64_t v = 0; v < blocks; v += BLOCK)
      for (int i = 0; i < 8; i++) total[i] += exponential(load(in + v + WIDTH * i) - top);
    for (int64_t v = blocks; v < whole; v += WIDTH) total[0] += exponential(load(in + v) - top);
    if (whole < V) total[1] += exponential(rest_of(in, whole, V) - top);
    for (int i = 1; i < 8; i++) total[0] += total[i];
    const float log_total = logf(sum(total[0]));
    for (int64_t v = 0; v < whole; v += WIDTH) store(out + v, load(in + v) - top - log_total);
    for (int64_t v = whole; v < V; v++) out[v] = in[v] - top - log_total;
  }
}

/* in: (rows, V), rows `in_row` elements apart; out: (rows, V) contiguous, or in itself. */
void log_softmax(parallel run, unsigned threads, float *out, const float *in, int64_t rows, int64_t vocabulary,
                 int64_t in_row) {
  Softmax job = {out, in, rows, vocabulary, in_row, 0};
  in_parallel(run, threads, normalise, &job);
}

typedef struct {
  float *values, *maxima; /* (B, k + 1), and of the blocks of each row, (B, M, blocks) */
  int64_t *indices;
  const float *in, *scores;
  int64_t sentences, beams, vocabulary, wanted, in_b, in_m, next;
  int undefined; /* whether a sum is NaN */
} Best;

static int64_t blocks_of(int64_t vocabulary) { return (vocabulary + BLOCK - 1) / BLOCK; }

/* The highest sum of each block of tokens, row by row. */
static void find_maxima(void *given) {
  Best *job = given;
  const int64_t V = job->vocabulary, G = blocks_of(V);
  for (int64_t r; (r = next(&job->next)) < job->sentences * job->beams;) {
    const float *in = job->in + r / job->beams * job->in_b + r % job->beams * job->in_m, score = job->scores[r];
    float *maxima = job->maxima + r * G;
    vec total = {};
    for (int64_t g = 0; g < V / BLOCK; g++) {
      vec most = splat(-INFINITY);
      for (int i = 0; i < 8; i++) {
        vec x = load(in + g * BLOCK + WIDTH * i) + score;
        total += x;
        most = higher(x, most);
      }
      maxima[g] = highest(most);
    }
    float rest = sum(total), most = -INFINITY;
    for (int64_t v = V / BLOCK * BLOCK; v < V; v++) {
      rest += in[v] + score;
      most = in[v] + score > most ? in[v] + score : most;
    }
    if (V % BLOCK) maxima[G - 1] = most;
    if (rest != rest) __atomic_store_n(&job->undefined, 1, __ATOMIC_RELAXED);
  }
}

/* Put a value into a list of the K highest, descending, if it is higher than the last; equals stand behind. */
INLINE void put(float *values, int64_t *indices, int64_t K, float value, int64_t index) {
  if (!(value > values[K - 1])) return;
  int64_t at = K - 1;
  for (; at > 0 && value > values[at - 1]; at--) values[at] = values[at - 1], indices[at] = indices[at - 1];
  values[at] = value, indices[at] = index;
}

/* The K highest sums of a sentence lie in the K blocks with the highest maxima, or equal what is there. */
static void rank(void *given) {
  Best *job = given;
  const int64_t V = job->vocabulary, G = blocks_of(V), K = job->wanted, M = job->beams;
  for (int64_t b; (b = next(&job->next)) < job->sentences;) {
    const float *maxima = job->maxima + b * M * G;
    float *values = job->values + b * K;
    int64_t *indices = job->indices + b * K;
    for (int64_t i = 0; i < K; i++) values[i] = -INFINITY, indices[i] = 0;
    for (int64_t g = 0; g < M * G; g++) put(values, indices, K, maxima[g], 0);
    const float least = values[K - 1];
    for (int64_t i = 0; i < K; i++) values[i] = -INFINITY;
    for (int64_t g = 0; g < M * G; g++) {
      if (maxima[g] < least) continue;
      const int64_t m = g / G, first = g % G * BLOCK, end = first + BLOCK < V ? first + BLOCK : V;
      const float *in = job->in + b * job->in_b + m * job->in_m, score = job->scores[b * M + m];
      for (int64_t v = first; v < end; v++) put(values, indices, K, in[v] + score, m * V + v);
    }
  }
}

/* The K highest of in (B, M, V) + scores (B, M) of each sentence: values (B, K) and indices (B, K) = beam * V + token,
 * -inf and 0 where there are fewer above -inf. maxima: (B, M, blocks of at least 64 tokens).
 *
 * Returns 0 where any two of a sentence's values are equal, or a sum is NaN: which stands first is for others to say. */
int k_best(parallel run, unsigned threads, float *values, int64_t *indices, float *maxima, const float *in,
           const float *scores, int64_t sentences, int64_t beams, int64_t vocabulary, int64_t wanted, int64_t in_b,
           int64_t in_m) {
  Best job = {values, maxima, indices, in, scores, sentences, beams, vocabulary, wanted, in_b, in_m, 0, 0};
  in_parallel(run, threads, find_maxima, &job);
  if (job.undefined) return 0;
  job.next = 0;
  in_parallel(run, threads, rank, &job);
  for (int64_t i = 0; i < sentences * wanted; i++)
    if (i % wanted && values[i] == values[i - 1]) return 0;
  return 1;
}
