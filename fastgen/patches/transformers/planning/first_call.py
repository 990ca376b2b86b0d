"""A short first call of a model does not pack its weights: that would take longer than its steps.

The first fused step of a model is compared with the model's own, for which all weights are packed
at once. A call of few new tokens leaves both to the next call.
"""

from typing import Any

from torch import Tensor

from fastgen.models.build.equivalence_check import recorded_verdict
from fastgen.models.build.introspection import NotFused
from fastgen.models.layers.packed_weights import Packed
from fastgen.models.routing import routes
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.state import CachedState, cached_state_of, state_of

_REASON = "the first call of this model is short, and its weights are packed from the second on"
"""Why the decode steps of a call are not fused."""

_ROWS = 4
"""Most rows of a call that does not pack: steps of more rows gain more."""

_HEAVY = 64 << 20
"""Bytes to pack from which on it takes a noticeable time."""


class FirstCallDone(CachedState):
    """Marks a model whose first call has ended."""


def packed(model: Any, step: DecoderStep, input_ids: Tensor, new_tokens: int) -> DecoderStep:
    """Return a step whose weights are packed in this call, if not before.

    Args:
        model: The model.
        step: Its fused decode step.
        input_ids: (R, P), the prompt.
        new_tokens: Most new tokens of a text.

    Raises:
        NotFused: The call leaves the packing to the next one.
    """
    if (
        new_tokens < Packed.uses_to_pack
        and len(input_ids) <= _ROWS
        and input_ids.device.type == "cpu"
        and cached_state_of(model, FirstCallDone) is None
        and recorded_verdict(step) is None
        and routes.survey(model).missing_bytes >= _HEAVY
    ):
        raise NotFused(_REASON)
    return step


def note_call(model: Any) -> None:
    """Note that a model was called."""
    state_of(model).of(FirstCallDone)
