"""Records of accelerated calls of fairseq's generators, for `fastgen.status`."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fastgen.decoding.plan import Plan
from fastgen.models.build.int8_step import is_requested, refusal
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.multistep_job import why_not_in_c
from fastgen.patches.engine import engine
from fastgen.patches.fairseq import TOOLKIT

PATCH = "fairseq.generate"
_METHODS = {
    "BeamSearch": "beam search",
    "Sampling": "sampling",
    "DiverseBeamSearch": "diverse beam search",
}


def of_generator(generator: Any) -> tuple[str, str]:
    """Return the model class and the decoding method of a generator."""
    search = type(generator.search).__name__
    return type(generator.model.models[0]).__name__, _METHODS.get(search, search)


def note_served(
    generator: Any, plan: Plan, left_off: Iterable[str], steps: Iterable[DecoderStep]
) -> None:
    """Count a call that fastgen's decode loop has served.

    Args:
        generator: fairseq's generator.
        plan: What the call ran.
        left_off: Features that were disabled for the call, with their fallback reasons.
        steps: The fused decode steps of its models.
    """
    steps = list(steps)
    refused = next(filter(None, map(refusal, steps or [None])), "")
    left_off = tuple(dict.fromkeys([*left_off, *([refused] if refused else [])]))
    plan = replace(
        plan,
        left_off=left_off,
        not_in_c=next(filter(None, map(why_not_in_c, steps)), ""),
        int8=is_requested() and not refused,
    )
    engine.hit(PATCH, left_off)
    outcome = "partly" if plan.missing else "accelerated"
    model, method = of_generator(generator)
    method = plan.method if plan.method == "big-little decoding" else method
    engine.note_call(TOOLKIT.name, model, method, outcome, plan.missing)
