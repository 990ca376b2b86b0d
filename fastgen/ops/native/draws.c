/* Drawing of the next token of each row, as `torch.multinomial` draws on a CPU: by the highest of
 * its probabilities, each divided by a random number.
 *
 * The random numbers are torch's. Probabilities differ from torch's in their rounding, so that a
 * draw that depends on it is left to torch.
 *
 * Source: decoding/search/sampling.py and multinomial.py, decoding/logits/top_p.py and min_p.py;
 * Matsumoto and Nishimura 1998 (MT19937); ATen's exponential distribution. */

#include "draws.h"

#include <stdlib.h>
#include <string.h>

#include "rows.h"

enum { WORDS = 624, APART = 397, BLOCK = 32 };

/* More than the largest difference from torch's numbers, in proportion: 1e-6 in a quotient. */
static const double ROUNDING = 1e-5;

/* The beginning of the state of torch's generator for CPUs; more follows. */
typedef struct {
  uint64_t seed;
  int32_t left, seeded; /* left: words before the next refresh, plus 1 */
  uint64_t next, words[WORDS];
} State;

void read_generator(Twister *twister, const uint8_t *state) {
  State from;
  memcpy(&from, state, sizeof from);
  for (int i = 0; i < WORDS; i++) twister->words[i] = (uint32_t)from.words[i];
  twister->next = from.left > 0 && from.left <= WORDS ? WORDS + 1 - from.left : WORDS;
}

/* Writes the state back. At least one number must have been taken since it was read. */
void write_generator(uint8_t *state, const Twister *twister) {
  State to;
  memcpy(&to, state, sizeof to);
  for (int i = 0; i < WORDS; i++) to.words[i] = twister->words[i];
  to.left = (int32_t)(WORDS + 1 - twister->next), to.next = (uint64_t)twister->next;
  memcpy(state, &to, sizeof to);
}

INLINE uint32_t twisted(uint32_t upper, uint32_t lower, uint32_t apart) {
  const uint32_t y = (upper & 0x80000000) | (lower & 0x7fffffff);
  return apart ^ y >> 1 ^ (-(y & 1) & 0x9908b0df);
}

static void refresh(Twister *twister) {
  uint32_t *w = twister->words;
  for (int i = 0; i < WORDS - APART; i++) w[i] = twisted(w[i], w[i + 1], w[i + APART]);
  for (int i = WORDS - APART; i < WORDS - 1; i++)
    w[i] = twisted(w[i], w[i + 1], w[i + APART - WORDS]);
  w[WORDS - 1] = twisted(w[WORDS - 1], w[0], w[APART - 1]);
  twister->next = 0;
}

static void skip(Twister *twister, int64_t count) {
  for (; count > WORDS - twister->next; refresh(twister)) count -= WORDS - twister->next;
  twister->next += count;
}

INLINE uint64_t word(Twister *twister) {
  if (twister->next == WORDS) refresh(twister);
  uint32_t y = twister->words[twister->next++];
  y ^= y >> 11;
  y ^= y << 7 & 0x9d2c5680;
  y ^= y << 15 & 0xefc60000;
  return y ^ y >> 18;
}

/* A random number in [0, 1). */
INLINE double uniform(Twister *twister) {
  const uint64_t high = word(twister) & 0x1fffff, low = word(twister);
  return (double)(high << 32 | low) * 0x1p-53;
}

INLINE float exponential_of(double uniform_number) { return (float)-log1p(-uniform_number); }

/* Fills (count,) as `exponential_` does from the state of a generator, which is advanced. */
void exponential_noise(parallel run, unsigned threads, float *out, uint8_t *state, int64_t count) {
  (void)run, (void)threads; /* each number follows from the one before it */
  Twister twister;
  if (!count) return;
  read_generator(&twister, state);
  for (int64_t i = 0; i < count; i++) out[i] = exponential_of(uniform(&twister));
  write_generator(state, &twister);
}

/* Scratch memory of a row. */
typedef struct {
  float *scores, *weights, *spare_scores, *spare_weights; /* (V,) each */
  int32_t *tokens;                                        /* (V,) */
  uint32_t *seen;
} Room;

/* Bytes of scratch memory of `draw_rows`. */
int64_t draw_size(int64_t vocabulary) { return 16 * vocabulary + row_size(vocabulary); }

static Room room_in(void *held, int64_t V) {
  float *at = held;
  return (Room){.scores = at, .seen = (uint32_t *)(at + 5 * V), .weights = at + V,
                .spare_scores = at + 2 * V, .spare_weights = at + 3 * V,
                .tokens = (int32_t *)(at + 4 * V)};
}

