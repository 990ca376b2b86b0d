"""CUDA graphs of the decode steps of a model's own modules, over a cache that stays in place.

The modules get what transformers passes to a model that it compiles: masks over the full capacity
of the cache, and lengths and positions on the device. A graph replays the kernels that they launch.
The Python code of a forward runs at the capture only, and numbers that it computes stay fixed. So
steps run both ways, captured and through the modules, until their results have agreed.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.models.build.equivalence_check import UNDECIDED, agree
from fastgen.models.build.introspection import NotFused, check_plain
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.replay import not_captured
from fastgen.models.layers.attention import BeamAttention
from fastgen.models.memory import scratch
from fastgen.models.routing.routes import modules_of
from fastgen.models.specs.registry import spec_of
from fastgen.models.state import CachedState, cached_state_of, state_of
from fastgen.patches.generation_call import in_step
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache.shared_cache import FullCapacityView, SharedCache
from fastgen.patches.transformers.generate.fused_decoder import check_arguments, check_preparation

WORTH = 16
"""Minimum number of remaining steps for a capture to pay: some of them run both ways."""

OUTPUTS_DIFFER = "replayed, the logits differ"
"""Reason not to capture a model whose captured steps gave other results than its modules."""

SURE = 3
"""Number of runs over the same memory that verify a model.

