"""Run the GPU benchmarks and tests in stages with time limits, most valuable first.

    make gpu PART=1 ENV_READY=1 PYTHON=python3
    python -m benchmarks.gpu --part 2 --out results --deadline 560
    python -m benchmarks.gpu --part 1 --stage smoke calls

Part 1 is for the first ten minutes on a GPU; parts 2 and 3 take ten minutes each as well. Each
stage is a process with a time limit. If a stage hangs, crashes or runs out of memory, the results
of earlier stages are kept and later stages still run. Three files are written to the folder of
`--out`:

- results.jsonl: one line per result, written as soon as it is known, and one line per stage with
  its exit status;
- log.txt: output of the stages;
- results.tar.gz: files of all stages, rebuilt after each stage, to be unpacked in
  benchmarks/results/<gpu>.

The exit status is 1 if a stage failed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import folder_of, option, parser_of, positive

POLL, GRACE = 0.5, 10.0
"""Seconds between two polls of a stage, and from its interrupt to its kill."""


@dataclass(frozen=True)
class Stage:
    """One process with a time limit.

    Attributes:
        name: name of the stage.
        seconds: its time limit; the deadline may shorten it.
        command: arguments of Python, with the fields {device}, {scale} and {out}.
        tool: program with arguments that runs Python, such as a profiler; empty for none.
        needs: module without which the stage is skipped; empty for none.
    """

    name: str
    seconds: float
    command: str
    tool: str = ""
    needs: str = ""

    def missing(self) -> str | None:
        """Return the program or module that this machine lacks, or None."""
        tool = self.tool.partition(" ")[0]
        if tool and shutil.which(tool) is None:
            return tool
        return self.needs if self.needs and importlib.util.find_spec(self.needs) is None else None

    def arguments(self, device: str, scale: str, out: Path) -> list[str]:
        """Return the command line of the stage."""
        command = self.command.format(device=device, scale=scale, out=out)
        return [*shlex.split(self.tool), sys.executable, *shlex.split(command)]


_BENCH = "-m benchmarks --device {device} --scale {scale} --out {out}"
_HALF = f"{_BENCH} --dtype bfloat16 --rounds 3"
_OPS = "-m benchmarks.ops --device {device}"
_SMOKE = "-m benchmarks.smoke --device {device} --scale {scale} --out {out}"
_TESTS = "-m pytest -m gpu -q -rfE -p no:cacheprovider"
_WHOLE_CALLS_FIRST = " ".join(
    (
        "tests/models/test_gpu.py", "tests/decoding/test_draw.py",
        "tests/patches/transformers/generate/test_kernel_calls.py", "tests/ops/test_kernels.py",
    )
)  # fmt: skip

PARTS = {
    1: (
        Stage("machine", 30, f"{_SMOKE} --look machine"),
        Stage("smoke", 90, f"{_SMOKE} --look call profile exact"),
        Stage("tests", 150, f"{_TESTS} -n 12 --dist worksteal --maxfail 40 {_WHOLE_CALLS_FIRST}"),
        Stage("ops", 60, f"{_OPS} --dtype bfloat16 --out {{out}}"),
        Stage("calls", 180, f"{_HALF} --case gpu_bart_large gpu_bart_one gpu_step_time gpu_gpt2"),
        Stage("graphs", 30, f"{_HALF} --case graphs"),
        Stage("greedy", 30, f"{_BENCH} --rounds 3 --case greedy"),
    ),
    2: (
        Stage("best_batch", 180, f"{_HALF} --case gpu_t5_base gpu_best_batch"),
        Stage("compiled", 60, f"{_HALF} --peer compiled --case greedy greedy_one"),
        Stage(
            "float32", 120,
            f"{_BENCH} --rounds 3 --case bart_large gpt2 t5_base marian_base kv_memory",
        ),
        Stage("refill", 60, f"{_HALF} --case refill trained"),
        Stage(
            "races", 60,
            f"{_TESTS} tests/ops/test_kernels.py -k 'table or choice or cache or rotation'",
            tool="compute-sanitizer --tool racecheck --target-processes all",
        ),
        Stage(
            "counters", 60,
            f"{_OPS} --dtype bfloat16 --rounds 1 --op beam_attention kbest "
            f"--out {{out}}/with_ncu",
            tool="ncu --clock-control none --launch-count 40 --set basic",
        ),
    ),
    3: (
        Stage(
            "launches", 200,
            "-m benchmarks.launches --device {device} --scale {scale} --out {out}",
        ),
        Stage("ops_float32", 60, f"{_OPS} --out {{out}}"),
        Stage(
            "fairseq", 120,
            f"{_BENCH} --dtype float16 --rounds 3 "
            "--case fairseq_iwslt fairseq_big fairseq_bart fairseq_one",
            needs="fairseq",
        ),
        Stage("paper", 180, "-m benchmarks.paper --device {device} --dtype bfloat16 --out {out}"),
    ),
}  # fmt: skip


class Run:
    """Runner of stages that collects their results.

    Args:
        out: folder for the results.
        deadline: seconds for all stages together.
        device: device that the stages' commands use.
        scale: full or tiny, passed to the stages' commands.
    """

    def __init__(
        self, out: Path, deadline: float, device: str = "cuda", scale: str = "full"
    ) -> None:
        self.out, self.device, self.scale = out, device, scale
        self.ends = time.monotonic() + deadline
        out.mkdir(parents=True, exist_ok=True)
        self._lines = (out / "results.jsonl").open("a", encoding="utf-8")
        self._log = (out / "log.txt").open("a", encoding="utf-8")
        self._seen: dict[Path, tuple[int, set[str]]] = {}

    def stages(self, stages: Sequence[Stage], folder: Path) -> bool:
        """Run stages, with their files in `folder`; return whether all of them succeeded."""
        succeeded = True
        for stage in stages:
            ended = self._stage(stage, folder)
            self._write({"stage": stage.name, **ended})
            print(
                f"{stage.name:<12}{ended['status']:<12}{ended['seconds']:6.1f} s  "
                f"{ended.get('note', '')}",
                flush=True,
            )
            succeeded &= ended["status"] in ("ok", "left out")
            self._archive(folder)
        return succeeded

    def close(self) -> None:
        self._lines.close()
        self._log.close()

    def _stage(self, stage: Stage, folder: Path) -> dict[str, Any]:
        limit = min(stage.seconds, self.ends - time.monotonic())
        if limit <= 1:
            return {
                "status": "not begun",
                "seconds": 0.0,
                "note": "no time is left to the deadline",
            }
        if (missing := stage.missing()) is not None:
            return {
                "status": "left out",
                "seconds": 0.0,
                "note": f"{missing} is not installed here",
            }
        command = stage.arguments(self.device, self.scale, folder)
        self._log.write(f"\n== {stage.name} ==\n+ {' '.join(command)}\n")
        self._log.flush()
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        within_limit = True
        try:
            while process.poll() is None and within_limit:
                time.sleep(POLL)
                self._take(stage, folder)
                within_limit = time.monotonic() - began < limit
        finally:
            _end(process)
        self._take(stage, folder)
        status = "ok" if process.returncode == 0 else "failed"
        return {
            "status": status if within_limit else "timed out",
            "seconds": round(time.monotonic() - began, 1),
            "exit": process.returncode,
        }

    def _take(self, stage: Stage, folder: Path) -> None:
        """Append the results that the stage has written since the previous call."""
        for file in sorted(folder.rglob("*.json")):
            changed = file.stat().st_mtime_ns
            before, keys = self._seen.get(file, (0, set()))
            if changed == before:
                continue
            try:
                data = json.loads(file.read_text("utf-8"))
            except ValueError:  # the stage is still writing it
                continue
            self._seen[file] = changed, keys
            for key, result in results_of(data):
                if key not in keys:
                    keys.add(key)
                    self._write(
                        {"stage": stage.name, "file": file.name, "key": key, "result": result}
                    )

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._lines.flush()

    def _archive(self, folder: Path) -> None:
        part = self.out / "results.tar.gz.part"
        with tarfile.open(part, "w:gz") as archive:
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                archive.add(file, file.relative_to(folder))
        part.replace(self.out / "results.tar.gz")


def results_of(data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the results in a file with their keys: each cell, row or model, else the whole."""
    result = data.get("result", data)
    parts = (
        result.get("cells", result)
        if data.get("kind") in ("grid", "step_time", "ops", "launches", "smoke")
        else None
    )
    yield from [("", result)] if parts is None else parts.items()


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and all its child processes.

    An interrupt comes first, so that pytest prints a summary; a kill follows after GRACE seconds.
    """
    for number, seconds in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # all processes have ended
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that the arguments name; return the exit status."""
    parser = parser_of("benchmarks.gpu", __doc__)
    parser.add_argument(
        "--part", type=int, choices=PARTS, default=1, help="ten minutes each (default: 1)"
    )
    parser.add_argument("--stage", nargs="+", metavar="NAME", help="some of its stages only")
    parser.add_argument(
        "--deadline", type=positive, default=560, metavar="SECONDS", help="for all (default: 560)"
    )
    option(parser, "device", default="cuda", help="cpu, cuda or cuda:N (default: cuda)")
    option(parser, "scale", help="tiny: a test of the stages themselves")
    option(parser, "out")
    args = parser.parse_args(argv)
    stages = {stage.name: stage for stage in PARTS[args.part]}
    if unknown := set(args.stage or ()) - set(stages):
        parser.error(
            f"part {args.part} has no stage {', '.join(sorted(unknown))}; "
            f"it has {', '.join(stages)}"
        )
    run = Run(folder_of(args), args.deadline, args.device, args.scale)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return (
                0
                if run.stages([stages[name] for name in args.stage or stages], Path(folder))
                else 1
            )
        finally:
            run.close()


if __name__ == "__main__":
    sys.exit(main())
