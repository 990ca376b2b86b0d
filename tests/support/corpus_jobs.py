"""Jobs over a text file, for the tests of `fastgen.corpus`.

As a program, it runs a job once, or kills and resumes it. The JSON holds fields of a `Job`:

    python -m tests.support.corpus_jobs run MODEL INPUT OUTPUT '{"block": 4}'
    python -m tests.support.corpus_jobs kill MODEL INPUT OUTPUT '{"block": 4}' N

The second command kills N runs and then completes one.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from fastgen.corpus.formats.records import Record
from fastgen.corpus.run import job as jobs
from fastgen.corpus.run import journal
from fastgen.corpus.run.identity import digest
from fastgen.corpus.run.job import Job
from fastgen.corpus.texts import Options, Output, Problem, TextGenerator
from fastgen.errors import CommandError

NEW = 8


@dataclass(frozen=True)
class Lines:
    """A source of records: the lines of a file."""

    file: Path
    once: bool = False

    def records(self) -> Iterator[Record]:
        with self.file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                yield Record(number, line.removesuffix("\n"))

    def identity(self) -> dict[str, Any]:
        return {"lines": digest(self.file)}

    def __len__(self) -> int:
        return sum(1 for _ in self.records())


@dataclass(frozen=True)
class Texts:
    """A sink that writes one line per record.

    Attributes:
        kills: whether the first worker process that has made a block kills itself.
    """

    kills: bool = False

    def block(self, records: Sequence[Record], outputs: Sequence[Output | Problem | None]) -> bytes:
        if self.kills:
            self._kill(Path(os.environ["KILLED"]))
        lines = [
            f"{record.number}\t{' '.join(one.texts) if isinstance(one, Output) else ''}".replace(
                "\n", " "
            )
            for record, one in zip(records, outputs, strict=True)
            if one is not None
        ]
        return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")

    def _kill(self, mark: Path) -> None:
        """Kill this process, unless the mark shows that another one was killed."""
        with suppress(FileExistsError):
            mark.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self, body: Path, output: Path) -> None:
        body.replace(output)

    def identity(self) -> dict[str, Any]:
        return {"format": "text"}


def job_of(model: Path, text: Path, output: Path | None, **more: Any) -> Job:
    """Return a job; `more` holds fields of `Job` and `Options`, and arguments of `generate`."""
    fields = {name: more.pop(name) for name in list(more) if name in Job.__dataclass_fields__}
    named = {name: more.pop(name) for name in list(more) if name in Options.__dataclass_fields__}
    generation = {"max_new_tokens": NEW, "num_beams": 2, **more}
    options = Options(
        model, generation, append_eos=True, **{"batch_tokens": 64, "device": "cpu"} | named
    )
    return Job(
        options, fields.pop("source", Lines(text)), fields.pop("sink", Texts()), output, **fields
    )


def run(job: Job) -> int:
    try:
        summary = jobs.run(job)
    except CommandError as error:
        print(error, file=sys.stderr)
        return 2
    if job.output is not None:
        print(json.dumps(summary.to_dict()))
    return 0


def kill(job: Job, kills: int) -> None:
    """Run a job in processes that get killed, half of them during a write, until one completes.

    Each process starts as a fork of this one, which has imported everything and started nothing.
    """
    # Its lock is shared, and a killed process may hold it.
    transformers.utils.logging.disable_progress_bar()
    TextGenerator(job.options)  # imports everything that the forks need
    draw, killed = random.Random(0), 0
    while True:
        point = draw.randrange(1, 8) if killed % 2 else 0
        child = os.fork()
        if child == 0:
            if point and killed < kills:
                _kill_at_sync(point)
            os._exit(run(job))
        if not point and killed < kills:
            time.sleep(draw.uniform(0.0, 1.0))
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0 and killed >= kills:
            return print(f"killed {killed}")
        if status not in (0, -signal.SIGKILL):
            sys.exit(status)
        killed += status != 0
        if status == 0:
            job.output.unlink()  # finished too early: kill another run


def _kill_at_sync(point: int) -> None:
    """Kill this process at its n-th write to disk, with half of the bytes written."""
    write, left = journal._write, point

    def torn(stream: Any, data: bytes) -> None:
        nonlocal left
        left -= 1
        if not left:
            stream.write(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(stream, data)

    journal._write = torn


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    mode, model, text, output, fields, *rest = sys.argv[1:]
    given = json.loads(fields)
    if "kills" in given:
        given["sink"] = Texts(given.pop("kills"))
    asked = job_of(Path(model), Path(text), Path(output) if output != "-" else None, **given)
    if mode == "kill":
        kill(asked, int(rest[0]))
    else:
        sys.exit(run(asked))
