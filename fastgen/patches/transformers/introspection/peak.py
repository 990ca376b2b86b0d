"""The most memory that a call of `generate` takes, found without running it.

transformers' own `generate` runs on a copy of the model that shares its weights, over tensors without values
(`footprint`): the encoder, the prompt, the first choice, and a decode step at the end of the longest text.
"""

import copy
import inspect
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers.utils import logging
from transformers.utils.generic import ModelOutput

from fastgen.decoding.kv_cache import room
from fastgen.decoding.loop import NATIVE
from fastgen.decoding.plan import Plan
from fastgen.decoding.search.beam_search import BeamSearch
from fastgen.decoding.search.sampling import Sampling
from fastgen.decoding.search.stopping import Stop
from fastgen.models.memory.footprint import Footprint
from fastgen.models.memory.scratch import Memory, plan_for
from fastgen.models.routing.instance import untouched
from fastgen.models.routing.routes import routed
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native_multistep_job import is_packable
from fastgen.models.specs.families import family_of
from fastgen.ops.dispatch import runs_kernels
from fastgen.patches.engine import engine
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache.shared_cache import SharedCache
from fastgen.patches.transformers.cache.user_cache import IS_GIVEN
from fastgen.patches.transformers.encoders import unpadded_encoder
from fastgen.patches.transformers.generate import generate as loops
from fastgen.patches.transformers.generate.decide import decide
from fastgen.patches.transformers.generate.fused_decoder import FusedDecoder
from fastgen.patches.transformers.generate.generation_call import requesting
from fastgen.patches.transformers.generate.legacy_search import METHODS
from fastgen.patches.transformers.generate.logits_processors import bounded, known, runs_code_of_others
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from fastgen.patches.transformers.introspection.prepared import MIXIN, Prepared, generates_segments


class NotPredicted(Exception):
    """What a call takes cannot be told beforehand; with the reason."""


