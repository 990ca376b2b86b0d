/* Rows of numbers rounded to bytes, for products with weights of bytes.
 *
 * A row is scaled so that its largest magnitude becomes 127. Source: Dettmers et al. 2022
 * (LLM.int8()), section 2.1: vector-wise quantization. */

#include "product.h"

/* A row of smaller numbers is rounded to zeros, as the reciprocal of its scale may overflow. */
static const float LEAST = 1e-30f;

typedef int8_t byte_vec __attribute__((vector_size(WIDTH), aligned(1), may_alias));

int can_dot(void) { return has_dots(); }

/* Bytes of a rounded row: its inputs, filled up to groups of four, and its scale. */
int64_t byte_row(int64_t inputs) { return (inputs + 3) / 4 * 4 + 4; }

/* A row with an infinity or NaN has the scale NaN. */
void round_row(int8_t *bytes, const float *x, int64_t inputs, int64_t kind) {
  const int64_t groups = (inputs + 3) / 4;
  const int32_t bias = kind == BYTES_AT_ONCE ? BIAS : 0;
  vec largest = {}, zero = {};
  for (int64_t k = 0; k < inputs; k += WIDTH) {
    const vec y = load_some(x, k, inputs - k, FP32);
    largest = higher(magnitude(y), largest);
    zero += y * 0.0f;
  }
  const float size = highest(largest);
  const int is_zero = size < LEAST;
  const float scale = (is_zero ? 0.0f : size / 127.0f) + sum(zero);
  const float inverse = is_zero ? 0.0f : 127.0f / size;
  for (int64_t k = 0; k < 4 * groups; k += WIDTH) {
    const vec y = load_some(x, k, inputs - k, FP32) * inverse;
    const byte_vec rounded = __builtin_convertvector(nearest(y) ^ bias, byte_vec);
    const int64_t left = 4 * groups - k;
    memcpy(bytes + k, &rounded, left < WIDTH ? left : WIDTH);
  }
  memcpy(bytes + 4 * groups, &scale, 4);
}

void work_on_rounding(void *given, Tasks *tasks) {
  const Rounding *job = given;
  for (int64_t r; (r = next(tasks)) >= 0;)
    round_row(job->bytes + r * byte_row(job->inputs), job->x + r * job->x_row, job->inputs,
              job->kind);
}
