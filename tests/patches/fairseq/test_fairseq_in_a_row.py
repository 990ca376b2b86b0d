"""Check native multistep decoding of fairseq's search, token selection included.

It must equal single steps and fairseq's own output.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgen
from fastgen import config
from fastgen.decoding import loop
from fastgen.models.layers import packed_weights
from fastgen.ops import native
from fastgen.ops.counts import calls

pytest.importorskip("fairseq")
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.patches.fairseq import test_fairseq_refill as refill
from tests.patches.fairseq.test_fairseq import OPTIONS
from tests.support import fairseq_zoo as zoo
from tests.support.together import start_soon

WITHOUT = {
    "temperature": "all scores are changed",
    "one_token": "there is no second step",
    **{name: "a search of fairseq's own" for name in OPTIONS if "search_strategy" in OPTIONS[name]},
}
"""Options under which Python runs each step by itself, with the reason."""


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use heads of 16 dimensions, the least that C attention supports.

    Weights are packed at first use.
    """
    for part in ("encoder", "decoder"):
        for size, value in {"embed_dim": 32, "ffn_embed_dim": 48}.items():
            monkeypatch.setitem(zoo._SIZES, f"{part}_{size}", value)
    monkeypatch.setattr(packed_weights.Packed, "uses_to_pack", 1)
    calls.clear()
    yield
    packed_weights.release()


def _build(name: str, seed: int = 0) -> Any:
    return zoo.build.__wrapped__(name, torch.float32, seed)


def _same(model: Any, sample: dict[str, Any], options: dict[str, Any]) -> Any:
    """Compare two calls with fairseq; the first one runs the equivalence check of the step."""
    for _ in range(2):
        calls.clear()
        found = zoo.assert_same([model], sample, options, 1e-4)
    return found


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("option", OPTIONS)
def test_option(option: str, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if option.startswith("diverse") and beams == 1:
        pytest.skip("groups of beams")
    options = {"beam_size": beams, "max_len_b": 14} | OPTIONS[option]
    model = _build("transformer")
    for padding in ("none", "left"):
        _same(model, zoo.batch(5, 8, padding), options)
        assert (calls["search", "native"] > 0) == (option not in WITHOUT)


@pytest.mark.parametrize("beams", [1, 4, 5])
@pytest.mark.parametrize("name", ["transformer", "prenorm", "bart", "lm", "lm_learned"])
def test_model(variant: str, name: str, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Include compaction and leaving sentences; compare with and without C's token selection."""
    options = {
        "beam_size": beams,
        "max_len_a": 0.0,
        "max_len_b": 50,
        "min_len": 20,
        "no_repeat_ngram_size": 3,
    }
    for seed in (0, 1):
        model, sample = (
            _build(name, seed),
            zoo.batch(17, 9, "none" if name.startswith("lm") else "left", seed),
        )
        found = _same(model, sample, options)
        in_a_row = calls["search", "native"]
        assert in_a_row > 0
        with monkeypatch.context() as alone:
            alone.setattr(loop, "BACKENDS", (loop.Eager,))
            expected = zoo.call([model], sample, options)[0]
        assert calls["search", "native"] == in_a_row
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one["tokens"], other["tokens"])
                for field in ("score", "attention", "positional_scores"):
                    torch.testing.assert_close(one[field], other[field], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["transformer", "bart"])
def test_batches_that_refill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that runs alone uses multistep jobs, before and after steps shared with others."""
    models, batches, together = [_build(name)], refill._batches(9), start_soon(monkeypatch, 0.5)
    options = {"beam_size": 4, "no_repeat_ngram_size": 3}
    stock = refill._stock(models, batches, options)
    for _ in range(2):
        calls.clear(), together.clear()
        refill._assert_same(
            list(refill._translations(models, batches, options)), batches, stock, 1e-4
        )
    assert calls["search", "native"] > 0
    assert max(together) > 1


def test_equal_values_are_left_to_torch() -> None:
    """Tokens with equal embeddings tie in every step; torch decides which one ranks first."""
    model = _build("transformer")
    with torch.no_grad():
        model.decoder.output_projection.weight[20:] = model.decoder.output_projection.weight[4:16]
    _same(model, zoo.batch(5, 8), {"beam_size": 3, "max_len_b": 14})
    assert calls["search", "native"] > 0


def test_values_that_are_no_numbers() -> None:
    model = _build("transformer")
    with torch.no_grad():
        model.decoder.output_projection.weight[20, 3] = torch.nan
    _same(model, zoo.batch(5, 8), {"beam_size": 3, "max_len_b": 14})


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_MEMORY from C becomes torch's OutOfMemoryError.

    The batch is halved, until a single sentence does not fit either.
    """
    from fastgen.ops.native import search as c

    model, options = _build("transformer"), {"beam_size": 3, "max_len_b": 14}
    _same(model, zoo.batch(5, 8), options)
    monkeypatch.setattr(c, "search_first_finished", lambda *_: c.NO_MEMORY)
    with pytest.raises(torch.OutOfMemoryError, match="decode steps of 3 rows in C"):
        zoo.call([model], zoo.batch(5, 8), options)


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda *_: None)
    _same(_build("transformer"), zoo.batch(5, 8), {"beam_size": 3, "max_len_b": 14})
    assert calls["search", "native"] == 0


@pytest.mark.parametrize("name", ["transformer", "prenorm", "scaled", "lm"])
def test_int8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are rounded as they are now, and those of an encoder whatever its decoder does."""
    monkeypatch.setenv("FASTGEN_PRECISION", "int8")
    config.reload()
    model, sample, refused_before = _build(name), zoo.batch(3, 9), _refused_int8()

    def scores(model: Any) -> Tensor:
        found, _ = zoo.call([model], sample, {"beam_size": 1, "max_len_b": 12})
        return torch.stack([sentence[0]["positional_scores"][:2] for sentence in found])

    for factor in (1.0, 1.1):
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        fresh = copy.deepcopy(model)
        for one in (model, fresh, model, fresh):  # the first calls run the equivalence checks
            calls.clear()
            scores(one)
        found = scores(model)
        assert torch.equal(found, scores(fresh))
        with fastgen.disabled():
            wanted = scores(model)
        assert 0.0 < (found - wanted)[:, 0 if name != "lm" else 1].abs().max() < 0.3
    assert fastgen.status().memory["int8 weights"] > 0
    assert (calls["decoder_step", "native"] > 0) == (name != "scaled")
    assert (_refused_int8() > refused_before) == (name == "scaled")
    monkeypatch.undo()
    config.reload()


def _refused_int8() -> int:
    """Return the number of calls whose decode steps did not run in int8 as requested."""
    rows = [row for row in fastgen.status().rows if row.name == "fairseq.generate"]
    notes = [note for row in rows for note in row.left_off.items()]
    return sum(calls for note, calls in notes if note.startswith("decode steps do not run in int8"))
