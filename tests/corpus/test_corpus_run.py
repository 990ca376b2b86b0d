"""Whole corpora: blocks stay in order, whatever interrupts a run and however many processes run."""

import errno
import fcntl
import importlib.metadata
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import fastgen
from fastgen.corpus.formats.records import Record
from fastgen.corpus.limits import Limit
from fastgen.corpus.run import job, journal, pipeline, worker, workers
from fastgen.corpus.run.blocks import Block, blocks
from fastgen.corpus.run.identity import digest, header_of
from fastgen.corpus.run.journal import Entry, Journal, held, in_progress, journal_of
from fastgen.corpus.run.summary import Report, summarise
from fastgen.corpus.texts import Output, Problem, TextGenerator
from fastgen.errors import CommandError
from tests.support.corpus_jobs import Lines, Texts, job_of

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/en-es/model"
LINES = [
    line[:40] for line in (ROOT / "examples/en-es/test.en").read_text("utf-8").splitlines()[:22]
]
BLOCK = 4
KILLS = int(os.environ.get("KILLS", "6"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "in"
    file.write_text("\n".join(LINES) + "\n", "utf-8")
    return file


@pytest.fixture(scope="module")
def whole(text: Path) -> bytes:
    """Return the output of an uninterrupted run."""
    file = text.with_name("whole")
    job.run(job_of(MODEL, text, file, block=BLOCK))
    return file.read_bytes()


def beside(output: Path) -> list[str]:
    """Return the names of files that runs left next to an output."""
    return sorted(
        file.name for file in output.parent.iterdir() if file.name.startswith(f"{output.name}.")
    )


@dataclass(frozen=True)
class Failing(Texts):
    """A sink that raises at the block whose first record is number `at`."""

    at: int = 9
    error: type[BaseException] = RuntimeError

    def block(self, records: Sequence[Record], outputs: Sequence[Output | Problem | None]) -> bytes:
        if records[0].number == self.at:
            raise self.error("no more")
        return super().block(records, outputs)


def interrupted(text: Path, output: Path, **more: Any) -> None:
    """Interrupt a run, which leaves two blocks next to the output."""
    with pytest.raises(RuntimeError, match="no more"):
        job.run(job_of(MODEL, text, output, block=BLOCK, sink=Failing(), **more))
    assert beside(output) == [f"{output.name}.journal", f"{output.name}.part"]
    assert len(journal.read(output).entries) == 2


# Single runs


def test_each_line_is_what_the_texts_alone_give(text: Path, whole: bytes) -> None:
    generator = TextGenerator(job_of(MODEL, text, None).options)
    for number, line in enumerate(whole.decode().splitlines(), 1):
        (alone,) = generator([LINES[number - 1]])
        assert isinstance(alone, Output)
        assert line == f"{number}\t{alone.texts[0]}"
    assert number == len(LINES)


def test_the_summary_says_what_was_done(text: Path, tmp_path: Path) -> None:
    asked = job_of(
        MODEL, text, tmp_path / "out", block=BLOCK, summary=tmp_path / "s.json", early_stopping=True
    )
    made = job.run(asked)
    written = json.loads((tmp_path / "s.json").read_text())
    assert written == json.loads(json.dumps(made.to_dict()))
    assert written["records"] == written["made"] == len(LINES)
    assert written["tokens"] == sum(entry_tokens(tmp_path / "out"))
    assert written["problems"] == []
    assert written["versions"]["transformers"] == importlib.metadata.version("transformers")
    assert 0 < written["peak_memory"] < 2**40
    assert 0 < written["loading"] < written["seconds"]
    assert written["records_per_second"] > 0
    assert 0 <= written["waiting_for_reading"] <= 1


def entry_tokens(output: Path) -> Iterator[int]:
    tokenizer = TextGenerator(job_of(MODEL, output, None).options)
    for line in output.read_text("utf-8").splitlines():
        (found,) = tokenizer([LINES[int(line.split("\t")[0]) - 1]])
        assert isinstance(found, Output)
        yield found.tokens


def test_what_is_done_without_is_in_the_summary(text: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        made = job.run(job_of(MODEL, text, tmp_path / name, block=len(LINES), max_time=1000.0))
        said = made.left_off["transformers.beam_search"]
        assert 0 < said["batches do not refill: max_time"] < len(LINES), "of this run alone"
    both = summarise(
        [],
        0,
        [Report(fallbacks={"a": {"x": 1}}), Report(fallbacks={"a": {"x": 2, "y": 1}})],
        [],
        1.0,
    )
    assert both.fallbacks == {"a": {"x": 3, "y": 1}}


def test_bad_records_shift_nothing(
    tmp_path: Path, whole: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bad = tmp_path / "bad"
    lines = list(LINES)
    lines[5], lines[13] = "", " "
    bad.write_text("\n".join(lines) + "\n", "utf-8")
    good = whole.decode().splitlines(keepends=True)

    with pytest.raises(CommandError, match="record 6: there is no text"):
        job.run(job_of(MODEL, bad, tmp_path / "out", block=BLOCK))
    assert len(journal.read(tmp_path / "out").entries) == 1, "what is before it is safe"
    made = job.run(job_of(MODEL, bad, tmp_path / "out", block=BLOCK, on_error="empty"))
    assert made.problems == [(6, "there is no text"), (14, "there is no text")]
    assert made.made == len(LINES) - BLOCK
    expected = [*good[:5], "6\t\n", *good[6:13], "14\t\n", *good[14:]]
    assert (tmp_path / "out").read_text("utf-8") == "".join(expected)
    assert "record 6 has no output: there is no text" in caplog.text
    assert "2 of 22 records have no output: 6, 14" in caplog.text

    made = job.run(job_of(MODEL, bad, tmp_path / "skipped", block=BLOCK, on_error="skip"))
    assert (tmp_path / "skipped").read_text("utf-8") == "".join(
        [*good[:5], *good[6:13], *good[14:]]
    )


def test_what_was_done_about_problems_stays(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("\n".join(["", *LINES[1:]]) + "\n", "utf-8")
    interrupted(bad, tmp_path / "out", on_error="skip")
    with pytest.raises(
        CommandError, match="--on-error was skip and is empty, and record 1 is a problem"
    ):
        job.run(job_of(MODEL, bad, tmp_path / "out", block=BLOCK, on_error="empty"))


@pytest.mark.parametrize("name", ["block", "processes"])
def test_sizes_are_positive(text: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(CommandError, match=f"--{name} 0: must be at least 1, not 0"):
        job.run(job_of(MODEL, text, tmp_path / "out", **{name: 0}))


def test_a_bar_with_an_end(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK, progress=True))
    shown = capsys.readouterr().err
    assert f"{len(LINES)}/{len(LINES)}" in shown
    assert "tokens/s" in shown


# Interrupted runs


def test_a_run_goes_on(text: Path, tmp_path: Path, whole: bytes) -> None:
    output = tmp_path / "out"
    interrupted(text, output)
    assert in_progress(output)
    made = job.run(job_of(MODEL, text, output, block=BLOCK, summary=tmp_path / "s.json"))
    assert (made.records, made.made) == (len(LINES), len(LINES) - 2 * BLOCK)
    assert output.read_bytes() == whole
    assert beside(output) == []
    assert not in_progress(output)


@pytest.mark.slow
def test_draws_do_not_depend_on_where_a_run_began(text: Path, tmp_path: Path, whole: bytes) -> None:
    drawn = {"do_sample": True, "num_beams": 1}
    job.run(job_of(MODEL, text, tmp_path / "whole", block=BLOCK, **drawn))
    interrupted(text, tmp_path / "out", **drawn)
    torch.manual_seed(99)
    job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK, **drawn))
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes() != whole
    job.run(job_of(MODEL, text, tmp_path / "other", block=BLOCK, seed=1, **drawn))
    assert (tmp_path / "other").read_bytes() != (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.slow
def test_killed_again_and_again(text: Path, tmp_path: Path, sampled: bool) -> None:
    """Kill a run many times; `KILLS=60 pytest -k again` kills it more often."""
    fields = {"block": BLOCK} | ({"do_sample": True, "num_beams": 1} if sampled else {})
    job.run(job_of(MODEL, text, tmp_path / "whole", **fields))
    done = program("kill", text, tmp_path / "killed" / "out", fields, str(KILLS))
    assert done.returncode == 0, done.stderr
    assert f"killed {KILLS}" in done.stdout
    assert (tmp_path / "killed/out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert os.listdir(tmp_path / "killed") == ["out"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_beams": 3}, r"options.generation.num_beams was 2 and is 3"),
        ({"batch_tokens": 63}, r"options.batch_tokens was 64 and is 63"),
        ({"block": 5}, r"block was 4 and is 5"),
        ({"text": "other"}, r"source.lines was \w+ and is \w+"),
        ({"model": "other"}, r"options.model was \w+ and is \w+"),
        ({"sink": "other"}, r"sink.format was text and is other"),
    ],
)
@pytest.mark.slow
def test_what_has_changed_is_refused(
    text: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    import shutil

    interrupted(text, tmp_path / "out")
    before = {name: (tmp_path / name).read_bytes() for name in beside(tmp_path / "out")}
    model = MODEL
    if changed.pop("model", None):
        model = tmp_path / "model"
        shutil.copytree(MODEL, model)
        (model / "source.spm").write_text("another model")
    if changed.pop("text", None):
        text = tmp_path / "text"
        text.write_text("a\n" * len(LINES))
    if changed.get("sink"):
        changed["sink"] = Renamed()
    asked = job_of(model, text, tmp_path / "out", **({"block": BLOCK} | changed))
    with pytest.raises(
        CommandError, match=f"was begun otherwise: {message}. --restart begins anew"
    ):
        job.run(asked)
    assert before == {name: (tmp_path / name).read_bytes() for name in before}, (
        "nothing is lost by asking"
    )
    made = job.run(replace(asked, restart=True))
    assert made.made == len(LINES)


def test_what_counts_of_a_model(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    seen = {digest(folder)}
    for name, counts in (
        ("source.spm", True),
        ("vocabulary.tiktoken", True),
        ("README.md", False),
        (".cache", False),
    ):
        (folder / name).write_text(name)
        assert (digest(folder) not in seen) == counts, name
        seen.add(digest(folder))
    (folder / "checkpoint-10").mkdir()
    assert digest(folder) in seen
    said = header_of(job_of(MODEL, text, tmp_path / "out"))["versions"]
    assert said["tokenizers"] == importlib.metadata.version("tokenizers")
    assert said["fastgen"] == fastgen.__version__


class Renamed(Texts):
    def identity(self) -> dict[str, Any]:
        return {"format": "other"}


def test_threads_and_a_header_alone_bind_nobody(text: Path, tmp_path: Path, whole: bytes) -> None:
    asked = job_of(MODEL, text, tmp_path / "out", block=BLOCK)
    nowhere = replace(asked, options=replace(asked.options, device="nowhere"))
    with pytest.raises(CommandError, match="--device nowhere"):
        job.run(nowhere)
    assert in_progress(tmp_path / "out")
    interrupted(text, tmp_path / "out")
    job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK, threads=1))
    assert (tmp_path / "out").read_bytes() == whole


@dataclass(frozen=True)
class Unnamed(Lines):
    """A source without an identity of its records, like a pipe."""

    once: bool = True

    def identity(self) -> dict[str, Any]:
        return {"stdin": True}


def test_other_records_of_a_pipe_are_noticed(text: Path, tmp_path: Path, whole: bytes) -> None:
    interrupted(text, tmp_path / "out", source=Unnamed(text))
    (tmp_path / "changed").write_text(
        "\n".join([*LINES[:4], "another", *LINES[5:]]) + "\n", "utf-8"
    )
    with pytest.raises(CommandError, match="the input has changed: records 5 to 8 were"):
        job.run(
            job_of(MODEL, text, tmp_path / "out", block=BLOCK, source=Unnamed(tmp_path / "changed"))
        )
    (tmp_path / "shorter").write_text("\n".join(LINES[:4]) + "\n", "utf-8")
    with pytest.raises(
        CommandError, match=r"it ends behind 1 blocks of 4 records, and an earlier run has read 2\."
    ):
        job.run(
            job_of(MODEL, text, tmp_path / "out", block=BLOCK, source=Unnamed(tmp_path / "shorter"))
        )
    job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK, source=Unnamed(text)))
    assert (tmp_path / "out").read_bytes() == whole


