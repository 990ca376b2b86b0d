/* Drawing of the next token of each row, as `torch.multinomial` draws on a CPU. */

#ifndef DRAWS_H
#define DRAWS_H

#include "search.h"

/* torch's random numbers: the Mersenne Twister MT19937. */
typedef struct {
  uint32_t words[624];
  int64_t next; /* of the words */
} Twister;

void read_generator(Twister *twister, const uint8_t *state);
void write_generator(uint8_t *state, const Twister *twister);
int64_t draw_size(int64_t vocabulary);
int draw_rows(const Draws *draws, Twister *twister, int64_t *tokens, const float *logits,
              const uint32_t *banned, const Texts *texts, void *held, int64_t rows, int64_t beams,
              int64_t vocabulary);

#endif
