"""Equivalence checks of fused steps against the model's own forward.

The first fused decode step of a decoder runs both ways, and the logits are compared; so are the
outputs of an encoder's first pass. A verdict holds for the facts of the step it was reached for:
after a change of the model or its config the check runs again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from fastgen.models.comparison import comparing
from fastgen.models.memory import scratch
from fastgen.models.state import CachedState, cached_state_of, state_of
from fastgen.ops.processor import in_tf32

_T = TypeVar("_T")

OUTPUTS_DIFFER = "first-step outputs differ from the family's"
"""Reason why a model whose fused step failed the comparison is not fused."""

UNDECIDED = "the first logits are not finite, so that nothing can be compared"
"""Reason why a single call is not fused."""


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest distance of equal tensors, relative to their spread; 0.03 in half precision."""

ROUNDED = 3.0
"""Largest distance of equal tensors, as a multiple of the effect of rounding noise.

The larger of the two limits applies.

Two ways to compute the logits of 12 layers in bfloat16 differ by up to 0.1. That is a tenth to nine
tenths of the effect of rounding each sublayer's output once more (shapes of BART-large, GPT-2 and
Marian, random weights, on a CPU).
"""


def agree(found: Tensor, own: Tensor, rounded: Tensor | None = None) -> bool | None:
    """Return whether logits of a fused step equal those of the model's own forward up to rounding.

    Args:
        found: (R, V), of the fused step.
        own: (R, V), of the model's own forward.
        rounded: (R, V), of the fused step with rounding noise added to each sublayer's output.

    Returns:
        None where `own` is not finite, so that nothing can be compared.
    """
    if not bool(own.isfinite().all()):
        return None
    if found.shape != own.shape:
        return False
    if distance(found, own) <= TOLERANCE.get(own.dtype, 3e-2):
        return True
    if rounded is None:
        return False
    effect = (rounded.double() - found.double()).norm()
    return bool((found.double() - own.double()).norm() <= ROUNDED * effect)


def distance(found: Tensor, reference: Tensor) -> float:
    """Return the distance of logits (R, V), relative to the spread of the reference."""
    found, reference = found.double(), reference.double()
    difference = (found - reference).norm()
    if difference == 0:
        return 0.0  # also where the spread is 0
    return float(difference / (reference - reference.mean(-1, keepdim=True)).norm())


FAILURES = AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError
"""Exceptions by which a model shows that it does not compute as expected."""


class Checkable(Protocol):
    """A step or encoder built from the weights of a module.

    Attributes:
        module: The module.
        fingerprint: Whatever else it was built from; equal as long as nothing has changed.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def fingerprint(self) -> tuple[object, ...]: ...


_Verdict: TypeAlias = tuple[tuple[object, ...], bool]


@dataclass(eq=False)
class Verdicts(CachedState):
    """The verdicts on one decoder or encoder, each with the facts that it holds for.

    Attributes:
        step: On the fused step, or on an encoder's layers.
        first_token: On the fused first token of a text.
        in_c: On an encoder's layers in C, compared with their torch operations.
        lacks_c: Whether an encoder has sublayers without a C implementation.
    """

    step: _Verdict | None = None
    first_token: _Verdict | None = None
    in_c: _Verdict | None = None
    lacks_c: bool = False


class RewindableLayer(Protocol):
    """A layer of the KV cache.

    Attributes:
        steps: Generated tokens per beam, beyond the prefix.
        filled: Filled slots of all beams, beyond the prefix.
    """

    steps: int
    filled: int


class TrialOutputs(NamedTuple):
    """Tensors to compare.

    Attributes:
        found: Outputs of the fused step.
        rounded: The same with rounding noise in each sublayer's output; None where it was not run.
    """

    found: Sequence[Tensor]
    rounded: Sequence[Tensor] | None = None


def trial(
    step: Callable[[], Tensor], text: Sequence[RewindableLayer], dtype: torch.dtype
) -> TrialOutputs | None:
    """Run a step and rewind the cache, so that the next step overwrites its token.

    Args:
        step: Returns the logits.
        text: Layers of the self-attention KV cache.
        dtype: The dtype in which the step computes.

    Returns:
        None where the step fails.
    """
    before = [(layer.steps, layer.filled) for layer in text]

    def again() -> Sequence[Tensor]:
        try:
            return [step()]
        finally:
            for layer, (steps, filled) in zip(text, before, strict=True):
                layer.steps, layer.filled = steps, filled

    return tried(again, dtype)


def tried(make: Callable[[], Sequence[Tensor]], dtype: torch.dtype) -> TrialOutputs | None:
    """Compute the tensors to compare; in coarse precision, also compute them with rounding noise.

    Args:
        make: Returns the tensors.
        dtype: The dtype in which it computes.

    Returns:
        None where `make` fails.
    """
    outputs = made(make)
    return (
        None
        if outputs is None
        else TrialOutputs(outputs, _with_noise(make, dtype, outputs[0].device))
    )


def _with_noise(
    make: Callable[[], Sequence[Tensor]], dtype: torch.dtype, device: torch.device
) -> Sequence[Tensor] | None:
    """Return tensors computed with rounding noise; None in a fine precision, or if it fails."""
    rounding = rounding_noise(dtype, device)
    return None if rounding is None else made(make, rounding)


def rounding_noise(dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Return a function that changes each element by up to half a unit in the last place.

    Args:
        dtype: The dtype of the model.
        device: The device of the tensors.

    Returns:
        The function, which draws from a generator of its own; None in a fine precision.
    """
    if (unit := _unit(dtype, device)) is None:
        return None
    generator = torch.Generator(device).manual_seed(0)

    def once_more(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator, dtype=torch.float32, device=x.device)
        return (x * (1 + unit * (2 * noise - 1))).to(x.dtype)

    return once_more


