"""Decode steps of a transformers model over the shared cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from fastgen.decoding.backends.drafted_sampling import Drafting
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.plan import Plan
from fastgen.models.build.equivalence_check import (
    by_modules,
    record_verdict,
    recorded_verdict,
    trial,
)
from fastgen.models.build.int8_step import step_to_run
from fastgen.models.build.introspection import NotFused
from fastgen.models.cuda_graphs.kept_graphs import KeptGraphs
from fastgen.models.cuda_graphs.replay import Opened, Result, not_captured
from fastgen.models.layers.attention import BeamAttention
from fastgen.models.memory.scratch import scratch_pool_of
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.multistep_job import Prepared
from fastgen.models.runtime.step_inputs import CallStepInputs
from fastgen.models.state import state_of
from fastgen.ops import native
from fastgen.patches.generation_call import in_step
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache.shared_cache import SharedCache
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.drafting.rounded_stepper import RoundedStepper
from fastgen.patches.transformers.generate.captured_module_step import (
    CapturedModules,
    reads_source_mask,
)
from fastgen.patches.transformers.generate.fused_decoder import FusedDecoder
from fastgen.patches.transformers.generate.module_stepper import ModuleStepper
from fastgen.patches.transformers.generate.report import CallReport
from fastgen.patches.transformers.generate.shared_prefill import SharedPrefill
from fastgen.patches.transformers.planning import common_prompt, images
from fastgen.patches.transformers.planning.decide import reason_not_to_capture
from fastgen.patches.transformers.planning.sharing import (
    MODULES_CANNOT,
    SharedCacheRefusal,
    computes_alone,
    has_own_attention,
    not_shared,
)

MOST_VERIFIED = 64
"""Maximum number of rows of a pass that verifies drafts: with more it would not be a read alone."""


class SharedStepper(ModuleStepper):
    """Stepper whose prefill runs at B rows and whose decode steps use a `SharedCache`.

    The first decode step shows whether the model takes all its keys from the shared cache. If it
    does not, as may happen with a changed forward, the call continues without the shared cache.

    With a fused step, decode steps bypass the model's modules. The first step of a model runs both
    ways and the results are compared. Modules that compute attention themselves then run with the
    first beam of each sentence, for which the shared cache looks like one without beams.

    Args:
        plan: The plan of the call.
        input_ids: (B * M, P) int64.
        model_kwargs: Arguments of the model's forward, at B * M rows.
        step: The fused decode step; None if the model's own modules run the steps.

    Attributes:
        cache: The shared cache; None once the call continues without it.
        of_weights: The fused decode step, or None.
        fused: The fused steps after prefill; None if the model's own modules run them.
        captured: Capture of the modules' steps; None if they are not captured.
        alone: Whether the modules cannot run over the shared cache with several beams.
        drafting: How the next tokens are drafted; None if they are not.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        step: DecoderStep | None,
    ) -> None:
        super().__init__(model, plan, input_ids, generation_config, model_kwargs)
        longest = (
            generation_config.max_length
            - input_ids.shape[1]
            + (1 if step is None else step.tokens)
            - 1
        )
        stock = model_kwargs[CACHE]
        self.cache: SharedCache | None = SharedCache(
            plan.sentences, plan.beams, longest, model.device, stock, scratch_pool_of(model),
            input_ids.shape[1],
        )  # fmt: skip
        model_kwargs[CACHE] = self.cache.model_cache
        self.of_weights = step
        self.fused: FusedDecoder | None = None
        self.captured: CapturedModules | None = None
        self.drafting: Drafting | None = None
        self._steps = 0  # generated tokens in the cache before the last `verify`
        self._behind = 0  # replayed steps that `kwargs` do not count yet
        self.alone = plan.beams > 1 and has_own_attention(model)
        self._shared_prefill = SharedPrefill(model, plan, generation_config, step)
        if step is not None and self._shared_prefill.proven is not None and recorded_verdict(step):
            self.of_weights = self._shared_prefill.step = step_to_run(step)

    @property
    def returned_cache(self) -> Any:
        return super().returned_cache if self.cache is None else self.cache.as_stock()

    def restore_user_cache(self) -> None:
        returned = self.config.return_dict_in_generate  # then `returned_cache` has filled it
        if self.cache is not None and compat.is_user_provided(self.cache.stock) and not returned:
            self.cache.as_stock()

    def keep_text(self, sequences: Tensor) -> None:
        """Store the keys and values of a single text in the prefix cache, if it is on."""
        if self.plan.rows == 1 and not self.plan.int8:
            self._keep_prefix(sequences[0, :-1])  # the last token has not run through the model

    def _keep_prefix(self, tokens: Tensor) -> None:
        """Store the keys and values of the only sentence's first tokens (N,), as many as exist."""
        if self._shared_prefill.fingerprint is not None and self.cache is not None:
            layers = [(layer.keys, layer.values) for layer in self.cache.text]
            self._shared_prefill.keep(tokens[: self.cache.text[0].length], layers)

    def begin(self) -> bool:
        """Skip prefill: compute cross-attention KV, and reserve room for the prompt's only token.

        That token runs later, as part of a span. Requires one beam per sentence.

        Returns:
            Whether prefill was skipped; if not, it must run.
        """
        cache, step = self.cache, self.of_weights
        assert cache is not None
        if not (step is not None and self._shared_prefill.proven and recorded_verdict(step)):
            return False
        kwargs: dict[str, Any] = self.kwargs
        if not self._shared_prefill.is_first_token(cache, self.input_ids.shape[1], kwargs):
            return False
        self._shared_prefill.reserve(cache, kwargs["encoder_outputs"][0])
        cache.begin_decoding()
        self.fused = FusedDecoder(step, self.model, cache, self.kwargs)
        return True

    def prefill(self) -> Tensor:
        assert self.cache is not None
        m = self.plan.beams
        ids = self.input_ids[::m]
        if self.plan.common:
            ids, self.kwargs = common_prompt.common_first(
                self.input_ids, self.kwargs, self.plan.common, m
            )
        images_once = images.once_per_sentence(self.model, self.input_ids, self.kwargs, m)
        others = {name: each for name, each in self.kwargs.items() if name not in images_once}
        first = {name: _every(m, value) for name, value in others.items()} | images_once
        outputs = self._shared_prefill(self.cache, ids, first)
        if self.plan.sentences == 1 and m > 1:
            self._keep_prefix(ids[0])
        self.cache.begin_decoding()
        logits = self._taken(outputs, repeat=m)
        if first.get(CACHE, self) is None:
            self._leave_shared(self.cache, self.kwargs, "a chunk of the prompt leaves no cache")
            self.kwargs[CACHE] = None
            self._check_cache()
        elif self.cache.has_gaps:
            self._leave_shared(
                self.cache, self.kwargs, "a layer that its modules number is not there"
            )
        elif self.of_weights is not None:
            try:
                self.fused = FusedDecoder(self.of_weights, self.model, self.cache, self.kwargs)
            except NotFused as reason:
                self._leave_fused(str(reason))
        elif self.plan.graphs:
            self.captured = CapturedModules(self.model, self.cache)
        return logits

    def check_equivalence(self, logits: Tensor) -> None:
        """After prefill, ensure that decode steps are fused.

        If the model has not passed the equivalence check yet, one step runs both ways with the most
        likely tokens, and is dropped.

        Args:
            logits: (R, V), what prefill returned.

        Raises:
            NotFused: They are not; the message has the reasons.
        """
        if self.cache is not None and self.fused is not None and not self.fused.ready:
            cache = self.cache
            SharedStepper.step(self, torch.cat([self.input_ids, logits.argmax(1, keepdim=True)], 1))
            cache.undo_steps()
            self._began.clear()
        if self.fused is None:
            raise NotFused("; ".join(self.plan.left_off))

    def step(self, ids: Tensor) -> Tensor:
        if self.cache is None or self.fused is None or not self.fused.ready:
            if self.alone and self.cache is not None:
                return self._first_alone(self.cache, ids)
            if (
                self.cache is not None
                and self.captured is not None
                and self._began
                and self.captured.supported(len(ids))
            ):
                return self._of_captured(self.cache, self.captured, ids)
            return super().step(ids)
        self._note_step(ids)
        self.cache.begin_step()
        return self.fused(ids)

    @property
    def supports_multistep(self) -> bool:
        """Whether C can run several decode steps per call, token selection included."""
        cache, fused = self.cache, self.fused
        return (
            cache is not None
            and fused is not None
            and fused.supports_multistep
            and not compat.is_user_provided(cache.stock)
        )

    def begin_steps(self, most: int) -> Prepared | None:
        """Prepare decode steps for C.

        Args:
            most: Maximum number of steps.

        Returns:
            The prepared steps; None if steps must run one at a time.
        """
        assert self.cache is not None
        assert self.fused is not None
        return self.fused.prepared(self.cache.begin_steps(most))

    def end_steps(self, run: int, began: Sequence[float], is_open: bool) -> None:
        """Record the steps that C has run.

        Args:
            run: Number of steps.
            began: Start time of each step, in seconds.
            is_open: Whether the slots of the next tokens are open.
        """
        assert self.cache is not None
        self._began += [(self.cache.rows, second) for second in began]
        self.cache.end_steps(run, is_open)

    @property
    def verifies(self) -> bool:
        """Whether C can run several successive tokens of each text in one pass."""
        fused = self.fused
        return fused is not None and fused.supports_multistep and fused.cache.beams == 1

    def most_drafted(self, texts: int) -> int:
        """Return the most tokens of a draft that a pass over `texts` texts may verify."""
        assert self.fused is not None
        rows = min(native.most_rows(self.fused.step.dtype), MOST_VERIFIED)
        return int(rows) // texts - 1

    def rounded(self, step: DecoderStep) -> RoundedStepper:
        """Return the stepper of a draft, which writes after the tokens in the cache.

        Args:
            step: The decode step on rounded weights.
        """
        assert self.fused is not None
        return RoundedStepper(self.fused, step)

    def verify(self, ids: Tensor, drafts: Tensor) -> Tensor:
        """Run the newest token of ids (R, L) and drafts (R, K).

        Returns:
            Logits (R, K + 1, V) fp32 of the token after each.
        """
        assert self.cache is not None
        assert self.fused is not None
        self._note_step(ids)
        self._steps = self.cache.text[0].steps
        return self.fused.verify(ids, drafts)

    def accept(self, tokens: int) -> None:
        """Keep the keys and values of the first `tokens` tokens of the last `verify`."""
        assert self.cache is not None
        self.cache.rewind(self._steps + tokens)

    def report(self) -> CallReport:
        replay = self.captured if self.fused is None else self.fused.replay
        if replay is not None and replay.refused is not None:
            self.plan = replace(
                self.plan, graphs=False, left_off=(*self.plan.left_off, replay.refused)
            )
        return super().report()

    def kept_graphs(self, logits: Tensor) -> KeptGraphs | None:
        replay = None if self.fused is None else self.fused.replay
        return None if replay is None else replay.kept_graphs(logits)

    @property
    def joinable(self) -> bool:
        return self.fused is not None and self.fused.ready

    @property
    def decoders(self) -> list[DecoderStep]:
        """Fused steps that make up one decode step."""
        assert self.fused is not None
        return [self.fused.step]

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a text."""
        assert self.fused is not None
        return self.fused.longest

    def is_replayed(self, rows: int) -> bool:
        """Return whether the next step, of `rows` rows, is captured or replayed."""
        assert self.fused is not None
        return self.fused.replay is not None and self.fused.replay.supported(rows)

    def begin_step(self, ids: Tensor) -> list[CallStepInputs]:
        """Open a step for the newest token of ids (R, L), to run jointly with other calls."""
        return [self._joined_with(ids).context()]

    def open_step(self, ids: Tensor) -> list[Opened]:
        """Open a step as `begin_step` does, but for capture and replay."""
        return [self._joined_with(ids).open(ids)]

    def _joined_with(self, ids: Tensor) -> FusedDecoder:
        assert self.cache is not None
        assert self.fused is not None
        self._note_step(ids)
        self._joined += 1
        self.cache.begin_step()
        return self.fused

    def end_step(self, results: Sequence[Result]) -> Tensor:
        """Return the logits (R, V) of a step that ran jointly with those of other calls."""
        assert self.fused is not None
        logits = results[0][0]
        return logits.float() if self.fused.replay is None else logits

    @property
    def ancestry(self) -> Ancestry | None:
        return None if self.cache is None else self.cache.ancestry

    def reorder(self, parents: Tensor) -> None:
        if self.cache is None:
            super().reorder(parents)
        else:
            self.cache.reorder(parents)

    @property
    def hidden(self) -> Tensor:
        fused = None if self.fused is None else self.fused.hidden
        return super().hidden if fused is None else fused[:, None]

    def _forward(self, ids: Tensor) -> Any:
        if self.cache is None:
            return super()._forward(ids)
        self._catch_up()
        first, kwargs = len(self._began) == 1, self.kwargs
        self.cache.begin_step()
        if self.fused is None:
            return self._of_module(self.cache, ids, kwargs, first)
        fused = self.fused
        attempt = trial(lambda: fused(ids), self.cache.text, fused.step.dtype)
        outputs = self._of_module(self.cache, ids, kwargs, first)
        reason = record_verdict(fused.step, attempt, outputs.logits[:, -1])
        fused.note_verdict(reason is None)
        if reason is not None and self.plan.fused:
            self._leave_fused(reason)
        return outputs

    def _first_alone(self, cache: SharedCache, ids: Tensor) -> Tensor:
        """Run the first step of a model whose modules cannot use the shared cache.

        It runs fused if that agrees with the model's own forward. Otherwise the call continues
        without the shared cache.
        """
        self._note_step(ids)
        if self.fused is not None:
            m, fused = self.plan.beams, self.fused
            kwargs = {name: _every(m, value) for name, value in self.kwargs.items()}
            with cache.as_of_prompt():
                inputs = self.model.prepare_inputs_for_generation(
                    ids[::m], next_sequence_length=1, **kwargs
                )
                own = self.model(**inputs, return_dict=True).logits[:, -1]
            cache.begin_step()
            attempt = trial(lambda: fused(ids)[::m], cache.text, fused.step.dtype)
            reason = record_verdict(fused.step, attempt, own)
            fused.note_verdict(reason is None)
            if reason is None:
                return fused(ids)
            self._leave_fused(reason)
        self._leave_shared(cache, self.kwargs, MODULES_CANNOT)
        return self._taken(super()._forward(ids))

    def _leave_fused(self, reason: str) -> None:
        self.fused, left_off = None, (*self.plan.left_off, by_modules(reason))
        graphs = self.plan.graphs and self.cache is not None
        if graphs and (
            reason_not := reason_not_to_capture(self.model, None, self.config, self.kwargs, None)
        ):
            graphs, left_off = False, (*left_off, not_captured(reason_not))
        self.plan = replace(self.plan, fused=False, graphs=graphs, left_off=left_off, apart=False)
        if self.cache is not None:
            self.cache.expand()  # modules would copy the common tokens in every step
            self.captured = CapturedModules(self.model, self.cache) if graphs else None

    def _of_captured(self, cache: SharedCache, captured: CapturedModules, ids: Tensor) -> Tensor:
        """Run a captured step, or run it both ways, and return logits (R, V) fp32."""
        self._note_step(ids)
        cache.begin_step()
        logits = captured(ids, self._catch_up)
        if logits is not None and not captured.doubted:
            for layer in cache.text:
                layer.note_step()
            self._behind += 1
            return logits
        outputs = self._of_module(cache, ids, self._catch_up(), first=False)
        captured.judge(logits, outputs.logits[:, -1])
        return self._taken(outputs)

    def _catch_up(self) -> dict[str, Any]:
        """Return the arguments of the forward, updated for the steps that were replayed."""
        for _ in range(self._behind):
            self.kwargs = compat.arguments_of_next(self.model, BaseModelOutput(), self.kwargs)
        self._behind = 0
        return self.kwargs

    def _of_module(
        self, cache: SharedCache, ids: Tensor, given: dict[str, Any], first: bool
    ) -> Any:
        """Run the model's own forward over the shared cache and return its outputs.

        Args:
            given: Arguments of the forward before the step.
            first: Whether this is the first step, which shows whether the model uses the cache.
        """
        ancestry = cache.ancestry
        if ancestry is None:
            return super()._forward(ids)
        attention = BeamAttention(
            cache.sentences, cache.beams, ancestry.visible, ancestry.slot_steps
        )
        with in_step(attention):
            outputs = super()._forward(ids)
        if first and attention.attended != cache.layers:
            self._go_on_unshared(cache, given)
            return super()._forward(ids)
        if first and cache.source and reads_source_mask(self.model, self.kwargs):
            # Reuse the prepared mask. To detect that nothing is padded, transformers would
            # synchronize with the device in every step.
            self.kwargs["attention_mask"] = attention.source_mask
        return outputs

    def _go_on_unshared(self, cache: SharedCache, kwargs: dict[str, Any]) -> None:
        """Drop what the first step has written, and continue with the toolkit's own cache."""
        state_of(self.model).keep(SharedCacheRefusal())
        self._leave_shared(cache, kwargs, computes_alone(self.model))

    def _leave_shared(self, cache: SharedCache, kwargs: dict[str, Any], reason: str) -> None:
        self._peak = cache.peak_nbytes
        cache.undo_steps()
        self.kwargs = kwargs | {CACHE: cache.as_stock()}
        self.cache = self.fused = self.captured = None
        left_off = (not_shared(reason), *self.plan.left_off)
        self.plan = replace(
            self.plan, shared=False, fused=False, graphs=False, left_off=left_off, apart=False
        )

    def keep_arguments(self, rows: Tensor) -> None:
        if self.joinable:  # the model's forward will not run again
            self.kwargs = {}
        else:
            super().keep_arguments(rows)

    def keep_cache(self, sentences: Tensor, rows: Tensor) -> None:
        if self.cache is None:
            super().keep_cache(sentences, rows)
        else:
            self.cache.keep(sentences)
            if self.fused is not None:
                self.fused.keep(sentences.to(self.cache.device))

    def _kv_bytes(self) -> tuple[int, int]:
        if self.cache is None:
            return super()._kv_bytes()
        return self.cache.peak_nbytes, self.cache.stock_nbytes


def _every(m: int, value: Any) -> Any:
    """Undo the expansion of `generate`: take every m-th row of a tensor or a mapping of tensors."""
    if m == 1:
        return value
    if isinstance(value, Tensor):
        # Copy once here, not in every layer that reads the encoder's output.
        return value[::m].contiguous()
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        return cast(Any, type(mapping))(
            {k: _every(m, v) if isinstance(v, Tensor) else v for k, v in mapping.items()}
        )
    return value
