"""Parity mode, ``FASTGEN_PARITY=1``: runs each call of `generate` with and without fastgen.

The outputs are compared, and the toolkit's own output is returned.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastgen.config import settings
from fastgen.decoding.search.near_ties import NEAR_TIE, closest_decision, end_tokens, prompt_length
from fastgen.patches.engine import engine
from fastgen.patches.engine.notices import is_new
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.compat import CACHE_ARGUMENTS
from fastgen.patches.transformers.generate import legacy_search
from fastgen.patches.transformers.generate.logits_processors import batchwise_processor
from fastgen.patches.transformers.generate.resolve_setting import Settings
from fastgen.patches.transformers.generate.stopping_criteria import unknown_criterion
from fastgen.patches.transformers.introspection.noise import HALVES, noise


class ParityError(RuntimeError):
    """Raised with ``FASTGEN_STRICT=1`` when the outputs differ by more than a near tie."""


class ParityWarning(UserWarning):
    """Warning that the outputs differ, shown once for each divergence."""


@dataclass(frozen=True)
class Divergence:
    """A difference between two outputs.

    Attributes:
        text: Description of the first difference.
        outcome: Name under which the call is counted. Rounding is the cause of a "near tie" and of
            a difference "within noise".
    """

    text: str
    outcome: str = "different"


def wanted() -> bool:
    """Return whether a call that starts now runs both ways.

    Only the outermost call of a context does, and only outside of canaries.
    """
    return settings().parity and engine.current_plan() is None and not engine.in_canary()


def both_ways(
    accelerated: Callable[..., Any],
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``accelerated(original, model, ...)`` and ``original(model, ...)``; report what differs.

    Both start from the same state of the random number generators. Afterwards that state is as the
    original leaves it. A call that cannot be repeated runs only once, accelerated.

    Args:
        accelerated: fastgen's `generate`, which takes the original as its first argument.
        original: The toolkit's `generate`.
        model: The model.
        args: Positional arguments of `generate`.
        kwargs: Keyword arguments of `generate`.

    Returns:
        The output of the original.

    Raises:
        ParityError: The outputs differ and ``FASTGEN_STRICT=1`` is set.
        Exception: Whatever the original raises; with ``FASTGEN_STRICT=1``, also a FallbackError.
    """
    call = _by_name(original, model, *args, **kwargs)
    if (reason := _reason_not_to_repeat(model, call)) is not None:
        engine.compared(f"run once: {reason}")
        return accelerated(original, model, **call)
    start = _random_states(model)
    with engine.running("parity"):
        ours = _attempt(lambda: accelerated(original, model, **_copied(call)))
    _set_random_states(model, start)
    with engine.disabled():
        stock = _attempt(lambda: original(model, **_copied(call)))
    if not _comparable(ours, stock):
        engine.compared(f"not compared: a {type(stock.output).__name__} is returned")
        return stock.result()
    divergence = _compare(model, ours, stock)
    if isinstance(divergence, _Part):
        with _restored(model):
            _set_random_states(model, start)
            with engine.disabled():
                divergence = _described(model, original, call, divergence)
            if model.dtype in HALVES:
                _set_random_states(model, start)
                divergence = _judged_by_noise(model, accelerated, original, call, divergence)
    _report(model, divergence, ours)
    return stock.result()


@dataclass(frozen=True)
class _Outcome:
    """The output of a call, or the exception it raised."""

    output: Any
    error: Exception | None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.output


@dataclass(frozen=True)
class _Part:
    """The first difference in tokens.

    Attributes:
        row: Output row.
        place: Position in the row.
        stock: The toolkit's token; None beyond its end.
        ours: fastgen's token; None beyond its end.
        wanted: fastgen's token ids of the whole row.
    """

    row: int
    place: int
    stock: int | None
    ours: int | None
    wanted: list[int]


