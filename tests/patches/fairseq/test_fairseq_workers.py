"""Check fairseq batches that several processes translate: results, order and errors."""

import copy
import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastgen
from fastgen.decoding.speculative.bild_options import Options
from fastgen.models.memory.budget import SystemMemory
from fastgen.ops.counts import calls
from fastgen.patches.engine import engine
from fastgen.patches.engine.patch import FallbackError

pytest.importorskip("fairseq")
from fairseq import options as fairseq_options
from fairseq import search
from fairseq.dataclass import FairseqDataclass
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from fairseq_cli import generate

from fastgen.patches.fairseq.bild import bild
from fastgen.patches.fairseq.commands import workers
from fastgen.patches.fairseq.commands.workers import Workers
from tests.support import fairseq_zoo as zoo
from tests.support.fairseq_commands import (
    GENERATE,
    STOCK,
    assert_alike,
    known_to_fairseq,
    preprocess,
    run,
    train,
)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="processes are forked on Linux alone"
)


def _squares(batches: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Yield the square of each number and the pid; even numbers take longer."""
    for number in batches:
        time.sleep(0.02 * (1 - number % 2))
        yield number**2, os.getpid()


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 12])
def test_in_the_order_of_the_batches(processes: int, count: int) -> None:
    with Workers(_squares, processes) as several:
        found = list(several.results(range(count)))
    assert [square for square, _ in found] == [number**2 for number in range(count)]
    by = [pid for _, pid in found]
    assert os.getpid() not in by
    assert all(by[i] == by[i % processes] for i in range(count)), (
        "in every run the same process gets a batch"
    )
    assert len(set(by)) == min(count, processes)


def test_who_reads_ahead_gets_what_it_has_asked_for() -> None:
    """A worker may read two batches at a time, as continuous batching does."""

    def in_pairs(batches: Iterator[int]) -> Iterator[int]:
        for first in batches:
            second = next(batches, None)
            yield first
            if second is not None:
                yield second

    with Workers(in_pairs, 3) as several:
        assert list(several.results(range(20))) == list(range(20))


def test_one_call_after_the_other() -> None:
    """Buffers follow one another: the processes stay, and their counts arrive at the end."""

    def translate(batches: Iterator[int]) -> Iterator[tuple[int, int]]:
        for number in batches:
            engine.hit("fairseq.generate")
            yield number, os.getpid()

    hits, seen = _row("fairseq.generate").hits, set[int]()
    with Workers(translate, 2) as several:
        for numbers in ([1, 2, 3], [], [4], range(5, 20)):
            found = list(several.results(numbers, more=True))
            assert [number for number, _ in found] == list(numbers)
            seen |= {pid for _, pid in found}
    assert len(seen) == 2
    assert _row("fairseq.generate").hits - hits == 19


def test_the_death_of_one_that_has_nothing_to_do(tmp_path: Path) -> None:
    """A process dies once, and its batch is translated again, in the end by this process."""

    def translate(batches: Iterator[int]) -> Iterator[tuple[int, int]]:
        for number in batches:
            if number == 1:
                time.sleep(0.5)
            yield number, os.getpid()
            if number == 2 and not (dead := tmp_path / "dead").exists():
                dead.touch()
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()

    with Workers(translate, 2) as several:
        for numbers in ([1, 2], [3, 4, 5, 6]):
            assert [number for number, _ in several.results(numbers, more=True)] == numbers
        assert len(several._running) == 1


def test_want_of_memory_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    """A process that runs out of memory exits and leaves its batches to the others."""
    here = os.getpid()

    def translate(batches: Iterator[int]) -> Iterator[int]:
        for number in batches:
            if os.getpid() != here and number % 2:
                raise MemoryError if number == 1 else torch.OutOfMemoryError("CPU out of memory")
            yield number

    with Workers(translate, 2) as several:
        assert list(several.results(range(12))) == list(range(12))
    assert f"has died (status {errno.ENOMEM};" in caplog.text


def test_one_that_is_behind_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent does not read batches without limit while one process lags behind."""
    monkeypatch.setattr(workers, "LEAD", 4)
    read = list[int]()

    def batches() -> Iterator[int]:
        for number in range(40):
            read.append(number)
            yield number

    def translate(handed: Iterator[int]) -> Iterator[tuple[int, int]]:
        for number in handed:
            time.sleep(0.05 * (number % 2 == 0))
            yield number, os.getpid()

    with Workers(translate, 2) as several:
        ahead, by = list[int](), list[int]()
        for number, pid in several.results(batches()):
            ahead.append(len(read) - number)
            by.append(pid)
    assert max(ahead) < 20
    assert by == by[:2] * 20


def test_processes_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, made = workers.Pipe, list[Any]()

    def limited(most: int) -> Any:
        def make() -> Any:
            if len(made) == most:
                raise OSError("no more of them")
            made.append(pipe())
            return made[-1]

        return make

    for most in (1, 0):
        made.clear()
        monkeypatch.setattr(workers, "Pipe", limited(most))
        with Workers(_squares, 3) as several:
            assert [square for square, _ in several.results(range(5))] == [0, 1, 4, 9, 16]
        assert f"{most} of 3 processes translate: no more of them" in caplog.text


@pytest.mark.parametrize("where", ["before", "behind"])
def test_an_error_that_belongs_to_no_batch(where: str) -> None:
    def translate(batches: Iterator[int]) -> Iterator[int]:
        if where == "before":
            raise ValueError("no batch's")
        yield from batches
        raise ValueError("no batch's")

    with pytest.raises(ValueError, match="no batch's"), Workers(translate, 2) as several:
        list(several.results(range(4)))


def test_a_fallback_that_raises_is_known_as_one() -> None:
    def translate(batches: Iterator[int]) -> Iterator[int]:
        for number in batches:
            if number >= 0:
                raise FallbackError("fairseq.generate", "something")
            yield number

    with (
        Workers(translate, 2) as several,
        pytest.raises(FallbackError, match=r"fairseq\.generate fell back: something"),
    ):
        list(several.results(range(4)))


@pytest.mark.parametrize("others", [1, 2])
def test_a_death_while_others_have_nothing_to_do(others: int) -> None:
    here = os.getpid()

    def translate(batches: Iterator[int]) -> Iterator[tuple[int, int]]:
        for number in batches:
            if number == 7 and os.getpid() != here:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            yield number, os.getpid()

    with Workers(translate, 1 + others) as several:
        for numbers in ([1, 2, 3], [7], [8, 9]):
            assert [number for number, _ in several.results(numbers, more=True)] == numbers


class Odd(Exception):
    """An exception that cannot be recreated from its arguments."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{number}: {why}")


@pytest.mark.parametrize("kind", [ValueError, Odd])
def test_an_error_comes_in_the_place_of_the_result(kind: type[Exception]) -> None:
    def translate(batches: Iterator[int]) -> Iterator[int]:
        for number in batches:
            if number == 5:
                raise ValueError("no fifth") if kind is ValueError else Odd(5, "no fifth")
            time.sleep(0.05 * (number < 5))
            yield number

    found: list[int] = []
    expected = ValueError if kind is ValueError else RuntimeError
    with Workers(translate, 2) as several, pytest.raises(expected, match="no fifth") as raised:
        found.extend(several.results(range(12)))
    assert found == [0, 1, 2, 3, 4]
    assert "in translate" in "".join(raised.value.__notes__)
    if kind is Odd:
        assert str(raised.value) == "Odd: 5: no fifth"


@pytest.mark.parametrize("slow", [0, 1])
def test_all_batches_before_an_error_come_out(slow: int) -> None:
    """This includes batches dealt to a process slower than the one that fails."""

    def translate(batches: Iterator[int]) -> Iterator[int]:
        for number in batches:
            if number % 2 == slow:
                time.sleep(0.1)
            elif number > 7:
                raise ValueError("no more than seven")
            yield number

    found: list[int] = []
    with Workers(translate, 2) as several, pytest.raises(ValueError, match="no more than seven"):
        found.extend(several.results(range(100)))
    assert found == list(range(9 if slow == 0 else 8))


def test_what_cannot_be_read_comes_behind_the_batches_before_it() -> None:
    def batches() -> Iterator[int]:
        yield from range(5)
        raise OSError("the disk is gone")

    found: list[int] = []
    with Workers(_squares, 2) as several, pytest.raises(OSError, match="the disk is gone"):
        found.extend(square for square, _ in several.results(batches()))
    assert found == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("deaths", [1, 2], ids=["one", "all"])
def test_the_batches_of_a_process_that_dies_are_translated_anew(
    deaths: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other process takes them, or this one when all have died."""
    here = os.getpid()

    def translate(batches: Iterator[int]) -> Iterator[tuple[int, int]]:
        for number in batches:
            if (
                number in (3, 4)[:deaths]
                and os.getpid() != here
                and not [*tmp_path.glob(f"{number}-*")]
            ):
                (tmp_path / f"{number}-{os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            # The last batch of the other process: it must not end before the death.
            if number == 10 and os.getpid() != here:
                while not (dead := [*tmp_path.glob("3-*")]) or _is_there(
                    int(dead[0].name.removeprefix("3-"))
                ):
                    time.sleep(0.01)
            yield number, os.getpid()

    with Workers(translate, 2) as several:
        found = list(several.results(range(12)))
    assert [number for number, _ in found] == list(range(12))
    assert caplog.text.count("has died (status -9") == deaths
    assert (here in {pid for _, pid in found}) == (deaths == 2)


def _is_there(pid: int) -> bool:
    """Return whether a process is alive, or dead but not yet reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_error_behind_a_death() -> None:
    """All processes have died, and this one meets the unreadable input."""
    here = os.getpid()

    def translate(batches: Iterator[int]) -> Iterator[int]:
        for number in batches:
            if os.getpid() != here:
                os.kill(os.getpid(), signal.SIGKILL)
            yield number

    def batches() -> Iterator[int]:
        yield from range(4)
        raise OSError("the disk is gone")

    found: list[int] = []
    with Workers(translate, 2) as several, pytest.raises(OSError, match="the disk is gone"):
        found.extend(several.results(batches()))
    assert found == [0, 1, 2, 3]


def test_what_they_count_is_counted() -> None:
    def translate(batches: Iterator[int]) -> Iterator[int]:
        for number in batches:
            engine.hit("fairseq.generate", ["something"])
            engine.note_skipped("fairseq.score", "too small")
            calls["kbest", "reference"] += 2
            yield number

    def so_far() -> list[int]:
        generate, score = _row("fairseq.generate"), _row("fairseq.score")
        left_off = generate.left_off.get("something", 0), score.left_off.get("too small", 0)
        return [generate.hits, *left_off, calls["kbest", "reference"]]

    before = so_far()
    with Workers(translate, 2) as several:
        list(several.results(range(7)))
    assert [now - then for now, then in zip(so_far(), before, strict=True)] == [7, 7, 7, 14]


def _row(name: str) -> Any:
    return fastgen.status()[name]


_SLEEPERS = """
    import os, signal, sys, time
    import fastgen, fairseq

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    from fastgen.patches.fairseq.commands import workers

    def translate(batches):
        for number in batches:
            os.write(1, f"{{os.getpid()}}\\n".encode())  # one write, even where PYTHONUNBUFFERED is set
            time.sleep(0 if {how!r} == "killed while it is told" else 60)
            yield bytes(10_000_000)

    with workers.Workers(translate, 2) as several:
        for _ in several.results(range(1000)):
            time.sleep(60)
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupted", "killed", "killed while it is told"])
def test_none_is_left_behind(how: str, tmp_path: Path) -> None:
    """Ctrl-C ends all processes of a terminal at once; they also end with a killed parent.

    This includes processes that send the parent more than a pipe holds.
    """
    script = tmp_path / "sleepers.py"
    script.write_text(textwrap.dedent(_SLEEPERS.format(how=how)))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        children = {int(parent.stdout.readline()) for _ in range(2)}
        began = time.monotonic()
        if how == "interrupted":
            os.killpg(parent.pid, signal.SIGINT)
        else:
            parent.kill()
        assert parent.wait(20) != 0
        while any(_is_alive(child) for child in children):
            assert time.monotonic() - began < 20
            time.sleep(0.05)
        assert parent.stderr is not None
        assert parent.stderr.read().count("Traceback") == (how == "interrupted")


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("threads", "cores", "free", "batches", "expected"),
    [
        (4, 4, 1.0, 32, 4),
        (4, 4, 1.0, 31, 1),
        (4, 3, 1.0, 32, 1),
        (1, 4, 1.0, 99, 1),
        (2, 4, 1.0, 16, 2),
        (4, 4, 0.99, 99, 1),
    ],
    ids=[
        "all",
        "too few batches",
        "too few cores",
        "one thread",
        "two threads",
        "too little memory",
    ],
)
def test_how_many_by_itself(
    threads: int,
    cores: int,
    free: float,
    batches: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(100, 25, bias=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(workers, "usable_cores", lambda: cores)
    available = int(free * 4 * threads * 10_000)
    monkeypatch.setattr(workers, "system_memory", lambda: SystemMemory(2 * available, available))
    assert workers.number_for(batches, [model]) == expected


class _OwnLayer(torch.nn.Linear):
    pass


@pytest.mark.parametrize(
    ("layer", "threads", "asked", "expected"),
    [
        (torch.nn.Linear, 1, None, 4),
        (torch.nn.Linear, 2, None, "other threads of this process may hold a lock"),
        (torch.nn.Linear, 2, 3, 3),
        (_OwnLayer, 1, None, "_OwnLayer may depend on the batches before"),
        (_OwnLayer, 1, 3, 3),
    ],
)
def test_what_is_not_begun_unless_asked_for(
    layer: Any,
    threads: int,
    asked: int | None,
    expected: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "number_for", lambda batches, models: 4)
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    generator = SequenceGenerator([zoo.build("transformer")], zoo.dictionary())
    task: Any = FairseqTask(FairseqDataclass())
    assert (
        workers.chosen("fairseq-generate", asked, 99, task, generator, [layer(2, 2).eval()])
        == expected
    )


class _OwnTask(FairseqTask):
    def inference_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().inference_step(*args, **kwargs)


class _OwnGenerator(SequenceGenerator):
    pass


class _OwnSearch(search.BeamSearch):
    pass


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("nothing", None),
        ("diverse beams", None),
        ("task", "_OwnTask has its own inference_step"),
        ("generator", "_OwnGenerator is no SequenceGenerator of fairseq's"),
        ("search", "_OwnSearch may depend on the batches before"),
        ("sampling", "Sampling may depend on the batches before"),
        ("dropout", "dropout is retained"),
        ("device", "the model is not on a CPU"),
        ("drafts", "a small model drafts"),
        ("parity", "FASTGEN_PARITY=1 compares batch by batch"),
        ("system", "processes are not forked on darwin"),
        ("daemon", "this process is a daemon of another, and may start none"),
    ],
)
def test_reasons_against(
    what: str, reason: str | None, setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = copy.deepcopy(zoo.build("transformer"))
    task: Any = (_OwnTask if what == "task" else FairseqTask)(FairseqDataclass())
    kinds: dict[str, Any] = {
        "sampling": search.Sampling,
        "search": _OwnSearch,
        "diverse beams": lambda words: search.DiverseBeamSearch(words, 2, 0.5),
    }
    strategy = kinds[what](zoo.dictionary()) if what in kinds else None
    kind = _OwnGenerator if what == "generator" else SequenceGenerator
    generator = kind([model], zoo.dictionary(), search_strategy=strategy)
    if what == "dropout":
        model.train()
    elif what == "device":
        model.to("meta")
    elif what == "parity":
        setting("FASTGEN_PARITY", "1")
    elif what == "system":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif what == "daemon":
        monkeypatch.setattr(workers, "current_process", lambda: SimpleNamespace(daemon=True))
    pair = Options(
        zoo.build("transformer"),
        None,
        0.6,
        5.0,
        4,
        lossless=True,
        paper_compat=False,
        adaptive=False,
    )
    with bild.drafting(pair) if what == "drafts" else nullcontext():
        assert workers.reason_against(task, generator, [model]) == reason


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small corpus and a trained transformer.

    The preprocessed corpus lies in `data/`, the checkpoint in `model/checkpoint_last.pt`.
    """
    folder = tmp_path_factory.mktemp("fairseq-workers")
    train(
        preprocess(folder), folder / "model", 60, "--arch", "transformer", "--share-all-embeddings"
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (
            "--beam 4 --batch-size 6 --nbest 2 --remove-bpe --scoring sacrebleu "
            "--no-repeat-ngram-size 3"
        ),
        "--beam 3 --batch-size 4 --print-alignment --postprocess-workers 2",
        "--beam 2 --batch-size 6 --prefix-size 2 --min-len 4 --postprocess-workers 0",
        "--beam 4 --batch-size 7 --diverse-beam-groups 2 --diverse-beam-strength 0.5",
        "--beam 2 --max-tokens 200 --num-workers 1",
    ],
    ids=["beams", "alignment", "prefix ensemble", "diverse", "loaded ahead"],
)
def test_the_command_prints_the_same(
    corpus: Path,
    tmp_path: Path,
    options: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = list[Any]()
    merge_counts = engine.merge_counts
    monkeypatch.setattr(
        engine, "merge_counts", lambda counts: (counted.append(counts), merge_counts(counts))
    )
    checkpoint = str(corpus / "model/checkpoint_last.pt")
    paths = f"{checkpoint}:{checkpoint}" if "--min-len" in options else checkpoint
    arguments = (str(corpus / "data"), "--path", paths, *GENERATE, *options.split())
    parser = fairseq_options.get_generation_parser()
    ours = [*arguments, "--generate-workers", "2", "--results-path", str(tmp_path)]
    given = fairseq_options.parse_args_and_arch(parser, ours)
    hits = _row("fairseq.generate").hits
    with caplog.at_level("INFO"):
        generate.main(given)
    assert len(counted) == 2
    assert all(counts["hit", "fairseq.generate"] for counts in counted)
    assert _row("fairseq.generate").hits > hits
    found = run(
        "fairseq-generate",
        *known_to_fairseq(arguments),
        afresh="--num-workers 1" in options,
        **STOCK,
    )
    stock = found.stdout
    text = (tmp_path / "generate-test.txt").read_text("utf-8")
    assert_alike(text, stock)
    assert [line for line in text.splitlines() if line[:2] == "A-"] == [
        line for line in stock.splitlines() if line[:2] == "A-"
    ]
    count = re.compile(r"Translated [\d,]+ sentences \([\d,]+ tokens\)")
    assert len(count.findall(caplog.text)) == 1
    assert count.findall(caplog.text) == count.findall(stock + found.stderr)


@pytest.mark.parametrize("where", ["typed", "file", "constraints"])
@pytest.mark.slow
def test_interactive_prints_the_same(corpus: Path, tmp_path: Path, where: str) -> None:
    """Buffers hold three batches; the last one is too small to be dealt."""
    lines = (corpus / "test.en").read_text("utf-8").splitlines()[:16]
    if where == "constraints":
        lines = [f"{line}\tde" for line in lines]
    text = "".join(f"{line}\n" for line in lines)
    file = tmp_path / "source"
    file.write_text(text, "utf-8")
    command = (
        "fairseq-interactive", str(corpus / "data"),
        "--path", str(corpus / "model/checkpoint_last.pt"), "--beam", "4", "--buffer-size", "5",
        "--batch-size", "2", "--cpu", "--max-len-b", "30", "--no-repeat-ngram-size", "3",
        *{"typed": [], "file": ["--input", str(file)], "constraints": ["--constraints"]}[where],
    )  # fmt: skip
    ours = run(*command, "--generate-workers", "2", text=text, FASTGEN_STRICT="1")
    stock = run(*command, text=text, **STOCK)
    assert_alike(ours.stdout, stock.stdout)
    assert sum(line.startswith("S-") for line in ours.stdout.splitlines()) == 16


_PRINTS_STATUS = """
import sys, fastgen
from fastgen.patches.fairseq.commands import workers
from fairseq_cli.{command} import cli_main

workers.usable_cores = lambda: 2
results = workers.Workers.results

def noted(self, *given, **how):
    print("processes:", self.number)
    return results(self, *given, **how)

workers.Workers.results = noted
cli_main()
status = fastgen.status()
print("left off:", status["fairseq.{command}_command"].left_off, status["fairseq.generate"].hits)
"""


@pytest.mark.parametrize("command", ["generate", "interactive"])
@pytest.mark.slow
def test_by_itself_where_there_are_threads(corpus: Path, command: str) -> None:
    """25 batches for two threads: counts are shown and no feature is left off.

    Sampling is not dealt to processes.
    """
    script = corpus / f"{command}.py"
    script.write_text(_PRINTS_STATUS.format(command=command))
    arguments = (
        str(script), str(corpus / "data"), "--path", str(corpus / "model/checkpoint_last.pt"),
        "--cpu", "--max-len-b", "10", "--beam", "2", "--batch-size", "2",
        *(["--buffer-size", "40"] if command == "interactive" else []),
    )  # fmt: skip
    text = (corpus / "test.en").read_text("utf-8")
    lines = len(text.splitlines())
    found = run(*arguments, text=text, afresh=True, OMP_NUM_THREADS="2", FASTGEN_STRICT="1").stdout
    dealt = found.count("processes: 2")
    # A report per buffer (interactive) or for all batches; interactive ends with a second one.
    assert dealt == (2 if command == "interactive" else 1)
    assert f"left off: {{}} {-(-lines // 2)}" in found
    found = run(
        *arguments, "--sampling", "--nbest", "2", text=text, afresh=True, OMP_NUM_THREADS="2"
    ).stdout
    assert "processes:" not in found
    assert "one process translates: Sampling may depend on the batches before" in found


@pytest.mark.slow
def test_what_is_asked_for_and_cannot_be(corpus: Path) -> None:
    command = (
        "fairseq-generate", str(corpus / "data"),
        "--path", str(corpus / "model/checkpoint_last.pt"), *GENERATE,
    )  # fmt: skip
    said = run(
        *command, "--generate-workers", "2", "--sampling", "--beam", "2", "--nbest", "2", status=1
    ).stderr
    assert "--generate-workers 2 is not possible: Sampling may depend on the batches before" in said
    assert "must be at least 1, not 0" in run(*command, "--generate-workers", "0", status=2).stderr