The first run is eager, the second is captured, the third replays at another length.
"""


@dataclass(frozen=True)
class CaptureVerdict(CachedState):
    """Whether the captured steps of a model have computed what its modules compute.

    Attributes:
        kinds: The model's `_kinds` when capture was tried.
        reason: Why not to capture; None if results agreed.
    """

    kinds: tuple[object, ...]
    reason: str | None = None


def check(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> None:
    """Check that the decode steps of a model's modules can be captured.

    Args:
        kwargs: Arguments of the model's forward.

    Raises:
        NotFused: They cannot; the message is the reason.
    """
    known = cached_state_of(model, CaptureVerdict)
    if known is not None and known.reason is not None and known.kinds == _kinds(model):
        raise NotFused(known.reason)
    check_arguments(model, generation_config, kwargs)
    check_preparation(model)
    if kwargs.get("decoder_attention_mask") is not None and not _prepares_as_all(model):
        raise NotFused(f"{type(model).__name__} has its own prepare_inputs_for_generation")
    if torch.is_autocast_enabled(model.device.type):
        raise NotFused("autocast chooses the types")
    if torch.is_grad_enabled():
        raise NotFused("gradients are enabled")
    check_plain(of_steps(model))


class _Setting:
    """State that all steps over the same memory share: buffers, and arguments of the forward.

    Args:
        kwargs: Arguments of the next step's forward.

    Raises:
        ValueError: The mask does not have the length of the text.
    """

    def __init__(self, model: Any, cache: SharedCache, kwargs: dict[str, Any]) -> None:
        self.full_view, self.runs = FullCapacityView(cache), 0
        self.tokens = torch.empty(cache.rows, dtype=torch.int64, device=cache.device)
        self.kwargs, before = dict(kwargs), cache.text[0].length
        positions = self.kwargs.pop("position_ids", None)
        self.offset = None if positions is None else positions[:, -1:] - before
        name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
        mask = kwargs.get(name)
        if mask is not None and mask.shape[1] != before + 1:
            raise ValueError(f"a mask of {mask.shape[1]} tokens for a text of {before + 1}")
        if mask is not None:
            self.kwargs[name] = nn.functional.pad(
                mask, (0, self.full_view.tokens - mask.shape[1]), value=1
            )
        elif _prepares_as_all(model):
            self.kwargs[name] = self.tokens.new_ones(cache.rows, self.full_view.tokens)


class CapturedModules:
    """Captured decode steps of a model's own modules, from the second step on.

    Attributes:
        refused: Message for the plan if capture was tried and failed; None otherwise.
    """

    def __init__(self, model: Any, cache: SharedCache) -> None:
        self.model, self.cache = model, cache
        self.refused: str | None = None
        self._kinds = _kinds(model)
        self._proven = cached_state_of(model, CaptureVerdict) == CaptureVerdict(self._kinds)
        self._repeated = graph.CapturedFunction()
        self._setting: _Setting | None = None

    def supported(self, rows: int) -> bool:
        """Return whether the next step, of `rows` rows, should run here."""
        known = self._setting is not None and len(self._setting.tokens) == rows
        return self.refused is None and (
            known or self.cache.longest - self.cache.text[0].steps >= WORTH
        )

    @property
    def doubted(self) -> bool:
        """Whether the newest step must also run through the modules, for comparison.

        For every model this holds once per memory, at run `SURE`. For a model that was not verified
        before this call, it also holds for all earlier runs, and later at powers of two.
        """
        runs = 0 if self._setting is None else self._setting.runs
        return runs == SURE or (not self._proven and (runs < SURE or runs & (runs - 1) == 0))

    def __call__(self, ids: Tensor, kwargs: Callable[[], dict[str, Any]]) -> Tensor | None:
        """Run one step.

        Its keys and values are written but not counted.

        Args:
            ids: (R, L), of which the newest token is run.
            kwargs: Returns the arguments of the model's forward; called if memory has moved.

        Returns:
            Logits (R, V) fp32, which the next step overwrites. None if the step could not run.
        """
        cache = self.cache
        for layer in cache.text:
            layer.ensure_capacity()
        try:
            if self._setting is None or not self._setting.full_view.holds(cache):
                self._setting = _Setting(self.model, cache, kwargs())
            setting = self._setting
            setting.tokens.copy_(ids[:, -1])
            setting.full_view.start.fill_(cache.text[0].slots)
            setting.runs += 1
            with self._unchanged(setting):
                return self._repeated(
                    functools.partial(self._run_modules, setting), cache.device, setting
                )
        except graph.NotCaptured as reason:
            self._refuse(
                str(reason),
                lasting=reason.__cause__ is None or not scratch.is_out_of_memory(reason.__cause__),
            )
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if scratch.is_out_of_memory(error):
                raise
            message = str(error).partition("\n")[0]
            self._refuse(f"its forward does not run over memory that stays in place: {message}")
        return None

    def judge(self, found: Tensor | None, own: Tensor) -> None:
        """Compare a step's logits with those of the modules, and stop capturing if they differ.

        Args:
            found: (R, V), what `__call__` returned.
            own: (R, V), what the modules returned for the same step.
        """
        if found is None:
            return
        same = agree(found, own)
        if same is None:
            self._refuse(UNDECIDED, lasting=False)
        elif not same:
            self._refuse(OUTPUTS_DIFFER)
        elif self._setting is not None and self._setting.runs == SURE:
            state_of(self.model).keep(CaptureVerdict(self._kinds))

    def _refuse(self, reason: str, lasting: bool = True) -> None:
        """Stop capturing in this call.

        Args:
            lasting: Whether later calls of the model do not capture either.
        """
        self.refused, self._setting = not_captured(reason), None
        if lasting:
            state_of(self.model).keep(CaptureVerdict(self._kinds, reason))

    @contextmanager
    def _unchanged(self, setting: _Setting) -> Generator[None]:
        """Check that a step leaves the modules' attributes unchanged; restore them if not.

        The modules may run the same step again. Only the first run of an unverified model over a
        memory is checked.

        Raises:
            ValueError: An attribute, buffer or parameter was added, removed or replaced.
        """
        held = (
            []
            if self._proven or setting.runs > 1
            else [each for m in of_steps(self.model) for each in _held(m)]
        )
        before = [dict(each) for each in held]
        try:
            yield
        finally:
            changed = [
                (new, old) for new, old in zip(held, before, strict=True) if not _same(new, old)
            ]
            for new, old in changed:
                new.clear()
                new.update(old)
        if changed:
            raise ValueError("it changes what its modules hold")

    def _run_modules(self, setting: _Setting) -> Tensor:
        cache, model, room = self.cache, self.model, setting.full_view
        attention = BeamAttention(
            cache.sentences, cache.beams, room.visible, seen=room.start + cache.beams
        )
        with in_step(attention), cache.as_full_capacity(room):
            kwargs = setting.kwargs
            if setting.offset is not None:
                kwargs = kwargs | {"position_ids": setting.offset + room.length}
            ids = setting.tokens[:, None]
            inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
            outputs = model(**inputs, return_dict=True)
        if attention.attended != cache.layers:
            raise RuntimeError(
                f"{attention.attended} of {cache.layers} layers take their keys from there"
            )
        if cache.source and reads_source_mask(self.model, setting.kwargs):
            # Reuse the prepared mask. To detect that nothing is padded, transformers would
            # synchronize with the device in every step.
            setting.kwargs["attention_mask"] = attention.source_mask
        return outputs.logits[:, -1].float()


def reads_source_mask(model: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a forward takes the prepared source mask in place of `attention_mask`."""
    spec = spec_of(model.config)
    known = spec is not None and spec.masks_source and spec.source_mask is None
    return known and kwargs.get("attention_mask") is not None


def of_steps(model: Any) -> list[nn.Module]:
    """Return the modules that decode steps may run: all but those of an encoder."""
    modules = modules_of(model)
    if not model.config.is_encoder_decoder:
        return modules
    encoder = set(model.get_encoder().modules())
    return [module for module in modules if module not in encoder]


def _held(module: nn.Module) -> tuple[dict[str, Any], ...]:
    attributes = vars(module)
    return attributes, attributes["_buffers"], attributes["_parameters"]


def _same(new: dict[str, Any], old: dict[str, Any]) -> bool:
    return new.keys() == old.keys() and all(new[name] is value for name, value in old.items())


def _prepares_as_all(model: Any) -> bool:
    return not compat.has_own(model, "prepare_inputs_for_generation")


def _kinds(model: Any) -> tuple[object, ...]:
    """Return what identifies a model's code; recorded outcomes hold as long as it is equal."""
    return (compat.attention_of(model.config), *map(type, of_steps(model)))
