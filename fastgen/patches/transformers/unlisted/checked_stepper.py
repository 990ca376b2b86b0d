"""The first call of a family without a spec: its first steps run both ways and are compared."""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.plan import Plan
from fastgen.models.build.equivalence_check import (
    FAILURES,
    ROUNDED,
    UNDECIDED,
    agree,
    distance,
    rounding_noise,
)
from fastgen.models.memory import scratch
from fastgen.models.state import state_of
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.module_stepper import ModuleStepper
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from fastgen.patches.transformers.planning.sharing import computes_alone, not_shared
from fastgen.patches.transformers.unlisted import families
from fastgen.patches.transformers.unlisted.families import Undecided

CHECKED = 3
"""Decode steps that have to agree, over all calls. Beams change places between them."""


class CheckedStepper(SharedStepper):
    """Stepper that also runs the model as transformers would, and compares the logits.

    Until the check is over, the caller gets the logits of transformers' way. Where both ways agree
    in prefill and in `CHECKED` decode steps, of this call and earlier ones, the call continues over
    the shared cache, and so do later calls from their start. Otherwise it continues with
    transformers' own cache.

    Args:
        key: What the verdict depends on, from `families.key_of`.

    Attributes:
        own: Stepper over transformers' own cache; None once the check is over.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        key: families.Key,
    ) -> None:
        kwargs = model_kwargs | {CACHE: copy.deepcopy(model_kwargs[CACHE])}  # both are empty
        # Captured steps are compared by themselves, once the family is known.
        plan = replace(plan, graphs=False)
        super().__init__(model, plan, input_ids, generation_config, dict(model_kwargs), None)
        self.own: ModuleStepper | None = ModuleStepper(
            model, plan, input_ids, generation_config, kwargs
        )
        self._key = key
        self._given = model_kwargs | {CACHE: copy.deepcopy(kwargs[CACHE])}

    def prefill(self) -> Tensor:
        assert self.own is not None
        logits = self.own.prefill()
        found = self._tried(super().prefill)
        if found is not None:
            self._judge(found, logits)
        return logits

    def step(self, ids: Tensor) -> Tensor:
        if self.own is None:
            return super().step(ids)
        logits = self.own.step(ids)
        found = self._tried(lambda: super(CheckedStepper, self).step(ids))
        agrees = found is not None and self._judge(found, logits)
        if agrees and families.count_agreed(self._key) >= CHECKED:
            families.record(self._key, "")
            self.own = None
        return logits

    @property
    def ancestry(self) -> Ancestry | None:
        return super().ancestry if self.own is None else None

    @property
    def returned_cache(self) -> Any:
        return super().returned_cache if self.own is None else self.own.returned_cache

    def reorder(self, parents: Tensor) -> None:
        if self.own is not None:
            self.own.reorder(parents)
        super().reorder(parents)

    def keep(self, sentences: Tensor) -> None:
        if self.own is not None:
            self.own.keep(sentences)
        super().keep(sentences)

    def _tried(self, run: Callable[[], Tensor]) -> Tensor | None:
        """Return the logits of a run over the shared cache; None once the check has failed.

        The run leaves the attributes of the model's modules as they were.
        """
        before = _attributes(self.model)
        try:
            logits = run()
        except FAILURES as error:
            _restore(before)
            self._leave(f"{type(error).__name__} over the shared cache", error)
            return None
        except BaseException:  # an interrupt, or what a signal handler raises
            _restore(before)
            raise
        if _restore(before):
            self._leave("its modules keep state of their own")
            return None
        if self.cache is None:  # the first step did not take its keys from it
            self._leave(computes_alone(self.model))
            return None
        return logits

    def _judge(self, found: Tensor, own: Tensor) -> bool:
        """Leave the shared cache if logits (R, V) differ by more than rounding.

        Returns:
            Whether they agree.
        """
        same = agree(found, own)
        if same is False:
            try:
                same = distance(found, own) <= ROUNDED * self._effect_of_rounding
            except FAILURES:  # such as a lack of memory: both caches are there
                same = None
        if same is not True:
            self._leave(families.DIFFERS if same is False else UNDECIDED)
        return same is True

    @functools.cached_property
    def _effect_of_rounding(self) -> float:
        """Distance of the prompt's logits from those with rounding noise in its layers.

        0 in a fine precision. As for fused steps, this is the measure of equal logits.
        """
        noise = rounding_noise(self.model.dtype, self.model.device)
        if noise is None:
            return 0.0
        own = self._prompt_alone()
        with _Noisy(noise, self.model.dtype):
            effect = distance(self._prompt_alone(), own)
        return effect if math.isfinite(effect) else 0.0

    def _prompt_alone(self) -> Tensor:
        """Return the logits of the prompt, over a cache of its own."""
        kwargs = self._given | {CACHE: copy.deepcopy(self._given[CACHE])}
        outputs = compat.prefill(self.model, self.input_ids, self.config, kwargs)
        return outputs.logits[:, -1]

    def _leave(self, reason: str, error: Exception | None = None) -> None:
        """Continue with transformers' own cache, and record why."""
        assert self.own is not None
        if reason == UNDECIDED:
            state_of(self.model).of(Undecided).keys.add(self._key)
        elif error is None or not scratch.is_out_of_memory(error):
            families.record(self._key, reason)
        self.kwargs, self._peak = self.own.kwargs, 0
        self.cache = self.own = self.captured = None
        if self.plan.shared:
            left_off = not_shared(reason), *self.plan.left_off
            self.plan = replace(self.plan, shared=False, left_off=left_off)


class _Noisy(TorchFunctionMode):
    """Scope of one thread in which sums and products of a dtype have rounding noise.

    Args:
        noise: Returns a tensor with noise.
        dtype: The dtype.
    """

    def __init__(self, noise: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._noise, self._dtype = noise, dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        is_noisy = func.__name__ in _SUMS and isinstance(result, Tensor)
        return self._noise(result) if is_noisy and result.dtype == self._dtype else result


_SUMS = frozenset(
    ("add", "__add__", "mul", "__mul__", "linear", "matmul", "rms_norm", "layer_norm")
)

_Attributes = list[tuple[dict[str, Any], dict[str, Any]]]


def _attributes(model: torch.nn.Module) -> _Attributes:
    """Return the attributes of all modules and their buffers, each with a copy."""
    held = [vars(module) for module in model.modules()]
    held += [attributes["_buffers"] for attributes in held]
    return [(each, dict(each)) for each in held]


def _restore(before: _Attributes) -> bool:
    """Restore the attributes of modules; return whether any had changed."""
    changed = False
    for now, then in before:
        for name in now.keys() - then.keys():
            del now[name]
            changed = True
        for name, value in then.items():
            if now.get(name) is not value:
                now[name] = value
                changed = True
    return changed
