"""Compare a call of `generate` with fastgen and without, field by field."""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

import fastgen
from fastgen.patches.transformers.compat import CACHE


@dataclass
class Result:
    """The outcome of a call: its value or exception, and the random state that it left."""

    value: Any
    error: BaseException | None
    random_state: torch.Tensor


def call(model: Any, kwargs: dict[str, Any], seed: int) -> Result:
    """Run `model.generate(**kwargs)`; an exception becomes part of the result."""
    torch.manual_seed(seed)
    value, error = None, None
    try:
        value = model.generate(**kwargs)
    except Exception as raised:
        error = raised.with_traceback(None)  # without its frames, which hold the model's weights
        error.__context__ = error.__cause__ = None
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return Result(value, error, torch.cat(states))


def fallbacks() -> Counter[str]:
    """Return the fallback reasons counted so far, over all patches."""
    return sum((Counter(row.fallbacks) for row in fastgen.status().rows), Counter())


def left_off() -> Counter[str]:
    """Return the disabled features that hits report, by reason, without those of encoders."""
    rows = [
        row
        for row in fastgen.status().rows
        if not row.name.startswith(("transformers.source", "transformers.enc"))
    ]
    return sum((Counter(row.left_off) for row in rows), Counter())


def counts() -> dict[str, Any]:
    """Return everything that `status` counts.

    Memory is excluded, as other models may release it at any time.
    """
    of_memory = "memory", "memory_by_model", "not_packed"
    return {
        name: value for name, value in fastgen.status().to_dict().items() if name not in of_memory
    }


def notes(explanation: Any) -> list[str]:
    """Return the notes of `fastgen.explain`, except that transformers is newer than tested."""
    return [note for note in explanation.notes if not note.startswith("newer than ")]


def hits() -> int:
    return sum(
        row.hits
        for row in fastgen.status().rows
        if row.name in ("transformers.beam_search", "transformers.sample")
    )


def assert_same(
    model: Any, kwargs: dict[str, Any], seed: int = 0, tolerance: float = 1e-9
) -> Result:
    """Assert that fastgen does not change a call, and return its result.

    Stateful arguments are copied for each run. The comparison covers the exception's type, the
    output's type and fields, every token, and the shape, dtype and value of every number. Values
    agree within `tolerance`, or to the last bit of fp32, to which scores of fp64 models are
    rounded. A user-provided cache has to be left in the same state.
    """
    mine, theirs = copy.deepcopy(kwargs), copy.deepcopy(kwargs)
    ours = call(model, mine, seed)
    with fastgen.disabled():
        stock = call(model, theirs, seed)
    if stock.error is not None or ours.error is not None:
        assert type(ours.error) is type(stock.error), f"{ours.error!r} instead of {stock.error!r}"
        return ours
    assert type(ours.value) is type(stock.value)
    same(ours.value, stock.value, "output", tolerance)
    same(mine.get(CACHE), theirs.get(CACHE), "the given cache", tolerance)
    if kwargs.get("do_sample"):
        assert torch.equal(ours.random_state, stock.random_state), (
            "the random number generator was left elsewhere"
        )
    return ours


def assert_same_but_for_ties(model: Any, kwargs: dict[str, Any]) -> None:
    """Assert the same for all beams of a sentence in fp32, up to near ties.

    Hypotheses whose scores differ by less than 1e-4 may swap places. Where the last ones have equal
    scores, the last one may be a different hypothesis.
    """
    ours = model.generate(**kwargs)
    with fastgen.disabled():
        stock = model.generate(**kwargs | {"return_dict_in_generate": True, "output_scores": True})
    assert ours.shape == stock.sequences.shape
    beams, scores = kwargs["num_beams"], stock.sequences_scores.tolist()
    for row, (found, wanted) in enumerate(
        zip(ours.tolist(), stock.sequences.tolist(), strict=True)
    ):
        of_sentence = range(row - row % beams, row - row % beams + beams)
        alike = [i for i in of_sentence if abs(scores[i] - scores[row]) < 1e-4]
        among_them = found in [stock.sequences[i].tolist() for i in alike]
        assert found == wanted or among_them or (len(alike) > 1 and alike[-1] == of_sentence[-1]), (
            scores[row]
        )


def same(ours: Any, stock: Any, where: str = "output", tolerance: float = 1e-9) -> None:
    """Assert that two values are equal: `generate` outputs, caches, tuples, tensors or others."""
    if isinstance(stock, ModelOutput):
        assert list(ours.keys()) == list(stock.keys()), where
        for name in stock:
            same(ours[name], stock[name], f"{where}.{name}", tolerance)
    elif isinstance(stock, torch.Tensor):
        assert isinstance(ours, torch.Tensor), where
        assert ours.shape == stock.shape, (
            f"{where}: shape {tuple(ours.shape)} instead of {tuple(stock.shape)}"
        )
        assert ours.dtype == stock.dtype, f"{where}: {ours.dtype} instead of {stock.dtype}"
        if stock.is_floating_point():
            relative = max(
                tolerance, torch.finfo(torch.float32).eps if stock.dtype == torch.float32 else 0.0
            )
            torch.testing.assert_close(
                ours,
                stock,
                atol=tolerance,
                rtol=relative,
                equal_nan=True,
                msg=lambda m: f"{where}: {m}",
            )
        else:
            assert torch.equal(ours, stock), f"{where}: {ours.tolist()} instead of {stock.tolist()}"
    elif isinstance(stock, tuple | list):
        assert len(ours) == len(stock), f"{where}: {len(ours)} entries instead of {len(stock)}"
        for index, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
            same(mine, theirs, f"{where}[{index}]", tolerance)
    elif isinstance(stock, dict):
        assert ours.keys() == stock.keys(), where
        for name in stock:
            same(ours[name], stock[name], f"{where}[{name!r}]", tolerance)
    elif hasattr(stock, "layers") or hasattr(stock, "self_attention_cache"):
        assert type(ours) is type(stock), where
        same(_layers(ours), _layers(stock), where, tolerance)
    else:
        assert ours == stock, where


def _layers(cache: Any) -> tuple[Any, ...]:
    if hasattr(cache, "self_attention_cache"):
        return _layers(cache.self_attention_cache) + _layers(cache.cross_attention_cache)
    return tuple(
        part
        for layer in cache.layers
        for part in (layer.keys, layer.values, int(layer.get_seq_length()))
    )