@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_torn_journal(text: Path, tmp_path: Path, whole: bytes, cut: int) -> None:
    interrupted(text, tmp_path / "out")
    file = tmp_path / "out.journal"
    data = file.read_bytes()
    file.write_bytes(data[: max(10, len(data) - cut)])
    with (tmp_path / "out.part").open("ab") as body:
        body.write(b"of a block that was being written")
    job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK))
    assert (tmp_path / "out").read_bytes() == whole


def test_what_is_no_journal_is_refused(text: Path, tmp_path: Path) -> None:
    interrupted(text, tmp_path / "out")
    file, data = tmp_path / "out.journal", (tmp_path / "out.journal").read_bytes()
    file.write_bytes(data.replace(b'"digest"', b'"dig?st"', 1))
    with pytest.raises(CommandError, match=r"out\.journal is no journal of a run"):
        job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK))
    file.write_bytes(data)
    os.truncate(tmp_path / "out.part", 7)
    with pytest.raises(CommandError, match=r"out\.part has 7 bytes of \d+"):
        job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK))
    job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK, restart=True))
    assert beside(tmp_path / "out") == []


class Stopped(BaseException):
    """Stands for the end of a process."""


def test_a_crash_before_the_output_is_there(
    text: Path, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise Stopped

    asked = job_of(MODEL, text, tmp_path / "out", block=BLOCK)
    monkeypatch.setattr(Texts, "finish", crash)
    with pytest.raises(Stopped):
        job.run(asked)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    made = job.run(asked)
    assert (made.made, made.records) == (0, len(LINES)), "nothing is made again"
    assert (tmp_path / "out").read_bytes() == whole
    assert beside(tmp_path / "out") == []


def test_a_crash_between_the_output_and_the_removal_of_its_journal(
    text: Path, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(_: Path) -> None:
        raise Stopped

    def none_are_made(*_: object) -> None:
        raise AssertionError("nothing is to be generated")

    asked = job_of(MODEL, text, tmp_path / "out", block=BLOCK)
    monkeypatch.setattr(job, "remove", crash)
    with pytest.raises(Stopped):
        job.run(asked)
    monkeypatch.undo()
    assert (tmp_path / "out").read_bytes() == whole
    assert in_progress(tmp_path / "out")
    monkeypatch.setattr(worker, "TextGenerator", none_are_made)
    made = job.run(asked)
    assert (made.made, made.records) == (0, len(LINES))
    assert (tmp_path / "out").read_bytes() == whole
    assert beside(tmp_path / "out") == []
    with pytest.raises(AssertionError):
        job.run(asked)


@pytest.mark.parametrize("removals", [1, 2, 3])
@pytest.mark.slow
def test_a_crash_in_the_midst_of_the_removal(
    text: Path, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    before = job.run(job_of(MODEL, text, tmp_path / "all", block=BLOCK)).tokens
    unlink, left = Path.unlink, removals

    def crash(self: Path, missing_ok: bool = False) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Stopped
        unlink(self, missing_ok)

    asked = job_of(MODEL, text, tmp_path / "out", block=BLOCK, sink=Copying())
    monkeypatch.setattr(Path, "unlink", crash)
    with pytest.raises(Stopped):
        job.run(asked)
    monkeypatch.undo()
    made = job.run(asked)
    assert (made.made, made.records) == (0, len(LINES))
    assert made.tokens == before
    assert (tmp_path / "out").read_bytes() == whole
    assert beside(tmp_path / "out") == []


@pytest.mark.parametrize("restart", [False, True])
def test_what_a_sink_was_making_is_taken_away(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    monkeypatch.setattr(worker, "TextGenerator", Fake)
    (tmp_path / "out.part.final").write_bytes(b"half")
    if restart:
        journal.restart(tmp_path / "out")
    else:
        job.run(job_of(MODEL, text, tmp_path / "out"))
    assert beside(tmp_path / "out") == []


class Copying(Texts):
    """A sink that leaves the body in place, like one that converts it to another format."""

    def finish(self, body: Path, output: Path) -> None:
        output.write_bytes(body.read_bytes())


def test_two_runs_at_once_are_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(text, tmp_path / "out")
    first = held(journal_of(tmp_path / "out"))
    monkeypatch.setattr(journal, "LOCKED", 0.2)
    for restart in (False, True):
        with pytest.raises(CommandError, match=r"out\.journal: another run is writing it"):
            job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK, restart=restart))
    first.close()
    job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK))