/* Whether all numbers are finite. */
static int all_finite(const float *x, int64_t count) {
  vec total = {};
  for (int64_t i = 0; i < count; i += WIDTH) total += 0.0f * load_some(x, i, count - i, FP32);
  return sum(total) == 0.0f;
}

static void ban_tokens(float *scores, const uint32_t *banned, int64_t V) {
  for (int64_t v = 0; v < V; v++) {
    if (banned[v / 32] == 0)
      v |= 31; /* none of this word */
    else if (banned[v / 32] >> v % 32 & 1)
      scores[v] = -INFINITY;
  }
}

static void divide(float *x, int64_t count, float by) {
  for (int64_t i = 0; i < count; i += WIDTH)
    store_some(x, i, load_some(x, i, count - i, FP32) / by, count - i, FP32);
}

static float highest_in(const float *x, int64_t count) {
  vec most = splat(-INFINITY);
  const int64_t whole = count / WIDTH * WIDTH;
  for (int64_t i = 0; i < whole; i += WIDTH) most = higher(load(x + i), most);
  float top = highest(most);
  for (int64_t i = whole; i < count; i++) top = x[i] > top ? x[i] : top;
  return top;
}

/* The k-th highest of (count,) scores, k <= count. heap: (k,), the lowest first. */
static float kth_highest(const float *scores, int64_t count, float *heap, int64_t k) {
  for (int64_t i = 0; i < k; i++) heap[i] = -INFINITY;
  for (int64_t first = 0; first < count; first += BLOCK) {
    const int64_t end = first + BLOCK < count ? first + BLOCK : count;
    if (!(highest_in(scores + first, end - first) > heap[0])) continue;
    for (int64_t i = first; i < end; i++) {
      if (!(scores[i] > heap[0])) continue;
      int64_t at = 0;
      for (int64_t child; (child = 2 * at + 1) < k; at = child) {
        if (child + 1 < k && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= scores[i]) break;
        heap[at] = heap[child];
      }
      heap[at] = scores[i];
    }
  }
  return heap[0];
}

/* Lists the tokens whose scores are `least` or more, in order, with weights in proportion to their
 * probabilities. Returns their number. */
static int64_t list_tokens(const Room *room, int64_t V, float least, float top) {
  int64_t found = 0;
  for (int64_t first = 0; first < V; first += BLOCK) {
    const int64_t count = first + BLOCK < V ? BLOCK : V - first;
    const float *scores = room->scores + first;
    if (highest_in(scores, count) < least) continue;
    float weights[BLOCK];
    for (int64_t i = 0; i < count; i += WIDTH)
      store(weights + i, exponential(load_some(scores, i, count - i, FP32) - top));
    for (int64_t i = 0; i < count; i++) {
      room->tokens[found] = (int32_t)(first + i), room->weights[found] = weights[i];
      found += scores[i] >= least && scores[i] > -INFINITY;
    }
  }
  return found;
}

/* The lowest score above which weights sum up to less than `target`. `whole`: whether that holds
 * for all tokens with this score but the last. */
typedef struct {
  float score;
  int whole;
} Boundary;

INLINE void swap(float *x, int64_t i, int64_t j) {
  const float held = x[i];
  x[i] = x[j], x[j] = held;
}

/* Reorders (count,) scores and their weights until the boundary is found. */
static Boundary boundary_of(float *scores, float *weights, int64_t count, double target) {
  double above = 0.0;
  for (int64_t first = 0, end = count;;) {
    const float pivot = scores[(first + end) / 2];
    double higher_mass = 0.0, equal_mass = 0.0;
    int64_t i = first, low = end;
    int64_t high = first; /* higher scores, equal ones, unread ones, lower ones */
    while (i < low) {
      if (scores[i] > pivot) {
        higher_mass += weights[i];
        swap(scores, high, i), swap(weights, high++, i++);
      } else if (scores[i] == pivot) {
        equal_mass += weights[i++];
      } else {
        low--;
        swap(scores, low, i), swap(weights, low, i);
      }
    }
    if (high > first && above + higher_mass >= target) {
      end = high;
    } else if (low < end && above + higher_mass + equal_mass < target) {
      above += higher_mass + equal_mass, first = low;
    } else {
      const double before_last = above + higher_mass + equal_mass - weights[high];
      return (Boundary){pivot, before_last < target};
    }
  }
}

/* The scores that top-p keeps in any case, and those that it keeps if rounding is for them. */
typedef struct {
  Boundary sure, possible;
} Nucleus;

