"""Compare continuous batching in fairseq with stock: hypotheses and their order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgen
from fastgen import config
from fastgen.decoding.batching import continuous_batching
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.joint_step import JointStepInputs
from fastgen.patches.engine.out_of_memory import NO_MEMORY

pytest.importorskip("fairseq")
from fairseq import search, utils
from fairseq.dataclass import FairseqDataclass
from fairseq.logging.meters import StopwatchMeter
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.tasks import FairseqTask

from fastgen.patches.fairseq.generator.refill import Translated, Translations
from tests.patches.fairseq.test_fairseq_split import run_out
from tests.support import fairseq_zoo as zoo
from tests.support.recorder import Graphs
from tests.support.together import start_soon

EMPTY = "batches do not refill: "


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fairseq's softmax compute in fp64, which it would otherwise round to fp32."""
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: torch.softmax(x, dim))


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of batches in each joint step; batches start once a few sentences left."""
    return start_soon(monkeypatch)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


def _batches(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return batches of different sizes and lengths, including one without sentences."""
    lengths = torch.randint(4, 12, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    made: list[dict[str, Any]] = [
        zoo.batch(4 + i % 5, n, ("left", "right")[i % 2], seed=seed + i)
        for i, n in enumerate(lengths)
    ]
    return [*made[:2], {}, *made[2:]]


def _generator(models: list[Any], options: dict[str, Any]) -> Any:
    options = {"beam_size": 3, "max_len_b": 30} | options
    return options.pop("generator", SequenceGenerator)(models, zoo.dictionary(), **options)


def _translations(
    models: list[Any], batches: Any, options: dict[str, Any], task: Any = None, prefix: int = 0
) -> Translations:
    task = task or FairseqTask(FairseqDataclass())
    return Translations(
        task, models, _generator(models, options), batches, StopwatchMeter(), prefix, False
    )


def _stock(models: list[Any], batches: list[Any], options: dict[str, Any]) -> list[Any]:
    """Return fairseq's output for each batch by itself."""
    generator = _generator(models, options)
    with fastgen.disabled():
        return [generator.generate(models, batch) if batch else None for batch in batches]


def _assert_same(
    found: list[Translated], batches: list[Any], stock: list[Any], tolerance: float = 1e-5
) -> None:
    """Compare results; fairseq keeps scores in fp32, whatever the dtype of the model."""
    assert [translated.sample is batch for translated, batch in zip(found, batches, strict=True)]
    for translated, expected in zip(found, stock, strict=True):
        if expected is None:
            assert translated.found is None
            continue
        assert translated.found is not None
        assert translated.tokens == sum(len(hypotheses[0]["tokens"]) for hypotheses in expected)
        for ours, theirs in zip(translated.found, expected, strict=True):
            assert [h["tokens"].tolist() for h in ours] == [h["tokens"].tolist() for h in theirs]
            for one, other in zip(ours, theirs, strict=True):
                assert one.keys() == other.keys()
                for name in other:
                    ours_of, theirs_of = _numbers(one[name]), _numbers(other[name])
                    torch.testing.assert_close(ours_of, theirs_of, atol=tolerance, rtol=tolerance)


def _numbers(value: Any) -> Tensor:
    """Return a tensor; an alignment may hold numbers as text."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor([[float(number) for number in row] for row in value], dtype=torch.float64)


OPTIONS: dict[str, dict[str, Any]] = {
    "one_beam": {"beam_size": 1},
    "beams": {"beam_size": 4},
    "ngrams": {"no_repeat_ngram_size": 2, "len_penalty": 0.6},
    "min_len": {"min_len": 6, "max_len_a": 1.2, "max_len_b": 4},
    "unk_penalty": {"unk_penalty": 1.5, "temperature": 0.8, "normalize_scores": False},
    "match_source_len": {"match_source_len": True},
    "hard": {"generator": SequenceGeneratorWithAlignment, "print_alignment": "hard"},
    "soft": {"generator": SequenceGeneratorWithAlignment, "print_alignment": "soft"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("name", "seed"), [("transformer", 0), ("prenorm", 1), ("bart", 1)])
def test_each_batch_as_by_itself(name: str, seed: int, options: str, together: list[int]) -> None:
    models, batches, before = [zoo.build(name, seed=seed)], _batches(7), zoo.hits()
    stock = _stock(models, batches, OPTIONS[options])
    for order in (
        range(len(batches)),
        torch.randperm(8, generator=torch.Generator().manual_seed(1)).tolist(),
    ):
        moved = [batches[i] for i in order]
        translations = _translations(models, moved, OPTIONS[options])
        _assert_same(list(translations), moved, [stock[i] for i in order])
        assert list(translations.left_off) == []
    assert max(together) > 1
    assert zoo.hits() == before + 2 * len([batch for batch in batches if batch])


@pytest.mark.parametrize(
    "members", [["transformer", "prenorm"], ["bart", "transformer", "transformer"]]
)
@pytest.mark.parametrize("beside", [False, True])
def test_ensemble(members: list[str], beside: bool, together: list[int]) -> None:
    """The ensemble may be combined with a language model."""
    models = [zoo.build(name, seed=seed) for seed, name in enumerate(members)]
    options = {"no_repeat_ngram_size": 2} | (
        {"lm_model": zoo.build("lm"), "lm_weight": 0.3} if beside else {}
    )
    batches = _batches(7)
    _assert_same(
        list(_translations(models, batches, options)), batches, _stock(models, batches, options)
    )
    assert max(together) > 1


@pytest.mark.parametrize("options", ["beams", "ngrams", "unk_penalty", "soft"])
@pytest.mark.parametrize("members", [["transformer"], ["bart", "transformer"]])
def test_captured(members: list[str], options: str, together: list[int], graphs: Graphs) -> None:
    """As on a GPU, a joint step is captured until a batch joins, leaves or moves."""
    models, batches = [zoo.build(name, seed=seed) for seed, name in enumerate(members)], _batches(7)
    found = list(_translations(models, batches, OPTIONS[options]))
    _assert_same(found, batches, _stock(models, batches, OPTIONS[options]))
    assert max(together) > 1
    assert graphs.texts[2] + graphs.texts[3] >= 1


def test_a_batch_that_is_done_first_waits_for_its_turn(together: list[int]) -> None:
    """The second batch runs to its longest text, while four later ones finish earlier."""
    models, options, batches = [zoo.build("bart", seed=3)], {"beam_size": 1}, _batches(7)
    read = list[int]()

    def reading() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            read.append(number)
            yield batch

    seen = [
        (translated, len(read))
        for translated in _translations(models, _Sized(reading(), 8), options)
    ]
    _assert_same([translated for translated, _ in seen], batches, _stock(models, batches, options))
    assert [count for _, count in seen] == [1, 6, 6, 6, 6, 8, 8, 8]


class _Sized:
    def __init__(self, items: Iterator[Any], length: int) -> None:
        self.items, self.length = items, length

    def __iter__(self) -> Iterator[Any]:
        return self.items

    def __len__(self) -> int:
        return self.length


def test_not_where_batches_end_at_once(
    monkeypatch: pytest.MonkeyPatch, together: list[int]
) -> None:
    """The rule looks at finished work: here no sentence leaves before the others."""
    monkeypatch.setattr(continuous_batching, "OCCUPIED", 0.5)
    list(_translations([zoo.build("transformer")], _batches(5), {"min_len": 9, "max_len_b": 9}))
    assert together == []


class _Own(FairseqTask):
    def inference_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().inference_step(*args, **kwargs)


class _OwnGenerate(SequenceGenerator):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


REFUSED: dict[str, tuple[dict[str, Any], Any, int, str]] = {
    "task": ({}, _Own(FairseqDataclass()), 0, "_Own has its own inference_step"),
    "generator": ({"generator": _OwnGenerate}, None, 0, "_OwnGenerate has its own generate"),
    "search": (
        {"search_strategy": search.DiverseSiblingsSearch(zoo.dictionary(), 0.4)}, None, 0,
        "DiverseSiblingsSearch may look at all sentences of a batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, together: list[int]) -> None:
    options, task, prefix, reason = REFUSED[what]
    models, batches = [zoo.build("transformer")], _batches(4)
    translations = _translations(models, batches, options, task, prefix)
    _assert_same(list(translations), batches, _stock(models, batches, options))
    assert together == []
    assert list(translations.left_off) == [EMPTY + reason]


def test_prefixes_are_refused(together: list[int]) -> None:
    models = [zoo.build("transformer")]
    batches = [
        batch | {"target": torch.full((len(batch["id"]), 4), 7)} for batch in _batches(4) if batch
    ]
    translations = _translations(models, batches, {}, prefix=2)
    found = [translated.found for translated in translations]
    assert all(
        h["tokens"][:2].tolist() == [7, 7] for batch in found for hs in batch or [] for h in hs
    )
    assert together == []
    assert list(translations.left_off) == [EMPTY + "hypotheses begin with a prefix"]


@pytest.mark.parametrize(
    ("name", "step", "reason"),
    [
        ("transformer", "module", "decode steps are not made from the weights"),
        ("adaptive", "auto", "decode steps are not made from the weights"),
        ("lstm", "auto", "calls run on fairseq's own code"),
    ],
)
def test_batches_that_run_to_their_end(
    name: str, step: str, reason: str, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, batches = [zoo.build(name, torch.float32)], _batches(4)
    stock = _stock(models, batches, {})
    monkeypatch.setenv("FASTGEN_STEP", step)
    config.reload()
    try:
        translations = _translations(models, batches, {})
        _assert_same(list(translations), batches, stock, 1e-4)
    finally:
        monkeypatch.undo()
        config.reload()
    assert together == []
    assert list(translations.left_off) == [EMPTY + reason]


def _raising_in(stage: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let joint steps fail, or the start of a batch beside another."""
    from fastgen.patches.fairseq.generator import refill

    step, begin, joined = DecoderStep.__call__, refill.begin, [False]

    def stepped(self: Any, ids: Tensor, context: Any) -> Tensor:
        joined[0] = isinstance(context, JointStepInputs)
        if stage == "step" and joined[0]:
            raise error
        return step(self, ids, context)

    def beginning(*args: Any, **kwargs: Any) -> Any:
        if stage == "begin" and joined[0]:
            raise error
        return begin(*args, **kwargs)

    monkeypatch.setattr(DecoderStep, "__call__", stepped)
    monkeypatch.setattr(refill, "begin", beginning)


@pytest.mark.parametrize("stage", ["step", "begin"])
def test_out_of_memory(
    stage: str,
    together: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    models, batches = [zoo.build("transformer", seed=1)], _batches(6)
    stock = _stock(models, batches, {})
    _raising_in(stage, torch.OutOfMemoryError("no memory"), monkeypatch)
    translations = _translations(models, batches, {})
    _assert_same(list(translations), batches, stock)
    assert list(translations.left_off) == [EMPTY + NO_MEMORY]
    assert ("not enough memory" in caplog.text) == (stage == "step")


@pytest.mark.parametrize("stage", ["step", "encoder"])
def test_one_that_is_too_large_alone_goes_in_halves(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, batches = [zoo.build("transformer", seed=1)], _batches(4)
    stock = _stock(models, batches, {})
    list(_translations(models, batches, {}))  # the first step of a model runs both ways
    run_out(monkeypatch, stage, 3)
    translations = _translations(models, batches, {})
    _assert_same(list(translations), batches, stock)
    assert list(translations.left_off) == [EMPTY + NO_MEMORY]


@pytest.mark.parametrize("stage", ["step", "begin", "read"])
def test_other_errors_come_out_and_leave_nothing_behind(
    stage: str, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of a batch that starts beside others come in its turn, after earlier results."""
    models, batches = [zoo.build("transformer", torch.float32, seed=1)], _batches(6)
    stock = _stock(models, batches, {})

    def failing() -> Iterator[Any]:
        yield from batches[:5]
        raise RuntimeError("something else")

    found: list[Translated] = []
    with monkeypatch.context() as patch:
        if stage != "read":
            _raising_in(stage, RuntimeError("something else"), patch)
        translations = _translations(
            models, _Sized(failing(), 7) if stage == "read" else batches, {}
        )
        with pytest.raises(RuntimeError, match="something else"):
            found.extend(translations)
    if stage == "read":
        _assert_same(found, batches[:5], stock[:5], 1e-4)
    assert max(together) > 1
    assert not any("forward" in vars(module) for module in models[0].modules())
    fastgen.disable()  # raises while anything runs
    fastgen.enable()
    _assert_same(list(_translations(models, batches, {})), batches, stock, 1e-4)


def test_the_timer_runs_while_something_is_translated(together: list[int]) -> None:
    models, batches = [zoo.build("transformer", seed=1)], _batches(6)
    timer = _Noted()

    def reading() -> Iterator[Any]:
        for batch in batches:
            assert not timer.runs
            yield batch

    translations = _translations(models, _Sized(reading(), 7), {})
    translations.timer = timer
    tokens = 0
    for translated in translations:
        assert not timer.runs
        tokens += translated.tokens
    assert timer.n == tokens
    assert max(together) > 1


class _Noted(StopwatchMeter):
    runs = False

    def start(self) -> None:
        assert not self.runs
        self.runs = True
        super().start()

    def stop(self, n: int = 1, prehook: Any = None) -> None:
        assert self.runs
        self.runs = False
        super().stop(n, prehook)
