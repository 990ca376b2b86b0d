"""The decode steps of a model's own modules as a CUDA graph, over a shared cache that stays in place.

The modules are given what transformers gives to a model that it compiles: masks over all the room of the cache, and
lengths and positions on the device. What they compute there, a graph computes again. What Python does in a forward
happens at a capture and never again, and a number that it has made is fixed: so steps are run both ways until it has
shown that nothing of the kind is needed.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastgen.models.build.equivalence_check import UNDECIDED, agree
from fastgen.models.build.introspection import NotFused, check_plain
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.replay import not_captured
from fastgen.models.layers.attention import BeamAttention
from fastgen.models.memory import scratch
from fastgen.models.routing.routes import modules_of
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache.attention import current_step
from fastgen.patches.transformers.cache.shared_cache import Room, SharedCache
from fastgen.patches.transformers.generate.fused_decoder import check_arguments, check_preparation

WORTH = 16
"""Steps that must be left at least: besides a capture there are steps to be made both ways."""

OTHERWISE = "replayed, they compute something else"
"""The reason for which a model that was compared and differs is not captured."""

SURE = 3
"""Runs over one memory: the first is made step by step, the second captured, the third replayed at another length."""


def check(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> None:
    """Raise NotFused where the steps of a model's modules are not to be captured, with the reason.

    Args:
        kwargs: what the model's forward gets.
    """
    kinds, reason = _outcomes.get(model, (None, None))
    if reason is not None and kinds == _kinds(model):
        raise NotFused(reason)
    check_arguments(model, generation_config, kwargs)
    check_preparation(model)
    if kwargs.get("decoder_attention_mask") is not None and not _prepares_as_all(model):
        raise NotFused(f"{type(model).__name__} has its own prepare_inputs_for_generation")
    if torch.is_autocast_enabled(model.device.type):
        raise NotFused("autocast chooses the types")
    if torch.is_grad_enabled():
        raise NotFused("gradients are wanted")
    check_plain(of_steps(model))


class _Setting:
    """What stays from one step to the next: memory, and the arguments of the forward.

    Args:
        kwargs: the arguments as the next step would get them.

    Raises:
        ValueError: the mask is not that of the whole text.
    """

    def __init__(self, model: Any, cache: SharedCache, kwargs: dict[str, Any]) -> None:
        self.room, self.runs = Room(cache), 0
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
                mask, (0, self.room.tokens - mask.shape[1]), value=1
            )
        elif _prepares_as_all(model):
            self.kwargs[name] = self.tokens.new_ones(cache.rows, self.room.tokens)


class CapturedModules:
    """The steps of a model's own modules, behind the first.

    Attributes:
        refused: that steps are not captured and why, found when it was tried.
    """

    def __init__(self, model: Any, cache: SharedCache) -> None:
        self.model, self.cache = model, cache
        self.refused: str | None = None
        self._kinds = _kinds(model)
        self._proven = _outcomes.get(model) == (self._kinds, None)
        self._repeated = graph.CapturedFunction()
        self._setting: _Setting | None = None

    def able(self, rows: int) -> bool:
        """Whether the next step, of so many rows, is to be run here."""
        known = self._setting is not None and len(self._setting.tokens) == rows
        return self.refused is None and (
            known or self.cache.longest - self.cache.text[0].steps >= WORTH
        )

    @property
    def doubted(self) -> bool:
        """Whether the step that has been run is to be made by the modules, too, and what came compared.

        Of a model that nobody has compared yet, all steps that are not like one that was; later ones at times.
        """
        runs = 0 if self._setting is None else self._setting.runs
        return runs == SURE or (not self._proven and (runs < SURE or runs & (runs - 1) == 0))

    def __call__(self, ids: Tensor, kwargs: Callable[[], dict[str, Any]]) -> Tensor | None:
        """Return logits (R, V) fp32 of what follows ids (R, L), which the next step overwrites.

        Their keys and values are written, but not counted. None where the step has not been made.

        Args:
            kwargs: what the model's forward would get, asked for where memory has moved.
        """
        cache = self.cache
        for layer in cache.text:
            layer.make_room()
        try:
            if self._setting is None or not self._setting.room.holds(cache):
                self._setting = _Setting(self.model, cache, kwargs())
            setting = self._setting
            setting.tokens.copy_(ids[:, -1])
            setting.room.start.fill_(cache.text[0].slots)
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
            said = str(error).partition("\n")[0]
            self._refuse(f"its forward does not run over memory that stays in place: {said}")
        return None

    def judge(self, found: Tensor | None, own: Tensor) -> None:
        """Compare what came of a step with the logits (R, V) that the modules have made of it."""
        if found is None:
            return
        same = agree(found, own)
        if same is None:
            self._refuse(UNDECIDED, lasting=False)
        elif not same:
            self._refuse(OTHERWISE)
        elif self._setting is not None and self._setting.runs == SURE:
            _outcomes[self.model] = self._kinds, None

    def _refuse(self, reason: str, lasting: bool = True) -> None:
        """Go on without; lasting: so do later calls."""
        self.refused, self._setting = not_captured(reason), None
        if lasting:
            _outcomes[self.model] = self._kinds, reason

    @contextmanager
    def _unchanged(self, setting: _Setting) -> Generator[None]:
        """Put back what the modules hold, as one step may be made both ways; it was not to change.

        Raises:
            ValueError: it did.
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
        cache, model, room = self.cache, self.model, setting.room
        attention = BeamAttention(
            cache.sentences, cache.beams, room.visible, seen=room.start + cache.beams
        )
        token = current_step.set(attention)
        try:
            with cache.as_room(room):
                kwargs = setting.kwargs
                if setting.offset is not None:
                    kwargs = kwargs | {"position_ids": setting.offset + room.length}
                ids = setting.tokens[:, None]
                inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
                outputs = model(**inputs, return_dict=True)
        finally:
            current_step.reset(token)
        if attention.attended != cache.layers:
            raise RuntimeError(
                f"{attention.attended} of {cache.layers} layers take their keys from there"
            )
        if cache.source and setting.kwargs.get("attention_mask") is not None:
            # Made once: to see that nothing is padded, transformers would wait for the device in every step.
            setting.kwargs["attention_mask"] = attention.source_mask
        return outputs.logits[:, -1].float()


def of_steps(model: Any) -> list[nn.Module]:
    """The modules that decode steps may run: all but those of an encoder."""
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
    """What a model is made of: what was found of it holds as long as this is equal."""
    return (compat.attention_of(model.config), *map(type, of_steps(model)))


_outcomes: "WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], str | None]]" = (
    WeakKeyDictionary()
)
"""Models whose steps have been captured: what they were made of, and why not to capture them; None where all agreed."""
