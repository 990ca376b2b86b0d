"""Count which families of transformers run on fastgen, and compare their outputs.

    make coverage-of-families
    python -m benchmarks.coverage --family mixtral olmoe --update
    python -m benchmarks.coverage --speed

Every model type of transformers' causal, sequence-to-sequence and speech mappings is built tiny, in
fp64, or in fp32 where its own code refuses fp64. Each call of `generate` runs with and without
fastgen, on one text and then on a longer one: the first call of a family without a spec is the one
that is checked. `--speed` also times one small size. The result goes to
benchmarks/results/coverage.json, from which `make tables` writes docs/families.md. The exit status
is 1 if any output is wrong, or if fewer families than `LEAST` are accelerated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import transformers

from benchmarks.coverage import recipe
from benchmarks.coverage.apart import apart
from benchmarks.coverage.record import FILE, LEAST, WRONG, accelerated, counted
from benchmarks.harness import parser_of, positive, write_whole


def main(argv: Sequence[str] | None = None) -> int:
    """Count the families that the arguments name; return the exit status."""
    parser = parser_of("benchmarks.coverage", __doc__)
    parser.add_argument(
        "--family", nargs="+", choices=recipe.types(), metavar="NAME", help="default: all"
    )
    parser.add_argument(
        "--update", action="store_true", help="record the families that --family names, too"
    )
    parser.add_argument("--speed", action="store_true", help="also time one small size")
    parser.add_argument(
        "--jobs",
        type=positive,
        default=os.cpu_count(),
        metavar="N",
        help="processes at once (default: one per core; with --speed one)",
    )
    args = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    names = args.family or recipe.types()
    with ThreadPoolExecutor(1 if args.speed else args.jobs) as pool:
        found = pool.map(apart, names, [args.speed] * len(names))
        families = dict(zip(names, found, strict=True))
    print(counted(families))
    if any(found["how"] == WRONG for found in families.values()):
        return 1
    if args.family is not None:
        if not args.update:
            return 0
        families = json.loads(FILE.read_text("utf-8"))["families"] | families
    write_whole(FILE, {"transformers": transformers.__version__, "families": families})
    return 1 if accelerated(families) < LEAST else 0


if __name__ == "__main__":
    sys.exit(main())