def _attempt(run: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(run(), None)
    except engine.FallbackError:
        raise
    except Exception as error:
        return _Outcome(None, error)


def _by_name(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, without the model.

    Raises:
        TypeError: The function does not take these arguments.
    """
    bound = inspect.signature(function).bind(model, *args, **kwargs)
    call = dict(list(bound.arguments.items())[1:])
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            call |= call.pop(name, {})
    return call


def _copied(call: dict[str, Any]) -> dict[str, Any]:
    """Copy dict arguments, because `generate` expands the encoder outputs in place."""
    return {
        name: copy.copy(value) if issubclass(type(value), dict) else value
        for name, value in call.items()
    }


def _reason_not_to_repeat(model: Any, call: dict[str, Any]) -> str | None:
    if settings().precision == "int8" and model.device.type == "cpu":
        return "FASTGEN_PRECISION=int8 changes the output"
    if call.get("streamer") is not None:
        return "a streamer is set"
    for name in (*sorted(CACHE_ARGUMENTS), "assistant_model", "custom_generate"):
        if call.get(name) is not None:
            return f"{name} is given"
    stateful = batchwise_processor(call.get("logits_processor") or ()) or unknown_criterion(
        call.get("stopping_criteria") or ()
    )
    if stateful is not None:
        return f"{stateful} may keep a state"
    if (method := legacy_search.method_of(Settings(model, call))) is not None:
        return f"transformers has no {method}"
    configs = (call.get("generation_config") or model.generation_config, model.generation_config)
    if any(
        limit is not None
        for limit in (call.get("max_time"), *(getattr(c, "max_time", None) for c in configs))
    ):
        return "max_time ends it by the clock"
    return None


def _random_states(model: Any) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if model.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(model.device))
    return states


def _set_random_states(model: Any, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, model.device)


@contextmanager
def _restored(model: Any) -> Generator[None]:
    """Restore the state of the random number generators on exit."""
    states = _random_states(model)
    try:
        yield
    finally:
        _set_random_states(model, states)


def _comparable(ours: _Outcome, stock: _Outcome) -> bool:
    """Return whether there are tokens or an exception to compare."""
    return any(
        outcome.error is not None
        or isinstance(outcome.output, Tensor)
        or hasattr(outcome.output, "sequences")
        for outcome in (ours, stock)
    )


def _compare(model: Any, ours: _Outcome, stock: _Outcome) -> Divergence | _Part | None:
    if ours.error is not None or stock.error is not None:
        raised = [type(outcome.error).__name__ for outcome in (ours, stock)]
        same = raised[0] == raised[1]
        return (
            None
            if same
            else Divergence(f"fastgen raised {ours.error!r}, transformers {stock.error!r}")
        )
    if type(ours.output) is not type(stock.output):
        kinds = [type(outcome.output).__name__ for outcome in (ours, stock)]
        return Divergence(f"fastgen returned {kinds[0]}, transformers {kinds[1]}")
    if isinstance(stock.output, Tensor):
        return _first_difference(ours.output, stock.output)
    part = _first_difference(ours.output.sequences, stock.output.sequences)
    return part or _scores_apart(model, ours.output, stock.output)


def _first_difference(ours: Any, stock: Any) -> _Part | Divergence | None:
    if torch.equal(ours, stock):
        return None
    if ours.shape[0] != stock.shape[0]:
        return Divergence(
            f"fastgen returned {ours.shape[0]} sequences, transformers {stock.shape[0]}"
        )
    rows: list[tuple[list[int], list[int]]] = list(zip(ours.tolist(), stock.tolist(), strict=True))
    for row, (our_tokens, stock_tokens) in enumerate(rows):
        for place in range(max(len(our_tokens), len(stock_tokens))):
            a, b = (
                tokens[place] if place < len(tokens) else None
                for tokens in (our_tokens, stock_tokens)
            )
            if a != b:
                return _Part(row, place, b, a, our_tokens)
    raise AssertionError("unequal tensors of equal entries")


def _scores_apart(model: Any, ours: Any, stock: Any) -> Divergence | None:
    """Return the first difference in scores, or None.

    In low precision, beams can swap places although the tokens are equal. Per-step scores of a beam
    search are therefore compared in float64 only.
    """
    tolerance = 1e-9 if model.dtype == torch.float64 else NEAR_TIE.get(model.dtype, 1e-4)
    per_step = (
        ("scores", "logits") if model.dtype == torch.float64 or "beam_indices" not in stock else ()
    )
    for name in ("sequences_scores", *per_step):
        pairs = [output.get(name) for output in (ours, stock)]
        our_values, stock_values = (
            [value] if isinstance(value, Tensor) else list(value or ()) for value in pairs
        )
        if len(our_values) != len(stock_values):
            return Divergence(
                f"fastgen returned {len(our_values)} steps of {name}, "
                f"transformers {len(stock_values)}"
            )
        for step, (a, b) in enumerate(zip(our_values, stock_values, strict=True)):
            if a.shape != b.shape:
                return Divergence(
                    f"{name}: shape {tuple(a.shape)} from fastgen, "
                    f"{tuple(b.shape)} from transformers"
                )
            if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                gap = float((a.double() - b.double()).nan_to_num(0.0, math.inf).abs().max())
                return Divergence(
                    f"equal tokens, but {name} of step {step} differ by up to {gap:.1e}"
                )
    return None


def _described(
    model: Any, original: Callable[..., Any], call: dict[str, Any], part: _Part
) -> Divergence:
    """Describe the first difference in tokens and how close the decisions of the search were.

    The margins come from the scores of another run of the toolkit's own code.
    """
    config: Any = compat.prepare_config(model, call.get("generation_config"), _options(call))
    beams, per_sentence = config.num_beams, config.num_return_sequences
    settings_for_scores = {"return_dict_in_generate": True, "output_scores": True}
    if beams > 1:  # return all hypotheses, because fastgen's may be among them
        settings_for_scores["num_return_sequences"] = beams
    try:
        run = original(model, **_copied(call) | settings_for_scores)
    except Exception as error:  # the scores of all steps may not fit into memory
        return Divergence(
            f"{_place(part, per_sentence)}; no scores, as {type(error).__name__} was raised"
        )
    sentence, rank = divmod(part.row, per_sentence)
    row = sentence * max(beams, per_sentence) + rank
    text = (
        f"{_place(part, per_sentence)}; "
        f"in transformers' own scores they are {_gap(run, part, row):.1e} apart"
    )
    closest = math.inf
    if not config.do_sample:
        closest = closest_decision(run, row, beams, part.wanted, end_tokens(config.eos_token_id))
    if beams > 1:
        text += f", and its closest decision until it left fastgen's sequence was by {closest:.1e}"
    outcome = "near tie" if closest < NEAR_TIE.get(model.dtype, 0.0) else "different"
    return Divergence(text, outcome)


def _judged_by_noise(
    model: Any,
    accelerated: Callable[..., Any],
    original: Callable[..., Any],
    call: dict[str, Any],
    divergence: Divergence,
) -> Divergence:
    """Judge other tokens in half precision by the errors of fastgen's and the toolkit's logits.

    Where they cannot be measured, the divergence stays as it is.
    """

    def generate(**kwargs: Any) -> Any:
        with engine.running("parity"):
            return accelerated(original, model, **kwargs)

    config: Any = compat.prepare_config(model, call.get("generation_config"), _options(call))
    by_name = {"input_ids" if name == "inputs" else name: value for name, value in call.items()}
    inputs = {name: value for name, value in by_name.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in by_name.items() if name not in inputs}
    if config.eos_token_id is not None:
        options["eos_token_id"] = config.eos_token_id
    try:
        found = noise(model, inputs, options, generate)
    except Exception as error:  # the copy in float32 may not fit into memory
        text = f"{divergence.text}; no errors of the logits, as {type(error).__name__} was raised"
        return replace(divergence, text=text)
    outcome = "within noise" if found.explains else "different"
    return replace(divergence, text=f"{divergence.text}; {found}", outcome=outcome)


def _options(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that may belong to its GenerationConfig."""
    named = (
        "inputs",
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
    )
    return {name: value for name, value in call.items() if name not in named}


def _place(part: _Part, per_sentence: int) -> str:
    sentence, rank = divmod(part.row, per_sentence)
    sequence = f", sequence {rank}" if per_sentence > 1 else ""
    tokens = ["nothing" if token is None else f"token {token}" for token in (part.stock, part.ours)]
    return (
        f"sentence {sentence}{sequence}, position {part.place}: "
        f"transformers has {tokens[0]}, fastgen {tokens[1]}"
    )


def _gap(run: Any, part: _Part, row: int) -> float:
    """Return the difference between the scores of the two tokens.

    Both are the toolkit's scores at that step, for the beam that its hypothesis continues.
    """
    step = part.place - prompt_length(run)
    if part.stock is None or part.ours is None or not 0 <= step < len(run.scores):
        return math.inf
    source = int(run.beam_indices[row, step]) if "beam_indices" in run else row
    if source < 0:  # the toolkit's hypothesis had ended
        return math.inf
    scores = run.scores[step][source]
    if max(part.stock, part.ours) >= scores.shape[0]:
        return math.inf
    return abs(float(scores[part.stock] - scores[part.ours]))


def _report(model: Any, divergence: Divergence | None, ours: _Outcome) -> None:
    """Count the outcome, and warn or raise if the outputs differ."""
    if divergence is None:
        engine.compared("equal")
        return
    engine.compared(divergence.outcome)
    text = f"{type(model).__name__}.generate: {divergence.text}"
    if settings().strict and divergence.outcome == "different":
        raise ParityError(text) from ours.error
    if is_new(text):
        warnings.warn(f"fastgen and transformers differ: {text}", ParityWarning, stacklevel=2)