class Ends:
    """A stand-in for `time` under which the awaited event happens while a run sleeps."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def sleep(self, _: float) -> None:
        self.end()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_has_waited_for_another_does_not_make_its_output_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool, there: bool
) -> None:
    output = tmp_path / "out"
    if there:
        output.write_bytes(b"old")

    def finish() -> None:
        (tmp_path / "new").write_bytes(b"made")
        (tmp_path / "new").replace(output)
        journal.remove(output)
        first.close()

    first = held(journal_of(output))
    monkeypatch.setattr(journal, "time", Ends(finish))
    monkeypatch.setattr(worker, "TextGenerator", None)  # raises when called
    with pytest.raises(
        CommandError, match="out: another run has just finished it; --overwrite replaces it"
    ):
        job.run(job_of(MODEL, text, output, restart=restart))
    assert output.read_bytes() == b"made"
    assert beside(output) == []


def test_a_journal_that_was_waited_for_is_the_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"

    def restart() -> None:
        journal.remove(output)
        first.close()

    first = held(journal_of(output))
    monkeypatch.setattr(journal, "time", Ends(restart))
    second = Journal(output, {"a": 1}, "fail")
    assert journal.read(output).header == {"a": 1}
    monkeypatch.undo()
    monkeypatch.setattr(journal, "LOCKED", 0.0)
    with pytest.raises(CommandError, match="another run is writing it"):
        Journal(output, {}, "fail")
    second.close()


# Failing stages


class Broken(RuntimeError):
    pass


def _broken(*_: object, **__: object) -> Any:
    raise Broken


@dataclass(frozen=True)
class Ending(Lines):
    """A source that raises, or never answers, after its ninth record."""

    waits: bool = False

    def records(self) -> Iterator[Record]:
        for record in super().records():
            if record.number == 10:
                if self.waits:
                    threading.Event().wait()
                raise Broken
            yield record


@pytest.mark.parametrize(
    ("stage", "made"),
    [("source", 2), ("encode", 0), ("decode", 0), ("sink", 2), ("interrupt", 2), ("stream", 0)],
)
@pytest.mark.slow
def test_an_exception_of_any_stage_ends_the_run(
    text: Path, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest, stage: str, made: int,
) -> None:  # fmt: skip
    asked = job_of(MODEL, text, tmp_path / "out", block=BLOCK)
    error: type[BaseException] = Broken
    failing = asked
    with monkeypatch.context() as patched:
        if stage == "source":
            failing = replace(asked, source=Ending(text))
        elif stage == "sink":
            failing = replace(asked, sink=Failing(error=Broken))
        elif stage == "interrupt":
            error = KeyboardInterrupt
            _hear_interrupts(request)
            patched.setattr(TextGenerator, "generate", _interrupted(TextGenerator.generate))
            # A source that never answers does not keep the run from ending either.
            failing = replace(asked, source=Ending(text, waits=True))
        else:
            patched.setattr(TextGenerator, {"stream": "generate"}.get(stage, stage), _broken)
        with pytest.raises(error):
            job.run(failing)
    assert len(journal.read(tmp_path / "out").entries) == made, "what was made before it is safe"
    job.run(asked)
    assert (tmp_path / "out").read_bytes() == whole


def _hear_interrupts(request: pytest.FixtureRequest) -> None:
    """Let SIGINT raise KeyboardInterrupt, even where a shell started the tests with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))


