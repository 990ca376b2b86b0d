"""Check cancellation: cancelled sentences leave a running batch, the others stay unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastgen
from fastgen import config
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo
from tests.support.recorder import Graphs
from tests.support.together import start_soon

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 24},
    "beams": {
        "max_new_tokens": 24,
        "num_beams": 4,
        "num_return_sequences": 2,
        "no_repeat_ngram_size": 3,
        "pad_token_id": zoo.EOS,  # which n-grams of a text cannot hold
    },
    "early": {
        "max_new_tokens": 24,
        "num_beams": 3,
        "early_stopping": True,
        "eos_token_id": [2, *range(20, 30)],
    },
}
SENTENCES = [[40 + i, *range(50, 50 + i % 4)] for i in range(8)]
NOBODY_S = (1, 2, 6)


class Clients:
    """A `wanted` callback that cancels sentences of `leaving` after `after` polls each."""

    def __init__(self, leaving: tuple[int, ...] = NOBODY_S, after: int = 3) -> None:
        self.leaving, self.after, self.asked = leaving, after, dict[int, int]()

    def __call__(self, sentence: int) -> bool:
        self.asked[sentence] = self.asked.get(sentence, 0) + 1
        return sentence not in self.leaving or self.asked[sentence] <= self.after


def _streamed(
    model: Any, options: dict[str, Any], wanted: Callable[[int], bool] | None = None, **more: Any
) -> Any:
    return list(
        fastgen.generate_stream(model, SENTENCES, scores=True, wanted=wanted, **options, **more)
    )


def _rows() -> list[int]:
    """Return the number of rows in each step of the last call."""
    call = last_call()
    assert call is not None
    return [rows for rows, _ in call.steps]


def _assert_others_equal(
    found: list[Any], expected: list[Any], leaving: tuple[int, ...] = NOBODY_S
) -> None:
    assert len(found) == len(expected)
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if i not in leaving:
            assert mine.sequences.tolist() == theirs.sequences.tolist()
            torch.testing.assert_close(
                mine.scores.double(), theirs.scores.double(), atol=1e-9, rtol=0
            )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_the_others_are_as_they_were_over_fewer_rows(family: str, method: str) -> None:
    model, options = zoo.build(family), METHODS[method]
    with fastgen.disabled():
        # unpatched transformers generates all of them
        expected = _streamed(model, options, Clients())
    _assert_others_equal(_streamed(model, options), expected, ())
    before = _rows()
    clients = Clients()
    _assert_others_equal(_streamed(model, options, clients), expected)
    after = _rows()
    rows = options.get("num_beams", 1)
    assert after[:3] == before[:3]
    # A sentence may wait until enough of them can leave together.
    assert after[3] <= before[3] - rows * len(NOBODY_S) + rows
    assert sum(after) < sum(before)
    assert clients.asked[1] == clients.after + 1  # not polled any more once it has left


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_nobody_ends_at_once(method: str) -> None:
    everybody = tuple(range(len(SENTENCES)))
    model = zoo.build("bart")
    for after, steps in ((0, 0), (4, 4)):
        found = _streamed(model, METHODS[method], Clients(everybody, after))
        assert [len(one.sequences) for one in found] == [
            METHODS[method].get("num_return_sequences", 1)
        ] * 8
        assert len(_rows()) == steps


def test_the_last_ones_are_not_waited_for() -> None:
    """When all other sentences have finished, cancelled ones alone end the call."""
    model, options = (
        zoo.build("bart"),
        METHODS["greedy"] | {"eos_token_id": [2, *range(20, 50)], "pad_token_id": 0},
    )
    lengths = [one.sequences.shape[1] for one in _streamed(model, options)]
    longest = tuple(i for i, length in enumerate(lengths) if length == max(lengths))
    second = max(length for length in lengths if length < max(lengths))
    _streamed(model, options, Clients(longest, 0))
    # The start token is given, and the prefill yields the first token.
    assert len(_rows()) == second - 2


@pytest.mark.parametrize("method", METHODS)
def test_batches_that_refill(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentence numbers are those of the stream; the next batch takes the freed rows."""
    model, options, together = zoo.build("bart"), METHODS[method], start_soon(monkeypatch)
    expected = _streamed(model, options)
    clients = Clients((2, 4, 7), 2)
    _assert_others_equal(
        _streamed(model, options, clients, max_tokens=8), expected, clients.leaving
    )
    assert max(together) > 1
    assert set(clients.asked) == set(range(8))


@pytest.mark.parametrize("beams", [1, 3])
def test_where_memory_runs_out_numbers_go_with_the_halves(
    beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options, step = (
        zoo.build("bart"),
        {"max_new_tokens": 12, "num_beams": beams},
        DecoderStep.__call__,
    )
    expected = _streamed(model, options)

    def short(self: DecoderStep, ids: torch.Tensor, context: Any) -> torch.Tensor:
        if len(ids) > 4 * beams:
            raise torch.OutOfMemoryError("out of memory")
        return step(self, ids, context)

    monkeypatch.setattr(DecoderStep, "__call__", short)
    clients = Clients((5, 6), 3)
    _assert_others_equal(_streamed(model, options, clients), expected, clients.leaving)
    assert clients.asked[5] < clients.asked[4]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 2])
def test_captured_choices(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancellation reaches the device one step late, which does not change the remaining text."""
    model, options = zoo.build("bart", torch.float32), {"num_beams": beams, "max_new_tokens": 13}
    expected = list(fastgen.generate_stream(model, SENTENCES[:2], **options))
    monkeypatch.setenv("FASTGEN_OPS", "triton")
    config.reload()
    try:
        graphs = Graphs(monkeypatch)
        found = list(
            fastgen.generate_stream(model, SENTENCES[:2], **options, wanted=Clients((0,), 9))
        )
        assert graphs.replayed["_select_tokens"] > 0
        assert found[1].tolist() == expected[1].tolist()
        assert _rows()[-1] == beams
    finally:
        monkeypatch.undo()
        config.reload()


def test_samples_stay_until_nobody_waits() -> None:
    """Random draws depend on the whole batch."""
    model, options = (
        zoo.build("bart"),
        {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2},
    )
    torch.manual_seed(0)
    expected = _streamed(model, options)
    torch.manual_seed(0)
    clients = Clients((2, 3), 2)
    _assert_others_equal(_streamed(model, options, clients), expected, ())
    _streamed(model, options, Clients(tuple(range(8)), 2 * 2))
    assert len(_rows()) == 2


def test_nobody_is_asked_where_all_run_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clients = zoo.build("bart"), Clients()
    expected = _streamed(model, METHODS["beams"])
    monkeypatch.setenv("FASTGEN_PARITY", "1")
    config.reload()
    try:
        found = _streamed(model, METHODS["beams"], clients)
    finally:
        monkeypatch.undo()
        config.reload()
    _assert_others_equal(found, expected, ())
    assert clients.asked == {}