def _unit(dtype: torch.dtype, device: torch.device) -> float | None:
    """Return the largest relative rounding error of a coarse precision; None for a fine one."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.finfo(dtype).eps / 2
    coarse = dtype == torch.float32 and device.type == "cuda" and in_tf32()
    # TF32 has as many mantissa bits as float16.
    return torch.finfo(torch.float16).eps / 2 if coarse else None


def made(make: Callable[[], _T], rounding: Callable[[Tensor], Tensor] | None = None) -> _T | None:
    """Return the result of a function; None where it fails for a reason other than lack of memory.

    Weights are packed at once, so that the comparison covers the products that later steps run.

    Args:
        make: The function.
        rounding: As in `models.comparison.Comparison`.
    """
    try:
        with comparing(rounding):
            return make()
    except FAILURES as error:
        if scratch.is_out_of_memory(error):
            raise
        return None


def record_verdict(step: Checkable, what: TrialOutputs | None, own: Tensor) -> str | None:
    """Compare a model's first fused step with its own forward and record the verdict.

    Args:
        step: The fused step, or the encoder.
        what: Result of `trial` or `tried`.
        own: (R, V) logits of the model's own forward; of an encoder, its output.

    Returns:
        The reason why the model is not fused; None where it is.
    """
    same = _alike(what, [own])
    if same is None:
        return UNDECIDED
    if not same or recorded_verdict(step) is None:
        state_of(step.module).of(Verdicts).step = step.fingerprint, same
    return None if same else OUTPUTS_DIFFER


def _alike(what: TrialOutputs | None, own: Sequence[Tensor]) -> bool | None:
    """Return whether all tensors equal the decoder's own; None where that cannot be decided."""
    if what is None or len(what.found) != len(own):
        return False
    rounded = what.rounded or [None] * len(own)
    same = [agree(*each) for each in zip(what.found, own, rounded, strict=True)]
    return None if None in same else all(same)


def recorded_verdict(step: Checkable) -> bool | None:
    """Return the recorded verdict for a step with these facts; None where none was reached."""
    return _recorded(step, verdicts_of(step.module).step)


def recorded_first_verdict(step: Checkable) -> bool | None:
    """Return the recorded verdict for the first token of a text, as `recorded_verdict`."""
    return _recorded(step, verdicts_of(step.module).first_token)


def record_first_verdict(step: Checkable, what: TrialOutputs | None, own: Sequence[Tensor]) -> None:
    """Compare a fused first token with that of the decoder's own forward and record the verdict."""
    same = _alike(what, own)
    if same is not None:
        state_of(step.module).of(Verdicts).first_token = step.fingerprint, same


def verdicts_of(module: nn.Module) -> Verdicts:
    """Return the verdicts on a module; none are recorded by default."""
    return cached_state_of(module, Verdicts) or Verdicts()


def _recorded(step: Checkable, verdict: _Verdict | None) -> bool | None:
    fingerprint, same = (None, None) if verdict is None else verdict
    return same if fingerprint == step.fingerprint else None


def recorded_verdict_in_c(step: Checkable) -> bool | None:
    """Return the recorded verdict for an encoder's layers in C, as `recorded_verdict`."""
    return _recorded(step, verdicts_of(step.module).in_c)


def record_verdict_in_c(
    step: Checkable, found: Tensor, own: Tensor, make: Callable[[], Tensor]
) -> None:
    """Compare an encoder's output in C with that of its torch operations and record the verdict.

    Args:
        step: The encoder.
        found: Its output in C.
        own: The output of its torch operations.
        make: Runs the torch operations once more.
    """
    noisy = _with_noise(lambda: [make()], own.dtype, own.device)
    same = agree(found, own, None if noisy is None else noisy[0])
    if same is not None:
        state_of(step.module).of(Verdicts).in_c = step.fingerprint, same


def by_modules(reason: object) -> str:
    """Return the note of a plan that decode steps are not fused."""
    return f"decode steps run through the model's own modules: {reason}"
