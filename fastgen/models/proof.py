"""The proof of a step from the weights: a decoder's first one is made both ways, and compared; so is an encoder's pass.

What was found is of the step as it was read: what was written into a model or its config since asks for a new proof.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastgen.models import memory, packed
from fastgen.ops.dispatch import uncounted

_T = TypeVar("_T")

OTHERWISE = "they compute something else than its family's"
"""The reason for which a model that was compared and differs is not fused."""

UNDECIDED = "the first logits are not finite, so that nothing can be compared"
"""The reason for which one call of a model is not fused."""


def agree(found: Tensor, own: Tensor) -> bool | None:
    """Whether logits (R, V) of a fused step are those of the model's own forward, but for rounding.

    None where they cannot tell, as they are not finite.
    """
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-3}.get(own.dtype, 3e-2)
    found, own = found.double(), own.double()
    if not bool(own.isfinite().all()):
        return None
    spread = (own - own.mean(-1, keepdim=True)).norm()
    return found.shape == own.shape and bool((found - own).norm() <= tolerance * spread)


class Proven(Protocol):
    """What is made from the weights of a module; facts: what else it was made from, equal where nothing has changed."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def facts(self) -> tuple[object, ...]: ...


class Written(Protocol):
    """A layer of the cache: tokens of a beam, and slots of all, behind the prefix."""

    steps: int
    filled: int


def trial(step: Callable[[], Tensor], text: Sequence[Written]) -> Tensor | None:
    """Make a step, and let its token be written to the layers once more; None where it cannot be made."""
    before = [(layer.steps, layer.filled) for layer in text]
    try:
        return made(step)
    finally:
        for layer, (steps, filled) in zip(text, before, strict=True):
            layer.steps, layer.filled = steps, filled


def made(what: "Callable[[], _T]") -> "_T | None":
    """Compute something; None where that fails, but for want of memory.

    Weights are packed for it, where they would be in the steps to come: what runs then is what is compared.
    """
    try:
        with packed.packing_at_once():
            return what()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if memory.is_out_of_memory(error):
            raise
        return None


def verdict(step: Proven, found: Tensor | None, own: Tensor) -> str | None:
    """Compare a model's first step with its own forward's logits (R, V), once for all; return why it is not fused.

    Of an encoder, what it puts out.
    """
    same = False if found is None else agree(found, own)
    if same is None:
        return UNDECIDED
    if not same or outcome(step) is None:
        _outcomes[step.module] = step.facts, same
    return None if same else OTHERWISE


def outcome(step: Proven) -> bool | None:
    """Whether a step like this one has agreed with its decoder's own forward; None where none has been compared."""
    return _known(_outcomes, step)


def first_outcome(step: Proven) -> bool | None:
    """Whether a text's first token, run as such a step is, has agreed with its decoder's own forward, as `outcome`."""
    return _known(_first_outcomes, step)


def first_verdict(step: Proven, found: Sequence[Tensor] | None, own: Sequence[Tensor]) -> None:
    """Compare what a text's first token has made with what the decoder's own forward has, once for all."""
    made_alike = found is not None and len(found) == len(own)
    same = [agree(one, other) for one, other in zip(found, own, strict=True)] if found and made_alike else [False]
    if None not in same:
        _first_outcomes[step.module] = step.facts, all(same)


def _known(outcomes: "_Outcomes", step: Proven) -> bool | None:
    facts, same = outcomes.get(step.module, (None, None))
    known = same if facts == step.facts else None
    return True if known is None and uncounted.get() else known  # tensors without values prove nothing


def outcome_in_c(step: Proven) -> bool | None:
    """Whether C has put out for an encoder what its operations do one by one, as `outcome`."""
    return _known(_outcomes_in_c, step)


def verdict_in_c(step: Proven, found: Tensor, own: Tensor) -> None:
    """Compare what C puts out for an encoder with what its operations do one by one, once for all."""
    same = agree(found, own)
    if same is not None:
        _outcomes_in_c[step.module] = step.facts, same


def by_modules(reason: object) -> str:
    """How a plan says that decode steps are not made from the weights."""
    return f"decode steps run through the model's own modules: {reason}"


_Outcomes: TypeAlias = "WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], bool]]"

_outcomes: _Outcomes = WeakKeyDictionary()
"""Decoders whose first fused step has been compared with their own forward: its facts, and whether the two agreed."""

_first_outcomes: _Outcomes = WeakKeyDictionary()
"""The same of a text's first token."""

_outcomes_in_c: _Outcomes = WeakKeyDictionary()
"""Encoders whose layers C has run: their facts, and whether that agreed with their operations one by one."""
