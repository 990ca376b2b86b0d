"""Run the calls of one family with and without fastgen, and say how they ran."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks.coverage import recipe
from benchmarks.coverage.record import ALONE, FAILS, FUSED, PART, SHARED, UNBUILT, WRONG
from benchmarks.session import Session, compared
from fastgen.cli.bench.agreement import Agreement
from fastgen.cli.bench.counts import counts
from fastgen.cli.bench.measure import Verdict
from fastgen.patches.transformers.generate.report import last_call

TEXTS = ((3, 9, 12), (2, 17, 16))
"""Sentences, tokens of the longest one, and new tokens of a call and of the one after it."""
CALLS: dict[str, tuple[bool, dict[str, Any]]] = {
    "greedy": (False, {}),
    "sampled": (True, {"do_sample": True, "top_k": 20}),
    "3 beams": (False, {"num_beams": 3}),
    "3 beams, padding": (True, {"num_beams": 3, "num_return_sequences": 2}),
    "3 samples": (True, {"do_sample": True, "num_return_sequences": 3}),
}
"""Whether the sentences are padded, and the options, by name of the call."""

_SPEED_SIZES = recipe.Sizes(256, 512, 4, 4, 2, 64, 512, 8_000)


def tried(name: str) -> dict[str, Any]:
    """Run all calls of a family.

    Returns:
        "how" it runs, one of `record.KINDS`; "why" not better, as the names of calls by reason; and
        its "dtype", if it runs.
    """
    try:
        model = recipe.enlarge(recipe.tiny(name))
    except Exception as error:
        return {"how": UNBUILT, "why": {_named(error): []}}
    for dtype in (torch.float64, torch.float32):
        model = model.to(dtype)
        ran = {call: _tried(model, *given) for call, given in CALLS.items()}
        kinds = {kind for kind, _ in ran.values()}
        if WRONG in kinds or FAILS not in kinds:
            break  # otherwise some of its code refuses fp64, or gives NaN in it
    why: dict[str, list[str]] = {}
    for call, (_, reasons) in ran.items():
        for reason in reasons:
            why.setdefault(reason, []).append(call)
    if WRONG in kinds or kinds == {FAILS}:
        return {"how": WRONG if WRONG in kinds else FAILS, "why": why}
    kinds.discard(FAILS)
    if ALONE in kinds:
        how = PART if len(kinds) > 1 else ALONE
    else:
        how = SHARED if SHARED in kinds else FUSED
    return {"how": how, "why": why, "dtype": str(dtype).removeprefix("torch.")}


def _tried(model: Any, padded: bool, options: dict[str, Any]) -> tuple[str, list[str]]:
    """Return how a call runs, and why not better, or what differs."""
    kind, reasons = FUSED, []
    for text in TEXTS:
        with fastgen.disabled():
            stock = _generated(model, text, padded, options)
        before, report = counts(), last_call()
        found = _generated(model, text, padded, options)
        if not isinstance(stock, Tensor) or not isinstance(found, Tensor):
            if type(found) is not type(stock):
                return WRONG, [f"{_named(found)} in place of {_named(stock)}"]
            return FAILS, [f"transformers raises {_named(stock)}"]
        verdict = _judged(model, text, padded, options, stock, found)
        if not verdict.equal:
            return WRONG, [verdict.note]
        ran = last_call()
        if ran is None or ran is report:
            fallbacks = counts().since(before).fallbacks
            kind, reasons = ALONE, [reason.partition(", ")[2] for reason in fallbacks]
        else:
            kind = FUSED if ran.plan.fused else SHARED if ran.plan.shared else ALONE
            parts = [note.partition(": ") for note in ran.plan.left_off]
            reasons = [why for feature, _, why in parts if _WITHOUT.get(feature) == kind]
    return kind, [reason for reason in reasons if not reason.startswith("there is no spec of")]


_WITHOUT = {
    "keys and values are not shared": ALONE,
    "decode steps run through the model's own modules": SHARED,
}
"""How a call runs without a feature."""


def _judged(
    model: Any,
    text: tuple[int, int, int],
    padded: bool,
    options: dict[str, Any],
    stock: Tensor,
    found: Tensor,
) -> Verdict:
    """Compare two outputs of a call, up to near ties in fp32."""
    if stock.shape == found.shape and torch.equal(stock, found):
        return Verdict(True)
    if options.get("do_sample"):
        return Verdict(False, note="the samples differ")
    given = _options(text, options)
    returned = given.pop("num_return_sequences", 1)
    # The judge of near ties takes one sequence per sentence.
    judge = Agreement(model, recipe.inputs_of(model, *text[:2], padded), given)
    verdict = judge(stock[::returned], found[::returned])
    return verdict if verdict.note else Verdict(False, note="later hypotheses differ")


def _options(text: tuple[int, int, int], options: dict[str, Any]) -> dict[str, Any]:
    return options | {"max_new_tokens": text[2], "eos_token_id": [recipe.EOS, 7, 9, 30]}


def _generated(
    model: Any, text: tuple[int, int, int], padded: bool, options: dict[str, Any]
) -> Tensor | Exception:
    torch.manual_seed(0)
    try:
        inputs = recipe.inputs_of(model, *text[:2], padded)
        return model.generate(**inputs, **_options(text, options))
    except Exception as error:
        return error


def _named(found: Any) -> str:
    """Return an exception in one line."""
    if isinstance(found, Tensor):
        return "an output"
    return f"{type(found).__name__}: {' '.join(str(found).split())}"[:160]


def timed(name: str) -> dict[str, Any]:
    """Return the speed of a call with 4 beams over that of transformers, with its 95% interval."""
    model = recipe.build(name, _SPEED_SIZES)
    inputs = recipe.inputs_of(model, 4, 32, padded=False)
    options = {"num_beams": 4, "do_sample": False, "min_new_tokens": 16, "max_new_tokens": 16}
    found = compared(model, inputs, options, 4 * 16, Session(), rounds=5, warmup=2)
    return {key: found[key] for key in ("equal", "ratio", "low", "high") if key in found}