static Nucleus nucleus_of(const Room *room, int64_t count, int64_t V, double top_p) {
  /* torch adds up all probabilities in fp32, the equal ones with errors of one sign. */
  const double rounding = ROUNDING + 2e-9 * (double)V;
  double total = 0.0;
  int64_t left = 0;
  for (int64_t i = 0; i < count; i++) total += room->weights[i];
  /* Tokens of less than this weight all lie below the boundary. */
  const double tail = (1.0 - top_p - rounding) * total / (double)count;
  for (int64_t i = 0; i < count; i++) {
    room->spare_scores[left] = room->scores[room->tokens[i]];
    room->spare_weights[left] = room->weights[i];
    left += room->weights[i] >= tail;
  }
  float *scores = room->spare_scores, *weights = room->spare_weights;
  return (Nucleus){boundary_of(scores, weights, left, (top_p - rounding) * total),
                   boundary_of(scores, weights, left, (top_p + rounding) * total)};
}

static int is_kept(float score, Boundary by) {
  return score > by.score || (by.whole && score == by.score);
}

/* Draws from the listed tokens of a row. Returns -1 where rounding decides.
 *
 * noise: (V,), or NULL to make it by the twister, of which V numbers are taken. */
static int64_t draw_listed(const Draws *draws, Twister *twister, const float *noise,
                           const Room *room, int64_t count, int64_t V) {
  Nucleus nucleus = {{-INFINITY, 1}, {-INFINITY, 1}};
  if (draws->top_p < 1.0) nucleus = nucleus_of(room, count, V, draws->top_p);
  const double least = draws->min_p * (1.0 - ROUNDING), surely = draws->min_p * (1.0 + ROUNDING);
  int64_t best = -1, taken = 0;
  double most = 0.0, second = 0.0; /* quotients */
  for (int64_t i = 0; i < count; i++) {
    const int64_t token = room->tokens[i];
    const float score = room->scores[token];
    const double weight = room->weights[i];
    if (score < nucleus.possible.score || weight < least) continue;
    double divisor;
    if (noise) {
      divisor = noise[token];
    } else {
      skip(twister, 2 * (token - taken)), taken = token + 1;
      const double number = uniform(twister);
      if (weight < second * number) continue; /* the divisor is no smaller */
      divisor = exponential_of(number);
    }
    const double quotient = weight / divisor;
    if (quotient > most) {
      second = most, most = quotient;
      best = is_kept(score, nucleus.sure) && weight >= surely ? token : -1;
    } else if (quotient > second) {
      second = quotient;
    }
  }
  if (!noise) skip(twister, 2 * (V - taken));
  return second < most * (1.0 - ROUNDING) ? best : -1;
}

/* Draws a token of a row. Returns -1 where torch has to. */
static int64_t draw_row(const Draws *draws, Twister *twister, const float *noise, const Room *room,
                        const float *logits, const uint32_t *banned, const Texts *texts,
                        int64_t beams, int64_t r, int64_t V) {
  float *scores = memcpy(room->scores, logits, 4 * V);
  if (!all_finite(scores, V) || !update_row(scores, room->seen, texts, beams, r, V)) return -1;
  if (banned) ban_tokens(scores, banned, V);
  if (draws->temperature != 1.0) divide(scores, V, (float)draws->temperature);
  const float top = highest_in(scores, V);
  if (!(fabsf(top) < INFINITY)) return -1;
  const int64_t k = draws->top_k;
  const float least = k && k < V ? kth_highest(scores, V, room->spare_scores, k) : -INFINITY;
  return draw_listed(draws, twister, noise, room, list_tokens(room, V, least, top), V);
}

/* Draws the next token of each row, after the updates of its text and the filters. The logits stay
 * as they are. Rows are drawn one after the other, as the random numbers are.
 *
 * banned: (R, words of a set), or NULL. held: `draw_size` bytes. Returns 0 if torch has to draw: a
 * logit is NaN or infinite, a token of a text has no logit, or rounding decides. The twister is
 * then as it was. */
int draw_rows(const Draws *draws, Twister *twister, int64_t *tokens, const float *logits,
              const uint32_t *banned, const Texts *texts, void *held, int64_t rows, int64_t beams,
              int64_t vocabulary) {
  const int64_t V = vocabulary;
  const Room room = room_in(held, V);
  const Twister before = *twister;
  for (int64_t r = 0; r < rows; r++) {
    const float *noise = draws->noise ? draws->noise + (texts->made * rows + r) * V : NULL;
    tokens[r] = draw_row(draws, twister, noise, &room, logits + r * V,
                         banned ? banned + r * ((V + 31) / 32) : NULL, texts, beams, r, V);
    if (tokens[r] < 0) {
      *twister = before;
      return 0;
    }
  }
  return 1;
}
