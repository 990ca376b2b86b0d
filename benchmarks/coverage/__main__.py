"""Count which families of transformers run on fastgen, and compare their outputs.

    make coverage-of-families
    python -m benchmarks.coverage --family mixtral olmoe --update
    python -m benchmarks.coverage --speed  # about 10 minutes

Every model type of transformers' causal, sequence-to-sequence and speech mappings is built tiny, in
fp64, or in fp32 where its own code refuses fp64. Each call of `generate` runs with and without
fastgen, on one text and then on a longer one: the first call of a family without a spec is the one
that is checked. `--speed` runs none of that: it times one small size of the families that the
record calls accelerated, with one thread. The result goes to benchmarks/results/coverage.json, from
which `make tables` writes docs/families.md. The exit status is 1 if any output is wrong, or if
fewer families than `LEAST` are accelerated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import transformers

from benchmarks.coverage import recipe
from benchmarks.coverage.apart import apart
from benchmarks.coverage.family import timed, tried
from benchmarks.coverage.record import (
    FILE,
    FUSED,
    LEAST,
    PART,
    SHARED,
    WRONG,
    accelerated,
    counted,
)
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
    parser.add_argument(
        "--speed", action="store_true", help="time the accelerated families of the record instead"
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        default=os.cpu_count(),
        metavar="N",
        help="processes at once (default: one per core); one with --speed",
    )
    args = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    names, recorded = args.family or recipe.types(), _recorded()
    if args.speed:
        is_equal = _time(names, recorded)
        if args.family is None or args.update:
            write_whole(FILE, {"transformers": transformers.__version__, "families": recorded})
        return 0 if is_equal else 1
    with ThreadPoolExecutor(args.jobs) as pool:
        found = pool.map(apart, [tried] * len(names), names, [SECONDS] * len(names))
        families = dict(zip(names, found, strict=True))
    for name, each in families.items():
        if each["how"] in _TIMED and "speed" in recorded.get(name, {}):
            each["speed"] = recorded[name]["speed"]
    print(counted(families))
    if any(found["how"] == WRONG for found in families.values()):
        return 1
    if args.family is not None:
        if not args.update:
            return 0
        families = recorded | families
    write_whole(FILE, {"transformers": transformers.__version__, "families": families})
    return 1 if accelerated(families) < LEAST else 0


SECONDS, SECONDS_OF_SPEED = 240, 30
"""Time after which the process of a family is ended."""
_TIMED = FUSED, SHARED, PART


def _recorded() -> dict[str, Any]:
    """Return the families of the record; none before the first run."""
    return json.loads(FILE.read_text("utf-8"))["families"] if FILE.exists() else {}


def _time(names: Sequence[str], recorded: dict[str, Any]) -> bool:
    """Add the speed of accelerated families to their record; return whether outputs were equal."""
    is_equal = True
    for name in names:
        if recorded.get(name, {}).get("how") not in _TIMED:
            continue
        found = apart(timed, name, SECONDS_OF_SPEED)
        recorded[name].pop("speed", None)
        if "equal" in found:
            recorded[name]["speed"] = found
            is_equal = is_equal and found["equal"]
    return is_equal


if __name__ == "__main__":
    sys.exit(main())