def peak_bytes(bare: Any, prepared: Prepared, plan: Plan, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the most bytes that a call's tensors take beside those of before it: at least, and at most.

    The two differ by the slots that are given up in the text (`kv_cache`): all that beams may ever share, or
    none.

    Args:
        bare: the model. prepared: what its `generate` hands to a loop, by which `plan` was made.
        kwargs: of its `generate`.

    Raises:
        NotPredicted: with the reason.
    """
    config = prepared.config
    if generates_segments(bare):
        raise NotPredicted(f"{type(bare).__name__} has a generate of its own")
    if not plan.shared:
        raise NotPredicted("the cache is transformers' own")
    if compat.is_user_provided(compat.cache_of(prepared.kwargs)):
        raise NotPredicted(IS_GIVEN)
    if bare.device.type != "cpu":
        raise NotPredicted(f"only on a CPU, not on {bare.device.type}")
    if plan.method in METHODS:
        raise NotPredicted(plan.method)
    if config.return_dict_in_generate:
        raise NotPredicted("return_dict_in_generate=True")
    if torch.is_autocast_enabled("cpu"):  # it would keep casts of weights without values for calls to come
        raise NotPredicted("autocast keeps casts of weights")
    if runs_kernels(prepared.input_ids):
        raise NotPredicted("kernels run")
    others = runs_code_of_others(prepared.logits_processor) or known(prepared.stopping_criteria)
    if others is not None:
        raise NotPredicted(f"{others} may take any")
    most = _peak(bare, prepared, plan, kwargs, shared=False)
    steps = config.max_length - prepared.input_ids.shape[1]
    if plan.beams == 1 or steps <= room.COMPACT_EVERY:
        return most, most
    return min(most, _peak(bare, prepared, plan, kwargs, shared=True)), most


def _peak(bare: Any, prepared: Prepared, plan: Plan, kwargs: dict[str, Any], shared: bool) -> int:
    """The most bytes that tensors take; shared: as `_Ends` has it."""
    config = prepared.config
    try:
        clone = _clone(bare)
        with routed(clone, family_of(clone.config.model_type)), torch.no_grad():
            given = (prepared.logits_processor, prepared.stopping_criteria, config, prepared.kwargs)
            step = decide(clone, prepared.loop, prepared.input_ids, *given)[1] if plan.fused else None
            clone.__class__ = _planned(type(clone), plan, step, shared)
            with (
                Footprint() as footprint,
                _unheard(),
                requesting(clone, skips_padding=unpadded_encoder.skips_padding(clone, kwargs)),
            ):
                inspect.unwrap(MIXIN.generate)(clone, **kwargs)
    except NotPredicted:
        raise
    except Exception as error:  # whatever a model's code says to tensors without values
        said = str(error).partition("\n")[0]
        raise NotPredicted(f"{type(error).__name__}: {said}") from error
    return footprint.peak


@contextmanager
def _unheard() -> Generator[None]:
    """Within it transformers warns of nothing: it has said all there is to say when the call was prepared."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _clone(model: Any) -> Any:
    """Return a copy of a model that shares its weights.

    Raises:
        NotPredicted: parts of it run code that is not known here, and that is not to run for this.
    """
    for module in model.modules():
        kind = cast(Any, type(module))
        if kind.__module__.partition(".")[0] not in ("torch", "transformers", "fastgen") or not untouched(module):
            raise NotPredicted(f"{kind.__name__} may take any")
    clone = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    plan_for(clone)
    return clone


def _planned(kind: Any, plan: Plan, step: DecoderStep | None, shared: bool) -> type:
    """Return a model's class with loops that make only the first decode step and one at the longest text.

    shared: as `_Ends` has it.
    """

    def loop(name: Literal["beam", "sample"]) -> Any:
        def planned(
            self: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
            synced_gpus: bool = False, streamer: Any = None, **kwargs: Any,
        ) -> None:  # fmt: skip
            self.__class__ = kind
            config = bounded(name, generation_config, stopping_criteria)
            call = Call(self, input_ids, logits_processor, stopping_criteria, config, synced_gpus, kwargs)
            model = cast(SharedStepper, call.stepper(plan, step))
            decoding = loops.decoding_of(name, call, model)
            with engine.running(plan), decoding.around():
                _Ends(cast("BeamSearch | Sampling", decoding.search), model, config.max_length, shared).run()

        return planned

    methods = {"__module__": kind.__module__} | {name: loop(which) for name, which in compat.LOOPS.items()}
    return type(kind.__name__, (kind,), methods)


class _Ends:
    """A search that has only the first decode step and the last one of the longest text.

    shared: whether beams share all their tokens whenever it is time for a sweep; else all slots stay.
    """

    def __init__(self, search: BeamSearch | Sampling, model: SharedStepper, max_length: int, shared: bool) -> None:
        self.search, self.model, self.max_length, self.shared = search, model, max_length, shared
        self.in_c = _chooses_in_c(search)
        search.may_drop = False
        search.stop = Stop()
        if isinstance(search, BeamSearch):
            search.memory = Memory(planned=True)

    def run(self) -> None:
        model = self.model
        going = self._advance(model.prefill())
        if (
            going
            and self.in_c
            and model.supports_multistep
            and model.fused is not None
            and is_packable(model.fused.step)
        ):
            self._go_to_end_in_c(model.fused)
            return
        while going:
            # A model's own first step does more than the others.
            if self._cache.text[0].steps == int(model.fused is None):
                self._lengthen(self.max_length - 1 - self.search.text.length)
            going = self._advance(model.step(self.search.text.ids))

    @property
    def _cache(self) -> SharedCache:
        if self.model.cache is None:
            raise NotPredicted("the cache is transformers' own")
        return self.model.cache

    def _advance(self, logits: Tensor) -> bool:
        length = self.search.text.length + 1
        self.search.advance(self.model, logits)
        self._set_length(length)
        return length < self.max_length

    def _go_to_end_in_c(self, fused: FusedDecoder) -> None:
        """Have room for all steps, as C makes them in a row; it takes next to nothing for its choices."""
        left = self.max_length - self.search.text.length
        while left > 0:
            self._sweep()
            steps = self._cache.begin_steps(left)
            fused.prepared(steps)
            self._cache.end_steps(steps, is_open=True)
            left -= steps

    def _lengthen(self, steps: int) -> None:
        """Leave a call as it would be after so many more steps, with all the memory that keys and values get."""
        model, cache = self.model, self._cache
        for _ in range(steps):
            self._sweep()
            for layer in cache.text:
                layer.make_room()
                layer.note_step()
            if cache.ancestry is not None:
                cache.ancestry.make_room()
                cache.ancestry.note_steps(1, is_open=False)
            if model.fused is None:
                model.kwargs = compat.arguments_of_next(model.model, ModelOutput(), model.kwargs)
        self._set_length(self.search.text.length + max(0, steps))

    def _sweep(self) -> None:
        """Sweep slots if it is time: most of them, or half, which takes the most memory for a moment."""
        cache, ancestry = self._cache, self._cache.ancestry
        if ancestry is None or not ancestry.is_due:
            return
        filled = ancestry.filled
        kept = ancestry.steps if self.shared else filled // 2
        if 2 * kept > filled:
            return
        slots = torch.zeros(cache.sentences, kept, dtype=torch.int64, device="cpu")
        if self.shared:
            ancestry.give_up(slots)
        for layer in cache.text:
            layer.sweep(slots)
            if not self.shared:
                layer.filled = filled

    def _set_length(self, length: int) -> None:
        """Let the text have a length, and tokens with values: edits look at them."""
        if isinstance(self.search, BeamSearch):
            self.search.length = length
        else:
            rows = self.search.present
            self.search.ids = self.search.outcome = torch.zeros(rows, length, dtype=torch.int64, device="cpu")


def _chooses_in_c(search: Any) -> bool:
    return any(kind.covers(search) for kind in NATIVE)