def _interrupted(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Interrupt the process before it starts a third block."""
    count = 0

    def interrupt(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            # Strikes while the run waits for the source.
            threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
        return generate(*args)

    return interrupt


def test_the_first_error_is_the_one_that_comes_out() -> None:
    """An error in writing is raised before one in a later block, and nothing more is written."""
    written: list[int] = []
    release = threading.Event()

    def make(item: int) -> int:
        if item == 2:
            release.set()
            raise Broken
        return item

    def write(item: int) -> None:
        release.wait(10)
        written.append(item)
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        pipeline.run(range(5), make, write, pipeline.Waits())
    assert written == [0]


def test_reading_and_writing_are_bounded() -> None:
    """A slow stage holds up the stages before it."""
    read = 0
    seen: list[int] = []

    def items() -> Iterator[int]:
        nonlocal read
        for number in range(30):
            read = number
            yield number

    def make(item: int) -> int:
        seen.append(read - item)
        return item

    waits = pipeline.Waits()
    pipeline.run(items(), make, lambda item: threading.Event().wait(0.01), waits)
    assert len(seen) == 30
    assert max(seen) <= pipeline.DEPTH + 1
    assert waits.writing > 0.2


class Fake:
    """A stand-in for `TextGenerator` that generates without a model."""

    def __init__(self, options: object) -> None:
        self.options, self.limit = options, Limit("nothing", 1)

    def encode(self, texts: Sequence[str], targets: Sequence[str]) -> list[list[int]]:
        return [[1] for _ in texts]

    def generate(self, sources: Sequence[object]) -> list[object]:
        return list(sources)

    def decode(self, found: Sequence[object]) -> list[Output]:
        return [Output(["x" * 20], 1) for _ in found]


@dataclass(frozen=True)
class Many:
    """A source of `count` records."""

    count: int
    once: bool = False

    def records(self) -> Iterator[Record]:
        return (Record(number, f"{number} {'y' * 500}") for number in range(1, self.count + 1))

    def identity(self) -> dict[str, Any]:
        return {"count": self.count}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TextGenerator", Fake)
    peaks: dict[int, int] = {}
    for count in (1_000, 4_000, 40_000):
        asked = job_of(MODEL, tmp_path, tmp_path / f"out{count}", source=Many(count), block=200)
        tracemalloc.start()
        job.run(asked)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len((tmp_path / f"out{count}").read_bytes().splitlines()) == count
    assert peaks[4_000] > 500 * 200, "a block at least"
    # One line per block is all that stays; the amount of data in flight varies.
    journal = 1_000 * 180
    assert peaks[40_000] < 1.5 * peaks[4_000] + journal


# System errors


def program(
    mode: str, text: Path, output: Path | str, fields: dict[str, Any], *more: str, **popen: Any
) -> Any:
    """Run `tests/support/corpus_jobs.py` as a program."""
    if isinstance(output, Path):
        output.parent.mkdir(exist_ok=True)
    return subprocess.run(
        words(mode, text, output, fields, *more), env=environment(), cwd=ROOT, capture_output=True,
        text=True, timeout=500, check=False, **popen,
    )  # fmt: skip


def words(
    mode: str, text: Path, output: Path | str, fields: dict[str, Any], *more: str
) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tests.support.corpus_jobs",
        mode,
        MODEL,
        text,
        output,
        json.dumps(fields),
        *more,
    ]  # type: ignore


def environment(**more: object) -> dict[str, str]:
    return (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        | {name: str(value) for name, value in more.items()}
    )


@pytest.mark.slow
def test_a_full_disk(text: Path, tmp_path: Path, whole: bytes) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, resource.RLIM_INFINITY))

    done = program("run", text, tmp_path / "out", {"block": 1}, preexec_fn=limit)
    assert done.returncode == 2
    assert "cannot be written: File too large. What is finished is safe" in done.stderr
    assert not (tmp_path / "out").exists()
    assert beside(tmp_path / "out") == ["out.journal", "out.part"]
    made = job.run(job_of(MODEL, text, tmp_path / "out", block=1))
    assert 0 < made.made < len(LINES)
    assert len((tmp_path / "out").read_bytes().splitlines()) == len(LINES)


@pytest.mark.parametrize("file", ["out.part", "out.journal"])
def test_no_space_left(
    text: Path, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    write, left = journal._write, 3

    def full(stream: Any, data: bytes) -> None:
        nonlocal left
        left -= stream.name.endswith(file)
        if not left:
            stream.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(stream, data)

    with monkeypatch.context() as patched:
        patched.setattr(journal, "_write", full)
        with pytest.raises(
            CommandError,
            match=rf"{file} cannot be written: No space left on device\. What is finished",
        ):
            job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK))
    job.run(job_of(MODEL, text, tmp_path / "out", block=BLOCK))
    assert (tmp_path / "out").read_bytes() == whole


@pytest.mark.slow
def test_standard_output_and_who_stops_reading_it(text: Path, whole: bytes) -> None:
    with subprocess.Popen(
        words("run", text, "-", {"block": BLOCK}), env=environment(), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stderr is not None
        assert whole.startswith(running.stdout.readline())
        running.stdout.close()
        errors = running.stderr.read().decode()
        assert running.wait(100) == 1
    assert "Traceback" not in errors
    assert "Error" not in errors
    done = program("run", text, "-", {"block": BLOCK})
    assert done.returncode == 0
    assert done.stdout.encode() == whole


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_standard_output_on_a_full_disk(text: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            words("run", text, "-", {"block": BLOCK}), env=environment(), cwd=ROOT, stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert (
        "standard output cannot be written: No space left on device. What was written to it"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_file_system_without_locks(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(worker, "TextGenerator", Fake)
    for number in (errno.ENOSYS, errno.ENOLCK):
        caplog.clear()
        made = job.run(job_of(MODEL, text, tmp_path / str(number)))
        assert made.made == len(LINES)
        assert f"its file system has no locks ({os.strerror(number)})" in caplog.text
    number = errno.EIO
    with pytest.raises(CommandError, match=r"out\.journal cannot be written: Input/output error"):
        job.run(job_of(MODEL, text, tmp_path / "out"))


def test_a_summary_that_cannot_be_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TextGenerator", Fake)
    with pytest.raises(
        CommandError, match=r"s\.json cannot be written: No such file .*\. The output is complete$"
    ):
        job.run(job_of(MODEL, text, tmp_path / "out", summary=tmp_path / "nowhere/s.json"))
    assert len((tmp_path / "out").read_bytes().splitlines()) == len(LINES)
    assert beside(tmp_path / "out") == []


# Several processes


@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.slow
def test_two_processes_write_what_one_does(text: Path, tmp_path: Path, kills: bool) -> None:
    job.run(job_of(MODEL, text, tmp_path / "whole", block=2))
    fields = {"block": 2, "processes": 2, "kills": kills}
    done = program_with({"KILLED": tmp_path / "mark"}, text, tmp_path / "r/out", fields)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (tmp_path / "r/out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert made["records"] == len(LINES)
    assert [one.partition(" ended ")[2] for one in made["lost"]] == (
        ["with signal 9"] if kills else []
    )
    assert made["processes"] == (1 if kills else 2)
    assert beside(tmp_path / "r/out") == []
    assert (tmp_path / "mark").exists() == kills


def program_with(
    variables: dict[str, object], text: Path, output: Path, fields: dict[str, Any]
) -> Any:
    with started(variables, text, output, fields) as running:
        stdout, stderr = running.communicate(timeout=300)
    return subprocess.CompletedProcess([], running.returncode, stdout, stderr)


def started(
    variables: dict[str, object], text: Path, output: Path, fields: dict[str, Any]
) -> subprocess.Popen[str]:
    output.parent.mkdir(exist_ok=True)
    return subprocess.Popen(
        words("run", text, output, fields), env=environment(**variables), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_bad_record_ends_several_processes_and_one_goes_on(
    tmp_path: Path, text: Path, whole: bytes
) -> None:
    bad = tmp_path / "bad"
    bad.write_text("\n".join([*LINES[:10], "", *LINES[11:]]) + "\n", "utf-8")
    output = tmp_path / "r/out"
    done = program("run", bad, output, {"block": BLOCK, "processes": 2})
    assert done.returncode == 2, done.stderr
    assert "record 11: there is no text" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(journal.read(output).entries) == 2, "the blocks before it are safe"
    made = job.run(job_of(MODEL, bad, output, block=BLOCK, on_error="empty"))
    assert made.problems == [(11, "there is no text")]
    good = whole.decode().splitlines(keepends=True)
    assert output.read_text("utf-8") == "".join([*good[:10], "11\t\n", *good[11:]])


@pytest.mark.slow
def test_who_leads_is_killed_and_another_number_goes_on(
    text: Path, tmp_path: Path, whole: bytes
) -> None:
    output = tmp_path / "r/out"
    with started({}, text, output, {"block": 1, "processes": 2}) as running:
        while not journal.read(output).entries and running.poll() is None:
            threading.Event().wait(0.01)
        running.kill()
        # Its worker processes end too; otherwise this would wait for them.
        running.communicate(timeout=100)
    assert running.returncode == -signal.SIGKILL
    made = job.run(job_of(MODEL, text, output, block=1))
    assert 0 < made.made < made.records == len(LINES)
    assert len(output.read_bytes().splitlines()) == len(LINES)
    assert beside(output) == []


@pytest.mark.slow
def test_two_processes_are_interrupted_and_go_on(text: Path, tmp_path: Path, whole: bytes) -> None:
    output = tmp_path / "out"
    words = [
        sys.executable,
        "-m",
        "fastgen",
        "generate",
        MODEL,
        "--input",
        text,
        "--output",
        output,
        "--block",
        1,
    ]
    words += [
        "--append-eos",
        "--num-beams",
        2,
        "--max-new-tokens",
        8,
        "--device",
        "cpu",
        "--processes",
        2,
    ]
    with subprocess.Popen(
        list(map(str, words)), env=environment(), stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:  # fmt: skip
        while not journal.read(output).entries and running.poll() is None:
            threading.Event().wait(0.01)
        os.killpg(running.pid, signal.SIGINT)  # like Ctrl-C in a terminal
        said = running.communicate(timeout=100)[1]
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert "leaked" not in said
    done = subprocess.run(
        list(map(str, words)), env=environment(), capture_output=True, text=True, check=True
    )
    assert "22 records" in done.stderr
    assert output.read_text("utf-8").splitlines() == [
        line.split("\t")[1] for line in whole.decode().splitlines()
    ]
    assert beside(output) == []


@pytest.mark.slow
def test_two_processes_that_cannot_begin(text: Path, tmp_path: Path) -> None:
    done = program("run", text, tmp_path / "out", {"processes": 2, "device": "nowhere"})
    assert done.returncode == 2
    assert done.stderr.count("--device nowhere") == 1
    assert "Traceback" not in done.stderr


def test_what_several_processes_cannot_do(text: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot read standard input"):
        job.run(job_of(MODEL, text, tmp_path / "out", processes=2, source=Unnamed(text)))
    assert beside(tmp_path / "out") == []


def test_torchrun_is_told_of_what_there_is(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TextGenerator", Fake)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        CommandError, match=r"^WORLD_SIZE=2: .*--processes N .* --engine ray for many machines$"
    ):
        job.run(job_of(MODEL, text, tmp_path / "out"))
    assert beside(tmp_path / "out") == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert job.run(job_of(MODEL, text, tmp_path / "out")).made == len(LINES)


@pytest.mark.parametrize("end", ["interrupt", "bad record"])
@pytest.mark.slow
def test_standard_input_that_is_waited_for(end: str, tmp_path: Path) -> None:
    """Python exits normally while a thread waits for more input."""
    words = [
        sys.executable,
        "-m",
        "fastgen",
        "generate",
        MODEL,
        "--input",
        "-",
        "--max-new-tokens",
        4,
        "--block",
        1,
    ]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        (tmp_path / "said").open("wb") as said,
        subprocess.Popen(
            list(map(str, words)),
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            # Shells have background processes ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):
        stdin, stdout = cast(Any, process.stdin), cast(Any, process.stdout)
        try:
            stdin.write(
                b"Returns the list.\n"
                + (b"\xff\n" if end == "bad record" else b"A list.\n")
                + b"x\n" * 8
            )
            stdin.flush()
            stdout.readline()  # wait until it is running
            if end == "interrupt":
                process.send_signal(signal.SIGINT)
            status = process.wait(60)
        finally:
            process.kill()
    message = (tmp_path / "said").read_text()
    assert status == (2 if end == "bad record" else 130), message
    assert "Fatal Python error" not in message
    assert (
        "record 2: not UTF-8" if end == "bad record" else "fastgen generate: interrupted"
    ) in message
    assert "Traceback" not in message


def test_threads_and_devices_of_a_process(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def placed(number: int, **options: Any) -> Any:
        asked = job_of(MODEL, text, None, processes=4)
        asked = replace(asked, options=replace(asked.options, **options))
        return workers._placed(asked, number).options

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(workers, "_cores", lambda: 10)
    assert placed(1).threads == 2
    assert placed(1, threads=5).threads == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert placed(1).threads is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [placed(number, device=None).device for number in range(3)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    assert placed(3, device="cuda").device == "cuda:1"
    assert placed(3, device="cpu").device == "cpu"


class Scripted:
    """A stand-in for a worker process: a thread that runs a script.

    The end of the script stands for the process being killed.
    """

    exitcode = -signal.SIGKILL

    def __init__(self, script: Callable[["Scripted"], None], connection: Any) -> None:
        self.script, self.connection = script, connection

    def start(self) -> None:
        # The parent closes its own descriptor of the connection.
        self.connection = Connection(os.dup(self.connection.fileno()))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError, EOFError):
            self.script(self)
        self.connection.close()

    def ask(self) -> Any:
        self.connection.send(None)
        return self.connection.recv()

    def make(self, block: Block) -> None:
        self.connection.send((b"%d " % block.number, Entry(2, len(block.records), 1, block.digest)))

    def work(self) -> None:
        """Process all blocks, then report."""
        while (block := self.ask()) is not None:
            self.make(block)
        self.connection.send(Report())

    def join(self) -> None:
        pass

    kill = join


def scripted(
    monkeypatch: pytest.MonkeyPatch, source: Any, *scripts: Callable[[Scripted], None]
) -> tuple[list[bytes], Callable[[], tuple[list[Report], list[str]]]]:
    """Return the list that a run of scripted workers writes to, and the run itself."""

    class Context:
        Pipe = staticmethod(Pipe)

        def Process(self, target: object, args: tuple[Any, int, Any], daemon: bool) -> Scripted:
            return Scripted(scripts[args[1]], args[2])

    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda _: Context())
    written: list[bytes] = []
    asked = job_of(MODEL, Path(), None, processes=len(scripts))
    return written, lambda: workers.run(
        asked, blocks(source, 1, ()), lambda data, _: written.append(data)
    )


def numbers(count: int) -> list[bytes]:
    return [b"%d " % number for number in range(count)]


def test_the_blocks_of_a_process_that_dies_are_made_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = threading.Event()

    def dies(process: Scripted) -> None:
        first, *_ = process.ask(), process.ask(), process.ask()
        process.make(first)
        gone.set()

    def waits(process: Scripted) -> None:
        """Outlive the other worker, and request blocks after the source has ended."""
        gone.wait(10)
        process.work()

    written, run = scripted(monkeypatch, Many(9), dies, waits)
    reports, lost = run()
    assert written == numbers(9)
    assert (len(reports), lost) == (1, ["process 0 ended with signal 9"])

    written, run = scripted(monkeypatch, Many(9), dies, dies)
    with pytest.raises(
        CommandError, match=r"process . ended with signal 9; .* What is finished is safe"
    ):
        run()
    assert written == numbers(len(written))


def test_blocks_before_one_that_fails_supports_sublayers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a worker that died are written too, and no idle worker delays the error."""
    asked, failed, for_ever = threading.Event(), threading.Event(), threading.Event()

    def dies(process: Scripted) -> None:
        process.ask()
        asked.set()
        failed.wait(10)

    def fails(process: Scripted) -> None:
        asked.wait(10)
        first, second = process.ask(), process.ask()
        process.make(first)
        process.connection.send(f"record {second.number + 1} is bad")
        failed.set()

    def helps(process: Scripted) -> None:
        failed.wait(10)
        number = None
        while number != 0:  # another block comes first where the death is noticed later
            block = process.ask()
            process.make(block)
            number = block.number
        process.ask()
        for_ever.wait(10)

    written, run = scripted(monkeypatch, Many(50), dies, fails, helps)
    with pytest.raises(CommandError, match="record 3 is bad"):
        run()
    assert written == numbers(2)


def test_a_source_that_fails_behind_what_was_made(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, run = scripted(monkeypatch, Ending(text), Scripted.work, Scripted.work)
    with pytest.raises(Broken):
        run()
    assert written == numbers(9)


def test_a_slow_process_holds_up_others_before_memory_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "WINDOW", 3)
    held, most, made = threading.Event(), 0, 0

    def slow(process: Scripted) -> None:
        nonlocal most
        block = process.ask()
        held.set()
        while made < 5:
            time.sleep(0.01)
        time.sleep(0.2)
        most = made
        process.make(block)
        process.work()

    def fast(process: Scripted) -> None:
        nonlocal made
        held.wait(10)
        while (block := process.ask()) is not None:
            process.make(block)
            made += 1
        process.connection.send(Report())

    written, run = scripted(monkeypatch, Many(30), slow, fast)
    assert len(run()[0]) == 2
    assert most == 5
    assert written == numbers(30)


# Blocks


def test_blocks_behind_those_that_are_known(text: Path) -> None:
    every = list(blocks(Lines(text), BLOCK, ()))
    assert [block.number for block in every] == list(range(6))
    assert [record.number for block in every for record in block.records] == list(
        range(1, len(LINES) + 1)
    )
    assert len({block.digest for block in every}) == 6
    digests = [block.digest for block in every]
    assert list(blocks(Lines(text), BLOCK, digests[:4])) == every[4:]
    assert list(blocks(Lines(text), BLOCK, digests)) == []
