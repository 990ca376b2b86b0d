"""Measure a whole corpus: a user's script, `fastgen generate`, and two processes.

Each run is a process of its own, timed from its start to the last line; loading, tokenization and
files are included. The script translates 32 lines per batch in file order, through transformers
alone (`batch_script.py`). Two processes are compared with a single process that has as many threads
as each of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import EXAMPLE
from benchmarks.harness import ROOT, finished, option, parser_of, positive, write_result
from benchmarks.near_ties import is_near_tie
from fastgen.cli.bench.measure import interleave, paired_ratio
from fastgen.corpus.texts import Options, TextGenerator

SCRIPT, COMMAND, ONE, SEVERAL = "script", "fastgen generate", "one thread", "processes"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all; return 1 if an output differed."""
    args = _arguments().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fastgen-corpus-") as scratch:
        runs = _Runs(Path(scratch), args)
        arms = {
            SCRIPT: runs.script,
            COMMAND: lambda: runs.command(COMMAND, "--threads", str(args.threads)),
        }
        if args.processes > 1:
            arms[ONE] = lambda: runs.command(ONE, "--threads", "1")
            arms[SEVERAL] = lambda: runs.command(
                SEVERAL, "--threads", "1", "--processes", str(args.processes)
            )
        times, difference = interleave(list(arms.values()), args.rounds, runs.check, warmup=0)
        result: dict[str, Any] = {
            "equal": difference is None, "note": difference or "", "near_ties": runs.near_ties,
            "lines": runs.count,
            "seconds": {name: [each[i] for each in times] for i, name in enumerate(arms)},
            "summaries": runs.summaries,
        }  # fmt: skip
    pairs = [(SCRIPT, COMMAND), (ONE, SEVERAL)][: 1 + (args.processes > 1)]
    for baseline, candidate in pairs if times else ():
        ratio = paired_ratio(result["seconds"][baseline], result["seconds"][candidate])
        result[f"{candidate} over {baseline}"] = dict(
            zip(("ratio", "low", "high"), ratio, strict=True)
        )
    print(
        json.dumps({name: value for name, value in result.items() if name != "summaries"}, indent=1)
    )
    write_result(args, "corpus", result)
    return 0 if result["equal"] else 1


class _Runs:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args, self.near_ties = folder, args, 0
        self.summaries: dict[str, Any] = {}
        with args.input.open(encoding="utf-8") as source:
            self.lines = [line.rstrip("\n") for line in itertools.islice(source, args.lines)]
        self.lines = [line for line in self.lines if line.strip()]
        self.count = len(self.lines)
        self.input = folder / "input.txt"
        self.input.write_text("".join(f"{line}\n" for line in self.lines), "utf-8")
        self._options = [
            "--num-beams",
            str(args.num_beams),
            "--max-new-tokens",
            str(args.max_new_tokens),
        ]
        self._runs = itertools.count()

    def script(self) -> list[str]:
        output = self.folder / f"{next(self._runs)}.txt"
        files = [str(self.args.model), str(self.input), str(output)]
        threads = ["--threads", str(self.args.threads)]
        _run(
            [
                sys.executable,
                str(ROOT / "benchmarks/batch_script.py"),
                *files,
                *self._options,
                *threads,
            ]
        )
        return output.read_text("utf-8").splitlines()

    def command(self, name: str, *more: str) -> list[str]:
        output = self.folder / f"{next(self._runs)}.txt"
        summary = output.with_suffix(".json")
        files = [
            str(self.args.model),
            "--input",
            str(self.input),
            "--output",
            str(output),
            "--summary",
            str(summary),
        ]
        device = ["--device", self.args.device, "--truncate", "--quiet"]
        _run([sys.executable, "-m", "fastgen", "generate", *files, *self._options, *device, *more])
        self.summaries.setdefault(name, []).append(json.loads(summary.read_text("utf-8")))
        return output.read_text("utf-8").splitlines()

    def check(self, outputs: Sequence[list[str]]) -> str | None:
        """Return None if all outputs equal the script's apart from near ties, else what differs."""
        expected, *others = outputs
        for lines in others:
            if len(lines) != len(expected):
                return f"{len(lines)} lines instead of {len(expected)}"
            differing = [
                i for i, pair in enumerate(zip(expected, lines, strict=True)) if pair[0] != pair[1]
            ]
            if not_ties := [i for i in differing if not self._is_near_tie(i, lines[i])]:
                return f"lines {[i + 1 for i in not_ties]} differ"
            self.near_ties = max(self.near_ties, len(differing))
        return None

    def _is_near_tie(self, line: int, other: str) -> bool:
        generation = {"num_beams": self.args.num_beams, "max_new_tokens": self.args.max_new_tokens}
        generator = TextGenerator(
            Options(self.args.model, generation, device=self.args.device, truncate=True)
        )
        return is_near_tie(generator, generation, self.lines[line], other)


def _run(command: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    finished(command, {"PYTHONPATH": path})


def _arguments() -> argparse.ArgumentParser:
    parser, example_default = parser_of("benchmarks.corpus", __doc__), "default: the example's"
    parser.add_argument(
        "--model", type=Path, default=EXAMPLE / "model", metavar="FOLDER", help=example_default
    )
    parser.add_argument(
        "--input", type=Path, default=EXAMPLE / "test.en", metavar="FILE", help=example_default
    )
    parser.add_argument("--lines", type=positive, metavar="N", help="first lines (default: all)")
    option(parser, "rounds", default=1, help="default: 1")
    parser.add_argument("--num-beams", type=positive, default=4, metavar="N", help="default: 4")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="default: 128"
    )
    option(parser, "threads", default=os.cpu_count(), help="default: all cores")
    parser.add_argument(
        "--processes", type=positive, default=2, metavar="N", help="1: leave them out (default: 2)"
    )
    option(parser, "device", choices=["cpu", "cuda"], help="default: cpu")
    option(parser, "out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
