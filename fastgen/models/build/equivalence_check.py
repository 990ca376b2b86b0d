"""The proof of a step from the weights: a decoder's first one is made both ways, and compared; so is an encoder's pass.

What was found is of the step as it was read: what was written into a model or its config since asks for a new proof.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastgen.context import assigned
from fastgen.models.layers import packed_weights
from fastgen.models.memory import scratch
from fastgen.models.runtime.decode_step import rounding
from fastgen.ops.processor import in_tf32

_T = TypeVar("_T")

OTHERWISE = "they compute something else than its family's"
"""The reason for which a model that was compared and differs is not fused."""

UNDECIDED = "the first logits are not finite, so that nothing can be compared"
"""The reason for which one call of a model is not fused."""


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far apart tensors may lie that count as alike, in proportion to their spread; in half precision 0.03."""

ROUNDED = 3.0
"""How many times as far apart as rounding puts them they may lie, where that was tried, and is more.

Two ways to make the logits of 12 layers in bfloat16 lie up to 0.1 apart, a tenth to nine tenths of what rounding each
sublayer's output once more makes of them (BART-large's, GPT-2's and Marian's shapes, random weights; on a CPU).
"""


def agree(found: Tensor, own: Tensor, rounded: Tensor | None = None) -> bool | None:
    """Whether logits (R, V) of a fused step are those of the model's own forward, but for rounding.

    None where they cannot tell, as they are not finite.

    Args:
        rounded: what was found where each sublayer's output was rounded once more.
    """
    if not bool(own.isfinite().all()):
        return None
    if found.shape != own.shape:
        return False
    found, mine = found.double(), own.double()
    spread, apart = (mine - mine.mean(-1, keepdim=True)).norm(), (found - mine).norm()
    if bool(apart <= TOLERANCE.get(own.dtype, 3e-2) * spread):
        return True
    return rounded is not None and bool(apart <= ROUNDED * (rounded.double() - found).norm())


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


class Tried(NamedTuple):
    """Tensors that are to be compared, and the same where each sublayer's output was rounded once more, if it was."""

    found: Sequence[Tensor]
    rounded: Sequence[Tensor] | None = None


def trial(step: Callable[[], Tensor], text: Sequence[Written], dtype: torch.dtype) -> Tried | None:
    """Make a step, and let its token be written to the layers once more; None where it cannot be made.

    dtype: in which it computes.
    """
    before = [(layer.steps, layer.filled) for layer in text]

    def again() -> Sequence[Tensor]:
        try:
            return [step()]
        finally:
            for layer, (steps, filled) in zip(text, before, strict=True):
                layer.steps, layer.filled = steps, filled

    return tried(again, dtype)


def tried(make: Callable[[], Sequence[Tensor]], dtype: torch.dtype) -> Tried | None:
    """Make what is to be compared, in a precision in which rounding counts twice; None where it cannot be made."""
    found = made(make)
    if found is None or (unit := _unit(dtype, found[0].device)) is None:
        return None if found is None else Tried(found)
    generator = torch.Generator(found[0].device).manual_seed(0)

    def once_more(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator, dtype=torch.float32, device=x.device)
        return (x * (1 + unit * (2 * noise - 1))).to(x.dtype)

    with assigned(rounding, once_more):
        return Tried(found, made(make))


def _unit(dtype: torch.dtype, device: torch.device) -> float | None:
    """By how much at most a number is rounded, in proportion, where that is much; else None."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.finfo(dtype).eps / 2
    coarse = dtype == torch.float32 and device.type == "cuda" and in_tf32()
    return torch.finfo(torch.float16).eps / 2 if coarse else None  # which has as many bits


def made(what: "Callable[[], _T]") -> "_T | None":
    """Compute something; None where that fails, but for want of memory.

    Weights are packed for it, where they would be in the steps to come: what runs then is what is compared.
    """
    try:
        with packed_weights.packing_at_once():
            return what()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if scratch.is_out_of_memory(error):
            raise
        return None


def verdict(step: Proven, what: Tried | None, own: Tensor) -> str | None:
    """Compare a model's first step with its own forward's logits (R, V), once for all; return why it is not fused.

    Of an encoder, what it puts out.
    """
    same = _alike(what, [own])
    if same is None:
        return UNDECIDED
    if not same or outcome(step) is None:
        _outcomes[step.module] = step.facts, same
    return None if same else OTHERWISE


def _alike(what: Tried | None, own: Sequence[Tensor]) -> bool | None:
    """Whether all that was made agrees with the decoder's own; None where it cannot be told."""
    if what is None or len(what.found) != len(own):
        return False
    rounded = what.rounded or [None] * len(own)
    same = [agree(*each) for each in zip(what.found, own, rounded, strict=True)]
    return None if None in same else all(same)


def outcome(step: Proven) -> bool | None:
    """Whether a step like this one has agreed with its decoder's own forward; None where none has been compared."""
    return _known(_outcomes, step)


def first_outcome(step: Proven) -> bool | None:
    """Whether a text's first token, run as such a step is, has agreed with its decoder's own forward, as `outcome`."""
    return _known(_first_outcomes, step)


def first_verdict(step: Proven, what: Tried | None, own: Sequence[Tensor]) -> None:
    """Compare what a text's first token has made with what the decoder's own forward has, once for all."""
    same = _alike(what, own)
    if same is not None:
        _first_outcomes[step.module] = step.facts, same


def _known(outcomes: "_Outcomes", step: Proven) -> bool | None:
    facts, same = outcomes.get(step.module, (None, None))
    return same if facts == step.facts else None


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
