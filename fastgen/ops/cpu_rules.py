"""Rules for CPUs: which implementation runs, by shape, instruction set and library.

Every rule states the measurement that it comes from. None asks for the maker of a processor.
"""

import math
from collections.abc import Sequence

THREAD_WORK = 32 * 1024
"""Multiplications, or logits, for each further thread that an operation in C uses."""

LEAST_ROWS = ((8 * 1024, 16), (24 * 1024, 2), (math.inf, 1))
"""Fewest rows for which products in C are faster than torch's own.

Each entry is (exclusive upper limit of the weight's elements, rows). Measured from 64 x 64 to
4096 x 1024, with one thread and two (Zen 5, AVX-512), where a call takes 2 us. With AVX2 (Zen 3,
one thread, 512 x 512 to 32000 x 512, beside other work), products in C took 1/1.2 to 1/4.8 of the
time of torch's own for 4 to 64 rows. Beyond, they were 0.6 to 1.7 times as fast, and no slower in
25 of 31 cases. Against weights packed by oneDNN they were 1.1 to 2.9 for 4 to 64 rows and 0.8 to
1.7 beyond, so fastgen does not pack for oneDNN.
"""

MOST_ROWS_BESIDE_MKL = ((600 * 1024, 256), (math.inf, 512))
"""Most rows for which products in C run where `processor.mkl_is_native`, as `LEAST_ROWS`.

MKL lays a weight out again in every product. Up to these rows that costs 10% or more; beyond, MKL
reaches the full throughput (Xeon with AVX-512, two threads). A prompt of 1,024 tokens of a
decoder-only model of 24 layers of 896 took 7.1 s with 16 new tokens in C alone, and 6.3 s with
MKL's products.
"""

MOST_ROWS_IN_HALF = {
    "tiles": (8, 8),
    "pairs": (16, 128),
    "widened": (math.inf, math.inf),
    "none": (math.inf, math.inf),
    "unknown": (8, 8),
}
"""Most rows of a product in half precision that run in C, by `processor.multiplies`.

The second number holds where C multiplies pairs of bf16 (`avx512_bf16.so`), the first where it
widens them. Up to about 8 rows a product takes the time it takes to read the weight, with any
instructions. Microseconds (Zen 4, torch 2.13, one thread, least of many calls in turn):

| K x N, instructions | rows: 1 | 4 | 8 | 16 | 32 | 128 | 256 |
|---|---|---|---|---|---|---|---|
| 1,024 x 4,096, oneDNN by pairs | 804 | 902 | 1,021 | 1,319 | 1,931 | 5,493 | 10,339 |
| C by pairs | 307 | 365 | 597 | 873 | 1,315 | 5,282 | 10,765 |
| C widened | 303 | 366 | 675 | 1,186 | 2,360 | 9,664 | 19,339 |
| oneDNN widened | 738 | 1,706 | 2,605 | 4,484 | 8,060 | 31,000 | 61,000 |
| fp16: torch | 403 | | 3,387 | 6,456 | 12,586 | 49,327 | 102,803 |
| fp16: C | 425 | | 772 | 1,227 | 2,393 | 9,553 | 19,171 |
| 896 x 151,936, oneDNN by pairs | 28,349 | 31,140 | 35,860 | 45,752 | 65,810 | 197,348 | 375,981 |
| C by pairs | 11,465 | 12,881 | 19,470 | 28,749 | 46,030 | 177,127 | 352,040 |

896 x 4,864 and 4,864 x 896 have the same limits, and so have two threads. Without AVX-512, torch's
own product is 3 to 15 times slower than C with any number of rows (Zen 3, AVX2). The limits beside
AMX, and on other architectures, follow from arithmetic and published times; nobody has measured
there.
"""

FILLED, SMALL_PANELS = 0.75, 64 * 1024
"""Limits for packing a weight for products in C.

`FILLED` is the least share of its panels that a weight must fill. A weight that fills less is
packed if its panels hold at most `SMALL_PANELS` elements, for decode steps that run entirely in C.

A panel has 64 outputs, or 16 with AVX2, and is always computed completely: 16 x 4096 takes up to
three times as long as elsewhere. Outside such decode steps, that layer runs torch's own product.
"""

FEWEST_OUTPUTS = 16
"""Fewest outputs of a weight that is packed for products in C."""

FEW_HEADS, FEW_SCORES = 16, 64
"""Sizes up to which one call of torch's attention is cheaper than attention in C (10 us).

`FEW_HEADS` counts the key heads of all sentences, `FEW_SCORES` the scores of each key head.
"""

SAVED_BY_PRODUCTS, SAVED_BESIDE_MKL = 0.15, 0.03
"""Least share of an encoder layer's time that products in C save.

The second holds where `processor.mkl_is_native`.
"""


def at(table: Sequence[tuple[float, int]], elements: int) -> int:
    """Return the entry of a rule for a weight with this many elements."""
    return next(rows for limit, rows in table if elements < limit)
