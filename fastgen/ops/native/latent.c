/* Latent attention in a decode step. Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1. */

#include "latent.h"

#include "attention.h"

/* Writes a row's latent vector and rotated key to their slots, and rotates its queries; a task is a
 * row. */
void keep_latents(void *given, Tasks *tasks) {
  Keeping *job = given;
  const Sublayer *of = job->of;
  const Seen *at = job->at;
  const int64_t C = of->latent, E = of->turned, dtype = job->step->dtype;
  for (int64_t r; (r = next(tasks)) >= 0;) {
    const int64_t row = job->call->first_row + r, b = r / job->call->beams;
    const int64_t slot = at->slot + r % job->call->beams, angle = job->angles + row * of->turn_row;
    const float *made = job->made + row * (C + E);
    float *kept = job->kept + row * (C + E);
    norm_row(kept, made, &of->key_norm, C, dtype);
    turn_head(kept + C, made + C, of, angle, dtype);
    WITH_DTYPE(dtype, write_row, at->keys, b * at->keys_b + slot * at->keys_n, kept, C)
    WITH_DTYPE(dtype, write_row, at->values, b * at->values_b + slot * at->values_n, kept + C, E)
    for (int64_t h = row * of->heads; h < (row + 1) * of->heads; h++)
      turn_head(job->asking + h * (C + E) + C, job->asked + (h + 1) * of->dims - E, of, angle,
                dtype);
  }
}

/* A task is a head. */
void multiply_heads(void *given, Tasks *tasks) {
  const Heads *job = given;
  const int64_t outputs = job->product.outputs, panels = outputs / panel();
  for (int64_t h; (h = next(tasks)) >= 0;) {
    Product product = job->product; /* its outputs are those of all heads, side by side */
    product.outputs = job->heads * outputs;
    product.x += h * job->x_head;
    product.out += h * (job->out_head - outputs);
    multiply_panels(&product, h * panels, (h + 1) * panels);
  }
}
